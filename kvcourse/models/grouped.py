"""GPT-2 with grouped heads: its KV heads pooled to fewer, as Ainslie et al. convert a checkpoint.

Source: Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
Checkpoints", section 2.1 (mean pooling of the projections) and 2.2 (groups).
"""

from dataclasses import replace

import numpy as np

from kvcourse.models.gpt2 import GPT2

POOLINGS = ("mean", "first")


def pool_kv_heads(params, config, num_kv_heads, how="mean"):
    """The same weights with the keys and values of each group of heads made into one head, as a new dict.

    params        of a GPT-2, c_attn.weight (d, 3d) and c_attn.bias (3d,); a NumPy array each
    num_kv_heads  a divisor of the number of heads
    how           "mean" of the group's projections, or its "first" head

    c_attn.weight becomes (d, d + 2 · num_kv_heads · head_dim), its bias accordingly; all other arrays are
    shared with `params`. Raises ValueError for heads that do not divide, or an unknown `how`.
    """
    heads, head_dim = config.num_heads, config.head_dim
    if config.architecture != "gpt2" or config.num_kv_heads != heads:
        raise ValueError(
            f"{config.name} is no GPT-2 with a KV head for each query head: only those are pooled"
        )
    if how not in POOLINGS:
        raise ValueError(f"pooling {how!r} is not known: use one of {', '.join(POOLINGS)}")
    if not isinstance(num_kv_heads, int) or num_kv_heads < 1 or heads % num_kv_heads:
        raise ValueError(f"{heads} heads cannot be pooled evenly to {num_kv_heads!r}: choose a divisor")
    pooled = dict(params)
    for layer in range(config.num_layers):
        for part in ("weight", "bias"):
            name = f"h.{layer}.attn.c_attn.{part}"
            qkv = params[name].reshape(-1, 3, heads * head_dim)  # (d or 1, 3, d)
            kv = qkv[:, 1:].reshape(len(qkv), 2, num_kv_heads, -1, head_dim)  # (…, KV heads, group, head_dim)
            kv = kv.mean(axis=3) if how == "mean" else kv[:, :, :, 0]
            joined = np.concatenate([qkv[:, 0], kv.reshape(len(qkv), -1)], axis=1)
            pooled[name] = joined if part == "weight" else joined[0]
    return pooled


class GroupedGPT2(GPT2):
    """A GPT-2 whose query heads share KV heads; called as a GPT2 is, with and without a cache.

    model         a GPT2, whose weights are pooled
    num_kv_heads  a divisor of its heads
    how           "mean" or "first", as in `pool_kv_heads`
    """

    def __init__(self, model, num_kv_heads, how="mean"):
        self.params = pool_kv_heads(model.params, model.config, num_kv_heads, how)
        self.config = replace(model.config, num_kv_heads=num_kv_heads)

    def _split_heads(self, qkv):
        """(T, d + 2 · KV heads · head_dim) → q (heads, T, head_dim), k, v (KV heads, T, head_dim), views."""
        heads = qkv.reshape(len(qkv), -1, self.config.head_dim).swapaxes(0, 1)
        return np.split(heads, [self.config.num_heads, self.config.num_heads + self.config.num_kv_heads])
