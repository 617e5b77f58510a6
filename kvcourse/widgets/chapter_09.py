"""The panel of chapter 09: prefill and decode on a roofline."""

from __future__ import annotations

import ipywidgets

from kvcourse.figures import chapter_09 as figures
from kvcourse.widgets.panel import Panel


def roofline_panel() -> Panel:
    """Prompt, cached part, batch, model, device: passes on the roof, and what their time goes to."""
    panel = Panel(
        "passes on a roofline",
        {
            "prompt": _slider(figures.PROMPTS, 1000, "prompt (tokens)"),
            "cached": _slider(figures.CACHED, 0, "of them cached (tokens)"),
            "batch": _slider(figures.BATCHES, 1, "requests that decode together"),
            "model": ipywidgets.Dropdown(options=list(figures.MODELS), description="model"),
            "device": ipywidgets.Dropdown(options=list(figures.DEVICES), description="device"),
        },
        compute=figures.passes,
        figure=figures.passes_figure,
        describe=figures.passes_text,
    )
    # One label width and a row each, so that they are of one length; the two lists share the last row.
    for name in ("prompt", "cached", "batch"):
        panel.controls[name].style.description_width = "200px"
        panel.controls[name].layout.width = "100%"
    return panel


def _slider(numbers, value, description):
    options = [(f"{number:,}", number) for number in numbers]
    return ipywidgets.SelectionSlider(options=options, value=value, description=description)
