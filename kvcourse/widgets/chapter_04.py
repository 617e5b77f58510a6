"""The widget of chapter 04: a text read and written pass by pass, on a real model's tensors."""

from __future__ import annotations

import math
from functools import partial

import ipywidgets
import numpy as np

from kvcourse import ops
from kvcourse.caches import ConcatenatingCache
from kvcourse.figures import chapter_04 as figures
from kvcourse.tap import Tap
from kvcourse.widgets.panel import Panel


def record(model, tokenizer, ids, chunk, passes):
    """`passes` passes through a new cache: the prompt in chunks, then one chosen token each.

    ids     the prompt's token ids
    chunk   tokens of the prompt in a pass, at least 1
    passes  how many in all, at least those that the prompt needs

    Each token is the likeliest one. Returns a list of `figures.Pass`. Raises ValueError when
    the prompt does not fit in that many passes.
    """
    prefill = math.ceil(len(ids) / chunk)
    if passes < prefill:
        raise ValueError(f"{passes} passes are too few: {len(ids)} tokens, {chunk} a pass, take {prefill}")
    cache = ConcatenatingCache.for_model(model)
    text, written, taken, read = list(ids), [], [], 0
    for number in range(passes):
        given = text[read : min(read + chunk, len(ids))] if number < prefill else text[read:]
        tap = Tap(model.config, cache=cache)
        logits = model(given, tap, rows=[-1])[0]
        read += len(given)
        written += [number] * len(given)
        chosen = None
        if read == len(text):
            text.append(int(np.argmax(logits)))
            chosen = tokenizer.decode(text[-1:])
        pieces = tuple(tokenizer.decode([token]) for token in text[:read])
        kind = "prefill" if number < prefill else "decode"
        taken.append(_pass(kind, tap.queries, cache, pieces, chosen, tuple(written)))
    return taken


def _pass(kind, queries, cache, pieces, chosen, written):
    layers, _, T, head_dim = queries.shape
    rows = [cache.keys_values(layer) for layer in range(layers)]
    keys, values = (np.stack(part) for part in zip(*rows, strict=True))  # (layers, KV heads, start + T, d)
    start = keys.shape[2] - T
    scores = queries @ keys.swapaxes(2, 3) * (1.0 / math.sqrt(head_dim))  # (layers, heads, T, start + T)
    weights = ops.softmax(np.where(ops.causal_mask(start, T), scores, np.float32(-np.inf)))
    return figures.Pass(
        kind, start, pieces, chosen, written, weights,
        np.linalg.norm(keys, axis=-1), np.linalg.norm(values, axis=-1), head_dim,
    )  # fmt: skip


def steps_panel(model, tokenizer, ids, passes=14, chunks=(1, 2, 3, 6)) -> Panel:
    """Step by step through prefill and decode: the cache's rows, what is new, what is read, what is masked.

    model      a model with as many KV heads as heads, such as GPT-2
    ids        the prompt's token ids
    passes     steps for each chunk size
    chunks     sizes to choose from; the panel starts with the last
    """
    recorded = {chunk: record(model, tokenizer, ids, chunk, passes) for chunk in chunks}
    layers, heads = model.config.num_layers, model.config.num_heads
    return Panel(
        "step by step",
        {
            "step": ipywidgets.IntSlider(value=0, min=0, max=passes - 1, description="step"),
            "chunk": ipywidgets.SelectionSlider(
                value=chunks[-1], options=list(chunks), description="prompt tokens a step"
            ),
            "layer": ipywidgets.IntSlider(value=2, min=0, max=layers - 1, description="layer"),
            "head": ipywidgets.IntSlider(value=1, min=0, max=heads - 1, description="head"),
        },
        compute=partial(figures.steps, recorded),
        figure=figures.steps_figure,
        describe=figures.steps_text,
    )
