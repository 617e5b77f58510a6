"""Typical wrong answers of primer A."""

import numpy as np


def _head_without_mask(x, w_q, w_k, w_v):
    weights = np.exp(x @ w_q @ (x @ w_k).T / w_q.shape[1] ** 0.5)
    return weights / weights.sum(axis=-1, keepdims=True) @ (x @ w_v)


def _head_without_scale(x, w_q, w_k, w_v):
    weights = np.tril(np.exp(x @ w_q @ (x @ w_k).T))
    return weights / weights.sum(axis=-1, keepdims=True) @ (x @ w_v)


def _head_that_softmaxes_columns(x, w_q, w_k, w_v):
    weights = np.tril(np.exp(x @ w_q @ (x @ w_k).T / w_q.shape[1] ** 0.5))
    return weights / weights.sum(axis=0) @ (x @ w_v)


def _head_without_transpose(x, w_q, w_k, w_v):
    weights = np.tril(np.exp(x @ w_q @ (x @ w_k) / w_q.shape[1] ** 0.5))
    return weights / weights.sum(axis=-1, keepdims=True) @ (x @ w_v)


WRONG = {
    "a.one_head": [
        (_head_without_mask, "the mask is missing"),
        (_head_without_scale, "the scale is missing"),
        (_head_that_softmaxes_columns, "the softmax runs over the queries"),
        (_head_without_transpose, "k is not transposed"),
    ],
}
