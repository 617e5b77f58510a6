"""Decode attention over block tables, in Triton: two kernels and their launch.

Program (sequence, KV head, split) reads its part of the sequence's blocks once, for all query heads of
the KV head, with an online softmax in float32; a second kernel merges the splits of a query head.
The form is flash-decoding's (https://pytorch.org/blog/flash-decoding/) on vLLM's block tables.

Importing this module imports torch and Triton. `TRITON_INTERPRET` is read when a kernel is decorated, that
is during this import. Where there is no CUDA device it is set to 1, for the whole process, and the kernels
run in Triton's interpreter, on CPU tensors; set to 1 beforehand it does the same beside a GPU.
"""

import importlib
import os
import sys

import torch

from kvcourse.kernels.inputs import MAX_SPLITS

_imported_before = "triton" in sys.modules
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402 - after the setting, for Triton's own functions (tl.sum ...) are decorated, too
import triton.language as tl  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED and _imported_before and isinstance(tl.sum, triton.JITFunction):
    # Another library imported Triton first, to compile: its functions are decorated once more.
    importlib.reload(triton.language.standard)
    importlib.reload(triton.language)

MIN_DOT = 16  # tl.dot works on tiles of at least 16 × 16: fewer query heads or dimensions are padded
TILE_BYTES = 16_384  # of K, and as much of V, that a program loads at a time
PROGRAMS_PER_SM = 4  # wanted: some wait for memory while others compute


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, lse_ptr, trace_ptr,
    scale, max_blocks, num_heads, num_splits,
    q_batch, q_head, cache_block, cache_slot, cache_head,
    block_size: tl.constexpr, head_dim: tl.constexpr, group: tl.constexpr,
    DIMS: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """One (sequence, KV head, split): out (batch, num_heads, num_splits, head_dim), lse without the last."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    heads, dims = tl.arange(0, HEADS), tl.arange(0, DIMS)
    head_ok, dim_ok = heads < group, dims < head_dim
    rows = kv_head * group + heads  # the query heads of this KV head lie side by side
    q = tl.load(
        q_ptr + sequence.to(tl.int64) * q_batch + rows[:, None] * q_head + dims[None, :],
        mask=head_ok[:, None] & dim_ok[None, :],
        other=0.0,
    )  # (HEADS, DIMS)
    if EXACT:
        q = q.to(tl.float32)

    length = tl.load(length_ptr + sequence)
    num_blocks = (length + block_size - 1) // block_size
    tokens_per_split = (num_blocks + num_splits - 1) // num_splits * block_size
    start = split * tokens_per_split
    stop = tl.minimum(start + tokens_per_split, length)
    table = table_ptr + sequence.to(tl.int64) * max_blocks
    trace = trace_ptr + ((sequence * num_kv_heads + kv_head) * num_splits + split) * max_blocks
    num_loaded = 0

    highest = tl.full([HEADS], float("-inf"), tl.float32)  # the online softmax: largest score so far,
    total = tl.full([HEADS], 0.0, tl.float32)  # sum of exp(score - highest),
    mixed = tl.full([HEADS, DIMS], 0.0, tl.float32)  # and that sum weighted with the values
    for first in range(start, stop, TILE):
        tokens = first + tl.arange(0, TILE)
        here = tokens < stop  # the last block's unused slots are never read
        blocks = tl.load(table + tokens // block_size, mask=here, other=0)
        if TRACE:
            opens = here & (tokens % block_size == 0)
            place = num_loaded + tl.cumsum(opens.to(tl.int32), 0) - 1
            tl.store(trace + place, blocks, mask=opens)
            num_loaded += tl.sum(opens.to(tl.int32), 0)
        # int64: a pool holds more than 2^31 numbers.
        at = blocks.to(tl.int64) * cache_block + tokens % block_size * cache_slot + kv_head * cache_head
        ok = here[:, None] & dim_ok[None, :]
        k = tl.load(k_ptr + at[:, None] + dims[None, :], mask=ok, other=0.0)  # (TILE, DIMS)
        v = tl.load(v_ptr + at[:, None] + dims[None, :], mask=ok, other=0.0)
        if EXACT:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (HEADS, TILE)
        scores = tl.where(here[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp(highest - new_highest)
        weights = tl.exp(scores - new_highest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest

    total_or_1 = tl.where(total > 0.0, total, 1.0)  # a split without tokens: zeros, lse -inf
    to = (sequence.to(tl.int64) * num_heads + rows) * num_splits + split
    tl.store(
        out_ptr + to[:, None] * head_dim + dims[None, :],
        (mixed / total_or_1[:, None]).to(out_ptr.dtype.element_ty),
        mask=head_ok[:, None] & dim_ok[None, :],
    )
    if num_splits > 1:
        tl.store(lse_ptr + to, highest + tl.log(total_or_1), mask=head_ok)


@triton.jit
def _merge(
    part_ptr, lse_ptr, out_ptr, num_splits,
    head_dim: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One (sequence, query head): its splits' answers, each weighted with exp(its log-sum-exp)."""
    row = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    split_ok, dim_ok = splits < num_splits, dims < head_dim
    lse = tl.load(lse_ptr + row * num_splits + splits, mask=split_ok, other=float("-inf"))
    highest = tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(highest > float("-inf"), highest, 0.0))  # (SPLITS,)
    parts = tl.load(
        part_ptr + (row * num_splits + splits)[:, None] * head_dim + dims[None, :],
        mask=split_ok[:, None] & dim_ok[None, :],
        other=0.0,
    )  # (SPLITS, DIMS)
    total = tl.sum(weights, 0)
    mixed = tl.sum(weights[:, None] * parts, 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * head_dim + dims, mixed.to(out_ptr.dtype.element_ty), mask=dim_ok)


def launch(q, k_cache, v_cache, block_tables, context_lens, scale, num_splits, step, trace=None):
    """Run both kernels on checked tensors (`kernels.paged_attention_decode`); returns (batch, heads, dim).

    num_splits None: choose_num_splits; step None: step_tokens. `trace` int32 (batch, num_kv_heads,
    num_splits, max_blocks), filled with -1: each program stores there the block ids it loads, in order.
    """
    batch, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    max_blocks = block_tables.shape[1]
    step = step or step_tokens(head_dim, k_cache.element_size())
    if num_splits is None:
        num_splits = choose_num_splits(batch * num_kv_heads, max_blocks * block_size, step, num_sms(q.device))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not batch:
        return out
    part, lse = out, out  # one split writes the answer itself; lse is then unused
    if num_splits > 1:
        part = torch.empty(*q.shape[:2], num_splits, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(part.shape[:3], dtype=torch.float32, device=q.device)
    dims = max(MIN_DOT, triton.next_power_of_2(head_dim))
    _attend[batch, num_kv_heads, num_splits](
        q, k_cache, v_cache, block_tables, context_lens, part, lse, part if trace is None else trace,
        scale, max_blocks, num_heads, num_splits, *q.stride()[:2], *k_cache.stride()[:3],
        block_size=block_size, head_dim=head_dim, group=num_heads // num_kv_heads,
        DIMS=dims, HEADS=max(MIN_DOT, triton.next_power_of_2(num_heads // num_kv_heads)), TILE=step,
        # The interpreter multiplies bfloat16 bit patterns as if they were integers: float32 there.
        EXACT=INTERPRETED, TRACE=trace is not None,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if num_splits > 1:
        splits = triton.next_power_of_2(num_splits)
        _merge[batch, num_heads](part, lse, out, num_splits, head_dim=head_dim, DIMS=dims, SPLITS=splits)
    return out


def step_tokens(head_dim, bytes_per_number):
    """Tokens that a program loads at a time: 16 to 64, so that a tile of K has at most TILE_BYTES."""
    row = max(MIN_DOT, triton.next_power_of_2(head_dim)) * bytes_per_number
    return max(MIN_DOT, min(64, TILE_BYTES // row))


def choose_num_splits(num_programs, max_tokens, step, num_sms):
    """Splits of each context, so that `num_programs` × splits keep `num_sms` multiprocessors busy.

    At least 1, at most MAX_SPLITS, and never more than the longest context has steps. The longest
    is what the table has room for: the lengths themselves lie on the device, and asking would wait for it.
    """
    wanted = -(-PROGRAMS_PER_SM * num_sms // max(1, num_programs))
    return max(1, min(wanted, -(-max_tokens // step), MAX_SPLITS))


def num_sms(device):
    """Multiprocessors of a CUDA device; 1 for a CPU, where the interpreter runs program after program."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
