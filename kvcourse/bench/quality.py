"""Measures what smaller caches cost SmolLM2 in quality: log-probabilities of a text, needles found.

Every run is kept as it was measured, token by token or needle by needle, so that perplexities,
curves along the text, standard errors and shorter cuts can all be made from it. Only `stream`
times anything. About an hour on one core; --out keeps every finished run beside FILE, in FILE.part,
and the same command goes on from there.

The recorded run's `results`:

    model, text, first_token    the text of all log-probabilities: tokens first_token … of the file
    bits, fake_bits, windows, heavy_hitters, needles, stream    the sections, each one

        tokens                  ids passed in; there is one ln p fewer (the first token has none)
        chunk                   tokens a pass: part of the result where a cache forgets or rounds per pass
        runs                    {name: run}

    log_probs of a run is a list of ln p in nats, to 3 decimals: entry t is token t + 1's, given what the
    cache kept of 0 … t. `evaluation.perplexity(run["log_probs"][a:b])` is that of a part.

    With 4 bits and fewer they are one draw of many: on another processor the last digits of a key decide
    for another code now and then, and every later layer rounds otherwise. One prediction then differs by
    0.14 nats (q4_0, standard deviation), perplexity over 256 tokens by 2 %.

    bits           real `QuantizedCache`s by name: "float16", "q8_0", "K int2/channel V int2/token g32 R128"
                   (K and V formats where they differ, gN: groups of N channels, R: the residual) →
                   {keys, values, residual, bytes_per_token (all layers, K and V, without the tail),
                   nbytes_used (at the end, with the tail), log_probs}
    fake_bits      the same names; every token, the newest too, is read back rounded →
                   {keys, values, log_probs}. The setting of KIVI's table 1 (Liu et al. 2024): layouts
                   compared without a tail.
    windows        "full", and "256 rows, 4 sinks": a `SlidingCache` of window 252 →
                   {rows, sinks, nbytes, log_probs}
    heavy_hitters  "64 heavy, 64 recent": a `HeavyHitterCache`; "4 sinks, 124 window"; "full" →
                   {rows, nbytes, log_probs}, with heavy hitters also {heavy, recent, heads,
                   heads_with_first_token: how many of layers × KV heads hold position 0 at the end}
    needles        "q4_0 at 512" → {cache: name, length, records: [{depth, seed, found, log_prob}]};
                   besides depths and characters (those of the text that are the haystack)
    stream         "4 sinks, 252 window" and "full" → {tokens, log_probs, thousands: [{tokens (so far),
                   seconds (of this thousand), step (seconds of one token after it, fastest of 7), nbytes,
                   nbytes_used, why (disturbed, or "")}]}; besides part (1,000), date, cpu, threads
"""

import json
import os
import platform
import re
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from kvcourse import evaluation, measure, needle, paths
from kvcourse.bench import numpy_gpt2
from kvcourse.caches import ContiguousCache, HeavyHitterCache, QuantizedCache, SlidingCache, formats
from kvcourse.cli import CommandError
from kvcourse.loading import fetch_model, load_model, load_tokenizer

KIND = "quality"
MODEL = "smollm2-135m"
TEXT = "austen-held-out.txt"
FIRST_TOKEN = 400
HAYSTACK = (3000, 60_000)  # characters of the text
GROUP = 32
SLACK = 63  # so passes of up to 64
SMALL_CHUNK = 16  # of the heavy hitters: closer to their algorithm, which evicts after every token
DECIMALS = 3
STEPS = 7  # single-token steps timed after each thousand

# (keys, values, residual). "int4/token": a scale for the whole head of a token; " g32": one for 32 channels.
K2, T2 = "int2/channel", "int2/token g32"
BITS = (
    ("float16", "float16", 0), ("fp8", "fp8", 0), ("q8_0", "q8_0", 0), ("q4_0", "q4_0", 0),
    ("int8/token", "int8/token", 0), ("int4/token", "int4/token", 0), ("int4/token g32", "int4/token g32", 0),
    ("int2/token", "int2/token", 0), (T2, T2, 0),
    ("int4/channel", "int4/token g32", 0), (K2, T2, 0), (K2, T2, 32), (K2, T2, 128),
    (T2, T2, 32), (K2, K2, 0), (T2, K2, 0),
    ("q4_0", "float16", 0), ("float16", "q4_0", 0), ("q8_0", "q4_0", 0),
    ("int4/token", "float16", 0), ("float16", "int4/token", 0),
    (T2, "float16", 0), (K2, "float16", 0), ("float16", T2, 0), ("float16", K2, 0),
)  # fmt: skip
NEEDLE_BITS = (
    ("float16", "float16", 0), ("fp8", "fp8", 0), ("q8_0", "q8_0", 0), ("q4_0", "q4_0", 0),
    ("int4/token", "int4/token", 0), ("int4/channel", "int4/token g32", 0),
    (K2, T2, 0), (K2, T2, 128), (T2, T2, 0),
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much is measured. The tests make a small one."""

    bits: int = 1024  # tokens
    fake_bits: int = 1025  # 1,024 are passed: whole groups
    windows: int = 2048
    rows: tuple = (256, 128, 64)
    sinks: tuple = (0, 1, 2, 4, 8)
    heavy_hitters: int = 1024
    heavy_recent: tuple = ((64, 64), (128, 128), (124, 4))
    sinks_window: tuple = ((4, 124), (4, 252))
    lengths: tuple = (512, 1024, 2048)
    depths: tuple = (0.1, 0.5, 0.9)
    seeds: tuple = (0, 1, 2)
    needle_rows: int = 256  # of a sliding or heavy-hitter cache
    stream: int = 10_000
    stream_full: int = 4_000
    stream_part: int = 1_000


# --- the command -----------------------------------------------------------------------


def add_arguments(parser):
    """The options of `kvcourse bench quality`."""
    parser.add_argument(
        "--out",
        nargs="?",
        const="",
        metavar="FILE",
        help=f"keep the run as a JSON file (default: data/measurements/{KIND}-<processor>.json)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="do not go on from FILE or FILE.part: begin anew"
    )
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION", help="measure anew: " + ", ".join(SECTIONS)
    )


def main(args):
    """Measure what FILE does not hold yet, print the table, keep the run where --out asks.

    Raises CommandError when --out cannot be written (before measuring) and when a file to go on from is
    no run of this bench; DownloadFailed where the model is neither here nor to be had.
    """
    path = Path(args.out) if args.out else default_path(measure.describe_machine()["cpu"])
    part = path.with_name(path.name + ".part")
    if args.out is not None:
        numpy_gpt2.check_writable(path)
    kept = None if args.fresh or args.out is None else _read(part if part.exists() else path)
    bench = Bench(*_model_and_text(), results=kept)
    save = (lambda: _write(part, bench.recorded_run())) if args.out is not None else (lambda: None)
    bench.measure(args.only, save)
    run = bench.recorded_run()
    print(table(run))
    if args.out is None:
        print(f"\nNot kept. With --out it would be written to {numpy_gpt2.shown(path)}.")
    elif bench.missing():
        print(
            f"\n{part.name} still lacks {', '.join(bench.missing())}: run the command again without --only."
        )
    else:
        _write(part, run)
        os.replace(part, path)
        print(f"\nKept in {numpy_gpt2.shown(path)}.")


def default_path(device):
    """data/measurements/quality-<short name of the processor>.json"""
    return numpy_gpt2.default_path(device, KIND)


def _model_and_text():
    fetch_model(MODEL)
    text = (paths.data_dir() / "texts" / TEXT).read_text(encoding="utf-8")
    return load_model(MODEL), load_tokenizer(MODEL), text


def _read(path):
    """The results to go on from, or None where there is no file."""
    if not path.exists():
        return None
    try:
        return measure.read_recorded(path).results
    except ValueError as error:
        raise CommandError(f"cannot go on from it: {error}; or begin anew with --fresh") from None


def _write(path, run):
    """As JSON, lists of numbers and records on one line each, under a temporary name until it is whole."""
    text = json.dumps(run, indent=1, ensure_ascii=False)
    text = re.sub(
        r"\[[-\d.,\s]*\]|\{[^{}\[\]]*\"found\"[^{}\[\]]*\}", lambda m: re.sub(r"\s+", "", m[0]), text
    )
    new = path.with_name(path.name + ".new.part")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)


def table(run):
    """The run as text: one line a cache, section by section."""
    results = run["results"]
    lines = [
        f"{results['model']}, {measure.threads_label(run['machine']['threads'])}, {run['machine']['cpu']}"
    ]
    for section in SECTIONS:
        if section in results:
            lines += ["", _heading(section, results[section])]
            lines += [_line(name, found) for name, found in results[section]["runs"].items()]
    disturbed = disturbed_line(results)
    return "\n".join([*lines, *(["", disturbed] if disturbed else [])])


def _heading(section, found):
    return f"{section}, {found['tokens']:,} tokens" if "tokens" in found else section


def _line(name, run):
    if "records" in run:
        found = [record["found"] for record in run["records"]]
        mean = np.mean([record["log_prob"] for record in run["records"]])
        return f"  {name:42}{sum(found):3} of {len(found)}  ln p {mean:7.3f}"
    line = f"  {name:42}perplexity {evaluation.perplexity(run['log_probs']):9.2f}"
    if "thousands" in run:
        seconds = [part["seconds"] for part in run["thousands"]]
        line += f"  {run['tokens']:,} tokens, {seconds[0]:.1f} … {seconds[-1]:.1f} s a thousand"
    return line


def disturbed_line(results):
    """Empty, or one line on the timings of `stream` that other work disturbed."""
    reasons = [
        (f"{part['tokens']:,} tokens, {name}", part["why"])
        for name, run in results.get("stream", {"runs": {}})["runs"].items()
        for part in run["thousands"]
    ]
    return measure.disturbed_line(reasons, "timings of the stream")


# --- measuring -------------------------------------------------------------------------


class Bench:
    """Runs section after section on one model and text; what `results` holds already is kept.

    model, tokenizer  SmolLM2, or any model; text str
    results           of an earlier run, or None. A section measured with other settings is dropped.
    """

    def __init__(self, model, tokenizer, text, results=None, sizes=Sizes()):
        self.model, self.tokenizer, self.text, self.sizes = model, tokenizer, text, sizes
        self.ids = tokenizer.encode_ordinary(text)[FIRST_TOKEN:]
        header = {"model": model.config.name, "text": TEXT, "first_token": FIRST_TOKEN}
        kept = results if results and all(results.get(key) == header[key] for key in header) else {}
        self.results = header
        for section in SECTIONS:
            stored = kept.get(section, {})
            settings, _ = self._plan(section)
            if {key: stored.get(key) for key in settings} == settings:
                self.results[section] = stored

    def measure(self, only=None, save=lambda: None):
        """Do what is missing, or the sections `only` anew; call save() after each run."""
        for section in only or SECTIONS:
            settings, jobs = self._plan(section)
            if only or section not in self.results:
                self.results[section] = settings | (_where() if section == "stream" else {}) | {"runs": {}}
            runs = self.results[section]["runs"]
            for name, job in jobs.items():
                if name not in runs:
                    runs[name] = job()
                    print(f"{section}: {_line(name, runs[name]).strip()}", file=sys.stderr, flush=True)
                    save()

    def missing(self):
        """The sections that are not complete."""
        complete = {
            s for s in SECTIONS if s in self.results and self._jobs(s) <= self.results[s]["runs"].keys()
        }
        return [section for section in SECTIONS if section not in complete]

    def _jobs(self, section):
        return self._plan(section)[1].keys()

    def _plan(self, section):
        """(settings, {run's name: function without arguments → run})."""
        settings, jobs = getattr(self, f"_{section}")()
        return json.loads(json.dumps(settings)), jobs  # as they are read back: lists for tuples

    def recorded_run(self):
        """The dict of data/measurements/*.json."""
        described = measure.describe_machine()
        ordered = {k: v for k, v in self.results.items() if k not in SECTIONS}
        ordered |= {section: self.results[section] for section in SECTIONS if section in self.results}
        return {
            "kind": KIND,
            "command": f"kvcourse bench {KIND}",
            "date": described["date"],
            "machine": {key: described[key] for key in ("cpu", "cores", "threads", "blas", "os")},
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "results": ordered,
        }

    def _log_probs(self, tokens, cache, chunk):
        found = evaluation.log_probs(self.model, self.ids[:tokens], cache, chunk)
        return {"log_probs": _rounded(found)}

    def _full(self, tokens):
        return ContiguousCache.for_model(self.model, tokens)

    def _sliding(self, sinks, window):
        return SlidingCache.for_model(self.model, window=window, num_sinks=sinks, slack=SLACK)

    # --- sections: settings and jobs -----------------------------------------------------

    def _bits(self):
        settings = {"tokens": self.sizes.bits, "chunk": GROUP}
        return settings, {label(*case): partial(self._quantized, *case) for case in BITS}

    def _quantized(self, keys, values, residual):
        cache = quantized_cache(self.model, self.sizes.bits, keys, values, residual)
        run = {"keys": keys, "values": values, "residual": residual}
        run["bytes_per_token"] = bytes_per_token(self.model.config, keys, values)
        found = self._log_probs(self.sizes.bits, cache, GROUP)
        return run | {"nbytes_used": cache.nbytes_used} | found

    def _fake_bits(self):
        settings = {"tokens": self.sizes.fake_bits, "chunk": GROUP, "group": GROUP}
        layouts = [("float16", "float16")]
        for bits in ("int4", "int2"):
            channel, token = f"{bits}/channel", f"{bits}/token g{GROUP}"
            both = [(k, v) for k in (channel, token) for v in (token, channel)]
            layouts += [*both, *((k, "float16") for k in (channel, token))]
            layouts += [("float16", v) for v in (token, channel)]
        return settings, {
            label(*layout): partial(self._rounded_before_reading, *layout) for layout in layouts
        }

    def _rounded_before_reading(self, keys, values):
        cache = RoundedCache.for_model(self.model, self.sizes.fake_bits, keys=keys, values=values)
        return {"keys": keys, "values": values} | self._log_probs(self.sizes.fake_bits, cache, GROUP)

    def _windows(self):
        settings = {"tokens": self.sizes.windows, "chunk": SLACK + 1}
        jobs = {"full": partial(self._window, None, None)}
        for rows in self.sizes.rows:
            for sinks in self.sizes.sinks:
                jobs[f"{rows} rows, {sinks} sinks"] = partial(self._window, rows, sinks)
        return settings, jobs

    def _window(self, rows, sinks):
        tokens = self.sizes.windows
        cache = self._full(tokens) if rows is None else self._sliding(sinks, rows - sinks)
        found = self._log_probs(tokens, cache, SLACK + 1)
        return {"rows": rows, "sinks": sinks, "nbytes": cache.nbytes} | found

    def _heavy_hitters(self):
        settings = {"tokens": self.sizes.heavy_hitters, "chunk": SMALL_CHUNK}
        jobs = {"full": lambda: self._in_small_passes(self._full(settings["tokens"]), None)}
        for sinks, window in self.sizes.sinks_window:
            jobs[f"{sinks} sinks, {window} window"] = lambda sinks=sinks, window=window: (
                self._in_small_passes(self._sliding(sinks, window), sinks + window)
            )
        for heavy, recent in self.sizes.heavy_recent:
            jobs[f"{heavy} heavy, {recent} recent"] = partial(self._heavy_recent, heavy, recent)
        return settings, jobs

    def _in_small_passes(self, cache, rows):
        found = self._log_probs(self.sizes.heavy_hitters, cache, SMALL_CHUNK)
        return {"rows": rows, "nbytes": cache.nbytes} | found

    def _heavy_recent(self, heavy, recent):
        cache = HeavyHitterCache.for_model(self.model, heavy=heavy, recent=recent, chunk=SMALL_CHUNK)
        found = self._in_small_passes(cache, heavy + recent)
        held = np.stack([cache.key_positions(layer) for layer in range(self.model.config.num_layers)])
        first = (held == 0).any(axis=2)  # (layers, KV heads)
        counted = {"heavy": heavy, "recent": recent, "heads": first.size}
        return counted | {"heads_with_first_token": int(first.sum())} | found

    def _needles(self):
        s = self.sizes
        settings = {"chunk": SLACK + 1, "depths": s.depths, "characters": HAYSTACK}
        jobs = {}
        for length in s.lengths:
            for name, make in self._needle_caches().items():
                jobs[f"{name} at {length}"] = partial(self._needle, name, make, length)
        return settings, jobs

    def _needle_caches(self):
        """{name: function of the length → an empty cache}."""
        rows, model = self.sizes.needle_rows, self.model
        caches = {
            label(*case): lambda length, case=case: quantized_cache(model, length, *case)
            for case in NEEDLE_BITS
        }
        caches[f"4 sinks, {rows - 4} window"] = lambda length: self._sliding(4, rows - 4)
        caches[f"{rows // 2} heavy, {rows // 2} recent"] = lambda length: HeavyHitterCache.for_model(
            model, heavy=rows // 2, recent=rows // 2, chunk=SLACK + 1
        )
        return caches

    def _needle(self, name, make, length):
        records = []
        haystack = self.text[slice(*HAYSTACK)]
        for depth in self.sizes.depths:
            for seed in self.sizes.seeds:
                prompt, answer = needle.prompt(self.tokenizer, haystack, length, depth, seed)
                found, log_prob = needle.ask(self.model, prompt, answer, make(length), SLACK + 1)
                records.append(
                    {"depth": depth, "seed": seed, "found": found, "log_prob": round(log_prob, DECIMALS)}
                )
        return {"cache": name, "length": length, "records": records}

    def _stream(self):
        s = self.sizes
        settings = {"chunk": SLACK + 1, "part": s.stream_part}
        return settings, {
            "4 sinks, 252 window": lambda: self._streamed(self._sliding(4, 252), s.stream),
            "full": lambda: self._streamed(self._full(s.stream_full + 1), s.stream_full),
        }

    def _streamed(self, cache, tokens):
        log_probs, thousands = [], []
        for start in range(0, tokens, self.sizes.stream_part):
            ids = self.ids[start : min(start + self.sizes.stream_part, tokens) + 1]
            found = []
            passed = measure.time_call(
                lambda ids=ids, found=found: found.append(
                    evaluation.log_probs(self.model, ids, cache, SLACK + 1)
                ),
                repeats=1,
                warmup=0,
            )
            log_probs += _rounded(found[0])
            step = measure.time_call(partial(_step, self.model, cache, ids[-1]), repeats=STEPS, warmup=1)
            thousands.append(
                {
                    "tokens": cache.seq_len,
                    "seconds": round(passed.min, 3),
                    "step": round(step.min, 5),
                    "nbytes": cache.nbytes,
                    "nbytes_used": cache.nbytes_used,
                    "why": passed.why or step.why,
                }
            )
        return {"tokens": tokens, "thousands": thousands, "log_probs": log_probs}


SECTIONS = ("bits", "fake_bits", "windows", "heavy_hitters", "needles", "stream")  # in the order measured


def _rounded(log_probs):
    return [round(float(x), DECIMALS) for x in log_probs]


def _where():
    """Beside timings: they belong to the machine and the day."""
    described = measure.describe_machine()
    return {key: described[key] for key in ("date", "cpu", "threads")}


def _step(model, cache, token):
    """One decode step, taken back."""
    model([token], cache, rows=[-1])
    cache.truncate(cache.seq_len - 1)


# --- caches by name ----------------------------------------------------------------------


def label(keys, values, residual=0):
    """A cache's name: "q8_0", "K int2/channel V int2/token g32 R128"."""
    name = keys if keys == values else f"K {keys} V {values}"
    return name + (f" R{residual}" if residual else "")


def form(name):
    """The Format of a name: those of `formats.by_name`, and "int4/token g32" for groups of 32 channels."""
    name, _, group = name.partition(" g")
    found = formats.by_name(name)
    return replace(found, group=int(group)) if group else found


def quantized_cache(model, max_seq_len, keys, values, residual=0):
    """An empty QuantizedCache with the formats of these names."""
    options = {"keys": form(keys), "values": form(values), "residual": residual}
    return QuantizedCache.for_model(model, max_seq_len, **options)


def bytes_per_token(config, keys, values):
    """Bytes of a quantized token in all layers, K and V, scales and zero points included."""
    layers, heads, head_dim = config.cache_shape
    return layers * sum(form(name).bytes_per_token(heads, head_dim) for name in (keys, values))


class RoundedCache(ContiguousCache):
    """Keeps float32, but every row went through a format first: nothing is read that was not rounded.

    keys, values  names of formats (see `form`). A per-channel format needs passes of whole groups.
    """

    def __init__(self, config, max_seq_len=None, *, keys, values):
        super().__init__(config, max_seq_len)
        self.formats = form(keys), form(values)

    def _write(self, layer, k, v):
        k, v = (f.decode(f.encode(rows)) for f, rows in zip(self.formats, (k, v), strict=True))
        return super()._write(layer, k, v)
