"""Three ways to hand out a memory of slots: the first run that is long enough, powers of two, blocks."""

import bisect
from collections import deque


def memory_for(rules, slots):
    """An empty memory of `slots` slots in which the policy of these `allocation.Rules` places requests."""
    if rules.policy == "paged":
        return Blocks(slots, rules.block_size)
    return Buddy(slots) if rules.policy == "buddy" else FirstFit(slots)


class FirstFit:
    """One address space. A place is (start, length), in the first free run that is long enough."""

    leftover = blocks = 0

    def __init__(self, slots):
        self.slots = self.largest = slots
        self._starts, self._lengths = [0], [slots]  # the free runs, by address; never two that touch

    def take(self, n):
        for i, length in enumerate(self._lengths):
            if length >= n:
                start = self._starts[i]
                if length == n:
                    del self._starts[i], self._lengths[i]
                else:
                    self._starts[i], self._lengths[i] = start + n, length - n
                return start, n
        return None

    def give(self, place):
        start, length = place
        i = bisect.bisect(self._starts, start)
        if i < len(self._starts) and start + length == self._starts[i]:
            length += self._lengths[i]
            del self._starts[i], self._lengths[i]
        if i and self._starts[i - 1] + self._lengths[i - 1] == start:
            self._lengths[i - 1] += length
        else:
            self._starts.insert(i, start)
            self._lengths.insert(i, length)

    def too_short(self, need):
        """The free runs shorter than `need`: [(start, length), …]."""
        runs = zip(self._starts, self._lengths, strict=True)
        return [(start, length) for start, length in runs if length < need]

    def rounded(self, n):
        return n

    def capacity(self, place):
        return place[1]

    def runs(self, place):
        return [(place[0], place[0] + place[1])]


class Buddy:
    """Pieces whose sizes are powers of two, each at a multiple of its size. A place is (start, length).

    A piece is split in halves until it is just large enough; a piece given back merges with its other half
    while that is free. A memory that is no power of two begins as several pieces, the largest first.
    """

    leftover = blocks = 0

    def __init__(self, slots):
        self.slots, self.largest = slots, 1 << (slots.bit_length() - 1)
        self._free = {1 << i: [] for i in range(slots.bit_length())}  # size -> starts, ascending
        start = 0
        for size in reversed(self._free):
            if slots & size:
                self._free[size].append(start)
                start += size

    def take(self, n):
        size = piece = self.rounded(n)
        while piece <= self.largest and not self._free[piece]:
            piece *= 2
        if piece > self.largest:
            return None
        start = self._free[piece].pop(0)
        while piece > size:
            piece //= 2
            bisect.insort(self._free[piece], start + piece)
        return start, size

    def give(self, place):
        start, size = place
        while size < self.largest and self._pop(size, start ^ size):
            start &= ~size
            size *= 2
        bisect.insort(self._free[size], start)

    def _pop(self, size, start):
        """Take this free piece out of its list; False when it is not there."""
        starts = self._free[size]
        i = bisect.bisect_left(starts, start)
        if i == len(starts) or starts[i] != start:
            return False
        del starts[i]
        return True

    def too_short(self, need):
        """The free pieces shorter than `need`, by address: [(start, length), …]."""
        return sorted((start, size) for size, starts in self._free.items() if size < need for start in starts)

    def rounded(self, n):
        return 1 << (n - 1).bit_length()

    capacity, runs = FirstFit.capacity, FirstFit.runs


class Blocks:
    """A free list of blocks, first given back, first taken. A place is a list of block ids."""

    def __init__(self, slots, block_size):
        self.slots, self.block_size = slots, block_size
        self.blocks, self.leftover = divmod(slots, block_size)
        self.largest = slots - self.leftover
        self._fresh, self._free = 0, deque()  # the first block never taken yet, and those given back

    @property
    def free(self):
        return self.blocks - self._fresh + len(self._free)

    def take(self, n):
        fresh = range(self._fresh, min(self._fresh + n, self.blocks))
        self._fresh += len(fresh)
        return [*fresh, *(self._free.popleft() for _ in range(n - len(fresh)))]

    def give(self, place):
        self._free.extend(reversed(place))

    def too_short(self, need):
        return []

    def capacity(self, place):
        return len(place) * self.block_size

    def runs(self, place):
        size = self.block_size
        return [(block * size, (block + 1) * size) for block in place]
