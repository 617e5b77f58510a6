"""The exercise of chapter 07."""

import numpy as np

from kvcourse.checks import Run, exercise, is_number, short

WIDTH = 3  # numbers in a row of the tests
ROW = WIDTH * 4  # its bytes
# (tokens of each pass, rows at first). In the last two, one pass needs more than twice the room there is.
# The second tells copied empty rows, rows copied again and rows appended one by one apart.
CASES = (
    ((1,) * 1000, 4),
    ((3, 13, *(1,) * 30), 4),
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
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            return f"{where}: return two things, rows and bytes_copied, not {short(got)}"
        rows, count = got
        mistake = _rows_mistake(rows, np.concatenate(passes)) or _count_mistake(count, sizes, capacity)
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
            f"count, [:seq_len], not the empty room after them"
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
    want, tokens = _copied(sizes, capacity) * ROW, sum(sizes)
    if count in (want, _copied(sizes, capacity, _doubled) * ROW):
        return None
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
    """(bytes, the line for a function that counts them)."""

    def grown(*args, **kwargs):
        return _copied(sizes, capacity, *args, **kwargs) * ROW

    one_by_one = _copied((1,) * sum(sizes), capacity) * ROW
    every = int(np.cumsum([0, *sizes])[:-1].sum()) * ROW
    return (
        (
            every,
            "old rows are copied in every pass. That is concatenating: copy only when new rows do not fit",
        ),
        (
            0,
            f"the counter stayed 0, but {want // ROW:,} old rows had to move: add their bytes where you copy",
        ),
        (want // ROW, f"that is the number of rows that moved. Asked are bytes: {ROW} a row here"),
        (
            2 * want,
            "that is twice the bytes of the rows that moved. There is one array here, not a K and a V",
        ),
        (
            grown(moved=lambda seq_len, room, needed: room),
            "you copy the whole old array, the empty rows too. Only the first seq_len rows count",
        ),
        (
            grown(moved=lambda seq_len, room, needed: needed),
            "you count the new rows as well. They are written once in any cache; count the old ones",
        ),
        (
            grown(_doubled, moved=lambda seq_len, room, needed: seq_len * _doublings(room, needed)),
            "the old rows are copied several times for one pass. Grow once a pass, to what it needs",
        ),
        (
            one_by_one,
            "full arrays are copied. Do you append a pass row by row, or copy empty rows? Grow once a pass, "
            "before its rows are written, and copy the first seq_len rows",
        ),
        (
            grown(early=True),
            "the room grows although the pass would just fit: grow when stop > len(array), not when they are "
            "equal",
        ),
        *(
            (grown(room), f"{what}: make it twice the old one, or what the pass needs")
            for what, room in ROOMS
        ),
        *((grown(_steps_of(step)), _constant(step)) for step in {capacity, 1, 2, 4, 8, 10, 16, 32, 64, 100}),
    )


ROOMS = (
    ("the new room is three times the old one", lambda room, needed: max(3 * room, needed)),
    ("the new room is four times the old one", lambda room, needed: max(4 * room, needed)),
    ("the new room is twice what the pass needs", lambda room, needed: 2 * needed),
    ("the new room is the old one and what the pass needs", lambda room, needed: room + needed),
)


def _constant(step):
    return (
        f"the room grows by {step} row{'s' * (step != 1)} each time. A longer text then grows more often, "
        f"and the copies are quadratic: double it"
    )


def _at_once(room, needed):
    return max(2 * room, needed)


def _doubled(room, needed):
    return room * 2 ** _doublings(room, needed)


def _doublings(room, needed):
    return (-(-needed // room) - 1).bit_length()


def _steps_of(step):
    """Room that grows by `step` rows at a time, as often as a pass needs."""
    return lambda room, needed: room + step * -(-(needed - room) // step)


def _copied(sizes, capacity, grow=_at_once, moved=lambda seq_len, room, needed: seq_len, early=False):
    """Rows copied where `grow(room, needed)` is the next room and `moved` what one growth copies.

    early  grow when a pass just fits, too
    """
    seq_len = copied = 0
    for n in sizes:
        needed = seq_len + n
        if needed + early > capacity:
            copied += moved(seq_len, capacity, needed)
            capacity = grow(capacity, needed)
        seq_len = needed
    return copied
