"""How many pieces of device work a call starts: counted one by one, or by the profiler on a GPU."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that only reserve memory, or are a view without saying so in their schema.
NO_LAUNCH = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view"}


def count_launches(fn):
    """How many operations that start device work fn() calls, an int. Runs fn once.

    Counted are PyTorch's operations on tensors, one launch each; left out are views and reservations
    of memory, which start nothing. scaled_dot_product_attention is one operation (on a GPU one
    kernel or more: a mask of True and False is turned into numbers first). Exact and the same on
    "cpu", "cuda" and "meta"; on "meta" nothing is computed. Seen is this thread alone: work that fn
    gives to another one counts as 0.
    """
    return launched_operations(fn).total()


def launched_operations(fn):
    """The operations behind `count_launches`: a Counter {name: how often}, most frequent first."""
    counter = _DispatchCounter()
    with _OneAttention(counter), counter:
        fn()
    return Counter(dict(counter.found.most_common()))


class _DispatchCounter(TorchDispatchMode):
    """Sees every operation just before a device would; counts those that start work."""

    def __init__(self):
        super().__init__()
        self.found = Counter()
        self.paused = False

    @classmethod
    def _should_skip_dynamo(cls):
        """Spare the import of PyTorch's compiler, which its wrapper of this method would need: seconds."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not (self.paused or func.is_view or name in NO_LAUNCH):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class _OneAttention(TorchFunctionMode):
    """scaled_dot_product_attention as one operation: on "meta" PyTorch takes it apart, elsewhere not."""

    def __init__(self, counter):
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self._counter.found["scaled_dot_product_attention"] += 1
        self._counter.paused = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._counter.paused = False


@dataclass(frozen=True)
class ProfiledLaunches:
    """What a profiler saw on a GPU: `kernels` the device ran, `calls` of the host that started them."""

    kernels: int
    calls: int


# Calls of the CUDA runtime and driver that start device work; a whole graph is one of them.
_STARTS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def profiled_launches(fn, rounds=3):
    """ProfiledLaunches of fn() on a CUDA device, by torch.profiler. Runs fn once more than `rounds`.

    A profiler may lose events at the start of a session and never invents one: the largest count of
    several sessions is taken. Raises RuntimeError without a CUDA device: use count_launches there.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the profiler counts kernels on a CUDA device, there is none: use count_launches")
    fn()  # libraries load their kernels at the first use
    sessions = [_profiled_once(fn) for _ in range(rounds)]
    return ProfiledLaunches(kernels=max(s.kernels for s in sessions), calls=max(s.calls for s in sessions))


def _profiled_once(fn):
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        fn()
        torch.cuda.synchronize()
    events = profiled.events()
    return ProfiledLaunches(
        kernels=sum(e.device_type == DeviceType.CUDA and not e.is_user_annotation for e in events),
        calls=sum(e.device_type == DeviceType.CPU and e.name.startswith(_STARTS) for e in events),
    )
