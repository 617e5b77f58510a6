"""The exercises of primer B: rounding to bfloat16 from the bits, and bits per character from logits."""

from __future__ import annotations

import math

import numpy as np

from kvcourse import ops
from kvcourse.checks import Run, exercise, short

UPPER = 0xFFFF0000  # the 16 bits that a bfloat16 keeps of a float32

PLAIN = np.array([13.4213, -13.4213, 0.1, 1e-3, 2048.7, 3e38, -1e-40, 0.0, 1.0], np.float32)
# Halfway between two bfloat16 numbers: the lower half is 1000 0000 0000 0000. The even neighbor is now
# below, now above.
TIES = np.array([1 + 1 / 256, 1 + 3 / 256, -1 - 1 / 256, -1 - 3 / 256, 10.03125, 10.09375], np.float32)
INFINITE = np.array([np.inf, -np.inf, 3.4e38], np.float32)
# Fraction bits all set, in the upper half only, in the lower half only: rounding must leave a NaN each time.
NANS = np.array([0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)


def _bits(x):
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def _rounded(x, add):
    """x after `add` was added to its bits and the lower half was cleared."""
    return ((_bits(x) + np.uint32(add)) & UPPER).view(np.float32)


def _same(got, expected):
    return got.shape == expected.shape and np.array_equal(_bits(got), _bits(expected))


@exercise(
    "b.to_bfloat16",
    right="nearest, ties to even, infinities and NaNs kept, as kv.ops.round_to_bfloat16 does it.",
    todo="replace `...` by the rounding of the bits, then run this cell again",
)
def to_bfloat16(run: Run) -> str | None:
    """``to_bfloat16(x)``: float32 (n,) → float32 (n,) whose lower 16 bits are 0."""
    for given in (PLAIN, TIES, INFINITE, NANS):
        got = np.asarray(run(given))
        mistake = _kind(got, given) or _value(got, given)
        if mistake:
            return mistake
    return None


def _kind(got, given):
    """What is wrong with the array as such."""
    if got.dtype == np.float32 and got.shape == given.shape:
        return None
    if got.dtype.kind in "iu" and got.shape == given.shape:
        return f"the result holds the bits as whole numbers ({got.dtype}): read them with .view(np.float32)"
    return f"the result is {got.dtype} {got.shape}, not float32 {given.shape}"


def _value(got, given):
    """The first number that is not what it should be, with the mistake that gives it."""
    if given is NANS:
        return _nan(got)
    expected = ops.round_to_bfloat16(given)
    if _same(got, expected):
        return None
    for wrong, line in _mistakes(given):
        if not _same(wrong, expected) and _same(got, wrong):
            return line
    at = int(np.argmax(_bits(got) != _bits(expected)))
    return (
        f"{short(float(given[at]))} becomes {short(float(got[at]))}, not {short(float(expected[at]))}: "
        f"compare their bits, f'{{bits:032b}}'"
    )


def _mistakes(x):
    """(result of the mistake, its line) pairs."""
    # Ties first: on TIES, going down is what cutting off does, and that was caught on PLAIN.
    yield (
        _rounded(x, 0x8000),
        "right except for ties: 1.00390625 lies halfway between 1 and 1.0078125, and you go away from 0. "
        "The neighbor whose last bit is 0 is 1",
    )
    yield (
        _rounded(x, 0x7FFF),
        "right except for ties: 1.01171875 lies halfway between 1.0078125 and 1.015625, and you go "
        "towards 0. The neighbor whose last bit is 0 is 1.015625",
    )
    yield _rounded(x, 0), "you cut the lower 16 bits off: that rounds towards 0. Go to the nearest"
    yield (
        ops.round_to_bfloat16(np.abs(x)),
        "the sign is lost: it is the top bit, and adding to the rest must not touch it",
    )
    even = 0x7FFF + (_bits(x) >> 16 & 1)
    yield (_bits(x) + even).view(np.float32), "the lower 16 bits are still there: clear them at the end"
    odd = 0x8000 - (_bits(x) >> 16 & 1)
    yield (
        _rounded(x, odd),
        "ties go to the odd neighbor: carry when the last kept bit is 1, so that it becomes 0",
    )
    with np.errstate(over="ignore"):
        half = x.astype(np.float16).astype(np.float32)
    yield half, "this is float16: 5 exponent bits. A bfloat16 has the 8 of a float32"
    yield (
        (_bits(x) & UPPER).astype(np.float32),
        "you turned the bits into a number by their size: .view(np.float32) reads them, .astype converts",
    )
    yield (
        np.where(np.isinf(x), np.float32(np.nan), ops.round_to_bfloat16(x)),
        "an infinity became NaN: it needs no rounding, its lower half is 0 already",
    )


def _nan(got):
    lost = ~np.isnan(got)
    if not lost.any():
        return None
    pattern = int(_bits(NANS)[np.argmax(lost)])
    became = short(float(got[np.argmax(lost)]))
    return (
        f"the NaN with the bits {pattern:08x} became {became}: a NaN is exponent bits all 1 and a fraction "
        "that is not 0, and rounding changed that. Find NaNs with np.isnan and keep them NaN"
    )


# --- bits per character ----------------------------------------------------------------

TOLERANCE = 1e-4  # relative; a handful of float32 logarithms is good to 1e-6
# tokens, size of the vocabulary, characters, added to all logits: softmax does not see it, exp does
TEXTS = ((6, 7, 17, 0.0), (2, 5, 3, 0.0), (9, 7, 30, 120.0))


def _text(T, vocab_size, characters, added):
    random = np.random.default_rng(T)
    logits = 2 * random.standard_normal((T, vocab_size), dtype=np.float32) + np.float32(added)
    return logits, random.integers(0, vocab_size, T).tolist(), characters


def _log_probs(logits, rows, targets):
    """ln p of the target of each row, in float64."""
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))[rows, targets]


def _bits_per_character(logits, ids, characters):
    rows = np.arange(len(ids) - 1)
    return -_log_probs(logits, rows, ids[1:]).sum() / math.log(2) / characters


@exercise(
    "b.bits_per_character",
    right="bits, per character, with the shift by one. kv.evaluation does the same.",
    todo="replace `...` by the calculation, then run this cell again",
)
def bits_per_character(run: Run) -> str | None:
    """``bits_per_character(logits, ids, characters)``: (T, vocab_size), T ids, a count → one number."""
    for text in TEXTS:
        given = _text(*text)
        got = run(*given)
        if not isinstance(got, (int, float)) or isinstance(got, bool):
            return f"the result is {short(got)}, not one number: add up over the text"
        mistake = _number(got, given)
        if mistake:
            return mistake
    return None


def _number(got, given):
    logits, _, characters = given
    expected = _bits_per_character(*given)
    if not math.isfinite(got):
        return (
            f"the result is {got} for logits of up to {logits.max():.0f}: exp overflows in float32 above 88. "
            "Take the row's maximum away first"
        )
    if _close(got, expected):
        return None
    for wrong, line in _wrong_numbers(*given):
        if _close(got, wrong) and not _close(wrong, expected):
            return line
    return (
        f"{len(logits)} tokens, {characters} characters: {got:.4f}, not {expected:.4f}. Print ln p of each "
        "token first: all are below 0"
    )


def _close(a, b):
    return math.isclose(a, b, rel_tol=TOLERANCE)


def _wrong_numbers(logits, ids, characters):
    """(result of the mistake, its line) pairs."""
    T = len(ids)
    right = _bits_per_character(logits, ids, characters)
    nats = right * math.log(2)
    yield -right, "the sign: ln p is negative, a cost is positive"
    yield nats, "these are nats: divide by ln 2 for bits"
    yield nats * math.log(2), "you multiplied by ln 2: one nat is 1/ln 2 = 1.44 bits, so divide"
    yield right * characters, "this is the sum over the text: divide by the number of characters"
    yield (
        right * characters / (T - 1),
        "these are bits per token: divide the sum by characters, or two tokenizers cannot be compared",
    )
    yield (
        nats * characters / (T - 1),
        "these are nats per token: divide by ln 2, and by characters, not tokens",
    )
    yield right / (T - 1), "you took the mean over tokens and then divided by characters: take the sum"
    yield (
        nats / (T - 1),
        "you took the mean over tokens and in nats: take the sum, divide by ln 2 and characters",
    )
    yield math.exp(nats * characters / (T - 1)), "this is the perplexity: it counts per token"
    unshifted = -_log_probs(logits, np.arange(T), ids).sum() / characters
    shifted_less = -_log_probs(logits, np.arange(T - 1), ids[:-1]).sum() / characters
    ahead = -_log_probs(logits, np.arange(1, T), ids[:-1]).sum() / characters
    line = "row t is compared with token t, which it has already read: row t predicts token t + 1"
    for wrong in (unshifted, shifted_less, ahead):
        for unit in (1, math.log(2)):
            yield wrong / unit, line
    raw = -logits[np.arange(T - 1), ids[1:]].astype(np.float64).sum() / characters
    for unit in (1, math.log(2)):
        yield raw / unit, "these are the logits themselves: take the logarithm of their softmax"
