"""Several sequences on one small pool, through any history: nobody ever reads a row that is not theirs.

A row's number is computed from all tokens up to it and the salt, as a real key would be, so a block that
was shared with the wrong prompt, copied too late, or written while somebody else held it is seen. After
every step NaN goes over all slots that nobody may read: one read of one shows.
"""

from hashlib import sha256

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcourse as kv
from kvcourse.paging import OutOfBlocks

CONFIG = kv.ModelConfig("tiny", "gpt2", 2, 2, 2, 4, 8, 16, 10, 24)
IDS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # two tokens only: prompts often begin alike


def number(salt, ids):
    """A whole number below 2^20, so exact in float32, for the last of these tokens."""
    return int.from_bytes(sha256(repr((salt, ids)).encode()).digest()[:4], "little") % 2**20


class PoolMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(2, 8), size=st.integers(1, 4), sharing=st.booleans())
    def make(self, blocks, size, sharing):
        self.pool = kv.PagedPool(CONFIG, blocks, size, prefix_caching=sharing)
        self.live = []  # [cache, salt, its committed ids]

    def pick(self, data):
        return self.live[data.draw(st.integers(0, len(self.live) - 1))]

    def books(self):
        caches = [(c.seq_len, c.pending, c.block_table, c._seq.num_tokens) for c, _, _ in self.live]
        return caches, self.pool.manager.free_blocks(), self.pool.keys.tobytes()

    def or_out_of_blocks(self, call):
        """What the call returns, or None when the pool had no room: then nothing may have changed."""
        before = self.books()
        try:
            return call()
        except OutOfBlocks as error:
            assert "\n" not in str(error) and self.books() == before
            return None

    @precondition(lambda self: len(self.live) < 4)
    @rule(ids=IDS, salt=st.sampled_from([None, "a"]))
    def a_prompt(self, ids, salt):
        cache = self.or_out_of_blocks(lambda: self.pool.sequence(ids, salt))
        if cache is not None:
            assert cache.seq_len == cache.num_cached_tokens < len(ids)
            assert cache.seq_len % self.pool.block_size == 0
            self.live.append([cache, salt, ids[: cache.seq_len]])
            self.run_pass(self.live[-1], ids[cache.seq_len :], len(ids), True)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), new=IDS, kept=st.integers(0, 9), named=st.booleans())
    def a_pass(self, data, new, kept, named):
        self.run_pass(self.pick(data), new, kept, named)

    def run_pass(self, entry, new, kept, named):
        """Compute `new` tokens and keep the first `kept` of them."""
        cache, salt, ids = entry
        new = new[: CONFIG.max_seq_len - cache.seq_len]
        if not new or self.or_out_of_blocks(lambda: cache.begin(len(new))) is None:
            return
        if named:
            cache.note_ids(new)
        all_ids = ids + new
        numbers = [number(salt, all_ids[: i + 1]) for i in range(len(ids), len(all_ids))]
        for layer in range(CONFIG.num_layers):
            k = np.array(numbers, np.float32)[None, :, None] + 2**20 * layer
            k = np.broadcast_to(k, (2, len(new), 4)).copy()
            out = cache.attend(layer, np.zeros_like(k), k, -k)
            # Queries of 0: the first one's answer is the mean of all values up to it.
            seen = [number(salt, all_ids[: i + 1]) + 2**20 * layer for i in range(len(ids) + 1)]
            np.testing.assert_allclose(out[:, 0], -np.mean(seen), rtol=1e-5)  # float32 sums of 24 at most
        kept = min(kept, len(new))
        cache.commit(kept)
        entry[2] = ids + new[:kept]

    @precondition(lambda self: self.live and len(self.live) < 4)
    @rule(data=st.data())
    def fork(self, data):
        cache, salt, ids = self.pick(data)
        used = self.pool.manager.num_used
        self.live.append([cache.fork(), salt, list(ids)])
        assert self.pool.manager.num_used <= used

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def go_back(self, data):
        entry = self.pick(data)
        seq_len = data.draw(st.integers(0, len(entry[2])))
        entry[0].truncate(seq_len)
        entry[2] = entry[2][:seq_len]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def reset(self, data):
        entry = self.pick(data)
        entry[0].reset()
        entry[2] = []

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        entry = self.pick(data)
        entry[0].free()
        self.live.remove(entry)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), named=st.booleans())
    def move(self, data, named):
        """Out of the pool and in again, as a swap would do it; blocks that were shared need room then."""
        entry = self.pick(data)
        payload = entry[0].export(0, len(entry[2]))
        entry[0].free()
        entry[0] = self.pool.sequence((), entry[1])
        names = entry[2] if named else None
        self.or_out_of_blocks(lambda: entry[0].load(payload, names))
        entry[2] = entry[2][: entry[0].seq_len]  # all, or none

    @invariant()
    def rows_are_the_sequence_s_own(self):
        self.pool.manager.check_invariants()
        self.poison()
        for cache, salt, ids in self.live:
            assert (cache.seq_len, cache.pending) == (len(ids), 0)
            for layer in range(CONFIG.num_layers):
                k, v = cache.keys_values(layer)
                expected = [number(salt, ids[: i + 1]) + 2**20 * layer for i in range(len(ids))]
                assert k.shape == v.shape == (2, len(ids), 4)
                assert (k == np.array(expected)[None, :, None]).all() and (v == -k).all()

    def poison(self):
        """NaN over every slot but committed rows and blocks that a later prompt may find."""
        manager = self.pool.manager
        readable = {s for c, _, _ in self.live for s in manager.slot_mapping(c._seq, 0, c.seq_len)}
        slots = range(self.pool.num_blocks * self.pool.block_size)
        stale = [s for s in slots if s not in readable and not manager.is_findable(s // self.pool.block_size)]
        for rows in (self.pool.keys, self.pool.values):
            rows.reshape(CONFIG.num_layers, len(slots), 2, 4)[:, stale] = np.nan

    def teardown(self):
        for cache, _, _ in self.live:
            cache.free()
        assert self.pool.manager.num_used == 0


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
