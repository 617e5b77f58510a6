"""The paged pool and cache by hand: where rows lie, what is shared and copied, what is given back."""

from types import SimpleNamespace

import numpy as np
import pytest

import kvcourse as kv
from kvcourse.paging import OutOfBlocks

# 2 layers, 6 query heads on 2 KV heads of 4: a row is 2 · 4 float32 = 32 bytes, keys and values, 2 layers.
CONFIG = kv.ModelConfig("tiny", "gpt2", 2, 6, 2, 4, 24, 16, 50, 32)
MODEL = SimpleNamespace(config=CONFIG)  # for_model asks for nothing else
RANDOM = np.random.default_rng(0)


def rows(n, heads=2):
    return RANDOM.standard_normal((heads, n, 4)).astype(np.float32)


def write(cache, ids, keep=None):
    """One pass over `ids` with random rows; the (k, v) of each layer."""
    cache.begin(len(ids))
    cache.note_ids(ids)
    new = []
    for layer in range(2):
        k, v = rows(len(ids)), rows(len(ids))
        cache.attend(layer, rows(len(ids), heads=6), k, v)
        new.append((k, v))
    cache.commit(keep)
    return new


def pool_of(blocks=8, size=4, **options):
    return kv.PagedPool(CONFIG, blocks, size, **options)


def test_rows_lie_where_the_table_says():
    pool = pool_of()
    first, second = pool.sequence(), pool.sequence()
    write(first, [1, 2])
    write(second, [3] * 5)
    new = write(first, [4, 5, 6])  # slots of its tokens 2 … 4: two in its first block, one in its second
    assert first.block_table == [0, 3] and second.block_table == [1, 2]
    for layer, (k, v) in enumerate(new):
        for block, offset, row in ((0, 2, 0), (0, 3, 1), (3, 0, 2)):
            assert np.array_equal(pool.keys[layer, block, offset], k[:, row])
            assert np.array_equal(pool.values[layer, block, offset], v[:, row])


def test_shapes_and_bytes():
    pool = pool_of()
    assert pool.keys.shape == pool.values.shape == (2, 8, 4, 2, 4) and pool.keys.dtype == np.float32
    assert (pool.block_nbytes, pool.nbytes, pool.nbytes_used) == (512, 4096, 0)
    cache = pool.sequence()
    write(cache, [1] * 5)
    assert (cache.nbytes, cache.nbytes_used, pool.nbytes_used) == (2 * (512 + 4), 5 * 128, 1024)
    fork = cache.fork()
    assert fork.nbytes == cache.nbytes and pool.nbytes_used == 1024  # each counts both blocks, the pool once
    assert (cache.num_rows, cache.max_rewind, cache.key_positions(0).tolist()) == (5, 5, [0, 1, 2, 3, 4])


def test_a_pool_of_its_own_has_just_enough_blocks():
    cache = kv.PagedCache.for_model(MODEL, 9, block_size=4)
    assert (cache.pool.num_blocks, cache.pool.block_size, cache.max_seq_len) == (3, 4, 9)
    assert kv.PagedCache.for_model(MODEL).pool.num_blocks == 2
    write(cache, [1] * 9)
    with pytest.raises(kv.CacheFull, match="10 tokens do not fit in a cache of 9"):
        cache.begin(1)
    pool = kv.PagedPool.for_model(MODEL, 5, block_size=2)
    assert (pool.num_blocks, pool.block_size, pool.config) == (5, 2, CONFIG)


def test_a_prompt_is_found_in_whole_blocks_and_never_whole():
    pool = pool_of()
    first = pool.sequence(range(8))
    assert (first.seq_len, first.num_cached_tokens, len(first.block_table)) == (0, 0, 2)
    new = write(first, list(range(8)))
    again = pool.sequence(range(8))  # 8 tokens are 2 full blocks, but the last must be computed
    longer = pool.sequence(range(11))
    assert (again.seq_len, longer.seq_len) == (4, 8)
    assert again.block_table[0] == longer.block_table[0] == first.block_table[0]
    for layer, (k, v) in enumerate(new):
        found_k, found_v = longer.keys_values(layer)
        assert np.array_equal(found_k, k) and np.array_equal(found_v, v)
    assert pool.sequence(range(8), salt="s").seq_len == 0
    with pytest.raises(TypeError, match="salt"):
        pool.sequence([1], salt=1.5)


def test_equal_blocks_are_held_once():
    pool = pool_of()
    first, second = pool.sequence(), pool.sequence()
    write(first, [7] * 5)
    write(second, [7] * 5)  # its own first block was written, then given back for the one that is findable
    assert second.block_table[0] == first.block_table[0] and pool.manager.num_used == 3
    for one, other in zip(first.keys_values(0), second.keys_values(0), strict=True):
        assert np.array_equal(one[:, :4], other[:, :4]) and not np.array_equal(one[:, 4], other[:, 4])


def test_nothing_is_found_without_names_or_without_sharing():
    pool, plain = pool_of(), pool_of(prefix_caching=False)
    cache = pool.sequence()
    cache.begin(8)
    for layer in range(2):
        cache.attend(layer, rows(8, 6), rows(8), rows(8))
    cache.commit()  # nobody said which tokens
    write(plain.sequence(), [1] * 8)
    assert pool.sequence([1] * 9).seq_len == plain.sequence([1] * 9).seq_len == 0


def test_loaded_rows_are_found_only_under_names():
    source = kv.ContiguousCache(CONFIG)
    source.begin(8)
    for layer in range(2):
        source.attend(layer, rows(8, 6), rows(8), rows(8))
    source.commit()
    payload = source.export(0, 8)
    pool = pool_of()
    pool.sequence().load(payload)
    assert pool.sequence([5] * 9).seq_len == 0
    with pytest.raises(ValueError, match="2 token ids for 8 loaded tokens"):
        pool.sequence().load(payload, [5, 5])
    pool.sequence().load(payload, [5] * 8)
    found = pool.sequence([5] * 9)
    assert found.seq_len == 8
    assert found.export(0, 8)["keys"].tobytes() == payload["keys"].tobytes()


def test_whoever_writes_into_a_shared_block_gets_a_copy():
    pool = pool_of()
    cache = pool.sequence()
    write(cache, [1] * 6)
    before = [cache.keys_values(layer) for layer in range(2)]
    fork = cache.fork()
    assert fork.block_table == cache.block_table and pool.manager.num_used == 2
    write(fork, [2])
    assert fork.block_table[0] == cache.block_table[0] and fork.block_table[1] != cache.block_table[1]
    for layer in range(2):
        for mine, now, was in zip(
            fork.keys_values(layer), cache.keys_values(layer), before[layer], strict=True
        ):
            assert np.array_equal(now, was) and np.array_equal(mine[:, :6], was)
    write(cache, [3])  # alone in its block by now
    assert pool.manager.num_used == 3
    fork.free()
    assert pool.manager.num_used == 2


def test_going_back_into_a_findable_block_copies_it_at_the_next_write():
    pool = pool_of()
    cache = pool.sequence()
    new = write(cache, [1, 2, 3, 4, 5])
    cache.truncate(3)
    assert cache.block_table == [0]
    write(cache, [9])
    assert cache.block_table == [2]  # block 1 was given back and is at the end of the queue
    found = pool.sequence([1, 2, 3, 4, 5])
    assert found.seq_len == 4 and np.array_equal(found.keys_values(1)[0], new[1][0][:, :4])


def test_a_fork_of_a_fork_forgets_nothing_when_the_first_is_freed():
    pool = pool_of()
    cache = pool.sequence()
    new = write(cache, [1] * 6)
    child = cache.fork().fork()
    cache.free()
    assert np.array_equal(child.keys_values(0)[0], new[0][0])


@pytest.mark.parametrize("end", ["abort", "partial", "reset", "truncate", "free"])
def test_what_was_reserved_is_given_back(end):
    pool = pool_of()
    cache = pool.sequence()
    write(cache, [1] * 5)
    assert pool.manager.num_used == 2
    if end == "partial":
        write(cache, [2] * 12, keep=1)
    elif end in ("abort", "free", "reset"):
        cache.begin(12)
        assert pool.manager.num_used == 5
        getattr(cache, end)()
    else:
        write(cache, [2] * 12)
        cache.truncate(5)
    assert pool.manager.num_used == {"free": 0, "reset": 0}.get(end, 2)
    pool.manager.check_invariants()


def test_out_of_blocks_changes_nothing():
    pool = pool_of(blocks=2)
    cache = pool.sequence()
    write(cache, [1] * 4)
    for call in (lambda: cache.begin(5), lambda: pool.sequence([2] * 5)):
        with pytest.raises(OutOfBlocks, match="blocks? of 4 tokens needed, 1 of 2 are free: free") as caught:
            call()
        assert "\n" not in str(caught.value)
        assert (cache.seq_len, cache.pending, cache.block_table) == (4, 0, [0])
        pool.manager.check_invariants()
    write(cache, [1] * 4)


def test_a_pass_that_finds_no_room_keeps_the_blocks_reserved_before():
    pool = pool_of(blocks=4)
    cache, other = pool.sequence(range(8)), pool.sequence(range(20, 28))
    with pytest.raises(OutOfBlocks):
        cache.begin(12)
    assert (cache.block_table, other.block_table, cache.pending) == ([0, 1], [2, 3], 0)
    write(cache, list(range(8)))  # the room that was asked for is still there


def test_a_cache_fills_its_own_pool_again_after_going_back():
    """The copy that a findable block asks for needs no second block when the pool has none."""
    pool = pool_of(blocks=2)
    cache = pool.sequence()
    write(cache, [1] * 8)
    cache.truncate(7)
    write(cache, [2])
    assert cache.seq_len == 8 and pool.sequence([]).seq_len == 0


def test_a_freed_cache_refuses():
    pool = pool_of()
    cache = pool.sequence()
    write(cache, [1] * 5)
    payload = cache.export(0, 5)
    cache.free()
    assert pool.manager.num_used == 0 and cache.seq_len == 0
    calls = [
        lambda: cache.begin(1), cache.free, cache.fork, cache.reset, lambda: cache.truncate(0),
        lambda: cache.keys_values(0), lambda: cache.export(0, 0), lambda: cache.load(payload),
        lambda: cache.block_table, lambda: cache.nbytes, lambda: cache.num_cached_tokens,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match="this cache was freed.*pool.sequence") as caught:
            call()
        assert "\n" not in str(caught.value)
    cache.abort()  # harmless, as when nothing was begun


def test_names_need_an_open_pass_and_one_id_a_token():
    cache = pool_of().sequence()
    with pytest.raises(RuntimeError, match="no pass is open"):
        cache.note_ids([1])
    cache.begin(2)
    with pytest.raises(RuntimeError, match="open"):
        cache.fork()
    with pytest.raises(ValueError, match="3 token ids for a pass of 2"):
        cache.note_ids([1, 2, 3])
    cache.abort()
    write(cache, [1, 2, 3, 4])
    assert cache._seq.token_ids == [1, 2, 3, 4]  # nothing of the failed pass sticks


def test_names_are_checked_and_a_pool_needs_a_sequence():
    pool = pool_of()
    cache = pool.sequence()
    cache.begin(2)
    for ids in (5, {1, 2}, None, [1, "a"]):
        with pytest.raises(TypeError, match="token id"):
            cache.note_ids(ids)
    cache.note_ids(token for token in (1, 2))
    for options in ({"pool": pool}, {"sequence": pool.manager.allocate()}):
        with pytest.raises(TypeError, match="pool and sequence go together: pool.sequence"):
            kv.PagedCache(CONFIG, **options)


def test_a_load_that_is_refused_in_an_open_pass_leaves_its_names():
    pool = pool_of()
    source, cache = pool.sequence(), pool.sequence()
    write(source, [1] * 4)
    payload = source.export(0, 4)
    cache.begin(4)
    cache.note_ids([5, 6, 7, 8])
    with pytest.raises(RuntimeError, match="open"):
        cache.load(payload, [1] * 4)
    for layer in range(2):
        cache.attend(layer, rows(4, heads=6), rows(4), rows(4))
    cache.commit()
    assert pool.manager.lookup([5, 6, 7, 8, 9]) == cache.block_table


@pytest.mark.parametrize("size", [0, 1.5, True, "16"])
def test_sizes_are_checked(size):
    calls = [
        lambda: pool_of(blocks=size), lambda: pool_of(size=size),
        lambda: kv.PagedCache.for_model(MODEL, block_size=size),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((TypeError, ValueError), match="num_blocks|block_size"):
            call()


@pytest.mark.parametrize("where", ["append", "copy"])
def test_an_interrupt_in_begin_loses_no_row(where, monkeypatch):
    """The manager's table names the new block; the copy of its rows must not be left out."""
    pool = pool_of()
    cache = pool.sequence()
    write(cache, [1] * 6)
    fork = cache.fork()
    before = cache.keys_values(0)[0].copy()
    if where == "append":
        append = pool.manager.append_slots

        def interrupted(seq, n):
            append(seq, n)
            raise KeyboardInterrupt

        monkeypatch.setattr(pool.manager, "append_slots", interrupted)
    else:
        calls = []

        def stopped_once(copies, copy=pool.copy_blocks):
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt
            copy(copies)

        monkeypatch.setattr(pool, "copy_blocks", stopped_once)
    with pytest.raises(KeyboardInterrupt):
        fork.begin(1)
    monkeypatch.undo()
    assert fork.pending == 0 and fork.seq_len == 6
    for held in (cache, fork):
        assert np.array_equal(held.keys_values(0)[0], before)
    pool.manager.check_invariants()
    write(fork, [2])


def test_an_interrupt_between_the_two_counts_is_mended():
    """The manager has counted a pass that the cache has not: the next pass starts from the cache's count."""
    pool = pool_of()
    cache = pool.sequence()
    write(cache, [1] * 3)
    pool.manager.append_slots(cache._seq, 6)
    pool.manager.commit(cache._seq, [2] * 6)
    assert cache.begin(2).tolist() == [3, 4]
    cache.abort()
    assert cache._seq.token_ids == [1, 1, 1] and pool.manager.num_used == 1


def test_an_interrupted_truncate_is_mended_before_the_next_row_is_written(monkeypatch):
    """The manager still counts all 5 tokens: block 0 can be found, and must not be written."""
    pool = pool_of()
    cache = pool.sequence()
    new = write(cache, [1, 2, 3, 4, 5])

    def interrupted(seq, num_tokens):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool.manager, "truncate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.truncate(3)
    write(cache, [9])
    assert cache._seq.token_ids == [1, 2, 3, 9]
    found = pool.sequence([1, 2, 3, 4, 5])
    assert found.seq_len == 4 and np.array_equal(found.keys_values(1)[0], new[1][0][:, :4])


def test_a_commit_stopped_before_it_counts_can_be_repeated(monkeypatch):
    pool = pool_of()
    cache = pool.sequence()

    def interrupted(n):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_count", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(cache, [1, 2])
    cache.commit()
    assert (cache.seq_len, cache._seq.num_tokens, cache.block_table) == (2, 2, [0])


@pytest.mark.parametrize("end", ["reset", "abort", "commit"])
def test_names_are_those_of_one_pass(end):
    pool = pool_of()
    cache = pool.sequence()
    for named in (True, False):
        cache.begin(4)
        if named:
            cache.note_ids([1, 2, 3, 4])
        for layer in range(2):
            cache.attend(layer, rows(4, heads=6), rows(4), rows(4))
        getattr(cache, end if named else "commit")()
    assert len(pool.manager.lookup([1, 2, 3, 4, 1, 2, 3, 4, 5])) == (end == "commit")


def test_a_fork_after_an_interrupted_truncate_has_the_new_length(monkeypatch):
    pool = pool_of()
    cache = pool.sequence()
    write(cache, [1] * 7)

    def interrupted(seq, num_tokens):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool.manager, "truncate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.truncate(2)
    fork = cache.fork()
    assert (cache.seq_len, fork.seq_len, fork.block_table) == (2, 2, cache.block_table[:1])


def test_a_batch_of_one_pool_is_kept_whole_or_not_at_all(monkeypatch):
    pool = pool_of(blocks=3)
    first, second = pool.sequence(), pool.sequence()
    view = kv.BatchView([first, second], [5, 9])
    with pytest.raises(OutOfBlocks):
        view.begin(14)  # the first has room, the second has not
    assert pool.manager.num_used == 0 and first.pending == second.pending == 0
    view = kv.BatchView([first, second], [4, 3])
    view.begin(7)
    view.note_ids([1, 2, 3, 4, 5, 6, 7])
    for layer in range(2):
        view.attend(layer, rows(7, 6), rows(7), rows(7))

    def fails(n):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(second, "_keep", fails)
        with pytest.raises(KeyboardInterrupt):
            view.commit()
        patch.undo()
    second.abort()
    assert (first.seq_len, second.seq_len, pool.manager.num_used) == (0, 0, 0)
    pool.manager.check_invariants()
