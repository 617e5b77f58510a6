"""The smaller caches through any history of passes, partial commits, aborts and rewinds.

Each machine keeps the rows that were committed, as plain lists, and computes beside the cache what
should be held and what a query should see. Every pass brings new random rows, so that a row that
was taken back, or lies in another's place, is seen.
"""

from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcourse as kv
from kvcourse import ops
from kvcourse.caches import formats
from kvcourse.caches.formats import PerChannel, PerToken

# Two query heads on one KV head; rotary positions up to 24, which a sliding stream passes by.
CONFIG = kv.ModelConfig("tiny", "llama", 2, 2, 1, 8, 16, 16, 10, 24, rope_theta=1e3)
ROTATE = ops.Rotary(8, 1e3)


class PassMachine(RuleBasedStateMachine):
    """Random rows into a cache, in passes that are kept, kept in part, or taken back."""

    def start(self, cache):
        self.cache = cache
        self.random = np.random.default_rng(0)
        self.keys, self.values = [[], []], [[], []]  # per layer: un-rotated rows (1, 8) of committed tokens

    def rows(self, n):
        shapes = (2, n, 8), (1, n, 8), (1, n, 8)
        return [self.random.standard_normal(s).astype(self.cache.dtype) for s in shapes]

    def longest(self):
        room = self.cache.max_seq_len - self.cache.seq_len
        return min(room, self.cache.max_pass or 6, 6)

    def run_pass(self, n, layers=2):
        """One open pass, its outputs checked; returns the new rows of each layer."""
        positions, new = self.cache.begin(n), []
        assert positions.tolist() == list(range(self.cache.seq_len, self.cache.seq_len + n))
        for layer in range(layers):
            q, k, v = self.rows(n)
            self.check_output(layer, q, k, v, self.cache.attend(layer, q, k, v, ROTATE))
            new.append((k, v))
        return new

    def keep(self, new, n):
        for layer, (k, v) in enumerate(new):
            self.keys[layer] += list(k[:, :n].swapaxes(0, 1))
            self.values[layer] += list(v[:, :n].swapaxes(0, 1))

    def forget(self, seq_len):
        for rows in (*self.keys, *self.values):
            del rows[seq_len:]

    @precondition(lambda self: self.longest() > 0)
    @rule(data=st.data())
    def a_pass(self, data):
        n = data.draw(st.integers(1, self.longest()))
        new = self.run_pass(n)
        self.cache.commit()
        self.keep(new, n)

    @precondition(lambda self: self.longest() > 0)
    @rule(data=st.data())
    def a_pass_kept_in_part(self, data):
        n = data.draw(st.integers(1, self.longest()))
        kept = data.draw(st.integers(0, n))
        new = self.run_pass(n)
        self.cache.commit(kept)
        self.keep(new, kept)

    @precondition(lambda self: self.longest() > 0)
    @rule(data=st.data())
    def a_pass_taken_back(self, data):
        self.run_pass(data.draw(st.integers(1, self.longest())), layers=data.draw(st.integers(0, 2)))
        self.cache.abort()

    @rule(data=st.data())
    def go_back(self, data):
        seq_len = self.cache.seq_len - data.draw(st.integers(0, self.cache.max_rewind))
        self.cache.truncate(seq_len)
        self.forget(seq_len)

    @rule()
    def reset(self):
        self.cache.reset()
        self.forget(0)

    @rule()
    def move(self):
        """The rest of the history goes on in another cache, filled from what this one exports."""
        payload = self.cache.export(0, self.cache.seq_len)
        self.cache = self.empty()
        self.cache.load(payload)

    @invariant()
    def counts_are_true(self):
        cache = self.cache
        assert cache.seq_len == len(self.keys[0]) and cache.pending == 0
        assert 0 <= cache.max_rewind <= cache.seq_len
        assert 0 <= cache.nbytes_used <= cache.nbytes
        for layer in (0, 1):
            k, v = cache.keys_values(layer)
            assert k.shape == v.shape == (1, cache.num_rows, 8)
            assert not k.flags.writeable and not v.flags.writeable


# --- sliding: StreamingLLM's scheme written out, in float64 --------------------------------------------


class Sliding64(kv.SlidingCache):
    dtype = np.dtype(np.float64)  # the class as it is; rounding alone is smaller


class SlidingMachine(PassMachine):
    @initialize(window=st.integers(1, 9), sinks=st.integers(0, 3), slack=st.integers(0, 5))
    def make(self, window, sinks, slack):
        self.window, self.sinks = window, sinks
        self.empty = partial(Sliding64, CONFIG, window=window, num_sinks=sinks, slack=slack)
        self.start(self.empty())

    def seen(self, position):
        """The tokens that a query sees, in order: the sinks and the newest `window`, itself included."""
        return [p for p in range(position + 1) if p < self.sinks or p > position - self.window]

    def check_output(self, layer, q, k, v, out):
        """Section 3.2 of the paper: cached keys are un-rotated, positions are counted in the cache."""
        keys = np.array([*self.keys[layer], *k.swapaxes(0, 1)])[:, 0]
        values = np.array([*self.values[layer], *v.swapaxes(0, 1)])[:, 0]
        for row in range(q.shape[1]):
            seen = self.seen(self.cache.seq_len + row)
            assert len(seen) == min(self.cache.seq_len + row + 1, self.sinks + self.window)
            places = np.arange(len(seen))
            turned = ROTATE(keys[None, seen], places)[0]  # (rows, 8)
            query = ROTATE(q[:, [row]], places[-1:])[:, 0]  # (2 heads, 8)
            expected = ops.softmax(query @ turned.T / np.sqrt(8)) @ values[seen]
            assert np.abs(out[:, row] - expected).max() < 1e-12

    @invariant()
    def rows_are_the_newest(self):
        cache, n = self.cache, self.cache.seq_len
        positions = cache.key_positions(0).tolist()
        newest = [p for p in range(n) if p < self.sinks or p >= n - self.window]
        # An aborted pass of slack + 1 tokens has taken the oldest row of the window, and no other.
        assert positions in (newest, [p for p in newest if p < self.sinks or p > n - self.window])
        if n:
            for layer in (0, 1):
                k, v = cache.keys_values(layer)
                turned = ROTATE(np.array(self.keys[layer])[:, 0][None], np.arange(n))
                np.testing.assert_allclose(k, turned[:, positions], rtol=0, atol=1e-12)
                assert np.array_equal(v[0], np.array(self.values[layer])[positions, 0])


# --- quantized: every group encoded by itself -----------------------------------------------------------


class QuantizedMachine(PassMachine):
    """Formats of one token or several a unit, with a residual or without."""

    @initialize(
        keys=st.sampled_from(["fp8", "int8/token", PerToken(2, 4), PerChannel(4, 4), PerChannel(2, 3)]),
        values=st.sampled_from(["float16", "int4/token", PerChannel(8, 2)]),
        residual=st.sampled_from([0, 1, 5]),
    )
    def make(self, keys, values, residual):
        self.empty = partial(kv.QuantizedCache, CONFIG, keys=keys, values=values, residual=residual)
        self.start(self.empty())
        self.formats = [formats.by_name(f) if isinstance(f, str) else f for f in (keys, values)]
        self.group = int(np.lcm(self.formats[0].tokens, self.formats[1].tokens))
        self.residual, self.at_once = residual, self.group == 1 and residual == 0
        self.quantized = 0

    def keep(self, new, n):
        super().keep(new, n)
        whole = (len(self.keys[0]) - self.residual) // self.group * self.group
        self.quantized = max(self.quantized, whole)

    def forget(self, seq_len):
        super().forget(seq_len)
        self.quantized = min(self.quantized, seq_len)

    def held(self, which, rows, quantized):
        """Rows (1, n, 8) as they are read back: whole units through the format, the rest through float16."""
        form = self.formats[which]
        if not self.at_once:
            rows = rows.astype(np.float16).astype(np.float32)
        units = [rows[:, i : i + form.tokens] for i in range(0, quantized, form.tokens)]
        return np.concatenate(
            [*(form.decode(form.encode(unit)) for unit in units), rows[:, quantized:]], axis=1
        )

    def expected(self, layer, new=()):
        """What the cache holds of a layer, and in an open pass the new rows too."""
        rows = []
        for which, past in enumerate((self.keys[layer], self.values[layer])):
            all_rows = np.array([*past, *(r for a in new[which : which + 1] for r in a.swapaxes(0, 1))])
            all_rows = all_rows.reshape(-1, 1, 8).swapaxes(0, 1).astype(np.float32)
            if which == 0:
                all_rows = ROTATE(all_rows, np.arange(all_rows.shape[1])) if all_rows.size else all_rows
            quantized = all_rows.shape[1] if self.at_once else self.quantized
            rows.append(self.held(which, all_rows, quantized))
        return rows

    def check_output(self, layer, q, k, v, out):
        keys, values = self.expected(layer, (k, v))
        start = self.cache.seq_len
        query = ROTATE(q, np.arange(start, start + q.shape[1]))
        # Keys of up to about 5 and float32 sums over at most 24 rows: rounding is below 1e-5.
        np.testing.assert_allclose(out, ops.attention(query, keys, values, start), rtol=0, atol=1e-5)

    @invariant()
    def rows_are_what_the_formats_make_of_them(self):
        for layer in (0, 1):
            for held, expected in zip(self.cache.keys_values(layer), self.expected(layer), strict=True):
                assert np.array_equal(held, expected)
        tail = self.cache.seq_len - self.quantized
        assert self.cache.max_rewind == (self.cache.seq_len if self.at_once else tail)
        assert tail < self.residual + self.group
        one = sum(form.bytes_per_token(1, 8) for form in self.formats)
        assert self.cache.nbytes_used == 2 * (round(one * self.quantized) + 2 * 8 * 2 * tail)


SlidingMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
QuantizedMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
TestSliding = SlidingMachine.TestCase
TestQuantized = QuantizedMachine.TestCase


# --- heavy hitters: a fresh cache that never saw what was taken back ------------------------------------

STEPS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, heavy=st.integers(0, 4), recent=st.integers(1, 4))
def test_heavy_hitters_forget_what_was_taken_back(steps, heavy, recent):
    """Passes of n tokens of which `kept` count (0: abort), against passes of `kept` tokens."""
    cache, fresh = (kv.HeavyHitterCache(CONFIG, heavy=heavy, recent=recent, chunk=4) for _ in "ab")
    random = np.random.default_rng(0)
    for n, kept in steps:
        kept = min(kept, n)
        if cache.seq_len + n > CONFIG.max_seq_len:
            cache.reset()
            fresh.reset()
        rows = [[random.standard_normal((h, n, 8)).astype(np.float32) for h in (2, 1, 1)] for _ in "01"]
        cache.begin(n)
        for layer in (0, 1):
            cache.attend(layer, *rows[layer], ROTATE)
        cache.commit(kept)
        if kept:
            fresh.begin(kept)
            for layer in (0, 1):
                fresh.attend(layer, *(a[:, :kept] for a in rows[layer]), ROTATE)
            fresh.commit()
        assert (cache.seq_len, cache.num_rows) == (fresh.seq_len, min(fresh.seq_len, heavy + recent))
        for layer in (0, 1):
            assert np.array_equal(cache.key_positions(layer), fresh.key_positions(layer))
            for one, other in zip(cache.keys_values(layer), fresh.keys_values(layer), strict=True):
                assert np.array_equal(one, other)
    if cache.seq_len:
        one, other = (c.export(0, c.seq_len)["scores"] for c in (cache, fresh))
        np.testing.assert_allclose(one, other, rtol=1e-5)  # sums of at most 24 shares, in two orders
