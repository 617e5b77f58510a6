"""Chapter 19: the page's code is the package's, the trace's counts, figures, panel, numbers, exercise."""

import importlib.util
import itertools
import json
import math
import random
import time
from collections import Counter, OrderedDict

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import checks, ops, paths
from kvcourse.bench import paging
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
        if {"conversations", "plain-replay", "plain-foresight", "plain-head-first"} & {*tags}:
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


@pytest.fixture(scope="module")
def requests():
    if traces.find(TRACE) is None:
        pytest.skip(f"the trace {TRACE} is not on this machine (KVCOURSE_TRACES)")
    return [list(request.hash_ids) for request in traces.load(TRACE)]


def test_the_page_counts_as_the_bench(page):
    """So what the page says of its functions holds for the recorded counts."""
    work = figures.conversations(150, 4)
    for capacity in (4, 20, 100):
        assert page["foresight"](work, capacity) == paging.foresight(work, capacity)
        assert page["head_first"](work, capacity) == paging.head_first(work, capacity)


def test_the_traces_counts_again(page, requests):
    """With the page's functions, not the bench's. The page's foresight sorts all blocks at each request and
    takes 2 s for the whole trace: so it and the bench's, which is quick, count its first 1,500 requests, and
    the bench's all of it."""
    recorded, first = figures.recorded_hits(TRACE), requests[:1500]
    assert recorded["accesses"] == sum(map(len, requests))
    assert page["replay"](requests, 1000) == recorded["lru"][1000]
    assert page["head_first"](requests, 1000) == recorded["head_first"][1000]
    assert page["foresight"](first, 1000) == paging.foresight(first, 1000)
    assert paging.foresight(requests, 1000) == recorded["foresight"][1000]
    uses = Counter(block for ids in requests for block in ids)
    assert recorded["names"] == len(uses)
    assert recorded["once"] == sum(count == 1 for count in uses.values())
    assert recorded["beginnings"] == len({ids[0] for ids in requests})


def test_the_traces_quarters_again(requests):
    recorded = figures.recorded_hits(TRACE)
    cuts = [0, 3007, 6015, 9023, 12_031]
    run = kv.paging.replay(requests, 10_000, "lfu").by_request
    for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
        assert recorded["quarters"]["lfu"][10_000][i] == sum(run[start:stop])
        assert recorded["quarters"]["accesses"][i] == sum(map(len, requests[start:stop]))


def test_golden_figures_of_the_record():
    recorded = figures.recorded_hits(TRACE)
    assert recorded["accesses"] == 288_500
    assert [recorded["lru"][n] for n in (None, 10_000, 1_000)] == [105_710, 61_046, 12_847]


def test_the_words_on_the_trace_hold():
    """Of chapter 19, rounds 1 and break it."""
    hits = figures.recorded_hits(TRACE)

    def order(capacity):
        return sorted(figures.POLICIES, key=lambda policy: -hits[policy][capacity])

    assert [order(n)[-1] for n in (1000, 3000)] == ["lru", "lru"]
    assert [order(n)[0] for n in (1000, 3000)] == ["length", "lfu"]
    assert [order(n)[0] for n in (10_000, 30_000, 50_000)] == ["lru"] * 3
    assert 0.74 < hits["once"] / hits["names"] < 0.77  # three quarters
    assert (hits["beginnings"], hits["requests"] - 1) == (1, 12_030)


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
    # OpenAI's rules keep multiples of 128: 2,048 of 2,100 and 2,176 of 2,250 tokens. An hour costs 5,210.
    assert list(data["totals"].values()) == pytest.approx([
        2350 + 204.8 + 202 + 250,
        2048 * 1.25 + 52 + 250 + 204.8 + 128 * 1.25 + 74 + 250,
        first + second,
        2100 * 2 + 250 + 210 + 150 * 2 + 250,
    ])  # fmt: skip
    assert figures.bills_text(data).endswith(
        "Less than no caching: OpenAI, 5 minutes (3,007); OpenAI, 30 minutes (3,551); "
        "Anthropic, 5 minutes (3,522)."
    )


def test_read_per_request_by_hand():
    parts = {"a": (100, 0.5), "b": (10, 0.2)}
    assert prices.read_per_request(["a", "b"], parts) == pytest.approx(50 + 10 * 0.4)
    assert prices.read_per_request(["b", "a"], parts) == pytest.approx(8 + 100 * 0.4)


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
    assert read == pytest.approx(prices.read_per_request(["b", "a"], parts), abs=150)


def test_pool_sentence():
    rows = [("users are live", 60, 0, 0), ("all have left", 0, 60, 0)]
    assert figures.pool_text(rows) == "Held, kept, empty: users are live: 60, 0, 0; all have left: 0, 60, 0."
    assert [trace.x for trace in figures.pool_figure(rows).data] == [(60, 0), (0, 60), (0, 0)]


def test_the_first_control_changes_the_sentence_and_quickly():
    panel = widgets.bill_panel()
    sentences, times = set(), []
    for gap in ("10 s", "4 min", "6 min", "2 h") * 2:
        start = time.process_time()  # of this process alone: others may be busy
        sentences.add(panel.set(gap=gap))
        times.append(time.process_time() - start)
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
    assert "OpenAI, 30 minutes (42,834); Anthropic, 1 hour (50,970)." in panel.set(gap="6 min")
    assert "None of the 4 rules" in panel.set(turns=1)


def test_the_sentence_on_policies():
    text = figures.policies_text([10, 20], {"lru": [0.2, 0.25], "foresight": [0.3, 0.4]}, 0.5, at=[20])
    assert text == "Found with 20 blocks: foresight 40.0%, LRU 25.0%; without a limit 50.0%."


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
