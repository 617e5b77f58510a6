"""Typical wrong answers of chapter 12."""

import math

import numpy as np


def _attend(q, keys, values, start, scale=None, visible=None):
    """Attention of heads that have keys of their own, any leading axes."""
    T, S = q.shape[-2], keys.shape[-2]
    scale = math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ keys.swapaxes(-1, -2) / scale
    if visible is None:
        visible = np.arange(S) <= (start + np.arange(T))[:, None]
    scores = np.where(visible, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values


def _grouped(q, k):
    return q.reshape(len(k), -1, *q.shape[1:])


def _repeated(q, k, v, start):
    return _attend(q, *(np.repeat(rows, len(q) // len(k), axis=0) for rows in (k, v)), start)


def _broadcast(q, k, v, start):
    """Copies K alone, by a reshape that looks as if it cost nothing."""
    group = len(q) // len(k)
    wide = np.broadcast_to(k[:, None], (len(k), group, *k.shape[1:])).reshape(len(q), *k.shape[1:])
    out = _attend(_grouped(q, k), wide.reshape(len(k), group, *k.shape[1:]), v[:, None], start)
    return out.reshape(q.shape)


def _tiled(q, k, v, start):
    return _attend(q, *(np.tile(rows, (len(q) // len(k), 1, 1)) for rows in (k, v)), start)


def _other_order(q, k, v, start):
    out = _attend(_grouped(q, k), k[:, None], v[:, None], start)
    return out.swapaxes(0, 1).reshape(q.shape)


def _still_grouped(q, k, v, start):
    return _attend(_grouped(q, k), k[:, None], v[:, None], start)


def _without_mask(q, k, v, start):
    visible = np.ones((q.shape[1], k.shape[1]), bool)
    return _attend(_grouped(q, k), k[:, None], v[:, None], start, visible=visible).reshape(q.shape)


def _from_zero(q, k, v, start):
    return _attend(_grouped(q, k), k[:, None], v[:, None], 0).reshape(q.shape)


def _unscaled(q, k, v, start):
    return _attend(_grouped(q, k), k[:, None], v[:, None], start, scale=1.0).reshape(q.shape)


def _in_float64(q, k, v, start):
    scale = np.sqrt(np.float64(q.shape[-1]))
    return _attend(_grouped(q, k), k[:, None], v[:, None], start, scale=scale).reshape(q.shape)


def _with_nan(q, k, v, start):
    T, S = q.shape[1], k.shape[1]
    visible = np.arange(S) <= (start + np.arange(T))[:, None]
    with np.errstate(invalid="ignore"):
        hidden = (1 - visible) * np.float32(-np.inf)
    scores = _grouped(q, k) @ k.swapaxes(1, 2)[:, None] / math.sqrt(q.shape[-1]) + hidden
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = weights / weights.sum(axis=-1, keepdims=True) @ v[:, None]
    return out.reshape(q.shape).astype(np.float32)


def _averaged(q, k, v, start):
    group = len(q) // len(k)
    return (_attend(_grouped(q, k), k[:, None], v[:, None], start) / group).reshape(q.shape)


def _one_head(q, k, v, start):
    """Every query head reads KV head 0."""
    return _attend(q, k[:1], v[:1], start)


WRONG = {
    "12.grouped_attention": [
        (_repeated, "K or V is copied for every query head"),
        (_broadcast, "K or V is copied for every query head"),
        (_tiled, "reads KV head h mod 2, as np.tile gives"),
        (_other_order, "in another order than they came in"),
        (_still_grouped, "put the groups together again"),
        (_without_mask, "the causal mask is missing"),
        (_from_zero, "`start` is not used"),
        (_unscaled, "not divided by √head_dim"),
        (_in_float64, "the output is float64"),
        (_with_nan, "the output holds NaN"),
        (_averaged, "they are not averaged"),
        (_one_head, "wrong numbers in query head"),
        (lambda q, k, v, start: (q, k), "return one array"),
    ]
}
