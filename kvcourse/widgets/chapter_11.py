"""The panel of chapter 11: what the time of one batched decode step goes to."""

from __future__ import annotations

from functools import partial

import ipywidgets

from kvcourse.figures import chapter_11 as figures
from kvcourse.widgets.panel import Panel


def step_panel(measured=()) -> Panel:
    """Batch, context, model, device, format, launches: weights, caches and waiting, beside measured steps.

    measured  lines of `figures.measured_line`, shown beside the blog's
    """
    dropdown = ipywidgets.Dropdown
    return Panel(
        "where a decode step's time goes",
        {
            "batch": ipywidgets.IntSlider(value=8, min=1, max=figures.MOST, description="sequences"),
            "context": ipywidgets.SelectionSlider(
                options=figures.CONTEXTS, value=512, description="tokens in the cache of each"
            ),
            "model": dropdown(options=list(figures.MODELS), description="model"),
            "device": dropdown(options=list(figures.DEVICES), value="H100", description="device"),
            "dtype": dropdown(options=figures.FORMATS, description="format"),
            "way": dropdown(options=list(figures.WAYS), description="launches"),
            "cost": ipywidgets.IntSlider(value=16, min=1, max=30, description="a launch takes (µs)"),
            "share": ipywidgets.IntSlider(
                value=100, min=10, max=100, description="of the bandwidth is reached (%)"
            ),
        },
        compute=partial(figures.step, measured=(figures.blog_line(), *measured)),
        figure=figures.step_figure,
        describe=figures.step_text,
    )
