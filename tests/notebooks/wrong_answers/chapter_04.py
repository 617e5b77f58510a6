"""Typical wrong answers of chapter 04."""

import math

import numpy as np

from kvcourse.ops import causal_mask, softmax


def _attends(mask=causal_mask, scale=math.sqrt, axis=-1, given=lambda k, v, start: (k, v), fill=-np.inf):
    """attend_from with one part exchanged."""

    def attend_from(q, k, v, start):
        seen = mask(start, q.shape[1])
        k, v = given(k, v, start)
        scores = q @ k.transpose(0, 2, 1) / scale(q.shape[-1])
        scores = np.where(seen, scores, fill)
        with np.errstate(invalid="ignore"):
            weights = np.moveaxis(softmax(np.moveaxis(scores, axis, -1)), -1, axis)
        return weights @ v

    return attend_from


def _additive(q, k, v, start):
    mask = np.where(causal_mask(start, q.shape[1]), 0, -np.inf)  # float64
    return softmax(q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]) + mask) @ v


def _shifted(by):
    """The triangle that begins `by` columns further right than the top left."""
    return lambda start, T: np.tri(T, start + T, by(start), dtype=bool)


def _embeds(first, stop=None):
    """embed with another slice of wpe."""

    def embed(ids, params, cache):
        begin = first(cache)
        end = begin + len(ids) if stop is None else stop(cache, ids)
        return params["wte.weight"][ids] + params["wpe.weight"][begin:end]

    return embed


def _start(cache):
    return cache[0][0].shape[0]


WRONG = {
    "04.attend_from": [
        (_attends(mask=lambda start, T: np.ones((T, start + T), bool)), "the mask is missing"),
        (_attends(mask=_shifted(lambda start: 0)), "the triangle from the top left"),
        (_attends(mask=_shifted(lambda start: start + 1)), "one column too wide"),
        (_attends(mask=_shifted(lambda start: start - 1)), "one column too narrow"),
        (_attends(mask=lambda start, T: causal_mask(0, T)), "your mask is (4, 4), and the scores of a head"),
        (_attends(mask=lambda start, T: causal_mask(0, start + T)), "your mask is (7, 7), and the scores"),
        (_attends(scale=lambda head_dim: 1.0), "the scale is missing"),
        (_attends(scale=float), "you divide by head_dim itself"),
        (_additive, "such as np.sqrt(head_dim) or np.where(mask, 0, -np.inf); use math.sqrt and np.float32"),
        (lambda *given: _attends()(*given).tolist(), "return the array, not a list"),
        (_attends(fill=-10), "the numbers differ by up to 0.00"),
        (_attends(axis=1), "the softmax runs over the queries"),
        (_attends(axis=0), "the softmax runs over the heads"),
        (
            _attends(mask=lambda start, T: causal_mask(0, T), given=lambda k, v, n: (k[:, n:], v[:, n:])),
            "only the new keys are used",
        ),
        (lambda q, k, v, start: softmax(q @ k.transpose(0, 2, 1)), "expected (2, 4, 5)"),
    ],
    "04.embed": [
        (_embeds(lambda cache: 0), "the positions are still 0"),
        (_embeds(lambda cache: _start(cache) + 1), "one too far"),
        (_embeds(lambda cache: _start(cache) - 1), "one too few"),
        (_embeds(lambda cache: cache[0][0].shape[1]), "that is the number of heads"),
        (_embeds(lambda cache: cache[0][0].shape[2]), "that is head_dim"),
        (_embeds(lambda cache: len(cache[0])), "that is len(cache[0]), K and V"),
        (_embeds(len), "that is len(cache), the number of layers"),
        (_embeds(lambda cache: 12), "for the ids plus row 7 of `wpe`"),
        (_embeds(_start, lambda cache, ids: _start(cache) + len(ids) + 1), "2 rows for one token"),
        (_embeds(_start, lambda cache, ids: None), "17 rows for one token"),
        (_embeds(_start, lambda cache, ids: len(ids)), "your slice of `wpe` is empty"),
        (
            lambda ids, params, cache: params["wte.weight"][ids] + params["wpe.weight"][_start(cache)],
            "all new tokens get position start",
        ),
        (
            lambda ids, params, cache: params["wpe.weight"][_start(cache) : _start(cache) + len(ids)],
            "the rows of `wte` are missing",
        ),
    ],
}
