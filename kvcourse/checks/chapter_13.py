"""The exercise of chapter 13."""

import numpy as np

from kvcourse.checks import Run, exercise

# (heads, v, rank, d). First v = rank: there the product exists without the transposition, and the check can
# name the mistake; at other shapes NumPy raises. Where heads = v the shapes hide other axes.
SHAPES = ((3, 4, 4, 6), (2, 3, 5, 4), (2, 2, 3, 5), (1, 3, 2, 4))
TOLERANCE = 1e-9  # float64, numbers of size 1, at most a dozen additions


@exercise(
    "13.absorb_output",
    right=(
        "each head's mixed latents times its matrix, added up over the heads, are the layer's output, "
        "without values and without the output matrix."
    ),
    todo="replace `...` by the matrices of all heads, then run this cell and the next one",
)
def absorb_output(run: Run) -> str | None:
    """``absorb_output(up_values, out)`` → (heads, rank, d)."""
    random = np.random.default_rng(13)
    for heads, v, rank, d in SHAPES:
        up = random.standard_normal((heads, v, rank))
        out = random.standard_normal((heads * v, d))
        got = np.asarray(run(up, out))
        want = np.stack([up[h].T @ out[h * v : (h + 1) * v] for h in range(heads)])
        mistake = _shape_mistake(got, want) or _value_mistake(got, want, up, out)
        if mistake:
            return f"heads {heads}, v {v}, rank {rank}, d {d}: {mistake}"
    return None


def _shape_mistake(got, want):
    heads, rank, d = want.shape
    if got.shape == want.shape:
        return None
    named = {
        (heads, d, rank): "the transpose of each head's matrix: mixed latents come from the left",
        (rank, d): (
            "one matrix for all heads. Each head has mixed latents of its own: keep the axis of heads, "
            "the sum over heads comes after the products"
        ),
        (heads * rank, d): "the heads' matrices one below the other: give them an axis of their own",
        (rank, heads, d): "heads and rank in the wrong order",
    }
    return f"shape {got.shape}, expected {want.shape}" + (
        f". That is {named[got.shape]}" if got.shape in named else ""
    )


def _value_mistake(got, want, up, out):
    if not np.issubdtype(got.dtype, np.number):
        return f"the matrices hold {got.dtype}, expected numbers"
    if _same(got, want):
        return None
    heads, v, rank = up.shape
    own = out.reshape(heads, v, -1)  # (heads, v, d)
    strided = out.reshape(v, heads, -1).swapaxes(0, 1)  # every heads-th row: the order of another layout
    if v == rank and _same(got, up @ own):
        return (
            "up_values is not transposed: its axes are (heads, v, rank), and the sum runs over v. Here v "
            "equals rank, so the shapes fit all the same"
        )
    if _same(got, up.swapaxes(1, 2) @ strided):
        return (
            f"wrong rows of `out`: head 1 begins at row {v}, after all rows of head 0. You took every "
            f"{heads}{'nd' if heads == 2 else 'rd' if heads == 3 else 'th'} row"
        )
    if _same(got, up.swapaxes(1, 2) @ own[::-1]) or _same(got, up[::-1].swapaxes(1, 2) @ own):
        return "a head's values meet the output rows of another head"
    if _same(got, np.repeat(up[:1].swapaxes(1, 2) @ own[:1], heads, axis=0)):
        return "all heads got the matrix of head 0"
    if np.allclose(got, want, atol=1e-4):
        return f"the numbers are right to the digits of {got.dtype}: keep float64, as the two arrays are"
    ratio = _common_ratio(got, want)
    if ratio:
        return (
            f"every number is {ratio:.3g} times what it should be: no scale belongs here, that of the scores "
            f"is applied before softmax"
        )
    head, row, column = (int(i) for i in np.argwhere(~np.isclose(got, want, atol=TOLERANCE))[0])
    return (
        f"head {head}, rank {row}, column {column}: {got[head, row, column]:.3f}, expected "
        f"{want[head, row, column]:.3f}, the sum over v of up_values[{head}, v, {row}] · "
        f"out[{head * v} + v, {column}]"
    )


def _same(got, want):
    return got.shape == want.shape and np.allclose(got, want, atol=TOLERANCE, rtol=0)


def _common_ratio(got, want):
    ratios = (got / want).ravel()
    spread = float(np.ptp(ratios))
    return float(ratios[0]) if np.isfinite(spread) and spread < 1e-6 * abs(ratios[0]) else None
