"""Caches: one interface (`base`), one way of storing rows a file."""

from kvcourse.caches.base import CacheFull, KVCache
from kvcourse.caches.batch import BatchView
from kvcourse.caches.contiguous import ConcatenatingCache, ContiguousCache, GrowingCache

__all__ = ["BatchView", "CacheFull", "ConcatenatingCache", "ContiguousCache", "GrowingCache", "KVCache"]
