"""`FreeQueue`: the blocks that nobody holds, in the order in which they will be taken."""


class Block:
    """One KV block's record. It is also a link of the free queue, so that leaving the queue needs no search.

    id         which block of the pool, 0 …
    ref_count  sequences that hold it; 0 = free
    key        the name it is shared under, None when it is not shared
    content    (token ids, parent's block id, salt, adapter) behind that name
    """

    __slots__ = ("id", "ref_count", "key", "content", "previous", "next")

    def __init__(self, number):
        self.id = number
        self.ref_count = 0
        self.key = self.content = self.previous = self.next = None


class FreeQueue:
    """A doubly linked list through the blocks themselves: append, popleft and remove take constant time.

    A cache hit takes a block out of the middle, which a deque can do only by searching. The two ends
    are blocks too, never handed out, so that no link is ever None. After vLLM's FreeKVCacheBlockQueue
    (vllm/v1/core/kv_cache_utils.py).
    """

    def __init__(self, blocks=()):
        self._ends = Block(None), Block(None)
        first, last = self._ends
        first.next, last.previous = last, first
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self):
        return self._length

    def __iter__(self):
        first, last = self._ends
        block = first.next
        while block is not last:
            yield block
            block = block.next

    def append(self, block):
        """Put a block at the end: it will be taken last."""
        last = self._ends[1]
        before = last.previous
        before.next = last.previous = block
        block.previous, block.next = before, last
        self._length += 1

    def popleft(self):
        """Take the block that has waited longest. Raises IndexError when there is none."""
        if not self._length:
            raise IndexError("the free queue is empty")
        block = self._ends[0].next
        self.remove(block)
        return block

    def remove(self, block):
        """Take this block out, wherever it stands. Raises ValueError when it is not in a queue."""
        before, after = block.previous, block.next
        if before is None:
            raise ValueError(f"block {block.id} is not in the free queue")
        before.next, after.previous = after, before
        block.previous = block.next = None
        self._length -= 1
