"""A cache with fewer bits a number: quantized rows, and a tail of the newest ones in float16.

Sources: llama.cpp's q8_0 and q4_0 caches (`--cache-type-k`), and KIVI (Liu et al. 2024, arXiv
2402.02750), algorithm 1: keys per channel in groups of tokens, values per token, and a residual
of recent tokens in full precision for both.
"""

import math

import numpy as np

from kvcourse import ops
from kvcourse.caches import formats
from kvcourse.caches.base import KVCache, _whole
from kvcourse.caches.contiguous import _read_only


class QuantizedCache(KVCache):
    """Rows in any format of `formats`, keys and values apart.

    keys, values  a Format, or its name ("q8_0", "int4/token", "int2/channel")
    residual      at least that many of the newest tokens stay in float16

    A format with one token a unit and residual 0 quantizes on writing: the newest token, too, is
    read back with its rounding, as in llama.cpp. Otherwise a pass sees its own rows and the tail in
    float16; `commit` then quantizes whole groups, so that `residual` … residual + group − 1 tokens
    stay behind. What was quantized lasts: the answer depends, a little, on how a prompt was chunked.

    `truncate` takes back what is not quantized yet, and everything where rows are quantized one by
    one without a residual. The cache then holds what it would have held without those tokens, but
    that after going back fewer than `residual` tokens may be left in float16.
    """

    def __init__(self, config, max_seq_len=None, *, keys="q8_0", values="q8_0", residual=0):
        super().__init__(config, max_seq_len)
        if _whole(residual) < 0:
            raise ValueError(f"residual is {residual}: it must be at least 0 tokens")
        self.formats = tuple(formats.by_name(f) if isinstance(f, str) else f for f in (keys, values))
        self.residual, self.group = int(residual), math.lcm(*(f.tokens for f in self.formats))
        self._quantized = 0  # tokens that are; what follows, up to seq_len, lies in the tail
        self._stores = [self._reserve(f) for f in self.formats]
        layers, heads, head_dim = config.cache_shape
        tail = layers, heads, min(self.residual + self.group - 1, self.max_seq_len), head_dim
        self._tails = [np.zeros(tail, np.float16) for _ in "kv"]
        self._new = {}  # layer -> (K, V) float16 of the open pass, until commit

    def _reserve(self, form):
        """{part: array (layers, heads, units, …)} with room for max_seq_len tokens."""
        layers, heads, head_dim = self.config.cache_shape
        one = form.encode(np.zeros((heads, form.tokens, head_dim), np.float32))
        room = layers, heads, self.max_seq_len // form.tokens
        return {key: np.zeros((*room, *part.shape[2:]), part.dtype) for key, part in one.items()}

    @property
    def _at_once(self):
        return self.residual == 0 and self.group == 1

    def attend(self, layer, q, k, v, rotate=None):
        self._check_rows(layer, q, k, v)
        if rotate is not None:
            positions = np.arange(self.seq_len, self.seq_len + self.pending)
            q, k = rotate(q, positions), rotate(k, positions)
        keys, values = self._store(layer, k, v)
        return ops.attention(q, keys, values, start=self.seq_len)

    def _write(self, layer, k, v):
        if self._at_once:
            for which, rows in enumerate((k, v)):
                self._encode(which, layer, self.seq_len, rows)
            return tuple(self._decode(which, layer, self.seq_len + self.pending) for which in (0, 1))
        self._new[layer] = k.astype(np.float16), v.astype(np.float16)
        old = self.keys_values(layer)
        return tuple(np.concatenate([o, n], axis=1) for o, n in zip(old, self._new[layer], strict=True))

    def _keep(self, n):
        new, self._new = self._new, {}
        if self._at_once:
            self._quantized = self.seq_len + n
        elif n:
            stop = max(self._quantized, (self.seq_len + n - self.residual) // self.group * self.group)
            for layer in range(self.config.num_layers):
                for which in (0, 1):
                    self._flush(which, layer, new[layer][which][:, :n], stop)
            self._quantized = stop

    def _flush(self, which, layer, new, stop):
        """Quantize the tokens up to `stop`; the rest of tail and new rows becomes the tail."""
        tail = self._tails[which][layer]
        rows = np.concatenate([tail[:, : self.seq_len - self._quantized], new], axis=1)
        out = stop - self._quantized
        if out:
            self._encode(which, layer, self._quantized, rows[:, :out].astype(np.float32))
        tail[:, : rows.shape[1] - out] = rows[:, out:]

    def _encode(self, which, layer, start, rows):
        form, store = self.formats[which], self._stores[which]
        units = slice(start // form.tokens, (start + rows.shape[1]) // form.tokens)
        for key, part in form.encode(rows).items():
            store[key][layer, :, units] = part

    def _decode(self, which, layer, stop):
        if stop == 0:
            return np.empty((self.config.num_kv_heads, 0, self.config.head_dim), np.float32)
        form, store = self.formats[which], self._stores[which]
        return form.decode({key: part[layer, :, : stop // form.tokens] for key, part in store.items()})

    @property
    def max_rewind(self):
        return self.seq_len if self._at_once else self.seq_len - self._quantized

    def truncate(self, seq_len):
        super().truncate(seq_len)
        self._quantized = min(self._quantized, self.seq_len)

    def reset(self):
        super().reset()
        self._quantized, self._new = 0, {}

    @property
    def nbytes(self):
        parts = [part for store in self._stores for part in store.values()]
        new = [rows for pair in self._new.values() for rows in pair]
        return sum(array.nbytes for array in parts + self._tails + new)

    @property
    def nbytes_used(self):
        layers, heads, head_dim = self.config.cache_shape
        quantized = sum(f.bytes_per_token(heads, head_dim) for f in self.formats) * self._quantized
        return int(layers * (quantized + 2 * 2 * heads * head_dim * (self.seq_len - self._quantized)))

    def keys_values(self, layer):
        return tuple(_read_only(self._rows(which, layer)) for which in (0, 1))

    def _rows(self, which, layer):
        """All committed rows of the keys (0) or values (1), float32: decoded, then the tail."""
        tail = self._tails[which][layer, :, : self.seq_len - self._quantized]
        return np.concatenate([self._decode(which, layer, self._quantized), tail], axis=1)
