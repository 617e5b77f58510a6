"""`make chapters` stores what the tests compare, the same every time, and nothing when a cell fails."""

import make_chapters
import nbformat
import pytest
import rules
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

PAGES = [page.path for page in rules.all_pages()]


def stored(folder, *sources):
    """A notebook file with a Markdown cell, then code cells c0, c1, … that hold `sources`."""
    cells = [new_code_cell(source, id=f"c{number}") for number, source in enumerate(sources)]
    notebook = new_notebook(cells=[new_markdown_cell("# Made up", id="m"), *cells])
    path = folder / "made_up.ipynb"
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_committed_notebooks_are_normalized(path):
    """Whoever saves one from JupyterLab brings timings, widget state and another order of keys along."""
    notebook = make_chapters.normalize(nbformat.read(path, as_version=4))
    assert path.read_bytes().decode() == make_chapters.as_text(notebook), "run `make chapters`"


def test_a_second_run_changes_no_byte(tmp_path):
    path = stored(
        tmp_path,
        "print('a', flush=True)\nimport time; time.sleep(0.1); print('b', flush=True)",
        "import ipywidgets; ipywidgets.IntSlider(description='rows')",
        "import kvcourse; print(kvcourse.progress.summary())",
    )
    make_chapters.remake(path)
    first = path.read_bytes()
    make_chapters.remake(path)
    assert path.read_bytes() == first
    assert first.endswith(b"}\n") and b"\r" not in first

    notebook = nbformat.read(path, as_version=4)
    assert [cell.id for cell in notebook.cells] == ["m", "c0", "c1", "c2"]
    code = notebook.cells[1:]
    assert [cell.execution_count for cell in code] == [1, 2, 3]
    assert [output.text for output in code[0].outputs] == ["a\nb\n"]
    assert list(code[1].outputs[0].data) == ["text/plain"]  # no model id of a kernel that is gone
    assert "Nothing recorded yet" in code[2].outputs[0].text
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


@pytest.mark.parametrize(
    "source, words",
    [
        ("1 / 0", "code cell 2 raises ZeroDivisionError: division by zero"),
        ("import warnings; warnings.warn('old')", "code cell 2 writes to stderr: "),
        ("import os; os._exit(3)", "code cell 2 ends the kernel"),
    ],
)
def test_a_cell_that_fails_leaves_the_file_alone(tmp_path, source, words):
    path = stored(tmp_path, "x = 1", source)
    before = path.read_bytes()
    with pytest.raises(SystemExit) as stopped:
        make_chapters.main([str(path)])
    line = str(stopped.value)
    assert line.startswith(f"{path}: {words}") and "\n" not in line
    assert path.read_bytes() == before


def test_a_cell_that_hangs_is_named(tmp_path):
    notebook = nbformat.read(stored(tmp_path, "import time; time.sleep(60)"), as_version=4)
    with pytest.raises(make_chapters.NotebookFailed, match="code cell 1 runs longer than 1 s"):
        make_chapters.run(notebook, tmp_path, timeout=1)


def test_what_a_kernel_leaves_behind_is_dropped():
    data = {"text/plain": "<Panel: x>", make_chapters.DROPPED_MIME: {"model_id": 1}}
    output = new_output("display_data", data)
    output.metadata = {"isolated": True}
    cell = new_code_cell("x", outputs=[output], execution_count=41)
    cell.metadata = {"execution": {"iopub.status.busy": "2026"}, "tags": ["kept"]}
    notebook = new_notebook(cells=[cell], metadata={"widgets": {"state": {}}, "kvcourse": {"greedy": []}})
    make_chapters.normalize(notebook)
    assert cell.metadata == {"tags": ["kept"]} and cell.execution_count == 1
    assert output.data == {"text/plain": "<Panel: x>"} and output.metadata == {}
    assert "widgets" not in notebook.metadata and "kvcourse" in notebook.metadata


def test_the_record_of_whoever_runs_it_is_not_seen(monkeypatch, tmp_path):
    for name in ("KVCOURSE_HOME", "KVCOURSE_PROGRESS", "KVCOURSE_SHARED"):
        monkeypatch.setenv(name, "/somebody")
    given = make_chapters.empty_record(tmp_path)
    assert "/somebody" not in given.values()
    assert given["KVCOURSE_HOME"] == str(tmp_path)


def test_a_fetched_model_stays_reachable(monkeypatch, tmp_path):
    """Without it every page that needs SmolLM2 would download it anew, into an empty home."""
    folder = tmp_path / "shared" / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    for name in ("config.json", "encoding.json", "vocabulary.tiktoken", "model.safetensors"):
        (folder / name).touch()
    monkeypatch.setenv("KVCOURSE_HOME", str(tmp_path / "shared"))
    monkeypatch.delenv("KVCOURSE_SHARED", raising=False)
    given = make_chapters.empty_record(tmp_path / "home")
    assert given["KVCOURSE_SHARED"] == str(folder.parent)
