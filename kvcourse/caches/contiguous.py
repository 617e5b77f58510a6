"""Two caches with all rows of a sequence side by side: reserved up front, or grown by concatenation."""

import numpy as np

from kvcourse import ops
from kvcourse.caches.base import KVCache


class _Contiguous(KVCache):
    def attend(self, layer, q, k, v, rotate=None):
        self._check_rows(layer, q, k, v)
        if rotate is not None:
            positions = np.arange(self.seq_len, self.seq_len + self.pending)
            q, k = rotate(q, positions), rotate(k, positions)
        keys, values = self._store(layer, k, v)  # first write, then read all rows back
        return ops.attention(q, keys, values, start=self.seq_len)


class ContiguousCache(_Contiguous):
    """Preallocated: K and V (num_layers, num_kv_heads, max_seq_len, head_dim), written in place.

    Rows from seq_len on hold old or undefined numbers; no method reads them.
    """

    def __init__(self, config, max_seq_len=None):
        super().__init__(config, max_seq_len)
        layers, heads, head_dim = config.cache_shape
        self._k = np.zeros((layers, heads, self.max_seq_len, head_dim), self.dtype)
        self._v = np.zeros_like(self._k)

    @property
    def nbytes(self):
        return self._k.nbytes + self._v.nbytes

    def keys_values(self, layer):
        return tuple(_read_only(rows[layer, :, : self.seq_len]) for rows in (self._k, self._v))

    def _write(self, layer, k, v):
        start, stop = self.seq_len, self.seq_len + self.pending
        self._k[layer, :, start:stop] = k
        self._v[layer, :, start:stop] = v
        return self._k[layer, :, :stop], self._v[layer, :, :stop]


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
        return tuple(_read_only(rows[:, : self.seq_len]) for rows in self._rows[layer])

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


def _read_only(rows):
    view = rows.view()
    view.flags.writeable = False
    return view
