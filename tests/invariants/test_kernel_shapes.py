"""The Triton kernel and its NumPy form against the reference: random shapes, lengths and tables."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourse import kernels

UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@st.composite
def batches(draw):
    """(q, k_cache, v_cache, block_tables, context_lens): every row that no sequence uses is NaN.

    The pool's last block is never used: a padding of -1 indexes it.
    """
    block_size = draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    lengths = draw(st.lists(st.integers(0, 5 * block_size + 3), min_size=1, max_size=3))
    num_kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 5))
    head_dim = draw(st.sampled_from([8, 16, 20, 64, 80]))
    dtype = draw(st.sampled_from(list(UNIT)))
    used = [-(-length // block_size) for length in lengths]
    spare, columns = draw(st.integers(1, 3)), max(used) + draw(st.integers(0, 2))
    blocks = draw(st.permutations(range(sum(used) + spare - 1)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    tables = np.full((len(lengths), columns), -1, dtype=np.int32)
    live = np.zeros((sum(used) + spare, block_size), dtype=bool)
    for row, length in enumerate(lengths):
        tables[row, : used[row]] = blocks[sum(used[:row]) : sum(used[:row]) + used[row]]
        tokens = np.arange(length)
        live[tables[row, tokens // block_size], tokens % block_size] = True

    q = torch.randn(len(lengths), num_kv_heads * group, head_dim, generator=random).to(dtype)
    k, v = (
        torch.randn(*live.shape, num_kv_heads, head_dim, generator=random)
        .masked_fill(~torch.from_numpy(live)[:, :, None, None], torch.nan)
        .to(dtype)
        for _ in range(2)
    )
    return q, k, v, torch.from_numpy(tables), torch.tensor(lengths, dtype=torch.int32)


def tolerance(v, unit):
    """An answer is an average of values; float32 sums of up to 163 products in two orders: 1e-5.

    A 16-bit answer is rounded on both sides (one unit in the last place, 2 × unit), and a GPU rounds the
    weights, too (unit): 3 × unit of the largest value.
    """
    return 1e-5 + 3 * unit * v.float().nan_to_num(0).abs().max().item()


@settings(max_examples=60)
@given(
    batch=batches(),
    num_splits=st.sampled_from([None, 1, 2, 3, 5]),
    step=st.sampled_from([None, 16, 32]),
)
def test_kernel_is_the_reference(kernel_device, batch, num_splits, step):
    on_device = [tensor.to(kernel_device) for tensor in batch]
    out = kernels.paged_attention_decode(*on_device, num_splits=num_splits, step=step)
    expected = kernels.paged_attention_reference(*batch)
    assert out.dtype == expected.dtype and out.isfinite().all()
    difference = (out.float().cpu() - expected.float()).abs().max().item()
    assert difference <= tolerance(batch[2], UNIT[expected.dtype])


@settings(max_examples=100)
@given(batch=batches(), num_splits=st.integers(1, 5), step=st.sampled_from([None, 1, 16, 1000]))
def test_numpy_form_is_the_reference_and_loads_each_block_once(batch, num_splits, step):
    q, k, v, tables, lengths = (t.float() if t.is_floating_point() else t for t in batch)
    programs = []
    out = kernels.paged_attention_numpy(
        *(t.numpy() for t in (q, k, v, tables, lengths)), num_splits=num_splits, step=step, trace=programs
    )
    expected = kernels.paged_attention_reference(q, k, v, tables, lengths)
    assert np.abs(out - expected.numpy()).max() <= tolerance(v, 0)  # NaN is not ≤
    for sequence in range(len(q)):
        for kv_head in range(k.shape[2]):
            loaded = [b for s, h, _, blocks in programs if (s, h) == (sequence, kv_head) for b in blocks]
            assert loaded == [block for block in tables[sequence].tolist() if block >= 0]
