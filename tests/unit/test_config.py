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


def test_a_config_without_its_fields_names_them():
    with pytest.raises(ValueError, match="lacks n_embd, n_layer"):
        configs.from_huggingface({"model_type": "gpt2", "n_head": 1, "vocab_size": 5}, "somewhere")
