"""Blocks of a shared cache: who holds them, what they are named, when they go. Ids only, no tensors."""

from kvcourse.paging import traces
from kvcourse.paging.allocation import lognormal_workload, reserved_slots, simulate_allocation
from kvcourse.paging.arrivals import poisson_arrivals, simulate_arrivals
from kvcourse.paging.block_manager import BlockManager, OutOfBlocks, Sequence
from kvcourse.paging.free_queue import Block, FreeQueue
from kvcourse.paging.prefix import block_hash, block_hashes
from kvcourse.paging.radix import RadixTree
from kvcourse.paging.replay import Replay, replay

__all__ = [
    "Block", "BlockManager", "FreeQueue", "OutOfBlocks", "RadixTree", "Replay", "Sequence",
    "block_hash", "block_hashes", "lognormal_workload", "poisson_arrivals", "replay", "reserved_slots",
    "simulate_allocation", "simulate_arrivals", "traces",
]  # fmt: skip
