"""`Engine`: a small loop that serves many requests from one pool of blocks.

First come, first served; one ragged pass a step. The shape of it is nano-vllm's (`LLMEngine.step`) and
vLLM's; what is left out here: preemption, priorities, a budget of tokens a step.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from kvcourse.arguments import count
from kvcourse.caches import BatchView, PagedCache, PagedPool
from kvcourse.generate import PREFILL_CHUNK, check_stop, check_token, greedy
from kvcourse.models.base import check_ids
from kvcourse.paging import OutOfBlocks

_clock = time.perf_counter  # replaced by the tests


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine. Made by `Engine.add`; read it.

    new_ids                 the tokens written so far
    finished                whether it is done: max_new_tokens reached, stop token chosen, or cancelled
    num_cached_tokens       tokens of the prompt found in the pool; None before it was admitted
    seconds_to_first_token  from add() to the first token, waiting included; None before
    cache                   its PagedCache while it runs
    """

    ids: list
    max_new_tokens: int
    salt: object
    stop: int | None
    sampler: object
    added: float
    new_ids: list = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int | None = None
    seconds_to_first_token: float | None = None
    cache: PagedCache | None = None
    logits: object = None  # float32 (vocab_size,), between the pass that gave them and the choice of a token

    @property
    def most_tokens(self):
        """Rows it may need at most. The last token is returned and never read, so it needs none."""
        return len(self.ids) + self.max_new_tokens - 1

    @property
    def in_prefill(self):
        """Whether a part of its prompt is still to be computed."""
        return self.cache is not None and self.cache.seq_len < len(self.ids)

    @property
    def is_complete(self):
        """Whether nothing is left to compute for it."""
        return self.finished or len(self.new_ids) >= self.max_new_tokens

    def next_ids(self):
        """The tokens that its next pass computes: a chunk of the prompt, later the newest token."""
        ids = self.ids + self.new_ids
        if self.cache.seq_len == len(ids):  # an interrupt lost the last pass's logits, or the token chosen
            self.cache.truncate(len(ids) - 1)
        return ids[self.cache.seq_len :][:PREFILL_CHUNK]


class Engine:
    """Requests on one PagedPool of `num_blocks` blocks, at most `max_batch` of them at a time.

        engine = Engine(model, num_blocks=64)
        request = engine.add(ids, max_new_tokens=20)
        engine.run()
        request.new_ids

    A request is admitted when the blocks that it may need at most are there, so none ever runs out of
    memory on its way; while the oldest has to wait, all behind it do. One prompt is computed at a time, the
    running requests' next tokens in the same pass, so that the next prompt finds its blocks.

    pool     the PagedPool; waiting, running: the requests, oldest first

    A step whose pass or sampler fails or is interrupted takes its pass back, or keeps it whole, and can be
    repeated: no token is lost or stands twice (a sampler with a random state may be asked twice for one).
    An interrupt in the few lines of bookkeeping around them can lose blocks or a request: make a new engine
    when one that is idle has `pool.manager.num_used` above 0.
    A sampler may call `cancel` and `add`, as for a reader who has left.
    Raises TypeError or ValueError for a size that is no whole number of at least 1.
    """

    def __init__(self, model, num_blocks, block_size=16, prefix_caching=True, max_batch=8):
        self.max_batch = count(max_batch, "max_batch")
        self.model = model
        self.pool = PagedPool.for_model(
            model, num_blocks, block_size=block_size, prefix_caching=prefix_caching
        )
        self.waiting, self.running = deque(), []

    def add(self, ids, max_new_tokens, salt=None, stop=None, sampler=greedy):
        """Queue a request; returns it. Nothing is computed before `step` or `run`.

        salt     only requests with the same salt share blocks
        stop     a token id that ends the text and is not returned
        sampler  logits (vocab_size,) → token id, such as kv.greedy or kv.sampled(…)

        Raises ValueError or TypeError, nothing queued, for arguments of another kind and for a request that
        can never fit, whoever else leaves.
        """
        ids = check_ids(ids, self.model.config).tolist()
        max_new_tokens = count(max_new_tokens, "max_new_tokens")
        check_stop(stop, self.model.config)
        if not callable(sampler):
            raise TypeError(f"sampler is {sampler!r}: give a function, such as kv.greedy")
        self.pool.manager.lookup(ids, salt)  # refuses a salt of another kind
        request = Request(ids, max_new_tokens, salt, stop, sampler, added=_clock())
        self._check_it_fits(request)
        self.waiting.append(request)
        return request

    def _check_it_fits(self, request):
        config, needed, prompt = self.model.config, request.most_tokens, len(request.ids)
        asked = f"{prompt:,} prompt tokens and {request.max_new_tokens:,} new ones need"
        way_out = "shorten the prompt or ask for fewer tokens"
        if needed > config.max_seq_len:
            raise ValueError(
                f"{asked} {needed:,} positions, {config.name} has {config.max_seq_len:,}: {way_out}"
            )
        blocks = self.pool.manager.blocks_for(needed)
        if blocks > self.pool.num_blocks:
            raise ValueError(
                f"{asked} {blocks:,} blocks of {self.pool.block_size} tokens, the pool has "
                f"{self.pool.num_blocks:,}: {way_out}, or make the pool larger (num_blocks)"
            )

    def run(self):
        """Steps until every request is finished. Returns those that finished in these steps, in that order.

        Cancelled ones are not among them. When a step raises, run() returns nothing: ask each request.
        """
        finished = []
        while self.waiting or self.running:
            finished += [request for request in self.step() if request.finished]
        return finished

    def step(self):
        """Admit, pass every running request's next tokens through the model at once, choose tokens.

        Returns the requests that went one token further or finished, cancelled ones left out; an empty list
        while a long prompt is on its way or nothing is left to do.

        Raises OutOfBlocks when sequences made outside the engine hold the blocks that it needs: nothing
        runs and the oldest request cannot be admitted, or a running one finds no room. Free them, and step.
        """
        moved = [request for request in self.running if request.is_complete]
        for request in moved:  # an interrupt came right after its last token
            self._finish(request)
        self._admit()
        if self.waiting and not self.running:
            raise OutOfBlocks(
                f"the oldest request needs {self._new_blocks(self.waiting[0]):,} blocks, {self._room:,} are "
                f"free and nothing runs: free() the sequences made outside the engine"
            )
        computed = [request for request in self.running if request.logits is None]
        if computed:
            self._compute(computed)
        for request in list(self.running):
            if request.logits is not None and self._choose(request):
                moved.append(request)
        return moved

    def cancel(self, request):
        """Take a request out, finished or not; its tokens so far stay in new_ids, its blocks are free.

        Raises TypeError or ValueError for what is no request of this engine.
        """
        if not isinstance(request, Request):
            raise TypeError(f"request is {request!r}: give what add() returned")
        if request in self.running:
            self._finish(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            request.finished = True
        elif not request.finished:
            raise ValueError("this request waits in another engine: cancel it there")

    # --- the parts of a step -------------------------------------------------------------

    def _admit(self):
        """The oldest waiting request, if there is a place and no prompt is being computed."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return
        if any(request.in_prefill for request in self.running):
            return
        request = self.waiting[0]
        if self._new_blocks(request) <= self._room:
            request.cache = self.pool.sequence(request.ids, request.salt)
            request.num_cached_tokens = request.cache.num_cached_tokens
            self.running.append(self.waiting.popleft())

    def _compute(self, requests):
        """One ragged pass; logits for those whose tokens are all computed then."""
        given = [request.next_ids() for request in requests]
        view = BatchView([request.cache for request in requests], [len(ids) for ids in given])
        logits = self.model([i for ids in given for i in ids], view, rows=view.last_rows)
        for request, row in zip(requests, logits, strict=True):
            if not request.in_prefill:
                request.logits = row

    def _choose(self, request):
        """The next token from the logits that wait. A sampler that raises is asked again in the next step.

        Returns False, and nothing is chosen, when the sampler has cancelled its own request.
        """
        token = check_token(request.sampler(request.logits), self.model.config)
        if request.finished:
            return False
        if request.seconds_to_first_token is None:
            request.seconds_to_first_token = _clock() - request.added
        request.logits = None  # first: an interrupt then costs a pass, and no token stands twice
        if token != request.stop:
            request.new_ids.append(token)
        if token == request.stop or request.is_complete:
            self._finish(request)
        return True

    def _finish(self, request):
        request.finished = True
        self.running.remove(request)
        request.cache.free()
        request.cache = request.logits = None

    # --- blocks --------------------------------------------------------------------------

    @property
    def _room(self):
        """Free blocks that no running request may still need."""
        manager, promised = self.pool.manager, 0
        for request in self.running:
            promised += manager.blocks_for(request.most_tokens) - len(request.cache.block_table)
        return manager.num_free - promised

    def _new_blocks(self, request):
        """Free blocks that a request takes at most: found blocks that somebody holds cost nothing."""
        manager = self.pool.manager
        found = manager.lookup(request.ids, request.salt)
        return manager.blocks_for(request.most_tokens) - sum(manager.ref_count(block) > 0 for block in found)
