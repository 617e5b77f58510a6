"""Chapter 12: the page's attention and pooling are the package's, figures by hand, panel and exercise."""

import importlib.util
import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, measure, ops, paths, sizing
from kvcourse.bench.chapter_code import tagged_code
from kvcourse.figures import chapter_12 as figures
from kvcourse.models.grouped import GroupedGPT2, pool_kv_heads
from kvcourse.widgets import chapter_12 as widgets

NOTEBOOK = paths.chapters_dir() / "12_fewer_heads.ipynb"
SHAPE = dict(
    num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, hidden_size=32, intermediate_size=64,
    vocab_size=50, max_seq_len=32,
)  # fmt: skip
WAYS = [(4, "mean"), (2, "mean"), (2, "first"), (1, "mean"), (1, "first")]


@pytest.fixture(scope="module")
def tiny():
    return kv.random_model("gpt2", **SHAPE)


@pytest.fixture(scope="module")
def page():
    """What the page defines, with the page's imports."""
    names = tagged_code(NOTEBOOK, "plain-heads")
    names.update(math=math, np=np, causal_mask=ops.causal_mask, softmax=ops.softmax)
    return names


@pytest.fixture(scope="module")
def pool():
    names = tagged_code(NOTEBOOK, "plain-pool")
    names.update(np=np)
    return names["pool"]


@pytest.fixture(scope="module")
def novel():
    return (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")


# --- the page's definitions are the package's ------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([1, 4, 16]),
    T=st.integers(1, 6),
    start=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_shared_attention_is_the_packages(page, kv_heads, group, head_dim, T, start, seed):
    random = np.random.default_rng(seed)
    shapes = (kv_heads * group, T, head_dim), *[(kv_heads, start + T, head_dim)] * 2
    q, k, v = (random.standard_normal(shape, dtype=np.float32) for shape in shapes)
    want = ops.attention(q, k, v, start)
    got = page["shared_attention"](q, k, v, start)
    # Outputs of size 1 in float32 (eps 1.2e-7), at most 15 additions in another order.
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=0)
    np.testing.assert_allclose(solution()(q, k, v, start), want, atol=2e-6, rtol=0)


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_the_layer_gives_in_pieces_what_it_gives_at_once(page, kv_heads):
    x = np.random.default_rng(3).standard_normal((9, 128), dtype=np.float32)
    whole, stepped = page["Heads"](kv_heads), page["Heads"](kv_heads)
    out = whole(x)
    pieces = [stepped(x[low:high]) for low, high in ((0, 3), (3, 8), (8, 9))]
    assert out.dtype == np.float32 and stepped.k.shape == (kv_heads, 9, 16)
    np.testing.assert_allclose(np.concatenate(pieces), out, atol=1e-5, rtol=0)  # outputs of size 1


def test_one_pass_is_the_models_own(page):
    llama = kv.random_model(
        "smollm2-135m", num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, hidden_size=48,
        intermediate_size=64, vocab_size=60, max_seq_len=64,
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(60, size=12)
    ours = page["OnePass"](llama.config)
    np.testing.assert_allclose(llama(ids, ours), llama(ids), atol=2e-4, rtol=0)
    q, k, v = ours.layers[1]
    assert (q.shape, k.shape, v.shape) == ((6, 12, 8), (2, 12, 8), (2, 12, 8))


@pytest.mark.parametrize("kv_heads, how", WAYS)
def test_pool_is_the_packages_and_a_group_reads_its_pooled_head(pool, tiny, kv_heads, how):
    pooled = pool_kv_heads(tiny.params, tiny.config, kv_heads, how)
    for name in ("h.0.attn.c_attn.weight", "h.1.attn.c_attn.bias"):
        np.testing.assert_array_equal(pooled[name], pool(tiny.params[name], 4, kv_heads, how))
    assert pooled["h.0.attn.c_attn.weight"].shape == (32, 32 + 2 * kv_heads * 8)
    assert all(pooled[name] is tiny.params[name] for name in pooled if "c_attn" not in name)
    # The oracle: a plain GPT-2 in which every query head has a copy of its group's pooled keys and values.
    wide = dict(tiny.params)
    for name in (name for name in wide if "c_attn" in name):
        q, k, v = np.split(wide[name], 3, axis=-1)
        heads = np.stack([k, v]).reshape(2, *q.shape[:-1], kv_heads, 4 // kv_heads, 8)
        one = heads.mean(axis=-2, keepdims=True) if how == "mean" else heads[..., :1, :]
        copies = np.broadcast_to(one, heads.shape).reshape(2, *q.shape)
        wide[name] = np.concatenate([q, *copies], axis=-1)
    ids = np.random.default_rng(1).integers(50, size=20)
    want = type(tiny)(tiny.config, wide)(ids)
    model = GroupedGPT2(tiny, kv_heads, how)
    np.testing.assert_allclose(model(ids), want, atol=2e-4, rtol=0)
    cache = kv.ContiguousCache.for_model(model)
    found = [model(ids[low:high], cache) for low, high in ((0, 3), (3, 19), (19, 20))]
    np.testing.assert_allclose(np.concatenate(found), want, atol=2e-4, rtol=0)
    assert cache.nbytes == 2 * 2 * kv_heads * 8 * 32 * 4  # K and V, layers, KV heads, head_dim, tokens, bytes


def test_heads_that_do_not_divide_are_refused(tiny):
    for kv_heads in (3, 0, -1, 8, "2", 2.0, None):
        with pytest.raises(ValueError, match="cannot be pooled evenly"):
            GroupedGPT2(tiny, kv_heads)
    with pytest.raises(ValueError, match="pooling 'median' is not known: use one of mean, first"):
        GroupedGPT2(tiny, 2, "median")
    with pytest.raises(ValueError, match="only those are pooled"):
        GroupedGPT2(GroupedGPT2(tiny, 2), 1)


# --- what the page prints --------------------------------------------------------------------


def printed():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))


def far_from_a_rounding(value, digits, margin):
    """No rounding of `value` to so many digits can go the other way when it moves by `margin`."""
    low, high = (round(value + off, digits) for off in (-margin, margin))
    return low == high


def test_answers_by_hand():
    text = printed()
    for answer in (
        "Answer: the cache rows and the weights that make them.",
        "Answer: KV head 1.",  # 5 div 3
        "Answer: 2.34 times.",
        "Answer: 1.64 times.",
        "Answer: the first of each pair.",
        "Answer: less.",  # the mean at full length
        "Answer: one above 1,000.",
        "Answer: 3 heads.",  # 0, 4 and 8
        "smollm2-135m with  9 KV heads:   69,120",
        "smollm2-135m with  3 KV heads:   23,040 (its own)",
        "smollm2-135m with  1 KV heads:    7,680",
    ):
        assert answer in text
    assert 2 * 30 * 3 * 64 * 2 == 23_040
    caches = [16 * 4000 * 2 * 32 * n * 128 * 2 for n in (32, 8, 1)]
    kv_weights = 2 * 32 * 4096 * 128 * 2  # K and V of one KV head in all layers, 16 bits
    own = (6_738_415_616 - 32_000 * 4096) * 2  # a step reads no input embedding
    steps = [
        own - (32 - n) * kv_weights + cache + 16 * cache // 64_000
        for n, cache in zip((32, 8, 1), caches, strict=True)
    ]
    assert steps[0] / steps[1] == pytest.approx(2.34, abs=0.004)
    assert steps[1] / steps[2] == pytest.approx(1.64, abs=0.004)


def test_losses_and_cosines_are_far_from_a_rounding(model, tokenizer, novel):
    held_out = tokenizer.encode(novel[:8000])[:513]
    characters = len(tokenizer.decode(held_out[1:]))
    found = {}
    for n, how in WAYS:
        log_probs = kv.evaluation.next_token_log_probs(GroupedGPT2(model, n, how)(held_out), held_out)
        found[n, how] = kv.evaluation.bits_per_character(log_probs, characters)
        assert far_from_a_rounding(found[n, how], 2, 1e-3), (n, how, found[n, how])
    assert found[2, "mean"] - found[2, "first"] > 0.05 and found[1, "mean"] - found[1, "first"] > 0.03
    for n in (2, 1):
        # The mean times √group, made of the package's pooling: as long as a head of unrelated vectors was.
        longer = GroupedGPT2(model, n, "mean")
        for name in [name for name in longer.params if "c_attn" in name]:
            q, kv_part = np.split(longer.params[name], [256], axis=-1)
            longer.params[name] = np.concatenate([q, kv_part * np.float32(math.sqrt(4 // n))], axis=-1)
        log_probs = kv.evaluation.next_token_log_probs(longer(held_out), held_out)
        bits = kv.evaluation.bits_per_character(log_probs, characters)
        assert far_from_a_rounding(bits, 2, 1e-3) and found[n, "first"] - bits > 0.09, (n, bits)
        assert f"mean at full length {bits:.2f}" in printed()
    tap = kv.Tap(model.config)
    model(held_out[:512], tap)
    for rows in (tap.keys, tap.values):
        for n in (2, 1):
            means = rows.reshape(6, n, 4 // n, 512, 64).mean(axis=2)
            short = np.linalg.norm(means, axis=-1).mean() / np.linalg.norm(rows, axis=-1).mean()
            assert short == pytest.approx(math.sqrt(n / 4), abs=0.015)  # unrelated vectors of one length
            assert far_from_a_rounding(float(short), 2, 1e-4)
    for own in (tap.values, tap.keys):
        unit = own / np.linalg.norm(own, axis=-1, keepdims=True)
        between = np.einsum("latd,lbtd->ab", unit, unit) / (6 * 512)
        assert np.abs(between[np.triu_indices(4, 1)]).max() < 0.04  # the page says below 0.05
    for n, how in WAYS:
        groups = tap.keys.reshape(6, n, 4 // n, 512, 64)
        shared = groups.mean(axis=2) if how == "mean" else groups[:, :, 0]
        shared = shared / np.linalg.norm(shared, axis=-1, keepdims=True)
        likeness = [(unit[:, h] * shared[:, h * n // 4]).sum(axis=-1).mean() for h in range(4)]
        # float32 sums of 64 products and a mean of 3,072 of them: off by 1e-6 at most
        assert all(far_from_a_rounding(float(value), 2, 2e-5) for value in likeness), likeness


def test_smollm2_overlaps_and_the_bug_are_far_from_a_rounding(page, smollm2, smollm2_tokenizer, novel):
    config, tok = smollm2.config, smollm2_tokenizer
    seen = page["OnePass"](config)
    smollm2(tok.encode(novel[:2000])[:128], seen, rows=[-1])
    overlaps, first, with_first = {True: [], False: []}, [], {True: [], False: []}
    for q, k, _ in seen.layers:
        scores = q @ np.repeat(k, 3, axis=0).swapaxes(1, 2) / 8
        weights = ops.softmax(np.where(ops.causal_mask(0, 128), scores, np.float32(-np.inf)))[:, 32:]
        first.append(weights[..., 0].mean())
        for a in range(9):
            for b in range(a):
                with_first[a // 3 == b // 3].append(np.minimum(weights[a], weights[b]).sum(axis=-1).mean())
        weights = weights[..., 1:] / weights[..., 1:].sum(axis=-1, keepdims=True)
        for a in range(9):
            for b in range(a):
                overlaps[a // 3 == b // 3].append(np.minimum(weights[a], weights[b]).sum(axis=-1).mean())
    assert [round(100 * np.mean(overlaps[same])) for same in (True, False)] == [50, 40]
    assert [round(100 * np.mean(with_first[same])) for same in (True, False)] == [60, 51]
    shares = [100 * np.mean(found) for found in (*overlaps.values(), *with_first.values(), first)]
    assert all(far_from_a_rounding(share, 0, 0.02) for share in shares), shares
    assert f"position 0 takes {shares[-1]:.0f}% of all attention" in printed()

    maps = page["OnePass"](config)
    smollm2(tok.encode("The captain wrote to Anne, and Anne answered the captain."), maps)
    q, k, _ = maps.layers[11]
    scores = q[:3] @ k[0].T / 8
    shown = ops.softmax(np.where(ops.causal_mask(0, 12), scores, np.float32(-np.inf))).astype(float)
    shown = shown[:, np.tri(12, dtype=bool)] * 100
    assert np.abs(shown % 1 - 0.5).min() > 2e-3  # in hundredths: the stored maps are rounded to those

    passage = tok.encode(novel[:4000])[:256]
    found = []
    for share in (page["by_repeat"], lambda rows, group: np.tile(rows, (group, 1, 1))):
        logits = smollm2(passage, page["OnePass"](config, share))
        found.append(kv.evaluation.perplexity(kv.evaluation.next_token_log_probs(logits, passage)))
    assert far_from_a_rounding(found[0], 0, found[0] * 1e-3), found
    assert far_from_a_rounding(found[1], -3, found[1] * 1e-3) and found[1] > 10_000, found


def test_the_recorded_run_says_what_the_page_says():
    run = measure.recorded_runs("heads")[-1]
    assert [(one["kv_heads"], one["pooling"]) for one in run.results["runs"]] == [
        (4, "none"), (2, "mean"), (2, "first"), (1, "mean"), (1, "first"),
    ]  # fmt: skip
    assert len(run.results["characters"]) == 24 and run.results["window"] == 512
    text = printed()
    for name, _, bits in figures.curves(run):
        assert f"{name:>38}" + "".join(f"{value:>12.3f}" for value in bits) in text
    # The same windows measured with the NumPy model: the first point is the conversion itself.
    assert figures.curves(run)[0][2][0] < figures.curves(run)[2][2][0] < figures.curves(run)[1][2][0]


# --- figures and panel -----------------------------------------------------------------------


def test_who_reads_whom_by_hand():
    assert [figures.read_by(h, 9, 3) for h in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [figures.read_by(h, 9, 3, "tile") for h in range(9)] == [0, 1, 2] * 3
    assert figures.map_text(4, 2) == "Query heads 0 and 1 read KV head 0; 2 and 3 read KV head 1."
    assert "3 of 9 read their own, the other 6 another group's." in figures.map_text(9, 3, "tile")
    drawn = figures.map_figure(9, 3, "tile")
    dashed = [trace for trace in drawn.data if trace.mode == "lines" and trace.line.dash == "dash"]
    assert len(dashed) == 6 and len(drawn.data) == 9 + 2
    assert list(drawn.data[-1].x) == [1.0, 4.0, 7.0]


def test_the_maps_of_attention():
    rows = [[1.0, 0.0], [0.25, 0.75]]
    drawn = figures.attention_figure([" a", "b"], [rows, rows], [3, 4])
    assert [trace.xaxis for trace in drawn.data] == ["x", "x2"]
    faint = figures.attention_figure(["a", "b"], [[[1.0, 0.0], [0.0, 1.0]]], [0]).data[0].z
    assert faint[0][1] is None and 0 < faint[1][0] < 0.005  # later: bare; rounded to 0: tinted
    assert drawn.data[1].text[1][0] == "query head 4: 1 b looks at 0 a with weight 0.25"
    assert "head 3 at position 1 ('b', 0.75) and head 4" in figures.attention_text(
        [" a", "b"], [rows, rows], [3, 4]
    )


def recorded(steps=4):
    def one(kv_heads, pooling, *nats):
        curve = [{"step": n * steps // 2, "nats": pair} for n, pair in enumerate(nats)]
        return {"kv_heads": kv_heads, "pooling": pooling, "curve": curve}

    bit = math.log(2)
    runs = [
        one(4, "none", [10 * bit, 20 * bit], [10 * bit, 20 * bit], [11 * bit, 22 * bit]),
        one(2, "mean", [20 * bit, 40 * bit], [16 * bit, 32 * bit], [15 * bit, 30 * bit]),
        one(2, "first", [18 * bit, 36 * bit], [16 * bit, 32 * bit], [14 * bit, 26 * bit]),
        one(1, "mean", [23 * bit, 47 * bit], [20 * bit, 45 * bit], [20 * bit, 40 * bit]),
        one(1, "first", [25 * bit, 50 * bit], [24 * bit, 48 * bit], [20 * bit, 43 * bit]),
    ]
    results = {"characters": [10, 20], "runs": runs, "steps": steps}
    return measure.RecordedRun("heads-x", "heads", "c", "2026-01-01", {"cpu": "A", "threads": 1}, {}, results)


def test_curves_of_a_recorded_run_by_hand():
    run = recorded()
    name, steps, bits = figures.curves(run)[2]
    assert (name, steps) == ("2 KV heads, the first of each group", [0, 2, 4])
    assert bits == pytest.approx([54 / 30, 48 / 30, 40 / 30])
    # windows: 15/10 − 14/10 and 30/20 − 26/20: 0.1 and 0.2, mean 0.15, spread 0.0707, error 0.05
    assert figures.difference(run, 2) == pytest.approx((0.15, 0.05))
    lines = figures.curves_table(run).split("\n")
    assert lines[3].split()[-3:] == ["1.800", "1.600", "1.333"]
    # windows at once: 20/10 − 18/10 and 40/20 − 36/20: 0.2 twice
    assert figures.difference(run, 2, point=0) == pytest.approx((0.2, 0.0))
    # the first way costs 1.8 − 1 and comes back by 1.8 − 1.333
    assert figures.won_back(run, 2) == pytest.approx((40 / 30, (54 - 40) / (54 - 30)))
    assert figures.won_back(run, 2, "first") == figures.won_back(run, 2)  # it ends lower
    assert figures.won_back(run, 2, "mean") == pytest.approx((45 / 30, (60 - 45) / (60 - 30)))
    text = figures.curves_text(run)
    assert text.startswith("After 4 steps: 2 KV heads 1.33, 58% of the cost won back; 1 KV head 2.00, 25%")
    assert text.endswith("the control 1.10 bits per character (recorded 2026-01-01: A, 1 thread).")
    drawn = figures.curves_figure(run)
    assert [trace.line.dash for trace in drawn.data] == ["solid", "dash", "dot", "dash", "dot"]


LIKENESS = [1.0, 0.5, -0.01, 0.7]
MEASURED = {(n, how): {"bits": 1 + 1 / n + (how == "mean") / 10, "likeness": LIKENESS} for n, how in WAYS}
MEASURED[4, "mean"] = MEASURED[4, "first"] = {"bits": 1.25, "likeness": [1.0] * 4}


def test_austen_is_the_bundled_model(model):
    assert figures.AUSTEN == replace(model.config, name="austen-gpt2")


def test_the_panels_numbers_by_hand():
    data = figures.sharing(8, "mean of the group", "Llama 2 7B", 16, 2000, MEASURED)
    assert list(data["steps"]) == [1, 2, 4, 8, 16, 32]
    assert data["steps"][8][1] == 16 * 2000 * 131_072
    chosen = replace(kv.catalogue()["llama-2-7b"], num_kv_heads=8)
    free = sizing.device("l4").memory_bytes - 2 * chosen.num_parameters
    assert data["fits"] == free // (2001 * 131_072)
    text = figures.sharing_text(data)
    assert (
        "Llama 2 7B with 8 KV heads (GQA, 4 query heads on each): 131,072 bytes a token in 16 bits." in text
    )
    assert text.endswith("Nobody trained it with so many: the loss is not known.")
    three = figures.sharing_text(figures.sharing(3, "mean of the group", "austen-gpt2", 1, 500, MEASURED))
    assert three == "austen-gpt2: 4 query heads cannot be shared out evenly among 3 KV heads; 1, 2, 4 can."
    first = figures.sharing_text(figures.sharing(2, "first of the group", "austen-gpt2", 1, 500, MEASURED))
    assert first.endswith(
        "Pooled by the first of the group: 1.50 bits per character instead of 1.25. "
        "Cosines of the keys, query heads 0 … 3: 1.00, 0.50, -0.01, 0.70."
    )
    own = figures.sharing_text(figures.sharing(4, "first of the group", "austen-gpt2", 1, 500, MEASURED))
    assert own.endswith("As trained: 1.25 bits per character.") and "(MHA, 1 query head on each)" in own
    assert "(MQA, 9 query heads on each)" in figures.sharing_text(
        figures.sharing(1, "mean of the group", "SmolLM2 135M", 1, 500, MEASURED)
    )
    crowded = figures.sharing_text(figures.sharing(32, "mean of the group", "Llama 2 7B", 16, 4000, MEASURED))
    assert "holds only 5 of them. As trained." in crowded
    short = figures.sharing_text(figures.sharing(1, "mean of the group", "Llama 2 7B", 1, 100, MEASURED))
    assert "1.6 MB of caches, below 1% caches. Beside the weights an L4 (24 GB) holds 7," in short
    past = figures.sharing_text(figures.sharing(1, "mean of the group", "austen-gpt2", 1, 2000, MEASURED))
    assert past.endswith("The model has 1,024 positions: choose fewer tokens.")


def test_the_panel_at_the_ends_of_its_controls():
    panel = widgets.sharing_panel(MEASURED)
    for model in figures.MODELS:
        for kv_heads in figures.KV_HEADS:
            for users, tokens in ((1, 100), (64, 4000)):
                text = panel.set(model=model, kv_heads=kv_heads, users=users, tokens=tokens)
                assert text.startswith(model) and "does not work" not in text
                cells, weights, caches = panel.figure.data
                shape = figures.MODELS[model]
                reads = shape.num_heads if shape.num_heads % kv_heads == 0 else 0
                assert len(cells.y) == reads and len(weights.x) == len(caches.x) > 0


def test_the_first_control_changes_the_sentence_and_quickly():
    panel = widgets.sharing_panel(MEASURED)
    times = []
    for kv_heads in (3, 4, 2, 1):
        before, start = panel.text, time.process_time()
        assert panel.set(kv_heads=kv_heads) != before
        times.append(time.process_time() - start)  # of this process alone: others may be busy
    assert min(times[1:]) < 0.1  # the course's limit for a repaint


# --- the exercise ------------------------------------------------------------------------------

NAME = "12.grouped_attention"


def solution():
    path = paths.chapters_dir() / "solutions" / "12_fewer_heads.py"
    spec = importlib.util.spec_from_file_location("solution_12", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.grouped_attention


def one_by_one(q, k, v, start):
    """A loop over the query heads copies nothing either."""
    group = len(q) // len(k)
    heads = range(len(q))
    each = [ops.attention(q[h : h + 1], k[h // group][None], v[h // group][None], start) for h in heads]
    return np.concatenate(each)


@pytest.mark.parametrize("right", [ops.attention, one_by_one])
def test_other_right_answers_pass(right):
    assert checks.verdict(NAME, right).status == checks.RIGHT


def test_groups_in_the_other_order_are_tile_without_a_tile():
    def group_first(q, k, v, start):
        """The queries as (group, KV heads, …), where it must be (KV heads, group, …)."""
        order = np.arange(len(q)).reshape(-1, len(k)).T.ravel()  # as they stand behind each KV head
        return solution()(q[order], k, v, start)[np.argsort(order)]

    verdict = checks.verdict(NAME, group_first)
    assert verdict.status == checks.WRONG and "h mod 2, as np.tile gives" in verdict.message


def test_axes_that_do_not_pair_are_explained_in_one_line():
    verdict = checks.verdict(NAME, lambda q, k, v, start: q @ k.swapaxes(1, 2) @ v)
    assert verdict.status == checks.WRONG and "\n" not in verdict.message
    assert "give q the shape (KV heads, group, T, head_dim)" in verdict.message


def test_the_check_leaves_no_tracing_on():
    import tracemalloc

    checks.verdict(NAME, solution())
    assert not tracemalloc.is_tracing()
