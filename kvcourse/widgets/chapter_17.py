"""The panel of chapter 17: which program loads which blocks, and what is moved."""

from __future__ import annotations

import functools

import ipywidgets

from kvcourse.figures import chapter_17 as figures
from kvcourse.widgets.panel import Panel


def loads_panel(q, rows) -> Panel:
    """Splits, lengths, block size and order of the blocks: programs, their loads, and the bytes.

    q     queries of three texts, float32 (3, heads, head_dim)
    rows  for each text (K, V), float32 (KV heads, figures.MOST_TOKENS or more, head_dim)
    """

    def tokens(name, value):
        return ipywidgets.IntSlider(
            value=value, min=1, max=figures.MOST_TOKENS, description=f"{name} (tokens)"
        )

    return Panel(
        "programs and their blocks",
        {
            "splits": ipywidgets.IntSlider(value=1, min=1, max=6, description="splits"),
            "a": tokens("A", 12),
            "b": tokens("B", 40),
            "c": tokens("C", 100),
            "block_size": ipywidgets.Dropdown(
                options=figures.BLOCK_SIZES, value=16, description="block size (slots)"
            ),
            "order": ipywidgets.Dropdown(options=figures.ORDERS, description="blocks"),
        },
        compute=functools.partial(figures.loads, q=q, rows=rows),
        figure=figures.loads_figure,
        describe=figures.loads_text,
    )
