"""The exercise of chapter 05: right and wrong caches, made once from the bundled model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from kvcourse import caches, loading
from kvcourse.checks import Run, exercise, short

TEXT = (
    "Emma was not able to give a direct answer, and the two ladies walked on in silence till they came "
    "to the gate, where Mr. Knightley was waiting for them with a letter in his hand."
)
PREFILL = 12  # tokens of TEXT in the first pass; each later one is a step
LATE = 40  # tokens before the step at which a row is NaN


@dataclass(frozen=True)
class Planted:
    """One planted cache: its logits, the right verdict on it, and the line for a wrong verdict."""

    name: str
    trusted: bool
    cached: np.ndarray
    mistake: str


@exercise(
    "05.same_answers",
    right=(
        "you trust both right caches, whose logits differ by rounding alone, and report the other seven: a "
        "neighbor's row, one wrong step, NaN, a moved position, float16 rows, and one logit off by 0.01, in "
        "either direction."
    ),
)
def same_answers(run: Run) -> str | None:
    """``same_answers(cached_logits, uncached_logits)``: True when only float32 rounding lies between them."""
    uncached, planted = planted_caches()
    for plant in planted:
        got = run(plant.cached, uncached)
        if not isinstance(got, bool):
            return f"expected True or False, got {short(got)}"
        if got != plant.trusted:
            return f"{plant.name}: {_closer(run, uncached, plant.mistake)}"
    return None


def _closer(run, uncached, mistake):
    """The line for a mistake, told from a similar one by one more call."""
    if mistake == _STRICT:
        far_from_0 = uncached + np.float32(64)
        return _RELATIVE if run(far_from_0 + np.float32(3e-5), far_from_0) is True else _STRICT
    if mistake == _FAR_OFF:
        twice = 2 * uncached  # the same tokens, all other logits far off
        return _TOKENS if run(twice, uncached) is True else _FAR_OFF
    if mistake == _ONE:
        above, below = (run(uncached + np.float32(side), uncached) is True for side in (1, -1))
        return _SIGN if above != below else _ONE
    return mistake


@cache
def planted_caches():
    """(uncached logits (steps, vocab), the planted caches in the order in which they are tried)."""
    model = loading.load_model("austen-gpt2")
    ids = loading.load_tokenizer("austen-gpt2").encode(TEXT)
    steps = [1] * (len(ids) - PREFILL)
    uncached = model(ids)[PREFILL - 1 :]

    def logits(kind, chunks=(PREFILL, *steps), of=model):
        held, parts, start = kind(of.config), [], 0
        for size in chunks:
            parts.append(of(ids[start : start + size], held))
            start += size
        return np.concatenate(parts)[PREFILL - 1 :]

    plain = caches.ConcatenatingCache
    chunks = (3, 2, 5, 2, *[4] * (len(steps) // 4), *[1] * (len(steps) % 4))
    found = [
        (
            "a right cache, the text passed in chunks of 3, 2, 5, 2 and 4",
            True,
            logits(plain, chunks),
            _STRICT,
        ),
        (
            "a right cache, the MLP's sums in another order",
            True,
            logits(plain, of=_other_order(model)),
            _STRICT,
        ),
        (
            "a wrong cache, one value row of the last layer is its neighbor's",
            False,
            logits(_NeighborsRow),
            _FAR_OFF,
        ),
        ("a wrong cache, one head reads a wrong row at one step", False, logits(_OneStep), _STEP),
        ("a wrong cache, one row of NaN near the end", False, logits(_NotANumber), _NAN),
        ("a wrong cache, one token at the position of the next", False, logits(_Moved), _FAR_OFF),
        ("a cache with float16 rows", False, logits(_Float16), _SIXTEEN),
        ("a wrong pass, one logit of one step 0.01 too low", False, _one_logit(uncached, -0.01), _ONE),
        ("a wrong pass, one logit of one step 0.01 too high", False, _one_logit(uncached, 0.01), _ONE),
    ]
    return uncached, [Planted(*entry) for entry in found]


_STRICT = (
    "you reject it. Its logits differ from the uncached ones by rounding alone, up to some 1e-5: `==` or a "
    "tolerance as small as that is too strict"
)
_RELATIVE = (
    "you reject it. Your tolerance shrinks with the logit (np.allclose does so, unless you set atol), and "
    "rounding does not: a logit near 0 is a sum of terms as large as the others"
)
_FAR_OFF = (
    "you trust it. Single logits are off by more than 0.3: look at the largest difference, with a tolerance "
    "far below that"
)
_TOKENS = (
    "you trust it. Every chosen token agrees, but single logits are off by more than 0.3: compare the "
    "logits, not the tokens"
)
_STEP = (
    "you trust it. Its logits differ at one early step alone, by up to 0.06: a mean over everything, the "
    "last step, or a tolerance wider than that does not see it"
)
_NAN = (
    "you trust it. Every comparison with NaN is False, so “no difference is above …” holds: ask that all "
    "differences lie below"
)
_SIXTEEN = (
    "you trust it. 16-bit rounding moves its logits by 0.001 to 0.003, and the task allows float32 rounding "
    "alone: put the tolerance between the two"
)
_ONE = (
    "you trust it. No mean, percentile, best logit or probability shows one logit among thousands: look at "
    "the largest difference of all"
)
_SIGN = "you trust it. Your comparison sees differences of one sign only: take the absolute value first"


def _one_logit(uncached, by):
    """The uncached logits but for a middling logit of one step, moved by `by`: too small to be chosen."""
    moved, step = uncached.copy(), 3
    moved[step, np.argsort(uncached[step])[uncached.shape[1] // 2]] += np.float32(by)
    return moved


class _OneStep(caches.ConcatenatingCache):
    """At one early step a head of the last layer reads another token's value; no kept row is touched."""

    def _write(self, layer, k, v):
        keys, values = super()._write(layer, k, v)
        if layer == self.config.num_layers - 1 and self.seq_len == PREFILL + 1:
            values = values.copy()
            values[0, PREFILL - 1] = values[0, PREFILL - 2]
        return keys, values


class _NeighborsRow(caches.ConcatenatingCache):
    """In the last layer the prompt's last token gets the value of the one before."""

    def attend(self, layer, q, k, v, rotate=None):
        if layer == self.config.num_layers - 1 and self.seq_len == 0:
            v = v.copy()
            v[:, -1] = v[:, -2]
        return super().attend(layer, q, k, v, rotate)


class _NotANumber(caches.ConcatenatingCache):
    """From LATE tokens on the last layer writes values of NaN, in one head."""

    def attend(self, layer, q, k, v, rotate=None):
        if layer == self.config.num_layers - 1 and self.seq_len >= LATE:
            v = v.copy()
            v[0] = np.nan
        return super().attend(layer, q, k, v, rotate)


class _Moved(caches.ConcatenatingCache):
    """One token in the middle is told the next position."""

    def begin(self, n):
        positions = super().begin(n)
        return positions + 1 if self.seq_len == PREFILL + 8 else positions


class _Float16(caches.ConcatenatingCache):
    """Rows rounded to float16 when they are written."""

    def attend(self, layer, q, k, v, rotate=None):
        k, v = (rows.astype(np.float16).astype(np.float32) for rows in (k, v))
        return super().attend(layer, q, k, v, rotate)


def _other_order(model):
    """The same function with the MLPs' hidden numbers in another order: only the order of sums changes."""
    params, inner = dict(model.params), model.config.intermediate_size
    order = np.random.default_rng(0).permutation(inner)
    for layer in range(model.config.num_layers):
        names = (f"h.{layer}.mlp.c_fc.weight", f"h.{layer}.mlp.c_fc.bias", f"h.{layer}.mlp.c_proj.weight")
        wide, bias, narrow = (params[name] for name in names)
        shuffled = wide[:, order], bias[order], narrow[order]
        params |= {name: np.ascontiguousarray(rows) for name, rows in zip(names, shuffled, strict=True)}
    return type(model)(model.config, params)
