"""The exercise of chapter 12."""

import math
import tracemalloc

import numpy as np

from kvcourse.checks import Run, exercise, short

# (query heads, KV heads, head_dim, new tokens, start): a group of 2, all the same, one for all, decode.
CASES = ((4, 2, 8, 5, 0), (6, 2, 8, 3, 4), (9, 3, 4, 2, 7), (4, 4, 8, 3, 2), (4, 1, 8, 3, 2), (8, 2, 4, 1, 6))
LARGE = (32, 2, 64, 1, 4095)  # keys of 2 MiB; repeated for all query heads 32 MiB
TOLERANCE = 1e-4  # outputs of size 1 in float32 (eps 1.2e-7), sums of at most 4,096 numbers in another order


@exercise(
    "12.grouped_attention",
    right=(
        "the same output as with repeated keys and values, for MHA, GQA and MQA, and no copy of them was "
        "made."
    ),
    todo="replace `...` by the attention of all query heads, then run this cell again",
)
def grouped_attention(run: Run) -> str | None:
    """``grouped_attention(q, k, v, start)`` → (H, T, head_dim)."""
    run.explain = _explained
    for case in CASES:
        q, k, v, start = _inputs(*case)
        mistake = _mistake(run(q, k, v, start), q, k, v, start)
        if mistake:
            heads, kv_heads, _, T, _ = case
            return f"{heads} query heads on {kv_heads} KV heads, {T} tokens after {start}: {mistake}"
    return _copies(run)


def _explained(error):
    if isinstance(error, ValueError) and ("broadcast" in str(error) or "mismatch" in str(error)):
        return (
            f"NumPy cannot pair the axes ({error}): give q the shape (KV heads, group, T, head_dim) and "
            f"k and v an axis of 1 where the group stands, k[:, None]"
        )
    return None


def _inputs(heads, kv_heads, head_dim, T, start):
    random = np.random.default_rng(heads * 100 + kv_heads)
    shapes = (heads, T, head_dim), *[(kv_heads, start + T, head_dim)] * 2
    return *(random.standard_normal(shape, dtype=np.float32) for shape in shapes), start


def _mistake(got, q, k, v, start):
    if not isinstance(got, np.ndarray):
        return f"return one array (H, T, head_dim), not {short(got)}"
    if got.shape != q.shape:
        grouped = (len(k), len(q) // len(k), *q.shape[1:])
        more = (
            ": put the groups together again at the end, out.reshape(q.shape)" if got.shape == grouped else ""
        )
        return f"the output has shape {got.shape}, expected {q.shape}{more}"
    if got.dtype != np.float32:
        return f"the output is {got.dtype}: keep float32, a scale of math.sqrt(…) is a Python float"
    if np.isnan(got).any():
        return "the output holds NaN. 0 · −∞ is NaN: choose with np.where, do not multiply the mask by −∞"
    if _close(got, _attention(q, k, v, start)):
        return None
    for wrong, name in _named(q, k, v, start):
        if _close(got, wrong):
            return name
    off = np.abs(got - _attention(q, k, v, start)).max(axis=(1, 2))
    return f"wrong numbers in query head {int(off.argmax())}, off by up to {off.max():.2g}"


def _close(a, b):
    return bool(np.abs(a - b).max() < TOLERANCE)


def _named(q, k, v, start):
    """(what a typical mistake gives, its name)."""
    heads, kv_heads = len(q), len(k)
    wrong = np.arange(heads) % kv_heads
    yield (
        _attention(q, k[wrong], v[wrong], start),
        f"query head h reads KV head h mod {kv_heads}, as np.tile gives. It must read h div "
        f"{heads // kv_heads}: the query heads of a group stand next to each other, "
        f"q.reshape({kv_heads}, {heads // kv_heads}, …)",
    )
    order = np.arange(heads).reshape(kv_heads, -1).T.ravel()
    yield (
        _attention(q, k, v, start)[order],
        "the query heads come out in another order than they came in: undo every change of axes",
    )
    yield (
        _attention(q, k, v, start, masked=False),
        "a query sees keys that come later: the causal mask is missing",
    )
    if start:
        yield (
            _attention(q, k, v, 0),
            f"`start` is not used: row r of the mask belongs to position {start} + r",
        )
    yield (
        _attention(q * math.sqrt(q.shape[-1]), k, v, start),
        "the scores are not divided by √head_dim",
    )
    yield (
        _attention(q, k, v, start) / (heads // kv_heads),
        "each output is divided by the size of the group: the heads share keys, they are not averaged",
    )


def _attention(q, k, v, start, masked=True):
    """The oracle, with keys and values repeated."""
    heads, T, head_dim = q.shape
    keys, values = (np.repeat(rows, heads // len(rows), axis=0) for rows in (k, v))
    scores = q @ keys.swapaxes(1, 2) / math.sqrt(head_dim)
    if masked:
        visible = np.arange(keys.shape[1]) <= (start + np.arange(T))[:, None]
        scores = np.where(visible, scores, np.float32(-np.inf))
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True) @ values


def _copies(run):
    """Room that the reader's function takes beside its input: a repeated copy of K is 16 times K."""
    q, k, v, start = _inputs(*LARGE)
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        run(q, k, v, start)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()
    peak -= q.nbytes + k.nbytes + v.nbytes  # the check hands over copies: they are not the reader's
    repeated = k.nbytes * len(q) // len(k)
    if peak < repeated / 2:
        return None
    return (
        f"the right numbers, but keys of {k.nbytes / 2**20:.0f} MiB made the function take up to "
        f"{peak / 2**20:.0f} MiB: K or V is copied for every query head. (np.broadcast_to takes none, but a "
        f"reshape of it copies.) Give the queries an axis more, (KV heads, group, T, head_dim), not the keys"
    )
