"""A cache with fewer bits a number: quantized rows, and a tail of the newest ones in float16.

Sources: llama.cpp's q8_0 and q4_0 caches (`--cache-type-k`), and KIVI (Liu et al. 2024, arXiv
2402.02750), algorithm 1: keys per channel in groups of tokens, values per token, and a residual
of recent tokens in full precision for both.
"""

import math

import numpy as np

from kvcourse import ops
from kvcourse.caches import formats
from kvcourse.caches.base import KVCache, read_only, whole_number


class QuantizedCache(KVCache):
    """Rows in any format of `formats`, keys and values apart.

    keys, values  a Format, or its name ("q8_0", "int4/token", "int2/channel")
    residual      at least that many of the newest tokens stay in float16

    A format with one token a unit and residual 0 quantizes on writing: the newest token, too, is
    read back with its rounding, as in llama.cpp. Otherwise a pass sees its own rows and the tail in
    float16; `commit` then quantizes whole groups, so that `residual` … residual + group − 1 tokens
    stay behind. What was quantized lasts: the answer depends, a little, on how a prompt was chunked.

    `truncate` can take back the tail, and nothing older; where rows are quantized on writing, every
    token. After it fewer than `residual` tokens may be in float16, until new ones have come.

    Every step decodes all rows of a layer into float32 and drops them again: the memory saved is that
    of the rows kept, not of the arithmetic. Rows that a format cannot write (NaN, infinity, beyond its
    scale) raise ValueError, in `attend` or, from the tail, in `commit`; the pass can be aborted then.
    """

    def __init__(self, config, max_seq_len=None, *, keys="q8_0", values="q8_0", residual=0):
        super().__init__(config, max_seq_len)
        self.residual = whole_number(residual, "residual", least=0)
        self.formats = _format("keys", keys, config), _format("values", values, config)
        self.group = math.lcm(*(form.tokens for form in self.formats))
        self.layout = f"keys {self.formats[0]}, values {self.formats[1]}, residual {self.residual}"
        self._quantized = 0  # tokens that are; what follows, up to seq_len, lies in the tail
        self._stores = [self._reserve(form) for form in self.formats]
        self._tails = self._empty_tails()
        self._new = {}  # layer -> (K, V) float16 of the open pass, until commit
        self._before = None  # what a pass that is aborted goes back to

    def _reserve(self, form):
        """{part: array (layers, heads, units, …)} with room for max_seq_len tokens."""
        layers, heads, head_dim = self.config.cache_shape
        one = form.encode(np.zeros((heads, form.tokens, head_dim), np.float32))
        room = layers, heads, self.max_seq_len // form.tokens
        return {key: np.zeros((*room, *part.shape[2:]), part.dtype) for key, part in one.items()}

    def _empty_tails(self):
        """K and V (layers, heads, residual + group − 1, head_dim), float16."""
        layers, heads, head_dim = self.config.cache_shape
        tail = min(self.residual + self.group - 1, self.max_seq_len)
        return [np.zeros((layers, heads, tail, head_dim), np.float16) for _ in "kv"]

    @property
    def _at_once(self):
        return self.residual == 0 and self.group == 1

    # --- one pass --------------------------------------------------------------------

    def begin(self, n):
        positions = super().begin(n)
        self._before = self._quantized, self._tails
        return positions

    def attend(self, layer, q, k, v, rotate=None):
        self._check_rows(layer, q, k, v)
        q, k = self._rotated(q, k, rotate)
        keys, values = self._store(layer, k, v)
        return ops.attention(q, keys, values, start=self.seq_len)

    def _write(self, layer, k, v):
        if self._at_once:
            for which, rows in enumerate((k, v)):
                self._encode(which, layer, self.seq_len, rows)
            return tuple(self._decode(which, layer, self.seq_len + self.pending) for which in (0, 1))
        self._new[layer] = tuple(formats.Float16().encode(rows)["numbers"] for rows in (k, v))
        return tuple(np.concatenate([self._rows(which, layer), self._new[layer][which]], axis=1)
                     for which in (0, 1))  # fmt: skip

    def _count(self, n):
        super()._count(n)
        self._before = None

    def _keep(self, n):
        if n and not self._at_once:
            self._flush(n)
        elif n:
            self._quantized = self.seq_len + n
        elif self.pending and self._before:  # an interrupted commit may have come as far as _flush
            self._quantized, self._tails = self._before
        self._new = {}

    def _flush(self, n):
        """Quantize whole groups but for the residual; the rest of tail and new rows is the new tail.

        Written apart from what counts until now: quantized rows after the old ones, tails in new arrays.
        """
        stop = max(self._quantized, (self.seq_len + n - self.residual) // self.group * self.group)
        tails = self._empty_tails()
        out, old = stop - self._quantized, max(self.seq_len - self._quantized, 0)
        for layer in range(self.config.num_layers):
            for which in (0, 1):
                tail = self._tails[which][layer, :, :old]
                rows = np.concatenate([tail, self._new[layer][which][:, :n]], axis=1)
                if out:
                    self._encode(which, layer, self._quantized, rows[:, :out].astype(np.float32))
                tails[which][layer, :, : rows.shape[1] - out] = rows[:, out:]
        self._quantized, self._tails = stop, tails

    def _encode(self, which, layer, start, rows):
        form, store = self.formats[which], self._stores[which]
        for key, part in form.encode(rows).items():
            first = start // form.tokens
            store[key][layer, :, first : first + part.shape[1]] = part

    def _decode(self, which, layer, stop):
        form, store = self.formats[which], self._stores[which]
        return form.decode({key: part[layer, :, : stop // form.tokens] for key, part in store.items()})

    def _rows(self, which, layer):
        """All committed rows of the keys (0) or values (1), float32: decoded, then the tail."""
        tail = self._tails[which][layer, :, : self.seq_len - self._quantized]
        return np.concatenate([self._decode(which, layer, self._quantized), tail], axis=1)

    # --- going back ------------------------------------------------------------------

    @property
    def max_rewind(self):
        return self.seq_len if self._at_once else self.seq_len - self._quantized

    def truncate(self, seq_len):
        super().truncate(seq_len)
        self._quantized = min(self._quantized, self.seq_len)

    def reset(self):
        super().reset()
        self._quantized, self._new, self._before = 0, {}, None

    # --- looking at it ---------------------------------------------------------------

    @property
    def nbytes(self):
        parts = [part for store in self._stores for part in store.values()]
        new = [rows for pair in self._new.values() for rows in pair]
        return sum(array.nbytes for array in parts + self._tails + new)

    @property
    def nbytes_used(self):
        tail = self.seq_len - self._quantized
        used = [rows[:, :, :tail] for rows in self._tails]
        for form, store in zip(self.formats, self._stores, strict=True):
            used += [part[:, :, : self._quantized // form.tokens] for part in store.values()]
        return sum(array.nbytes for array in used)

    def keys_values(self, layer):
        return tuple(read_only(self._rows(which, layer)) for which in (0, 1))

    def export(self, start, stop):
        """As in KVCache, but "keys" and "values" are the stored bytes, {part: array (layers, heads, units,
        …)}, and "tails" what is still float16, [K, V] (layers, heads, tokens, head_dim).

        Raises ValueError for a range that cuts through a group.
        """
        start, stop = self._check_range(start, stop)
        cut = min(max(start, self._quantized), stop)  # bytes up to here, float16 from here on
        if cut > start and (start % self.group or cut % self.group):
            raise ValueError(
                f"cannot export {start} … {stop}: tokens are quantized {self.group} together, "
                f"choose multiples of {self.group} up to {self._quantized}"
            )
        stored = [
            {key: part[:, :, start // form.tokens : cut // form.tokens].copy() for key, part in store.items()}
            for form, store in zip(self.formats, self._stores, strict=True)
        ]
        tail = slice(cut - self._quantized, stop - self._quantized) if stop > cut else slice(0, 0)
        tails = [rows[:, :, tail].copy() for rows in self._tails]
        return {
            "layout": self.layout, "dtype": "bytes and float16", "start": start, "stop": stop,
            "keys": stored[0], "values": stored[1], "tails": tails,
        }  # fmt: skip

    def load(self, payload):
        """As in KVCache: bytes are taken as they are. Raises ValueError where quantized tokens would
        come after some that are not."""
        self._check_parts(payload, "keys", "values", "tails", "stop")
        stored, tails = (payload["keys"], payload["values"]), payload["tails"]
        n = whole_number(payload["stop"]) - self.seq_len
        in_bytes = n - self._check_arrays(stored, tails, n)
        if in_bytes % self.group:
            raise ValueError(
                f"the payload's {n} tokens do not end where its arrays do: give what export() gave"
            )
        if in_bytes and self._quantized != self.seq_len:
            raise ValueError(
                f"the cache's tokens from {self._quantized} on are not quantized, the payload's first are: "
                f"truncate({self._quantized}) and load from there"
            )
        if n == 0:
            return
        self.begin(n)
        try:
            self._take(stored, tails, in_bytes)
            self.commit()
        except BaseException:
            self.abort()
            raise

    def _take(self, stored, tails, in_bytes):
        for store, parts, form in zip(self._stores, stored, self.formats, strict=True):
            first = self.seq_len // form.tokens
            for key, part in parts.items():
                store[key][:, :, first : first + part.shape[2]] = part
        for layer in range(self.config.num_layers):
            self._new[layer] = tails[0][layer], tails[1][layer]
            self._written.add(layer)
        self._quantized += in_bytes

    def _check_arrays(self, stored, tails, n):
        """The number of tokens in the tails; ValueError or TypeError where any array does not fit."""
        layers, heads, head_dim = self.config.cache_shape
        tail = np.shape(tails[0])[2] if np.ndim(tails[0]) == 4 else 0
        expected = [((layers, heads, tail, head_dim), np.dtype(np.float16))] * 2
        found = list(tails)
        for store, parts, form in zip(self._stores, stored, self.formats, strict=True):
            units = (n - tail) // form.tokens
            expected += [((layers, heads, units, *a.shape[3:]), a.dtype) for a in store.values()]
            found += [parts.get(key, np.empty(0)) for key in store]
        for (shape, dtype), array in zip(expected, found, strict=True):
            if array.shape != shape:
                raise ValueError(f"payload of shape {array.shape} does not fit: expected {shape}")
            if array.dtype != dtype:
                raise TypeError(f"payload holds {array.dtype}, this cache {dtype}: load what export() gave")
        return tail


def _format(name, given, config):
    """A Format that fits the heads of this config, from itself or its name."""
    form = formats.by_name(given) if isinstance(given, str) else given
    if not isinstance(form, formats.Format):
        raise TypeError(f"{name} is {given!r}: give a format or its name, such as 'q8_0'")
    form.check_head_dim(config.cache_shape[2])
    return form
