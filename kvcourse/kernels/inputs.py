"""What a decode attention over block tables may be given: each check raises one line.

The shape checks serve NumPy arrays and torch tensors alike; nothing here imports either.
"""

import math

DTYPES = ("float16", "bfloat16", "float32")
MAX_HEAD_DIM = 256
MAX_SPLITS = 64  # one program merges them: 64 × head_dim numbers at a time


def check_arguments(q, k_cache, v_cache, block_tables, context_lens):
    """ValueError unless the five shapes belong together, q is float, tables and lengths whole numbers."""
    ranks = (("q", q, 3), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4))
    for name, array, rank in (*ranks, ("block_tables", block_tables, 2), ("context_lens", context_lens, 1)):
        if len(array.shape) != rank:
            raise ValueError(f"{name} has {len(array.shape)} axes, {rank} are needed: {LAYOUT[name]}")
    if "float" not in _name(q.dtype):
        raise ValueError(f"q is {_name(q.dtype)}: give float numbers, such as float32")
    for name, array in (("block_tables", block_tables), ("context_lens", context_lens)):
        check_whole(name, array)
    batch, num_heads, head_dim = q.shape
    if k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache is {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}: give both one shape"
        )
    if 0 in k_cache.shape:
        raise ValueError(f"the caches are {tuple(k_cache.shape)}: give every axis at least length 1")
    if k_cache.shape[3] != head_dim:
        raise ValueError(
            f"q has head_dim {head_dim}, the caches {k_cache.shape[3]}: take both from one model"
        )
    if num_heads == 0 or num_heads % k_cache.shape[2]:
        raise ValueError(
            f"{num_heads} query heads over {k_cache.shape[2]} KV heads: the first must be a multiple of the "
            f"second, at least 1 (the caches are {LAYOUT['k_cache']})"
        )
    for name, array in (("block_tables", block_tables), ("context_lens", context_lens)):
        if len(array) != batch:
            raise ValueError(f"q has {batch} sequences, {name} {len(array)}: give one row a sequence")


def check_whole(name, array):
    """ValueError unless the numbers of this array or tensor are whole."""
    dtype = _name(array.dtype)
    if "int" not in dtype and 0 not in array.shape:  # an empty list becomes a float array
        raise ValueError(f"{name} is {dtype}: give whole numbers, such as int32")


LAYOUT = {
    "q": "(batch, num_heads, head_dim)",
    "k_cache": "(num_blocks, block_size, num_kv_heads, head_dim)",
    "v_cache": "(num_blocks, block_size, num_kv_heads, head_dim)",
    "block_tables": "(batch, max_blocks)",
    "context_lens": "(batch,)",
}


def check_for_triton(q, k_cache, v_cache, block_tables, context_lens, interpreted):
    """ValueError unless these are torch tensors whose dtypes, devices and strides are the kernel's."""
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    given |= {"block_tables": block_tables, "context_lens": context_lens}
    for name, tensor in given.items():
        if not hasattr(tensor, "stride"):
            kind = type(tensor).__name__
            raise ValueError(f"{name} is a {kind}: give torch tensors, or use paged_attention_numpy")
    dtype = _name(q.dtype)
    if dtype not in DTYPES:
        raise ValueError(f"q is {dtype}: the kernel takes {', '.join(DTYPES)}, convert with q.to(...)")
    if q.shape[2] > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim is {q.shape[2]}, the kernel's limit {MAX_HEAD_DIM}: use paged_attention_reference"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != q.dtype:
            raise ValueError(f"q is {dtype}, {name} {_name(cache.dtype)}: convert q with q.to({name}.dtype)")
    for name, tensor in (("block_tables", block_tables), ("context_lens", context_lens)):
        if _name(tensor.dtype) != "int32":
            raise ValueError(f"{name} is {_name(tensor.dtype)}, int32 is needed: {name}.to(torch.int32)")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: give {name}.contiguous()")
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has strides {tensor.stride()}, the last must be 1: give {name}.contiguous()"
            )
    if k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"k_cache has strides {k_cache.stride()}, v_cache {v_cache.stride()}: store both in one layout"
        )
    devices = {str(tensor.device) for tensor in given.values()}
    if len(devices) > 1:
        raise ValueError(f"the tensors lie on {' and '.join(sorted(devices))}: move all to one device")
    if not interpreted and q.device.type != "cuda":
        raise ValueError(
            f"the tensors lie on {q.device}, the kernel was compiled for a CUDA device: move them there, "
            f"or set TRITON_INTERPRET=1 before the first use of kv.kernels"
        )


def check_count(name, count, most=None):
    """ValueError unless `count` is a whole number from 1 to `most`."""
    whole = isinstance(count, int) and not isinstance(count, bool)
    if not whole or count < 1 or (most is not None and count > most):
        limit = "at least 1" if most is None else f"from 1 to {most}"
        raise ValueError(f"{name}={count!r}: give a whole number {limit}")


def check_step(step):
    """ValueError unless `step` is None or one of the tile lengths the kernel is compiled for."""
    if step is not None and (not isinstance(step, int) or step not in (16, 32, 64, 128)):
        raise ValueError(f"step={step!r}: give 16, 32, 64 or 128 tokens, or None for the kernel's choice")


def check_tables(block_tables, context_lens, num_blocks, block_size):
    """ValueError for a length, or a table entry that a length makes use of, outside its range."""
    room = block_tables.shape[1] * block_size
    for sequence, (row, length) in enumerate(zip(block_tables.tolist(), context_lens.tolist(), strict=True)):
        if not 0 <= length <= room:
            raise ValueError(
                f"sequence {sequence} has {length} tokens, its table row room for 0 to {room} "
                f"({block_tables.shape[1]} blocks of {block_size}): give it more columns"
            )
        for place, block in enumerate(row[: -(-length // block_size)]):
            if not 0 <= block < num_blocks:
                raise ValueError(
                    f"sequence {sequence}, table entry {place} is block {block}, the pool has blocks 0 to "
                    f"{num_blocks - 1}: its {length} tokens need {-(-length // block_size)} entries in range"
                )


def checked_scale(scale, head_dim):
    """The factor of the scores as a float, 1/√head_dim for None; ValueError unless it is finite."""
    if scale is None:
        return head_dim**-0.5
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}: give a finite number, or None for 1/√head_dim")
    return float(scale)


def _name(dtype):
    return str(dtype).removeprefix("torch.")
