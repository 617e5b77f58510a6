"""A block manager beside a memory: every operation is done in both, and what the manager says is compared.

The memory holds in each slot a number that stands for a token together with all tokens before it, salt and
adapter: what a key and a value depend on, and who may see them. Blocks that are handed out are emptied, and
slots that were given but not committed hold rubbish, so that whatever is read or found wrongly is seen.
"""

import itertools

import pytest

from kvcourse.paging import OutOfBlocks


def snapshot(manager):
    """All that the manager knows, as one comparable value."""
    blocks = [(b.id, b.ref_count, b.key, b.content) for b in manager._blocks]
    sequences = {
        id(s): (s.salt, s.adapter, *map(tuple, (s.block_table, s.token_ids, s.keys)), s.num_cached_tokens)
        for s in manager._sequences
    }
    names = {key: block.id for key, block in manager._shared.items()}
    counters = manager.queries, manager.hits, manager.evictions
    return blocks, manager.free_blocks(), sequences, names, counters


class Contents:
    """The operations of `manager`, each compared with what the rules say should come of it.

    exact  False where names may collide: a miss or a second copy is then allowed, a mix-up never
    """

    def __init__(self, manager, exact=True):
        self.manager, self.exact, self.size = manager, exact, manager.block_size
        self.memory = [None] * (manager.num_blocks * manager.block_size)
        self.sequences = []
        self.rows, self.room, self.named = (
            {},
            {},
            {},
        )  # of each sequence: rows, slots asked for, shared blocks
        self._numbers, self._known = itertools.count(1), {}
        self._before, self._nameless = {}, set()

    # --- what the memory should hold -----------------------------------------------------

    def chain(self, ids, salt, adapter, after=()):
        """One row for each token, after the rows `after`."""
        row = after[-1] if after else self._row("start", (type(salt), salt, type(adapter), adapter))
        rows = []
        for token in ids:
            row = self._row(row, token)
            rows.append(row)
        return rows

    def _row(self, before, token):
        if token is None:  # nobody knows it, so it equals no other
            row = next(self._numbers)
            self._nameless.add(row)
        else:
            row = self._known.setdefault((before, token), 0) or next(self._numbers)
            self._known[before, token] = row
        self._before[row] = before
        return row

    def findable(self):
        """{last row of a block: the block} for all blocks that a prompt can find."""
        size, known = self.size, self.manager.is_findable
        return {self.memory[(b + 1) * size - 1]: b for b in range(self.manager.num_blocks) if known(b)}

    def blocks_for(self, tokens):
        return -(-tokens // self.size)

    def block(self, number):
        return slice(number * self.size, (number + 1) * self.size)

    def _empty(self, blocks):
        for number in blocks:
            self.memory[self.block(number)] = [None] * self.size

    def refused(self, error, call, *arguments):
        """The call raises `error` in one line, and the manager is as it was."""
        before = snapshot(self.manager)
        with pytest.raises(error) as caught:
            call(*arguments)
        assert "\n" not in str(caught.value)
        assert snapshot(self.manager) == before, f"{call.__name__} failed and changed something"

    # --- the operations --------------------------------------------------------------------

    def allocate(self, ids, salt=None, adapter=None):
        """The new sequence, or None when there is no room and the manager said so."""
        manager = self.manager
        rows, present, expected = self.chain(ids, salt, adapter), self.findable(), []
        for last in rows[self.size - 1 : max(0, len(ids) - 1) : self.size]:
            if last not in present:
                break
            expected.append(present[last])
        found = manager.lookup(ids, salt, adapter)
        assert found == (expected if self.exact else expected[: len(found)])
        queue = [number for number in manager.free_blocks() if number not in found]
        needed = self.blocks_for(len(ids)) - len(found)
        if needed > len(queue):
            self.refused(OutOfBlocks, manager.allocate, ids, salt, adapter)
            return None
        seq = manager.allocate(ids, salt, adapter)
        assert seq.block_table == found + queue[:needed] and manager.free_blocks() == queue[needed:]
        hit = len(found) * self.size
        assert seq.num_cached_tokens == seq.num_tokens == hit and seq.token_ids == ids[:hit]
        self._empty(queue[:needed])
        self._enter(seq, rows[:hit], len(ids), len(found))
        return seq

    def append(self, seq, n=1):
        """Room for n tokens, the copies made; False when there is no room and the manager said so."""
        manager, table, at = self.manager, list(seq.block_table), seq.num_tokens // self.size
        old = table[at] if seq.num_tokens % self.size else None
        copied = old is not None and (manager.ref_count(old) > 1 or manager.is_findable(old))
        queue = manager.free_blocks()
        queue += [old] if copied and manager.ref_count(old) == 1 else []
        needed = max(0, self.blocks_for(seq.num_tokens + n) - len(table)) + copied
        if needed > len(queue):
            self.refused(OutOfBlocks, manager.append_slots, seq, n)
            return False
        copies = manager.append_slots(seq, n)
        new = queue[:needed]
        if copied:
            assert copies == ([(old, new[0])] if new[0] != old else [])
            table[at] = new[0]
            self.memory[self.block(new[0])] = self.memory[self.block(old)]
        else:
            assert copies == []
        self._empty(new[copied:])
        assert seq.block_table == table + new[copied:] and manager.free_blocks() == queue[needed:]
        self.room[seq] = max(self.room[seq], seq.num_tokens + n)
        return True

    def commit(self, seq, ids):
        """Write rows for `ids` and rubbish after them, then commit. False when that was refused, rightly."""
        manager, start = self.manager, seq.num_tokens
        end = len(seq.block_table) * self.size
        written = {s // self.size for s in manager.slot_mapping(seq, start, min(start + len(ids), end))}
        if len(ids) > end - start or any(map(self.is_shared, written)):
            self.refused(ValueError, manager.commit, seq, ids)
            return False
        rows = self.chain(ids, seq.salt, seq.adapter, self.rows[seq])
        for i, slot in enumerate(manager.slot_mapping(seq, start, end)):
            if not self.is_shared(slot // self.size):  # the caller knows not to write there
                self.memory[slot] = rows[i] if i < len(rows) else -next(self._numbers)
        self.rows[seq] += rows
        table, queue = self._after_commit(seq)
        manager.commit(seq, ids)
        if self.exact:
            assert seq.block_table == table and manager.free_blocks() == queue
        self.read(seq)
        return True

    def is_shared(self, number):
        return self.manager.ref_count(number) > 1 or self.manager.is_findable(number)

    def _after_commit(self, seq):
        """The table and the free queue that follow, when every new full block is shared."""
        table, queue, present = list(seq.block_table), self.manager.free_blocks(), self.findable()
        whole = len(self.rows[seq]) // self.size if self.manager.prefix_caching else 0
        while self.named[seq] < whole:
            i = self.named[seq]
            rows = self.rows[seq][self.block(i)]
            if self._nameless.intersection(rows):
                break
            own, first = table[i], present.setdefault(rows[-1], table[i])
            if first != own:
                queue = [number for number in queue if number != first]
                queue += [own] if self.manager.ref_count(own) == 1 else []
                table[i] = first
            self.named[seq] += 1
        return table, queue

    def truncate(self, seq, num_tokens):
        kept = self.blocks_for(num_tokens)
        table, queue = self._after_release(seq, kept)
        self.manager.truncate(seq, num_tokens)
        assert seq.block_table == table and self.manager.free_blocks() == queue
        del self.rows[seq][num_tokens:]
        self.room[seq], self.named[seq] = num_tokens, min(self.named[seq], num_tokens // self.size)
        self.read(seq)

    def _after_release(self, seq, kept):
        """The table and the free queue that follow when the blocks after `kept` are given back."""
        last_first = reversed(seq.block_table[kept:])
        freed = [number for number in last_first if self.manager.ref_count(number) == 1]
        return seq.block_table[:kept], self.manager.free_blocks() + freed

    def fork(self, seq):
        queue = self.manager.free_blocks()
        child = self.manager.fork(seq)
        assert child.block_table == seq.block_table[: self.blocks_for(seq.num_tokens)]
        assert child.token_ids == seq.token_ids and child.token_ids is not seq.token_ids
        assert child.keys == seq.keys and child.keys is not seq.keys
        assert child.block_table is not seq.block_table
        assert self.manager.free_blocks() == queue
        self._enter(child, list(self.rows[seq]), seq.num_tokens, self.named[seq])
        return child

    def free(self, seq):
        _, queue = self._after_release(seq, 0)
        self.manager.free(seq)
        assert self.manager.free_blocks() == queue
        for held in (self.rows, self.room, self.named):
            del held[seq]
        self.sequences.remove(seq)
        for call in (self.manager.free, self.manager.append_slots, self.manager.fork):
            with pytest.raises(ValueError, match="this sequence was freed"):
                call(seq)

    def _enter(self, seq, rows, room, named):
        self.rows[seq], self.room[seq], self.named[seq] = rows, room, named
        self.sequences.append(seq)
        self.read(seq)

    # --- what must hold after each of them -----------------------------------------------

    def read(self, seq):
        """Through its table the sequence reads its own rows, and its last block is all it wastes."""
        slots = self.manager.slot_mapping(seq, 0, seq.num_tokens)
        assert [self.memory[slot] for slot in slots] == self.rows[seq], "a sequence reads other tokens"
        wasted = len(seq.block_table) * self.size - self.room[seq]
        assert 0 <= wasted < self.size, f"{wasted} slots nobody asked for"

    def check(self):
        """Everything: blocks, counts, tables, names, and every sequence's contents."""
        manager = self.manager
        manager.check_invariants()
        held = [number for seq in self.sequences for number in seq.block_table]
        assert all(len(set(seq.block_table)) == len(seq.block_table) for seq in self.sequences)
        free = manager.free_blocks()
        assert len(free) == len(set(free)) == manager.num_free and not set(free) & set(held)
        assert (
            manager.num_free + manager.num_used == manager.num_blocks and len(set(held)) == manager.num_used
        )
        for number in range(manager.num_blocks):
            assert manager.ref_count(number) == held.count(number)
        for seq in self.sequences:
            self.read(seq)
        findable = [number for number in range(manager.num_blocks) if manager.is_findable(number)]
        assert manager.num_kept == len(set(findable) & set(free))
        for number in findable:
            self._check_full(self.memory[self.block(number)])

    def _check_full(self, rows):
        """A findable block holds the committed, named rows of whole blocks of one sequence, in order."""
        assert all(row is not None and row > 0 for row in rows), "a block is findable before it is full"
        assert not self._nameless.intersection(rows), "a block with a nameless token is findable"
        assert all(self._before[b] == a for a, b in itertools.pairwise(rows)), "rows of several sequences"
        depth, row = 0, rows[0]
        while self._before[row] != "start":
            depth, row = depth + 1, self._before[row]
        assert depth % self.size == 1 % self.size, "rows of two blocks"
