"""`ModelConfig`, the shape of a model, and the catalogue of published shapes."""

import json
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from kvcourse import paths

ARCHITECTURES = ("gpt2",)


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix a model's shape. Checked when made, never changed after.

    `head_dim` is stated, not derived: in some models (Qwen3) it is not
    hidden_size / num_heads. `max_seq_len` counts positions the model was trained
    for. `intermediate_size` is the width of the MLP's hidden layer.
    """

    name: str
    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-5

    def __post_init__(self):
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"architecture {self.architecture!r} is not supported: use one of {', '.join(ARCHITECTURES)}"
            )
        for field in _SIZES:
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}: it must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}: "
                f"every KV head must serve the same number of query heads"
            )
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps is {self.norm_eps!r}: it must lie between 0 and 1, usually 1e-5")

    @property
    def cache_shape(self):
        """What two models must share for one's cache to fit the other: (layers, KV heads, head_dim)."""
        return self.num_layers, self.num_kv_heads, self.head_dim

    @property
    def num_parameters(self):
        """Trained numbers of a GPT-2: tied embedding, positions, layers, the last norm."""
        d, inner = self.hidden_size, self.intermediate_size
        attention = 4 * d * d + 4 * d
        mlp = 2 * d * inner + inner + d
        layer = attention + mlp + 4 * d  # two norms, a scale and a shift each
        return (self.vocab_size + self.max_seq_len) * d + self.num_layers * layer + 2 * d


_SIZES = (
    "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size",
    "intermediate_size", "vocab_size", "max_seq_len",
)  # fmt: skip


def from_huggingface(described, name):
    """A ModelConfig from the dict of a Hugging Face `config.json`.

    Raises ValueError, in one line, for another model type, a missing field, a value of
    the wrong kind, or a setting that this course's GPT-2 does not compute (another
    activation, scaled attention by layer).
    """
    if not isinstance(described, dict):
        raise ValueError(f"{name}: config.json holds {described!r:.40}: it must hold an object of settings")
    kind = described.get("model_type")
    if kind != "gpt2":
        raise ValueError(f"{name}: model_type {kind!r} is not supported: this course loads 'gpt2' folders")
    activation = described.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise ValueError(f"{name}: activation {activation!r} is not supported: GPT-2 uses 'gelu_new'")
    for flag, usual in _GPT2_FLAGS.items():
        if described.get(flag, usual) != usual:
            raise ValueError(f"{name}: {flag}={described[flag]} is not supported: only {usual} is")
    missing = [key for key in ("n_embd", "n_layer", "n_head", "vocab_size") if key not in described]
    if missing:
        raise ValueError(f"{name}: config.json lacks {', '.join(missing)}: is it a GPT-2 model folder?")
    described = {"n_positions": 1024, "layer_norm_epsilon": 1e-5, **described}
    hidden, heads = _size(described, "n_embd", name), _size(described, "n_head", name)
    inner = 4 * hidden if described.get("n_inner") is None else _size(described, "n_inner", name)
    eps = described["layer_norm_epsilon"]
    if type(eps) is not float or not 0 < eps < 1:
        raise ValueError(f"{name}: layer_norm_epsilon is {eps!r}: it must lie between 0 and 1, usually 1e-5")
    if hidden % heads:
        raise ValueError(f"{name}: n_embd {hidden} is not a multiple of n_head {heads}")
    return ModelConfig(
        name=name,
        architecture="gpt2",
        num_layers=_size(described, "n_layer", name),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=_size(described, "vocab_size", name),
        max_seq_len=_size(described, "n_positions", name),
        norm_eps=eps,
    )


def _size(described, key, name):
    value = described[key]
    if type(value) is not int or value < 1:  # isinstance would let True pass
        raise ValueError(f"{name}: {key} is {value!r}: it must be a whole number of at least 1")
    return value


_GPT2_FLAGS = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


@cache
def catalogue():
    """Published shapes by key, from `data/models.json`: {"gpt2": ModelConfig, …}."""
    with open(paths.data_dir() / "models.json", encoding="utf-8") as file:
        entries = json.load(file)["models"]
    # Read-only: every caller gets the same dict.
    return MappingProxyType({key: ModelConfig(name=key, **entry["config"]) for key, entry in entries.items()})


def lookup(key):
    """The catalogue's entry of this name. Raises KeyError that lists the names there are."""
    known = catalogue()
    if key not in known:
        raise KeyError(f"no model {key!r} in the catalogue: use one of {', '.join(known)}")
    return known[key]
