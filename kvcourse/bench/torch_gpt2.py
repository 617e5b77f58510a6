"""Times batched decode in PyTorch at the shape of GPT-2 124M, on a CPU or a CUDA device.

A step at batch sizes 1, 2, 4 … after 512 and 4,096 tokens, in each dtype, eager and (on CUDA)
as a graph, beside the replay of its matrix products and the bytes it must read. Then the
transformers library (where installed) on the same weights, the answers of a ragged batch
against single runs and the NumPy model, and recovery from out-of-memory. A block that other
work disturbs is timed again, a few times. --out keeps a recorded run.
"""

import gc
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch

from kvcourse import measure, paths
from kvcourse.bench import numpy_gpt2, transformers_gpt2
from kvcourse.bench.numpy_gpt2 import ATTEMPTS, PAUSE_SECONDS, UNSET, clean_environment
from kvcourse.bench.replay import TorchStepProducts
from kvcourse.cli import CommandError
from kvcourse.loading import load_model, random_model
from kvcourse.torch_models import (
    GPT2,
    BatchCache,
    GraphedDecode,
    MemoryCap,
    count_launches,
    event_seconds,
    profiled_launches,
)

KIND = "torch"
CONTEXTS = (512, 4096)  # tokens already there
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS_ON_CPU = 32_768  # batch × context at most: a step on more takes seconds there
DTYPES = {"cpu": ("float32", "bfloat16", "float16"), "cuda": ("float16", "bfloat16", "float32")}
ROOM = 8  # rows of a cache beyond its context, as in the published sweep
PEER_BATCH = 8
QUICK_CONTEXTS, QUICK_BATCHES = (16, 48), (1, 2, 8)
MEMORY_SHARE = 0.6  # of the free memory that a cache may take
OOM_ROUNDS = 5
# Largest difference allowed between two ways to the same logits, as a share of the largest logit.
# A 16-bit format rounds each number by at most u = 2⁻¹¹ (float16) or 2⁻⁸ (bfloat16): 8 u. In float32
# what differs is the order of sums over up to 3,072 numbers, and u is 2⁻²⁴: 2e-5.
TOLERANCE = {"float32": 2e-5, "float16": 8 * 2**-11, "bfloat16": 8 * 2**-8}
LIMITS = (  # (label, key of the ratio, limit or None)
    ("batch {peer} at {short} ÷ transformers, default cache", "peer_dynamic", 1.0),
    ("batch {peer} at {short} ÷ transformers, static cache", "peer_static", None),
    ("batch {peer} at {short} ÷ its matrix products", "products", None),
    ("tokens a second, batch {peer} ÷ batch 1", "batching", None),
    ("batch 1 at {short}, eager ÷ graph", "graph", None),
)


def add_arguments(parser):
    """The options of `kvcourse bench torch`."""
    parser.add_argument("--device", choices=sorted(DTYPES), help="default: cuda where there is one")
    threads = "threads of PyTorch on a CPU (default: its own choice)"
    numpy_gpt2.add_common_arguments(parser, threads, "torch-<device>")


def main(args):
    """Time in a process of its own, print the table, keep the run where --out asks.

    Raises CommandError for a device that is not there, when --out cannot be written (before timing),
    when the timing process fails, or when a disturbed run is to be kept.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: PyTorch finds no CUDA device here, use --device cpu")
    if args.out is not None:
        numpy_gpt2.check_writable(Path(args.out) if args.out else default_path("check"))
    run = _run_in_own_process(args)
    print(table(run))
    path = Path(args.out) if args.out else default_path(run["machine"].get("gpu", run["machine"]["cpu"]))
    numpy_gpt2.keep(run, path, asked=args.out is not None)


def default_path(device):
    """data/measurements/torch-<short name of the processor or GPU>.json"""
    return numpy_gpt2.default_path(device, KIND)


def point(run, dtype, context, batch, mode="eager"):
    """That entry of a run's results["points"], or None where it was not timed."""
    wanted = (dtype, context, batch, mode)
    found = (p for p in run["points"] if (p["dtype"], p["context"], p["batch"], p["mode"]) == wanted)
    return next(found, None)


def ratios(results):
    """[(label, value, limit or None)] of those of LIMITS whose two sides were timed."""
    dtype, context, peer = results["dtypes"][0], results["contexts"][0], results["peer"]
    one, eight = (point(results, dtype, context, b) for b in (1, PEER_BATCH))
    graph = point(results, dtype, context, 1, "graph")
    value = {f"peer_{name}": peer["ours"] / peer[name] for name in ("dynamic", "static") if name in peer}
    if eight:
        value["products"] = eight["seconds"] / eight["products"]
    if one and eight:
        value["batching"] = PEER_BATCH * one["seconds"] / eight["seconds"]
    if one and graph:
        value["graph"] = one["seconds"] / graph["seconds"]
    names = {"peer": PEER_BATCH, "short": f"{context:,}"}
    return [(label.format(**names), value[key], limit) for label, key, limit in LIMITS if key in value]


def table(run):
    """The run as text: one line a batch size, then the ratios with pass or miss."""
    r, machine, versions = run["results"], run["machine"], run["versions"]
    lines = [
        f"{r['shape']}, random weights: {r['statistic']}, milliseconds",
        f"{r['device']}, {measure.threads_label(machine['threads'])}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    for dtype in r["dtypes"]:
        for context in r["contexts"]:
            lines += _table_of(r, dtype, context)
    lines.append("")
    for label, value, limit in ratios(r):
        verdict = "" if limit is None else f"≤ {limit:<5g}{'pass' if value <= limit else 'MISS'}"
        lines.append(f"{label:58}{value:8.2f}  {verdict}".rstrip())
    lines += ["", *r["notes"]]
    lines += [f"disturbed: {line}" for line in r["disturbed"]]
    return "\n".join(lines)


def _table_of(r, dtype, context):
    """The lines of one dtype and context: batch, step, graph, products, tokens a second, bytes read."""
    lines = [
        "",
        f"{dtype}, {context:,} tokens there",
        "   batch    eager    graph products   tokens/s  weights MiB  caches MiB",
    ]
    for batch in r["batches"]:
        eager, graph = (point(r, dtype, context, batch, mode) for mode in ("eager", "graph"))
        if eager:
            fastest = min(p["seconds"] for p in (eager, graph) if p)
            lines.append(
                f"{batch:8}{1e3 * eager['seconds']:9.2f}"
                + (f"{1e3 * graph['seconds']:9.2f}" if graph else 9 * " ")
                + f"{1e3 * eager['products']:9.2f}{batch / fastest:11,.0f}"
                + f"{eager['weights_bytes'] / 2**20:13,.1f}{eager['cache_bytes'] / 2**20:12,.1f}"
            )
    return lines


# --- the process that times --------------------------------------------------------


def _run_in_own_process(args):
    """A new process is the only clean start: libraries read their settings when they are loaded."""
    asked = {
        "device": args.device,
        "quick": args.quick,
        "repeats": args.repeats,
        "peer": not args.no_transformers,
    }
    command = [sys.executable, "-m", "kvcourse.bench.torch_gpt2", json.dumps(asked)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env=clean_environment(args.threads), cwd=paths.repository_dir()
    )
    if done.returncode:
        raise CommandError(f"the timing process ended with status {done.returncode}, its own words are above")
    run = json.loads(done.stdout)
    options = f" --device {args.device}" if args.device else ""
    options += " --quick" * args.quick + " --no-transformers" * args.no_transformers
    options += f" --threads {args.threads}" if args.threads else ""
    run["command"] = f"kvcourse bench {KIND} --repeats {args.repeats}{options}"
    return run


def time_everything(quick, repeats, device=None, peer=True):
    """A recorded run as a dict, its `command` empty: what the timing process hands back.

    `results` holds "points", a list of {dtype, context, batch, mode ("eager" or "graph"), seconds,
    median, products (seconds), weights_bytes, cache_bytes}: bytes are those one step reads.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    bench = _Bench(device, quick, 2 if quick else repeats, 1 if quick else ATTEMPTS)
    bench.correctness()
    bench.sweep()
    bench.count_launches()
    if peer:
        bench.transformers()
    bench.out_of_memory()
    described = measure.describe_machine()
    machine = {name: described[name] for name in ("cpu", "cores", "os")}
    machine["threads"] = torch.get_num_threads()
    versions = {name: described[name] for name in ("python", "torch")} | bench.versions
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        machine |= {"gpu": card.name, "gpu_bytes": card.total_memory}
        versions["cuda"] = torch.version.cuda
    return {
        "kind": KIND,
        "command": "",
        "date": described["date"],
        "machine": machine,
        "versions": versions,
        "results": bench.results(machine.get("gpu", machine["cpu"])),
    }


class _Bench:
    """Collects the points of a sweep and what stands beside them, on one device."""

    def __init__(self, device, quick, repeats, attempts):
        self.device, self.quick, self.repeats, self.attempts = device, quick, repeats, attempts
        self.dtypes = DTYPES[device]
        self.contexts = QUICK_CONTEXTS if quick else CONTEXTS
        self.batches = QUICK_BATCHES if quick else BATCHES
        shape = numpy_gpt2.QUICK_SHAPE if quick else {"max_seq_len": CONTEXTS[-1] + ROOM}
        self.model = random_model("gpt2", **shape)
        self.points, self.peer, self.versions = [], {}, {}
        self.answers, self.memory, self.launches = {}, {}, {}
        self.disturbed, self.notes = [], []

    def results(self, device):
        """The `results` of the recorded run; `device` is the name of what computed."""
        collected = {
            "shape": "a tiny GPT-2, its ratios mean nothing" if self.quick else "GPT-2 124M",
            "device": device,
            "statistic": f"fastest of {self.repeats}",
            "dtypes": list(self.dtypes),
            "contexts": list(self.contexts),
            "batches": list(self.batches),
            "points": self.points,
            "peer": self.peer,
            "launches": self.launches,
            "answers": self.answers,
            "out_of_memory": self.memory,
            "disturbed": self.disturbed,
            "notes": [*self.notes, f"{' and '.join(UNSET)} unset"],
        }
        return collected | {"ratios": {label: round(value, 3) for label, value, _ in ratios(collected)}}

    def sweep(self):
        """Every dtype, context and batch that fits, each step in a block of its own."""
        for dtype in self.dtypes:
            net = GPT2(self.model, self.device, dtype)
            for context in self.contexts:
                for batch in self.batches:
                    if self._fits(net, context, batch):
                        self._one_batch(net, dtype, context, batch)

    def _one_batch(self, net, dtype, context, batch):
        cache = BatchCache(net, batch, context + ROOM)
        cache.fill_random(context)
        tokens = torch.arange(batch, device=net.device) % net.config.vocab_size
        label = f"{dtype}, {context} tokens, batch {batch}"
        products = self._quiet(f"{label}, products", TorchStepProducts(net, cache))
        ways = {"eager": partial(net.decode, tokens, cache)}
        if self.device == "cuda":
            ways["graph"] = partial(GraphedDecode(net, cache), tokens)
        for mode, step in ways.items():
            timing = self._quiet(f"{label}, {mode}", _at(cache, context, step))
            self.points.append(
                {
                    "dtype": dtype,
                    "context": context,
                    "batch": batch,
                    "mode": mode,
                    "seconds": round(timing.min, 7),
                    "median": round(timing.median, 7),
                    "products": round(products.min, 7),
                    # Of the position table a step reads one row a sequence.
                    "weights_bytes": net.nbytes - net.params["wpe.weight"].nbytes,
                    "cache_bytes": cache.nbytes // cache.max_seq_len * (context + 1),
                }
            )

    def count_launches(self):
        """Operations of a step that start device work; on CUDA also the profiler's counts of both ways."""
        net = GPT2(self.model, self.device, self.dtypes[0])
        cache = BatchCache(net, 1, self.contexts[0])
        tokens = torch.zeros(1, dtype=torch.int64, device=net.device)
        ways = {"eager": partial(net.decode, tokens, cache)}
        self.launches["counted"] = count_launches(ways["eager"])
        if self.device == "cuda":
            ways["graph"] = partial(GraphedDecode(net, cache), tokens)
            for mode, step in ways.items():
                profiled = profiled_launches(step)
                self.launches[mode] = {"kernels": profiled.kernels, "calls": profiled.calls}

    def transformers(self):
        """Batch 8 after the shorter context, each storage with the faster of the peer's attentions."""
        if not transformers_gpt2.available():
            self.notes.append("transformers left out: not installed (requirements-test.lock has it)")
            return
        dtype, context = self.dtypes[0], self.contexts[0]
        ids = np.random.default_rng(0).integers(self.model.config.vocab_size, size=(PEER_BATCH, context + 1))
        net = GPT2(self.model, self.device, dtype)
        cache = BatchCache(net, PEER_BATCH, context + ROOM)
        net.prefill(ids[:, :-1].tolist(), cache)
        step = _at(cache, context, partial(net.decode, torch.tensor(ids[:, -1], device=net.device), cache))
        expected = _numbers(step())
        self.peer = {"dtype": dtype, "context": context, "batch": PEER_BATCH}
        self.peer["ours"] = round(self._quiet(f"batch {PEER_BATCH}, ours", step).min, 7)
        peer = transformers_gpt2.TransformersGPT2(self.model, None, self.device, dtype)
        self.versions |= {"transformers": peer.versions["transformers"]}
        for storage in ("dynamic", "static"):
            make = partial(peer.batched_step, ids.tolist(), storage, max_seq_len=context + ROOM)
            self.peer[storage] = self._time_best(storage, make, peer.ATTENTION, expected, dtype)

    def _time_best(self, storage, make, ways, expected, dtype):
        """Seconds of the fastest way; all must give `expected`."""
        timings = {}
        for way in ways:
            call = make(attention=way)
            largest = float(np.abs(expected).max())
            transformers_gpt2.same_answer(expected, _numbers(call()), TOLERANCE[dtype] * largest)
            timings[way] = self._quiet(f"batch {PEER_BATCH}, transformers {storage}, {way}", call)
        best = min(timings, key=lambda way: timings[way].min)
        all_ways = ", ".join(f"{way} {measure.format_seconds(t.min)}" for way, t in timings.items())
        self.notes.append(f"transformers, {storage} cache: {best} attention ({all_ways})")
        return round(timings[best].min, 7)

    def correctness(self):
        """A ragged batch against single runs and against the NumPy model, in every dtype, or ValueError."""
        model = load_model("austen-gpt2")
        random = np.random.default_rng(0)
        prompts = [random.integers(model.config.vocab_size, size=n).tolist() for n in (3, 60, 17, 1)]
        tokens = random.integers(model.config.vocab_size, size=(4, len(prompts)))
        expected = np.stack(
            [
                [
                    model([*prompt, *tokens[: step + 1, row].tolist()], rows=[-1])[0]
                    for row, prompt in enumerate(prompts)
                ]
                for step in range(len(tokens))
            ]
        )  # (steps, batch, vocab)
        for dtype in self.dtypes:
            net = GPT2(model, self.device, dtype)
            batched = _decoded(net, BatchCache(net, 4, 80), prompts, tokens)
            single = [
                _decoded(net, BatchCache(net, 1, 80), [prompt], tokens[:, row : row + 1])
                for row, prompt in enumerate(prompts)
            ]
            found = {"NumPy": expected, "single runs": np.concatenate(single, axis=1)}
            if self.device == "cuda":
                found["graph"] = _decoded(net, BatchCache(net, 4, 80), prompts, tokens, GraphedDecode)
            self._compare(dtype, batched, found)

    def _compare(self, dtype, batched, found):
        """Note the largest differences as shares of the largest logit; ValueError beyond TOLERANCE."""
        largest = float(np.abs(found["NumPy"]).max())
        self.answers[dtype] = {"tolerance": TOLERANCE[dtype]}
        for other, logits in found.items():
            share = float(np.abs(batched - logits).max()) / largest
            self.answers[dtype][other] = float(f"{share:.2g}")
            if not share <= TOLERANCE[dtype]:
                raise ValueError(
                    f"{dtype}: a batch and {other} differ by {share:.2g} of the largest logit, "
                    f"not by ≤ {TOLERANCE[dtype]:.2g}: not the same answers"
                )

    def out_of_memory(self):
        """Run out of memory under a cap and recover, five times in a row; note the bytes held after each."""
        net = GPT2(self.model, self.device, self.dtypes[0])
        context, caches, after = self.contexts[-1], [], []
        # Room for two and a half caches beside what is there: the third one cannot fit.
        cap = MemoryCap(_reserved_bytes(self.device) + 5 * _cache_bytes(net, 1, context) // 2, self.device)
        with cap:
            baseline = cap.held
            for _ in range(OOM_ROUNDS):
                _run_out(lambda: caches.append(BatchCache(net, 1, context)), caches)
                after.append(cap.held)
            cache = BatchCache(net, 1, context)  # and work goes on
            net.prefill([[0, 1, 2]], cache)
            net.decode([3], cache)
        self.memory = {"limit_bytes": cap.limit_bytes, "baseline_bytes": baseline, "after_bytes": after}
        if after != OOM_ROUNDS * [baseline]:
            raise ValueError(f"after out-of-memory {after} bytes were held, {baseline} before: not recovered")

    def _fits(self, net, context, batch):
        """Whether a cache fits into the free memory (and, on a CPU, into a bearable time). Notes what not."""
        if self.device == "cpu" and batch * context > TOKENS_ON_CPU:
            return False
        asked = _cache_bytes(net, batch, context + ROOM)
        if asked <= MEMORY_SHARE * _free_bytes(self.device):
            return True
        self.notes.append(
            f"{str(net.dtype).removeprefix('torch.')}, {context:,} tokens, batch {batch} left out: "
            f"{asked / 2**30:.1f} GiB of caches do not fit"
        )
        return False

    def _quiet(self, label, call):
        """Time a block; again while it is disturbed, at most `attempts` times. Notes one that stays so."""
        for attempt in range(self.attempts):
            time.sleep(PAUSE_SECONDS if attempt else 0)
            timing = event_seconds(call, self.repeats, device=self.device)
            print(f"{label}: {timing}", file=sys.stderr, flush=True)
            if not timing.disturbed:
                return timing
        self.disturbed.append(f"{label}: {timing.why}")
        return timing


def _at(cache, context, step):
    """A call of step() that finds `context` tokens in the cache and leaves as many. Returns its logits."""

    def call():
        logits = step()
        cache.set_lengths(context)
        return logits

    return call


def _decoded(net, cache, prompts, tokens, graphed=None):
    """Logits float32 (steps, batch, vocab_size) of decoding `tokens` (steps, batch) after the prompts."""
    net.prefill(prompts, cache)
    step = graphed(net, cache) if graphed else partial(net.decode, cache=cache)
    return np.stack([_numbers(step(row.tolist())) for row in tokens])


def _numbers(logits):
    """A float32 NumPy copy of a tensor on any device."""
    return logits.detach().float().cpu().numpy().copy()


def _cache_bytes(net, batch, max_seq_len):
    """Bytes of a BatchCache of this size."""
    layers, heads, head_dim = net.config.cache_shape
    return 2 * layers * heads * head_dim * batch * max_seq_len * net.dtype.itemsize


def _run_out(allocate, held):
    """Allocate until memory runs out, then let go of everything. The traceback ends with the except block."""
    try:
        while True:
            allocate()
    except torch.OutOfMemoryError:
        held.clear()


def _reserved_bytes(device):
    """Bytes that PyTorch's CUDA allocator keeps, those of dropped objects given back; on a CPU 0."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _free_bytes(device):
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available


if __name__ == "__main__":
    print(json.dumps(time_everything(**json.loads(sys.argv[1]))))
