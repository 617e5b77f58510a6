"""The exercises of chapter 16."""

import numbers

from kvcourse.checks import Run, exercise, short

# (block_table, start, stop, block_size)
TABLES = (
    ([7, 2, 5], 0, 20, 16),  # from the first block into the second
    ([7, 2, 5], 30, 37, 16),  # a piece in the middle
    ([9, 0, 4, 1], 5, 13, 4),  # three blocks, of which the first and the last in part
    ([3], 2, 3, 8),  # one token
    ([6, 8], 4, 4, 4),  # none
    ([5, 1, 2], 0, 3, 1),  # blocks of one slot
)


@exercise(
    "16.slot_mapping",
    right="position p lies in slot block_table[p // block_size] · block_size + p mod block_size.",
    todo="replace `...` by the list of slots, then run this cell again",
)
def slot_mapping(run: Run) -> str | None:
    """``slot_mapping(block_table, start, stop, block_size)`` → slots of tokens start … stop − 1, a list."""
    for table, start, stop, size in TABLES:
        run.explain = _explain
        got = run(table, start, stop, size)
        got = got.tolist() if hasattr(got, "tolist") else got  # arrays of NumPy and of torch
        got = list(got) if isinstance(got, tuple) else got
        case = f"block_table {table}, tokens {start} … {stop - 1}, block_size {size}"
        if not isinstance(got, list):
            return f"return a list of slots, not {short(got)}"
        mistake = _mapping_mistake(got, table, start, stop, size)
        if mistake:
            return f"{mistake} ({case})"
    return None


def _explain(error):
    if isinstance(error, IndexError):
        return "your function reads an entry that the block table has not: p lies in entry p // block_size"
    return None


def _mapping_mistake(got, table, start, stop, size):
    positions = range(start, stop)
    want = [table[p // size] * size + p % size for p in positions]
    if any(isinstance(item, (tuple, list)) for item in got):
        return "a slot is one number, block · block_size + place in the block, not a pair"
    for item in got:
        if not isinstance(item, numbers.Integral) or isinstance(item, bool):
            return f"a slot is a whole number, an index, not {short(item)}"
    if got == want:
        return None
    if len(got) != len(want):
        return f"{len(got)} slots for {len(want)} tokens: start … stop − 1 are meant, stop is not"
    wrong = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    where = f"position {start + wrong} in slot {short(got[wrong])}, expected {want[wrong]}"
    for rule, name in (
        (lambda p: p, "that is the position itself; the block table says where its block lies"),
        (lambda p: table[0] * size + p, "blocks need not be adjacent: each has its own entry in the table"),
        (lambda p: table[p // 16] * 16 + p % 16, "take block_size, not always 16"),
        (lambda p: table[p // size] * size, "that is the first slot of its block: add the place in it"),
        (lambda p: table[p // size] + p % size, "a block number counts blocks: multiply it by block_size"),
        (
            lambda p: table[(p - start) // size] * size + (p - start) % size,
            "the table begins at position 0 of the sequence, not at start",
        ),
        (
            lambda p: sorted(table)[p // size] * size + p % size,
            "the table lists blocks in the order of the tokens: do not sort it",
        ),
        (
            lambda p: table[p // size] * size + p,
            "add the place in the block, p mod block_size, not the position in the sequence",
        ),
    ):
        if got == [rule(p) for p in positions]:
            return f"{where}: {name}"
    return where


@exercise(
    "16.needs_block",
    right="a new block is needed before position p is written exactly when p is a multiple of block_size.",
    todo="replace `...` by a condition, then run this cell again",
)
def needs_block(run: Run) -> str | None:
    """``needs_block(position, block_size)`` → whether a block must be taken for this position."""
    cases = [
        (p, size) for size in (16, 4, 1) for p in (0, 1, size - 1, size, size + 1, 2 * size - 1, 5 * size)
    ]
    answers = []
    for position, size in cases:
        got = run(position, size)
        if not isinstance(got, bool):
            return f"return True or False, not {short(got)}"
        answers.append(got)
    wrong = [case for case, got in zip(cases, answers, strict=True) if got != (case[0] % case[1] == 0)]
    if not wrong:
        return None
    for rule, name in (
        (
            lambda p, size: (p + 1) % size == 0,
            "that is when a block has just become full: the next token needs a block, and the very first",
        ),
        (
            lambda p, size: p == 0 or (p + 1) % size == 0,
            "a block early: this token fills the last block, and the next one needs a new one",
        ),
        (
            lambda p, size: p > 0 and p % size == 0,
            "an empty sequence has no block yet: its first token needs one",
        ),
        (lambda p, size: p == 0 or p % size == 1, "a token late: the one before it had no slot any more"),
        (lambda p, size: p == 0, "after the first block is full, the next token needs another one"),
        (lambda p, size: True, "a block has room for block_size tokens, not for one"),
    ):
        if answers == [rule(*case) for case in cases]:
            return f"{name} ({_case(*wrong[0])})"
    position, size = wrong[0]
    if position % size == 0:
        return f"all blocks so far are full, and this token would have no slot ({_case(position, size)})"
    return (
        f"its block is there already: position {position // size * size} opened it ({_case(position, size)})"
    )


def _case(position, block_size):
    return f"position {position}, block_size {block_size}"
