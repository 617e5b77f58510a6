"""The widgets of primer A."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import ipywidgets
import numpy as np

from kvcourse.figures import chapter_a as figures
from kvcourse.widgets.panel import Panel, Still


def triangle(pieces: Sequence[str]) -> Still:
    """The causal mask of these tokens as a still figure."""
    return Still("the causal triangle", figures.triangle_figure(pieces), figures.triangle_text(pieces))


def attention_panel(weights: np.ndarray, pieces: Sequence[str]) -> Panel:
    """What each head of each layer looks at, row by row.

    weights  attention weights of one text, float32 (num_layers, num_heads, T, T)
    pieces   (T,) the text of its tokens, T at least 2

    Raises ValueError when the two do not belong together.
    """
    if weights.ndim != 4 or weights.shape[2:] != (len(pieces), len(pieces)):
        raise ValueError(
            f"weights have shape {weights.shape}: for {len(pieces)} tokens give "
            f"(layers, heads, {len(pieces)}, {len(pieces)})"
        )
    layers, heads, T, _ = weights.shape
    return Panel(
        "what a head looks at",
        {
            "layer": ipywidgets.IntSlider(value=0, min=0, max=layers - 1, description="layer"),
            "head": ipywidgets.IntSlider(value=0, min=0, max=heads - 1, description="head"),
            "query": ipywidgets.IntSlider(value=T // 2, min=0, max=T - 1, description="query position"),
        },
        compute=partial(figures.attention, weights, pieces),
        figure=figures.attention_figure,
        describe=figures.attention_text,
    )
