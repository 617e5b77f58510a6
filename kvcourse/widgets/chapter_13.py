"""The panel of chapter 13: a latent, and what a head makes of it."""

from __future__ import annotations

from functools import partial

import ipywidgets

from kvcourse.figures import chapter_13 as figures
from kvcourse.widgets.panel import Panel


def rank_panel(bases, rows, perplexities, full) -> Panel:
    """Rank, layer and head of austen-gpt2: arguments as in `figures.rank_state`."""
    state = figures.rank_state(bases, rows, perplexities, full)
    return Panel(
        "a latent and what a head makes of it",
        {
            "rank": ipywidgets.SelectionSlider(
                value=128, options=figures.RANKS, description="rank (numbers)"
            ),
            "layer": ipywidgets.IntSlider(value=0, min=0, max=figures.LAYERS - 1, description="layer"),
            "head": ipywidgets.IntSlider(value=0, min=0, max=figures.HEADS - 1, description="head"),
            "show": ipywidgets.ToggleButtons(options=list(figures.KINDS), description="show"),
        },
        compute=partial(figures.rank_view, state),
        figure=figures.rank_figure,
        describe=figures.rank_text,
        update=figures.rank_update,
    )
