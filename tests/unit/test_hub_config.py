"""`config.json` files of every family become the catalogue's shapes, or are refused in one line."""

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


