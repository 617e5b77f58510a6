"""The reader's record: predictions, passed checks, last activity. One small JSON file in the reader's own
folder.

Nothing in here may stop a notebook: a damaged file is kept beside the new one and named in one line, a folder
that cannot be written gives a record that lives until the kernel ends, with one line that says so.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from kvcourse import paths

VERSION = 1

# A kernel holds the lock for some milliseconds; one that did not change for this long was left by a crash.
STALE_SECONDS = 3.0


@dataclass
class Record:
    """What is known about one reader.

    ``predictions``: prediction key ("01.crossover") -> number or text. ``passed``: check name -> date (ISO).
    ``last_run``: ``{"chapter": "01", "date": "2026-01-31"}`` or empty.
    """

    predictions: dict[str, float | int | str] = field(default_factory=dict)
    passed: dict[str, str] = field(default_factory=dict)
    last_run: dict[str, str] = field(default_factory=dict)


# The record when the file cannot be read or written, and the line about the last trouble with the file.
_unsaved: dict[Path, Record] = {}
_unreadable: set[Path] = set()  # never replaced: the reader's record may still be in there
_notice: dict[Path, str] = {}


def _path() -> Path:
    return Path(paths.progress_file())


def _refuse_what_is_no_file(path: Path) -> None:
    """``OSError`` for a device, a pipe or a folder: reading one may block, renaming one takes it away."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file beside ``path``, so that another kernel's change is not lost in between.

    Where no lock can be made the change goes on without one: one kernel alone is the usual case.
    """
    lock = Path(f"{path}.lock")
    try:
        held = _take(lock, path)
    except OSError:
        held = False
    try:
        yield
    finally:
        if held:
            with suppress(OSError):
                lock.unlink()


def _take(lock: Path, path: Path) -> bool:
    """Wait for the lock and make it. ``OSError`` where that is impossible."""
    _refuse_what_is_no_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    seen, since = None, time.monotonic()
    while True:
        time.sleep(0 if seen is None else 0.005)
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        except FileExistsError:
            pass
        except PermissionError:
            # Windows says so for a moment while another kernel removes its lock; elsewhere it is the folder.
            if os.name != "nt" or time.monotonic() - since > STALE_SECONDS:
                raise
        # Told by a lock that does not change, not by its age: the clock of a network folder may differ.
        try:
            now = lock.lstat().st_mtime_ns
        except OSError:
            continue  # just removed
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > STALE_SECONDS:
            lock.unlink(missing_ok=True)


def _parse(text: str) -> Record:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, found {type(content).__name__}")
    if content.get("version") != VERSION:
        raise ValueError(f"version {content.get('version')!r}, expected {VERSION}")
    record = Record()
    for name, allowed in (("predictions", (int, float, str)), ("passed", str), ("last_run", str)):
        part = content.get(name, {})
        if not isinstance(part, dict) or not all(isinstance(item, allowed) for item in part.values()):
            raise ValueError(f"{name} is not a table of plain values")
        setattr(record, name, part)
    return record


def _set_aside(path: Path) -> str:
    """Rename a damaged file so that nothing of the reader's is lost, and return a phrase that names the
    place."""
    number = 1
    while (kept := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    try:
        os.replace(path, kept)
    except OSError:
        return "it could not be renamed and is left as it is"
    return f"it is kept as {kept.name}"


def load() -> Record:
    """The record from the file, or an empty one. ``notice()`` says what went wrong.

    Raises only ``paths.BadSetting``, for a ``KVCOURSE_PROGRESS`` in the home of an unknown user.
    """
    path = _path()
    if path in _unsaved:
        return _unsaved[path]
    try:
        _refuse_what_is_no_file(path)
        return _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Record()
    except OSError as error:
        _unreadable.add(path)
        _keep_in_memory(path, Record(), error)
        return _unsaved[path]
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors, brackets nested without end
        kept = _set_aside(path)
        _notice[path] = f"Your progress file was damaged ({error}); {kept} and a new one is started."
        return Record()


def _save(record: Record) -> None:
    path = _path()
    if path in _unreadable:
        return
    content = json.dumps({"version": VERSION, **asdict(record)}, indent=1, sort_keys=True)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own in the same folder, then a rename: a crash or a second kernel never leaves half a
        # file.
        handle, temporary = tempfile.mkstemp(prefix=path.name, suffix=".new", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(content + "\n")
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        _keep_in_memory(path, record, error)


def _keep_in_memory(path: Path, record: Record, error: OSError) -> None:
    _unsaved[path] = record
    _notice[path] = (
        f"Your progress cannot be saved in {path} ({error.strerror}): it lasts until the kernel stops. "
        "Set KVCOURSE_PROGRESS to a file you may write."
    )


@contextmanager
def _changing(key: str) -> Iterator[Record]:
    """The record to change, saved afterwards as the last activity in the key's chapter."""
    with _locked(_path()):
        record = load()
        yield record
        record.last_run = {"chapter": key.partition(".")[0], "date": date.today().isoformat()}
        _save(record)


def record_prediction(key: str, value: float | int | str | None) -> None:
    """Keep a prediction under its key ("01.crossover"); ``None`` or an empty text removes it.

    Raises ``TypeError`` for anything but a number (NumPy's too) or a text, which the file could not hold.
    """
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        value = value.item()
    if not isinstance(value, (int, float, str, type(None))):
        raise TypeError(f"prediction {key!r} is a {type(value).__name__}: give a number, a text or None")
    with _changing(key) as record:
        if value is None or value == "":
            record.predictions.pop(key, None)
        else:
            record.predictions[key] = value


def prediction(key: str) -> float | int | str | None:
    """The recorded prediction, or ``None``."""
    return load().predictions.get(key)


def record_passed(name: str) -> None:
    """Note that a check passed today (the first date stays)."""
    with _changing(name) as record:
        record.passed.setdefault(name, date.today().isoformat())


def passed() -> dict[str, str]:
    """Check name -> ISO date of the first pass."""
    return dict(load().passed)


def notice() -> str:
    """One line about trouble with the file (damaged, not writable), or an empty string."""
    return _notice.get(_path(), "")


def summary() -> str:
    """The record in a few words, for chapter 00. With an empty record always the same text."""
    record = load()
    if not record.predictions and not record.passed:
        text = "Nothing recorded yet: no predictions, no checks passed."
    else:
        text = (
            f"{_count(len(record.predictions), 'prediction')}, {_count(len(record.passed), 'check')} passed"
        )
        if record.passed:
            text += f" ({', '.join(sorted(record.passed))})"
        if record.last_run.keys() >= {"chapter", "date"}:  # a file edited by hand may lack one
            text += f"; last activity in chapter {record.last_run['chapter']} on {record.last_run['date']}"
        text += "."
    return "\n".join(filter(None, [text, notice()]))


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
