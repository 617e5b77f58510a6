"""What single calls on the smaller caches do and refuse, and what they weigh."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

import kvcourse as kv
from kvcourse.caches.formats import PerChannel, PerToken
from kvcourse.config import Latent

# A Llama's shape: rotary positions, two query heads on each of two KV heads of 32.
CONFIG = kv.ModelConfig("tiny", "llama", 2, 4, 2, 32, 64, 96, 50, 40, rope_theta=1e4)
LEARNED = replace(CONFIG, name="tiny-gpt2", architecture="gpt2", rope_theta=None)
LATENT = replace(CONFIG, architecture="deepseek", num_kv_heads=4, latent=Latent(16, 8, 12, 12))
KINDS = {
    "sliding": lambda: kv.SlidingCache(CONFIG, window=6, num_sinks=2, slack=3),
    "q8_0": lambda: kv.QuantizedCache(CONFIG),
    "kivi": lambda: kv.QuantizedCache(CONFIG, keys=PerChannel(4, 4), values=PerToken(4), residual=3),
    "heavy hitters": lambda: kv.HeavyHitterCache(CONFIG, heavy=4, recent=4, chunk=4),
    "latent": lambda: kv.LatentCache(LATENT),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def given(cache, n, seed=0):
    """Random q, k, v of a pass of n tokens, of the shapes that the cache takes."""
    random, c = np.random.default_rng(seed), cache.config
    if c.latent:
        shapes = (4, n, 24), (1, n, 8), (1, n, 16)
    else:
        shapes = (4, n, 32), (2, n, 32), (2, n, 32)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def write(cache, n, layers=2):
    cache.begin(n)
    return [cache.attend(layer, *given(cache, n, seed=cache.seq_len + layer)) for layer in range(layers)]


def feed(cache, *chunks):
    for n in chunks:
        write(cache, n)
        cache.commit()
    return cache


def snapshot(cache):
    rows = [a.tobytes() for layer in (0, 1) for a in (*cache.keys_values(layer), cache.key_positions(layer))]
    return (
        cache.seq_len,
        cache.pending,
        cache.num_rows,
        cache.max_rewind,
        cache.nbytes,
        cache.nbytes_used,
        rows,
    )


# --- what is refused when a cache is made -------------------------------------------------------------


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: kv.SlidingCache(CONFIG, window=0), ValueError, "window is 0: it must be at least 1"),
        (lambda: kv.SlidingCache(CONFIG, window=2.5), TypeError, "window is 2.5: it is not a whole number"),
        (lambda: kv.SlidingCache(CONFIG, window=8, num_sinks=-1), ValueError, "num_sinks is -1: .* least 0"),
        (lambda: kv.SlidingCache(CONFIG, window=8, num_sinks=True), TypeError, "num_sinks is True"),
        (lambda: kv.SlidingCache(CONFIG, window=8, slack=-1), ValueError, "slack is -1: .* at least 0"),
        (lambda: kv.SlidingCache(CONFIG, window=37), ValueError, "more than the 40 positions of tiny: make"),
        (lambda: kv.SlidingCache(CONFIG, 0, window=8), ValueError, "max_seq_len 0 is outside 1 … 2,147"),
        (lambda: kv.SlidingCache(LEARNED, 41, window=8), ValueError, "outside 1 … 40, the positions of"),
        (lambda: kv.SlidingCache(LATENT, window=8), ValueError, "caches a latent"),
        (lambda: kv.QuantizedCache(CONFIG, residual=-1), ValueError, "residual is -1: it must be at least 0"),
        (lambda: kv.QuantizedCache(CONFIG, residual=0.5), TypeError, "residual is 0.5"),
        (lambda: kv.QuantizedCache(CONFIG, keys=8), TypeError, "keys is 8: give a format or its name"),
        (lambda: kv.QuantizedCache(CONFIG, values="int5/token"), ValueError, "'int5/token' is not known"),
        (
            lambda: kv.QuantizedCache(replace(CONFIG, head_dim=48)),
            ValueError,
            "head_dim 48 is not a multiple of 32, the numbers in a block of q8_0: use a format such as",
        ),
        (lambda: kv.QuantizedCache(CONFIG, keys=PerToken(4, 24)), ValueError, "head_dim 32 does not fit"),
        (lambda: kv.QuantizedCache(CONFIG, 41), ValueError, "max_seq_len 41 is outside 1 … 40"),
        (lambda: kv.HeavyHitterCache(CONFIG, heavy=-1, recent=4), ValueError, "heavy is -1"),
        (lambda: kv.HeavyHitterCache(CONFIG, heavy=4, recent=0), ValueError, "recent is 0: .* at least 1"),
        (lambda: kv.HeavyHitterCache(CONFIG, heavy=4, recent=4, chunk=0), ValueError, "chunk is 0"),
        (lambda: kv.HeavyHitterCache(CONFIG, heavy=4.0, recent=4), TypeError, "heavy is 4.0"),
        (lambda: kv.LatentCache(CONFIG), ValueError, "tiny caches keys and values per head: use a Contig"),
        (lambda: kv.LatentCache(LATENT, 0), ValueError, "max_seq_len 0 is outside 1 … 40"),
    ],
)  # fmt: skip
def test_impossible_caches(make, error, words):
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


# --- what is refused in use, and that nothing changes then --------------------------------------------


def with_pass(call):
    """A call in an open pass of two tokens."""

    def inside(cache):
        cache.begin(2)
        try:
            call(cache)
        finally:
            cache.abort()

    return inside


def rows_with(cache, **changed):
    """The arguments of `attend` for two tokens, one of them changed."""
    rows = dict(zip("qkv", given(cache, 2), strict=True))
    return [change(rows[name]) if (change := changed.get(name)) else rows[name] for name in "qkv"]


def leave_a_layer_out(cache):
    cache.attend(0, *rows_with(cache))
    cache.commit()


FAILURES = {
    "empty": (lambda c: c.begin(0), ValueError, "is empty"),
    "half a token": (lambda c: c.begin(1.5), TypeError, "1.5 is not a whole number of tokens"),
    "commit unasked": (lambda c: c.commit(1), ValueError, "cannot commit 1 tokens: 0 were begun"),
    "attend unasked": (lambda c: c.attend(0, *rows_with(c)), RuntimeError, "no pass is open"),
    "truncate ahead": (lambda c: c.truncate(c.seq_len + 1), ValueError, "cannot go to"),
    "too far back": (lambda c: c.truncate(c.seq_len - c.max_rewind - 1), ValueError, "cannot go to"),
    "export ahead": (lambda c: c.export(0, c.seq_len + 1), ValueError, "cannot export"),
    "twice": (with_pass(lambda c: c.begin(1)), RuntimeError, "a pass over 2 tokens is still open"),
    "truncate in a pass": (with_pass(lambda c: c.truncate(0)), RuntimeError, "a pass is open"),
    "layer outside": (with_pass(lambda c: c.attend(2, *rows_with(c))), IndexError, "layer 2 is outside 0"),
    "negative layer": (with_pass(lambda c: c.attend(-1, *rows_with(c))), IndexError, "layer -1 is outside"),
    "a layer left out": (with_pass(leave_a_layer_out), RuntimeError, r"layers \[1\] were not"),
    "keys": (with_pass(lambda c: c.attend(0, *rows_with(c, k=lambda a: a[:, :1]))), ValueError, "keys"),
    "values": (with_pass(lambda c: c.attend(0, *rows_with(c, v=lambda a: a[..., 1:]))), ValueError, "values"),
    "queries": (with_pass(lambda c: c.attend(0, *rows_with(c, q=lambda a: a[:3]))), ValueError, "queries"),
    "float64": (with_pass(lambda c: c.attend(0, *rows_with(c, k=np.float64))), TypeError, "keys are float64"),
    "float16": (with_pass(lambda c: c.attend(0, *rows_with(c, q=np.float16))), TypeError, "are float16"),
    "load nothing": (lambda c: c.load({}), ValueError, "the payload lacks"),
}  # fmt: skip


@every_kind
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("chunks", [(), (3,), (4, 3, 1, 4, 2)], ids=["empty", "three", "fourteen"])
def test_a_failing_call_leaves_the_cache_as_it_was(kind, failure, chunks):
    cache = feed(KINDS[kind](), *chunks)
    before, (call, error, words) = snapshot(cache), FAILURES[failure]
    with pytest.raises(error, match=words) as caught:
        call(cache)
    assert "\n" not in str(caught.value)
    # "a layer left out" has written rows into the ring, which max_rewind then counts.
    assert [a for i, a in enumerate(snapshot(cache)) if i != 3] == [a for i, a in enumerate(before) if i != 3]
    assert cache.max_rewind == before[3] or failure == "a layer left out"


def test_a_chunk_larger_than_the_cache_takes_names_the_way_out():
    sliding, hitters = KINDS["sliding"](), KINDS["heavy hitters"]()
    for cache in (sliding, hitters):
        feed(cache, 4, 4)
        before = snapshot(cache)
        with pytest.raises(kv.CacheFull, match=r"a pass of 5 tokens: .* takes at most 4, pass .* in chunks"):
            cache.begin(5)
        assert snapshot(cache) == before and len(cache.begin(4)) == 4


def test_a_full_cache_says_whose_limit_it_is():
    longer = kv.SlidingCache(CONFIG, 12, window=6, num_sinks=2, slack=9)
    learned = kv.SlidingCache(LEARNED, window=6, num_sinks=2, slack=9)
    with pytest.raises(kv.CacheFull, match=r"13 tokens do not fit .* of 12 .* or without that limit"):
        feed(longer, 10).begin(3)
    with pytest.raises(kv.CacheFull, match=r"tiny-gpt2 was trained with 40 positions"):
        feed(learned, *[10] * 4).begin(1)


def test_a_stream_may_be_longer_than_rotary_positions_and_not_than_learned_ones():
    stream = feed(kv.SlidingCache(CONFIG, window=6, num_sinks=2, slack=0), *[1] * 90)
    assert (stream.unlimited, stream.seq_len, stream.num_rows) == (True, 90, 8)
    assert stream.key_positions(0).tolist() == [0, 1, *range(84, 90)]
    learned = kv.SlidingCache(LEARNED, window=6)
    assert (learned.unlimited, learned.max_seq_len) == (False, 40)
    assert not kv.BatchView([stream, learned], [1, 1]).unlimited
    assert kv.BatchView([stream, KINDS["sliding"]()], [1, 1]).unlimited


# --- going back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", [0, 1, 3, 9])
def test_a_sliding_cache_can_go_back_by_exactly_its_slack(slack):
    cache = kv.SlidingCache(CONFIG, window=6, num_sinks=2, slack=slack)
    ring = 6 + slack
    for seq_len in range(1, 40):
        feed(cache, 1)
        assert cache.max_rewind == (seq_len if seq_len <= 2 + ring else slack)
    feed(cache, slack + 1)
    assert cache.max_rewind == slack


def test_an_aborted_pass_has_overwritten_rows_but_none_that_the_next_token_sees():
    cache, clean = (feed(KINDS["sliding"](), *[1] * 20) for _ in "ab")
    write(cache, 4)  # slack + 1
    cache.abort()
    assert (cache.max_rewind, cache.num_rows) == (0, 7)
    assert cache.key_positions(0).tolist() == [0, 1, *range(15, 20)]  # 14 is gone; token 20 sees 15 … 20
    for one, other in zip(write(cache, 1), write(clean, 1), strict=True):
        assert np.array_equal(one, other)
    cache.commit()
    clean.commit()
    assert cache.num_rows == clean.num_rows == 8
    assert snapshot(feed(cache, 3)) == snapshot(feed(clean, 3))


def test_nothing_begun_and_nothing_written_costs_no_rewind():
    """So that a batch that could not begin leaves its first cache alone."""
    first, second = KINDS["sliding"](), kv.ContiguousCache(CONFIG, 1)
    feed(first, *[1] * 20)
    with pytest.raises(kv.CacheFull):
        kv.BatchView([first, second], [2, 2]).begin(4)
    assert first.max_rewind == 3 and first.num_rows == 8


@every_kind
def test_rows_taken_back_do_not_spoil_later_ones(kind):
    """Values of a pass that went wrong may be NaN; after abort, truncate or reset nothing of it is left."""
    if kind == "heavy hitters":  # nothing can be taken back but an open pass
        ways = [lambda c: c.abort(), lambda c: c.reset()]
    else:
        ways = [lambda c: c.abort(), lambda c: c.reset(), lambda c: (c.commit(), c.truncate(5))]
    for number, way in enumerate(ways):
        cache, clean = feed(KINDS[kind](), 3, 2), feed(KINDS[kind](), 3, 2)
        n = 1 if kind == "kivi" else 2  # with one token more its first group would be quantized for good
        rows = given(cache, n)
        if kind not in ("q8_0", "kivi"):  # which refuse NaN
            rows[1][...] = rows[2][...] = np.nan
        cache.begin(n)
        for layer in (0, 1):
            cache.attend(layer, *rows)
        way(cache)
        if number == 1:
            clean = KINDS[kind]()
        assert cache.seq_len == clean.seq_len
        for one, other in zip(write(cache, 1), write(clean, 1), strict=True):  # over the first of the two
            assert np.isfinite(one).all() and np.array_equal(one, other)


def test_a_quantized_cache_refuses_what_it_cannot_write():
    """At once in attend; from the tail in commit. Either way the pass can be aborted."""
    for cache, refuses in ((KINDS["q8_0"](), "attend"), (KINDS["kivi"](), "commit")):
        before = snapshot(feed(cache, 3))
        rows = given(cache, 8)
        rows[1][0, 2, 3] = np.nan
        cache.begin(8)
        with pytest.raises(ValueError, match="does not fit in float16"):
            for layer in (0, 1):
                cache.attend(layer, *rows)
            assert refuses == "commit"
            cache.commit()
        assert cache.pending == 8
        cache.abort()
        assert snapshot(cache) == before


def test_a_batch_keeps_a_pass_in_all_caches_or_in_none():
    """The second cache refuses when the first has already evicted, or quantized what it cannot take back."""
    for first in (KINDS["kivi"](), KINDS["heavy hitters"]()):
        second = KINDS["kivi"]()
        before = [snapshot(feed(first, 4, 4, 2)), snapshot(second)]
        view, rows = kv.BatchView([first, second], [1, 7]), given(first, 8)
        rows[2][0, 1, 0] = np.nan  # in the first token of the second cache: among the four that are quantized
        view.begin(8)
        for layer in (0, 1):
            view.attend(layer, *rows)
        with pytest.raises(ValueError, match="does not fit in float16"):
            view.commit()
        assert [snapshot(first), snapshot(second)] == before


@every_kind
@pytest.mark.parametrize("chunks", [(3,), (4, 4, 4)])
def test_an_interrupt_in_commit_leaves_the_old_rows(kind, chunks, monkeypatch):
    cache = feed(KINDS[kind](), *chunks)
    clean = feed(KINDS[kind](), *chunks)
    before = snapshot(cache)
    write(cache, 2)
    plain = type(cache)._keep

    def interrupted(self, n):
        plain(self, n)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(cache), "_keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.commit()
    cache.abort()
    after = snapshot(cache)
    assert after[:3] == before[:3] and after[4:] == before[4:]
    for one, other in zip(write(cache, 2), write(clean, 2), strict=True):
        assert np.array_equal(one, other)


def test_what_a_quantized_cache_can_take_back():
    at_once = feed(KINDS["q8_0"](), 9)
    assert at_once.max_rewind == 9
    at_once.truncate(4)
    assert at_once.keys_values(0)[0].shape == (2, 4, 32) and at_once.nbytes_used == 2 * 2 * 2 * 34 * 4
    grouped = kv.QuantizedCache(CONFIG, keys=PerChannel(4, 4), values=PerToken(4))
    assert [feed(grouped, 1).max_rewind for _ in range(9)] == [1, 2, 3, 0, 1, 2, 3, 0, 1]
    residual = KINDS["kivi"]()  # groups of 4, at least 3 behind them
    assert [feed(residual, 1).max_rewind for _ in range(12)] == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3, 4]


def test_heavy_hitters_take_nothing_back_but_an_open_pass():
    """The attention that old rows got from a token is in their scores."""
    cache = feed(KINDS["heavy hitters"](), 3)
    assert cache.max_rewind == 0
    with pytest.raises(ValueError, match="cannot go to 2 tokens: choose 3 … 3"):
        cache.truncate(2)


def test_of_equal_scores_the_older_tokens_stay():
    """Rows 0 … 19 have received 1 and rows 20 … 44 received 2; queries of zeros give each the same again. Two
    values and that many rows, because short runs, and on some processors equal numbers alone, are left in
    order by any sort."""
    config = replace(CONFIG, max_seq_len=85)
    cache, copy = (kv.HeavyHitterCache(config, heavy=5, recent=40, chunk=40) for _ in "ab")
    payload = feed(cache, 40, 5).export(0, 45)
    received = np.repeat(np.float32([1, 2]), [20, 25])
    copy.load(payload | {"scores": np.broadcast_to(received, (2, 2, 45))})
    q, k, v = given(copy, 40)
    copy.begin(40)
    for layer in (0, 1):
        copy.attend(layer, np.zeros_like(q), k, v)
    copy.commit()
    for layer in (0, 1):
        assert copy.key_positions(layer).tolist() == [[*range(20, 25), *range(45, 85)]] * 2


def test_scores_are_sums_over_queries_and_the_heads_of_a_group():
    """Every query of the two on a KV head gives 1 in all. Nothing is evicted, so no share is lost."""
    cache = feed(KINDS["heavy hitters"](), 4, 3)
    scores = cache.export(0, 7)["scores"]
    np.testing.assert_allclose(scores.sum(axis=2), np.full((2, 2), 2 * 7), rtol=1e-5)


# --- bytes ---------------------------------------------------------------------------------------------


def arrays_of(value):
    """Every array that an object holds, however it is nested."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict):
        yield from (array for item in value.values() for array in arrays_of(item))
    elif isinstance(value, list | tuple):
        yield from (array for item in value for array in arrays_of(item))


@every_kind
def test_nbytes_counts_every_array_of_the_cache(kind):
    """Found by looking through its attributes, not by the cache's own word."""
    cache = KINDS[kind]()
    for chunks in ((), (3,), (4, 4, 4)):
        feed(cache, *chunks)
        held = {id(a): a.nbytes for a in arrays_of(list(vars(cache).values())) if a.base is None}
        assert cache.nbytes == sum(held.values()) > 0
        assert 0 <= cache.nbytes_used <= cache.nbytes


def test_bytes_by_hand():
    """2 layers, 2 KV heads of 32, K and V."""
    numbers = 2 * 2 * 32 * 2  # of one token
    sliding = feed(KINDS["sliding"](), 4, 4, 4)
    assert sliding.nbytes == numbers * 4 * (2 + 6 + 3) and sliding.nbytes_used == numbers * 4 * 8
    blocks = feed(KINDS["q8_0"](), 10)
    assert blocks.nbytes == 2 * 2 * 2 * 34 * 40 and blocks.nbytes_used == 2 * 2 * 2 * 34 * 10
    assert blocks.nbytes_used == kv.sizing.kv_bytes(CONFIG, 10, "q8_0")
    kivi = feed(KINDS["kivi"](), 4, 4, 2)  # 4 tokens quantized, 6 in float16
    keys, values = 2 * 2 * (4 * 32 / 2 + 32 * 4) / 4, 2 * 2 * (32 / 2 + 4)
    assert kivi.nbytes_used == 4 * (keys + values) + 6 * numbers * 2
    assert kivi.nbytes == 40 * (keys + values) + (3 + 3) * numbers * 2
    hitters = feed(KINDS["heavy hitters"](), 4, 4, 4)
    row = 2 * 2 * (2 * 32 * 4 + 4 + 8)  # K, V, a float32 score and an int64 position
    assert (hitters.nbytes, hitters.nbytes_used) == (12 * row, 8 * row)
    latent = feed(KINDS["latent"](), 10)
    assert (latent.nbytes, latent.nbytes_used) == (40 * 2 * 24 * 4, 10 * 2 * 24 * 4)
    assert latent.nbytes_used == 10 * kv.sizing.kv_bytes_per_token(LATENT, 4)


def test_a_step_of_a_sliding_cache_copies_no_rows():
    """It allocates the scores (4 heads, 1, 1,011 slots), a mask and a few vectors of that length: about
    60 kB. One layer's keys alone are 1,011 × 2 × 32 × 4 B = 259 kB."""
    config = replace(CONFIG, max_seq_len=2000)
    cache = feed(kv.SlidingCache(config, window=1000, num_sinks=4, slack=7), *[8] * 150)
    arrays = cache._k, cache._v
    rows = given(cache, 1)
    cache.begin(1)
    tracemalloc.start()
    for layer in (0, 1):
        cache.attend(layer, *rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    cache.commit()
    assert 4 * 4 * 1011 < peak < 130_000
    assert (cache._k, cache._v) == arrays  # the same two objects


def test_a_step_of_a_full_heavy_hitter_cache_copies_its_rows_once():
    """New arrays of the size of the old, and beside them one layer's K or V: a tenth of them, or scores and
    indices of 8 bytes where a row has 512."""
    config = replace(CONFIG, num_layers=8, max_seq_len=2000)
    cache = kv.HeavyHitterCache(config, heavy=300, recent=300, chunk=100)
    for n in [100] * 7 + [1]:
        write(cache, n, layers=8)
        cache.commit()
    write(cache, 1, layers=8)
    tracemalloc.start()
    cache.commit()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert cache.num_rows == 600 and cache.nbytes < peak < 1.25 * cache.nbytes


# --- from one cache to another -------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("chunks", [(), (3,), (4, 4, 4, 1), (1,) * 30])
def test_what_export_gives_load_takes(kind, chunks):
    """The copy is bit for bit the same and goes on like the original."""
    cache, copy = feed(KINDS[kind](), *chunks), KINDS[kind]()
    payload = cache.export(0, cache.seq_len)
    arrays = list(arrays_of(payload))
    assert all(a.flags.owndata or a.base.flags.owndata for a in arrays) and isinstance(payload["layout"], str)
    copy.load(payload)
    if cache.seq_len:
        assert [a.tobytes() for a in arrays_of(copy.export(0, copy.seq_len))] == [a.tobytes() for a in arrays]
    for n in (2, 1, 4):
        for one, other in zip(write(cache, n), write(copy, n), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # another order of the ring's slots
        cache.commit()
        copy.commit()
    assert np.array_equal(cache.key_positions(1), copy.key_positions(1))


@pytest.mark.parametrize("kind", ["sliding", "q8_0", "latent"])
def test_rows_can_be_sent_piece_by_piece(kind):
    cache, copy = KINDS[kind](), KINDS[kind]()
    for n in (3, 1, 4, 2, 4, 4):
        start = cache.seq_len
        feed(cache, n)
        copy.load(cache.export(start, cache.seq_len))
    assert copy.seq_len == 18
    for one, other in zip(cache.keys_values(1), copy.keys_values(1), strict=True):
        assert np.array_equal(one, other)


def test_groups_are_sent_whole():
    cache, copy = feed(KINDS["kivi"](), *[4] * 5), KINDS["kivi"]()  # 16 quantized, 4 in the tail
    with pytest.raises(ValueError, match="cannot export 0 … 6: tokens are quantized 4 together, .* up to 16"):
        cache.export(0, 6)
    with pytest.raises(ValueError, match="cannot export 3 … 8"):
        cache.export(3, 8)
    copy.load(cache.export(0, 8))
    copy.load(cache.export(8, 19))
    copy.load(cache.export(19, 20))
    assert snapshot(copy) == snapshot(cache)
    with pytest.raises(ValueError, match="from 16 on are not quantized, .* truncate\\(16\\) and load"):
        copy.load(feed(KINDS["kivi"](), *[4] * 10).export(20, 32))
    assert snapshot(copy) == snapshot(cache)


def test_a_sliding_cache_takes_rows_of_another_window_where_none_is_missing():
    long = feed(kv.SlidingCache(CONFIG, window=12, num_sinks=4, slack=3), *[4] * 8)
    payload = long.export(0, 32)
    assert payload["positions"].tolist() == [0, 1, 2, 3, *range(20, 32)]
    short = kv.SlidingCache(CONFIG, window=6, num_sinks=2, slack=3)
    short.load(payload)
    assert short.key_positions(0).tolist() == [0, 1, *range(26, 32)] and short.max_rewind == 3
    never_sent = feed(kv.SlidingCache(CONFIG, window=6, num_sinks=2, slack=3), *[4] * 8)
    for cache in (short, never_sent):
        cache.truncate(29)  # 23 … 25, in no window of 32 tokens, came along and count again
    assert short.key_positions(0).tolist() == [0, 1, *range(23, 29)]
    assert snapshot(short) == snapshot(never_sent)
    for window, sinks, missing in ((14, 4, 18), (12, 6, 4)):
        cache = kv.SlidingCache(CONFIG, window=window, num_sinks=sinks, slack=3)
        with pytest.raises(
            ValueError, match=f"lacks position {missing}, which {sinks} sinks and a window of"
        ):
            cache.load(payload)
        assert (cache.seq_len, cache.num_rows) == (0, 0)


def test_a_loaded_window_goes_back_as_far_as_its_rows_came_along():
    cache, copy = feed(KINDS["sliding"](), *[4] * 8), KINDS["sliding"]()
    copy.load(cache.export(0, 32))
    assert (cache.max_rewind, copy.max_rewind) == (3, 0)
    feed(copy, 2)
    assert copy.max_rewind == 2


@pytest.mark.parametrize(
    "kind, change, error, words",
    [
        ("sliding", dict(positions=np.arange(5)), ValueError, "positions do not fit 8 rows"),
        ("sliding", dict(positions=np.arange(8)[::-1]), ValueError, "positions do not fit"),
        ("sliding", dict(stop=3), ValueError, "positions do not fit"),
        ("sliding", dict(layout="token"), ValueError, "layout is 'token'"),
        ("sliding", dict(start=4), ValueError, "begins at position 4, the cache ends at 0"),
        ("sliding", dict(keys=np.zeros((2, 2, 8, 4), np.float32)), ValueError, "does not fit"),
        ("sliding", dict(dtype="float16"), TypeError, "payload holds float16"),
        ("q8_0", dict(layout="keys q4_0"), ValueError, "layout is 'keys q4_0': this cache takes 'keys q8_0"),
        ("q8_0", dict(stop=12), ValueError, "does not fit"),
        ("q8_0", dict(keys={}), ValueError, "does not fit"),
        ("kivi", dict(stop=11), ValueError, "payload of shape|do not end where"),
        ("kivi", dict(tails=[np.zeros((2, 2, 1, 32))] * 2), TypeError, "payload holds float64"),
        ("latent", dict(rows=np.zeros((2, 3, 4), np.float32)), ValueError, r"expected \(2, tokens, 24\)"),
        ("latent", dict(rows=np.zeros((2, 3, 24))), TypeError, "payload holds float64"),
        ("latent", dict(rows=np.zeros((2, 41, 24), np.float32)), kv.CacheFull, "41 tokens do not fit"),
        ("heavy hitters", dict(stop=4), ValueError, "of the same heavy and recent"),
        ("heavy hitters", dict(scores=np.zeros(3)), ValueError, "scores and positions do not fit"),
        ("heavy hitters", dict(stop=41), kv.CacheFull, "41 tokens do not fit"),
    ],
)
def test_load_refuses_what_does_not_fit(kind, change, error, words):
    payload, cache = feed(KINDS[kind](), 4, 4, 1).export(0, 9), KINDS[kind]()
    before = snapshot(cache)
    with pytest.raises(error, match=words) as caught:
        cache.load(payload | change)
    assert snapshot(cache) == before and "\n" not in str(caught.value)
    with pytest.raises((RuntimeError, ValueError), match="a pass.* is (still )?open|into an empty cache"):
        cache.begin(1)
        cache.load(payload)


def test_heavy_hitters_are_exported_whole():
    cache = feed(KINDS["heavy hitters"](), 4, 4, 4)
    with pytest.raises(ValueError, match="cannot export 2 … 12: only the whole, 0 … 12"):
        cache.export(2, 12)
    with pytest.raises(ValueError, match="load it into an empty cache"):
        feed(kv.HeavyHitterCache(CONFIG, heavy=3, recent=4, chunk=4)).load(cache.export(0, 12))
