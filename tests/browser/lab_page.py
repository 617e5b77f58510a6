"""What the browser tests do on a JupyterLab page: open, run all, find panels, move a control by keyboard."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

LIGHT, DARK = "JupyterLab Light", "JupyterLab Dark"
OPEN_MS = 60_000
RUN_MS = 180_000  # a guard against a hanging notebook, not a target
SHOW_MS = 20_000  # from the end of the run to a drawn figure; 1 s on a quiet machine

_READY = """path => {
  const panel = window.jupyterapp?.shell?.currentWidget;
  return panel?.context?.path === path && panel.context.isReady
    && panel.sessionContext?.session?.kernel?.status === "idle";
}"""
# A promise that never settles would hang the test, so the run is raced against a clock.
_RUN_ALL = """limit => Promise.race([
  jupyterapp.commands.execute("notebook:run-all-cells"),
  new Promise(resolve => setTimeout(() => resolve("timeout"), limit)),
])"""
_CELLS = """() => jupyterapp.shell.currentWidget.content.widgets.map(cell => ({
  code: cell.model.type === "code",
  source: cell.model.sharedModel.getSource(),
  count: cell.model.executionCount ?? null,
  outputs: cell.model.outputs?.toJSON() ?? [],
}))"""
_SHOW_CELL = """async index => {
  const content = jupyterapp.shell.currentWidget.content;
  content.activeCellIndex = index;
  content.deselectAll();
  await content.scrollToItem(index, "smart");
  return content.widgets[index].node;
}"""


@dataclass
class Cell:
    """One cell after the run: index, source, execution count and stored outputs."""

    index: int
    code: bool
    source: str
    count: int | None
    outputs: list[dict]

    def shown(self, prefix: str) -> list[str]:
        """The ``text/plain`` of outputs that start with ``prefix`` ("<Panel: ")."""
        texts = [output.get("data", {}).get("text/plain", "") for output in self.outputs]
        texts = ["".join(text) for text in texts]
        return [text for text in texts if text.startswith(prefix)]


def open_notebook(page, server, path: str) -> None:
    """Open a working copy and wait for its kernel."""
    # A workspace of its own: JupyterLab would otherwise restore the tabs of the notebook before.
    workspace = secrets.token_hex(4)
    page.goto(f"{server.url}/lab/workspaces/{workspace}/tree/{path}?token={server.token}")
    page.wait_for_function(_READY, arg=path, timeout=OPEN_MS)


def run_all(page) -> list[Cell]:
    """Run every cell and return them; fails when the run does not end."""
    outcome = page.evaluate(_RUN_ALL, RUN_MS)
    cells = [Cell(index, **cell) for index, cell in enumerate(page.evaluate(_CELLS))]
    waiting = [cell for cell in cells if cell.code and cell.count is None]
    assert outcome != "timeout", (
        f"the notebook did not finish within {RUN_MS / 1000:.0f} s; it was in cell {waiting[0].index}:\n"
        f"{waiting[0].source}"
    )
    return cells


def problems_of_run(cells: list[Cell]) -> list[str]:
    """Error outputs and code cells that did not run, in words."""
    found = []
    for cell in cells:
        for output in cell.outputs:
            if output["output_type"] == "error":
                found.append(f"cell {cell.index}: {output['ename']}: {output['evalue']}")
            if output["output_type"] == "stream" and output["name"] == "stderr":
                found.append(f"cell {cell.index} wrote to stderr: {''.join(output['text'])[:200]}")
        if cell.code and cell.source.strip() and cell.count is None:
            found.append(f"cell {cell.index} did not run")
    return found


def show_cell(page, index: int):
    """Scroll to a cell (JupyterLab renders only cells near the view) and return its element."""
    element = page.evaluate_handle(_SHOW_CELL, index).as_element()
    element.wait_for_element_state("visible", timeout=SHOW_MS)
    return element


def panels_of(page, cell: Cell) -> list:
    """The panels that a cell shows, drawn: each has its figure and its sentence."""
    expected = len(cell.shown("<Panel: "))
    element = show_cell(page, cell.index)
    page.wait_for_function(
        """([cell, count]) => {
          const panels = [...cell.querySelectorAll(".kv-panel")];
          return panels.length === count && panels.every(panel =>
            panel.querySelector(".main-svg") && panel.querySelector("[role=status]")?.textContent);
        }""",
        arg=[element, expected],
        timeout=SHOW_MS,
    )
    return element.query_selector_all(".kv-panel")


def still_of(page, cell: Cell):
    """The element of a cell with still figures, each drawn in its full height."""
    element = show_cell(page, cell.index)
    page.wait_for_function(
        """([cell, count]) => {
          const stills = [...cell.querySelectorAll(".jp-RenderedPlotly")];
          return stills.length === count && stills.every(still => {
            const drawing = still.querySelector(".main-svg");
            return drawing && still.offsetHeight >= drawing.getBoundingClientRect().height;
          });
        }""",
        arg=[element, len(cell.shown("<Still: "))],
        timeout=SHOW_MS,
    )
    return element


def text_of(panel) -> str:
    """The sentence under the figure."""
    return panel.query_selector("[role=status]").inner_text()


def first_control(panel):
    """The first control of a panel, the element that takes the keyboard."""
    found = panel.query_selector(
        ".noUi-handle, select, input[type=radio]:checked, input, button:not(.mod-active), textarea"
    )
    assert found is not None, "the panel has no control"
    return found


def move_by_keyboard(page, panel) -> tuple[str, str]:
    """Focus the first control, move it with the keyboard, and return the sentence before and after.

    The keys of the control are tried in turn, because the first one does nothing at the end of a range.
    """
    before = text_of(panel)
    control = first_control(panel)
    kind = control.evaluate("e => e.matches('.noUi-handle') ? 'slider' : e.type || e.tagName.toLowerCase()")
    keys = {
        "slider": ["ArrowRight", "ArrowLeft"],
        "select-one": ["ArrowDown", "ArrowUp"],
        "radio": ["ArrowDown", "ArrowUp"],
        "number": ["ArrowUp", "ArrowDown"],
        "checkbox": ["Space"],
        "submit": ["Enter"],
        "button": ["Enter"],
    }.get(kind)
    assert keys, f"no keys known for a first control of kind {kind!r}"
    control.focus()
    assert control.evaluate("e => document.activeElement === e"), "the first control takes no focus"
    for key in keys:
        page.keyboard.press(key)
        if wait_for_other_text(page, panel, before, 3000):
            break
    return before, text_of(panel)


def wait_for_other_text(page, panel, before: str, limit_ms: int) -> bool:
    """Whether the sentence becomes another one within the limit."""
    from playwright.sync_api import TimeoutError as PlaywrightTimeout

    try:
        page.wait_for_function(
            "([panel, before]) => panel.querySelector('[role=status]').innerText !== before",
            arg=[panel, before],
            timeout=limit_ms,
        )
    except PlaywrightTimeout:
        return False
    return True


def set_theme(page, theme: str) -> None:
    """Switch JupyterLab's theme and wait until it is there."""
    page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', { theme })", theme)
    page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=theme)
    page.wait_for_selector("#jupyterlab-splash", state="detached")  # a veil while the theme changes


def layout_problems(panel) -> list[str]:
    """Labels cut off and anything wider than the panel, in words. At a page width of 1,280 px."""
    return panel.evaluate(
        """panel => {
          const found = [];
          const edge = panel.closest(".jp-OutputArea-output").getBoundingClientRect().right + 1;
          for (const label of panel.querySelectorAll(".widget-label")) {
            if (label.offsetWidth && label.scrollWidth > label.clientWidth + 1)
              found.push(`label cut off: ${label.textContent}`);
          }
          for (const part of panel.querySelectorAll(".jupyter-widgets, .main-svg, .kv-text")) {
            if (part.getBoundingClientRect().right > edge)
              found.push(`wider than the page: ${part.getAttribute("class")}`);
          }
          return found;
        }"""
    )


def unreadable_text(element, least: float = 4.5) -> list[str]:
    """Texts of figure, labels and sentence whose contrast with the page is below ``least`` (WCAG AA: 4.5)."""
    return element.evaluate(
        """(element, least) => {
          const rgb = color => color.match(/[\\d.]+/g).map(Number);
          const light = color => {
            const [r, g, b] = rgb(color).slice(0, 3).map(v => v / 255)
              .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          let node = element;
          const seen = n => (rgb(getComputedStyle(n).backgroundColor)[3] ?? 1) > 0;
          while (node.parentElement && !seen(node)) node = node.parentElement;
          const page = light(getComputedStyle(node).backgroundColor);
          const texts = [...element.querySelectorAll(
            ".xtick text, .ytick text, .xtitle, .ytitle, .legendtext, .widget-label, .kv-text")];
          const filled = texts.filter(text => text.textContent.trim());
          return filled.map(text => {
            const style = getComputedStyle(text);
            const own = light(text.closest("svg") ? style.fill : style.color);
            const ratio = (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05);
            return [ratio, text.textContent];
          }).filter(([ratio]) => ratio < least)
            .map(([ratio, text]) => `${text}: contrast ${ratio.toFixed(1)}`);
        }""",
        least,
    )
