"""Primer A: its figures and exercise, and that what its cells print does not hang on a rounding."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, ops
from kvcourse.checks import chapter_a as exercise
from kvcourse.figures import chapter_a as figures
from kvcourse.figures import template
from kvcourse.widgets import chapter_a as widgets

TEXT = "She is a great reader"
SENTENCE = "She is a great reader, and has no pleasure in anything else."


def weights_of(rows):
    return np.array(rows, np.float32)[None, None]


# --- pictures ------------------------------------------------------------------------


def test_triangle_has_a_cell_for_every_pair():
    kept, masked = figures.triangle_figure(["a", "b", "c"]).data
    traces = (kept, masked)
    cells = {(y, round(base + 0.47)) for trace in traces for y, base in zip(trace.y, trace.base, strict=True)}
    assert cells == {(row, column) for row in range(3) for column in range(3)}
    assert list(kept.text) == ["q0 · k0", "q1 · k0", "q1 · k1", "q2 · k0", "q2 · k1", "q2 · k2"]
    assert masked.marker.pattern.shape == template.HATCH
    assert figures.triangle_text(["a"] * 6).startswith("Of 6 × 6 = 36 scores 21 are kept and 15 masked")


def test_habits_by_hand():
    weights = weights_of([[1, 0, 0], [0.75, 0.25, 0], [0.5, 0.125, 0.375]])
    data = figures.attention(weights, ["x", " y", "z"], 0, 0, 2)
    assert data["first"] == (75 + 50) / 2
    assert data["before"] == (75 + 12.5) / 2
    assert data["own"] == (25 + 37.5) / 2
    assert data["even"] == pytest.approx((50 + 100 / 3) / 2)
    assert (data["best"], data["best_percent"]) == (0, 50.0)
    assert data["percent"][2] == [50.0, 12.5, 37.5]
    text = figures.attention_text(data)
    assert text.startswith("Layer 0, head 0: token 2 “z” looks most at token 0 “x” (50 %).")


@given(st.integers(2, 9), st.data())
def test_even_attention_gives_the_even_share_everywhere(T, data):
    even = np.tril(np.ones((T, T), np.float32)) / np.arange(1, T + 1, dtype=np.float32)[:, None]
    got = figures.attention(even[None, None], ["a"] * T, 0, 0, data.draw(st.integers(0, T - 1)))
    assert [got["first"], got["before"], got["own"]] == pytest.approx([got["even"]] * 3, rel=1e-6)


def test_bars_are_the_visible_part_of_the_chosen_row_and_the_rest_is_hatched():
    weights = weights_of([[1, 0, 0], [0.75, 0.25, 0], [0.5, 0.125, 0.375]])
    drawing = figures.attention_figure(figures.attention(weights, ["x", "y", "z"], 0, 0, 1))
    heat, hatched, bars, scale = drawing.data
    assert list(bars.x) == [75.0, 25.0]
    assert [(y, x) for y, x in zip(hatched.y, hatched.x, strict=True)] == [(0, 2), (1, 1)]
    # The scale on top is in the very colors of the cells, and those are not the keys'.
    assert (scale.colorscale, scale.zmin, scale.zmax) == (heat.colorscale, heat.zmin, heat.zmax)
    assert bars.marker.color == template.QUERY
    assert heat.z[0][1] is None and heat.text[0][1] == "query 0 “x”, key 1 “y”: masked"
    assert drawing.layout.shapes[0].y0 == 0.5 and drawing.layout.shapes[0].x1 == 1.5


def test_panel_refuses_weights_of_another_text():
    with pytest.raises(ValueError, match=r"weights have shape \(1, 1, 3, 3\): for 2 tokens give"):
        widgets.attention_panel(weights_of(np.eye(3)), ["a", "b"])


# --- the exercise --------------------------------------------------------------------


def one_head(x, w_q, w_k, w_v, **mistake):
    return exercise._head(x, w_q, w_k, w_v, **mistake)[1]


def test_right_head_passes_and_float64_is_named():
    assert checks.verdict("a.one_head", one_head).status == "right"
    outcome = checks.verdict("a.one_head", lambda *given: one_head(*given).astype(np.float64))
    assert outcome.status == "wrong" and "Use math.sqrt" in outcome.message


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda *g: one_head(*g, scale=1.0), "the scale is missing"),
        (lambda *g: one_head(*g, scale=1 / g[1].shape[1]), "by its square root"),
        (lambda *g: one_head(*g, scale=1 / math.sqrt(g[1].shape[0])), "by the width of x"),
        (lambda *g: one_head(*g, hide="nothing"), "the mask is missing"),
        (lambda *g: one_head(*g, hide="earlier"), "the wrong way round"),
        (lambda *g: one_head(*g, fill=0.0), "masked scores are 0"),
        (lambda *g: one_head(*g, after=True), "after the softmax"),
        (lambda *g: one_head(*g, axis=0), "over the queries"),
        (lambda *g: one_head(*g, turned=False), "k is not transposed"),
        (lambda x, w_q, w_k, w_v: one_head(x, w_k, w_q, w_v), "have changed places"),
        (lambda x, w_q, w_k, w_v: one_head(x, w_q, w_k, w_k), "you sum up the keys"),
        (lambda *g: exercise._head(*g)[0], "these are the weights"),
        (lambda *g: one_head(*g) * 2, "the numbers differ by up to"),
        (lambda *g: one_head(*g)[:, :1], "the result has shape (4, 1)"),
        (lambda *g: one_head(*g) * np.nan, "Row r must still see its own column r"),
    ],
)
def test_every_mistake_is_named(function, words):
    outcome = checks.verdict("a.one_head", function)
    assert outcome.status == "wrong"
    assert words in outcome.message


def test_mistakes_differ_from_the_right_answer_and_from_each_other():
    """Each by 100 times the tolerance: no right answer is called wrong, and no line is the wrong one."""
    given = exercise._inputs(*exercise.SIZES[0])
    results = [exercise._head(*given)[1]] + [wrong for wrong, _ in exercise._mistakes(*given)]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert one.shape != other.shape or np.abs(one - other).max() > 100 * exercise.TOLERANCE


# --- what is compared does not hang on a rounding --------------------------------------


@pytest.fixture(scope="module")
def trained():
    return kv.load_model("austen-gpt2"), kv.load_tokenizer("austen-gpt2")


def gaps(values):
    """Largest minus second largest of each row of (rows, n)."""
    ordered = np.sort(values, axis=-1)
    return ordered[..., -1] - ordered[..., -2]


def test_each_of_the_six_rows_has_a_clear_first_choice(trained):
    model, tokenizer = trained
    ids = tokenizer.encode(TEXT)
    together = model(ids)
    cache = kv.ContiguousCache.for_model(model)
    one_by_one = np.concatenate([model([token], cache) for token in ids])
    assert gaps(together).min() > 100 * np.abs(together - one_by_one).max()


def attention_weights(model, ids):
    """(layers, heads, T, T), by watching what the model asks of its attention."""
    seen = []

    def attend(layer, q, k, v):
        scores = (q @ k.swapaxes(1, 2)) * (1 / math.sqrt(q.shape[-1]))
        scores[:, ~ops.causal_mask(0, len(ids))] = -np.inf
        seen.append(ops.softmax(scores))
        return seen[-1] @ v

    model._forward(np.array(ids), np.arange(len(ids)), attend, None)
    return np.stack(seen)


def test_the_two_heads_that_the_page_names_lead_clearly(trained):
    """By 1e-3 of the weight; float32 rounding changes a mean weight by less than 1e-6."""
    model, tokenizer = trained
    weights = attention_weights(model, tokenizer.encode(SENTENCE))
    first = weights[:, :, 1:, 0].mean(axis=-1)
    previous = np.diagonal(weights, offset=-1, axis1=2, axis2=3).mean(axis=-1)
    for share in (first, previous):
        assert gaps(share.reshape(1, -1))[0] > 1e-3
