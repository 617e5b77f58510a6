"""Every chapter in a real JupyterLab: it runs, nothing leaves the machine, every panel moves."""

from __future__ import annotations

import lab_page as lab
import pytest

from conftest import REPOSITORY, screenshot_dir

CHAPTERS = REPOSITORY / "chapters"
NOTEBOOKS = sorted(
    path.relative_to(CHAPTERS).as_posix()
    for path in CHAPTERS.rglob("*.ipynb")
    if ".ipynb_checkpoints" not in path.parts
)


def _picture(element, notebook: str, name: str, theme: str) -> None:
    chapter = notebook.removesuffix(".ipynb").replace("/", "-")
    plain = "".join(char if char.isalnum() else "-" for char in name).strip("-")
    element.screenshot(path=screenshot_dir() / f"{chapter}--{plain}--{theme}.png")


def _names(cell: lab.Cell) -> list[str]:
    return [text[len("<Panel: ") :].rstrip(">") for text in cell.shown("<Panel: ")]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_chapter_in_jupyterlab(notebook, skip_without, server, page):
    skip_without((CHAPTERS / notebook).read_text(encoding="utf-8"))
    lab.open_notebook(page, server, notebook)
    cells = lab.run_all(page)
    problems = lab.problems_of_run(cells)

    with_panels = [cell for cell in cells if cell.shown("<Panel: ")]
    with_stills = [cell for cell in cells if cell.shown("<Still: ")]
    for cell in with_panels:
        for name, panel in zip(_names(cell), lab.panels_of(page, cell), strict=True):
            before, after = lab.move_by_keyboard(page, panel)
            if after == before:
                problems.append(f"panel {name!r}: moving its first control leaves the text {before!r}")
            problems += [f"panel {name!r}: {problem}" for problem in lab.layout_problems(panel)]
    for theme in (lab.LIGHT, lab.DARK):
        lab.set_theme(page, theme)
        short = theme.split()[-1].lower()
        for cell in with_panels:
            for name, panel in zip(_names(cell), lab.panels_of(page, cell), strict=True):
                problems += [f"panel {name!r}, {short}: {text}" for text in lab.unreadable_text(panel)]
                _picture(panel, notebook, name, short)
        for cell in with_stills:
            element = lab.still_of(page, cell)
            problems += [f"still, {short}: {text}" for text in lab.unreadable_text(element)]
            _picture(element, notebook, cell.shown("<Still: ")[0][8:-1], short)
    assert page.locator("text=Error displaying widget").count() == 0

    assert not problems, "\n".join(problems)
    assert not page.watch.foreign, f"requests to other machines: {page.watch.foreign}"
    assert not page.watch.console, f"console errors: {page.watch.console}"
