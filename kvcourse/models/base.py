"""What every NumPy model shares: the call, with a cache or without, and the checks of its arguments."""

from abc import ABC, abstractmethod

import numpy as np

from kvcourse import ops
from kvcourse.caches.base import CacheFull


class LanguageModel(ABC):
    """`model(ids)` → logits float32 (T, vocab_size); `model(ids, cache)` continues a sequence.

    A subclass has `config` and `params`, checked, and computes `_forward`.
    """

    def __call__(self, ids, cache=None, rows=None):
        """Logits of the given tokens, float32 (T, vocab_size), or of the chosen `rows` only.

        ids    T ≥ 1 token ids, a list or a 1-D integer array
        cache  a KVCache or BatchView; the tokens follow those already in it. Without
               one they are positions 0 … T − 1 and nothing is kept.
        rows   which of the T rows to return logits for, such as [-1]

        Raises, with the cache unchanged: ValueError (no tokens, an id outside the
        vocabulary, a row outside T, a cache of another shape, too many tokens without
        a cache), TypeError (ids that are not whole numbers), CacheFull.
        """
        ids = check_ids(ids, self.config)
        rows = check_rows(rows, len(ids))
        if cache is None:
            return self._forward(ids, _no_cache_positions(ids, self.config), _attend_without_cache, rows)
        if cache.config.cache_shape != self.config.cache_shape:
            raise ValueError(
                f"a cache of shape {cache.config.cache_shape} (layers, KV heads, head_dim) does not fit "
                f"{self.config.name}, {self.config.cache_shape}: make one with for_model(model)"
            )
        open_before = getattr(cache, "pending", 0)  # somebody else's pass: begin refuses, and it stays open
        try:
            positions = cache.begin(len(ids))
            self._check_positions(positions, cache)
            if hasattr(cache, "note_ids"):  # a reader's own plain cache need not have it
                cache.note_ids(ids)
            logits = self._forward(ids, positions, cache.attend, rows)
            cache.commit()
        except BaseException:  # an interrupted cell too must leave the cache as it was
            if not open_before:
                cache.abort()
            raise
        return logits

    def _check_positions(self, positions, cache):
        """A cache made for another model of the same shape may have more positions than this one.

        A cache without a limit says so: no query in it is turned further from a key than its window.
        """
        last, limit = int(positions.max()), self.config.max_seq_len
        unlimited = getattr(cache, "unlimited", False) and self.config.rope_theta is not None
        if last >= limit and not unlimited:
            raise CacheFull(
                f"position {last:,} is outside the {limit:,} positions of {self.config.name}: "
                f"shorten the prompt, or reset() the cache and keep the last tokens"
            )

    @abstractmethod
    def _forward(self, ids, positions, attend, rows):
        """Logits of checked ids; attend(layer, q, k, v, rotate=None) is the cache's or causal attention."""


def _attend_without_cache(layer, q, k, v, rotate=None):
    if rotate is not None:
        positions = np.arange(q.shape[1])
        q, k = rotate(q, positions), rotate(k, positions)
    return ops.attention(q, k, v, start=0)


def _no_cache_positions(ids, config):
    if len(ids) > config.max_seq_len:
        raise ValueError(
            f"{len(ids):,} tokens are more than the {config.max_seq_len:,} positions of {config.name}: "
            f"shorten the prompt, or keep its last {config.max_seq_len:,} tokens"
        )
    return np.arange(len(ids))


def check_ids(ids, config):
    """Token ids as an int64 array (T,). One-line errors for no, wrong or unknown ids."""
    if isinstance(ids, str):
        raise TypeError(
            f"ids is the text {ids[:20]!r}: give the token ids that tokenizer.encode(text) returns"
        )
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        raise ValueError("ids are lists of different lengths: give one flat list of token ids") from None
    if array.ndim != 1:
        raise ValueError(f"ids have shape {array.shape}: give one flat list of token ids")
    if array.size == 0:
        raise ValueError("no token ids: give at least 1 (an empty text may start with <|endoftext|>)")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"ids are {array.dtype}, such as {array.tolist()[0]!r}: token ids are whole numbers, "
            f"as tokenizer.encode(text) gives"
        )
    for bad in (int(array.min()), int(array.max())):
        if not 0 <= bad < config.vocab_size:
            raise ValueError(
                f"token id {bad:,} is outside the vocabulary of {config.name}, "
                f"0 … {config.vocab_size - 1:,}: was the text encoded with another model's tokenizer?"
            )
    return array.astype(np.int64, copy=False)


def check_rows(rows, T):
    """`rows` as an int64 array, or None. Raises ValueError for a row outside −T … T − 1."""
    if rows is None:
        return None
    array = np.asarray(rows)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"rows is {rows!r}: give a list of row numbers, such as [-1]")
    for row in array.reshape(-1):
        if not -T <= row < T:
            raise ValueError(f"row {row} is outside {-T} … {T - 1}: the pass has {T} tokens")
    return array.reshape(-1).astype(np.int64)
