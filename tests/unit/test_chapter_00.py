"""Chapter 00: its pictures and its map, and that what its cells print does not hang on a rounding."""

import ast
import re

import nbformat
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import ops, paths
from kvcourse.figures import chapter_00 as figures
from kvcourse.figures import template
from kvcourse.widgets import chapter_00 as widgets

NOTEBOOK = paths.chapters_dir() / "00_start_here.ipynb"


# --- the next token as bars --------------------------------------------------------


def logits_of(*probabilities):
    return np.log(np.array([probabilities], np.float32))


def test_percentages_places_and_own_token_by_hand():
    data = figures.next_token(logits_of(0.125, 0.5, 0.125, 0.25), ["a", " b", "\n", "d"], [0, 3], 1, 1.0)
    assert [row["percent"] for row in data["rows"]] == [50.0, 25.0, 12.5, 12.5]
    assert [row["label"] for row in data["rows"]] == ["“ b”", "“d”", "“a”", "“⏎”"]
    assert [row["own"] for row in data["rows"]] == [False, True, False, False]
    assert [row["place"] for row in data["rows"]] == [1, 2, 3, 4]


def test_temperature_one_half_squares_the_probabilities():
    data = figures.next_token(logits_of(0.5, 0.25, 0.125, 0.125), list("abcd"), [0, 0], 1, 0.5)
    # 0.25, 0.0625, 0.015625, 0.015625 over their sum 0.34375
    assert [row["percent"] for row in data["rows"]] == [72.7, 18.2, 4.5, 4.5]


def test_a_token_from_far_down_stands_in_the_last_row_with_its_place():
    logits = np.arange(20, 0, -1, dtype=np.float32)[None]
    data = figures.next_token(logits, [f"t{i}" for i in range(20)], [0, 16], 1, 1.0)
    assert [row["place"] for row in data["rows"]] == [1, 2, 3, 4, 5, 6, 7, 17]
    drawing = figures.next_token_figure(data)
    assert drawing.layout.yaxis.ticktext[-1] == "“t16” (place 17)"
    assert "place 17 of 20" in figures.next_token_text(data)


@pytest.mark.parametrize("read", [0, 2, 3, -1])
def test_a_place_without_a_next_token_is_refused(read):
    with pytest.raises(ValueError, match=rf"read is {read}: it must lie in 1 … 1"):
        figures.next_token(logits_of(0.5, 0.5), ["a", "b"], [0, 1], read, 1.0)


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40),
    st.sampled_from(widgets.TEMPERATURES),
    st.data(),
)
def test_rows_are_in_order_and_hold_the_own_token_once(logits, temperature, data):
    own = data.draw(st.integers(0, len(logits) - 1))
    pieces = [str(i) for i in range(len(logits))]
    rows = figures.next_token(np.array([logits], np.float32), pieces, [0, own], 1, temperature)["rows"]
    percents = [row["percent"] for row in rows]
    assert percents == sorted(percents, reverse=True)
    assert sum(percents) <= 100 + 0.05 * len(rows)  # each is rounded by at most 0.05
    assert [row["label"] for row in rows if row["own"]] == [f"“{own}”"]
    assert len({row["label"] for row in rows}) == len(rows) == min(figures.BARS, len(logits))


def test_the_figure_keeps_its_two_traces_and_shows_every_row():
    for own in (0, 1, 16):
        logits = np.arange(20, 0, -1, dtype=np.float32)[None]
        data = figures.next_token(logits, [f"t{i}" for i in range(20)], [0, own], 1, 1.0)
        others, novel = figures.next_token_figure(data).data
        assert list(novel.x) == [row["percent"] for row in data["rows"] if row["own"]]
        assert sorted([*others.y, *novel.y]) == list(range(figures.BARS))


@pytest.mark.parametrize(
    ("first", "end"), [(0.05, 10), (0.1, 10), (0.101, 25), (0.5, 50), (0.51, 100), (1.0, 100)]
)
def test_the_axis_ends_above_the_longest_bar_and_says_where(first, end):
    rest = [(1 - first) / 40] * 40  # always shorter than `first`
    data = figures.next_token(logits_of(first, *(max(r, 1e-9) for r in rest)), ["t"] * 41, [0, 0], 1, 1.0)
    axis = figures.next_token_figure(data).layout.xaxis
    assert axis.title.text.endswith(f"ends at {end} %")
    assert axis.range[1] == pytest.approx(1.08 * end) and axis.tickvals[-1] == end


@pytest.mark.parametrize(
    ("percent", "text"),
    [(0.0, "under 0.1 %"), (0.1, "0.1 %"), (9.9, "9.9 %"), (10.0, "10 %"), (99.6, "100 %")],
)
def test_percent_text(percent, text):
    assert figures.percent_text(percent) == text


def test_the_sentence_names_both_tokens_or_says_that_they_are_one():
    pieces, logits = ["a", "b"], logits_of(0.75, 0.25)
    differ = figures.next_token_text(figures.next_token(logits, pieces, [0, 1], 1, 1.0))
    assert differ == (
        "1 token read, up to “a”: at temperature 1 the model gives “a” 75 %; "
        "the novel goes on with “b”, 25 %, place 2 of 2."
    )
    same = figures.next_token_text(figures.next_token(logits, pieces, [0, 0], 1, 1.0))
    assert same.endswith("the model gives “a” 75 %, and the novel goes on with it.")


# --- the colors ----------------------------------------------------------------------


def test_the_legend_uses_the_template_s_colors_and_says_each():
    drawing = figures.legend()
    fills = [trace.marker.color for trace in drawing.data[:3]]
    assert fills == [template.KEY, template.VALUE, template.QUERY]
    assert [trace.text[0] for trace in drawing.data[:3]] == ["<b>K</b>", "<b>V</b>", "<b>Q</b>"]
    assert len(drawing.data) == len(drawing.layout.xaxis.ticktext)
    for word in ("key", "value", "query", "new", "cached", "masked", "wasted", "elsewhere", "this machine"):
        assert word in figures.LEGEND_TEXT


# --- what the cells print ------------------------------------------------------------


def cells(kind):
    return [cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == kind]


def assigned(name):
    """The literal that a cell of the notebook assigns to `name`."""
    for source in cells("code"):
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name]:
                return ast.literal_eval(node.value)
    raise AssertionError(f"no cell of {NOTEBOOK.name} assigns {name}")


def keyword(function, name):
    """The literal keyword argument `name` of the notebook's call of `function`, such as kv.generate."""
    for source in cells("code"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
                return next(ast.literal_eval(k.value) for k in node.keywords if k.arg == name)
    raise AssertionError(f"no cell of {NOTEBOOK.name} calls {function}")


def in_two_orders(model, ids):
    """Logits (T, vocab_size) of one pass and of token after token: the same sums in another order."""
    cache = kv.ContiguousCache.for_model(model)
    return model(ids), np.concatenate([model([token], cache) for token in ids])


@pytest.mark.parametrize("factor", [-100, -10, 10, 100])
def test_the_drawn_line_hangs_on_no_rounding(model, tokenizer, factor):
    """The same draws when every logit moves by 100 times what the order of the sums changes, either way."""
    ids = tokenizer.encode(assigned("prompt"))
    settings = {name: keyword("kv.sampled", name) for name in ("temperature", "seed")}
    new = kv.generate(
        model,
        ids,
        max_new_tokens=keyword("kv.generate", "max_new_tokens"),
        sampler=kv.sampled(**settings),
    )
    once, stepwise = in_two_orders(model, ids + new[:-1])
    moved = once + factor * (once - stepwise)
    draw = kv.sampled(**settings)
    assert [draw(row) for row in moved[len(ids) - 1 :]] == new


def test_the_count_for_90_percent_hangs_on_no_rounding(model, tokenizer):
    once, stepwise = (
        np.cumsum(np.sort(ops.softmax(logits[-1]))[::-1])
        for logits in in_two_orders(model, tokenizer.encode(assigned("prompt")))
    )
    assert np.abs(once - 0.9).min() >= 10 * np.abs(once - stepwise).max()


def test_the_panel_s_sentences_hang_on_no_rounding(model, tokenizer):
    """Percentages and places stay when every logit moves by 10 times what the order of the sums changes."""
    ids = tokenizer.encode_ordinary(assigned("passage"))
    pieces = [tokenizer.decode([token]) for token in range(model.config.vocab_size)]
    once, stepwise = in_two_orders(model, ids)
    moved = once + 10 * (once - stepwise)
    read = keyword("panel.set", "read")
    for temperature in widgets.TEMPERATURES:
        assert figures.next_token(once, pieces, ids, read, temperature) == figures.next_token(
            moved, pieces, ids, read, temperature
        )


def test_the_novel_s_token_is_likeliest_at_0_7_on_either_side_less(model, tokenizer):
    """What the page says: the best temperature lies in the middle, and the token is not the first choice."""
    ids = tokenizer.encode_ordinary(assigned("passage"))
    pieces = [tokenizer.decode([token]) for token in range(model.config.vocab_size)]
    logits, read = model(ids), keyword("panel.set", "read")
    own = [
        next(row for row in figures.next_token(logits, pieces, ids, read, t)["rows"] if row["own"])
        for t in widgets.TEMPERATURES
    ]
    percents = [row["percent"] for row in own]
    best = widgets.TEMPERATURES.index(0.7)
    assert percents[: best + 1] == sorted(percents[: best + 1])
    assert percents[best:] == sorted(percents[best:], reverse=True)
    assert {row["place"] for row in own} == {3}


def test_the_passage_was_never_trained_on():
    held_out = (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    assert assigned("passage") in held_out


def test_the_panel_runs_the_model_once_and_follows_its_controls(model, tokenizer):
    panel = widgets.next_token_panel(model, tokenizer, assigned("passage"))
    before = panel.text
    after = panel.set(read=panel.values["read"] + 1)
    assert after != before
    assert panel.set(read=panel.values["read"] - 1) == before


# --- the map -------------------------------------------------------------------------


def linked():
    """{relative path of a notebook: the rest of its row in the map}."""
    rows = [line for source in cells("markdown") for line in source.splitlines() if line.startswith("|")]
    found = (re.search(r"\]\(([^)]+\.ipynb)\)(.*)", row) for row in rows)
    return {match[1]: match[2] for match in found if match}


def test_the_map_links_every_page_and_no_other():
    chapters = paths.chapters_dir()
    there = {
        path.relative_to(chapters).as_posix()
        for path in chapters.rglob("*.ipynb")
        if ".ipynb_checkpoints" not in path.parts
    }
    assert set(linked()) == there - {NOTEBOOK.name}


def minutes(notebook):
    """The minutes that a notebook's first cell names."""
    first = nbformat.read(paths.chapters_dir() / notebook, 4).cells[0].source
    return int(re.search(r"(\d+) minutes", first)[1])


def test_the_map_gives_the_minutes_that_the_pages_give():
    for notebook, row in linked().items():
        assert f"| {minutes(notebook)} |" in row, notebook
    assert f"| {minutes(NOTEBOOK.name)} |" in next(
        line for source in cells("markdown") for line in source.splitlines() if line.startswith("| 00 |")
    )
