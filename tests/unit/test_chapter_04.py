"""Chapter 04: the page's cache is the package's, its bugs are bugs, the panel, and no roundings."""

import ast
import difflib
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, ops, paths
from kvcourse.bench.chapter_code import tagged_code
from kvcourse.checks import chapter_04 as exercises
from kvcourse.figures import chapter_04 as figures
from kvcourse.widgets import chapter_04 as widgets

NOTEBOOK = paths.chapters_dir() / "04_a_cache_in_numpy.ipynb"
PROMPT, NEW = "It was a very fine morning", 24
TWELVE = PROMPT + ", and Emma had been out"
PAIRS = [(start, T) for start in range(12) for T in range(1, 13 - start)]
SISTERS = {
    "plain_attend": "attend",
    "plain_attention": "cached_attention",
    "plain_gpt2": "cached_gpt2",
    "plain_generate": "generate",
}

# Logits of size 10, and the same sums in another order: about 1e-5 in float32. What a cache does wrong
# shows in whole units.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def ids(tokenizer):
    return tokenizer.encode(PROMPT)


@pytest.fixture(scope="module")
def chapter():
    """Everything that the page's tagged cells define, with the imports that its import cell makes."""
    names = {}
    for tag in ("plain-gpt2", "cached-gpt2"):
        defined = tagged_code(NOTEBOOK, tag)
        # A function looks its names up where it was made.
        defined |= {name: getattr(ops, name) for name in ("causal_mask", "gelu", "layer_norm", "softmax")}
        names |= defined
    return names


@pytest.fixture(scope="module")
def restarted(chapter):
    """The page's function with the bug."""
    source = source_of("def restarted_gpt2").split("\n\n\ndef write")[0]
    names = dict(chapter)
    exec(source, names)
    return names["restarted_gpt2"]


def source_of(text):
    """The one code cell with a line that begins with the text."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (found,) = (source for source in sources if f"\n{text}" in "\n" + source)
    return found


def lines_of(function):
    """The lines of one of the page's functions, comments included."""
    source = source_of(f"def {function}(")
    (node,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == function)
    return source.splitlines()[node.lineno - 1 : node.end_lineno]


def fed(chapter, model, ids, sizes):
    """Logits of ids in passes of these sizes, and the page's cache after them."""
    cache, logits, at = chapter["empty_cache"](model.config), [], 0
    for size in sizes:
        logits.append(chapter["cached_gpt2"](ids[at : at + size], model.params, model.config, cache))
        at += size
    return np.concatenate(logits), cache


# --- the page's definitions are the package's --------------------------------------------


def test_the_uncached_version_is_the_packages(chapter, model, ids):
    plain = chapter["plain_gpt2"](ids, model.params, model.config)
    assert plain.dtype == np.float32
    np.testing.assert_allclose(plain, model(ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("start, T", PAIRS)
def test_claim_c15_every_pair_of_a_twelve_token_prompt(chapter, model, tokenizer, start, T):
    ids = tokenizer.encode(TWELVE)
    sizes = [size for size in (start, T) if size]
    logits, cache = fed(chapter, model, ids, sizes)
    assert len(ids) == 12 and logits.dtype == np.float32
    np.testing.assert_allclose(logits, model(ids)[: start + T], atol=TOLERANCE, rtol=0)
    assert {rows.shape for pair in cache for rows in pair} == {(4, start + T, 64)}


def test_there_are_78_pairs():
    assert len(PAIRS) == len(set(PAIRS)) == 78


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_random_chunks_of_random_texts(chapter, model, sizes, seed):
    ids = np.random.default_rng(seed).integers(model.config.vocab_size, size=sum(sizes)).tolist()
    logits, _ = fed(chapter, model, ids, sizes)
    np.testing.assert_allclose(logits, model(ids), atol=TOLERANCE, rtol=0)


@settings(deadline=None, max_examples=10)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_the_pages_cache_is_the_concatenating_cache(chapter, model, sizes, seed):
    ids = np.random.default_rng(seed).integers(model.config.vocab_size, size=sum(sizes)).tolist()
    logits, cache = fed(chapter, model, ids, sizes)
    package, at = kv.ConcatenatingCache.for_model(model), 0
    for size in sizes:
        theirs = model(ids[at : at + size], package)
        np.testing.assert_allclose(logits[at : at + size], theirs, atol=TOLERANCE, rtol=0)
        at += size
    for layer, pair in enumerate(cache):
        for ours, theirs in zip(pair, package.keys_values(layer), strict=True):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("start, T", [(0, 5), (6, 1), (4, 2), (9, 7)])
def test_attend_with_start_is_the_packages_attention(chapter, start, T):
    random = np.random.default_rng(start)
    q = random.standard_normal((4, T, 16), dtype=np.float32)
    k, v = random.standard_normal((2, 4, start + T, 16), dtype=np.float32)
    got = chapter["attend"](q, k, v, start)
    assert got.dtype == np.float32
    # Weighted means of numbers of size 1, float32.
    np.testing.assert_allclose(got, ops.attention(q, k, v, start), atol=1e-5, rtol=0)


def test_the_text_is_the_same_each_time_and_without_a_cache(chapter, model, tokenizer, ids):
    def write(name, prompt):
        return chapter[name](prompt, NEW, model.params, model.config, kv.greedy)

    text, cache = write("generate", ids)
    write("generate", tokenizer.encode("Emma was very fond of her"))
    assert write("generate", ids)[0] == text == write("plain_generate", ids)
    assert text == ids + kv.generate(model, ids, max_new_tokens=NEW)
    assert [k.shape[1] for k, _ in cache] == [len(ids) + NEW - 1] * 6
    assert ids == tokenizer.encode(PROMPT)  # the caller's list is not appended to


def test_only_the_marked_lines_differ():
    changed = 0
    for old, new in SISTERS.items():
        before, after = [line.replace("plain_", "") for line in lines_of(old)], lines_of(new)
        found = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")]
        assert found == [line for line in after if "# NEW" in line]
        changed += len(found)
    assert changed == 15


# --- what goes wrong, goes wrong ---------------------------------------------------------


def along(forward, chapter, model, ids, new):
    cache, given, rows = chapter["empty_cache"](model.config), list(ids), []
    for token in new:
        rows.append(forward(given, model.params, model.config, cache, rows=[-1])[0])
        given = [token]
    return np.stack(rows)


def test_claim_c14_restarted_positions_change_the_logits_by_more_than_one(chapter, restarted, model, ids):
    new = kv.generate(model, ids, max_new_tokens=NEW)
    right = along(chapter["cached_gpt2"], chapter, model, ids, new)
    wrong = along(restarted, chapter, model, ids, new)
    difference = np.abs(right - wrong).max(axis=1)
    assert difference[0] < TOLERANCE  # prefill begins at 0 anyway
    assert difference[1:].min() > 1.5  # the page prints "above 1"


def test_the_restarted_text_survives_a_hundred_times_the_rounding(chapter, restarted, model, ids):
    cache, given, written = chapter["empty_cache"](model.config), list(ids), []
    for _ in range(NEW):
        logits = restarted(given, model.params, model.config, cache, rows=[-1])[0]
        second, best = np.partition(logits, -2)[-2:]
        assert best - second > 100 * 5e-5  # cached and uncached passes differ by less than 5e-5
        written.append(kv.greedy(logits))
        given = written[-1:]
    right = kv.generate(model, ids, max_new_tokens=NEW)
    assert written[:4] == right[:4] and written[4] != right[4]


def test_a_pass_that_stops_half_way_leaves_layers_of_two_lengths(chapter, model, ids):
    cache, new = chapter["empty_cache"](model.config), kv.generate(model, ids, max_new_tokens=1)
    chapter["cached_gpt2"](ids, model.params, model.config, cache)
    half = {name: array for name, array in model.params.items() if not name.startswith("h.3.")}
    with pytest.raises(KeyError):
        chapter["cached_gpt2"](new, half, model.config, cache)
    assert [k.shape[1] for k, _ in cache] == [7, 7, 7, 6, 6, 6]
    retried = chapter["cached_gpt2"](new, model.params, model.config, cache)
    assert np.abs(retried - model(ids + new, rows=[-1])).max() > 1.1  # the page prints "more than 1"


# --- the exercises -----------------------------------------------------------------------


def test_each_mistake_of_the_checks_is_told_apart_from_the_right_answer():
    """A mistake that gave the right numbers for every call could never be named."""
    lines = set()
    for start, T in ((3, 4), (0, 4), (6, 1)):
        q, k, v = exercises._qkv(start, T)
        right = ops.attention(q, k, v, start)
        for wrong, line in exercises._attend_mistakes(q, k, v, start):
            # Ten times the check's tolerance: what is told apart here is told apart on every machine.
            if wrong.shape != right.shape or not np.allclose(wrong, right, atol=1e-3):
                lines.add(line.split(":")[0])
    assert len(lines) >= 13


def test_the_packages_attention_passes_the_check():
    assert checks.verdict("04.attend_from", ops.attention).status == "right"


# --- the panel ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def panel(model, tokenizer, ids):
    return widgets.steps_panel(model, tokenizer, ids)


def test_the_recorded_passes_are_one_text_in_other_pieces(model, tokenizer, ids):
    text = [tokenizer.decode([token]) for token in ids + kv.generate(model, ids, max_new_tokens=14)]
    for chunk, prefill in ((1, 6), (2, 3), (3, 2), (4, 2), (6, 1), (9, 1)):
        taken = widgets.record(model, tokenizer, ids, chunk, 14)
        assert [one.kind for one in taken] == ["prefill"] * prefill + ["decode"] * (14 - prefill)
        read = 0
        for number, one in enumerate(taken):
            assert one.start == read and one.new == (1 if number >= prefill else min(chunk, 6 - read))
            read += one.new
            assert list(one.pieces) == text[:read]
            assert one.next == (None if read < 6 else text[read])
            assert one.written[one.start :] == (number,) * one.new
            assert one.weights.shape == (6, 4, one.new, read)
            # Rows of weights sum to 1 in float32.
            np.testing.assert_allclose(one.weights.sum(-1), 1, atol=1e-5)
    with pytest.raises(ValueError, match="5 passes are too few"):
        widgets.record(model, tokenizer, ids, 1, 5)


def test_the_recorded_weights_are_those_of_a_pass_over_everything(model, tokenizer, ids):
    taken = widgets.record(model, tokenizer, ids, 6, 4)
    tap = kv.Tap(model.config)
    model(ids + kv.generate(model, ids, max_new_tokens=3), tap)
    scores = tap.queries @ tap.keys.swapaxes(2, 3) / np.float32(8)
    weights = ops.softmax(np.where(ops.causal_mask(0, 9), scores, np.float32(-np.inf)))
    np.testing.assert_allclose(taken[3].weights[:, :, 0], weights[:, :, 8], atol=1e-4)
    np.testing.assert_allclose(taken[3].keys, np.linalg.norm(tap.keys, axis=-1), atol=1e-3)
    np.testing.assert_allclose(taken[3].values, np.linalg.norm(tap.values, axis=-1), atol=1e-3)


def test_the_sentence_names_what_is_written_read_and_chosen(panel):
    said = panel.set(step=3, chunk=6, layer=2, head=1)
    for words in (
        "Step 3, decode: token “ she” at position 8 writes row 8 and reads rows 0–8;",
        "q (4, 1, 64), K and V (4, 9, 64), scores (4, 1, 9), 0 of 9 cells masked",
        "next token “ was”.",
    ):
        assert words in said
    said = panel.set(step=1, chunk=3)
    assert "tokens “ very” … “ morning” at positions 3–5 write rows 3–5 and read rows 0–5" in said
    assert "3 of 18 cells masked" in said
    said = panel.set(step=0, chunk=1)
    assert "reads row 0;" in said and "0 of 1 cell masked" in said and "nothing is chosen yet" in said


def test_masked_cells_are_those_of_the_mask(panel):
    for chunk in (1, 2, 3, 6):
        for step in range(14):
            panel.set(step=step, chunk=chunk)
            data = panel.data
            mask = ops.causal_mask(data["start"], data["T"])
            assert data["masked"] == (~mask).sum() and mask.size == data["T"] * data["tokens"]
            weights, masked = panel.figure.data[5:7]
            assert len(masked.y) == data["masked"] and len(weights.y) == mask.sum()


def test_new_rows_are_bold_and_cached_rows_pale(panel):
    panel.set(step=1, chunk=2)
    q, cached_k, new_k, cached_v, new_v = panel.figure.data[:5]
    assert [len(bars.y) for bars in (q, cached_k, new_k, cached_v, new_v)] == [2, 2, 2, 2, 2]
    assert cached_k.marker.opacity == cached_v.marker.opacity == 0.45
    assert q.marker.opacity == new_k.marker.opacity == new_v.marker.opacity == 1
    assert new_k.marker.line.width > cached_k.marker.line.width
    assert "written in step 0" in cached_k.hovertext[0] and "written in step 1" in new_v.hovertext[0]


def test_the_choice_stands_after_the_last_query_and_no_weight_reads_as_none(panel):
    heights = set()
    for step, chunk, line in ((0, 6, 8.6), (1, 2, 4.6), (13, 6, 3.6)):
        panel.set(step=step, chunk=chunk, layer=2, head=3)
        assert panel.figure.data[7].y[0] == pytest.approx(line)
        assert "0" not in panel.figure.data[5].text
        lanes = panel.figure.layout.yaxis.range
        heights.add(round((panel.figure.layout.height - 104) / (lanes[0] - lanes[1]), 1))
    assert "<1" in panel.figure.data[5].text  # step 13 has two of them
    assert heights == {31}  # px a lane, whatever stands under it


def test_every_setting_works_and_shows_nothing_of_the_future(panel):
    for step in (0, 13):
        for chunk in (1, 6):
            for layer in (0, 5):
                for head in (0, 3):
                    said = panel.set(step=step, chunk=chunk, layer=layer, head=head)
                    assert f"layer {layer}, head {head}" in said
                    ticks = panel.figure.layout.xaxis.ticktext
                    assert [t.isdigit() for t in ticks] == [n >= panel.data["tokens"] for n in range(19)]


def test_the_first_control_changes_the_sentence_and_quickly(model, tokenizer, ids):
    panel = widgets.steps_panel(model, tokenizer, ids)
    times = []
    for step in range(1, 7):
        before, start = panel.text, time.process_time()
        assert panel.set(step=step) != before
        times.append(time.process_time() - start)  # of this process alone: others may be busy
    assert min(times) < 0.1  # the course's limit for a repaint


def test_numbers_for_plotly_are_plain_lists(panel):
    for trace in panel.figure.data:
        assert all(isinstance(values, (tuple, list)) for values in (trace.x, trace.y))


# --- no printed line hangs on a rounding -------------------------------------------------


def test_the_percentages_that_the_page_prints_are_far_from_a_tie(panel, ids):
    shown = [(0, 6, 2, 1), (1, 6, 2, 1), (1, 2, 2, 1), (13, 6, 2, 3)]
    for step, chunk, layer, head in shown:
        panel.set(step=step, chunk=chunk, layer=layer, head=head)
        last = sorted(panel.data["percent"][-1])
        assert last[-1] - last[-2] > 1  # percent; another processor moves it by less than 0.001
        assert abs(panel.data["best_percent"] % 1 - 0.5) > 0.01
    shares = []
    for layer in range(6):
        for head in range(4):
            panel.set(step=13, chunk=6, layer=layer, head=head)
            shares.append(panel.data["percent"][-1])
    share = np.mean(shares, axis=0)
    for part in (share[:6].sum(), share[6:18].sum(), share[18]):
        assert abs(part % 1 - 0.5) > 0.02


def test_a_pass_counts_its_own_tokens():
    nothing = np.zeros((1, 1, 2, 5), np.float32)
    one = figures.Pass("prefill", 3, tuple("abcde"), None, (0, 0, 0, 1, 1), nothing, nothing, nothing, 4)
    assert one.new == 2
