"""Times the block manager and replays public traces through prefix caches and allocation policies.

Three sections. `timing` is the only one that depends on the machine; it says where other work disturbed it,
and `--only timing` measures it anew. The others give the same numbers everywhere.

    kvcourse bench paging --traces FOLDER --out

FOLDER holds the traces of kvcourse/paging/traces.py (`traces.fetch(name)` downloads one). Without --traces
they are looked for where `traces.find` does; what is not there is left out, and the run is not kept.

The recorded run's `results`:

    timing      {name: {seconds (the fastest call), median, calls, why (disturbed, or ""), …}}, and date, cpu.
                Those of a trace have hits, and so has "the same rules with an OrderedDict", the same number.
                Blocks: of the manager's three operations together, seconds ÷ blocks is the time of one
    decode      {shape, layers, tokens (held before the step), threads, difference (largest, of the logits),
                calls: {"contiguous" or "paged": {seconds, median, calls, why}}}: one NumPy decode step on
                neighboring rows and on blocks scattered over the pool, in one run
    replay      {trace: {requests, references, names, once (names asked for once), beginnings (different
                first blocks), quarters (references of each quarter of the requests), runs: {policy:
                [{capacity (null: no limit), hits, evictions, quarters (hits of each)}]}, foresight and
                head_first: [{capacity, hits}]}}: `paging.replay` on block names as they are, and the two
                functions of those names below
    allocation  {workload: {requests, prompt_tokens, answer_tokens, max_seq_len, max_answer, block_size,
                memory_slots, step_seconds, policies: {policy: {end, life (shares of memory that hold
                tokens), as_they_came, all_at_once}}}}. The last two are runs of `simulate_arrivals`:
                {throughput (answer tokens a step), mean_wait (steps), crowded (share of the time in
                which somebody waits), and over that time: running (mean), fragmented (share), shares {kind:
                share of the memory}; put_back, rewritten}; as_they_came also has curve {steps, running,
                waiting, and slots: held, later, never, rounding, gaps, free}
"""

import heapq
import json
import math
import os
import platform
import re
import sys
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvcourse import measure
from kvcourse.bench import numpy_gpt2
from kvcourse.caches import ContiguousCache, PagedPool
from kvcourse.cli import CommandError
from kvcourse.loading import random_model
from kvcourse.paging import BlockManager, block_hashes, replay, traces
from kvcourse.paging.allocation import POLICIES, lognormal_workload, simulate_allocation
from kvcourse.paging.arrivals import poisson_arrivals, simulate_arrivals
from kvcourse.paging.replay import POLICIES as EVICTION

KIND = "paging"
ATTEMPTS = 4  # at a timing, before its disturbed figure is taken
PAUSE_SECONDS = 1.0  # between two attempts
STEP_SECONDS = 0.03  # of one decode step, to turn a trace's seconds into steps
CURVE = ("running", "waiting", "held", "later", "never", "rounding", "gaps", "free")


@dataclass(frozen=True)
class Workload:
    """Requests and limits of an `allocation` run: the smallest usual limits that hold every request."""

    name: str
    max_seq_len: int
    max_answer: int
    memory_slots: int = 65_536
    block_size: int = 16


WORKLOADS = (
    Workload("log-normal", 4096, 1024),
    Workload("azure-conv", 16_384, 1024),
    Workload("azure-code", 8192, 2048),
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured. The tests make a small one."""

    requests: int | None = None  # of each trace; None: all
    lognormal: int = 2000
    per_step: float = 0.25  # log-normal requests that arrive in a step
    at_once: int = 2000  # requests of `all_at_once`
    capacities: tuple = (None, 1000, 3000, 10_000, 30_000, 50_000)
    managed: tuple = (1000, 10_000, 50_000)  # capacities of the manager's own replay
    prompt_blocks: int = 64
    hashed_tokens: int = 100_000
    decode_shape: tuple = ()  # (field, value), … in which the model differs from GPT-2 small
    decode_tokens: int = 1000
    repeats: int = 7
    decode_repeats: int = 25
    curve_every: int = 2000  # steps between two points of a curve: 60 s


# --- the command -----------------------------------------------------------------------


def add_arguments(parser):
    """The options of `kvcourse bench paging`."""
    parser.add_argument("--traces", metavar="FOLDER", help="where the traces lie")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION", help="measure anew: " + ", ".join(SECTIONS)
    )
    parser.add_argument(
        "--out",
        nargs="?",
        const="",
        metavar="FILE",
        help=f"keep the run as a JSON file (default: data/measurements/{KIND}-<processor>.json)",
    )


def main(args):
    """Measure, print the table, keep the run where --out asks.

    With --only the other sections come from FILE. Raises CommandError when FILE cannot be written or read,
    or when a run without all traces is to be kept: before anything is measured.
    """
    path = Path(args.out) if args.out else numpy_gpt2.default_path(measure.describe_machine()["cpu"], KIND)
    missing = [name for name in traces.TRACES if traces.find(name, args.traces) is None]
    if args.out is not None:
        if missing:
            raise CommandError(
                f"--out: {', '.join(missing)} not found: name their folder with --traces, or fetch them "
                f"(kvcourse.paging.traces.fetch)"
            )
        numpy_gpt2.check_writable(path)
    kept = _read(path) if args.only else {}
    bench = Bench({name: traces.load(name, args.traces) for name in traces.TRACES if name not in missing})
    bench.results = kept
    for section in args.only or SECTIONS:
        bench.results[section] = SECTIONS[section](bench)
    run = bench.recorded_run()
    print(table(run))
    if missing:
        print(f"\nLeft out, not on this machine: {', '.join(missing)}.")
    if args.out is None:
        print(f"\nNot kept. With --out it would be written to {numpy_gpt2.shown(path)}.")
    else:
        _write(path, run)
        print(f"\nKept in {numpy_gpt2.shown(path)}.")


def _read(path):
    try:
        return dict(measure.read_recorded(path).results)
    except (OSError, ValueError) as error:
        raise CommandError(f"--only goes on from {path.name}, but {error}: run it without --only") from None


def _write(path, run):
    """As JSON with short lists and records on one line, under a temporary name until it is whole."""
    text = json.dumps(run, indent=1, ensure_ascii=False)
    for short in (r"\[[-\d.,\s]*\]|\{[^{}\[\]]{,400}\}", r"\{[^{}]{,150}\}"):
        text = re.sub(short, lambda m: re.sub(r"\s*\n\s*", " ", m[0]), text)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, path)


def table(run):
    """The run as text."""
    results = run["results"]
    lines = [f"{run['machine']['cpu']}, Python {run['versions']['python']}"]
    if "timing" in results:
        lines += ["", "timing, fastest call"]
        lines += [_timing_line(name, t) for name, t in results["timing"]["calls"].items()]
    if "decode" in results:
        found = results["decode"]
        steps = {name: measure.format_seconds(t["seconds"]) for name, t in found["calls"].items()}
        lines += [
            "",
            f"decode after {found['tokens']:,} tokens, {found['shape']}: {steps['paged']} on scattered "
            f"blocks, {steps['contiguous']} on neighboring rows, ratio {decode_ratio(found):.2f}",
        ]
    for name, found in results.get("replay", {}).items():
        lines += ["", f"{name}: {found['references']:,} references, hits by capacity"]
        others = {name: found[name] for name in ("foresight", "head_first")}
        for policy, runs in (found["runs"] | others).items():
            cells = [f"{_capacity(r['capacity'])}: {r['hits']:,}" for r in runs]
            lines.append(f"  {policy:12}" + "  ".join(cells))
    for name, found in results.get("allocation", {}).items():
        lines += ["", f"{name}: {found['requests']:,} requests, {found['memory_slots']:,} slots"]
        for policy, p in found["policies"].items():
            lines.append(
                f"  {policy:15}end {100 * p['end']:5.1f} %  life {100 * p['life']:5.1f} %  "
                f"running {p['all_at_once']['running']:6.1f}  "
                f"tokens a step {p['as_they_came']['throughput']:5.1f}"
            )
    disturbed = disturbed_line(results)
    return "\n".join([*lines, *(["", disturbed] if disturbed else [])])


def _timing_line(name, t):
    line = f"  {name:52}{measure.format_seconds(t['seconds']):>10}"
    if "blocks" in t:
        line += f"  {1e6 * t['seconds'] / t['blocks']:.2f} µs a block"
    return line + (f"  {t['hits']:,} hits" if "hits" in t else "")


def _capacity(blocks):
    return "no limit" if blocks is None else f"{blocks:,}"


def disturbed_line(results):
    """Empty, or one line on the timings that other work disturbed."""
    calls = {
        name: t
        for part in ("timing", "decode")
        if part in results
        for name, t in results[part]["calls"].items()
    }
    return measure.disturbed_line([(name, t["why"]) for name, t in calls.items()], "timings")


# --- measuring -------------------------------------------------------------------------


class Bench:
    """The sections, on traces that were read: {name of traces.TRACES: list of Request}."""

    def __init__(self, requests, sizes=Sizes()):
        self.sizes, self.results = sizes, {}
        self.traces = {name: found[: sizes.requests] for name, found in requests.items()}

    def recorded_run(self):
        """The dict of data/measurements/*.json."""
        described = measure.describe_machine()
        return {
            "kind": KIND,
            "command": f"kvcourse bench {KIND} --traces FOLDER",
            "date": described["date"],
            "machine": {key: described[key] for key in ("cpu", "cores", "threads", "os")},
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "results": {name: self.results[name] for name in SECTIONS if name in self.results},
        }

    # --- timing ------------------------------------------------------------------------------

    def timing(self):
        """Seconds of the manager's operations, of hashing, of replays and of simulations."""
        described = measure.describe_machine()
        calls = self._manager_calls() | self._hashing() | self._replays() | self._arrivals_calls()
        return {"date": described["date"], "cpu": described["cpu"], "calls": calls}

    def _manager_calls(self):
        """allocate + commit + free of one prompt: its blocks new, all found again, and without sharing."""
        blocks, found = self.sizes.prompt_blocks, {}
        for name, sharing, new in (
            ("allocate, commit, free: new blocks", True, True),
            ("allocate, commit, free: found again", True, False),
            ("allocate, commit, free: no prefix caching", False, False),
        ):
            manager = BlockManager(4 * blocks, 16, prefix_caching=sharing)
            prompts = _Prompts(16 * blocks, new)
            found[name] = self._time(name, lambda m=manager, p=prompts: _serve(m, p.next())) | {
                "blocks": blocks
            }
        return found

    def _hashing(self):
        ids, name = (
            list(range(self.sizes.hashed_tokens)),
            f"block_hashes of {self.sizes.hashed_tokens:,} tokens",
        )
        timed = self._time(name, lambda: block_hashes(ids, 16))
        return {name: timed | {"blocks": len(ids) // 16}}

    def _replays(self):
        """A trace's blocks through the manager, and through the same rules with an OrderedDict."""
        found = {}
        if "mooncake-conversation" not in self.traces:
            return found
        requests = [list(request.hash_ids) for request in self.traces["mooncake-conversation"]]
        references = sum(map(len, requests))
        ways = {"the block manager": through_manager, "the same rules with an OrderedDict": through_dict}
        for capacity in self.sizes.managed:
            for name, way in ways.items():
                label = f"{capacity:,} blocks, {name}"
                timed = self._time(label, partial(way, requests, capacity), repeats=3)
                found[label] = timed | {"blocks": references, "hits": way(requests, capacity)}
        return found

    def _arrivals_calls(self):
        prompts, answers = lognormal_workload(self.sizes.lognormal)
        arrivals = poisson_arrivals(len(prompts), self.sizes.per_step)
        found = {}
        for policy in POLICIES:
            name = f"simulate_arrivals, {len(prompts):,} requests, {policy}"
            found[name] = self._time(
                name, lambda p=policy: simulate_arrivals(arrivals, prompts, answers, p, 65_536)
            )
        return found

    def decode(self):
        """One decode step of the NumPy model, with each cache in a block of calls of its own."""
        model = random_model("gpt2", **dict(self.sizes.decode_shape))
        tokens, ids = self.sizes.decode_tokens, np.arange(self.sizes.decode_tokens)
        caches = {"contiguous": ContiguousCache.for_model(model), "paged": scattered_cache(model, tokens + 1)}
        for cache in caches.values():
            model(ids, cache, rows=[-1])
        after = [_decode_step(model, cache) for cache in caches.values()]
        steps = {name: partial(_decode_step, model, cache) for name, cache in caches.items()}
        timed = _quietest("decode", lambda: measure.time_blocks(steps, self.sizes.decode_repeats, warmup=3))
        return {
            "shape": "gpt2", "layers": model.config.num_layers, "tokens": tokens,
            "threads": measure.threads(),
            "difference": float(f"{np.abs(after[0] - after[1]).max():.1g}"),
            "calls": {name: _as_dict(t) for name, t in timed.items()},
        }  # fmt: skip

    def _time(self, name, call, repeats=None):
        """Time a call; the fastest of the undisturbed attempts counts."""
        repeats = repeats or self.sizes.repeats
        return _as_dict(_quietest(name, lambda: {"call": measure.time_call(call, repeats, warmup=1)})["call"])

    # --- the same everywhere -------------------------------------------------------------------

    def replay(self):
        """Hits of every eviction policy at every capacity, of the traces that name their blocks."""
        found = {}
        for name, requests in self.traces.items():
            if not requests[0].hash_ids:
                continue
            ids, capacities = [request.hash_ids for request in requests], self.sizes.capacities
            found[name] = described(ids) | {
                "runs": {p: [self._replayed(ids, c, p) for c in capacities] for p in EVICTION},
                "foresight": [{"capacity": c, "hits": foresight(ids, c)} for c in capacities],
                "head_first": [{"capacity": c, "hits": head_first(ids, c)} for c in capacities],
            }
        return found

    def _replayed(self, ids, capacity, policy):
        result = replay(ids, capacity, policy)
        return {
            "capacity": capacity,
            "hits": result.hits,
            "evictions": result.evictions,
            "quarters": quarters(result.by_request),
        }

    def allocation(self):
        """Every allocation policy on the log-normal workload and on the traces that have lengths only."""
        return {
            w.name: self._allocated(w) for w in WORKLOADS if w.name == "log-normal" or w.name in self.traces
        }

    def _allocated(self, workload):
        arrivals, prompts, answers = self._requests(workload.name)
        limits = {key: getattr(workload, key) for key in ("max_seq_len", "max_answer", "block_size")}
        policies = {}
        for policy in POLICIES:
            shares = {
                over: round(simulate_allocation(prompts, answers, policy, **limits, over=over), 4)
                for over in ("end", "life")
            }
            came = simulate_arrivals(
                arrivals, prompts, answers, policy, workload.memory_slots, sample_every=50, **limits
            )
            n = self.sizes.at_once
            at_once = simulate_arrivals(
                np.zeros(len(prompts[:n])), prompts[:n], answers[:n], policy, workload.memory_slots, **limits
            )
            policies[policy] = shares | {
                "as_they_came": summary(came) | {"curve": curve(came, self.sizes.curve_every)},
                "all_at_once": summary(at_once),
            }
        return {
            "requests": len(prompts),
            "prompt_tokens": int(prompts.sum()),
            "answer_tokens": int(answers.sum()),
            "memory_slots": workload.memory_slots,
            "step_seconds": None if workload.name == "log-normal" else STEP_SECONDS,
            **limits,
            "policies": policies,
        }

    def _requests(self, name):
        """(arrivals in steps, prompt lengths, answer lengths)."""
        if name == "log-normal":
            lengths = lognormal_workload(self.sizes.lognormal)
            return poisson_arrivals(self.sizes.lognormal, self.sizes.per_step), *lengths
        times, prompts, answers, _ = zip(*self.traces[name], strict=True)
        return np.array(times) / STEP_SECONDS, np.array(prompts), np.array(answers)


def described(ids):
    """What a trace of lists of block names asks for, in numbers."""
    uses = Counter(name for names in ids for name in names)
    return {
        "requests": len(ids),
        "references": uses.total(),
        "names": len(uses),
        "once": sum(times == 1 for times in uses.values()),
        "beginnings": len({names[0] for names in ids if names}),
        "quarters": quarters([len(names) for names in ids]),
    }


def quarters(counts):
    """Four sums: over the first, second, third and last quarter of a list with a count for each request."""
    cuts = [i * len(counts) // 4 for i in range(5)]
    return [sum(counts[start:stop]) for start, stop in pairwise(cuts)]


SECTIONS = {
    "timing": Bench.timing,
    "decode": Bench.decode,
    "replay": Bench.replay,
    "allocation": Bench.allocation,
}


def summary(run):
    """An `Arrivals` in a few numbers; running, fragmented and shares are means while somebody waits."""
    return {
        "throughput": round(run.throughput, 3),
        "mean_wait": round(run.mean_wait, 1),
        "crowded": round(float(run.crowded.mean()), 4),
        "running": round(run.mean("running"), 2),
        "fragmented": round(run.mean("fragmented"), 4),
        "put_back": run.put_back,
        "rewritten": run.rewritten,
        "shares": {kind: round(share, 4) for kind, share in run.shares().items()},
    }


def curve(run, every):
    """The samples of every `every`-th step, {name: list}, and the last one."""
    chosen = (run.steps % every == 0) | (run.steps == run.steps[-1])
    return {name: getattr(run, name)[chosen].tolist() for name in ("steps", *CURVE)}


# --- what is timed -----------------------------------------------------------------------


def _quietest(label, attempt):
    """attempt() → {name: Timing}, again while one is disturbed, at most ATTEMPTS times: the quietest."""
    tried = []
    while len(tried) < ATTEMPTS and (not tried or any(timed.disturbed for timed in tried[-1].values())):
        time.sleep(PAUSE_SECONDS if tried else 0)
        tried.append(attempt())
        shown = ", ".join(f"{name} {timed}" for name, timed in tried[-1].items())
        print(f"{label}: {shown}", file=sys.stderr, flush=True)
    return min(tried, key=lambda found: (sum(t.disturbed for t in found.values()),
                                         sum(t.min for t in found.values())))  # fmt: skip


def _as_dict(timed):
    """A measure.Timing as the record keeps it."""
    seconds, median = float(f"{timed.min:.3g}"), float(f"{timed.median:.3g}")
    return {"seconds": seconds, "median": median, "calls": len(timed.samples), "why": timed.why}


def decode_ratio(found):
    """How many times as long the fastest paged step of a `decode` section took as the contiguous one."""
    return found["calls"]["paged"]["seconds"] / found["calls"]["contiguous"]["seconds"]


def scattered_cache(model, max_tokens, seed=1):
    """An empty PagedCache with room for max_tokens in a pool whose free blocks stand in random order."""
    pool = PagedPool.for_model(model, -(-max_tokens // 16))
    single = [pool.manager.allocate(range(16)) for _ in range(pool.num_blocks)]
    for i in np.random.default_rng(seed).permutation(len(single)):
        pool.manager.free(single[i])
    return pool.sequence()


def _decode_step(model, cache):
    """One token more, taken back afterwards. Returns its logits (1, vocab_size)."""
    before = cache.seq_len
    logits = model([7], cache, rows=[-1])
    cache.truncate(before)
    return logits


class _Prompts:
    """Lists of token ids, made beforehand: `new` ones that share no block, or the same one each time."""

    def __init__(self, tokens, new, count=16):
        starts = [i * tokens if new else 0 for i in range(count)]
        self._prompts, self._next = [list(range(start, start + tokens)) for start in starts], 0

    def next(self):
        self._next += 1
        return self._prompts[self._next % len(self._prompts)]


def _serve(manager, ids):
    """One prompt through its whole life."""
    seq = manager.allocate(ids)
    manager.commit(seq, ids[seq.num_cached_tokens :])
    manager.free(seq)


def through_manager(requests, capacity):
    """Hits of a trace whose block names stand for tokens, in blocks of one: a name is its own hash."""
    manager = BlockManager(capacity, 1, hasher=lambda parent, tokens, salt, adapter: tokens[0])
    for ids in requests:
        _serve(manager, ids)
    return manager.hits


def through_dict(requests, capacity):
    """Hits of the same rules written for one request at a time: no reference counts, tables or checks.

    A dict from name to block, and the free blocks in an OrderedDict {block: name it can be found by}: a
    deque would have to search for a block that is found again.
    """
    blocks, free, hits = {}, OrderedDict.fromkeys(range(capacity)), 0
    for ids in requests:
        found = []
        for name in ids[:-1]:  # the last block must be computed
            if name not in blocks:
                break
            found.append(blocks[name])
        hits += len(found)
        for block in found:
            del free[block]
        table = found
        for _ in ids[len(found) :]:
            block, name = free.popitem(last=False)
            if name is not None:
                del blocks[name]
            table.append(block)
        for i, name in enumerate(ids):
            first = blocks.setdefault(name, table[i])
            if first != table[i]:  # held already: the own block goes back at once, without a name
                free[table[i]] = None
                del free[first]
                table[i] = first
        free.update(zip(reversed(table), reversed(ids), strict=True))  # the last one goes first
    return hits


# --- what no server does -------------------------------------------------------------------


def foresight(requests, capacity):
    """Hits of the rule that knows the future: evict the block whose next use lies farthest away.

    requests  lists of block names from the front; capacity  in blocks, None: no limit

    No rule with as many blocks finds more (L. A. Belady, "A study of replacement algorithms for a
    virtual-storage computer", IBM Systems Journal 5(2), 1966: the rule MIN). Of two blocks with the same
    next use the one farther back in its request goes, so that what is left of a chain can be found. Counts
    and evicts as `paging.replay` does: after a whole request.
    """
    uses = next_uses(requests)
    held, farthest, hits = {}, [], 0  # name: its rank; a heap of ranks, of which the outdated are skipped
    for names, following in zip(requests, uses, strict=True):
        hits += next((i for i, name in enumerate(names) if name not in held), len(names))
        for place, (name, use) in enumerate(zip(names, following, strict=True)):
            held[name] = rank = (-use, -place, name)
            heapq.heappush(farthest, rank)
        while capacity is not None and len(held) > capacity:
            rank = heapq.heappop(farthest)
            if held.get(rank[-1]) == rank:
                del held[rank[-1]]
    return hits


def next_uses(requests):
    """For each name of each request the number of the next request that asks for it, or infinity."""
    later, uses = {}, []
    for number in range(len(requests) - 1, -1, -1):
        uses.append([later.get(name, math.inf) for name in requests[number]])
        later.update(dict.fromkeys(requests[number], number))
    return uses[::-1]


def head_first(requests, capacity):
    """Hits of LRU with a bug: a request's blocks become the newest from the first to the last.

    So a chain's first block is evicted before its tail, which then nobody can find. Otherwise as
    `paging.replay`. capacity  in blocks, None: no limit
    """
    held, hits = OrderedDict(), 0
    for names in requests:
        hits += next((i for i, name in enumerate(names) if name not in held), len(names))
        for name in names:
            held[name] = None
            held.move_to_end(name)
        while capacity is not None and len(held) > capacity:
            held.popitem(last=False)
    return hits
