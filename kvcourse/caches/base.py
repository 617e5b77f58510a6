"""The one interface behind which every cache of the course stands.

One object holds one sequence, for all layers. A pass through the model goes

    positions = cache.begin(n)                  # room for n tokens, or an error and nothing changed
    for layer in …:
        out = cache.attend(layer, q, k, v)      # writes the new rows of this layer, then attends
    cache.commit()                              # only now do the n tokens count

and `abort()` instead of `commit()` takes everything back. `seq_len` moves only in
`commit` and `truncate`, so a pass that fails half way, or is interrupted, leaves
the cache as it was.
"""

from abc import ABC, abstractmethod

import numpy as np


class CacheFull(RuntimeError):
    """More tokens than the cache, or the model, has positions for. Nothing was changed."""


class KVCache(ABC):
    """Keys and values of one sequence. Subclasses decide how rows are stored.

    config       ModelConfig the rows fit: (num_layers, num_kv_heads, head_dim)
    max_seq_len  capacity in tokens, at most the model's own max_seq_len
    seq_len      committed tokens, which is also the position of the next one
    pending      tokens begun and not yet committed
    """

    dtype = np.dtype(np.float32)

    def __init__(self, config, max_seq_len=None):
        limit = config.max_seq_len
        max_seq_len = limit if max_seq_len is None else max_seq_len
        if not isinstance(max_seq_len, int) or not 1 <= max_seq_len <= limit:
            raise ValueError(
                f"max_seq_len {max_seq_len!r} is outside 1 … {limit:,}, the positions of {config.name}"
            )
        self.config = config
        self.max_seq_len = max_seq_len
        self.seq_len = 0
        self.pending = 0

    @classmethod
    def for_model(cls, model, max_seq_len=None):
        """An empty cache for this model, with room for `max_seq_len` tokens (default: all it can)."""
        return cls(model.config, max_seq_len)

    # --- one pass --------------------------------------------------------------------

    def begin(self, n):
        """Reserve room for n tokens; return their positions, int64 (n,).

        Raises CacheFull when they do not fit and RuntimeError when a pass is already
        open; the cache is unchanged after either.
        """
        if self.pending:
            raise RuntimeError(
                f"a pass over {self.pending} tokens is still open: call commit() or abort() first"
            )
        if n < 1:
            raise ValueError(f"a pass over {n} tokens is empty: give at least 1")
        if self.seq_len + n > self.max_seq_len:
            raise CacheFull(self._full_message(n))
        self.pending = n
        return np.arange(self.seq_len, self.seq_len + n)

    @abstractmethod
    def attend(self, layer, q, k, v, rotate=None):
        """Write the new rows of one layer, then attend to all rows up to each query.

        q (num_heads, n, head_dim), k and v (num_kv_heads, n, head_dim), float32, not yet
        rotated; `rotate(x, positions)` applies rotary positions where a model has them.
        Returns (num_heads, n, head_dim).
        """

    def commit(self, n=None):
        """Keep the first n of the tokens begun (default: all); the rest is dropped."""
        n = self.pending if n is None else n
        if not 0 <= n <= self.pending:
            raise ValueError(f"cannot commit {n} tokens: {self.pending} were begun")
        self._keep(n)
        self.seq_len += n
        self.pending = 0

    def abort(self):
        """Take back what was begun. Harmless when nothing was."""
        self.commit(0)

    # --- going back --------------------------------------------------------------------

    @property
    def max_rewind(self):
        """How many tokens `truncate` can take back now: all of them, unless a subclass forgets rows."""
        return self.seq_len

    def truncate(self, seq_len):
        """Go back to `seq_len` tokens. Later rows can never be read again."""
        if self.pending:
            raise RuntimeError("a pass is open: call commit() or abort() before truncate()")
        oldest = self.seq_len - self.max_rewind
        if not oldest <= seq_len <= self.seq_len:
            raise ValueError(f"cannot go to {seq_len} tokens: choose {oldest} … {self.seq_len}")
        self._drop_after(seq_len)
        self.seq_len = seq_len

    def reset(self):
        """Forget the whole sequence, an open pass included."""
        self.abort()
        self._drop_after(0)
        self.seq_len = 0

    # --- looking at it -----------------------------------------------------------------

    @property
    def num_rows(self):
        """Rows held, one a token and layer; fewer than seq_len after eviction."""
        return self.seq_len

    @property
    @abstractmethod
    def nbytes(self):
        """Bytes reserved."""

    @property
    def nbytes_used(self):
        """Bytes of the reserved ones that hold committed rows."""
        layers, heads, head_dim = self.config.cache_shape
        return 2 * layers * heads * head_dim * self.num_rows * self.dtype.itemsize

    @abstractmethod
    def keys_values(self, layer):
        """The committed rows of one layer, in order, read-only: K and V (num_kv_heads, rows, head_dim)."""

    def key_positions(self, layer):
        """The position of each row of `keys_values(layer)`, int64 (rows,)."""
        return np.arange(self.seq_len)

    def export(self, start, stop):
        """The rows of tokens start … stop − 1 as a dict of arrays that `load` takes, copied."""
        if not 0 <= start <= stop <= self.seq_len:
            raise ValueError(f"cannot export {start} … {stop}: the cache holds 0 … {self.seq_len}")
        rows = [self.keys_values(layer) for layer in range(self.config.num_layers)]
        return {
            "layout": "layer, kv_head, token, head_dim",
            "dtype": self.dtype.name,
            "start": start,
            "keys": np.stack([k[:, start:stop] for k, _ in rows]),
            "values": np.stack([v[:, start:stop] for _, v in rows]),
        }

    def load(self, payload):
        """Append what `export` gave. Its first token must be this cache's next position."""
        keys, values = payload["keys"], payload["values"]
        layers, heads, head_dim = self.config.cache_shape
        fits = keys.ndim == 4 and (*keys.shape[:2], keys.shape[3]) == self.config.cache_shape
        if not fits or keys.shape != values.shape:
            raise ValueError(
                f"payload of shape {keys.shape} does not fit: "
                f"expected ({layers}, {heads}, tokens, {head_dim})"
            )
        if payload["dtype"] != self.dtype.name:
            raise TypeError(
                f"payload holds {payload['dtype']}, this cache {self.dtype.name}: convert it first"
            )
        if payload["start"] != self.seq_len:
            raise ValueError(
                f"payload begins at position {payload['start']}, the cache ends at {self.seq_len}"
            )
        if keys.shape[2] == 0:
            return
        self.begin(keys.shape[2])
        for layer in range(layers):
            self._write(layer, keys[layer], values[layer])
        self.commit()

    # --- for subclasses ----------------------------------------------------------------

    @abstractmethod
    def _write(self, layer, k, v):
        """Store the new rows of one layer behind the committed ones; return all rows (K, V)."""

    def _keep(self, n):  # noqa: B027 - nothing to do where rows already lie in place
        """The first n pending rows become part of the sequence."""

    def _drop_after(self, seq_len):  # noqa: B027 - nothing to do where seq_len alone decides
        """Rows from `seq_len` on are gone."""

    def _check_rows(self, q, k, v):
        layers, heads, head_dim = self.config.cache_shape
        expected = (heads, self.pending, head_dim)
        if k.shape != expected or v.shape != expected:
            raise ValueError(f"keys {k.shape} and values {v.shape} do not fit: expected {expected}")
        if q.shape != (self.config.num_heads, self.pending, head_dim):
            raise ValueError(
                f"queries {q.shape} do not fit: expected {(self.config.num_heads, self.pending, head_dim)}"
            )
        for name, rows in (("queries", q), ("keys", k), ("values", v)):
            if rows.dtype != self.dtype:
                raise TypeError(
                    f"{name} are {rows.dtype}, the cache holds {self.dtype}: use .astype(np.float32)"
                )

    def _full_message(self, n):
        asked, limit = self.seq_len + n, self.max_seq_len
        if limit == self.config.max_seq_len:
            way_out = (
                f"{self.config.name} was trained with {limit:,} positions: "
                f"shorten the prompt, or reset() the cache and keep the last tokens"
            )
        else:
            way_out = f"make the cache larger (max_seq_len, up to {self.config.max_seq_len:,})"
        held = f"{self.seq_len:,} held, {n:,} new"
        return f"{asked:,} tokens do not fit in a cache of {limit:,} ({held}): {way_out}"
