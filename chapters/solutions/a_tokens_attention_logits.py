"""Solutions of primer A."""

import math

import numpy as np


def one_head(x, w_q, w_k, w_v):
    """x (T, width), each weight (width, head_dim) → (T, head_dim), causal."""
    q, k, v = x @ w_q, x @ w_k, x @ w_v  # each (T, head_dim)
    scores = q @ k.T / math.sqrt(w_q.shape[1])  # (T, T)
    scores[~np.tril(np.ones(scores.shape, dtype=bool))] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)  # only so that exp cannot overflow
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True)  # each row sums to 1
    return weights @ v  # (T, head_dim)
