"""What a pass through a model costs: FLOPs, bytes moved, and their ratio."""

from dataclasses import dataclass

from kvcourse.sizing.memory import kv_bytes, rounded_up_bytes_of
from kvcourse.sizing.units import at_least


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one pass, a multiply-add counted as two.

    `linear` grows with the number of new tokens alone (the weight products);
    `attention` also with the tokens before them (scores and weighted sums).
    """

    linear: int
    attention: int

    @property
    def total(self):
        """Both kinds together."""
        return self.linear + self.attention


@dataclass(frozen=True)
class Traffic:
    """Bytes that one pass moves between memory and processor: weights and cached rows are read once,
    new rows written once. Activations are left out: they are small, and stay close to the processor."""

    weights: int
    cache_read: int
    cache_written: int

    @property
    def total(self):
        """All bytes of the pass."""
        return self.weights + self.cache_read + self.cache_written


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of one pass, and the precision of its weights (it decides on the peak)."""

    flops: Flops
    traffic: Traffic
    weights_dtype: str

    @property
    def intensity(self):
        """FLOP per byte moved."""
        return self.flops.total / self.traffic.total


def forward_flops(config, new_tokens, past_tokens=0, logit_rows=1):
    """FLOPs of passing `new_tokens` through the model after `past_tokens` cached ones.

    Counts matrix products only, those of the experts that a token is sent to. Attention counts the
    query–key pairs that causal mask and window allow, so a pass over T tokens from the start has
    T(T + 1)/2 of them a head. Latent attention is counted with keys and values expanded.
    """
    (new_tokens,) = at_least(1, new_tokens=new_tokens)
    past_tokens, logit_rows = at_least(0, past_tokens=past_tokens, logit_rows=logit_rows)
    layers = range(config.num_layers)
    per_token = sum(config.attention_matrices + config.mlp_matrices(layer) for layer in layers)
    if config.experts:
        per_token += config.num_expert_layers * config.experts.experts_per_token * config.expert_matrices
    linear = 2 * (new_tokens * per_token + logit_rows * config.hidden_size * config.vocab_size)
    key, value = config.head_dim, config.latent.v_head_dim if config.latent else config.head_dim
    pairs = sum(_pairs(new_tokens, past_tokens, window) for window in config.layer_windows)
    return Flops(linear, 2 * pairs * config.num_heads * (key + value))


def _pairs(new, past, window):
    """Query–key pairs of one head: query i of the pass sees past + i + 1 keys, at most the window."""
    if window is None or past + new <= window:
        return new * past + new * (new + 1) // 2
    growing = max(window - past, 0)  # queries that still see everything before them
    return growing * past + growing * (growing + 1) // 2 + (new - growing) * window


def pass_bytes(
    config, new_tokens, past_tokens=0, batch=1, dtype="float16", weights_dtype="float16"
):  # fmt: skip
    """Bytes of one pass for `batch` sequences, each with `new_tokens` new ones after `past_tokens`.

    dtype, weights_dtype  formats of cache and weights, keys of `NUMBER_FORMATS`

    Weights are read once a pass, caches once a sequence. Of a mixture of experts, a pass reads those
    that at least one token is sent to; tokens are taken to choose evenly and independently. A layer
    with a sliding window is charged its whole window of cached rows, one more than a step reads.
    """
    new_tokens, batch = at_least(1, new_tokens=new_tokens, batch=batch)
    (past_tokens,) = at_least(0, past_tokens=past_tokens)
    return Traffic(
        weights=rounded_up_bytes_of(_parameters_read(config, batch * new_tokens), weights_dtype),
        cache_read=batch * kv_bytes(config, past_tokens, dtype),
        cache_written=batch * kv_bytes(config, new_tokens, dtype),
    )


def _parameters_read(config, tokens):
    read = config.step_parameters
    if config.experts:
        e = config.experts
        met = e.num_experts * (1 - (1 - e.experts_per_token / e.num_experts) ** tokens)
        read += round(config.num_expert_layers * config.expert_matrices * (met - e.experts_per_token))
    return read


def work(config, new_tokens, past_tokens=0, batch=1, dtype="float16", weights_dtype="float16"):
    """FLOPs and bytes of one pass for `batch` sequences: arguments as in `pass_bytes`.

    Logits are counted for the last token of each sequence, which is all that generation needs.
    """
    one = forward_flops(config, new_tokens, past_tokens, logit_rows=1)
    traffic = pass_bytes(config, new_tokens, past_tokens, batch, dtype, weights_dtype)
    return Work(Flops(batch * one.linear, batch * one.attention), traffic, weights_dtype)
