"""`BatchCache`: keys and values of a batch of sequences, preallocated on the device."""

import math

import torch

from kvcourse.arguments import count
from kvcourse.caches import CacheFull


class BatchCache:
    """Room for `batch` sequences of `max_seq_len` tokens each, every sequence with its own length.

    keys, values  (num_layers, batch, num_heads, max_seq_len, head_dim), dtype and device of the model
    lengths       int64 (batch,) on the device: tokens held by each sequence, so also the position
                  of its next one. Read it; change it with set_lengths() and reset() only.

    A sequence's rows from its length on do not count. Those below the longest sequence's length are
    still read, and get the weight 0; 0 × NaN is NaN, so they must be finite: new rows are zeros, and
    reset() zeroes them again.

    Raises TypeError or ValueError for a batch or a max_seq_len that is no whole number of at least 1,
    and ValueError for more tokens than the model has positions. torch.OutOfMemoryError where the
    device has no room.
    """

    def __init__(self, net, batch, max_seq_len):
        self._set_sizes(net, batch, max_seq_len)
        what = f"{self.batch:,} sequences of {self.max_seq_len:,} tokens"
        self._reserve_rows(net, f"{what}: ask for a smaller batch or max_seq_len")
        self._start(net.device)

    def _set_sizes(self, net, batch, max_seq_len):
        c = net.config
        batch, max_seq_len = count(batch, "batch"), count(max_seq_len, "max_seq_len")
        if max_seq_len > c.max_seq_len:
            raise ValueError(
                f"max_seq_len {max_seq_len:,} is more than the {c.max_seq_len:,} positions of {c.name}"
            )
        self.config, self.batch, self.max_seq_len = c, batch, max_seq_len

    def _reserve_rows(self, net, what):
        shape = self.shape_for(net.config)
        self.keys, self.values = (_zeros(shape, net.dtype, net.device, what) for _ in range(2))

    def _start(self, device):
        """Lengths of 0, on the device and on the host."""
        self.lengths = torch.zeros(self.batch, dtype=torch.int64, device=device)
        self._sequences = torch.arange(self.batch, device=device)  # (batch,), the first index of a write
        self._rows = torch.arange(_aligned(self.max_seq_len), device=device)  # row numbers, for the mask
        # The lengths once more on the host: reading the device's would wait for all its queued work.
        self._host = [0] * self.batch
        self._moving = False  # True while host and device lengths may differ

    def shape_for(self, config):
        """The shape that `keys` and `values` must have for a model of this config."""
        return config.num_layers, self.batch, config.num_heads, self.max_seq_len, config.head_dim

    @property
    def nbytes(self):
        """Bytes reserved for keys and values."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def nbytes_used(self):
        """Bytes of the reserved ones that hold tokens."""
        return self.nbytes // (self.batch * self.max_seq_len) * sum(self._host)

    @property
    def dtype(self):
        """The torch.dtype of a stored number."""
        return self.keys.dtype

    @property
    def device(self):
        """The torch.device the rows lie on."""
        return self.keys.device

    @property
    def longest(self):
        """Tokens of the longest sequence, an int. Does not wait for the device."""
        return max(self._host)

    @property
    def ragged(self):
        """True when the sequences have different lengths. Does not wait for the device."""
        return min(self._host) != max(self._host)

    def set_lengths(self, lengths):
        """Say how many rows of each sequence count: an int for all, or a list of one a sequence.

        To go back to an earlier length, or to time a step on a cache that was filled with
        fill_random(). Raises ValueError or TypeError, the cache unchanged, for a length outside
        0 … max_seq_len or another number of lengths than sequences.
        """
        self._move(self._checked(lengths))

    def _checked(self, lengths):
        """What set_lengths() takes, as a list of ints, one a sequence, each within 0 … max_seq_len."""
        one = not hasattr(lengths, "__len__") or getattr(lengths, "ndim", 1) == 0
        given = [lengths] * self.batch if one else list(lengths)
        if len(given) != self.batch:
            raise ValueError(f"{len(given)} lengths for a batch of {self.batch}: give one a sequence")
        given = [count(n, "length", least=0) for n in given]
        if max(given) > self.max_seq_len:
            raise ValueError(f"length {max(given):,} is outside 0 … {self.max_seq_len:,}, the rows there are")
        return given

    def reset(self):
        """Forget every sequence and zero the rows; nothing is allocated or freed."""
        self.set_lengths(0)
        self.keys.zero_()
        self.values.zero_()

    def fill_random(self, seq_len, seed=0):
        """Random rows for `seq_len` tokens of every sequence, as if they had been computed: for timing.

        A step takes as long on them as on real ones. All sequences and layers get the same rows.
        Raises TypeError or ValueError, the cache unchanged, for a seq_len outside 0 … max_seq_len
        and for a seed that is no whole number of at least 0.
        """
        seq_len = count(seq_len, "seq_len", least=0)
        lengths = self._checked(seq_len)
        generator = torch.Generator().manual_seed(count(seed, "seed", least=0))
        _, _, heads, _, head_dim = self.keys.shape
        for rows in (self.keys, self.values):
            random = torch.randn(heads, seq_len, head_dim, generator=generator)
            rows[:, :, :, :seq_len] = random.to(rows.device, rows.dtype)
        self._move(lengths)

    # --- for the model ---------------------------------------------------------------

    def check_room(self, span=None):
        """Raise CacheFull unless every sequence has a free row, one of the first `span` if given."""
        if span is not None and self.longest < self.max_seq_len and self.longest >= span:
            raise CacheFull(
                f"{self.longest + 1:,} tokens do not fit in the {span:,} rows that the graph reads: "
                f"record one with a larger span"
            )
        if self.longest >= self.max_seq_len:
            raise CacheFull(
                f"{self.longest + 1:,} tokens do not fit in a cache of {self.max_seq_len:,} "
                f"({self.longest:,} held, 1 new): reset() it, or make it larger (max_seq_len)"
            )

    def reserve_prompts(self, lengths):
        """Room for prompts of these lengths; here there always is."""

    def settle(self):
        """Bring the device's lengths back to the host's after a call that was interrupted between them."""
        if self._moving:
            self._move(self._host)

    def write_prompt(self, layer, k, v):
        """Rows 0 … T − 1 of every sequence in one layer: k, v (batch, num_heads, T, head_dim)."""
        self.keys[layer, :, :, : k.shape[2]] = k
        self.values[layer, :, :, : v.shape[2]] = v

    def write_next(self, layer, k, v):
        """One row of each sequence, at its own length, in place: k, v (batch, num_heads, head_dim)."""
        self.keys[layer][self._sequences, :, self.lengths] = k
        self.values[layer][self._sequences, :, self.lengths] = v

    def rows(self, layer, span):
        """The first `span` rows of one layer, views: K and V (batch, num_heads, span, head_dim)."""
        return self.keys[layer, :, :, :span], self.values[layer, :, :, :span]

    def attend(self, layer, q, span, mask, attended):
        """What `attended` gives for q (batch, num_heads, 1, head_dim) and the first `span` rows, masked."""
        return attended(q, *self.rows(layer, span), attn_mask=mask)

    def mask(self, span):
        """What is added to the scores of the next tokens: 0 for rows up to a sequence's length, else −inf.

        (batch, 1, 1, span) in the cache's dtype. The row at the length is the new token's own.
        """
        width = _aligned(span)
        unseen = self._rows[:width] > self.lengths[:, None]  # (batch, width)
        mask = torch.zeros(self.batch, 1, 1, width, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(unseen[:, None, None], float("-inf"))[..., :span]

    def grow(self):
        """One more token in every sequence, on the device and on the host."""
        self.begin_growing()
        self.lengths.add_(1)
        self.end_growing()

    def begin_growing(self):
        """Before the device's lengths move: from here to end_growing() the host's are the true ones."""
        self._moving = True

    def end_growing(self):
        """The device's lengths have grown by one: now the host's."""
        self._host = [n + 1 for n in self._host]
        self._moving = False

    def _move(self, lengths):
        self._moving = True
        if min(lengths) == max(lengths):
            self.lengths.fill_(lengths[0])
        else:
            self.lengths.copy_(torch.tensor(lengths))
        self._host = lengths
        self._moving = False


def _zeros(shape, dtype, device, what):
    """torch.zeros, with one clear line for a size that cannot be, which PyTorch words in many ways."""
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # clear already, or no matter of size
        raise
    except (RuntimeError, TypeError):  # no room on a CPU, or more bytes than 64 bits count
        size = math.prod(shape) * dtype.itemsize
        raise torch.OutOfMemoryError(
            f"out of memory on {device}: {size:,} bytes each for keys and values of {what}"
        ) from None


def _aligned(rows):
    """Rows up to a multiple of 16. PyTorch's masked attention on CUDA wants a mask whose rows begin at
    multiples of 8 numbers; another one it copies, once a layer (aligned_tensor in ATen's attention.cpp)."""
    return -(-rows // 16) * 16
