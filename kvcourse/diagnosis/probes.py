"""The diagnosis kit: ten probes, each a short session with the cache under test, with a cost and an outcome.

A cost counts positions passed: through the cache under test and, where an answer is needed to
compare with, through the model without a cache. A dye test needs no such answer.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from kvcourse.diagnosis.bugs import LETTERS, RIGHT, faulty
from kvcourse.tap import Tap

MAX_TOKENS = 40  # rows reserved in every layer of a cache under test
SAME = 1e-4  # logits and rows closer than this are the same but for the order of sums (measured: 1.4e-5)
CLOSE = 0.05  # below this a rounding of the rows (float16: 1.3e-3), above it something else (from 1.6 on)

# In tokens of austen-gpt2, 12 and 8 (another model with so many ids would do, its words being noise):
TEXT = [69, 741, 728, 885, 266, 842, 44, 282, 1089, 320, 1250, 341]  # Elizabeth opened the letter, and read …
OTHER = [635, 1506, 304, 349, 266, 1333, 44, 282]  # The carriage was at the door, and
NEW_TOKENS = 12  # written by the probe "text"


class Session:
    """One new cache under test and the model's weights: `passed(ids)` → logits float32 (T, vocab)."""

    def __init__(self, model, code, dyed=False):
        self._model, self._code = model, code
        self.cache = code.Cache(model.config, MAX_TOKENS)
        if dyed:
            self.dye(0)

    def passed(self, ids):
        """Logits of `ids` after what the cache already holds."""
        return self._code.gpt2(list(ids), self._model.params, self._model.config, self.cache)

    def dye(self, first):
        """Fill every row from `first` on with NaN, in all layers."""
        self.cache.k[:, :, first:] = np.nan
        self.cache.v[:, :, first:] = np.nan


def compared(got, expected):
    """One word for two arrays of one shape, "same", "close", "wrong" or "NaN", by the largest difference."""
    largest = np.abs(got - expected).max()
    if np.isnan(largest):
        return "NaN"
    return "same" if largest < SAME else "close" if largest < CLOSE else "wrong"


def _prefill(model, code):
    return compared(Session(model, code).passed(TEXT[:8]), model(TEXT[:8]))


def _step(model, code):
    return _after_prefill(model, code, 1)


def _chunk(model, code):
    return _after_prefill(model, code, 3)


def _after_prefill(model, code, n):
    session = Session(model, code)
    session.passed(TEXT[:8])
    return compared(session.passed(TEXT[8 : 8 + n]), model(TEXT[: 8 + n])[8:])


def _reset(model, code):
    session = Session(model, code)
    session.passed(TEXT[:8])
    session.cache.reset()
    return compared(session.passed(OTHER), model(OTHER))


def _truncate(model, code):
    session = Session(model, code)
    session.passed(TEXT[:8])
    session.cache.truncate(6)
    return compared(session.passed(OTHER[:1]), model(TEXT[:6] + OTHER[:1])[6:])


def _layers(model, code):
    """The first layer whose rows differ after a prefill of 8, a step, and a chunk of 3."""
    session, tap = Session(model, code), Tap(model.config)
    for low, high in ((0, 8), (8, 9), (9, 12)):
        session.passed(TEXT[low:high])
    model(TEXT, tap)
    for layer in range(model.config.num_layers):
        for rows, expected in ((session.cache.k, tap.keys), (session.cache.v, tap.values)):
            if compared(rows[layer, :, : len(TEXT)], expected[layer]) != "same":
                return f"layer {layer}"
    return "same"


def _dye(model, code):
    session = Session(model, code, dyed=True)
    return _dyed([session.passed(TEXT[:8]), session.passed(TEXT[8:9])])


def _dye_truncate(model, code):
    session = Session(model, code, dyed=True)
    first = session.passed(TEXT[:8])
    session.cache.truncate(6)
    session.dye(6)
    return _dyed([first, session.passed(OTHER[:1])])


def _dye_reset(model, code):
    session = Session(model, code, dyed=True)
    first = session.passed(TEXT[:8])
    session.cache.reset()
    session.dye(0)
    return _dyed([first, session.passed(OTHER)])


def _dyed(passes):
    """The first of these passes whose logits show the dye, as "NaN 1" or "NaN 2", or "clean"."""
    for number, logits in enumerate(passes, start=1):
        if np.isnan(logits).any():
            return f"NaN {number}"
    return "clean"


def written(model, code, new=NEW_TOKENS):
    """`new` greedy tokens after the first 8 of TEXT, through the cache under test. A tuple."""
    session, ids = Session(model, code), TEXT[:8]
    unread = ids
    for _ in range(new):
        unread = [int(session.passed(unread)[-1].argmax())]
        ids = ids + unread
    return tuple(ids[8:])


@lru_cache(maxsize=1)  # 162 positions, and the same for every cache under test
def written_without_cache(model, new=NEW_TOKENS):
    """The same tokens by the model alone, the whole text in every pass. A tuple."""
    ids = TEXT[:8]
    for _ in range(new):
        ids = ids + [int(model(ids)[-1].argmax())]
    return tuple(ids[8:])


def _text(model, code):
    return "same" if written(model, code) == written_without_cache(model) else "other"


@dataclass(frozen=True)
class Probe:
    """What it does in words, positions passed through the cache under test and without one, and how."""

    what: str
    under_test: int
    without_cache: int
    run: object

    @property
    def cost(self):
        """Positions passed in all."""
        return self.under_test + self.without_cache


_NAIVE_TEXT = sum(8 + step for step in range(NEW_TOKENS))
PROBES = {
    "prefill": Probe("pass 8 tokens, compare the logits", 8, 8, _prefill),
    "step": Probe("pass 8, then 1, compare the last logits", 9, 9, _step),
    "chunk": Probe("pass 8, then 3, compare the last 3 rows of logits", 11, 11, _chunk),
    "reset": Probe("pass 8, reset, pass 8 of another text, compare", 16, 8, _reset),
    "truncate": Probe("pass 8, truncate to 6, pass 1 other token, compare", 9, 7, _truncate),
    "layers": Probe("pass 8, then 1, then 3, compare all stored rows", 12, 12, _layers),
    "dye": Probe("NaN in all rows, pass 8, then 1", 9, 0, _dye),
    "dye + truncate": Probe("NaN, pass 8, truncate to 6, NaN after them, pass 1", 9, 0, _dye_truncate),
    "dye + reset": Probe("NaN, pass 8, reset, NaN again, pass 8", 16, 0, _dye_reset),
    "text": Probe("write 12 greedy tokens after 8, compare them", 8 + NEW_TOKENS - 1, _NAIVE_TEXT, _text),
}


def outcome(model, code, name):
    """What one probe says of `code`, a module with Cache and gpt2; "error" when it raises.

    Raises KeyError for a probe that there is not.
    """
    _check(name)
    try:
        return PROBES[name].run(model, code)
    except (ValueError, IndexError):  # what NumPy raises for rows that do not fit
        return "error"


def symptoms(model):
    """{letter or "right": {probe: outcome}}, all of the kit run now."""
    return {
        letter: {name: outcome(model, faulty(letter), name) for name in PROBES}
        for letter in [*LETTERS, RIGHT]
    }


def cost(probes):
    """Positions passed by these probes together; each starts with a new cache of its own.

    Raises KeyError for a probe that there is not, TypeError for one name in place of several.
    """
    if isinstance(probes, str):
        raise TypeError(f"probes is the text {probes!r}: give a list of names, [{probes!r}]")
    probes = list(probes)
    for name in probes:
        _check(name)
    return sum(PROBES[name].cost for name in probes)


def confused(table, probes):
    """Pairs of rows of `symptoms` that these probes cannot tell apart, in the table's order."""
    seen = {letter: tuple(row[name] for name in probes) for letter, row in table.items()}
    return [(one, other) for one, other in combinations(table, 2) if seen[one] == seen[other]]


def _check(name):
    if name not in PROBES:
        raise KeyError(f"no probe {name!r}: the kit has {', '.join(PROBES)}")
