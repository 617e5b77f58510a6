"""Hugging Face's `config.json` → `ModelConfig`: of any family whose cache this course sizes.

Field names and what holds where a file leaves one out are those of transformers 5
(`src/transformers/models/*/configuration_*.py`).
"""

import json
from pathlib import Path

from kvcourse.config import Experts, Latent, ModelConfig, RopeScaling


def read_config(path, name=None):
    """The ModelConfig of a `config.json`, or of a folder that holds one.

    name  what the model is called in tables and messages: by default the folder's name

    Raises FileNotFoundError, or ValueError in one line: not JSON, a model type that is not known
    here, a missing field, a value of the wrong kind, a setting that changes the shape.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    name = name or path.resolve().parent.name
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path.name} in {name}: give the path of a config.json or its folder"
        )
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # broken JSON, or bytes that are no UTF-8
        raise ValueError(f"{name}: {path.name} is not JSON ({error})") from None
    return from_huggingface(described, name)


def from_huggingface(described, name):
    """A ModelConfig from the dict of a `config.json`. Raises ValueError as `read_config` does."""
    if not isinstance(described, dict):
        raise ValueError(f"{name}: config.json holds {described!r:.40}: it must hold an object of settings")
    kind = described.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        known = ", ".join(_READERS)
        raise ValueError(f"{name}: model_type {kind!r} is not known here: its shape is read for {known}")
    try:
        return _READERS[kind](_Fields(described, name))
    except ValueError as error:  # what ModelConfig itself refuses does not name the file
        message = str(error)
        raise ValueError(message if message.startswith(f"{name}: ") else f"{name}: {message}") from None


class _Fields:
    """The settings of one file; `size` and the like complain in one line that names the model."""

    def __init__(self, described, name):
        self.described, self.name = described, name

    def get(self, key, default=None):
        """The value; the default where the file leaves it out or says null."""
        value = self.described.get(key)
        return default if value is None else value

    def size(self, key, default=None, least=1):
        value = self.get(key, default)
        if value is None:
            self.stated(key)
        if type(value) is not int or value < least:  # isinstance would let True pass
            raise ValueError(
                f"{self.name}: {key} is {value!r}: it must be a whole number of at least {least}"
            )
        most = 10_000 if key in ("num_hidden_layers", "n_layer") else 10**9  # layers are looped over
        if value > most:
            raise ValueError(f"{self.name}: {key} is above {most:,}: no model is that large")
        return value

    def stated(self, *keys):
        """Refuse a file that leaves these out: what holds then differs between models of one family."""
        for key in keys:
            if key not in self.described:
                raise ValueError(f"{self.name}: config.json lacks {key}: is it a whole config.json?")

    def eps(self, key, default):
        value = self.described.get(key, default)
        if type(value) is not float or not 0 < value < 1:
            raise ValueError(f"{self.name}: {key} is {value!r}: it must lie between 0 and 1, usually 1e-5")
        return value

    def flag(self, key, default=False):
        value = self.get(key, default)
        if type(value) is not bool:
            raise ValueError(f"{self.name}: {key} is {value!r}: it must be true or false")
        return value

    def only(self, **usual):
        """Refuse settings that change the shape in a way that is not counted here."""
        for key, expected in usual.items():
            value = self.get(key, expected)
            if value != expected:
                raise ValueError(f"{self.name}: {key}={value} is not supported: only {expected} is")


def _gpt2(fields):
    """GPT-2, with the settings that this course's own model computes."""
    fields.only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, tie_word_embeddings=True)
    activation = fields.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise ValueError(f"{fields.name}: activation {activation!r} is not supported: GPT-2 uses 'gelu_new'")
    needed = ("n_embd", "n_layer", "n_head", "vocab_size")
    missing = [key for key in needed if key not in fields.described]
    if missing:
        raise ValueError(
            f"{fields.name}: config.json lacks {', '.join(missing)}: is it a GPT-2 model folder?"
        )
    hidden, heads = fields.size("n_embd"), fields.size("n_head")
    if hidden % heads:
        raise ValueError(f"{fields.name}: n_embd {hidden} is not a multiple of n_head {heads}")
    return ModelConfig(
        name=fields.name,
        architecture="gpt2",
        num_layers=fields.size("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        hidden_size=hidden,
        intermediate_size=fields.size("n_inner", 4 * hidden),
        vocab_size=fields.size("vocab_size"),
        max_seq_len=fields.size("n_positions", 1024),
        norm_eps=fields.eps("layer_norm_epsilon", 1e-5),
    )


def _llama(fields):
    fields.only(attention_bias=False, mlp_bias=False)
    return ModelConfig(architecture="llama", rope_scaling=_rope_scaling(fields), **_shape(fields))


def _qwen2(fields):
    fields.stated("num_key_value_heads")
    return ModelConfig(
        architecture="qwen2", qkv_bias=True, **_shape(fields, eps=1e-6), **_qwen_window(fields)
    )


def _qwen3(fields):
    fields.stated("num_key_value_heads")
    fields.only(attention_bias=False)
    shape = _shape(fields, eps=1e-6, head_dim=128)
    return ModelConfig(architecture="qwen3", qk_norm=True, **shape, **_qwen_window(fields))


def _mistral(fields):
    # null means that all layers see everything (v0.2 and later); a file without the field means 4,096.
    window = fields.described.get("sliding_window", 4096)
    if window is not None:
        window = fields.size("sliding_window", 4096)
    return ModelConfig(architecture="mistral", sliding_window=window, **_shape(fields, eps=1e-6, kv_heads=8))


def _gemma3(fields):
    """The language model: files of 4B and more nest it in `text_config` and leave out what is usual."""
    text = _Fields(fields.get("text_config", fields.described), fields.name)
    if not isinstance(text.described, dict):
        raise ValueError(f"{fields.name}: text_config is {text.described!r:.40}: it must hold settings")
    text.only(attention_bias=False)
    usual = {
        "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "intermediate_size": 9216,
        "vocab_size": 262_208, "max_position_embeddings": 131_072,
    }  # fmt: skip
    text.described = usual | {key: value for key, value in text.described.items() if value is not None}
    shape = _shape(text, eps=1e-6, kv_heads=4, head_dim=256, tied=True, rope=1_000_000.0)
    every = text.size("sliding_window_pattern", 6, least=2)
    layers = range(shape["num_layers"])
    pattern = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in layers]
    return ModelConfig(
        architecture="gemma3", qk_norm=True, norms_per_layer=4,
        sliding_window=text.size("sliding_window", 4096),
        full_attention_layers=_full_layers(text, len(pattern), pattern), **shape,
    )  # fmt: skip


def _deepseek(fields):
    """V2 and V3: one latent a token and layer is cached, whatever `num_key_value_heads` says."""
    fields.only(attention_bias=False, moe_layer_freq=1)
    fields.stated("q_lora_rank", "n_routed_experts")  # null: queries are not compressed, no experts
    rank = None if fields.get("q_lora_rank") is None else fields.size("q_lora_rank")
    latent = Latent(
        **{key: fields.size(key) for key in
           ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")},
        q_lora_rank=rank,
    )  # fmt: skip
    experts = None
    if fields.get("n_routed_experts") is not None:
        experts = Experts(
            num_experts=fields.size("n_routed_experts"),
            experts_per_token=fields.size("num_experts_per_tok"),
            num_shared_experts=fields.size("n_shared_experts", least=0),
            intermediate_size=fields.size("moe_intermediate_size"),
            num_dense_layers=fields.size("first_k_dense_replace", least=0),
        )
    # transformers writes the rotated part alone as head_dim, and num_key_value_heads caches nothing.
    key = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    shape = _shape(fields, eps=1e-6, head_dim=key) | {"head_dim": key}
    shape["num_kv_heads"] = shape["num_heads"]
    return ModelConfig(architecture="deepseek", latent=latent, experts=experts, **shape)


def _shape(fields, eps=1e-6, kv_heads=None, head_dim=None, tied=False, rope=10_000.0):
    """The fields that all but GPT-2 share. The keywords are what holds where a file leaves one out."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if fields.get("head_dim", head_dim) is None and hidden % heads:
        raise ValueError(
            f"{fields.name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            f"and head_dim is not given"
        )
    return {
        "name": fields.name,
        "num_layers": fields.size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.size("num_key_value_heads", kv_heads or heads),
        "head_dim": fields.size("head_dim", head_dim or hidden // heads),
        "hidden_size": hidden,
        "intermediate_size": fields.size("intermediate_size"),
        "vocab_size": fields.size("vocab_size"),
        "max_seq_len": fields.size("max_position_embeddings"),
        "norm_eps": fields.eps("rms_norm_eps", eps),
        "tied_embeddings": fields.flag("tie_word_embeddings", tied),
        "rope_theta": _rope_theta(fields, rope),
    }


def _rope_theta(fields, usual):
    """`rope_theta`, or where transformers 5 writes it: in `rope_parameters`, for Gemma by kind of layer."""
    nested = fields.get("rope_parameters", {})
    if isinstance(nested, dict):
        nested = nested.get("full_attention", nested)
    theta = fields.get("rope_theta", nested.get("rope_theta") if isinstance(nested, dict) else None)
    theta = usual if theta is None else theta
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        raise ValueError(f"{fields.name}: rope_theta is {theta!r}: it must be a number above 0")
    return float(theta)


def _rope_scaling(fields):
    """The RopeScaling of a Llama, or None: without one, and for a kind that is only sized here."""
    rope = fields.get("rope_scaling", fields.get("rope_parameters", {}))
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    lacking = [name for name in names if name not in rope]
    if lacking:
        raise ValueError(f"{fields.name}: the llama3 rotation lacks {', '.join(lacking)}")
    return RopeScaling(*(rope[name] for name in names))


def _qwen_window(fields):
    """Qwen files name a window that counts only with `use_sliding_window`, from `max_window_layers` on."""
    if not fields.flag("use_sliding_window", False):
        return {}
    layers, first = fields.size("num_hidden_layers"), fields.size("max_window_layers", 28, least=0)
    pattern = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    full = _full_layers(fields, layers, pattern)
    return {"sliding_window": fields.size("sliding_window", 4096), "full_attention_layers": full}


def _full_layers(fields, num_layers, pattern):
    """Layers that see everything: from `layer_types` where the file lists them, else from the pattern."""
    kinds = fields.get("layer_types", pattern)
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= known:
        raise ValueError(
            f"{fields.name}: layer_types must list {num_layers} of 'full_attention' and 'sliding_attention'"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")


_READERS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
