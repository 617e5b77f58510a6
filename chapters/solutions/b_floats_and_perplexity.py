"""Solutions of primer B."""

import math

import numpy as np


def to_bfloat16(x):
    """x float32 (n,) → float32 (n,), rounded to the nearest bfloat16, ties to even."""
    bits = x.view(np.uint32)
    last = (bits >> 16) & 1  # the last bit that stays
    # Below a tie nothing carries, above it something does; at the tie only where the last bit is 1.
    rounded = (bits + 0x7FFF + last) & 0xFFFF0000
    return np.where(np.isnan(x), x, rounded.view(np.float32))


def bits_per_character(logits, ids, characters):
    """logits (T, vocab_size), T ids, characters of tokens 1 … T − 1 → bits per character."""
    logits = logits[:-1]  # the last row predicts what nobody wrote
    shifted = logits - logits.max(axis=-1, keepdims=True)  # softmax is the same, and exp cannot overflow
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    nats = -log_probs[np.arange(len(ids) - 1), ids[1:]].sum()
    return nats / math.log(2) / characters
