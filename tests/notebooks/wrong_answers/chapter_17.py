"""Typical wrong answers of chapter 17."""

import numpy as np


def _answer(used_of, score=-np.inf, value=0.0):
    """mask_block with another idea of which slots are used, or of what to put into the others."""

    def mask_block(scores, v, first, length):
        used = used_of(np.arange(len(v)), first, length)
        new_v = v if value is None else np.where(used[:, None], v, value)
        return np.where(used, scores, score), new_v

    return mask_block


def _right(slot, first, length):
    return first + slot < length


def _times_mask(scores, v, first, length):
    used = first + np.arange(len(v)) < length
    return scores * used, np.where(used[:, None], v, 0)


def _plus_minus_inf(scores, v, first, length):
    used = first + np.arange(len(v)) < length
    return scores + np.where(used, 0, -np.inf), np.where(used[:, None], v, 0)


def _values_times_mask(scores, v, first, length):
    used = first + np.arange(len(v)) < length
    return np.where(used, scores, -np.inf), v * used[:, None]


def _cut(scores, v, first, length):
    n = min(len(v), length - first)
    return scores[:, :n], v[:n]


def _in_place(scores, v, first, length):
    used = first + np.arange(len(v)) < length
    scores[:, ~used] = -np.inf
    v[~used] = 0
    return scores, v


def _scores_alone(scores, v, first, length):
    return np.where(first + np.arange(len(v)) < length, scores, -np.inf)


def _query_0_alone(scores, v, first, length):
    used = first + np.arange(len(v)) < length
    scores = scores.copy()
    scores[0, ~used] = -np.inf
    return scores, np.where(used[:, None], v, 0)


WRONG = {
    "17.mask_block": [
        (_answer(lambda slot, first, length: slot < length % len(slot)), "says nothing of earlier blocks"),
        (_answer(lambda slot, first, length: slot < length), "Token number: first + slot"),
        (_answer(lambda slot, first, length: first + slot <= length), "so use < and not <="),
        (_answer(lambda slot, first, length: first + slot < length - 1), "and it holds token 7 of 8"),
        (_answer(_right, score=-1e4), "expected −inf"),
        (_answer(_right, value=None), "v keeps old values"),
        (_times_mask, "a score of 0 has weight"),
        (_plus_minus_inf, "NaN times 0 or plus −inf stays NaN"),
        (_values_times_mask, "Mask the values as well"),
        (_cut, "a block keeps all its slots"),
        (_in_place, "changed its input"),
        (_scores_alone, "two arrays"),
        (_query_0_alone, "−inf for query 0 and 50 for query 1"),
    ]
}
