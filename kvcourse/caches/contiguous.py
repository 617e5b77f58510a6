"""Three caches with all rows of a sequence side by side: reserved up front, doubled, or concatenated."""

import numpy as np

from kvcourse import ops
from kvcourse.caches.base import KVCache, read_only


class _Contiguous(KVCache):
    def attend(self, layer, q, k, v, rotate=None):
        self._check_rows(layer, q, k, v)
        q, k = self._rotated(q, k, rotate)
        keys, values = self._store(layer, k, v)  # first write, then read all rows back
        return ops.attention(q, keys, values, start=self.seq_len)


class _InPlace(_Contiguous):
    """Rows laid out in advance, K and V (num_layers, num_kv_heads, capacity, head_dim), written in place.

    Rows from seq_len on hold old or undefined numbers; no method reads them.
    """

    def _reserve(self, capacity):
        """Two arrays with room for `capacity` tokens in every layer. np.zeros, so that a row nobody
        wrote is 0 and not whatever the memory held before."""
        layers, heads, head_dim = self.config.cache_shape
        shape = (layers, heads, capacity, head_dim)
        return np.zeros(shape, self.dtype), np.zeros(shape, self.dtype)

    @property
    def nbytes(self):
        return self._k.nbytes + self._v.nbytes

    def keys_values(self, layer):
        return tuple(read_only(rows[layer, :, : self.seq_len]) for rows in (self._k, self._v))

    def _write(self, layer, k, v):
        start, stop = self.seq_len, self.seq_len + self.pending
        self._k[layer, :, start:stop] = k
        self._v[layer, :, start:stop] = v
        return self._k[layer, :, :stop], self._v[layer, :, :stop]


class ContiguousCache(_InPlace):
    """Preallocated: room for all max_seq_len tokens from the start; no row is ever moved."""

    def __init__(self, config, max_seq_len=None):
        super().__init__(config, max_seq_len)
        self._k, self._v = self._reserve(self.max_seq_len)


class GrowingCache(_InPlace):
    """Room for `capacity` tokens at first (default: 16), and twice as much each time it runs out.

    `bytes_copied` counts the bytes of old rows that growing has moved. Each capacity but the
    last, which max_seq_len may cut, is at least twice the one before, so all copies together
    move fewer than twice the rows that there were at the last growth: a constant share of
    the writing, however long the text (Cormen et al., "Introduction to Algorithms", dynamic
    tables). Room, once made, stays after abort, truncate and reset.
    """

    def __init__(self, config, max_seq_len=None, capacity=None):
        super().__init__(config, max_seq_len)
        capacity = min(16, self.max_seq_len) if capacity is None else capacity
        if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer):
            raise TypeError(f"capacity is {capacity!r}: give a whole number of tokens")
        if not 1 <= capacity <= self.max_seq_len:
            raise ValueError(
                f"capacity {capacity} is outside 1 … {self.max_seq_len:,}, the tokens it may hold"
            )
        self.bytes_copied = 0
        self._k, self._v = self._reserve(int(capacity))

    @property
    def capacity(self):
        """Tokens there is room for without growing."""
        return self._k.shape[2]

    def begin(self, n):
        positions = super().begin(n)
        try:
            if self.seq_len + self.pending > self.capacity:
                self._grow(self.seq_len + self.pending)
        except BaseException:  # no memory, or an interrupt: the pass never began
            self.abort()
            raise
        return positions

    def _grow(self, needed):
        rows = self._reserve(min(max(2 * self.capacity, needed), self.max_seq_len))
        for new, old in zip(rows, (self._k, self._v), strict=True):
            new[:, :, : self.seq_len] = old[:, :, : self.seq_len]
        # Both in one assignment: an interrupt before it finds the old pair whole.
        self._k, self._v = rows
        self.bytes_copied += self.nbytes_used


class ConcatenatingCache(_Contiguous):
    """Grown with np.concatenate: every pass copies every old row into a new array.

    Kept as the plainest cache there is, the oracle of the others. `bytes_copied`
    counts the bytes of old rows copied so far. After `truncate` the arrays stay as
    long as they were until the next pass copies the rows that count.
    """

    def __init__(self, config, max_seq_len=None):
        super().__init__(config, max_seq_len)
        layers, heads, head_dim = config.cache_shape
        self.bytes_copied = 0
        empty = np.empty((heads, 0, head_dim), self.dtype)
        self._rows = [(empty, empty)] * layers
        self._grown = {}  # layer -> (K, V) with the pending rows, until commit

    @property
    def nbytes(self):
        return sum(k.nbytes + v.nbytes for k, v in [*self._rows, *self._grown.values()])

    def keys_values(self, layer):
        return tuple(read_only(rows[:, : self.seq_len]) for rows in self._rows[layer])

    def _write(self, layer, k, v):
        old_k, old_v = self.keys_values(layer)
        self.bytes_copied += old_k.nbytes + old_v.nbytes
        self._grown[layer] = np.concatenate([old_k, k], axis=1), np.concatenate([old_v, v], axis=1)
        return self._grown[layer]

    def _keep(self, n):
        # Rows behind seq_len are never read, so all that were begun may come along.
        if n:
            self._rows = [self._grown[layer] for layer in range(self.config.num_layers)]
        self._grown = {}
