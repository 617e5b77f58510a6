"""The widget of primer B."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import ipywidgets

from kvcourse.figures import chapter_b as figures
from kvcourse.widgets.panel import Panel


def bits_panel(numbers: Mapping[str, float]) -> Panel:
    """A number in float32, bfloat16 and float16: its bits, its neighbors, its rounding error.

    numbers  the choices: what the reader sees → its value, a finite number

    Raises ValueError for no numbers.
    """
    if not numbers:
        raise ValueError("no numbers: give at least one, for example {'a tenth': 0.1}")
    return Panel(
        "a number and its bits",
        {
            "choice": ipywidgets.Dropdown(options=list(numbers), description="number"),
            "power": ipywidgets.IntSlider(value=0, min=-32, max=32, description="times 2 to the power"),
            "format": ipywidgets.ToggleButtons(
                options=list(figures.FORMATS), value="bfloat16", description="format"
            ),
        },
        compute=partial(figures.bits, dict(numbers)),
        figure=figures.bits_figure,
        describe=figures.bits_text,
    )
