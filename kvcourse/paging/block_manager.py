"""`BlockManager`: which sequence holds which blocks of a pool, and which blocks can be shared. No tensors.

The pool's memory is cut into `num_blocks` blocks of `block_size` tokens. A sequence has a block table: its
i-th entry says in which block its tokens i × block_size … lie. The manager hands blocks out, counts who
holds them, and finds blocks that already hold a prompt's beginning (Kwon et al. 2023, "Efficient Memory
Management for Large Language Model Serving with PagedAttention", sections 4.2–4.4; the prefix cache follows
vLLM's docs/design/prefix_caching.md).

    seq = manager.allocate(prompt)              # cached prefix + room for the rest
    # … compute tokens seq.num_cached_tokens … and write their rows into their slots
    manager.commit(seq, prompt[seq.num_cached_tokens:])
    copies = manager.append_slots(seq)          # room for the next token; make these copies first
    # … compute and write it
    manager.commit(seq, [token])
    manager.free(seq)                           # full blocks stay findable until their memory is needed
"""

from dataclasses import dataclass, field

from kvcourse.arguments import count
from kvcourse.paging.free_queue import Block, FreeQueue
from kvcourse.paging.prefix import block_hash, checked_ids, label


class OutOfBlocks(RuntimeError):
    """More blocks asked for than are free. Nothing was changed."""


@dataclass(eq=False)
class Sequence:
    """One sequence's share of the pool. Read it; only the manager changes it.

    block_table        block ids, in the order of the tokens; room for at least num_tokens
    token_ids          the committed tokens (None: a token that nobody named)
    num_cached_tokens  how many of them `allocate` found in the cache
    keys               names of its leading shared blocks
    """

    salt: object = None
    adapter: object = None
    block_table: list = field(default_factory=list)
    token_ids: list = field(default_factory=list)
    num_cached_tokens: int = 0
    keys: list = field(default_factory=list)

    @property
    def num_tokens(self):
        """Committed tokens, which is also the position of the next one."""
        return len(self.token_ids)


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` tokens and remembers what full ones hold.

    prefix_caching  False: nothing is ever found again, every block is emptied when it is freed
    hasher          what names a block: hasher(parent key, tokens, salt, adapter) → hashable, not None;
                    default `prefix.block_hash`. Two different blocks with one name are a miss, never a
                    mix-up: tokens, parent, salt and adapter are compared.

    Three rules make sharing safe:
    - a block becomes findable in `commit`, when its last token has been computed, and only if it is full;
    - a block that is findable or held twice is never written: `append_slots` replaces it by a copy;
    - equal content is findable once: a block committed again is given back and the first one held instead.
    So whoever holds a block holds its parent too, a parent is never freed before its children, and the
    parent's block id can stand for everything before it.

    Free blocks wait in a queue and are taken from its front. `free` and `truncate` put a table's last
    block in first, so a chain loses its tail first, and what was used longest ago goes first (LRU).

    A call that raises changes nothing, also when the hasher raised. An interrupt (Ctrl-C) that falls between
    two lines of a method is not undone: blocks may then be lost. Make a new manager after one.

    Raises TypeError or ValueError for a size that is no whole number of at least 1 and for a hasher that
    cannot be called.
    """

    def __init__(self, num_blocks, block_size=16, prefix_caching=True, hasher=None):
        self.num_blocks = count(num_blocks, "num_blocks")
        self.block_size = count(block_size, "block_size")
        self.prefix_caching = prefix_caching
        if not (hasher is None or callable(hasher)):
            raise TypeError(f"hasher is {hasher!r}: give a function of (parent, tokens, salt, adapter)")
        self._hash = block_hash if hasher is None else hasher
        self._blocks = [Block(number) for number in range(self.num_blocks)]
        self._queue = FreeQueue(self._blocks)
        self._shared = {}  # key -> block
        self._sequences = set()
        self.queries = 0  # tokens of all allocated prompts
        self.hits = 0  # … of which were found in the cache
        self.evictions = 0  # findable blocks whose memory was taken for something else

    # --- the life of a sequence ---------------------------------------------------------

    def allocate(self, token_ids=(), salt=None, adapter=None):
        """A new Sequence: the longest cached prefix of the prompt, and free blocks for the rest.

        Whole blocks are reused, at most len(token_ids) − 1 tokens: the last token must be computed,
        its logits choose the next one. The found tokens count as committed; the others are given to
        `commit` once they have been computed.

        Raises OutOfBlocks, and TypeError or ValueError for token ids, salt or adapter of another kind.
        """
        ids = checked_ids(token_ids)
        found = self._find(ids, salt, adapter)
        needed = self.blocks_for(len(ids)) - len(found)
        waiting = sum(block.ref_count == 0 for block in found)  # found ones that are free at the moment
        self._check_free(needed, len(self._queue) - waiting)
        for block in found:
            self._hold(block)
        blocks = found + [self._take() for _ in range(needed)]
        hit = len(found) * self.block_size
        seq = Sequence(salt, adapter, [b.id for b in blocks], ids[:hit], hit, [b.key for b in found])
        self._sequences.add(seq)
        self.queries += len(ids)
        self.hits += hit
        return seq

    def append_slots(self, seq, n=1):
        """Make room for n tokens after the committed ones.

        Returns copies to make before anything is written: [(source block, target block)], at most one.
        It is there when the block to be written next is shared (copy-on-write).
        Raises OutOfBlocks, ValueError for n < 1 and for a sequence that was freed.
        """
        self._check_alive(seq)
        n = count(n, "n")
        needed = max(0, self.blocks_for(seq.num_tokens + n) - len(seq.block_table))
        old = self._next_written(seq)
        must_copy = old is not None and self._is_shared(old)
        given_back = must_copy and old.ref_count == 1
        self._check_free(needed + must_copy, len(self._queue) + given_back)
        copies = []
        if must_copy:
            self._release(old)
            new = self._take()  # with nothing else free this is `old` again, and nothing needs copying
            seq.block_table[seq.num_tokens // self.block_size] = new.id
            copies = [(old.id, new.id)] if new is not old else []
        seq.block_table.extend(self._take().id for _ in range(needed))
        return copies

    def commit(self, seq, token_ids):
        """These tokens, the next ones of the sequence, are computed and written: they count from now on.

        Blocks that they fill become findable. If equal content is findable already, that block takes
        the place of the sequence's own in its block table: read the table again after a commit.
        Raises ValueError when there are no slots for them, TypeError or ValueError as `allocate`, and what
        the hasher raises.
        """
        self._check_alive(seq)
        ids = checked_ids(token_ids, unnamed=True)
        room = len(seq.block_table) * self.block_size - seq.num_tokens
        if len(ids) > room:
            raise ValueError(f"{len(ids)} tokens committed, {room} have slots: call append_slots() first")
        written = self._next_written(seq)
        if ids and written is not None and self._is_shared(written):
            raise ValueError(f"block {written.id} is shared: call append_slots() before writing to it")
        before = seq.num_tokens
        seq.token_ids.extend(ids)
        try:
            names = self._new_names(seq)  # all of them before one counts: the hasher may raise
        except BaseException:
            del seq.token_ids[before:]
            raise
        for tokens, key in names:
            if not self._share(seq, tokens, key):
                break

    def truncate(self, seq, num_tokens):
        """Go back to `num_tokens` committed tokens; blocks that hold none of them are given back.

        Room that was made and not used is given back too. Raises ValueError outside 0 … seq.num_tokens.
        """
        self._check_alive(seq)
        num_tokens = count(num_tokens, "num_tokens", least=0)
        if num_tokens > seq.num_tokens:
            raise ValueError(f"cannot go to {num_tokens} tokens: the sequence holds {seq.num_tokens}")
        kept = self.blocks_for(num_tokens)
        given_back = seq.block_table[kept:]
        del seq.block_table[kept:], seq.token_ids[num_tokens:], seq.keys[num_tokens // self.block_size :]
        self._release_all(given_back)

    def fork(self, seq):
        """A second Sequence with the same committed tokens in the same blocks. Costs no block.

        Both may go on: whoever writes into the last, partly filled block first gets a copy of it.
        """
        self._check_alive(seq)
        table = seq.block_table[: self.blocks_for(seq.num_tokens)]
        for number in table:
            self._hold(self._blocks[number])
        child = Sequence(seq.salt, seq.adapter, table, list(seq.token_ids), seq.num_tokens, list(seq.keys))
        self._sequences.add(child)
        return child

    def free(self, seq):
        """The sequence is over. Blocks nobody else holds can be taken; full ones stay findable until then."""
        self._check_alive(seq)
        self._sequences.remove(seq)
        self._release_all(seq.block_table)
        seq.block_table, seq.token_ids, seq.keys = [], [], []

    # --- looking ------------------------------------------------------------------------

    def lookup(self, token_ids, salt=None, adapter=None):
        """The block ids that `allocate` would find for this prompt. Changes nothing."""
        return [block.id for block in self._find(checked_ids(token_ids), salt, adapter)]

    def slot_mapping(self, seq, start, stop):
        """Where the rows of tokens start … stop − 1 lie: a list of block × block_size + offset.

        Raises ValueError for tokens that have no slot, TypeError for what is no whole number.
        """
        self._check_alive(seq)
        start, stop = count(start, "start", least=0), count(stop, "stop", least=0)
        room = len(seq.block_table) * self.block_size
        if not start <= stop <= room:
            raise ValueError(f"no slots for tokens {start} … {stop}: there is room for 0 … {room}")
        size, table = self.block_size, seq.block_table
        return [table[position // size] * size + position % size for position in range(start, stop)]

    @property
    def num_free(self):
        """Blocks that can be taken, those that are kept for a later hit included."""
        return len(self._queue)

    @property
    def num_used(self):
        """Blocks that at least one sequence holds."""
        return self.num_blocks - len(self._queue)

    @property
    def num_kept(self):
        """Free blocks that can still be found. Looks at every findable block."""
        return sum(block.ref_count == 0 for block in self._shared.values())

    def blocks_for(self, num_tokens):
        """How many blocks so many tokens need."""
        return -(-num_tokens // self.block_size)

    def ref_count(self, block):
        """How many sequences hold the block. Raises TypeError or ValueError for an id the pool lacks."""
        return self._block(block).ref_count

    def is_findable(self, block):
        """Whether the block's content can be found by a later prompt. Raises as `ref_count`."""
        return self._block(block).key is not None

    def free_blocks(self):
        """Ids of the free blocks in the order in which they will be taken."""
        return [block.id for block in self._queue]

    def check_invariants(self):
        """Raise AssertionError unless blocks, tables, names and queue agree. For tests; reads everything."""
        held = {}
        for seq in self._sequences:
            assert len(set(seq.block_table)) == len(seq.block_table), "a block stands twice in one table"
            assert len(seq.block_table) >= self.blocks_for(seq.num_tokens), "tokens without a block"
            for number in seq.block_table:
                held[number] = held.get(number, 0) + 1
            chain = [self._blocks[number] for number in seq.block_table[: len(seq.keys)]]
            assert [block.key for block in chain] == seq.keys, "a sequence's keys are not its blocks'"
            assert len(seq.keys) * self.block_size <= seq.num_tokens, "a block is shared before it is full"
        queue = list(self._queue)
        assert len(queue) == len(set(queue)) == len(self._queue), "the free queue is damaged"
        assert len(queue) + len(held) == self.num_blocks, "free + used is not all"
        for block in self._blocks:
            assert block.ref_count == held.get(block.id, 0), f"block {block.id}: wrong ref_count"
            assert (block.ref_count == 0) == (block.previous is not None), f"block {block.id}: free and held"
            assert (block.key is None) == (block.content is None), f"block {block.id}: half a name"
        for key, block in self._shared.items():
            assert block.key == key, f"block {block.id} is listed under another name"
            tokens, parent, _, _ = block.content
            assert len(tokens) == self.block_size and None not in tokens, f"block {block.id} is not full"
            assert parent is None or self._blocks[parent].key is not None, f"block {block.id}: parent lost"
        assert sum(block.key is not None for block in self._blocks) == len(self._shared), (
            "names and blocks differ"
        )

    # --- inside -------------------------------------------------------------------------

    def _block(self, number):
        if count(number, "block", least=0) >= self.num_blocks:
            raise ValueError(f"block is {number}: the pool has 0 … {self.num_blocks - 1}")
        return self._blocks[number]

    def _find(self, ids, salt, adapter):
        """The findable blocks of the prompt's beginning, up to the first miss."""
        for value, name in ((salt, "salt"), (adapter, "adapter")):
            if value is not None:
                label(value, name)  # refuses other types
        if not self.prefix_caching:
            return []
        found, key, parent = [], None, None
        for start in range(0, (len(ids) - 1) // self.block_size * self.block_size, self.block_size):
            content = tuple(ids[start : start + self.block_size]), parent, salt, adapter
            key = self._name(key, content[0], salt, adapter)
            block = self._shared.get(key)
            if block is None or block.content != content:
                break
            found.append(block)
            parent, salt = block.id, None  # the salt is in the first block's name only
        return found

    def _name(self, parent, tokens, salt, adapter):
        key = self._hash(parent, tokens, salt, adapter)
        try:
            if key is None:  # which says that a block is not shared
                raise TypeError
            hash(key)
        except TypeError:
            raise TypeError(f"the hasher gave {key!r}: it must give a name, hashable and not None") from None
        return key

    def _new_names(self, seq):
        """(tokens, name) of each full block that is not shared yet, up to one with a token nobody named."""
        names, key = [], seq.keys[-1] if seq.keys else None
        full = seq.num_tokens // self.block_size if self.prefix_caching else 0
        for i in range(len(seq.keys), full):
            tokens = tuple(seq.token_ids[i * self.block_size : (i + 1) * self.block_size])
            if None in tokens:
                break
            key = self._name(key, tokens, None if i else seq.salt, seq.adapter)
            names.append((tokens, key))
        return names

    def _share(self, seq, tokens, key):
        """Make the sequence's next full block findable under its name. False if the name is taken."""
        i = len(seq.keys)
        parent, salt = (seq.block_table[i - 1], None) if i else (None, seq.salt)
        content = tokens, parent, salt, seq.adapter
        own, first = self._blocks[seq.block_table[i]], self._shared.get(key)
        if first is None:
            own.key, own.content = key, content
            self._shared[key] = own
        elif first.content != content:
            return False  # a collision
        elif first is not own:
            self._hold(first)
            seq.block_table[i] = first.id
            self._release(own)
        seq.keys.append(key)
        return True

    def _next_written(self, seq):
        """The partly filled block that the next token goes into; None if it goes into an empty one."""
        if seq.num_tokens % self.block_size == 0:
            return None
        return self._blocks[seq.block_table[seq.num_tokens // self.block_size]]

    def _is_shared(self, block):
        return block.ref_count > 1 or block.key is not None

    def _hold(self, block):
        if block.ref_count == 0:
            self._queue.remove(block)
        block.ref_count += 1

    def _release(self, block):
        block.ref_count -= 1
        if block.ref_count == 0:
            self._queue.append(block)

    def _release_all(self, table):
        """Give blocks back, the last one first: a chain's tail is evicted before its head."""
        for number in reversed(table):
            self._release(self._blocks[number])

    def _take(self):
        """The first free block, emptied; the caller has made sure that there is one."""
        block = self._queue.popleft()
        if block.key is not None:
            del self._shared[block.key]
            block.key = block.content = None
            self.evictions += 1
        block.ref_count = 1
        return block

    def _check_free(self, needed, free):
        if needed > free:
            blocks = "block" if needed == 1 else "blocks"
            raise OutOfBlocks(
                f"{needed:,} {blocks} of {self.block_size} tokens needed, {free:,} of {self.num_blocks:,} "
                f"are free: free() a sequence, or make the pool larger (num_blocks)"
            )

    def _check_alive(self, seq):
        if not isinstance(seq, Sequence):
            raise TypeError(f"seq is {seq!r}: give what allocate() or fork() returned")
        if seq not in self._sequences:
            raise ValueError("this sequence was freed, or belongs to another manager: allocate() a new one")
