"""Chapter 03: masks, marks, pictures, exercises; and that nothing the page prints hangs on a rounding."""

import ast
import importlib.util
import json
import math
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import kvcourse as kv
from kvcourse import checks, evaluation, ops, paths, progress
from kvcourse.checks import chapter_03 as exercise
from kvcourse.figures import chapter_03 as figures
from kvcourse.figures import template
from kvcourse.tap import masked_attention
from kvcourse.widgets import chapter_03 as widgets

NOTEBOOK = paths.chapters_dir() / "03_masks.ipynb"
SENTENCE, PROMPT = "Elizabeth opened the letter, and read it again.", "Elizabeth opened the letter, and"
PAIRS = [(start, T) for T in range(1, 13) for start in range(13 - T)]
CHUNKS = st.lists(st.integers(1, 6), min_size=1, max_size=8)
LAYER, LONG, SIZES, NEW = 3, 257, (1, 4, 16, 64, 128, 256, 257), 24


@pytest.fixture(autouse=True)
def record(tmp_path, monkeypatch):
    file = tmp_path / "progress.json"
    monkeypatch.setenv("KVCOURSE_PROGRESS", str(file))
    return file


@pytest.fixture(scope="module")
def tok():
    return kv.load_tokenizer("austen-gpt2")


def pieces(n, size):
    return [size] * (n // size) + [n % size] * (n % size > 0)


# --- the page's definitions are the package's ------------------------------------------------


@pytest.fixture(scope="module")
def page():
    """All functions that the page defines, by name; its cells also print, so only the definitions are run."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    trees = (ast.parse("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code")
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {"np": np, "math": math}
    exec(compile(ast.Module(functions, []), NOTEBOOK.name, "exec"), names)
    return names


def test_there_are_78_pairs_and_the_rows_are_the_packages(page):
    rows_of_triangle = page["rows_of_triangle"]
    assert len(PAIRS) == 78
    for start, T in [*PAIRS, (100, 1), (90, 37)]:
        np.testing.assert_array_equal(rows_of_triangle(start, T), ops.causal_mask(start, T))
    # Claim C10, by hand.
    assert rows_of_triangle(4, 2).astype(int).tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert rows_of_triangle(6, 1).all() and rows_of_triangle(6, 1).shape == (1, 7)
    assert rows_of_triangle(0, 3).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("start, T", [(0, 12), (9, 3), (11, 1), (0, 1), (40, 25)])
def test_the_pages_attend_is_the_packages(page, start, T):
    q, k, v = np.random.default_rng(start).standard_normal((3, 4, start + T, 16), dtype=np.float32)
    got = page["attend"](q[:, start:], k, v, ops.causal_mask(start, T))
    assert got.dtype == np.float32
    # Weighted means of numbers of size 1 over at most 65 rows, float32 (eps 1.2e-7).
    np.testing.assert_allclose(got, ops.attention(q[:, start:], k, v, start), atol=1e-5, rtol=0)


@given(CHUNKS)
def test_right_masks_stacked_are_the_triangle_for_any_chunks(page, chunks):
    n = sum(chunks)
    np.testing.assert_array_equal(page["stacked"](chunks, ops.causal_mask), np.tri(n, dtype=bool))
    masked = sum(int((~ops.causal_mask(sum(chunks[:i]), T)).sum()) for i, T in enumerate(chunks))
    seen = sum(int(ops.causal_mask(sum(chunks[:i]), T).sum()) for i, T in enumerate(chunks))
    assert masked == sum(T * (T - 1) // 2 for T in chunks)
    assert seen == n * (n + 1) // 2  # the hint says so


class Chunked:
    """Keeps K and V from chunk to chunk and masks each chunk by a rule: what the page runs as one pass."""

    def __init__(self, config, rule):
        self.config, self.max_seq_len = config, config.max_seq_len
        self.rule, self.kept, self.start = rule, {}, 0

    def begin(self, n):
        self.n = n
        return np.arange(self.start, self.start + n)

    def attend(self, layer, q, k, v, rotate=None):
        if layer in self.kept:
            k, v = (np.concatenate(pair, axis=1) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        return masked_attention(q, k, v, self.rule(self.start, self.n))

    def commit(self):
        self.start += self.n

    def abort(self):
        raise AssertionError("a pass failed")


@pytest.mark.parametrize("chunks", [[4, 4, 4], [8, 1, 1, 1, 1], [3, 2, 5, 2], [12]])
@pytest.mark.parametrize("rule", [ops.causal_mask, figures.top_left])
def test_chunk_by_chunk_is_one_pass_with_the_stacked_mask(model, tok, page, chunks, rule):
    ids, cache, rows, start = tok.encode(SENTENCE), Chunked(model.config, rule), [], 0
    for T in chunks:
        rows.append(model(ids[start : start + T], cache))
        start += T
    whole = model(ids, kv.Tap(model.config, mask=page["stacked"](chunks, rule)))
    # Logits of size 10 from six layers; the shapes of the products differ, so their sums are ordered anew.
    np.testing.assert_allclose(np.concatenate(rows), whole, atol=2e-4, rtol=0)


def test_the_pages_top_left_is_the_figures(page):
    for start, T in PAIRS:
        np.testing.assert_array_equal(page["top_left"](start, T), figures.top_left(start, T))


# --- what PyTorch does (claim C12) ----------------------------------------------------------


@pytest.mark.parametrize("start, T", PAIRS)
def test_pytorchs_masks(start, T):
    q, k, v = np.random.default_rng(17 * start + T).standard_normal(
        (3, 1, 4, start + T, 16), dtype=np.float32
    )

    def torch_rows(**mask):
        given = (torch.from_numpy(a) for a in (q[:, :, start:], k, v))
        return scaled_dot_product_attention(*given, **mask)[0].numpy()

    def ours(mask):
        return masked_attention(q[0, :, start:], k[0], v[0], mask)

    # Weighted means of numbers of size 1, float32.
    close = {"atol": 1e-5, "rtol": 0}
    np.testing.assert_allclose(torch_rows(is_causal=True), ours(figures.top_left(start, T)), **close)
    right = ours(ops.causal_mask(start, T))
    np.testing.assert_allclose(torch_rows(attn_mask=causal_lower_right(T, start + T)), right, **close)
    np.testing.assert_allclose(
        torch_rows(attn_mask=torch.from_numpy(ops.causal_mask(start, T))), right, **close
    )
    wrong = np.abs(torch_rows(is_causal=True) - right).max(axis=(0, 2)) > 1e-3
    assert wrong.tolist() == [start > 0] * T  # every row, as soon as something came before


# --- the mask of a chunk, drawn -----------------------------------------------------------


@given(st.integers(0, 6), st.integers(1, 6), st.booleans())
def test_every_cell_is_drawn_once_and_the_wrong_ones_are_counted(start, T, overlay):
    data = figures.chunk(start, T, overlay, 4)
    drawing = figures.chunk_figure(data)
    assert data["shape"] == (4, T, start + T)
    assert len(data["wrong"]) == start * T
    cells = [
        (y, round(base + 0.47))
        for trace in drawing.data[:3]
        for y, base in zip(trace.y, trace.base, strict=True)
    ]
    assert sorted(cells) == [(start + row, key) for row in range(T) for key in range(start + T)]
    before, new, masked, earlier = drawing.data[:4]
    assert len(before.y) == start * T
    assert len(new.y) == T * (T + 1) // 2 and len(masked.y) == T * (T - 1) // 2
    assert len(earlier.y) == start * (start + 1) // 2
    assert len(drawing.data) == 4 + overlay
    if overlay:
        assert set(drawing.data[4].text) <= {"×"} and len(drawing.data[4].y) == start * T


def test_a_still_of_fewer_positions_ends_its_axes_there():
    drawing = figures.chunk_figure(figures.chunk(4, 2, False, 4), positions=6).layout
    assert (drawing.xaxis.range, drawing.yaxis.range) == ((-0.5, 5.5), (5.5, -0.5))
    assert drawing.height < figures.chunk_figure(figures.chunk(4, 2, False, 4)).layout.height


def test_the_visual_language():
    before, new, masked, _, wrong = figures.chunk_figure(figures.chunk(3, 3, True, 4)).data
    assert before.marker.color == "rgba(0, 114, 178, 0.45)"  # the key's color, #0072B2
    assert (template.KEY, template.CACHED_OPACITY) == (new.marker.color, 0.45)
    assert new.marker.line.width > before.marker.line.width
    assert masked.marker.pattern.shape == template.HATCH
    assert masked.marker.pattern.fgcolor == template.MASKED
    assert wrong.marker.line.color == template.WRONG
    assert set(masked.text) == {"0"}
    crossed = {(y, base) for y, base in zip(wrong.y, wrong.base, strict=True)}
    for trace in (before, new):  # a digit or a cross, never both
        for y, base, text in zip(trace.y, trace.base, trace.text, strict=True):
            assert text == ("" if (y, base) in crossed else "1")


def test_sentences_by_hand():
    def said(start, T, overlay):
        return figures.chunk_text(figures.chunk(start, T, overlay, 4))

    assert said(4, 2, False) == (
        "start 4, T 2: scores (4, 2, 6), 12 cells a head, 1 masked (8%); "
        "position 4 sees keys 0–4, position 5 sees keys 0–5."
    )
    assert said(0, 1, True).endswith(
        "1 cell a head, 0 masked (0%); position 0 sees key 0. is_causal=True draws the same mask."
    )
    assert figures.rows_text(figures.chunk(4, 2, False, 4)) == (
        "Position 4 sees keys 0–4, position 5 sees keys 0–5; 1 of 12 cells masked (8%)."
    )
    assert said(1, 1, True).endswith("is_causal=True hides 1 cell more: 1 in each row.")
    assert said(6, 6, True).endswith(
        "position 6 sees keys 0–6, …, position 11 sees keys 0–11. "
        "is_causal=True hides 36 cells more: 6 in each row."
    )


def test_panel_moves_fast_and_starts_with_nothing_given_away():
    panel = widgets.mask_panel(4)
    assert "is_causal" not in panel.text and panel.values["overlay"] is False
    panel.set(start=6, T=6, overlay=True)  # warm-up
    times = []
    for start, T in ((6, 6), (0, 6), (6, 1), (5, 6)):
        began = time.process_time()  # of this process alone: others may be busy
        panel.set(start=start, T=T)
        times.append(time.process_time() - began)
    assert min(times) < 0.1  # the course's limit for a repaint


def test_changes_by_hand():
    changes = [0, 0, 3.5, 8.1]
    bars = figures.changes_figure(changes, 2)
    assert list(bars.data[0].y) == changes and [shape.x0 for shape in bars.layout.shapes] == [1.5]
    assert figures.changes_text(changes, 2) == (
        "Chunks of 2: positions 0–1 are unchanged; "
        "at positions 2–3 every row changed, its most changed logit by 3.5 to 8.1."
    )
    assert figures.changes_text([0, 0], 2) == "Chunks of 2: no logit changed."


# --- cells to mark ----------------------------------------------------------------------


WRONG_3_3 = np.tri(6, dtype=bool)[3:] != np.tri(3, 6, dtype=bool)
ALL_NINE = [(3, 1), (3, 2), (3, 3), (4, 2), (4, 3), (4, 4), (5, 3), (5, 4), (5, 5)]


def marks():
    return widgets.mark_cells("03.wrong_cells", "Which?", start=3, T=3)


def test_nothing_marked_is_no_guess(record):
    fresh = marks()
    assert repr(fresh) == "<Marks: 03.wrong_cells>"
    assert (fresh.marked, fresh.note) == ([], "No cell marked.")
    assert fresh.against(WRONG_3_3) == (
        "No cell marked: no guess. 9 cells differ: "
        "position 3: keys 1, 2, 3; position 4: keys 2, 3, 4; position 5: keys 3, 4, 5."
    )
    assert not record.exists()


def test_marks_are_recorded_put_back_and_taken_away():
    first = marks()
    first.boxes[3, 1].value = True
    assert first.note == "Recorded: 1 of 18 cells, q3·k1."
    first.boxes[5, 0].value = True
    assert progress.prediction("03.wrong_cells") == "q3·k1 q5·k0"
    again = marks()
    assert again.marked == [(3, 1), (5, 0)]
    assert again.note == "Your earlier marks: 2 of 18 cells, q3·k1, q5·k0."
    assert again.mark([]) == "No cell marked."
    assert progress.prediction("03.wrong_cells") is None
    assert marks().marked == []


def test_a_record_of_something_else_marks_nothing():
    progress.record_prediction("03.wrong_cells", "q9·k9 nonsense")
    assert marks().marked == []
    progress.record_prediction("03.wrong_cells", 7)
    assert marks().marked == []


def test_marks_against_the_truth():
    grid = marks()
    grid.mark(ALL_NINE)
    assert grid.against(WRONG_3_3) == "Exactly right: you marked all 9 cells and no other."
    grid.mark([*ALL_NINE[1:], (5, 0)])
    assert grid.against(WRONG_3_3) == (
        "You marked 9 cells, 8 of the 9 that differ. Missed: q3·k1. Marked, but the same in both: q5·k0."
    )
    grid.mark(ALL_NINE[:1])
    assert "Marked, but" not in grid.against(WRONG_3_3)
    assert figures.marks_text([], np.zeros((2, 3), bool), 1) == "No cell marked: no guess. No cell differs."


def test_marks_refuse_what_they_cannot_use():
    grid = marks()
    grid.mark([(3, 1)])
    with pytest.raises(ValueError, match=r"\(2, 0\) is no cell: queries are 3 … 5, keys 0 … 5"):
        grid.mark([(4, 4), (2, 0)])
    assert grid.marked == [(3, 1)]
    with pytest.raises(ValueError, match=r"the truth has shape \(6, 3\): give \(3, 6\)"):
        grid.against(WRONG_3_3.T)
    with pytest.raises(ValueError, match="names no chapter"):
        widgets.mark_cells("wrong_cells", "Which?", 3, 3)


@pytest.mark.parametrize(
    "cells, error, said",
    [
        ([(9, 9), ("a", 1)], ValueError, "(9, 9) is no cell: "),
        ([("a", 1), (9, 9)], ValueError, "('a', 1) is no cell: "),
        ([([1], 2)], ValueError, "([1], 2) is no cell: "),
        ([np.ones((2, 2))], ValueError, "array([[1., 1.], [1., 1.]]) is no cell: "),
        ((3, 1), ValueError, "3 is no cell: queries are 3 … 5, keys 0 … 5; give pairs (query, key), such as"),
        (None, TypeError, "cells is None: give pairs (query, key), such as [(3, 0)], or [] for no mark"),
    ],
)
def test_what_is_no_cell_is_named_and_changes_nothing(cells, error, said):
    grid = marks()
    grid.mark([(np.int64(3), 1)])
    with pytest.raises(error) as caught:
        grid.mark(cells)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
    assert "give pairs (query, key), such as [(3, 0)]" in str(caught.value)
    assert grid.marked == [(3, 1)]


@pytest.mark.parametrize(
    "key, start, T, error, said",
    [
        ("03.x", -1, 3, ValueError, "start is -1: give a whole number of at least 0, such as start=3"),
        ("03.x", 3, 0, ValueError, "T is 0: give a whole number of at least 1, such as T=3"),
        ("03.x", 1.5, 3, TypeError, "start is 1.5: give a whole number of at least 0, such as start=3"),
        ("03.x", 3, True, TypeError, "T is True: give a whole number of at least 1, such as T=3"),
        (None, 3, 3, TypeError, "prediction key None is no text: write it like '03.wrong_cells'"),
    ],
)
def test_no_grid_of_impossible_sizes(key, start, T, error, said):
    with pytest.raises(error) as caught:
        widgets.mark_cells(key, "Which?", start, T)
    assert str(caught.value) == said


def test_a_grid_may_start_at_0_with_one_token():
    grid = widgets.mark_cells("03.x", "Which?", start=np.int64(0), T=1)
    assert grid.mark([(0, 0)]) == "Recorded: 1 of 1 cells, q0·k0."


def test_a_progress_file_that_cannot_be_saved_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCOURSE_PROGRESS", str(tmp_path / "file" / "progress.json"))
    assert "cannot be saved" in marks().mark([(3, 1)])


def test_every_box_has_a_name_and_shows_its_kind():
    grid = marks()
    assert {box.description for box in grid.boxes.values()} == {
        f"q{q}·k{k}" for q in (3, 4, 5) for k in range(6)
    }
    for (query, key), box in grid.boxes.items():
        kind = "masked" if key > query else "before" if key < 3 else "new"
        assert f"kv-{kind}" in box._dom_classes


# --- the exercises ------------------------------------------------------------------------


def solutions():
    path = paths.chapters_dir() / "solutions" / "03_masks.py"
    spec = importlib.util.spec_from_file_location("solutions_03", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@given(st.integers(0, 40), st.integers(1, 40))
def test_the_solution_and_the_checks_own_mask_are_the_packages(start, T):
    np.testing.assert_array_equal(solutions().causal_mask(start, T), ops.causal_mask(start, T))
    np.testing.assert_array_equal(exercise._right(start, T), ops.causal_mask(start, T))


@given(CHUNKS)
def test_the_count_of_masked_cells_by_counting(chunks):
    counted = sum(int((~ops.causal_mask(sum(chunks[:i]), T)).sum()) for i, T in enumerate(chunks))
    assert solutions().masked_cells(chunks) == counted


def test_every_mistake_differs_from_the_right_mask_where_it_is_looked_for():
    """In the first pair that is asked, and from each other: no line is said of another mistake."""
    start, T = exercise.PAIRS[0]
    masks = [mask for mask, _ in exercise._mistakes(start, T, ops.causal_mask(start, T))]
    masks.append(ops.causal_mask(start, T))
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    assert {mask.shape for mask in masks} == {(T, start + T)}


@pytest.mark.parametrize(
    "function",
    [
        lambda start, T: np.tril(np.ones((T, start + T), dtype=bool), k=start),
        lambda start, T: np.array([[key <= start + row for key in range(start + T)] for row in range(T)]),
        lambda start, T: ~np.triu(np.ones((T, start + T), dtype=bool), k=start + 1),
    ],
)
def test_other_right_ways_pass(function):
    outcome = checks.verdict("03.causal_mask", function)
    assert outcome.status == "right", outcome


def test_the_memory_of_a_call_is_seen_with_tracing_on_and_off():
    def whole(start, T):
        return np.tri(start + T, dtype=bool)[start:]

    assert "the whole triangle" in checks.verdict("03.causal_mask", whole).message
    assert not tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        assert "the whole triangle" in checks.verdict("03.causal_mask", whole).message
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


# --- no line of the page hangs on a rounding ------------------------------------------------


def safe(value, digits, rounding):
    """Whether the value prints the same after a hundred times the rounding, up or down."""
    return len({round(value + shift, digits) for shift in (-100 * rounding, 0, 100 * rounding)}) == 1


def test_the_wrong_rows_print_the_same_everywhere(model, tok, page):
    ids = tok.encode(SENTENCE)
    assert len(ids) == 12
    tap = kv.Tap(model.config)
    model(ids, tap)
    q, k, v = tap.queries[LAYER], tap.keys[LAYER], tap.values[LAYER]
    right = ops.attention(q, k, v, start=0)[:, 3:6]
    wrong = masked_attention(q[:, 3:6], k[:, :6], v[:, :6], figures.top_left(3, 3))
    rounding = float(np.abs(page["attend"](q, k, v, np.tri(12, dtype=bool))[:, 3:6] - right).max()) + 1e-6
    for row in range(3):
        assert safe(float(np.abs(wrong[:, row] - right[:, row]).max()), 2, rounding)
    assert safe(float(np.abs(right).max()), 2, rounding)


@pytest.fixture(scope="module")
def story(model, tok, page):
    """ids, characters, logits of one pass, and of the same pass in top-left chunks of every size."""
    text = (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    ids = tok.encode(text)[:LONG]
    logits = {
        size: model(ids, kv.Tap(model.config, mask=page["stacked"](pieces(LONG, size), figures.top_left)))
        for size in SIZES
    }
    return ids, len(tok.decode(ids[1:])), model(ids), logits


def bits(story, logits):
    ids, characters, _, _ = story
    return evaluation.bits_per_character(evaluation.next_token_log_probs(logits, ids), characters)


def test_bits_per_character_print_the_same_everywhere(story):
    _, _, right, wrong = story
    assert safe(bits(story, right), 2, 1e-6)  # the rounding, see the last test but one
    for logits in wrong.values():
        assert safe(bits(story, logits), 2, 1e-6)
    assert f"{bits(story, right):.2f}" == "1.26" and f"{bits(story, wrong[4]):.2f}" == "1.85"  # the recap


def test_rows_are_clearly_wrong_or_clearly_not(story):
    """The page counts rows whose logits changed by more than 1e-3; none is near that line."""
    _, _, right, wrong = story
    for size, logits in wrong.items():
        changes = np.abs(logits - right).max(axis=-1)
        assert changes[:size].max() < 1e-4
        assert (changes[size:] > 0.1).all()


def test_the_drawn_changes_round_the_same_everywhere(story):
    _, _, right, wrong = story
    for change in np.abs(wrong[4] - right).max(axis=-1)[4:20]:
        assert safe(float(change), 1, 2e-5)  # the rounding of logits here


@pytest.mark.parametrize("name", ["rows_of_triangle", "top_left"])
def test_the_written_texts_survive_a_hundred_times_the_rounding(model, tok, page, name):
    prompt, noise = tok.encode(PROMPT), 100 * 2e-5

    def written(seed, size):
        random, choose = np.random.default_rng(seed), kv.sampled(temperature=0.7, top_p=0.8, seed=11)
        text = list(prompt)
        for step in range(NEW):
            mask = page["stacked"]([len(prompt)] + [1] * step, page[name])
            logits = model(text, kv.Tap(model.config, mask=mask), rows=[-1])[0]
            text.append(choose(logits + random.uniform(-size, size, logits.shape).astype(np.float32)))
        return tuple(text)

    assert len({written(seed, noise) for seed in range(3)} | {written(0, 0.0)}) == 1


def test_the_rounding_of_logits_is_what_the_tests_above_assume(model, tok, page, story):
    ids, _, right, _ = story
    chunked = model(ids, kv.Tap(model.config, mask=page["stacked"](pieces(LONG, 4), ops.causal_mask)))
    assert np.abs(chunked - right).max() < 2e-5
    assert abs(bits(story, chunked) - bits(story, right)) < 1e-6  # 256 roundings of either sign


def test_a_chunk_of_one_does_not_see_the_prompt(model, tok, page):
    prompt = tok.encode(PROMPT)
    other = prompt[:1] + tok.encode(" is a great reader, and")
    assert len(prompt) == len(other) == 8
    tap = kv.Tap(model.config, mask=page["stacked"]([8, 1], figures.top_left))
    one, two = (model(text + tok.encode(" she"), tap, rows=[-1]) for text in (prompt, other))
    # Rows of one product each, in passes of the same shape: no more than the last digits may differ.
    assert np.abs(one - two).max() < 1e-4
    # With the right mask the prompts differ by far more.
    right = [model(text + tok.encode(" she"), rows=[-1]) for text in (prompt, other)]
    assert np.abs(right[0] - right[1]).max() > 1
