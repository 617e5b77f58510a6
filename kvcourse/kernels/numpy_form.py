"""The Triton kernel's loop in NumPy: the same programs, splits, steps and order of loads."""

import numpy as np

from kvcourse.kernels import inputs


def paged_attention_numpy(
    q, k_cache, v_cache, block_tables, context_lens, scale=None, num_splits=1, step=None, trace=None
):
    """Attention of one new token per sequence over its blocks, one program after the other.

    q             float (batch, num_heads, head_dim)
    k_cache, v_cache  float (num_blocks, block_size, num_kv_heads, head_dim)
    block_tables  integers (batch, max_blocks); context_lens integers (batch,); 0 tokens give zeros
    num_splits    programs that share a context
    step          tokens loaded at a time; default one block
    trace         a list to which each program appends (sequence, kv_head, split, [block ids as loaded])
    Returns (batch, num_heads, head_dim) in q's dtype; the arithmetic is float32.
    Raises ValueError for inputs that do not fit together.
    """
    block_tables, context_lens = np.asarray(block_tables), np.asarray(context_lens)
    inputs.check_arguments(q, k_cache, v_cache, block_tables, context_lens)
    inputs.check_tables(block_tables, context_lens, *k_cache.shape[:2])
    inputs.check_count("num_splits", num_splits)
    inputs.check_count("step", 1 if step is None else step)
    scale = np.float32(inputs.checked_scale(scale, q.shape[-1]))
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // num_kv_heads
    out = np.empty_like(q)
    for sequence, length in enumerate(context_lens.tolist()):
        for kv_head in range(num_kv_heads):
            rows = slice(kv_head * group, (kv_head + 1) * group)
            q_group = q[sequence, rows].astype(np.float32) * scale  # (group, head_dim)
            parts = []
            for split in range(num_splits):
                start, stop = split_range(length, block_size, num_splits, split)
                k, v, table = k_cache[:, :, kv_head], v_cache[:, :, kv_head], block_tables[sequence]
                loaded = []
                parts.append(attend_split(q_group, k, v, table, start, stop, step or block_size, loaded))
                if trace is not None:
                    trace.append((sequence, kv_head, split, loaded))
            out[sequence, rows] = merge(parts)
    return out


def split_range(length, block_size, num_splits, split):
    """(start, stop): the tokens of one split. Whole blocks, equally many for each split but the last ones."""
    num_blocks = -(-length // block_size)
    tokens_per_split = -(-num_blocks // num_splits) * block_size
    return min(split * tokens_per_split, length), min((split + 1) * tokens_per_split, length)


def attend_split(q, k_cache, v_cache, table, start, stop, step, loaded):
    """One program: online softmax over tokens start … stop-1 of one sequence and KV head.

    q float32 (group, head_dim), scaled; caches (num_blocks, block_size, head_dim); table (max_blocks,).
    The ids of the blocks it opens are appended to `loaded`.
    Returns (answer (group, head_dim), log-sum-exp of its scores (group,)); zeros and -inf without tokens.
    """
    block_size = k_cache.shape[1]
    highest = np.full(len(q), -np.inf, dtype=np.float32)  # largest score so far
    total = np.zeros(len(q), dtype=np.float32)  # sum of exp(score - highest)
    mixed = np.zeros(q.shape, dtype=np.float32)  # that sum weighted with the values
    for first in range(start, stop, step):
        tokens = np.arange(first, min(first + step, stop))  # the last block's unused slots are left out
        blocks, slots = table[tokens // block_size], tokens % block_size
        loaded.extend(blocks[slots == 0].tolist())
        k = k_cache[blocks, slots].astype(np.float32)  # (tokens, head_dim)
        v = v_cache[blocks, slots].astype(np.float32)
        scores = q @ k.T  # (group, tokens)
        new_highest = np.maximum(highest, scores.max(axis=1))
        shrink = np.exp(highest - new_highest)
        weights = np.exp(scores - new_highest[:, None])
        total = total * shrink + weights.sum(axis=1)
        mixed = mixed * shrink[:, None] + weights @ v
        highest = new_highest
    total_or_1 = np.where(total > 0, total, np.float32(1))
    return mixed / total_or_1[:, None], highest + np.log(total_or_1)


def merge(parts):
    """One answer (group, head_dim) from the splits' [(answer, log-sum-exp)]: weights exp(log-sum-exp)."""
    answers, lse = (np.stack(list(side)) for side in zip(*parts, strict=True))  # (splits, group, …)
    highest = lse.max(axis=0)
    weights = np.exp(lse - np.where(highest > -np.inf, highest, np.float32(0)))  # (splits, group)
    total = weights.sum(axis=0)
    return (weights[:, :, None] * answers).sum(axis=0) / np.where(total > 0, total, np.float32(1))[:, None]
