"""Check of primer D: rotate every pair of a head by its own frequency and the row's position."""

from __future__ import annotations

import numpy as np

from kvcourse.checks import Run, exercise, short

# heads, tokens, head_dim, theta, positions. Out of order, so that nobody may count rows instead; the last
# near the end of SmolLM2's longest text, where an angle in float32 is visibly off.
CASES = (
    (2, 3, 8, 10_000.0, (5, 0, 2)),
    (1, 2, 64, 100_000.0, (3, 700)),
    (1, 3, 64, 100_000.0, (8_191, 8_000, 7_777)),
)
# x is of size 1 and its result rounded to float32: 1e-7. An angle of 8,191 in float32 is off by up to
# 2.4e-4, and so is the fastest pair.
TOLERANCE = 5e-6
LOOSE = 2e-3  # within this, all is right but the digits of an angle


@exercise(
    "d.rotate",
    right="each pair (j, j + head_dim / 2) is turned by its own frequency and its row's position.",
    todo="replace `...` by halves, angles and two rotated halves, then run this cell again",
)
def rotate(run: Run) -> str | None:
    """``rotate(x, positions, theta)``: x (heads, T, head_dim), positions (T,) → x's shape and dtype."""
    rng = np.random.default_rng(4)
    for heads, T, head_dim, theta, positions in CASES:
        x = rng.standard_normal((heads, T, head_dim)).astype(np.float32)
        at = np.array(positions)
        got = run(x, at, theta)
        mistake = _form(got, x) or _mistake(np.asarray(got, np.float64), x.astype(np.float64), at, theta)
        if mistake:
            return mistake
        if got.dtype != np.float32:
            return (
                f"the numbers are right, but {got.dtype}: cosines of float64 angles are float64, so turn "
                "them into x's dtype before they meet x"
            )
    return None


def _form(got, x):
    """What is wrong with the result as an array, if anything."""
    if not isinstance(got, np.ndarray):
        return f"the result is {short(got)}, not an array"
    if got.shape == (*x.shape[:-1], x.shape[-1] // 2):
        return f"only one half comes back, shape {got.shape}: put both turned halves side by side"
    if got.shape != x.shape:
        return f"the result has shape {got.shape}: expected x's own, {x.shape}"
    if got.dtype not in (np.float32, np.float64):
        return f"the result holds {got.dtype}: expected x's own, {x.dtype}"
    if not np.isfinite(got).all():
        return f"the result is {short(got)} and holds something that is no finite number"
    return None


def _mistake(got, x, positions, theta):
    """The line for a wrong result, or None. All float64."""
    d = x.shape[-1]
    j = np.arange(d // 2)
    f = float(theta) ** (-2 * j / d)
    right = _turned(x, positions, f)
    error = np.abs(got - right).max()
    if error < TOLERANCE:
        return None
    for wrong, line in _mistakes(x, positions, theta, f, j, d):
        if np.abs(got - wrong).max() < LOOSE:
            return line
    if error < LOOSE:
        return (
            f"nearly: off by {error:.0e} at position {positions.max():,}. In float32 an angle of some "
            "hundred radians has few digits left for its place on the circle: compute angles in float64"
        )
    lengths = np.hypot(*np.split(got, 2, axis=-1)) - np.hypot(*np.split(x, 2, axis=-1))
    if np.abs(lengths).max() > LOOSE:
        return (
            "a rotation keeps the length of each pair (x[j], x[j + head_dim / 2]), yours does not: "
            "(a, b) becomes (a·cos − b·sin, a·sin + b·cos)"
        )
    return (
        "every pair keeps its length, but is not where it belongs: print the angles, a row for each "
        "position, a column for each pair, and compare with position · theta ** (−2j / head_dim)"
    )


def _mistakes(x, positions, theta, f, j, d):
    """(result of the mistake, its line) pairs."""
    rows = np.arange(len(positions))
    yield x, "nothing is turned: the result is x"
    yield (
        _neighbors(x, positions, f),
        "you turn neighbors, (x[2j], x[2j + 1]): here pair j is (x[j], x[j + head_dim / 2]), the two halves",
    )
    yield (
        _turned(x, -positions, f),
        "turned the other way: a·cos − b·sin comes first, a·sin + b·cos second, as in `turn`",
    )
    yield (
        _turned(x, np.radians(positions), f),
        "the angles are taken for degrees: position · frequency is in radians, which np.cos expects",
    )
    yield (
        _turned(x, np.degrees(positions), f),
        "the angles were turned into degrees, and np.cos expects radians",
    )
    yield (
        _turned(x, rows, f),
        "rows are counted, 0, 1, 2 …: use the positions you are given; after a cached text a chunk does not "
        "start at 0",
    )
    yield (
        _turned(x, positions, float(theta) ** (-j / d)),
        "the exponent is −j / head_dim: it is −2j / head_dim, and the last frequency near 1 / theta",
    )
    yield (
        _turned(x, positions, float(theta) ** (2 * j / d)),
        "the frequencies grow with j: the exponent is −2j / head_dim, with a minus",
    )
    yield (
        _turned(x, positions, float(theta) ** (-2 * (j + 1) / d)),
        "pairs are counted from 1: pair 0 turns by exactly 1 radian a position",
    )
    yield (
        _turned(x, positions, np.ones(d // 2)),
        "all pairs turn alike: pair j has the frequency theta ** (−2j / head_dim)",
    )
    a, b = np.split(_turned(x, positions, f), 2, axis=-1)
    yield (
        np.concatenate([b, a], axis=-1),
        "both halves are right, in the wrong order: a·cos − b·sin comes first",
    )
    mixed = np.stack([a, b], axis=-1).reshape(x.shape)
    yield mixed, "pairs are right, but written back as neighbors: put the two halves side by side again"
    angles, (_, old) = positions[:, None] * f, np.split(x, 2, axis=-1)
    twice_turned = np.concatenate([a, a * np.sin(angles) + old * np.cos(angles)], axis=-1)
    yield (
        twice_turned,
        "the second half was made from the turned first one: keep a as it was until both are made",
    )
    yield (
        np.concatenate([a, b - 2 * old * np.cos(angles)], axis=-1),
        "the second half is a·sin + b·cos, with a plus",
    )


def _turned(x, positions, f):
    angles = positions[:, None] * f
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _neighbors(x, positions, f):
    angles = positions[:, None] * f
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
