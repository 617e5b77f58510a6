"""`config.json` files of every family become the catalogue's shapes, or are refused in one line."""

import json

import pytest

from kvcourse import config as configs
from kvcourse.hub_config import from_huggingface, read_config

GPT2 = configs.lookup("gpt2")
HUGGINGFACE = dict(model_type="gpt2", n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=1024)


def test_huggingface_config_becomes_the_catalogue_shape():
    assert from_huggingface(HUGGINGFACE, "gpt2") == GPT2


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(model_type="bert"), "model_type 'bert' is not known here"),
        (dict(activation_function="relu"), "activation 'relu'"),
        (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        (dict(tie_word_embeddings=False), "tie_word_embeddings=False"),
        (dict(n_head=7), "n_embd 768 is not a multiple of n_head 7"),
    ],
)
def test_huggingface_settings_we_do_not_compute_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        from_huggingface(HUGGINGFACE | change, "somewhere")


@pytest.mark.parametrize("key", ["n_embd", "n_layer", "n_head", "n_inner", "vocab_size", "n_positions"])
@pytest.mark.parametrize("value", ["16", 0, -1, True, 1.5, []])
def test_a_huggingface_size_of_the_wrong_kind(key, value):
    with pytest.raises(ValueError, match="somewhere: ") as caught:
        from_huggingface(HUGGINGFACE | {key: value}, "somewhere")
    assert f"{key} is {value!r}: it must be a whole number" in str(caught.value)


@pytest.mark.parametrize(
    "described, words",
    [
        ([], "config.json holds \\[\\]"),
        (None, "config.json holds None"),
        (HUGGINGFACE | dict(n_embd=None), "n_embd is None"),
        (HUGGINGFACE | dict(layer_norm_epsilon="1e-5"), "somewhere: layer_norm_epsilon is '1e-5'"),
        (HUGGINGFACE | dict(layer_norm_epsilon=None), "somewhere: layer_norm_epsilon is None"),
    ],
)
def test_huggingface_configs_of_the_wrong_kind(described, words):
    with pytest.raises(ValueError, match=words):
        from_huggingface(described, "somewhere")


def test_no_inner_width_means_four_times_the_hidden_one():
    assert from_huggingface(HUGGINGFACE | dict(n_inner=None), "gpt2").intermediate_size == 4 * 768
    assert from_huggingface(HUGGINGFACE | dict(n_inner=100), "gpt2").intermediate_size == 100


def test_a_config_without_its_fields_names_them():
    with pytest.raises(ValueError, match="lacks n_embd, n_layer"):
        from_huggingface({"model_type": "gpt2", "n_head": 1, "vocab_size": 5}, "somewhere")


# Settings of the hub's files, shortened to what a shape needs.
LLAMA_31_8B = dict(
    model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False, attention_bias=False,
    mlp_bias=False,
    rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
)  # fmt: skip
QWEN25_3B = dict(
    model_type="qwen2", hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
    num_attention_heads=16, num_key_value_heads=2, vocab_size=151936, max_position_embeddings=32768,
    rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=True, use_sliding_window=False,
    sliding_window=32768, max_window_layers=36,
)  # fmt: skip
QWEN3_4B = dict(
    model_type="qwen3", hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
    max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000, tie_word_embeddings=True,
    attention_bias=False, use_sliding_window=False, sliding_window=None, max_window_layers=36,
)  # fmt: skip
MISTRAL_7B = dict(
    model_type="mistral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, max_position_embeddings=32768,
    rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False,
)  # fmt: skip
GEMMA_3_4B = dict(
    model_type="gemma3",
    text_config=dict(
        model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        rope_scaling=dict(factor=8.0, rope_type="linear"), sliding_window=1024,
    ),
    vision_config=dict(hidden_size=1152, num_hidden_layers=27),
)  # fmt: skip
DEEPSEEK_V2_LITE = dict(
    model_type="deepseek_v2", hidden_size=2048, intermediate_size=10944, num_hidden_layers=27,
    num_attention_heads=16, num_key_value_heads=16, vocab_size=102400, max_position_embeddings=163840,
    rms_norm_eps=1e-6, rope_theta=10000, tie_word_embeddings=False, kv_lora_rank=512, q_lora_rank=None,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=64, n_shared_experts=2,
    num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, moe_layer_freq=1,
)  # fmt: skip
FILES = {
    "llama-3.1-8b": LLAMA_31_8B,
    "qwen2.5-3b": QWEN25_3B,
    "qwen3-4b": QWEN3_4B,
    "mistral-7b-v0.1": MISTRAL_7B,
    "gemma-3-4b": GEMMA_3_4B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
}


@pytest.mark.parametrize("key", FILES)
def test_a_hub_file_of_each_family_becomes_the_catalogue_shape(key, tmp_path):
    folder = tmp_path / key
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FILES[key]), encoding="utf-8")
    assert read_config(folder) == read_config(folder / "config.json") == configs.lookup(key)


def test_the_first_file_of_llama_405b_is_read_as_it_was_written():
    """It said 16 KV heads, doubled for sharding: an error of that file, and twice the cache."""
    assert from_huggingface(LLAMA_31_8B | dict(num_key_value_heads=16), "x").num_kv_heads == 16


def test_what_a_file_leaves_out_or_sets_to_null():
    def read(described, **change):
        left = {key: value for key, value in (described | change).items() if value != "left out"}
        return from_huggingface(left, "x")

    assert read(LLAMA_31_8B, num_key_value_heads="left out").num_kv_heads == 32
    assert read(LLAMA_31_8B, num_key_value_heads=None).num_kv_heads == 32
    assert read(LLAMA_31_8B, head_dim=None).head_dim == 128
    assert read(QWEN3_4B, head_dim="left out").head_dim == 128  # not 2560 / 32
    assert read(MISTRAL_7B, sliding_window=None).layer_windows == (None,) * 32
    assert read(MISTRAL_7B, sliding_window="left out").sliding_window == 4096
    assert read(LLAMA_31_8B, rope_theta="left out", rope_parameters=dict(rope_theta=1e6)).rope_theta == 1e6


def test_a_qwen_window_counts_only_when_it_is_switched_on():
    windowed = from_huggingface(
        QWEN25_3B | dict(use_sliding_window=True, sliding_window=4096, max_window_layers=30), "x"
    )
    assert windowed.layer_windows == (None,) * 30 + (4096,) * 6
    assert from_huggingface(QWEN25_3B, "x").sliding_window is None


def test_gemma_layers_from_a_list_or_a_pattern():
    every_second = GEMMA_3_4B["text_config"] | dict(sliding_window_pattern=2)
    assert from_huggingface(every_second, "x").full_attention_layers == tuple(range(1, 34, 2))
    kinds = ["full_attention"] + ["sliding_attention"] * 33
    listed = GEMMA_3_4B["text_config"] | dict(layer_types=kinds)
    assert from_huggingface(listed, "x").full_attention_layers == (0,)
    with pytest.raises(ValueError, match="layer_types must list 34 of"):
        from_huggingface(GEMMA_3_4B["text_config"] | dict(layer_types=kinds[:5]), "x")


@pytest.mark.parametrize(
    "described, words",
    [
        (LLAMA_31_8B | dict(num_hidden_layers=-1), "num_hidden_layers is -1: it must be a whole number"),
        (LLAMA_31_8B | dict(num_key_value_heads=5), "32 is not a multiple of num_kv_heads 5"),
        (LLAMA_31_8B | dict(mlp_bias=True), "mlp_bias=True is not supported"),
        (LLAMA_31_8B | dict(hidden_size=4097), "4097 is not a multiple of num_attention_heads 32"),
        (LLAMA_31_8B | dict(tie_word_embeddings="no"), "tie_word_embeddings is 'no'"),
        (LLAMA_31_8B | dict(rope_theta="big"), "rope_theta is 'big'"),
        ({k: v for k, v in LLAMA_31_8B.items() if k != "vocab_size"}, "config.json lacks vocab_size"),
        (DEEPSEEK_V2_LITE | dict(kv_lora_rank=0), "kv_lora_rank is 0"),
        (DEEPSEEK_V2_LITE | dict(num_experts_per_tok=65), "experts_per_token 65 is above num_experts 64"),
        (GEMMA_3_4B | dict(text_config=[1]), "text_config is "),
        (MISTRAL_7B | dict(sliding_window=0), "sliding_window is 0"),
        ({}, "model_type None is not known here: its shape is read for gpt2, llama"),
    ],
)
def test_files_that_make_no_sense_are_refused_in_one_line(described, words):
    with pytest.raises(ValueError, match=words) as caught:
        from_huggingface(described, "somewhere")
    assert "\n" not in str(caught.value)


def test_a_missing_or_broken_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file config.json in "):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"{\xff")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "described, words",
    [
        ({"model_type": []}, "model_type \\[\\] is not known"),
        (LLAMA_31_8B | dict(num_hidden_layers=10**30), "num_hidden_layers is above 10,000"),
        (QWEN25_3B | dict(use_sliding_window=True, num_hidden_layers=10**30), "is above 10,000"),
        (DEEPSEEK_V2_LITE | dict(num_experts_per_tok=65), "somewhere: experts_per_token 65"),
        ({k: v for k, v in QWEN3_4B.items() if k != "num_key_value_heads"}, "lacks num_key_value_heads"),
        ({k: v for k, v in DEEPSEEK_V2_LITE.items() if k != "q_lora_rank"}, "lacks q_lora_rank"),
        ({k: v for k, v in DEEPSEEK_V2_LITE.items() if k != "first_k_dense_replace"}, "lacks first_k_dense"),
    ],
)
def test_files_that_would_be_guessed_at_or_never_end(described, words):
    with pytest.raises(ValueError, match=words):
        from_huggingface(described, "somewhere")
