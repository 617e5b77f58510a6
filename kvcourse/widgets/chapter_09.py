"""The panel of chapter 09: prefill and decode on a roofline."""

from __future__ import annotations

import ipywidgets

from kvcourse.figures import chapter_09 as figures
from kvcourse.widgets.panel import Panel


def roofline_panel() -> Panel:
    """Prompt, cached part, batch, model, device: passes on the roof, and what their time goes to."""
    longest, step = figures.LONGEST, figures.STEP
    return Panel(
        "passes on a roofline",
        {
            "prompt": ipywidgets.IntSlider(
                value=1000, min=step, max=longest, step=step, description="prompt (tokens)"
            ),
            "cached": ipywidgets.IntSlider(
                value=0, min=0, max=longest, step=step, description="of them cached (tokens)"
            ),
            "batch": ipywidgets.IntSlider(
                value=1, min=1, max=figures.LARGEST_BATCH, description="requests that decode together"
            ),
            "model": ipywidgets.Dropdown(options=list(figures.MODELS), description="model"),
            "device": ipywidgets.Dropdown(options=list(figures.DEVICES), description="device"),
        },
        compute=figures.passes,
        figure=figures.passes_figure,
        describe=figures.passes_text,
    )
