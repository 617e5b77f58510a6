"""Downloads are whole or not there; every failure is one line with a way out."""

import functools
import hashlib
import http.server
import os
import threading

import pytest

from kvcourse import fetch

CONTENT = b"rows of keys and values" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(tmp_path):
    """A web server on loopback that serves one file, `whole`, and breaks off or speaks nonsense elsewhere."""
    raw = {
        "/cut": b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(CONTENT) + CONTENT[:100],
        "/chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n" + CONTENT[:50],
        "/status": b"no such protocol\r\n\r\n",
        "/length": b"HTTP/1.0 200 OK\r\nContent-Length: many\r\n\r\n",
        "/lines": b"HTTP/1.0 500 one\rtwo\r\n\r\n",
    }

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path not in raw:
                return super().do_GET()
            self.wfile.write(raw[self.path])

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
        ("chunked", SHA256, "IncompleteRead"),
        ("status", SHA256, "no such protocol"),
        ("length", SHA256, "many"),
        ("lines", SHA256, r"\(HTTP 500: one\)"),
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


def test_an_address_that_is_none(tmp_path):
    with pytest.raises(fetch.DownloadFailed, match="unknown url type"):
        fetch.download("no address", tmp_path / "file", SHA256)


def test_a_place_that_cannot_be_written_is_one_line(server, tmp_path):
    (tmp_path / "taken").write_bytes(b"mine")
    with pytest.raises(fetch.DownloadFailed, match="taken/file cannot be written .*KVCOURSE_HOME"):
        fetch.download(f"{server}/whole", tmp_path / "taken" / "file", SHA256)
    with pytest.raises(fetch.DownloadFailed, match="served is a folder where a file must go"):
        fetch.download(f"{server}/whole", tmp_path / "served", SHA256)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_a_full_disk_is_not_the_network(server, tmp_path):
    (tmp_path / "file.part").symlink_to("/dev/full")
    with pytest.raises(fetch.DownloadFailed, match="No space left") as caught:
        fetch.download(f"{server}/whole", tmp_path / "file", SHA256)
    assert "network" not in str(caught.value) and "free some space" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["served"]


def test_verify_names_the_file_and_the_remedy(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(fetch.DamagedFile, match="file is missing: fetch it"):
        fetch.verify(path, SHA256, "fetch it")
    path.write_bytes(b"half")
    with pytest.raises(fetch.DamagedFile, match="file is damaged: SHA-256 .*: fetch it"):
        fetch.verify(path, SHA256, "fetch it")
    path.write_bytes(CONTENT)
    fetch.verify(path, SHA256, "fetch it")
