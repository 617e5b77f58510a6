"""The exercises of chapter 03: the mask of a chunk, and how many cells the masks of several chunks remove."""

from __future__ import annotations

import tracemalloc

import numpy as np

from kvcourse.checks import Run, exercise, is_number, short

# The first pair is not square and has more rows than one, so that most mistakes show there.
PAIRS = [(2, 3), (0, 4)] + [(start, T) for T in range(1, 13) for start in range(13 - T)]
# A whole triangle has 9 million cells here, the mask 6,004. A boolean is one byte, a position eight.
LONG, LONG_T, MOST_BYTES = 3000, 2, 1_000_000


def _right(start: int, T: int) -> np.ndarray:
    """By the definition, cell by cell: row r belongs to position start + r."""
    return np.array([[key <= start + row for key in range(start + T)] for row in range(T)])


def _mistakes(start: int, T: int, right: np.ndarray) -> list[tuple[np.ndarray, str]]:
    """(mask of the mistake, its line) pairs, all of the right shape."""
    key, query = np.arange(start + T)[None, :], start + np.arange(T)[:, None]
    return [
        (
            np.ones_like(right),
            f"all ones: row 0 belongs to position {start} and must not see keys after it. "
            "A mask of ones is right for T = 1 alone",
        ),
        (
            key <= query - start,
            f"the triangle starts in the corner top left: row 0 sees key 0 alone, but it belongs to "
            f"position {start} and sees keys 0 … {start}",
        ),
        (
            key < query,
            "off by one: no row sees its own key. Row r sees keys 0 … start + r, the last one included",
        ),
        (
            key <= query + 1,
            "off by one: every row but the last sees one key too many, the next token's. "
            "Row r sees keys 0 … start + r",
        ),
        (
            key >= query,
            "transposed: row r sees key start + r and later ones. Rows are queries, columns are keys: "
            "compare key <= query",
        ),
        (~right, "the wrong way round: True says that a query may see a key, yours says that it may not"),
    ]


@exercise(
    "03.causal_mask",
    right="rows start … of the triangle for all 78 pairs up to 12 tokens, and no larger array on the way.",
    todo="replace `...` by the mask, then run this cell again",
)
def causal_mask(run: Run) -> str | None:
    """``causal_mask(start, T)`` → boolean (T, start + T), True where row r may see a key."""
    for start, T in PAIRS:
        mistake = _look_at(run(start=start, T=T), start, T)
        if mistake:
            return f"start={start}, T={T}: {mistake}"
    if _peak_bytes(run) > MOST_BYTES:
        return (
            f"the masks are right, but for start={LONG:,}, T={LONG_T} you make the whole triangle of "
            f"{(LONG + LONG_T) ** 2:,} cells and keep {LONG_T * (LONG + LONG_T):,}: compare the positions "
            "of keys and queries instead"
        )
    return None


def _peak_bytes(run: Run) -> int:
    """Most memory that one call for a long text holds at a time; NumPy reports its arrays to tracemalloc."""
    already = tracemalloc.is_tracing()
    if not already:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        run(start=LONG, T=LONG_T)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not already:
            tracemalloc.stop()


def _look_at(got: object, start: int, T: int) -> str | None:
    if not isinstance(got, np.ndarray):
        return f"a mask is a NumPy array of shape {(T, start + T)}, you returned {short(got)}"
    right = _right(start, T)
    if got.shape != right.shape:
        return _wrong_shape(got.shape, start, T)
    if got.dtype != bool:
        same = np.array_equal(got, right)
        which = "the cells are right, but the" if same else "the"
        return f"{which} dtype is {got.dtype}, not bool: with numbers, ~mask and x[mask] mean something else"
    if np.array_equal(got, right):
        return None
    for wrong, line in _mistakes(start, T, right):
        if np.array_equal(got, wrong):
            return line
    row, key = np.argwhere(got != right)[0].tolist()
    must = "must" if right[row, key] else "must not"
    return f"row {row}, which belongs to position {start + row}, {must} see key {key}"


def _wrong_shape(shape: tuple, start: int, T: int) -> str:
    n = start + T
    if shape == (n, T):
        return f"transposed: the shape is {shape}; rows are the {T} queries, columns the {n} keys: {(T, n)}"
    if shape == (n, n):
        return f"that is the whole triangle, {shape}: keep the rows of the {T} new positions, {(T, n)}"
    if shape == (T, T):
        return (
            f"the shape is {shape}: columns of the {start} keys that are there before are missing, {(T, n)}"
        )
    return f"the shape is {shape}: {T} queries in rows and {n} keys in columns make {(T, n)}"


CHUNKS = ([3, 2, 3], [8], [1] * 8, [4, 4], [1], [100, 1, 1, 20], [1, 7])


@exercise(
    "03.masked_cells",
    right="T·(T − 1)/2 a chunk, wherever it starts. In ones nothing is masked, in one piece the most.",
    todo="replace `...` by the count, then run this cell again",
)
def masked_cells(run: Run) -> str | None:
    """``masked_cells(chunks)`` → masked cells a head, all passes together."""
    for chunks in CHUNKS:
        got = run(chunks=list(chunks))
        if not is_number(got):
            return f"chunks {chunks}: a count is a number, you returned {short(got)}"
        right = sum(T * (T - 1) // 2 for T in chunks)
        if got != right:
            return f"chunks {chunks}: {_why(got, chunks, right)}"
    return None


def _why(got: float, chunks: list[int], right: int) -> str:
    n = sum(chunks)
    known = {
        sum(T * (T + 1) // 2 for T in chunks): "you count the diagonal, but a row sees its own key",
        # The same number as a top-left triangle in each chunk masks: each pair of positions once.
        n * (n - 1) // 2: (
            f"that is n·(n − 1)/2 for all {n} tokens: keys of earlier chunks are never masked, "
            "so count inside each chunk alone"
        ),
        sum(T * (T - 1) for T in chunks): "twice too many: half of a T × T square is masked",
        n * (n + 1) // 2: "these are the cells that are seen, the same for any chunks: count the masked ones",
    }
    return known.get(got, f"expected {right:,} masked cells, got {short(got)}")
