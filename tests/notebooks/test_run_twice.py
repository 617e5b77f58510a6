"""A reader who runs a generating cell again gets the same text.

A cache that is not reset, a random stream that goes on, a list that keeps growing: each shows
as another text the second time. So every cell that writes text is run twice in a row, in a
fresh kernel, and its two outputs are compared.
"""

import json
import sys
from pathlib import Path

import nbformat
import pytest
import rules

sys.path.insert(0, str(Path(__file__).parent))
import make_chapters

# Timing is not what is tested here, so each call that a page times runs once.
QUICK = """
import kvcourse.measure as _measure


def _once(timer):
    return lambda work, *ignored, **also_ignored: timer(work, repeats=1, warmup=0)


_measure.time_call, _measure.time_blocks = _once(_measure.time_call), _once(_measure.time_blocks)
"""

PAGES = [page for page in rules.all_pages() if any(rules.writes_text(page, cell) for cell in page.code)]


def doubled(page):
    """The page as a notebook in which every generating cell stands twice; ends with the last of them."""
    notebook = nbformat.reads(json.dumps(page.notebook), as_version=4)
    writes = [rules.writes_text(page, cell) for cell in page.cells]
    last = max(number for number, found in enumerate(writes) if found)
    cells = [nbformat.v4.new_code_cell(QUICK)]
    for cell, again in list(zip(notebook.cells, writes, strict=True))[: last + 1]:
        cells.append(cell)
        if again:
            cells.append(nbformat.v4.new_code_cell(cell.source, metadata={"tags": ["again"]}))
    notebook.cells = cells
    return notebook


def printed(cell):
    """What a cell shows as text: streams, and the plain text of displays (a widget's is its fixed name)."""
    shown = []
    for output in cell.outputs:
        text = output.get("text", output.get("data", {}).get("text/plain", ""))
        shown.append("".join(text))
    return "".join(shown)


def differences(notebook):
    """One line for each cell that printed something else the second time."""
    pairs = zip(notebook.cells, notebook.cells[1:], strict=False)
    twins = [pair for pair in pairs if "again" in pair[1].metadata.get("tags", [])]
    assert twins
    for first, again in twins:
        if "nbval-ignore-output" not in first.metadata.get("tags", []) and printed(first) != printed(again):
            yield f"{rules.first_line(first)!r} printed {printed(first)!r}, then {printed(again)!r}"


@pytest.mark.parametrize("page", PAGES, ids=[page.path.stem for page in PAGES])
def test_running_a_generating_cell_twice(page, skip_without):
    skip_without(json.dumps(page.notebook))
    notebook = doubled(page)
    make_chapters.run(notebook, page.path.parent)
    assert not list(differences(notebook))


def test_a_cache_that_is_not_reset_is_seen(tmp_path):
    """The trap itself: one cache for two prompts."""
    source = (
        "import kvcourse as kv\n"
        "model = kv.load_model('austen-gpt2-draft')\n"
        "cache = globals().get('cache') or kv.ContiguousCache.for_model(model)\n"
        "print(kv.generate(model, [5, 6, 7], max_new_tokens=8, cache=cache))"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", text="[1]")]
    page = rules.Page(tmp_path / "99_trap.ipynb", notebook)
    notebook = doubled(page)
    make_chapters.run(notebook, tmp_path)
    assert len(list(differences(notebook))) == 1
