"""Chapter 03's cells to mark, in a real JupyterLab: by keyboard, recorded, put back, readable."""

from __future__ import annotations

import json

import lab_page as lab
import nbformat

from conftest import screenshot_dir

SOURCES = [
    """import numpy as np
from kvcourse.widgets import chapter_03 as widgets
marks = widgets.mark_cells("99.cells", "In which cells do the two masks differ?", start=3, T=3)
marks""",
    "print(marks.against(np.tri(6, dtype=bool)[3:] != np.tri(3, 6, dtype=bool)))",
]


def write_notebook(server) -> str:
    book = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        cells=[nbformat.v4.new_code_cell(source) for source in SOURCES],
    )
    nbformat.write(book, server.root / "marks.ipynb")
    return "marks.ipynb"


def grid_of(page):
    """The grid, drawn with its line of text."""
    element = lab.show_cell(page, 0)
    element.wait_for_selector(".kv-marks input[type=checkbox]", timeout=lab.SHOW_MS)
    page.wait_for_function(
        "cell => [...cell.querySelectorAll('.kv-marks [role=status]')].every(line => line.textContent)",
        arg=element,
        timeout=lab.SHOW_MS,
    )
    return element.query_selector(".kv-marks")


def predictions(server) -> dict:
    return json.loads((server.root.parent / "progress.json").read_text())["predictions"]


def label_of_focused(page) -> str:
    """What a screen reader says of the box that has the keyboard: the text of its label."""
    return page.evaluate("() => document.activeElement.labels[0].innerText.trim()")


def test_cells_are_marked_by_keyboard_recorded_and_put_back(server, page):
    lab.open_notebook(page, server, write_notebook(server))
    cells = lab.run_all(page)
    assert lab.problems_of_run(cells) == []
    assert cells[0].shown("<Marks: ") == ["<Marks: 99.cells>"]
    assert cells[1].outputs[0]["text"].startswith("No cell marked: no guess. 9 cells differ: ")

    grid = grid_of(page)
    boxes = grid.query_selector_all("input[type=checkbox]")
    assert len(boxes) == 18
    boxes[0].focus()
    assert label_of_focused(page) == "q3·k0"
    page.keyboard.press("Tab")  # row by row, left to right
    assert label_of_focused(page) == "q3·k1"
    page.keyboard.press("Space")
    grid.wait_for_selector("text=Recorded: 1 of 18 cells, q3·k1.", timeout=10_000)
    for _ in range(11):
        page.keyboard.press("Tab")
    assert label_of_focused(page) == "q5·k0"
    page.keyboard.press("Space")
    grid.wait_for_selector("text=Recorded: 2 of 18 cells, q3·k1, q5·k0.", timeout=10_000)
    assert boxes[1].evaluate("box => box.checked")

    assert lab.layout_problems(grid) == []
    for theme in (lab.DARK, lab.LIGHT):
        lab.set_theme(page, theme)
        assert lab.unreadable_text(grid) == []
        assert unreadable_boxes(grid) == []
        grid.screenshot(path=screenshot_dir() / f"marks--{theme.split()[-1].lower()}.png")

    cells = lab.run_all(page)
    assert cells[1].outputs[0]["text"].startswith("You marked 2 cells, 1 of the 9 that differ. Missed: q3·k2")
    grid = grid_of(page)
    grid.wait_for_selector("text=Your earlier marks: 2 of 18 cells", timeout=lab.SHOW_MS)
    assert predictions(server)["99.cells"] == "q3·k1 q5·k0"

    # Without a mark there is no prediction; the record of this server is as it was before.
    for box in grid.query_selector_all("input[type=checkbox]:checked"):
        box.focus()
        page.keyboard.press("Space")
    grid.wait_for_selector("text=No cell marked.", timeout=10_000)
    assert "99.cells" not in predictions(server)
    assert page.watch.foreign == []
    assert page.watch.console == []


def unreadable_boxes(grid, least: float = 4.5) -> list[str]:
    """Names of boxes whose contrast with the fill of their cell is below ``least`` (WCAG AA: 4.5)."""
    return grid.evaluate(
        """(grid, least) => {
          const rgb = color => color.match(/[\\d.]+/g).map(Number);
          const light = ([r, g, b]) => {
            const [x, y, z] = [r, g, b].map(v => v / 255)
              .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * x + 0.7152 * y + 0.0722 * z;
          };
          const over = (top, under) => {
            const alpha = top[3] ?? 1;
            return under.slice(0, 3).map((v, i) => alpha * top[i] + (1 - alpha) * v);
          };
          let node = grid;
          while (node.parentElement && (rgb(getComputedStyle(node).backgroundColor)[3] ?? 1) === 0)
            node = node.parentElement;
          const page = rgb(getComputedStyle(node).backgroundColor);
          return [...grid.querySelectorAll(".kv-cell")].map(cell => {
            const fill = over(rgb(getComputedStyle(cell).backgroundColor), page);
            const name = cell.querySelector("span");
            const [a, b] = [light(over(rgb(getComputedStyle(name).color), fill)), light(fill)];
            return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), name.innerText];
          }).filter(([ratio]) => ratio < least)
            .map(([ratio, name]) => `${name}: contrast ${ratio.toFixed(1)}`);
        }""",
        least,
    )
