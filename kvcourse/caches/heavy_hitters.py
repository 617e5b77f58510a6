"""A cache that forgets what nobody looked at: the tokens with the most attention so far, and the newest.

Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle" (arXiv 2306.14048), algorithm 1: a token's score is
the attention it has received, summed over the steps so far; half of the room goes to the largest scores,
half to the newest tokens, per layer and KV head.
"""

from typing import NamedTuple

import numpy as np

from kvcourse import ops
from kvcourse.caches.base import CacheFull, KVCache, read_only, whole_number


class _Rows(NamedTuple):
    """What the cache holds. Replaced as a whole, so that an interrupt finds the old rows or the new."""

    k: np.ndarray  # (layers, KV heads, room, head_dim)
    v: np.ndarray
    score: np.ndarray  # attention received so far, (layers, KV heads, room)
    position: np.ndarray  # (layers, KV heads, room)
    held: int  # committed rows, the same number in every layer and head


class HeavyHitterCache(KVCache):
    """At most `heavy + recent` rows a layer and KV head; each head keeps tokens of its own choice.

    A pass of up to `chunk` tokens sees what is held and itself; `commit` then evicts. Keys keep their
    original positions. Neither an eviction nor attention once counted can be taken back: max_rewind is 0.
    Scores and positions are counted in nbytes: an engine with a fused kernel has no attention weights to
    sum. Equal scores: the older token stays.

    Every `commit` that evicts, so each one of a full cache, copies the rows that stay, of all layers, into
    new arrays of `nbytes` together. Thus rows lie in order, and an interrupt finds the old ones whole. An
    engine would overwrite the row that leaves: this class shows what is forgotten, not what a step costs.
    """

    layout = "layer, kv_head, row, head_dim, with scores and positions"
    max_rewind = 0

    def __init__(self, config, max_seq_len=None, *, heavy, recent, chunk=64):
        super().__init__(config, max_seq_len)
        self.heavy = whole_number(heavy, "heavy", least=0)
        self.recent = whole_number(recent, "recent", least=1)
        self.chunk = self.max_pass = whole_number(chunk, "chunk", least=1)
        self._rows = self._empty()
        self._before = None  # the rows that a pass that is aborted goes back to
        self._seen = {}  # layer -> attention that each query of the open pass gave, (heads, n, rows)

    def _empty(self):
        layers, heads, head_dim = self.config.cache_shape
        room = layers, heads, self.heavy + self.recent + self.chunk
        k, v = (np.zeros((*room, head_dim), self.dtype) for _ in "kv")
        return _Rows(k, v, np.zeros(room, np.float32), np.full(room, -1), held=0)

    def begin(self, n):
        positions = super().begin(n)
        self._before = self._rows
        return positions

    def attend(self, layer, q, k, v, rotate=None):
        self._check_rows(layer, q, k, v)
        q, k = self._rotated(q, k, rotate)
        keys, values = self._store(layer, k, v)
        heads, _, head_dim = keys.shape
        grouped = (q * head_dim**-0.5).reshape(heads, -1, self.pending, head_dim)
        scores = grouped @ keys.swapaxes(1, 2)[:, None]  # (KV heads, group, n, rows)
        scores[..., ~ops.causal_mask(self._rows.held, self.pending)] = -np.inf
        weights = ops.softmax_inplace(scores)
        self._seen[layer] = weights.sum(axis=1)  # (KV heads, n, rows)
        return (weights @ values[:, None]).reshape(q.shape)

    def _write(self, layer, k, v):
        r, n = self._rows, self.pending
        new = slice(r.held, r.held + n)
        r.k[layer, :, new], r.v[layer, :, new] = k, v
        r.score[layer, :, new] = 0
        r.position[layer, :, new] = np.arange(self.seq_len, self.seq_len + n)
        return r.k[layer, :, : new.stop], r.v[layer, :, : new.stop]

    def _count(self, n):
        super()._count(n)
        self._before = None

    def _keep(self, n):
        if n:
            self._rows = self._evicted(self._counted(n))
        elif self.pending and self._before:
            self._rows = self._before
        self._seen = {}

    def _counted(self, n):
        """The rows with the first n of the pass among them, and the attention that those gave."""
        held = self._rows.held + n
        score = self._rows.score.copy()
        for layer, given in self._seen.items():
            score[layer, :, :held] += given[:, :n, :held].sum(axis=1)
        return self._rows._replace(score=score, held=held)

    def _evicted(self, rows):
        """Of the old rows the `heavy` with the largest scores, in order; then the newest `recent`."""
        held = self.heavy + self.recent
        if rows.held <= held:
            return rows
        old = rows.held - self.recent
        ranked = np.argsort(-rows.score[..., :old], axis=-1, kind="stable")
        best = np.sort(ranked[..., : self.heavy], axis=-1)
        newest = np.broadcast_to(np.arange(old, rows.held), (*best.shape[:2], self.recent))
        keep = np.concatenate([best, newest], axis=-1)  # (layers, heads, held)
        fresh, heads = self._empty(), np.arange(keep.shape[1])[:, None]
        for layer, kept in enumerate(keep):  # layer by layer: no second copy of all rows at once
            for new, now in zip(fresh[:4], rows[:4], strict=True):
                new[layer, :, :held] = now[layer, heads, kept]
        return fresh._replace(held=held)

    def reset(self):
        super().reset()
        self._rows, self._before, self._seen = self._empty(), None, {}

    @property
    def num_rows(self):
        return self._rows.held

    @property
    def nbytes(self):
        return sum(array.nbytes for array in self._rows[:4])

    @property
    def nbytes_used(self):
        return sum(array[:, :, : self._rows.held].nbytes for array in self._rows[:4])

    def keys_values(self, layer):
        return tuple(read_only(array[layer, :, : self._rows.held]) for array in self._rows[:2])

    def key_positions(self, layer):
        return self._rows.position[layer, :, : self._rows.held].copy()

    def export(self, start, stop):
        """The whole sequence: each head has kept tokens of its own, and scores that belong together."""
        if self._check_range(start, stop) != (0, self.seq_len):
            raise ValueError(f"cannot export {start} … {stop}: only the whole, 0 … {self.seq_len}")
        arrays = [array[:, :, : self._rows.held].copy() for array in self._rows[:4]]
        parts = dict(zip(("keys", "values", "scores", "positions"), arrays, strict=True))
        return {"layout": self.layout, "dtype": self.dtype.name, "start": 0, "stop": stop} | parts

    def load(self, payload):
        """What `export` of a cache of the same `heavy` and `recent` gave, into an empty cache.

        Raises ValueError or TypeError for a payload that does not fit, CacheFull when there is no room."""
        self._check_parts(payload, "keys", "values", "scores", "positions", "stop")
        keys, values = self._check_payload(payload)
        held, stop = keys.shape[2], whole_number(payload["stop"])
        arrays = keys, values, payload["scores"], payload["positions"]
        if self.seq_len or self.pending or held != min(stop, self.heavy + self.recent):
            raise ValueError(
                f"a payload of {held} rows for {stop} tokens: load it into an empty cache, "
                f"and of the same heavy and recent as it came from, here {self.heavy} and {self.recent}"
            )
        if np.shape(arrays[2]) != keys.shape[:3] or np.shape(arrays[3]) != keys.shape[:3]:
            raise ValueError(f"scores and positions do not fit: expected {keys.shape[:3]}")
        if stop > self.max_seq_len:
            raise CacheFull(self._full_message(stop))
        fresh = self._empty()
        for new, given in zip(fresh[:4], arrays, strict=True):
            new[:, :, :held] = given
        self._rows, self._counts = fresh._replace(held=held), (stop, 0)
