"""`PagedBatchCache`: the batch of `BatchCache`, with its rows in blocks that a block table lists."""

import torch

from kvcourse import kernels
from kvcourse.arguments import count
from kvcourse.paging import BlockManager
from kvcourse.torch_models.cache import BatchCache


class PagedBatchCache(BatchCache):
    """A BatchCache whose sequences take blocks from one pool as they grow: for prefill and decode alike.

    keys, values  (num_layers, num_blocks, block_size, num_kv_heads, head_dim), the model's dtype and device
    block_tables  int32 (batch, max_blocks) on the device, padded with −1
    num_blocks    default: enough for every sequence to reach max_seq_len; with fewer, a prefill, a decode
                  step or set_lengths() may raise OutOfBlocks, with the cache unchanged
    kernel        True: attention by kv.kernels.paged_attention_decode, which follows the table; False:
                  the rows are gathered, then scaled_dot_product_attention as in BatchCache, or what decode's
                  `attention` says, which the kernel does not look at. Default: the
                  kernel on a CUDA device where Triton is installed. That branch has been run in Triton's
                  interpreter only, on a CPU.

    Slots that hold no token are never part of a sum: they may hold anything, NaN too. A CUDA graph of it
    is not supported: GraphedDecode refuses it.

    Raises TypeError, ValueError and torch.OutOfMemoryError as BatchCache, ImportError for kernel=True
    without Triton.
    """

    def __init__(self, net, batch, max_seq_len, num_blocks=None, block_size=16, kernel=None):
        self._set_sizes(net, batch, max_seq_len)
        size = count(block_size, "block_size")
        most = -(-self.max_seq_len // size)  # blocks of one sequence
        self.manager = BlockManager(self.batch * most if num_blocks is None else num_blocks, size, False)
        self.kernel = kernels.available() and net.device.type == "cuda" if kernel is None else kernel
        if self.kernel and not kernels.available():
            raise ImportError("kernel=True needs Triton, which is not installed: leave kernel out")
        self._reserve_rows(net, f"{self.manager.num_blocks:,} blocks of {size:,} tokens: ask for fewer")
        self._start(net.device)
        self.block_tables = torch.full((self.batch, most), -1, dtype=torch.int32, device=net.device)
        self._seqs = [self.manager.allocate() for _ in range(self.batch)]
        self._lens = torch.zeros(self.batch, dtype=torch.int32, device=net.device)  # the new token included
        self._slots = self._prompt = None  # where the next rows go; which rows of a padded prompt count

    @property
    def nbytes_used(self):
        """Bytes of the reserved ones that hold tokens."""
        return self.nbytes // (self.manager.num_blocks * self.manager.block_size) * sum(self._host)

    def shape_for(self, config):
        """The shape that `keys` and `values` must have for a model of this config."""
        size = self.manager.num_blocks, self.manager.block_size
        return config.num_layers, *size, config.num_kv_heads, config.head_dim

    # --- room ----------------------------------------------------------------------------

    def check_room(self, span=None):
        """As in BatchCache, and a block for every sequence whose last one is full: OutOfBlocks without."""
        super().check_room(span)
        self._give_back()  # what a step that failed has left
        self._reserve([n + 1 for n in self._host])
        slots = [self.manager.slot_mapping(s, s.num_tokens, s.num_tokens + 1)[0] for s in self._seqs]
        self._slots = torch.tensor(slots, device=self.device)  # (batch,)
        self._lens.copy_(torch.tensor([n + 1 for n in self._host], dtype=torch.int32))

    def reserve_prompts(self, lengths):
        """Blocks for the first `lengths` tokens of each sequence, all or none; OutOfBlocks without."""
        self._give_back()
        self._reserve(lengths)
        slots = [slot for s, n in zip(self._seqs, lengths, strict=True)
                 for slot in self.manager.slot_mapping(s, 0, n)]  # fmt: skip
        self._slots = torch.tensor(slots, device=self.device)  # (all tokens,)
        longest = torch.arange(max(lengths), device=self.device)
        self._prompt = longest < torch.tensor(lengths, device=self.device)[:, None]  # (batch, T)

    def _reserve(self, lengths):
        """Room for that many tokens of each sequence, or for none."""
        try:
            for seq, n in zip(self._seqs, lengths, strict=True):
                if n > seq.num_tokens:
                    self.manager.append_slots(seq, n - seq.num_tokens)
        except BaseException:
            self._give_back()
            raise
        self._write_tables()

    def _give_back(self):
        """Blocks that were reserved and hold no token."""
        for seq in self._seqs:
            self.manager.truncate(seq, seq.num_tokens)

    def _write_tables(self):
        width = self.block_tables.shape[1]
        tables = [s.block_table + [-1] * (width - len(s.block_table)) for s in self._seqs]
        self.block_tables.copy_(torch.tensor(tables, dtype=torch.int32))

    def _move(self, lengths):
        self._reserve(lengths)
        self._moving = True
        self._count(lengths)
        super()._move(lengths)

    def _count(self, lengths):
        """The manager's books follow: tokens that nobody named, or fewer of them."""
        for seq, n in zip(self._seqs, lengths, strict=True):
            if n > seq.num_tokens:
                self.manager.commit(seq, [None] * (n - seq.num_tokens))
            self.manager.truncate(seq, n)
        self._write_tables()

    def end_growing(self):
        """As in BatchCache, the manager's count with it."""
        self._count([n + 1 for n in self._host])
        super().end_growing()

    # --- rows ----------------------------------------------------------------------------

    def write_prompt(self, layer, k, v):
        """The tokens that count of k, v (batch, num_kv_heads, T, head_dim), padded at the end."""
        self._write(layer, *(rows.transpose(1, 2)[self._prompt] for rows in (k, v)))

    def write_next(self, layer, k, v):
        """One row of each sequence, in its next slot: k, v (batch, num_kv_heads, head_dim)."""
        self._write(layer, k, v)

    def _write(self, layer, k, v):
        for rows, new in ((self.keys, k), (self.values, v)):
            rows[layer].flatten(0, 1)[self._slots] = new

    def fill_random(self, seq_len, seed=0):
        """As in BatchCache, with the same numbers for the same seed."""
        seq_len = count(seq_len, "seq_len", least=0)
        lengths = self._checked(seq_len)
        generator = torch.Generator().manual_seed(count(seed, "seed", least=0))
        self._move(lengths)
        slots = [slot for s in self._seqs for slot in self.manager.slot_mapping(s, 0, seq_len)]
        slots = torch.tensor(slots, dtype=torch.int64, device=self.device)
        _, _, _, heads, head_dim = self.keys.shape
        for rows in (self.keys, self.values):
            random = torch.randn(heads, seq_len, head_dim, generator=generator).transpose(0, 1)
            rows.flatten(1, 2)[:, slots] = random.repeat(self.batch, 1, 1).to(rows.device, rows.dtype)

    def rows(self, layer, span):
        """The first `span` rows of one layer, gathered: K and V (batch, num_kv_heads, span, head_dim).

        A row that does not count is 0: whatever lies there, also in the block that −1 points at."""
        blocks = -(-span // self.manager.block_size)
        tables = self.block_tables[:, :blocks].long()  # (batch, blocks); −1 is masked below
        unseen = self._rows[:span] > self.lengths[:, None]  # (batch, span); the new token's own row counts
        both = (rows[layer][tables].flatten(1, 2)[:, :span] for rows in (self.keys, self.values))
        return tuple(rows.masked_fill(unseen[..., None, None], 0).transpose(1, 2) for rows in both)

    def mask(self, span):
        """As in BatchCache; None where the kernel attends, which stops at each sequence's length."""
        return None if self.kernel else super().mask(span)

    def attend(self, layer, q, span, mask, attended):
        """As in BatchCache, or by the kernel."""
        if not self.kernel:
            return super().attend(layer, q, span, mask, attended)
        out = kernels.paged_attention_decode(
            q[:, :, 0], self.keys[layer], self.values[layer], self.block_tables, self._lens
        )
        return out[:, :, None]
