"""`ModelConfig`, the shape of a model, and the catalogue of published shapes."""

import json
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from kvcourse import paths

ARCHITECTURES = ("gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma3", "deepseek")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: what a layer keeps of a token is not keys and values but one
    vector of `kv_lora_rank` numbers for all heads, and a rotated key of `qk_rope_head_dim`.

    `qk_nope_head_dim` and `v_head_dim` are the widths of a head's key (without rotation) and value
    once they are expanded; `q_lora_rank` is None where queries are not compressed.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; field names as in its config.json.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self):
        optional = () if self.q_lora_rank is None else ("q_lora_rank",)
        _check_sizes(self, "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", *optional)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP, in all layers after the first `num_dense_layers`.

    Every token passes through `experts_per_token` of `num_experts` experts of `intermediate_size`,
    and through all `num_shared_experts`.
    """

    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    num_dense_layers: int = 0

    def __post_init__(self):
        _check_sizes(self, "num_experts", "experts_per_token", "intermediate_size")
        _check_sizes(self, "num_shared_experts", "num_dense_layers", least=0)
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is above num_experts {self.num_experts}"
            )


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotations for a longer context, as Llama 3.1 and later have them ("llama3").

    Frequencies whose wavelength is above original_max_seq_len / low_freq_factor are divided by
    `factor`, those below original_max_seq_len / high_freq_factor stay, and in between the two are mixed.
    Source: Llama 3.1's own code (meta-llama/llama-models, `apply_scaling`); field names of its config.json.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self):
        _check_sizes(self, "original_max_seq_len")
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} is {value!r}: it must be a number above 0")
        if not self.low_freq_factor < self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ValueError(f"low_freq_factor {low} is not below high_freq_factor {high}: are they swapped?")


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix a model's shape. Checked when made, never changed after.

    `head_dim` is stated, not derived: in some models (Qwen3) it is not
    hidden_size / num_heads. `max_seq_len` counts positions the model was trained
    for. `intermediate_size` is the width of the MLP's hidden layer.

    tied_embeddings        the logits use the input embedding; otherwise a matrix of their own
    qkv_bias, qk_norm      queries, keys and values have biases; a norm a head on queries and keys
    norms_per_layer        2, or 4 where the outputs of attention and MLP are normalized too
    sliding_window         a token sees this many tokens, itself included, except in the layers of
    full_attention_layers  which see everything; None: all layers do
    rope_theta             base of the rotary positions; None where positions are learned
    rope_scaling           how a Llama's rotations are slowed; None: they are not
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
    tied_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    latent: Latent | None = None
    experts: Experts | None = None

    def __post_init__(self):
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"architecture {self.architecture!r} is not supported: use one of {', '.join(ARCHITECTURES)}"
            )
        _check_sizes(
            self, "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size",
            "intermediate_size", "vocab_size", "max_seq_len", "norms_per_layer",
        )  # fmt: skip
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}: "
                f"every KV head must serve the same number of query heads"
            )
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps is {self.norm_eps!r}: it must lie between 0 and 1, usually 1e-5")
        self._check_windows()

    def _check_windows(self):
        # A list would make the config unhashable, and JSON has no tuples.
        object.__setattr__(self, "full_attention_layers", tuple(self.full_attention_layers))
        if self.sliding_window is not None:
            _check_sizes(self, "sliding_window")
            if self.latent:
                raise ValueError("sliding_window and latent are both given: no model here has both")
        elif self.full_attention_layers:
            raise ValueError("full_attention_layers without sliding_window: all layers see everything then")
        for layer in self.full_attention_layers:
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.num_layers:
                raise ValueError(
                    f"layer {layer!r} in full_attention_layers is outside 0 … {self.num_layers - 1}"
                )

    @property
    def cache_shape(self):
        """What two models must share for one's cache to fit the other: (layers, KV heads, head_dim).

        Raises ValueError for a model that caches a latent: it has no rows of this shape.
        """
        if self.latent:
            raise ValueError(
                f"{self.name} caches a latent, not keys and values per head: kv.sizing.kv_bytes sizes it"
            )
        return self.num_layers, self.num_kv_heads, self.head_dim

    @property
    def layer_windows(self):
        """How many tokens each layer sees, itself included: a tuple of int, or None for all of them."""
        full = set(self.full_attention_layers)
        return tuple(None if i in full else self.sliding_window for i in range(self.num_layers))

    @property
    def num_parameters(self):
        """Trained numbers, all experts included; language model only, where there is a vision part."""
        return self._embeddings + self._shared_by_all_tokens + self._routed(lambda e: e.num_experts)

    @property
    def active_parameters(self):
        """Trained numbers that one token passes through: of the experts, only those it is sent to."""
        return self._embeddings + self._shared_by_all_tokens + self._routed(lambda e: e.experts_per_token)

    @property
    def step_parameters(self):
        """Numbers that a decode step of one sequence reads: `active_parameters` without the tables
        of which it reads a row (learned positions, and an input embedding that the logits do not use)."""
        head = self.vocab_size * self.hidden_size
        return head + self._shared_by_all_tokens + self._routed(lambda e: e.experts_per_token)

    @property
    def attention_matrices(self):
        """Numbers in the weight matrices of one layer's attention, without biases and norms."""
        d, heads = self.hidden_size, self.num_heads
        if not self.latent:
            return 2 * d * self.head_dim * (heads + self.num_kv_heads)  # Q and output; K and V
        m = self.latent
        key = m.qk_nope_head_dim + m.qk_rope_head_dim
        queries = heads * key * d if m.q_lora_rank is None else m.q_lora_rank * (d + heads * key)
        compress = d * (m.kv_lora_rank + m.qk_rope_head_dim)
        expand = m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim)
        return queries + compress + expand + heads * m.v_head_dim * d

    def mlp_matrices(self, layer):
        """Numbers in the weight matrices after a layer's attention that every token passes through:
        the MLP, or the router and the shared experts. Experts chosen per token are counted apart."""
        if self.experts and layer >= self.experts.num_dense_layers:
            e = self.experts
            return self.hidden_size * e.num_experts + e.num_shared_experts * self.expert_matrices
        return self._mlp(self.intermediate_size)

    @property
    def expert_matrices(self):
        """Numbers in one expert's weight matrices; 0 in a model without experts."""
        return self._mlp(self.experts.intermediate_size) if self.experts else 0

    @property
    def num_expert_layers(self):
        """Layers with experts."""
        return max(self.num_layers - self.experts.num_dense_layers, 0) if self.experts else 0

    def _mlp(self, inner):
        # All but GPT-2 multiply two projections of the input, one of them through the activation.
        return (2 if self.architecture == "gpt2" else 3) * self.hidden_size * inner

    @property
    def _embeddings(self):
        d = self.hidden_size
        positions = self.max_seq_len * d if self.architecture == "gpt2" else 0
        return self.vocab_size * d * (1 if self.tied_embeddings else 2) + positions

    @property
    def _shared_by_all_tokens(self):
        layers = range(self.num_layers)
        matrices = sum(self.attention_matrices + self.mlp_matrices(layer) for layer in layers)
        return matrices + self.num_layers * self._layer_vectors + self._norm

    @property
    def _norm(self):
        return self.hidden_size * (2 if self.architecture == "gpt2" else 1)  # GPT-2: a shift beside the scale

    @property
    def _layer_vectors(self):
        """Norms and biases of one layer."""
        d, vectors = self.hidden_size, self.norms_per_layer * self._norm
        if self.architecture == "gpt2":
            vectors += 4 * d + self.intermediate_size + d  # biases of attention and MLP
        if self.qkv_bias:
            vectors += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        if self.qk_norm:
            vectors += 2 * self.head_dim
        if self.latent:
            vectors += self.latent.kv_lora_rank + (
                self.latent.q_lora_rank or 0
            )  # norms of what is compressed
        return vectors

    def _routed(self, experts_counted):
        if not self.experts:
            return 0
        return self.num_expert_layers * self.expert_matrices * experts_counted(self.experts)


def _check_sizes(owner, *fields, least=1):
    for field in fields:
        value = getattr(owner, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{field} is {value!r}: it must be a whole number of at least {least}")


def from_fields(name, fields):
    """A ModelConfig from plain fields, as `data/models.json` stores them: its parts as dicts."""
    parts = {"latent": Latent, "experts": Experts, "rope_scaling": RopeScaling}
    made = {key: kind(**fields[key]) for key, kind in parts.items() if fields.get(key) is not None}
    return ModelConfig(name=name, **(fields | made))


@cache
def catalogue():
    """Published shapes by key, from `data/models.json`: {"gpt2": ModelConfig, …}."""
    with open(paths.data_dir() / "models.json", encoding="utf-8") as file:
        entries = json.load(file)["models"]
    # Read-only: every caller gets the same dict.
    return MappingProxyType({key: from_fields(key, entry["config"]) for key, entry in entries.items()})


def lookup(key):
    """The catalogue's entry of this name. Raises KeyError that lists the names there are."""
    known = catalogue()
    if key not in known:
        raise KeyError(f"no model {key!r} in the catalogue: use one of {', '.join(known)}")
    return known[key]
