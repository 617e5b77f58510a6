"""The panel of chapter 15: sinks and window over real attention and a recorded text."""

from __future__ import annotations

import functools

import ipywidgets

from kvcourse.figures import chapter_15 as figures
from kvcourse.widgets.panel import Panel


def forgetting_panel(weights, recorded) -> Panel:
    """Sinks and rows of a cache: which attention it evicts, and the perplexity along a text.

    weights   attention of a pass with all keys, float32 (layers, 512, 512), the mean over a layer's heads
    recorded  {"full" or (rows, sinks): ln p} of `figures.chapter_15.windows`
    """
    return Panel(
        "sinks and window",
        {
            "sinks": ipywidgets.SelectionSlider(value=1, options=figures.SINKS, description="first tokens"),
            "rows": ipywidgets.SelectionSlider(value=128, options=figures.ROWS, description="rows in all"),
            "layer": ipywidgets.IntSlider(value=20, min=0, max=len(weights) - 1, description="layer"),
        },
        compute=functools.partial(figures.forgetting, weights=weights, recorded=recorded),
        figure=figures.forgetting_figure,
        describe=figures.forgetting_text,
    )
