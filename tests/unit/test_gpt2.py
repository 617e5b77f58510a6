"""The model's edges: float32 throughout, one-line errors, the cache untouched after them."""

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import ops
from kvcourse.models import gpt2

MODEL = kv.load_model("austen-gpt2-draft")
CACHES = [kv.ContiguousCache, kv.GrowingCache, kv.ConcatenatingCache, kv.PagedCache]
PROMPT = list(range(40, 52))


def state(cache):
    rows = [cache.keys_values(layer) for layer in range(cache.config.num_layers)]
    return cache.seq_len, cache.pending, [(k.copy(), v.copy()) for k, v in rows]


def unchanged(cache, before):
    seq_len, pending, rows = state(cache)
    same = all(
        np.array_equal(a, b)
        for pair, old in zip(rows, before[2], strict=True)
        for a, b in zip(pair, old, strict=True)
    )
    return (seq_len, pending) == before[:2] and same


def test_float32_through_the_whole_pass(monkeypatch):
    """One float64 scalar anywhere would turn all that follows into float64."""
    seen = []
    for name in ("layer_norm", "gelu_inplace", "attention"):
        plain = getattr(ops, name)

        def watched(*args, plain=plain, **kwargs):
            result = plain(*args, **kwargs)
            seen.extend(a.dtype for a in (*args, result) if isinstance(a, np.ndarray))
            return result

        monkeypatch.setattr(ops, name, watched)
    cache = kv.ContiguousCache.for_model(MODEL)
    assert MODEL(PROMPT, cache).dtype == np.float32
    assert MODEL([1], cache).dtype == np.float32
    assert set(seen) == {np.dtype(np.float32)}


@pytest.mark.parametrize("rows", [[-1], [0, 3], [11], np.array([2])])
def test_rows_are_rows_of_all_logits(rows):
    # One row and twelve rows times a matrix add up in different orders.
    np.testing.assert_allclose(MODEL(PROMPT, rows=rows), MODEL(PROMPT)[rows], atol=1e-4)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    "ids, error, words",
    [
        ([], ValueError, "no token ids"),
        ([5, 2048], ValueError, "token id 2,048 is outside the vocabulary of austen-gpt2-draft, 0 … 2,047"),
        ([-1], ValueError, "token id -1 is outside"),
        ([1.5], TypeError, "ids are float64"),
        ([True], TypeError, "ids are bool"),
        ([[1, 2]], ValueError, r"ids have shape \(1, 2\)"),
        (["a"], TypeError, "ids are <U1, such as 'a'"),
        ("It was", TypeError, "ids is the text 'It was': give the token ids"),
        ([[1], [2, 3]], ValueError, "lists of different lengths"),
    ],
)
def test_wrong_ids(kind, ids, error, words):
    cache = kind.for_model(MODEL)
    MODEL(PROMPT, cache)
    before = state(cache)
    for where in (cache, None):
        with pytest.raises(error, match=words) as caught:
            MODEL(ids, where)
        assert "\n" not in str(caught.value)
    assert unchanged(cache, before)


@pytest.mark.parametrize("row", [12, -13])
def test_a_row_outside_the_pass(row):
    with pytest.raises(ValueError, match=f"row {row} is outside -12 … 11"):
        MODEL(PROMPT, rows=[row])


@pytest.mark.parametrize("kind", CACHES)
def test_token_1025_names_the_limit_and_the_way_out(kind):
    cache = kind.for_model(MODEL)
    MODEL(np.arange(1024), cache, rows=[-1])
    before = state(cache)
    with pytest.raises(kv.CacheFull, match="1,025 tokens do not fit .* 1,024 positions: shorten") as caught:
        MODEL([7], cache)
    assert "\n" not in str(caught.value)
    assert unchanged(cache, before)


def test_1025_tokens_without_a_cache():
    with pytest.raises(ValueError, match="1,025 tokens are more than the 1,024 positions"):
        MODEL(np.arange(1025))


def test_a_small_cache_says_how_to_make_a_larger_one():
    cache = kv.ContiguousCache.for_model(MODEL, max_seq_len=8)
    with pytest.raises(kv.CacheFull, match="12 tokens do not fit in a cache of 8 .*max_seq_len, up to 1,024"):
        MODEL(PROMPT, cache)
    assert cache.seq_len == 0


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_of_another_models_shape(kind):
    cache = kind.for_model(kv.load_model("austen-gpt2"))
    with pytest.raises(ValueError, match="does not fit austen-gpt2-draft"):
        MODEL(PROMPT, cache)
    assert (cache.seq_len, cache.pending) == (0, 0)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("moment", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_pass_leaves_the_cache_as_it_was(kind, moment, monkeypatch):
    cache = kind.for_model(MODEL)
    MODEL(PROMPT, cache)
    before = state(cache)
    calls = []

    def interrupted(x):
        calls.append(1)
        if len(calls) == 2:  # in layer 1, after layer 0 has written its rows
            raise moment
        return x

    with monkeypatch.context() as patch:
        patch.setattr(gpt2.ops, "gelu_inplace", interrupted)
        with pytest.raises(moment):
            MODEL([1, 2, 3], cache)
    assert unchanged(cache, before)
    np.testing.assert_allclose(MODEL([9], cache)[-1], MODEL([*PROMPT, 9])[-1], atol=1e-4)


def test_rows_are_a_list_of_row_numbers():
    for rows in ([1.7], slice(0, 2), [True]):
        with pytest.raises(TypeError, match="give a list of row numbers"):
            MODEL(PROMPT, rows=rows)
    assert MODEL(PROMPT, rows=[]).shape == (0, 2048)


def small(**changes):
    shape = dict(num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, hidden_size=16, vocab_size=50)
    return kv.random_model("gpt2", **{**shape, "intermediate_size": 64, "max_seq_len": 32, **changes})


def test_a_stream_of_a_rotary_model_of_the_same_shape_has_no_more_positions_either():
    """Its cache has no limit of its own; learned positions do."""
    rotary = kv.ModelConfig("rotary", "llama", 2, 2, 2, 8, 16, 64, 50, 32, rope_theta=1e4)
    model, cache = small(), kv.SlidingCache(rotary, window=8)
    assert cache.unlimited
    model([1] * 30, cache)
    with pytest.raises(ValueError, match="need 33 positions, the limit is 32"):
        kv.generate(model, [1], 3, cache=cache)
    with pytest.raises(kv.CacheFull, match="position 32 is outside the 32 positions of gpt2"):
        model([1] * 3, cache)
    assert (cache.seq_len, cache.pending) == (30, 0)


def test_a_cache_with_more_positions_than_the_model():
    model, cache = small(), kv.ContiguousCache.for_model(small(max_seq_len=64))
    model([1] * 30, cache)
    with pytest.raises(kv.CacheFull, match="position 32 is outside the 32 positions of gpt2"):
        model([1] * 3, cache)
    assert (cache.seq_len, cache.pending) == (30, 0)
    with pytest.raises(ValueError, match="need 33 positions, the limit is 32"):
        kv.generate(model, [1], 3, cache=cache)


@pytest.mark.parametrize("change", [dict(num_kv_heads=1), dict(num_heads=4), dict(head_dim=4)])
def test_shapes_that_gpt2_does_not_have(change):
    with pytest.raises(ValueError, match="one KV head per query head and heads · head_dim = hidden_size$"):
        small(**change)


def test_a_failing_commit_leaves_the_cache_closed(monkeypatch):
    cache = kv.ConcatenatingCache.for_model(MODEL)
    MODEL(PROMPT, cache)
    before = state(cache)

    def full(self, n):
        if n:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(kv.ConcatenatingCache, "_keep", full)
        with pytest.raises(MemoryError):
            MODEL([1], cache)
    assert unchanged(cache, before)
