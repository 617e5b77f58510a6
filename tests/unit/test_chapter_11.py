"""Chapter 11: the page's step is the package's, its counts and replays hold, panel, tables and exercise."""

import ast
import gc
import importlib.util
import json
import math
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, measure, paths, sizing
from kvcourse.figures import chapter_11 as figures
from kvcourse.widgets import chapter_11 as widgets

NOTEBOOK = paths.chapters_dir() / "11_on_the_gpu.ipynb"
PROMPT, NEW = "Mr. Darcy walked", 24
DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


@pytest.fixture(scope="module")
def page():
    """Imports, functions and classes of the page, in order; nothing else of it runs."""
    names = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            tree.body = [node for node in tree.body if isinstance(node, DEFINES)]
            exec(compile(tree, "11_on_the_gpu", "exec"), names)
    return names


@pytest.fixture(scope="module")
def params(model):
    return {name: torch.from_numpy(array) for name, array in model.params.items()}


@pytest.fixture(scope="module")
def tok():
    return kv.load_tokenizer("austen-gpt2")


# --- the page's step --------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["written", "fused"])
@settings(deadline=None, max_examples=10)
@given(prompts=st.lists(st.integers(1, 20), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_the_pages_step_is_numpys_and_the_packages(page, model, params, attention, prompts, seed):
    random = np.random.default_rng(seed)
    ids = [random.integers(model.config.vocab_size, size=n).tolist() for n in prompts]
    net = kv.torch_models.GPT2(model)
    cache = kv.torch_models.BatchCache(net, len(ids), 24)
    net.prefill(ids, cache)
    rows = page["Rows"](model.config, len(ids), 24)
    rows.keys.copy_(cache.keys)
    rows.values.copy_(cache.values)
    rows.lengths.copy_(cache.lengths)
    caches = [kv.ContiguousCache.for_model(model, max_seq_len=24) for _ in ids]
    for own, text in zip(caches, ids, strict=True):
        model(text, own)
    for _ in range(3):
        tokens = random.integers(model.config.vocab_size, size=len(ids)).tolist()
        ours = page["decode_step"](torch.tensor(tokens), params, model.config, rows, page[attention]).numpy()
        view = kv.BatchView(caches, [1] * len(ids))
        # Logits of size 10, float32 (eps 1.2e-7), some hundred additions in another order.
        np.testing.assert_allclose(ours, model(tokens, view, rows=view.last_rows), atol=2e-4, rtol=0)
        np.testing.assert_allclose(ours, net.decode(tokens, cache).numpy(), atol=2e-4, rtol=0)
    assert rows.lengths.tolist() == [n + 3 for n in prompts]


def test_the_blogs_step_is_the_pages_for_one_length(page, model, params):
    tokens = torch.tensor([5, 900])
    two = [page["Rows"](model.config, 2, 16) for _ in range(2)]
    for pos in range(4):
        at = page["step_at"](tokens, params, model.config, two[0], pos)
        step = page["decode_step"](tokens, params, model.config, two[1], page["fused"])
        # Masked rows against rows cut off: sums of the same numbers in another order.
        torch.testing.assert_close(at, step, atol=2e-4, rtol=0)
        tokens = tokens + 7
    bias = page["step_at"](tokens, params, model.config, two[0], 4, linear=page["with_bias"])
    plain = page["step_at"](tokens, params, model.config, two[0], 4)
    torch.testing.assert_close(bias, plain, atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype, gap", [("float16", 2**-6), ("bfloat16", 2**-3)])
def test_the_gaps_between_neighbors_from_16_to_32(dtype, gap):
    kind = getattr(torch, dtype)
    assert 16 * torch.finfo(kind).eps == gap
    assert float(torch.nextafter(torch.tensor(17.0, dtype=kind), torch.tensor(32.0, dtype=kind))) == 17 + gap


def test_the_formats_keep_a_margin_to_the_printed_tolerances(page, model):
    """The page prints "below 4 gaps" and the power of two nearest to a ratio of 8: both with room."""
    random = np.random.default_rng(3)
    ids = [random.integers(model.config.vocab_size, size=n).tolist() for n in (30, 9)]
    net = {name: kv.torch_models.GPT2(model, dtype=name) for name in ("float32", "float16", "bfloat16")}
    logits = {}
    for name, one in net.items():
        cache = kv.torch_models.BatchCache(one, 2, 48)
        one.prefill(ids, cache)
        steps = [one.decode([7 * i, 11 * i], cache).float().numpy() for i in range(12)]
        logits[name] = np.stack(steps)
    off = {name: np.abs(logits[name] - logits["float32"]) for name in ("float16", "bfloat16")}
    assert off["float16"].max() < 2 / 64 and off["bfloat16"].max() < 2 / 8  # half of what the page allows
    assert 2**2.6 < off["bfloat16"].mean() / off["float16"].mean() < 2**3.4


# --- launches and replays ----------------------------------------------------------------


def recorded(page, step, *args, **options):
    with page["Recorder"]() as seen:
        result = step(*args, **options)
    return page["launched"](seen.calls), result


@pytest.mark.parametrize("layers", [1, 12])
def test_claim_c45_launches_by_hand(page, layers):
    """A layer: norm, product, bias, 2 copies, attention, product, bias, sum; norm, product, bias, gelu,
    product, bias, sum = 16. Around: token look-up, sum; norm, product. A tensor of lengths: 2 ranges,
    comparison, look-up of positions, counting. Attention written out: 2 products, scaling, ~mask, masking,
    softmax in place of 1."""
    model = kv.random_model("gpt2", num_layers=layers)
    net = kv.torch_models.GPT2(model, device="meta", dtype="float16")
    rows = page["Rows"](model.config, 3, 40, "meta", torch.float16)
    tokens = torch.zeros(3, dtype=torch.int64, device="meta")
    given = tokens, net.params, model.config, rows
    for step, args, options, launches in (
        (page["step_at"], (30,), {}, 16 * layers + 4),
        (page["step_at"], (30,), {"linear": page["with_bias"]}, 12 * layers + 4),
        (page["decode_step"], (page["fused"],), {}, 16 * layers + 4 + 5),
        (page["decode_step"], (page["written"],), {}, 21 * layers + 4 + 5),
    ):
        calls, _ = recorded(page, step, *given, *args, **options)
        assert len(calls) == launches
        if step is page["step_at"]:
            counted = kv.torch_models.count_launches(
                lambda a=args, o=options: page["step_at"](*given, *a, **o)
            )
            assert counted == launches


def test_the_counts_of_the_panel_are_the_pages():
    assert figures.launches("gpt2", "one by one") == 16 * 12 + 4 == 196
    assert figures.launches("gpt2", "bias within the product") == 148
    assert (
        figures.launches("llama-3.1-8b", "one by one") == 516 and figures.launches("gpt2", "one graph") == 1
    )
    assert f"{figures.launch_cost() * 1e6:.0f}" == "16" and 196 * figures.launch_cost() == pytest.approx(
        3.2e-3
    )


def test_a_replay_is_the_step_where_lengths_are_in_a_tensor(page, model, params):
    eager, rows = (page["Rows"](model.config, 2, 32) for _ in range(2))
    tokens = torch.tensor([3, 4])
    calls, logits = recorded(page, page["decode_step"], tokens, params, model.config, rows, page["fused"])
    page["decode_step"](torch.tensor([3, 4]), params, model.config, eager, page["fused"])
    for new in ([9, 8], [100, 7], [1, 2], [5, 5]):
        tokens.copy_(torch.tensor(new))
        page["replay"](calls)
        judge = page["decode_step"](torch.tensor(new), params, model.config, eager, page["fused"])
        torch.testing.assert_close(logits, judge, atol=2e-4, rtol=0)  # the same operations, float32
    assert rows.lengths.tolist() == [5, 5]
    torch.testing.assert_close(rows.keys, eager.keys, atol=2e-4, rtol=0)


def write(page, model, params, prompt, new, record):
    """As the page's `write`, with the best logits' margins: (tokens, margins, rows written)."""
    rows, tokens = page["Rows"](model.config, 1, 64), torch.tensor(prompt[-1:])
    for token in prompt[:-1]:
        page["decode_step"](torch.tensor([token]), params, model.config, rows, page["fused"])
    calls, logits = recorded(page, record, tokens, rows)
    text, margins = [], []
    while True:
        best = torch.topk(logits[0], 2).values
        margins.append((best[0] - best[1]).item())
        text.append(int(logits.argmax()))
        if len(text) == new:
            return text, margins, (rows.keys[0, 0, 0] != 0).any(-1).sum().item()
        tokens.fill_(text[-1])
        page["replay"](calls)


def test_break_it_and_its_margins(page, model, params, tok):
    prompt = tok.encode(PROMPT)

    def right(tokens, rows):
        return page["decode_step"](tokens, params, model.config, rows, page["fused"])

    def baked(tokens, rows):
        return page["step_at"](tokens, params, model.config, rows, len(prompt) - 1)

    good, good_margins, good_rows = write(page, model, params, prompt, NEW, right)
    bad, bad_margins, bad_rows = write(page, model, params, prompt, NEW, baked)
    assert good == kv.generate(model, prompt, NEW) and good_rows == len(prompt) + NEW - 1 == 27
    assert bad[0] == good[0] and bad != good and bad_rows == len(prompt) == 4
    # The judge of rounding: the largest cached-uncached difference along the right text.
    text = prompt + good
    cache = kv.ContiguousCache.for_model(model)
    steps = np.concatenate([model([token], cache) for token in text])
    rounding = float(np.abs(steps - model(text)).max())
    assert min(good_margins + bad_margins) > 100 * rounding


# --- memory ------------------------------------------------------------------------------


def test_claim_c43_by_hand():
    row = 2 * 12 * 12 * 64 * 2  # bytes of a token, float16
    weights = 124_439_808 * 2
    assert 512 * 512 * row == 9 * 2**30 and 512 * 520 * row > figures.BLOG_CARD
    loop = 256 * 520 * row + 128 * 520 * row // 2 + weights  # new keys and values, old values
    assert f"{loop / 2**30:.2f}" == "5.94" and 0 < figures.BLOG_CARD - loop < figures.CONTEXT_BYTES
    assert (figures.BLOG_CARD - loop) // 2**20 == 56  # 56.7: the page says 57 MiB
    assert f"{(256 * 520 * row + weights) / 2**30:.2f}" == "4.80"


def test_the_blogs_loop_at_its_true_sizes(page):
    page["meta"] = kv.torch_models.GPT2(kv.random_model("gpt2"), device="meta", dtype="float16")
    page["GIB"] = 2**30
    usable = figures.BLOG_CARD - figures.CONTEXT_BYTES
    loop = page["blog_loop"]
    assert loop(figures.BLOG_CARD, False)[0] == 512 and loop(figures.BLOG_CARD, False, (128, 256))[0] is None
    assert loop(usable, False)[0] == 256 and loop(usable, True)[0] == 512
    assert f"{loop(figures.BLOG_CARD, False, figures.BLOG_BATCHES)[1]:.2f}" == "5.94"
    assert loop(figures.BLOG_CARD, True, (512,))[0] == 512


def test_who_holds_what_and_lets_go(page, model):
    cap = page["cap"] = kv.torch_models.MemoryCap(100 * 2**20)
    page["c"] = model.config
    held = page["capped"](32).nbytes  # no tensor within an assert: pytest would keep it
    assert held == 96 * 2**20
    assert cap.held == 0
    with pytest.raises(torch.OutOfMemoryError, match="48.00 MiB asked for, 60.00 MiB of 100.00 MiB held"):
        page["at_once"](40, 32)
    held = page["afterward"](40, 32).nbytes
    assert held == 96 * 2**20
    gc.collect()  # pytest.raises leaves the error in a circle of its own
    assert cap.held == 0
    try:
        page["capped"](40)
    except torch.OutOfMemoryError as error:
        kept = error
    assert page["holders"](kept) == [("__init__", "self.keys", 60.0)] and cap.held == 60 * 2**20
    kept.__traceback__ = None
    assert cap.held == 0
    gc.disable()
    try:
        page["caught"](40)
        assert cap.held == 60 * 2**20
        gc.collect()
    finally:
        gc.enable()
    assert cap.held == 0
    for _ in range(5):
        batch, rows = page["first_that_fits"]([64, 40, 34, 16])
        assert batch == 16 and cap.held == 48 * 2**20 + 16 * 8  # keys, values, lengths
        rows = None
        assert rows is None and cap.held == 0


# --- clocks ------------------------------------------------------------------------------


def test_the_clocks_of_the_page(page):
    """Work of a known length: a sleep is never shorter than asked, and may be longer on a busy machine."""
    stream = kv.streams.Stream()

    def work():
        time.sleep(0.01)

    assert page["by_clock"](stream, work, 10) < 0.05
    assert page["by_clock"](stream, work, 10, wait=True) > 0.15  # the first ten as well
    page["by_clock"](stream, work, 10)
    assert 0.1 <= page["by_events"](stream, work, 10)
    stream.synchronize()


# --- the panel ----------------------------------------------------------------------------


def test_the_split_adds_up_and_says_what_decides():
    for batch in (1, 8, 64, 512):
        for way in figures.WAYS:
            data = figures.step(batch, 512, "GPT-2 124M", "RTX 3060 laptop", "float16", way, 16, 100)
            one = data["every"][batch]
            parts = sum(one[key] for key, *_ in figures.PARTS)
            assert parts == pytest.approx(one["total"])
            assert one["total"] == pytest.approx(max(one["weights"] + one["caches"], one["launches"]))
    first = figures.step(1, 512, "GPT-2 124M", "RTX 3060 laptop", "float16", "one by one", 16, 100)
    # 3.136 ms of launches; weights 0.736 ms and 0.0563 ms a sequence at 336 GB/s.
    assert first["bound_below"] == math.ceil((3.136 - 0.736) / 0.0563) == 43
    assert first["every"][1]["bound"] == "launches" and first["every"][64]["bound"] == "memory"


def test_the_share_that_fits_the_blogs_table_keeps_a_margin(page):
    _at_the_blogs_setting(page)
    found = {share: page["misses"](share, share) for share in range(30, 45)}
    best = min(found, key=found.get)
    assert best == 36 and found[best] < min(found[35], found[37])
    assert f"{found[36]:.2f}" == "1.08" and f"{page['misses'](100, 100):.1f}" == "3.0"


def test_a_second_pair_of_shares_fits_as_well_and_says_another_batch(page):
    """By hand, at 336 GB/s: weights 0.736 ms / 0.8, 0.0563 ms a sequence / 0.3; launches 3.136 ms."""
    _at_the_blogs_setting(page)
    assert page["misses"](80, 30) < page["misses"](36, 36) + 0.01
    assert page["read_ms"](11, 80, 30) == pytest.approx(0.736 / 0.8 + 11 * 0.0563 / 0.3, abs=2e-3)
    assert page["read_ms"](11, 80, 30) < 3.136 < page["read_ms"](12, 80, 30)
    assert page["read_ms"](6, 36, 36) < 3.136 < page["read_ms"](7, 36, 36)
    assert f"{page['read_ms'](8, 80, 30):.2f}" == "2.42"
    panels = figures.step(64, 512, "GPT-2 124M", "RTX 3060 laptop", "float16", "one by one", 16, 36)
    assert page["read_ms"](64, 36, 36) == pytest.approx(panels["every"][64]["total"])


def _at_the_blogs_setting(page):
    page["settings"] = {
        "model": "GPT-2 124M",
        "device": "RTX 3060 laptop",
        "dtype": "float16",
        "context": 512,
    }
    page["launching"] = 196 * 16 / 1000  # ms


def test_the_sentence_of_the_panel():
    panel = widgets.step_panel()
    said = panel.set(batch=8, device="RTX 3060 laptop")
    for words in (
        "GPT-2 124M in float16 on the RTX 3060 laptop, 8 sequences of 512 tokens",
        "weights 0.74 ms, caches 0.45 ms, waiting for 196 launches 1.95 ms; together 3.14 ms a step",
        "launch bound up to a batch of 42. The blog measured 3.4 ms.",
    ):
        assert words in said
    assert "waiting for 1 launch 0.00 ms" in panel.set(way="one graph")
    assert "launch bound at no batch." in panel.text and "blog measured" not in panel.text
    assert "It does not fit: 9.2 GiB on a card of 6.0 GiB." in panel.set(batch=512)
    assert "The model has 1,024 positions" in panel.set(batch=1, context=1024)
    panel.set(context=128, batch=512, device="H100", cost=30, way="one by one", model="GPT-2 XL")
    assert "1 sequence of" in panel.set(batch=1)
    none = figures.step(1, 1, "GPT-2 124M", "H100", "float16", "one by one", 10**9, 100)
    assert "launch bound at every batch" in figures.step_text(none)


def test_arithmetic_shows_where_it_decides():
    data = figures.step(512, 128, "GPT-2 XL", "RTX 3060 laptop", "float16", "one graph", 1, 100)
    one = data["every"][512]
    shape, card = kv.catalogue()["gpt2-xl"], sizing.device("rtx-3060-laptop")
    took = sizing.step_time(shape, card, 128, 512)
    assert one["arithmetic"] == pytest.approx(1000 * max(0, took.compute - took.memory))
    assert ("arithmetic beyond that" in figures.step_text(data)) == (took.compute > took.memory)


def test_the_packages_step_by_hand():
    """12 a layer and 4 around as in step_at with the bias in the product; look-up of positions, counting."""
    model = kv.random_model("gpt2", num_layers=12)
    net = kv.torch_models.GPT2(model, device="meta", dtype="float16")
    cache = kv.torch_models.BatchCache(net, 4, 40)
    cache.set_lengths(30)
    tokens = torch.zeros(4, dtype=torch.int64, device="meta")
    assert kv.torch_models.count_launches(lambda: net.decode(tokens, cache)) == 12 * 12 + 4 + 2


LINE = figures.measured_line("here", "here: CPU", "CPU, 2 threads", 512, [1, 2], [20.0, 30.0])


def test_measured_lines_stand_where_they_belong():
    data = figures.step(1, 512, *SETTING, measured=(LINE, figures.blog_line()))
    assert "2 threads" in _drawn(data, "here: CPU") and "float16" in _drawn(data, "blog")
    for other in ((1, 256, *SETTING), (1, 512, "GPT-2 XL", *SETTING[1:])):
        assert figures.step(*other, measured=(LINE,))["measured"] == []
    on_h100 = figures.step(1, 512, "GPT-2 124M", "H100", *SETTING[2:], measured=(LINE, figures.blog_line()))
    assert [line["name"] for line in on_h100["measured"]] == ["here: CPU"]


SETTING = ("GPT-2 124M", "RTX 3060 laptop", "float16", "one by one", 16, 100)


def _drawn(data, name):
    (trace,) = [trace for trace in figures.step_figure(data).data if trace.name == name]
    return trace.hovertemplate


def test_the_panel_at_the_ends_of_its_controls():
    panel = widgets.step_panel([LINE])
    for name, control in panel.controls.items():
        ends = control.options if hasattr(control, "options") else (control.min, control.max)
        before = panel.values[name]
        for value in ends:
            text = panel.set(**{name: value})
            assert "does not work" not in text and "nan" not in text
            for trace in panel.figure.data:
                assert all(isinstance(values, (tuple, list)) for values in (trace.x, trace.y))
        panel.set(**{name: before})


def test_the_first_control_changes_the_sentence_and_quickly():
    panel = widgets.step_panel([LINE])
    panel.set(batch=9)
    times = []
    for batch in range(10, 15):
        before, start = panel.text, time.process_time()
        assert panel.set(batch=batch) != before
        times.append(time.process_time() - start)
    assert min(times) < 0.1


# --- tables -------------------------------------------------------------------------------


def test_the_blogs_table_beside_its_bytes():
    lines = figures.blog_table().split("\n")
    assert lines[1].split() == "1 0.79 ms 3.2 ms 4.0".split()
    assert lines[6].split() == "256 15.14 ms 45.4 ms 3.0".split()
    assert figures.blog_growth(1, 8) == (pytest.approx(1.497, abs=1e-3), 3.4 / 3.2)


def test_the_table_of_devices():
    small = figures.device_table().split("\n")[1:]
    assert all(line.endswith("launches") for line in small) and "73.8 µs" in small[-1]
    large = figures.device_table("llama-3.1-8b").split("\n")[1:]
    assert [line.removesuffix("   does not fit").split()[-1] for line in large] == ["weights"] * 3 + [
        "launches"
    ] * 2
    assert [line.endswith("does not fit") for line in large] == [True] + 4 * [False]  # 15 GiB on 6
    assert figures.longer_of_both("H100") == figures.longer_of_both("L4") == pytest.approx(3.2e-3)
    assert figures.longer_of_both("L4", "llama-3.1-8b") == pytest.approx(0.0500, rel=2e-3)


def run(device="NVIDIA Something", gpu=True):
    point = {"dtype": "float16", "context": 512, "batch": 1, "mode": "eager", "seconds": 0.0031}
    points = [point, {**point, "mode": "graph", "seconds": 0.0009}, {**point, "batch": 8, "seconds": 0.0033}]
    machine = {"cpu": "some processor", "threads": 8} | ({"gpu": device} if gpu else {})
    results = {"device": device, "points": points, "contexts": [512], "dtypes": ["float16"]}
    return measure.RecordedRun(
        "torch-x", "torch", "kvcourse bench torch", "2026-11-29", machine, {"torch": "2"}, results
    )


@pytest.mark.parametrize("runs", [[], [run()], [run("a processor", gpu=False)], [run(), run("another")]])
def test_recorded_runs_none_one_or_more(runs):
    table = figures.recorded_table(runs)
    gpu = any("gpu" in one.machine for one in runs)
    assert ("no recorded run of a GPU yet: `kvcourse bench torch --out` writes one" in table) == (not gpu)
    for one in runs:
        label = f"recorded 2026-11-29: {one.results['device']}, float16, 512 tokens each"
        assert f"{label}, eager: 1: 3.10 ms, 8: 3.30 ms" in table and f"{label}, graph: 1: 0.90 ms" in table
    lines = figures.recorded_lines(runs)
    assert len(lines) == 2 * len(runs)
    assert all(line["dtype"] == "float16" and line["context"] == 512 for line in lines)
    drawn = figures.step_figure(figures.step(1, 512, *SETTING, measured=lines))
    assert sum((trace.name or "").startswith("recorded") for trace in drawn.data) == len(lines)


def test_the_table_of_a_sweep():
    rows = [{"batch": 1, "ms": 20.0, "why": ""}, {"batch": 4, "ms": 30.0, "why": "busy"}]
    lines = figures.sweep_table(rows).split("\n")
    assert lines[1].split() == "1 20.0 ms 20.0 ms".split()
    assert lines[2].split() == "4 30.0 ms 7.5 ms disturbed".split()
    assert lines[3] == "disturbed at 4, do not quote: busy"


# --- the exercise --------------------------------------------------------------------------


def solution():
    path = paths.chapters_dir() / "solutions" / "11_on_the_gpu.py"
    spec = importlib.util.spec_from_file_location("solution_11", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.sweep


def test_the_solution_is_right_and_other_right_ways_pass():
    assert checks.verdict("11.sweep", solution()).status == "right"

    def deletes(make, batches):
        found = {}
        for batch in batches:
            rows = None
            try:
                rows = make(batch)
            except torch.OutOfMemoryError as error:
                print(str(error)[:0], end="")
            found[batch] = rows.nbytes if rows else None
            del rows
        return found

    assert checks.verdict("11.sweep", deletes).status == "right"


def test_rows_or_an_error_kept_anywhere_are_named():
    def keeps_the_rows(make, batches):
        found = {}
        for batch in batches:
            try:
                found[batch] = make(batch)
            except torch.OutOfMemoryError:
                found[batch] = None
        return found

    def remembers_the_last_error(make, batches):
        found, last = {}, None
        for batch in batches:
            try:
                found[batch] = make(batch).nbytes
            except torch.OutOfMemoryError as error:
                found[batch], last = None, error
        assert last is not None
        return found

    assert "a place in what you collect" in checks.verdict("11.sweep", keeps_the_rows).message
    assert "the error of make(512) is kept" in checks.verdict("11.sweep", remembers_the_last_error).message


def test_the_check_leaves_the_collector_as_it_was_and_takes_no_memory():
    before = measure.resident_bytes()
    assert gc.isenabled() and checks.verdict("11.sweep", solution()).status == "right" and gc.isenabled()
    gc.disable()
    try:
        checks.verdict("11.sweep", solution())
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert measure.resident_bytes() - before < 2**28  # the sweep asks for up to 36 GiB, of "meta" only


def test_the_stub_is_not_done():
    assert checks.verdict("11.sweep", lambda make, batches: ...).status == "not done"
    assert sys.exc_info() == (None, None, None)
