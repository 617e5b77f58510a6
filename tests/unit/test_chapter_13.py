"""Chapter 13: the page's latents and its MLA equal the package's, sums by hand, the panel, the exercise."""

import importlib.util
import json
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, ops, paths
from kvcourse.bench.chapter_code import tagged_code
from kvcourse.config import Latent
from kvcourse.figures import chapter_13 as figures
from kvcourse.models.grouped import GroupedGPT2
from kvcourse.models.latent import LatentAttention, param_shapes
from kvcourse.widgets import chapter_13 as widgets

NOTEBOOK = paths.chapters_dir() / "13_latent_attention.ipynb"
V3 = kv.catalogue()["deepseek-v3"]


def code_cells(tag):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if tag in cell["metadata"].get("tags", [])]


def printed():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))


@pytest.fixture(scope="module")
def page(model, tokenizer):
    """What the cells tagged plain-latent define, with the windows and the directions of the page."""
    names = {"np": np, "kv": kv, "attention": ops.attention, "model": model, "c": model.config}
    for cell in code_cells("plain-latent"):
        exec(compile(cell, NOTEBOOK.name, "exec"), names)
    novel = (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    windows = np.array(tokenizer.encode(novel[:30000])[:6144]).reshape(6, 1024)
    names["unseen"] = windows[4:]
    names["strengths"], names["bases"] = names["directions"](windows[:4])
    return names


@pytest.fixture(scope="module")
def mla():
    """What the cells tagged plain-mla define, with the imports of the page."""
    names = tagged_code(NOTEBOOK, "plain-mla")
    names.update(Rotary=ops.Rotary, attention=ops.attention, rms_norm=ops.rms_norm)
    return names


def squeezed(page, ranks):
    cache = page["Squeezed"].for_model(page["model"])
    cache.ranks = np.broadcast_to(ranks, 6)
    return cache


# --- latents of the trained model -----------------------------------------------------------


def test_keys_and_values_of_a_layer_have_the_rank_of_its_width(page):
    """The page's threshold, 1e-10 of the largest strength, lies far from both neighbors: 256 and 257."""
    relative = page["strengths"] / page["strengths"][:, :1]
    assert (relative[:, 255] > 1e-7).all() and (np.abs(relative[:, 256]) < 1e-12).all()
    for layer in page["bases"]:  # rows at right angles, of length 1
        np.testing.assert_allclose(layer @ layer.T, np.eye(512), atol=1e-5)


@settings(deadline=None, max_examples=8)
@given(
    rank=st.sampled_from([1, 8, 64, 128, 256]),
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)
def test_absorbed_latents_give_what_rebuilt_keys_and_values_give(page, rank, chunks):
    ids, start, cache = page["unseen"][0][: sum(chunks)], 0, page["Latents"](rank)
    want, parts = page["model"](ids, squeezed(page, rank)), []
    for n in chunks:
        parts.append(page["model"](ids[start : start + n], cache))
        start += n
    # Logits of size 10, float32, six layers of sums in another order; the page asks for 1e-3.
    np.testing.assert_allclose(np.concatenate(parts), want, atol=2e-4, rtol=0)
    assert cache.seq_len == sum(chunks)


def test_a_latent_of_full_rank_changes_nothing_and_is_read_once(page):
    ids, cache = page["unseen"][1][:40], page["Latents"](256)
    np.testing.assert_allclose(page["model"](ids, cache), page["model"](ids), atol=2e-4, rtol=0)
    assert cache.bytes_read == 6 * 40 * 256 * 4


def near(value, shown, digits):
    """`shown` is `value` rounded, and no rounding noise could change it: that is of the order of 1e-6."""
    step = 10**-digits
    assert f"{value:.{digits}f}" == shown
    assert abs(value / step % 1 - 0.5) * step > 1e-4 * value


def test_printed_perplexities(page):
    text, log_probs = printed(), page["log_probs"]
    plain, found = log_probs(lambda: None), log_probs(lambda: squeezed(page, 128))
    shared = log_probs(lambda: None, GroupedGPT2(page["model"], 1, "first"))
    wrong = log_probs(lambda: page["Latents"](256, 1 / 16))
    for line, scores, shown in (
        ("as trained: 512 numbers a token and layer, perplexity 31.5", plain, "31.5"),
        ("latent of rank 128: 128 numbers a token and layer, perplexity 31.7", found, "31.7"),
        ("1: 128 numbers a token and layer, perplexity 86.5 by the mean, 77.3 by the first", shared, "77.3"),
        ("rank 256: perplexity 31.5, with the scale of the row 42.3", wrong, "42.3"),
    ):
        assert line in text
        near(kv.evaluation.perplexity(scores), shown, 1)
    extra = plain - found
    near(float(extra.mean()), "0.004", 3)
    near(float(extra.std() / len(extra) ** 0.5), "0.003", 3)
    assert "rank 128: 0.004 ± 0.003 nats a token more" in text


def test_printed_shares_that_layers_keep(page):
    """Per cent of the keys at rank 48, by another way than the panel's."""
    tap = kv.Tap(page["c"])
    page["model"](page["unseen"][0], tap, rows=[-1])
    shown = []
    for layer in range(6):
        rows, down = page["joint"](tap.keys[layer], tap.values[layer]), page["bases"][layer][:48]
        lost = (rows - rows @ down.T @ down)[:, :256].var(axis=0).sum()
        kept = 100 * (1 - lost / rows[:, :256].var(axis=0).sum())
        shown.append(f"layer {layer} {kept:.0f}%")
        near(float(kept), f"{kept:.0f}", 0)
    assert f"rank 48, share of the keys kept: {', '.join(shown)}" in printed()


def test_printed_gains_of_one_layer_at_rank_96(page):
    """Nats a token that layers 0 and 4 win back: the page says that layer 0 is the wrong one to choose."""
    at_48, text = page["log_probs"](lambda: squeezed(page, 48)), printed()
    for layer, shown, error in ((0, "0.014", "0.003"), (4, "0.041", "0.005")):
        ranks = [96 if one == layer else 48 for one in range(6)]
        gain = page["log_probs"](lambda ranks=ranks: squeezed(page, ranks)) - at_48
        near(float(gain.mean()), shown, 3)
        near(float(gain.std() / len(gain) ** 0.5), error, 3)
        assert f"  layer {layer}: {shown} ± {error}  (it keeps" in text


def test_printed_share_of_best_tokens(page):
    """The same with the right scale and with that of the row: a tie more or less moves 1 in 2,048."""
    right, wrong = (
        np.concatenate(
            [page["model"](ids, page["Latents"](256, scale)).argmax(axis=1) for ids in page["unseen"]]
        )
        for scale in (1 / 8, 1 / 16)
    )
    near(float((right == wrong).mean()), "0.65", 2)
    assert "the best token is the same at 65% of the positions" in printed()


# --- the layer of multi-head latent attention ------------------------------------------------


def shape(heads, rank, rope, nope, v, q_rank=None):
    sizes = Latent(rank, rope, nope, v, q_rank)
    lite = kv.catalogue()["deepseek-v2-lite"]
    return replace(
        lite, num_layers=1, max_seq_len=64, hidden_size=20, num_heads=heads, num_kv_heads=heads,
        head_dim=nope + rope, latent=sizes,
    )  # fmt: skip


def of_the_package(config, w):
    params = {"q_proj": w["q"].T, "kv_a_proj_with_mqa": w["down"].T, "kv_a_layernorm": w["norm"]}
    up = np.concatenate([w["up_keys"], w["up_values"]], axis=1)
    params |= {"o_proj": w["out"].T, "kv_b_proj": up.reshape(-1, config.latent.kv_lora_rank)}
    assert {name: array.shape for name, array in params.items()} == param_shapes(config)
    return LatentAttention(config, params)


@settings(deadline=None, max_examples=20)
@given(
    heads=st.integers(1, 4),
    rank=st.integers(1, 9),
    rope=st.sampled_from([2, 4]),
    nope=st.integers(1, 5),
    v=st.integers(1, 5),
    chunks=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_both_forms_of_the_page_are_the_packages_layer(mla, heads, rank, rope, nope, v, chunks):
    config = shape(heads, rank, rope, nope, v)
    w = mla["random_weights"](config, np.float64, seed=heads)
    x = np.random.default_rng(rank).standard_normal((sum(chunks), 20))
    want = of_the_package(config, w).expanded(x, np.arange(len(x)))
    layer, rows, start = mla["MLA"](config, w), np.empty((0, rank + rope)), 0
    for n in chunks:
        new = x[start : start + n]
        rows = np.concatenate([rows, layer.rows(new, start + np.arange(n))])
        for form in ("expanded", "absorbed"):
            got = mla[form](layer, new, rows, start)
            # float64: outputs of size 1, some hundred additions; the page asks for 1e-12, too.
            np.testing.assert_allclose(got, want[start : start + n], atol=1e-12, rtol=1e-10)
        start += n


def test_rows_are_what_the_packages_cache_holds(mla):
    config = shape(3, 6, 4, 5, 2)
    w = mla["random_weights"](config, np.float32)
    x = np.random.default_rng(0).standard_normal((7, 20)).astype(np.float32)
    cache, package = kv.LatentCache(config), of_the_package(config, w)
    cache.begin(7)
    out = package.absorbed(x, cache)
    cache.commit()
    layer = mla["MLA"](config, w)
    rows = layer.rows(x, np.arange(7))
    # float32, numbers of size 1.
    np.testing.assert_allclose(cache.keys_values(0)[0][0], rows, atol=1e-5)
    np.testing.assert_allclose(mla["absorbed"](layer, x, rows, 0), out, atol=1e-5)
    assert out.dtype == rows.dtype == np.float32


def test_a_key_cached_unrotated_fools_both_forms(mla):
    """What "Break it" shows: the forms agree with each other and not with the layer."""
    config = shape(2, 6, 4, 5, 3)
    w = mla["random_weights"](config, np.float64)
    x = np.random.default_rng(1).standard_normal((9, 20))
    layer = mla["MLA"](config, w)
    rows = layer.rows(x, np.zeros(9, int))
    one, two = (mla[form](layer, x, rows, 0) for form in ("expanded", "absorbed"))
    np.testing.assert_allclose(one, two, atol=1e-12)
    assert np.abs(one - of_the_package(config, w).expanded(x, np.arange(9))).max() > 0.05


def test_a_rotated_key_needs_an_absorbed_query_for_each_distance():
    """Turning the query back by n before absorbing is the score with the key turned by n."""
    random, turn = np.random.default_rng(0), ops.Rotary(8, 10_000.0)
    up, query, latent = random.standard_normal((8, 5)), random.standard_normal(8), random.standard_normal(5)
    found = []
    for m, n in ((7, 3), (8, 4), (7, 4)):
        key = turn((latent @ up.T)[None, None], np.array([n]))[0, 0]
        score = key @ turn(query[None, None], np.array([m]))[0, 0]
        absorbed = turn(query[None, None], np.array([m - n]))[0, 0] @ up
        assert absorbed @ latent == pytest.approx(score, abs=1e-12)
        found.append(absorbed)
    np.testing.assert_allclose(found[0], found[1], atol=1e-12)  # the same distance
    assert np.abs(found[0] - found[2]).max() > 0.01


# --- counts ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work():
    return tagged_code(NOTEBOOK, "plain-work")["attention_work"]


def test_work_by_hand(work):
    """Two heads, rank 5, rope 2, nope 3, v 4; one new token over three cached ones, one layer."""
    config = shape(2, 5, 2, 3, 4)
    expand = 2 * 2 * 5 * (3 + 4)  # a token
    assert work(config, 1, 3, "keys and values cached") == (expand + 2 * 2 * 4 * (3 + 2 + 4), 3 * 2 * 9 * 2)
    assert work(config, 1, 3, "latent, expanded") == (4 * expand + 2 * 2 * 4 * 9, 3 * 7 * 2)
    assert work(config, 1, 3, "latent, absorbed") == (expand + 2 * 2 * 4 * (7 + 5), 3 * 7 * 2)


def test_printed_counts_by_hand(work):
    text = printed()
    flops, read = work(V3, 1, 8192, "latent, absorbed")
    assert read == kv.sizing.pass_bytes(V3, 1, 8192).cache_read == 8192 * 70_272
    assert f"{flops / read:.1f}" == "245.4"
    expanded, absorbed = (work(V3, 1, 8192, f"latent, {form}")[0] for form in ("expanded", "absorbed"))
    plain = work(V3, 1, 8192, "keys and values cached")[0]
    assert (round(expanded / 1e9), round(absorbed / 1e9), round(plain / 1e9)) == (16811, 141, 43)
    assert round(absorbed / plain, 1) == 3.3
    # past · 131,072 against pairs · 768, with pairs = n · past + n (n + 1) / 2, from 8,192 cached
    assert 168 * 8192 + 168 * 169 // 2 < 8192 * 131_072 / 768 < 169 * 8192 + 169 * 170 // 2
    for answer in (
        "Answer: 256 numbers.",
        "Answer: 512,000 bytes.",
        "Answer: 96 numbers.",
        "Answer: 101 queries.",
        "Answer: latent, expanded.",
        "Answer: 170 tokens.",  # 131,072 / 768 = 170.7
        "over   8,192 cached tokens absorbing takes fewer FLOPs up to 168 new ones",
        "Answer: 1.91 times.",  # 70,272 / 36,864
        "Answer: 2.25 KV heads.",
        "Answer: 470 million.",  # 128 · 512 · 7,168
        "Answer: higher at 128 and 256, the same at 64.",
        "Answer: no.",
    ):
        assert answer in text


def test_claim_c34_by_hand():
    assert kv.sizing.kv_bytes_per_token(V3, 2) == 61 * (512 + 64) * 2 == 70_272
    gpt2 = kv.catalogue()["gpt2"]
    assert (kv.sizing.kv_bytes_per_token(gpt2, 4), kv.sizing.kv_bytes_per_token(gpt2, 2)) == (73_728, 36_864)
    assert 61 * 128 * (128 + 64 + 128) * 2 == 4_997_120 and round(4_997_120 / 70_272, 1) == 71.1
    assert 576 / 256 == 2.25
    text = printed()
    assert "61 × (512 + 64) × 2 = 70,272 B = 68.6 KiB" in text and "4,997,120 B a token, 71.1 times" in text


# --- the panel and the still -------------------------------------------------------------------


@pytest.fixture(scope="module")
def state():
    """Random rows in place of the model's: six layers, 40 tokens."""
    random = np.random.default_rng(5)
    bases = np.stack([np.linalg.qr(random.standard_normal((512, 512)))[0] for _ in range(6)])
    rows = random.standard_normal((6, 40, 512)) + 3
    measured = {rank: 30 + 100 / rank for rank in figures.RANKS}
    return figures.rank_state(bases, rows, measured, 30.0), rows, bases


def test_the_view_by_another_way(state):
    view, rows, bases = state[0], state[1], state[2]
    data = figures.rank_view(view, 96, layer=2, head=1, show="values")
    down, centered = bases[2][:96], rows[2] - rows[2].mean(axis=0)
    back = rows[2] @ down.T @ down
    lost = (rows[2] - back).var(axis=0)
    where = slice(256 + 64, 256 + 128)
    assert data["kept"]["head"] == pytest.approx(1 - lost[where].sum() / centered[:, where].var(axis=0).sum())
    assert data["kept"]["keys"] == pytest.approx(1 - lost[:256].sum() / centered[:, :256].var(axis=0).sum())
    assert data["kept"]["values"] == pytest.approx(1 - lost[256:].sum() / centered[:, 256:].var(axis=0).sum())
    np.testing.assert_allclose(data["true"], np.abs(centered[0:32:2, where].T))
    back = (centered @ down.T @ down)[0:32:2, where]
    np.testing.assert_allclose(data["rebuilt"], np.abs(back.T), atol=1e-12)
    assert data["latent"].shape == (96, 16) and data["missing"].shape == (64, 16)


def test_the_sentence_and_the_figure_at_the_ends_of_the_controls(state):
    panel = widgets.rank_panel(state[2], state[1], state[0]["perplexities"], 30.0)
    for rank, bytes_shown in ((8, "96 B"), (256, "3,072 B")):
        for layer, head, show in ((0, 0, "keys"), (5, 3, "values")):
            text = panel.set(rank=rank, layer=layer, head=head, show=show)
            assert text.startswith(f"Rank {rank} in all layers: {bytes_shown} a token in 16 bits, against")
            assert (
                f"Layer {layer} keeps" in text
                and f"head {head} " in text
                and text.endswith(f"of its {show}.")
            )
            assert [len(trace.z) for trace in panel.figure.data] == [rank, 64, 64, 64]
            assert all(isinstance(trace.z, (tuple, list)) for trace in panel.figure.data)


def test_the_panel_repaints_quickly(state):
    panel = widgets.rank_panel(state[2], state[1], state[0]["perplexities"], 30.0)
    times = []
    for rank in (256, 192, 256, 128, 256):
        before, start = panel.text, time.process_time()
        assert panel.set(rank=rank) != before
        times.append(time.process_time() - start)  # of this process alone: others may be busy
    assert min(times[1:]) < 0.1  # the course's limit for a repaint


def test_the_still():
    shown = {"GPT-2 small": kv.catalogue()["gpt2"], "DeepSeek-V3": V3}
    bars = figures.token_figure(shown).data
    assert [(list(bar.width), list(bar.y)) for bar in bars] == [([1536], [12]), ([576], [61])]
    assert "73,728" not in bars[0].hovertemplate and "36,864 B" in bars[0].hovertemplate
    assert figures.token_text(shown).endswith(
        "GPT-2 small 1,536 × 12, 36.0 KiB; DeepSeek-V3 576 × 61, 68.6 KiB. "
        "GPT-2 small in float32, as the blog counts it: 72.0 KiB."
    )


# --- the exercise -------------------------------------------------------------------------------


def solution():
    path = paths.chapters_dir() / "solutions" / "13_latent_attention.py"
    spec = importlib.util.spec_from_file_location("solution_13", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.absorb_output


def test_the_solution_gives_the_layers_output(mla):
    config = shape(3, 5, 2, 4, 6)
    w = mla["random_weights"](config, np.float64)
    mixed = np.random.default_rng(0).standard_normal((3, 4, 5))  # (heads, T, rank)
    want = mla["MLA"](config, w).merge(mixed @ w["up_values"].swapaxes(1, 2))
    got = (mixed @ solution()(w["up_values"], w["out"])).sum(axis=0)
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_the_check_takes_other_ways_to_write_it():
    def einsum(up_values, out):
        return np.einsum("hvr,hvd->hrd", up_values, out.reshape(*up_values.shape[:2], -1))

    def loop(up_values, out):
        heads, v, _ = up_values.shape
        return [up_values[h].T @ out[h * v : h * v + v] for h in range(heads)]

    for function in (einsum, loop, lambda up, out: einsum(up, out).astype(np.float64)):
        assert checks.verdict("13.absorb_output", function).status == "right"
