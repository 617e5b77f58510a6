"""The strict run compares: change one constant of the package and a chapter fails.

The package is copied and put before the installed one; the cells and their stored outputs
are the committed ones. Only those that need no torch are kept, for the time it takes to load.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import rules

CHAPTER = rules.CHAPTERS / "00_start_here.ipynb"


def shortened(path):
    """A notebook's imports, the text its model writes, its panel, and the sentences that says."""
    page = rules.load(path)
    kept = [
        cell
        for cell in page.code
        if "imports" in rules.tags(cell)
        or rules.is_panel(cell)
        or any(rules.calls(cell, name) for name in ("generate", "set"))
    ]
    assert len(kept) == 4, [rules.first_line(cell) for cell in kept]
    return json.dumps(page.notebook | {"cells": kept})


def strict_run(tmp_path, file=None, old="", new=""):
    """Exit status and output of `pytest --nbval` on the chapter, with `old` → `new` in one file."""
    shutil.copytree(rules.REPOSITORY / "kvcourse", tmp_path / "kvcourse")
    for name in ("data", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).symlink_to(rules.REPOSITORY / name)
    (tmp_path / "chapters").mkdir()
    notebook = tmp_path / "chapters" / CHAPTER.name
    notebook.write_text(shortened(CHAPTER), encoding="utf-8")
    if file is not None:
        text = (tmp_path / "kvcourse" / file).read_text(encoding="utf-8")
        assert old in text, f"{file} no longer holds {old!r}: choose another mutation"
        (tmp_path / "kvcourse" / file).write_text(text.replace(old, new), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--nbval",
        "--nbval-current-env",
        "-p",
        "no:cacheprovider",
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, notebook], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout


def test_unchanged_it_passes(tmp_path):
    status, output = strict_run(tmp_path)
    assert status == 0, output[-3000:]


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("ops.py", "inner *= 0.044715", "inner *= 0.14715"),
        ("ops.py", "scale = 1.0 / math.sqrt(head_dim)", "scale = 1.1 / math.sqrt(head_dim)"),
    ],
    ids=["gelu", "attention scale"],
)
def test_a_changed_constant_fails(tmp_path, file, old, new):
    status, output = strict_run(tmp_path, file, old, new)
    assert status == 1 and "mismatch" in output.lower(), output[-3000:]
