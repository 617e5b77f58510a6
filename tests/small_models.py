"""Small models with random weights, for tests that compare caches."""

from kvcourse import weights
from kvcourse.models import gpt2, llama


def make_model(config):
    """A GPT2 or Llama of this shape; its matrices are 15 times larger, so that logits are of order 10."""
    module, kind = (gpt2, gpt2.GPT2) if config.architecture == "gpt2" else (llama, llama.Llama)
    params = weights.random_params(module.param_shapes(config), 1)
    return kind(config, {name: array * 15 if array.ndim > 1 else array for name, array in params.items()})
