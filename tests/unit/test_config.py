"""ModelConfig refuses impossible shapes in one line; the catalogue's shapes are right."""

from dataclasses import FrozenInstanceError, replace

import pytest

from kvcourse import config as configs

GPT2 = configs.lookup("gpt2")
HUGGINGFACE = dict(model_type="gpt2", n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=1024)


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


def test_huggingface_config_becomes_the_catalogue_shape():
    assert configs.from_huggingface(HUGGINGFACE, "gpt2") == GPT2


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(model_type="llama"), "model_type 'llama' is not supported"),
        (dict(activation_function="relu"), "activation 'relu'"),
        (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        (dict(tie_word_embeddings=False), "tie_word_embeddings=False"),
        (dict(n_head=7), "n_embd 768 is not a multiple of n_head 7"),
    ],
)
def test_huggingface_settings_we_do_not_compute_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        configs.from_huggingface(HUGGINGFACE | change, "somewhere")


@pytest.mark.parametrize("key", ["n_embd", "n_layer", "n_head", "n_inner", "vocab_size", "n_positions"])
@pytest.mark.parametrize("value", ["16", 0, -1, True, 1.5, []])
def test_a_huggingface_size_of_the_wrong_kind(key, value):
    with pytest.raises(ValueError, match="somewhere: ") as caught:
        configs.from_huggingface(HUGGINGFACE | {key: value}, "somewhere")
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
        configs.from_huggingface(described, "somewhere")


def test_no_inner_width_means_four_times_the_hidden_one():
    assert configs.from_huggingface(HUGGINGFACE | dict(n_inner=None), "gpt2").intermediate_size == 4 * 768
    assert configs.from_huggingface(HUGGINGFACE | dict(n_inner=100), "gpt2").intermediate_size == 100


def test_a_config_without_its_fields_names_them():
    with pytest.raises(ValueError, match="lacks n_embd, n_layer"):
        configs.from_huggingface({"model_type": "gpt2", "n_head": 1, "vocab_size": 5}, "somewhere")


def test_the_catalogue_cannot_be_changed_by_a_reader():
    with pytest.raises(TypeError):
        configs.catalogue()["gpt2"] = None
