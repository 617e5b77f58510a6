"""Downloads are whole or not there; every failure is one line with a way out."""

import functools
import hashlib
import http.server
import threading

import pytest

from kvcourse import fetch

CONTENT = b"rows of keys and values" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(tmp_path):
    """A web server on loopback that serves one file, `whole`, and cuts `cut` short."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/cut":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[:100])

        def log_message(self, *args):
            pass

    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "whole").write_bytes(CONTENT)
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


def test_a_download_is_checked_and_renamed(server, tmp_path):
    target = fetch.download(f"{server}/whole", tmp_path / "a" / "file", SHA256)
    assert target.read_bytes() == CONTENT
    assert [p.name for p in target.parent.iterdir()] == ["file"]


def test_a_whole_file_is_not_fetched_again(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    # Port 9 of loopback answers nobody: an attempt would fail.
    fetch.download("http://127.0.0.1:9/none", tmp_path / "file", SHA256)


@pytest.mark.parametrize(
    "path, sha256, words",
    [
        ("missing", SHA256, "404"),
        ("cut", SHA256, "connection closed after 100 of 23,000 bytes|IncompleteRead"),
        ("whole", "0" * 64, "sent other bytes"),
    ],
)
def test_a_failed_download_leaves_nothing_behind(server, tmp_path, path, sha256, words):
    with pytest.raises(fetch.DownloadFailed, match=words) as caught:
        fetch.download(f"{server}/{path}", tmp_path / "file", sha256)
    assert "by hand" in str(caught.value) and "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["served"]


def test_no_network_is_one_line(tmp_path):
    with pytest.raises(fetch.DownloadFailed, match="check the network"):
        fetch.download("http://127.0.0.1:9/file", tmp_path / "file", SHA256)


def test_verify_names_the_file_and_the_remedy(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(fetch.DamagedFile, match="file is missing: fetch it"):
        fetch.verify(path, SHA256, "fetch it")
    path.write_bytes(b"half")
    with pytest.raises(fetch.DamagedFile, match="file is damaged: SHA-256 .*: fetch it"):
        fetch.verify(path, SHA256, "fetch it")
    path.write_bytes(CONTENT)
    fetch.verify(path, SHA256, "fetch it")
