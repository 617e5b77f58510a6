"""Run notebooks and store their outputs in place: what `make chapters` calls.

    python tests/notebooks/make_chapters.py                     all of chapters/
    python tests/notebooks/make_chapters.py chapters/01_*.ipynb

Each runs in a fresh kernel with an empty reader's record, and is then normalized so that the
stored file holds only what the tests compare: running it twice gives the same file, except for
the cells that time something. Stops with one line when a cell raises or writes to stderr.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

CHAPTERS = Path(__file__).resolve().parents[2] / "chapters"
# A widget's view names a model that lives in one kernel only. Without it JupyterLab shows the
# stored text, "<Panel: …>", until the reader runs the cell.
DROPPED_MIME = "application/vnd.jupyter.widget-view+json"


class NotebookFailed(Exception):
    """A cell raised or wrote to stderr; the message is one line."""


def run(notebook, folder, timeout=300):
    """Run every cell of a notebook in place, in a fresh `python3` kernel started in `folder`."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise NotebookFailed(lines[-1]) from None


def normalize(notebook):
    """Keep only what is compared or shown; raise NotebookFailed for text on stderr."""
    count = 0
    for number, cell in enumerate(notebook.cells):
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = _merged(cell.outputs)
        for output in cell.outputs:
            if output.get("name") == "stderr":
                raise NotebookFailed(f"cell {number} writes to stderr: {output.text.strip().splitlines()[0]}")
            if "execution_count" in output:
                output.execution_count = count
            output.get("data", {}).pop(DROPPED_MIME, None)
            if "metadata" in output:
                output.metadata = {}
    notebook.metadata.pop("widgets", None)
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    }
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def _merged(outputs):
    """Neighboring pieces of one stream as one: how a stream is cut into messages is chance."""
    merged = []
    for output in outputs:
        last = merged[-1] if merged else {}
        if output.output_type == "stream" and last.get("name") == output.name:
            last["text"] += output.text
        else:
            merged.append(output)
    return merged


def remake(path):
    """Run, normalize and store one notebook; return the seconds it took."""
    began = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as home:
        os.environ["KVCOURSE_HOME"] = home
        os.environ["KVCOURSE_PROGRESS"] = str(Path(home) / "progress.json")
        run(notebook, path.parent)
    normalize(notebook)
    nbformat.validate(notebook)
    text = nbformat.writes(notebook)
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8", newline="\n")
    return time.perf_counter() - began


def main(names):
    paths = [Path(name) for name in names] or sorted(
        path for path in CHAPTERS.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
    )
    for path in paths:
        try:
            seconds = remake(path)
        except NotebookFailed as error:
            sys.exit(f"{path}: {error}")
        print(f"{path}: {seconds:.1f} s, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
