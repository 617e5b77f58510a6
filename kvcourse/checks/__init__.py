"""Exercise checks that name the mistake: ``kv.check("01.positions_processed", my_function)`` prints one line.

A chapter's checks live in ``kvcourse/checks/chapter_<nn>.py`` and are found by name: "01.positions_processed"
is the exercise ``positions_processed`` of ``chapter_01.py``. See ``exercise`` for how one is written.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcourse import progress
from kvcourse.config import ModelConfig

NOT_DONE, RIGHT, WRONG = "not done", "right", "wrong"
_EXERCISES: dict[str, Exercise] = {}


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check: ``status`` is "not done", "right" or "wrong"; ``message`` is one line."""

    status: str
    message: str

    def __str__(self) -> str:
        start = {NOT_DONE: "not done yet", RIGHT: "right", WRONG: "not right"}[self.status]
        return f"{start}: {self.message}"


@dataclass(frozen=True)
class Exercise:
    """A registered check: ``judge(run) -> mistake or None``, and the line for a right answer."""

    name: str
    judge: Callable[[Run], str | Verdict | None]
    right: str
    todo: str


class _Stop(Exception):
    """Carries a verdict out of a check, whatever the check was about to do with the returned value."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


class Run:
    """Calls the reader's function for a check, and turns every way to fail into one line.

    ``run(*args, **kwargs)`` returns what the function returned; a NumPy scalar or a one-number tensor comes
    as a Python number, also within a tuple, list or dict. Containers and arrays are handed over as copies, so
    that the check's own inputs stay whole and a function that changes its input is caught.

    A check that knows what lies behind an error sets ``run.explain``: it gets the error and returns the line
    that names the mistake, or ``None``.
    """

    def __init__(self, function: Callable[..., Any], todo: str) -> None:
        self._function, self._todo = function, todo
        self.calls = 0
        self.last = ""  # the last call in words, for messages: "prompt=16, new=4"
        self.result: Any = None
        self.explain: Callable[[BaseException], str | None] = lambda error: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # mutable=True is the point of one exercise now and then; no need for it yet, so no switch.
        self.last = _in_words(args, kwargs)
        given_args = [_copied(value) for value in args]
        given_kwargs = {name: _copied(value) for name, value in kwargs.items()}
        try:
            self.result = self._function(*given_args, **given_kwargs)
        except NotImplementedError:
            raise _Stop(Verdict(NOT_DONE, self._todo)) from None
        except KeyboardInterrupt:
            raise
        # BaseException: a tokenizer's PanicException and SystemExit from exit() are no Exception, and neither
        # may take the kernel or the rest of Run All with it.
        except BaseException as error:
            named = self.explain(error) or f"your function raised {_cause(error)}"
            raise _Stop(self._wrong(named)) from None
        self.calls += 1
        self.result = _plain(self.result)
        if self.result is None or self.result is Ellipsis:
            if self.calls == 1:
                raise _Stop(Verdict(NOT_DONE, self._todo))
            raise _Stop(self._wrong("your function returned None: is a `return` missing on one path?"))
        after = [*given_args, *given_kwargs.values()]
        for before, now in zip([*args, *kwargs.values()], after, strict=True):
            if not _equal(before, now):
                raise _Stop(self._wrong("your function changed its input: work on a copy"))
        return self.result

    def _wrong(self, message: str) -> Verdict:
        # The mistake first: the input of an exercise on arrays is a long line of shapes.
        return Verdict(WRONG, f"{message} (called with {self.last})" if self.last else message)


def _plain(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    if getattr(value, "ndim", None) == 0 and hasattr(
        value, "item"
    ):  # NumPy's scalars, 0-d arrays and tensors
        return value.item()
    return value


def exercise(
    name: str, *, right: str, todo: str = "fill in the function above and run both cells again"
) -> Callable[[Callable[[Run], str | Verdict | None]], Callable[[Run], str | Verdict | None]]:
    """Register a check under its name.

    The decorated function gets ``run``, calls it like the reader's function, and returns a line that names
    the mistake, or ``None`` when everything is right::

        @exercise("01.positions_processed", right="a cached step processes one position")
        def positions_processed(run):
            got = run(prompt=2000, new=300, cached=True)
            if got == 2300 * 300:
                return "that is the count without a cache: ..."
            if got != 2299:
                return f"2,000 + 300 tokens with a cache: expected 2,299, got {short(got)}"

    A check that can be handed in half done returns ``Verdict(NOT_DONE, "...")`` for what is right so far.
    ``right`` is shown for a right answer: say what it proves. Raises ``ValueError`` when the name is taken.
    """

    def register(judge: Callable[[Run], str | Verdict | None]) -> Callable[[Run], str | Verdict | None]:
        known = _EXERCISES.get(name)
        # The same function again is a reload of its module (autoreload), not a clash.
        if known is not None and (known.judge.__module__, known.judge.__qualname__) != (
            judge.__module__,
            judge.__qualname__,
        ):
            raise ValueError(f"check {name!r} is registered twice: rename one of them")
        _EXERCISES[name] = Exercise(name, judge, right, todo)
        return judge

    return register


def find(name: str) -> Exercise:
    """The exercise called "<chapter>.<exercise>". Raises ``KeyError`` with the names that exist."""
    chapter, _, short = name.partition(".")
    if not short:
        raise KeyError(f"check name {name!r} has no chapter: write it like '01.positions_processed'")
    module = f"{__name__}.chapter_{chapter}"
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    if name not in _EXERCISES:
        known = sorted(other for other in _EXERCISES if other.startswith(chapter + "."))
        raise KeyError(f"no check {name!r}; chapter {chapter} has: {', '.join(known) or 'none'}")
    return _EXERCISES[name]


def verdict(name: str, function: Any) -> Verdict:
    """What ``check`` prints, as a value; nothing is printed or recorded. ``KeyError`` for an unknown name."""
    found = find(name)
    if function is None or function is Ellipsis:
        return Verdict(NOT_DONE, found.todo)
    if not callable(function):
        return Verdict(WRONG, f"give the function itself, without parentheses, not {short(function)}")
    run = Run(function, found.todo)
    try:
        mistake = found.judge(run)
    except _Stop as stop:
        return stop.verdict
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # The check stumbled over a value of another kind than it expected, so name that value. BaseException,
        # because comparing with the reader's object may run the reader's code.
        return run._wrong(
            f"your function returned {short(run.result)}, which this check cannot use ({_cause(error)})"
        )
    if isinstance(mistake, Verdict):
        return mistake
    return Verdict(RIGHT, found.right) if mistake is None else Verdict(WRONG, mistake)


def check(name: str, function: Any) -> None:
    """Print one line on the reader's function: "not done yet: …", "right: …" or "not right: …" with the
    mistake.

    A pass is noted in the reader's progress. Raises only ``KeyError`` for an unknown name, never for the
    reader's code.
    """
    outcome = verdict(name, function)
    if outcome.status == RIGHT:
        progress.record_passed(name)
    print(outcome)


def _copied(value: Any) -> Any:
    # Arrays and containers only: a model or a cache handed to an exercise is large and is not ours to copy.
    return copy.deepcopy(value) if isinstance(value, (np.ndarray, list, dict, set, tuple)) else value


def _equal(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if isinstance(before, np.ndarray):
        return isinstance(now, np.ndarray) and before.shape == now.shape and before.tobytes() == now.tobytes()
    if isinstance(before, (list, tuple)):
        return len(before) == len(now) and all(map(_equal, before, now))
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_equal(before[key], now[key]) for key in before)
    return bool(before == now)


def is_number(value: Any) -> bool:
    """Whether a returned value is a plain ``int`` or ``float``: ask before comparing, because another object
    decides by itself what it is equal to."""
    return type(value) in (int, float)


def short(value: Any) -> str:
    """A returned value for a message, on one short line: ``"2,300"``, ``"'ten' (str)"``, ``"an array of shape
    (2, 2), float64"``. Raises nothing, whatever the value's ``repr`` does, and shows no addresses."""
    if is_number(value):
        return _safely("{:,}".format, value)
    kind = "" if issubclass(type(value), np.ndarray) else f" ({type(value).__name__})"
    return _safely(_in_a_word, value) + kind


def _in_a_word(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}, {value.dtype}"
    if inspect.isroutine(value):  # a method's repr is that of its object, a function's an address
        return value.__name__
    if isinstance(value, ModelConfig):  # twenty fields, where the name says which
        return value.name
    return repr(value)


def _cause(error: BaseException) -> str:
    def first_line(error):
        return (str(error).strip().splitlines() or ["no message"])[0]

    return f"{type(error).__name__}: {_safely(first_line, error, 200)}"


def _safely(write: Callable[[Any], str], value: Any, limit: int = 60) -> str:
    """``write(value)`` on one line, cut after ``limit`` characters; it may run the reader's code."""
    try:
        # An address changes with every run and says nothing to the reader.
        text = " ".join(re.sub(r" at 0x[0-9A-Fa-f]+", "", write(value)).split())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = f"<no text: {type(error).__name__}>"
    return text if len(text) <= limit else text[:limit] + "…"


def _in_words(args: tuple, kwargs: dict[str, Any]) -> str:
    return ", ".join(
        [_safely(_in_a_word, value) for value in args]
        + [f"{name}={_safely(_in_a_word, value)}" for name, value in kwargs.items()]
    )
