"""Typical wrong answers of every exercise, each with words its message must hold."""

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


def _naive(prompt, new):
    return sum(range(prompt, prompt + new))


WRONG = {
    "a.one_head": [
        (_head_without_mask, "the mask is missing"),
        (_head_without_scale, "the scale is missing"),
        (_head_that_softmaxes_columns, "the softmax runs over the queries"),
        (_head_without_transpose, "k is not transposed"),
    ],
    "00.total_tokens": [
        (lambda prompt, new: new, "you count only the new tokens"),
        (lambda prompt, new: prompt * new, "you multiply"),
        (lambda prompt, new: prompt + new - 1, "one off"),
    ],
    "01.positions_processed": [
        (
            lambda prompt, new, cached: prompt + new - 1 if cached else _naive(prompt + 1, new),
            "every step is one position too long",
        ),
        (lambda prompt, new, cached: prompt + new - 1 if cached else prompt * new, "but the text grows"),
        (lambda prompt, new, cached: prompt + new - 1, "that is the count with a cache"),
        (lambda prompt, new, cached: prompt + new if cached else _naive(prompt, new), "one too many"),
        (lambda prompt, new, cached: new if cached else _naive(prompt, new), "you forgot the prompt"),
        (lambda prompt, new, cached: _naive(prompt, new), "that is the count without a cache"),
        (lambda prompt, new, cached: prompt * new if cached else _naive(prompt, new), "it passes once"),
        (lambda prompt, new, cached: prompt + new - 1 if cached else _naive(prompt, new), "no pass is made"),
    ],
}
