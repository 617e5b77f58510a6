"""The panel of primer D: one pair of a query and a key, turned by their positions."""

from __future__ import annotations

from functools import partial

import ipywidgets
import numpy as np

from kvcourse.figures import chapter_d as figures
from kvcourse.widgets.panel import Panel


def pair_panel(q: np.ndarray, k: np.ndarray, theta: float, longest: int) -> Panel:
    """Pair and positions, for one query and one key of one head.

    q, k     (head_dim,) before any rotation
    longest  positions in the longest text of the model: no position of the panel lies beyond

    Raises ValueError when the two are not vectors of one even length.
    """
    if q.ndim != 1 or q.shape != k.shape or len(q) % 2:
        raise ValueError(f"q has shape {q.shape}, k {k.shape}: give two vectors of one even length")
    most = figures.FARTHEST
    return Panel(
        "a pair and two positions",
        {
            "pair": ipywidgets.IntSlider(value=0, min=0, max=len(q) // 2 - 1, description="pair"),
            "query": ipywidgets.IntSlider(value=8, min=0, max=most, description="query at"),
            "key": ipywidgets.IntSlider(value=4, min=0, max=most, description="key at"),
            "shift": ipywidgets.IntSlider(
                value=0, min=0, max=(longest - 1 - most) // 100 * 100, step=100, description="both further by"
            ),
        },
        compute=partial(figures.pair_view, q, k, theta),
        figure=figures.pair_figure,
        describe=figures.pair_text,
    )
