"""Chapter 16: the hand by hand-made cases, the page's code is the package's, panels, printed numbers."""

import importlib.util
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, ops, paging, paths
from kvcourse.figures import chapter_16 as figures
from kvcourse.widgets import chapter_16 as widgets

NOTEBOOK = paths.chapters_dir() / "16_paged_allocation.ipynb"


class _Silent:
    """Stands for kvcourse in cells that also ask for a prediction."""

    def predict(self, *args, **kwargs):
        pass


def _cells():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def page(*tags):
    """What the cells with these tags define."""
    names = {"np": np, "attention": ops.attention, "B": 16, "kv": _Silent()}
    for cell in _cells():
        if set(tags) & set(cell["metadata"].get("tags", [])):
            exec("".join(cell["source"]), names)
    return names


@pytest.fixture(scope="module")
def plain():
    names = page("plain-paged", "plain-shared")
    assert {"Pool", "Paged", "SharedPool", "Forkable"} <= names.keys()
    return names


@pytest.fixture(scope="module")
def tiny():
    return kv.random_model(
        "gpt2", num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, hidden_size=8,
        intermediate_size=16, vocab_size=20, max_seq_len=128,
    )  # fmt: skip


# --- the page's code ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(
    passes=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    forked=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_the_plain_pool_is_the_packages(tiny, plain, passes, forked, seed):
    """Two sequences, the second a fork of the first after some passes: same logits, equally many blocks."""
    random = np.random.default_rng(seed)
    pool = plain["SharedPool"](tiny.config, random.permutation(32).tolist())
    theirs = kv.PagedPool.for_model(tiny, num_blocks=32, prefix_caching=False)
    mine, package = [plain["Forkable"](pool)], [theirs.sequence()]
    for number, n in enumerate(passes):
        if number == forked:
            mine.append(mine[0].fork())
            package.append(package[0].fork())
        for a, b in zip(mine, package, strict=True):
            ids = random.integers(20, size=n).tolist()
            # Logits of size 1, float32 (eps 1.2e-7), a hundred additions in another order.
            np.testing.assert_allclose(tiny(ids, a), tiny(ids, b), atol=2e-4, rtol=0)
            assert (a.seq_len, len(a.table)) == (b.seq_len, len(b.block_table))
    assert len(pool.ref_count) - len(pool.free) == theirs.manager.num_used
    counts = sorted(count for count in pool.ref_count if count)
    assert counts == sorted(
        theirs.manager.ref_count(block) for block in range(32) if theirs.manager.ref_count(block)
    )
    for cache in mine:
        pool.give_back(cache.table)
    assert sorted(pool.free) == list(range(32))


@pytest.mark.parametrize("policy", ["reserve_max", "reserve_answer", "paged"])
def test_the_page_counts_slots_as_the_package_does(policy):
    names = page("plain-allocation")
    prompt, answer = paging.lognormal_workload(300, seed=5)
    assert names["at_the_end"](policy, prompt, answer) == paging.simulate_allocation(prompt, answer, policy)
    life = next(cell for cell in _cells() if "plain-allocation-life" in cell["metadata"].get("tags", []))
    exec("".join(life["source"]).split("\n\n\n")[0], names)
    held, occupied = np.array([names["life"](policy, p, a) for p, a in zip(prompt, answer, strict=True)]).T
    over = paging.simulate_allocation(prompt, answer, policy, over="life")
    assert held.sum() / occupied.sum() == pytest.approx(over, abs=1e-12)


# --- the hand ----------------------------------------------------------------------------------


def kinds(row):
    return "".join("." if cell is None else cell[0][0] for cell in row)


def test_a_reservation_by_hand():
    """Prompt 2, answer 1, 8 slots; then one that is turned away. h held, n never, l later."""
    requests, rows = figures.play("reserve_answer", hand=((2, 1), (3, 3)), steps=4)
    assert [r.fate for r in requests] == ["complete", "complete"]
    assert kinds(rows[0])[:9] == "hhhnnnnn."
    assert kinds(rows[1])[:10] == "hhhhllnnn."  # the first has left, its slots are taken again
    assert kinds(rows[3])[:10] == "hhhhhhnnn."
    assert figures.slot_steps(rows)["never"] == 5 + 3 * 3


def test_buddy_rounds_up_at_multiples_of_its_size():
    requests, rows = figures.play("buddy", hand=((3, 6), (2, 6)), steps=8)
    assert requests[0].slots == list(range(16))  # 9 slots asked for
    assert requests[1].slots == list(range(16, 24))
    assert kinds(rows[0])[:17] == "hhhhlllll" + "r" * 7 + "."


def test_paged_takes_a_block_when_a_token_needs_one():
    requests, rows = figures.play("paged", hand=((3, 6), (4, 1)), steps=6)
    assert [len(row) for row in rows] == [40] * 6
    assert kinds(rows[0])[:5] == "hhhh."
    # Before the second arrives the first has taken block 1; it gets blocks 2 and 3, with 3 slots of rounding.
    assert kinds(rows[1])[:17] == "hhhhhlllhhhhhrrr."
    assert requests[0].slots == [*range(8), *range(8, 12)]  # block 2 was given back in the meantime
    assert kinds(rows[5])[:13] == "hhhhhhhhhrrr."


def test_gaps_are_marked_only_when_the_sum_would_do():
    """Slots 10 … 29 are taken: 20 are free, in two pieces of 10, and 16 are asked for."""
    requests, rows = figures.play([(10, 16), (26, 4), None], hand=((10, 6), (1, 3), (15, 1)), steps=3)
    assert requests[2].fate == "turned away" and requests[2].scattered
    assert kinds(rows[2]).count("g") == 20
    requests, rows = figures.play([(0, 16), (16, 16), None], hand=((10, 6), (3, 6), (9, 1)), steps=3)
    assert not requests[2].scattered and "g" not in kinds(rows[2])
    requests, rows = figures.play([(0, 16), None], hand=((10, 6), (3, 6)), steps=2)
    assert not requests[1].scattered and "g" not in kinds(rows[1])  # it would have fitted


def test_who_has_too_few_slots_is_cut_short():
    requests, rows = figures.play([(0, 5)], hand=((4, 3),), steps=3)
    assert requests[0].fate == "cut short"
    assert kinds(rows[0])[:6] == "hhhhh." and kinds(rows[1]) == "." * 40


@pytest.mark.parametrize("policy", [*figures.POLICIES, figures.KNOWS])
def test_nobody_holds_a_slot_twice_and_all_answers_are_there(policy):
    requests, rows = figures.play(policy)
    assert sum(figures.fates(requests).values()) == len(figures.HAND)
    for request in requests:
        assert len(set(request.slots)) == len(request.slots)
        if request.fate == "complete":
            assert len(request.slots) >= request.prompt + request.answer
    held = sum(sum(r.prompt + k for k in range(1, r.answer + 1)) for r in requests if r.fate == "complete")
    assert figures.slot_steps(rows)["held"] == held  # so no two wrote into one slot
    assert max(r.last_step for r in requests) == figures.STEPS - 1


def test_the_fraction_of_the_hand_that_each_policy_serves():
    """Printed on the page, and what its text leans on."""
    served = {p: figures.fates(figures.play(p)[0])["complete"] for p in (*figures.POLICIES, figures.KNOWS)}
    assert list(served.values()) == [6, 8, 7, 12, 10]
    assert [r.number for r in figures.play(figures.KNOWS)[0] if r.fate == "turned away"] == [6, 11]


def test_with_hindsight_all_twelve_fit_in_pieces_of_their_own_length():
    requests, _ = figures.play(figures.HINDSIGHT)
    assert figures.fates(requests)["complete"] == 12
    assert [len(r.slots) for r in requests] == [prompt + answer for prompt, answer in figures.HAND]
    held = [set(r.slots) for r in requests]
    together = [
        (a, b) for a in requests for b in requests
        if a.number < b.number <= a.last_step and held[a.number] & held[b.number]
    ]  # fmt: skip
    assert not together


# --- panels ------------------------------------------------------------------------------------


def test_the_readers_hand():
    hand = widgets.hand_panel()
    assert "Slots 4 … 13 are free" in hand.set(start=4, slots=10)
    assert hand.place().startswith("Step 1") and hand.moves == [(4, 10)]
    assert hand.values["start"] == 0  # the first free slot; 0 … 9 would reach into the first request
    assert "taken by request 0" in hand.text
    assert hand.place() == hand.text == hand.place() and len(hand.moves) == 1  # not free: nothing happens
    assert hand.text.startswith("Not put there. Step 1") and hand.text.count("Not put there") == 1
    hand.set(start=14)
    assert hand.place().startswith("Step 2") and hand.values["start"] == 0
    hand.take_back()
    assert "do not exist" in hand.set(start=35)
    assert "too few" in hand.set(start=20, slots=4)
    assert hand.take_back().startswith("Step 0") and hand.moves == []
    hand.set(slots=6)
    hand.place()
    assert hand.values["start"] == 6  # behind the request that lies at 0 … 5
    hand.take_back()
    for _ in figures.HAND:
        hand.turn_away()
    assert "turned 12 away" in hand.text and hand.turn_away() == hand.text and len(hand.moves) == 12
    assert hand.start_over().startswith("Step 0")
    for name, button in hand.buttons.items():
        button.click()
        assert hand.text, name


def test_the_readers_map_does_not_tell_how_long_an_answer_will_be():
    data = figures.hand(0, 8, moves=[(0, 10), (10, 12)])
    kinds_shown = {cell[0] for row in data["rows"] for cell in row if cell}
    assert kinds_shown == {"held", "open"}


def test_playing_the_reservations_by_hand_gives_the_policys_result():
    hand = widgets.hand_panel()
    for request in figures.play("reserve_answer")[0]:
        if request.slots:
            hand.set(start=request.slots[0], slots=len(request.slots))
            hand.place()
        else:
            hand.turn_away()
    assert "You answered 8 in full, cut 0 short and turned 4 away" in hand.text


def test_panels_answer_in_100_ms_at_their_extremes():
    for panel, settings_ in (
        (widgets.policy_panel(), [{"policy": name} for name in (*figures.POLICIES, figures.KNOWS)]),
        (
            widgets.server_panel(),
            [
                {"prompt": 50, "answer": 288, "block": 8, "policy": "paged"},
                {"prompt": 1600, "memory": 32768, "policy": "buddy"},
                {"memory": 8192, "block": 1024, "policy": "reserve_answer"},
                {"prompt": 50, "answer": 9, "memory": 32768, "block": 8, "policy": "paged"},
            ],
        ),
    ):
        for values in settings_:
            best = math.inf
            for _ in range(3):
                figures._simulated.cache_clear()
                start = time.process_time()  # of this process: other work on the machine does not count
                text = panel.set(**values)
                best = min(best, time.process_time() - start)
            assert "does not work" not in text
            assert best < 0.1, values


def test_the_main_panel_shows_the_packages_figures():
    panel = widgets.server_panel()
    text = panel.set(policy="paged", memory=16384)
    prompts, answers = paging.lognormal_workload(figures.REQUESTS, 16)
    run = paging.simulate_arrivals([0] * figures.REQUESTS, prompts, answers, "paged", 16384, sample_every=50)
    assert f"on average {run.mean('running'):.1f} requests at once" in text
    assert f"{100 * run.shares()['held']:.1f} % hold a token" in text
    names = [trace.name for trace in panel.figure.data]
    drawn = panel.figure.data[names.index("holds a token")]
    assert sum(drawn.x) == sum(row.count(0) for row in panel.data["rows"])
    assert len(panel.data["rows"]) == figures.ROWS and sum(map(len, panel.data["rows"])) == 16384


def test_every_bar_of_a_map_is_as_thick_as_one_line():
    """plotly would take it from the distance of a trace's own bars: gaps in steps 6 and 11, 5 lines tall."""
    maps = [figures.policy_figure(figures.policy_map(p)) for p in (*figures.POLICIES, figures.KNOWS)]
    maps += [figures.busy_figure(figures.busy(390, 144, 16384, 16, p)) for p in figures.POLICIES]
    maps.append(figures.hand_figure(figures.hand(20, 6, moves=[(0, 10), None])))
    for figure in maps:
        bars = [trace for trace in figure.data if trace.orientation == "h"]
        assert bars and all(0.8 < bar.width < 1 for bar in bars)


def test_a_setting_in_which_everybody_fits_says_so():
    data = figures.busy(50, 9, 32768, 16, "paged")
    assert not data["waits"] and f"All {figures.REQUESTS} fit" in figures.busy_text(data)


def test_the_recorded_table_has_a_line_for_each_policy():
    run, came = {"shares": {"held": 0.5}, "running": 3.25, "put_back": 4}, {"crowded": 0.125}
    found = {
        "requests": 10, "prompt_tokens": 100, "answer_tokens": 20, "max_seq_len": 64, "max_answer": 8,
        "policies": {"paged": {"end": 0.25, "life": 0.2, "all_at_once": run, "as_they_came": came}},
    }  # fmt: skip
    lines = figures.azure_table({"allocation": dict.fromkeys(figures.TRACES, found)}).splitlines()
    assert [line.partition(":")[0] for line in lines[1::2]] == list(figures.TRACES.values())
    assert "10 requests, on average 10 tokens in and 2 out; limits 64 and 8" in lines[1]
    assert lines[2].split() == ["paged", "25.0", "%", "20.0", "%", "50.0", "%", "3.2", "4", "12.5", "%"]


# --- numbers that the page prints ----------------------------------------------------------------


@pytest.mark.parametrize(("policy", "blog", "within"), [
    ("reserve_max", 20.9, 1.5), ("reserve_answer", 51.5, 2.5), ("paged", 99.1, 0.2),
])  # fmt: skip
def test_claim_52_holds_for_ten_draws(policy, blog, within):
    for seed in range(10):
        share = paging.simulate_allocation(*paging.lognormal_workload(2000, seed), policy)
        assert abs(100 * share - blog) < within


def test_other_readings_of_the_blogs_lengths_do_not_give_its_figures():
    """Printed with this many digits: 390 and 144 as means, and medians with a standard deviation of 0.5."""
    means = paging.lognormal_workload(2000, 0, 390 * math.exp(-0.5), 144 * math.exp(-0.5))
    shares = [100 * paging.simulate_allocation(*means, p) for p in ("reserve_max", "reserve_answer", "paged")]
    assert shares == pytest.approx([12.6, 36.8, 98.5], abs=0.049)
    narrow = paging.lognormal_workload(2000, 0, sigma=0.5)
    assert 100 * paging.simulate_allocation(*narrow, "reserve_answer") == pytest.approx(41.0, abs=0.049)


def test_the_careless_texts_are_far_from_a_near_tie():
    """Greedy tokens of the broken session: its margins against 1e-3, a hundred times any rounding seen."""
    cells = ["".join(cell["source"]) for cell in _cells() if cell["cell_type"] == "code"]
    model, tok = kv.load_model("austen-gpt2"), kv.load_tokenizer("austen-gpt2")
    margins = []

    def greedy(logits):
        best = np.sort(logits)[-2:]
        margins.append(float(best[1] - best[0]))
        return kv.greedy(logits)

    class Watched:
        predict = staticmethod(lambda *args, **kwargs: None)
        generate = staticmethod(kv.generate)

    Watched.greedy = staticmethod(greedy)
    names = page("plain-paged", "plain-shared") | {"kv": Watched, "model": model, "tok": tok}
    for start in ("prompt_a = ", "class CarelessPool"):
        exec(next(source for source in cells if source.startswith(start)), names)
    careless = names["CarelessPool"](model.config, range(16))
    text_a, text_c, table_a, table_c = names["session"](careless)
    assert text_c == names["c_alone"] and text_a != names["a_alone"]
    assert set(table_a) & set(table_c)
    assert min(margins) > 1e-3


# --- the exercises -------------------------------------------------------------------------------


def _solutions():
    path = paths.chapters_dir() / "solutions" / "16_paged_allocation.py"
    spec = importlib.util.spec_from_file_location("solutions_16", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@given(tokens=st.integers(1, 60), block_size=st.integers(1, 9), seed=st.integers(0, 99), data=st.data())
@settings(deadline=None)
def test_the_solutions_are_what_the_block_manager_does(tokens, block_size, seed, data):
    manager = kv.paging.BlockManager(64, block_size, prefix_caching=False)
    others = [manager.allocate([0]) for _ in range(4)]
    seq, blocks = manager.allocate(), 0
    for position in range(tokens):
        manager.append_slots(seq)
        assert (len(seq.block_table) > blocks) == _solutions_cached.needs_block(position, block_size)
        blocks = len(seq.block_table)
        manager.commit(seq, [1])
        if position == seed % 7:
            manager.free(others.pop())  # so that the table is not ascending
    start = data.draw(st.integers(0, tokens))
    stop = data.draw(st.integers(start, tokens))
    mapping = _solutions_cached.slot_mapping(seq.block_table, start, stop, block_size)
    assert mapping == manager.slot_mapping(seq, start, stop)


_solutions_cached = _solutions()


@pytest.mark.parametrize("name", ["slot_mapping", "needs_block"])
def test_the_checks_take_the_solutions(name):
    assert checks.verdict(f"16.{name}", getattr(_solutions_cached, name)).status == "right"


def test_a_tuple_is_taken():
    def slot_mapping(*args):
        return tuple(_solutions_cached.slot_mapping(*args))

    assert checks.verdict("16.slot_mapping", slot_mapping).status == "right"


def test_a_numpy_answer_is_taken():
    def slot_mapping(block_table, start, stop, block_size):
        positions = np.arange(start, stop)
        return np.array(block_table)[positions // block_size] * block_size + positions % block_size

    assert checks.verdict("16.slot_mapping", slot_mapping).status == "right"
