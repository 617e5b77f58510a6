"""Whatever is done to a cache, in whatever order, its counts and rows stay true.

A state machine drives each cache beside a plain list of the rows that
should be there. Each row holds a number of its own, so that a misplaced one is seen.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcourse as kv

CONFIG = kv.ModelConfig("tiny", "gpt2", 2, 2, 2, 4, 8, 16, 10, 12)


class CacheMachine(RuleBasedStateMachine):
    kind = None

    @initialize(capacity=st.integers(1, CONFIG.max_seq_len))
    def make(self, capacity):
        self.cache = self.kind(CONFIG, capacity)
        self.rows = []  # the number each committed row carries
        self.open = []  # the same for the pass begun
        self.next_number = 1.0

    @precondition(lambda self: not self.open)
    @rule(n=st.integers(1, 5))
    def begin_and_write(self, n):
        if len(self.rows) + n > self.cache.max_seq_len:
            with pytest.raises(kv.CacheFull):
                self.cache.begin(n)
            return
        positions = self.cache.begin(n)
        assert positions.tolist() == list(range(len(self.rows), len(self.rows) + n))
        self.open = [self.next_number + i for i in range(n)]
        self.next_number += n
        for layer in range(CONFIG.num_layers):
            self.cache.attend(layer, *self.written(layer, n))

    def written(self, layer, n):
        numbers = np.array(self.open[:n], np.float32)[None, :, None] + 1000 * layer
        k = np.broadcast_to(numbers, (2, n, 4)).copy()
        return np.zeros_like(k), k, -k

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data):
        n = data.draw(st.integers(0, len(self.open)))
        self.cache.commit(n)
        self.rows += self.open[:n]
        self.open = []

    @precondition(lambda self: self.open)
    @rule()
    def commit_all(self):
        self.cache.commit()
        self.rows += self.open
        self.open = []

    @precondition(lambda self: self.open)
    @rule()
    def misuse_while_open(self):
        for call in (lambda: self.cache.begin(1), lambda: self.cache.truncate(0)):
            with pytest.raises(RuntimeError, match="open"):
                call()
        with pytest.raises(ValueError, match="cannot commit"):
            self.cache.commit(len(self.open) + 1)

    @rule()
    def abort(self):
        self.cache.abort()
        self.open = []

    @rule()
    def reset(self):
        self.cache.reset()
        self.rows, self.open = [], []

    @precondition(lambda self: not self.open)
    @rule(data=st.data())
    def truncate(self, data):
        with pytest.raises(ValueError, match="cannot go to"):
            self.cache.truncate(len(self.rows) + 1)
        seq_len = data.draw(st.integers(0, len(self.rows)))
        self.cache.truncate(seq_len)
        self.rows = self.rows[:seq_len]

    @precondition(lambda self: not self.open)
    @rule(data=st.data())
    def export_and_load(self, data):
        cut = data.draw(st.integers(0, len(self.rows)))
        payload = self.cache.export(cut, len(self.rows))
        self.cache.truncate(cut)
        self.cache.load(payload)

    @invariant()
    def counts_are_true(self):
        cache = self.cache
        assert cache.seq_len == cache.num_rows == cache.max_rewind == len(self.rows)
        assert cache.pending == len(self.open)
        assert cache.nbytes_used == 2 * 2 * 2 * 4 * 4 * len(self.rows)
        assert cache.nbytes >= cache.nbytes_used

    @invariant()
    def rows_are_the_committed_ones(self):
        for layer in range(CONFIG.num_layers):
            k, v = self.cache.keys_values(layer)
            expected = np.array(self.rows, np.float32) + 1000 * layer
            assert k.shape == v.shape == (2, len(self.rows), 4)
            assert (k == expected[None, :, None]).all() and (v == -expected[None, :, None]).all()
            assert not k.flags.writeable and not v.flags.writeable


class ContiguousMachine(CacheMachine):
    kind = kv.ContiguousCache


class ConcatenatingMachine(CacheMachine):
    kind = kv.ConcatenatingCache


class GrowingMachine(CacheMachine):
    """Grows from 1 row, so that nearly every history crosses a growth."""

    @staticmethod
    def kind(config, max_seq_len):
        return kv.GrowingCache(config, max_seq_len, capacity=1)

    @invariant()
    def copies_are_amortized(self):
        self.most = max(getattr(self, "most", 0), len(self.rows) + len(self.open))
        copied = self.cache.bytes_copied / (2 * 2 * 2 * 4 * 4)
        assert copied <= 2 * self.most and self.most <= self.cache.capacity <= self.cache.max_seq_len
        assert self.cache.capacity <= max(1, 2 * self.most)


class PagedMachine(CacheMachine):
    """In a pool of its own, of just enough blocks; the pool's books are right after every step."""

    @staticmethod
    def kind(config, max_seq_len):
        return kv.PagedCache(config, max_seq_len, block_size=3)

    @invariant()
    def the_pool_agrees(self):
        pool, manager = self.cache.pool, self.cache.pool.manager
        manager.check_invariants()
        assert manager.num_used == len(self.cache.block_table) == -(-(len(self.rows) + len(self.open)) // 3)
        assert pool.num_blocks == -(-self.cache.max_seq_len // 3)
        assert self.cache.nbytes == manager.num_used * (2 * 2 * 3 * 2 * 4 * 4 + 4)


TestContiguous = ContiguousMachine.TestCase
TestConcatenating = ConcatenatingMachine.TestCase
TestGrowing = GrowingMachine.TestCase
TestPaged = PagedMachine.TestCase
for case in (TestContiguous, TestConcatenating, TestGrowing, TestPaged):
    case.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
