"""Solutions of chapter 04."""

import math

import numpy as np

from kvcourse.ops import causal_mask, softmax


def attend_from(q, k, v, start):
    """k and v hold `start` cached rows and the new ones after them; row r of q is position start + r."""
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])  # (heads, T, start + T)
    mask = causal_mask(start, q.shape[1])  # (T, start + T)
    return softmax(np.where(mask, scores, -np.inf)) @ v  # (heads, T, head_dim)


def embed(ids, params, cache):
    """Here a layer's K is (tokens, heads, head_dim), so the cached tokens are its shape[0]."""
    start = cache[0][0].shape[0]
    return params["wte.weight"][ids] + params["wpe.weight"][start : start + len(ids)]  # (T, d)
