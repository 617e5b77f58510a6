"""The exercise of primer A: one attention head, with a line for each of the usual mistakes."""

from __future__ import annotations

import math

import numpy as np

from kvcourse import ops
from kvcourse.checks import Run, exercise

TOLERANCE = 1e-4  # outputs are of size 1; float32 rounding over 12 products stays below 1e-5

# The first call has as many tokens as the head has numbers, so that a k that was not transposed still
# multiplies and can be named.
SIZES = ((4, 12, 4), (7, 12, 5), (1, 12, 5))  # tokens, width of x, head_dim


def _inputs(T, width, head_dim):
    random = np.random.default_rng(width * T + head_dim)
    x = random.standard_normal((T, width), dtype=np.float32)
    # Scaled so that scores are of size 3: every mistake below then shows far above the tolerance.
    return [x, *(0.5 * random.standard_normal((3, width, head_dim), dtype=np.float32))]


def _head(x, w_q, w_k, w_v, *, scale=None, hide="later", fill=-np.inf, axis=-1, after=False, turned=True):
    """One head, right with the defaults; each keyword is one mistake."""
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    scores = (q @ k.T if turned else q @ k) * (1 / math.sqrt(w_q.shape[1]) if scale is None else scale)
    hidden = {
        "later": ~ops.causal_mask(0, len(x)),
        "earlier": ~ops.causal_mask(0, len(x)).T,
        "nothing": np.zeros((len(x), len(x)), bool),
    }[hide]
    if not after:
        scores[hidden] = fill
    weights = ops.softmax(scores) if axis == -1 else ops.softmax(scores.T).T
    if after:
        weights[hidden] = 0
    return weights, weights @ v


def _mistakes(x, w_q, w_k, w_v):
    """(result of the mistake, its line) pairs."""
    head_dim, width = w_q.shape[1], x.shape[1]
    given = (x, w_q, w_k, w_v)
    weights, _ = _head(*given)
    yield weights, "these are the weights: multiply them by v, the values, to get the head's output"
    yield _head(*given, scale=1.0)[1], f"the scale is missing: divide the scores by √head_dim, √{head_dim}"
    yield (
        _head(*given, scale=1 / head_dim)[1],
        f"you divide the scores by head_dim itself: divide by its square root, √{head_dim}",
    )
    yield (
        _head(*given, scale=1 / math.sqrt(width))[1],
        f"you scale by the width of x, √{width}: a score is a sum of head_dim products, so use √{head_dim}",
    )
    yield (
        _head(*given, hide="nothing")[1],
        "the mask is missing: row 0 looks at later tokens. Set the scores with column > row to -inf",
    )
    yield (
        _head(*given, hide="earlier")[1],
        "the mask is the wrong way round: row r may see columns 0 … r, yours sees r and later",
    )
    yield (
        _head(*given, fill=0.0)[1],
        "masked scores are 0, and e⁰ is 1, not nothing: set them to -inf before the softmax",
    )
    yield (
        _head(*given, after=True)[1],
        "the mask comes after the softmax, so the rows no longer sum to 1: mask the scores first",
    )
    yield (
        _head(*given, axis=0)[1],
        "the softmax runs over the queries (axis 0): each row, the last axis, must sum to 1",
    )
    yield _head(x, w_k, w_q, w_v)[1], "q and k have changed places: rows belong to queries, columns to keys"
    yield weights @ (x @ w_k), "you sum up the keys: the weights mix the values, x @ w_v"
    if len(x) == head_dim:
        yield (
            _head(*given, turned=False)[1],
            "k is not transposed: q @ k.T compares every query with every key",
        )


@exercise(
    "a.one_head",
    right="one head, right for 1, 4 and 7 tokens. GPT-2 runs four of these side by side in each layer.",
    todo="replace `...` by the five steps, then run this cell again",
)
def one_head(run: Run) -> str | None:
    """``one_head(x, w_q, w_k, w_v)``: x (T, width), weights (width, head_dim) → (T, head_dim), causal."""
    for size in SIZES:
        given = _inputs(*size)
        mistake = _look_at(run(*given), given)
        if mistake:
            return mistake
    return None


def _look_at(got, given):
    T, head_dim = len(given[0]), given[1].shape[1]
    got = np.asarray(got)
    if got.shape != (T, head_dim):
        return f"for {T} tokens and head_dim {head_dim} the result has shape {got.shape}, not {(T, head_dim)}"
    if np.isnan(got).any():
        return (
            "there is nan in the result: a row whose scores are all -inf has nothing left. "
            "Row r must still see its own column r"
        )
    if np.allclose(got, _head(*given)[1], atol=TOLERANCE):
        if got.dtype == np.float64:
            return (
                "the numbers are right, but float64: np.sqrt(head_dim) is a float64 number, and NumPy goes "
                "on in float64 from there. Use math.sqrt"
            )
        return None
    for wrong, line in _mistakes(*given):
        if wrong.shape == got.shape and np.allclose(got, wrong, atol=TOLERANCE):
            return line
    largest = np.abs(got - _head(*given)[1]).max()
    return (
        f"for {T} tokens the numbers differ by up to {largest:.2g}: print scores, then weights. "
        "Each row of the weights must sum to 1 and be 0 right of the diagonal"
    )
