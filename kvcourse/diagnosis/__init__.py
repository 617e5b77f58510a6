"""For chapter 06: a plain cache, twelve one-line bugs in it, and a kit that tells them apart."""

from kvcourse.diagnosis.bugs import (
    LETTERS,
    RIGHT,
    SUSPECTS,
    bug_of,
    diff,
    faulty,
    named_rightly,
    source,
    with_line,
)
from kvcourse.diagnosis.probes import (
    MAX_TOKENS,
    OTHER,
    PROBES,
    TEXT,
    Session,
    compared,
    confused,
    cost,
    outcome,
    symptoms,
    written,
    written_without_cache,
)

__all__ = [
    "LETTERS", "MAX_TOKENS", "OTHER", "PROBES", "RIGHT", "SUSPECTS", "TEXT", "Session", "bug_of", "compared",
    "confused", "cost", "diff", "faulty", "named_rightly", "outcome", "source", "symptoms", "with_line",
    "written", "written_without_cache",
]  # fmt: skip
