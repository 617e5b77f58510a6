"""`Tap`: look at a pass. It takes the cache's place and keeps the queries, keys and values that go by."""

import math

import numpy as np

from kvcourse import ops
from kvcourse.caches import KVCache
from kvcourse.config import ModelConfig


class Tap:
    """Stands where a pass expects its cache, and keeps every layer's q, k and v.

        tap = Tap(model.config)
        logits = model(ids, tap)
        tap.keys                                # (num_layers, num_kv_heads, T, head_dim)

    config  ModelConfig of the model
    mask    boolean (T, T), True where a row may see a column, for passes of T tokens;
            None is the causal triangle. With a mask of its own a tap answers what a
            model would compute if it could see the future, or less of the past.
    cache   a KVCache to pass through: the tap then holds the rows of the newest pass only

    Without a cache each pass is one whole text at positions 0 … T − 1, and nothing of it
    is attended to by the next one.
    """

    def __init__(self, config, *, mask=None, cache=None):
        if not isinstance(config, ModelConfig):
            raise TypeError(f"config is a {type(config).__name__}: give model.config")
        if mask is not None and cache is not None:
            raise ValueError("a mask and a cache were given: a cache brings the causal mask, leave one out")
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"cache is a {type(cache).__name__}: a tap looks at one sequence, in a KVCache")
        self.config = config if cache is None else cache.config
        self.unlimited = cache is not None and cache.unlimited  # whether positions may pass the model's
        self._mask = None if mask is None else _checked_mask(mask)
        self._cache = cache
        # layer -> (q, k, v), of the pass that is open (None without one) and of the last whole one
        self._open, self._rows = None, {}

    @property
    def queries(self):
        """Queries of the last pass, float32 (num_layers, num_heads, T, head_dim)."""
        return self._stacked(0)

    @property
    def keys(self):
        """Keys of the last pass, before any rotation, float32 (num_layers, num_kv_heads, T, head_dim)."""
        return self._stacked(1)

    @property
    def values(self):
        """Values of the last pass, float32 (num_layers, num_kv_heads, T, head_dim)."""
        return self._stacked(2)

    def begin(self, n):
        """The positions of n tokens, int64 (n,). Raises what the cache raises; ValueError for n < 1 or
        a mask of another size."""
        if self._cache is not None:
            positions = self._cache.begin(n)
            self._open = {}
            return positions
        if n < 1:
            raise ValueError(f"a pass over {n} tokens is empty: give at least 1")
        if self._mask is not None and len(self._mask) != n:
            raise ValueError(
                f"the mask is {self._mask.shape}, the pass has {n} tokens: give one of ({n}, {n})"
            )
        self._open = {}
        return np.arange(n)

    def note_ids(self, ids):
        """Handed on to the cache, where there is one."""
        if self._cache is not None:
            self._cache.note_ids(ids)

    def attend(self, layer, q, k, v, rotate=None):
        """Attention of q over the rows it may see, (num_heads, n, head_dim); q, k, v are kept as copies.

        Raises RuntimeError without an open pass.
        """
        if self._open is None:
            raise RuntimeError("no pass is open: call begin(n) before attend()")
        self._open[layer] = q.copy(), k.copy(), v.copy()
        if self._cache is not None:
            return self._cache.attend(layer, q, k, v, rotate)
        if rotate is not None:
            positions = np.arange(q.shape[1])
            q, k = rotate(q, positions), rotate(k, positions)
        if self._mask is None:
            return ops.attention(q, k, v, start=0)
        return masked_attention(q, k, v, self._mask)

    def commit(self):
        """The pass is whole: what it left can be read. Raises RuntimeError when a layer has not attended."""
        missing = [layer for layer in range(self.config.num_layers) if layer not in (self._open or {})]
        if missing:
            raise RuntimeError(f"layers {missing} were not attended in this pass: call abort()")
        if self._cache is not None:
            self._cache.commit()
        self._rows, self._open = self._open, None

    def abort(self):
        """The pass failed: the rows of the one before stay readable."""
        self._open = None
        if self._cache is not None:
            self._cache.abort()

    def _stacked(self, which):
        if not self._rows:
            raise RuntimeError("nothing passed yet: call model(ids, tap) first")
        return np.stack([self._rows[layer][which] for layer in range(self.config.num_layers)])


def masked_attention(q, k, v, mask):
    """Attention under any mask, written out.

    q (num_heads, T, head_dim), k and v (num_kv_heads, S, head_dim), mask boolean (T, S)
    with a True in every row. Query heads h·G … h·G + G − 1 share KV head h, where
    G = num_heads / num_kv_heads. Returns (num_heads, T, head_dim).
    Source: Vaswani et al. 2017, equation 1.
    """
    num_heads, T, head_dim = q.shape
    grouped = q.reshape(k.shape[0], -1, T, head_dim)
    scores = grouped @ k.swapaxes(1, 2)[:, None] * (1.0 / math.sqrt(head_dim))
    weights = ops.softmax(np.where(mask, scores, np.float32(-np.inf)))
    return (weights @ v[:, None]).reshape(num_heads, T, head_dim)


def _checked_mask(mask):
    mask = np.array(mask)  # a copy: what the caller changes later must not slip past the checks
    if mask.dtype != bool or mask.ndim != 2 or mask.shape[0] != mask.shape[1]:
        raise ValueError(f"the mask is {mask.dtype} {mask.shape}: give a boolean (T, T)")
    blind = np.flatnonzero(~mask.any(axis=1))
    if blind.size:  # softmax over nothing is 0/0
        raise ValueError(f"row {blind[0]} of the mask sees nothing: every row needs at least one True")
    return mask
