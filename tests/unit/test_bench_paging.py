"""`kvcourse bench paging`: a small run by hand, its peer, and the recorded run computed again."""

import argparse
import itertools
import json
import random

import numpy as np
import pytest

from kvcourse import cli, measure
from kvcourse.bench import paging
from kvcourse.paging import traces
from kvcourse.paging.allocation import POLICIES
from kvcourse.paging.arrivals import KINDS, simulate_arrivals
from kvcourse.paging.traces import Request

SMALL = paging.Sizes(
    lognormal=40, at_once=10, capacities=(None, 3), managed=(5,), prompt_blocks=4, hashed_tokens=64,
    repeats=1, curve_every=100, decode_tokens=40,
    decode_repeats=1, decode_shape=(("num_layers", 1), ("vocab_size", 64)),
)  # fmt: skip
SHARED = [Request(0.0, 900, 5, (1, 2, 3)), Request(1.0, 900, 5, (1, 2, 4)), Request(2.0, 900, 5, (1, 2, 3))]
LENGTHS = [Request(0.3 * i, 100 + 7 * i, 5 + i) for i in range(30)]


@pytest.fixture(scope="module", autouse=True)
def once():
    """No second attempts and no waiting: these tests look at what is kept, not at how long it takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paging, "ATTEMPTS", 1)
        yield


@pytest.fixture(scope="module")
def small():
    requests = {"mooncake-conversation": SHARED, "azure-conv": LENGTHS}
    bench = paging.Bench(requests, SMALL)
    for name, section in paging.SECTIONS.items():
        bench.results[name] = section(bench)
    return bench


def test_a_small_run_by_hand(small):
    found = small.results["replay"]["mooncake-conversation"]
    assert (found["requests"], found["references"], found["names"]) == (3, 9, 4)
    # No limit: 0, then 1 2, then 1 2 3. Of 3 blocks, LRU: after each request exactly its own are there.
    # Quarters of three requests: none, then one in each.
    assert found["runs"]["lru"] == [
        {"capacity": None, "hits": 5, "evictions": 0, "quarters": [0, 0, 2, 3]},
        {"capacity": 3, "hits": 4, "evictions": 2, "quarters": [0, 0, 2, 2]},
    ]
    assert (found["once"], found["beginnings"], found["quarters"]) == (1, 1, [0, 3, 3, 3])
    # With foresight 4, which nobody asks for again, makes room, and 3 is there when it is asked for.
    assert found["foresight"] == [{"capacity": None, "hits": 5}, {"capacity": 3, "hits": 5}]
    assert found["head_first"] == [{"capacity": None, "hits": 5}, {"capacity": 3, "hits": 4}]
    assert list(small.results["replay"]) == ["mooncake-conversation"]  # the other one names no blocks
    calls = small.results["timing"]["calls"]
    # The manager computes the last block each time: 0, 2, 2.
    assert calls["5 blocks, the block manager"]["hits"] == 4
    assert calls["5 blocks, the same rules with an OrderedDict"]["hits"] == 4
    assert calls["block_hashes of 64 tokens"]["blocks"] == 4
    assert all(t["seconds"] > 0 and isinstance(t["why"], str) for t in calls.values())
    decode = small.results["decode"]
    assert (decode["layers"], decode["tokens"], list(decode["calls"])) == (1, 40, ["contiguous", "paged"])
    assert decode["difference"] < 2e-4  # float32 sums in another order
    assert paging.decode_ratio({"calls": {"paged": {"seconds": 3}, "contiguous": {"seconds": 2}}}) == 1.5
    workload = small.results["allocation"]["azure-conv"]
    assert (workload["requests"], workload["prompt_tokens"]) == (30, sum(100 + 7 * i for i in range(30)))
    assert list(workload["policies"]) == list(POLICIES)
    assert list(small.results["allocation"]) == ["log-normal", "azure-conv"]


def test_a_summary_and_a_curve_are_those_of_the_run():
    run = simulate_arrivals([0, 0, 1], [3, 1, 2], [2, 3, 1], "reserve_answer", 12, 8, 3, sample_every=1)
    found = paging.summary(run)
    # Somebody waits in steps 1 and 2, of 6 samples; then 6 and 8 of 12 slots hold a token (test_allocation).
    assert (found["crowded"], found["running"], found["mean_wait"]) == (0.3333, 2, 0.7)
    assert found["shares"]["held"] == round(14 / 24, 4) and found["shares"]["gap"] == round(4 / 24, 4)
    assert list(found["shares"]) == list(KINDS)
    curve = paging.curve(run, 2)
    assert curve["steps"] == [0, 2, 4, 5] and curve["held"] == [4, 8, 3, 0]


def test_foresight_by_trying_every_choice():
    """On short traces: the most that any choice of blocks to keep after each request can find."""

    def most(requests, capacity, held=frozenset()):
        if not requests:
            return 0
        hits = next((i for i, name in enumerate(requests[0]) if name not in held), len(requests[0]))
        there = held | set(requests[0])
        choices = itertools.combinations(there, min(capacity, len(there)))
        return hits + max(most(requests[1:], capacity, frozenset(kept)) for kept in choices)

    for seed in range(20):
        draw = random.Random(seed)
        # A name stands for its block and all before it: the paths of a tree with two branches a node.
        requests = [[f"{path:03b}"[:length] for length in range(1, draw.randrange(2, 5))]
                    for path in (draw.randrange(8) for _ in range(5))]  # fmt: skip
        for capacity in (1, 2, 4):
            assert paging.foresight(requests, capacity) == most(requests, capacity)


def test_head_first_loses_a_chain_by_its_head():
    requests = [(1, 2, 3), (9,), (1, 2, 3)]
    assert paging.head_first(requests, 3) == 0  # 9 took the place of 1
    assert paging.replay(requests, 3).hits == 2  # tail first: of 3


def test_the_peer_finds_what_the_manager_finds():
    """Conversations that grow, are interrupted by others, and share a system prompt of 0 to 3 blocks."""
    for seed in range(40):
        draw = random.Random(seed)
        next_name, talks, requests = 10, [], []
        for _ in range(60):
            if not talks or draw.random() < 0.3:
                talks.append(list(range(draw.randrange(4))))
            talk = draw.choice(talks)
            new = draw.randrange(1, 4) if len(talk) < 12 else 0
            talk += range(next_name, next_name + new)
            next_name += new
            requests.append(list(talk))
        for capacity in (16, 25, 60, 1000):
            found = paging.through_manager(requests, capacity)
            assert paging.through_dict(requests, capacity) == found
        assert found > 0


def test_a_run_is_kept_read_again_and_names_no_folder(small, tmp_path):
    run = small.recorded_run()
    path = tmp_path / "paging.json"
    paging._write(path, run)
    read = measure.read_recorded(path)
    assert read.kind == "paging" and str(tmp_path) not in path.read_text()
    assert read.results == json.loads(json.dumps(run["results"]))
    text = paging.table(run)
    assert "mooncake-conversation: 9 references" in text and "no limit: 5  3: 4" in text
    calls = run["results"]["timing"]["calls"]
    for name, timed in calls.items():  # whatever disturbed this run itself
        timed["why"] = "other programs" if name == "block_hashes of 64 tokens" else ""
    assert "at block_hashes of 64 tokens other programs" in paging.table(run)


def arguments(**given):
    return argparse.Namespace(**({"traces": None, "only": None, "out": None} | given))


def test_without_the_traces_the_rest_is_measured_and_nothing_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paging.Bench.__init__, "__defaults__", (SMALL,))
    paging.main(arguments(traces=str(tmp_path)))
    printed = capsys.readouterr().out
    assert "Left out, not on this machine: azure-conv, azure-code, mooncake-conversation" in printed
    assert "log-normal: 40 requests" in printed and "Not kept." in printed
    with pytest.raises(
        cli.CommandError, match="--out: azure-conv, .* not found: name their folder with --traces"
    ):
        paging.main(arguments(traces=str(tmp_path), out=str(tmp_path / "run.json")))
    assert list(tmp_path.iterdir()) == []


def test_one_section_can_be_measured_anew(small, tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.json"
    paging._write(path, small.recorded_run())
    before = json.loads(path.read_text())["results"]
    monkeypatch.setattr(paging.Bench.__init__, "__defaults__", (SMALL,))
    monkeypatch.setattr(traces, "find", lambda name, folder=None: tmp_path)
    monkeypatch.setattr(traces, "load", lambda name, folder=None: SHARED if "moon" in name else LENGTHS)
    paging.main(arguments(only=["timing"], out=str(path)))
    after = json.loads(path.read_text())["results"]
    assert {k: v for k, v in after.items() if k != "timing"} == {
        k: v for k, v in before.items() if k != "timing"
    }
    assert after["timing"] != before["timing"]
    with pytest.raises(
        cli.CommandError, match="--only goes on from other.json, but .*: run it without --only"
    ):
        paging.main(arguments(only=["timing"], out=str(tmp_path / "other.json")))
    capsys.readouterr()


# --- the recorded run -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    runs = measure.recorded_runs(paging.KIND)
    assert runs, "data/measurements holds no run of kvcourse bench paging"
    return runs[-1].results


def bench_on(*names):
    for name in names:
        if traces.find(name) is None:
            pytest.skip(f"the trace {name} is not here")
    return paging.Bench({name: traces.load(name) for name in names})


def test_the_recorded_run_has_the_golden_figures(recorded):
    """Of 288,500 references of Mooncake's conversation trace, counted beforehand and not with this code."""
    lru = {r["capacity"]: r["hits"] for r in recorded["replay"]["mooncake-conversation"]["runs"]["lru"]}
    assert (lru[None], lru[10_000], lru[1000]) == (105_710, 61_046, 12_847)
    for found in recorded["replay"].values():
        rows = found["runs"] | {"foresight": found["foresight"], "head_first": found["head_first"]}
        for name, runs in rows.items():
            assert [r["capacity"] for r in runs] == [None, 1000, 3000, 10_000, 30_000, 50_000], name
        for runs in found["runs"].values():
            assert all(sum(r["quarters"]) == r["hits"] for r in runs)
        assert sum(found["quarters"]) == found["references"]


def test_the_recorded_manager_and_its_peer_found_the_same(recorded):
    calls = recorded["timing"]["calls"]
    for capacity in paging.Sizes().managed:
        manager = calls[f"{capacity:,} blocks, the block manager"]
        peer = calls[f"{capacity:,} blocks, the same rules with an OrderedDict"]
        assert manager["hits"] == peer["hits"] > 0
        assert manager["blocks"] == 288_500


@pytest.mark.parametrize(
    "trace, policy, capacities",
    [
        ("mooncake-conversation", "lru", (None, 1000, 3000, 10_000, 30_000, 50_000)),
        ("mooncake-conversation", "lfu", (10_000,)),  # a fraction: every one takes a second
        ("mooncake-conversation", "length", (10_000,)),
        ("mooncake-synthetic", "lru", (3000,)),
        ("mooncake-synthetic", "lfu", (3000,)),
    ],
)
def test_recorded_replays_can_be_computed_again(recorded, trace, policy, capacities):
    ids = [request.hash_ids for request in bench_on(trace).traces[trace]]
    stored = {run["capacity"]: run for run in recorded["replay"][trace]["runs"][policy]}
    for capacity in capacities:
        assert paging.Bench({})._replayed(ids, capacity, policy) == stored[capacity]


@pytest.mark.parametrize("trace", ["mooncake-conversation", "mooncake-synthetic"])
def test_recorded_foresight_and_head_first_can_be_computed_again(recorded, trace):
    ids, stored = [request.hash_ids for request in bench_on(trace).traces[trace]], recorded["replay"][trace]
    assert paging.described(ids) == {key: stored[key] for key in paging.described(ids)}
    for name, capacity in (("foresight", 3000), ("foresight", None), ("head_first", 3000)):
        found = {"capacity": capacity, "hits": getattr(paging, name)(ids, capacity)}
        assert found in stored[name]


def test_recorded_hits_of_the_manager_can_be_computed_again(recorded):
    requests = [list(r.hash_ids) for r in bench_on("mooncake-conversation").traces["mooncake-conversation"]]
    hits = paging.through_manager(requests, 10_000)
    assert hits == recorded["timing"]["calls"]["10,000 blocks, the block manager"]["hits"]


@pytest.mark.parametrize("workload", paging.WORKLOADS, ids=lambda w: w.name)
def test_recorded_allocations_can_be_computed_again(recorded, workload):
    bench = paging.Bench({}) if workload.name == "log-normal" else bench_on(workload.name)
    found = json.loads(json.dumps(bench._allocated(workload)))
    stored = recorded["allocation"][workload.name]
    assert found.keys() == stored.keys()
    for policy in POLICIES:
        assert found["policies"][policy].keys() == stored["policies"][policy].keys()
        for run in ("as_they_came", "all_at_once"):
            got, want = found["policies"][policy][run], stored["policies"][policy][run]
            # Logarithms and exponentials of the log-normal draws may round otherwise on other processors.
            assert got["throughput"] == pytest.approx(want["throughput"], rel=1e-2)
            assert got["running"] == pytest.approx(want["running"], rel=1e-2)
            assert got["shares"] == pytest.approx(want["shares"], abs=5e-3)
        if workload.name != "log-normal":
            assert found["policies"][policy] == stored["policies"][policy]
        for over in ("end", "life"):
            assert found["policies"][policy][over] == pytest.approx(
                stored["policies"][policy][over], abs=1e-3
            )


def test_recorded_slots_add_up_at_every_point_of_a_curve(recorded):
    for workload in recorded["allocation"].values():
        for policy in workload["policies"].values():
            curve = policy["as_they_came"]["curve"]
            total = np.sum(
                [curve[name] for name in ("held", "later", "never", "rounding", "gaps", "free")], axis=0
            )
            assert set(total.tolist()) == {workload["memory_slots"]}
