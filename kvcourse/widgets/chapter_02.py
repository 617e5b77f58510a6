"""The panel of chapter 02: change one token, and see which keys or values change."""

from __future__ import annotations

from functools import partial

import ipywidgets

from kvcourse.figures import chapter_02 as figures
from kvcourse.tap import Tap
from kvcourse.widgets.panel import Panel


class Passes:
    """Keys and values of a text under each mask, and of the text with one token replaced.

    model      the model that makes them
    tokenizer  a tiktoken Encoding
    ids        token ids of the text
    """

    def __init__(self, model, tokenizer, ids):
        self._model, self._tokenizer, self._ids = model, tokenizer, list(ids)
        self.pieces = [tokenizer.decode([token]) for token in ids]
        self._original = {}  # mask -> the tap of the unchanged text

    def change(self, j, replacement, mask, which):
        """`figures.change` of the text against the text with token j replaced."""
        (token,) = self._tokenizer.encode(replacement)
        ids = [*self._ids[:j], token, *self._ids[j + 1 :]]
        if mask not in self._original:
            self._original[mask] = self._pass(self._ids, mask)
        before, after = self._original[mask], self._pass(ids, mask)
        name = {figures.KEYS: "keys", figures.VALUES: "values"}[which]
        pieces = [*self.pieces[:j], replacement, *self.pieces[j + 1 :]]
        return figures.change(getattr(before, name), getattr(after, name), pieces, j, which)

    def _pass(self, ids, mask):
        tap = Tap(self._model.config, mask=figures.mask_of(mask, len(ids)))
        self._model(ids, tap, rows=[-1])
        return tap


def change_panel(model, tokenizer, ids, replacements):
    """Controls: the changed token, what replaces it, the mask, keys or values. The heat map follows.

    replacements  texts of one token each, such as " door". Raises ValueError for one that is not.
    """
    for text in replacements:
        count = len(tokenizer.encode(text))
        if count != 1:
            raise ValueError(f"the replacement {text!r} is {count} tokens: give texts of one token")
    passes = Passes(model, tokenizer, ids)
    return Panel(
        "a changed token",
        {
            "j": ipywidgets.IntSlider(
                value=8, min=0, max=len(passes.pieces) - 1, description="changed token"
            ),
            "replacement": ipywidgets.Dropdown(
                options=[(f"“{text}”", text) for text in replacements], description="becomes"
            ),
            "mask": ipywidgets.Dropdown(options=list(figures.MASKS), description="mask"),
            "which": ipywidgets.ToggleButtons(options=[figures.KEYS, figures.VALUES], description="show"),
        },
        compute=partial(_compute, passes),
        figure=figures.change_figure,
        describe=figures.change_text,
    )


def _compute(passes, j, replacement, mask, which):
    return passes.change(j, replacement, mask, which)
