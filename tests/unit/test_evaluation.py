"""Log-probabilities, perplexity and bits per character, by examples that can be computed by hand."""

import math

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import evaluation


def test_equal_logits_are_equal_probabilities():
    logs = evaluation.log_probabilities(np.full((2, 8), 3.0, np.float32))
    assert logs.dtype == np.float32
    np.testing.assert_allclose(logs, -math.log(8), rtol=1e-6)


def test_large_logits_do_not_overflow():
    logs = evaluation.log_probabilities(np.array([[1000.0, 0.0, -1000.0]], np.float32))
    assert logs.tolist() == [[0.0, -1000.0, -2000.0]]


def test_each_row_has_its_own_maximum():
    """One maximum for the whole array would make the lower row −inf − (−inf)."""
    logits = np.array([[1000.0, 1000.0], [-1000.0, -1000.0]], np.float32)
    np.testing.assert_allclose(evaluation.log_probabilities(logits), -math.log(2), rtol=1e-6)


def test_a_long_text_is_summed_in_float64():
    """float32 keeps 24 bits: 2²⁴ + 1 ones do not change a sum of 2²⁴ any more."""
    log_probs = np.concatenate([[-(2.0**24)], -np.ones(1000)]).astype(np.float32)
    bits = evaluation.bits_per_character(log_probs, 1)
    assert bits == pytest.approx((2**24 + 1000) / math.log(2), rel=1e-12)


def test_perplexity_beyond_float64_is_infinite():
    assert evaluation.perplexity([-1e5]) == math.inf


def test_row_t_predicts_token_t_plus_1():
    """Row 0 gives token 2 the probability 1/2, row 1 gives token 0 the probability 1/4; row 2 is not used."""
    logits = np.log(np.array([[1, 1, 2], [1, 1, 2], [9, 9, 9]], np.float32))
    logs = evaluation.next_token_log_probs(logits, [1, 2, 0])
    np.testing.assert_allclose(np.exp(logs), [1 / 2, 1 / 4], rtol=1e-6)
    assert evaluation.perplexity(logs) == pytest.approx(math.sqrt(2 * 4))
    assert evaluation.bits_per_character(logs, 6) == pytest.approx((1 + 2) / 6)


def test_the_model_cards_figure():
    """The held-out bits of the card are of the whole file; a part of it lies near them."""
    model, tokenizer = kv.load_model("austen-gpt2"), kv.load_tokenizer("austen-gpt2")
    text = (kv.paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")[:3000]
    ids = tokenizer.encode(text)
    logs = evaluation.next_token_log_probs(model(ids), ids)
    bits = evaluation.bits_per_character(logs, len(tokenizer.decode(ids[1:])))
    assert 1.2 < bits < 1.7


@pytest.mark.parametrize("chunk", [1, 3, 7, 19, 20, 64])
def test_in_passes_the_log_probabilities_are_those_of_one_pass(model, chunk):
    """20 tokens, 19 of them passed; another order of sums changes float32's last digits only: 2e-4."""
    ids = list(range(100, 120))
    cache = kv.ContiguousCache.for_model(model, 64)
    found = evaluation.log_probs(model, ids, cache, chunk)
    expected = evaluation.next_token_log_probs(model(ids), ids)
    assert found.dtype == np.float32 and cache.seq_len == 19
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_text_goes_on_in_another_call(model):
    ids = list(range(100, 120))
    cache = kv.ContiguousCache.for_model(model, 64)
    found = [evaluation.log_probs(model, ids[low:high], cache) for low, high in ((0, 9), (8, 20))]
    expected = evaluation.next_token_log_probs(model(ids), ids)
    np.testing.assert_allclose(np.concatenate(found), expected, atol=2e-4)  # as above


@pytest.mark.parametrize(("ids", "chunk", "message"), [([1], 4, "at least 2"), ([1, 2], 0, "chunk is 0")])
def test_log_probs_of_too_little(model, ids, chunk, message):
    with pytest.raises(ValueError, match=message):
        evaluation.log_probs(model, ids, kv.ContiguousCache.for_model(model), chunk)


@pytest.mark.parametrize("bad", [-1, 2048])
def test_an_id_outside_the_vocabulary_is_refused_before_any_pass(model, bad):
    """The last id is never passed: the model itself would not see it."""
    cache = kv.ContiguousCache.for_model(model, 64)
    with pytest.raises(ValueError, match=f"token id {bad:,} has no column"):
        evaluation.log_probs(model, [1, 2, bad], cache, 2)
    assert cache.seq_len == 0


def test_without_a_cache_each_chunk_would_be_a_text_of_its_own(model):
    with pytest.raises(TypeError, match="cache is None: give one"):
        evaluation.log_probs(model, [1, 2, 3], None)


def test_one_row_predicts_nothing():
    with pytest.raises(ValueError, match="at least 2 tokens"):
        evaluation.next_token_log_probs(np.zeros((1, 4), np.float32), [1])


@pytest.mark.parametrize("bad", [-1, 4])
def test_an_id_without_a_column(bad):
    with pytest.raises(ValueError, match=f"token id {bad} has no column among the 4"):
        evaluation.next_token_log_probs(np.zeros((2, 4), np.float32), [1, bad])


@pytest.mark.parametrize("ids", [[1], [1, 2], [[1, 2, 3]]])
def test_rows_and_tokens_must_agree(ids):
    with pytest.raises(ValueError, match="one row per token"):
        evaluation.next_token_log_probs(np.zeros((3, 4), np.float32), ids)


def test_impossible_input():
    with pytest.raises(ValueError, match="0 characters"):
        evaluation.bits_per_character(np.zeros(3), 0)
    assert evaluation.bits_per_character([-math.log(2)], 1) == pytest.approx(1)
    with pytest.raises(TypeError, match="give its length"):
        evaluation.bits_per_character(np.zeros(3), "abc")
    with pytest.raises(TypeError, match="whole numbers"):
        evaluation.next_token_log_probs(np.zeros((2, 4), np.float32), [1.0, 2.0])
    with pytest.raises(ValueError, match="at least 1 token"):
        evaluation.perplexity(np.zeros(0))
