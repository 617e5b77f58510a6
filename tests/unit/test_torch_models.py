"""torch_models: what a net and its cache hold and refuse, which launches a step makes, how it is timed."""

import subprocess
import sys
from collections import Counter, namedtuple

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType

from kvcourse import loading, measure
from kvcourse.caches import ContiguousCache
from kvcourse.torch_models import (
    GPT2,
    BatchCache,
    GraphedDecode,
    MemoryCap,
    ProfiledLaunches,
    count_launches,
    event_seconds,
    graphs,
    launched_operations,
    launches,
    profiled_launches,
    timing,
)
from kvcourse.torch_models.gpt2 import written_attention

LAYERS, HEADS, HEAD_DIM, VOCAB, POSITIONS = 3, 2, 8, 50, 24
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none")


@pytest.fixture(scope="module")
def model():
    return loading.random_model(
        "gpt2", num_layers=LAYERS, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM,
        hidden_size=HEADS * HEAD_DIM, intermediate_size=64, vocab_size=VOCAB, max_seq_len=POSITIONS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def net(model):
    return GPT2(model)


def test_kvcourse_imports_no_torch_until_it_is_used():
    code = "import sys, kvcourse as kv\nassert 'torch' not in sys.modules\nkv.torch_models.GPT2"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- the net ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_weights_are_copied_once_in_the_asked_format(model, dtype, size):
    net = GPT2(model, dtype=dtype)
    assert net.nbytes == size * model.config.num_parameters
    assert net.dtype == getattr(torch, dtype) and net.device == torch.device("cpu")
    before = model.params["wpe.weight"][0, 0]
    net.params["wpe.weight"].zero_()
    assert model.params["wpe.weight"][0, 0] == before != 0


def test_a_meta_net_has_every_shape_and_no_memory(model):
    net = GPT2(model, "meta", torch.bfloat16)
    cache = BatchCache(net, 1000, 20)
    logits = net.prefill([[1, 2], *[[3]] * 999], cache)
    assert logits.shape == net.decode([1] * 1000, cache).shape == (1000, VOCAB)
    assert logits.is_meta and cache.longest == 3 and cache.ragged
    assert cache.nbytes == 2 * LAYERS * 1000 * HEADS * 20 * HEAD_DIM * 2


@pytest.mark.parametrize(
    "device, dtype, message",
    [
        ("cpu", "float64", "dtype 'float64' is not supported: use one of float32, float16, bfloat16"),
        ("mps", "float32", "device 'mps' is not supported: use 'cpu', 'cuda' or 'meta'"),
        ("foo", "float32", "device 'foo' is not supported: use 'cpu', 'cuda' or 'meta'$"),
        ("", "float32", "device '' is not supported: use 'cpu', 'cuda' or 'meta'$"),
        (None, "float32", "device 'None' is not supported: use 'cpu', 'cuda' or 'meta'$"),
        ("cpu", ["x"], r"dtype \['x'\] is not supported: use one of float32"),
    ],
)
def test_unknown_devices_and_formats_are_one_line(model, device, dtype, message):
    with pytest.raises(ValueError, match=message):
        GPT2(model, device, dtype)


@pytest.mark.parametrize("device", ["foo", ""])
def test_an_unknown_device_to_time_is_one_line(device):
    with pytest.raises(ValueError, match=f"device '{device}' is not supported: use 'cpu', 'cuda' or 'meta'$"):
        event_seconds(lambda: None, device=device)


def test_the_number_of_the_one_cpu_is_left_out(model):
    net = GPT2(model, "cpu:3")
    assert net.device == BatchCache(net, 1, 5).device == torch.device("cpu")
    assert net.prefill([[1]], BatchCache(net, 1, 5)).shape == (1, VOCAB)


def test_a_gpu_number_that_is_not_there_is_one_line(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="device 'cuda:2': CUDA devices here have the numbers 0 … 1$"):
        GPT2(model, "cuda:2")


def test_cuda_without_a_device_is_one_line(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'cuda': PyTorch finds no CUDA device here, use 'cpu'"):
        GPT2(model, "cuda")
    with pytest.raises(ValueError, match="device 'cuda': PyTorch finds no CUDA device here"):
        MemoryCap(1, "cuda")


def test_only_a_numpy_gpt2_is_taken(net):
    with pytest.raises(TypeError, match="a GPT2 is given: give a GPT-2, as kv.load_model"):
        GPT2(net)


# --- the cache ------------------------------------------------------------------------------


def test_the_shape_of_the_cache(net):
    cache = BatchCache(net, 4, 10)
    assert cache.keys.shape == cache.values.shape == (LAYERS, 4, HEADS, 10, HEAD_DIM)
    assert cache.lengths.dtype == torch.int64 and cache.lengths.tolist() == [0] * 4
    assert cache.nbytes == 2 * LAYERS * 4 * HEADS * 10 * HEAD_DIM * 4 and cache.nbytes_used == 0
    cache.set_lengths([1, 2, 3, 4])
    assert cache.nbytes_used == cache.nbytes // 4  # 10 of 40 tokens
    assert (cache.longest, cache.ragged, cache.lengths.tolist()) == (4, True, [1, 2, 3, 4])
    cache.set_lengths(7)
    assert (cache.longest, cache.ragged, cache.lengths.tolist()) == (7, False, [7] * 4)


@pytest.mark.parametrize(
    "batch, max_seq_len, error, message",
    [
        (0, 5, ValueError, "batch is 0: give at least 1"),
        (2, 0, ValueError, "max_seq_len is 0: give at least 1"),
        (2.0, 5, TypeError, "batch is 2.0: give a whole number of at least 1"),
        (True, 5, TypeError, "batch is True: give a whole number of at least 1"),
        (2, POSITIONS + 1, ValueError, f"max_seq_len 25 is more than the {POSITIONS} positions of gpt2"),
    ],
)
def test_an_impossible_cache_is_one_line(net, batch, max_seq_len, error, message):
    with pytest.raises(error, match=message):
        BatchCache(net, batch, max_seq_len)


@pytest.mark.parametrize(
    "device, batch", [("cpu", 10**15), ("cpu", 10**18), ("meta", 10**18), ("cpu", 10**30)]
)
def test_a_cache_of_a_size_that_cannot_be_is_out_of_memory(model, device, batch):
    """The sizes meet three refusals of PyTorch: no room, a product and a number beyond 64 bits."""
    size = LAYERS * batch * HEADS * 20 * HEAD_DIM * 4
    with pytest.raises(torch.OutOfMemoryError) as refused:
        BatchCache(GPT2(model, device), batch, 20)
    assert str(refused.value) == (
        f"out of memory on {device}: {size:,} bytes each for keys and values of {batch:,} sequences of "
        f"20 tokens: ask for a smaller batch or max_seq_len"
    )


@pytest.mark.parametrize("one", [np.array(3), torch.tensor(3), np.int64(3)])
def test_a_length_may_be_an_array_of_no_axes(net, one):
    cache = BatchCache(net, 2, 5)
    cache.set_lengths(one)
    assert cache.lengths.tolist() == [3, 3] and cache.longest == 3


@pytest.mark.parametrize(
    "seq_len, seed, error, message",
    [
        ([1, 2, 3], 0, TypeError, r"seq_len is \[1, 2, 3\]: give a whole number of at least 0"),
        (3, "x", TypeError, "seed is 'x': give a whole number of at least 0"),
        (6, 0, ValueError, "length 6 is outside 0 … 5, the rows there are"),
    ],
)
def test_random_rows_that_are_refused_change_nothing(net, seq_len, seed, error, message):
    cache = BatchCache(net, 3, 5)
    cache.set_lengths([1, 0, 2])
    with pytest.raises(error, match=message):
        cache.fill_random(seq_len, seed=seed)
    assert cache.lengths.tolist() == [1, 0, 2] and cache.longest == 2
    assert not cache.keys.any() and not cache.values.any()


def test_a_step_writes_one_row_a_sequence_and_moves_nothing(net):
    """Every number of the cache is a 7 at first; after a step all are, but the rows at the old lengths."""
    cache = BatchCache(net, 3, 12)
    for rows in (cache.keys, cache.values):
        rows.fill_(7)
    lengths = [2, 9, 5]
    cache.set_lengths(lengths)
    places = cache.keys.data_ptr(), cache.values.data_ptr(), cache.lengths.data_ptr()
    net.decode([1, 2, 3], cache)
    assert places == (cache.keys.data_ptr(), cache.values.data_ptr(), cache.lengths.data_ptr())
    for rows in (cache.keys, cache.values):
        changed = (rows != 7).all(dim=-1).all(dim=2).all(dim=0)  # (batch, max_seq_len)
        assert changed.nonzero().tolist() == [[row, n] for row, n in enumerate(lengths)]
        assert ((rows == 7).all(dim=-1).all(dim=2).all(dim=0) | changed).all()
    assert cache.lengths.tolist() == [3, 10, 6]


@pytest.mark.parametrize("attention", ["sdpa", "written"])
@pytest.mark.parametrize("lengths", [20, [20, 3, 11, 7]])
def test_a_step_copies_no_cache(model, attention, lengths):
    """All that the operations of a step hold at once is smaller than one layer's keys (here 16 KiB)."""
    net = GPT2(model)
    cache = BatchCache(net, 4, POSITIONS)
    cache.fill_random(20)
    cache.set_lengths(lengths)
    tokens = torch.tensor([1, 2, 3, 4])
    net.decode(tokens, cache, attention)
    with MemoryCap(2**30) as cap:
        net.decode(tokens, cache, attention)
    assert 0 < cap.peak < cache.keys[0].nbytes


def test_caches_of_other_models_are_refused(net, model):
    other = GPT2(model, dtype="float16")
    with pytest.raises(ValueError, match=r"float16 on cpu does not fit gpt2, .* float32 on cpu: make one"):
        net.decode([1], BatchCache(other, 1, 5))
    wider = loading.random_model(
        "gpt2", num_layers=LAYERS, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM,
        hidden_size=HEADS * HEAD_DIM, intermediate_size=64, vocab_size=VOCAB, max_seq_len=99,
    )  # fmt: skip
    with pytest.raises(ValueError, match="the cache has 99 rows a sequence, gpt2 only 24 positions"):
        net.decode([1], BatchCache(GPT2(wider), 1, 99))


@pytest.mark.parametrize(
    "prompts, error, message",
    [
        ([1, 2], TypeError, r"prompts are \[1, 2\]: give one list of token ids a sequence"),
        ("ab", TypeError, "prompts are 'ab': give one list"),
        (["ab", "c"], TypeError, "give one list of token ids a sequence"),
        ([[1]], ValueError, "1 prompts for a cache of 2 sequences: give one each"),
        ([], ValueError, "0 prompts for a cache of 2 sequences"),
        ([[1], []], ValueError, "no token ids"),
        ([[1], [VOCAB]], ValueError, "token id 50 is outside the vocabulary"),
        (None, TypeError, "prompts are None: give one list of token ids a sequence"),
        (5, TypeError, "prompts are 5: give one list of token ids a sequence"),
        (np.array(5), TypeError, r"prompts are array\(5\): give one list"),
        ((i for i in (1, 2)), TypeError, r"prompts are \[1, 2\]: give one list"),
        ([[1], [True, 2]], TypeError, r"ids are \[True, 2\]: token ids are whole numbers, not True or False"),
    ],
)
def test_prompts_that_cannot_be_are_one_line(net, prompts, error, message):
    with pytest.raises(error, match=message):
        net.prefill(prompts, BatchCache(net, 2, 5))


def test_prompts_may_come_from_a_generator(net):
    lists, generated = BatchCache(net, 2, 5), BatchCache(net, 2, 5)
    expected = net.prefill([[1, 2], [3]], lists)
    assert torch.equal(net.prefill((prompt for prompt in ([1, 2], [3])), generated), expected)


@pytest.mark.parametrize(
    "tokens, error, message",
    [
        ([True, 1], TypeError, r"ids are \[True, 1\]: token ids are whole numbers, not True or False"),
        ([np.True_, 1], TypeError, "token ids are whole numbers, not True or False"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "tokens are on meta, .* on cpu"),
    ],
)
def test_tokens_that_cannot_be_are_one_line(net, tokens, error, message):
    cache = BatchCache(net, 2, 5)
    with pytest.raises(error, match=message):
        net.decode(tokens, cache)
    assert cache.lengths.tolist() == [0, 0]


def test_something_else_for_a_cache_is_one_line(net, model):
    for other in (None, ContiguousCache.for_model(model)):
        message = f"the cache is a {type(other).__name__}: make one with BatchCache"
        with pytest.raises(TypeError, match=message):
            net.decode([1], other)
        with pytest.raises(TypeError, match=message):
            net.prefill([[1]], other)


def test_a_cache_in_use_takes_no_prompts(net):
    cache = BatchCache(net, 1, 5)
    net.prefill([[1, 2]], cache)
    with pytest.raises(ValueError, match=r"the cache holds up to 2 tokens already: reset\(\) it first"):
        net.prefill([[1, 2]], cache)


def test_random_rows_are_finite_and_only_where_they_count(net):
    cache = BatchCache(net, 2, 9)
    cache.fill_random(6)
    assert cache.lengths.tolist() == [6, 6]
    for rows in (cache.keys, cache.values):
        assert rows[:, :, :, :6].std() > 0.5 and (rows[:, :, :, 6:] == 0).all()
    assert torch.isfinite(net.decode([1, 2], cache)).all()


def test_the_mask_hides_what_lies_after_each_new_token(net):
    cache = BatchCache(net, 3, 20)
    cache.set_lengths([0, 4, 1])
    mask = cache.mask(5)
    assert mask.shape == (3, 1, 1, 5)
    assert (mask[:, 0, 0] == 0).tolist() == [
        [True, False, False, False, False],
        [True, True, True, True, True],
        [True, True, False, False, False],
    ]
    assert set(mask.unique().tolist()) == {0.0, float("-inf")}
    assert all(stride % 8 == 0 for stride in mask.stride()[:3])  # what CUDA's kernels take without a copy


def test_written_attention_is_the_formula():
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 3, n, 4), dtype=np.float32) for n in (1, 6, 6))
    mask = np.where(random.random((2, 1, 1, 6)) < 0.3, -np.inf, 0).astype(np.float32)
    scores = np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k) / 2 + mask  # √4 = 2
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    expected = np.einsum("bhqk,bhkd->bhqd", weights, v)
    found = written_attention(*map(torch.from_numpy, (q, k, v)), torch.from_numpy(mask))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)  # float32 sums of 6 numbers of size 1


# --- launches ---------------------------------------------------------------------------------


def step_of(model, device, lengths, attention="sdpa"):
    net = GPT2(model, device)
    cache = BatchCache(net, len(lengths), POSITIONS)
    cache.set_lengths(lengths)
    tokens = torch.zeros(len(lengths), dtype=torch.int64, device=device)
    return lambda: net.decode(tokens, cache, attention)


# Counted by hand from the formulas: a layer is 2 norms, 4 products, 2 writes, attention, a gelu, 2 sums;
# around the layers stand 2 embeddings and their sum, the last norm, the logits, and the lengths.
A_LAYER = Counter(native_layer_norm=2, addmm=4, index_put_=2, gelu=1, add=2)
AROUND = Counter(embedding=2, add=1, native_layer_norm=1, mm=1, add_=1)
ATTENTION = {
    "sdpa": Counter(scaled_dot_product_attention=1),
    "written": Counter(mul=1, bmm=2, _softmax=1),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("attention", ["sdpa", "written"])
def test_every_launch_of_a_step_is_counted(model, device, attention):
    layer = A_LAYER + ATTENTION[attention]
    expected = AROUND + Counter({name: LAYERS * n for name, n in layer.items()})
    step = step_of(model, device, [5, 5], attention)
    assert launched_operations(step) == expected
    assert count_launches(step) == expected.total() == {"sdpa": 12, "written": 15}[attention] * LAYERS + 6


def test_a_ragged_batch_makes_its_mask_once(model):
    equal, ragged = (launched_operations(step_of(model, "meta", n)) for n in ([5, 5], [5, 3]))
    assert ragged - equal == Counter(gt=1, zeros=1, masked_fill_=1) and not equal - ragged


def test_views_and_reservations_start_nothing():
    x = torch.zeros(4, 6)

    def looks():
        y = x.T.reshape(2, 3, 4)[:, 1].unsqueeze(0)
        return y.expand(5, 2, 4), x.split(2), torch.empty(7), torch.empty_like(x), x.detach()

    assert count_launches(looks) == 0
    assert launched_operations(lambda: (x.add_(1), x @ x.T, x.clone())) == Counter(add_=1, mm=1, clone=1)


def test_counting_twice_and_after_an_error(model):
    step = step_of(model, "meta", [5])
    assert count_launches(step) == count_launches(step)
    with pytest.raises(ZeroDivisionError):
        count_launches(lambda: 1 // 0)
    assert count_launches(lambda: torch.zeros(2) + 1) == 2


def test_the_profiler_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        RuntimeError, match="counts kernels on a CUDA device, there is none: use count_launches"
    ):
        profiled_launches(lambda: None)


def test_what_the_profiler_counts(monkeypatch):
    """Kernels, copies and fills on the device; calls of the host that start them. Sessions lose events at
    their start, so the fullest one is taken. Here the sessions are made up."""
    Event = namedtuple("Event", "name device_type is_user_annotation", defaults=[False])
    host, device = DeviceType.CPU, DeviceType.CUDA
    whole = [
        Event("aten::add", host), Event("cudaLaunchKernel", host), Event("cudaLaunchKernelExC", host),
        Event("cuLaunchKernel", host), Event("cudaMemcpyAsync", host), Event("cudaGraphLaunch", host),
        Event("cudaDeviceSynchronize", host), Event("cudaStreamIsCapturing", host),
        *[Event("gemm", device)] * 7, Event("Memcpy HtoD", device), Event("my range", device, True),
    ]  # fmt: skip
    sessions = iter([whole[:9], whole, whole[3:]])

    class Session:
        def __init__(self, activities):
            self.found = next(sessions)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def events(self):
            return self.found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(launches, "profile", Session)
    calls = []
    assert profiled_launches(lambda: calls.append(1)) == ProfiledLaunches(kernels=8, calls=5)
    assert len(calls) == 4


@needs_cuda
def test_the_profiler_sees_what_was_counted():
    x = torch.ones(64, 64, device="cuda")
    found = profiled_launches(lambda: x + 1)
    assert found == ProfiledLaunches(kernels=1, calls=1)


@needs_cuda
def test_a_graph_is_one_call_and_many_kernels(model):
    net = GPT2(model, "cuda", "float16")
    cache = BatchCache(net, 1, POSITIONS)
    graphed = GraphedDecode(net, cache)
    tokens = torch.zeros(1, dtype=torch.int64, device="cuda")
    found = profiled_launches(lambda: graphed(tokens))
    # The tokens are copied to where the graph reads them, then it is launched; PyTorch may set its random
    # numbers' seed and offset before that.
    assert 2 <= found.calls <= 4
    assert found.kernels >= 12 * LAYERS


# --- graphs, without a GPU --------------------------------------------------------------------


def test_a_graph_needs_a_gpu(net):
    with pytest.raises(RuntimeError, match="a CUDA graph needs a CUDA device, this model is on cpu: use net"):
        GraphedDecode(net, BatchCache(net, 1, 5))


class _FakeCuda:
    """torch.cuda as far as GraphedDecode uses it. A capture runs the step and takes the lengths back, as
    a real one computes nothing; a replay runs the recorded step again into the recorded tensor."""

    def __init__(self):
        self.replays = 0

    def device(self, device):
        return self

    def Stream(self):
        return self

    def current_stream(self):
        return self

    def wait_stream(self, stream):
        pass

    def stream(self, stream):
        return self

    def CUDAGraph(self):
        return self

    def graph(self, graph):
        return self

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            self.owner._logits.copy_(self.owner._recorded())


@pytest.fixture
def fake_cuda(monkeypatch):
    fake = _FakeCuda()
    monkeypatch.setattr(graphs, "_check_device", lambda device: None)
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def graphed_on(fake, net, cache, span=None):
    lengths = cache.lengths.clone()
    graphed = GraphedDecode(net, cache, span)
    cache.lengths.copy_(lengths)  # what capturing does not do on a GPU
    fake.owner = graphed
    return graphed


@pytest.mark.parametrize("span", [None, 9])
def test_a_replayed_step_is_a_step(net, fake_cuda, span):
    """The Python side of a graph: what is recorded, which numbers go in, which lengths come out."""
    cache, twin = BatchCache(net, 2, 12), BatchCache(net, 2, 12)
    for c in (cache, twin):
        net.prefill([[1, 2, 3], [4]], c)
    graphed = graphed_on(fake_cuda, net, cache, span)
    assert cache.lengths.tolist() == [3, 1] and cache.longest == 3
    for number, tokens in enumerate([[5, 6], [7, 8], [9, 10]], start=1):
        found = graphed(tokens)
        # float32 both; over a longer span the same sums are split in other ways
        torch.testing.assert_close(found, net.decode(tokens, twin), rtol=0, atol=1e-6)
        assert fake_cuda.replays == number
        assert cache.lengths.tolist() == [3 + number, 1 + number] and cache.longest == 3 + number
    assert graphed([1, 1]) is graphed([2, 2])  # one tensor, written over


def test_a_graph_refuses_before_anything_changes(net, fake_cuda):
    cache = BatchCache(net, 2, 12)
    net.prefill([[1, 2, 3], [4]], cache)
    graphed = graphed_on(fake_cuda, net, cache, span=4)
    graphed([1, 2])
    with pytest.raises(RuntimeError, match="5 tokens do not fit in the 4 rows that the graph reads"):
        graphed([1, 2])
    with pytest.raises(ValueError, match="tokens of shape"):
        graphed([1])
    assert cache.lengths.tolist() == [4, 2] and fake_cuda.replays == 1
    with pytest.raises(ValueError, match="span 13 is outside 1 … 12, the rows of the cache"):
        GraphedDecode(net, cache, span=13)
    cache.set_lengths(12)
    with pytest.raises(RuntimeError, match="13 tokens do not fit in a cache of 12"):
        GraphedDecode(net, cache)


# --- timing -------------------------------------------------------------------------------------


def test_on_a_cpu_the_clock_times(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(measure, "_clock", lambda: float(next(now)))
    monkeypatch.setattr(measure, "_threads_waiting", lambda: "")
    monkeypatch.setattr(measure._Crowd, "why", lambda self: "")
    calls = []
    timed = event_seconds(lambda: calls.append(1), repeats=3, warmup=1, device="cpu")
    assert isinstance(timed, measure.Timing) and timed.samples == (1.0, 1.0, 1.0) and len(calls) == 4


class _FakeEvents(_FakeCuda):
    """Events whose clock a call moves on by the next of `milliseconds`; nothing waits in between."""

    def __init__(self, milliseconds):
        self.times, self.now, self.waits = iter(milliseconds), 0.0, []

    def work(self):
        self.now += next(self.times)

    def synchronize(self):
        self.waits.append(self.now)

    def is_initialized(self):
        return True

    def Event(self, enable_timing):
        assert enable_timing
        return _FakeEvent(self)


class _FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self):
        self.at = self.cuda.now

    def elapsed_time(self, end):
        return end.at - self.at


def test_on_a_gpu_its_own_events_time(monkeypatch):
    fake = _FakeEvents([9, 9, 4, 2, 3])
    monkeypatch.setattr(timing.torch, "cuda", fake)
    timed = event_seconds(fake.work, repeats=3, warmup=2)
    assert timed.samples == pytest.approx((0.004, 0.002, 0.003)) and not timed.disturbed
    assert fake.waits == [18, 27]  # after the warm-up and once at the end


def test_times_far_apart_are_disturbed(monkeypatch):
    fake = _FakeEvents([1, 4, 4])
    monkeypatch.setattr(timing.torch, "cuda", fake)
    timed = event_seconds(fake.work, repeats=3, warmup=0, device="cuda")
    assert timed.why == "the median call took 4.0x the fastest"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_impossible_repeats_are_one_line(device):
    with pytest.raises(ValueError, match="repeats=0, warmup=2: give at least 1 repeat and 0 warm-ups"):
        event_seconds(lambda: None, repeats=0, device=device)


@needs_cuda
def test_events_on_a_real_gpu():
    x = torch.ones(4096, 4096, device="cuda")
    timed = event_seconds(lambda: x @ x, repeats=5)
    assert len(timed.samples) == 5 and 0 < timed.min < 1
