"""Typical wrong answers of primer B."""

import math

import numpy as np


def _truncated(x):
    return (x.view(np.uint32) & 0xFFFF0000).view(np.float32)


def _ties_away(x):
    rounded = ((x.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def _without_nan(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def _bits_only(x):
    bits = x.view(np.uint32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _in_nats(logits, ids, characters):
    return -_log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]].sum() / characters


def _per_token(logits, ids, characters):
    return -_log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]].mean() / math.log(2)


def _without_shift(logits, ids, characters):
    return -_log_softmax(logits)[np.arange(len(ids)), ids].sum() / math.log(2) / characters


def _without_softmax(logits, ids, characters):
    return -logits[np.arange(len(ids) - 1), ids[1:]].sum() / math.log(2) / characters


WRONG = {
    "b.to_bfloat16": [
        (_truncated, "you cut the lower 16 bits off"),
        (_ties_away, "you go away from 0"),
        (_without_nan, "Find NaNs with np.isnan"),
        (_bits_only, "the bits as whole numbers"),
    ],
    "b.bits_per_character": [
        (_in_nats, "these are nats"),
        (_per_token, "these are bits per token"),
        (_without_shift, "row t predicts token t + 1"),
        (_without_softmax, "these are the logits themselves"),
    ],
}
