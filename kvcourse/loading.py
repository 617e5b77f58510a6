"""Names to things: `load_model`, `random_model`, `load_tokenizer`."""

from dataclasses import replace

from kvcourse import config as configs
from kvcourse import tokenizer, weights
from kvcourse.models.gpt2 import GPT2, param_shapes


def load_model(name):
    """A trained model by name ("austen-gpt2", "austen-gpt2-draft", "gpt2") or from a folder.

    A folder holds Hugging Face's GPT-2 layout: `config.json` and `model.safetensors`.
    A name wins over a folder of the same name: give Path("gpt2") or "./gpt2" for that.
    Weights are float32 in memory. Raises ValueError that lists the names for an
    unknown one, or names what this course does not compute, and DamagedFile when
    files are missing or their hashes differ.
    """
    return GPT2(*weights.load(name))


def random_model(name, seed=0, **changes):
    """A model of a catalogue shape with seeded random weights, for timing and tests.

    `changes` replace fields of the shape: random_model("gpt2", num_layers=2). It writes
    nonsense, but a step takes exactly as long as with the trained weights.
    """
    config = replace(configs.lookup(name), **changes)
    return GPT2(config, weights.random_params(param_shapes(config), seed))


def load_tokenizer(name):
    """The `tiktoken.Encoding` of a model: "austen-gpt2", "austen-gpt2-draft", "gpt2", or a folder."""
    return tokenizer.from_folder(weights.tokenizer_folder(name))
