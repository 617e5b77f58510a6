"""The reader's own copy of the chapters.

JupyterLab saves outputs back into the file it has open, and a filled-in exercise would change what the
tests compare. So readers work in `work/`, a git-ignored copy. In a copied notebook no cell has run: the
committed outputs hold the answers to the questions a page asks. The rules:

- a file that is missing there is copied;
- a file the reader has changed is never overwritten;
- a file the reader has not touched since it was copied follows the course;
- `renew` starts a file anew and keeps the reader's version beside it, with a time stamp in its name.
"""

import hashlib
import json
import time
from dataclasses import dataclass, field

from kvcourse import paths
from kvcourse.cli import CommandError

RECORD = ".copied.json"  # in the working folder: {relative path: SHA-256 of what was copied}
_SKIPPED = {"__pycache__", ".ipynb_checkpoints"}


@dataclass
class Changes:
    """What an update did, as relative POSIX paths.

    `copied`: new. `followed`: untouched by the reader and brought up to date. `newer`: changed by the reader
    and by the course, left alone. `kept`: where the reader's version went.
    """

    copied: list[str] = field(default_factory=list)
    followed: list[str] = field(default_factory=list)
    newer: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def work_dir():
    """Where the reader's copy lies: `work/` in the clone, or the folder that KVCOURSE_WORK names."""
    return paths.from_environment("KVCOURSE_WORK") or paths.repository_dir() / "work"


def course_files(chapters):
    """Relative POSIX paths of all files under `chapters`: notebooks, primers, solutions, glossary; sorted.

    Raises CommandError when there is no such folder (the package was installed without its clone).
    """
    if not chapters.is_dir():
        raise CommandError(
            f"no folder {chapters}: kvcourse runs from a clone of its repository, "
            "installed there with `pip install -e .`"
        )
    found = (path.relative_to(chapters) for path in chapters.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in found if not _SKIPPED & set(path.parts))


def find_chapter(name, files):
    """The one notebook of `files` that `name` means: `01`, `01_the_waste`, `primers/a`, `a_tokens.ipynb`.

    Raises CommandError when none or several fit.
    """
    notebooks = [file for file in files if file.endswith(".ipynb")]
    wanted = name.removesuffix(".ipynb").lower()

    def fits(file, whole):
        path = file.removesuffix(".ipynb").lower()
        names = (path, path.rsplit("/", 1)[-1])
        return wanted in names if whole else any(known.startswith(wanted + "_") for known in names)

    found = [f for f in notebooks if fits(f, True)] or [f for f in notebooks if fits(f, False)]
    if len(found) != 1:
        said = f"{len(found)} chapters fit" if found else "no chapter is named"
        choices = ", ".join(file.removesuffix(".ipynb") for file in found or notebooks)
        raise CommandError(f"{said} {name!r}: choose one of {choices}")
    return found[0]


def update(chapters, work):
    """Bring `work` up to date with `chapters` by the rules above; returns Changes."""
    changes, record = Changes(), _read_record(work)
    for name in course_files(chapters):
        content, target = _for_reader(chapters / name), work / name
        source, mine = _digest(content), _digest(target.read_bytes()) if target.exists() else None
        untouched = mine == record.get(name)
        if mine not in (None, source) and not untouched:
            if source != record.get(name):
                changes.newer.append(name)
            continue
        if mine != source:
            _write(content, target)
            (changes.copied if mine is None else changes.followed).append(name)
        record[name] = source
    _write_record(work, record)
    return changes


def renew(chapters, work, names):
    """Replace the files `names` by the course's; what the reader had is renamed first. Returns Changes."""
    changes, record = Changes(), _read_record(work)
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    for name in names:
        content, target = _for_reader(chapters / name), work / name
        source = _digest(content)
        if target.exists() and _digest(target.read_bytes()) != source:
            saved = _free_name(target, stamp)
            target.rename(saved)
            changes.kept.append(saved.relative_to(work).as_posix())
        if not target.exists():
            _write(content, target)
            changes.copied.append(name)
        record[name] = source
    _write_record(work, record)
    return changes


def _free_name(target, stamp):
    """A name beside `target` that nothing has yet: the stem, the time stamp, and a number if need be."""
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        candidate = target.with_name(f"{target.stem}.{stamp}{suffix}{target.suffix}")
        if not candidate.exists():
            return candidate
    raise CommandError(
        f"no free name for the old {target.name} in {target.parent}: move some old versions away"
    )


def _for_reader(path):
    """The bytes a reader gets of a course file: a notebook without its outputs, anything else as it is."""
    content = path.read_bytes()
    if path.suffix != ".ipynb":
        return content
    notebook = json.loads(content)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


def _digest(content):
    return hashlib.sha256(content).hexdigest()


def _write(content, target):
    """Write under a temporary name and rename, so that half a copy is never taken for the reader's file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_bytes(content)
    part.replace(target)


def _read_record(work):
    """The record, or {} for none: then every file that differs counts as the reader's, the safe reading."""
    try:
        record = json.loads((work / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_record(work, record):
    work.mkdir(parents=True, exist_ok=True)
    part = work / (RECORD + ".part")
    part.write_text(json.dumps(record, indent=1, sort_keys=True), encoding="utf-8")
    part.replace(work / RECORD)
