"""Shapes against transformers: a file it writes, the parameters and the cache of the model it builds from it.

Tiny models with every kind of layer; parameters are counted on the meta device, which holds no numbers.
"""

import pytest
import torch
import transformers

from kvcourse import config as configs
from kvcourse import sizing
from kvcourse.hub_config import from_huggingface

SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4)
EXPERTS = dict(
    moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1,
    topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
LATENT = dict(kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6)
TINY = {
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=32, n_head=4, n_layer=3, n_positions=50),
    "llama": transformers.LlamaConfig(**SHAPE, num_hidden_layers=3),
    "llama grouped, tied": transformers.LlamaConfig(
        **SHAPE, num_hidden_layers=3, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "llama with a head_dim of its own": transformers.LlamaConfig(
        **SHAPE, num_hidden_layers=2, num_key_value_heads=1, head_dim=12
    ),
    "qwen2": transformers.Qwen2Config(**SHAPE, num_hidden_layers=3, num_key_value_heads=2),
    "qwen2 windowed from layer 1": transformers.Qwen2Config(
        **SHAPE, num_hidden_layers=3, num_key_value_heads=2, use_sliding_window=True, sliding_window=8,
        max_window_layers=1,
    ),
    "qwen3": transformers.Qwen3Config(**SHAPE, num_hidden_layers=3, num_key_value_heads=2, head_dim=16),
    "mistral": transformers.MistralConfig(
        **SHAPE, num_hidden_layers=3, num_key_value_heads=2, sliding_window=8
    ),
    "mistral without window": transformers.MistralConfig(
        **SHAPE, num_hidden_layers=3, num_key_value_heads=2, sliding_window=None
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SHAPE, num_hidden_layers=7, num_key_value_heads=1, head_dim=16, sliding_window=8,
        sliding_window_pattern=3,
    ),
    "deepseek v2": transformers.DeepseekV2Config(
        **SHAPE, **LATENT, **EXPERTS, num_hidden_layers=3, num_key_value_heads=4, q_lora_rank=None
    ),
    "deepseek v3": transformers.DeepseekV3Config(
        **SHAPE, **LATENT, **EXPERTS, num_hidden_layers=3, num_key_value_heads=4, q_lora_rank=10
    ),
}  # fmt: skip
TOKENS = 40


@pytest.mark.parametrize("name", TINY)
def test_parameters_of_a_file_are_those_of_the_model(name):
    described = TINY[name].to_dict()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(TINY[name])
    assert from_huggingface(described, name).num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", TINY)
def test_cache_bytes_are_those_that_the_model_holds(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(TINY[name]).eval()
    with torch.no_grad():
        output = model(torch.arange(TOKENS)[None], use_cache=True)
    held = output.cache if "cache" in output else output.past_key_values  # renamed within transformers 5
    config = from_huggingface(TINY[name].to_dict(), name)
    # Between steps transformers keeps one row less than the window: the next token brings its own.
    one_row = sizing.kv_bytes(config, 1, "float32") // config.num_layers
    windowed = sum(window is not None for window in config.layer_windows)
    expected = sizing.kv_bytes(config, TOKENS, "float32") - windowed * one_row
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in held.layers) == expected


@pytest.mark.parametrize(
    "kind, key",
    [
        (transformers.GPT2Config(), "gpt2"),
        (transformers.LlamaConfig(max_position_embeddings=4096, rms_norm_eps=1e-5), "llama-2-7b"),
        (transformers.DeepseekV3Config(max_position_embeddings=163_840), "deepseek-v3"),
    ],
)
def test_what_transformers_takes_for_usual_is_the_catalogue_entry(kind, key):
    assert from_huggingface(kind.to_dict(), key) == configs.lookup(key)
