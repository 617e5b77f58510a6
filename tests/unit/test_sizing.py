"""Counts against a loop that really counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourse import config as configs
from kvcourse import sizing

GPT2 = configs.lookup("gpt2")


@given(prompt=st.integers(1, 60), new=st.integers(0, 60))
def test_positions_processed_is_what_the_two_loops_do(prompt, new):
    uncached = cached = 0
    for step in range(new):
        uncached += prompt + step
        cached += prompt if step == 0 else 1
    assert sizing.positions_processed(prompt, new, cached=False) == uncached
    assert sizing.positions_processed(prompt, new, cached=True) == cached


@pytest.mark.parametrize("prompt, new", [(0, 5), (5, -1)])
def test_negative_lengths_are_refused(prompt, new):
    with pytest.raises(ValueError, match="must be at least"):
        sizing.positions_processed(prompt, new, cached=True)


def test_flops_of_gpt2_by_hand():
    flops = sizing.forward_flops(GPT2, new_tokens=3, logit_rows=1)
    per_layer = 768 * 3 * 768 + 768 * 768 + 2 * 768 * 3072
    assert flops.linear == 2 * (12 * 3 * per_layer + 768 * 50257)
    pairs = 1 + 2 + 3  # query 0 sees one key, query 1 two, query 2 three
    assert flops.attention == 12 * 12 * pairs * (2 * 64 + 2 * 64)
    assert flops.total == flops.linear + flops.attention


@given(past=st.integers(0, 50), new=st.integers(1, 50))
def test_attention_flops_do_not_depend_on_how_a_text_is_cut(past, new):
    whole = sizing.forward_flops(GPT2, past + new).attention
    first = sizing.forward_flops(GPT2, past).attention if past else 0
    assert first + sizing.forward_flops(GPT2, new, past).attention == whole


def test_kv_bytes_per_token_of_gpt2():
    assert sizing.kv_bytes_per_token(GPT2, bytes_per_number=4) == 73_728


@pytest.mark.parametrize("bytes_per_number", [0, -1, float("inf"), float("nan"), None])
def test_impossible_precisions_are_refused(bytes_per_number):
    with pytest.raises(ValueError, match="bytes_per_number is"):
        sizing.kv_bytes_per_token(GPT2, bytes_per_number)


def test_numpy_counts_do_not_overflow():
    large = np.int32(2**30)
    assert sizing.positions_processed(large, large, cached=False) > 2**60
    with pytest.raises(TypeError):
        sizing.positions_processed(1.5, 1, cached=True)
