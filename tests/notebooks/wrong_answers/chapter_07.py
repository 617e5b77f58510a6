"""Typical wrong answers of chapter 07."""

import numpy as np


def _append(passes, capacity, room, copy=True, count=lambda seq_len, capacity, n: seq_len, result=None):
    """The loop with its parts exchanged: how much room comes next, what is copied, what is counted."""
    width = passes[0].shape[1]
    array, seq_len, copied = np.zeros((capacity, width), np.float32), 0, 0
    for new in passes:
        stop = seq_len + len(new)
        if stop > len(array):
            larger = np.zeros((room(len(array), stop), width), np.float32)
            if copy:
                larger[:seq_len] = array[:seq_len]
            copied += count(seq_len, len(array), len(new)) * width * 4
            array = larger
        array[seq_len:stop] = new
        seq_len = stop
    return (array[:seq_len] if result is None else result(array)), copied


def _double(capacity, needed):
    return max(2 * capacity, needed)


def _grows_by_its_first_room(passes, capacity):
    return _append(passes, capacity, lambda room, needed: room + capacity * -(-(needed - room) // capacity))


def _grows_by_sixteen(passes, capacity):
    return _append(passes, capacity, lambda room, needed: room + 16 * -(-(needed - room) // 16))


def _concatenates(passes, capacity):
    rows, copied = passes[0][:0], 0
    for new in passes:
        copied += rows.nbytes
        rows = np.concatenate([rows, new])
    return rows, copied


def _doubles_once(passes, capacity):
    array, seq_len, copied = np.zeros((capacity, passes[0].shape[1]), np.float32), 0, 0
    for new in passes:
        if seq_len + len(new) > len(array):
            copied += array[:seq_len].nbytes
            array = np.concatenate([array, np.zeros_like(array)])
        array[seq_len : seq_len + len(new)] = new
        seq_len += len(new)
    return array[:seq_len], copied


def _doubles_and_copies_until_it_fits(passes, capacity):
    array, seq_len, copied = np.zeros((capacity, passes[0].shape[1]), np.float32), 0, 0
    for new in passes:
        while seq_len + len(new) > len(array):
            copied += array[:seq_len].nbytes
            array = np.concatenate([array, np.zeros_like(array)])
        array[seq_len : seq_len + len(new)] = new
        seq_len += len(new)
    return array[:seq_len], copied


def _row_by_row(passes, capacity):
    return _append([row[None] for new in passes for row in new], capacity, _double)


def _grows_one_row_early(passes, capacity):
    rows, seq_len, room, copied = np.concatenate(passes), 0, capacity, 0
    for new in passes:
        if seq_len + len(new) >= room:
            copied += rows[:seq_len].nbytes
            room = _double(room, seq_len + len(new))
        seq_len += len(new)
    return rows, copied


def _counts_k_and_v(passes, capacity):
    rows, copied = _append(passes, capacity, _double)
    return rows, 2 * copied


def _never_moves_seq_len(passes, capacity):
    rows, copied = _append(passes, capacity, _double)
    rows = rows.copy()
    rows[:] = rows[-1]
    return rows, copied


WRONG = {
    "07.append_growing": [
        (_grows_by_its_first_room, "the room grows by 4 rows each time"),
        (_grows_by_sixteen, "the room grows by 16 rows each time"),
        (_concatenates, "That is concatenating"),
        (
            lambda passes, capacity: _append(passes, capacity, _double, count=lambda rows, room, n: 0),
            "the counter stayed 0",
        ),
        (
            lambda passes, capacity: (_append(passes, capacity, _double)[0], 1020),
            "that is the number of rows that moved",
        ),
        (
            lambda passes, capacity: _append(passes, capacity, _double, count=lambda rows, room, n: room),
            "you copy the whole old array",
        ),
        (
            lambda passes, capacity: _append(passes, capacity, _double, count=lambda rows, room, n: rows + n),
            "you count the new rows as well",
        ),
        (
            lambda passes, capacity: _append(passes, capacity, _double, copy=False),
            "it was lost when the array grew",
        ),
        (
            lambda passes, capacity: _append(passes, capacity, _double, result=lambda array: array),
            "return the rows that count",
        ),
        (lambda passes, capacity: (passes[-1], 0), "some were lost"),
        (_doubles_once, "could not broadcast"),
        (_doubles_and_copies_until_it_fits, "the old rows are copied several times for one pass"),
        (_row_by_row, "Do you append a pass row by row"),
        (_grows_one_row_early, "the room grows although the pass would just fit"),
        (_counts_k_and_v, "that is twice the bytes"),
        (
            lambda passes, capacity: _append(passes, capacity, lambda room, needed: max(3 * room, needed)),
            "the new room is three times the old one",
        ),
        (
            lambda passes, capacity: _append(passes, capacity, lambda room, needed: max(4 * room, needed)),
            "the new room is four times the old one",
        ),
        (
            lambda passes, capacity: _append(passes, capacity, lambda room, needed: 2 * needed),
            "the new room is twice what the pass needs",
        ),
        (
            lambda passes, capacity: _append(passes, capacity, lambda room, needed: room + needed),
            "the new room is the old one and what the pass needs",
        ),
        (_never_moves_seq_len, "seq_len moves after every pass"),
        (
            lambda passes, capacity: _append(passes, capacity, lambda room, needed: needed + room // 4 + 1),
            "more than twice as many",
        ),
        (lambda passes, capacity: _append(passes, capacity, _double)[0], "return two things"),
    ],
}
