"""Chapter 09: the page's counts and its fit are right, the audits by hand, figures, panel, exercise."""

import importlib.util
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, measure, paths, sizing
from kvcourse.bench.chapter_code import tagged_code
from kvcourse.figures import chapter_09 as figures
from kvcourse.widgets import chapter_09 as widgets

NOTEBOOK = paths.chapters_dir() / "09_prefill_and_decode.ipynb"
LLAMA = kv.catalogue()["llama-3.1-8b"]


@pytest.fixture(scope="module")
def printed():
    """Everything that the page's compared cells print."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    compared = [c for c in cells if "nbval-ignore-output" not in c["metadata"].get("tags", [])]
    return "".join("".join(output.get("text", "")) for cell in compared for output in cell.get("outputs", []))


# --- the page's definitions --------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["llama-3.1-8b", "llama-2-7b", "llama-3.1-70b", "qwen2.5-1.5b", "qwen2.5-3b"]),
    st.integers(1, 5000),
    st.integers(0, 40_000),
    st.integers(1, 600),
)
def test_the_pages_counts_are_the_packages(name, new, past, batch):
    page, shape = tagged_code(NOTEBOOK, "plain-work"), kv.catalogue()[name]
    work = sizing.work(shape, new, past, batch)
    assert page["flops"](shape, new, past, batch) == work.flops.total
    traffic = work.traffic
    assert page["moved"](shape, new, past, batch) == (
        traffic.weights,
        traffic.cache_read,
        traffic.cache_written,
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 999), st.integers(4, 40))
def test_the_pages_fit_is_numpys(seed, count):
    rng = np.random.default_rng(seed)
    x = rng.permutation(np.linspace(1, 1000, count))
    y = 20 + 0.3 * x + rng.normal(0, 5, count)
    slope, intercept, errors, residuals = tagged_code(NOTEBOOK, "plain-fit")["fit_line"](x, y)
    # polyfit divides by n − 2 as well (since NumPy 1.16); float64, condition below 1e4.
    (line_slope, line_intercept), covariance = np.polyfit(x, y, 1, cov=True)
    np.testing.assert_allclose([slope, intercept], [line_slope, line_intercept], rtol=1e-8)
    np.testing.assert_allclose(errors, np.sqrt(np.diag(covariance)), rtol=1e-8)
    np.testing.assert_allclose(residuals, y - np.polyval((line_slope, line_intercept), x), atol=1e-8)


def test_the_standard_error_is_how_far_the_slope_misses():
    """2,000 runs with new noise: the slopes scatter as the error of one run says."""
    fit, x = tagged_code(NOTEBOOK, "plain-fit")["fit_line"], np.repeat([250.0, 500.0, 750.0, 1000.0], 2)
    rng = np.random.default_rng(1)
    found = [fit(x, 20 + 0.3 * x + rng.normal(0, 5, len(x))) for _ in range(2000)]
    scatter = np.std([slope for slope, *_ in found])
    # The mean error of 6 free numbers is 4 % low (c4), and 2,000 draws know a scatter within 1.6 %.
    assert np.mean([errors[0] for _, _, errors, _ in found]) == pytest.approx(scatter, rel=0.08)


def test_the_server_of_break_it_computes_what_differs_and_never_nothing(model):
    names = tagged_code(NOTEBOOK, "plain-server")
    names.update(model=model, kv=kv)
    server = names["Server"]()
    ids = list(range(5, 45))
    other = [*ids[:30], 7, 8, 9]
    for prompt, computed in ((ids, 40), (ids, 1), (other, 3), (ids[:30], 1), ([1, *ids], 41)):
        logits = server.first_token(prompt)
        assert server.computed[-1] == computed
        # Logits of size 10, float32, six layers; other shapes of the same products.
        np.testing.assert_allclose(logits[0], model(prompt)[-1], atol=2e-4, rtol=0)


def test_a_run_in_order_misleads_and_a_shuffled_one_does_not(printed):
    assert "in order: 15.8 ± 0.2 ms" in printed and "shuffled: 11.4 ± 0.7 ms" in printed
    # By hand: the middle of 30 calls that slow by 1 % each is 1.01 ** 14.5 of the first.
    assert "10.0 at the first call, 11.6 in the middle, 13.3 at the last" in printed


# --- the audits, by hand ------------------------------------------------------------------


def test_claim_c36_by_hand(printed):
    cache = 2 * 32 * 8 * 128 * 2 * 2300
    assert cache == 301_465_600 == sizing.kv_bytes(LLAMA, 2300)
    assert round(100 * cache / 16e9, 2) == 1.88 and round(100 * cache / (16e9 + cache), 2) == 1.85
    assert "of the 16 GB that the book gives the weights: 1.88%; of all bytes: 1.85%" in printed
    # One token against 15.01 GB, its cache and its own row: the 7.5 billion weights of the products, twice.
    linear = 2 * (32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128_256)
    attention = 4 * 32 * 4096 * 2301
    intensity = (linear + attention) / (LLAMA.step_parameters * 2 + cache + 131_072)
    assert intensity == pytest.approx(1.06, abs=0.005) and "1.06 FLOP/B" in printed
    # An endless batch: one request's arithmetic over its own rows.
    assert f"{(linear + attention) / (cache + 131_072):.1f} FLOP per byte" in printed


def test_counting_as_primer_c_does_by_hand(printed):
    """Llama 3.1 8B, one layer: 4,096 → Q 4,096, K and V 1,024, back to 4,096, and 14,336 in its MLP."""
    matrices = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14_336), (4096, 14_336)]
    matrices += [(14_336, 4096)]
    token = 32 * sum(into + out for into, out in matrices) * 2
    work = sizing.work(LLAMA, 2000)
    moved = work.traffic.total + 2000 * token
    said = f"counted as in primer C: {moved / 1e9:.2f} GB, {work.flops.total / moved:,.0f} FLOP/B"
    assert said in printed and "25.76 GB, 1,125 FLOP/B" in said
    # "Each verdict below is the same by either count": the warm prefill on every card, and the batches.
    for new, past, batch in ((200, 1800, 1), (1, 2300, 1), (1, 2300, 64), (1, 2300, 512)):
        work = sizing.work(LLAMA, new, past, batch)
        with_rows = work.flops.total / (work.traffic.total + batch * new * token)
        for key in figures.DEVICES.values():
            ridge = sizing.device(key).ridge
            assert (work.intensity > ridge) == (with_rows > ridge)


def test_the_batch_that_an_h100_holds_by_hand(printed):
    free = 81_559 * 2**20 - 2 * 8_030_261_248  # 81,559 MiB, weights in 16 bits
    held = free // 301_465_600
    step = (7_504_924_672 * 2 + held * (301_465_600 + 131_072)) / 3.35e12
    assert held == 230 and "beside the weights it holds 230 requests" in printed
    assert f"at most {held / step:,.0f} tokens a second" in printed and round(held / step) == 9132


def test_the_recorded_passes_bend_and_start_below_zero(printed):
    """What the prose says of the recorded residuals; a new recorded run may want other words."""
    run = measure.recorded_runs("numpy")[0]
    lengths = np.array(run.results["lengths"], float)
    passes, steps = (1000 * np.array(run.results["seconds"][key]) for key in ("uncached", "cached"))
    off = passes - np.polyval(np.polyfit(lengths, passes, 1), lengths)
    assert off[0] > 0 and off[-1] > 0 and (off[2:4] < 0).all()
    assert np.abs(steps - np.polyval(np.polyfit(lengths, steps, 1), lengths)).max() < 0.25
    assert np.polyfit(lengths[2:], passes[2:], 1)[1] < 0 and "starts at -47.0 ms" in printed


def test_claim_c38_by_hand(printed):
    assert 16e9 / 131_072 == pytest.approx(122_070.3, abs=0.1)
    assert 7e-3 * 3.35e12 / 131_072 == pytest.approx(178_909.3, abs=0.1)
    assert 16e9 / 301_465_600 == pytest.approx(53.07, abs=0.01)
    assert 8_030_261_248 * 2 / 3.35e12 == pytest.approx(4.79e-3, abs=5e-6)
    for said in (
        "122,070",
        "178,909",
        "53.07",
        "4.79 ms",
        "90 µs",
        "1.29%",
        "26.21%",
        "17.89%",
        "1.46 times",
    ):
        assert said in printed, said
    assert "287 MiB taken for 287 MB: 86 µs" in printed


def test_claim_c37_by_hand(printed):
    per_token = (95 - 21) / 1800
    assert round(21 - 200 * per_token, 1) == 12.8 and round(21 + 3800 * per_token) == 177
    assert "fixed 12.8 ms" in printed and "Answer: 177 ms" in printed


def test_claim_c40_by_hand(printed):
    assert round(41 / 1.1e-3) == 37_273 and round(41 - 1.1 * 7.9, 1) == 32.3
    slope = (1000 / (41 - 1.1 * 7.9) - 1000 / 41) / 7.9
    assert round(slope, 2) == 0.83
    assert "reaches 0 at 37,273 tokens" in printed and "24.39 → 30.95 ms, 0.83 ms per 1,000" in printed
    assert 5 < slope / (19_584 * 1000 / 120e9 * 1000) < 5.15 and "measured: 5.1 times" in printed


def test_claim_c39_by_hand(printed):
    assert "300 more steps 2.1 s" in printed
    for said in (
        "300 + 300: 300 passes over 599",
        "600 + 300: 300 passes over 899",
        "300 + 600: 600 passes over 899",
    ):
        assert said in printed
    assert f"{300 * sizing.step_time(LLAMA, sizing.device('h100-sxm'), 300).total:.2f} s" in printed


def test_printed_answers_do_not_hang_on_a_rounding():
    """First pass above the ridge: the one before lies below it by more than a float can blur."""
    ridge = sizing.device("h100-sxm").ridge
    for new, past in ((317, 0), (302, 1800)):
        below, above = (sizing.work(LLAMA, n, past).intensity for n in (new - 1, new))
        assert below < ridge * (1 - 1e-6) and above > ridge * (1 + 1e-6)
    for batch, context in ((398, 100), (1262, 300)):
        below, above = (sizing.work(LLAMA, 1, context, n).intensity for n in (batch - 1, batch))
        assert below < ridge * (1 - 1e-6) and above > ridge * (1 + 1e-6)
    warm = sizing.work(LLAMA, 200, 1800).intensity
    for key in figures.DEVICES.values():
        assert abs(warm / sizing.device(key).ridge - 1) > 0.04


# --- the panel ----------------------------------------------------------------------------


def test_the_passes_of_the_panel_are_the_packages():
    data = figures.passes("Llama 3.1 8B", "H100", 2000, 1800, 64)
    cold, warm, alone, together = data["passes"]
    device = sizing.device("h100-sxm")
    assert cold["total"] == sizing.time_to_first_token(LLAMA, device, 2000).total
    assert warm["total"] == sizing.time_to_first_token(LLAMA, device, 2000, cached=1800).total
    assert alone["total"] == sizing.step_time(LLAMA, device, 2000).total
    assert together["total"] == sizing.step_time(LLAMA, device, 2000, batch=64).total
    assert [one["bound"] for one in data["passes"]] == ["compute", "memory", "memory", "memory"]
    assert data["ridge"] == pytest.approx(295.3, abs=0.1)


def test_the_last_token_is_always_computed():
    _, warm, _ = figures.passes("Llama 3.1 8B", "H100", 500, 9000, 1)["passes"]
    assert (warm["new"], warm["past"]) == (1, 499)


def test_dots_lie_on_the_roof_and_the_books_below_it():
    figure = figures.passes_figure(figures.passes("Llama 3.1 8B", "H100", 2000, 1800, 64))
    roof, ridge, *dots, book = figure.data[:7]
    bandwidth, peak = 3.35, 989.4  # TB/s, TFLOP/s
    assert roof.x[1] == ridge.x[0] == pytest.approx(peak / bandwidth, rel=1e-4)
    for dot in dots:
        assert dot.y[0] == pytest.approx(min(peak, bandwidth * dot.x[0]), rel=1e-3)
    assert [dot.showlegend for dot in dots] == [True] * 4
    for x, y in zip(book.x, book.y, strict=True):
        assert y < 0.8 * min(peak, bandwidth * x)
    elsewhere = figures.passes_figure(figures.passes("Llama 2 7B", "H100", 2000, 0, 1))
    assert not elsewhere.data[6].x and [dot.showlegend for dot in elsewhere.data[2:6]] == [
        True,
        False,
        True,
        False,
    ]


def test_bars_are_the_shares_of_the_time():
    data = figures.passes("Llama 3.1 8B", "H100", 2300, 0, 64)
    weights, caches, compute = figures.passes_figure(data).data[-3:]
    for row, one in enumerate(data["passes"]):
        longest = max(weights.x[row] + caches.x[row], compute.x[row])
        assert longest == pytest.approx(100, abs=0.02)  # two roundings to 0.01
        assert caches.base[row] == weights.x[row]
        assert compute.x[row] == pytest.approx(100 * one["compute"] / one["total"], abs=0.01)


def test_the_sentence_says_what_does_not_fit():
    text = figures.passes_text(figures.passes("Llama 2 7B", "L4", 5000, 0, 8))
    assert "The model has 4,096 positions: beyond them this is arithmetic only." in text
    assert "Weights and caches take 34 GB, the card has 24 GB: it does not fit." in text
    text = figures.passes_text(figures.passes("Llama 3.1 8B", "H100", 2300, 0, 64))
    assert "does not fit" not in text and "56% of the bytes are caches" in text
    assert "over 99%" in figures.passes_text(figures.passes("Qwen2.5 1.5B", "H200", 32_000, 0, 512))


def test_the_panel_at_the_ends_of_its_controls():
    panel = widgets.roofline_panel()
    (low_x, high_x), (low_y, high_y) = figures._FLOP_PER_BYTE, figures._TFLOPS
    for model in figures.MODELS:
        for device in figures.DEVICES:
            for prompt, cached, batch in ((100, 0, 1), (100, 64_000, 512), (128_000, 0, 512)):
                text = panel.set(model=model, device=device, prompt=prompt, cached=cached, batch=batch)
                assert text.startswith(f"{model} on the {device}, prompt {prompt:,}")
                for trace in panel.figure.data[1:7]:  # the roof runs from edge to edge
                    for x, y in zip(trace.x, trace.y, strict=True):
                        assert low_x < math.log10(x) < high_x and low_y <= math.log10(y) < high_y


def test_the_first_control_changes_the_sentence_and_quickly():
    panel = widgets.roofline_panel()
    times = []
    for prompt in (1500, 2000, 2300, 3000, 4000):
        before, start = panel.text, time.process_time()
        assert panel.set(prompt=prompt) != before
        times.append(time.process_time() - start)  # of this process alone: others may be busy
    assert min(times) < 0.1  # the course's limit for a repaint


# --- measured rows -------------------------------------------------------------------------

ROWS = [
    {"tokens": n, "first": first, "step": step, "why": ""}
    for n, first, step in (
        (250, 300, 20),
        (500, 600, 22),
        (500, 640, 23),
        (1000, 1300, 25),
        (1000, 1260, 24.2),
    )
]


RUN = measure.RecordedRun(
    "x", "numpy", "c", "2026-01-02", {"cpu": "C", "threads": 2}, {"p": "1"},
    {
        "lengths": [256, 512, 1000],
        "seconds": {"uncached": [0.3, 0.5, 1.2], "cached": [0.02, 0.02, 0.022]},
    },
)  # fmt: skip


def test_growths_are_this_machines_or_the_recorded_ones():
    found, source = figures.growths(ROWS, None)
    assert found == {"first": pytest.approx(2.1), "step": pytest.approx(1.1)} and source == "the run here"
    busy = [{**ROWS[0], "why": "busy"}, *ROWS[1:]]
    found, source = figures.growths(busy, RUN)
    assert found == {"first": pytest.approx(2.4), "step": pytest.approx(1.1)}
    assert "recorded 2026-01-02: C, 2 threads" in source and "disturbed" in source
    assert "1.95 times the tokens" in source and round(1000 / 512, 2) == 1.95
    assert figures.disturbed(busy) == "disturbed, do not quote (1 of 5 calls): at 250 tokens busy"
    assert figures.disturbed(ROWS) == ""


def test_the_figure_of_both_times():
    figure = figures.latency_figure(ROWS, (1.2, 10), (0.005, 19), RUN)
    points, line, step_points, step_line, recorded = figure.data
    assert list(recorded.y) == [20, 20, 22] and recorded.line.dash == "dash"
    assert "recorded 2026-01-02: C" in recorded.hovertemplate
    assert list(points.x) == [250, 500, 500, 1000, 1000] and list(step_points.y) == [20, 22, 23, 25, 24.2]
    assert list(line.y) == [10, 1210] and list(step_line.y) == [19, 24]
    assert figures.latency_text(ROWS) == (
        "From 250 to 1,000 prompt tokens the time to first token grows 4.2 times and the time per token "
        "1.21 times; from 500, 2.10 and 1.10 times."
    )
    busy = [{**row, "why": "busy"} for row in ROWS]
    assert figures.latency_text(busy).endswith("Disturbed, do not quote (5 of 5 calls): at 250 tokens busy.")
    assert figures.latency_figure(busy, (1, 1), (1, 1), RUN).data[0].name == "here, disturbed"


def test_residuals_are_drawn_in_order_and_compared():
    residuals = {"time per token": [0.3, -0.4, 0.0], "tokens per second": [3.0, 4.0, 0.0]}
    figure = figures.residual_figure([300, 100, 200], residuals)
    assert list(figure.data[0].x) == [100, 200, 300] and list(figure.data[1].y) == [4.0, 0.0, 3.0]
    assert "time per token 0.3 % of its mean and tokens per second 2.9 %" in figures.residual_text(residuals)
    assert figures.straighter(residuals) == "time per token"
    assert figures.straighter({"a": [1.0, 1.0], "b": [1.1, -1.1]}) is None


def test_numbers_in_words():
    assert [figures.intensity(i) for i in (1.058, 30.25, 1896.8)] == ["1.06", "30.2", "1,897"]


# --- the exercise ---------------------------------------------------------------------------


def solution():
    path = paths.chapters_dir() / "solutions" / "09_prefill_and_decode.py"
    spec = importlib.util.spec_from_file_location("solution_09", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.doubling_context


@settings(deadline=None)
@given(st.integers(1, 10**13), st.integers(1, 200_000), st.sampled_from([1, 2, 4]))
def test_the_solution_is_the_first_whole_number_that_is_enough(weights, context, number):
    tokens, requests = solution()(LLAMA, weights, context, number)
    size = {1: "fp8", 2: "float16", 4: "float32"}[number]
    assert sizing.kv_bytes(LLAMA, tokens, size) >= weights > sizing.kv_bytes(LLAMA, tokens - 1, size)
    one = sizing.kv_bytes(LLAMA, context, size)
    assert requests * one >= weights > (requests - 1) * one


def test_the_checks_own_cases_by_hand():
    from kvcourse.checks import chapter_09 as check

    assert solution()(LLAMA, 16_000_000_000, 2300) == (122_071, 54)
    assert check._right(*check.CASES[0]) == (122_071, 54)
    assert check._right(*check.CASES[2]) == (131_072, 64)  # 16 GiB over 128 KiB: comes out even
    assert check._right(*check.CASES[5]) == (6001, 21)  # 20 requests of 300 rows, and one byte
    assert check._right(*check.CASES[3]) == (108_507, 109)  # 36 layers, 8 heads of 128, 1 byte: 73,728 a row


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("number", [int, float, np.int64])
def test_a_right_answer_may_be_a_list_of_any_whole_numbers(kind, number):
    def answer(config, weight_bytes, context, bytes_per_number=2):
        return kind(map(number, solution()(config, weight_bytes, context, bytes_per_number)))

    assert checks.verdict("09.doubling_context", answer).status == checks.RIGHT


def test_an_answer_that_nothing_explains_is_told_what_was_expected():
    said = checks.verdict("09.doubling_context", lambda *a, **k: (5, 6)).message
    assert "expected 122,071 tokens and 54 requests, got 5 and 6" in said
    assert "must be numbers" in checks.verdict("09.doubling_context", lambda *a, **k: ("5", 6)).message
