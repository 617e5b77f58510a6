"""A cache that forgets: the first `num_sinks` tokens and the newest `window`, whatever the length.

Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks" (arXiv
2309.17453), section 3.2. There keys are cached un-rotated and turned anew at every step, to
their places within the cache. Here every key is rotated once, at its own position, and the
query is turned instead: only the difference of two positions enters a rotary score.
"""

import numpy as np

from kvcourse import ops
from kvcourse.caches.base import LAYOUT, CacheFull, KVCache, read_only, whole_number


class SlidingCache(KVCache):
    """Token i sees the first `num_sinks` tokens and the newest `window`, itself included.

    Rows of one layer, K and V (num_kv_heads, num_sinks + window + slack, head_dim): the sinks, then
    a ring. Position p ≥ num_sinks lies in slot num_sinks + (p − num_sinks) mod (window + slack).
    Nothing is ever moved. The `slack` rows beyond the window are what a pass of several tokens may
    overwrite while its first token still needs them, and what `truncate` can go back to:

        a pass has at most slack + 1 tokens;  max_rewind is slack

    Until the ring is full for the first time, everything can be taken back. A pass that is aborted
    has overwritten old rows too: until as many tokens are committed, max_rewind is that much smaller,
    and after an aborted pass of slack + 1 tokens the oldest row of the window is gone, which no later
    token would have seen.

    max_seq_len  default: no limit where positions are rotary. No query is turned further from a key
                 it sees than num_sinks + window − 1, so a stream may be longer than the model's
                 positions. It still knows only what it sees. Learned positions end where they end.

    A step allocates the scores (num_heads, n, rows of the ring and sinks), and no row is copied.
    Rows taken back are cleared; a NaN in a row that counts lasts until the ring has overwritten it.
    """

    layout = LAYOUT + " of the tokens at positions"

    def __init__(self, config, max_seq_len=None, *, window, num_sinks=4, slack=63):
        super().__init__(config, max_seq_len)
        self.window = whole_number(window, "window", least=1)
        self.num_sinks = whole_number(num_sinks, "num_sinks", least=0)
        self.slack = whole_number(slack, "slack", least=0)
        if self.num_sinks + self.window > config.max_seq_len:
            raise ValueError(
                f"num_sinks {num_sinks:,} and window {window:,} are more than the {config.max_seq_len:,} "
                f"positions of {config.name}: make the window smaller"
            )
        self.max_pass = self.slack + 1
        layers, heads, head_dim = config.cache_shape
        shape = layers, heads, self.num_sinks + self._ring, head_dim
        self._k, self._v = np.zeros(shape, self.dtype), np.zeros(shape, self.dtype)
        self._oldest = self.num_sinks  # the first position in the ring that nothing has overwritten

    @property
    def unlimited(self):
        """Whether the stream may be longer than the model's positions: yes, where they are rotary."""
        return self.config.rope_theta is not None

    @property
    def _ring(self):
        return self.window + self.slack

    # --- one pass --------------------------------------------------------------------

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
        scores = self._scores(to_sinks, to_window, keys)  # (KV heads, group, n, slots)
        # The ring is read as it lies: softmax does not care in which order the keys come.
        scores[..., ~self._visible(positions)] = -np.inf
        return (ops.softmax_inplace(scores) @ values[:, None]).reshape(q.shape)

    def _scores(self, to_sinks, to_window, keys):
        heads, slots, head_dim = keys.shape
        n, columns = to_window.shape[1], keys.swapaxes(1, 2)[:, None]  # (KV heads, 1, head_dim, slots)
        scores = np.empty((heads, self.config.num_heads // heads, n, slots), self.dtype)
        for part, q in ((slice(0, self.num_sinks), to_sinks), (slice(self.num_sinks, None), to_window)):
            grouped = (q * head_dim**-0.5).reshape(heads, -1, n, head_dim)
            np.matmul(grouped, columns[..., part], out=scores[..., part])
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
        laps = (stop - 1 - slots) // self._ring  # how often the ring has come round to a slot again
        held = np.where(slots < self.num_sinks, slots, slots + np.maximum(laps, 0) * self._ring)
        return np.where(held < stop, held, -1)

    def _slots(self, positions):
        in_ring = self.num_sinks + (positions - self.num_sinks) % self._ring
        return np.where(positions < self.num_sinks, positions, in_ring)

    def _write(self, layer, k, v):
        stop = self.seq_len + self.pending
        self._oldest = max(self._oldest, stop - self._ring)  # whatever becomes of the pass
        slots = self._slots(np.arange(self.seq_len, stop))
        self._k[layer][:, slots], self._v[layer][:, slots] = k, v
        return self._k[layer], self._v[layer]

    def _keep(self, n):
        self._clear(self.seq_len + n, self.seq_len + self.pending, self._written)

    def _clear(self, start, stop, layers):
        """Zero the rows taken back: they are masked, but stay in the product, and 0 · NaN is NaN."""
        slots = self._slots(np.arange(start, stop))
        for layer in layers if start < stop else ():
            self._k[layer][:, slots] = self._v[layer][:, slots] = 0

    # --- going back ------------------------------------------------------------------

    @property
    def max_rewind(self):
        if self._oldest == self.num_sinks:
            return self.seq_len
        return max(self.seq_len - self.window - self._oldest, 0)

    def truncate(self, seq_len):
        end = self.seq_len
        super().truncate(seq_len)
        self._clear(self.seq_len, end, range(self.config.num_layers))

    def reset(self):
        super().reset()
        self._oldest = self.num_sinks
        self._k[:] = self._v[:] = 0

    # --- looking at it ---------------------------------------------------------------

    @property
    def num_rows(self):
        return len(self.key_positions(0))

    @property
    def nbytes(self):
        return self._k.nbytes + self._v.nbytes

    def key_positions(self, layer):
        return self._kept_after(self.seq_len, self._oldest)

    def _kept_after(self, seq_len, oldest=0):
        """Positions of the sinks and of the newest `window` of seq_len tokens, from `oldest` on."""
        first = max(self.num_sinks, seq_len - self.window, oldest)
        return np.concatenate([np.arange(min(self.num_sinks, seq_len)), np.arange(first, seq_len)])

    def keys_values(self, layer):
        slots = self._slots(self.key_positions(layer))
        return tuple(read_only(rows[layer][:, slots]) for rows in (self._k, self._v))

    def export(self, start, stop):
        """The rows still held of tokens start … stop − 1, copied; "positions" says which they are."""
        start, stop = self._check_range(start, stop)
        positions = self.key_positions(0)
        positions = positions[(start <= positions) & (positions < stop)]
        slots = self._slots(positions)
        parts = {"keys": self._k[:, :, slots], "values": self._v[:, :, slots], "positions": positions}
        return {"layout": self.layout, "dtype": self.dtype.name, "start": start, "stop": stop} | parts

    def load(self, payload):
        """As in KVCache. Sinks and window may differ from the exporting cache's: ValueError where a row
        that this cache would hold is missing. Rows older than its window allow no `truncate` afterwards
        unless they came along."""
        self._check_parts(payload, "keys", "values", "stop", "positions")
        keys, values = self._check_payload(payload)
        stop, positions = whole_number(payload["stop"]), np.asarray(payload["positions"])
        self._check_positions(positions, stop, keys.shape[2])
        k, v = self._k.copy(), self._v.copy()  # replaced in one assignment: an interrupt finds the old rows
        stays = (positions < self.num_sinks) | (positions >= stop - self._ring)
        slots = self._slots(positions[stays])
        k[:, :, slots], v[:, :, slots] = keys[:, :, stays], values[:, :, stays]
        gaps = np.setdiff1d(np.arange(max(self.seq_len, self.num_sinks), stop), positions)
        oldest = max([self._oldest, stop - self._ring, *(gaps[-1:] + 1)])
        self._k, self._v, self._oldest, self._counts = k, v, int(oldest), (stop, 0)

    def _check_positions(self, positions, stop, rows):
        if self.pending:
            raise RuntimeError("a pass is open: call commit() or abort() before load()")
        fit = positions.shape == (rows,) and np.isin(positions, np.arange(self.seq_len, stop)).all()
        if stop < self.seq_len or not fit or (np.diff(positions) <= 0).any():
            raise ValueError(f"the payload's positions do not fit {rows} rows of {self.seq_len} … {stop}")
        if stop > self.max_seq_len:
            raise CacheFull(self._full_message(stop - self.seq_len))
        needed = self._kept_after(stop)
        missing = np.setdiff1d(needed[needed >= self.seq_len], positions)
        if missing.size:
            raise ValueError(
                f"the payload lacks position {missing[0]}, which {self.num_sinks} sinks and a window of "
                f"{self.window} still need: export it from a cache that holds it"
            )
