"""The panel of chapter 14: bits, layout, group and residual, on real keys and values."""

from __future__ import annotations

from functools import partial

import ipywidgets

from kvcourse.figures import chapter_14 as figures
from kvcourse.widgets.panel import Panel


def rounding_panel(keys, values, results) -> Panel:
    """A matrix before and after, with bytes a token and the recorded perplexity.

    keys, values  float32 (layers, KV heads, T, head_dim) of one text, keys rotated
    results       of a recorded run of `kvcourse bench quality`
    """
    return Panel(
        "a matrix before and after",
        {
            "bits": ipywidgets.SelectionSlider(value=2, options=list(figures.BITS), description="bits"),
            "layout": ipywidgets.Dropdown(
                options=list(figures.LAYOUTS), value="both per token", description="layout"
            ),
            "group": ipywidgets.SelectionSlider(
                options=list(figures.GROUPS), description="numbers in a group"
            ),
            "residual": ipywidgets.SelectionSlider(
                options=list(figures.RESIDUALS), description="residual (tokens)"
            ),
            "layer": ipywidgets.IntSlider(value=10, min=0, max=len(keys) - 1, description="layer shown"),
            "matrix": ipywidgets.Dropdown(options=["keys", "values"], description="shown"),
        },
        compute=partial(figures.rounding, {"keys": keys, "values": values}, results),
        figure=figures.rounding_figure,
        describe=figures.rounding_text,
    )
