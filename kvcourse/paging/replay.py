"""Replay a trace of block ids through a prefix cache of limited size and count the hits: three policies."""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from kvcourse.arguments import count

POLICIES = ("lru", "lfu", "length")


@dataclass
class Replay:
    """What a replay found.

    accesses  block ids of all requests
    hits      … of which were present, counted from the front of each request to its first miss
    evictions blocks that were thrown out
    by_request  hits of each request, in order
    """

    accesses: int = 0
    hits: int = 0
    evictions: int = 0
    by_request: list = field(default_factory=list)

    @property
    def hit_rate(self):
        """hits / accesses, 0.0 for an empty trace."""
        return self.hits / self.accesses if self.accesses else 0.0


def replay(trace, capacity_blocks, policy="lru"):
    """Send the requests of a trace, one after the other, through a cache of `capacity_blocks` blocks.

    trace   requests in order of arrival, each a list of block ids from the front of its prompt (or an
            object with such a list as `hash_ids`, as `traces.load_mooncake` gives). An id stands for its
            block and everything before it. Ids are counted as they are, a partial last block too.
    capacity_blocks  None for a cache without limit
    policy  "lru"     evict the block used longest ago
            "lfu"     evict the block used least often since it came in; of several, the one used longest ago
            "length"  evict the block that stands farthest back in its request; of several, the one used
                      longest ago (after the LengthAwareCache of Qin et al. 2024, "Mooncake")

    Each request's leading run of present ids counts as hits; then all its ids become the newest, from
    the last to the first, so that the first ends newest; then blocks are evicted down to the capacity.

    Raises ValueError for an unknown policy, ValueError or TypeError for a capacity below 1.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}: choose one of {', '.join(POLICIES)}")
    if capacity_blocks is not None:
        capacity_blocks = count(capacity_blocks, "capacity_blocks")
    cache = _LRU() if policy == "lru" else _Ranked(policy)
    result = Replay()
    for request in trace:
        ids = getattr(request, "hash_ids", request)
        hits = next((i for i, block in enumerate(ids) if block not in cache), len(ids))
        result.accesses += len(ids)
        result.hits += hits
        result.by_request.append(hits)
        cache.use(ids)
        if capacity_blocks is not None:
            result.evictions += cache.shrink(capacity_blocks)
    return result


class _LRU(OrderedDict):
    """Block ids, the one used longest ago first."""

    def use(self, ids):
        for block in reversed(ids):
            self[block] = None
            self.move_to_end(block)

    def shrink(self, capacity):
        """Evict down to `capacity`; how many were evicted."""
        evicted = max(0, len(self) - capacity)
        for _ in range(evicted):
            self.popitem(last=False)
        return evicted


class _Ranked(dict):
    """Block id → its rank; the smallest rank is evicted first. A heap finds it; outdated entries are skipped.

    Ranks are (uses, clock) for "lfu" and (−place in the request, clock) for "length"; the clock makes
    the one used longest ago the smaller one.
    """

    def __init__(self, policy):
        super().__init__()
        self._by_uses = policy == "lfu"
        self._heap, self._clock = [], 0

    def use(self, ids):
        for place in range(len(ids) - 1, -1, -1):
            block = ids[place]
            self._clock += 1
            first = self[block][0] + 1 if self._by_uses and block in self else 1
            self[block] = rank = (first if self._by_uses else -place, self._clock)
            heapq.heappush(self._heap, (rank, block))

    def shrink(self, capacity):
        """Evict down to `capacity`; how many were evicted."""
        evicted = 0
        while len(self) > capacity:
            rank, block = heapq.heappop(self._heap)
            if self.get(block) == rank:
                del self[block]
                evicted += 1
        return evicted
