"""Requests that come, run and leave in a memory with addresses, so that gaps and waiting can be seen."""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvcourse.arguments import count
from kvcourse.paging.address_space import memory_for
from kvcourse.paging.allocation import Rules

# What a slot is used for, in the order of `Arrivals.kinds`.
KINDS = ("held", "later", "never", "rounding", "gap", "free")


def poisson_arrivals(n, per_step, seed=0):
    """Arrival times of n requests in steps, float64 (n,), ascending: independent, `per_step` on average.

    Raises TypeError or ValueError for n < 1 and for a rate that is not above 0.
    """
    n = count(n, "n")
    if not (0 < per_step < math.inf and 1 / per_step < math.inf):
        raise ValueError(f"per_step is {per_step}: give the mean number of requests a step, above 0")
    return np.cumsum(np.random.default_rng(seed).exponential(1 / per_step, n))


@dataclass(frozen=True)
class Arrivals:
    """What `simulate_arrivals` saw. Arrays of shape (samples,), taken after the steps in `steps`.

    In slots; the six add up to memory_slots:
    held       hold a token
    later      empty, but their request will write them before it is finished
    never      reserved for a longer answer: their request will not write them
    rounding   more than was asked for: up to a power of two, or the end of a last block (also what is
               left of a memory that is no whole number of blocks)
    gaps       free, but in a run of slots too short for the next request (the first that waits, or else the
               next to arrive). Always 0 with blocks: one block is never too short
    free       free, and long enough for it. With blocks: all free ones

    running, waiting  requests
    fragmented        bool: the first one waits although enough slots are free in sum, but not in one run

    Of shape (requests,), in steps; every request is finished in the end:
    admitted_at, finished_at  when its prompt was written first; when its last token was

    put_back   how often a running request gave its blocks back for an older one ("paged" only)
    rewritten  tokens that those had to compute a second time
    """

    policy: str
    memory_slots: int
    steps: np.ndarray = field(repr=False)
    held: np.ndarray = field(repr=False)
    later: np.ndarray = field(repr=False)
    never: np.ndarray = field(repr=False)
    rounding: np.ndarray = field(repr=False)
    gaps: np.ndarray = field(repr=False)
    free: np.ndarray = field(repr=False)
    running: np.ndarray = field(repr=False)
    waiting: np.ndarray = field(repr=False)
    fragmented: np.ndarray = field(repr=False)
    arrivals: np.ndarray = field(repr=False)
    admitted_at: np.ndarray = field(repr=False)
    finished_at: np.ndarray = field(repr=False)
    answer_tokens: int
    put_back: int
    rewritten: int
    _maps: tuple = field(repr=False)
    _runs: object = field(repr=False)  # what the memory gave -> runs of slots

    @property
    def crowded(self):
        """bool (samples,): somebody waited, so what is empty is wasted."""
        return self.waiting > 0

    @property
    def throughput(self):
        """Answer tokens written a step, from the first arrival to the last departure."""
        return self.answer_tokens / float(self.finished_at.max() - np.ceil(self.arrivals[0]) + 1)

    @property
    def mean_wait(self):
        """Steps from a request's arrival to its first admission, on average."""
        return float((self.admitted_at - self.arrivals).mean())

    def mean(self, name, crowded=True):
        """The mean of one of the arrays, over the samples in which somebody waited, or over all.

        With nobody ever waiting (`crowded` all False) it is the mean over all samples.
        """
        values = getattr(self, name)
        return float(values[self.crowded].mean() if crowded and self.crowded.any() else values.mean())

    def shares(self, crowded=True):
        """{kind: mean share of the memory, 0 … 1}, over the samples in which somebody waited, or all."""
        arrays = dict(zip(KINDS, ("held", "later", "never", "rounding", "gaps", "free"), strict=True))
        return {kind: self.mean(name, crowded) / self.memory_slots for kind, name in arrays.items()}

    def places(self, sample):
        """{request: (tokens it holds, its runs of slots [(start, stop), …] in the order of the tokens)}."""
        return {job[0]: (job[1], self._runs(job[4])) for job in self._map(sample)[0]}

    def owners(self, sample):
        """The request that occupies each slot at a sample, −1 for none: int64 (memory_slots,)."""
        found = np.full(self.memory_slots, -1, np.int64)
        for request, (_, runs) in self.places(sample).items():
            for start, stop in runs:
                found[start:stop] = request
        return found

    def kinds(self, sample):
        """What each slot is used for at a sample: indices into KINDS, int8 (memory_slots,)."""
        jobs, gaps, leftover = self._map(sample)
        found = np.full(self.memory_slots, KINDS.index("free"), np.int8)
        found[self.memory_slots - leftover :] = KINDS.index("rounding")
        for _, tokens, total, asked, place in jobs:
            position = 0  # of the run's first slot within the request
            for start, stop in self._runs(place):
                edges = [min(max(limit - position, 0), stop - start) for limit in (tokens, total, asked)]
                edges = [start, *(start + edge for edge in edges), stop]
                for kind in range(4):
                    found[edges[kind] : edges[kind + 1]] = kind
                position += stop - start
        for start, length in gaps:
            found[start : start + length] = KINDS.index("gap")
        return found

    def _map(self, sample):
        if not self._maps:
            raise ValueError("no maps were kept: call simulate_arrivals(…, maps=True)")
        return self._maps[sample]


def simulate_arrivals(
    arrivals,
    prompt_lengths,
    answer_lengths,
    policy,
    memory_slots,
    max_seq_len=4096,
    max_answer=1024,
    block_size=16,
    keep_free=0.01,
    sample_every=10,
    maps=False,
):
    """Requests come, are placed in a memory of `memory_slots` slots, write a token a step, and go.

    arrivals      when each one comes, in steps, ascending (seconds ÷ seconds of a step)
    sample_every  steps between two samples, the first after step 0
    maps          keep what lies where at each sample, for `places`, `owners` and `kinds`
    keep_free     "paged": a request is let in only while this share of the blocks stays free, so that
                  those running can grow (0.01 is the watermark of vLLM's first block manager,
                  vllm/core/block_manager.py); not where nobody runs

    Other arguments as `simulate_allocation`. One step, in this order: who wrote the last token in the step
    before leaves; with "paged", whoever's last block is full takes another, the longest running first;
    whoever has come by now joins the queue; the queue's first is let in while it fits, and nobody
    overtakes it. A request writes its whole prompt in the step that lets it in, and one answer token
    in each later step. Reserving policies take the first run of slots that is long enough (buddy: the
    smallest piece, of those the first).

    "paged" reserves nothing, so a running request may find no free block. Then the one let in last is put
    back: it gives its blocks up, waits at the head of the queue, and writes its prompt and its answer so
    far again when it is let in (vLLM's preemption by recomputation). Nobody is let in in that step.

    The time of a step does not depend on what runs in it, and neither does the time of a prompt: this
    counts memory, not arithmetic.

    Returns `Arrivals`. Raises ValueError or TypeError in one line as `simulate_allocation`, and for
    arrivals that are negative or not ascending, and for a memory in which one of the requests never fits.
    """
    rules = Rules(policy, max_seq_len, max_answer, block_size)
    prompts, answers = rules.checked(prompt_lengths, answer_lengths)
    times = _arrival_steps(arrivals, len(prompts))
    memory = memory_for(rules, count(memory_slots, "memory_slots"))
    if not 0 <= keep_free < 1:
        raise ValueError(f"keep_free is {keep_free}: give a share of the blocks, 0 … below 1")
    needed = rules.taken(prompts, prompts + answers)
    if needed.max() > memory.largest:
        i = int(np.argmax(needed > memory.largest))
        raise ValueError(
            f"request {i} takes {needed[i]:,} slots with {policy}, at most {memory.largest:,} of the "
            f"{memory_slots:,} can be had at once: raise memory_slots"
        )
    run = _Run(rules, memory, times, prompts, answers, keep_free, count(sample_every, "sample_every"), maps)
    run.play()
    return run.result(np.asarray(arrivals, np.float64))


def _arrival_steps(arrivals, n):
    """The steps in which they join the queue: the first that begins at or after their time."""
    times = np.asarray(arrivals)
    if times.shape != (n,) or times.dtype.kind not in "iuf":
        raise ValueError(
            f"arrivals must be {n:,} numbers, one for each request: they are of shape {times.shape}"
        )
    bad = ~((times >= 0) & (times < 2**53))
    bad[1:] |= times[1:] < times[:-1]
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(f"arrival {i} is {times[i]}: give times in steps, from 0 on, in ascending order")
    return np.ceil(times).astype(np.int64)


@dataclass(eq=False)
class _Job:
    """A request that runs. `written` tokens in the step `since`, one more in each later step."""

    request: int
    order: int  # how many were let in before it
    since: int
    written: int
    total: int  # tokens in the end
    asked: int  # slots asked for; "paged": grows with its blocks
    place: object  # what the memory gave
    capacity: int  # its slots

    def tokens(self, step):
        return self.written + step - self.since

    @property
    def useful(self):
        """Slots of it that hold a token or will."""
        return min(self.capacity, self.total)


_LEAVES, _GROWS, _TRY = range(3)  # events of one step, in this order


class _Run:
    """The state between two events; within them every request writes one token a step.

    Between events only `held` changes, by the number of running requests a step, so samples cost no
    walk through them: `_base` is the tokens that the running would have had at step 0.
    """

    def __init__(self, rules, memory, times, prompts, answers, keep_free, sample_every, maps):
        self.rules, self.memory = rules, memory
        self.times, self.prompts = times.tolist(), prompts.tolist()
        self.totals, self.answer_tokens = (prompts + answers).tolist(), int(answers.sum())
        self.asked = rules.asked(prompts, prompts + answers).tolist()
        self.kept = int(keep_free * memory.blocks) if rules.policy == "paged" else 0
        self.every, self.maps = sample_every, maps
        self.queue, self.next, self.events = deque(), 0, []
        self.running = {}  # request -> job, the one let in last at the end
        self.written = list(self.prompts)  # tokens to write on admission: more after being put back
        self.admitted, self.finished = [-1] * len(times), [-1] * len(times)
        self._base = self._useful = self._asked = self._capacity = 0
        self.order = self.put_back = self.rewritten = 0
        self.samples, self.kept_maps, self.sampled = [], [], 0

    def play(self):
        """From event to event until everybody is gone."""
        while self.events or self.next < len(self.times):
            step = min(
                self.events[0][0] if self.events else math.inf,
                self.times[self.next] if self.next < len(self.times) else math.inf,
            )
            self._sample(before=step)
            disturbed = self._due(step)
            while self.next < len(self.times) and self.times[self.next] <= step:
                self.queue.append(self.next)
                self.next += 1
            if not disturbed:
                self._admit(step)
        self._sample(before=max(self.finished) + 2)

    # --- what happens in a step --------------------------------------------------------------

    def _due(self, step):
        """The events of this step. True when somebody was put back."""
        before = self.put_back
        while self.events and self.events[0][0] == step:
            _, kind, _, job = heapq.heappop(self.events)
            if job is None or self.running.get(job.request) is not job:
                continue  # it was put back meanwhile
            if kind == _LEAVES:
                self.finished[job.request] = step - 1
                self._remove(job)
            else:
                self._grow(job, step)
        if self.put_back > before:
            heapq.heappush(self.events, (step + 1, _TRY, 0, None))
        return self.put_back > before

    def _grow(self, job, step):
        while not self.memory.free:
            newest = next(reversed(self.running.values()))
            self._put_back(newest, step)
            if newest is job:
                return
        self._count(job, -1)
        job.place += self.memory.take(1)
        job.capacity += self.rules.block_size
        job.asked = job.useful
        self._count(job, +1)
        self._plan_growth(job)

    def _put_back(self, job, step):
        self.put_back += 1
        self.written[job.request] = job.tokens(step - 1)
        self.rewritten += job.tokens(step - 1)
        self._remove(job)
        self.queue.appendleft(job.request)

    def _remove(self, job):
        del self.running[job.request]
        self._count(job, -1)
        self.memory.give(job.place)

    def _admit(self, step):
        while self.queue:
            request = self.queue[0]
            tokens = self.written[request]
            place = self._place(request, tokens)
            if place is None:
                return
            self.queue.popleft()
            if self.admitted[request] < 0:
                self.admitted[request] = step
            capacity, total = self.memory.capacity(place), self.totals[request]
            asked = min(capacity, total) if self.rules.policy == "paged" else self.asked[request]
            job = _Job(request, self.order, step, tokens, total, asked, place, capacity)
            self.order += 1
            self.running[request] = job
            self._count(job, +1)
            heapq.heappush(self.events, (step + total - tokens + 1, _LEAVES, job.order, job))
            self._plan_growth(job)

    def _place(self, request, tokens):
        """Where the request lies from now on, or None."""
        if self.rules.policy != "paged":
            return self.memory.take(self.asked[request])
        needed = -(-tokens // self.rules.block_size)
        kept = self.kept if self.running else 0
        return self.memory.take(needed) if self.memory.free - needed >= kept else None

    def _plan_growth(self, job):
        if job.capacity < job.total:
            step = job.since + job.capacity - job.written + 1
            heapq.heappush(self.events, (step, _GROWS, job.order, job))

    def _count(self, job, sign):
        self._base += sign * (job.written - job.since)
        self._useful += sign * job.useful
        self._asked += sign * job.asked
        self._capacity += sign * job.capacity

    # --- what is seen ------------------------------------------------------------------------

    def _sample(self, before):
        """Samples of the steps up to `before`, exclusive, that were not taken yet."""
        if self.sampled >= before:
            return
        need = self._need()
        gaps = self.memory.too_short(need)
        in_gaps = sum(length for _, length in gaps)
        free = self.memory.slots - self.memory.leftover - self._capacity
        fragmented = bool(self.queue) and self.rules.policy != "paged" and free >= need
        rounding = self._capacity - self._asked + self.memory.leftover
        fixed = (self._asked - self._useful, rounding, in_gaps, free - in_gaps)
        people = (len(self.running), len(self.queue), fragmented)
        while self.sampled < before:
            held = self._base + len(self.running) * self.sampled
            self.samples.append((self.sampled, held, self._useful - held, *fixed, *people))
            if self.maps:
                self.kept_maps.append((self._jobs(self.sampled), tuple(gaps), self.memory.leftover))
            self.sampled += self.every

    def _need(self):
        """Slots in one run that the next request takes; 0 when none is to come."""
        coming = self.queue[0] if self.queue else self.next
        if self.rules.policy == "paged" or coming == len(self.times):
            return 0
        return self.memory.rounded(self.asked[coming])

    def _jobs(self, step):
        return tuple(
            (job.request, job.tokens(step), job.total, job.asked, tuple(job.place))
            for job in self.running.values()
        )

    def result(self, arrivals):
        """Everything as `Arrivals`."""
        names = (
            "steps", "held", "later", "never", "rounding", "gaps", "free", "running", "waiting", "fragmented"
        )  # fmt: skip
        columns = {
            name: np.array(column)
            for name, column in zip(names, zip(*self.samples, strict=True), strict=True)
        }
        return Arrivals(
            policy=self.rules.policy,
            memory_slots=self.memory.slots,
            arrivals=arrivals,
            admitted_at=np.array(self.admitted),
            finished_at=np.array(self.finished),
            answer_tokens=self.answer_tokens,
            put_back=self.put_back,
            rewritten=self.rewritten,
            _maps=tuple(self.kept_maps),
            _runs=self.memory.runs,
            **columns,
        )
