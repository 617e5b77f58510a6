"""Panels (controls + figure + one sentence of text) and still figures, with one look and one way to fail.

A panel is made of pure functions that live in ``kvcourse/figures/<chapter>.py`` and are tested without a
browser: ``compute(**values) -> data``, ``figure(data) -> plotly Figure`` and ``describe(data) -> one
sentence``.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import ipywidgets
import numpy as np
import plotly.graph_objects as go
import traitlets
from IPython.display import display

from kvcourse.figures.template import CONFIG, HEIGHT, MAX_HEIGHT, MAX_WIDTH, TEMPLATE, THEME_CSS
from kvcourse.widgets.shared_plotly import SharedFigureWidget

PLOTLY_MIME = "application/vnd.plotly.v1+json"
SIGNIFICANT_DIGITS = 6  # of the numbers stored with a still figure


class Readout(anywidget.AnyWidget):
    """One line of text that a screen reader announces when it changes (``role="status"``).

    ``ipywidgets.HTML`` replaces its whole content on a change, the live region included, and most screen
    readers then stay silent. This widget keeps its element and changes only the text, which also needs no
    escaping. The style sheet that makes figures follow the theme travels with it.
    """

    _esm = """
    export default {
      render({ model, el }) {
        el.setAttribute("role", "status");
        el.classList.add("kv-text");
        const show = () => { el.textContent = model.get("text"); };
        model.on("change:text", show);
        show();
        return () => model.off("change:text", show);
      }
    };
    """
    _css = THEME_CSS
    text = traitlets.Unicode("").tag(sync=True)


def one_line(error: BaseException) -> str:
    """``"ValueError: what happened"``, the message's first line only."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Panel(ipywidgets.VBox):
    """Controls, a figure and one sentence that says what the figure shows.

    Parameters
    ----------
    name
        Whole words, unique in the notebook: the panel's ``repr`` is ``<Panel: name>``, which ``pytest
        --nbval`` compares (a bare ``FigureWidget`` would show a random id).
    controls
        Argument name of ``compute`` -> ipywidgets widget with a ``value`` and a ``description``.
    compute
        ``compute(**values) -> data``: pure, under 100 ms unless ``slow``.
    figure
        ``figure(data) -> Figure``. Every call gives the same traces in the same order.
    describe
        ``describe(data) -> str``: one sentence with the result, not a description of the axes.
    update
        ``update(figure_widget, data)``, run inside ``batch_update``. Without it the panel calls
        ``figure(data)`` again and sends what changed, which is fast enough for some thousand points.
    slow
        For a ``compute`` above 100 ms: it then runs only when the reader presses the button, and is called as
        ``compute(progress=report, **values)`` where ``report(done, total)`` moves the progress bar.
    first
        The data of the first drawing when it should not be computed (a recorded run, say).
    button
        The label of the button of a ``slow`` panel.

    Raises ``ValueError`` when a control has no description. An exception of the first drawing is raised (the
    author sees it); later ones, while the reader moves a control, become one line of text and the panel stays
    alive.
    """

    def __init__(
        self,
        name: str,
        controls: Mapping[str, ipywidgets.Widget],
        compute: Callable[..., Any],
        figure: Callable[[Any], go.Figure],
        describe: Callable[[Any], str],
        update: Callable[[go.FigureWidget, Any], None] | None = None,
        *,
        slow: bool = False,
        first: Any = None,
        button: str = "Run",
    ) -> None:
        self.name = name
        self.controls = dict(controls)
        self.slow = slow
        self._compute, self._draw, self._describe = compute, figure, describe
        self._update = update or self._send_changes
        self._held = False

        self.data = self._run_compute() if first is None else first
        drawing = self._draw(self.data)
        _check_size(drawing)
        self.figure = SharedFigureWidget(drawing)
        self.figure.update_layout(template=TEMPLATE, autosize=True, height=drawing.layout.height or HEIGHT)
        self.figure._config = self.figure._config | CONFIG
        self._readout = Readout(text=self._describe(self.data))

        for control_name, control in self.controls.items():
            _lay_out(control_name, control)
            control.observe(self._moved, names="value")
        row = ipywidgets.HBox(
            [*self.controls.values(), *(self._slow_parts(button) if slow else [])],
            layout=ipywidgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="4px 24px"),
        )
        super().__init__(
            children=[row, self.figure, self._readout],
            layout=ipywidgets.Layout(width="100%", max_width=f"{MAX_WIDTH}px", overflow="hidden"),
        )
        self.add_class("kv-panel")  # how the browser test finds it

    def __repr__(self) -> str:
        return f"<Panel: {self.name}>"

    @property
    def text(self) -> str:
        """The sentence under the figure, as plain text."""
        return self._readout.text

    @property
    def values(self) -> dict[str, Any]:
        """The controls' values by name."""
        return {name: control.value for name, control in self.controls.items()}

    def set(self, **values: Any) -> str:
        """Set controls as if the reader had moved them, and return the sentence under the figure.

        A ``slow`` panel is run as well. Raises ``ValueError`` for an unknown control or a value that the
        control cannot take (a slider would silently move to its end).
        """
        for name in values:
            if name not in self.controls:
                raise ValueError(f"no control {name!r} in {self!r}: it has {', '.join(self.controls)}")
        # Held, so that two values set together are computed once.
        self._held = True
        try:
            for name, value in values.items():
                _set_value(self, name, value)
        finally:
            self._held = False
        self._refresh()
        return self.text

    def _moved(self, change: Any) -> None:
        if self._held:
            return
        if self.slow:
            self._readout.text = f"Setting changed: press “{self._button.description}” to compute it."
        else:
            self._refresh()

    def _refresh(self) -> None:
        # Called from a widget callback: a traceback would land in a log the reader never sees, and printing
        # would add text to whichever cell ran last. The line under the figure is where the reader looks.
        try:
            data = self._run_compute()
            text = self._describe(data)
            with self.figure.batch_update():
                self._update(self.figure, data)
        except Exception as error:
            setting = ", ".join(f"{name} = {value}" for name, value in self.values.items())
            self._readout.text = f"This setting does not work ({setting}): {one_line(error)}"
        else:
            self.data = data
            self._readout.text = text

    def _run_compute(self) -> Any:
        if self.slow:
            return self._compute(progress=self._report, **self.values)
        return self._compute(**self.values)

    def _send_changes(self, shown: go.FigureWidget, data: Any) -> None:
        fresh = self._draw(data)
        if len(fresh.data) != len(shown.data):
            raise ValueError(
                f"figure(data) made {len(fresh.data)} traces, the panel shows {len(shown.data)}: "
                "keep the number of traces fixed and empty the ones not needed"
            )
        for old, new in zip(shown.data, fresh.data, strict=True):
            before, after = old.to_plotly_json(), new.to_plotly_json()
            old.update({key: value for key, value in after.items() if not _same(before.get(key), value)})
        before, after = shown.layout.to_plotly_json(), fresh.layout.to_plotly_json()
        after.pop("template", None)
        shown.layout.update({key: value for key, value in after.items() if not _same(before.get(key), value)})

    def _slow_parts(self, label: str) -> list[ipywidgets.Widget]:
        self._button = ipywidgets.Button(description=label, layout=ipywidgets.Layout(width="auto"))
        self._progress = ipywidgets.IntProgress(
            value=0, min=0, max=1, layout=ipywidgets.Layout(width="180px", visibility="hidden")
        )
        self._button.on_click(self._pressed)
        return [self._button, self._progress]

    def _pressed(self, button: ipywidgets.Button) -> None:
        self._button.disabled = True
        self._progress.value = 0
        self._progress.layout.visibility = "visible"
        self._readout.text = "Computing …"
        try:
            self._refresh()
        finally:
            self._progress.layout.visibility = "hidden"
            self._button.disabled = False

    def _report(self, done: int, total: int) -> None:
        # The first drawing runs before the progress bar exists.
        bar = getattr(self, "_progress", None)
        if bar is not None:
            bar.max, bar.value = total, done


class Still:
    """A still figure with the same look and its sentence below; the last expression of a cell shows it.

    The figure is stored in the notebook (some kB) and compared by ``pytest --nbval``, so its numbers are
    rounded to six significant digits here. Raises ``ValueError`` for a NumPy array in the figure, which
    plotly would store as raw bits: one last-digit change between two processors would fail the comparison.
    """

    def __init__(self, name: str, figure: go.Figure, text: str) -> None:
        _check_size(figure)
        self.name, self.text = name, text
        self.figure = go.Figure(figure)
        self.figure.update_layout(template=TEMPLATE, autosize=True, height=figure.layout.height or HEIGHT)

    def __repr__(self) -> str:
        return f"<Still: {self.name}>"

    def bundle(self) -> dict[str, Any]:
        """The figure as plain JSON values, as it is stored in the notebook."""
        content = _plain(self.figure.to_plotly_json(), self.name)
        content["config"] = dict(CONFIG)
        return {PLOTLY_MIME: content, "text/plain": repr(self)}

    def _ipython_display_(self) -> None:
        display(self.bundle(), raw=True)
        page = f'<style>{THEME_CSS}</style><div class="kv-text" role="note">{html.escape(self.text)}</div>'
        display({"text/html": page, "text/plain": self.text}, raw=True)


def _check_size(figure: go.Figure) -> None:
    for side, limit in (("height", MAX_HEIGHT), ("width", MAX_WIDTH)):
        size = figure.layout[side]
        if size is not None and size > limit:
            raise ValueError(f"figure {side} {size} px is above {limit} px: show less in one figure")


def _set_value(panel: Panel, name: str, value: Any) -> None:
    control = panel.controls[name]
    try:
        control.value = value
    except Exception as error:
        raise ValueError(f"control {name!r} of {panel!r} cannot be {value!r}: {one_line(error)}") from error
    if control.value != value:
        limits = f" (from {control.min} to {control.max})" if hasattr(control, "min") else ""
        raise ValueError(
            f"control {name!r} of {panel!r} cannot be {value!r}{limits}: it went to {control.value!r}"
        )


def _lay_out(name: str, control: ipywidgets.Widget) -> None:
    """Give a control a width in which its whole label and its value are readable, whatever their length."""
    label = getattr(control, "description", "")
    if not label:
        raise ValueError(f"control {name!r} has no description: give it a label with its unit")
    control.style.description_width = "initial"
    label_px = 8 * len(label)  # 13 px text, about 7 px a character
    if isinstance(control, (ipywidgets.Checkbox, ipywidgets.ToggleButton)):
        if hasattr(control, "indent"):
            control.indent = False
        width = "auto"
    elif isinstance(control, (ipywidgets.RadioButtons, ipywidgets.ToggleButtons)):
        width = "auto"
    elif isinstance(control, (ipywidgets.Dropdown, ipywidgets.Combobox)):
        labels = getattr(control, "_options_labels", None) or getattr(control, "options", ())
        longest = max((len(str(option)) for option in labels), default=10)
        width = f"{label_px + 8 * longest + 60}px"
    elif isinstance(control, ipywidgets.SelectionSlider):
        longest = max((len(str(option)) for option in control._options_labels), default=5)
        width = f"{label_px + 8 * longest + 220}px"
    else:
        width = f"{label_px + 260}px"
    control.layout.width = width
    control.layout.max_width = "100%"


def _same(old: Any, new: Any) -> bool:
    # An array compared with == gives an array; to be safe anything array-like counts as changed unless
    # identical.
    try:
        return bool(old is new or old == new)
    except ValueError:
        return False


def _plain(value: Any, name: str) -> Any:
    """``value`` with tuples as lists and floats rounded; ``ValueError`` where a NumPy array sits in it."""
    if isinstance(value, np.ndarray):
        raise ValueError(
            f"still figure {name!r} holds a NumPy array: pass a list of rounded numbers (array.tolist())"
        )
    if isinstance(value, dict):
        return {key: _plain(item, name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value
