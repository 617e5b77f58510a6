"""ModelConfig refuses impossible shapes in one line; the catalogue's shapes are right."""

from dataclasses import FrozenInstanceError, replace

import pytest

from kvcourse import config as configs

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
