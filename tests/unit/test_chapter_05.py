"""Chapter 05: comparisons, rounded caches, the panel, the exercise; and that no text hangs on a rounding.

"Another processor" is played by the same model with its MLPs' hidden numbers and its width in another order:
the same function, and all sums are added differently.
"""

import ast
import importlib.util
import json
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import kvcourse as kv
from kvcourse import checks, ops, paths
from kvcourse.checks import chapter_05 as plants
from kvcourse.figures import chapter_05 as figures
from kvcourse.widgets import chapter_05 as widgets

NOTEBOOK = paths.chapters_dir() / "05_the_same_answers.ipynb"
PROMPT, TRUTH = "In the meanwhile", "It is a truth universally acknowledged, that"
STRETCH = slice(13_000, 14_000)
# Logits of two right passes differ by up to 3e-5, and by 1e-4 at the first positions of a text.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def tok():
    return kv.load_tokenizer("austen-gpt2")


@pytest.fixture(scope="module")
def processors(model):
    return [model, reordered(model, 1), reordered(model, 2)]


@pytest.fixture(scope="module")
def chapter(model, tok):
    """What the page's definitions define, run in order; its experiments are not run."""
    names = {"np": np, "kv": kv, "model": model, "ids": tok.encode(PROMPT)}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and "imports" not in cell["metadata"].get("tags", []):
            for part in definitions("".join(cell["source"])):
                exec(part, names)
    return names


def definitions(source):
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [ast.unparse(node) for node in ast.parse(source).body if isinstance(node, kinds)]


def reordered(model, seed):
    """The same function of the same weights, with other orders of summation."""
    random, config, params = np.random.default_rng(seed), model.config, dict(model.params)
    width = random.permutation(config.hidden_size)
    for name, weight in params.items():
        if name.endswith(("c_attn.weight", "c_fc.weight")) or ".ln_" in name or name.startswith("ln_"):
            params[name] = weight[width].copy()
        elif name in ("wte.weight", "wpe.weight") or name.endswith(("c_proj.weight", "c_proj.bias")):
            params[name] = weight[..., width].copy()
    for layer in range(config.num_layers):
        inner, mlp = random.permutation(config.intermediate_size), f"h.{layer}.mlp."
        for name, axis in (("c_fc.weight", 1), ("c_fc.bias", 0), ("c_proj.weight", 0)):
            params[mlp + name] = np.take(params[mlp + name], inner, axis=axis)
    return type(model)(config, params)


def greedy_text(model, ids, new, cache=None):
    return kv.generate(model, ids, max_new_tokens=new, cache=cache)


# --- the page's definitions -----------------------------------------------------------------


def test_another_order_is_the_same_function(model, processors):
    ids = list(range(40))
    for other in processors[1:]:
        difference = np.abs(other(ids) - model(ids)).max()
        assert 0 < difference < ROUNDING


def test_the_pages_comparison_is_the_packages(chapter):
    one, other = np.random.default_rng(0).standard_normal((2, 7, 50), dtype=np.float32)
    np.testing.assert_array_equal(chapter["differences"](one, other), figures.differences(one, other))
    np.testing.assert_array_equal(chapter["margins"](one), figures.margins(one))
    by_hand = np.array([[1.0, 4.0, 2.5], [0.0, 0.0, -1.0]])
    assert chapter["margins"](by_hand).tolist() == [1.5, 0.0]
    assert chapter["differences"](by_hand, by_hand[::-1]).tolist() == [4.0, 4.0]


LOGITS = arrays(np.float64, (1, 6), elements=st.floats(-8, 8))


@given(LOGITS, LOGITS)
def test_a_flip_needs_a_margin_of_at_most_twice_the_difference(one, other):
    margin, difference = figures.margins(one), figures.differences(other, one)
    if one.argmax() != other.argmax():
        # Two roundings of the subtraction, in units of float64 at 16.
        assert figures.flip_possible(margin, difference + 1e-14).all()


def test_both_orders_add_the_same_products(chapter):
    x, W = np.arange(20, dtype=np.float32), np.ones((20, 3), dtype=np.float32)
    for order in ("first_to_last", "eight_lanes"):  # whole numbers: no order rounds
        assert chapter[order](x, W).tolist() == [190.0] * 3
        assert chapter[order](x, W).dtype == np.float32
    # 1e8 swallows a 1 that comes after it: the order decides.
    x = np.array([1e8, 1, -1e8, 0, 0, 0, 0, 0, 0, 1, 0], dtype=np.float32)
    W = np.ones((11, 1), dtype=np.float32)
    assert chapter["first_to_last"](x, W).tolist() == [1.0]
    assert chapter["eight_lanes"](x, W).tolist() == [0.0]


def test_the_counts_of_the_two_orders_need_no_library(chapter, model):
    """Neither count hangs on a near-tie with the judge: float64 errors are a million times smaller."""
    W = model.params["h.0.attn.c_attn.weight"]
    x = model.params["wte.weight"][0] + model.params["wpe.weight"][0]
    one, other = chapter["first_to_last"](x, W), chapter["eight_lanes"](x, W)
    exact = np.array([float(sum(map(fraction, x * 1.0, column))) for column in W.astype(np.float64).T])
    assert ((one == other).sum(), (np.abs(one - exact) < np.abs(other - exact)).sum()) == (72, 213)
    assert (np.abs(one - exact) > np.abs(other - exact)).sum() == 483


def fraction(a, b):
    return Fraction(float(a)) * Fraction(float(b))


def test_a_rounded_cache_holds_rows_of_its_format(chapter, model):
    for rounding in (chapter["to_float16"], ops.round_to_bfloat16):
        cache = chapter["RoundedCache"](model.config, rounding)
        model([5, 6, 7], cache)
        exact = kv.ConcatenatingCache.for_model(model)
        model([5, 6, 7], exact)
        keys, values = cache.keys_values(0)
        np.testing.assert_array_equal(keys, rounding(exact.keys_values(0)[0]))
        np.testing.assert_array_equal(values, rounding(values))


def test_the_period_of_a_text(chapter):
    assert chapter["period"]([9, 8, 1, 2, 3, 1, 2, 3]) == 3
    assert chapter["period"]([4, 4]) == 1
    assert chapter["period"]([1, 2, 3, 4]) is None


def test_the_pieces_are_the_samplers(chapter, model, tok):
    ids = tok.encode(PROMPT)
    text = kv.generate(model, ids, max_new_tokens=15, sampler=kv.sampled(0.8, seed=3))
    for draw, row, token in zip(
        np.random.default_rng(3).random(15), forced(model, ids, text), text, strict=True
    ):
        assert chapter["token_at"](draw, row) == token


def test_the_pieces_of_three_tokens(chapter):
    """The page's table: edges 0.42, 0.71 and 1, the second moves to 0.7098."""
    old, new = (0.8 * np.log(sizes) for sizes in ([0.42, 0.29, 0.29], [0.42, 0.2898, 0.2902]))
    starts, ends = chapter["pieces"](old)
    np.testing.assert_allclose(starts, [0, 0.42, 0.71])
    np.testing.assert_allclose(ends, [0.42, 0.71, 1])
    # The likeliest comes first, so the third token of the new line lies before the second.
    assert chapter["pieces"](new)[0].argsort().tolist() == [0, 2, 1]
    new = 0.8 * np.log([0.42, 0.2902, 0.2898])
    assert chapter["share_changed"](old, old) == pytest.approx(0, abs=1e-12)
    assert chapter["share_changed"](old, new) == pytest.approx(0.0002)
    assert [chapter["token_at"](0.7101, row) for row in (old, new)] == [2, 1]


# --- what the page prints is the same on every processor ----------------------------------------


def forced(model, ids, text, cache=None):
    return model([*ids, *text[:-1]], cache)[len(ids) - 1 :]


def test_flips_of_the_greedy_text(chapter, processors, tok):
    ids = tok.encode(PROMPT)
    text = greedy_text(processors[0], ids, 100)
    assert chapter["period"](text) == 13 and len(set(text[-50:])) == 16
    for other in processors:
        uncached = forced(other, ids, text)
        margin = figures.margins(uncached)
        assert uncached.argmax(axis=-1).tolist() == text
        # Printed to three decimals at these steps; rounding is far below a thousandth.
        for step, said in ((24, 0.005), (36, 0.015), (0, 0.648)):
            assert abs(margin[step] - said) < 0.0005 - ROUNDING
        found = {}
        for name, rounding in (("float16", chapter["to_float16"]), ("bfloat16", ops.round_to_bfloat16)):
            cached = forced(other, ids, text, chapter["RoundedCache"](other.config, rounding))
            difference = figures.differences(cached, uncached)
            found[name] = (
                np.flatnonzero(figures.flip_possible(margin, difference)).tolist(),
                np.flatnonzero(cached.argmax(axis=-1) != uncached.argmax(axis=-1)).tolist(),
            )
        assert found == {"float16": ([], []), "bfloat16": ([24, 36], [24])}


def test_the_text_of_the_bfloat16_cache(chapter, processors, tok):
    texts = {
        tuple(
            greedy_text(
                other, tok.encode(PROMPT), 40, chapter["RoundedCache"](other.config, ops.round_to_bfloat16)
            )
        )
        for other in processors
    }
    assert len(texts) == 1


def test_flips_of_the_held_out_stretch(chapter, processors, tok):
    text = (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    ids = tok.encode(text)[STRETCH]
    for other in processors:
        unrounded = other(ids)
        margin = figures.margins(unrounded)
        assert (margin < 0.001 - ROUNDING).sum() == (margin < 0.001 + ROUNDING).sum() == 3
        shares = (margin > 0.1 - ROUNDING).mean(), (margin > 0.1 + ROUNDING).mean()
        assert {f"{share:.0%}" for share in shares} == {"90%"}
        for rounding, said, flips in (
            (chapter["to_float16"], 0.001, [970]),
            (ops.round_to_bfloat16, 0.008, [273, 691, 970]),
        ):
            logits = other(ids, chapter["RoundedCache"](other.config, rounding))
            difference = figures.differences(logits, unrounded)
            assert np.flatnonzero(logits.argmax(axis=-1) != unrounded.argmax(axis=-1)).tolist() == flips
            assert abs(np.median(difference) - said) < 0.0004
            possible = figures.flip_possible(margin, difference)
            assert possible[flips].all() and possible.sum() >= len(flips) + 2


SAMPLED = [(0.1, 1.0), (0.8, 1.0), (1.0, 0.9), (0.8, 0.9)]


def kept(logits, temperature, top_p):
    """The tokens a sampler draws from, likeliest first."""
    order = np.argsort(-logits, kind="stable")
    return order[: np.searchsorted(edges(logits, order, temperature), top_p) + 1]


def edges(logits, order, temperature):
    """Where the pieces of the tokens `order` end on the line from 0 to 1."""
    probabilities = ops.softmax((logits - logits.max()) / temperature)
    ends = np.cumsum(probabilities[order], dtype=np.float64)
    return ends / ends[-1]


@pytest.mark.parametrize("temperature, top_p", SAMPLED)
def test_no_draw_of_a_printed_text_lies_near_an_edge(model, processors, tok, temperature, top_p):
    ids = tok.encode(PROMPT)
    text = kv.generate(model, ids, max_new_tokens=100, sampler=kv.sampled(temperature, top_p, seed=1))
    draws = np.random.default_rng(1).random(100)
    for other in processors[1:]:
        logits = forced(model, ids, text), forced(other, ids, text)
        for draw, token, one, two in zip(draws, text, *logits, strict=True):
            order = kept(one, temperature, top_p)
            ends = edges(one, order, temperature)
            assert order[np.searchsorted(ends, draw, side="right")] == token
            moved = np.abs(edges(two, order, temperature) - ends).max()
            # Five times what a changed order of sums moves.
            assert np.abs(ends - draw).min() > 5 * moved


def test_the_sampled_round(chapter, processors, tok):
    ids = tok.encode(PROMPT)
    greedy = greedy_text(processors[0], ids, 100)
    plain = kv.generate(processors[0], ids, max_new_tokens=100, sampler=kv.sampled(0.8, seed=1))
    for other in processors:
        # The page says it of the steps of the greedy text, and of drawn texts in general.
        for text in (greedy, plain):
            uncached = forced(other, ids, text)
            stepped = kv.ConcatenatingCache.for_model(other)
            cached = [other(rows, stepped, rows=[-1])[0] for rows in (ids, *([token] for token in text[:-1]))]
            rounded = forced(other, ids, text, chapter["RoundedCache"](other.config, ops.round_to_bfloat16))
            changed = [sum(map(chapter["share_changed"], uncached, rows)) for rows in (cached, rounded)]
            # Rounding may also exchange two tokens with all but equal logits: that alone can be 0.01.
            assert 0 < changed[0] < 0.03 and changed[1] > 2
        cache = chapter["RoundedCache"](other.config, ops.round_to_bfloat16)
        assert plain != kv.generate(
            other, ids, max_new_tokens=100, cache=cache, sampler=kv.sampled(0.8, seed=1)
        )


def test_a_draw_between_two_edges_gives_two_tokens(chapter, processors, tok):
    ids = tok.encode(PROMPT)
    for other in processors:
        _, cached, uncached = step_by_step(chapter, other, ids)
        two = 0
        for one, row in zip(uncached, cached, strict=True):
            draw = (chapter["pieces"](one)[1].min() + chapter["pieces"](row)[1].min()) / 2
            two += chapter["token_at"](draw, one) != chapter["token_at"](draw, row)
        assert two >= 95  # 90 is printed; only a step that is equal in all bits gives one token


def step_by_step(chapter, model, ids):
    known = chapter["model"]
    chapter["model"] = model
    try:
        return chapter["step_by_step"](ids, 100, kv.ConcatenatingCache.for_model(model))
    finally:
        chapter["model"] = known


def test_the_neighbors_row(chapter, processors, tok):
    for prompt, flips in ((TRUTH, []), (PROMPT, [24])):
        ids = tok.encode(prompt)
        for other in processors:
            text = greedy_text(other, ids, 100)
            cache = chapter["NeighborsRow"].for_model(other)
            parts = [other(ids, cache, rows=[-1]), other(text[:-1], cache)]
            wrong, right = np.concatenate(parts), forced(other, ids, text)
            assert np.flatnonzero(wrong.argmax(axis=-1) != right.argmax(axis=-1)).tolist() == flips
            # The wrong text is compared as well, so it too must not hang on a near-tie.
            assert figures.margins(wrong).min() > 100 * 1e-5 / 2
            if prompt == TRUTH:
                difference, margin = figures.differences(wrong, right), figures.margins(right)
                assert 0.36 < difference.max() < 0.44 and difference.argmax() == 1
                assert (difference > 1e-3 + ROUNDING).sum() > 92
                for slack in (-ROUNDING, ROUNDING):
                    possible = np.flatnonzero(margin <= 2 * (difference + slack))
                    assert possible[:4].tolist() == [0, 1, 5, 11] and len(possible) <= 7


# --- the panel ----------------------------------------------------------------------------

TINY = np.array([[0.0, 3.0, 1.0], [2.0, 2.005, 0.0], [1.0, 1.5, 9.0]], dtype=np.float32)
NEAR = TINY + np.array([[0, 0, 0], [0.01, -0.01, 0], [0.004, 0, 0]], dtype=np.float32)
WORDS = "abc".__getitem__


def compared(step, rows="bfloat16", close=False):
    return figures.compare(step, rows, close, TINY, {"bfloat16": NEAR, "float32": TINY}, WORDS)


def test_the_panels_numbers():
    data = compared(1)
    assert data["words"] == ["'b'", "'a'", "'c'"] and data["winner"] == "'a'"
    assert data["possible_steps"] == data["flipped_steps"] == [1]
    assert data["margin"] == pytest.approx(0.005, abs=1e-6)
    assert data["difference"] == pytest.approx(0.01, abs=1e-6)
    assert data["doubled"][0] is None, "an exact 0 has no place on a log axis"
    assert compared(1, close=True)["words"] == ["'b'", "'a'"]


@pytest.mark.parametrize(
    "step, rows, words",
    [
        (
            1,
            "bfloat16",
            "margin 0.005, difference 0.01: a flip is possible, and it happens, 'b' becomes 'a'.",
        ),
        (0, "float32", "margin 2.000, difference below 0.001: no flip is possible, both passes choose 'b'."),
        (2, "bfloat16", "margin 7.500, difference 0.004: no flip is possible, both passes choose 'c'."),
    ],
)
def test_the_panels_sentence(step, rows, words):
    assert figures.compare_text(compared(step, rows)) == f"Step {step}, {rows} rows: {words}"


def test_a_possible_flip_that_did_not_happen():
    data = figures.compare(0, "float16", False, TINY[1:2], {"float16": TINY[1:2] + [[0, 0.01, 0]]}, WORDS)
    assert "possible, but both passes choose 'b'" in figures.compare_text(data)


def test_the_panel_shows_what_it_says(chapter, model):
    random = np.random.default_rng(5)
    uncached = random.standard_normal((100, 2048), dtype=np.float32) * 4
    cached = {
        name: uncached + np.float32(size)
        for name, size in zip(figures.FORMATS, (0, 0.001, 0.05), strict=True)
    }
    panel = widgets.compare_panel(uncached, cached, str)
    said = {panel.set(step=step, rows=rows) for step in (0, 99) for rows in figures.FORMATS}
    assert len(said) == 6
    for close in (False, True):
        panel.set(close=close)
        assert len(panel.figure.data[0].x) == (2 if close else figures.BEST)
        low, high = panel.figure.layout.xaxis.range
        assert all(low < value < high for trace in panel.figure.data[:2] for value in trace.x)
    fastest = min(timed(panel, step) for step in range(1, 6))
    assert fastest < 0.1


def timed(panel, step):
    start = time.process_time()  # of this process alone: others may be busy
    panel.set(step=step)
    return time.process_time() - start


# --- the exercise ---------------------------------------------------------------------------

NAME = "05.same_answers"


@pytest.fixture(scope="module")
def solution():
    path = paths.chapters_dir() / "solutions" / "05_the_same_answers.py"
    spec = importlib.util.spec_from_file_location("solution_05", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.same_answers


def test_the_solution_passes(solution):
    assert checks.verdict(NAME, solution).status == checks.RIGHT


def test_every_planted_cache_is_told_apart_by_a_wide_space(solution):
    """Right ones lie far below the solution's limit, wrong ones far above; tokens agree in all of them."""
    uncached, planted = plants.planted_caches()
    assert uncached.shape == (32, 2048) and uncached.dtype == np.float32
    assert [plant.trusted for plant in planted] == [True] * 2 + [False] * 7
    for plant in planted:
        assert plant.cached.shape == uncached.shape and plant.cached.dtype == np.float32
        whole = np.isfinite(plant.cached).all(axis=-1)
        assert (plant.cached[whole].argmax(axis=-1) == uncached[whole].argmax(axis=-1)).all()
        largest = np.abs(plant.cached[whole] - uncached[whole]).max()
        if plant.trusted:
            assert 0 < largest < 5e-5
        elif whole.all():
            assert largest > 1.2e-3


def test_what_the_messages_say_of_the_planted_caches():
    uncached, planted = plants.planted_caches()
    neighbors, one_step, not_a_number, moved, sixteen, low, high = (plant.cached for plant in planted[2:])
    assert min(np.abs(neighbors - uncached).max(), np.abs(moved - uncached).max()) > 0.3
    by_step = np.abs(one_step - uncached).max(axis=-1)
    assert np.flatnonzero(by_step > 1e-3).tolist() == [2] and 0.05 < by_step[2] < 0.06
    assert np.flatnonzero(np.isnan(not_a_number).any(axis=-1)).tolist() == [29, 30, 31]
    assert 0.001 < np.abs(sixteen - uncached).max() < 0.003
    for plant, sign in ((low, -1), (high, 1)):
        assert (plant != uncached).sum() == 1
        assert 0.0099 < sign * (plant - uncached).sum() < 0.0101


@pytest.mark.parametrize(
    "measure, limit",
    [
        (lambda a, b: (b - a).max(), 3e-4),
        (lambda a, b: np.percentile(np.abs(a - b), 99), 3e-4),
        (lambda a, b: np.sqrt(((a - b) ** 2).mean()), 1e-4),
        (lambda a, b: np.median(np.abs(a - b), axis=-1).max(), 1e-4),
        (lambda a, b: np.abs(a - b).mean(axis=-1).max(), 1e-4),
        (lambda a, b: np.abs(ops.softmax(a) - ops.softmax(b)).max(), 1e-5),
    ],
    ids=["one sign", "percentile", "root mean square", "median", "mean of a step", "probabilities"],
)
def test_a_measure_that_misses_single_logits_is_not_accepted(measure, limit):
    verdict = checks.verdict(NAME, lambda cached, uncached: bool(measure(cached, uncached) < limit))
    assert verdict.status == checks.WRONG


@pytest.mark.parametrize("limit", [1e-4, 3e-4, 1e-3])
def test_any_tolerance_between_the_two_roundings_is_accepted(limit):
    def compare(cached, uncached):
        return bool((np.abs(cached - uncached) < limit).all())

    assert checks.verdict(NAME, compare).status == checks.RIGHT


def test_a_stub_is_not_done():
    assert checks.verdict(NAME, lambda cached, uncached: ...).status == checks.NOT_DONE


def test_always_and_never_are_both_named():
    assert "you reject it" in checks.verdict(NAME, lambda cached, uncached: False).message
    assert "you trust it" in checks.verdict(NAME, lambda cached, uncached: True).message
