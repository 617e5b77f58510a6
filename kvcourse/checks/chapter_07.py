"""The exercise of chapter 07."""

import numpy as np

from kvcourse.checks import Run, exercise, is_number, short

WIDTH = 3  # numbers in a row of the tests
ROW = WIDTH * 4  # its bytes
# (tokens of each pass, rows at first). In the last two, one pass needs more than twice the room there is.
CASES = (
    ((1,) * 1000, 4),
    ((5, *(1,) * 60), 4),
    ((3, 2, 2, 3, 5, 7, 1, 1), 4),
    ((1,) * 4, 4),
    ((2, 13, *(1,) * 30), 4),
    ((1, 40), 2),
)


@exercise(
    "07.append_growing",
    right=(
        "all rows are there, in order, and 1,000 of them cost 1,020 copied ones: "
        "fewer than two for each row held, for every text we tried."
    ),
    todo="replace `...` by the loop over the passes, then run this cell again",
)
def append_growing(run: Run) -> str | None:
    """``append_growing(passes, capacity)`` → the rows that count, and the bytes of old rows copied."""
    for sizes, capacity in CASES:
        passes = _passes(sizes)
        got = run(passes, capacity)
        where = f"passes of {_sizes(sizes)} rows, room for {capacity} at first"
        if not isinstance(got, tuple) or len(got) != 2:
            return f"{where}: return two things, rows and bytes_copied, not {short(got)}"
        mistake = _rows_mistake(got[0], np.concatenate(passes)) or _count_mistake(got[1], sizes, capacity)
        if mistake:
            return f"{where}: {mistake}"
    return None


def _passes(sizes):
    """Rows with the number of their token in them, 1, 2, 3 …, so that a misplaced row is seen."""
    numbers = np.arange(1, sum(sizes) + 1, dtype=np.float32)
    rows = np.repeat(numbers[:, None], WIDTH, axis=1)
    return np.split(rows, np.cumsum(sizes)[:-1])


def _sizes(sizes):
    return ", ".join(map(str, sizes[:4])) + (" …" if len(sizes) > 4 else "")


def _rows_mistake(rows, want):
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.shape[1] != WIDTH:
        return f"the rows must be an array (tokens, {WIDTH}), got {short(rows)}"
    if rows.dtype != np.float32:
        return f"the rows are {rows.dtype}: make the array with np.float32"
    if len(rows) > len(want):
        return (
            f"{len(want):,} tokens were appended and {len(rows):,} rows come back: return the rows that "
            f"count, [:seq_len], not the room behind them"
        )
    if len(rows) < len(want):
        return f"{len(want):,} tokens were appended and {len(rows):,} rows come back: some were lost"
    differ = (rows != want).any(axis=1)
    if not differ.any():
        return None
    first = int(np.flatnonzero(differ)[0])
    if not rows[first].any():
        return (
            f"row {first:,} is all zeros: it was lost when the array grew. "
            f"Copy the old rows into the new array"
        )
    found = rows[first, 0]
    return (
        f"row {first:,} holds {found:g} where token {first:,} should be ({want[first, 0]:g}): new rows go to "
        f"[seq_len : seq_len + n], and seq_len moves after every pass"
    )


def _count_mistake(count, sizes, capacity):
    """The line for a wrong counter, or None. A large pass may be met at once or by repeated doubling."""
    if not is_number(count):
        return f"bytes_copied must be a number, got {short(count)}"
    allowed = {_doubled(sizes, capacity, at_once=True), _doubled(sizes, capacity, at_once=False)}
    if count in allowed:
        return None
    want, tokens = _doubled(sizes, capacity, at_once=True), sum(sizes)
    for value, line in _known_counts(sizes, capacity, want):
        if count == value:
            return line
    if count > 2 * tokens * ROW:
        return (
            f"{count:,} bytes were copied for {tokens * ROW:,} held, more than twice as many. Does the room "
            f"double each time? Growing by a fixed number of rows makes the copies quadratic"
        )
    return (
        f"expected {want:,} bytes copied, got {short(count)}: count the old rows that move, each {ROW} bytes"
    )


def _known_counts(sizes, capacity, want):
    every = np.cumsum([0, *sizes])[:-1].sum() * ROW
    whole, with_new = _doubled(sizes, capacity, whole=True), _doubled(sizes, capacity, new_too=True)
    return (
        (
            int(every),
            "old rows are copied in every pass. That is concatenating: copy only when new rows do not fit",
        ),
        (
            0,
            f"the counter stayed 0, but {want // ROW:,} old rows had to move: add their bytes where you copy",
        ),
        (want // ROW, f"that is the number of rows that moved. Asked are bytes: {ROW} a row here"),
        (
            whole,
            "you copy the whole old array, the empty rows too. Only the first seq_len rows count",
        ),
        (with_new, "you count the new rows as well. They are written once in any cache; count the old ones"),
        *(
            (_linear(sizes, capacity, step), _constant(step))
            for step in {capacity, 1, 2, 4, 8, 10, 16, 32, 64, 100}
        ),
    )


def _constant(step):
    return (
        f"the room grows by {step} row{'s' * (step != 1)} each time. A longer text then grows more often, "
        f"and the copies are quadratic: double it"
    )


def _doubled(sizes, capacity, at_once=True, whole=False, new_too=False):
    """Bytes copied by doubling; or by one of two mistakes."""
    seq_len = copied = 0
    for n in sizes:
        if seq_len + n > capacity:
            copied += capacity if whole else seq_len + n * new_too
            capacity = max(2 * capacity, seq_len + n) if at_once else _room(capacity, seq_len + n)
        seq_len += n
    return copied * ROW


def _room(capacity, needed):
    while capacity < needed:
        capacity *= 2
    return capacity


def _linear(sizes, capacity, step):
    """Bytes copied when the room grows by `step` rows at a time, as often as a pass needs."""
    seq_len = copied = 0
    for n in sizes:
        if seq_len + n > capacity:
            copied += seq_len
            capacity += step * -(-(seq_len + n - capacity) // step)
        seq_len += n
    return copied * ROW
