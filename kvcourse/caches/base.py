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

LAYOUT = "layer, kv_head, token, head_dim"  # of the arrays that export gives and load takes
NO_LIMIT = 2**31  # more tokens than any stream will have


class CacheFull(RuntimeError):
    """More tokens than the cache, or the model, has positions for. Nothing was changed."""


class KVCache(ABC):
    """Keys and values of one sequence. Subclasses decide how rows are stored.

    config       ModelConfig the rows fit: (num_layers, num_kv_heads, head_dim)
    max_seq_len  capacity in tokens, at most the model's own max_seq_len unless `unlimited`

    `seq_len` alone says which rows count: whatever lies behind it is never read.
    """

    dtype = np.dtype(np.float32)
    layout = LAYOUT
    max_pass = None  # most tokens of one pass, where a cache limits them
    unlimited = False  # True: may grow past the model's positions

    def __init__(self, config, max_seq_len=None):
        self.config = config
        limit = NO_LIMIT if self.unlimited else config.max_seq_len
        max_seq_len = limit if max_seq_len is None else max_seq_len
        if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int | np.integer):
            raise TypeError(
                f"max_seq_len is {max_seq_len!r}: give a whole number of tokens, at most {limit:,}"
            )
        if not 1 <= max_seq_len <= limit:
            what = "more than any stream has" if self.unlimited else f"the positions of {config.name}"
            raise ValueError(f"max_seq_len {max_seq_len} is outside 1 … {limit:,}, {what}")
        self.max_seq_len = int(max_seq_len)
        # One assignment moves both, so that an interrupt finds the old state or the new one.
        self._counts = (0, 0)
        self._written = set()  # layers that have stored their rows in the open pass

    @classmethod
    def for_model(cls, model, max_seq_len=None, **options):
        """An empty cache for this model, with room for `max_seq_len` tokens (default: all it can).

        `options` are the class's own, such as the first `capacity` of a GrowingCache.
        """
        return cls(model.config, max_seq_len, **options)

    @property
    def seq_len(self):
        """Committed tokens, which is also the position of the next one."""
        return self._counts[0]

    @property
    def pending(self):
        """Tokens begun and not yet committed."""
        return self._counts[1]

    # --- one pass --------------------------------------------------------------------

    def begin(self, n):
        """Reserve room for n tokens; return their positions, int64 (n,).

        Raises CacheFull when they do not fit, RuntimeError when a pass is already open,
        ValueError for n < 1 and TypeError for an n that is no whole number; the cache is
        unchanged after each.
        """
        n = whole_number(n)
        if self.pending:
            raise RuntimeError(
                f"a pass over {self.pending} tokens is still open: call commit() or abort() first"
            )
        if n < 1:
            raise ValueError(f"a pass over {n} tokens is empty: give at least 1")
        if self.seq_len + n > self.max_seq_len:
            raise CacheFull(self._full_message(n))
        if self.max_pass is not None and n > self.max_pass:
            raise CacheFull(
                f"a pass of {n:,} tokens: a {type(self).__name__} like this takes at most {self.max_pass:,}, "
                "pass the prompt in chunks of that size"
            )
        self._written = set()
        self._counts = (self.seq_len, n)
        return np.arange(self.seq_len, self.seq_len + n)

    def note_ids(self, ids):  # noqa: B027 - only a cache that shares rows needs names
        """The model says which tokens the open pass computes, one id each, right after `begin`."""

    @abstractmethod
    def attend(self, layer, q, k, v, rotate=None):
        """Write the new rows of one layer, then attend to all rows up to each query.

        q (num_heads, n, head_dim), k and v (num_kv_heads, n, head_dim), float32, not yet
        rotated; `rotate(x, positions)` applies rotary positions where a model has them.
        Returns (num_heads, n, head_dim).

        Raises RuntimeError without an open pass, IndexError for a layer the model lacks,
        ValueError for another shape, TypeError for another dtype.
        """

    def commit(self, n=None):
        """Keep the first n of the tokens begun (default: all); the rest is dropped.

        Raises ValueError for more than were begun, and RuntimeError when a layer has not
        stored its rows; the pass is then still open.
        """
        n = self.pending if n is None else whole_number(n)
        if not 0 <= n <= self.pending:
            raise ValueError(f"cannot commit {n} tokens: {self.pending} were begun")
        if n:
            self.check_complete()
        self._keep(n)
        self._count(n)

    def check_complete(self):
        """Raise RuntimeError unless every layer has stored its rows in the open pass."""
        missing = sorted(set(range(self.config.num_layers)) - self._written)
        if missing:
            raise RuntimeError(f"layers {missing} were not attended in this pass: call abort()")

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
        seq_len = whole_number(seq_len)
        if self.pending:
            raise RuntimeError("a pass is open: call commit() or abort() before truncate()")
        oldest = self.seq_len - self.max_rewind
        if not oldest <= seq_len <= self.seq_len:
            raise ValueError(f"cannot go to {seq_len} tokens: choose {oldest} … {self.seq_len}")
        self._counts = (seq_len, 0)

    def reset(self):
        """Forget the whole sequence, an open pass included."""
        self._counts = (0, 0)

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
        """The position of each row of `keys_values(layer)`, int64 (rows,), or (num_kv_heads, rows) where
        each head keeps tokens of its own."""
        return np.arange(self.seq_len)

    def export(self, start, stop):
        """The rows of tokens start … stop − 1 as a dict of arrays that `load` takes, copied."""
        start, stop = self._check_range(start, stop)
        rows = [self.keys_values(layer) for layer in range(self.config.num_layers)]
        return {
            "layout": self.layout,
            "dtype": self.dtype.name,
            "start": start,
            "keys": np.stack([k[:, start:stop] for k, _ in rows]),
            "values": np.stack([v[:, start:stop] for _, v in rows]),
        }

    def load(self, payload):
        """Append what `export` gave. Its first token must be this cache's next position.

        Raises ValueError or TypeError for a payload that does not fit and CacheFull when
        there is no room; the cache is unchanged after each.
        """
        keys, values = self._check_payload(payload)
        if keys.shape[2] == 0:
            return
        self.begin(keys.shape[2])
        try:
            for layer in range(self.config.num_layers):
                self._store(layer, keys[layer], values[layer])
            self.commit()
        except BaseException:
            self.abort()
            raise

    def _check_range(self, start, stop):
        start, stop = whole_number(start), whole_number(stop)
        if not 0 <= start <= stop <= self.seq_len:
            raise ValueError(f"cannot export {start} … {stop}: the cache holds 0 … {self.seq_len}")
        return start, stop

    def _check_parts(self, payload, *names):
        """ValueError unless the payload has these parts, this cache's layout, and its next position."""
        missing = {"layout", "dtype", "start", *names} - set(payload)
        if missing:
            raise ValueError(f"the payload lacks {', '.join(sorted(missing))}: give what export() returned")
        if payload["layout"] != self.layout:
            raise ValueError(
                f"the payload's layout is {payload['layout']!r}: this cache takes {self.layout!r}"
            )
        if payload["start"] != self.seq_len:
            raise ValueError(
                f"payload begins at position {payload['start']}, the cache ends at {self.seq_len}"
            )

    def _check_payload(self, payload):
        self._check_parts(payload, "keys", "values")
        layers, heads, head_dim = self.config.cache_shape
        keys, values = np.asarray(payload["keys"]), np.asarray(payload["values"])
        fits = keys.ndim == 4 and (*keys.shape[:2], keys.shape[3]) == self.config.cache_shape
        if not fits or keys.shape != values.shape:
            raise ValueError(
                f"payload of shape {keys.shape} does not fit: "
                f"expected ({layers}, {heads}, tokens, {head_dim})"
            )
        self._check_dtypes(payload, keys, values)
        return keys, values

    def _check_dtypes(self, payload, *arrays):
        for found in (payload["dtype"], *(array.dtype.name for array in arrays)):
            if found != self.dtype.name:
                raise TypeError(f"payload holds {found}, this cache {self.dtype.name}: convert it first")

    # --- for subclasses ----------------------------------------------------------------

    @abstractmethod
    def _write(self, layer, k, v):
        """Store the new rows of one layer behind the committed ones; return all rows (K, V)."""

    def _store(self, layer, k, v):
        """`_write`, noted down for `commit`."""
        rows = self._write(layer, k, v)
        self._written.add(layer)
        return rows

    def _keep(self, n):  # noqa: B027 - nothing to do where rows already lie in place
        """The first n pending rows are about to count; n is 0 when a pass is taken back."""

    def _count(self, n):
        """The first n pending rows, kept, count from now on; the pass is over."""
        self._counts = (self.seq_len + n, 0)

    def _rotated(self, q, k, rotate):
        """Queries and keys of the open pass, turned by their positions where the model rotates."""
        if rotate is None:
            return q, k
        positions = np.arange(self.seq_len, self.seq_len + self.pending)
        return rotate(q, positions), rotate(k, positions)

    def _check_rows(self, layer, q, k, v):
        if not self.pending:
            raise RuntimeError("no pass is open: call begin(n) before attend()")
        if not 0 <= layer < self.config.num_layers:
            raise IndexError(f"layer {layer} is outside 0 … {self.config.num_layers - 1}")
        shapes, rows = self._expected_shapes(), {"queries": q, "keys": k, "values": v}
        if k.shape != shapes["keys"] or v.shape != shapes["values"]:
            expected = " and ".join(dict.fromkeys(str(shapes[name]) for name in ("keys", "values")))
            raise ValueError(f"keys {k.shape} and values {v.shape} do not fit: expected {expected}")
        if q.shape != shapes["queries"]:
            raise ValueError(f"queries {q.shape} do not fit: expected {shapes['queries']}")
        for name, array in rows.items():
            if array.dtype != self.dtype:
                raise TypeError(
                    f"{name} are {array.dtype}, the cache holds {self.dtype}: use .astype(np.float32)"
                )

    def _expected_shapes(self):
        """What `attend` takes in the open pass."""
        _, heads, head_dim = self.config.cache_shape
        rows = heads, self.pending, head_dim
        return {"queries": (self.config.num_heads, self.pending, head_dim), "keys": rows, "values": rows}

    def _full_message(self, n):
        asked, limit = self.seq_len + n, self.max_seq_len
        if self.unlimited:
            way_out = "make the cache larger (max_seq_len), or without that limit"
        elif limit == self.config.max_seq_len:
            way_out = (
                f"{self.config.name} was trained with {limit:,} positions: "
                f"shorten the prompt, or reset() the cache and keep the last tokens"
            )
        else:
            way_out = f"make the cache larger (max_seq_len, up to {self.config.max_seq_len:,})"
        held = f"{self.seq_len:,} held, {n:,} new"
        return f"{asked:,} tokens do not fit in a cache of {limit:,} ({held}): {way_out}"


def whole_number(number, name=None, least=None):
    """An int from any whole-number type; TypeError for 1.5, NaN or True, ValueError below `least`."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        said = repr(number) if name is None else f"{name} is {number!r}: it"
        raise TypeError(f"{said} is not a whole number of tokens")
    if least is not None and number < least:
        raise ValueError(f"{name} is {number}: it must be at least {least}")
    return int(number)


def read_only(rows):
    """A view of rows through which nothing can be written."""
    view = rows.view()
    view.flags.writeable = False
    return view
