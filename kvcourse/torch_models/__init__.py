"""GPT-2 in PyTorch: the batched decode step of chapter 10, on a CPU or a CUDA device.

`import kvcourse` does not import this module, and so not torch, until `kv.torch_models` is used.
"""

from kvcourse.torch_models.cache import BatchCache
from kvcourse.torch_models.gpt2 import GPT2
from kvcourse.torch_models.graphs import GraphedDecode
from kvcourse.torch_models.launches import (
    ProfiledLaunches,
    count_launches,
    launched_operations,
    profiled_launches,
)
from kvcourse.torch_models.memory import MemoryCap
from kvcourse.torch_models.paged import PagedBatchCache
from kvcourse.torch_models.timing import event_seconds

__all__ = [
    "BatchCache",
    "GPT2",
    "GraphedDecode",
    "MemoryCap",
    "PagedBatchCache",
    "ProfiledLaunches",
    "count_launches",
    "event_seconds",
    "launched_operations",
    "profiled_launches",
]
