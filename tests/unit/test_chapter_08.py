"""Chapter 08: formulas of the page against package and arrays, its sums by hand, planner and exercises."""

import importlib.util
import json
import time

import ipywidgets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, paths, sizing
from kvcourse.checks import chapter_08 as exercises
from kvcourse.figures import chapter_08 as figures
from kvcourse.figures import template as look
from kvcourse.sizing import Plan
from kvcourse.widgets import chapter_08 as widgets

NOTEBOOK = paths.chapters_dir() / "08_how_big.ipynb"
MODELS = kv.catalogue()
GB, GIB = 1000**3, 1024**3


@pytest.fixture(scope="module")
def cells():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


@pytest.fixture(scope="module")
def printed(cells):
    return "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))


@pytest.fixture(scope="module")
def defined(cells):
    """The formulas that the page writes out: by_width, by_division, by_config."""
    names = {"kv": kv}
    for cell in cells:
        source = "".join(cell["source"])
        for part in source.split("\n\n\n"):
            if part.startswith("def by_"):
                exec(part, names)
    return names


# --- the page's formulas ------------------------------------------------------------------

PLAIN = [name for name, config in MODELS.items() if not config.latent]


@pytest.mark.parametrize("name", PLAIN)
def test_the_formula_is_the_bytes_of_real_arrays(name, defined):
    config = MODELS[name]
    arrays = kv.ContiguousCache(config, max_seq_len=3).nbytes
    assert defined["by_config"](config) * 3 == arrays
    assert sizing.kv_bytes(config, 3, "float32") == arrays  # every window is wider


def test_the_shortcuts_hold_only_where_the_page_says(defined):
    def exact(formula):
        right = defined["by_config"]
        return {name for name in PLAIN if defined[formula](MODELS[name]) == right(MODELS[name])}

    multi_head = {n for n in PLAIN if MODELS[n].num_heads == MODELS[n].num_kv_heads}
    assert (
        exact("by_width")
        == multi_head
        == {n for n in PLAIN if n.startswith("gpt2")}
        | {
            "llama-2-7b",
            "llama-2-13b",
        }
    )
    apart = {"qwen3-4b", "gemma-3-1b", "gemma-3-4b", "gemma-3-27b"}
    assert exact("by_division") == set(PLAIN) - apart


# --- its sums by hand -----------------------------------------------------------------------


def test_sums_of_the_page_by_hand(printed):
    weights_7b, token_7b = 6_738_415_616 * 2, 2 * 32 * 32 * 128 * 2
    assert sizing.weight_bytes(MODELS["llama-2-7b"]) == weights_7b and token_7b == 512 * 1024
    assert f"= {25_705:,} tokens, 6.3 texts of 4,096" in printed and round(weights_7b / token_7b) == 25_705
    assert 64 * GB // (4096 * token_7b) == 29 and "holds 29 of the 32 sequences" in printed
    assert 8000 * 2 * 36 * 2 * 128 * 2 == 294_912_000 and "8,000 tokens 0.29 GB" in printed
    assert "36,864 B" in printed and "19,584 B a token" in printed and "819,200 B a token" in printed
    assert 2 * 36 * 8 * 80 * 2 == 92_160 and "92,160 B = 90 KiB" in printed
    assert 2 * 36 * 8 * 128 * 2 == 147_456 and "147,456 B = 144 KiB" in printed
    assert "457,763 tokens, / 2,300 = 199 requests" in printed
    assert "491,520 tokens, / 2,300 = 213 requests" in printed
    assert 81_559 * 1024**2 == 85_520_809_984 and "85,520,809,984 B = 85.52 GB = 79.65 GiB" in printed
    assert "left for the rest: 4.69 GiB after 60 GiB of cache, 9.46 GB after 60 GB" in printed
    assert "at most 202 requests" in printed and "at most 207 requests" in printed
    assert (
        240_000 * token_7b == 125_829_120_000 and "cache 125.8 GB" in printed and "cache  31.5 GB" in printed
    )
    prompt_once = 240_000 - 39 * 500
    in_q8_0, left = token_7b * 34 / 64, 81_559 * 1024**2 - 20 * GB
    assert prompt_once * in_q8_0 < left < 240_000 * in_q8_0
    assert f"{prompt_once * in_q8_0 / GB:.1f}" == "61.4" and "for 32: 61.4 GB" in printed
    assert f"{prompt_once * token_7b / 2 / GB:.1f}" == "57.8" and "a number: 57.8 GB" in printed
    assert "its layers without a window: 10 of 62" in printed
    assert "34,359,738,368 B = 32 GiB" in printed
    assert 32 * 8000 * 131_072 == 31.25 * GIB and "= 31.25 GiB" in printed


def test_roundings_of_the_page_have_a_margin():
    """No printed figure lies so near a rounding edge that another way of dividing would change it."""
    for value, digits in (
        (85_520_809_984 / GB, 2),
        (85_520_809_984 / GIB, 2),
        (16_060_522_496 / GIB, 2),
        (125_829_120_000 / GB, 1),
        (31_457_280_000 / GB, 1),
        (66_846_720_000 / GB, 1),
        (62_914_560_000 / GB, 1),
        (61_415_424_000 / GB, 1),
        (57_802_752_000 / GB, 1),
        (13_476_831_232 / (524_288 * 4096), 1),
    ):
        scaled = value * 10**digits
        assert abs(scaled % 1 - 0.5) > 0.01, value


def test_the_multi_head_model_of_the_office(cells):
    source = next("".join(c["source"]) for c in cells if '"qwen1.5-7b"' in "".join(c["source"]))
    made = source[source.index("old = ") : source.index("caches = {}")]
    names = {"kv": kv}
    exec(made, names)
    old = names["old"]
    layer = 4 * 4096**2 + 3 * 4096 + 3 * 4096 * 11_008 + 2 * 4096  # products, biases, MLP, two norms
    assert old.num_parameters == 2 * 151_936 * 4096 + 32 * layer + 4096 == 7_721_324_544
    assert sizing.kv_bytes_per_token(old) == 512 * 1024 and old.max_seq_len > 6000


def test_questions_at_the_end_by_hand():
    idle = 24_564 * 1024**2 - 24 * GB
    assert f"{24_564 * 1024**2 / GB:.2f}" == "25.76" and f"{idle / GB:.2f}" == "1.76"
    assert round(idle // 131_072, -2) == 13_400
    assert f"{128_000 * 131_072 / GIB:.1f}" == "15.6" and 131_072**2 == 16 * GIB


# --- the table and the still ------------------------------------------------------------------


def test_the_table_of_models():
    table = figures.models_table([MODELS[n] for n in ("qwen3-4b", "mistral-7b-v0.1", "deepseek-v3")])
    rows = [line.split() for line in table.split("\n")[2:]]
    assert rows[0] == "qwen3-4b 36 32 8 128 80 144.0 KiB 4.50 GiB".split()
    assert rows[1] == "mistral-7b-v0.1 32 32 8 128 128 – 0.50 GiB".split()
    assert rows[2] == "deepseek-v3 61 128 – – 56 68.6 KiB 2.14 GiB".split()
    assert len({len(line) for line in table.split("\n")[2:]}) == 1


def test_kinds_of_models():
    kinds = {name: figures.kind(config) for name, config in MODELS.items()}
    assert kinds["gpt2"] == kinds["llama-2-13b"] == "a KV head for each query head"
    assert kinds["llama-2-70b"] == kinds["smollm2-135m"] == "grouped heads"
    assert kinds["mistral-7b-v0.1"] == kinds["gemma-3-1b"] == "windows" and kinds["deepseek-v3"] == "latent"


def test_the_still_of_models():
    chosen = [MODELS[n] for n in ("llama-2-7b", "llama-2-13b", "llama-3.1-405b", "gemma-3-4b")]
    drawn = figures.models_figure(chosen)
    points = {name: (x, y) for t in drawn.data for name, x, y in zip(t.text, t.x, t.y, strict=True)}
    assert set(points) == {c.name for c in chosen}
    assert points["llama-2-7b"] == (13.477, 16.0)
    assert [t.name for t in drawn.data] == list(figures.KINDS)
    assert len({t.marker.symbol for t in drawn.data}) == 4
    assert figures.models_text(chosen) == (
        "The largest cache of 32,768 tokens is that of llama-2-13b (made for 4,096 tokens), 25.0 GiB beside "
        "26 GB of weights; llama-3.1-405b has 812 GB of weights and a cache of 15.8 GiB."
    )
    assert "that of llama-3.1-405b, 15.8 GiB" in figures.models_text(chosen[2:])


# --- the planner ------------------------------------------------------------------------------


def names_of(drawn):
    return [bar.name for bar in drawn.data if bar.showlegend]


def ends(drawn):
    """First and last GB of each bar that is drawn."""
    shown = [bar for bar in drawn.data if bar.showlegend]
    return [(bar.base[0], round(bar.base[-1] + bar.x[-1], 4)) for bar in shown]


def test_the_bar_of_a_plan_that_fits():
    plan = Plan(memory="80 GB", weights="16 GB", keep_free="4 GB", context=8192, users=32)
    data = figures.planner(plan)
    drawn = figures.planner_figure(data)
    assert names_of(drawn) == ["weights: 16.00 GB", "kept free: 4.00 GB", "32 caches: 34.36 GB"]
    assert ends(drawn) == [(0, 16), (16, 20), (20, 54.3597)]
    assert len(drawn.data[3].x) == 32 and data["no_room"] == 0 and data["changes"] == {}
    assert drawn.layout.shapes[0].x0 == 80
    assert figures.planner_text(data) == (
        "llama-3.1-8b: weights 16.00 GB, 4.00 GB kept free, card 80.00 GB (74.51 GiB). 32 requests of 8,192 "
        "tokens take 34.36 GB and fit; at most 55 would."
    )


def test_the_bar_of_a_plan_that_does_not_fit():
    plan = Plan(memory="80 GB", weights="16 GB", keep_free="4 GB", context=6000, users=80, shared_prefix=1000)
    data = figures.planner(plan)
    drawn = figures.planner_figure(data)
    # (60 GB − 1,000 · 131,072) / (5,000 · 131,072) = 91.3: they all fit; 120 do not.
    assert data["placed"] == 80 and data["no_room"] == 0
    data = figures.planner(plan.replace(users=120))
    drawn = figures.planner_figure(data)
    assert data["placed"] == 91 and data["no_room"] == 29 * 5000 * 131_072
    assert names_of(drawn)[2:] == [
        "shared prefix: 0.13 GB",
        "91 caches: 59.64 GB",
        "29 caches, no room: 19.01 GB",
    ]
    wrong = drawn.data[-1]
    assert wrong.marker.color == look.WRONG and wrong.marker.pattern.shape == look.CROSS_HATCH
    parts = ends(drawn)
    assert all(a[1] == pytest.approx(b[0], abs=1e-3) for a, b in zip(parts, parts[1:], strict=False))
    assert figures.planner_text(data).endswith(
        "120 requests of 6,000 tokens would take 78.77 GB, and 60.00 GB are left: 91 fit. One of these is "
        "enough: 91 users; requests of 4,806 tokens; the cache in q8_0; another card: h200."
    )


def test_weights_that_exceed_the_card():
    data = figures.planner(Plan("llama-2-70b", memory="l4", users=1))
    drawn = figures.planner_figure(data)
    # 68,976,648,192 numbers of 2 bytes, and 2,300 tokens of 327,680 bytes
    assert names_of(drawn) == ["weights: 137.95 GB", "kept free: 4.00 GB", "1 cache, no room: 0.75 GB"]
    for drawn_to, gb in zip(ends(drawn), [137.953296, 141.953296, 142.706960], strict=True):
        assert drawn_to[1] == pytest.approx(gb, abs=1e-4)
    assert drawn.layout.shapes[0].x0 == pytest.approx(24.1529, abs=1e-4)
    text = figures.planner_text(data)
    assert "exceed the card by 117.80 GB: no request fits." in text and "another card: h200" in text
    alone = figures.planner_text(figures.planner(Plan("llama-3.1-405b", memory="l4")))
    assert alone.endswith("No single change here is enough: several cards, or a smaller model.")
    assert "But gpt2 was made for 1,024 tokens." in figures.planner_text(figures.planner(Plan("gpt2")))


def test_many_caches_are_one_bar():
    drawn = figures.planner_figure(figures.planner(Plan(users=figures.MOST_DRAWN + 1)))
    assert len(drawn.data[3].x) == 1
    drawn = figures.planner_figure(figures.planner(Plan(users=figures.MOST_DRAWN)))
    assert len(drawn.data[3].x) == figures.MOST_DRAWN


@pytest.fixture(scope="module")
def panel():
    return widgets.planner_panel()


def test_the_planner_at_the_ends_of_its_controls(panel):
    for model in MODELS:
        for users, context in ((1, 1), (1024, 1), (1, 10**8), (1024, 10**8)):
            text = panel.set(model=model, users=users, context=context, shared_prefix=0)
            assert "does not work" not in text and f"{model}: weights" in text
            for bar in panel.figure.data:
                assert all(isinstance(values, (tuple, list)) for values in (bar.x, bar.base))
    for name, control in panel.controls.items():
        if isinstance(control, ipywidgets.Dropdown):
            for option in control.options:
                assert "does not work" not in panel.set(**{name: option, "context": 2048, "users": 9})
    assert "shared_prefix 5,000 is not below" in panel.set(context=100, shared_prefix=5000)
    panel.set(context=2300, shared_prefix=0)


def test_it_repaints_within_the_limit(panel):
    panel.set(model="gemma-3-27b", users=1024, context=100_000)
    times = []
    for more in range(1, 6):
        before, start = panel.text, time.process_time()
        assert panel.set(context=100_000 + 1000 * more) != before
        times.append(time.process_time() - start)  # of this process alone: others may be busy
    assert min(times) < 0.1  # the course's limit for a repaint


@settings(deadline=None, max_examples=30)
@given(
    model=st.sampled_from(sorted(MODELS)),
    card=st.sampled_from(["l4", "h200", "96 GB", "81,251 MiB"]),
    weights=st.sampled_from(["float32", "bfloat16", "13.5 GB"]),
    cache=st.sampled_from(sorted(sizing.NUMBER_FORMATS)),
    kept=st.sampled_from(["0 GB", "3 GiB", "12.5 %"]),
    users=st.integers(1, 1024),
    context=st.integers(2, 200_000),
    shared=st.integers(0, 1),
)
def test_the_planners_text_goes_there_and_back(
    panel, model, card, weights, cache, kept, users, context, shared
):
    plan = Plan(model, card, weights, cache, context, users, shared, kept)
    sentence = panel.restore(plan.text())
    assert panel.setting == plan.text() and sentence == figures.planner_text(figures.planner(plan))
    other = widgets.planner_panel()
    assert other.restore(panel.setting) == sentence and other.setting == panel.setting


@pytest.mark.parametrize(
    "text, words",
    [
        ("model=llama-4", "no model 'llama-4' in the catalogue"),
        ("users=5000", "cannot be 5000 (from 1 to 1024)"),
        ("block_size=16", "block_size is 16: this planner counts single tokens"),
        ("memory=80", "'80' is no amount of memory"),
        ("hello", "cannot read 'hello'"),
    ],
)
def test_a_text_that_the_planner_cannot_take(panel, text, words):
    before = panel.set(model="llama-3.1-8b", users=7), panel.values
    with pytest.raises(ValueError) as caught:
        panel.restore(text)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert (panel.text, panel.values) == before


def test_a_model_of_the_readers_own():
    mine = kv.ModelConfig("my-model", "llama", 4, 8, 2, 16, 64, 128, 100, 1000)
    panel = widgets.planner_panel(mine)
    assert panel.values["model"] == "my-model" == panel.controls["model"].options[0]
    line = panel.set(users=3) and panel.setting
    panel.set(model="gpt2")
    assert panel.restore(line).startswith("my-model: weights 0.00 GB")


def test_a_model_of_the_readers_own_called_like_one_of_the_catalogue():
    mine = kv.ModelConfig("gpt2", "llama", 4, 8, 2, 16, 64, 128, 100, 1000)
    panel = widgets.planner_panel(mine)
    assert panel.values["model"] == "gpt2" and panel.controls["model"].options.count("gpt2") == 1
    # 4 layers of 2 KV heads of 16 numbers, key and value, 2 bytes each: 512 B a token
    own_cache = "1 request of 1,000 tokens takes 0.00 GB"
    assert own_cache in panel.set(users=1, context=1000)  # the catalogue's: 36.9 MB
    panel.set(model="smollm2-135m")
    assert own_cache in panel.set(model="gpt2")


@pytest.mark.parametrize("names", [("twice", "twice"), ("",)])
def test_models_that_no_name_tells_apart(names):
    with pytest.raises(ValueError, match="models are told apart by their names"):
        widgets.planner_panel(
            *(kv.ModelConfig(name, "llama", 4, 8, 2, 16, 64, 128, 100, 1000) for name in names)
        )


def test_sentences_with_one_of_a_thing():
    def said(**given):
        return figures.planner_text(figures.planner(Plan(**given)))

    assert "1 request of 1 token takes 0.00 GB and fits; at most " in said(users=1, context=1)
    # 131,072 B a token: 0.5 GB hold one request of 3,000 tokens, 0.39 GB, and 1,907 tokens of two
    text = said(memory="20.5 GB", weights="16 GB", users=2, context=3000)
    assert "2 requests of 3,000 tokens would take 0.79 GB, and 0.50 GB are left: 1 fits. " in text
    assert "One of these is enough: 1 user; requests of 1,907 tokens; " in text
    text = said(memory="20.1 GB", weights="16 GB", users=762, context=2)
    assert "; requests of 1 token; " in text


# --- the exercises ----------------------------------------------------------------------------


def solutions():
    path = paths.chapters_dir() / "solutions" / "08_how_big.py"
    spec = importlib.util.spec_from_file_location("solution_08", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [n for n in PLAIN if MODELS[n].sliding_window is None])
@pytest.mark.parametrize("size", [4, 2, 1, 34 / 32])
def test_the_solution_is_the_packages(name, size):
    config = MODELS[name]
    assert solutions().kv_bytes_per_token(config, size) == sizing.kv_bytes_per_token(config, size)


def test_any_two_mistakes_differ_in_the_odd_shape():
    values = [value for part in exercises._parts(exercises.ODD, 5)[2:3] for value, _ in part]
    assert len(set(values)) == len(values)
    config = exercises.ODD
    sizes = [config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size]
    assert len(set(sizes)) == 5 and config.hidden_size // config.num_heads not in sizes


def test_figures_and_readings_of_the_audits():
    def under(claim):
        values = {r: exercises.figure_under(claim, r) for r in exercises.READINGS}
        digits, printed = exercises.CLAIMS[claim]["digits"], exercises.CLAIMS[claim]["printed"]
        return {r for r, v in values.items() if v is not None and round(v, digits) == printed}

    assert exercises.CLAIMS["A"]["bytes"] == 327_680 * 128_000
    assert exercises.CLAIMS["B"]["bytes"] == 256 * 513 * 36_864
    assert exercises.CLAIMS["C"]["bytes"] == 19_584 * 8000
    # 128,000 tokens of 320 KiB are 40,000 MiB, so both readings of A are the same sum.
    assert under("A") == {"1K is 1,024", "1,000 MiB to the GiB"}
    assert under("B") == {"1,000 MiB to the GiB"} and under("C") == {"as it stands"}


@pytest.mark.parametrize("figure", [39.06, 39.1, 39.0625, 39])
def test_a_figure_may_have_more_or_fewer_digits(figure):
    right = solutions().audits() | {"A": (figure, "1K is 1,024")}
    verdict = checks.verdict("08.audits", lambda: right)
    assert verdict.status == (checks.RIGHT if figure != 39 else checks.WRONG)


def test_either_reading_of_claim_a_is_right_and_the_verdict_says_so():
    for reading in ("1K is 1,024", "1,000 MiB to the GiB"):
        verdict = checks.verdict("08.audits", lambda r=reading: solutions().audits() | {"A": (39.06, r)})
        assert verdict.status == checks.RIGHT and 128_000 * 320 / 1024 == 40_000
        assert "A holds with 1K = 1,024 (1,000 MiB to the GiB is the same sum" in verdict.message


@pytest.mark.parametrize("number", [np.float64, np.float32, np.array])
def test_figures_may_be_numpys(number):
    def audits():
        return {claim: (number(figure), reading) for claim, (figure, reading) in solutions().audits().items()}

    assert checks.verdict("08.audits", audits).status == checks.RIGHT
