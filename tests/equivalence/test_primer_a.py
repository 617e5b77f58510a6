"""What primer A defines in its cells equals what the package computes."""

import math
from itertools import pairwise

import nbformat
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import ops, paths

NOTEBOOK = paths.chapters_dir() / "primers" / "a_tokens_attention_logits.ipynb"
TEXT = "She is a great reader"

# Two ways to add up float32 numbers of size 1 to 20 over 256 columns and six layers differ by some 1e-5.
TOLERANCE = 1e-4


def cells_tagged(tag):
    """The source of the page's code cells with this tag, in order."""
    cells = nbformat.read(NOTEBOOK, 4).cells
    return [cell.source for cell in cells if tag in cell.metadata.get("tags", [])]


@pytest.fixture(scope="module")
def model():
    return kv.load_model("austen-gpt2")


@pytest.fixture(scope="module")
def page(model):
    """The names that the page's definitions make, run in order with what they read."""
    names = {"np": np, "math": math, "pairwise": pairwise, "kv": kv, "model": model, "p": model.params}
    names["tokenizer"] = kv.load_tokenizer("austen-gpt2")
    names["ids"] = names["tokenizer"].encode(TEXT)
    for source in cells_tagged("plain-bpe") + cells_tagged("plain-gpt2"):
        exec(source, names)
    return names


def random_rows(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * 3


@pytest.mark.parametrize("T", [1, 2, 6, 131])
def test_forward_equals_the_model(page, model, T):
    ids = np.random.default_rng(T).integers(0, model.config.vocab_size, T)
    got = page["forward"](ids, model.params)
    assert got.dtype == np.float32
    assert np.abs(got - model(ids)).max() < TOLERANCE


def test_layer_norm_and_gelu_equal_the_package(page):
    x, weight, bias = random_rows((5, 256)), random_rows(256, 1), random_rows(256, 2)
    assert np.allclose(page["layer_norm"](x, weight, bias), ops.layer_norm(x, weight, bias), atol=TOLERANCE)
    assert np.allclose(page["gelu"](x), ops.gelu(x), atol=1e-6)


def test_split_heads_equals_the_package(page, model):
    qkv = random_rows((7, 768))
    q, k, v = model._split_heads(qkv)
    for ours, theirs in zip(np.split(qkv, 3, axis=1), (q, k, v), strict=True):
        assert np.array_equal(page["split_heads"](ours), theirs)


@pytest.mark.parametrize("i", [0, 5])
def test_attention_of_a_layer_equals_the_package(page, model, i):
    h, p = random_rows((9, 256), i) / 3, model.params
    q, k, v = model._split_heads(h @ p[f"h.{i}.attn.c_attn.weight"] + p[f"h.{i}.attn.c_attn.bias"])
    merged = ops.attention(q, k, v, start=0).swapaxes(0, 1).reshape(9, 256)
    expected = merged @ p[f"h.{i}.attn.c_proj.weight"] + p[f"h.{i}.attn.c_proj.bias"]
    added, weights = page["attention"](h, p, i)
    assert np.abs(added - expected).max() < TOLERANCE
    assert weights.shape == (4, 9, 9) and np.allclose(weights.sum(axis=-1), 1, atol=1e-5)
    assert (weights[:, ~ops.causal_mask(0, 9)] == 0).all()


def first_head(page, dtype):
    """Scores and weights of head 0 in layer 0 on the page's six tokens, computed in `dtype`."""
    p = {name: array.astype(dtype) for name, array in page["p"].items()}
    h = page["layer_norm"](page["embed"](page["ids"], p), p["h.0.ln_1.weight"], p["h.0.ln_1.bias"])
    qkv = h @ p["h.0.attn.c_attn.weight"] + p["h.0.attn.c_attn.bias"]
    scores = qkv[:, :64] @ qkv[:, 256:320].T / math.sqrt(64)
    return scores, page["attention"](h, p, 0)[1][0]


def test_printed_scores_and_weights_are_no_rounding_ties(page):
    """Two decimals are printed: no number lies nearer to a tie than 4 × the float32 rounding of its array."""
    exact = first_head(page, np.float64)
    for in_32, in_64 in zip(first_head(page, np.float32), exact, strict=True):
        to_a_tie = np.abs((in_64 * 100) % 1 - 0.5) / 100
        assert to_a_tie.min() > 4 * np.abs(in_32 - in_64).max()


SWAPPED = ("The lady saw the gentleman there", "The gentleman saw the lady there")


@pytest.mark.parametrize("positions", [False, True])
def test_without_wpe_the_last_row_of_the_first_layer_does_not_know_the_order(page, positions):
    """The page's pair: the same tokens in two orders, the same last token."""
    one, other = (page["tokenizer"].encode(text) for text in SWAPPED)
    assert one != other and sorted(one) == sorted(other) and one[-1] == other[-1]
    prose = " ".join(cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "markdown")
    assert all(text in " ".join(prose.split()) for text in SWAPPED)
    p = dict(page["p"])
    if not positions:
        p["wpe.weight"] = np.zeros_like(p["wpe.weight"])
    rows = [page["layer"](page["embed"](ids, p), p, 0)[0][-1] for ids in (one, other)]
    difference = np.abs(rows[0] - rows[1]).max()
    assert (difference > 100 * TOLERANCE) if positions else (difference < TOLERANCE)


def test_the_greedy_loop_equals_generate(page, model):
    expected = kv.generate(model, page["ids"], max_new_tokens=12)
    assert page["write"](page["ids"], model.params, 12) == page["ids"] + expected


@pytest.fixture(scope="module")
def ranks():
    return kv.tokenizer.read_ranks(kv.weights.tokenizer_folder("austen-gpt2") / "vocabulary.tiktoken")


WORDS = [" reader", " gentleman", "happiness", " acknowledged", " naïve", "…", "a", " Elizabeth"]


@given(st.one_of(st.sampled_from(WORDS), st.from_regex(r"\A ?[a-zA-Zäïé]{1,12}\Z")))
def test_merging_by_rank_equals_the_tokenizer(page, ranks, piece):
    parts, before = [bytes([byte]) for byte in piece.encode()], None
    while parts != before:
        before, parts = parts, page["merge_once"](parts, ranks)
    assert [ranks[part] for part in parts] == page["tokenizer"].encode(piece)
