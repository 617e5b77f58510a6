"""Replays of block ids: by hand, against a slow replay that looks at every block, and on the real trace."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourse.paging import replay, traces
from kvcourse.paging.replay import POLICIES
from kvcourse.paging.traces import Request

TRACE = "mooncake-conversation"


def hits(requests, capacity, policy):
    """Hits of each request. Digits are ids: "12 3" is a request for 1 and 2, then one for 3."""
    return replay([[int(digit) for digit in word] for word in requests.split()], capacity, policy).by_request


def test_lru_by_hand():
    """4 takes the place of 3, the tail of its chain; 3 comes back for 4; 5 takes the place of 3."""
    found = replay([[1, 2, 3], [4], [1, 2, 3], [1, 2, 5]], 3)
    assert found.by_request == [0, 0, 2, 2]
    assert (found.accesses, found.hits, found.evictions, found.hit_rate) == (10, 4, 3, 0.4)
    assert hits("1 2 1 3 1 2", 2, "lru") == [0, 0, 1, 0, 1, 0]  # a hit makes 1 newer than 2


def test_lfu_by_hand():
    # 1 has two uses. Of 2 and 3 with one each, 2 was used longest ago and goes.
    assert hits("1 1 2 3 1 3", 2, "lfu") == [0, 1, 0, 0, 1, 1]
    assert hits("1 1 2 3 1 2", 2, "lfu") == [0, 1, 0, 0, 1, 0]
    # Uses count from when a block came in: 2 and 3 push each other out, never 1, however often they come.
    assert hits("1 1 2 3 2 3 1", 2, "lfu") == [0, 1, 0, 0, 0, 0, 1]
    # LRU would evict 1 for 3.
    assert hits("1 1 2 3 1", 2, "lru") == [0, 1, 0, 0, 0]


def test_length_by_hand():
    # All stand first in their requests: of equal places, the one used longest ago goes, here 2.
    assert hits("1 2 1 3 1 2", 2, "length") == [0, 0, 1, 0, 1, 0]
    # 3 stands second, so it goes for 4, although 1 was used longer ago; LRU evicts 1.
    assert hits("1 23 4 1 23", 3, "length") == [0, 0, 0, 1, 1]
    assert hits("1 23 4 1 23", 3, "lru") == [0, 0, 0, 0, 1]
    # Of 2 and 4, both second, the older one goes. Then 5, third, before everything.
    assert hits("12 34 12", 3, "length") == [0, 0, 1]
    assert hits("12 34 34", 3, "length") == [0, 0, 2]
    assert hits("12 345 12", 4, "length") == [0, 0, 2]
    # 2 moves from second to first place, so it and 1 are equals, and 1 is older.
    assert hits("12 2 3 2", 2, "length") == [0, 1, 0, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_hits_are_a_leading_run(policy):
    assert hits("123 123", None, policy) == [0, 3]
    assert hits("123 923 183", None, policy) == [0, 0, 1]  # 9 and 8 are new; what follows does not count
    assert hits("123 23", None, policy) == [0, 2]  # an id stands for what is before it, too


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_longer_than_the_cache_leaves_its_front(policy):
    found = replay([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], 2, policy)
    assert (found.by_request, found.evictions) == ([0, 2], 6)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_id_twice_in_a_request(policy):
    """It asks twice and takes one block; a request does not find what it brings itself."""
    found = replay([[7, 7], [7], [7, 7]], 1, policy)
    assert (found.by_request, found.accesses, found.evictions) == ([0, 1, 2], 5, 0)
    assert replay([[7, 7, 8, 7]], 1, policy).evictions == 1
    # Each is a use: 1 has two, so LFU evicts 2 for 3, the others 1, which is the older one.
    assert hits("11 2 3 1", 2, policy) == [0, 0, 0, policy == "lfu"]


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_of_a_trace_are_their_hash_ids(policy):
    ids = [(1, 2, 3), (1, 4), (), (1, 2, 3)]
    requests = [Request(time, 512 * len(names), 9, names) for time, names in enumerate(ids)]
    assert replay(requests, 3, policy) == replay(ids, 3, policy)
    assert replay(iter(requests), 3, policy).by_request == [0, 1, 0, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_trace(policy):
    found = replay([], 4, policy)
    assert (found.accesses, found.hits, found.evictions, found.by_request) == (0, 0, 0, [])
    assert found.hit_rate == 0.0 and replay([[]], 4, policy).hit_rate == 0.0


def test_refused():
    with pytest.raises(ValueError, match="policy is 'fifo': choose one of lru, lfu, length"):
        replay([[1]], 4, "fifo")
    for capacity in (0, -1):
        with pytest.raises(ValueError, match=f"capacity_blocks is {capacity}"):
            replay([[1]], capacity)
    with pytest.raises(TypeError, match="capacity_blocks is 1.5"):
        replay([[1]], 1.5)


def slow_replay(requests, capacity, policy):
    """Each eviction looks at every block: its uses since it came in are kept as (time, place) pairs."""
    worst_first = {
        "lru": lambda uses: uses[-1][0],
        "lfu": lambda uses: (len(uses), uses[-1][0]),
        "length": lambda uses: (-uses[-1][1], uses[-1][0]),
    }[policy]
    held, found, evictions, time = {}, [], 0, 0
    for ids in requests:
        run = 0
        while run < len(ids) and ids[run] in held:
            run += 1
        found.append(run)
        for place, block in reversed(list(enumerate(ids))):
            time += 1
            held.setdefault(block, []).append((time, place))
        while len(held) > capacity:
            del held[min(held, key=lambda block: worst_first(held[block]))]
            evictions += 1
    return found, evictions


@settings(deadline=None, max_examples=150)
@given(
    requests=st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=25),
    capacity=st.integers(1, 8),
    policy=st.sampled_from(POLICIES),
)
def test_the_slow_replay_finds_the_same(requests, capacity, policy):
    found = replay(requests, capacity, policy)
    assert (found.by_request, found.evictions) == slow_replay(requests, capacity, policy)
    assert found.hits == sum(found.by_request) and found.accesses == sum(map(len, requests))


def test_the_golden_figures():
    """Counted beforehand by other code. The other policies' counts: test_bench_paging, from the record."""
    if traces.find(TRACE) is None:
        pytest.skip(f"the trace {TRACE} is not here: fetch it, or let KVCOURSE_TRACES name its folder")
    requests = traces.load(TRACE)
    for capacity, expected in ((None, 105_710), (10_000, 61_046), (1000, 12_847)):
        found = replay(requests, capacity)
        assert (found.hits, found.accesses, len(found.by_request)) == (expected, 288_500, 12_031)
