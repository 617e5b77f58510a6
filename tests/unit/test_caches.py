"""What a single call on a cache does and refuses, beyond the state machine of tests/invariants."""

import numpy as np
import pytest

import kvcourse as kv

CONFIG = kv.ModelConfig("tiny", "gpt2", 2, 2, 2, 4, 8, 16, 10, 12)
KINDS = [kv.ContiguousCache, kv.GrowingCache, kv.ConcatenatingCache, kv.PagedCache]


def rows(n, dtype=np.float32, heads=2):
    return np.ones((heads, n, 4), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, -1, 13])
def test_impossible_capacity(kind, size):
    with pytest.raises(ValueError, match="outside 1 … 12, the positions of tiny"):
        kind(CONFIG, size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [2.5, float("nan"), True, "3"])
def test_only_whole_numbers_of_tokens(kind, number):
    """A cache that took 1.5 tokens could not be used again."""
    with pytest.raises(TypeError, match="whole number"):
        kind(CONFIG, number)
    cache = kind(CONFIG)
    for call in (cache.begin, cache.commit, cache.truncate):
        with pytest.raises(TypeError, match="is not a whole number of tokens"):
            call(number)
    assert (cache.seq_len, cache.pending) == (0, 0)
    assert kind(CONFIG, np.int64(5)).begin(np.int32(2)).tolist() == [0, 1]


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


def run_pass(cache, n, commit=True):
    cache.begin(n)
    for layer in range(cache.config.num_layers):
        cache.attend(layer, rows(n), rows(n), rows(n))
    if commit:
        cache.commit()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_with_a_layer_left_out_cannot_be_committed(kind):
    """Otherwise that layer would show rows that truncate has taken away."""
    cache = kind(CONFIG)
    run_pass(cache, 4)
    cache.truncate(2)
    cache.begin(2)
    cache.attend(0, rows(2), rows(2), rows(2))
    with pytest.raises(RuntimeError, match=r"layers \[1\] were not attended"):
        cache.commit()
    assert (cache.seq_len, cache.pending) == (2, 2)
    cache.abort()
    assert (cache.seq_len, cache.pending) == (2, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_attend_needs_an_open_pass_and_a_layer_of_the_model(kind):
    cache = kind(CONFIG)
    with pytest.raises(RuntimeError, match="no pass is open: call begin"):
        cache.attend(0, rows(1), rows(1), rows(1))
    cache.begin(1)
    for layer in (-1, 2):
        with pytest.raises(IndexError, match=f"layer {layer} is outside 0 … 1"):
            cache.attend(layer, rows(1), rows(1), rows(1))


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_in_commit_leaves_the_old_rows(kind, monkeypatch):
    cache = kind(CONFIG)
    run_pass(cache, 3)
    before = [a.copy() for a in cache.keys_values(1)]
    run_pass(cache, 2, commit=False)
    plain = kind._keep

    def interrupted(self, n):
        plain(self, n)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, "_keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.commit()
    cache.abort()
    assert (cache.seq_len, cache.pending) == (3, 0)
    assert all(np.array_equal(a, b) for a, b in zip(cache.keys_values(1), before, strict=True))


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
    for one, other in zip(first.keys_values(1), second.keys_values(1), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(model([3], first), model([3], second))


ZEROS = np.zeros((2, 2, 3, 4), np.float32)
LONGER = np.zeros((2, 2, 13, 4), np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(keys=ZEROS[:1]), ValueError, "does not fit"),
        (dict(keys=ZEROS[0]), ValueError, "does not fit"),
        (dict(dtype="float16"), TypeError, "payload holds float16, this cache float32"),
        (dict(keys=ZEROS.astype(np.float64)), TypeError, "payload holds float64"),
        (dict(values=np.full(ZEROS.shape, "a")), TypeError, "payload holds str"),
        (dict(start=5), ValueError, "begins at position 5, the cache ends at 0"),
        (dict(keys=LONGER, values=LONGER), kv.CacheFull, "13 tokens do not fit"),
        (dict(layout="token, layer"), ValueError, "layout is 'token, layer'"),
    ],
)
def test_load_refuses_what_does_not_fit(kind, change, error, words):
    cache = kind(CONFIG)
    good = dict(layout="layer, kv_head, token, head_dim", dtype="float32", start=0, keys=ZEROS, values=ZEROS)
    with pytest.raises(error, match=words):
        cache.load(good | change)
    del good["layout"]
    with pytest.raises(ValueError, match="the payload lacks layout"):
        cache.load(good)
    assert (cache.seq_len, cache.pending) == (0, 0)


def test_export_refuses_rows_that_are_not_there():
    with pytest.raises(ValueError, match="cannot export 0 … 1: the cache holds 0 … 0"):
        kv.ContiguousCache(CONFIG).export(0, 1)


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


def test_a_batch_commits_in_all_caches_or_in_none(monkeypatch):
    first, second = kv.ContiguousCache(CONFIG), kv.ConcatenatingCache(CONFIG)
    run_pass(first, 3)
    view = kv.BatchView([first, second], [1, 2])
    view.begin(3)
    for layer in range(2):
        view.attend(layer, rows(3), rows(3), rows(3))
    monkeypatch.setattr(kv.ConcatenatingCache, "_keep", lambda self, n: 1 / 0 if n else None)
    with pytest.raises(ZeroDivisionError):
        view.commit()
    assert [(c.seq_len, c.pending) for c in (first, second)] == [(3, 0), (0, 0)]


def test_a_batch_leaves_foreign_passes_alone():
    first, second = two()
    second.begin(1)
    view = kv.BatchView([first, second], [1, 1])
    with pytest.raises(RuntimeError, match="cache 1 of the batch has an open pass"):
        view.begin(2)
    with pytest.raises(RuntimeError, match="the batch has no open pass"):
        view.commit()
    assert (first.pending, second.pending) == (0, 1)


def test_a_batch_refuses_rows_that_do_not_add_up():
    view = kv.BatchView(two(), [1, 2])
    view.begin(3)
    with pytest.raises(ValueError, match="4 queries given, the batch's lengths add up to 3"):
        view.attend(0, rows(4), rows(4), rows(4))


def grow_to(cache, chunks):
    for n in chunks:
        run_pass(cache, n)


def test_a_growing_cache_doubles():
    """From 2 rows, one token a pass: growth at the 3rd and 5th and 9th token copies 2 + 4 + 8 rows."""
    cache = kv.GrowingCache(CONFIG, capacity=2)
    capacities = []
    for _ in range(12):
        run_pass(cache, 1)
        capacities.append(cache.capacity)
    assert capacities == [2, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]  # the last doubling stops at max_seq_len
    assert cache.bytes_copied == (2 + 4 + 8) * kv.sizing.kv_bytes_per_token(CONFIG, 4)
    assert cache.nbytes == cache.nbytes_used == 12 * kv.sizing.kv_bytes_per_token(CONFIG, 4)


def test_a_growing_cache_makes_room_for_a_long_chunk_at_once():
    cache = kv.GrowingCache(CONFIG, capacity=1)
    grow_to(cache, [1, 9])
    assert (cache.capacity, cache.bytes_copied) == (10, kv.sizing.kv_bytes_per_token(CONFIG, 4))
    cache.reset()
    assert cache.capacity == 10  # room once made stays
    grow_to(cache, [10])
    assert cache.bytes_copied == kv.sizing.kv_bytes_per_token(CONFIG, 4)


def test_a_growing_cache_that_gets_no_memory_is_unchanged(monkeypatch):
    cache = kv.GrowingCache(CONFIG, capacity=2)
    run_pass(cache, 2)
    before = cache.export(0, 2)

    def no_memory(capacity):
        raise MemoryError

    monkeypatch.setattr(cache, "_reserve", no_memory)
    with pytest.raises(MemoryError):
        cache.begin(1)
    assert (cache.seq_len, cache.pending, cache.capacity, cache.bytes_copied) == (2, 0, 2, 0)
    assert (cache.export(0, 2)["keys"] == before["keys"]).all()


@pytest.mark.parametrize(
    "capacity, error, words",
    [
        (0, ValueError, "outside 1 … 12"),
        (13, ValueError, "outside 1 … 12"),
        (2.0, TypeError, "whole number"),
        (True, TypeError, "whole number"),
    ],
)
def test_impossible_first_capacity(capacity, error, words):
    with pytest.raises(error, match=words):
        kv.GrowingCache(CONFIG, capacity=capacity)


def test_for_model_passes_a_class_s_own_options_on():
    model = kv.load_model("austen-gpt2-draft")
    assert kv.GrowingCache.for_model(model, capacity=4).capacity == 4
    assert kv.GrowingCache.for_model(model, 64, capacity=32).max_seq_len == 64
