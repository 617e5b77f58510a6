"""What a single call on a cache does and refuses, beyond the state machine of tests/invariants."""

import numpy as np
import pytest

import kvcourse as kv

CONFIG = kv.ModelConfig("tiny", "gpt2", 2, 2, 2, 4, 8, 16, 10, 12)
KINDS = [kv.ContiguousCache, kv.ConcatenatingCache]


def rows(n, dtype=np.float32, heads=2):
    return np.ones((heads, n, 4), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, -1, 13, 2.5])
def test_impossible_capacity(kind, size):
    with pytest.raises(ValueError, match="outside 1 … 12, the positions of tiny"):
        kind(CONFIG, size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", range(3))
def test_wrong_dtype_is_refused(kind, position):
    cache = kind(CONFIG)
    cache.begin(2)
    given = [rows(2)] * 3
    given[position] = rows(2, np.float64)
    with pytest.raises(TypeError, match="are float64, the cache holds float32: use .astype"):
        cache.attend(0, *given)
    cache.abort()
    assert cache.seq_len == 0


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_shapes_are_refused(kind):
    cache = kind(CONFIG)
    cache.begin(2)
    for given in [
        (rows(2), rows(3), rows(2)),
        (rows(2), rows(2), rows(2, heads=1)),
        (rows(1), rows(2), rows(2)),
    ]:
        with pytest.raises(ValueError, match="do not fit: expected"):
            cache.attend(0, *given)


def test_reserved_and_held_bytes():
    cache = kv.ContiguousCache(CONFIG)
    assert (cache.nbytes, cache.nbytes_used) == (2 * 2 * 2 * 12 * 4 * 4, 0)
    assert kv.ConcatenatingCache(CONFIG).nbytes == 0


def test_concatenating_copies_every_old_row_in_every_pass():
    """Passes of 3, 1, 1, 1 tokens copy 0 + 3 + 4 + 5 old rows in each layer, K and V."""
    cache = kv.ConcatenatingCache(CONFIG)
    for n in (3, 1, 1, 1):
        cache.begin(n)
        for layer in range(2):
            cache.attend(layer, rows(n), rows(n), rows(n))
        cache.commit()
    assert cache.bytes_copied == (0 + 3 + 4 + 5) * kv.sizing.kv_bytes_per_token(CONFIG, 4)


def test_concatenating_refuses_a_pass_with_a_layer_left_out():
    cache = kv.ConcatenatingCache(CONFIG)
    cache.begin(1)
    cache.attend(0, rows(1), rows(1), rows(1))
    with pytest.raises(RuntimeError, match=r"layers \[1\] were not attended"):
        cache.commit()
    cache.abort()
    assert cache.seq_len == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_way_to_read_rows_behind_the_end(kind):
    """Truncated rows are poisoned; logits and keys_values must not feel it."""
    model = kv.load_model("austen-gpt2-draft")
    cache = kind.for_model(model)
    model([1, 2, 3, 4, 5], cache)
    cache.truncate(2)
    if kind is kv.ContiguousCache:
        cache._k[:, :, 2:], cache._v[:, :, 2:] = np.nan, np.nan
    assert cache.keys_values(0)[0].shape[1] == 2
    np.testing.assert_allclose(model([9], cache)[-1], model([1, 2, 9])[-1], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_export_moves_rows_to_another_kind_of_cache(kind):
    model = kv.load_model("austen-gpt2-draft")
    first, second = kind.for_model(model), kv.ContiguousCache.for_model(model)
    model(list(range(10)), first)
    second.load(first.export(0, 6))
    second.load(first.export(6, 10))
    np.testing.assert_array_equal(model([3], first), model([3], second))


def test_load_refuses_what_does_not_fit():
    cache = kv.ContiguousCache(CONFIG)
    cache.begin(2)
    cache.abort()
    zeros = np.zeros((2, 2, 3, 4), np.float32)
    good = dict(layout="layer, kv_head, token, head_dim", dtype="float32", start=0, keys=zeros, values=zeros)
    longer = np.zeros((2, 2, 13, 4), np.float32)
    for change, error, words in [
        (dict(keys=np.zeros((1, 2, 3, 4), np.float32)), ValueError, "does not fit"),
        (dict(dtype="float16"), TypeError, "payload holds float16"),
        (dict(start=5), ValueError, "begins at position 5, the cache ends at 0"),
        (dict(keys=longer, values=longer), kv.CacheFull, "13 tokens do not fit"),
        (dict(keys=zeros[0]), ValueError, "does not fit"),
    ]:
        with pytest.raises(error, match=words):
            cache.load(good | change)
        assert (cache.seq_len, cache.pending) == (0, 0)
    with pytest.raises(ValueError, match="cannot export"):
        cache.export(0, 1)


def two():
    return [kv.ContiguousCache(CONFIG), kv.ContiguousCache(CONFIG)]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: kv.BatchView([], []), "0 sequences"),
        (lambda: kv.BatchView(two(), [1]), "2 caches but 1 lengths"),
        (lambda: kv.BatchView(two(), [1, 0]), "length 0 in the batch"),
        (lambda: kv.BatchView([two()[0]] * 2, [1, 1]), "stands twice"),
    ],
)
def test_impossible_batches(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_batch_begins_in_all_caches_or_in_none():
    first, second = two()
    second.begin(12)
    second.abort()
    full = kv.ContiguousCache(CONFIG, max_seq_len=1)
    view = kv.BatchView([first, full], [2, 2])
    with pytest.raises(kv.CacheFull):
        view.begin(4)
    assert (first.pending, full.pending) == (0, 0)
    with pytest.raises(ValueError, match="3 tokens given, the batch's lengths add up to 4"):
        view.begin(3)
