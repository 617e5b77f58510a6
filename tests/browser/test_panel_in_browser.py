"""Panels, still figures and prediction boxes in a real JupyterLab, on notebooks written here.

The last tests prove that the guards of ``test_chapters.py`` see what they are there for.
"""

from __future__ import annotations

import json

import lab_page as lab
import nbformat
import pytest

from conftest import screenshot_dir

SET_UP = """
import time
import ipywidgets
from kvcourse.figures import template as look
from kvcourse.widgets import Panel, Still, predict, reveal

def compute(prompt, new, way="cached"):
    steps = list(range(1, new + 1))
    return {"prompt": prompt, "steps": steps, "naive": [prompt + s - 1 for s in steps],
            "cached": [prompt] + [1] * (new - 1)}

def figure(data):
    drawing = look.new_figure("step", "positions processed (positions a step)", log_y=True)
    drawing.add_trace(look.here(data["steps"], data["naive"], name="without cache", color=look.WRONG))
    drawing.add_trace(look.here(data["steps"], data["cached"], name="with cache", unit="positions"))
    drawing.add_trace(look.published(data["steps"], [2 * v for v in data["naive"]], name="published",
                                     unit="positions", source="source 1, a laptop"))
    return drawing

def describe(data):
    return f"Without a cache {sum(data['naive']):,} positions <b>, with one {sum(data['cached']):,}."

def slow(prompt, progress):
    for done in range(4):
        progress(done + 1, 4)
        time.sleep(0.05)
    if prompt == 12:
        raise ValueError("twelve is not allowed here")
    return compute(prompt, 5)

def heat(layers):
    drawing = look.new_figure("position", "layer", grid=False)
    z = [[0 if position < 4 else round(0.001 + layer * position / 10, 3) for position in range(10)]
         for layer in range(layers)]
    hover = [[f"layer {l}, position {p}: {v}" for p, v in enumerate(row)] for l, row in enumerate(z)]
    drawing.add_trace(look.heat_map(z, hover=hover, largest=10, bar_title="change"))
    drawing.update_yaxes(autorange="reversed", dtick=1)
    return drawing
"""
PANEL = """
moving = Panel("positions processed", {
    "prompt": ipywidgets.IntSlider(value=2001, min=1, max=4001, step=100, description="tokens in the prompt"),
    "new": ipywidgets.IntSlider(value=300, min=1, max=1000, description="new tokens"),
    "way": ipywidgets.Dropdown(options=["cached", "not cached at all"], description="kept between two steps"),
}, compute, figure, describe)
moving
"""
AS_TEXT = """
def read(text):
    values = dict(part.split("=") for part in text.split())
    if set(values) != {"prompt", "new"}:
        raise ValueError(f"{text!r} is no setting")
    return {name: int(value) for name, value in values.items()}

written = Panel("kept as text", {
    "prompt": ipywidgets.IntSlider(value=10, min=1, max=20, description="prompt"),
    "new": ipywidgets.BoundedIntText(value=3, min=1, max=9, description="new tokens"),
}, compute, figure, describe, as_text=("prompt={prompt} new={new}".format_map, read))
written
"""
SLOW = """
pressed = Panel("slow panel", {"prompt": ipywidgets.IntSlider(value=10, min=1, max=20, description="prompt")},
                slow, figure, describe, slow=True, first=compute(10, 5), button="Measure")
pressed
"""
KINDS = """
for kind, control in {
    "dropdown": ipywidgets.Dropdown(options=[2, 3, 4], value=2, description="layers"),
    "radio": ipywidgets.RadioButtons(options=[2, 3, 4], value=2, description="layers"),
    "toggle": ipywidgets.ToggleButtons(options=[2, 3, 4], value=2, description="layers"),
    "steps": ipywidgets.SelectionSlider(options=[2, 3, 4], value=2, description="layers"),
    "number": ipywidgets.BoundedIntText(value=2, min=1, max=9, description="layers"),
    "checkbox": ipywidgets.Checkbox(value=False, description="one more layer than none"),
}.items():
    display(Panel(kind, {"layers": control}, lambda layers: int(layers) + 1, heat, lambda n: f"{n} layers."))
"""
STILL = 'Still("changes", heat(6), "Positions 0–3 do not change.")'
PREDICT = """
predict("99.count", "How many positions does a step process at 1,000 tokens, no cache?", unit="positions")
predict("99.why", "Why?", kind="choice", options=["the mask", "the positions"])
"""
REVEAL = 'reveal("99.count", 1000, "positions")'


def write_notebook(server, name: str, sources: list[str]) -> str:
    book = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        cells=[nbformat.v4.new_code_cell(source.strip()) for source in sources],
    )
    nbformat.write(book, server.root / name)
    return name


def run_notebook(server, page, name: str, sources: list[str]) -> list[lab.Cell]:
    lab.open_notebook(page, server, write_notebook(server, name, sources))
    cells = lab.run_all(page)
    assert lab.problems_of_run(cells) == []
    return cells


def assert_quiet(page) -> None:
    assert page.watch.foreign == []
    assert page.watch.console == []


def test_a_setting_can_be_copied_and_pasted(server, page):
    cells = run_notebook(server, page, "as_text.ipynb", [SET_UP, AS_TEXT])
    (panel,) = lab.panels_of(page, cells[1])
    field = panel.query_selector("input[type=text]")
    assert field.input_value() == "prompt=10 new=3"
    lab.move_by_keyboard(page, panel)
    assert field.input_value() == "prompt=11 new=3"
    for text, said in (
        ("prompt=12 new=2", "Without a cache 25 positions <b>, with one 13."),
        ("prompt=12", "This text does not work: ValueError: 'prompt=12' is no setting"),
        ("prompt=7 new=1", "Without a cache 7 positions <b>, with one 7."),
    ):
        field.fill(text)
        field.press("Enter")
        page.wait_for_function(
            "([panel, text]) => panel.querySelector('[role=status]').innerText === text", arg=[panel, said]
        )
        assert field.input_value() == text
    assert lab.layout_problems(panel) == []
    assert_quiet(page)


def test_a_panel_moves_by_keyboard_and_reads_in_both_themes(server, page):
    cells = run_notebook(
        server, page, "panel.ipynb", [SET_UP, PANEL, "print(moving.set(prompt=1001, new=3))", STILL]
    )
    (panel,) = lab.panels_of(page, cells[1])
    # What Python computed, markup shown as typed.
    expected = "Without a cache 3,006 positions <b>, with one 1,003."
    assert cells[2].outputs[0]["text"] == expected + "\n"
    page.wait_for_function(
        "([panel, text]) => panel.querySelector('[role=status]').innerText === text", arg=[panel, expected]
    )
    before, after = lab.move_by_keyboard(page, panel)
    assert before == expected
    assert after == "Without a cache 3,306 positions <b>, with one 1,103."  # one step of 100 tokens
    drawn = "panel => panel.querySelector('.js-plotly-plot').data[0].y[0]"
    page.wait_for_function(f"panel => ({drawn})(panel) === 1101", arg=panel)
    assert lab.layout_problems(panel) == []
    for theme in (lab.LIGHT, lab.DARK):
        lab.set_theme(page, theme)
        short = theme.split()[-1].lower()
        assert lab.unreadable_text(panel) == []
        panel.screenshot(path=screenshot_dir() / f"fixture--panel--{short}.png")
        still = lab.still_of(page, cells[3])
        assert lab.unreadable_text(still) == []
        still.screenshot(path=screenshot_dir() / f"fixture--still--{short}.png")
        lab.show_cell(page, cells[1].index)
        # "This machine" is drawn in the theme's text color, which plotly cannot know.
        line = panel.query_selector_all(".scatterlayer .js-line")[1]
        color = line.evaluate("line => getComputedStyle(line).stroke")
        channels = [int(part) for part in color[4:-1].split(",")]
        assert (max(channels) < 64) if theme == lab.LIGHT else (min(channels) > 192)
    assert_quiet(page)


def test_every_kind_of_first_control_answers_the_keyboard(server, page):
    cells = run_notebook(server, page, "kinds.ipynb", [SET_UP, KINDS])
    panels = lab.panels_of(page, cells[1])
    assert len(panels) == 6
    for panel in panels:
        panel.scroll_into_view_if_needed()
        before, after = lab.move_by_keyboard(page, panel)
        assert after != before
        assert lab.layout_problems(panel) == []
    panels[0].screenshot(path=screenshot_dir() / "fixture--heat-map.png")
    panels[2].screenshot(path=screenshot_dir() / "fixture--toggle.png")
    assert_quiet(page)


def test_a_slow_panel_computes_on_its_button_and_survives_an_error(server, page):
    cells = run_notebook(server, page, "slow.ipynb", [SET_UP, SLOW])
    (panel,) = lab.panels_of(page, cells[1])
    before, after = lab.move_by_keyboard(page, panel)
    assert after == "Setting changed: press “Measure” to compute it."
    button = panel.query_selector("button")
    button.focus()
    page.keyboard.press("Enter")
    wait = "([panel, part]) => panel.querySelector('[role=status]').innerText.includes(part)"
    page.wait_for_function(wait, arg=[panel, "65 positions"], timeout=10_000)  # 11 + 12 + 13 + 14 + 15
    panel.query_selector(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(wait, arg=[panel, "Setting changed"], timeout=10_000)
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_function(wait, arg=[panel, "ValueError: twelve is not allowed here"], timeout=10_000)
    page.wait_for_function("button => !button.disabled", arg=button, timeout=10_000)
    panel.screenshot(path=screenshot_dir() / "fixture--slow.png")
    assert_quiet(page)


def test_a_prediction_is_recorded_and_revealed(server, page):
    cells = run_notebook(server, page, "predict.ipynb", [SET_UP, PREDICT, REVEAL])
    assert cells[2].outputs[0]["text"] == "Your guess: no guess. Answer: 1,000 positions.\n"
    element = lab.show_cell(page, 1)
    element.wait_for_selector(".kv-prediction input[type=text]", timeout=lab.SHOW_MS).focus()
    page.keyboard.type("800")
    page.keyboard.press("Enter")
    element.wait_for_selector("text=Recorded: 800", timeout=10_000)
    radio = element.query_selector("input[type=radio]")
    radio.focus()
    page.keyboard.press("Space")
    element.wait_for_selector("text=Recorded.", timeout=10_000)
    for theme in (lab.DARK, lab.LIGHT):
        lab.set_theme(page, theme)
        assert lab.unreadable_text(element) == []
        name = f"fixture--prediction--{theme.split()[-1].lower()}.png"
        element.screenshot(path=screenshot_dir() / name)
    cells = lab.run_all(page)
    assert (
        cells[2].outputs[0]["text"] == "Your guess: 800 positions. Answer: 1,000 positions: 20 % too low.\n"
    )
    record = json.loads((server.root.parent / "progress.json").read_text())
    assert record["predictions"] == {"99.count": 800, "99.why": "the mask"}
    assert_quiet(page)


def test_the_guard_sees_a_request_to_another_machine(server, page):
    # 192.0.2.1 is reserved for documentation; the request is refused before it leaves the browser.
    source = """from IPython.display import HTML\nHTML('<img src="http://192.0.2.1/picture.png">')"""
    run_notebook(server, page, "foreign.ipynb", [source])
    page.wait_for_timeout(500)
    assert set(page.watch.foreign) == {"http://192.0.2.1/picture.png"}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("1 / 0", "cell 0: ZeroDivisionError: division by zero"),
        ("import sys; print('x', file=sys.stderr)", "cell 0 wrote to stderr: x\n"),
    ],
)
def test_the_guard_sees_a_failing_cell(server, page, source, problem):
    lab.open_notebook(page, server, write_notebook(server, "failing.ipynb", [source, "2"]))
    found = lab.problems_of_run(lab.run_all(page))
    assert problem in found


def test_the_guard_sees_a_console_error(server, page):
    source = """from IPython.display import HTML\nHTML('<script>console.error("a broken widget")</script>')"""
    run_notebook(server, page, "console.ipynb", [source])
    page.wait_for_timeout(500)
    assert any("a broken widget" in line for line in page.watch.console)
