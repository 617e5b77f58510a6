"""Solutions of primer D."""

import numpy as np


def rotate(x, positions, theta):
    """x (heads, T, head_dim), each row turned by its position; positions int (T,). Same shape and dtype."""
    head_dim = x.shape[-1]
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)  # (head_dim / 2,), float64
    angles = np.asarray(positions)[:, None] * frequencies  # (T, head_dim / 2)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = np.split(x, 2, axis=-1)  # each (heads, T, head_dim / 2)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def for_halves(rows, head_dim):
    """Break it, repaired at the weights: rows (heads · head_dim, width) of Q or K as a GGUF stores them,
    for neighbors, back into the order for halves."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])  # head, pair, first or second, width
    return pairs.swapaxes(1, 2).reshape(rows.shape)
