"""Decode attention that follows block tables: in Triton, and the same in PyTorch and in NumPy.

Triton is an optional extra and has no macOS or Windows build. Nothing here imports it, or torch, before a
function that needs it is called; `available()` asks. Without a CUDA device the kernels run in Triton's
interpreter, on CPU tensors: slow, and the same loads in the same order.
"""

from importlib.util import find_spec

from kvcourse.kernels import inputs
from kvcourse.kernels.numpy_form import paged_attention_numpy

__all__ = [
    "available",
    "paged_attention_decode",
    "paged_attention_numpy",
    "paged_attention_reference",
    "trace",
]

TRACED = 2**20  # blocks that a traced table can name: `trace` makes an empty cache for them


def available():
    """Whether Triton and PyTorch are installed, so that `paged_attention_decode` can run here."""
    return find_spec("triton") is not None and find_spec("torch") is not None


def paged_attention_decode(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    scale=None,
    num_splits=None,
    step=None,
    check_tables=None,
):
    """Attention of one new token per sequence over its blocks, by the Triton kernel.

    q             float16, bfloat16 or float32 (batch, num_heads, head_dim), head_dim at most 256
    k_cache, v_cache  q's dtype, (num_blocks, block_size, num_kv_heads, head_dim), the new token's row
                  included; num_heads is a multiple of num_kv_heads, the heads of a group side by side
    block_tables  int32 (batch, max_blocks): the block of tokens 0 … block_size-1, of the next ones, …; what
                  lies after a sequence's last block is not read (padding: -1)
    context_lens  int32 (batch,): tokens of each sequence; 0 gives a row of zeros
    scale         factor of the scores; default 1/√head_dim
    num_splits    programs that share a context, 1 to 64; default: enough to keep the device busy
    step          tokens that a program loads at a time, 16, 32, 64 or 128; default by size
    check_tables  look at every length and table entry. Default: on a CPU only; on a CUDA device it
                  would wait for the device, and a wrong entry reads memory that is not the sequence's
    Returns (batch, num_heads, head_dim) in q's dtype; scores, softmax and sums are float32. No gradient
    comes back through it.
    Raises ImportError without Triton, ValueError for inputs that do not fit together.
    """
    if not available():
        raise ImportError(
            "no Triton in this Python: on Linux `pip install -e '.[kernels]'` in the clone brings it, "
            "elsewhere use kv.kernels.paged_attention_reference (PyTorch) or paged_attention_numpy"
        )
    from kvcourse.kernels import triton_decode

    inputs.check_arguments(q, k_cache, v_cache, block_tables, context_lens)
    inputs.check_for_triton(q, k_cache, v_cache, block_tables, context_lens, triton_decode.INTERPRETED)
    inputs.check_count("num_splits", 1 if num_splits is None else num_splits, inputs.MAX_SPLITS)
    inputs.check_step(step)
    if check_tables or (check_tables is None and q.device.type == "cpu"):
        inputs.check_tables(block_tables, context_lens, *k_cache.shape[:2])
    scale = inputs.checked_scale(scale, q.shape[-1])
    return triton_decode.launch(q, k_cache, v_cache, block_tables, context_lens, scale, num_splits, step)


def paged_attention_reference(q, k_cache, v_cache, block_tables, context_lens, scale=None):
    """The same answer in PyTorch, gather then attend in float32: see kernels/reference.py."""
    from kvcourse.kernels import reference

    return reference.paged_attention_reference(q, k_cache, v_cache, block_tables, context_lens, scale)


def trace(block_tables, context_lens, block_size=16, num_kv_heads=1, num_splits=1):
    """Which blocks each program of the kernel loads, in the order in which it loads them.

    A list of (sequence, kv_head, split, [block ids]), program after program; a program without work
    has an empty list. The Triton kernel writes the ids down itself where it is `available()`; elsewhere
    the NumPy form of the same loop does, and the two are the same (tests/unit/test_kernels.py).

    block_tables  integers (batch, max_blocks), below 2^20; context_lens integers (batch,): arrays or lists
    Raises ValueError as `paged_attention_decode` does.
    """
    import numpy as np

    inputs.check_count("num_splits", num_splits, inputs.MAX_SPLITS)
    tables, lengths = np.asarray(block_tables), np.asarray(context_lens)
    for name, array in (("block_tables", tables), ("context_lens", lengths)):
        inputs.check_whole(name, array)
        if array.max(initial=0) >= TRACED:
            raise ValueError(f"{name} has {array.max():,}: the trace takes numbers below {TRACED:,}")
    tables, lengths = tables.astype(np.int32), lengths.astype(np.int32)
    cache = np.zeros((int(tables.max(initial=0)) + 1, block_size, num_kv_heads, 16), dtype=np.float32)
    q = np.zeros((len(tables), num_kv_heads, 16), dtype=np.float32)
    programs = []
    paged_attention_numpy(q, cache, cache, tables, lengths, num_splits=num_splits, trace=programs)
    if not available():
        return programs
    return _kernel_trace(q, cache, tables, lengths, num_splits)


def _kernel_trace(q, cache, tables, lengths, num_splits):
    """`trace` from the Triton kernel, on inputs that are checked."""
    import numpy as np
    import torch

    from kvcourse.kernels import triton_decode

    device = "cpu" if triton_decode.INTERPRETED else "cuda"
    q, cache, on_device, lengths = (torch.from_numpy(x).to(device) for x in (q, cache, tables, lengths))
    shape = (len(tables), cache.shape[2], num_splits, tables.shape[1])
    loaded = torch.full(shape, -1, dtype=torch.int32, device=device)
    triton_decode.launch(q, cache, cache, on_device, lengths, 1.0, num_splits, None, trace=loaded)
    loaded = loaded.cpu().numpy()
    return [(*program, [int(b) for b in loaded[program] if b >= 0]) for program in np.ndindex(shape[:3])]
