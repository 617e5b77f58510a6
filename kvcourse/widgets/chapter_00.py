"""The widgets of chapter 00."""

from __future__ import annotations

from functools import partial

import ipywidgets

from kvcourse.figures import chapter_00 as figures
from kvcourse.widgets.panel import Panel, Still

TEMPERATURES = (0.25, 0.5, 0.7, 1.0, 1.5, 2.0)


def next_token_panel(model, tokenizer, text: str) -> Panel:
    """The model's next-token probabilities along ``text``, with a control for the place and the temperature.

    The model runs once, here; moving a control reads another row of its logits.
    """
    ids = tokenizer.encode_ordinary(text)
    logits = model(ids)  # (T, vocab_size)
    pieces = [tokenizer.decode([token]) for token in range(model.config.vocab_size)]
    return Panel(
        "next token",
        {
            "read": ipywidgets.IntSlider(
                value=min(8, len(ids) - 1), min=1, max=len(ids) - 1, description="tokens read"
            ),
            "temperature": ipywidgets.SelectionSlider(
                value=1.0, options=TEMPERATURES, description="temperature"
            ),
        },
        compute=partial(figures.next_token, logits, pieces, ids),
        figure=figures.next_token_figure,
        describe=figures.next_token_text,
    )


def legend() -> Still:
    """What the course's colors mean, as a still figure."""
    return Still("what the colors mean", figures.legend(), figures.LEGEND_TEXT)
