"""The heart of the course: cached = uncached, for any model, any chunking, any history.

Tolerance: logits of these models lie between about −10 and 10. A chunk of another
size sums in another order, which moves a logit by some 1e-5; 2e-4 leaves room for
wider layers and is far below the change a wrong row makes (see the last test).
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import weights
from kvcourse.models import gpt2

TOLERANCE = 2e-4
KINDS = [kv.ContiguousCache, kv.GrowingCache, kv.ConcatenatingCache, kv.PagedCache]


@st.composite
def models(draw):
    heads, head_dim = draw(st.integers(1, 4)), draw(st.sampled_from([4, 8, 64]))
    width = heads * head_dim
    config = kv.ModelConfig(
        "random", "gpt2", draw(st.integers(1, 3)), heads, heads, head_dim, width,
        draw(st.sampled_from([width, 4 * width])), draw(st.integers(2, 60)), 48,
    )  # fmt: skip
    params = weights.random_params(gpt2.param_shapes(config), draw(st.integers(0, 99)))
    for array in params.values():
        array *= 5  # larger weights than a fresh model's, so that attention is far from uniform
    return gpt2.GPT2(config, params)


@st.composite
def histories(draw):
    """What a user may do to one sequence: chunks, rewinds, resets, aborted and failed passes."""
    step = st.one_of(
        st.tuples(st.just("chunk"), st.integers(1, 9)),
        st.tuples(st.just("truncate"), st.integers(0, 12)),
        st.tuples(st.sampled_from(["reset", "abort", "fail"]), st.just(3)),
    )
    return draw(st.lists(step, min_size=1, max_size=8))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(model=models(), history=histories(), seed=st.integers(0, 99))
def test_any_history(kind, model, history, seed):
    random = np.random.default_rng(seed)
    cache, ids = kind.for_model(model), []
    for action, n in history:
        new = random.integers(model.config.vocab_size, size=n).tolist()
        if action == "chunk" and len(ids) + n <= model.config.max_seq_len:
            ids += new
            logits = model(ids)[-n:]
            np.testing.assert_allclose(model(new, cache), logits, rtol=0, atol=TOLERANCE)
        elif action == "truncate":
            ids = ids[: max(len(ids) - n, 0)]
            cache.truncate(len(ids))
        elif action == "reset":
            ids = []
            cache.reset()
        elif action == "abort" and len(ids) + n <= model.config.max_seq_len:
            cache.begin(n)
            rows = [np.full((model.config.num_heads, n, model.config.head_dim), np.nan, np.float32)] * 3
            cache.attend(0, *rows)
            cache.abort()
        elif action == "fail":
            with pytest.raises(ValueError):
                model([model.config.vocab_size], cache)
        assert cache.seq_len == len(ids) and cache.pending == 0
    if 0 < len(ids) < model.config.max_seq_len:
        np.testing.assert_allclose(model([0], cache)[-1], model([*ids, 0])[-1], rtol=0, atol=TOLERANCE)


@settings(max_examples=40)
@given(model=models(), data=st.data())
def test_a_ragged_batch_equals_its_sequences(model, data):
    size = data.draw(st.integers(1, 4))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=size, max_size=size))
    caches, texts = [kind.for_model(model) for kind in kinds], [[] for _ in kinds]
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    for _ in range(3):
        lengths = data.draw(st.lists(st.integers(1, 5), min_size=size, max_size=size))
        new = [random.integers(model.config.vocab_size, size=n).tolist() for n in lengths]
        view = kv.BatchView(caches, lengths)
        logits = model(sum(new, []), view, rows=view.last_rows)
        for row, (text, tokens) in enumerate(zip(texts, new, strict=True)):
            text.extend(tokens)
            np.testing.assert_allclose(logits[row], model(text)[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_trained_model_in_odd_chunks_to_the_last_position(kind):
    """1,024 tokens in chunks of 3, 2, 5, 128, 1, …, each position compared once."""
    model = kv.load_model("austen-gpt2")
    text = (kv.paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    ids = kv.load_tokenizer("austen-gpt2").encode(text[:6000])[:1024]
    assert len(ids) == 1024
    whole, cache, done = model(ids), kind.for_model(model), 0
    for n in (3, 2, 5, 128, 1, 1, 300, 129, 455):
        part = model(ids[done : done + n], cache)
        np.testing.assert_allclose(part, whole[done : done + n], rtol=0, atol=TOLERANCE)
        done += n
    assert done == cache.seq_len == 1024


def test_the_tolerance_can_tell_a_wrong_row():
    """Swap one cached key row of one layer: logits move by at least 10 × the tolerance."""
    model = kv.load_model("austen-gpt2")
    ids = kv.load_tokenizer("austen-gpt2").encode("She had always wanted to do everything.")
    cache = kv.ContiguousCache.for_model(model)
    model(ids[:-1], cache)
    cache._k[3, :, [1, 4]] = cache._k[3, :, [4, 1]]
    assert np.abs(model(ids[-1:], cache)[-1] - model(ids)[-1]).max() > 10 * TOLERANCE
