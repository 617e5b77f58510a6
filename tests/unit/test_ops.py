"""Each operation against its written-out float64 form, and always float32 out."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourse import ops

# float32 carries 24 bits: 1.2e-7 relative for one rounding, a few of them in a row here.
CLOSE = dict(rtol=2e-6, atol=2e-6)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def test_layer_norm_is_the_formula():
    x, weight, bias = normal(5, 64) * 3 + 1, normal(64, seed=1), normal(64, seed=2)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    got = ops.layer_norm(x, weight, bias)
    np.testing.assert_allclose(got, expected * weight + bias, rtol=1e-5, atol=1e-5)
    assert got.dtype == np.float32


def test_layer_norm_leaves_its_input_alone():
    x = normal(2, 8)
    before = x.copy()
    ops.layer_norm(x, np.ones(8, np.float32), np.zeros(8, np.float32))
    assert np.array_equal(x, before)


def test_gelu_is_the_formula_and_the_fast_form_equals_it():
    x = np.linspace(-8, 8, 2001, dtype=np.float32)
    wide = x.astype(np.float64)
    expected = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    assert ops.gelu(x).dtype == np.float32
    np.testing.assert_allclose(ops.gelu(x), expected, **CLOSE)
    np.testing.assert_allclose(ops.gelu_inplace(x.copy()), expected, **CLOSE)


def test_gelu_inplace_really_is():
    x = normal(3, 4)
    assert ops.gelu_inplace(x) is x


def test_softmax_rows_sum_to_one_even_for_huge_scores():
    x = np.array([[1e4, 1e4 - 1, -np.inf], [-1e4, 0, 0]], np.float32)
    got = ops.softmax(x)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(got[0], [1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0], **CLOSE)


@pytest.mark.parametrize("start", range(13))
@pytest.mark.parametrize("T", range(1, 13))
def test_causal_mask_is_rows_of_the_full_triangle(start, T):
    full = np.tril(np.ones((start + T, start + T), bool))
    assert np.array_equal(ops.causal_mask(start, T), full[start:])


def plain_attention(q, k, v, start):
    """Equation 1 as it stands, one head at a time, in float64, with k and v repeated."""
    group = q.shape[0] // k.shape[0]
    out = np.empty(q.shape)
    for head in range(q.shape[0]):
        keys, values = k[head // group].astype(np.float64), v[head // group].astype(np.float64)
        scores = q[head].astype(np.float64) @ keys.T / math.sqrt(q.shape[2])
        scores[~np.tril(np.ones((start + q.shape[1],) * 2, bool))[start:]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[head] = weights / weights.sum(-1, keepdims=True) @ values
    return out


@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    start=st.integers(0, 300),
    T=st.integers(1, 300),
    head_dim=st.sampled_from([1, 8, 64]),
    seed=st.integers(0, 99),
)
def test_attention_equals_the_written_out_form(kv_heads, group, start, T, head_dim, seed):
    q = normal(kv_heads * group, T, head_dim, seed=seed)
    k, v = (normal(kv_heads, start + T, head_dim, seed=seed + s) for s in (100, 200))
    got = ops.attention(q, k, v, start)
    assert got.dtype == np.float32
    # Sums over up to 600 keys in float32 against float64.
    np.testing.assert_allclose(got, plain_attention(q, k, v, start), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "T", [1, ops.QUERY_CHUNK - 1, ops.QUERY_CHUNK, ops.QUERY_CHUNK + 1, 2 * ops.QUERY_CHUNK]
)
def test_attention_at_the_edges_of_a_chunk(T):
    q, k, v = normal(2, T, 16), normal(2, T + 5, 16, seed=1), normal(2, T + 5, 16, seed=2)
    np.testing.assert_allclose(ops.attention(q, k, v, 5), plain_attention(q, k, v, 5), rtol=1e-4, atol=1e-5)


def test_attention_never_looks_at_the_future():
    q, k, v = normal(2, 6, 8), normal(2, 6, 8, seed=1), normal(2, 6, 8, seed=2)
    before = ops.attention(q, k, v, 0)
    k[:, 4:], v[:, 4:] = 1e3, 1e3
    after = ops.attention(q, k, v, 0)
    assert np.array_equal(before[:, :4], after[:, :4])
    assert not np.allclose(before[:, 4:], after[:, 4:])


def every_upper_half():
    """All 65,536 upper halves, each followed by every kind of lower half: none, below, at and above a tie."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (upper | lower).view(np.float32)


def test_round_to_bfloat16_is_torchs_bit_for_bit():
    import torch

    x = every_upper_half()
    expected = torch.from_numpy(x.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    got = ops.round_to_bfloat16(x)
    assert got.dtype == np.float32 and got.shape == x.shape
    number = ~np.isnan(x)
    assert np.array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.array_equal(np.isnan(got), ~number)  # a NaN has many bit patterns: any of them will do
    assert not np.any(got.view(np.uint32) & 0xFFFF)


def test_round_to_bfloat16_takes_any_shape_and_changes_nothing():
    x = normal(4, 6)
    before = x.copy()
    assert np.array_equal(ops.round_to_bfloat16(x[:, ::2]), ops.round_to_bfloat16(x)[:, ::2])
    assert np.array_equal(x, before)
    assert ops.round_to_bfloat16(np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert ops.round_to_bfloat16(np.float32(1 + 2**-8)) == 1  # a tie: 1's last bit is 0
    assert ops.round_to_bfloat16(np.float32(1 + 3 * 2**-8)) == 1 + 2**-6  # a tie, the other way


def test_round_to_bfloat16_refuses_other_dtypes():
    with pytest.raises(TypeError, match="float64: give a float32 array"):
        ops.round_to_bfloat16(np.ones(3))
