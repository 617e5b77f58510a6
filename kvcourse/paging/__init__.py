"""Blocks of a shared cache: who holds them, what they are named, when they go. Ids only, no tensors."""

from kvcourse.paging.block_manager import BlockManager, OutOfBlocks, Sequence
from kvcourse.paging.free_queue import Block, FreeQueue
from kvcourse.paging.prefix import block_hash, block_hashes
from kvcourse.paging.replay import Replay, replay

__all__ = [
    "Block", "BlockManager", "FreeQueue", "OutOfBlocks", "Replay", "Sequence",
    "block_hash", "block_hashes", "replay",
]  # fmt: skip
