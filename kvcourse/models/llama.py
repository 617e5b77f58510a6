"""Llama in NumPy, with a cache as an argument. SmolLM2 is one.

Source: Touvron et al. 2023, "LLaMA", section 2.2, and "Llama 2", section 2.2 (grouped-query
attention); parameter names and the layout of the rotation are Hugging Face's.
"""

from functools import cached_property

import numpy as np

from kvcourse import ops
from kvcourse.models.base import LanguageModel


class Llama(LanguageModel):
    """`model(ids)` → logits float32 (T, vocab_size); `model(ids, cache)` continues a sequence.

    config  ModelConfig with architecture "llama"
    params  {"model.embed_tokens.weight": (vocab, d), "model.layers.0.self_attn.q_proj.weight":
            (heads · head_dim, d), …}, float32, weights stored (out, in) as Hugging Face does

    The weights that share an input are joined once, q, k and v, and gate and up, and turned to
    (in, out) as GPT-2's are: with several tokens in a pass the products are up to a third faster.
    """

    def __init__(self, config, params):
        check_params(config, params)
        self.config = config
        self.rotate = ops.Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        self._layers = [_joined(params, i) for i in range(config.num_layers)]
        self._embedding = params["model.embed_tokens.weight"]  # (vocab, d)
        self._norm = params["model.norm.weight"]
        self._head = params.get("lm_head.weight", self._embedding)  # tied: one matrix for both

    def _forward(self, ids, positions, attend, rows):
        eps, T = self.config.norm_eps, len(ids)
        x = self._embedding[ids]  # (T, d)
        for number, layer in enumerate(self._layers):
            h = ops.rms_norm(x, layer["norm_1"], eps)
            q, k, v = self._split_heads(h @ layer["qkv"])
            out = attend(number, q, k, v, self.rotate)  # (heads, T, head_dim)
            x += out.swapaxes(0, 1).reshape(T, -1) @ layer["o"]  # (T, d)
            h = ops.rms_norm(x, layer["norm_2"], eps)
            x += ops.swiglu_inplace(h @ layer["gate_up"]) @ layer["down"]  # (T, d)
        if rows is not None:
            x = x[rows]
        return ops.rms_norm(x, self._norm, eps) @ self._head.T  # (T, vocab)

    def _split_heads(self, qkv):
        """(T, all widths) → q (heads, T, head_dim), k and v (KV heads, T, head_dim), views."""
        c = self.config
        heads = qkv.reshape(len(qkv), -1, c.head_dim).swapaxes(0, 1)
        return np.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads])

    @cached_property
    def params(self):
        """Hugging Face's names again, as views of the joined weights."""
        c = self.config
        params = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        cuts = np.cumsum([c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim])
        for i, layer in enumerate(self._layers):
            parts = dict(zip("qkv", np.split(layer["qkv"].T, cuts), strict=True))
            parts["gate"], parts["up"] = np.split(layer["gate_up"].T, 2)
            parts |= {"o": layer["o"].T, "down": layer["down"].T}
            parts |= {key: layer[key] for key in ("norm_1", "norm_2")}
            params |= {f"model.layers.{i}.{_NAMES[key]}.weight": parts[key] for key in _NAMES}
        return params if self._head is self._embedding else params | {"lm_head.weight": self._head}


_NAMES = {
    "norm_1": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "norm_2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def _joined(params, i):
    p = {short: params[f"model.layers.{i}.{name}.weight"] for short, name in _NAMES.items()}
    return {
        "norm_1": p["norm_1"],
        "qkv": _side_by_side(p["q"], p["k"], p["v"]),  # (d, (heads + 2 KV heads) · head_dim)
        "o": _side_by_side(p["o"]),  # (heads · head_dim, d)
        "norm_2": p["norm_2"],
        "gate_up": _side_by_side(p["gate"], p["up"]),  # (d, 2 · inner)
        "down": _side_by_side(p["down"]),  # (inner, d)
    }


def _side_by_side(*weights):
    """Weights (out, in) as one new array (in, sum of outs)."""
    return np.ascontiguousarray(np.concatenate(weights).T)


def check_params(config, params):
    """Raise ValueError or TypeError, in one line, unless params has Llama's names, shapes and float32."""
    for name, shape in param_shapes(config).items():
        if name not in params:
            raise ValueError(f"{config.name}: the weights lack {name}: is this a Llama model?")
        if params[name].shape != shape:
            raise ValueError(f"{config.name}: {name} has shape {params[name].shape}, the config says {shape}")
        if params[name].dtype != np.float32:
            raise TypeError(f"{config.name}: {name} is {params[name].dtype}: convert it to float32")


def param_shapes(config):
    """{parameter name: shape} of a Llama of this config, in the order of the forward pass.

    Raises ValueError for a config of another architecture, or one whose heads cannot be rotated.
    """
    if config.architecture != "llama":
        raise ValueError(
            f"{config.name} is a {config.architecture} shape: this course sizes it, "
            f"and computes gpt2 and llama only"
        )
    if config.head_dim % 2 or config.rope_theta is None:
        raise ValueError(
            f"{config.name}: head_dim {config.head_dim} and rope_theta {config.rope_theta}: a Llama turns "
            f"pairs of numbers, so head_dim must be even and rope_theta a number, usually 10,000"
        )
    d, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    parts = {
        "norm_1": (d,), "q": (queries, d), "k": (keys, d), "v": (keys, d), "o": (d, queries),
        "norm_2": (d,), "gate": (inner, d), "up": (inner, d), "down": (d, inner),
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{_NAMES[key]}.weight": shape for key, shape in parts.items()}
    shapes["model.norm.weight"] = (d,)
    return shapes if config.tied_embeddings else shapes | {"lm_head.weight": (config.vocab_size, d)}
