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
    _check_ids(ids, logits.shape[1])
    return log_probabilities(logits[:-1])[np.arange(len(ids) - 1), ids[1:]]


def log_probs(model, ids, cache, chunk=64):
    """ln p(ids[t + 1] | what the cache holds) for t = 0 … T − 2, float32 (T − 1,).

    The tokens pass through the model in passes of `chunk`, into the cache, so that each one is
    predicted from what the cache kept of those before it, and as the cache gives it back. The last
    token is predicted and never passed: another call that begins with it continues the text.

    model  called as model(ids, cache)
    cache  a KVCache; what it holds already stands before ids[0]
    chunk  tokens a pass. A cache that forgets or rounds at the end of a pass shows a pass its own
           tokens whole, so state the chunk beside such a figure.

    Raises, before any pass, ValueError for fewer than 2 tokens, an id outside the vocabulary or a chunk
    below 1, and TypeError for no cache; CacheFull, from the cache, where a pass does not fit: passes
    before it then count.
    """
    ids = checked_text(model, ids, cache, chunk)
    found = []
    for start in range(0, len(ids) - 1, chunk):
        part = ids[start : min(start + chunk, len(ids) - 1)]
        following = ids[start + 1 : start + 1 + len(part)]
        logits = log_probabilities(model(part, cache))  # (chunk, vocab_size)
        found.append(logits[np.arange(len(part)), following])
    return np.concatenate(found)


def checked_text(model, ids, cache, chunk):
    """ids as an array, once it is sure that they can pass through the model in chunks, into the cache.

    Raises as `log_probs` says.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or len(ids) < 2:
        raise ValueError(f"ids of shape {ids.shape}: give a list of at least 2 tokens")
    _check_ids(ids, model.config.vocab_size)
    if cache is None:  # each chunk would be a text of its own
        raise TypeError("cache is None: give one, such as kv.ContiguousCache.for_model(model)")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: pass at least 1 token at once")
    return ids


def _check_ids(ids, vocab_size):
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"ids are {ids.dtype}: token ids are whole numbers")
    for bad in (int(ids.min()), int(ids.max())):
        if not 0 <= bad < vocab_size:
            raise ValueError(f"token id {bad:,} has no column among the {vocab_size:,} logits of a row")


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
