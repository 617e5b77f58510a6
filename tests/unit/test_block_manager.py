"""BlockManager by hand: vLLM's worked example, sharing, copies, the free queue, one-line errors."""

import itertools

import numpy as np
import pytest
from block_contents import snapshot

from kvcourse.paging import Block, BlockManager, FreeQueue, OutOfBlocks, block_hash

TEXT = list(range(100, 200))  # tokens of a prompt, all different


def computed(manager, ids, salt=None, adapter=None):
    """A sequence whose whole prompt has been computed."""
    seq = manager.allocate(ids, salt, adapter)
    manager.commit(seq, ids[seq.num_tokens :])
    return seq


def findable(manager):
    return [number for number in range(manager.num_blocks) if manager.is_findable(number)]


# --- the worked example of vLLM's docs/design/prefix_caching.md -------------------------------


def test_the_example_of_vllms_design_document():
    """10 blocks of 4 tokens, three requests; block ids and the order of the free queue are the document's.

    One thing is later here: the document marks a block as cached when it is allocated, ours is findable once
    its tokens have been computed (`commit`).
    """
    m = BlockManager(10, block_size=4)
    assert m.free_blocks() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    # Time 1: request 0 comes with 15 tokens: four blocks, three of them full.
    first = TEXT[:15]
    zero = m.allocate(first)
    assert zero.block_table == [0, 1, 2, 3] and zero.num_cached_tokens == 0
    assert m.free_blocks() == [4, 5, 6, 7, 8, 9] and findable(m) == []
    m.commit(zero, first)
    assert findable(m) == [0, 1, 2]

    # Time 2 and 3: one more token makes block 3 full, the next one needs block 4.
    assert m.append_slots(zero) == [] and zero.block_table == [0, 1, 2, 3]
    m.commit(zero, TEXT[15:16])
    assert findable(m) == [0, 1, 2, 3]
    assert m.append_slots(zero) == [] and zero.block_table == [0, 1, 2, 3, 4]
    m.commit(zero, TEXT[16:17])
    assert m.free_blocks() == [5, 6, 7, 8, 9] and findable(m) == [0, 1, 2, 3]

    # Time 4: request 1 has 14 tokens, the first 10 are request 0's: two whole blocks of them.
    one = m.allocate([*TEXT[:10], 1, 2, 3, 4])
    assert one.block_table == [0, 1, 5, 6] and one.num_cached_tokens == 8
    m.commit(one, [*TEXT[8:10], 1, 2, 3, 4])
    assert m.free_blocks() == [7, 8, 9] and findable(m) == [0, 1, 2, 3, 5]
    assert [m.ref_count(block) for block in range(7)] == [2, 2, 1, 1, 1, 1, 1]

    # Time 5: request 0 is finished. Its tail goes into the queue first; 0 and 1 are request 1's as well.
    m.free(zero)
    assert m.free_blocks() == [7, 8, 9, 4, 3, 2] and findable(m) == [0, 1, 2, 3, 5]
    assert (m.num_free, m.num_kept, m.num_used) == (6, 2, 4)

    # Time 6: request 1 is finished.
    m.free(one)
    assert m.free_blocks() == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    assert (m.num_free, m.num_kept, m.num_used) == (10, 5, 0)

    # Time 7: request 2 has 29 tokens, the first 12 are request 0's. Three hits leave the queue's middle.
    second = [*TEXT[:12], *range(17)]
    assert m.lookup(second) == [0, 1, 2]
    two = m.allocate(second)
    assert two.block_table == [0, 1, 2, 7, 8, 9, 4, 3] and two.num_cached_tokens == 12
    assert m.free_blocks() == [6, 5]
    assert m.evictions == 1 and findable(m) == [0, 1, 2, 5]  # block 3 was kept, block 4 never was full
    assert m.lookup(TEXT[:17]) == [0, 1, 2]
    assert (m.hits, m.queries) == (8 + 12, 15 + 14 + 29)
    m.check_invariants()


# --- what is found ------------------------------------------------------------------------


def test_the_last_token_is_always_left_to_compute():
    m = BlockManager(8, block_size=4)
    m.free(computed(m, TEXT[:8]))
    for length, hit in ((3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8)):
        assert len(m.lookup(TEXT[:length])) * 4 == hit
    seq = m.allocate(TEXT[:8])
    assert (seq.num_cached_tokens, seq.num_tokens, seq.token_ids) == (4, 4, TEXT[:4])
    assert len(seq.block_table) == 2


def test_claim_c56_370_and_371_blocks():
    """5,937 tokens: the last question changed leaves 370 blocks and 17 tokens; unchanged 371 and 1."""
    m = BlockManager(1000)
    prompt = list(range(5937))
    m.free(computed(m, prompt))
    assert len(m.lookup(prompt)) == 371 and 371 * 16 + 1 == 5937
    changed = [*prompt[:5925], *range(9000, 9012)]
    assert len(m.lookup(changed)) == 370 and 370 * 16 + 17 == 5937
    shared = [*prompt[:1800], *range(9000, 9100)]
    assert len(m.lookup(shared)) * 16 == 1792


def test_a_block_is_findable_when_it_is_computed_and_full_and_not_before():
    m = BlockManager(8, block_size=4)
    seq = m.allocate(TEXT[:8])
    assert m.lookup(TEXT[:9]) == []
    m.commit(seq, TEXT[:3])
    assert m.lookup(TEXT[:9]) == []
    m.commit(seq, TEXT[3:7])
    assert m.lookup(TEXT[:9]) == [0]
    m.commit(seq, TEXT[7:8])
    assert m.lookup(TEXT[:9]) == [0, 1]


def test_blocks_of_an_answer_are_found_too():
    m = BlockManager(8, block_size=2)
    seq = computed(m, TEXT[:3])
    for token in TEXT[3:6]:
        m.append_slots(seq)
        m.commit(seq, [token])
    assert len(m.lookup(TEXT[:7])) == 3


def test_a_changed_token_misses_from_its_block_on():
    m = BlockManager(8, block_size=4)
    m.free(computed(m, TEXT[:16]))
    for place, hit in ((0, 0), (3, 0), (4, 4), (11, 8), (12, 12), (15, 12)):
        ids = [*TEXT[:place], 7, *TEXT[place + 1 : 17]]
        assert len(m.lookup(ids)) * 4 == hit


def test_the_same_block_after_another_beginning_is_another_block():
    m = BlockManager(8, block_size=2)
    computed(m, [1, 1, 2, 2])
    assert m.lookup([3, 3, 2, 2, 0]) == [] and m.lookup([2, 2, 0]) == []


LABELS = [None, "1", b"1", 1, "", b"", 0, "\ud800"]  # the last: no valid Unicode, a str all the same


@pytest.mark.parametrize("a, b", list(itertools.permutations(LABELS, 2)))
def test_another_salt_or_adapter_never_hits(a, b):
    m = BlockManager(8, block_size=2)
    computed(m, TEXT[:4], salt=a)
    computed(m, TEXT[4:8], adapter=a)
    assert len(m.lookup(TEXT[:5], salt=a)) == 2 and m.lookup(TEXT[:5], salt=b) == []
    assert len(m.lookup(TEXT[4:9], adapter=a)) == 2 and m.lookup(TEXT[4:9], adapter=b) == []
    assert a is None or m.lookup(TEXT[:5], adapter=a) == m.lookup(TEXT[4:9], salt=a) == []


def test_a_token_that_nobody_named_is_never_found_nor_what_follows():
    m = BlockManager(8, block_size=2)
    seq = m.allocate()
    m.append_slots(seq, 6)
    m.commit(seq, [1, 2, None, 3, 4, 5])
    assert findable(m) == seq.block_table[:1] and seq.token_ids == [1, 2, None, 3, 4, 5]


def test_without_prefix_caching_nothing_is_found():
    m = BlockManager(4, block_size=2, prefix_caching=False)
    m.free(computed(m, TEXT[:4]))
    assert m.lookup(TEXT[:4]) == findable(m) == [] and m.num_kept == 0
    assert m.allocate(TEXT[:4]).num_cached_tokens == 0 and m.hits == 0


def test_equal_content_is_held_once():
    """Two requests compute the same prompt at the same time: the second one's blocks are given back."""
    m = BlockManager(8, block_size=2)
    one, two = m.allocate(TEXT[:5]), m.allocate(TEXT[:5])
    assert (one.block_table, two.block_table) == ([0, 1, 2], [3, 4, 5])
    m.commit(one, TEXT[:5])
    m.commit(two, TEXT[:5])
    assert two.block_table == [0, 1, 5] and m.free_blocks() == [6, 7, 3, 4]
    assert m.ref_count(0) == m.ref_count(1) == 2 and findable(m) == [0, 1]
    m.check_invariants()


def test_two_blocks_with_one_name_are_a_miss():
    m = BlockManager(8, block_size=2, hasher=lambda parent, tokens, salt, adapter: "always the same")
    one = computed(m, [1, 1])
    two = computed(m, [2, 2])
    assert m.lookup([1, 1, 0]) == [0] and m.lookup([2, 2, 0]) == []
    assert findable(m) == [0] and two.block_table == [1]
    m.free(one)
    m.free(two)
    m.check_invariants()


def test_a_name_of_ones_own_is_the_hasher_s():
    seen = []

    def hasher(parent, tokens, salt, adapter):
        seen.append((parent, tokens, salt, adapter))
        return block_hash(parent, tokens, salt, adapter)

    m = BlockManager(8, block_size=2, hasher=hasher)
    computed(m, [1, 2, 3, 4], salt="s", adapter="a")
    name = block_hash(None, (1, 2), "s", "a")
    assert seen[-2:] == [(None, (1, 2), "s", "a"), (name, (3, 4), None, "a")]


def test_a_parent_is_a_name():
    with pytest.raises(TypeError, match="parent is 'x': give the bytes that block_hash"):
        block_hash("x", [1, 2])


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("name, error", [(None, TypeError), ([], TypeError), (ZeroDivisionError(), None)])
def test_a_hasher_that_fails_changes_nothing(failing, name, error):
    """In the first or the second of two blocks; afterwards the same call goes through."""
    answers = iter([*range(failing - 1), name])

    def hasher(*fields):
        answer = next(answers, fields)
        if isinstance(answer, Exception):
            raise answer
        return answer

    m = BlockManager(8, block_size=2, hasher=hasher)
    seq = m.allocate()
    m.append_slots(seq, 5)
    m.commit(seq, TEXT[:1])
    before = snapshot(m)
    with pytest.raises(error or ZeroDivisionError) as caught:
        m.commit(seq, TEXT[1:5])
    assert error is None or f"the hasher gave {name!r}: it must give a name" in str(caught.value)
    assert snapshot(m) == before
    m.commit(seq, TEXT[1:5])
    assert m.lookup(TEXT[:5]) == [0, 1]
    m.check_invariants()


def test_a_name_that_is_none_is_refused_when_a_prompt_comes():
    m = BlockManager(8, block_size=2, hasher=lambda *fields: None)
    with pytest.raises(TypeError, match="the hasher gave None"):
        m.allocate(TEXT[:5])
    assert m.num_used == m.queries == 0


# --- forks and copies ------------------------------------------------------------------------


def test_a_fork_costs_nothing_until_somebody_writes():
    m = BlockManager(8, block_size=4)
    parent = computed(m, TEXT[:6])
    child = m.fork(parent)
    assert child.block_table == [0, 1] and child.token_ids == TEXT[:6] and m.num_free == 6
    assert m.ref_count(1) == 2
    assert m.append_slots(child) == [(1, 2)]  # the child gets a copy of the half-filled block
    assert (parent.block_table, child.block_table) == ([0, 1], [0, 2]) and m.ref_count(1) == 1
    assert m.append_slots(parent) == []  # which the parent has for itself now
    m.commit(child, [1])
    m.commit(parent, [2])
    assert (parent.token_ids[6:], child.token_ids[6:]) == ([2], [1])
    m.check_invariants()


def test_a_fork_at_a_block_end_needs_no_copy():
    m = BlockManager(8, block_size=4)
    parent = computed(m, TEXT[:4])
    child = m.fork(parent)
    assert m.append_slots(child) == m.append_slots(parent) == []
    assert (parent.block_table, child.block_table) == ([0, 2], [0, 1])


def test_a_fork_takes_no_room_that_is_not_committed():
    m = BlockManager(8, block_size=4)
    parent = m.allocate(TEXT[:9])
    m.commit(parent, TEXT[:2])
    child = m.fork(parent)
    assert (parent.block_table, child.block_table) == ([0, 1, 2], [0])
    with pytest.raises(ValueError, match="block 0 is shared: call append_slots"):
        m.commit(parent, TEXT[2:4])
    assert m.append_slots(parent, 7) == [(0, 3)] and parent.block_table == [3, 1, 2]


def test_a_findable_block_is_copied_before_it_is_written_again():
    m = BlockManager(8, block_size=4)
    seq = computed(m, TEXT[:8])
    m.truncate(seq, 6)
    assert seq.block_table == [0, 1] and m.lookup(TEXT[:9]) == [0, 1]
    with pytest.raises(ValueError, match="block 1 is shared"):
        m.commit(seq, [1])
    assert m.append_slots(seq) == [(1, 2)] and seq.block_table == [0, 2]
    m.commit(seq, [1, 1])
    assert m.lookup(TEXT[:9]) == [0, 1] and m.lookup([*TEXT[:6], 1, 1, 0]) == [0, 2]
    assert m.free_blocks() == [3, 4, 5, 6, 7, 1]


def test_the_last_free_block_is_the_findable_one_itself():
    """Nothing else is free: the block is emptied and written where it is, and nothing is copied."""
    m = BlockManager(2, block_size=4)
    seq = computed(m, TEXT[:8])
    m.truncate(seq, 6)
    assert m.append_slots(seq) == [] and seq.block_table == [0, 1]
    assert m.lookup(TEXT[:9]) == [0] and m.evictions == 1
    m.commit(seq, [1, 1])
    assert m.lookup([*TEXT[:6], 1, 1, 0]) == [0, 1]
    m.check_invariants()


def test_copied_from_a_block_that_is_taken_in_the_same_call():
    """The copy comes first, then the source's memory is the sequence's own next block."""
    m = BlockManager(3, block_size=2)
    seq = computed(m, TEXT[:4])
    m.truncate(seq, 3)
    assert m.append_slots(seq, 3) == [(1, 2)] and seq.block_table == [0, 2, 1]
    m.check_invariants()


def test_a_conversation_goes_on_in_its_own_block():
    m = BlockManager(8, block_size=4)
    seq = computed(m, TEXT[:6])
    assert m.append_slots(seq, 7) == [] and seq.block_table == [0, 1, 2, 3]
    assert m.append_slots(seq, 3) == [] and len(seq.block_table) == 4


# --- going back, and giving back ---------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, table, free", [(9, [0, 1, 2], []), (8, [0, 1], [2]), (5, [0, 1], [2]), (0, [], [2, 1, 0])]
)
def test_truncate(tokens, table, free):
    m = BlockManager(4, block_size=4)
    seq = computed(m, TEXT[:9])
    m.truncate(seq, tokens)
    assert seq.block_table == table and seq.token_ids == TEXT[:tokens] and m.free_blocks() == [3, *free]
    m.check_invariants()


def test_truncate_gives_unused_room_back():
    m = BlockManager(4, block_size=4)
    seq = computed(m, TEXT[:4])
    m.append_slots(seq, 9)
    assert m.num_free == 0
    m.truncate(seq, 4)
    assert seq.block_table == [0] and m.free_blocks() == [3, 2, 1]


@pytest.mark.parametrize("act", ["truncate", "commit"])
def test_an_interrupt_loses_a_block_and_never_leaves_it_in_a_table(act, monkeypatch):
    """Stopped while a block is given back: no table may name a block that somebody else will write."""
    m = BlockManager(4, block_size=2)
    computed(m, TEXT[:2])
    seq = m.allocate(TEXT[:2])

    def interrupted(block, append=m._queue.append):
        append(block)
        raise KeyboardInterrupt

    monkeypatch.setattr(m._queue, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        m.truncate(seq, 0) if act == "truncate" else m.commit(seq, TEXT[:2])
    assert not set(seq.block_table) & set(m.free_blocks())


def test_a_chain_loses_its_tail_first_and_the_longest_unused_goes_first():
    m = BlockManager(4, block_size=2)
    old, new = computed(m, [1, 1, 2, 2]), computed(m, [3, 3, 4, 4])
    m.free(old)
    m.free(new)
    lost = []
    for _ in range(4):
        m.allocate([9])
        lost.append([len(m.lookup(ids)) for ids in ([1, 1, 2, 2, 0], [3, 3, 4, 4, 0])])
    assert lost == [[1, 2], [0, 2], [0, 1], [0, 0]] and m.evictions == 4


def test_a_hit_makes_a_block_new_again():
    m = BlockManager(3, block_size=2)
    for ids in ([1, 1], [2, 2]):
        m.free(computed(m, ids))
    assert m.free_blocks() == [2, 0, 1]
    m.free(m.allocate([1, 1, 5]))
    assert m.free_blocks() == [1, 2, 0]


@pytest.mark.parametrize("tokens", range(1, 34))
def test_claim_c53_only_the_last_block_has_room_to_spare(tokens):
    m = BlockManager(8, block_size=16)
    seq = computed(m, list(range(tokens)))
    assert 0 <= len(seq.block_table) * 16 - tokens <= 15
    m.append_slots(seq)
    m.commit(seq, [1])
    assert 0 <= len(seq.block_table) * 16 - (tokens + 1) <= 15


def test_slot_mapping_follows_the_table():
    m = BlockManager(8, block_size=4)
    other = m.allocate(TEXT[:4])
    seq = m.allocate(TEXT[10:13])
    third = m.allocate(TEXT[20:24])
    m.append_slots(seq, 7)
    assert (other.block_table, third.block_table, seq.block_table) == ([0], [2], [1, 3])
    assert m.slot_mapping(seq, 0, 7) == [4, 5, 6, 7, 12, 13, 14]
    assert m.slot_mapping(seq, 3, 5) == [7, 12] and m.slot_mapping(seq, 8, 8) == []


def test_ids_may_come_as_an_array():
    m = BlockManager(4, block_size=2)
    seq = m.allocate(np.array([1, 2, 3]))
    m.commit(seq, np.array([1, 2, 3]))
    assert seq.token_ids == [1, 2, 3] and type(seq.token_ids[0]) is int
    assert m.lookup((1, 2, 9)) == [0]


def test_an_empty_prompt_takes_no_block():
    m = BlockManager(1)
    seq = m.allocate()
    assert (seq.block_table, seq.num_tokens, m.num_free) == ([], 0, 1)
    m.append_slots(seq)
    assert seq.block_table == [0]


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((0,), ValueError, "num_blocks is 0: give at least 1"),
        ((2.0,), TypeError, "num_blocks is 2.0: give a whole number"),
        ((True,), TypeError, "num_blocks is True"),
        ((4, 0), ValueError, "block_size is 0: give at least 1"),
        ((4, "16"), TypeError, "block_size is '16': give a whole number"),
        ((4, 16, True, 3), TypeError, "hasher is 3: give a function"),
    ],
)
def test_a_pool_of_no_size_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        BlockManager(*arguments)


@pytest.fixture
def full():
    """Five blocks of 4: `seq` holds three (10 tokens), `other` two (one findable, shared with a fork)."""
    m = BlockManager(5, block_size=4)
    m.seq, m.other = computed(m, TEXT[:10]), computed(m, TEXT[50:56])
    m.child = m.fork(m.other)
    return m


@pytest.mark.parametrize(
    "act, error, words",
    [
        (lambda m: m.allocate([1]), OutOfBlocks, "1 block of 4 tokens needed, 0 of 5 are free: free()"),
        (lambda m: m.allocate(TEXT[:9]), OutOfBlocks, "1 block of 4 tokens needed, 0 of 5 are free"),
        (lambda m: m.append_slots(m.seq, 3), OutOfBlocks, "1 block of 4 tokens needed, 0 of 5 are free"),
        (lambda m: m.append_slots(m.seq, 4000), OutOfBlocks, "1,000 blocks of 4 tokens needed, 0 of 5"),
        (lambda m: m.append_slots(m.child), OutOfBlocks, "1 block of 4 tokens needed, 0 of 5 are free"),
        (lambda m: m.append_slots(m.seq, 0), ValueError, "n is 0: give at least 1"),
        (lambda m: m.append_slots(m.seq, 1.5), TypeError, "n is 1.5: give a whole number"),
        (lambda m: m.commit(m.seq, [1, 2, 3]), ValueError, "3 tokens committed, 2 have slots: call append"),
        (lambda m: m.commit(m.child, [1]), ValueError, "block 4 is shared: call append_slots"),
        (lambda m: m.commit(m.seq, [1, -2]), ValueError, "token id -2 is outside 0 … 4,294,967,295"),
        (lambda m: m.commit(m.seq, [2**32]), ValueError, "token id 4,294,967,296 is outside"),
        (lambda m: m.commit(m.seq, [1.5]), TypeError, "token id 1.5 is not a whole number"),
        (lambda m: m.commit(m.seq, "It"), TypeError, "token ids are 'It'"),
        (lambda m: m.allocate("It"), TypeError, "token ids are 'It': give the ids that"),
        (lambda m: m.allocate([[1, 2]]), TypeError, "is not a whole number: give a flat list"),
        (lambda m: m.allocate([1, None]), TypeError, "token id None is not a whole number"),
        (lambda m: m.allocate([True]), TypeError, "token id True is not a whole number"),
        (lambda m: m.allocate([1], salt=1.5), TypeError, "salt is 1.5: give a str, bytes or int"),
        (lambda m: m.allocate([1], adapter=True), TypeError, "adapter is True: give a str, bytes or int"),
        (lambda m: m.lookup([1], salt=["s"]), TypeError, "salt is .*: give a str, bytes or int"),
        (lambda m: m.truncate(m.seq, 11), ValueError, "cannot go to 11 tokens: the sequence holds 10"),
        (lambda m: m.truncate(m.seq, -1), ValueError, "num_tokens is -1: give at least 0"),
        (lambda m: m.slot_mapping(m.seq, 3, 13), ValueError, "no slots for tokens 3 … 13: .* 0 … 12"),
        (lambda m: m.slot_mapping(m.seq, -1, 2), ValueError, "start is -1: give at least 0"),
        (lambda m: m.slot_mapping(m.seq, 0, 1.5), TypeError, "stop is 1.5: give a whole number"),
        (lambda m: m.slot_mapping(m.seq, "a", 3), TypeError, "start is 'a': give a whole number"),
        (lambda m: m.slot_mapping(m.seq, 5, 4), ValueError, "no slots for tokens 5 … 4"),
        (lambda m: m.free(BlockManager(1).allocate()), ValueError, "belongs to another manager"),
        (lambda m: m.free([1]), TypeError, r"seq is \[1\]: give what allocate\(\)"),
        (lambda m: m.allocate(5), TypeError, "token ids are 5: give a flat list"),
        (lambda m: m.allocate(np.array(5)), TypeError, r"token ids are array\(5\): give a flat list"),
        (lambda m: m.allocate(None), TypeError, "token ids are None: give a flat list"),
        (lambda m: m.lookup({3}), TypeError, r"token ids are \{3\}: give a flat list"),
        (lambda m: m.lookup({1: 2}), TypeError, r"token ids are \{1: 2\}: give a flat list"),
        (lambda m: m.lookup(bytearray(b"a")), TypeError, "token ids are bytearray"),
        (lambda m: m.ref_count(-1), ValueError, "block is -1: give at least 0"),
        (lambda m: m.is_findable(5), ValueError, "block is 5: the pool has 0 … 4"),
        (lambda m: m.ref_count("a"), TypeError, "block is 'a': give a whole number"),
    ],
)
def test_errors_are_one_line_and_change_nothing(full, act, error, words):
    before = snapshot(full)
    with pytest.raises(error, match=words) as caught:
        act(full)
    assert "\n" not in str(caught.value)
    assert snapshot(full) == before
    full.check_invariants()


@pytest.mark.parametrize(
    "act",
    [
        lambda m, seq: m.free(seq),
        lambda m, seq: m.append_slots(seq),
        lambda m, seq: m.commit(seq, []),
        lambda m, seq: m.truncate(seq, 0),
        lambda m, seq: m.fork(seq),
        lambda m, seq: m.slot_mapping(seq, 0, 0),
    ],
)
def test_a_freed_sequence_is_refused(full, act):
    full.free(full.seq)
    before = snapshot(full)
    with pytest.raises(ValueError, match="this sequence was freed"):
        act(full, full.seq)
    assert snapshot(full) == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: setattr(m._blocks[0], "ref_count", 2),
        lambda m: m.seq.block_table.append(0),
        lambda m: m.seq.block_table.pop(),
        lambda m: m._queue.append(m._blocks[0]),
        lambda m: m._shared.popitem(),
        lambda m: setattr(m._blocks[0], "key", "another"),
        lambda m: setattr(m._blocks[0], "content", None),
        lambda m: m.seq.keys.append("a name"),
        lambda m: m.seq.token_ids.extend([1, 2, 3]),
        lambda m: m._sequences.clear(),
    ],
)
def test_check_invariants_sees_damage(full, damage):
    full.check_invariants()
    damage(full)
    with pytest.raises(AssertionError):
        full.check_invariants()


# --- the free queue ------------------------------------------------------------------------------


def test_the_free_queue_gives_from_the_front_and_lets_anybody_leave():
    blocks = [Block(number) for number in range(5)]
    queue = FreeQueue(blocks)
    for leaves in (blocks[2], blocks[0], blocks[4]):
        queue.remove(leaves)
    assert [block.id for block in queue] == [1, 3] and len(queue) == 2
    queue.append(blocks[0])
    assert [queue.popleft().id for _ in range(3)] == [1, 3, 0] and len(queue) == 0
    with pytest.raises(IndexError, match="the free queue is empty"):
        queue.popleft()
    with pytest.raises(ValueError, match="block 2 is not in the free queue"):
        queue.remove(blocks[2])
    assert list(queue) == []
