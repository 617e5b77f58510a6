"""Checks of primer C: time on a device that works later, and FLOP per byte."""

from __future__ import annotations

import math

from kvcourse.checks import Run, exercise, is_number, short

# Seconds of the pretended device. Each count of repeats makes every mistake another number.
LAUNCH, FIRST, EACH, BUSY = 10e-6, 700e-6, 100e-6, 5e-3
LOOK = 10e-6  # of the CPU, for a look whether an event has passed
REPEATS = (10, 4)
TOLERANCE = 1e-9  # the clock below adds up a few dozen numbers: nothing else is rounded


class PretendedEvent:
    """What `PretendedStream.record` returns."""

    def __init__(self, stream, time):
        self._stream, self._time, self._place = stream, time, len(stream.log)

    def __repr__(self):
        return "event"

    @property
    def _reached(self):
        return self._stream.now >= self._time

    @property
    def passed(self):
        # Who looks again and again waits too. Without a moment for each look that would never end.
        if not self._reached:
            self._stream.wait_until(min(self._time, self._stream.now + LOOK))
            return False
        return True

    def synchronize(self):
        self._stream.wait_until(self._time)

    def seconds_since(self, earlier):
        if not (self._reached and earlier._reached):
            raise RuntimeError("the device has not reached this event yet: synchronize first, then read it")
        self._stream.readings += [earlier._place, self._place]
        return self._time - earlier._time


class PretendedStream:
    """`kv.streams.Stream` without a clock of its own: time is a number that launches and waits move.

    A launch takes the CPU `LAUNCH`. A piece of work takes the device `EACH`, the first one `FIRST`, and
    work from before keeps it busy for `BUSY`. `log` holds the work it did and the looks at the clock,
    `readings` the places in it at which a time was taken: the clock's, and those of events that were read.
    """

    def __init__(self):
        self.now, self._free, self.log, self.readings = 0.0, BUSY, [], []
        self._spent, self._launching, self._done = 0.0, False, 0

    def __repr__(self):
        return "stream"

    def clock(self):
        """The CPU's clock, to be handed over."""
        self.readings.append(len(self.log))
        self.log.append(("clock", self._free > self.now))
        return self.now

    def work(self):
        """The piece of work, to be launched."""
        self.log.append(("work" if self._launching else "direct", None))
        self._spent += EACH if self._done else FIRST
        self._done += 1

    def launch(self, work, *args):
        if not callable(work):
            raise TypeError(
                f"launch takes a function, got {type(work).__name__}: launch(work), not launch(work())"
            )
        self.now += LAUNCH
        self._spent, self._launching = 0.0, True
        work(*args)
        self._launching = False
        self._free = max(self.now, self._free) + self._spent

    def record(self):
        return PretendedEvent(self, max(self.now, self._free))

    def synchronize(self):
        self.wait_until(self._free)

    def wait_until(self, time):
        self.now = max(self.now, time)


@exercise(
    "c.seconds_per_call",
    right="an idle device at the first reading, a finished one at the second, no slow first call in between.",
    todo="replace `...` by launches, waits and two readings, then run this cell again",
)
def seconds_per_call(run: Run) -> str | None:
    """``seconds_per_call(stream, work, repeats, clock)`` → seconds of one piece of work on the device."""
    for repeats in REPEATS:
        stream = PretendedStream()
        got = run(stream, stream.work, repeats, stream.clock)
        if not is_number(got):
            return f"the result is {short(got)}, not seconds as one number"
        mistake = _timing_mistake(got, repeats, stream)
        if mistake:
            return mistake
    return None


def _timing_mistake(got, repeats, stream):
    acts = [act for act, _ in stream.log]
    if "direct" in acts:
        return "you called work() yourself, so the CPU did it: hand it over with stream.launch(work)"
    if "work" not in acts:
        return "nothing was launched: stream.launch(work), `repeats` times between two readings"
    if not stream.readings:
        return "neither clock() nor an event was read: another clock knows nothing of this device"
    timed = acts[min(stream.readings) : max(stream.readings)].count("work")
    # Right: the work alone (events), or with the one launch that nothing hides (clock). A number can be
    # right by accident: all the work has to stand between the readings too.
    if EACH - TOLERANCE <= got <= EACH + LAUNCH / repeats + TOLERANCE:
        return _wrong_count(timed, repeats) if timed < repeats else None
    if math.isclose(got, LAUNCH, rel_tol=1e-6):
        return (
            f"{got * 1e6:.0f} µs is what a launch takes the CPU: at your second reading the device was "
            "still working. Synchronize before it"
        )
    return _other_timing_mistake(got, repeats, stream.log, timed)


def _wrong_count(timed, repeats):
    stand = f"stands {timed} launch" if timed == 1 else f"stand {timed} launches"
    return (
        f"between your readings {stand}, not {repeats}: launch once before the first "
        "reading, then time `repeats` more"
    )


def _other_timing_mistake(got, repeats, log, timed):
    clocks = [busy for act, busy in log if act == "clock"]
    if len(clocks) > 1 and clocks[0]:
        return (
            "at your first reading the device was still busy with earlier work, and your time includes that: "
            "synchronize before the first reading"
        )
    if 0 < timed != repeats:
        return _wrong_count(timed, repeats)
    if math.isclose(got, LAUNCH + EACH, rel_tol=1e-6):
        return (
            "you wait after every launch: then launch and work come one after the other, "
            f"{(LAUNCH + EACH) * 1e6:.0f} µs together. Launch all `repeats` first, wait once"
        )
    for unit, line in ((1e3, "milliseconds"), (1e6, "microseconds")):
        if EACH - TOLERANCE <= got / unit <= EACH + LAUNCH + TOLERANCE:
            return f"{got:.6g} looks like {line}: give seconds"
    if EACH - TOLERANCE <= got / repeats <= EACH + LAUNCH / repeats + TOLERANCE:
        return f"{got:.6g} s are all {repeats} calls together: divide by repeats"
    if [act for act, _ in log].count("work") == repeats:
        return (
            "the first call on a device is slower (it loads the kernel), and it is within your time: launch "
            "once, synchronize, and only then start"
        )
    if got == 0:
        return "0 seconds: both readings stand at the same place"
    return (
        f"{got * 1e6:,.1f} µs a call; the device needs {EACH * 1e6:.0f} µs for each, after a slower first one"
    )


# --- FLOP per byte -----------------------------------------------------------------------

PRODUCTS = ((1, 768, 3072, 4), (64, 768, 3072, 2), (300, 4096, 1024, 2))  # rows, n_in, n_out, bytes a number


@exercise(
    "c.arithmetic_intensity",
    right="two FLOPs for each multiply-add; matrix, rows in and rows out moved once each.",
    todo="replace `...` by FLOPs divided by bytes, then run this cell again",
)
def arithmetic_intensity(run: Run) -> str | None:
    """``arithmetic_intensity(rows, n_in, n_out, bytes_per_number)`` → FLOP per byte."""
    for given in PRODUCTS:
        got = run(*given)
        if not is_number(got):
            return f"the result is {short(got)}, not one number"
        if not math.isclose(got, _intensity(*given), rel_tol=1e-9):
            return _intensity_mistake(got, given)
    return None


def _intensity(rows, n_in, n_out, size, *, flops=2, matrix=1, x=1, y=1):
    numbers = matrix * n_in * n_out + x * rows * n_in + y * rows * n_out
    return flops * rows * n_in * n_out / (numbers * size)


def _intensity_mistake(got, given):
    for wrong, line in _wrong_intensities(*given):
        if math.isclose(got, wrong, rel_tol=1e-9):
            return line
    return (
        f"expected {_intensity(*given):.4g}, got {short(got)}. Print the FLOPs and the bytes on their own: "
        "each is one line"
    )


def _wrong_intensities(rows, n_in, n_out, size):
    """(result of the mistake, its line) pairs."""
    given = rows, n_in, n_out, size
    once = "a multiplication and an addition for each pair of numbers: 2 FLOPs, not 1"
    yield _intensity(*given, flops=1), once
    yield _intensity(*given, flops=1, x=0, y=0), f"{once}; and the rows in and out are moved too"
    yield 1 / _intensity(*given), "this is bytes per FLOP: turn the fraction over"
    yield (
        _intensity(*given, x=0, y=0),
        "only the matrix is counted: the rows that go in and come out move too",
    )
    yield _intensity(*given, x=0), "the rows that go in are missing among the bytes: rows × n_in numbers"
    yield _intensity(*given, y=0), "the rows that come out are missing among the bytes: rows × n_out numbers"
    yield _intensity(*given, matrix=0), "the matrix is missing among the bytes: n_in × n_out numbers"
    yield (
        _intensity(*given, matrix=rows),
        "the matrix is counted once for every row: one product reads it once, for all rows",
    )
    yield _intensity(rows, n_in, n_out, 1), "this is FLOPs per number: each has bytes_per_number bytes"
    yield (
        _intensity(rows, n_in, n_out, 1 / size),
        "multiply the numbers by bytes_per_number, do not divide by it",
    )
    yield 2 * rows * n_in * n_out, "these are the FLOPs: divide by the bytes"
    yield (
        _intensity(*given, x=1 / rows, y=1 / rows),
        "x and the result are counted with one row only: rows × n_in and rows × n_out numbers",
    )
    for n in (n_in, n_out):
        yield (
            _intensity(*given, flops=2 - 1 / n),
            f"{2 * n - 1:,} FLOPs for each number of the result? A sum of n products has n − 1 additions, "
            "but the usual count is one for each multiplication: 2 · rows · n_in · n_out",
        )
