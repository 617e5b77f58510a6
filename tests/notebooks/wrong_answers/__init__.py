"""Typical wrong answers of every exercise, each with words its message must hold: one file a chapter.

`WRONG` of a chapter's file is {exercise name: [(function, words of the message), …]}.
"""

from importlib import import_module
from pathlib import Path

WRONG = {}
for _file in sorted(Path(__file__).parent.glob("chapter_*.py")):
    _chapter = import_module(f"{__name__}.{_file.stem}").WRONG
    assert not WRONG.keys() & _chapter.keys(), f"{_file.name} repeats an exercise of another chapter"
    WRONG |= _chapter
