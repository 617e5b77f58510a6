"""The reader's record survives crashes, damage and folders that cannot be written."""

import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from kvcourse import progress

# The kernels of a test run elsewhere and must find the package that is tested here.
PACKAGE = {"PYTHONPATH": os.path.dirname(os.path.dirname(progress.__file__))}
TODAY = re.compile(r"\d{4}-\d\d-\d\d")


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    path = tmp_path / "home" / "progress.json"
    monkeypatch.setenv("KVCOURSE_PROGRESS", str(path))
    return path


def test_an_empty_record_is_always_the_same_and_writes_nothing(file):
    assert progress.summary() == "Nothing recorded yet: no predictions, no checks passed."
    assert progress.load() == progress.Record()
    assert not file.exists() and not file.parent.exists()


def test_predictions_and_checks_are_kept(file):
    progress.record_prediction("01.crossover", 40.5)
    progress.record_prediction("01.why", "the mask")
    progress.record_passed("01.positions_processed")
    stored = json.loads(file.read_text())
    assert stored["predictions"] == {"01.crossover": 40.5, "01.why": "the mask"}
    assert list(stored["passed"]) == ["01.positions_processed"]
    assert TODAY.fullmatch(stored["passed"]["01.positions_processed"])
    assert stored["last_run"]["chapter"] == "01" and TODAY.fullmatch(stored["last_run"]["date"])
    assert progress.prediction("01.crossover") == 40.5
    assert progress.passed() == stored["passed"]
    assert progress.summary().startswith(
        "2 predictions, 1 check passed (01.positions_processed); last activity in chapter 01 on "
    )


def test_a_prediction_can_be_taken_back():
    progress.record_prediction("01.a", 1)
    progress.record_prediction("01.a", None)
    progress.record_prediction("01.never", "")
    assert progress.load().predictions == {}


def test_the_first_pass_keeps_its_date(file):
    progress.record_passed("01.a")
    content = json.loads(file.read_text())
    content["passed"]["01.a"] = "2020-01-01"
    file.write_text(json.dumps(content))
    progress.record_passed("01.a")
    assert progress.passed() == {"01.a": "2020-01-01"}


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (b"{half a rec", "Expecting property name"),
        (b"", "Expecting value"),
        (b"\xff\xfe\x00", "codec can't decode"),
        (b"[" * 100_000, "recursion depth exceeded"),
        (b"[1, 2]", "expected an object, found list"),
        (b'{"version": 99}', "version 99, expected 1"),
        (b'{"version": 1, "predictions": [1]}', "predictions is not a table of plain values"),
        (b'{"version": 1, "passed": {"a": 3}}', "passed is not a table of plain values"),
    ],
)
def test_a_damaged_file_is_kept_beside_a_new_one(file, damage, why):
    file.parent.mkdir()
    file.write_bytes(damage)
    assert progress.load() == progress.Record()
    notice = progress.notice()
    assert why in notice and "progress.json.damaged-1" in notice and "\n" not in notice
    assert (file.parent / "progress.json.damaged-1").read_bytes() == damage
    assert notice in progress.summary()
    progress.record_prediction("01.a", 1)
    assert progress.prediction("01.a") == 1


def test_a_second_damage_does_not_overwrite_the_first(file):
    file.parent.mkdir()
    for number in (1, 2):
        file.write_text(f"damage {number}")
        progress.load()
        assert (file.parent / f"progress.json.damaged-{number}").read_text() == f"damage {number}"


def test_a_crash_while_writing_leaves_the_old_record(file, monkeypatch):
    progress.record_prediction("01.a", 1)
    before = file.read_bytes()

    def crash(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            progress.record_prediction("01.a", 2)
    assert file.read_bytes() == before


def test_no_temporary_file_stays(file):
    progress.record_prediction("01.a", 1)
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"]


def test_a_place_that_cannot_be_written_keeps_the_record_in_memory(tmp_path, monkeypatch):
    # A file where the folder should be: this fails for root too, unlike a read-only folder.
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "progress.json"
    monkeypatch.setenv("KVCOURSE_PROGRESS", str(path))
    progress.record_prediction("01.a", 1)
    progress.record_passed("01.b")
    assert progress.prediction("01.a") == 1 and list(progress.passed()) == ["01.b"]
    notice = progress.notice()
    assert str(path) in notice and "KVCOURSE_PROGRESS" in notice and "\n" not in notice
    assert notice in progress.summary()


def test_a_disk_that_fills_up_leaves_no_half_file(file, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    progress.record_prediction("01.a", 1)
    assert list(file.parent.iterdir()) == []
    assert "No space left on device" in progress.notice()
    assert progress.prediction("01.a") == 1


def test_two_files_do_not_mix(tmp_path, monkeypatch):
    progress.record_prediction("01.a", 1)
    monkeypatch.setenv("KVCOURSE_PROGRESS", str(tmp_path / "other.json"))
    assert progress.prediction("01.a") is None and progress.notice() == ""


WRITER = """
import os, sys, time
from kvcourse import progress
open(sys.argv[1] + ".ready", "w").close()
while not os.path.exists(sys.argv[2]):
    time.sleep(0.001)
for number in range(30):
    progress.record_prediction(f"{sys.argv[1]}.{number}", number)
"""


def test_two_kernels_lose_nothing(file, tmp_path):
    kernels = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, name, "start"], cwd=tmp_path, env=os.environ | PACKAGE
        )
        for name in ("01", "02")
    ]
    while not all((tmp_path / f"{name}.ready").exists() for name in ("01", "02")):
        assert all(kernel.poll() is None for kernel in kernels)
        time.sleep(0.01)
    (tmp_path / "start").write_text("")
    assert [kernel.wait(timeout=60) for kernel in kernels] == [0, 0]
    assert len(progress.load().predictions) == 60
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"]


@pytest.mark.parametrize("make", ["write_text", "mkdir"])  # a folder cannot be removed like a file
def test_a_lock_left_by_a_crash_stops_nothing(file, monkeypatch, make):
    monkeypatch.setattr(progress, "STALE_SECONDS", 0.05)
    file.parent.mkdir()
    lock = file.parent / "progress.json.lock"
    lock.write_text("") if make == "write_text" else lock.mkdir()
    progress.record_prediction("01.a", 1)
    assert json.loads(file.read_text())["predictions"] == {"01.a": 1}
    assert progress.notice() == ""
    assert lock.exists() == (make == "mkdir")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a pipe"])
def test_what_is_no_regular_file_is_left_alone(tmp_path, monkeypatch, kind):
    if kind != "folder" and not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    path = tmp_path / "place" / "progress.json"
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    # A reader that never waits: without it a mistake in here would block the tests instead of failing.
    monkeypatch.setattr(type(path), "read_text", lambda self, **_: "damaged")
    before = path.lstat()
    monkeypatch.setenv("KVCOURSE_PROGRESS", str(path))
    progress.record_prediction("01.a", 1)
    after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert list(path.parent.iterdir()) == [path]
    assert progress.prediction("01.a") == 1
    assert "cannot be saved" in progress.notice() and "it is not a regular file" in progress.notice()


def test_a_file_that_cannot_be_read_now_is_not_replaced(file, monkeypatch):
    progress.record_prediction("01.a", 1)
    before = file.read_bytes()

    def busy(self, **_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:  # a virus scanner on Windows does this for a moment
        patch.setattr(type(file), "read_text", busy)
        progress.record_prediction("01.b", 2)
    assert file.read_bytes() == before
    assert progress.prediction("01.b") == 2 and "Permission denied" in progress.notice()


def test_a_half_written_last_run_is_not_shown(file):
    file.parent.mkdir()
    file.write_text('{"version": 1, "predictions": {"01.a": 1}, "last_run": {"chapter": "01"}}')
    assert progress.summary() == "1 prediction, 0 checks passed."


@pytest.mark.parametrize("value", [np.int64(3), np.float32(2.5), np.array(4), np.str_("mask")])
def test_numpy_values_are_kept_as_plain_ones(value):
    progress.record_prediction("01.a", value)
    assert progress.prediction("01.a") == value.item()


@pytest.mark.parametrize("value", [[1], {"a": 1}, np.array([1, 2]), 1j])
def test_what_the_file_cannot_hold_is_refused_and_the_record_stays(value):
    progress.record_prediction("01.a", 1)
    with pytest.raises(TypeError, match="prediction '01.b' is a .*: give a number, a text or None"):
        progress.record_prediction("01.b", value)
    assert progress.load().predictions == {"01.a": 1} and progress.notice() == ""
