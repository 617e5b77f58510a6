"""Chapter 19: the page's code is the package's, the trace's counts, figures, panel, numbers, exercise."""

import importlib.util
import itertools
import json
import math
import random
import time
from collections import OrderedDict

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import checks, ops, paths
from kvcourse.figures import chapter_19 as figures
from kvcourse.paging import traces
from kvcourse.sizing import prices
from kvcourse.widgets import chapter_19 as widgets

NOTEBOOK = paths.chapters_dir() / "19_eviction_and_cost.ipynb"
NAME = "19.best_order"
TRACE = "mooncake-conversation"


class _Silent:
    """Stands for kvcourse in cells that also ask for a prediction."""

    paging = kv.paging

    def predict(self, *args, **kwargs):
        pass

    reveal = predict


@pytest.fixture(scope="module")
def page():
    """What the tagged cells of rounds 1 and 4 define, with the imports of the page."""
    names = {
        "kv": _Silent(), "math": math, "random": random, "itertools": itertools, "OrderedDict": OrderedDict,
        "figures": figures,
    }  # fmt: skip
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        tags = cell["metadata"].get("tags", [])
        if {"conversations", "plain-replay", "plain-foresight"} & {*tags}:
            exec("".join(cell["source"]), names)
    return names


def printed():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))


# --- the page's code ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_the_page_makes_the_packages_conversations(page, seed):
    assert page["conversations"](200, seed) == figures.conversations(200, seed)


@pytest.mark.parametrize("capacity", [1, 7, 60, 500, None])
def test_the_page_replays_as_the_package(page, capacity):
    work = figures.conversations(150, 3)
    expected = kv.paging.replay(work, capacity).hits
    assert page["replay"](work, math.inf if capacity is None else capacity) == expected


def test_replay_and_foresight_by_hand(page):
    trace = [[1, 2, 3], [4], [1, 2, 3], [1, 2, 5]]
    # LRU, three blocks: 4 takes the place of 3; the third request finds 1 and 2; the last one 1 and 2.
    assert page["replay"](trace, 3) == 4
    # Foresight: 4 is never asked for again and goes itself, so the third request finds all three.
    assert page["foresight"](trace, 3) == 5
    assert page["foresight"](trace, 10) == 5
    # One block: 1 is used next, so it is what is kept.
    assert page["foresight"](trace, 1) == 2


def test_no_policy_beats_foresight(page):
    work = figures.conversations(120, 5)
    for capacity in (5, 20, 80):
        best = page["foresight"](work, capacity)
        assert all(kv.paging.replay(work, capacity, policy).hits <= best for policy in figures.POLICIES)


# --- the trace -----------------------------------------------------------------------------------


def test_the_traces_counts_again(page):
    if traces.find(TRACE) is None:
        pytest.skip(f"the trace {TRACE} is not on this machine (KVCOURSE_TRACES)")
    requests = [list(request.hash_ids) for request in traces.load(TRACE)]
    quarter = len(requests) // 4
    cuts = [slice(i * quarter, (i + 1) * quarter if i < 3 else None) for i in range(4)]
    assert [sum(map(len, requests[cut])) for cut in cuts] == figures.TRACE_QUARTER_ACCESSES
    recorded = figures.recorded_hits(TRACE)
    assert recorded["accesses"] == sum(map(len, requests))
    for policy in figures.POLICIES:
        assert kv.paging.replay(requests, 1000, policy).hits == recorded[policy][1000]
        run = kv.paging.replay(requests, 10_000, policy)
        assert run.hits == recorded[policy][10_000] == sum(figures.TRACE_QUARTERS[policy])
        assert [sum(run.by_request[cut]) for cut in cuts] == figures.TRACE_QUARTERS[policy]
    assert len({ids[0] for ids in requests}) == 1
    assert figures.TRACE_FIRST_BLOCK == len(requests) - 1
    for capacity, hits in figures.TRACE_HEAD_FIRST.items():
        assert _head_first(requests, capacity) == hits
    counts = _counts(requests)
    assert len(counts) == recorded["names"]
    assert figures.TRACE_ONCE == sum(count == 1 for count in counts.values())


def test_foresight_on_the_trace(page):
    if traces.find(TRACE) is None:
        pytest.skip(f"the trace {TRACE} is not on this machine (KVCOURSE_TRACES)")
    requests = [list(request.hash_ids) for request in traces.load(TRACE)]
    # The page's function sorts all blocks at each request, so the smallest capacity only.
    assert page["foresight"](requests, 1000) == figures.TRACE_FORESIGHT[1000]


def _counts(requests):
    counts = {}
    for ids in requests:
        for block in ids:
            counts[block] = counts.get(block, 0) + 1
    return counts


def _head_first(trace, capacity):
    held, hits = OrderedDict(), 0
    for ids in trace:
        hits += next((i for i, block in enumerate(ids) if block not in held), len(ids))
        for block in ids:
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


def test_golden_figures_of_the_record():
    recorded = figures.recorded_hits(TRACE)
    assert recorded["accesses"] == 288_500
    assert [recorded["lru"][n] for n in (None, 10_000, 1_000)] == [105_710, 61_046, 12_847]
    assert set(recorded["foresight"]) == set(recorded["lru"])


# --- printed numbers -------------------------------------------------------------------------------


def test_shares_are_exact_counts():
    text = printed()
    work = figures.conversations(1000)
    asked = sum(map(len, work))
    assert f"{len(work):,} requests ask for {asked:,} blocks" in text
    for capacity in (50, 300, 1000):
        hits = kv.paging.replay(work, capacity).hits
        assert f"{capacity:,} blocks: {hits:>7,} found, {hits / asked:.1%}" in text


def test_sampled_answers_are_far_from_the_edges(model, tokenizer):
    """A draw that fell next to an edge between two tokens could give another token on another processor.

    Rounding moves logits of size 10 by some 1e-5, and so an edge by some 1e-5 of its probability at most.
    """
    novel = (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    prompt = tokenizer.encode(novel[:1500])
    shown = printed()
    for seed in (1, 2, 3):
        cache, given, draws = kv.ContiguousCache.for_model(model, 512), prompt, np.random.default_rng(seed)
        new = []
        for _ in range(20):
            logits = model(given, cache, rows=[-1])[-1]
            probabilities = ops.softmax(logits - logits.max())
            order = np.argsort(-probabilities, kind="stable")
            reached = np.cumsum(probabilities[order], dtype=np.float64)
            draw = draws.random() * reached[-1]
            place = int(np.searchsorted(reached, draw, side="right"))
            edges = [reached[place] - draw, draw - (reached[place - 1] if place else -1)]
            assert min(edges) > 3e-5
            new.append(int(order[place]))
            given = new[-1:]
        assert repr(tokenizer.decode(new)) in shown


@pytest.fixture(scope="module")
def model():
    return kv.load_model("austen-gpt2")


@pytest.fixture(scope="module")
def tokenizer():
    return kv.load_tokenizer("austen-gpt2")


# --- figures and panel ------------------------------------------------------------------------------


def test_bills_by_hand():
    data = figures.bills(
        turns=2, gap="1 min", prefix=2000, question=100, answer=50, output=5, rules="Anthropic, 5 minutes"
    )
    assert data["without"] == [2100 + 250, 2350 + 2250 + 250]
    first, second = 2100 * 1.25 + 250, 2100 * 0.1 + 150 * 1.25 + 250
    assert data["with"] == pytest.approx([first, first + second])
    assert (data["tokens_read"], data["tokens_prompt"]) == (2100, 4350)
    cheapest = min(data["totals"], key=data["totals"].get)
    assert figures.bills_text(data).endswith(
        f"Cheapest of the three: {cheapest}, {data['totals'][cheapest]:,.0f}."
    )


def test_read_per_request_by_hand():
    parts = {"a": (100, 0.5), "b": (10, 0.2)}
    assert figures.read_per_request(["a", "b"], parts) == pytest.approx(50 + 10 * 0.4)
    assert figures.read_per_request(["b", "a"], parts) == pytest.approx(8 + 100 * 0.4)


def test_read_per_request_is_what_is_billed():
    parts = {"a": (300, 0.1), "b": (8000, 0.15)}
    draw, version, sent = random.Random(1), {"a": 0, "b": 0}, []
    for number in range(4000):
        for name, (_, changes) in parts.items():
            version[name] += draw.random() < changes
        sent.append(
            prices.Request(number, tuple(((name, version[name]), parts[name][0]) for name in ("b", "a")))
        )
    rules = prices.Rules("bare", read=0.1, write=1.0, lifetime=10, minimum=1)
    read = sum(usage.read for usage in prices.bill(sent, rules)) / len(sent)
    # The standard error of a share of 0.85 over 4,000 requests is 0.006, of its tokens 45.
    assert read == pytest.approx(figures.read_per_request(["b", "a"], parts), abs=150)


def test_pool_sentence():
    rows = [("users are live", 60, 0, 0), ("all have left", 0, 60, 0)]
    assert figures.pool_text(rows) == "Held, kept, empty: users are live: 60, 0, 0; all have left: 0, 60, 0."
    assert [trace.x for trace in figures.pool_figure(rows).data] == [(60, 0), (0, 60), (0, 0)]


def test_the_first_control_changes_the_sentence_and_quickly():
    panel = widgets.bill_panel()
    sentences, times = set(), []
    for gap in ("10 s", "4 min", "6 min", "2 h") * 2:
        start = time.perf_counter()
        sentences.add(panel.set(gap=gap))
        times.append(time.perf_counter() - start)
    assert len(sentences) == 4
    assert min(times[1:]) < 0.1  # the course's limit for a repaint


def test_the_ends_of_all_controls():
    panel = widgets.bill_panel()
    for turns, prefix, tokens, output in ((30, 20000, 2000, 10), (1, 0, 50, 1)):
        for rules in figures.RULES:
            text = panel.set(
                rules=rules, turns=turns, prefix=prefix, question=tokens, answer=tokens, output=output
            )
            assert f"{turns} turn" in text and panel.data["with"][-1] > 0


def test_the_panel_decides():
    panel = widgets.bill_panel()
    assert "21% more than" in panel.set(gap="6 min", rules="Anthropic, 5 minutes")
    assert "None of the three" in panel.set(turns=1)


# --- the exercise ------------------------------------------------------------------------------------


def test_the_solution_and_the_short_way():
    path = paths.chapters_dir() / "solutions" / "19_eviction_and_cost.py"
    spec = importlib.util.spec_from_file_location("solution_19", path)
    solution = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(solution)
    assert checks.verdict(NAME, solution.best_order).status == "right"

    def short_way(parts):
        return sorted(parts, key=lambda n: -parts[n][0] * (1 - parts[n][1]) / (parts[n][1] or 1e-9))

    assert checks.verdict(NAME, short_way).status == "right"
