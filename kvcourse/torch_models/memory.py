"""`MemoryCap`: a device that has less memory than it has, to run out of it on purpose."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcourse.torch_models.devices import parsed_device


class MemoryCap:
    """Inside `with MemoryCap(limit_bytes, device):` no more than so many bytes can be allocated there.

    limit_bytes  a whole number of bytes
    device       "cuda": PyTorch's allocator itself gets the limit, and everything the process holds
                 there counts. "cpu" or "meta": bookkeeping. Every tensor made inside the block
                 counts from its making until nothing refers to its memory any more, wherever
                 that happens; tensors from outside count once they are given to `count()`.

    What goes past the limit raises torch.OutOfMemoryError, and the tensor in question is gone. A
    variable, a list, a view, or a traceback that still holds a tensor keeps its bytes counted. The
    same cap may be entered again, and `held` stays right in between.

    The bookkeeping sees what operations of this thread return. It does not see tensors that another
    thread makes, bytes that a tensor gains in place (`resize_`, or `out=` with a tensor that is too
    small), or sparse tensors.

    Raises ValueError for a limit that is no whole number of at least 1 and for an unknown device.
    """

    def __init__(self, limit_bytes, device="cpu"):
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes < 1:
            raise ValueError(f"limit_bytes is {limit_bytes!r}: give a whole number of bytes, at least 1")
        self.limit_bytes = limit_bytes
        self.device = parsed_device(device)
        if self.device.type == "cuda":
            self._ledger = _CudaLimit(limit_bytes, self.device)
        else:
            self._ledger = _Ledger(limit_bytes, self.device)

    def __enter__(self):
        self._ledger.__enter__()
        return self

    def __exit__(self, *error):
        self._ledger.__exit__(*error)

    @property
    def held(self):
        """Bytes held now."""
        return self._ledger.held

    @property
    def peak(self):
        """The most bytes that were held at once since the cap was first entered."""
        return self._ledger.peak

    def count(self, *tensors):
        """Count tensors that were made outside the block, such as a model's weights. On "cuda" they
        count already. Raises torch.OutOfMemoryError when they do not fit."""
        self._ledger.count(tensors)


class _Ledger(TorchDispatchMode):
    """Bytes of live storages: entered when an operation returns one, struck out when it is freed."""

    def __init__(self, limit, device):
        super().__init__()
        self.limit, self.device = limit, device
        self.held = self.peak = 0
        self._live = set()  # identities of the storages that count now

    @classmethod
    def _should_skip_dynamo(cls):
        """Let PyTorch call __torch_dispatch__ as it is: its wrapper's frames would hold the operands of a
        refused operation, and it imports the compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # A view, an operation in place and `out=` give back memory that came in: not theirs to count.
        # Only lift_fresh, the last step of torch.tensor(…), is given memory that is new.
        came_in = set() if func is torch.ops.aten.lift_fresh.default else self._storages((args, kwargs))
        refused = self._enter(self._storages(result) - came_in)
        if refused:
            # The traceback keeps this frame, and its variables would keep their tensors.
            del result, args, kwargs, came_in
            raise torch.OutOfMemoryError(refused)
        return result

    def count(self, tensors):
        refused = self._enter(self._storages(tensors))
        if refused:
            raise torch.OutOfMemoryError(refused)

    def _storages(self, values):
        """The storages on this device of all tensors in nested lists, tuples and dicts.

        Sparse ones are left out: PyTorch gives them no storage of their own."""
        tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
        return {
            tensor.untyped_storage()
            for tensor in tensors
            if tensor.device.type == self.device.type and tensor.layout == torch.strided
        }

    def _enter(self, storages):
        """Count these storages from now on. Returns "", or why they do not fit."""
        new = [storage for storage in storages if storage._cdata not in self._live]
        size = sum(storage.nbytes() for storage in new)
        if self.held + size > self.limit:
            return (
                f"out of memory: {_shown(size)} asked for, {_shown(self.held)} of {_shown(self.limit)} "
                f"held: let go of tensors that are no longer needed, or ask for less"
            )
        for storage in new:
            self._live.add(storage._cdata)
            weakref.finalize(storage, self._strike, storage._cdata, storage.nbytes()).atexit = False
        self.held += size
        self.peak = max(self.peak, self.held)
        return ""

    def _strike(self, key, size):
        self._live.discard(key)
        self.held -= size


class _CudaLimit:
    """The limit of PyTorch's CUDA allocator: a share of the card's memory, given back on leaving."""

    def __init__(self, limit, device):
        if not torch.cuda.is_available():
            raise ValueError("device 'cuda': PyTorch finds no CUDA device here, use 'cpu' or 'meta'")
        self.device = device
        total = torch.cuda.get_device_properties(device).total_memory
        self._fraction = min(1.0, limit / total)
        self._entered = False

    def __enter__(self):
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # kept but unused blocks count against the limit
        self._before = torch.cuda.get_per_process_memory_fraction(self.device)
        torch.cuda.set_per_process_memory_fraction(self._fraction, self.device)
        if not self._entered:
            torch.cuda.reset_peak_memory_stats(self.device)
        self._entered = True

    def __exit__(self, *error):
        torch.cuda.set_per_process_memory_fraction(self._before, self.device)

    @property
    def held(self):
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak(self):
        return torch.cuda.max_memory_allocated(self.device)

    def count(self, tensors):
        """Nothing to do: the allocator knows every tensor of the process."""


def _shown(size):
    return f"{size / 2**30:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.2f} MiB"
