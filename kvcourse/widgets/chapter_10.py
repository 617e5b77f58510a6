"""The panel of chapter 10: how many sequences share a step."""

from __future__ import annotations

import ipywidgets

from kvcourse.figures import chapter_10 as figures
from kvcourse.widgets.panel import Panel


def users_panel() -> Panel:
    """Batch, context, model and card: the bytes of a step as time, and the tokens a second that follow."""
    return Panel(
        "sequences in a step",
        {
            "batch": ipywidgets.IntSlider(value=1, min=1, max=figures.MOST_USERS, description="sequences"),
            "context": ipywidgets.SelectionSlider(
                value=500,
                options=[100, 200, 500, 1000, 2000, 4000, 8000, 16000, 32000],
                description="tokens in each",
            ),
            "model": ipywidgets.Dropdown(options=list(figures.MODELS), description="model"),
            "device": ipywidgets.Dropdown(options=list(figures.DEVICES), description="card"),
        },
        compute=figures.users,
        figure=figures.users_figure,
        describe=figures.users_text,
    )
