"""Run notebooks and store their outputs in place: what `make chapters` calls.

    python tests/notebooks/make_chapters.py                     all of chapters/
    python tests/notebooks/make_chapters.py chapters/01_*.ipynb

Each runs in a fresh kernel with an empty reader's record, and is then normalized so that the
stored file holds only what the tests compare: running it twice gives the same file, except for
the cells that time something. Those are stored anew as well, so that every figure on a page comes
from one run of one machine. Stops with one line when a cell raises or writes to stderr; that
notebook's file is then left as it was.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from kvcourse import weights

CHAPTERS = Path(__file__).resolve().parents[2] / "chapters"
# A widget's view names a model that lives in one kernel only. Without it JupyterLab shows the
# stored text, "<Panel: …>", until the reader runs the cell.
DROPPED_MIME = "application/vnd.jupyter.widget-view+json"


class NotebookFailed(Exception):
    """A cell raised or wrote to stderr; the message is one line."""


def run(notebook, folder, timeout=300, environment=None):
    """Run every cell in a fresh `python3` kernel started in `folder`, with an empty reader's record.

    `timeout` is in seconds a cell; `environment` holds variables to set besides. Raises NotebookFailed
    when a cell raises, hangs or ends the kernel.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    with tempfile.TemporaryDirectory() as home:
        try:
            client.execute(env=empty_record(home) | (environment or {}))
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            # Counted as JupyterLab does, [1], [2], …
            raise NotebookFailed(f"code cell {client.code_cells_executed} {_what(error, timeout)}") from None


def empty_record(home):
    """The environment of a kernel whose reader has no record yet; `home` is an empty folder.

    SmolLM2 stays reachable where it was fetched; else each page that needs it would download it anew.
    """
    record = {"KVCOURSE_HOME": str(home), "KVCOURSE_PROGRESS": str(Path(home) / "progress.json")}
    inherited = {name: value for name, value in os.environ.items() if name != "KVCOURSE_SHARED"}
    fetched = weights.available()["smollm2-135m"].folder
    shared = {"KVCOURSE_SHARED": str(fetched.parent)} if fetched else {}
    return inherited | record | shared


def _what(error, timeout):
    if isinstance(error, DeadKernelError):
        return "ends the kernel"
    if isinstance(error, CellTimeoutError):
        return f"runs longer than {timeout} s"
    first = (str(error.evalue).strip().splitlines() or ["no message"])[0]
    return f"raises {error.ename}: {first}"


def normalize(notebook):
    """Keep only what is compared or shown; raise NotebookFailed for text on stderr."""
    count = 0
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = _merged(cell.outputs)
        for output in cell.outputs:
            if output.get("name") == "stderr":
                first = (output.text.strip().splitlines() or ["an empty line"])[0]
                raise NotebookFailed(f"code cell {count} writes to stderr: {first}")
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


def as_text(notebook):
    """The one way a notebook is written down: sorted keys, a line feed at the end. Validates it first."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def remake(path):
    """Run, normalize and store one notebook; return the seconds it took and the bytes of its outputs."""
    began = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    run(notebook, path.parent)
    text = as_text(normalize(notebook))
    path.write_text(text, encoding="utf-8", newline="\n")
    outputs = json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    return time.perf_counter() - began, len(outputs)


def main(names):
    paths = [Path(name) for name in names] or sorted(
        path for path in CHAPTERS.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
    )
    for path in paths:
        try:
            seconds, size = remake(path)
        except NotebookFailed as error:
            sys.exit(f"{path}: {error}")
        print(f"{path}: {seconds:.1f} s, {size / 1000:.0f} kB of outputs", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
