"""GPT-2 in NumPy, with a cache as an argument.

Source: Radford et al. 2019 and the released TensorFlow code (`openai/gpt-2`,
`src/model.py`); parameter names are Hugging Face's.
"""

from functools import cached_property

import numpy as np

from kvcourse import ops
from kvcourse.models.base import LanguageModel


class GPT2(LanguageModel):
    """`model(ids)` → logits float32 (T, vocab_size); `model(ids, cache)` continues a sequence.

    config  ModelConfig with architecture "gpt2"
    params  {"wte.weight": (vocab, d), "wpe.weight": (positions, d), "h.0.ln_1.weight": (d,),
            "h.0.attn.c_attn.weight": (d, 3d), …}, float32, weights stored (in, out)
    """

    def __init__(self, config, params):
        check_params(config, params)
        self.config = config
        self.params = params

    def _forward(self, ids, positions, attend, rows):
        p, eps = self.params, self.config.norm_eps
        x = p["wte.weight"][ids] + p["wpe.weight"][positions]  # (T, d)
        for number, layer in enumerate(self._layers):
            h = ops.layer_norm(x, *layer["ln_1"], eps)
            q, k, v = self._split_heads(_linear(h, *layer["attn.c_attn"]))
            out = attend(number, q, k, v)  # (heads, T, head_dim)
            merged = out.swapaxes(0, 1).reshape(len(ids), -1)  # (T, d)
            x += _linear(merged, *layer["attn.c_proj"])
            h = ops.layer_norm(x, *layer["ln_2"], eps)
            h = ops.gelu_inplace(_linear(h, *layer["mlp.c_fc"]))  # (T, 4d)
            x += _linear(h, *layer["mlp.c_proj"])
        if rows is not None:
            x = x[rows]
        x = ops.layer_norm(x, p["ln_f.weight"], p["ln_f.bias"], eps)
        return x @ p["wte.weight"].T  # (T, vocab)

    def _split_heads(self, qkv):
        """(T, 3d) → q, k, v, each a view (heads, T, head_dim)."""
        return qkv.reshape(len(qkv), 3, self.config.num_heads, self.config.head_dim).transpose(1, 2, 0, 3)

    @cached_property
    def _layers(self):
        """Each layer's (weight, bias) pairs by short name: looked up once, not at every step."""
        names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        return [
            {
                name: tuple(self.params[f"h.{i}.{name}.{part}"] for part in ("weight", "bias"))
                for name in names
            }
            for i in range(self.config.num_layers)
        ]


def _linear(x, weight, bias):
    out = x @ weight
    out += bias
    return out


def check_params(config, params):
    """Raise ValueError or TypeError, in one line, unless params has GPT-2's names, shapes and float32."""
    if config.num_kv_heads != config.num_heads or config.num_heads * config.head_dim != config.hidden_size:
        found = f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} KV heads"
        raise ValueError(
            f"{config.name}: found {found} and width {config.hidden_size}: a GPT-2 has one KV head "
            f"per query head and heads · head_dim = hidden_size"
        )
    for name, shape in param_shapes(config).items():
        if name not in params:
            raise ValueError(f"{config.name}: the weights lack {name}: is this a GPT-2 model?")
        if params[name].shape != shape:
            raise ValueError(f"{config.name}: {name} has shape {params[name].shape}, the config says {shape}")
        if params[name].dtype != np.float32:
            raise TypeError(f"{config.name}: {name} is {params[name].dtype}: convert it to float32")


def param_shapes(config):
    """{parameter name: shape} of a GPT-2 of this config, in the order of the forward pass.

    Raises ValueError for a config of another architecture.
    """
    if config.architecture != "gpt2":
        raise ValueError(
            f"{config.name} is a {config.architecture} shape: this course sizes it, "
            f"and computes gpt2 and llama only"
        )
    d, inner = config.hidden_size, config.intermediate_size
    shapes = {"wte.weight": (config.vocab_size, d), "wpe.weight": (config.max_seq_len, d)}
    parts = {
        "ln_1": (d,),
        "attn.c_attn": (d, 3 * d),
        "attn.c_proj": (d, d),
        "ln_2": (d,),
        "mlp.c_fc": (d, inner),
        "mlp.c_proj": (inner, d),
    }
    for i in range(config.num_layers):
        for name, shape in parts.items():
            shapes[f"h.{i}.{name}.weight"] = shape
            shapes[f"h.{i}.{name}.bias"] = shape[-1:]
    return shapes | {"ln_f.weight": (d,), "ln_f.bias": (d,)}
