"""Caches: one interface (`base`), one way of storing rows a file."""

from kvcourse.caches.base import CacheFull, KVCache
from kvcourse.caches.batch import BatchView
from kvcourse.caches.contiguous import ConcatenatingCache, ContiguousCache, GrowingCache
from kvcourse.caches.heavy_hitters import HeavyHitterCache
from kvcourse.caches.latent import LatentCache
from kvcourse.caches.paged import PagedCache, PagedPool
from kvcourse.caches.quantized import QuantizedCache
from kvcourse.caches.sliding import SlidingCache

__all__ = [
    "BatchView", "CacheFull", "ConcatenatingCache", "ContiguousCache", "GrowingCache", "HeavyHitterCache",
    "KVCache", "LatentCache", "PagedCache", "PagedPool", "QuantizedCache", "SlidingCache",
]  # fmt: skip
