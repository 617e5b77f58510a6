"""Twelve one-line bugs, each behind a letter. Reading this file gives chapter 06 away.

A faulty cache is the text of specimen.py with exactly one line replaced, then executed: the
diff that the reader sees is the code that runs.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import ModuleType

RIGHT = "right"  # stands where a letter does, for the specimen with no line changed


@dataclass(frozen=True)
class Bug:
    """A changed line: its name, what it does in words, the old and the new line, and where they stand."""

    name: str
    what: str
    old: str
    new: str
    where: str


_POSITIONS = '    x = p["wte.weight"][ids] + p["wpe.weight"][start:stop]  # (T, d)'
_MASK = "    mask = np.tri(q.shape[1], keys.shape[1], start, dtype=bool)  # row r sees keys 0 … start + r"
_READ = (
    "        keys, values = self.k[layer, :, :stop], self.v[layer, :, :stop]"
    "  # views: they see the two lines below"
)

BUGS = {
    "A": Bug(
        "mask skipped",
        "once the cache holds rows, every row of a pass sees every key",
        _MASK,
        "    mask = np.tri(q.shape[1], keys.shape[1], start, dtype=bool) | (start > 0)",
        "attend",
    ),
    "B": Bug(
        "float16 rows",
        "the reserved rows are 16-bit numbers",
        "        dtype = np.float32",
        "        dtype = np.float16",
        "Cache.__init__",
    ),
    "C": Bug(
        "reset keeps the count",
        "reset leaves seq_len as it is: the rows of the text before still count",
        "        self.seq_len = 0",
        "        seq_len = 0",
        "Cache.reset",
    ),
    "D": Bug(
        "read before written",
        "a pass reads the rows as they were before its own were written",
        _READ,
        "        keys, values = self.k[layer, :, :stop].copy(), self.v[layer, :, :stop].copy()",
        "Cache.update",
    ),
    "E": Bug(
        "top-left mask",
        "row r of a pass sees keys 0 … r, wherever the pass starts",
        _MASK,
        "    mask = np.tri(q.shape[1], keys.shape[1], dtype=bool)",
        "attend",
    ),
    "F": Bug(
        "count per layer",
        "seq_len grows in every layer, not once a pass",
        "    cache.seq_len += len(ids)",
        "        cache.seq_len += len(ids)",
        "gpt2",
    ),
    "G": Bug(
        "positions from 1",
        "the first token of a text is given position 1, and so on",
        _POSITIONS,
        '    x = p["wte.weight"][ids] + p["wpe.weight"][start + 1 : stop + 1]  # (T, d)',
        "gpt2",
    ),
    "H": Bug(
        "truncate keeps one",
        "truncate keeps one row more than it was asked to",
        "        self.seq_len = seq_len",
        "        self.seq_len = seq_len + 1",
        "Cache.truncate",
    ),
    "I": Bug(
        "heads merged wrongly",
        "the outputs of the heads are joined along the wrong axis",
        "    merged = out.transpose(1, 0, 2).reshape(T, d)",
        "    merged = out.reshape(T, d)",
        "attention",
    ),
    "J": Bug(
        "one row too many",
        "a pass is handed one row after the last; the mask hides it",
        _READ,
        "        keys, values = self.k[layer, :, : stop + 1], self.v[layer, :, : stop + 1]",
        "Cache.update",
    ),
    "K": Bug(
        "positions restart",
        "every pass counts its positions from 0",
        _POSITIONS,
        '    x = p["wte.weight"][ids] + p["wpe.weight"][: len(ids)]  # (T, d)',
        "gpt2",
    ),
    "L": Bug(
        "K and V swapped",
        "in layer 3, keys are stored as values and values as keys",
        "    keys, values = cache.update(layer, k, v)",
        "    keys, values = cache.update(layer, *((v, k) if layer == 3 else (k, v)))",
        "attention",
    ),
}
LETTERS = list(BUGS)
SUSPECTS = {bug.name: bug.what for bug in sorted(BUGS.values(), key=lambda bug: bug.name.lower())}


def source():
    """The specimen's text, as it stands in specimen.py."""
    return (Path(__file__).parent / "specimen.py").read_text(encoding="utf-8")


def with_line(old, new):
    """A module made of the specimen's text with the line `old` replaced by `new`; it has Cache and gpt2.

    Both are whole lines with their indentation, without a line break. Raises ValueError unless
    `old` stands there exactly once.
    """
    lines = source().split("\n")
    if lines.count(old) != 1:
        found = f"the specimen has {lines.count(old)} lines {old.strip()[:50]!r}"
        raise ValueError(f"{found}: copy one that stands there once, with its indentation")
    lines[lines.index(old)] = new
    module = ModuleType("specimen_with_another_line")
    exec(compile("\n".join(lines), "specimen", "exec"), module.__dict__)
    return module


@cache
def faulty(letter):
    """The specimen with the bug of this letter, a module with Cache and gpt2; "right" gives it unchanged.

    Raises KeyError for another letter.
    """
    if letter == RIGHT:
        first = source().split("\n")[0]
        return with_line(first, first)
    bug = bug_of(letter)
    return with_line(bug.old, bug.new)


def bug_of(letter):
    """What stands behind a letter. Raises KeyError for one that there is not."""
    if letter not in BUGS:
        raise KeyError(f"no bug {letter!r}: the letters are {LETTERS[0]} … {LETTERS[-1]}")
    return BUGS[letter]


def diff(letter):
    """The one changed line of a letter, as three lines of text: where, the old line, the new one."""
    bug = bug_of(letter)
    old, new = dedent(f"{bug.old}\n{bug.new}").split("\n")  # by the same amount: indentation may be the bug
    return f"{letter}, {bug.name}, in {bug.where}\n- {old}\n+ {new}"


def named_rightly(names):
    """The diffs of the letters that `names`, {letter: name of a suspect}, has right, and how many are open.

    What a reader has not found out stays hidden. Takes anything, such as the None of an unfilled exercise.
    """
    names = names if isinstance(names, dict) else {}
    found = [letter for letter in LETTERS if names.get(letter) == BUGS[letter].name]
    lines = [diff(letter) for letter in found]
    return "\n".join([*lines, f"{len(found)} of {len(LETTERS)} letters named rightly"])
