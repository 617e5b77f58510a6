"""Chapter 15: the page's cache is the package's, counts by hand, tables, the panel, the exercise."""

import importlib.util
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, measure, ops, paths
from kvcourse.figures import chapter_15 as figures
from kvcourse.widgets import chapter_15 as widgets

NOTEBOOK = paths.chapters_dir() / "15_forgetting.ipynb"
NAME = "15.held_slots"


@pytest.fixture(scope="module")
def tiny():
    return kv.random_model(
        "smollm2-135m", num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, hidden_size=24,
        intermediate_size=32, vocab_size=20, max_seq_len=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(tiny):
    """What the cells tagged plain-sliding define, with the imports of the page."""
    text = {"kv": _Silent(), "softmax": ops.softmax}
    source = [cell for cell in _cells() if "plain-sliding" in cell["metadata"].get("tags", [])]
    assert len(source) == 5
    names = {"np": np, **text}
    for cell in source:
        # The last of them goes on to compare on a model of its own; here only what it defines matters.
        exec("".join(cell["source"]).split("\nsmall = ")[0], names)
    return names


class _Silent:
    """Stands for kvcourse in cells that also ask for a prediction."""

    def predict(self, *args, **kwargs):
        pass


def _cells():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def printed():
    return "".join("".join(output.get("text", "")) for cell in _cells() for output in cell.get("outputs", []))


# --- the page's cache ------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    num_sinks=st.integers(0, 4),
    window=st.integers(1, 9),
    passes=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_the_plain_cache_is_the_packages(tiny, page, num_sinks, window, passes, seed):
    """Logits and the tokens held, for passes of any length up to slack + 1."""
    plain = page["Streaming"](tiny.config, window, num_sinks)
    ring = kv.SlidingCache.for_model(tiny, window=window, num_sinks=num_sinks, slack=5)
    random = np.random.default_rng(seed)
    for n in passes:
        ids = random.integers(20, size=n).tolist()
        # Logits of size 1, float32 (eps 1.2e-7), a few hundred additions in another order.
        np.testing.assert_allclose(tiny(ids, plain), tiny(ids, ring), atol=2e-4, rtol=0)
        assert plain.held.tolist() == ring.key_positions(0).tolist()
        assert plain.rows[0].shape[2] == ring.num_rows == min(plain.seq_len, num_sinks + window)


@pytest.mark.parametrize(("name", "sinks"), [("Window", 0), ("Sinks", 2)])
def test_the_first_versions_are_a_mask(tiny, page, name, sinks):
    """Without the paper's positions a pass through the cache is one whole pass under `visible`."""
    ids = np.random.default_rng(3).integers(20, size=40).tolist()
    options = (5,) if name == "Window" else (5, sinks)
    cache = page[name](tiny.config, *options)
    got = np.concatenate([tiny(ids[start : start + 8], cache) for start in range(0, 40, 8)])
    mask = figures.visible(40, rows=5 + sinks, sinks=sinks)
    # As above: the same sums in another order.
    np.testing.assert_allclose(got, tiny(ids, kv.Tap(tiny.config, mask=mask)), atol=2e-4, rtol=0)


def test_a_failed_pass_says_that_the_cache_is_spoiled(tiny, page):
    with pytest.raises(RuntimeError, match="make the cache anew"):
        page["Window"](tiny.config, 4).abort()


def test_the_ring_of_exactly_w_slots_loses_keys():
    defined = [cell for cell in _cells() if "def after_writing" in "".join(cell["source"])]
    names = {}
    exec("".join(defined[0]["source"]).split("\nneeded = ")[0], names)
    assert names["after_writing"](8, 8, 3) == {0: 8, 1: 9, 2: 10, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7}
    assert set(names["after_writing"](10, 8, 3).values()) == set(range(1, 11))


# --- numbers that the page prints ---------------------------------------------------------------


def _margin(value, step):
    """How far a number is from where its rounding to `step` flips, as a share of the number."""
    return abs((value / step) % 1 - 0.5) * step / abs(value)


@pytest.fixture(scope="module")
def seen(smollm2, smollm2_tokenizer):
    """The passage, its log-probabilities, and attention: shares of position 0, means over heads."""
    novel = (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    ids = smollm2_tokenizer.encode(novel[:12000])[400:912]
    tap = kv.Tap(smollm2.config)
    log_probs = kv.evaluation.next_token_log_probs(smollm2(ids, tap), ids)
    share, mean, positions = [], [], np.arange(512)
    triangle = ops.causal_mask(0, 512)
    for q, k in zip(tap.queries, tap.keys, strict=True):
        q, k = smollm2.rotate(q, positions), smollm2.rotate(k, positions)
        scores = q.reshape(3, 3, 512, 64) @ k.swapaxes(1, 2)[:, None] / 8
        weights = ops.softmax(np.where(triangle, scores, -np.inf)).reshape(9, 512, 512)
        share.append(weights[:, 128:, 0].mean(axis=1))
        mean.append(weights.mean(axis=0))
    return ids, log_probs, np.array(share), np.array(mean)


def test_perplexities_and_shares_are_far_from_a_rounding(smollm2, seen):
    """Processors differ by about 1e-5 of a perplexity."""
    ids, log_probs, share, mean = seen

    def hidden(positions):
        mask = ops.causal_mask(0, 256)
        mask[64:, positions] = False
        logits = smollm2(ids[:256], kv.Tap(smollm2.config, mask=mask))
        return kv.evaluation.next_token_log_probs(logits, ids[:256])[96:]

    found = {
        "all keys: perplexity of tokens 256 … 511 27": log_probs[255:],
        "nothing hidden: 28.": log_probs[96:255],
        "position 0 hidden: 77,": hidden(0),
        "0 … 63 hidden: 28,": hidden(slice(64)),
    }
    for text, values in found.items():
        value = kv.evaluation.perplexity(values)
        assert text in printed() and _margin(value, 1) > 1e-3
        assert figures.whole(value) in text
    assert f"{share.mean():.0%}" == "31%" and _margin(share.mean(), 0.01) > 1e-3
    # The still shows two decimals of each share, and none below one percent. Between BLAS kernels (SkylakeX,
    # Haswell, Nehalem) shares differ by up to 3.3e-7.
    assert abs((share * 100) % 1 - 0.5).min() / 100 > 3.3e-6 and abs(share - 0.01).min() > 3.3e-6
    for layer, sinks in ((11, 0), (23, 0), (7, 1), (17, 1)):
        late = mean[layer, 256:]
        kept = (late * figures.visible(512, 64, sinks)[256:]).sum(axis=1).mean()
        for value in (1 - kept, late[:, 0].mean()):
            assert value < 1e-3 or _margin(float(value), 0.01) > 1e-4


def test_the_sink_is_where_the_page_says(seen):
    _, _, share, mean = seen
    assert share.shape == (30, 9) and (share > 0.5).sum() == 75
    assert abs(share - 0.5).min() > 3.3e-6  # no head is near to one half, see above
    assert [layer for layer in range(30) if share[layer].max() < 0.1] == [0, 1, 10, 11]
    received = mean[:, 128:].mean(axis=(0, 1))
    assert sorted(np.argsort(-received)[:4].tolist()) == [0, 55, 61, 72]
    assert mean[7, 256:][:, [55, 61, 72]].sum(axis=1).mean() > 0.3


def test_the_texts_that_the_model_writes_are_no_near_ties(smollm2, seen, page):
    """The page shows 15 likeliest tokens from either cache, and speaks of them.

    Passes of 32 in place of 64 change these logits by 6e-5 at most; every gap between the two
    best is 100 times that.
    """
    ids = seen[0]
    for name, options in (("Window", (64,)), ("Sinks", (63, 1))):
        cache, token, gaps = page[name](smollm2.config, *options), ids[511], []
        for start in range(0, 511, 64):
            smollm2(ids[start : min(start + 64, 511)], cache, rows=[-1])
        for _ in range(15):
            logits = smollm2([token], cache)[-1]
            second, best = np.partition(logits, -2)[-2:]
            token = int(np.argmax(logits))
            gaps.append(best - second)
        assert min(gaps) > 100 * 6e-5


def test_short_pieces_are_far_from_a_collapse(smollm2, seen):
    """One piece of the eight: its last 32 tokens, with nothing before it."""
    ids = seen[0]
    piece = ids[224:288]
    found = kv.evaluation.perplexity(kv.evaluation.next_token_log_probs(smollm2(piece), piece)[31:])
    assert found < 100


def test_printed_answers():
    text = printed()
    for answer in (
        "Answer: 2.81 MiB.",  # 64 · 46,080 / 2^20
        "Answer: 75 heads.",
        "Answer: 2 keys.",
        "Answer: 255 positions.",  # 256 rows, the query in the last
        "Answer: layer 11.",
        "Answer: layer 7.",
        "Answer: up by more, at most tenfold.",
        "Answer: up by under a tenth.",
        "Answer: somewhere.",
        "10 see everything, others 1,024",
    ):
        assert answer in text
    assert 64 * figures.ROW_BYTES / 2**20 == pytest.approx(2.8125)
    assert 2 * 30 * 3 * 64 * 4 == figures.ROW_BYTES
    # gemma-3-27b at 131,072: ten layers see all, 52 see 1,024; a row of a layer is 16 · 128 · 2 · 2 bytes.
    assert (10 * 131_072 + 52 * 1024) * 8192 / 2**30 == pytest.approx(10.41, abs=0.004)
    assert "10.41 GiB    62.00 GiB" in text


# --- the recorded run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    return figures.windows(measure.recorded_runs("quality")[-1].results)


def test_what_the_page_says_of_the_recorded_run(recorded):
    """In words: one first token is enough, without it the text is lost, more rows buy little."""
    found = {key: figures.perplexity(values[255:]) for key, values in recorded.items()}
    assert set(found) == {"full"} | {(rows, sinks) for rows in figures.ROWS for sinks in figures.SINKS}
    for rows in figures.ROWS:
        assert found[rows, 0] > 2 * found["full"]
        for sinks in (1, 2, 4, 8):
            assert found["full"] < found[rows, sinks] < 1.45 * found["full"]
    assert min((1, 2, 4, 8), key=lambda sinks: found[128, sinks]) == 1
    assert f"{found[64, 1]:.1f} {found[256, 1]:.1f}" == "39.1 32.7" and f"{found[64, 0]:.0f}" == "408"
    for rows in figures.ROWS:
        assert abs(found[rows, 4] / found[rows, 1] - 1) < 0.015  # "next to nothing"
    assert 1.01 < found[64, 8] / found[64, 1] and 1.01 < found[128, 8] / found[128, 1]  # "begin to show"
    assert 1.25 < found[64, 1] / found["full"] < 1.4  # "a third above"
    assert 0.15 < found[128, 4] / found["full"] - 1 < 0.18  # "a sixth above"


def test_what_the_page_says_of_the_curves(recorded):
    """The window alone swings and lies above both others; with sinks every curve fits the panel's axis."""
    curves = {key: np.array(figures.along(values)[1]) for key, values in recorded.items()}
    past = np.array(figures.along(recorded["full"])[0]) >= 384
    alone = curves[64, 0][past]
    assert 70 < alone.min() < 80 and 7500 < alone.max() < 8500
    assert (alone > curves[64, 1][past]).all() and (alone > curves["full"][past]).all()
    ratio = (curves[256, 1] / curves["full"])[past]
    assert f"{ratio.min():.2f}" == "0.95"  # "by up to 5 %"
    for key, values in curves.items():
        assert values.min() > 10 and values.max() < (100 if key == "full" or key[1] else 10**4.1)


def test_the_live_runs_are_the_beginning_of_the_recorded_one(recorded, seen):
    """Recorded to three decimals, in passes of 64."""
    np.testing.assert_allclose(seen[1], recorded["full"][:511], atol=2e-3, rtol=0)


def _section(name):
    return measure.recorded_runs("quality")[-1].results[name]["runs"]


def test_what_the_page_says_of_the_long_text():
    stream = _section("stream")
    sliding, full = (stream[name]["thousands"] for name in figures.STREAMS)
    assert {row["nbytes_used"] for row in sliding} == {256 * figures.ROW_BYTES}
    assert [row["nbytes_used"] for row in full] == [row["tokens"] * figures.ROW_BYTES for row in full]
    values = stream[figures.STREAMS[0]]["log_probs"]
    thousands = [figures.perplexity(values[low : low + 1000]) for low in range(0, 10_000, 1000)]
    assert max(thousands) < 2 * min(thousands)
    halves = [sum(thousands[:5]) / 5, sum(thousands[5:]) / 5]
    assert abs(halves[1] / halves[0] - 1) < 0.2  # "without a trend"
    whole = stream[figures.STREAMS[1]]["log_probs"]
    above = [thousands[i] / figures.perplexity(whole[1000 * i : 1000 * i + 1000]) - 1 for i in range(4)]
    assert f"{above[0]:.0%}" == "3%"
    assert (f"{min(above[1:]):.0%}", f"{max(above[1:]):.0%}") == ("13%", "20%")


def test_what_the_page_says_of_the_steps():
    """Flat past the window, growing with all keys: said of a run that nothing else disturbed."""
    stream = _section("stream")
    assert [len(stream[name]["thousands"]) for name in figures.STREAMS] == [10, 4]
    quiet = not any(row["why"] for name in figures.STREAMS for row in stream[name]["thousands"])
    sliding, full = (figures.step_growth({"runs": stream}, name) for name in figures.STREAMS)
    assert full > 1.2 and (0.8 < sliding < 1.25 if quiet else sliding < full)


def test_what_the_page_says_of_heavy_hitters():
    found = {name: figures.perplexity(run["log_probs"]) for name, run in _section("heavy_hitters").items()}
    assert set(figures.HEAVY) <= set(found)
    for heavy, window, better in ((64, 124, "2%"), (128, 252, "1%")):  # "by 1 and 2 %"
        gain = 1 - found[f"{heavy} heavy, {heavy} recent"] / found[f"4 sinks, {window} window"]
        assert f"{gain:.0%}" == better


def test_what_the_page_says_of_needles():
    found = {}
    for name, run in _section("needles").items():
        (cache, length), hits = name.split(" at "), {}
        for record in run["records"]:
            hits[record["depth"]] = hits.get(record["depth"], 0) + record["found"]
        if cache in ("4 sinks, 252 window", "128 heavy, 128 recent"):
            assert hits[0.1] == 0 and len(run["records"]) == 9  # "of a needle at 10 % nothing was found"
            found[cache, int(length)] = hits[0.5], hits[0.9]
        if cache == "float16":
            assert sum(hits.values()) == len(run["records"])
    assert found.pop(("128 heavy, 128 recent", 2048)) == (0, 0)  # "heavy hitters find none"
    assert len(found) == 5 and {late for _, late in found.values()} == {3}
    assert sum(middle for middle, _ in found.values()) == 1  # "nearly all … near the end of the text"


RESULTS = {
    "windows": {
        "runs": {
            "full": {"rows": None, "sinks": None, "log_probs": [-1.0] * 4},
            **{
                f"{rows} rows, {sinks} sinks": {
                    "rows": rows, "sinks": sinks, "log_probs": [-1.0, -1.0, -2.0, -(2.0 + sinks)]
                }
                for rows in figures.ROWS
                for sinks in figures.SINKS
            },
        }
    },
    "stream": {
        "runs": {
            "4 sinks, 252 window": {
                "log_probs": [-1.0] * 1000 + [-2.0] * 999,
                "thousands": [
                    {"tokens": n, "step": 0.02 + n / 1e6, "nbytes": 2**22, "nbytes_used": 2**21, "why": ""}
                    for n in (1000, 2000)
                ],
            },
            "full": {
                "log_probs": [-1.0] * 999,
                "thousands": [
                    {"tokens": 1000, "step": 0.02, "nbytes": 2**30, "nbytes_used": 2**23, "why": "busy"}
                ],
            },
        }
    },
    "needles": {
        "runs": {
            "float16 at 512": {
                "length": 512,
                "records": [{"depth": d, "found": d > 0.1, "log_prob": -1.0} for d in (0.1, 0.5, 0.9)] * 2,
            },
            **{
                f"{cache} at 512": {
                    "length": 512, "records": [{"depth": 0.5, "found": False, "log_prob": -2.0}]
                }
                for cache in figures.NEEDLES[1:]
            },
        }
    },
}  # fmt: skip


def test_the_tables_by_hand():
    plain = figures.windows(RESULTS)
    table = figures.sinks_table(plain, start=3).split("\n")
    assert table[0] == "tokens 3 … 4; all keys: 2.7"
    assert table[2].split() == ["256", "7.4", "12.2", "20.1", "54.6", "403"]  # e to 2, 2.5, 3, 4, 6
    table = figures.stream_table(RESULTS["stream"]).split("\n")
    assert table[3].split() == "1,000 2.0 21.0 ms 2.7 8.0 20.0 ms 2.7".split()
    assert table[4].split() == "2,000 2.0 22.0 ms 7.4".split()
    assert table[5].endswith("4.0 MiB") and table[6].endswith("busy")
    assert figures.step_growth(RESULTS["stream"], "4 sinks, 252 window") == pytest.approx(22 / 21)
    row = figures.needle_table(RESULTS["needles"]).split("\n")[1]
    assert row.split() == "512 all keys (in float16) 0 of 2 2 of 2 2 of 2 0.37".split()


# --- figures ------------------------------------------------------------------------------------------


def test_numbers_for_the_tables():
    assert [figures.whole(value) for value in (26.89, 99.4, 2304.9, 178.0)] == ["27", "99", "2,300", "180"]
    assert figures.two_digits(2304.9) == 2300 and figures.short(2304.9) == "2,305"
    tokens, values = figures.along([-1.0] * 4 + [-3.0] * 4, width=4, every=2)
    assert tokens == [4, 6, 8]
    np.testing.assert_allclose(values, np.exp([1.0, 2.0, 3.0]), rtol=1e-3)  # four digits are kept


def test_who_sees_whom_by_hand():
    assert figures.visible(6, rows=3, sinks=1).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 1, 1],
    ]


def test_the_ring_by_hand():
    assert figures.ring(4, 1, 2, 1) == [(0, 0, "sink"), (1, 1, "slack"), (2, 2, "window"), (3, 3, "window")]
    assert figures.ring(5, 1, 2, 1) == [(0, 0, "sink"), (1, 4, "window"), (2, 2, "slack"), (3, 3, "window")]
    assert figures.ring(2, 1, 2, 1)[2:] == [(2, None, "empty"), (3, None, "empty")]
    drawn = figures.ring_figure([2, 5], 1, 2, 1)
    assert [list(bars.text) for bars in drawn.data] == [["0", "0"], ["1", "4", "3"], ["2"], ["", ""]]
    assert (
        figures.ring_text([5], 1, 2, 1)
        == "After 5 tokens the newest one sees positions 0, 3 and 4; 2 lie there still."
    )


@pytest.fixture(scope="module")
def made_up():
    """Attention where every query gives half to position 0 and half to itself, in two layers."""
    weights = np.zeros((2, 512, 512), np.float32)
    weights[:, np.arange(512), np.arange(512)] = 0.5
    weights[:, :, 0] += 0.5
    recorded = {"full": [-3.0] * 2047}
    recorded |= {(rows, sinks): [-4.0] * 2047 for rows in figures.ROWS for sinks in figures.SINKS}
    return weights, recorded


def test_the_panels_numbers_by_hand(made_up):
    weights, recorded = made_up
    data = figures.forgetting(0, 64, 1, weights=weights, recorded=recorded)
    assert data["kept"] == pytest.approx(0.5) and data["first"] == pytest.approx(0.5)
    assert figures.forgetting(1, 64, 1, weights=weights, recorded=recorded)["kept"] == pytest.approx(1)
    cells = np.array(data["map"])
    assert cells.shape == (32, 33)
    assert cells[1:, 0].tolist() == [0.5] * 31  # position 0 has a column of its own
    assert cells[31, 32] == 0.5 and cells[31, 5] == 0.001 and cells[3, 5] == 0  # itself; a little; later
    # Row 31 of the map, its query 504 sees 441 … 504: 0 and cells 1 … 27 (keys up to 431) are gone.
    assert data["evicted"][-1] == (31, 0, 28)
    assert figures.forgetting(1, 64, 1, weights=weights, recorded=recorded)["evicted"][-1] == (31, 1, 27)
    assert data["evicted"][0] == (4, 0, 1)  # query 72 sees 9 … 72
    text = figures.forgetting_text(data)
    assert text.startswith("Newest 64, 64 visible keys: 2.8 MiB however long the text (90 MiB with all 2,048")
    assert "50% of their attention to position 0 and 50% to keys" in text
    assert text.endswith("Perplexity from token 256 on: 54.6, with all keys 20.1.")


def test_the_panel_at_the_ends_of_its_controls_and_quickly(made_up):
    panel = widgets.forgetting_panel(*made_up)
    traces, times = len(panel.figure.data), []
    for rows in figures.ROWS:
        for sinks in figures.SINKS:
            for layer in (0, 1):
                start = time.process_time()
                before, text = panel.text, panel.set(sinks=sinks, rows=rows, layer=layer)
                times.append(time.process_time() - start)  # of this process alone: others may be busy
                assert text != before and "does not work" not in text
                assert len(panel.figure.data) == traces
                for trace in panel.figure.data:
                    assert (
                        all(
                            isinstance(v, (tuple, list)) or v is None
                            for v in (trace.x, trace.y, trace.z)
                            if hasattr(trace, "z") or v is not None
                        )
                        if trace.type == "heatmap"
                        else True
                    )
    for sinks, top in ((0, 4.1), (1, 2)):  # powers of ten
        panel.set(sinks=sinks)
        assert panel.figure.layout.yaxis2.range == (1, top)
    assert min(times[1:]) < 0.1  # the course's limit for a repaint


def test_the_stills(made_up):
    share = np.array([[0.0, 0.75], [0.005, 0.02]])
    drawn = figures.share_figure(share)
    assert [list(row) for row in drawn.data[0].z] == [[None, 0.75], [None, 0.02]]
    assert "Position 0 gets 19% of the attention" in figures.share_text(share)
    assert "in 1 of 4 heads. In layers 1 no head" in figures.share_text(share)
    drawn = figures.curves_figure({"all keys": [-1.0] * 300, "newest 64": [-2.0] * 300})
    assert [trace.name for trace in drawn.data] == ["all keys", "newest 64"]
    assert drawn.data[1].y[0] == pytest.approx(7.389)
    text = figures.curves_text({"a": [-1.0] * 300, "b": [-2.0] * 300}, 256)
    assert text == "Perplexity of tokens 256 … 300. A: 2.7; b: 7.4."


# --- the exercise ---------------------------------------------------------------------------------------


def solution():
    path = paths.chapters_dir() / "solutions" / "15_forgetting.py"
    spec = importlib.util.spec_from_file_location("solution_15", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.held_slots


@settings(deadline=None, max_examples=60)
@given(
    seq_len=st.integers(1, 60), num_sinks=st.integers(0, 5), window=st.integers(1, 9), slack=st.integers(0, 7)
)
def test_the_solution_is_what_a_ring_holds(tiny, seq_len, num_sinks, window, slack):
    """Against writing one token after another, and against the package's cache."""
    found = solution()(seq_len, num_sinks, window, slack)
    slots = figures.ring(seq_len, num_sinks, window, slack)
    assert found == {position: slot for slot, position, kind in slots if kind in ("sink", "window")}
    cache = kv.SlidingCache.for_model(tiny, window=window, num_sinks=num_sinks, slack=slack)
    for start in range(0, seq_len, slack + 1):
        tiny([1] * min(slack + 1, seq_len - start), cache, rows=[-1])
    assert sorted(found) == cache.key_positions(0).tolist()


def test_the_check_takes_the_solution():
    assert checks.verdict(NAME, solution()).status == "right"
