"""Times a NumPy model at its true shape, with seeded random weights: GPT-2 124M or SmolLM2-135M.

A cached step and an uncached pass at several lengths, beside the replay of a step's matrix
products, the plain loop of chapter 01 and the transformers library (where installed), each in
a block of its own in one process. A block that other work disturbs is timed again, a few
times. Prints a table and the ratios the course promises; --out keeps a recorded run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from kvcourse import measure, paths
from kvcourse.bench import chapter_code, transformers_gpt2
from kvcourse.bench.replay import step_products
from kvcourse.caches import ContiguousCache
from kvcourse.cli import CommandError
from kvcourse.loading import random_model

KIND = "numpy"
KIND_LLAMA = "numpy-llama"
MODELS = {"gpt2": (KIND, "GPT-2 124M"), "smollm2-135m": (KIND_LLAMA, "SmolLM2-135M")}  # (kind of run, name)
LENGTHS = (16, 128, 256, 512, 1000)  # tokens already there
QUICK_LENGTHS = (4, 8, 16, 32, 60)
QUICK_SHAPE = dict(
    num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, hidden_size=32,
    intermediate_size=128, vocab_size=300, max_seq_len=64,
)  # fmt: skip
# Settings that force OpenBLAS into a kernel or blocking of another processor: slower, so not for timing.
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
ATTEMPTS = 6  # at a block, before its disturbed figure is taken
PAUSE_SECONDS = 2.0  # between two attempts
# (label, numerator, denominator, {kind of run: limit}): of the fastest calls; -1 is the longest length
LIMITS = (
    (
        "cached step at {long} ÷ its matrix products", ("cached", -1), ("products", -1),
        {KIND: 1.25, KIND_LLAMA: 1.25},
    ),
    ("cached step at {long} ÷ transformers, default cache", ("cached", -1), ("peer_cached", -1), {KIND: 0.9}),
    ("cached step at {long} ÷ transformers, static cache", ("cached", -1), ("peer_static", -1), {}),
    ("cached step at {long} ÷ at {short}", ("cached", -1), ("cached", 0), {KIND: 1.45}),
    ("uncached pass over {long} ÷ transformers", ("uncached", -1), ("peer_uncached", -1), {KIND: 1.5}),
    ("uncached ÷ cached at {long}, package", ("uncached", -1), ("cached", -1), {}),
    ("uncached ÷ cached at {long}, plain loop", ("plain", -1), ("cached", -1), {}),
)  # fmt: skip
ROWS = {
    "cached": "cached step",
    "products": "  its matrix products alone",
    "peer_cached": "  transformers, default cache",
    "peer_static": "  transformers, static cache",
    "uncached": "uncached pass",
    "plain": "  plain loop of chapter 01",
    "peer_uncached": "  transformers",
}


def add_arguments(parser):
    """The options of `kvcourse bench numpy`."""
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="gpt2", help="whose shape (default: %(default)s)"
    )
    add_common_arguments(parser, "threads of NumPy and PyTorch (default: NumPy's)", "numpy-<processor>")


def add_common_arguments(parser, threads, file):
    """Options of every bench: threads is that option's help, file the recorded run's name without .json."""
    parser.add_argument("--quick", action="store_true", help="a tiny shape and two repeats: tests the bench")
    parser.add_argument("--repeats", type=count, default=7, help="calls timed (default: %(default)s)")
    parser.add_argument("--threads", type=count, help=threads)
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    parser.add_argument(
        "--out",
        nargs="?",
        const="",
        metavar="FILE",
        help=f"keep the run as a JSON file (default: data/measurements/{file}.json)",
    )


def count(text):
    """A whole number of at least 1, as argparse wants it."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few: at least 1")
    return number


def main(args):
    """Time in a process of its own, print the table, keep the run where --out asks.

    Raises CommandError when --out cannot be written (before timing), the timing process fails, or a
    disturbed run is to be kept.
    """
    if args.out is not None:
        check_writable(Path(args.out) if args.out else default_path("check"))
    run = _run_in_own_process(args)
    print(table(run))
    path = Path(args.out) if args.out else default_path(run["machine"]["cpu"], run["kind"])
    keep(run, path, asked=args.out is not None)


def keep(run, path, asked):
    """Write the run to path if asked, else say where it would go.

    CommandError for a disturbed run, and where it cannot be written.
    """
    if not asked:
        print(f"\nNot kept. With --out it would be written to {shown(path)}.")
        return
    if run["results"]["disturbed"]:
        raise CommandError(
            f"not kept, the run was disturbed ({run['results']['disturbed'][0]}): "
            f"close other programs and run it again"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise _not_writable(path, error) from None
    print(f"\nKept in {shown(path)}.")


def check_writable(path):
    """Make the folder of path; CommandError unless a file can be written there, found by trying.

    Called before timing: minutes of it would be lost if this came out at the end.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("a").close()  # its content stays
        else:
            path.touch()
            path.unlink()
    except OSError as error:
        raise _not_writable(path, error) from None


def _not_writable(path, error):
    return CommandError(f"--out {path}: {error.strerror or error}: name a file that can be written")


def default_path(device, kind=KIND):
    """data/measurements/<kind>-<short name of the processor or GPU>.json"""
    words = re.findall(r"\w+", re.sub(r"\((R|TM)\)|Processor|CPU|@.*", " ", device).lower())
    return paths.data_dir() / "measurements" / f"{'-'.join([kind, *words])}.json"


def ratios(seconds, lengths, kind=KIND):
    """[(label, value, limit or None)] of those of LIMITS whose two sides were timed."""
    found = []
    for label, (top, i), (bottom, j), limits in LIMITS:
        if top in seconds and bottom in seconds:
            named = label.format(short=f"{lengths[0]:,}", long=f"{lengths[-1]:,}")
            found.append((named, seconds[top][i] / seconds[bottom][j], limits.get(kind)))
    return found


def table(run):
    """The run as text: milliseconds by length, then the ratios with pass or miss."""
    r, machine, versions = run["results"], run["machine"], run["versions"]
    width = max(map(len, ROWS.values())) + 2
    lines = [
        f"{r['shape']}, random weights, float32: {r['statistic']}, milliseconds",
        f"{machine['cpu']}, {measure.threads_label(machine['threads'])}, {machine['blas']}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        "tokens there".ljust(width) + "".join(f"{n:>9,}" for n in r["lengths"]),
    ]
    for key, label in ROWS.items():
        if key in r["seconds"]:
            cells = [f"{1e3 * s:,.1f}" if s is not None else "" for s in r["seconds"][key]]
            lines.append(label.ljust(width) + "".join(f"{cell:>9}" for cell in cells))
    lines.append("")
    for label, value, limit in ratios(r["seconds"], r["lengths"], run["kind"]):
        verdict = "" if limit is None else f"≤ {limit:<5g}{'pass' if value <= limit else 'MISS'}"
        lines.append(f"{label:58}{value:8.2f}  {verdict}".rstrip())
    lines += ["", *r["notes"]]
    lines += [f"disturbed: {line}" for line in r["disturbed"]]
    return "\n".join(lines)


# --- the process that times --------------------------------------------------------


def clean_environment(threads=None):
    """This process's environment without UNSET, and with the thread count where one is asked for."""
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    if threads:
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
            environment[name] = str(threads)
    return environment


def _run_in_own_process(args):
    """The libraries read their settings when they are loaded, so a new process is the only clean start."""
    asked = {
        "model_name": args.model,
        "quick": args.quick,
        "repeats": args.repeats,
        "peer": not args.no_transformers,
    }
    command = [sys.executable, "-m", "kvcourse.bench.numpy_gpt2", json.dumps(asked)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env=clean_environment(args.threads), cwd=paths.repository_dir()
    )
    if done.returncode:
        raise CommandError(f"the timing process ended with status {done.returncode}, its own words are above")
    run = json.loads(done.stdout)
    options = f" --model {args.model}" if args.model != "gpt2" else ""
    options += " --quick" * args.quick + " --no-transformers" * args.no_transformers
    options += f" --threads {args.threads}" if args.threads else ""
    run["command"] = f"kvcourse bench {KIND} --repeats {args.repeats}{options}"
    return run


def time_everything(quick, repeats, peer=True, model_name="gpt2"):
    """A recorded run as a dict, its `command` empty: what the timing process hands back."""
    kind, shape = MODELS[model_name]
    model = random_model(model_name, **(QUICK_SHAPE if quick else {}))
    lengths = QUICK_LENGTHS if quick else LENGTHS
    bench = _Bench(model, lengths, 2 if quick else repeats, 1 if quick else ATTEMPTS)
    bench.package()
    if model_name == "gpt2":
        bench.plain_loop()
    if peer:
        bench.transformers()
    described = measure.describe_machine()
    versions = {name: described[name] for name in ("python", "numpy")} | bench.versions
    return {
        "kind": kind,
        "command": "",
        "date": described["date"],
        "machine": {name: described[name] for name in ("cpu", "cores", "threads", "blas", "os")},
        "versions": versions,
        "results": {
            "shape": f"a tiny {model_name}, its ratios mean nothing" if quick else shape,
            "statistic": f"fastest of {bench.repeats}",
            "lengths": list(lengths),
            "seconds": bench.seconds,
            "medians": bench.medians,
            "ratios": {label: round(value, 3) for label, value, _ in ratios(bench.seconds, lengths)},
            "disturbed": bench.disturbed,
            "notes": [*bench.notes, f"{' and '.join(UNSET)} unset"],
        },
    }


class _Bench:
    """Collects one row of seconds (fastest) and one of medians a thing timed, aligned with `lengths`."""

    def __init__(self, model, lengths, repeats, attempts):
        self.model, self.lengths = model, lengths
        self.repeats, self.attempts = repeats, attempts
        self.ids = np.random.default_rng(0).integers(model.config.vocab_size, size=max(lengths) + 1).tolist()
        self.seconds, self.medians, self.versions = {}, {}, {}
        self.disturbed, self.notes = [], []

    def package(self):
        """The package's cached step, its matrix products, and the uncached pass."""
        cache = ContiguousCache.for_model(self.model)
        self.model(self.ids, cache, rows=[-1])
        self._time("products", -1, step_products(self.model, cache))
        for i in reversed(range(len(self.lengths))):  # downwards: truncate keeps what shorter ones need
            cache.truncate(self.lengths[i])
            self._time("cached", i, lambda n=self.lengths[i]: self._step(cache, n))
        for i, n in enumerate(self.lengths):
            self._time("uncached", i, lambda n=n: self.model(self.ids[:n]))

    def plain_loop(self):
        """The chapter's own forward pass, where the chapter is there."""
        plain = chapter_code.plain_gpt2()
        if plain is None:
            self.notes.append("plain loop left out: chapter 01 is not there")
            return
        model, shortest = self.model, self.ids[: self.lengths[0]]
        transformers_gpt2.same_answer(model(shortest), plain(shortest, model.params, model.config))
        for i, n in enumerate(self.lengths):
            self._time("plain", i, lambda n=n: plain(self.ids[:n], model.params, model.config))

    def transformers(self):
        """transformers' step and pass at the longest length, each with the faster of its attentions."""
        if not transformers_gpt2.available():
            self.notes.append("transformers left out: not installed (requirements-test.lock has it)")
            return
        peer = transformers_gpt2.peer_of(self.model, measure.threads())
        self.versions |= peer.versions
        longest, expected = self.ids[:-1], self.model(self.ids)
        for key, storage in (("peer_cached", "dynamic"), ("peer_static", "static")):
            self._time_best(key, partial(peer.cached_step, self.ids, storage), peer.ATTENTION, expected[-1:])
        self._time_best("peer_uncached", partial(peer.uncached, longest), peer.ATTENTION, expected[:-1])
        self.notes.append(f"transformers with {peer.threads} threads")

    def _step(self, cache, n):
        self.model(self.ids[n : n + 1], cache)
        cache.truncate(n)

    def _time(self, key, i, call):
        self._keep(key, i, self._quiet(f"{ROWS[key].strip()} at {self.lengths[i]}", call))

    def _time_best(self, key, make, ways, expected):
        """Time make(way) for each way, keep the fastest; all must give `expected`."""
        timings = {}
        for name in ways:
            call = make(name)
            transformers_gpt2.same_answer(expected, call())
            timings[name] = self._quiet(f"{ROWS[key].strip()}, {name}", call)
        best = min(timings, key=lambda name: timings[name].min)
        self._keep(key, -1, timings[best])
        all_ways = ", ".join(f"{name} {measure.format_seconds(t.min)}" for name, t in timings.items())
        self.notes.append(f"{ROWS[key].strip()}, {self.lengths[-1]:,} tokens: {best} attention ({all_ways})")

    def _keep(self, key, i, timing):
        for rows, value in ((self.seconds, timing.min), (self.medians, timing.median)):
            rows.setdefault(key, [None] * len(self.lengths))[i] = round(value, 7)

    def _quiet(self, label, call):
        """Time a block; again while it is disturbed, at most `attempts` times. Notes one that stays so."""
        for attempt in range(self.attempts):
            time.sleep(PAUSE_SECONDS if attempt else 0)
            timing = measure.time_call(call, self.repeats)
            print(f"{label}: {timing}", file=sys.stderr, flush=True)
            if not timing.disturbed:
                return timing
        self.disturbed.append(f"{label}: {timing.why}")
        return timing


def shown(path):
    """A path as the reader writes it: relative to where they stand, if it lies below."""
    path, here = path.resolve(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


if __name__ == "__main__":
    print(json.dumps(time_everything(**json.loads(sys.argv[1]))))
