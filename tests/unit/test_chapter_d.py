"""Primer D: its rotation and its forward pass are the package's, and no printed digit hangs on a rounding."""

import copy
import importlib.util
import math
import random
import time

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import checks, gguf_convert, ops, paths
from kvcourse.bench.chapter_code import tagged_code
from kvcourse.figures import chapter_d as figures
from kvcourse.figures import template as look
from kvcourse.widgets import chapter_d as widgets

NAME = "d_from_gpt2_to_llama"
NOTEBOOK = paths.chapters_dir() / "primers" / f"{NAME}.ipynb"
THETA = 100_000.0
SENTENCE = "She is a great reader, and has no pleasure in anything else."
FLOAT32 = 2e-6  # sums of a hundred float32 numbers of size 1 in another order


@pytest.fixture(scope="module")
def page():
    """What the page defines in its cells tagged plain-llama, by name."""
    return tagged_code(NOTEBOOK, "plain-llama")


@pytest.fixture(scope="module")
def tap(smollm2, smollm2_tokenizer):
    """Queries, keys and values of the page's sentence."""
    tap = kv.Tap(smollm2.config)
    smollm2(smollm2_tokenizer.encode(SENTENCE), tap)
    return tap


@pytest.fixture(scope="module")
def novel():
    return (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def safely_rounded(value, digits, room):
    """Whether a value that is off by `room` (relative) would still be printed alike."""
    return f"{value * (1 - room):.{digits}f}" == f"{value * (1 + room):.{digits}f}"


# --- the page's parts are the package's ---------------------------------------------------------


def test_rms_norm_and_swiglu(page):
    x, weight = numbers(5, 48), numbers(48, seed=1)
    assert np.abs(page["rms_norm"](x, weight, 1e-5) - ops.rms_norm(x, weight, 1e-5)).max() < FLOAT32
    # 3 and 4: mean square 12.5, so 3 / √12.5 and 4 / √12.5
    by_hand = [3 / math.sqrt(12.5), 4 / math.sqrt(12.5)]
    assert page["rms_norm"](np.float32([[3, 4]]), np.float32([1, 1]), 0.0)[0] == pytest.approx(
        by_hand, rel=1e-6
    )
    gate, up, down = numbers(96, 48, seed=2), numbers(96, 48, seed=3), numbers(48, 96, seed=4)
    joined = x @ np.concatenate([gate, up]).T
    want = ops.swiglu_inplace(joined) @ down.T
    assert np.abs(page["swiglu"](x, gate, up, down) - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("head_dim, theta", [(4, 10_000.0), (64, THETA), (128, 500_000.0)])
def test_rotation(page, head_dim, theta):
    x, positions = numbers(3, 6, head_dim), np.array([0, 5, 5, 700, 8_000, 8_191])
    got = page["rotated"](x, positions, theta)
    assert got.dtype == np.float32
    assert np.abs(got - ops.Rotary(head_dim, theta)(x, positions)).max() < FLOAT32
    assert np.array_equal(got[:, 0], x[:, 0])  # position 0 turns nothing


def test_rotation_by_hand(page):
    """Two pairs, theta 100: pair 0 by 1 radian a position, pair 1 by 100^(−1/2) = 0.1."""
    got = page["rotated"](np.array([[[1.0, 0.0, 0.0, 2.0]]]), np.array([3]), 100.0)[0, 0]
    assert got == pytest.approx([math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)], abs=1e-12)


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 4, 8), (6, 2, 8), (3, 1, 16)])
def test_the_forward_pass_is_the_package_s(page, heads, kv_heads, head_dim):
    shape = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "vocab_size": 100,
        "num_layers": 3,
        "num_heads": heads,
    }
    model = kv.random_model("smollm2-135m", num_kv_heads=kv_heads, head_dim=head_dim, **shape)
    ids = list(range(17, 47))
    want = model(ids)
    got = page["llama"](ids, model.params, model.config)
    assert np.abs(got - want).max() < 1e-4 * max(1, np.abs(want).max())
    # Moved on as a whole it says the same, by another rotation it does not.
    moved = page["llama"](ids, model.params, model.config, start=1_000)
    assert np.abs(moved - want).max() < 1e-3 * max(1, np.abs(want).max())


def test_the_repair_at_the_rows_is_the_package_s():
    spec = importlib.util.spec_from_file_location(
        "solution", paths.chapters_dir() / "solutions" / f"{NAME}.py"
    )
    solution = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(solution)
    rows = np.arange(2 * 8)[:, None]  # two heads of 8, as a GGUF has them: row 1 of a head is j = 0 + 4
    assert solution.for_halves(rows, 8)[:8, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert np.array_equal(solution.for_halves(rows, 8), gguf_convert.unpermuted(rows, 2))


# --- figures -------------------------------------------------------------------------------------


def test_frequencies():
    assert figures.frequencies(4, 100.0).tolist() == pytest.approx([1.0, 0.1])
    found = figures.frequencies(64, THETA)
    assert np.abs(found - ops.Rotary(64, THETA).frequencies).max() == 0
    assert found[0] == 1 and found[31] == pytest.approx(THETA ** (-62 / 64))


def test_frequency_table():
    table = figures.frequency_table(64, THETA, 8_192, pairs=(0, 16, 31)).splitlines()
    # 1 radian is 57.2958°, 2π = 6.28; 8,192 / 2π = 1,303.8
    assert table[1].split() == ["0", "57.2958°", "6.3", "tokens", "1,303.8", "turns"]
    # 100,000^(−1/2) = 0.0031623 rad = 0.18118°; 2π / 0.0031623 = 1,986.9
    assert table[2].split() == ["16", "0.1812°", "1,986.9", "tokens", "4.1", "turns"]
    assert table[3].split()[:4] == ["31", "0.0008°", "438,459.9", "tokens"]
    assert table[3].split()[4:] == ["6.7°"]  # below one turn: degrees


def test_circles():
    text = figures.circles_text(64, THETA, (0, 16))
    assert text == "From position 0 to position 6: pair 0 343.8°, pair 16 1.1°."  # 6 radians; 6 · 0.18118°
    drawing = figures.circles_figure(64, THETA, (0, 4, 8, 16))
    points = [trace for trace in drawing.data if trace.mode == "markers"]
    assert len(points) == 4
    assert [round(value, 3) for value in points[0].x] == [round(math.cos(n), 3) for n in range(7)]
    assert all(trace.marker.color == look.KEY for trace in points)
    written = [list(trace.text) for trace in drawing.data if trace.mode == "text"]
    assert written == [list("0123456"), list("0123456"), ["0", "6"], ["0 … 6"]]


def view(**changes):
    given = {"pair": 1, "query": 9, "key": 4, "shift": 0} | changes
    return figures.pair_view(numbers(8), numbers(8, seed=1), THETA, **given)


def test_pair_view_is_the_rotated_product():
    data, q, k = view(), numbers(1, 1, 8).astype(float), numbers(8, seed=1)[None, None].astype(float)
    rotate = ops.Rotary(8, THETA)
    parts = rotate(q, np.array([9]))[0, 0] * rotate(k, np.array([4]))[0, 0] / math.sqrt(8)
    assert data["score"] == pytest.approx(parts.sum())
    assert data["part"] == pytest.approx(parts[1] + parts[5])
    assert (data["scores"][5], data["parts"][5]) == pytest.approx((data["score"], data["part"]))
    assert len(data["scores"]) == figures.FARTHEST + 1
    length = math.hypot(q[0, 0, 1], q[0, 0, 5]) * math.hypot(k[0, 0, 1], k[0, 0, 5])
    assert length * math.cos(math.radians(data["between"])) / math.sqrt(8) == pytest.approx(data["part"])
    assert 0 <= data["between"] <= 180
    assert data["lowest"] <= min(data["scores"]) and data["highest"] >= max(data["scores"])


def test_moving_both_changes_directions_only():
    draw = random.Random(0)
    for _ in range(30):
        pair, query, key, shift = (
            draw.randrange(4),
            draw.randrange(65),
            draw.randrange(65),
            draw.randrange(8_000),
        )
        here = view(pair=pair, query=query, key=key)
        there = view(pair=pair, query=query, key=key, shift=shift)
        for name in ("part", "score", "between", "distance"):
            assert here[name] == pytest.approx(there[name], abs=1e-8)
        assert there["turned"]["key"] - here["turned"]["key"] == pytest.approx(shift * here["step"])
        assert (there["query"], there["key"]) == (query + shift, key + shift)


def test_pair_sentence():
    text = figures.pair_text(view(pair=0, query=1, key=0))
    assert text.startswith("Pair 0 turns 57° a position. Query at 1: ")
    assert "Distance 1: the pair adds " in text and "mask" not in text
    assert figures.pair_text(view(query=3, key=5)).endswith(
        "The key comes after the query, so the mask hides it."
    )
    assert "Distance −2" in figures.pair_text(view(query=3, key=5))


def test_pair_figure():
    drawing = figures.pair_figure(view())
    arrows = [trace for trace in drawing.data if trace.marker.symbol == "arrow"]
    assert [trace.line.color for trace in arrows] == [look.KEY, look.KEY, look.QUERY, look.QUERY]
    assert [trace.line.dash for trace in arrows] == ["dot", "solid"] * 2
    end = math.degrees(math.atan2(arrows[3].y[1], arrows[3].x[1]))
    assert math.cos(math.radians(end - view()["turned"]["query"])) == pytest.approx(1, abs=1e-6)
    (chosen,) = (trace for trace in drawing.data if trace.name == "chosen distance")
    assert list(chosen.x) == [5, 5]
    hidden = figures.pair_figure(view(query=3, key=5))
    assert not [trace for trace in hidden.data if trace.name == "chosen distance"]


def test_an_arrow_that_hardly_turned_hides_none():
    def drawn(**choices):
        drawing = figures.pair_figure(view(**choices))
        dotted = [trace.line.color for trace in drawing.data if trace.line.dash == "dot" and not trace.name]
        return dotted, [note.text for note in drawing.layout.annotations if "pair" in note.text]

    assert drawn(pair=3, query=8, key=0) == ([], ["pair 3; before and after alike"])
    assert drawn(pair=0, query=8, key=0) == ([look.QUERY], ["pair 0; dotted: before"])


def test_panel_refuses_and_is_quick():
    with pytest.raises(ValueError, match="even length"):
        widgets.pair_panel(np.zeros(7), np.zeros(7), THETA, 8_192)
    panel = widgets.pair_panel(numbers(64), numbers(64, seed=1), THETA, 8_192)
    assert panel.controls["shift"].max + figures.FARTHEST < 8_192
    panel.set(pair=3)  # the first figure loads plotly's validators
    seconds = []
    for pair in (5, 31, 0):
        began = time.process_time()  # of this process alone: others may be busy
        panel.set(pair=pair, query=64, key=0, shift=8_000)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.1


# --- the exercise --------------------------------------------------------------------------------


def test_other_ways_to_rotate_are_right():
    def complex_numbers(x, positions, theta):
        half = x.shape[-1] // 2
        f = theta ** (-2 * np.arange(half) / x.shape[-1])
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.asarray(positions)[:, None] * f)
        return np.concatenate([turned.real, turned.imag], axis=-1).astype(np.float32)

    def loop(x, positions, theta):
        out, half = np.empty_like(x), x.shape[-1] // 2
        for row, position in enumerate(positions):
            for j in range(half):
                angle = int(position) * theta ** (-2 * j / x.shape[-1])
                cos, sin = math.cos(angle), math.sin(angle)
                out[:, row, j] = x[:, row, j] * cos - x[:, row, j + half] * sin
                out[:, row, j + half] = x[:, row, j] * sin + x[:, row, j + half] * cos
        return out

    def packages(x, positions, theta):
        return ops.Rotary(x.shape[-1], theta)(x, positions)

    for function in (complex_numbers, loop, packages):
        assert checks.verdict("d.rotate", function).status == "right"


# --- printed figures -------------------------------------------------------------------------------

# How far a figure may move on another processor: a perplexity is a mean of hundreds of log-probabilities,
# each off by 1e-5 or so; queries and keys of layer 16 are off by about 1e-4.
OF_PERPLEXITY, OF_LAYER_16 = 5e-4, 1e-3


def perplexity(model, ids):
    return kv.evaluation.perplexity(kv.evaluation.next_token_log_probs(model(ids), ids))


def test_centering_is_worth_less_than_a_printed_digit(model, tokenizer, novel, monkeypatch):
    ids = tokenizer.encode_ordinary(novel[30_000:34_000])[:512]
    with_it = perplexity(model, ids)
    monkeypatch.setattr(ops, "layer_norm", lambda x, w, b, eps=1e-5: ops.rms_norm(x, w, eps) + b)
    without = perplexity(model, ids)
    assert f"{with_it:.1f}" == f"{without:.1f}" == "30.8"
    assert with_it != without
    for value in (with_it, without):
        assert safely_rounded(value, 1, OF_PERPLEXITY)


def neighbors(x, positions):
    angles = positions[:, None] * ops.Rotary(64, THETA).frequencies
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    first, second = x[..., 0::2], x[..., 1::2]
    return np.stack([first * cos - second * sin, first * sin + second * cos], axis=-1).reshape(x.shape)


def test_perplexities_of_the_layouts(smollm2, smollm2_tokenizer, novel):
    ids = smollm2_tokenizer.encode_ordinary(novel[15_000:17_000])[:256]
    rotations = {
        37: smollm2.rotate,
        197: neighbors,
        # rows as in a GGUF, halves rotated: the queries come in GGUF's order, and so do the keys
        138: lambda x, at: smollm2.rotate(
            x.reshape(*x.shape[:-1], 2, 32).swapaxes(-1, -2).reshape(x.shape), at
        ),
        158: lambda x, at: x,
    }
    for printed, rotate in rotations.items():
        changed = copy.copy(smollm2)
        changed.rotate = rotate
        value = perplexity(changed, ids)
        assert f"{value:.0f}" == str(printed)
        assert safely_rounded(value, 0, OF_PERPLEXITY)


def test_the_broken_answer_is_no_near_tie(smollm2, smollm2_tokenizer):
    """As tests/equivalence does for texts of whole models: this one has another rotation."""
    broken = copy.copy(smollm2)
    broken.rotate = neighbors
    ids = kv.chat.encode(smollm2_tokenizer, "What is the capital of France?")
    gaps = []

    def watched(logits):
        second, best = np.partition(logits, -2)[-2:]
        gaps.append(float(best - second))
        return kv.greedy(logits)

    answer = kv.generate(broken, ids, max_new_tokens=15, sampler=watched)
    cache = kv.ContiguousCache.for_model(broken, max_seq_len=64)
    cached = np.concatenate([broken(ids[:20], cache), broken(ids[20:], cache)])
    difference = float(np.abs(cached - broken(ids)).max())
    assert smollm2_tokenizer.decode(answer) == "The capital of France\n" * 3
    assert min(gaps) >= 100 * difference > 0


def test_products_of_the_first_pair(tap):
    q, k = (x.astype(np.float64) for x in (tap.queries[16, 0, 7], tap.keys[16, 0, 4]))
    for value in (q[0], q[32], k[0], k[32]):
        assert abs(value * 10 % 1 - 0.5) > 0.005  # one decimal, of numbers below 10
    for query_at, key_at in ((7, 4), (4, 7), (7, 5)):
        angle = query_at - key_at
        turned = complex(q[0], q[32]) * complex(k[0], -k[32]) * complex(math.cos(angle), math.sin(angle))
        assert abs(turned.real % 1 - 0.5) > 0.02


def test_the_panel_s_sentences_and_table(tap):
    q, k = tap.queries[16, 0, 4], tap.keys[16, 0, 3]
    for shift in (0, 3_000, 8_000):
        data = figures.pair_view(q, k, THETA, 0, 4, 3, shift)
        for degrees in (data["turned"]["query"], data["turned"]["key"], data["between"]):
            assert abs(degrees % 1 - 0.5) > 0.02
    for pair in (0, 25):
        for key in (4, 3, 2):
            data = figures.pair_view(q, k, THETA, pair, 4, key, 0)
            assert pair or abs(data["between"] % 1 - 0.5) > 0.02
            for value in (data["part"], data["score"]):
                assert abs(value * 10 % 1 - 0.5) > 0.03  # 30 times 1e-4, what rounding moves
    assert int(np.argmax(data["scores"])) == 1
    first, second = sorted(data["scores"])[-2:]
    assert second - first > 1  # the next best distance is far behind


def test_scores_and_logits_as_printed(tap, smollm2, smollm2_tokenizer, novel):
    rotate, at = ops.Rotary(64, THETA), np.arange(14)
    q, k = rotate(tap.queries, at), np.repeat(rotate(tap.keys, at), 3, axis=1)
    scores = q @ k.swapaxes(2, 3) / 8
    assert safely_rounded(np.abs(scores).max(), 0, OF_LAYER_16)
    weights = ops.softmax(np.where(np.tril(np.ones((14, 14), dtype=bool)), scores[16, 0], -np.inf))
    assert safely_rounded(100 * np.diagonal(weights, -1).mean(), 0, OF_LAYER_16)  # percent
    ids = smollm2_tokenizer.encode_ordinary(novel[15_000:17_000])[:256]
    assert safely_rounded(np.abs(smollm2(ids)).max(), 0, OF_LAYER_16)


def test_gpt2_moved_on(model, tokenizer, novel):
    """The change of GPT-2's logits is printed without decimals."""
    ids = tokenizer.encode_ordinary(novel[30_000:34_000])[:30]
    table = np.roll(model.params["wpe.weight"], -500, axis=0)
    moved = type(model)(model.config, model.params | {"wpe.weight": table})
    change = np.abs(moved(ids) - model(ids)).max()
    assert f"{change:.0f}" == "7" and safely_rounded(change, 0, OF_LAYER_16)
