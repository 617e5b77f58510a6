"""How well a model predicts a text: log-probabilities, perplexity, bits per character. Pure functions."""

import math

import numpy as np


def log_probabilities(logits):
    """Natural logarithm of softmax over the last axis, same shape and dtype as logits.

    The row's maximum is taken away first, so exp cannot overflow.
    """
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def next_token_log_probs(logits, ids):
    """ln p(ids[t + 1] | ids[0 … t]) for t = 0 … T − 2, float32 (T − 1,).

    logits float32 (T, vocab_size) of a pass over all T ids; row t predicts token t + 1,
    and the last row predicts what nobody wrote. Raises ValueError unless there is one row
    a token, at least two tokens, and every id has a column; TypeError for ids that are not
    whole numbers.
    """
    logits, ids = np.asarray(logits), np.asarray(ids)
    if ids.ndim != 1 or len(logits) != len(ids) or len(ids) < 2:
        raise ValueError(
            f"logits of {len(logits)} rows and ids of shape {ids.shape}: "
            f"give one row per token, at least 2 tokens"
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"ids are {ids.dtype}: token ids are whole numbers")
    for bad in (int(ids.min()), int(ids.max())):
        if not 0 <= bad < logits.shape[1]:
            raise ValueError(f"token id {bad:,} has no column among the {logits.shape[1]:,} logits of a row")
    return log_probabilities(logits[:-1])[np.arange(len(ids) - 1), ids[1:]]


def perplexity(log_probs):
    """exp(−mean): the number of equally likely tokens among which the model would be as unsure.

    Infinite where that number exceeds float64. Raises ValueError for no log-probabilities.
    """
    with np.errstate(over="ignore"):
        return float(np.exp(-_mean(log_probs)))


def bits_per_character(log_probs, characters):
    """Bits spent on the tokens, −Σ log₂ p, divided by the characters they stand for.

    Unlike perplexity it can be compared across tokenizers: it counts text, not pieces of
    it. `characters` is the length of the predicted tokens' text. Raises ValueError for
    fewer than 1 character.
    """
    if isinstance(characters, str):
        raise TypeError("characters is a text: give its length, len(text)")
    if not characters >= 1:
        raise ValueError(f"{characters} characters: give the length of the predicted text, at least 1")
    return -_mean(log_probs) * len(log_probs) / math.log(2) / characters


def _mean(log_probs):
    """Mean in float64: a text of thousands of tokens would lose digits in a float32 sum."""
    if len(log_probs) == 0:
        raise ValueError("no log-probabilities: give those of at least 1 token")
    return float(np.mean(log_probs, dtype=np.float64))
