"""Decode attention over block tables in PyTorch, the plain way: gather the rows, then attend.

The oracle of the Triton kernel, and its fallback on every device that torch knows.
"""

import torch

from kvcourse.kernels import inputs


def paged_attention_reference(q, k_cache, v_cache, block_tables, context_lens, scale=None):
    """Attention of one new token per sequence over its blocks, computed in float32.

    Arguments and result as `kernels.paged_attention_decode`; any head_dim, integer dtype and strides.
    It reads every length, so on a CUDA device it waits for the device, and checks every table entry.
    Raises ValueError for inputs that do not fit together.
    """
    inputs.check_arguments(q, k_cache, v_cache, block_tables, context_lens)
    inputs.check_tables(block_tables, context_lens, *k_cache.shape[:2])
    scale = inputs.checked_scale(scale, q.shape[-1])
    out = torch.zeros_like(q)  # a sequence without tokens keeps its zeros
    for sequence, length in enumerate(context_lens.tolist()):
        if length:
            k, v = (_gathered(cache, block_tables[sequence], length) for cache in (k_cache, v_cache))
            out[sequence] = _attend(q[sequence].float(), k, v, scale).to(q.dtype)
    return out


def _gathered(cache, table, length):
    """The first `length` rows that `table` lists, float32 (num_kv_heads, length, head_dim)."""
    blocks = table[: -(-length // cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)[:length].float().transpose(0, 1)


def _attend(q, k, v, scale):
    """(num_heads, head_dim) of one query over k and v (num_kv_heads, length, head_dim)."""
    grouped = q.unflatten(0, (k.shape[0], -1))  # (num_kv_heads, group, head_dim)
    weights = torch.softmax(grouped @ k.transpose(1, 2) * scale, dim=-1)  # (num_kv_heads, group, length)
    return (weights @ v).flatten(0, 1)
