"""The paged batch in PyTorch gives what the contiguous batch gives, whichever blocks the rows lie in."""

import random
from functools import cache

import numpy as np
import pytest
import torch

from kvcourse import kernels, loading
from kvcourse.caches import CacheFull
from kvcourse.models.gpt2 import GPT2 as NumpyGPT2
from kvcourse.paging import OutOfBlocks
from kvcourse.torch_models import GPT2, BatchCache, GraphedDecode, PagedBatchCache

# As in test_torch_batched: a share of the largest logit; in float32 only the order of sums differs.
TOLERANCE = {"float32": 2e-5, "float16": 8 * 2**-11, "bfloat16": 8 * 2**-8}
VOCAB, POSITIONS = 61, 40
LENGTHS = (3, 17, 1, 9)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none")
needs_triton = pytest.mark.skipif(not kernels.available(), reason="needs Triton, which is not installed")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
KERNELS = [False, pytest.param(True, marks=needs_triton)]


@cache
def net_of(dtype="float32", device="cpu"):
    """A tiny random GPT-2 whose attention is sharp: a row too many changes far more than rounding does."""
    model = loading.random_model(
        "gpt2", num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, hidden_size=32,
        intermediate_size=64, vocab_size=VOCAB, max_seq_len=POSITIONS,
    )  # fmt: skip
    params = {n: a * np.float32(5) if a.ndim == 2 else a for n, a in model.params.items()}
    return GPT2(NumpyGPT2(model.config, params), device, dtype)


def some(lengths, steps, seed=0):
    numbers = np.random.default_rng(seed)
    prompts = [numbers.integers(VOCAB, size=n).tolist() for n in lengths]
    return prompts, numbers.integers(VOCAB, size=(steps, len(lengths))).tolist()


def spoiled(paged, seed=1):
    """NaN in every slot, and the free blocks in random order."""
    paged.keys.fill_(float("nan"))
    paged.values.fill_(float("nan"))
    queue = paged.manager._queue
    blocks = [queue.popleft() for _ in range(len(queue))]
    random.Random(seed).shuffle(blocks)
    for block in blocks:
        queue.append(block)
    return paged


def logits_of(net, prompts, tokens, batch_cache):
    found = [net.prefill(prompts, batch_cache)]
    found += [net.decode(row, batch_cache) for row in tokens]
    return np.stack([logits.float().cpu().numpy() for logits in found])


def assert_close(found, expected, dtype="float32"):
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_paged_is_contiguous(size, kernel):
    """Ragged and equal lengths; blocks shuffled; everything that does not count is NaN."""
    net = net_of()
    for lengths in (LENGTHS, (5, 5)):
        prompts, tokens = some(lengths, 4 if kernel else 9)
        expected = logits_of(net, prompts, tokens, BatchCache(net, len(lengths), POSITIONS))
        paged = spoiled(PagedBatchCache(net, len(lengths), POSITIONS, block_size=size, kernel=kernel))
        assert_close(logits_of(net, prompts, tokens, paged), expected)
        paged.manager.check_invariants()
        assert paged.lengths.tolist() == [n + len(tokens) for n in lengths]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_dtype(dtype, device):
    """On a CUDA device this is the compiled kernel: `kernel` is left to its default."""
    net = net_of(dtype, device)
    prompts, tokens = some(LENGTHS, 5)
    expected = logits_of(net, prompts, tokens, BatchCache(net, 4, POSITIONS))
    paged = spoiled(PagedBatchCache(net, 4, POSITIONS, block_size=4))
    assert paged.kernel == (device == "cuda" and kernels.available())
    assert_close(logits_of(net, prompts, tokens, paged), expected, dtype)


def test_the_tables_and_the_bytes():
    paged = PagedBatchCache(net_of(), 3, 12, block_size=4)
    assert paged.keys.shape == (2, 9, 4, 2, 16) and paged.block_tables.dtype == torch.int32
    assert (paged.block_tables == -1).all() and paged.nbytes_used == 0
    net_of().prefill([[1] * 5, [2], [3] * 8], paged)
    assert paged.block_tables.tolist() == [[0, 1, -1], [2, -1, -1], [3, 4, -1]]
    assert paged.nbytes_used == 14 * 2 * 2 * 2 * 16 * 4 and paged.nbytes == 36 * 2 * 2 * 2 * 16 * 4
    net_of().decode([1, 2, 3], paged)
    assert paged.block_tables.tolist() == [[0, 1, -1], [2, -1, -1], [3, 4, 5]]
    paged.set_lengths([4, 0, 9])
    assert paged.block_tables.tolist() == [[0, -1, -1], [-1, -1, -1], [3, 4, 5]]
    paged.reset()
    assert paged.manager.num_used == 0 and (paged.block_tables == -1).all()


def test_random_rows_are_those_of_the_contiguous_cache():
    net = net_of()
    caches = BatchCache(net, 3, 20), PagedBatchCache(net, 3, 20, block_size=4)
    found = []
    for batch_cache in caches:
        batch_cache.fill_random(13, seed=4)
        found.append(net.decode([1, 2, 3], batch_cache).numpy().copy())
    assert_close(found[1], found[0])
    assert caches[1].lengths.tolist() == [14] * 3


def test_going_back_and_forth():
    net = net_of()
    prompts, tokens = some(LENGTHS, 6)
    caches = BatchCache(net, 4, POSITIONS), spoiled(PagedBatchCache(net, 4, POSITIONS, block_size=4))
    found = []
    for batch_cache in caches:
        logits_of(net, prompts, tokens[:4], batch_cache)
        batch_cache.set_lengths([5, 3, 2, 12])
        found.append(np.stack([net.decode(row, batch_cache).numpy() for row in tokens[4:]]))
    assert_close(found[1], found[0])
    caches[1].manager.check_invariants()


def test_out_of_blocks_changes_nothing():
    net = net_of()
    paged = PagedBatchCache(net, 2, 16, num_blocks=3, block_size=4)
    with pytest.raises(OutOfBlocks):
        net.prefill([[1] * 4, [2] * 9], paged)
    assert paged.manager.num_used == 0 and paged.lengths.tolist() == [0, 0]
    net.prefill([[1] * 4, [2] * 8], paged)
    table = paged.block_tables.tolist()
    for call in (lambda: net.decode([1, 2], paged), lambda: paged.set_lengths([5, 8])):
        with pytest.raises(OutOfBlocks) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert paged.block_tables.tolist() == table and paged.lengths.tolist() == [4, 8]
        paged.manager.check_invariants()
    paged.set_lengths([4, 4])
    fresh = BatchCache(net, 2, 16)
    net.prefill([[1] * 4, [2] * 4], fresh)
    paged.set_lengths([3, 4])
    fresh.set_lengths([3, 4])
    paged.set_lengths([0, 4])
    fresh.set_lengths([0, 4])
    assert_close(net.decode([5, 6], paged).numpy(), net.decode([5, 6], fresh).numpy())


def test_an_interrupted_step_is_taken_back(monkeypatch):
    """Between the device's lengths and the manager's books, and within a layer."""
    net = net_of()
    prompts, tokens = some(LENGTHS, 1)
    expected = logits_of(net, prompts, tokens, BatchCache(net, 4, POSITIONS))
    paged = PagedBatchCache(net, 4, POSITIONS, block_size=1)
    net.prefill(prompts, paged)
    for name in ("end_growing", "write_next"):

        def interrupted(*arguments):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(paged, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                net.decode(tokens[0], paged)
    assert_close(net.decode(tokens[0], paged).numpy(), expected[1])
    paged.manager.check_invariants()
    assert paged.manager.num_used == sum(LENGTHS) + 4


def test_what_does_not_fit_is_refused(monkeypatch):
    net = net_of()
    with pytest.raises(ValueError, match="positions"):
        PagedBatchCache(net, 1, POSITIONS + 1)
    for options in ({"block_size": 0}, {"num_blocks": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            PagedBatchCache(net, 1, 8, **options)
    paged = PagedBatchCache(net, 1, 8)
    with pytest.raises(ValueError, match="does not fit"):
        net_of("float16").prefill([[1]], paged)
    net.prefill([[1] * 8], paged)
    with pytest.raises(CacheFull):
        net.decode([1], paged)
    monkeypatch.setattr("kvcourse.torch_models.graphs._check_device", lambda device: None)
    with pytest.raises(TypeError, match="a graph of a PagedBatchCache is not supported"):
        GraphedDecode(net, paged)
    monkeypatch.setattr(kernels, "available", lambda: False)
    with pytest.raises(ImportError, match="Triton"):
        PagedBatchCache(net, 1, 8, kernel=True)
