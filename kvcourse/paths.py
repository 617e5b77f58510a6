"""Where things lie: the course's own files (read only) and the reader's folder."""

import os
import sys
from pathlib import Path


class BadSetting(ValueError):
    """An environment variable names a path that cannot be; the message is one line."""


_REPOSITORY = Path(__file__).resolve().parent.parent


def repository_dir():
    """The folder of the clone. The package works only from one (`pip install -e .`)."""
    return _REPOSITORY


def data_dir():
    """`data/` of the clone: bundled weights, texts, recorded runs. Never written to by a run."""
    return _REPOSITORY / "data"


def chapters_dir():
    """`chapters/` of the clone: the committed notebooks, which the tests compare."""
    return _REPOSITORY / "chapters"


def user_dir():
    """The reader's own folder for fetched weights and progress; not created here.

    `KVCOURSE_HOME` overrides it. Otherwise the operating system's usual place
    for per-user application data.
    """
    if named := from_environment("KVCOURSE_HOME"):
        return named
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "kvcourse"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "kvcourse"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "kvcourse"


def shared_dir():
    """A read-only folder with fetched weights for a whole class (`KVCOURSE_SHARED`), or None."""
    return from_environment("KVCOURSE_SHARED")


def progress_file():
    """The JSON file with the reader's predictions and passed checks (`KVCOURSE_PROGRESS` overrides)."""
    return from_environment("KVCOURSE_PROGRESS") or user_dir() / "progress.json"


def from_environment(variable):
    """The path that an environment variable names, `~` expanded, or None. Raises BadSetting for `~nobody`."""
    named = os.environ.get(variable)
    try:
        return Path(named).expanduser() if named else None
    except RuntimeError:
        raise BadSetting(
            f"{variable} is {named}, but the home folder of that user is not known: write the path in full"
        ) from None
