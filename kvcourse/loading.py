"""Names to things: `fetch_model`, `load_model`, `random_model`, `load_tokenizer`."""

from dataclasses import replace

import psutil

from kvcourse import config as configs
from kvcourse import tokenizer, weights
from kvcourse.models import gpt2, llama

_MODELS = {"gpt2": (gpt2.GPT2, gpt2.param_shapes), "llama": (llama.Llama, llama.param_shapes)}


def fetch_model(name):
    """Make sure that a model is on this machine: download it, with a progress bar, unless it is.

    Raises DownloadFailed, in one line with the ways out, without network and without the files.
    """
    weights.fetch(name)


def load_model(name):
    """A trained model by name ("austen-gpt2", "austen-gpt2-draft", "smollm2-135m", "gpt2") or from a folder.

    A folder holds Hugging Face's layout of a GPT-2 or a Llama: `config.json` and `model.safetensors`.
    A name wins over a folder of the same name: give Path("gpt2") or "./gpt2" for that.
    Weights are float32 in memory. Raises ValueError that lists the names for an
    unknown one, or names what this course does not compute, and DamagedFile when
    files are missing or their hashes differ.
    """
    config, params = weights.load(name)
    model, _ = _MODELS[config.architecture]
    return model(config, params)


def random_model(name, seed=0, **changes):
    """A model of a catalogue shape with seeded random weights, for timing and tests.

    `changes` replace fields of the shape: random_model("gpt2", num_layers=2). It writes
    nonsense, but a step takes exactly as long as with the trained weights. Raises ValueError for a
    shape that is only sized here, not computed, and for one that does not fit in this machine's memory.
    """
    config = replace(configs.lookup(name), **changes)
    model, param_shapes = _MODELS.get(config.architecture, _MODELS["gpt2"])  # which says what it computes
    shapes = param_shapes(config)
    _check_memory(config)
    return model(config, weights.random_params(shapes, seed))


def _check_memory(config):
    """ValueError where the weights need more than the free memory: asking for them would end the kernel."""
    # A Llama joins its matrices (see models/llama.py): for a moment they are there twice.
    needed = 4 * config.num_parameters * (2 if config.architecture == "llama" else 1)
    free = psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"{config.name} needs {needed / 1e9:.1f} GB while it is made, {free / 1e9:.1f} GB of memory are "
            f"free: take fewer layers, such as random_model({config.name!r}, num_layers=2)"
        )


def load_tokenizer(name):
    """The `tiktoken.Encoding` of a model: "austen-gpt2", "smollm2-135m", "gpt2", or a folder."""
    return tokenizer.from_folder(weights.tokenizer_folder(name))
