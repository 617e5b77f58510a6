"""The tap: what it keeps is what passed, and any mask gives the written-out attention."""

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import ops
from kvcourse import tap as module


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
        kv.Tap(config, mask=np.array([[True, True], [False, False]]))
    for wrong in (model, None, kv.ContiguousCache.for_model(model)):
        with pytest.raises(TypeError, match="give model.config"):
            kv.Tap(wrong)
    for tokens in (0, -1):
        with pytest.raises(ValueError, match="give at least 1"):
            kv.Tap(config).begin(tokens)
    with pytest.raises(RuntimeError, match="no pass is open"):
        kv.Tap(config).attend(0, *[np.ones((4, 1, 64), np.float32)] * 3)
    with pytest.raises(TypeError, match="a Tap in the batch"):
        kv.BatchView([kv.Tap(config)], [1])
    for mask in (np.ones((2, 3), bool), np.ones((2, 2))):
        with pytest.raises(ValueError, match="give a boolean .T, T."):
            kv.Tap(config, mask=mask)
    with pytest.raises(ValueError, match="leave one out"):
        kv.Tap(config, mask=np.ones((1, 1), bool), cache=kv.ContiguousCache.for_model(model))
    with pytest.raises(TypeError, match="cache is a list"):
        kv.Tap(config, cache=[])


TINY = kv.ModelConfig("tiny", "gpt2", 2, 2, 2, 4, 8, 16, 10, 12)


def rows(value, n=2):
    return [np.full((2, n, 4), value + kind, np.float32) for kind in (0, 10, 20)]


def whole_pass(tap, value, n=2):
    tap.begin(n)
    for layer in range(2):
        tap.attend(layer, *rows(value + layer, n))
    tap.commit()


def test_what_is_kept_is_a_copy():
    """A model that reuses its arrays for the next layer must not change what was kept."""
    tap, given = kv.Tap(TINY), rows(1)
    tap.begin(2)
    for layer in range(2):
        tap.attend(layer, *given)
    for array in given:
        array[:] = -1
    tap.commit()
    assert [float(kept.min()) for kept in (tap.queries, tap.keys, tap.values)] == [1, 11, 21]


def test_the_mask_is_a_copy(model, ids):
    mask = np.tri(len(ids), dtype=bool)
    tap = kv.Tap(model.config, mask=mask)
    mask[:] = False
    assert np.isfinite(model(ids, tap)).all()


@pytest.mark.parametrize("cache", [None, kv.ContiguousCache(TINY)], ids=["alone", "through a cache"])
def test_a_pass_with_a_layer_left_out_is_not_published(cache):
    tap = kv.Tap(TINY, cache=cache)
    whole_pass(tap, 1)
    tap.begin(2)
    tap.attend(0, *rows(5))
    with pytest.raises(RuntimeError, match=r"layers \[1\] were not attended"):
        tap.commit()
    assert tap.keys.max() == 12
    tap.abort()
    with pytest.raises(RuntimeError, match="not attended"):  # nothing is open now
        tap.commit()
    whole_pass(tap, 3, n=1)
    assert tap.keys.shape == (2, 2, 1, 4) and tap.keys.max() == 14


def test_an_aborted_pass_reaches_the_cache(model, ids, monkeypatch):
    """A layer raises in the middle of a pass through tap and cache: both are as before."""
    cache = kv.ContiguousCache.for_model(model)
    tap = kv.Tap(model.config, cache=cache)
    model(ids[:4], tap)
    kept, before = tap.keys, cache.export(0, 4)["keys"]
    attend, calls = kv.Tap.attend, []

    def failing(self, layer, *given):
        calls.append(layer)
        if layer == 3:
            raise KeyboardInterrupt
        return attend(self, layer, *given)

    with monkeypatch.context() as patch:
        patch.setattr(kv.Tap, "attend", failing)
        with pytest.raises(KeyboardInterrupt):
            model(ids[4:6], tap)
    assert calls == [0, 1, 2, 3]
    assert (cache.seq_len, cache.pending) == (4, 0)
    assert (tap.keys == kept).all() and (cache.export(0, 4)["keys"] == before).all()
    np.testing.assert_allclose(model(ids[4:6], tap), model(ids[:6])[4:], rtol=0, atol=2e-4)


@pytest.mark.parametrize("cache", [None, kv.ContiguousCache(TINY)], ids=["alone", "through a cache"])
def test_queries_and_keys_are_rotated_and_kept_as_they_came(cache):
    """Attention works on rows rotated by their positions; the tap shows them as they came."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 4)).astype(np.float32)

    def rotate(x, positions):
        return x * (1 + positions[None, :, None]).astype(np.float32)

    tap = kv.Tap(TINY, cache=cache)
    positions = tap.begin(3)
    out = [tap.attend(layer, q, k, v, rotate) for layer in range(2)][0]
    tap.commit()
    expected = ops.attention(rotate(q, positions), rotate(k, positions), v, start=0)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert (tap.keys[0] == k).all() and (tap.queries[1] == q).all()
