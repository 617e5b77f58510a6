"""The panel of chapter 07: three ways to grow, step by step."""

from __future__ import annotations

import ipywidgets

from kvcourse.figures import chapter_07 as figures
from kvcourse.widgets.panel import Panel


def growing_panel() -> Panel:
    """Length of the text, way of growing, first capacity: bytes copied, held and reserved."""
    return Panel(
        "three ways to grow",
        {
            "length": ipywidgets.IntSlider(value=300, min=1, max=figures.MOST, description="tokens"),
            "way": ipywidgets.ToggleButtons(options=list(figures.WAYS), description="way"),
            "capacity": ipywidgets.IntSlider(
                value=16, min=1, max=128, description="rows at first (doubling)"
            ),
        },
        compute=figures.growing,
        figure=figures.growing_figure,
        describe=figures.growing_text,
    )
