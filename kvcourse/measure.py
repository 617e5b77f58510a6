"""Timing that can be trusted: warm-up, repeats, a synchronized device, and a look at who else is busy.

A figure from a disturbed machine is worse than none, so every timing says whether it
was disturbed, and why. `str(timing)` carries the word along; `require_quiet=True`
refuses instead. Recorded runs, made by `kvcourse bench`, are read with `load_recorded`.
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvcourse import paths

SPREAD_LIMIT = 1.5  # median ÷ fastest; a quiet machine stays below 1.2
THREAD_LIMIT = 3.0  # all threads ÷ one thread on the same product; a quiet machine stays below 1
CROWD_LIMIT = 0.25  # share of our threads' cores that other programs may take
SETTLE_SECONDS = 0.3  # idle threads of a math library spin up to 0.2 s before they sleep

_clock = time.perf_counter  # replaced by the tests


class MeasurementDisturbed(RuntimeError):
    """Other work ran at the same time: the figure would say more about that than about the code."""


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated calls. `why` is empty, or one line that says what disturbed the run."""

    samples: tuple[float, ...]
    why: str = ""

    @property
    def min(self):
        """The fastest call, in seconds."""
        return min(self.samples)

    @property
    def median(self):
        """The median call, in seconds."""
        return statistics.median(self.samples)

    @property
    def disturbed(self):
        """True when other work ran at the same time; `why` says how it showed."""
        return bool(self.why)

    def __str__(self):
        return format_seconds(self.min) + (" (disturbed)" if self.disturbed else "")


def time_call(fn, repeats=7, warmup=2, require_quiet=False):
    """Call fn() `warmup` times unmeasured, then `repeats` times measured; return a `Timing` in seconds.

    Waits for the GPU before each clock reading where PyTorch uses one. A disturbed run is
    marked (`.disturbed`, `.why`); with `require_quiet` it raises MeasurementDisturbed.
    Raises ValueError for fewer than 1 repeat or a negative warm-up.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats}, warmup={warmup}: give at least 1 repeat and 0 warm-ups")
    why = _threads_waiting()
    for _ in range(warmup):
        fn()
    _synchronize()
    crowd = _Crowd()
    samples = []
    for _ in range(repeats):
        start = _clock()
        fn()
        _synchronize()
        samples.append(_clock() - start)
    timing = Timing(tuple(samples), why or _spread(samples) or crowd.why())
    if require_quiet and timing.disturbed:
        raise MeasurementDisturbed(
            f"measurement refused: {timing.why}; close other programs and run it again"
        )
    return timing


def time_blocks(calls, repeats=7, warmup=2, require_quiet=False):
    """{name: fn} → {name: Timing}: each one in a block of its own, one after the other.

    Never call by call in turns: NumPy's and PyTorch's idle threads spin for a while after
    each call, and taking turns slows either two to three times.
    """
    return {name: time_call(fn, repeats, warmup, require_quiet) for name, fn in calls.items()}


def format_seconds(seconds):
    """Three digits in the unit that fits: 1.23 s, 45.6 ms, 7.89 µs."""
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if seconds >= s), ("µs", 1e-6))
    value = seconds / size
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def disturbed_line(reasons, noun):
    """Empty, or one line on disturbed measurements: "disturbed, do not quote (2 of 9 calls): at 250 …".

    reasons  [(what was measured, why it was disturbed or "")], in order
    noun     what they are, in the plural
    """
    found = [f"at {what} {why}" for what, why in reasons if why]
    if not found:
        return ""
    return f"disturbed, do not quote ({len(found)} of {len(reasons)} {noun}): {found[0]}"


# --- was it disturbed? -------------------------------------------------------------


def _spread(samples):
    """Step times far apart: half of the calls took much longer than the fastest one."""
    ratio = statistics.median(samples) / min(samples) if min(samples) > 0 else 1.0
    return f"the median call took {ratio:.1f}x the fastest" if ratio > SPREAD_LIMIT else ""


def _threads_waiting():
    """All calls about ten times too slow: each thread waits for one that other work keeps off its core.

    A short calibration shows it: the same product with all threads, then with one. On a
    quiet machine more threads are never slower; next to other work they can take 20x.
    """
    if threads() in (None, 1):
        return ""
    _settle()
    many, one = _calibrate()
    _settle()
    if many <= THREAD_LIMIT * one:
        return ""
    return f"a product took {many / one:.0f}x longer with {threads()} threads than with one"


def _calibrate(repeats=5):
    """Fastest time of one small product, in seconds: (with all threads, with one)."""
    from threadpoolctl import threadpool_limits

    x, weights = np.ones((1, 768), np.float32), np.ones((768, 3072), np.float32)

    def fastest():
        times = []
        for _ in range(repeats + 1):  # the first call warms up
            start = _clock()
            x @ weights
            times.append(_clock() - start)
        return min(times[1:])

    many = fastest()
    with threadpool_limits(limits=1, user_api="blas"):
        return many, fastest()


class _Crowd:
    """Processor time that other programs take between the making of this object and `why()`."""

    def __init__(self):
        self._start = _cpu_seconds()

    def why(self):
        """Empty, or one line: the others left fewer cores than our threads need."""
        (wall, everybody, ours), start = _cpu_seconds(), self._start
        wall, everybody, ours = wall - start[0], everybody - start[1], ours - start[2]
        if wall < 0.25:  # the system counts in ticks of 10 ms: too coarse for less
            return ""
        others = max(0.0, everybody - ours) / wall
        needed, cores = threads() or 1, os.cpu_count() or 1
        if others <= cores - needed + CROWD_LIMIT * needed:
            return ""
        return f"other programs kept {others:.1f} of {cores} cores busy"


def _cpu_seconds():
    """(clock, processor seconds of all programs, of this process), a hypervisor's stolen time included."""
    import psutil

    spent = psutil.cpu_times()._asdict()
    not_work = ("idle", "iowait", "guest", "guest_nice")  # guests are already counted in user and nice
    everybody = sum(seconds for kind, seconds in spent.items() if kind not in not_work)
    return _clock(), everybody, time.process_time()


def _settle():
    """Let the spinning threads of a second math library go to sleep, where one is loaded."""
    if "torch" in sys.modules:
        time.sleep(SETTLE_SECONDS)


def _synchronize():
    """Wait for the GPU, without importing torch or waking a GPU that nobody uses."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


# --- memory ------------------------------------------------------------------------


def resident_bytes():
    """Bytes of this process that lie in memory now: reserved ones count only once they were touched."""
    import psutil

    return psutil.Process().memory_info().rss


def page_faults():
    """How often the system has put a page in place for this process so far; None where it does not say.

    The first touch of fresh memory is one fault a page (commonly 4 KiB). Linux and macOS count
    them (getrusage, `ru_minflt`); Windows has no such call.
    """
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# --- where was it measured? ----------------------------------------------------------


def threads():
    """Threads NumPy's matrix products use now, or None where the library does not say (Accelerate)."""
    library = _blas()
    return library and library["num_threads"]


def threads_label(count):
    """In words: 1 thread, 8 threads, or "threads unknown" for None."""
    return "threads unknown" if count is None else f"{count} thread{'s' * (count != 1)}"


def describe_machine():
    """What a figure needs beside it, as a flat dict: processor, threads, libraries, versions, date.

    Names no user, host or folder.
    """
    described = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads(),
        "blas": _blas_label(),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": datetime.date.today().isoformat(),
    }
    if "torch" in sys.modules:
        described["torch"] = sys.modules["torch"].__version__
    return described


def _blas():
    """threadpoolctl's record of the library that NumPy multiplies with, or None."""
    from threadpoolctl import threadpool_info

    found = [library for library in threadpool_info() if library["user_api"] == "blas"]
    # PyTorch may bring a second one; NumPy's wheels keep theirs in `numpy.libs`.
    numpys_own = [library for library in found if "numpy" in library["filepath"]]
    return next(iter(numpys_own or found), None)


def _blas_label():
    library = _blas()
    if library is None:
        return np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    kernel = library.get("architecture")
    return f"{library['internal_api']} {library['version']}" + (f" ({kernel} kernel)" if kernel else "")


def _cpu_model():
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    if sys.platform == "darwin":
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return platform.processor() or platform.machine()


# --- recorded runs ---------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedRun:
    """A run of `kvcourse bench`, kept in data/measurements/. Times in `results` are seconds."""

    name: str
    kind: str  # which bench: "numpy"
    command: str
    date: str  # of the run, YYYY-MM-DD
    machine: dict = field(repr=False)
    versions: dict = field(repr=False)
    results: dict = field(repr=False)

    @property
    def label(self):
        """One line for a table or a hover text: recorded, on what, when."""
        m = self.machine
        return f"recorded {self.date}: {m['cpu']}, {threads_label(m['threads'])}"


_FIELDS = {"kind": str, "command": str, "date": str, "machine": dict, "versions": dict, "results": dict}


def load_recorded(name):
    """The recorded run data/measurements/<name>.json.

    Raises ValueError, in one line, for an unknown name (it lists those there are) and for a
    file that is not a recorded run.
    """
    path = _measurements_dir() / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in _measurements_dir().glob("*.json"))) or "none yet"
        raise ValueError(f"no recorded run {name!r}: there are {known}")
    return read_recorded(path)


def recorded_runs(kind):
    """All recorded runs of one bench ("numpy"), oldest first."""
    runs = (read_recorded(path) for path in sorted(_measurements_dir().glob("*.json")))
    return sorted((run for run in runs if run.kind == kind), key=lambda run: run.date)


def read_recorded(path):
    """A RecordedRun from a file, checked: every field there, of its type, the date a real one."""
    path = Path(path)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error}): restore it with git checkout") from None
    if not isinstance(stored, dict) or stored.keys() != _FIELDS.keys():
        raise ValueError(f"{path.name} is no recorded run: it must hold exactly {', '.join(_FIELDS)}")
    for key, kind in _FIELDS.items():
        if not isinstance(stored[key], kind) or not stored[key]:
            raise ValueError(f"{path.name}: {key} is {stored[key]!r}, it must be a filled {kind.__name__}")
    for key in ("cpu", "threads"):
        if key not in stored["machine"]:
            raise ValueError(f"{path.name}: machine lacks {key}: a figure needs it beside it")
    try:
        datetime.date.fromisoformat(stored["date"])
    except ValueError:
        raise ValueError(f"{path.name}: date {stored['date']!r} is not YYYY-MM-DD") from None
    return RecordedRun(name=path.stem, **stored)


def _measurements_dir():
    return paths.data_dir() / "measurements"
