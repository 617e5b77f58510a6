"""A cache of latents: one vector a token and layer for all heads, and one rotated key.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2 and 2.1.3, and appendix C, equations 41 and 43.
"""

import numpy as np

from kvcourse import ops
from kvcourse.caches.base import KVCache, read_only


class LatentCache(KVCache):
    """Rows (num_layers, max_seq_len, kv_lora_rank + qk_rope_head_dim), preallocated.

    What is stored of a token is its *normed* latent and the shared key, rotated at its position.
    `attend` works in absorbed form: to the queries this is one KV head, whose key is the whole row
    and whose value is the row's latent part. So the values need no memory of their own.

    Raises ValueError for a config without `latent`.
    """

    layout = "layer, token, latent then rotated key"

    def __init__(self, config, max_seq_len=None):
        if not config.latent:
            raise ValueError(f"{config.name} caches keys and values per head: use a ContiguousCache")
        super().__init__(config, max_seq_len)
        self.rank, self.rope = config.latent.kv_lora_rank, config.latent.qk_rope_head_dim
        self._rows = np.zeros((config.num_layers, self.max_seq_len, self.rank + self.rope), self.dtype)
        # The scale is that of the expanded form: the width of its keys, not of the rows here.
        self._scale = (config.latent.qk_nope_head_dim + self.rope) ** -0.5

    def attend(self, layer, q, k, v, rotate=None):
        """q (num_heads, n, rank + rope), absorbed; k (1, n, rope), the shared key; both parts of rope
        un-rotated; v (1, n, rank), the normed latent. Returns (num_heads, n, rank)."""
        self._check_rows(layer, q, k, v)
        if rotate is not None:
            positions = np.arange(self.seq_len, self.seq_len + self.pending)
            turned = rotate(q[..., self.rank :], positions)
            q, k = np.concatenate([q[..., : self.rank], turned], axis=-1), rotate(k, positions)
        keys, values = self._store(layer, k, v)
        return ops.attention(q, keys, values, start=self.seq_len, scale=self._scale)

    def _write(self, layer, k, v):
        start, stop = self.seq_len, self.seq_len + self.pending
        self._rows[layer, start:stop, : self.rank] = v[0]
        self._rows[layer, start:stop, self.rank :] = k[0]
        rows = self._rows[layer, None, :stop]
        return rows, rows[..., : self.rank]

    def _expected_shapes(self):
        n, heads = self.pending, self.config.num_heads
        return {
            "queries": (heads, n, self.rank + self.rope),
            "keys": (1, n, self.rope),
            "values": (1, n, self.rank),
        }

    @property
    def nbytes(self):
        return self._rows.nbytes

    @property
    def nbytes_used(self):
        return self._rows[:, : self.seq_len].nbytes

    def keys_values(self, layer):
        """One KV head: keys (1, rows, rank + rope), and values that are the first `rank` columns of them."""
        rows = read_only(self._rows[layer, None, : self.seq_len])
        return rows, rows[..., : self.rank]

    def export(self, start, stop):
        """As in KVCache, with one array "rows" (num_layers, tokens, rank + rope)."""
        start, stop = self._check_range(start, stop)
        rows = self._rows[:, start:stop].copy()
        return {"layout": self.layout, "dtype": self.dtype.name, "start": start, "rows": rows}

    def _check_payload(self, payload):
        self._check_parts(payload, "rows")
        rows = np.asarray(payload["rows"])
        layers, _, width = self._rows.shape
        if rows.ndim != 3 or (rows.shape[0], rows.shape[2]) != (layers, width):
            raise ValueError(
                f"payload of shape {rows.shape} does not fit: expected ({layers}, tokens, {width})"
            )
        self._check_dtypes(payload, rows)
        rows = rows[:, None]  # (layers, 1, tokens, width)
        return rows[..., self.rank :], rows[..., : self.rank]
