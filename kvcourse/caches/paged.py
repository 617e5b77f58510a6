"""A cache in blocks of a shared pool: `PagedPool` owns the memory, a `PagedCache` is one sequence in it.

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (arXiv 2309.06180), section 4. Which block belongs to whom, and which can be shared, is
the business of `kvcourse.paging.BlockManager`; here are the rows, and attention that follows a block
table.
"""

import numpy as np

from kvcourse import ops
from kvcourse.arguments import count
from kvcourse.caches.base import KVCache, read_only
from kvcourse.paging import BlockManager, OutOfBlocks
from kvcourse.paging.prefix import checked_ids

TILE = 128  # tokens gathered at once, in whole blocks: few calls, and the tile stays in a core's own cache


class PagedPool:
    """Memory for `num_blocks` blocks of `block_size` tokens, shared by any number of sequences.

    keys, values  float32 (num_layers, num_blocks, block_size, num_kv_heads, head_dim). One block id means
                  the same block in every layer, so one table serves all layers.
    manager       the BlockManager that knows who holds what

        pool = PagedPool.for_model(model, num_blocks=64)
        cache = pool.sequence(prompt)                     # cache.seq_len tokens of it were found
        logits = model(prompt[cache.seq_len:], cache, rows=[-1])
        cache.free()                                      # full blocks stay findable until memory is needed

    prefix_caching, hasher  as in BlockManager
    Raises TypeError or ValueError for a size that is no whole number of at least 1.
    """

    def __init__(self, config, num_blocks, block_size=16, prefix_caching=True, hasher=None):
        self.manager = BlockManager(num_blocks, block_size, prefix_caching, hasher)
        self.config = config
        layers, heads, head_dim = config.cache_shape
        block = self.manager.block_size, heads, head_dim
        # np.zeros: a row that nobody wrote is 0, and takes no memory before its block is first used.
        shape = layers, self.manager.num_blocks, *block
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._tile = np.empty((max(1, TILE // self.manager.block_size), *block), np.float32)

    @classmethod
    def for_model(cls, model, num_blocks, **options):
        """A pool that fits this model; `options` as for the class."""
        return cls(model.config, num_blocks, **options)

    def sequence(self, token_ids=(), salt=None, adapter=None):
        """A PagedCache for a new sequence, with the blocks that `token_ids` need.

        Its seq_len is the number of tokens whose rows were found in the pool, whole blocks and at most
        len(token_ids) − 1. Give the model, or kv.generate, the rest: token_ids[cache.seq_len:]. Whoever gives
        the whole prompt continues the found tokens with the prompt, another text. Only a sequence with the
        same salt and adapter finds them. The blocks are given back by `free()` only.

        Raises OutOfBlocks, the pool unchanged, and TypeError or ValueError for ids, salt or adapter of
        another kind.
        """
        return PagedCache(self.config, pool=self, sequence=self.manager.allocate(token_ids, salt, adapter))

    @property
    def num_blocks(self):
        """Blocks of the pool."""
        return self.manager.num_blocks

    @property
    def block_size(self):
        """Tokens of a block."""
        return self.manager.block_size

    @property
    def nbytes(self):
        """Bytes of all blocks, keys and values of all layers."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def block_nbytes(self):
        """Bytes of one block, keys and values of all layers."""
        return self.nbytes // self.num_blocks

    @property
    def nbytes_used(self):
        """Bytes of the blocks that a sequence holds, a shared block once."""
        return self.manager.num_used * self.block_nbytes

    def copy_blocks(self, copies):
        """Copy whole blocks in all layers: copies is [(source block, target block), …]."""
        for source, target in copies:
            for rows in (self.keys, self.values):
                rows[:, target] = rows[:, source]

    def gather(self, rows, table, tokens):
        """The first `tokens` tokens of a few blocks, copied side by side: (num_kv_heads, tokens, head_dim).

        rows  keys or values of one layer
        What is returned is a view of one buffer that the next call overwrites.
        """
        tile = self._tile[: len(table)]
        # mode: with any other than "raise" NumPy writes into `out` directly. Ids are always inside.
        np.take(rows, table, axis=0, out=tile, mode="clip")
        return tile.reshape(-1, *tile.shape[2:])[:tokens].swapaxes(0, 1)

    @property
    def tile_blocks(self):
        """Blocks that `gather` takes at most at once."""
        return len(self._tile)


class PagedCache(KVCache):
    """One sequence in a PagedPool: its rows lie in the blocks that its block table lists in order.

    Made by `pool.sequence(prompt)`, by `fork()`, or by `PagedCache.for_model(model, max_seq_len)` with a
    pool of its own of just enough blocks.

    The rows of a block that another sequence holds too, or that can be found by one, are never written:
    `begin` first puts a copy in its place (copy-on-write). The model tells which tokens it computes
    (`note_ids`), and what is committed under those names can be found by later prompts; tokens that
    nobody named, such as loaded ones, never are.

    A pass raises OutOfBlocks before anything changes when the pool has no room for it. Blocks reserved
    and not used are given back by abort, truncate, reset, and a commit of only a part. In a batch that has
    no room, the sequences begun before the one that found none are aborted: their reserved blocks go, and a
    copy that one of them got stays.

    A step gathers TILE tokens at a time into one buffer of the pool, the keys and then the values, so it
    needs no contiguous copy of the sequence. A freed cache refuses all further use.
    """

    def __init__(self, config, max_seq_len=None, *, block_size=16, pool=None, sequence=None):
        super().__init__(config, max_seq_len)
        if (pool is None) != (sequence is None):
            raise TypeError("pool and sequence go together: pool.sequence(token_ids) makes a cache in a pool")
        if pool is None:
            blocks = -(-self.max_seq_len // count(block_size, "block_size"))
            pool = PagedPool(config, blocks, block_size, prefix_caching=False)
            sequence = pool.manager.allocate()
        self.pool = pool
        self._seq = sequence  # None once it was freed
        self._ids = None  # the open pass's tokens, where somebody named them
        self._table = self._slots = np.empty(0, np.int64)  # of the open pass: all blocks, and new rows' slots
        self._counts = (sequence.num_tokens, 0)

    @property
    def block_table(self):
        """The ids of this sequence's blocks, in order of its tokens: a list, copied."""
        return list(self._held().block_table)

    @property
    def num_cached_tokens(self):
        """Tokens whose rows were found in the pool when the sequence began."""
        return self._held().num_cached_tokens

    def _held(self):
        if self._seq is None:
            raise RuntimeError(
                "this cache was freed, its blocks are others' now: pool.sequence() makes a new one"
            )
        return self._seq

    # --- one pass --------------------------------------------------------------------

    def begin(self, n):
        seq = self._held()
        if self._ahead() and not self.pending:
            self._give_back(self.seq_len)
        positions = super().begin(n)
        before = list(seq.block_table)
        try:
            self.pool.copy_blocks(self.pool.manager.append_slots(seq, n))
            self._table = np.array(seq.block_table)
            size = self.pool.block_size
            self._slots = self._table[positions // size] * size + positions % size
        except OutOfBlocks:
            self._counts = (self.seq_len, 0)  # and nothing to give back: what was reserved before stays
            raise
        except BaseException:
            # The table may name a new block already: it gets its rows before the table counts again.
            now = zip(before, seq.block_table, strict=False)
            self.pool.copy_blocks((old, new) for old, new in now if old != new)
            self.abort()
            raise
        return positions

    def note_ids(self, ids):
        """Names the open pass's tokens. Raises RuntimeError without one, ValueError for another number,
        TypeError or ValueError for what is no list of ids."""
        if not self.pending:
            raise RuntimeError("no pass is open: call begin(n) before note_ids()")
        ids = checked_ids(ids)
        if len(ids) != self.pending:
            raise ValueError(f"{len(ids)} token ids for a pass of {self.pending}: give one a token")
        self._ids = ids

    def attend(self, layer, q, k, v, rotate=None):
        self._check_rows(layer, q, k, v)
        q, k = self._rotated(q, k, rotate)
        self._store(layer, k, v)
        heads, n, head_dim = q.shape
        scaled = (q * head_dim**-0.5).reshape(k.shape[0], -1, n, head_dim)  # (KV heads, group, n, head_dim)
        out = np.empty_like(scaled)
        for low in range(0, n, ops.QUERY_CHUNK):
            rows = slice(low, low + ops.QUERY_CHUNK)
            out[:, :, rows] = self._attend_tiles(layer, scaled[:, :, rows], self.seq_len + low)
        return out.reshape(heads, n, head_dim)

    def _attend_tiles(self, layer, queries, first):
        """Attention of queries (KV heads, group, m, head_dim) at positions first …, one tile after the other.

        All keys first, then the softmax, then all values: with NumPy's price for a call that is faster than
        a running softmax (`kernels.paged_attention_numpy`), and a score is a small part of a row.
        """
        m, stop = queries.shape[2], first + queries.shape[2]
        scores = np.empty((*queries.shape[:3], stop), np.float32)  # (KV heads, group, m, tokens)
        for low, high, keys in self._tiles(self.pool.keys[layer], stop):
            np.matmul(queries, keys.swapaxes(1, 2)[:, None], out=scores[..., low:high])
        if m > 1:
            scores[..., np.arange(stop) > np.arange(first, stop)[:, None]] = -np.inf
        weights, out = ops.softmax_inplace(scores), np.zeros_like(queries)
        for low, high, values in self._tiles(self.pool.values[layer], stop):
            out += weights[..., low:high] @ values[:, None]
        return out

    def _tiles(self, rows, stop):
        """(low, high, rows of the tokens low … high − 1): all tokens up to `stop`, gathered tile by tile."""
        size = self.pool.block_size
        step = self.pool.tile_blocks * size
        for low in range(0, stop, step):
            high = min(low + step, stop)
            yield low, high, self.pool.gather(rows, self._table[low // size : -(-high // size)], high - low)

    def _write(self, layer, k, v):
        for rows, new in zip((self.pool.keys[layer], self.pool.values[layer]), (k, v), strict=True):
            rows.reshape(-1, *rows.shape[2:])[self._slots] = new.swapaxes(0, 1)

    def _keep(self, n):
        if n:
            ids = [None] * self.pending if self._ids is None else self._ids
            self.pool.manager.commit(self._held(), ids[:n])
        if n < self.pending or self._ahead(n):
            self._give_back(self.seq_len + n)
        self._ids = None

    def _ahead(self, n=0):
        """Whether the manager counts more than n tokens after the committed ones: an interrupt came between
        its count and this cache's."""
        return self._seq is not None and self._seq.num_tokens > self.seq_len + n

    def _give_back(self, seq_len):
        if self._seq is not None:
            self.pool.manager.truncate(self._seq, seq_len)

    # --- going back, and sharing -------------------------------------------------------

    def truncate(self, seq_len):
        """As in KVCache; blocks that hold none of the tokens left are given back, others keep theirs."""
        self._held()
        super().truncate(seq_len)
        self._give_back(self.seq_len)

    def reset(self):
        self._held()
        super().reset()
        self._ids = None
        self._give_back(0)

    def fork(self):
        """A second PagedCache with the same committed tokens in the same blocks; either may go on.

        Costs no block until one of them writes into a partly filled block that both hold: it then gets
        a copy. Raises RuntimeError in an open pass.
        """
        if self.pending:
            raise RuntimeError("a pass is open: call commit() or abort() before fork()")
        if self._ahead():
            self._give_back(self.seq_len)
        child = self.pool.manager.fork(self._held())
        return PagedCache(self.config, self.max_seq_len, pool=self.pool, sequence=child)

    def free(self):
        """The sequence is over: its blocks go back to the pool, an open pass with them. Once only."""
        seq = self._held()
        self._seq, self._ids, self._counts = None, None, (0, 0)
        self.pool.manager.free(seq)

    def load(self, payload, token_ids=None):
        """As in KVCache. With `token_ids`, one id a token of the payload, the loaded blocks can be found by
        later prompts; whoever names them vouches for their rows."""
        self._held()
        keys, _ = self._check_payload(payload)
        ids = None if token_ids is None else checked_ids(token_ids)
        if ids is not None and len(ids) != keys.shape[2]:
            raise ValueError(f"{len(ids)} token ids for {keys.shape[2]} loaded tokens: give one a token")
        before = self._ids  # of an open pass, in which load is refused
        try:
            self._ids = ids
            super().load(payload)
        finally:
            self._ids = before

    # --- looking at it -----------------------------------------------------------------

    @property
    def nbytes(self):
        """Bytes of the blocks in this sequence's table, and of the table at 4 bytes an entry.

        A block that several sequences hold counts in each of them; `pool.nbytes_used` counts it once, and
        `pool.nbytes` is all that was reserved.
        """
        return len(self._held().block_table) * (self.pool.block_nbytes + 4)

    def keys_values(self, layer):
        slots = np.array(self.pool.manager.slot_mapping(self._held(), 0, self.seq_len), np.int64)
        both = (self.pool.keys[layer], self.pool.values[layer])
        return tuple(read_only(rows.reshape(-1, *rows.shape[2:])[slots].swapaxes(0, 1)) for rows in both)
