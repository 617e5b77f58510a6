"""The tap: what it keeps is what passed, and any mask gives the written-out attention."""

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import tap as module


@pytest.fixture(scope="module")
def model():
    return kv.load_model("austen-gpt2")


@pytest.fixture(scope="module")
def ids():
    return kv.load_tokenizer("austen-gpt2").encode("She was not quite so happy as she had been")


def test_a_tap_changes_nothing_and_keeps_the_cached_rows(model, ids):
    tap, cache = kv.Tap(model.config), kv.ContiguousCache.for_model(model)
    assert (model(ids, tap) == model(ids)).all()
    model(ids, cache)
    assert tap.queries.shape == tap.keys.shape == tap.values.shape == (6, 4, len(ids), 64)
    assert tap.keys.dtype == np.float32
    for layer in range(6):
        for mine, cached in zip((tap.keys, tap.values), cache.keys_values(layer), strict=True):
            assert (mine[layer] == cached).all()


def test_through_a_cache_the_new_rows_are_kept(model, ids):
    cache = kv.ContiguousCache.for_model(model)
    tap = kv.Tap(model.config, cache=cache)
    model(ids[:4], tap)
    assert cache.seq_len == 4 and tap.keys.shape[2] == 4
    model(ids[4:6], tap)
    assert cache.seq_len == 6 and tap.keys.shape[2] == 2
    assert (tap.values[5] == cache.keys_values(5)[1][:, 4:]).all()


def test_the_causal_triangle_given_as_a_mask(model, ids):
    mask = np.tri(len(ids), dtype=bool)
    # Same numbers in another order of adding; logits are of size 10.
    np.testing.assert_allclose(model(ids, kv.Tap(model.config, mask=mask)), model(ids), rtol=0, atol=2e-4)


def test_any_mask_against_loops():
    """Grouped heads and a mask without a pattern, one number at a time in float64."""
    random = np.random.default_rng(3)
    q = random.standard_normal((4, 5, 8)).astype(np.float32)
    k, v = random.standard_normal((2, 2, 7, 8)).astype(np.float32)
    mask = random.random((5, 7)) < 0.5
    mask[:, 2] = True
    out = module.masked_attention(q, k, v, mask)
    assert out.dtype == np.float32
    for head in range(4):
        for row in range(5):
            seen = np.flatnonzero(mask[row])
            weights = np.exp(k[head // 2, seen].astype(np.float64) @ q[head, row] / 8**0.5)
            expected = weights / weights.sum() @ v[head // 2, seen]
            np.testing.assert_allclose(out[head, row], expected, atol=1e-5)


def test_a_failed_pass_leaves_the_rows_of_the_one_before(model, ids):
    tap = kv.Tap(model.config, mask=np.ones((3, 3), bool))
    model(ids[:3], tap)
    before = tap.keys
    with pytest.raises(ValueError, match="the mask is .3, 3., the pass has 4 tokens"):
        model(ids[:4], tap)
    assert (tap.keys == before).all()


def test_one_line_errors(model):
    config = model.config
    with pytest.raises(RuntimeError, match="nothing passed yet"):
        kv.Tap(config).keys  # noqa: B018
    with pytest.raises(ValueError, match="row 1 of the mask sees nothing"):
        kv.Tap(config, mask=np.array([[True, False], [False, False]]))
    for mask in (np.ones((2, 3), bool), np.ones((2, 2))):
        with pytest.raises(ValueError, match="give a boolean .T, T."):
            kv.Tap(config, mask=mask)
    with pytest.raises(ValueError, match="leave one out"):
        kv.Tap(config, mask=np.ones((1, 1), bool), cache=kv.ContiguousCache.for_model(model))
    with pytest.raises(TypeError, match="cache is a list"):
        kv.Tap(config, cache=[])
