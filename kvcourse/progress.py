"""The reader's record: predictions, passed checks, last activity. One small JSON file in the reader's own
folder.

Nothing in here may stop a notebook: a damaged file is kept beside the new one and named in one line, a folder
that cannot be written gives a record that lives until the kernel ends, with one line that says so.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from kvcourse import paths

VERSION = 1


@dataclass
class Record:
    """What is known about one reader.

    ``predictions``: prediction key ("01.crossover") -> number or text. ``passed``: check name -> date (ISO).
    ``last_run``: ``{"chapter": "01", "date": "2026-01-31"}`` or empty.
    """

    predictions: dict[str, float | int | str] = field(default_factory=dict)
    passed: dict[str, str] = field(default_factory=dict)
    last_run: dict[str, str] = field(default_factory=dict)


# The record when the file cannot be written, and the line about the last trouble with the file.
_unsaved: dict[Path, Record] = {}
_notice: dict[Path, str] = {}


def _path() -> Path:
    return Path(paths.progress_file())


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
    """The record from the file, or an empty one. Never raises; ``notice()`` says what went wrong."""
    path = _path()
    if path in _unsaved:
        return _unsaved[path]
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Record()
    except OSError as error:
        _notice[path] = (
            f"Your progress file {path} cannot be read ({error.strerror}): this session starts empty."
        )
        return Record()
    except ValueError as error:  # includes JSON and UTF-8 errors
        kept = _set_aside(path)
        _notice[path] = f"Your progress file was damaged ({error}); {kept} and a new one is started."
        return Record()


def _save(record: Record) -> None:
    path = _path()
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
        _unsaved[path] = record
        _notice[path] = (
            f"Your progress cannot be saved in {path} ({error.strerror}): it lasts until the kernel stops. "
            "Set KVCOURSE_PROGRESS to a file you may write."
        )


def _touch(record: Record, key: str) -> None:
    record.last_run = {"chapter": key.partition(".")[0], "date": date.today().isoformat()}


def record_prediction(key: str, value: float | int | str | None) -> None:
    """Keep a prediction under its key ("01.crossover"); ``None`` or an empty text removes it."""
    record = load()
    if value is None or value == "":
        record.predictions.pop(key, None)
    else:
        record.predictions[key] = value
    _touch(record, key)
    _save(record)


def prediction(key: str) -> float | int | str | None:
    """The recorded prediction, or ``None``."""
    return load().predictions.get(key)


def record_passed(name: str) -> None:
    """Note that a check passed today (the first date stays)."""
    record = load()
    record.passed.setdefault(name, date.today().isoformat())
    _touch(record, name)
    _save(record)


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
        if record.last_run:
            text += f"; last activity in chapter {record.last_run['chapter']} on {record.last_run['date']}"
        text += "."
    return "\n".join(filter(None, [text, notice()]))


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def as_dict() -> dict[str, Any]:
    """The whole record as plain values."""
    return asdict(load())
