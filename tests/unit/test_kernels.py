"""Decode attention over block tables: kernel, reference and NumPy form against each other and by hand.

Where there is no CUDA device the kernel runs in Triton's interpreter, so that these tests run everywhere
on Linux; on a machine with a GPU the same tests run on it. tests/invariants/test_kernel_shapes.py draws
shapes at random.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvcourse import kernels
from kvcourse.kernels.numpy_form import attend_split, merge, split_range

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def case(dtype=torch.float32, device="cpu", lengths=(0, 83, 17), heads=(6, 2), head_dim=80, block_size=16):
    """Random q, caches and shuffled tables; whatever no sequence uses, the last block included, is NaN."""
    generator = torch.Generator().manual_seed(7)
    num_heads, num_kv_heads = heads
    used = [-(-n // block_size) for n in lengths]
    pool = sum(used) + 3
    order = torch.randperm(pool - 1, generator=generator)  # the last block, which -1 indexes, stays unused
    tables = torch.full((len(lengths), max(used) + 1), -1, dtype=torch.int32)
    live = torch.zeros(pool, block_size, dtype=torch.bool)
    for row, (n, count) in enumerate(zip(lengths, used, strict=True)):
        tables[row, :count] = order[sum(used[:row]) : sum(used[:row]) + count]
        for token in range(n):
            live[tables[row, token // block_size], token % block_size] = True

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    q = random(len(lengths), num_heads, head_dim)
    k, v = (
        random(pool, block_size, num_kv_heads, head_dim).masked_fill(~live[:, :, None, None], torch.nan)
        for _ in range(2)
    )
    named = {"q": q.to(dtype), "k_cache": k.to(dtype), "v_cache": v.to(dtype), "block_tables": tables}
    named["context_lens"] = torch.tensor(lengths, dtype=torch.int32)
    return {name: tensor.to(device) for name, tensor in named.items()}


def tolerance(case_):
    """Largest difference allowed between two ways to the same answer.

    An answer is an average of values. float32: sums of up to a few hundred products of numbers below 5,
    another order in each: 1e-5. A 16-bit format with rounding unit u: both answers are rounded
    (one unit in the last place, 2u), and on a GPU the weights are too (u): 3u of the largest value.
    """
    u = {torch.float32: 0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[case_["q"].dtype]
    return 1e-5 + 3 * u * case_["v_cache"].float().nan_to_num(0).abs().max().item()


def difference(a, b):
    """Largest absolute difference; NaN counts as infinite."""
    return (a.float().cpu() - b.float().cpu()).abs().nan_to_num(torch.inf).max().item()


def as_numpy(case_):
    return {name: tensor.cpu().numpy() for name, tensor in case_.items()}


# --- the reference, by other means --------------------------------------------------------


def test_reference_by_hand():
    """Two heads a KV head. Query 0: both scores 0, the mean. Query ln 3 on keys 1 and 0: weights 3/4, 1/4."""
    q = torch.tensor([[[0.0], [float(np.log(3))]]])
    k = torch.tensor([[[[0.0]], [[9.0]]], [[[1.0]], [[0.0]]]])  # block 1 holds the two tokens
    v = torch.tensor([[[[9.0]], [[9.0]]], [[[8.0]], [[4.0]]]])
    out = kernels.paged_attention_reference(q, k, v, torch.tensor([[1, -1]]), torch.tensor([2]), scale=1.0)
    torch.testing.assert_close(out, torch.tensor([[[6.0], [7.0]]]))


def test_reference_is_attention_over_the_gathered_rows():
    given = case(lengths=(40, 33))
    out = kernels.paged_attention_reference(**given)
    for row, n in enumerate((40, 33)):
        slots = [(given["block_tables"][row, t // 16].item(), t % 16) for t in range(n)]
        k, v = (torch.stack([given[name][b, s] for b, s in slots], dim=1) for name in ("k_cache", "v_cache"))
        expected = torch.nn.functional.scaled_dot_product_attention(
            given["q"][row][None, :, None], k[None], v[None], enable_gqa=True
        )
        assert difference(out[row], expected[0, :, 0]) < 1e-5  # see tolerance


# --- the kernel ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("num_splits", [1, 2, 7, None])
def test_kernel_is_the_reference(kernel_device, dtype, num_splits):
    """Unused blocks, unused slots of a last block and the pool's last block are NaN: none of them is read."""
    given = case(dtype, kernel_device)
    out = kernels.paged_attention_decode(**given, num_splits=num_splits)
    assert out.dtype == dtype and out.shape == given["q"].shape
    assert difference(out, kernels.paged_attention_reference(**given)) <= tolerance(given)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_sequence_without_tokens_gives_zeros(kernel_device, num_splits):
    given = case(device=kernel_device, lengths=(0, 5, 0))
    for out in (
        kernels.paged_attention_decode(**given, num_splits=num_splits),
        kernels.paged_attention_reference(**given),
        torch.from_numpy(kernels.paged_attention_numpy(**as_numpy(given), num_splits=num_splits)),
    ):
        assert out[0].eq(0).all() and out[2].eq(0).all() and out[1].ne(0).all()


def test_no_sequences_and_no_columns(kernel_device):
    given = case(device=kernel_device, lengths=(0,))
    given["block_tables"] = given["block_tables"][:, :0].contiguous()
    assert kernels.paged_attention_decode(**given).eq(0).all()
    none = given | {name: given[name][:0] for name in ("q", "block_tables", "context_lens")}
    assert kernels.paged_attention_decode(**none).shape == (0, 6, 80)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65])
def test_lengths_around_a_block_and_a_step(kernel_device, length):
    given = case(device=kernel_device, lengths=(length,), heads=(2, 1), head_dim=16)
    expected = kernels.paged_attention_reference(**given)
    for num_splits in (1, 2):
        out = kernels.paged_attention_decode(**given, num_splits=num_splits)
        assert difference(out, expected) <= tolerance(given)


@pytest.mark.parametrize("block_size, step", [(1, 16), (4, 64), (64, 16), (128, 32), (10, 32)])
def test_a_step_may_be_longer_or_shorter_than_a_block(kernel_device, block_size, step):
    given = case(device=kernel_device, lengths=(150,), heads=(2, 2), head_dim=16, block_size=block_size)
    out = kernels.paged_attention_decode(**given, step=step, num_splits=2)
    assert difference(out, kernels.paged_attention_reference(**given)) <= tolerance(given)


@pytest.mark.parametrize("head_dim", [1, 96, 256])
def test_head_dims(kernel_device, head_dim):
    given = case(device=kernel_device, lengths=(20,), heads=(2, 1), head_dim=head_dim)
    out = kernels.paged_attention_decode(**given, num_splits=2)
    assert difference(out, kernels.paged_attention_reference(**given)) <= tolerance(given)


def test_more_query_heads_than_one_tile_of_16(kernel_device):
    given = case(device=kernel_device, lengths=(20,), heads=(40, 2), head_dim=16)
    out = kernels.paged_attention_decode(**given)
    assert difference(out, kernels.paged_attention_reference(**given)) <= tolerance(given)


def test_where_the_blocks_lie_changes_no_bit(kernel_device):
    """The same rows in other blocks: the loop adds them in the same order."""
    given = case(device=kernel_device)
    moved = torch.roll(torch.arange(given["k_cache"].shape[0]), 3)  # block b goes to moved[b]
    there = {name: torch.empty_like(given[name]) for name in ("k_cache", "v_cache")}
    for name, cache in there.items():
        cache[moved.to(kernel_device)] = given[name]
    tables = given["block_tables"].cpu().long()
    there["block_tables"] = torch.where(tables < 0, -1, moved[tables]).int().to(kernel_device)
    one, other = (kernels.paged_attention_decode(**x, num_splits=3) for x in (given, given | there))
    assert torch.equal(one, other)


def test_scores_far_beyond_what_exp_can_hold(kernel_device):
    """Scores of ±20,000 overflow a plain exp; the two heads each put all weight on one token, 3 and 5."""
    k = torch.zeros(2, 4, 1, 16)
    k[0, 3], k[1, 1] = 1.0, -1.0  # tokens 3 and 5
    v = torch.arange(8.0).reshape(2, 4, 1, 1).expand(2, 4, 1, 16).contiguous()
    q = torch.tensor([1250.0, -1250.0])[None, :, None].expand(1, 2, 16).contiguous()
    table, length = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    given = [tensor.to(kernel_device) for tensor in (q, k, v, table, length)]
    for num_splits in (1, 2):
        out = kernels.paged_attention_decode(*given, scale=1.0, num_splits=num_splits)
        assert out[0, 0].eq(3).all() and out[0, 1].eq(5).all()
    assert (
        kernels.paged_attention_numpy(*(x.cpu().numpy() for x in given), scale=1.0)[0, :, 0] == [3, 5]
    ).all()


def test_layouts_that_are_not_contiguous(kernel_device):
    """K and V as halves of one tensor, heads before slots, q as a slice of a larger projection."""
    given = case(device=kernel_device)
    both = torch.stack([given["k_cache"], given["v_cache"]]).transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.cat([given["q"], given["q"]], dim=1)
    there = given | {"k_cache": both[0], "v_cache": both[1], "q": wide[:, 6:]}
    assert not there["q"].is_contiguous() and not there["k_cache"].is_contiguous()
    one, other = (kernels.paged_attention_decode(**x, num_splits=2) for x in (given, there))
    assert torch.equal(one, other)


def test_scale_is_a_factor_of_the_scores(kernel_device):
    given = case(device=kernel_device, lengths=(20,))
    out = kernels.paged_attention_decode(**given, scale=0.3)
    doubled = kernels.paged_attention_reference(**given | {"q": given["q"] * 2}, scale=0.15)
    assert difference(out, doubled) <= tolerance(given)
    assert difference(out, kernels.paged_attention_decode(**given)) > 0.01


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("shape", [(1, 4096), (64, 1000), (7, 513)])
def test_kernel_on_a_gpu_at_real_sizes(kernel_device, dtype, shape):
    batch, length = shape
    lengths = [length - 3 * row for row in range(batch)]
    given = case(dtype, "cuda", lengths=lengths, heads=(32, 8), head_dim=128)
    out = kernels.paged_attention_decode(**given)
    assert difference(out, kernels.paged_attention_reference(**given)) <= tolerance(given)


@needs_cuda
def test_a_pool_of_more_than_two_billion_numbers(kernel_device):
    """Offsets beyond 2³¹: the last but one block of a pool of 2³¹ + 2¹⁶ numbers."""
    blocks = 2**17 + 4
    if torch.cuda.mem_get_info()[0] < 3 * blocks * 16 * 8 * 128 * 2:
        pytest.skip("needs 13 GB of free GPU memory")
    given = case(torch.float16, "cuda", lengths=(16,), heads=(8, 8), head_dim=128)
    k, v = (torch.zeros(blocks, 16, 8, 128, dtype=torch.float16, device="cuda") for _ in range(2))
    k[blocks - 2], v[blocks - 2] = (
        given[name][given["block_tables"][0, 0]] for name in ("k_cache", "v_cache")
    )
    far = given | {
        "k_cache": k,
        "v_cache": v,
        "block_tables": torch.full_like(given["block_tables"], blocks - 2),
    }
    assert torch.equal(kernels.paged_attention_decode(**far), kernels.paged_attention_decode(**given))


# --- what a launch decides ---------------------------------------------------------------


def test_choose_num_splits(kernel_device):
    """By hand, 132 multiprocessors want 528 programs."""
    from kvcourse.kernels.triton_decode import choose_num_splits

    assert choose_num_splits(8, 4096, 64, 132) == 64  # 66 would do, at most 64
    assert choose_num_splits(8, 512, 64, 132) == 8  # 512 tokens are eight steps
    assert choose_num_splits(64, 4096, 64, 132) == 9  # 528 / 64, rounded up
    assert choose_num_splits(2048, 4096, 64, 132) == 1
    assert choose_num_splits(1, 0, 64, 1) == 1


def test_step_tokens(kernel_device):
    """16,384 bytes of K: 64 rows of 128 float16, 32 of 128 float32 (80 is padded to 128), 16 at least."""
    from kvcourse.kernels.triton_decode import step_tokens

    assert [step_tokens(128, 2), step_tokens(64, 2), step_tokens(80, 4), step_tokens(256, 4)] == [
        64,
        64,
        32,
        16,
    ]


def test_splits_come_from_the_device(kernel_device, monkeypatch):
    """2 KV heads on a device with 1 multiprocessor: 4 programs wanted, so 2 splits."""
    from kvcourse.kernels import triton_decode

    seen = []
    grid = type("Grid", (), {"__getitem__": lambda self, shape: lambda *a, **k: seen.append(shape)})
    monkeypatch.setattr(triton_decode, "num_sms", lambda device: 1)
    monkeypatch.setattr(triton_decode, "_attend", grid())
    monkeypatch.setattr(triton_decode, "_merge", grid())
    kernels.paged_attention_decode(**case(device=kernel_device, lengths=(83,)))
    assert seen == [(1, 2, 2), (1, 6)]


# --- the NumPy form and the trace ----------------------------------------------------------


@pytest.mark.parametrize("num_splits", [1, 2, 7])
@pytest.mark.parametrize("step", [None, 1, 16, 50])
def test_numpy_form_is_the_reference(num_splits, step):
    given = case()
    out = kernels.paged_attention_numpy(**as_numpy(given), num_splits=num_splits, step=step)
    expected = kernels.paged_attention_reference(**given)
    assert out.dtype == np.float32
    assert difference(torch.from_numpy(out), expected) <= tolerance(given)


def test_numpy_form_computes_in_float32():
    """16-bit keys too; the answer has q's dtype."""
    given = case(torch.float16)
    out = kernels.paged_attention_numpy(**as_numpy(given), num_splits=2)
    assert out.dtype == np.float16
    assert difference(torch.from_numpy(out), kernels.paged_attention_reference(**given)) <= tolerance(given)
    k = np.ones((1, 2, 4), dtype=np.float16)
    parts = attend_split(np.ones((1, 4), np.float32), k, k, np.array([0]), 0, 2, 2, [])
    assert {part.dtype for part in parts} == {np.dtype(np.float32)}
    assert merge([parts, parts]).dtype == np.float32


def test_split_range_by_hand():
    """83 tokens are six blocks of 16: two splits of three, four of two and the last idle."""
    assert [split_range(83, 16, 2, s) for s in range(2)] == [(0, 48), (48, 83)]
    assert [split_range(83, 16, 4, s) for s in range(4)] == [(0, 32), (32, 64), (64, 83), (83, 83)]
    assert split_range(0, 16, 3, 2) == (0, 0)


def test_merge_by_hand():
    """Log-sum-exps ln 1 and ln 3: weights 1/4 and 3/4. An empty split weighs nothing, two give zeros."""
    one, three = np.float32([[4.0]]), np.float32([[8.0]])
    lse = np.float32([np.log(1.0)]), np.float32([np.log(3.0)])
    assert merge([(one, lse[0]), (three, lse[1])]) == pytest.approx(7.0)
    empty = (np.zeros((1, 1), np.float32), np.float32([-np.inf]))
    assert merge([(one, lse[0]), empty]) == 4.0
    assert merge([empty, empty]) == 0.0


TABLES, LENGTHS = [[7, 2, 9, 4, 0], [3, 8, -1, -1, -1], [-1, -1, -1, -1, -1]], [70, 20, 0]


def test_trace_by_hand():
    """70 tokens are five blocks, in two splits three and two; 20 tokens are two blocks, one each."""
    expected = {
        (0, 0): [7, 2, 9],
        (0, 1): [4, 0],
        (1, 0): [3],
        (1, 1): [8],
        (2, 0): [],
        (2, 1): [],
    }
    found = kernels.trace(TABLES, LENGTHS, num_kv_heads=2, num_splits=2)
    assert found == [(s, h, i, expected[s, i]) for s in range(3) for h in range(2) for i in range(2)]


@pytest.mark.parametrize("block_size, num_splits", [(16, 1), (16, 3), (1, 2), (4, 2), (64, 2), (128, 3)])
def test_the_kernel_loads_what_the_numpy_form_loads(kernel_device, monkeypatch, block_size, num_splits):
    given = case(lengths=(0, 83, 300), heads=(2, 2), head_dim=16, block_size=block_size)
    tables, lengths = given["block_tables"].numpy(), [0, 83, 300]
    asked = (tables, lengths, block_size, 2, num_splits)
    by_kernel = kernels.trace(*asked)
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert by_kernel == kernels.trace(*asked)
    for sequence, row in enumerate(tables.tolist()):
        for kv_head in range(2):  # all splits together: each block once, in the table's order
            loaded = [b for s, h, _, blocks in by_kernel if (s, h) == (sequence, kv_head) for b in blocks]
            assert loaded == [block for block in row if block >= 0]


def test_the_trace_is_what_the_kernel_read(kernel_device, monkeypatch):
    """Written by the programs themselves: with the tables reversed behind the launch, so is the trace."""
    from kvcourse.kernels import triton_decode

    launch = triton_decode.launch

    def reversed_tables(q, k, v, tables, *rest, **options):
        return launch(q, k, v, tables.flip(1).contiguous(), *rest, **options)

    monkeypatch.setattr(triton_decode, "launch", reversed_tables)
    assert kernels.trace([[7, 2, 9]], [48]) == [(0, 0, 0, [9, 2, 7])]


# --- one line each -------------------------------------------------------------------------


def changed(**change):
    """A good case with some of its tensors put through functions."""
    given = case(lengths=(20, 5), heads=(4, 2), head_dim=16)
    return given | {name: function(given[name]) for name, function in change.items()}


SHAPE_ERRORS = [
    ({"q": lambda t: t[0]}, "q has 2 axes, 3 are needed: (batch, num_heads, head_dim)"),
    ({"k_cache": lambda t: t[0]}, "k_cache has 3 axes, 4 are needed"),
    ({"block_tables": lambda t: t[0]}, "block_tables has 1 axes, 2 are needed"),
    ({"v_cache": lambda t: t[:-1]}, "k_cache is (6, 16, 2, 16) and v_cache (5, 16, 2, 16)"),
    ({"q": lambda t: t[:, :, :8]}, "q has head_dim 8, the caches 16"),
    ({"q": lambda t: t[:, :3]}, "3 query heads over 2 KV heads"),
    ({"context_lens": lambda t: t[:1]}, "q has 2 sequences, context_lens 1"),
    ({"q": lambda t: t.int()}, "q is int32: give float numbers"),
    ({"block_tables": lambda t: t.float()}, "block_tables is float32: give whole numbers"),
    ({"context_lens": lambda t: t.double()}, "context_lens is float64: give whole numbers"),
    ({"context_lens": lambda t: t + 100}, "sequence 0 has 120 tokens, its table row room for 0 to 48"),
    ({"context_lens": lambda t: t - 6}, "sequence 1 has -1 tokens"),
    ({"block_tables": lambda t: t + 6}, "table entry 0 is block"),
    ({"context_lens": lambda t: t + 20}, "table entry 2 is block -1, the pool has blocks 0 to 5"),
]
KERNEL_ERRORS = [
    ({"q": lambda t: t.double()}, "q is float64: the kernel takes float16, bfloat16, float32"),
    ({"q": lambda t: t.half()}, "q is float16, k_cache float32"),
    ({"block_tables": lambda t: t.long()}, "block_tables is int64, int32 is needed"),
    ({"context_lens": lambda t: t.short()}, "context_lens is int16, int32 is needed"),
    ({"block_tables": lambda t: t.T.contiguous().T}, "block_tables has strides"),
    ({"q": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, "the last must be 1"),
    ({"v_cache": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, "store both in one layout"),
    ({"q": lambda t: t.to("meta")}, "move all to one device"),
]


def one_line(call, words):
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    assert words in message and "\n" not in message, message


@pytest.mark.parametrize("change, words", SHAPE_ERRORS, ids=[words[:40] for _, words in SHAPE_ERRORS])
def test_inputs_that_do_not_fit_together(change, words):
    given = changed(**change)
    one_line(lambda: kernels.paged_attention_reference(**given), words)
    one_line(lambda: kernels.paged_attention_numpy(**as_numpy(given)), words)


@pytest.mark.parametrize(
    "change, words", SHAPE_ERRORS + KERNEL_ERRORS, ids=[w[:40] for _, w in SHAPE_ERRORS + KERNEL_ERRORS]
)
def test_inputs_the_kernel_refuses(kernel_device, change, words):
    given = changed(**change)
    given = {name: t if t.device.type == "meta" else t.to(kernel_device) for name, t in given.items()}
    one_line(lambda: kernels.paged_attention_decode(**given, check_tables=True), words)


def test_a_head_that_is_too_wide(kernel_device):
    given = case(device=kernel_device, lengths=(5,), heads=(1, 1), head_dim=257)
    one_line(lambda: kernels.paged_attention_decode(**given), "head_dim is 257, the kernel's limit 256")
    assert kernels.paged_attention_reference(**given).isfinite().all()


@pytest.mark.parametrize(
    "option, words",
    [
        ({"num_splits": 0}, "num_splits=0: give a whole number from 1 to 64"),
        ({"num_splits": 65}, "num_splits=65"),
        ({"num_splits": 2.0}, "num_splits=2.0"),
        ({"num_splits": True}, "num_splits=True"),
        ({"step": 48}, "step=48: give 16, 32, 64 or 128"),
        ({"step": 16.0}, "step=16.0: give 16, 32, 64 or 128"),
        ({"scale": float("nan")}, "scale=nan: give a finite number"),
    ],
)
def test_options_the_kernel_refuses(kernel_device, option, words):
    given = case(device=kernel_device, lengths=(20,))
    one_line(lambda: kernels.paged_attention_decode(**given, **option), words)


def test_the_kernel_takes_tensors_only(kernel_device):
    given = as_numpy(case(lengths=(20,)))
    one_line(lambda: kernels.paged_attention_decode(**given), "q is a ndarray: give torch tensors")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (([[1.7, 0]], [5]), "block_tables is float64: give whole numbers"),
        (([[1, 0]], [5.9]), "context_lens is float64: give whole numbers"),
        (([[2**31]], [1]), "block_tables has 2,147,483,648: the trace takes numbers below 1,048,576"),
        (([[10**9]], [1]), "block_tables has 1,000,000,000: the trace takes"),
        (([[0]], [2**40]), "context_lens has 1,099,511,627,776: the trace takes"),
        (([[0]], [1], 16, 1, 65), "num_splits=65: give a whole number from 1 to 64"),
    ],
)
def test_what_the_trace_refuses(arguments, words):
    one_line(lambda: kernels.trace(*arguments), words)


def test_a_trace_of_nothing():
    assert kernels.trace([[]], [0]) == [(0, 0, 0, [])]


def test_options_the_numpy_form_refuses():
    given = as_numpy(case(lengths=(20,)))
    one_line(lambda: kernels.paged_attention_numpy(**given, num_splits=0), "whole number at least 1")
    one_line(lambda: kernels.paged_attention_numpy(**given, step=0), "step=0: give a whole number at least 1")


# --- with and without Triton -----------------------------------------------------------------


def test_without_triton_one_line_and_the_fallbacks(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None if name == "triton" else object())
    assert not kernels.available()
    given = case(lengths=(20,))
    with pytest.raises(ImportError) as error:
        kernels.paged_attention_decode(**given)
    message = str(error.value)
    assert "pip install -e '.[kernels]'" in message and "paged_attention_reference" in message
    assert "\n" not in message
    assert kernels.trace([[1, 0]], [20]) == [(0, 0, 0, [1, 0])]
    assert kernels.paged_attention_reference(**given).isfinite().all()


def python(code, **environment):
    """Run `code` in a new Python; returns what it printed."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_torch_and_no_triton_until_they_are_needed():
    code = (
        "import sys, kvcourse as kv, numpy as np\n"
        "one = np.ones((1, 1, 1, 4), dtype=np.float32)\n"
        "kv.kernels.paged_attention_numpy(one[0], one, one, [[0]], [1]), kv.kernels.available()\n"
        "print(sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    assert python(code).strip() == "[]"


def test_interpreted_also_when_triton_was_imported_before(kernel_device):
    """As by transformers: Triton's own functions are then decorated already, for a compiler."""
    code = (
        "import triton, kvcourse as kv\n"
        "print(kv.kernels.trace([[7, 2, 9]], [48], num_splits=2))\n"
        "from kvcourse.kernels import triton_decode\n"
        "print(triton_decode.INTERPRETED)"
    )
    found = python(code, CUDA_VISIBLE_DEVICES="").splitlines()
    assert found == ["[(0, 0, 0, [7, 2]), (0, 0, 1, [9])]", "True"]


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvcourse.kernels import triton_decode as td, inputs

def build(kernel, arch, number, constants):
    types = {name: "fp32" if name == "scale" else "i32" for name in kernel.arg_names}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            types[name] = {"q": "*" + number, "k": "*" + number, "v": "*" + number, "table": "*i32",
                           "length": "*i32", "trace": "*i32"}.get(name.removesuffix("_ptr"), "*fp32")
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    options = {"num_warps": 4, "num_stages": 2}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)

for arch, number, size in ((80, "fp16", 2), (90, "bf16", 2), (90, "fp32", 4)):
    constants = dict(block_size=16, head_dim=128, group=4, DIMS=128, HEADS=16,
                     TILE=td.step_tokens(128, size), EXACT=False, TRACE=False)
    built = build(td._attend, arch, number, constants)
    print(arch, number, built.metadata.shared, "mma.sync" in built.asm["ptx"], len(built.asm["cubin"]) > 0)
built = build(td._merge, 90, "fp32", dict(head_dim=128, DIMS=128, SPLITS=8))
print("merge", built.metadata.shared, len(built.asm["cubin"]) > 0)
one = torch.zeros(1, 1, 1, 16)
try:
    inputs.check_for_triton(one[0], one, one, one[0, 0].int(), one[0, 0, 0].int(), td.INTERPRETED)
except ValueError as error:
    print(error)
"""


def test_the_kernels_compile_for_gpus_that_are_not_here(kernel_device, tmp_path):
    """Triton brings its assembler, so that this needs no GPU: what cannot be run here at least compiles.

    16-bit products run on tensor cores (mma.sync), float32 ones do not; 48 KiB of shared memory a program
    are what every GPU since 2010 grants.
    """
    lines = python(COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    for line, mma in zip(lines[:3], ("True", "True", "False"), strict=True):
        arch, number, shared, tensor_cores, cubin = line.split()
        assert int(shared) <= 48 * 1024 and tensor_cores == mma and cubin == "True", line
    name, shared, cubin = lines[3].split()
    assert (name, cubin) == ("merge", "True") and int(shared) <= 48 * 1024
    assert "compiled for a CUDA device" in lines[4] and "TRITON_INTERPRET=1" in lines[4]
