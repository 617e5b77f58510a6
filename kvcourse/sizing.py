"""Pure arithmetic on shapes: positions, bytes, FLOPs. No arrays, no clock."""

import operator
from dataclasses import dataclass


def positions_processed(prompt, new, cached):
    """How many positions pass through the model to write `new` tokens after `prompt` tokens.

    Without a cache step i passes all prompt + i positions through; with one, the
    prompt goes once and then every written token but the last, which is never read.
    """
    (prompt,), (new,) = _at_least(1, prompt=prompt), _at_least(0, new=new)
    if new == 0:
        return 0
    if cached:
        return prompt + new - 1
    return new * prompt + new * (new - 1) // 2


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


def forward_flops(config, new_tokens, past_tokens=0, logit_rows=1):
    """FLOPs of passing `new_tokens` through the model behind `past_tokens` cached ones.

    Counts matrix products only. Attention counts the query–key pairs that the causal
    mask allows, so a pass over T tokens from the start has T(T + 1)/2 of them a head.
    """
    (new_tokens,) = _at_least(1, new_tokens=new_tokens)
    past_tokens, logit_rows = _at_least(0, past_tokens=past_tokens, logit_rows=logit_rows)
    d, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    per_token = d * (heads + 2 * kv) + heads * d + 2 * d * config.intermediate_size
    linear = 2 * (config.num_layers * new_tokens * per_token + logit_rows * d * config.vocab_size)
    pairs = new_tokens * past_tokens + new_tokens * (new_tokens + 1) // 2
    return Flops(linear, config.num_layers * 2 * 2 * pairs * heads)


def kv_bytes_per_token(config, bytes_per_number=2):
    """Bytes one token's keys and values take: 2 · layers · KV heads · head_dim · bytes per number."""
    if not isinstance(bytes_per_number, int | float) or not bytes_per_number > 0:
        raise ValueError(
            f"bytes_per_number is {bytes_per_number!r}: give a number above 0, such as 2 for float16"
        )
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_number


def _at_least(limit, **values):
    """The values as Python ints, which do not overflow; ValueError below the limit, TypeError for 1.5."""
    for name, value in values.items():
        if operator.index(value) < limit:
            raise ValueError(f"{name} is {value}: it must be at least {limit}")
    return [operator.index(value) for value in values.values()]
