"""The exercise of chapter 10."""

import numpy as np

from kvcourse.checks import Run, exercise, short

# Where each row's tokens stand: (tokens, padding before them, padding after them).
CASES = (
    ((3, 5, 0), (8, 0, 0), (4, 4, 0)),  # padded at the left
    ((4, 0, 2), (1, 0, 5), (6, 0, 0)),  # at the right
    ((2, 1, 1), (4, 0, 0), (3, 0, 1), (1, 3, 0)),  # both in one batch
    ((5, 0, 0), (5, 0, 0)),  # none
    ((1, 0, 0),),
)


@exercise(
    "10.batch_inputs",
    right=(
        "each row counts its own tokens from 0, sees no padding and nothing later, and hands out the logits "
        "of its own newest token, wherever the padding stands."
    ),
    todo="replace `...` by the three arrays, then run this cell again",
)
def batch_inputs(run: Run) -> str | None:
    """``batch_inputs(real)`` → positions (B, T), visible (B, T, T), last (B,)."""
    for case in CASES:
        real = _real(case)
        got = run(real)
        if not isinstance(got, (tuple, list)) or len(got) != 3:
            return f"return three arrays, positions, visible and last, not {short(got)}"
        positions, visible, last = (np.asarray(array) for array in got)
        B, T = real.shape
        mistake = (
            _form_mistake("positions", positions, (B, T), np.integer)
            or _form_mistake("visible", visible, (B, T, T), np.bool_)
            or _form_mistake("last", last, (B,), np.integer)
            or _position_mistake(positions, real)
            or _mask_mistake(visible, real)
            or _last_mistake(last, real)
        )
        if mistake:
            return f"{mistake} (x a token, · padding: {_drawn(real)})"
    return None


def _real(case):
    """Boolean (B, T), True where a column holds a token."""
    rows = [[False] * before + [True] * tokens + [False] * after for tokens, before, after in case]
    return np.array(rows)


def _drawn(real):
    """The batch on one line: x for a token, · for padding."""
    rows = ("".join("x" if cell else "·" for cell in row) for row in real)
    return ", ".join(f"row {number} {row}" for number, row in enumerate(rows))


def _form_mistake(name, array, shape, kind):
    if array.shape != shape:
        return f"{name} has shape {array.shape}, expected {shape}"
    if not np.issubdtype(array.dtype, kind):
        wanted = "booleans" if kind is np.bool_ else "whole numbers"
        return f"{name} holds {array.dtype}, expected {wanted}"
    return None


def _position_mistake(positions, real):
    B, T = real.shape
    own = np.cumsum(real, axis=1) - 1
    wrong = (positions != own) & real
    if wrong.any():
        row, column = (int(index) for index in np.argwhere(wrong)[0])
        found, want = int(positions[row, column]), int(own[row, column])
        where = f"row {row}, column {column}: position {found}, expected {want}"
        if (positions == np.arange(T)).all():
            return (
                f"{where}. Positions not shifted: all rows share their columns' numbers. The first token of "
                f"a text has position 0, however much padding stands before it"
            )
        if (positions[real] == own[real] + 1).all():
            return f"{where}. A running sum of tokens is 1 at the first one: take 1 away"
        return f"{where}: a token's position is the number of its own text's tokens before it"
    if positions.min() < 0:
        row, column = (int(index) for index in np.argwhere(positions < 0)[0])
        return (
            f"row {row}, column {column}: position {int(positions[row, column])}, negative. NumPy would take "
            f"a row from the end of wpe, and a GPU would stop or read elsewhere: give padding a position of "
            f"at least 0"
        )
    if positions.max() >= T:
        return f"padding got position {int(positions.max())} in {T} columns: keep it below {T}, 0 will do"
    return None


def _mask_mistake(visible, real):
    B, T = real.shape
    causal = np.tri(T, dtype=bool)
    for row in range(B):
        seen = visible[row]
        tokens = np.flatnonzero(real[row])
        late = np.argwhere(seen & ~causal & real[row][:, None])
        if len(late):
            query, key = late[0].tolist()
            turned = (seen == (causal & real[row]).T)[tokens].all() and T > 1
            return f"row {row}: the query in column {query} sees column {key}, which comes later. " + (
                "The mask is turned around: axis 1 is the query, axis 2 the key"
                if turned
                else "Keep the triangle"
            )
        padding = np.argwhere(seen & ~real[row] & real[row][:, None])
        if len(padding):
            query, key = padding[0].tolist()
            return (
                f"padding not masked: in row {row} the token in column {query} sees column {key}, which "
                f"holds padding"
            )
        missing = np.argwhere(causal & real[row] & real[row][:, None] & ~seen)
        if len(missing):
            query, key = missing[0].tolist()
            which = "itself" if query == key else f"the token in column {key}"
            return f"row {row}: the token in column {query} does not see {which}"
        empty = np.flatnonzero(~seen.any(axis=1))
        if len(empty):
            return (
                f"row {row}: the padding in column {int(empty[0])} sees no key at all, and a softmax over "
                f"nothing is NaN: let padding see itself"
            )
    return None


def _last_mistake(last, real):
    B, T = real.shape
    want = T - 1 - np.argmax(real[:, ::-1], axis=1)
    if (last == want).all():
        return None
    row = int(np.flatnonzero(last != want)[0])
    found, wanted = int(last[row]), int(want[row])
    where = f"last real token of row {row} picked wrongly: column {found}, expected {wanted}"
    if found == int(real[row].sum()) - 1:
        return f"{where}. The number of tokens less 1 is its column only if no padding stands before it"
    if found == T - 1:
        return f"{where}. The last column holds padding here"
    if found == wanted + 1:
        return f"{where}. Columns count from 0"
    return where
