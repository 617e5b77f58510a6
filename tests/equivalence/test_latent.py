"""Latent attention three ways: expanded, absorbed through a LatentCache, and transformers' own layer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

import kvcourse as kv
from kvcourse.config import Latent
from kvcourse.models.latent import LatentAttention, param_shapes

# heads, rank, rope, nope, value width, query rank: widths differ, so that a mix-up cannot fit by chance.
SHAPES = [(4, 16, 8, 12, 10, None), (6, 32, 4, 16, 20, 24), (2, 8, 6, 4, 5, 10)]
T, WIDTH = 50, 40


def make_config(heads, rank, rope, nope, value, q_rank):
    return kv.ModelConfig(
        "tiny-mla", "deepseek", 1, heads, heads, nope + rope, WIDTH, 64, 100, 64,
        norm_eps=1e-6, tied_embeddings=False, rope_theta=1e4, latent=Latent(rank, rope, nope, value, q_rank),
    )  # fmt: skip


def make_layer(shape, dtype=np.float32):
    config, random = make_config(*shape), np.random.default_rng(1)
    params = {
        name: random.uniform(0.5, 1.5, s) if len(s) == 1 else random.standard_normal(s) / np.sqrt(s[1])
        for name, s in param_shapes(config).items()
    }
    return LatentAttention(config, {name: array.astype(dtype) for name, array in params.items()})


def text(dtype=np.float32):
    return np.random.default_rng(2).standard_normal((T, WIDTH)).astype(dtype)


def absorbed(layer, x, cache, chunks):
    out, start = [], cache.seq_len
    for n in chunks:
        cache.begin(n)
        out.append(layer.absorbed(x[start : start + n], cache))
        cache.commit()
        start += n
    return np.concatenate(out)


@pytest.mark.parametrize("shape", SHAPES)
def test_expanded_is_transformers_layer(shape):
    """Outputs are about 1; two orders of float32 sums over at most 40 numbers differ by about 1e-6."""
    layer, x = make_layer(shape), text()
    heads, rank, rope, nope, value, q_rank = shape
    config = DeepseekV3Config(
        hidden_size=WIDTH, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=q_rank,
        kv_lora_rank=rank, qk_rope_head_dim=rope, qk_nope_head_dim=nope, v_head_dim=value,
        rope_interleave=False, max_position_embeddings=64, rms_norm_eps=1e-6,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"}, attn_implementation="eager",
    )  # fmt: skip
    peer = DeepseekV3Attention(config, 0).eval()
    peer.load_state_dict({f"{k}.weight": torch.from_numpy(v) for k, v in layer.params.items()}, strict=True)
    given_ = torch.from_numpy(x)[None]
    turned = DeepseekV3RotaryEmbedding(config)(given_, torch.arange(T)[None])
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = peer(given_, position_embeddings=turned, attention_mask=mask)[0][0].numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(layer.expanded(x, np.arange(T)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_absorbed_is_expanded_in_float64(shape):
    """What is left in float64 is rounding alone: the two forms are the same function."""

    class Cache64(kv.LatentCache):
        dtype = np.dtype(np.float64)

    layer, x = make_layer(shape, np.float64), text(np.float64)
    got = absorbed(layer, x, Cache64(layer.config), [3, 2, 5, 1, 38, 1])
    np.testing.assert_allclose(got, layer.expanded(x, np.arange(T)), rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans()), min_size=1, max_size=8),
)
def test_absorbed_in_any_chunks_with_partial_commits_and_rewinds(shape, steps):
    layer, x = LAYERS[shape]
    cache, expected = kv.LatentCache(layer.config), layer.expanded(x, np.arange(T))
    for n, number, back in steps:
        start = cache.seq_len
        n = min(n, T - start)
        if n:
            cache.begin(n)
            got = layer.absorbed(x[start : start + n], cache)
            cache.commit(min(number, n))
            np.testing.assert_allclose(got, expected[start : start + n], rtol=0, atol=1e-5)
            assert cache.seq_len == start + min(number, n)
        if back:
            cache.truncate(max(cache.seq_len - number, 0))


LAYERS = {shape: (make_layer(shape), text()) for shape in SHAPES}


@pytest.mark.parametrize("shape", SHAPES)
def test_only_latents_and_the_shared_key_are_kept(shape):
    layer, x = LAYERS[shape]
    heads, rank, rope, nope, value, _ = shape
    cache = kv.LatentCache.for_model(layer)
    absorbed(layer, x, cache, [T])
    assert cache.nbytes_used == T * (rank + rope) * 4 == T * kv.sizing.kv_bytes_per_token(layer.config, 4)
    assert cache.nbytes_used < T * heads * (nope + rope + value) * 4  # what the expanded form would keep
    keys, values = cache.keys_values(0)
    latent, key = layer.compressed(x)
    assert keys.shape == (1, T, rank + rope) and np.shares_memory(keys, values)
    np.testing.assert_allclose(values[0], latent, rtol=0, atol=1e-6)
    np.testing.assert_allclose(keys[0, :, rank:], layer.rotate(key[None], np.arange(T))[0], rtol=0, atol=1e-6)
    # Normed: without the layer's weight every latent has a root mean square of 1.
    plain = values[0] / layer.params["kv_a_layernorm"]
    np.testing.assert_allclose(np.sqrt((plain**2).mean(axis=1)), 1, atol=1e-4)


@pytest.mark.parametrize("shape", [(WIDTH,), (2, WIDTH), (3, WIDTH - 1)])
@pytest.mark.parametrize("kind", [np.zeros, lambda shape: np.zeros(shape).tolist()], ids=["array", "list"])
def test_tokens_that_do_not_fit_the_open_pass_are_refused(kind, shape):
    layer = LAYERS[SHAPES[0]][0]
    cache = kv.LatentCache(layer.config)
    cache.begin(3)
    with pytest.raises(ValueError, match=r"x has shape \(.*: give the tokens of .* \(3, 40\)") as caught:
        layer.absorbed(kind(shape), cache)
    assert "\n" not in str(caught.value)


def test_params_that_do_not_fit_are_refused():
    layer = make_layer(SHAPES[0])
    some = {name: array for name, array in layer.params.items() if name != "o_proj"}
    for params, words in (
        (some, r"tiny-mla: the weights lack o_proj, of shape \(40, 40\)"),
        (some | {"o_proj": np.zeros((3, 3))}, r"o_proj has shape \(3, 3\), the config says \(40, 40\)"),
    ):
        with pytest.raises(ValueError, match=words):
            LatentAttention(layer.config, params)
    with pytest.raises(ValueError, match="smollm2-135m has no latent attention"):
        LatentAttention(kv.catalogue()["smollm2-135m"], layer.params)
