"""`BatchView`: several sequences, each with its own cache and length, in one pass."""

import operator

import numpy as np

from kvcourse.caches.base import KVCache


class BatchView:
    """A ragged batch: the new tokens of several sequences laid end to end.

    The weights see one tall matrix, so they are read once for the whole batch;
    attention is split per sequence, so each sees only its own rows. The NumPy
    models need no batch dimension for this.

        view = BatchView([cache_a, cache_b], lengths=[3, 1])
        logits = model(three_tokens_of_a + one_token_of_b, view, rows=view.last_rows)
    """

    def __init__(self, caches, lengths):
        caches, lengths = list(caches), [operator.index(n) for n in lengths]
        if not caches:
            raise ValueError("a batch of 0 sequences is empty: give at least 1 cache")
        if len(caches) != len(lengths):
            raise ValueError(f"{len(caches)} caches but {len(lengths)} lengths: give one length a cache")
        for cache in caches:
            if not isinstance(cache, KVCache):
                raise TypeError(f"a {type(cache).__name__} in the batch: every sequence needs a KVCache")
        if len({id(c) for c in caches}) < len(caches):
            raise ValueError("the same cache stands twice in the batch: give each sequence its own")
        if min(lengths) < 1:
            raise ValueError(f"length {min(lengths)} in the batch: each sequence needs at least 1 new token")
        if len({c.config.cache_shape for c in caches}) > 1:
            raise ValueError("the caches of a batch are of different shapes: all must fit one model")
        self.caches = caches
        self.lengths = lengths
        self.config = caches[0].config
        self.unlimited = all(c.unlimited for c in caches)
        self._bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        self._open = False  # whether this view has begun a pass in all its caches

    @property
    def last_rows(self):
        """The row of each sequence's newest token in the pass, as a list."""
        return [stop - 1 for stop in self._bounds[1:]]

    @property
    def pending(self):
        """Tokens begun and not yet committed, of all caches together."""
        return sum(cache.pending for cache in self.caches)

    def begin(self, n):
        """Begin in every cache, or in none. Returns the positions, end to end, int64 (n,)."""
        if n != self._bounds[-1]:
            raise ValueError(f"{n} tokens given, the batch's lengths add up to {self._bounds[-1]}")
        for row, cache in enumerate(self.caches):
            if cache.pending:
                raise RuntimeError(f"cache {row} of the batch has an open pass: commit() or abort() it first")
        try:
            positions = [c.begin(length) for c, length in zip(self.caches, self.lengths, strict=True)]
        except BaseException:
            self.abort()
            raise
        self._open = True
        return np.concatenate(positions)

    def note_ids(self, ids):
        """`note_ids` of each cache on its own tokens."""
        for cache, low, high in zip(self.caches, self._bounds, self._bounds[1:], strict=False):
            cache.note_ids(ids[low:high])

    def attend(self, layer, q, k, v, rotate=None):
        """`attend` of each cache on its own rows; the results end to end, (num_heads, n, head_dim)."""
        if q.shape[1] != self._bounds[-1]:
            raise ValueError(f"{q.shape[1]} queries given, the batch's lengths add up to {self._bounds[-1]}")
        out = np.empty_like(q)
        for cache, low, high in zip(self.caches, self._bounds, self._bounds[1:], strict=False):
            rows = slice(low, high)
            out[:, rows] = cache.attend(layer, q[:, rows], k[:, rows], v[:, rows], rotate)
        return out

    def commit(self):
        """Keep the pass in every cache, or in none: a failure takes back what was kept."""
        if not self._open:
            raise RuntimeError("the batch has no open pass: call begin(n) first")
        for cache in self.caches:
            cache.check_complete()
        before = [cache.seq_len for cache in self.caches]
        try:
            for cache in self.caches:  # what may fail, in all of them before any counts
                cache._keep(cache.pending)
            for cache in self.caches:
                cache._count(cache.pending)
        except BaseException:
            self.abort()
            for cache, seq_len in zip(self.caches, before, strict=True):
                cache.truncate(seq_len)
            raise
        self._open = False

    def abort(self):
        """Take the pass back in every cache. Harmless when nothing was begun."""
        self._open = False
        for cache in self.caches:
            cache.abort()
