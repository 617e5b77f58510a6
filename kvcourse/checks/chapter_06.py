"""The exercises of chapter 06."""

from functools import cache
from itertools import combinations

from kvcourse import diagnosis
from kvcourse.checks import NOT_DONE, Run, Verdict, exercise, short
from kvcourse.figures.chapter_06 import pair
from kvcourse.loading import load_model


@cache
def _table():
    """The outcomes of the whole kit, run on this machine once a session."""
    return diagnosis.symptoms(load_model("austen-gpt2"))


@cache
def _lowest_cost():
    """By trying every subset of the kit."""
    names = list(diagnosis.PROBES)
    subsets = (chosen for size in range(len(names) + 1) for chosen in combinations(names, size))
    return min(diagnosis.cost(chosen) for chosen in subsets if not diagnosis.confused(_table(), chosen))


@exercise(
    "06.cheapest_probes",
    right="all twelve are told apart, from each other and from a right cache, and no cheaper set does it.",
    todo="return a list of names of probes, such as ['prefill', 'step']",
)
def cheapest_probes(run: Run) -> str | None:
    """``cheapest_probes()``: the cheapest names of probes that tell all thirteen apart."""
    got = run()
    if not isinstance(got, (list, tuple, set)) or not all(isinstance(name, str) for name in got):
        return f"expected a list of names of probes, got {short(got)}"
    chosen = list(got)
    for name in chosen:
        if name not in diagnosis.PROBES:
            return f"there is no probe {name[:30]!r}: the kit has {', '.join(diagnosis.PROBES)}"
        if chosen.count(name) > 1:
            return f"{name!r} stands in your set twice, and would be paid twice"
    left = diagnosis.confused(_table(), chosen)
    if left:
        return (
            f"cost {diagnosis.cost(chosen)}, but {pair(*left[0])} have the same outcome in each of your "
            f"probes ({len(left)} of {len(diagnosis.confused(_table(), []))} pairs are still confused)"
        )
    if diagnosis.cost(chosen) > _lowest_cost():
        return f"they are all told apart, for {diagnosis.cost(chosen)} positions. A cheaper set does it too"
    return None


@exercise(
    "06.diagnose",
    right="all twelve letters have their right names. The next cell shows their lines.",
    todo="return a dict with a suspect's name for each letter, such as {'A': 'float16 rows', …}",
)
def diagnose(run: Run) -> str | Verdict | None:
    """``diagnose()``: {letter: name of a suspect}, all twelve."""
    got = run()
    if not isinstance(got, dict):
        return f"expected a dict from letters to names, got {short(got)}"
    owner = {diagnosis.bug_of(letter).name: letter for letter in diagnosis.LETTERS}
    for letter, name in got.items():
        if letter not in diagnosis.LETTERS:
            return f"{short(letter)} is no letter of the kit: they are A … {diagnosis.LETTERS[-1]}"
        if not isinstance(name, str) or name not in owner:
            return f"{letter}: {short(name)} is none of the twelve names: copy one from the list of suspects"
    for letter, name in got.items():
        if owner[name] != letter:
            return _witness(letter, name, _table()[letter], _table()[owner[name]])
    missing = [letter for letter in diagnosis.LETTERS if letter not in got]
    if missing:
        so_far = f"right so far, {len(got)} of {len(diagnosis.LETTERS)} letters"
        return Verdict(NOT_DONE, f"{so_far}. No name yet for {', '.join(missing)}")
    return None


def _witness(letter, name, seen, claimed):
    """A probe on which the letter and the named bug differ: every two of them differ on some probe."""
    probe = next(probe for probe in diagnosis.PROBES if seen[probe] != claimed[probe])
    said = f"under {probe!r} that bug would be {claimed[probe]!r}"
    return f"{letter} is not {name!r}: {said}, and {letter} is {seen[probe]!r}"
