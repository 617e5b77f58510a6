"""The panel of chapter 12: how many KV heads."""

from __future__ import annotations

from functools import partial

import ipywidgets

from kvcourse.figures import chapter_12 as figures
from kvcourse.widgets.panel import Panel


def sharing_panel(measured: dict) -> Panel:
    """KV heads, pooling, model, users and tokens: who reads what, what a step reads, how many users fit.

    measured  losses and likenesses of the pooled austen-gpt2, as `figures.chapter_12.sharing` takes them
    """
    return Panel(
        "heads that share",
        {
            "kv_heads": ipywidgets.SelectionSlider(value=2, options=figures.KV_HEADS, description="KV heads"),
            "pooling": ipywidgets.Dropdown(options=list(figures.POOLINGS), description="pooled by the"),
            "model": ipywidgets.Dropdown(options=list(figures.MODELS), description="model"),
            "users": ipywidgets.SelectionSlider(value=16, options=[1, 4, 16, 64], description="users"),
            "tokens": ipywidgets.SelectionSlider(
                value=500, options=[100, 500, 1000, 2000, 4000], description="tokens of each"
            ),
        },
        compute=partial(figures.sharing, measured=measured),
        figure=figures.sharing_figure,
        describe=figures.sharing_text,
    )
