"""Chapter 01: forward pass, model of time, pictures, exercise; and that no text hangs on a rounding."""

import importlib.util
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, config, ops, paths, sizing
from kvcourse.bench.chapter_code import tagged_code
from kvcourse.figures import chapter_01 as figures
from kvcourse.figures import template
from kvcourse.widgets import chapter_01 as widgets

NOTEBOOK = paths.chapters_dir() / "01_the_waste.ipynb"
PROMPT, NEW, SEED = "Elizabeth opened the letter, and", 60, 11
GPT2 = config.lookup("gpt2")
ROWS = [
    {"tokens": n, "without": a, "with": b}
    for n, a, b in zip(figures.TOKENS, [40.0, 150.0, 290.0, 610.0, 1500.0], [30, 31, 32, 32, 33], strict=True)
]
DISTURBED = [*ROWS[:3], {**ROWS[3], "why": "other programs kept 2.0 of 2 cores busy"}, ROWS[4]]


@pytest.fixture(scope="module")
def ids():
    return kv.load_tokenizer("austen-gpt2").encode(PROMPT)


@pytest.fixture(scope="module")
def chapter():
    return tagged_code(NOTEBOOK, "plain-gpt2")


# --- the chapter's definitions are the package's ---------------------------------------


@pytest.mark.parametrize("count", [1, 2, 37, 200])
def test_the_plain_forward_pass_is_the_packages(model, chapter, count):
    ids = np.random.default_rng(count).integers(model.config.vocab_size, size=count).tolist()
    plain = chapter["plain_gpt2"](ids, model.params, model.config)
    assert plain.dtype == np.float32 and plain.shape == (count, model.config.vocab_size)
    # Logits are of size 10; both sides add the same numbers in another order, in float32 (eps 1.2e-7).
    np.testing.assert_allclose(plain, model(ids), atol=1e-4, rtol=0)
    last = chapter["plain_gpt2"](ids, model.params, model.config, rows=[-1])
    np.testing.assert_allclose(last, plain[-1:], atol=1e-4, rtol=0)


def test_the_plain_attend_is_the_packages_attention(chapter):
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 150, 16), dtype=np.float32)
    assert chapter["attend"](q, k, v).dtype == np.float32
    # Weighted means of numbers of size 1 over at most 150 rows, float32.
    np.testing.assert_allclose(chapter["attend"](q, k, v), ops.attention(q, k, v, start=0), atol=1e-5, rtol=0)


# --- no text of the page hangs on a rounding -------------------------------------------


def perturbed(model, ids, choose, seed, size):
    """The text with noise of the given size on every logit, as another processor might add."""
    noise = np.random.default_rng(seed)
    cache = kv.ContiguousCache.for_model(model)
    given, written = ids, []
    for _ in range(NEW):
        logits = model(given, cache, rows=[-1])[0]
        written.append(choose(logits + noise.uniform(-size, size, logits.shape).astype(np.float32)))
        given = written[-1:]
    return written


def rounding(model, ids):
    """The largest difference of logits along the greedy text, in one pass or token by token with a cache."""
    text = ids + kv.generate(model, ids, NEW)
    cache = kv.ContiguousCache.for_model(model)
    steps = np.concatenate([model([token], cache) for token in text])
    return float(np.abs(steps - model(text)).max())


def test_the_sampled_text_survives_a_hundred_times_the_rounding(model, ids):
    size = 100 * rounding(model, ids)

    def written(seed, size):
        return perturbed(model, ids, kv.sampled(temperature=0.7, top_p=0.8, seed=SEED), seed, size)

    assert len({tuple(written(seed, size)) for seed in range(5)} | {tuple(written(0, 0.0))}) == 1


def test_the_forgetful_text_survives_a_hundred_times_the_rounding(model, ids):
    size, given, written = 100 * rounding(model, ids), ids, []
    for _ in range(NEW):
        logits = model(given, rows=[-1])[0]
        assert gap(logits) > size
        written.append(kv.greedy(logits))
        given = written[-1:]
    for k in range(1, NEW):  # the page looks for the first place where the whole text says something else
        whole, alone = (model(seen, rows=[-1])[0] for seen in (ids + written[:k], written[k - 1 : k]))
        assert min(gap(whole), gap(alone)) > size
        if kv.greedy(whole) != kv.greedy(alone):
            break
    else:
        pytest.fail("the forgetful text is what the whole text would have said: choose another prompt")


def gap(logits):
    """Between the two largest logits."""
    second, first = np.sort(logits)[-2:]
    return float(first - second)


# --- the model of time ------------------------------------------------------------------


def test_the_books_line_is_proportional_above_a_decode_step():
    machine = figures.machines()[figures.H100]
    assert figures.pass_ms(machine, 1) == 7 and figures.pass_ms(machine, 175) == 7
    assert figures.pass_ms(machine, 2000) == 80 and figures.pass_ms(machine, 4000) == 160
    assert figures.pass_ms(machine, 500) == pytest.approx(20)


def test_chunks_of_query_rows_give_what_the_whole_matrix_gives():
    code = tagged_code(NOTEBOOK, "plain-gpt2") | {"c": GPT2, "figures": figures}
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (source,) = ("".join(c["source"]) for c in cells if "def attend_in_chunks" in "".join(c["source"]))
    exec(source.split("def random_qkv")[0], code)
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 150, 16), dtype=np.float32)
    for size in (1, 64, 128, 200):
        got = code["attend_in_chunks"](q, k, v, size)
        # Weighted means of numbers of size 1 over at most 150 rows, float32.
        np.testing.assert_allclose(got, code["attend"](q, k, v), atol=1e-5, rtol=0)


def test_measured_rows_become_a_machine():
    known, times = figures.machines(ROWS)[figures.HERE]
    assert known == [1, *figures.TOKENS] and times == [32.0, *(row["without"] for row in ROWS)]
    assert figures.HERE not in figures.machines()
    busy = figures.machines(DISTURBED)
    assert figures.HERE not in busy and figures.HERE + " (disturbed)" in busy


@settings(deadline=None)  # the first call imports
@given(st.integers(1, 3000), st.integers(1, 300), st.sampled_from([1, 3, 16]))
def test_both_loops_by_adding_step_by_step(prompt, new, batch):
    machine = figures.machines()[figures.H100]
    without, cached = figures.two_loops(machine, prompt, new, batch)
    by_hand = sum(float(figures.pass_ms(machine, batch * (prompt + i))) for i in range(new))
    assert without[-1] == pytest.approx(by_hand)
    first, later = figures.pass_ms(machine, batch * prompt), figures.pass_ms(machine, batch)
    assert cached[-1] == pytest.approx(float(first + (new - 1) * later))
    assert without[0] == cached[0]


@pytest.mark.parametrize("prompt, times, batch", [(2000, 10, 1), (200, 10, 1), (2000, 40, 3), (1, 2, 1)])
def test_the_crossing_is_the_first_step_that_reaches_it(prompt, times, batch):
    machine = figures.machines()[figures.H100]
    at = figures.crossing(machine, prompt, times, batch)
    without, cached = figures.two_loops(machine, prompt, at, batch)
    assert without[-1] >= times * cached[-1]
    assert not (without[:-1] >= times * cached[:-1]).any()


def test_claim_c04_and_its_audit():
    machine = figures.machines()[figures.H100]
    without, cached = figures.two_loops(machine, 2000, 1000)
    assert without[299] / 1000 == pytest.approx(25.794)
    assert without[-1] / cached[-1] == pytest.approx(14.1, abs=0.05)
    assert figures.crossing(machine, 2000, 40) == 10016
    assert cached[299] / 1000 == pytest.approx(0.080 + 299 * 0.007)
    assert figures.crossing(machine, 6765, 40) <= 1000 < figures.crossing(machine, 6764, 40)
    two, three = (np.divide(*figures.two_loops(machine, 2000, 1000, batch))[-1] for batch in (2, 3))
    assert two < 40 <= three and three == pytest.approx(41.5, abs=0.05)
    assert figures.crossing(machine, 2000, 100) is None


# --- the panel --------------------------------------------------------------------------


def test_the_sentence_of_the_panel():
    data = figures.loops(2000, 300, 1, 10, figures.H100)
    assert data["total"] == 644_850 and data["cached_total"] == 2_299 and data["at"] == 65
    text = figures.loops_text(data)
    for said in ("644,850 positions in 25.8 s", "2,299 in 2.17 s", "11.9 times", "from 65 new tokens on"):
        assert said in text


def test_one_of_a_thing_is_singular_and_large_ratios_are_written_out():
    one = figures.loops_text(figures.loops(1, 1, 1, 2, figures.H100))
    assert "1 position in" in one and "1 positions" not in one and "with one, the same time;" in one
    large = figures.loops_text(figures.loops(8000, 12_000, 64, 2, figures.LAPTOP))
    assert "e+" not in large and ", 11,021 times;" in large


def test_the_line_with_a_cache_drops_at_the_second_step_however_long_the_text():
    for new in (2, 300, 12_000):
        data = figures.loops(2000, new, 1, 10, figures.H100)
        assert data["steps"][:2] == [1, 2] and data["cached_positions"][:2] == [2000, 1]
    drawn = figures.loops_figure(data)
    assert next(line for line in drawn.data if line.name == "with cache").line.shape == "hv"
    axes = (drawn.layout.xaxis, drawn.layout.xaxis2, drawn.layout.yaxis, drawn.layout.yaxis2)
    assert {axis.tickformat for axis in axes} == {","}


def test_passes_of_each_position():
    times = [3, 3, 2, 1, 0]  # two prompt tokens, three new ones
    assert figures.passes_text(times) == "9 positions processed: 4 for the first time and 5 again."
    first, again = figures.passes_figure(times).data
    assert list(first.y) == [1, 1, 1, 1, 0] and list(again.y) == [2, 2, 1, 0, 0]


def test_positions_are_the_packages_count():
    for prompt, new, batch in ((1, 1, 1), (7, 40, 3), (500, 12, 64)):
        data = figures.loops(prompt, new, batch, 2, figures.H100)
        assert sum(data["positions"]) == data["total"]  # up to 60 steps all are shown
        assert sum(data["cached_positions"]) == data["cached_total"]
        assert data["total"] == batch * sizing.positions_processed(prompt, new, cached=False)


def test_a_crossing_out_of_reach_or_beyond_the_end_is_not_drawn():
    beyond = figures.loops(2000, 30, 1, 10, figures.H100)
    never = figures.loops(2000, 30, 1, 100, figures.H100)
    assert beyond["at"] == 65 and beyond["at_s"] is None
    assert never["at"] is None and "not reached within 12,000 new tokens" in figures.loops_text(never)
    for data in (beyond, never):
        assert list(figures.loops_figure(data).data[-1].x) == []


def test_beyond_gpt2s_positions_the_sentence_says_so():
    assert "1,024 positions" in figures.loops_text(figures.loops(1000, 26, 1, 10, figures.LAPTOP))
    assert "1,024 positions" not in figures.loops_text(figures.loops(1000, 25, 1, 10, figures.LAPTOP))
    assert "1,024 positions" not in figures.loops_text(figures.loops(1000, 26, 1, 10, figures.H100))


def test_the_panel_at_the_ends_of_its_controls():
    panel = widgets.loops_panel(ROWS)
    traces = len(panel.figure.data)
    for where in figures.machines(ROWS):
        for prompt, new, batch in ((1, 1, 1), (8000, 1, 64), (1, 12_000, 64), (8000, 12_000, 1)):
            text = panel.set(prompt=prompt, new=new, batch=batch, where=where)
            assert f"{prompt:,}" in text and "does not work" not in text
            assert len(panel.figure.data) == traces


def test_the_first_control_changes_the_sentence_and_quickly():
    panel = widgets.loops_panel()
    before, value = panel.text, panel.controls["prompt"].value
    times = []
    for step in range(1, 6):
        start = time.process_time()
        assert panel.set(prompt=value + step) != before
        times.append(time.process_time() - start)  # of this process alone: others may be busy
    assert min(times) < 0.1  # the course's limit for a repaint


def test_numbers_for_plotly_are_plain_lists():
    for trace in figures.loops_figure(figures.loops(2000, 300, 2, 10, figures.H100)).data:
        assert all(isinstance(values, (tuple, list)) for values in (trace.x, trace.y))


def test_live_text_escapes_and_has_a_fixed_name():
    page = widgets.LiveText("<b>one</b>")
    page.show(" & two\n", "step 1")
    assert "&lt;b&gt;one" in page.value and "&amp; two\n" in page.value and "step 1" in page.value
    assert repr(page) == "<LiveText>"


# --- FLOPs in two parts -----------------------------------------------------------------


def test_the_whole_square_is_twice_the_allowed_half_but_for_the_diagonal():
    for tokens in (1, 2, 1000):
        linear, square = figures.flops_parts(GPT2, tokens)
        half = figures.flops_parts(GPT2, tokens, whole_square=False)
        assert linear == half[0] and square * (tokens + 1) == 2 * tokens * half[1]


def test_claim_c03_flops_explain_2_1_from_512_to_1000():
    for whole in (True, False):
        growth = np.divide(*(sum(figures.flops_parts(GPT2, t, whole)) for t in (1000, 512)))
        assert 2.05 <= growth < 2.15
    assert round(figures.BLOG_WITHOUT_MS[4] / figures.BLOG_WITHOUT_MS[3], 1) == 3.0
    assert round(figures.BLOG_WITHOUT_MS[3] / figures.BLOG_WITHOUT_MS[2], 1) == 1.8


def test_scaled_parts_meet_the_curve_at_the_anchor():
    parts = figures.parts_scaled(GPT2, 512, 795.0)
    at = parts["tokens"].index(512)
    assert parts["both"][at] == 795.0 and parts["linear"][at] < 795.0
    assert all(a <= b for a, b in zip(parts["linear"], parts["both"], strict=True))
    text = figures.parts_text(parts, "the blog", [256, 1000], [435, 2400])
    assert text.endswith("where the blog has 435 and 1,700 ms at 1,000 where the blog has 2,400.")
    every = figures.parts_scaled(GPT2, 512, 795.0, every_row=True)
    assert every["both"][at] == 795.0 and every["linear"][at] > parts["linear"][at]
    assert "1,658 ms at 1,000 where the blog has 2,400" in figures.blog_over_flops(GPT2)[1]
    for rows, word in ((ROWS, False), (DISTURBED, True)):
        drawn, text = figures.here_over_flops(GPT2, rows)
        assert ("isturbed" in text) == word == ("disturbed" in drawn.data[-1].name)


def test_the_step_figure_and_its_sentence():
    recorded = figures.recorded_rows(
        {
            "lengths": [16, 1000],
            "seconds": {"plain": [0.1, 3.0], "cached": [0.02, 0.03]},
        }
    )
    assert recorded[0] == {"tokens": 16, "without": 100.0, "with": 20.0}
    drawn = figures.step_figure(ROWS, (recorded, "recorded on a test machine"))
    assert [line.name for line in drawn.data] == [
        "blog, without", "blog, with", "recorded run, without", "recorded run, with",
        "here, without", "here, with",
    ]  # fmt: skip
    assert all(line.line.color == template.PUBLISHED and line.line.dash == "dash" for line in drawn.data[:4])
    assert len({line.marker.symbol for line in drawn.data[:4]}) == 4
    assert "8 threads" in drawn.data[0].hovertemplate and "test machine" in drawn.data[2].hovertemplate
    text = figures.step_text(ROWS)
    assert "grows 38 times" in text and "1.1 times with one" in text and "is 45." in text
    assert "isturbed" not in text and "Disturbed, not to be quoted" in figures.step_text(DISTURBED)
    assert all("disturbed" in line.name for line in figures.step_figure(DISTURBED).data[2:])


def test_a_disturbed_row_says_so_and_is_not_quoted():
    marked = [line.endswith("disturbed") for line in figures.step_table(DISTURBED).split("\n")[2:]]
    assert marked == [False, False, False, True, False]
    assert "disturbed" not in figures.step_table(ROWS)
    assert figures.quoted(ROWS, "kept", "label") == (ROWS, "the run here")
    rows, source = figures.quoted(DISTURBED, "kept", "label")
    assert rows == "kept" and "label" in source and "disturbed" in source


def test_no_impossible_time_in_the_table_of_attends_parts():
    found = [
        {"tokens": 512, "whole": 300.0, "chunks": 200.0, "products": 50.0, "why": ""},
        {"tokens": 1000, "whole": 100.0, "chunks": 800.0, "products": 250.0, "why": ""},
    ]
    head, first, growth, last = figures.attend_table(found).split("\n")
    assert first.split() == ["512", *"300 ms 200 ms 100 ms 50 ms 150 ms".split()]
    assert growth.split() == ["T²", "3.8x", "0.3x", "4.0x", "-", "5.0x", "3.7x"]
    assert "cannot tell" in last and "-700" not in last
    found[1]["why"] = "busy"
    *_, growth, last = figures.attend_table(found).split("\n")
    assert growth.split() == ["T²", "3.8x", *"-----"] and last.endswith("disturbed")


# --- the exercise -----------------------------------------------------------------------

NAME = "01.positions_processed"


def right(prompt, new, cached):
    return sizing.positions_processed(prompt, new, cached)


def test_the_solution_passes_and_is_the_packages_formula():
    path = paths.chapters_dir() / "solutions" / "01_the_waste.py"
    spec = importlib.util.spec_from_file_location("solution_01", path)
    solution = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(solution)
    assert checks.verdict(NAME, solution.positions_processed).status == checks.RIGHT
    for prompt in (1, 2, 50):
        for new in range(5):
            for cached in (False, True):
                assert solution.positions_processed(prompt, new, cached) == right(prompt, new, cached)


def test_a_stub_is_not_done():
    assert checks.verdict(NAME, lambda prompt, new, cached: ...).status == checks.NOT_DONE


MISTAKES = [
    (lambda p, n, c: p + n - 1 if c else sum(range(p + 1, p + n + 1)), "every step is one position too long"),
    (lambda p, n, c: p + n - 1 if c else p * n, "you count the prompt at every step"),
    (lambda p, n, c: p + n - 1, "that is the count with a cache"),
    (lambda p, n, c: p + n - 1 if c else p + n, "length of the finished text"),
    (lambda p, n, c: p + n - 1 if c else (p + n) * n, "you pass the finished text at every step"),
    (lambda p, n, c: p + n - 1 if c else n * (n - 1) // 2, "you count the new tokens only"),
    (lambda p, n, c: p + n if c else right(p, n, c), "one too many"),
    (lambda p, n, c: n if c else right(p, n, c), "you forgot the prompt"),
    (lambda p, n, c: n - 1 if c else right(p, n, c), "you forgot the prompt"),
    (lambda p, n, c: right(p, n, False), "that is the count without a cache"),
    (lambda p, n, c: p * n if c else right(p, n, c), "you pass the prompt at every step"),
    (lambda p, n, c: p + n - 1 if c else right(p, n, c), "no token is asked for"),
    (lambda p, n, c: right(p, n, c) + 5, "Write down what each of the first three steps passes"),
    (lambda p, n, c: [1, 2], "expected the number 644,850"),
]


@pytest.mark.parametrize("wrong, words", MISTAKES, ids=[words for _, words in MISTAKES])
def test_the_check_names_the_mistake(wrong, words):
    verdict = checks.verdict(NAME, wrong)
    assert verdict.status == checks.WRONG and words in verdict.message, verdict.message
