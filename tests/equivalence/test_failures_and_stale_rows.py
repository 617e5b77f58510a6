"""After a call that fails a cache is what it was, and rows that were taken back are never read again.

"What it was" is checked from outside: counts, bytes, every row bit for bit, and the logits of
the next token. Stale rows are made visible by writing NaN over every row that does not count:
one read of one of them would turn the logits into NaN.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import weights
from kvcourse.models import gpt2

TOLERANCE = 2e-4  # as in test_cached_equals_uncached
CONFIG = kv.ModelConfig("small", "gpt2", 2, 3, 3, 8, 24, 48, 40, 16)
SIZE = 12  # tokens the caches have room for


def make_model(seed=1):
    params = weights.random_params(gpt2.param_shapes(CONFIG), seed)
    for array in params.values():
        array *= 5
    return gpt2.GPT2(CONFIG, params)


MODEL = make_model()
KINDS = {
    "contiguous": lambda: kv.ContiguousCache(CONFIG, SIZE),
    "growing": lambda: kv.GrowingCache(CONFIG, SIZE, capacity=1),
    "concatenating": lambda: kv.ConcatenatingCache(CONFIG, SIZE),
    "paged": lambda: kv.PagedCache(CONFIG, SIZE, block_size=4),
}
ROW = np.ones((3, 2, 8), np.float32)


# Every way to call a cache, or a model with one, wrongly: (what, call, error).
FAILURES = {
    "too many tokens": (lambda cache, n: MODEL([1] * (SIZE - n + 1), cache), kv.CacheFull),
    "a longer pass than room": (lambda cache, n: cache.begin(SIZE - n + 1), kv.CacheFull),
    "no tokens": (lambda cache, n: MODEL([], cache), ValueError),
    "an empty pass": (lambda cache, n: cache.begin(0), ValueError),
    "half a token": (lambda cache, n: cache.begin(1.5), TypeError),
    "an unknown id": (lambda cache, n: MODEL([1, CONFIG.vocab_size], cache), ValueError),
    "a negative id": (lambda cache, n: MODEL([-1], cache), ValueError),
    "text for ids": (lambda cache, n: MODEL("text", cache), TypeError),
    "a row outside": (lambda cache, n: MODEL([1, 2], cache, rows=[2]), ValueError),
    "attend unasked": (lambda cache, n: cache.attend(0, ROW, ROW, ROW), RuntimeError),
    "commit unasked": (lambda cache, n: cache.commit(1), ValueError),
    "truncate ahead": (lambda cache, n: cache.truncate(n + 1), ValueError),
    "truncate below": (lambda cache, n: cache.truncate(-1), ValueError),
    "export ahead": (lambda cache, n: cache.export(0, n + 1), ValueError),
    "load a gap": (lambda cache, n: cache.load(payload(start=n + 1)), ValueError),
    "load too much": (lambda cache, n: cache.load(payload(start=n, tokens=SIZE - n + 1)), kv.CacheFull),
    "load float64": (lambda cache, n: cache.load(payload(start=n, dtype=np.float64)), TypeError),
    "load another shape": (lambda cache, n: cache.load(payload(start=n, heads=2)), ValueError),
    "generate too much": (lambda cache, n: kv.generate(MODEL, [1], SIZE - n + 1, cache=cache), ValueError),
    "a sampler that fails": (lambda cache, n: cache_after_sampler(cache), ZeroDivisionError),
}


def payload(start, tokens=1, dtype=np.float32, heads=3):
    rows = np.ones((2, heads, tokens, 8), dtype)
    return {"layout": "layer, kv_head, token, head_dim", "dtype": np.dtype(dtype).name, "start": start,
            "keys": rows, "values": rows}  # fmt: skip


def cache_after_sampler(cache):
    """The pass before the sampler was whole, so its tokens count; they are taken back to compare."""
    n = cache.seq_len
    try:
        kv.generate(MODEL, [1], 1, cache=cache, sampler=lambda logits: 1 // 0)
    finally:
        cache.truncate(n)


def snapshot(cache):
    rows = cache.export(0, cache.seq_len)
    return (cache.seq_len, cache.pending, cache.nbytes_used, rows["keys"].tobytes(), rows["values"].tobytes())


@pytest.mark.parametrize("tokens", [0, 1, 7, SIZE - 1])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_call_leaves_the_cache_as_it_was(kind, failure, tokens):
    cache, ids = KINDS[kind](), list(range(tokens))
    if ids:
        MODEL(ids, cache)
    before = snapshot(cache)
    call, error = FAILURES[failure]
    with pytest.raises(error) as caught:
        call(cache, tokens)
    assert "\n" not in str(caught.value)
    assert snapshot(cache) == before
    np.testing.assert_allclose(MODEL([9], cache)[-1], MODEL([*ids, 9])[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_fails_in_any_layer_is_taken_back(kind, layer):
    """The weights of one layer raise in the middle of the pass, as an interrupt would."""
    cache = KINDS[kind]()
    MODEL([3, 4, 5], cache)
    before = snapshot(cache)
    broken = make_model()
    original = broken._layers

    class Interrupted(dict):
        def __getitem__(self, name):
            if name == "attn.c_proj":  # after this layer has written its rows
                raise KeyboardInterrupt
            return super().__getitem__(name)

    broken._layers = [Interrupted(p) if number == layer else p for number, p in enumerate(original)]
    with pytest.raises(KeyboardInterrupt):
        broken([6, 7], cache)
    assert snapshot(cache) == before
    np.testing.assert_allclose(MODEL([9], cache)[-1], MODEL([3, 4, 5, 9])[-1], rtol=0, atol=TOLERANCE)


def poison(cache):
    """NaN over every row that does not count, wherever this kind of cache keeps one."""
    if isinstance(cache, kv.ConcatenatingCache):
        for rows in cache._rows:
            for array in rows:
                if array.flags.writeable:
                    array[:, cache.seq_len :] = np.nan
    elif isinstance(cache, kv.PagedCache):
        slots = cache.pool.manager.slot_mapping(cache._seq, 0, cache.seq_len)
        others = np.setdiff1d(np.arange(cache.pool.num_blocks * 4), slots)
        for array in (cache.pool.keys, cache.pool.values):
            array.reshape(2, -1, 3, 8)[:, others] = np.nan
    else:
        for array in (cache._k, cache._v):
            array[:, :, cache.seq_len :] = np.nan


def stale_rows(cache):
    """How many rows of layer 0 are held beyond those that count."""
    if isinstance(cache, kv.PagedCache):
        written = cache.pool.keys[0].any(axis=(2, 3)).sum()  # the others are still 0
        return written - cache.seq_len
    held = cache._rows[0][0].shape[1] if isinstance(cache, kv.ConcatenatingCache) else cache._k.shape[2]
    return held - cache.seq_len


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_stale_rows_are_never_read(kind, data):
    cache, ids = KINDS[kind](), []
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    for _ in range(data.draw(st.integers(1, 5))):
        new = random.integers(CONFIG.vocab_size, size=data.draw(st.integers(1, 5))).tolist()
        if len(ids) + len(new) <= SIZE:
            ids += new
            MODEL(new, cache)
        kept = data.draw(st.integers(0, len(ids)))
        if kept == 0 and data.draw(st.booleans()):
            cache.reset()
        else:
            cache.truncate(kept)
        ids = ids[:kept]
        poison(cache)
        for layer in range(CONFIG.num_layers):
            for rows in cache.keys_values(layer):
                assert rows.shape[1] == kept and np.isfinite(rows).all()
        if kept < SIZE:
            logits = MODEL([7], cache)[-1]
            np.testing.assert_allclose(logits, MODEL([*ids, 7])[-1], rtol=0, atol=TOLERANCE)
            cache.truncate(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_stale_rows_to_read(kind):
    """Otherwise the test above would prove nothing: after a truncate old rows do lie there."""
    cache = KINDS[kind]()
    MODEL([1, 2, 3, 4, 5], cache)
    cache.truncate(2)
    assert stale_rows(cache) >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_of_a_stale_row_would_be_seen(kind):
    """The count moved on by hand, as a bug would: the NaN reaches the logits."""
    cache = KINDS[kind]()
    MODEL([1, 2, 3, 4, 5], cache)
    cache.truncate(2)
    poison(cache)
    cache._counts = (3, 0)
    assert np.isnan(MODEL([7], cache)).all()


@pytest.mark.parametrize("kind", [kv.ContiguousCache, kv.GrowingCache, kv.PagedCache])
def test_an_interrupt_while_a_pass_begins_leaves_no_open_pass(kind, monkeypatch):
    """The cell that is run again must not hear that a pass is still open."""
    model = kv.load_model("austen-gpt2-draft")
    cache, begin = kind.for_model(model), kind.begin

    def interrupted(self, n):
        begin(self, n)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model([1, 2, 3], cache)
    assert (cache.seq_len, cache.pending) == (0, 0)
    model([1, 2, 3], cache)


def test_somebody_elses_open_pass_stays_open():
    model = kv.load_model("austen-gpt2-draft")
    cache = kv.ContiguousCache.for_model(model)
    cache.begin(2)
    for whole in (cache, kv.BatchView([cache], [1])):
        with pytest.raises(RuntimeError, match="open"):
            model([1], whole)
        assert cache.pending == 2
