"""`kvcourse lab`: the rules of the reader's copy, the port, and what the server is started with."""

import json
import os
import socket
import subprocess
import sys

import pytest

from kvcourse import cli
from kvcourse.cli import CommandError, lab, working_copy


def page(text, **cell):
    """A notebook of one code cell, as the working copy writes it: nothing has run."""
    code = {"cell_type": "code", "source": text, "execution_count": None, "outputs": []} | cell
    return json.dumps({"cells": [code], "metadata": {}}, indent=1, ensure_ascii=False) + "\n"


FILES = {
    "00_start_here.ipynb": page("zero"),
    "01_the_waste.ipynb": page("one"),
    "primers/A_tokens.ipynb": page("primer"),
    "solutions/chapter_01.py": "solution",
    "GLOSSARY.md": "words",
}


@pytest.fixture
def folders(tmp_path):
    """(chapters, work): a small course, and a working copy that does not exist yet."""
    chapters = tmp_path / "chapters"
    for name, text in FILES.items():
        (chapters / name).parent.mkdir(parents=True, exist_ok=True)
        (chapters / name).write_text(text)
    return chapters, tmp_path / "work"


def contents(work):
    return {name: (work / name).read_text() for name in FILES}


def test_first_update_copies_everything_but_caches(folders):
    chapters, work = folders
    (chapters / ".ipynb_checkpoints").mkdir()
    (chapters / ".ipynb_checkpoints" / "00_start_here-checkpoint.ipynb").write_text("old")
    changes = working_copy.update(chapters, work)
    assert sorted(changes.copied) == sorted(FILES)
    assert contents(work) == FILES
    assert not (work / ".ipynb_checkpoints").exists()


def test_the_copy_of_a_notebook_has_not_run(folders):
    """Stored outputs would answer a page's questions before they are asked."""
    chapters, work = folders
    executed = page("kv.reveal(…)", execution_count=1, outputs=[{"output_type": "stream", "text": "42"}])
    (chapters / "01_the_waste.ipynb").write_text(executed)
    working_copy.update(chapters, work)
    assert (work / "01_the_waste.ipynb").read_text() == page("kv.reveal(…)")
    assert working_copy.update(chapters, work) == working_copy.Changes()


def test_second_update_changes_nothing(folders):
    working_copy.update(*folders)
    assert working_copy.update(*folders) == working_copy.Changes()


def test_an_edit_is_never_overwritten_even_when_the_course_changes(folders):
    chapters, work = folders
    working_copy.update(chapters, work)
    (work / "01_the_waste.ipynb").write_text("my answers")
    assert working_copy.update(chapters, work).newer == []
    (chapters / "01_the_waste.ipynb").write_text(page("one, second edition"))
    assert working_copy.update(chapters, work).newer == ["01_the_waste.ipynb"]
    assert (work / "01_the_waste.ipynb").read_text() == "my answers"


def test_an_untouched_copy_follows_the_course(folders):
    chapters, work = folders
    working_copy.update(chapters, work)
    (chapters / "01_the_waste.ipynb").write_text(page("one, second edition"))
    assert working_copy.update(chapters, work).followed == ["01_the_waste.ipynb"]
    assert (work / "01_the_waste.ipynb").read_text() == page("one, second edition")
    (work / "01_the_waste.ipynb").write_text("my answers")
    (chapters / "01_the_waste.ipynb").write_text(page("one, third edition"))
    assert working_copy.update(chapters, work).newer == ["01_the_waste.ipynb"]


def test_without_its_record_every_differing_file_counts_as_the_readers(folders):
    chapters, work = folders
    working_copy.update(chapters, work)
    (work / working_copy.RECORD).write_text("{ half a rec")
    (chapters / "GLOSSARY.md").write_text("more words")
    working_copy.update(chapters, work)
    assert (work / "GLOSSARY.md").read_text() == "words"


def test_a_new_chapter_is_added(folders):
    chapters, work = folders
    working_copy.update(chapters, work)
    (chapters / "02_why.ipynb").write_text(page("two"))
    assert working_copy.update(chapters, work).copied == ["02_why.ipynb"]


def test_renew_keeps_the_readers_version_beside_the_new_one(folders):
    chapters, work = folders
    working_copy.update(chapters, work)
    for edit in ("first try", "second try"):  # twice within a second: the names must not collide
        (work / "01_the_waste.ipynb").write_text(edit)
        changes = working_copy.renew(chapters, work, ["01_the_waste.ipynb"])
        assert changes.copied == ["01_the_waste.ipynb"]
    saved = sorted(work.glob("01_the_waste.*.ipynb"))
    assert {path.read_text() for path in saved} == {"first try", "second try"}
    assert contents(work) == FILES


def test_renew_of_an_unchanged_file_saves_nothing(folders):
    chapters, work = folders
    working_copy.update(chapters, work)
    assert working_copy.renew(chapters, work, list(FILES)) == working_copy.Changes()
    assert not list(work.glob("*.20*"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permission bits")
def test_the_copy_of_a_read_only_clone_is_writable(folders):
    chapters, work = folders
    (chapters / "00_start_here.ipynb").chmod(0o444)
    working_copy.update(chapters, work)
    assert (work / "00_start_here.ipynb").stat().st_mode & 0o200


@pytest.mark.parametrize(
    "name, expected",
    [
        ("01", "01_the_waste.ipynb"),
        ("01_the_waste.ipynb", "01_the_waste.ipynb"),
        ("a", "primers/A_tokens.ipynb"),
        ("primers/A_tokens", "primers/A_tokens.ipynb"),
    ],
)
def test_find_chapter(name, expected):
    assert working_copy.find_chapter(name, list(FILES)) == expected


def test_find_chapter_names_the_choices():
    with pytest.raises(CommandError, match="no chapter is named '99'.*00_start_here, 01_the_waste"):
        working_copy.find_chapter("99", list(FILES))
    with pytest.raises(CommandError, match="2 chapters fit '01'"):
        working_copy.find_chapter("01", ["01_a.ipynb", "01_b.ipynb", "02_c.ipynb"])


def test_without_a_clone_the_error_says_so(tmp_path):
    with pytest.raises(CommandError, match="runs from a clone"):
        working_copy.course_files(tmp_path / "chapters")


def test_port_taken_is_one_line_that_names_a_free_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(CommandError) as caught:
            lab.check_port(port)
    message = str(caught.value)
    assert f"port {port} cannot be used" in message and "\n" not in message
    free = int(message.split("--port ")[1].split()[0])
    assert free != port
    lab.check_port(free)


def test_port_outside_the_range():
    with pytest.raises(CommandError, match="ports go from 1 to 65535"):
        lab.check_port(70000)


@pytest.fixture
def started(folders, monkeypatch):
    """What `kvcourse lab` would start: a list that gets (command line, environment) instead of a server."""
    chapters, work = folders
    monkeypatch.setattr(lab.paths, "chapters_dir", lambda: chapters)
    monkeypatch.setenv("KVCOURSE_WORK", str(work))
    calls = []
    monkeypatch.setattr(lab, "_start", lambda line, env: calls.append((line, env)))
    monkeypatch.setattr(lab, "check_port", lambda port: None)
    return calls


def test_lab_opens_chapter_00_of_the_copy(started, folders):
    assert cli.main(["lab", "--port", "9123", "--no-browser", "--", "--ServerApp.quit_button=False"]) == 0
    line, env = started[0]
    assert line[:3] == [sys.executable, "-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={folders[1]}" in line
    assert "--LabApp.default_url=/lab/tree/00_start_here.ipynb" in line
    assert "--ServerApp.port=9123" in line and "--no-browser" in line
    assert line[-1] == "--ServerApp.quit_button=False"
    assert not any("token" in word for word in line)
    assert contents(folders[1]) == FILES


def test_lab_opens_the_chapter_that_is_named_or_renewed(started):
    cli.main(["lab", "a"])
    assert "--LabApp.default_url=/lab/tree/primers/A_tokens.ipynb" in started[0][0]
    cli.main(["lab", "--fresh", "01"])
    assert "--LabApp.default_url=/lab/tree/01_the_waste.ipynb" in started[1][0]


def test_lab_fresh_renews_one_chapter_or_all(started, folders, capsys):
    chapters, work = folders
    cli.main(["lab"])
    for name in FILES:
        (work / name).write_text("mine")
    cli.main(["lab", "--fresh", "01"])
    assert "kept your version as 01_the_waste.20" in capsys.readouterr().out
    assert contents(work) == {**dict.fromkeys(FILES, "mine"), "01_the_waste.ipynb": page("one")}
    cli.main(["lab", "--fresh"])
    assert contents(work) == FILES


def test_a_failure_is_one_line_and_status_1(started, capsys):
    assert cli.main(["lab", "nowhere"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvcourse: no chapter is named 'nowhere'") and error.count("\n") == 1
    assert started == []


def work_is_a_file(work):
    work.write_text("")


def work_is_a_broken_link(work):
    work.symlink_to("nowhere")


def a_chapter_is_a_folder(work):
    (work / "01_the_waste.ipynb").mkdir(parents=True)


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
@pytest.mark.parametrize("prepare", [work_is_a_file, work_is_a_broken_link, a_chapter_is_a_folder])
def test_a_copy_that_cannot_be_written_is_one_line(started, folders, capsys, prepare, fresh):
    prepare(folders[1])
    assert cli.main(["lab", *fresh]) == 1
    error = capsys.readouterr().err
    assert str(folders[1]) in error and "KVCOURSE_WORK" in error and error.count("\n") == 1
    assert started == []


@pytest.mark.parametrize("record", ["[]", "null"])
def test_a_record_that_is_no_table_counts_as_none(folders, record):
    chapters, work = folders
    working_copy.update(chapters, work)
    (work / working_copy.RECORD).write_text(record)
    (work / "GLOSSARY.md").write_text("mine")
    working_copy.update(chapters, work)
    working_copy.renew(chapters, work, ["00_start_here.ipynb"])
    assert (work / "GLOSSARY.md").read_text() == "mine"


@pytest.mark.parametrize("words", [["01", "a"], ["01", "a", "--", "--ServerApp.quit_button=False"]])
def test_two_chapters_are_refused(started, capsys, words):
    assert cli.main(["lab", *words]) == 1
    assert "opens one chapter, 'a' is one too many" in capsys.readouterr().err
    assert started == []


def test_a_working_folder_of_an_unknown_user(started, monkeypatch, capsys):
    monkeypatch.setenv("KVCOURSE_WORK", "~nosuchuser/x")
    assert cli.main(["lab"]) == 1
    assert capsys.readouterr().err.startswith("kvcourse: KVCOURSE_WORK is ~nosuchuser/x")


def test_the_settings_reach_jupyterlab_and_the_readers_own_stay(monkeypatch, tmp_path):
    """Asks JupyterLab what it reads: no news, no update check; the reader's own folder still counts."""
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path))
    env = lab.environment()
    assert env["JUPYTER_CONFIG_PATH"] == f"{lab.SETTINGS}{os.pathsep}{tmp_path}"
    script = (
        "import json; from jupyterlab.labapp import LabApp;"
        "from jupyterlab_server.config import get_static_page_config as page;"
        "app = LabApp(); app.load_config_file();"
        "print(json.dumps([app.news_url, app.check_for_updates_class.__name__, app.extension_manager,"
        " page(level='all')['disabledExtensions']]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    news, update_check, manager, disabled = json.loads(answer.stdout)
    assert (news, update_check, manager) == (None, "NeverCheckForUpdate", "readonly")
    assert disabled["@jupyterlab/apputils-extension:announcements"] is True
