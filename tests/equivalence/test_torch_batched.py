"""A ragged batch in PyTorch gives what single runs give, and what the NumPy model gives without a cache."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourse import loading
from kvcourse.caches import BatchView, CacheFull, ContiguousCache
from kvcourse.models.gpt2 import GPT2 as NumpyGPT2
from kvcourse.torch_models import GPT2, BatchCache, GraphedDecode, MemoryCap

# Largest difference allowed, as a share of the largest logit. A 16-bit format rounds each number by at
# most u = 2⁻¹¹ (float16) or 2⁻⁸ (bfloat16), and after a few layers some such errors have met: 8 u.
# In float32 only the order of the sums differs; u is 2⁻²⁴, and 2e-5 leaves room for sums of some 100 terms.
TOLERANCE = {"float32": 2e-5, "float16": 8 * 2**-11, "bfloat16": 8 * 2**-8}
DTYPES = tuple(TOLERANCE)
VOCAB, POSITIONS = 61, 40
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none"),
    ),
]


@cache
def numpy_model():
    """A tiny random GPT-2 with weights five times the usual size: its attention is sharp, so that a row
    too many, or a wrong position, changes the logits far more than rounding does."""
    model = loading.random_model(
        "gpt2", num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, hidden_size=16,
        intermediate_size=64, vocab_size=VOCAB, max_seq_len=POSITIONS,
    )  # fmt: skip
    return NumpyGPT2(
        model.config, {n: a * np.float32(5) if a.ndim == 2 else a for n, a in model.params.items()}
    )


@cache
def net_of(dtype="float32", device="cpu"):
    return GPT2(numpy_model(), device, dtype)


def numbers(logits):
    return logits.float().cpu().numpy().copy()


def decoded(net, prompts, tokens, max_seq_len=POSITIONS, step=None, batch_cache=None):
    """Logits (1 + steps, batch, vocab): of the prefill, then after each row of tokens (steps, batch)."""
    batch_cache = batch_cache or BatchCache(net, len(prompts), max_seq_len)
    found = [numbers(net.prefill(prompts, batch_cache))]
    step = step(net, batch_cache) if step else lambda row: net.decode(row, batch_cache)
    return np.stack(found + [numbers(step(row.tolist())) for row in tokens])


def uncached(prompts, tokens):
    """The same from the NumPy model, every sequence alone and computed whole each time."""
    model = numpy_model()
    return np.stack(
        [
            [model([*p, *tokens[:step, row]], rows=[-1])[0] for row, p in enumerate(prompts)]
            for step in range(len(tokens) + 1)
        ]
    )


def assert_close(found, expected, dtype="float32"):
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max())


def some(lengths, steps, seed=0):
    """Random prompts of these lengths, and tokens (steps, batch)."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(VOCAB, size=n).tolist() for n in lengths]
    return prompts, random.integers(VOCAB, size=(steps, len(lengths)))


RAGGED = (3, 17, 1, 9)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    steps=st.integers(0, 4),
    room=st.integers(0, 6),
    attention=st.sampled_from(["sdpa", "written"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_ragged_batch_is_its_single_runs(lengths, steps, room, attention, seed):
    """In prefill and in every decode step, whatever the lengths, and however much room is left."""
    prompts, tokens = some(lengths, steps, seed)
    net, rows = net_of(), max(lengths) + steps + room
    found = decoded(net, prompts, tokens, rows, lambda n, c: lambda row: n.decode(row, c, attention))
    assert_close(found, uncached(prompts, tokens))
    single = [decoded(net, [p], tokens[:, [row]], rows) for row, p in enumerate(prompts)]
    assert_close(found, np.concatenate(single, axis=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, device):
    prompts, tokens = some(RAGGED, 5)
    net = net_of(dtype, device)
    found = decoded(net, prompts, tokens)
    assert_close(found, uncached(prompts, tokens), dtype)
    single = [decoded(net, [p], tokens[:, [row]]) for row, p in enumerate(prompts)]
    assert_close(found, np.concatenate(single, axis=1), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tolerance_is_far_below_what_a_mistake_changes(dtype):
    """Padded rows that share one position, the bug of chapter 10, is seen in every dtype."""
    prompts, tokens = some(RAGGED, 1)
    net = net_of(dtype)
    batch_cache = BatchCache(net, len(prompts), POSITIONS)
    net.prefill(prompts, batch_cache)
    batch_cache.set_lengths(max(RAGGED))
    wrong, expected = numbers(net.decode(tokens[0].tolist(), batch_cache)), uncached(prompts, tokens)[1]
    off = np.abs(wrong - expected).max(axis=1) / np.abs(expected).max()
    shorter = [row for row, n in enumerate(RAGGED) if n < max(RAGGED)]
    assert (off[shorter] > 4 * TOLERANCE[dtype]).all()


def test_the_batch_is_the_batch_view_of_chapter_10():
    prompts, tokens = some(RAGGED, 3)
    model = numpy_model()
    caches = [ContiguousCache.for_model(model) for _ in prompts]
    view = BatchView(caches, [len(p) for p in prompts])
    expected = [model(np.concatenate(prompts), view, rows=view.last_rows)]
    expected += [model(row, BatchView(caches, [1] * len(caches))) for row in tokens]
    assert_close(decoded(net_of(), prompts, tokens), np.stack(expected))


@pytest.mark.parametrize("span", [18, 33, POSITIONS])
def test_a_fixed_span_under_a_mask_is_the_step_up_to_the_longest(span):
    """What a CUDA graph records: the same work whatever the lengths. Here without the graph."""
    prompts, tokens = some(RAGGED, 1)
    net = net_of()
    batch_cache = BatchCache(net, len(prompts), POSITIONS)
    net.prefill(prompts, batch_cache)
    with torch.no_grad():
        found = net.step(torch.from_numpy(tokens[0]), batch_cache, span, batch_cache.mask(span))
    assert_close(numbers(found), uncached(prompts, tokens)[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cuda_graph_replays_the_step(dtype):
    prompts, tokens = some(RAGGED, 6)
    net = net_of(dtype, "cuda")
    batch_cache = BatchCache(net, len(prompts), POSITIONS)
    graphed = GraphedDecode(net, batch_cache)
    for _ in range(2):  # one graph serves several batches of prompts
        batch_cache.reset()
        found = decoded(net, prompts, tokens, step=lambda n, c: graphed, batch_cache=batch_cache)
        assert_close(found, uncached(prompts, tokens), dtype)
    assert batch_cache.lengths.tolist() == [n + 6 for n in RAGGED]


# --- rows that do not count -------------------------------------------------------------


def test_what_stands_in_unused_rows_changes_nothing():
    """Above the longest sequence nothing is read, so NaN is harmless; below it a weight of 0 hides a row."""
    prompts, tokens = some(RAGGED, 4)
    net = net_of()
    expected = decoded(net, prompts, tokens)
    batch_cache = BatchCache(net, len(prompts), POSITIONS)
    found = [numbers(net.prefill(prompts, batch_cache))]
    for row in tokens:
        for rows in (batch_cache.keys, batch_cache.values):
            rows[:, :, :, batch_cache.longest + 1 :] = float("nan")
            for sequence, n in enumerate(batch_cache.lengths.tolist()):
                rows[:, sequence, :, n : batch_cache.longest + 1] = 1e3
        found.append(numbers(net.decode(row.tolist(), batch_cache)))
    np.testing.assert_array_equal(np.stack(found), expected)


def test_nan_below_the_longest_sequence_spreads_until_reset():
    """0 × NaN is NaN: why rows start as zeros and why reset() zeroes them."""
    prompts, tokens = some(RAGGED, 2)
    net = net_of()
    batch_cache = BatchCache(net, len(prompts), POSITIONS)
    expected = decoded(net, prompts, tokens, batch_cache=batch_cache)
    # Sequence 0 has 5 tokens, the longest 19. A prefill's padding, 17 rows, does not reach row 18.
    batch_cache.values[:, 0, :, 18] = float("nan")
    assert np.isnan(numbers(net.decode([0] * 4, batch_cache))[0]).all()
    batch_cache.reset()
    np.testing.assert_array_equal(
        decoded(net, prompts, tokens, batch_cache=batch_cache), expected
    )  # exactly the same after a reset


def test_the_same_answers_after_reset_and_after_going_back():
    prompts, tokens = some(RAGGED, 3)
    net = net_of()
    batch_cache = BatchCache(net, len(prompts), POSITIONS)
    first = decoded(net, prompts, tokens, batch_cache=batch_cache)
    batch_cache.reset()
    other, more = some((8, 2, 30, 5), 3, seed=1)
    decoded(net, other, more, batch_cache=batch_cache)
    batch_cache.reset()
    np.testing.assert_array_equal(decoded(net, prompts, tokens, batch_cache=batch_cache), first)
    batch_cache.set_lengths([n + 1 for n in RAGGED])
    again = [numbers(net.decode(row.tolist(), batch_cache)) for row in tokens[1:]]
    np.testing.assert_array_equal(np.stack(again), first[2:])


# --- calls that fail -----------------------------------------------------------------------


def bad_calls(net, batch_cache):
    yield ValueError, lambda: net.decode([0] * 3, batch_cache)
    yield ValueError, lambda: net.decode([0, 1, 2, VOCAB], batch_cache)
    yield TypeError, lambda: net.decode([0.5] * 4, batch_cache)
    yield ValueError, lambda: net.decode([0] * 4, batch_cache, attention="flash")
    yield ValueError, lambda: net.prefill([[1]] * 4, batch_cache)
    yield ValueError, lambda: batch_cache.set_lengths([1, 2, 3, POSITIONS + 1])
    yield ValueError, lambda: batch_cache.set_lengths([1, 2, 3])
    yield ValueError, lambda: batch_cache.set_lengths(-1)
    yield TypeError, lambda: batch_cache.set_lengths(1.5)


def test_a_refused_call_changes_nothing():
    prompts, tokens = some(RAGGED, 2)
    net = net_of()
    expected = decoded(net, prompts, tokens)[1:]
    batch_cache = BatchCache(net, len(prompts), POSITIONS)
    net.prefill(prompts, batch_cache)
    for row, logits in zip(tokens, expected, strict=True):
        before = [rows.clone() for rows in (batch_cache.keys, batch_cache.values, batch_cache.lengths)]
        for error, call in bad_calls(net, batch_cache):
            with pytest.raises(error):
                call()
        for rows, kept in zip(
            (batch_cache.keys, batch_cache.values, batch_cache.lengths), before, strict=True
        ):
            assert torch.equal(rows, kept)
        np.testing.assert_array_equal(numbers(net.decode(row.tolist(), batch_cache)), logits)


def failing_at(number, error, monkeypatch):
    """Let the `number`-th gelu from now on raise: in the middle of a pass, some layers are written."""
    gelu, calls = torch.nn.functional.gelu, iter(range(10**6))

    def sometimes(*args, **kwargs):
        if next(calls) == number:
            raise error
        return gelu(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "gelu", sometimes)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_pass_that_breaks_off_changes_nothing(error, layer, monkeypatch):
    prompts, tokens = some(RAGGED, 2)
    net = net_of()
    expected = decoded(net, prompts, tokens)
    batch_cache = BatchCache(net, len(prompts), POSITIONS)
    with monkeypatch.context() as patch:
        failing_at(layer, error, patch)
        with pytest.raises(type(error)):
            net.prefill(prompts, batch_cache)
    assert batch_cache.lengths.tolist() == [0] * 4 and batch_cache.longest == 0
    found = [numbers(net.prefill(prompts, batch_cache))]
    for row in tokens:
        with monkeypatch.context() as patch:
            failing_at(layer, error, patch)
            with pytest.raises(type(error)):
                net.decode([1, 2, 3, 4], batch_cache)
        found.append(numbers(net.decode(row.tolist(), batch_cache)))
    np.testing.assert_array_equal(np.stack(found), expected)


@pytest.mark.parametrize("moment", ["begin_growing", "end_growing"])
def test_an_interrupt_while_the_lengths_grow_leaves_the_old_ones(moment, monkeypatch):
    """The lengths exist on the device and on the host: what stops between the two must not part them."""
    prompts, tokens = some(RAGGED, 2)
    net = net_of()
    expected = decoded(net, prompts, tokens)[1:]
    batch_cache = BatchCache(net, len(prompts), POSITIONS)
    net.prefill(prompts, batch_cache)
    for row, logits in zip(tokens, expected, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(batch_cache, moment, lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
            if moment == "end_growing":
                patch.setattr(batch_cache, "begin_growing", lambda: setattr(batch_cache, "_moving", True))
            with pytest.raises(KeyboardInterrupt):
                net.decode([1, 2, 3, 4], batch_cache)
        np.testing.assert_array_equal(numbers(net.decode(row.tolist(), batch_cache)), logits)


def test_out_of_memory_in_a_step_changes_nothing():
    prompts, tokens = some(RAGGED, 1)
    net = net_of()
    expected = decoded(net, prompts, tokens)[1]
    batch_cache = BatchCache(net, len(prompts), POSITIONS)
    net.prefill(prompts, batch_cache)
    with MemoryCap(2_000), pytest.raises(torch.OutOfMemoryError):
        net.decode(tokens[0].tolist(), batch_cache)
    np.testing.assert_array_equal(numbers(net.decode(tokens[0].tolist(), batch_cache)), expected)


def test_a_full_cache_is_refused_and_stays_full():
    prompts, tokens = some((2, 5), 1)
    net = net_of()
    batch_cache = BatchCache(net, 2, 6)
    with pytest.raises(CacheFull, match="a prompt of 7 tokens does not fit in a cache of 6"):
        net.prefill([[1], [1] * 7], batch_cache)
    net.prefill(prompts, batch_cache)
    net.decode(tokens[0].tolist(), batch_cache)
    for _ in range(2):
        with pytest.raises(CacheFull, match=r"7 tokens do not fit in a cache of 6 \(6 held, 1 new\)"):
            net.decode(tokens[0].tolist(), batch_cache)
    assert batch_cache.lengths.tolist() == [3, 6]
