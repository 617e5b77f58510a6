"""The main panel of chapter 05: both passes' logits, step by step."""

from __future__ import annotations

from functools import partial

import ipywidgets

from kvcourse.figures import chapter_05 as figures
from kvcourse.widgets.panel import Panel


def compare_panel(uncached, cached, words) -> Panel:
    """The best tokens of a cached and an uncached pass at a chosen step, and the margins of all steps.

    ``uncached`` is logits float32 (steps, vocab_size), ``cached`` {format: logits of the same shape} for
    ``figures.FORMATS``, ``words(id)`` the text of a token.
    """
    return Panel(
        "two passes",
        {
            "step": ipywidgets.IntSlider(value=10, min=0, max=len(uncached) - 1, description="step"),
            "rows": ipywidgets.ToggleButtons(options=figures.FORMATS, description="cached rows"),
            "close": ipywidgets.Checkbox(value=False, description="two best only"),
        },
        compute=partial(figures.compare, uncached=uncached, cached=cached, words=words),
        figure=figures.compare_figure,
        describe=figures.compare_text,
    )
