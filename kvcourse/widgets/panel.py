"""Panels (controls + figure + one sentence of text) and still figures, with one look and one way to fail.

A panel is made of pure functions that live in ``kvcourse/figures/<chapter>.py`` and are tested without a
browser: ``compute(**values) -> data``, ``figure(data) -> plotly Figure`` and ``describe(data) -> one
sentence``.
"""

from __future__ import annotations

import html
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
import plotly.graph_objects as go
from IPython.display import display

from kvcourse.figures.template import MAX_HEIGHT, MAX_WIDTH, THEME_CSS
from kvcourse.widgets.views import FigureView, Readout, styled

PLOTLY_MIME = "application/vnd.plotly.v1+json"
SIGNIFICANT_DIGITS = 6  # of the numbers stored with a still figure


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
        --nbval`` compares.
    controls
        Argument name of ``compute`` -> ipywidgets widget with a ``value`` and a ``description``.
    compute
        ``compute(**values) -> data``: pure, under 100 ms unless ``slow``.
    figure
        ``figure(data) -> Figure``.
    describe
        ``describe(data) -> str``: one sentence with the result, not a description of the axes.
    update
        ``update(figure, data)``, run inside ``figure.batch_update()``. Without it the panel calls
        ``figure(data)`` again and sends what changed, which is fast enough for some thousand points.
    slow
        For a ``compute`` above 100 ms: it then runs only when the reader presses the button, and is called as
        ``compute(progress=report, **values)`` where ``report(done, total)`` moves the progress bar.
    first
        The data of the first drawing when it should not be computed (a recorded run, say).
    button
        The label of the button of a ``slow`` panel.
    as_text
        ``(write, read)``: ``write(values) -> str`` puts the controls' values into one line, which stands in a
        text field to be copied; ``read(text) -> values`` is called with what the reader pastes there, and
        raises ``ValueError`` in one line for what it cannot read. Not for a ``slow`` panel.

    Raises ``ValueError`` when a control has no description or a slider's value is not one of its steps. An
    exception of the first drawing is raised (the author sees it); later ones, while the reader moves a
    control, become one line of text and the panel stays alive.
    """

    def __init__(
        self,
        name: str,
        controls: Mapping[str, ipywidgets.Widget],
        compute: Callable[..., Any],
        figure: Callable[[Any], go.Figure],
        describe: Callable[[Any], str],
        update: Callable[[go.Figure, Any], None] | None = None,
        *,
        slow: bool = False,
        first: Any = None,
        button: str = "Run",
        as_text: tuple[Callable[[dict], str], Callable[[str], dict]] | None = None,
    ) -> None:
        self.name = name
        self.controls = dict(controls)
        self.slow = slow
        self._compute, self._draw, self._describe = compute, figure, describe
        self._update = update
        self._held = False
        self._write, self._read = as_text or (None, None)

        for control_name, control in self.controls.items():
            _lay_out(control_name, control)
            _check_step(self, control_name, control)
        self.data = self._run_compute() if first is None else first
        drawing = self._draw(self.data)
        _check_size(drawing)
        self.figure = drawing
        self._view = FigureView(drawing)
        self._readout = Readout(text=self._describe(self.data))

        for control in self.controls.values():
            control.observe(self._moved, names="value")
        row = ipywidgets.HBox(
            [*self.controls.values(), *(self._slow_parts(button) if slow else [])],
            layout=ipywidgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="4px 24px"),
        )
        super().__init__(
            children=[row, self._view, self._readout, *self._text_parts()],
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

    @property
    def setting(self) -> str:
        """The line in the text field of a panel with ``as_text``; ``restore`` reads it."""
        self._needs_text()
        return self._field.value

    def restore(self, text: str) -> str:
        """Set all controls from a line as ``setting`` gives it, and return the sentence under the figure.

        Raises ``ValueError`` in one line for a text that cannot be read, or a value that a control cannot
        take; all controls then stay as they were.
        """
        self._needs_text()
        before = self._held
        self._held = True  # reading may add an option to a control, which is not yet a choice
        try:
            values = self._read(text)
        finally:
            self._held = before
        return self.set(**values)

    def set(self, **values: Any) -> str:
        """Set controls as if the reader had moved them, and return the sentence under the figure.

        A ``slow`` panel is run as well. Raises ``ValueError`` for an unknown control or a value that the
        control cannot take (a slider would silently move to its end); all controls then stay as they were.
        """
        for name in values:
            if name not in self.controls:
                raise ValueError(f"no control {name!r} in {self!r}: it has {', '.join(self.controls)}")
        before = self.values
        # Held, so that two values set together are computed once.
        self._held = True
        try:
            for name, value in values.items():
                _set_value(self, name, value)
        except Exception:
            # Otherwise the controls would say something else than the figure and the text.
            for name, value in before.items():
                self.controls[name].value = value
            raise
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
            if self._update is None:
                self.figure = self._draw(data)
            else:
                with self.figure.batch_update():
                    self._update(self.figure, data)
            self._view.show(self.figure)
        except Exception as error:
            setting = ", ".join(f"{name} = {value}" for name, value in self.values.items())
            self._readout.text = f"This setting does not work ({setting}): {one_line(error)}"
        else:
            self.data = data
            self._readout.text = text
            self._write_field()

    def _text_parts(self) -> list[ipywidgets.Widget]:
        if self._write is None:
            return []
        if self.slow:
            raise ValueError(f"{self!r} is slow: a pasted setting could not show its result at once")
        self._field = ipywidgets.Text(
            description="as text",
            continuous_update=False,  # half a pasted line is not a setting
            style={"description_width": "initial"},
            layout=ipywidgets.Layout(width="auto"),
        )
        self._write_field()
        self._field.observe(self._pasted, names="value")
        return [self._field]

    def _needs_text(self) -> None:
        if self._write is None:
            raise ValueError(f"{self!r} keeps no setting as text: make it with as_text=(write, read)")

    def _write_field(self) -> None:
        if self._write is None:
            return
        before = self._held
        self._held = True
        try:
            self._field.value = self._write(self.values)
        finally:
            self._held = before

    def _pasted(self, change: Any) -> None:
        if self._held:
            return
        try:
            self.restore(change["new"])
        except ValueError as error:
            # The text stays, so that it can be corrected; controls and figure stay as they were.
            self._readout.text = f"This text does not work: {one_line(error)}"

    def _run_compute(self) -> Any:
        if self.slow:
            return self._compute(progress=self._report, **self.values)
        return self._compute(**self.values)

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
        self.name, self.figure, self.text = name, figure, text
        self._content = _rounded(styled(figure), name)

    def __repr__(self) -> str:
        return f"<Still: {self.name}>"

    def bundle(self) -> dict[str, Any]:
        """The figure as plain JSON values, as it is stored in the notebook."""
        return {PLOTLY_MIME: self._content, "text/plain": repr(self)}

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
    if isinstance(value, numbers.Real) and math.isnan(value):  # neither below a limit nor above it
        raise ValueError(f"control {name!r} of {panel!r} cannot be nan: give a number")
    try:
        control.value = value
    except Exception as error:
        raise ValueError(f"control {name!r} of {panel!r} cannot be {value!r}: {one_line(error)}") from error
    if control.value != value:
        limits = f" (from {control.min} to {control.max})" if hasattr(control, "min") else ""
        raise ValueError(
            f"control {name!r} of {panel!r} cannot be {value!r}{limits}: it went to {control.value!r}"
        )
    _check_step(panel, name, control)


def _check_step(panel: Panel, name: str, control: ipywidgets.Widget) -> None:
    # The browser moves such a slider to its next step by itself and reports that back at some later time, so
    # the text would change under the reader's eyes and a test would depend on who is faster.
    if isinstance(control, (ipywidgets.IntSlider, ipywidgets.FloatSlider)):
        steps = (control.value - control.min) / control.step
        if abs(steps - round(steps)) > 1e-6:
            raise ValueError(
                f"control {name!r} of {panel!r} cannot be {control.value}: "
                f"its values are {control.min} + a multiple of {control.step}"
            )


def _lay_out(name: str, control: ipywidgets.Widget) -> None:
    """Give a control a width in which its whole label and its value are readable, whatever their length."""
    label = getattr(control, "description", "")
    if not label:
        raise ValueError(f"control {name!r} has no description: give it a label with its unit")
    control.style.description_width = "initial"
    label_px = 8 * len(label) + 8  # 13 px text, about 7 px a character, and a gap
    if isinstance(control, (ipywidgets.Checkbox, ipywidgets.ToggleButton)):
        if hasattr(control, "indent"):
            control.indent = False
        width = "auto"
    elif isinstance(control, (ipywidgets.RadioButtons, ipywidgets.ToggleButtons)):
        width = "auto"
        if isinstance(control, ipywidgets.ToggleButtons):
            # The label beside the buttons, in line with the other controls, and not above them.
            control.add_class("widget-inline-hbox")
    elif isinstance(control, (ipywidgets.Dropdown, ipywidgets.Combobox)):
        labels = getattr(control, "_options_labels", None) or getattr(control, "options", ())
        longest = max((len(str(option)) for option in labels), default=10)
        width = f"{label_px + 8 * longest + 60}px"
    elif isinstance(control, (ipywidgets.IntText, ipywidgets.BoundedIntText)):
        width = f"{label_px + 130}px"  # nine digits and the arrows
    elif isinstance(control, ipywidgets.SelectionSlider):
        longest = max((len(str(option)) for option in control._options_labels), default=5)
        width = f"{label_px + 8 * longest + 220}px"
    else:
        width = f"{label_px + 260}px"
    control.layout.width = width
    control.layout.max_width = "100%"


def _rounded(value: Any, name: str) -> Any:
    """JSON values with floats rounded; ``ValueError`` where plotly packed a NumPy array ("bdata")."""
    if isinstance(value, dict):
        if "bdata" in value:
            raise ValueError(f"still figure {name!r} holds a NumPy array: pass a list of rounded numbers")
        return {key: _rounded(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item, name) for item in value]
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value
