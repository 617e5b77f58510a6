"""ModelConfig refuses impossible shapes in one line; the catalogue's shapes are right."""

import json
import types
from dataclasses import FrozenInstanceError, replace

import pytest

import kvcourse as kv
from kvcourse import config as configs
from kvcourse import loading, ops, paths

GPT2 = configs.lookup("gpt2")


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(num_layers=0), "num_layers is 0"),
        (dict(head_dim=-1), "head_dim is -1"),
        (dict(vocab_size=3.5), "vocab_size is 3.5"),
        (dict(num_kv_heads=5), "num_heads 12 is not a multiple of num_kv_heads 5"),
        (dict(architecture="bert"), "'bert' is not supported"),
        (dict(norm_eps=0), "norm_eps is 0"),
    ],
)
def test_impossible_shapes_are_refused_in_one_line(change, words):
    with pytest.raises(ValueError, match=words) as caught:
        replace(GPT2, **change)
    assert "\n" not in str(caught.value)


def test_a_config_never_changes():
    with pytest.raises(FrozenInstanceError):
        GPT2.num_layers = 6


@pytest.mark.parametrize(
    "name, millions", [("gpt2", 124.4), ("gpt2-medium", 354.8), ("gpt2-large", 774.0), ("gpt2-xl", 1557.6)]
)
def test_catalogue_parameter_counts_are_the_published_ones(name, millions):
    assert round(configs.lookup(name).num_parameters / 1e6, 1) == millions


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(KeyError, match="use one of gpt2, "):
        configs.lookup("gpt3")


def test_the_catalogue_cannot_be_changed_by_a_reader():
    with pytest.raises(TypeError):
        configs.catalogue()["gpt2"] = None


def test_an_entry_records_the_parameters_that_its_shape_has():
    """Counted for each model from the modules of transformers 5.24 on the meta device."""
    with open(paths.data_dir() / "models.json", encoding="utf-8") as file:
        entries = json.load(file)["models"]
    for key, config in configs.catalogue().items():
        assert config.num_parameters == entries[key]["parameters"], key
        assert config.active_parameters == entries[key].get("active_parameters", config.num_parameters), key
        assert entries[key]["source"].startswith("https://")


@pytest.mark.parametrize(
    "name, billions",
    [("llama-3.1-8b", 8.03), ("llama-3.1-405b", 405.85), ("qwen2.5-3b", 3.09), ("deepseek-v3", 671.03)],
)
def test_published_parameter_counts(name, billions):
    assert round(configs.lookup(name).num_parameters / 1e9, 2) == billions


def test_what_a_step_reads():
    gpt2, llama, v3 = (configs.lookup(key) for key in ("gpt2", "llama-3.1-8b", "deepseek-v3"))
    assert gpt2.num_parameters - gpt2.step_parameters == 1024 * 768  # one row of the position table
    assert llama.num_parameters - llama.step_parameters == 128_256 * 4096  # one row of the input embedding
    assert configs.lookup("qwen3-4b").step_parameters == configs.lookup("qwen3-4b").num_parameters  # tied
    assert round(v3.step_parameters / 1e9, 1) == 36.6  # the card: 36.7B activated


def test_layer_windows():
    gemma = configs.lookup("gemma-3-4b").layer_windows
    assert gemma[:12] == (1024,) * 5 + (None,) + (1024,) * 5 + (None,)
    assert len(gemma) == 34 and gemma.count(None) == 5
    assert configs.lookup("mistral-7b-v0.1").layer_windows == (4096,) * 32
    assert configs.lookup("llama-2-7b").layer_windows == (None,) * 32


@pytest.mark.parametrize(
    "key, change, words",
    [
        ("mistral-7b-v0.1", dict(sliding_window=0), "sliding_window is 0"),
        ("mistral-7b-v0.1", dict(full_attention_layers=(32,)), "layer 32 in full_attention_layers"),
        ("llama-2-7b", dict(full_attention_layers=(1,)), "without sliding_window"),
        ("deepseek-v3", dict(sliding_window=8), "sliding_window and latent are both given"),
    ],
)
def test_impossible_windows_are_refused(key, change, words):
    with pytest.raises(ValueError, match=words):
        replace(configs.lookup(key), **change)


def test_a_latent_has_no_rows_per_head():
    with pytest.raises(ValueError, match="deepseek-v3 caches a latent"):
        configs.lookup("deepseek-v3").cache_shape  # noqa: B018 - looking it up is the point


def test_models_that_are_sized_but_not_computed():
    with pytest.raises(ValueError, match="qwen2.5-1.5b is a qwen2 shape"):
        kv.random_model("qwen2.5-1.5b")


def test_a_model_that_does_not_fit_in_memory_is_not_begun(monkeypatch):
    """8,030,261,248 parameters of 4 bytes, twice: the system would end the kernel before any message."""
    free = types.SimpleNamespace(available=16_000_000_000)
    monkeypatch.setattr(loading.psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(loading.weights, "random_params", lambda *args: pytest.fail("memory was asked for"))
    words = "llama-3.1-8b needs 64.2 GB while it is made, 16.0 GB of memory are free: take fewer layers"
    with pytest.raises(ValueError, match=words):
        kv.random_model("llama-3.1-8b")


@pytest.mark.parametrize(
    "numbers, words",
    [
        ((0, 1, 4, 8192), "factor is 0: it must be a number above 0"),
        ((8, "1", 4, 8192), "low_freq_factor is '1'"),
        ((8, 4, 1, 8192), "low_freq_factor 4 is not below high_freq_factor 1"),
        ((8, 1, 4, 0.5), "original_max_seq_len is 0.5"),
    ],
)
def test_impossible_rotations(numbers, words):
    with pytest.raises(ValueError, match=words):
        configs.RopeScaling(*numbers)


def test_llama_31_turns_fast_pairs_as_before_and_slow_ones_an_eighth_as_fast():
    """By hand: pair 0 turns 8,192 / 2π = 1,304 times within 8,192 tokens, far above 4: it stays. Pair 63
    turns 1,304 · 500,000^(−126/128) = 0.003 times, below 1: divided by 8. Pair 35 turns
    1,304 · 500,000^(−70/128) = 0.998 times, just below 1; pair 34 turns 1.225 times: mixed, with a weight
    of (1.225 − 1) / 3 = 0.075 for the old one: 0.075 + 0.925 / 8 = 0.19.
    """
    config = configs.lookup("llama-3.1-8b")
    scaled = ops.rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    ratios = scaled / ops.rotary_frequencies(config.head_dim, config.rope_theta)
    assert ratios[0] == 1 and ratios[35] == ratios[63] == 1 / 8
    assert ratios[34] == pytest.approx(0.19, abs=0.005)
