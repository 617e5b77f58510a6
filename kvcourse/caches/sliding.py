"""A cache that forgets: the first `num_sinks` tokens and the newest `window`, whatever the length.

Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks" (arXiv
2309.17453), section 3.2. There keys are cached un-rotated and turned anew at every step, to
their places within the cache. Here every key is rotated once, at its own position, and the
query is turned instead: only the difference of two positions enters a rotary score.
"""

import numpy as np

from kvcourse import ops
from kvcourse.caches.base import CacheFull, KVCache, _whole
from kvcourse.caches.contiguous import _read_only


class SlidingCache(KVCache):
    """Token i sees the first `num_sinks` tokens and the newest `window`, itself included.

    Rows of one layer, K and V (num_kv_heads, num_sinks + window + slack, head_dim): the sinks, then
    a ring. Position p ≥ num_sinks lies in slot num_sinks + (p − num_sinks) mod (window + slack).
    Nothing is ever moved. The `slack` rows behind the window are what a pass of several tokens may
    overwrite while its first token still needs them, and what `truncate` can go back to:

        a pass has at most slack + 1 tokens;  max_rewind is slack

    and less for a moment after an aborted pass, which has overwritten rows too. While nothing has
    been overwritten yet, everything can be taken back.

    A stream may be longer than the model's positions: no query is turned further from a key it
    sees than num_sinks + window − 1. It still knows only what it sees.
    """

    unlimited = True

    def __init__(self, config, max_seq_len=None, *, window, num_sinks=4, slack=63):
        super().__init__(config, min(max_seq_len or config.max_seq_len, config.max_seq_len))
        for name, value, least in (("window", window, 1), ("num_sinks", num_sinks, 0), ("slack", slack, 0)):
            if _whole(value) < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}")
        if config.rope_theta is not None:
            self.max_seq_len = max_seq_len or 2**31  # no limit but what a position number can be
        self.window, self.num_sinks, self.slack = int(window), int(num_sinks), int(slack)
        self.max_pass = self.slack + 1
        layers, heads, head_dim = self.config.cache_shape
        shape = layers, heads, self.num_sinks + self._ring, head_dim
        self._k, self._v = np.zeros(shape, self.dtype), np.zeros(shape, self.dtype)
        self._overwritten = 0  # one more than the largest position ever written

    @property
    def _ring(self):
        return self.window + self.slack

    def begin(self, n):
        if _whole(n) > self.slack + 1:
            raise CacheFull(
                f"a pass of {n:,} tokens, the cache takes {self.slack + 1}: pass the prompt in chunks, "
                f"or make the cache with slack={n - 1}"
            )
        positions = super().begin(n)
        self._overwritten = max(self._overwritten, self.seq_len + n)
        return positions

    def attend(self, layer, q, k, v, rotate=None):
        self._check_rows(layer, q, k, v)
        positions = np.arange(self.seq_len, self.seq_len + self.pending)
        to_window = to_sinks = q
        if rotate is not None:
            k = rotate(k, positions)
            to_window = rotate(q, positions)
            # A sink stands just before the window, however long ago that was.
            to_sinks = rotate(q, np.minimum(positions, self.num_sinks + self.window - 1))
        keys, values = self._store(layer, k, v)
        scores = self._scores(to_sinks, to_window, keys)  # (KV, G, n, slots)
        scores[..., ~self._visible(positions)] = -np.inf
        return (ops.softmax_inplace(scores) @ values[:, None]).reshape(q.shape)

    def _scores(self, to_sinks, to_window, keys):
        heads, slots, head_dim = keys.shape
        n, turned = to_window.shape[1], keys.swapaxes(1, 2)[:, None]  # (KV, 1, head_dim, slots)
        scores = np.empty((heads, self.config.num_heads // heads, n, slots), self.dtype)
        for part, q in ((slice(0, self.num_sinks), to_sinks), (slice(self.num_sinks, None), to_window)):
            grouped = (q * head_dim**-0.5).reshape(heads, -1, n, head_dim)
            np.matmul(grouped, turned[..., part], out=scores[..., part])
        return scores

    def _visible(self, positions):
        """Boolean (n, slots): the sinks and the newest `window`, up to the query's own position."""
        held = self._positions(positions[-1] + 1)  # (slots,)
        distance = positions[:, None] - held
        near = (held >= self.num_sinks) & (distance < self.window)
        return (distance >= 0) & (held >= 0) & (near | (held < self.num_sinks))

    def _positions(self, stop):
        """Which position each slot holds once those below `stop` are written; −1 for none yet."""
        slots = np.arange(self.num_sinks + self._ring)
        laps = (stop - 1 - slots) // self._ring  # whole turns that a slot has been through again
        held = np.where(slots < self.num_sinks, slots, slots + np.maximum(laps, 0) * self._ring)
        return np.where(held < stop, held, -1)

    def _write(self, layer, k, v):
        slots = self._slots(np.arange(self.seq_len, self.seq_len + self.pending))
        self._k[layer, :, slots] = k.swapaxes(0, 1)
        self._v[layer, :, slots] = v.swapaxes(0, 1)
        return self._k[layer], self._v[layer]

    def _slots(self, positions):
        in_ring = self.num_sinks + (positions - self.num_sinks) % self._ring
        return np.where(positions < self.num_sinks, positions, in_ring)

    @property
    def max_rewind(self):
        oldest = self._overwritten - self._ring  # of the positions still in the ring
        if oldest <= self.num_sinks:
            return self.seq_len
        return max(self.seq_len - (oldest + self.window), 0)

    def reset(self):
        super().reset()
        self._overwritten = 0

    @property
    def num_rows(self):
        return len(self.key_positions(0))

    @property
    def nbytes(self):
        return self._k.nbytes + self._v.nbytes

    def key_positions(self, layer):
        sinks = np.arange(min(self.num_sinks, self.seq_len))
        # An aborted pass of slack + 1 tokens has taken one row more, which the next token cannot see anyway.
        first = max(self.num_sinks, self.seq_len - self.window, self._overwritten - self._ring)
        return np.concatenate([sinks, np.arange(first, self.seq_len)])

    def keys_values(self, layer):
        slots = self._slots(self.key_positions(layer))
        return tuple(_read_only(rows[layer][:, slots]) for rows in (self._k, self._v))
