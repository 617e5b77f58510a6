"""The exercises of chapter 04: attention over cached rows, and positions that go on from `start`."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from kvcourse import ops
from kvcourse.checks import Run, exercise

# Outputs are weighted means of numbers of size 1; float32 rounding over 7 rows stays below 1e-6.
TOLERANCE = 1e-4

# start, T: a chunk after cached rows, a prefill, a decode step. Heads and head_dim differ from all of them.
PAIRS = ((3, 4), (0, 4), (6, 1))
HEADS, HEAD_DIM = 2, 5
SCALE = 1 / math.sqrt(HEAD_DIM)


# --- attention with start ----------------------------------------------------------------


def _qkv(start, T):
    random = np.random.default_rng(10 * start + T)
    # Scores of size 3, so that every mistake below shows far above the tolerance.
    q = 2 * random.standard_normal((HEADS, T, HEAD_DIM), dtype=np.float32)
    k, v = random.standard_normal((2, HEADS, start + T, HEAD_DIM), dtype=np.float32)
    return q, k, v


def _attend(q, k, v, mask, *, scale=SCALE, axis=-1, fill=-np.inf, after=False):
    """(weights, output), right with `causal_mask(start, T)` and the defaults; each keyword is one mistake."""
    scores = q @ k.transpose(0, 2, 1) * scale
    if not after:
        scores = np.where(mask, scores, np.float32(fill))
    with np.errstate(invalid="ignore"):  # a softmax over the wrong axis may meet a row of -inf
        weights = np.moveaxis(ops.softmax(np.moveaxis(scores, axis, -1)), -1, axis)
    if after:
        weights = np.where(mask, weights, np.float32(0))
    return weights, weights @ v


def _attend_mistakes(q, k, v, start):
    """(result of the mistake, its line) pairs."""
    T, tokens = q.shape[1], k.shape[1]
    mask = ops.causal_mask(start, T)
    weights, _ = _attend(q, k, v, mask)
    yield weights, "these are the weights: multiply them by v to get the rows of the result"
    yield (
        _attend(q, k, v, np.ones_like(mask))[1],
        f"the mask is missing: with start {start} and T {T}, row 0 belongs to position {start} and must not "
        f"see keys {start + 1} … {tokens - 1}",
    )
    yield (
        _attend(q, k, v, np.tri(T, tokens, dtype=bool))[1],
        f"your mask is the triangle from the top left: row 0 sees key 0 alone. It belongs to position "
        f"{start} and sees keys 0 … {start}; use causal_mask(start, T)",
    )
    yield (
        _attend(q, k, v, np.tri(T, tokens, start + 1, dtype=bool))[1],
        "your mask is one column too wide: row r belongs to position start + r and sees keys 0 … start + r",
    )
    if start:
        yield (
            _attend(q, k, v, np.tri(T, tokens, start - 1, dtype=bool))[1],
            "your mask is one column too narrow: row r belongs to position start + r and sees that key too",
        )
        yield (
            _attend(q, k[:, start:], v[:, start:], ops.causal_mask(0, T))[1],
            "only the new keys are used: the first `start` rows of k and v are cached, read them too",
        )
    yield (
        _attend(q, k, v, mask, scale=1.0)[1],
        f"the scale is missing: divide the scores by √head_dim, √{HEAD_DIM}",
    )
    yield (
        _attend(q, k, v, mask, scale=1 / HEAD_DIM)[1],
        f"you divide by head_dim itself: divide the scores by its square root, √{HEAD_DIM}",
    )
    yield (
        _attend(q, k, v, mask, scale=1 / math.sqrt(tokens))[1],
        f"you scale by the number of keys, √{tokens}: a score is a sum of head_dim products, use √{HEAD_DIM}",
    )
    for axis, over in ((1, "the queries"), (0, "the heads")):
        yield (
            _attend(q, k, v, mask, axis=axis)[1],
            f"the softmax runs over {over} (axis {axis}): the weights of one query, the last axis, must sum "
            f"to 1",
        )
    yield (
        _attend(q, k, v, mask, fill=0)[1],
        "masked scores are 0, and e⁰ is 1, not nothing: set them to -inf before the softmax",
    )
    yield (
        _attend(q, k, v, mask, after=True)[1],
        "the mask comes after the softmax, so the rows no longer sum to 1: mask the scores first",
    )


@exercise(
    "04.attend_from",
    right="a prefill, a chunk after cached rows and a decode step all come out of the same three lines.",
    todo="replace `...` by your lines, then run this cell again",
)
def attend_from(run: Run) -> str | None:
    """``attend_from(q, k, v, start)``: q (heads, T, head_dim), k and v (heads, start + T, head_dim)."""
    for start, T in PAIRS:
        given = _qkv(start, T)
        run.explain = partial(_explain_attend, start, T)
        got = run(*given, start)
        mistake = _look_at_attend(np.asarray(got), given, start)
        if mistake:
            return mistake
        if isinstance(got, (list, tuple)):
            return f"the numbers are right: return the array, not a {type(got).__name__}"
        if np.asarray(got).dtype == np.float64:
            return (
                "the numbers are right, but float64: a float64 scalar or array came in, such as "
                "np.sqrt(head_dim) or np.where(mask, 0, -np.inf); use math.sqrt and np.float32(-np.inf)"
            )
    return None


def _explain_attend(start, T, error):
    # A mask of another shape than the scores stops in NumPy, with all shapes in one message. Nothing else
    # here has two axes of T or of start + T.
    tokens, said = start + T, str(error)
    for side in (T, tokens):
        if isinstance(error, ValueError) and "broadcast" in said and f"({side},{side})" in said:
            return (
                f"your mask is ({side}, {side}), and the scores of a head are ({T}, {tokens}): T rows and "
                f"start + T columns, as causal_mask(start, T) has them"
            )
    return None


def _look_at_attend(got, given, start):
    q, k, v = given
    T = q.shape[1]
    right = _attend(q, k, v, ops.causal_mask(start, T))[1]
    # Weights have another shape than the result, and get their own line before the shape is complained of.
    for wrong, line in _attend_mistakes(q, k, v, start):
        told_apart = wrong.shape != right.shape or not np.allclose(wrong, right, atol=TOLERANCE)
        if told_apart and wrong.shape == got.shape and _close(got, wrong):
            return line
    if got.shape != right.shape:
        return f"start {start}, T {T}: the result is {got.shape}, expected {right.shape}, one row a query"
    if np.isnan(got).any():
        return (
            f"start {start}, T {T}: there is nan in the result. A row whose scores are all -inf has nothing "
            f"left; row r must see keys 0 … start + r"
        )
    if not np.allclose(got, right, atol=TOLERANCE):
        largest = np.abs(got - right).max()
        return (
            f"start {start}, T {T}: the numbers differ by up to {largest:.2g}. Print the mask, then the "
            f"sums of the weights, which must all be 1"
        )
    return None


def _close(got, wrong):
    return np.allclose(got, wrong, atol=TOLERANCE, equal_nan=True)


# --- positions that go on ----------------------------------------------------------------

LAYERS, KV_HEADS, ROW = 5, 3, 4  # of the exercise's cache: these, 2 and `start` all differ
WIDTH, POSITIONS, VOCAB = 6, 24, 11


def _embedding_params():
    # Every number once: a row that was taken from the wrong place cannot be right by chance.
    wte = np.arange(VOCAB * WIDTH, dtype=np.float32).reshape(VOCAB, WIDTH)
    wpe = 1000 + 100 * np.arange(POSITIONS * WIDTH, dtype=np.float32).reshape(POSITIONS, WIDTH)
    return {"wte.weight": wte, "wpe.weight": wpe}


def _cache_of(start):
    rows = np.zeros((start, KV_HEADS, ROW), dtype=np.float32)
    return [(rows, rows)] * LAYERS


@exercise(
    "04.embed",
    right="a decode step, a chunk and a prefill all get the positions they have in the text.",
    todo="delete the line with NotImplementedError, mend the line under it, then run this cell again",
)
def embed(run: Run) -> str | None:
    """``embed(ids, params, cache)``: token and position rows of the new tokens, (T, width)."""
    params = _embedding_params()
    for start, ids in ((7, [4]), (7, [4, 0, 9]), (0, [3, 3, 8, 1]), (8, [1, 2])):
        got = np.asarray(run(ids, params, _cache_of(start)))
        mistake = _look_at_embed(got, ids, params, start)
        if mistake:
            return mistake
    return None


def _look_at_embed(got, ids, params, start):
    T, (wte, wpe) = len(ids), params.values()
    where = f"{start} tokens cached, {T} new"
    right = wte[ids] + wpe[start : start + T]
    if got.shape == right.shape and np.array_equal(got, right):
        return None
    for wrong, line in _embed_mistakes(wte[ids], wpe, start, T):
        if got.shape == wrong.shape and np.array_equal(got, wrong):
            return f"{where}: {line}"
    if got.shape != right.shape:
        return f"{where}: the result is {got.shape}, expected {right.shape}, one row for each new token"
    rows = f"row {start}" if T == 1 else f"rows {start} … {start + T - 1}"
    return f"{where}: expected the rows of `wte` for the ids plus {rows} of `wpe`"


def _embed_mistakes(tokens, wpe, start, T):
    """(result of the mistake, its line) pairs."""
    width = wpe.shape[1]
    at = {
        0: "the positions are still 0, 1, …, as if the new tokens opened the text",
        start + 1: "one too far: `start` tokens have positions 0 … start − 1, the first new one has `start`",
        start - 1: "one too few: that is the last cached token's position; the first new one has `start`",
        KV_HEADS: "that is the number of heads, shape[1] of this K: here the tokens are axis 0",
        ROW: "that is head_dim, shape[2] of this K: here the tokens are axis 0",
        2: "that is len(cache[0]), K and V: the tokens are axis 0 of one of them",
        LAYERS: "that is len(cache), the number of layers: the tokens are shape[0] of one layer's K",
    }
    for first, line in at.items():
        if first >= 0 and first != start:
            yield tokens + wpe[first : first + T], line
    if T == 1:  # with more tokens NumPy refuses to add these
        for rows in (2, len(wpe) - start):
            yield (
                tokens + wpe[start : start + rows],
                f"your slice of `wpe` has {rows} rows for one token: stop at start + len(ids), not past it",
            )
        yield (
            np.empty((0, width), np.float32),
            "your slice of `wpe` is empty, and one row plus no rows is no rows: begin at `start`, stop at "
            "start + len(ids)",
        )
    else:
        for place, name in ((start, "start"), (start + T - 1, "start + T − 1")):
            yield tokens + wpe[place], f"all new tokens get position {name}: row r needs position start + r"
    yield wpe[start : start + T], "the rows of `wte` are missing: add token and position"
    yield tokens, "the rows of `wpe` are missing: add token and position"
