"""MemoryCap: what counts, until when, and how one gets out of out-of-memory."""

import gc
from types import SimpleNamespace

import pytest
import torch

from kvcourse import loading
from kvcourse.torch_models import GPT2, BatchCache, MemoryCap

MIB, GIB = 2**20, 2**30
TOKEN = 2 * 12 * 12 * 64 * 2  # bytes of a token's keys and values, GPT-2 124M in 16 bit: 36,864
WEIGHTS = 2 * 124_439_808  # bytes of its weights in 16 bit
ROWS = 520  # of the published sweep: 512 tokens and 8 to come
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none")


def mebibytes(number, device="cpu"):
    return torch.zeros(number * MIB, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_count_while_somebody_holds_them(device):
    with MemoryCap(10 * MIB, device) as cap:
        x = mebibytes(3, device)
        y = mebibytes(2, device)
        assert cap.held == 5 * MIB
        view = x[5:].view(torch.int8)  # no bytes of its own, and it keeps x's
        del x
        assert cap.held == 5 * MIB
        held = [y]
        del y, view
        assert cap.held == 2 * MIB
        held.clear()
        assert cap.held == 0
    assert cap.peak == 5 * MIB


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_exactly_the_limit_fits_and_one_byte_more_does_not(device):
    with MemoryCap(4 * MIB, device) as cap:
        x = mebibytes(4, device)
        with pytest.raises(torch.OutOfMemoryError) as refused:
            torch.zeros(1, dtype=torch.uint8, device=device)
        del x
        mebibytes(4, device)
    assert isinstance(refused.value, RuntimeError)
    assert str(refused.value) == (
        "out of memory: 0.00 MiB asked for, 4.00 MiB of 4.00 MiB held: "
        "let go of tensors that are no longer needed, or ask for less"
    )
    assert cap.peak == 4 * MIB


def test_memory_that_came_in_is_not_counted_again():
    outside = torch.ones(MIB)
    with MemoryCap(64 * MIB) as cap:
        outside.add_(1)
        outside[3:].mul_(2)
        outside.view(4, -1).T.unbind()
        torch.add(outside, 1, out=outside)
        (outside.view(2, 2, -1).detach() * 0).sum()
        assert cap.held == 0
        cap.count(outside, outside[1:])
        assert cap.held == outside.nbytes
        again = torch.tensor([[1.0, 2.0]])
        assert cap.held == outside.nbytes + again.nbytes
    del outside
    assert cap.held == again.nbytes


def test_count_refuses_what_does_not_fit():
    outside = mebibytes(2)
    with pytest.raises(torch.OutOfMemoryError, match="2.00 MiB asked for, 0.00 MiB of 1.00 MiB held"):
        MemoryCap(MIB).count(outside)


def test_other_devices_do_not_count():
    with MemoryCap(MIB, "meta") as cap:
        on_cpu = mebibytes(3)
        assert cap.held == 0 and on_cpu.nbytes == 3 * MIB


def test_several_results_of_one_operation_count_together():
    with MemoryCap(GIB) as cap:
        values, places = torch.zeros(1000).sort()  # float32 and int64
        assert cap.held == 12_000
        del places
        assert cap.held == 4_000
        del values
    assert cap.held == 0


def test_a_sparse_tensor_is_let_through():
    places, numbers = torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0])
    with MemoryCap(MIB) as cap:
        sparse = torch.sparse_coo_tensor(places, numbers, (3,), check_invariants=True)
        assert (sparse * 2).to_dense().tolist() == [2, 4, 0]
        assert cap.held == 0


# --- who still holds it? -----------------------------------------------------------------------


def fails_with_a_tensor_in_hand(cap):
    in_hand = mebibytes(3)
    assert cap.held == 3 * MIB
    return in_hand, mebibytes(9)


def test_a_kept_traceback_keeps_the_tensors_of_its_frames():
    with MemoryCap(10 * MIB) as cap:
        try:
            fails_with_a_tensor_in_hand(cap)
        except torch.OutOfMemoryError as error:
            kept = error
        assert cap.held == 3 * MIB, "the refused 9 MiB are gone, the frame's 3 MiB are not"
        kept.__traceback__ = None
        assert cap.held == 0


def test_the_refused_operations_own_frame_keeps_nothing():
    """On a GPU the error comes out of C++, where no Python frame holds an operand or the result."""
    with MemoryCap(10 * MIB) as cap:
        try:
            mebibytes(4) + mebibytes(4)
        except torch.OutOfMemoryError as error:
            kept = error
        assert cap.held == 0 and kept.__traceback__ is not None


def test_a_cycle_counts_until_the_collector_finds_it():
    with MemoryCap(10 * MIB) as cap:
        gc.disable()
        try:
            knot = [mebibytes(2)]
            knot.append(knot)
            del knot
            assert cap.held == 2 * MIB
        finally:
            gc.enable()
        gc.collect()
        assert cap.held == 0


def test_bytes_freed_outside_are_struck_out_and_the_cap_can_be_entered_again():
    cap = MemoryCap(4 * MIB)
    with cap:
        x = mebibytes(3)
    y = mebibytes(50)  # outside: neither counted nor refused
    assert cap.held == 3 * MIB
    with cap, pytest.raises(torch.OutOfMemoryError):
        mebibytes(3)
    del x, y
    with cap:
        x = mebibytes(3)
    assert cap.held == cap.peak == x.nbytes


# --- recovery -------------------------------------------------------------------------------------


def provoke(cap, device):
    held = []
    try:
        while True:
            held.append(mebibytes(3, device))
    except torch.OutOfMemoryError:
        reached = cap.held
        held.clear()
    return reached


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=needs_cuda)])
def test_five_times_in_a_row_back_to_the_baseline(device):
    if device == "cuda":
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_reserved() + 100 * MIB
    else:
        limit = 100 * MIB
    with MemoryCap(limit, device) as cap:
        baseline = cap.held
        for _ in range(5):
            assert provoke(cap, device) - baseline >= 60 * MIB  # 3 MiB each; a GPU reserves in larger pieces
            assert cap.held == baseline
        assert mebibytes(3, device).sum().device.type == device
    with torch.no_grad():
        assert len({tensor.device for tensor in [mebibytes(200, device)]}) == 1  # no limit any more


class _FakeCuda:
    """The part of torch.cuda that a cap uses, on a card of 8 GiB, with a note of every fraction set."""

    def __init__(self):
        self.fraction, self.set, self.peak_resets = 0.9, [], 0

    def is_available(self):
        return True

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=8 * GIB)

    def synchronize(self, device):
        pass

    empty_cache = staticmethod(lambda: None)

    def get_per_process_memory_fraction(self, device):
        return self.fraction

    def set_per_process_memory_fraction(self, fraction, device):
        assert isinstance(fraction, float) and 0 <= fraction <= 1  # what PyTorch takes
        self.fraction = fraction
        self.set.append(fraction)

    def reset_peak_memory_stats(self, device):
        self.peak_resets += 1

    def memory_allocated(self, device):
        return 3 * GIB

    def max_memory_allocated(self, device):
        return 5 * GIB


def test_on_cuda_the_allocator_gets_the_share_and_has_it_taken_back(monkeypatch):
    fake = _FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    cap = MemoryCap(6 * GIB, "cuda")
    assert fake.set == []
    with pytest.raises(torch.OutOfMemoryError), cap:
        assert (cap.held, cap.peak) == (3 * GIB, 5 * GIB)
        raise torch.OutOfMemoryError("from the allocator")
    with cap:
        cap.count(torch.zeros(1))
    assert fake.set == [0.75, 0.9, 0.75, 0.9] and fake.peak_resets == 1
    with MemoryCap(20 * GIB, "cuda"):
        assert fake.fraction == 1.0


@needs_cuda
def test_on_cuda_the_limit_is_given_back():
    before = torch.cuda.get_per_process_memory_fraction()
    with pytest.raises(torch.OutOfMemoryError), MemoryCap(64 * MIB, "cuda"):
        mebibytes(512, "cuda")
    assert torch.cuda.get_per_process_memory_fraction() == before


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "6 GiB"])
def test_a_limit_that_is_no_number_of_bytes_is_one_line(limit):
    with pytest.raises(ValueError, match="give a whole number of bytes, at least 1"):
        MemoryCap(limit)


@pytest.mark.parametrize("device", ["mps", "foo", "", None])
def test_an_unknown_device_is_one_line(device):
    with pytest.raises(ValueError, match=f"device '{device}' is not supported: use 'cpu', 'cuda' or 'meta'$"):
        MemoryCap(1, device)


# --- the published sweep on a card of 6 GiB, at its true size, without its memory ------------------------


@pytest.fixture(scope="module")
def gpt2_124m():
    return GPT2(loading.random_model("gpt2"), "meta", "float16")


def test_512_sequences_never_fit_and_256_do(gpt2_124m):
    cap = MemoryCap(6 * GIB, "meta")
    cap.count(*gpt2_124m.params.values())
    assert cap.held == gpt2_124m.nbytes == WEIGHTS
    with cap:
        cache = BatchCache(gpt2_124m, 256, ROWS)
        assert WEIGHTS + 256 * ROWS * TOKEN <= cap.held < 6 * GIB
        cache.fill_random(512)
        gpt2_124m.decode([5] * 256, cache)
        del cache
        with pytest.raises(torch.OutOfMemoryError, match=r"4.57 GiB asked for, 4.80 GiB of 6.00 GiB held"):
            BatchCache(gpt2_124m, 512, ROWS)
    assert 512 * ROWS * TOKEN > 9 * GIB  # more than the whole card


def test_a_stale_cache_fails_one_size_earlier(gpt2_124m):
    with MemoryCap(6 * GIB, "meta") as cap:
        cap.count(*gpt2_124m.params.values())
        cache = BatchCache(gpt2_124m, 128, ROWS)
        with pytest.raises(torch.OutOfMemoryError, match="2.29 GiB asked for, 4.80 GiB of 6.00 GiB held"):
            cache = BatchCache(gpt2_124m, 256, ROWS)  # the old one is held until the new one is there
        del cache
        cache = BatchCache(gpt2_124m, 256, ROWS)
        assert cap.held == cap.peak > WEIGHTS + cache.nbytes
