"""A cache that forgets what nobody looked at: the tokens with the most attention so far, and the newest.

Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle" (arXiv 2306.14048), algorithm 1: a token's score is
the attention it has received, summed over the steps so far; half of the room goes to the largest scores,
half to the newest tokens, per layer and KV head.
"""

import numpy as np

from kvcourse import ops
from kvcourse.caches.base import CacheFull, KVCache, _whole
from kvcourse.caches.contiguous import _read_only


class HeavyHitterCache(KVCache):
    """At most `heavy + recent` rows a layer and KV head; each head keeps tokens of its own choice.

    A pass of up to `chunk` tokens sees what is held and itself; `commit` then evicts. Keys keep their
    original positions. Eviction cannot be taken back: max_rewind is 0 once something was evicted.
    The scores are counted in nbytes: an engine with a fused kernel has no attention weights to sum.
    """

    def __init__(self, config, max_seq_len=None, *, heavy, recent, chunk=64):
        super().__init__(config, max_seq_len)
        if heavy < 0 or recent < 1 or chunk < 1:
            raise ValueError(f"heavy {heavy}, recent {recent}, chunk {chunk}: at least 0, 1 and 1")
        self.heavy, self.recent, self.chunk = heavy, recent, chunk
        self.max_pass = chunk
        layers, heads, head_dim = config.cache_shape
        shape = layers, heads, heavy + recent + chunk
        self._k, self._v = (np.zeros((*shape, head_dim), self.dtype) for _ in "kv")
        self._score, self._position = np.zeros(shape, np.float32), np.full(shape, -1)
        self._held = 0  # committed rows, the same number in every layer and head
        self._seen = {}  # layer -> attention received in the open pass, (heads, rows)

    def begin(self, n):
        if _whole(n) > self.chunk:
            raise CacheFull(f"a pass of {n} tokens, the cache takes {self.chunk}: pass the prompt in chunks")
        return super().begin(n)

    def attend(self, layer, q, k, v, rotate=None):
        self._check_rows(layer, q, k, v)
        if rotate is not None:
            positions = np.arange(self.seq_len, self.seq_len + self.pending)
            q, k = rotate(q, positions), rotate(k, positions)
        keys, values = self._store(layer, k, v)
        heads, rows, head_dim = keys.shape
        grouped = (q * head_dim**-0.5).reshape(heads, -1, self.pending, head_dim)
        scores = grouped @ keys.swapaxes(1, 2)[:, None]  # (heads, group, n, rows)
        scores[..., ~ops.causal_mask(self._held, self.pending)] = -np.inf
        weights = ops.softmax_inplace(scores)
        self._seen[layer] = weights.sum(axis=(1, 2))  # (heads, rows)
        return (weights @ values[:, None]).reshape(q.shape)

    def _write(self, layer, k, v):
        new = slice(self._held, self._held + self.pending)
        self._k[layer, :, new], self._v[layer, :, new] = k, v
        self._score[layer, :, new] = 0
        self._position[layer, :, new] = np.arange(self.seq_len, self.seq_len + self.pending)
        return self._k[layer, :, : new.stop], self._v[layer, :, : new.stop]

    def _keep(self, n):
        seen, self._seen = self._seen, {}
        if not n:
            return
        rows = self._held + n
        for layer, received in seen.items():
            self._score[layer, :, :rows] += received[:, :rows]
        self._held = min(rows, self.heavy + self.recent)
        if rows > self._held:
            self._evict(rows)

    def _evict(self, rows):
        """Of the old rows keep the `heavy` largest scores, in order; the newest `recent` stay."""
        old = rows - self.recent
        ranked = np.argsort(-self._score[..., :old], axis=-1, kind="stable")
        best = np.sort(ranked[..., : self.heavy], axis=-1)
        newest = np.broadcast_to(np.arange(old, rows), (*best.shape[:2], self.recent))
        keep = np.concatenate([best, newest], axis=-1)  # (layers, heads, held)
        for array in (self._k, self._v):
            array[:, :, : self._held] = np.take_along_axis(array, keep[..., None], axis=2)
        for array in (self._score, self._position):
            array[:, :, : self._held] = np.take_along_axis(array, keep, axis=2)

    @property
    def max_rewind(self):
        return self.seq_len if self._held == self.seq_len else 0

    def truncate(self, seq_len):
        super().truncate(seq_len)
        self._held = min(self._held, seq_len)

    def reset(self):
        super().reset()
        self._held = 0

    @property
    def num_rows(self):
        return self._held

    @property
    def nbytes(self):
        return sum(a.nbytes for a in (self._k, self._v, self._score, self._position))

    def keys_values(self, layer):
        return tuple(_read_only(a[layer, :, : self._held]) for a in (self._k, self._v))

    def key_positions(self, layer):
        """Here each KV head has positions of its own: int64 (num_kv_heads, rows)."""
        return self._position[layer, :, : self._held].copy()
