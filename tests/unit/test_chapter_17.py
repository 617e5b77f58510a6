"""Chapter 17: the page's loop is the package's and the oracle's, counts by hand, panel, source, exercise."""

import ast
import importlib.util
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, kernels, ops, paths, sizing
from kvcourse.bench.chapter_code import tagged_code
from kvcourse.figures import chapter_17 as figures
from kvcourse.figures import template as look
from kvcourse.widgets import chapter_17 as widgets

NOTEBOOK = paths.chapters_dir() / "17_a_kernel_that_follows_the_table.ipynb"
NAME = "17.mask_block"
# float32 (eps 1.2e-7), values of size 1, sums of at most some hundred terms in another order.
CLOSE = dict(atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def page():
    """What the cells tagged plain-paged define, with the page's import."""
    names = tagged_code(NOTEBOOK, "plain-paged")
    names["attention"] = ops.attention
    return names


def printed():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))


# --- the page's definitions are the package's ---------------------------------------------


@st.composite
def batches(draw):
    """Texts in a dyed pool: q, K, V, tables, lengths, and each text's rows side by side."""
    random = np.random.default_rng(draw(st.integers(0, 999)))
    size, heads, group, head_dim = (draw(st.integers(1, most)) for most in (5, 3, 3, 4))
    lengths = draw(st.lists(st.integers(1, 23), min_size=1, max_size=3))
    counts = [-(-n // size) for n in lengths]
    total = sum(counts) + 2
    ids = random.permutation(total - 1)  # the last block is never used: −1 would read it
    tables = np.full((len(lengths), max(counts) + 1), -1, np.int32)
    k, v = np.full((2, total, size, heads, head_dim), np.nan, np.float32)
    rows = []
    for text, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[text, :count], ids = ids[:count], ids[count:]
        rows.append(random.standard_normal((2, n, heads, head_dim), dtype=np.float32))
        position = np.arange(n)
        place = tables[text, position // size], position % size
        k[place], v[place] = rows[-1]
    q = random.standard_normal((len(lengths), heads * group, head_dim), dtype=np.float32)
    return q, k, v, tables, lengths, rows


def contiguous(q, rows):
    both = [(k.swapaxes(0, 1), v.swapaxes(0, 1)) for k, v in rows]
    pairs = zip(q, both, strict=True)
    return np.stack([ops.attention(x[:, None], k, v, start=k.shape[1] - 1)[:, 0] for x, (k, v) in pairs])


@settings(deadline=None, max_examples=40)
@given(batch=batches(), splits=st.integers(1, 5))
def test_the_pages_loop_is_the_packages(page, batch, splits):
    """Answers, the blocks that are opened, and the bytes; splits against the unsplit answer."""
    q, k, v, tables, lengths, rows = batch
    want, seen = contiguous(q, rows), []
    package = kernels.paged_attention_numpy(q, k, v, tables, lengths, num_splits=splits, trace=seen)
    np.testing.assert_allclose(package, want, **CLOSE)
    page["opened"].clear()
    page["moved"].update(read=0, written=0)
    np.testing.assert_allclose(page["paged_decode"](q, k, v, tables, lengths), want, **CLOSE)
    assert page["moved"] == {"read": figures.floor_bytes(lengths, *k.shape[2:]), "written": 0}
    kernels.paged_attention_numpy(q, k, v, tables, lengths, trace=(whole := []))
    assert page["opened"] == sum((blocks for *_, blocks in whole), [])

    scaled = (q / np.float32(math.sqrt(q.shape[2]))).reshape(len(q), k.shape[2], -1, q.shape[2])
    page["opened"].clear()
    for text, head in np.ndindex(*scaled.shape[:2]):
        given = scaled[text, head], k[:, :, head], v[:, :, head], tables[text], lengths[text], splits
        found = page["split_program"](*given)
        np.testing.assert_allclose(found, want[text].reshape(scaled[text].shape)[head], **CLOSE)
    assert page["opened"] == sum((blocks for *_, blocks in seen), [])


@settings(deadline=None, max_examples=25)
@given(batch=batches())
def test_gather_then_attend_is_the_packages_reference(page, batch):
    torch = pytest.importorskip("torch")
    q, k, v, tables, lengths, rows = batch
    page["moved"].update(read=0, written=0)
    triples = zip(q, tables, lengths, strict=True)
    found = np.stack([page["gather_then_attend"](x, k, v, table, n) for x, table, n in triples])
    np.testing.assert_allclose(found, contiguous(q, rows), **CLOSE)
    given = [torch.from_numpy(x) for x in (q, k, v, tables, np.array(lengths, np.int32))]
    np.testing.assert_allclose(found, kernels.paged_attention_reference(*given).numpy(), **CLOSE)
    assert sum(page["moved"].values()) == figures.gather_bytes(lengths, *k.shape[1:])


def test_merge_by_hand(page):
    answers, lse = np.array([[[18.0]], [[37.5]]]), np.log([[4.0], [8.0]])
    assert page["merge"](answers, lse).item() == pytest.approx(31)
    assert page["merge"](answers, lse + 1000).item() == pytest.approx(31)  # e^1000 would be infinite
    np.testing.assert_allclose(
        page["merge"](answers, lse), kernels.numpy_form.merge(list(zip(answers, lse, strict=True)))
    )


@settings(deadline=None, max_examples=25)
@given(
    scores=st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=12),
    cut=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_the_online_softmax_is_the_softmax(page, scores, cut, seed):
    row = np.array([scores], np.float32)
    v = np.random.default_rng(seed).standard_normal((len(scores), 3), dtype=np.float32)
    state = page["empty"](1, 3)
    for first in range(0, len(scores), cut):
        state = page["take_in"](state, row[:, first : first + cut], v[first : first + cut])
    np.testing.assert_allclose(state[2] / state[1][:, None], ops.softmax(row) @ v, **CLOSE)
    exact = math.log(math.fsum(math.exp(x - max(scores)) for x in row[0].astype(float))) + max(scores)
    # float32 holds a number of size 300 to 3e-5.
    assert (state[0] + np.log(state[1])).item() == pytest.approx(exact, abs=1e-4)


def test_the_pages_cache_is_the_contiguous_one(page):
    tiny = kv.random_model(
        "gpt2", num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, hidden_size=8, intermediate_size=16,
        vocab_size=20, max_seq_len=64,
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(20, size=11).tolist()
    cache, oracle = page["Paged"](tiny.config, [3, 0, 2], 4), kv.ContiguousCache.for_model(tiny)
    for piece in (ids[:3], ids[3:4], ids[4:9], ids[9:]):  # a block's end lies within passes
        # Logits of size 1, float32, a few hundred additions in another order.
        np.testing.assert_allclose(tiny(piece, cache), tiny(piece, oracle), atol=2e-4, rtol=0)
    assert np.isnan(cache.k[:, 1]).all() and np.isnan(cache.k[:, 2, 3]).all()  # never written
    with pytest.raises(RuntimeError, match="make the cache anew"):
        cache.abort()


# --- numbers of the page -----------------------------------------------------------------


def test_printed_answers_by_hand():
    text = printed()
    for answer in (
        "Answer: 3.24 times.",  # (2 · 112 + 100) / 100
        "Answer: 2.63 times.",
        "Answer: 0.500.",  # 3 / 6
        "Answer: NaN.",
        "Answer: nobody's.",
        "Answer: 4 times.",
        "Answer: 12 programs.",
        "Answer: nothing, not one bit.",
        "Answer: vectors that are too short.",
        "Answer: 17 splits.",  # 132 / 8, rounded up
        "Answer: 0.667.",  # 8 / 12
        "Answer: 32 programs.",
        "Answer: 1.12 times the floor.",
        "Answer: only those of a gather.",
        "Answer: right at first, then another text, in the same manner.",
        "Answer: 17 tokens.",
    ):
        assert answer in text, answer
    step = sizing.step_time(kv.catalogue()["llama-3.1-8b"], sizing.device("h100-sxm"), 8000, batch=64)
    ratio = (step.weights + 3 * step.caches) / (step.weights + step.caches)
    assert ratio == pytest.approx(2.634, abs=0.002)
    # 152 tokens, 4 heads of 64, K and V, float32; 18 parts of 4 heads with 65 numbers, written and read.
    assert 1 + (18 * 4 * 65 * 4 * 2) / (152 * 4 * 64 * 2 * 4) == pytest.approx(1.120, abs=0.001)
    assert "8.19 MB" in text and 1000 * 8 * 128 * 2 * 4 == 8_192_000
    assert 63 * 8 == 504 and "2,016 loads" in text


def test_bytes_by_hand():
    assert figures.floor_bytes([100], 4, 64) == 100 * 4 * 64 * 2 * 4
    assert figures.gather_bytes([100], 16, 4, 64) == 324 * 4 * 64 * 2 * 4
    assert figures.partial_bytes(1, 32, 128, 1) == 0
    assert figures.partial_bytes(1, 32, 128, 17) == 17 * 32 * 129 * 4 * 2
    assert figures.splits_needed(1, 8, 132) == 17 and figures.splits_needed(17, 8, 132) == 1
    assert figures.splits_needed(16, 8, 132) == 2
    table = figures.splits_table((1, 64), 8).split("\n")
    assert table[2].split() == "H100 SXM 80 GB 132 17 1".split()
    assert "L4" not in "".join(table)  # its maker does not publish them
    assert len(table) == 2 + sum(device.multiprocessors is not None for device in sizing.devices().values())


def test_the_kernels_own_splits_by_hand():
    """4 · 132 / 8 = 66 programs for each KV head, of which the kernel takes its most, 64."""
    pytest.importorskip("triton")
    from kvcourse.kernels import triton_decode as triton

    step = triton.step_tokens(128, 2)
    assert triton.choose_num_splits(8, 4096, step, 132) == triton.MAX_SPLITS == 64 <= 4096 // step


def test_the_broken_texts_tokens_are_no_near_tie(page, model, tokenizer):
    """The text that the bug writes is compared too: gaps between the two best logits along it."""
    prompt, smallest = tokenizer.encode("It was a very"), math.inf
    cell = next(
        "".join(cell["source"])
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if "def unscaled" in "".join(cell["source"])
    )
    names = {"np": np}
    exec(cell.split("\n\n\n")[0], names)
    cache = page["Paged"](model.config, [5, 0, 3, 7], take_in=names["unscaled"])
    given, wrong = prompt, []
    for _ in range(40):
        logits = model(given, cache, rows=[-1])[0]
        second, best = np.partition(logits, -2)[-2:]
        smallest, given = min(smallest, best - second), [kv.greedy(logits)]
        wrong += given
    assert smallest > 1e-2  # other processors differ by about 1e-5
    assert "broken|" + tokenizer.decode(wrong) in printed()


# --- figures and panel -----------------------------------------------------------------------


def test_the_pools_map_by_hand():
    cells = figures.cells_of_pool([[2, -1], [0, 3]], [3, 6], 4, 5)
    assert [label for label, *_ in cells] == ["B0", "", "A0", "B1", ""]
    assert [tokens for _, tokens, _ in cells] == [4, 0, 3, 2, 0]
    assert cells[3][2] == "block 3: tokens 4 … 5 of text B"
    assert figures.pool_text([[2, -1], [0, 3]], [3, 6], 4, 5) == (
        "3 and 6 tokens lie in 1 and 2 blocks of 4, 3 slots in them hold no token, and 2 of the 5 blocks are "
        "free."
    )


@pytest.fixture(scope="module")
def passages():
    random = np.random.default_rng(0)
    rows = [tuple(random.standard_normal((2, 4, 128, 64), dtype=np.float32)) for _ in range(3)]
    return random.standard_normal((3, 4, 64), dtype=np.float32), rows


def test_the_panels_numbers_by_hand(passages):
    data = figures.loads(6, 12, 40, 100, 16, "in order", *passages)
    assert [(text, split, blocks) for text, split, blocks in data["programs"] if blocks] == [
        (0, 0, [0]), (1, 0, [1]), (1, 1, [2]), (1, 2, [3]), (2, 0, [4, 5]), (2, 1, [6, 7]), (2, 2, [8, 9]),
        (2, 3, [10]),
    ]  # fmt: skip
    assert data["with_work"] == 32 and len(data["programs"]) == 18 and data["same"]
    assert data["padding"] == 3 * 8 - 11
    text = figures.loads_text(data)
    assert text == (
        "32 of 72 programs (4 KV heads · 3 texts · 6 splits) have work, the longest loads 2 blocks in a row, "
        "and they move 1.12 times the 311.3 kB of K and V, a gather 3.32 times; the answers equal attention "
        "over contiguous rows, and −1, in 13 places of the tables, is never read."
    )
    shortest = figures.loads_text(figures.loads(1, 1, 1, 1, 16, "in order", *passages))
    assert shortest.startswith("12 of 12 programs (4 KV heads · 3 texts · 1 split) have work, each loads")
    shuffled = figures.loads(6, 12, 40, 100, 16, "shuffled", *passages)
    assert [len(blocks) for *_, blocks in shuffled["programs"]] == [len(b) for *_, b in data["programs"]]
    assert shuffled["tables"] != data["tables"] and shuffled["same"]


def test_a_wrong_answer_is_said(passages):
    q, rows = passages
    data = figures.loads(2, 12, 40, 100, 16, "shuffled", q, rows)
    assert "answers equal" in figures.loads_text(data)
    assert "answers differ from" in figures.loads_text({**data, "same": False})
    poisoned = [(np.where(np.arange(128)[:, None] < 11, k, np.nan), v) for k, v in rows]
    assert not figures.loads(2, 12, 40, 100, 16, "shuffled", q, poisoned)["same"]


def test_the_panel_at_the_ends_of_its_controls(passages):
    panel = widgets.loads_panel(*passages)
    for order in figures.ORDERS:
        for size in figures.BLOCK_SIZES:
            for splits, a, b, c in ((1, 1, 1, 1), (6, 128, 128, 128), (6, 1, 64, 128)):
                text = panel.set(order=order, block_size=size, splits=splits, a=a, b=b, c=c)
                assert "answers equal" in text and f"of {12 * splits} programs" in text
                blocks = {block for *_, loaded in panel.data["programs"] for block in loaded}
                assert -1 not in blocks and panel.data["total"] - 1 not in blocks
                for trace in panel.figure.data:
                    assert all(isinstance(values, (tuple, list)) for values in (trace.x, trace.y))


def test_the_first_control_changes_the_sentence_and_quickly(passages):
    panel = widgets.loads_panel(*passages)
    panel.set(block_size=8, a=128, b=128, c=128)
    times = []
    for splits in range(2, 7):
        before, start = panel.text, time.process_time()
        assert panel.set(splits=splits) != before
        times.append(time.process_time() - start)  # of this process alone: others may be busy
    assert min(times[1:]) < 0.1  # the course's limit for a repaint


def test_the_figure_names_block_and_mask(passages):
    data = figures.loads(1, 12, 40, 100, 16, "in order", *passages)
    drawn = figures.loads_figure(data)
    loaded, masked, ids, held, unused, names = drawn.data
    assert list(names.text).count("A0") == 1 and len(names.text) == 11
    assert list(ids.text) == [str(block) for block in range(11)] and list(ids.y) == [0] + [1] * 3 + [2] * 7
    assert len(masked.x) == 3  # the last block of each text
    one = figures.loads_figure(figures.loads(1, 1, 40, 100, 32, "in order", *passages))
    assert min(one.data[3].x) == pytest.approx(figures.CELL * figures.LEAST, abs=1e-4)  # not 1/32 of a cell
    assert loaded.hovertext[3] == "text B, split 0, load 3: block 3, 8 of 16 slots"
    # 12, 8 and 4 of 16 slots of the last blocks: the labels of two lie on the hatch.
    assert [color == look.PAPER for color in ids.marker.color] == [
        *[False], *[False, False, True], *[False] * 6, True,
    ]  # fmt: skip
    assert len(held.x) == 11 and len(unused.x) == 3 + 25 - 11


# --- the kernel's text ------------------------------------------------------------------------


def test_the_shown_source_is_the_kernels():
    """Whole pieces of it in their order, the whole loop among them, and what the page's table speaks of."""
    source, shown = figures.kernel_source("_attend"), figures.kernel_excerpt()
    assert source.startswith("@triton.jit\ndef _attend(") and shown in printed()
    pieces, at = shown.split("\n    ...\n"), 0
    for piece in pieces:
        at = source.index(piece, at) + len(piece)
    (node,) = (n for n in ast.parse(source).body[0].body if isinstance(n, ast.For))
    assert "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]) in shown
    assert pieces[0] == source.splitlines()[source.splitlines().index(pieces[0])]  # one line: program_id
    for words in ("program_id(2)", "    table = ", "block_size, mask=here", "shrink = ", "mixed * shrink"):
        assert words in shown
    for words in ("    stop = ", "    highest = tl.full", "\n    tl.store(\n        out_ptr", "total_or_1 ="):
        assert words in shown
    with pytest.raises(ValueError, match="no kernel 'x'"):
        figures.kernel_source("x")


# --- the exercise -----------------------------------------------------------------------------


def solution():
    path = paths.chapters_dir() / "solutions" / "17_a_kernel_that_follows_the_table.py"
    spec = importlib.util.spec_from_file_location("solution_17", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.mask_block


@settings(deadline=None, max_examples=25)
@given(batch=batches())
def test_the_solution_makes_whole_blocks_right(page, batch):
    """Every slot of every block is loaded, NaN included; the answer is the oracle's."""
    q, k, v, tables, lengths, rows = batch
    want, size = contiguous(q, rows), k.shape[1]
    grouped = (q / np.float32(math.sqrt(q.shape[2]))).reshape(len(q), k.shape[2], -1, q.shape[2])
    for text, head in np.ndindex(*grouped.shape[:2]):
        state = page["empty"](*grouped.shape[2:])
        for first in range(0, lengths[text], size):
            block = tables[text, first // size]
            scores = grouped[text, head] @ k[block, :, head].T
            state = page["take_in"](state, *solution()(scores, v[block, :, head], first, lengths[text]))
        found = state[2] / state[1][:, None]
        np.testing.assert_allclose(found, want[text].reshape(grouped[text].shape)[head], **CLOSE)


def test_messages_are_one_line():
    verdict = checks.verdict(NAME, lambda scores, v, first, length: (scores, v))
    assert verdict.status == checks.WRONG and "\n" not in verdict.message
    assert "slot 2 would be token 10, and the sequence has 10" in verdict.message
    assert checks.verdict(NAME, solution()).status == checks.RIGHT
