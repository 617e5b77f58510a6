"""The exercise of chapter 11: a sweep that runs out of memory many times and leaves nothing behind."""

import gc
import sys
from dataclasses import dataclass, field

from kvcourse.checks import Run, exercise, is_number, short

MIB = 2**20
A_SEQUENCE = 18 * MIB  # keys and values of one sequence
LIMIT = 6 * 1024 * MIB  # 6 GiB: 341 sequences fit
# Seven of ten fail. Each that fits needs more than half of the room, so nothing else may be there then.
BATCHES = (200, 512, 256, 400, 1024, 600, 342, 341, 2048, 350)


@dataclass
class Stage:
    """A card on the "meta" device, and what `make` found there each time: shapes only, no memory is taken."""

    cap: object
    calls: list = field(default_factory=list)  # (batch, whether it fitted) of every call so far
    mistake: str = ""  # the first one

    def make(self, batch):
        """The reader's `make`: notes what is still held when it is called."""
        import torch

        self.mistake = self.mistake or self._left(batch, sys.exc_info()[1])
        self.calls.append((batch, False))
        with self.cap:  # variables, so that a traceback holds the keys when the values do not fit
            keys = torch.empty(batch * A_SEQUENCE // 2, dtype=torch.uint8, device="meta")
            values = torch.empty(batch * A_SEQUENCE // 2, dtype=torch.uint8, device="meta")
        self.calls[-1] = batch, True
        return Rows(keys, values)

    def _left(self, batch, handled):
        """The line for what is held when make(batch) starts, or "". `handled`: an open clause's error."""
        held = self.cap.held
        if not held or not self.calls:
            return ""
        start = f"when make({batch}) is called, {_mib(held)} are still held"
        if handled is not None:
            return (
                f"{start}: you call make within the except clause, where Python keeps the error, and the "
                f"error its frames. Leave the clause first"
            )
        last, fitted = self.calls[-1]
        if not fitted:
            return (
                f"{start}: the error of make({last}) is kept, and its traceback holds half-made rows. "
                f"Write down None, not the error"
            )
        return (
            f"{start}: the rows of {last} still have a name, or a place in what you collect. `rows = "
            f"make(batch)` lets go of the old ones only when the new ones are there: write down rows.nbytes, "
            f"then del rows"
        )


class Rows:
    """Keys and values of a batch."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values

    @property
    def nbytes(self):
        """Bytes of both."""
        return self.keys.nbytes + self.values.nbytes


def _stage(limit=LIMIT):
    from kvcourse.torch_models import MemoryCap  # torch is loaded by those who use it

    return Stage(MemoryCap(limit, device="meta"))


@exercise(
    "11.sweep",
    right=(
        "seven errors in one sweep, every batch that fits was found, and nothing was held before a try or "
        "after the last."
    ),
    todo="replace `...` by the loop, then run this cell again",
)
def sweep(run: Run) -> str | None:
    """``sweep(make, batches)`` → {batch: bytes or None}, nothing held before each try or at the end."""
    stage = _stage()

    def make(batch):
        """The rows of `batch` sequences, or torch.OutOfMemoryError."""
        return stage.make(batch)

    run.explain = lambda error: stage.mistake or _uncaught(error, stage)
    collects = gc.isenabled()
    gc.disable()  # a circle left behind must be seen every time, not only when the collector is late
    try:
        got = run(make, list(BATCHES))
        return stage.mistake or _answer_mistake(got, stage) or _left_at_the_end(stage)
    finally:
        if collects:
            gc.enable()


def _uncaught(error, stage):
    import torch

    if not isinstance(error, torch.OutOfMemoryError):
        return None
    batch = stage.calls[-1][0]
    return f"make({batch}) ran out of memory and ended your loop: catch torch.OutOfMemoryError and go on"


def _answer_mistake(got, stage):
    if not isinstance(got, dict):
        return f"return a dict {{batch: bytes or None}}, not {short(got)}"
    tried = {batch for batch, _ in stage.calls}
    for batch in BATCHES:
        if batch not in tried:
            return f"make({batch}) was never called: try every batch, whatever the others did"
        if batch not in got:
            return f"batch {batch} is missing in what you return: every batch gets its bytes, or None"
        mistake = _value_mistake(batch, got[batch])
        if mistake:
            return mistake
    return None


def _value_mistake(batch, value):
    need = batch * A_SEQUENCE
    if need > LIMIT:
        if value is None:
            return None
        if isinstance(value, BaseException):
            return f"for batch {batch} you return the error itself: it holds half-made rows. Return None"
        return f"batch {batch} needs {_mib(need)} of {_mib(LIMIT)}: expected None, got {short(value)}"
    if value is None:
        return f"batch {batch} needs {_mib(need)} of {_mib(LIMIT)}, so it fits alone, and you return None"
    if isinstance(value, Rows):
        return f"for batch {batch} you return the rows, and so they stay held. Write down rows.nbytes"
    if not is_number(value) or value != need:
        return f"batch {batch}: expected {need:,} bytes (rows.nbytes), got {short(value)}"
    return None


def _left_at_the_end(stage):
    """What is held after the last call, by a circle of frame and error, or by something outside."""
    if not stage.cap.held:
        return None
    return (
        f"your function has returned and {_mib(stage.cap.held)} are still held. Was an error given to a "
        f"variable of the function that caught it? That is a circle: do not keep it, or call gc.collect()"
    )


def _mib(count):
    return f"{count // MIB:,} MiB"
