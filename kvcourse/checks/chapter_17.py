"""The exercise of chapter 17."""

import numpy as np

from kvcourse.checks import Run, exercise, short

SIZE = 4  # slots of a block in the check
# (first position of the block, tokens of the sequence)
CASES = (
    (4, 8, "a full last block"),
    (8, 10, "the last block, two of its four slots filled"),
    (0, 10, "a full block in front of others"),
    (12, 13, "a last block with one token"),
    (0, 3, "a text of one block"),
)
OLD = 50.0  # score of a key that somebody left in an unused slot: larger than all others


@exercise(
    "17.mask_block",
    right=(
        "scores of slots without a token are −inf and their values 0, whatever lay there: NaN, old keys, "
        "old values. The last block is where first + slot reaches length."
    ),
    todo="replace `...` by the two arrays, then run this cell again",
)
def mask_block(run: Run) -> str | None:
    """``mask_block(scores, v, first, length)`` → scores, v with the unused slots masked."""
    for poison in ("old keys", "NaN"):
        for first, length, what in CASES:
            scores, v = _block(first, length, poison)
            got = run(scores, v, first, length)
            mistake = _shape_mistake(got) or _mistake(got, scores, v, first, length)
            if mistake:
                return f"{mistake} ({what}: first {first}, length {length}, unused slots hold {poison})"
    return None


def _block(first, length, poison):
    random = np.random.default_rng(first + length)
    scores = random.standard_normal((2, SIZE)).astype(np.float32)
    v = random.standard_normal((SIZE, 3)).astype(np.float32)
    used = _used(first, length)
    scores[:, ~used] = np.nan if poison == "NaN" else OLD
    v[~used] = np.nan if poison == "NaN" else OLD
    return scores, v


def _used(first, length):
    return first + np.arange(SIZE) < length


def _shape_mistake(got):
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        return f"return two arrays, scores and v, not {short(got)}"
    for name, array, shape in zip(("scores", "v"), got, ((2, SIZE), (SIZE, 3)), strict=True):
        if getattr(array, "shape", None) != shape:
            return (
                f"{name} has shape {getattr(array, 'shape', None)}, expected {shape}: a block keeps all its "
                f"slots, as a program's tile does"
            )
    return None


def _mistake(got, scores, v, first, length):
    new_scores, new_v = (np.asarray(array) for array in got)
    used = _used(first, length)
    hidden = (new_scores == -np.inf).all(axis=0)  # slots that take no part
    if hidden.all():
        return (
            "all slots are masked. length % 4 is 0 for a full last block and says nothing of earlier blocks: "
            "compare first + slot with length"
        )
    if (hidden & used).any():
        slot = int(np.argmax(hidden & used))
        return f"slot {slot} is masked, and it holds token {first + slot} of {length}"
    if (~hidden & ~used).any():
        return _open_slot(new_scores, scores, ~hidden & ~used, first, length)
    if not np.array_equal(new_scores[:, used], scores[:, used]):
        return "scores of tokens were changed: only unused slots are masked"
    if not np.array_equal(new_v[used], v[used]):
        return "values of tokens were changed: only unused slots are masked"
    if not np.isfinite(new_v[~used]).all():
        return (
            "v still holds NaN in unused slots: their weight is 0, but 0 · NaN is NaN. "
            "Mask the values as well"
        )
    if new_v[~used].any():
        return "v keeps old values in unused slots: put 0 there, so that nothing hangs on their weight"
    return None


def _open_slot(new_scores, scores, open_slots, first, length):
    slot = int(np.argmax(open_slots))
    query = int(np.argmax(new_scores[:, slot] != -np.inf))  # its score takes part, others may be masked
    where = f"slot {slot} would be token {first + slot}, and the sequence has {length}"
    value, before = new_scores[query, slot], scores[query, slot]
    if query:
        return f"{where}: its score is −inf for query 0 and {value:g} for query {query}. Mask it for all"
    if np.isnan(value):
        if np.isnan(before):
            return f"{where}: its score is NaN. NaN times 0 or plus −inf stays NaN: choose with np.where"
        return f"{where}: its score became NaN (0 · −inf): choose with np.where"
    if value == 0:
        return f"{where}: a score of 0 has weight e⁰ = 1 before the division: −inf has 0"
    if value == before:
        if open_slots.sum() == 1 and slot + 1 < SIZE:
            return f"{where}: the last token is number {length - 1}, so use < and not <="
        return f"{where}: its score is still that of an old key. Token number: first + slot"
    return f"{where}: its score is {value:g}, expected −inf"
