"""Chapter 10: the page's batches give what single runs give, counts by hand, the panel, the exercise."""

import importlib.util
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, measure, ops, paths, sizing
from kvcourse.bench.chapter_code import tagged_code
from kvcourse.figures import chapter_10 as figures
from kvcourse.widgets import chapter_10 as widgets

NOTEBOOK = paths.chapters_dir() / "10_batched_decode.ipynb"
NAMES = ["Anne", "Elizabeth opened the letter, and", "My dear Emma,"]
NEW = 16
SHAPE = dict(
    num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, hidden_size=8, intermediate_size=16, vocab_size=10,
    max_seq_len=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer.encode(name) for name in NAMES]


@pytest.fixture(scope="module")
def tiny():
    return kv.random_model("gpt2", **SHAPE)


def page_of(model):
    """What the cells tagged plain-batch define, with the imports of the page, for this model."""
    names = tagged_code(NOTEBOOK, "plain-batch")
    names.update(attention=ops.attention, gelu=ops.gelu, layer_norm=ops.layer_norm, softmax=ops.softmax)
    names.update(model=model, c=model.config)
    return names


def end_to_end(page, model, given, caches):
    batch = page["EndToEnd"](caches, [len(ids) for ids in given])
    flat = [token for ids in given for token in ids]
    logits = page["rows_gpt2"](
        flat, batch.positions(), batch.attend, model.params, model.config, batch.last_rows
    )
    batch.commit()
    return logits


def alone(model, given, caches):
    return np.concatenate([model(ids, cache, rows=[-1]) for ids, cache in zip(given, caches, strict=True)])


# --- the page's definitions are the package's -------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    chunk=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_both_layouts_give_every_sequence_what_it_gets_alone(tiny, lengths, chunk, seed):
    """Prefill of ragged prompts, then a chunk of some tokens each, then a decode step."""
    page, random = page_of(tiny), np.random.default_rng(seed)
    passes = [[random.integers(10, size=n).tolist() for n in lengths]]
    passes += [[random.integers(10, size=n).tolist() for _ in lengths] for n in (chunk, 1)]
    single = [kv.ContiguousCache.for_model(tiny) for _ in lengths]
    views = [kv.ContiguousCache.for_model(tiny) for _ in lengths]
    caches = [page["Reserved"](tiny.config, 32) for _ in lengths]
    grid = page["Rectangle"](tiny.config, lengths, 32)
    for new in passes:
        want = alone(tiny, new, single)
        view = kv.BatchView(views, [len(ids) for ids in new])
        package = tiny([token for ids in new for token in ids], view, rows=view.last_rows)
        # Logits of size 1, float32 (eps 1.2e-7), a few hundred additions in another order.
        np.testing.assert_allclose(package, want, atol=2e-4, rtol=0)
        np.testing.assert_allclose(end_to_end(page, tiny, new, caches), want, atol=2e-4, rtol=0)
        np.testing.assert_allclose(page["padded"](new, grid), want, atol=2e-4, rtol=0)
    assert [cache.seq_len for cache in caches] == [n + chunk + 1 for n in lengths]
    assert grid.columns == max(lengths) + chunk + 1


def test_positions_and_masks_by_hand(tiny):
    page = page_of(tiny)
    batch = page["EndToEnd"]([page["Reserved"](tiny.config, 9) for _ in range(2)], [2, 3])
    batch.caches[1].seq_len = 4
    assert batch.positions().tolist() == [0, 1, 4, 5, 6] and batch.last_rows == [1, 4]
    grid = page["LeftPadded"]([1, 3])
    assert grid.begin(3).tolist() == [[0, 0, 0], [0, 1, 2]]
    assert grid.visible.astype(int).tolist() == [
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
    ]
    grid.columns = 3
    assert grid.begin(1).tolist() == [[1], [3]]
    assert grid.visible.astype(int).tolist() == [[[0, 0, 1, 1]], [[1, 1, 1, 1]]]


def test_padding_may_hold_any_token(tiny):
    """A masked cell has no say: another id in it changes no logit at all."""
    page, lengths = page_of(tiny), [2, 5]
    found = []
    for pad in (0, 9):
        grid = page["Rectangle"](tiny.config, lengths, 8)
        ids = np.array([[pad, pad, pad, 3, 4], [1, 2, 3, 4, 5]])
        positions = grid.begin(5)
        found.append(page["rows_gpt2"](ids.ravel(), positions.ravel(), grid.attend, tiny.params, tiny.config))
    first, second = (logits.reshape(2, 5, -1) for logits in found)
    np.testing.assert_array_equal(first[:, 3:], second[:, 3:])
    assert (first[0, :3] != second[0, :3]).any()


def test_the_ledger_counts_what_the_formula_says(tiny):
    page = page_of(tiny)
    for batch, past in ((1, 1), (3, 1), (3, 7)):
        caches = [page["Reserved"](tiny.config, 16) for _ in range(batch)]
        end_to_end(page, tiny, [[1] * past] * batch, caches)
        page["ledger"].update(weights=0, caches=0)
        end_to_end(page, tiny, [[1]] * batch, caches)
        formula = sizing.pass_bytes(tiny.config, 1, past, batch, "float32", "float32")
        assert page["ledger"]["weights"] == formula.weights
        assert page["ledger"]["caches"] == formula.cache_read + formula.cache_written
        assert page["ledger"]["caches"] == batch * (past + 1) * 2 * 2 * 8 * 4


def test_the_page_names_a_product_that_reads_the_weights_once_for_each_sequence():
    """Question 3: x of (32, 1, d) is 32 products of a row, and gives what one product of 32 rows gives."""
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape, dtype=np.float32) for shape in ((32, 1, 16), (16, 24)))
    # Sums of 16 products of size 1 in another order.
    np.testing.assert_allclose((x @ w)[:, 0], x[:, 0] @ w, atol=1e-5, rtol=0)


# --- texts and answers that the page prints -----------------------------------------------


def test_the_texts_survive_a_hundred_times_the_rounding_of_a_batch(model, prompts):
    page = page_of(model)
    written = [kv.generate(model, ids, NEW) for ids in prompts]
    single = [kv.ContiguousCache.for_model(model) for _ in prompts]
    caches = [page["Reserved"](model.config, 64) for _ in prompts]
    grid = page["Rectangle"](model.config, [len(ids) for ids in prompts], 64)
    given, rounding, gap = prompts, 0.0, np.inf
    for step in range(NEW):
        want = alone(model, given, single)
        for logits in (end_to_end(page, model, given, caches), page["padded"](given, grid)):
            rounding = max(rounding, float(np.abs(logits - want).max()))
        second, first = np.sort(want, axis=1)[:, -2:].T
        gap = min(gap, float((first - second).min()))
        given = [[text[step]] for text in written]
    assert gap > 100 * rounding, (gap, rounding)


def test_wrong_masks_and_positions_are_far_from_the_threshold(model, prompts):
    """The page prints `< 1e-3: False`, and one digit of how far unmasked padding is off."""
    page, config = page_of(model), model.config
    lengths = [len(ids) for ids in prompts]
    want = np.concatenate([model(ids, rows=[-1]) for ids in prompts])
    grid = page["Rectangle"](config, lengths, 8)
    grid.begin(8)
    grid.visible = np.tri(8, dtype=bool)[None]
    grid.begin = lambda T: np.maximum(np.arange(T) - grid.padding[:, None], 0)
    off = np.abs(page["padded"](prompts, grid) - want).max(axis=1)
    assert [f"{difference:.1f}" for difference in off] == ["5.4", "0.0", "3.0"]
    assert all(abs(difference * 10 % 1 - 0.5) > 0.01 for difference in off[[0, 2]])  # no rounding at .05
    second, first = np.sort(want[0])[-2:]
    assert 0.16 < first - second < 0.24  # printed as 0.2
    assert off[0] > 2 * (first - second)


def test_an_empty_row_of_the_mask_spoils_the_whole_sequence(model, prompts):
    page = page_of(model)
    lengths = [len(ids) for ids in prompts]
    grid = page["Rectangle"](model.config, lengths, 8)
    begin = grid.begin

    def strict(T):
        positions = begin(T)
        grid.visible &= np.arange(T) >= grid.padding[:, None, None]
        return positions

    grid.begin = strict
    with np.errstate(invalid="ignore"):
        logits = page["padded"](prompts, grid)
    assert np.isnan(logits).all(axis=1).tolist() == [True, False, True] and not np.isnan(logits[1]).any()
    bad = np.isnan(grid.v[:, 0, :, :8]).any(axis=(1, 3))
    assert not bad[0].any() and bad[1].tolist() == [True] * 5 + [False] * 3 and bad[2:].all()


def printed():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))


def test_printed_answers_by_hand():
    text = printed()
    for answer in (
        "Answer: 52 pairs.",  # 3 · 4 / 2 + 8 · 9 / 2 + 4 · 5 / 2
        "Answer: 3, 8, 4.",
        "Answer: 3.87 MB.",
        "Answer: 14 sequences.",
        "Answer: 4 columns.",  # the prompt's 3 and its own
        "Answer: 83.3 %.",
        "Answer: 80.9 %.",
        "Answer: 3.00 times.",
        "Answer: 70 users.",
        "Answer: 17 users.",
    ):
        assert answer in text
    # 247,306,752 bytes of weights against 13 and 14 times 18,874,368 bytes of cache.
    assert 13 * 18_874_368 < 247_306_752 < 14 * 18_874_368
    assert (4 * 5_263_360 + 8 * 101 * 12_288) / 8 / 1e6 == pytest.approx(3.87, abs=0.004)


def test_the_paragraphs_of_round_4(tokenizer):
    novel = (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    sizes = [len(tokenizer.encode(text)) for text in novel.split("\n\n") if text.strip()][:32]
    asked, answers = sizes[0::2], sizes[1::2]
    assert (max(asked), sum(asked), max(answers), sum(answers)) == (449, 1203, 147, 628)
    assert "prompts, together 1,203, longest 449:" in printed()
    assert 1 - 1203 / (16 * 449) == pytest.approx(0.8325, abs=1e-4)
    assert 1 - (1203 + 612) / (16 * (449 + 146)) == pytest.approx(0.8093, abs=1e-4)
    assert "9,520    81%" in printed()


# --- the published sweep --------------------------------------------------------------------


def test_claim_c41_by_hand():
    assert sizing.kv_bytes(figures.GPT2, 512, "float16") == 18 * 2**20
    per_token = 2 * 12 * 12 * 64 * 2
    column = [round(n * 513 * per_token / 2**20, 1) for n in figures.BLOG_BATCHES]
    assert column == [18.0, 144.3, 577.1, 1154.2, 2308.5, 4617.0]
    assert all(
        abs(a - b) <= 0.5 for a, b in zip(column, figures.BLOG_KV_MIB, strict=True)
    )  # 2,308.5 is printed as 2,308
    floor = (247_306_752 + 256 * 513 * per_token) / 336e9 * 1000
    assert figures.blog_floor_ms(256) == pytest.approx(floor)
    assert 45.4 / floor == pytest.approx(3.00, abs=0.004)
    for n, ms, rate in zip(figures.BLOG_BATCHES, figures.BLOG_MS, figures.BLOG_TOKENS_S, strict=True):
        step = 100 if rate > 1000 else 5
        assert n / (ms + 0.05) * 1000 <= rate + step / 2 and n / (ms - 0.05) * 1000 >= rate - step / 2


TIMED = {
    1: {"step": 0.020, "weights": 0.010, "caches": 0.001},
    32: {"step": 0.080, "weights": 0.030, "caches": 0.040},
}


def timed(why=""):
    return {
        n: {name: measure.Timing((seconds,), why if n == 32 else "") for name, seconds in row.items()}
        for n, row in TIMED.items()
    }


def test_the_table_of_the_sweep():
    rows, bandwidth = figures.sweep_rows(timed())
    assert bandwidth == pytest.approx(494_613_504 / 0.010)
    assert rows[1]["bytes"] == 494_613_504 + 32 * 513 * 73_728
    assert rows[1]["floor"] == pytest.approx(10 * rows[1]["bytes"] / 494_613_504)
    assert rows[1]["rate"] == pytest.approx(400) and rows[0]["rate"] == pytest.approx(50)
    lines = figures.sweep_table(rows, bandwidth).split("\n")
    assert len(lines) == 4 and "÷ 49 GB/s" in lines[1]
    assert lines[3].split() == "32 1,705 MB 34.5 ms 30.0 40.0 70.0 80.0 2.3 12.5 400".split()
    busy = figures.sweep_table(*figures.sweep_rows(timed("busy"))).split("\n")
    assert figures.disturbed(rows) == ""
    assert busy[3].endswith("disturbed") and busy[4] == "disturbed at 32, do not quote: busy"


@pytest.mark.parametrize("batch", [1, 32])
def test_no_step_lies_below_its_floor(batch):
    """The products of batch 1 met a slow moment, a step did not."""
    slow = timed()
    slow[1]["weights"] = measure.Timing((1.0,), "")
    slow[batch]["step"] = measure.Timing((0.001,), "")
    rows, _ = figures.sweep_rows(slow)
    found = {row["batch"]: row for row in rows}
    assert found[batch]["floor"] == pytest.approx(1.0)  # ms, the fastest reading is its own
    assert all(row["floor"] <= row["step"] * (1 + 1e-9) for row in rows)


def test_the_figure_of_the_sweep_shows_both_machines():
    rows, _ = figures.sweep_rows(timed())
    drawn = figures.sweep_figure(rows)
    assert list(drawn.data[0].x) == [1, 32] and list(drawn.data[0].y) == [20.0, 80.0]
    blog = [trace for trace in drawn.data if trace.line.dash == "dash"]
    assert [list(trace.y) for trace in blog] == [figures.BLOG_MS, figures.BLOG_TOKENS_S]
    assert all("6 GB" in trace.hovertemplate for trace in blog)
    text = figures.sweep_text(rows)
    assert "32 sequences take 4.0 times as long as one and give 8.0 times the tokens" in text
    assert (
        "2.1 times as long for 15.2 times the tokens, its 256 take 14.2 times as long for 17.8 times" in text
    )
    assert text.endswith("17.8 times as many.")
    busy, _ = figures.sweep_rows(timed("busy"))
    assert figures.sweep_text(busy).endswith(
        "17.8 times as many. Disturbed, do not quote (1 of 2 sizes): at 32 busy."
    )


# --- stills and panel -------------------------------------------------------------------------


def test_the_stills():
    drawn = figures.mask_figure(["a", "b"], [2, 3])
    seen, never = (set(zip((b + 0.47 for b in bars.base), bars.y, strict=True)) for bars in drawn.data)
    assert {(round(x), y) for x, y in seen} == {(0, 0), (0, 1), (1, 1)} | {
        (x, y) for y in (2, 3, 4) for x in range(2, y + 1)
    }
    assert {(round(x), y) for x, y in never} == {(x, y) for y in (2, 3, 4) for x in (0, 1)}
    assert "9 pairs are seen. As one text, 5 rows would have 15, and 25" in figures.mask_text([2, 3])
    drawn = figures.rectangle_figure(["a", "b"], [1, 3], new=1)
    assert [list(bars.text) for bars in drawn.data] == [["0", "0", "1", "2"], ["1", "3"], ["", ""]]
    assert figures.rectangle_text([1, 3]).startswith("6 cells in prefill, 2 of them padding. Column 3")


H100 = {"model": "Llama 3.1 8B", "device": "H100 (80 GB)"}


def test_the_panels_numbers_by_hand():
    data = figures.users(64, 8000, **H100)
    weights = (8_030_261_248 - 128_256 * 4096) * 2  # a step reads no input embedding
    assert data["weights"][0] == pytest.approx(weights / 3.35e12 * 1000, rel=1e-6)
    assert data["caches"][63] == pytest.approx(64 * 8001 * 131_072 / 3.35e12 * 1000)
    assert data["total"][63] == pytest.approx(data["weights"][63] + data["caches"][63])
    assert data["room"] == (85_520_809_984 - 2 * 8_030_261_248) // (8001 * 131_072)
    assert figures.largest_batch(data, limit_ms=10) == 17
    assert figures.largest_batch(figures.users(1, 2000, **H100), limit_ms=10) == 70
    assert figures.largest_batch(data, limit_ms=1) == 0
    assert figures.largest_batch(data, limit_ms=1e9) == data["room"]


def test_a_second_card_pays_where_caches_are_read():
    gains = []
    for context in (200, 8000):
        data = figures.users(1, context, **H100)
        gains.append(data["total"][63] / data["total"][31])
    assert gains == pytest.approx([1.053, 1.691], abs=0.002)


def test_the_sentence_of_the_panel():
    text = figures.users_text(figures.users(1, 500, **H100))
    assert text.startswith(
        "Llama 3.1 8B on H100 (80 GB), 1 sequence of 500 tokens: a step takes at least 4.50"
    )
    assert "It does not fit: there is room for 66." in figures.users_text(figures.users(67, 8000, **H100))
    assert "There is room for 66." in figures.users_text(figures.users(66, 8000, **H100))
    small = figures.users(1, 500, "Llama 3.1 8B", "RTX 3060 Laptop (6 GB)")
    assert "It does not fit: there is room for 0." in figures.users_text(small)
    past = figures.users_text(figures.users(1, 2000, "GPT-2 124M", "H100 (80 GB)"))
    assert "the model has 1,024 positions" in past
    many = {**figures.users(1, 100, **H100), "compute": [9.0] * 256}
    assert "but 9.00 for the arithmetic" in figures.users_text(many)


def test_the_panel_at_the_ends_of_its_controls():
    panel = widgets.users_panel()
    traces = len(panel.figure.data)
    for model in figures.MODELS:
        for device in figures.DEVICES:
            for batch, context in ((1, 100), (256, 32000)):
                text = panel.set(model=model, device=device, batch=batch, context=context)
                assert f"{batch} sequence" in text and "does not work" not in text
                assert len(panel.figure.data) == traces
                for trace in panel.figure.data:
                    assert all(isinstance(values, (tuple, list)) for values in (trace.x, trace.y))


def test_the_first_control_changes_the_sentence_and_quickly():
    panel = widgets.users_panel()
    times = []
    for batch in range(2, 8):
        before, start = panel.text, time.process_time()
        assert panel.set(batch=batch) != before
        times.append(time.process_time() - start)  # of this process alone: others may be busy
    assert min(times[1:]) < 0.1  # the course's limit for a repaint


# --- the exercise -------------------------------------------------------------------------------

NAME = "10.batch_inputs"


def solution():
    path = paths.chapters_dir() / "solutions" / "10_batched_decode.py"
    spec = importlib.util.spec_from_file_location("solution_10", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.batch_inputs


@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_the_solution_gives_every_prompt_its_own_logits(tiny, rows, seed):
    """Padding at the left, at the right and on both sides, through the page's own rectangle."""
    page, random = page_of(tiny), np.random.default_rng(seed)
    T = max(sum(row) for row in rows)
    ids, real = random.integers(10, size=(len(rows), T)), np.zeros((len(rows), T), bool)
    for row, (tokens, before, _) in enumerate(rows):
        real[row, before : before + tokens] = True
    grid = page["Rectangle"](tiny.config, [T] * len(rows), T)
    positions, grid.visible, last = solution()(real)
    logits = page["rows_gpt2"](ids.ravel(), positions.ravel(), grid.attend, tiny.params, tiny.config)
    logits = logits.reshape(len(rows), T, -1)
    for row, text in enumerate(real):
        want = tiny(ids[row, text], rows=[-1])[0]
        # Logits of size 1, float32 (eps 1.2e-7), a few hundred additions in another order.
        np.testing.assert_allclose(logits[row, last[row]], want, atol=2e-4, rtol=0)


def test_what_padding_sees_and_where_it_stands_is_free_within_the_rules():
    def generous(real):
        positions, visible, last = solution()(real)
        T = real.shape[1]
        return np.where(real, positions, T - 1), visible | ~real[:, :, None], last.tolist()

    assert checks.verdict(NAME, generous).status == checks.RIGHT
    assert checks.verdict(NAME, lambda real: list(solution()(real))).status == checks.RIGHT


def test_messages_are_one_line():
    verdict = checks.verdict(NAME, lambda real: (np.zeros(real.shape, int), solution()(real)[1], [0]))
    assert verdict.status == checks.WRONG and "\n" not in verdict.message
    assert "last has shape (1,), expected (3,)" in verdict.message
    assert "row 0 ·····xxx, row 1 xxxxxxxx, row 2 ····xxxx" in verdict.message
