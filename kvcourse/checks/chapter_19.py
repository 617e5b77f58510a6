"""Exercise of chapter 19: the order of a prompt's parts."""

from itertools import permutations

from kvcourse.checks import Run, exercise, short
from kvcourse.sizing import prices

# {name: (tokens, probability of a change from one request to the next)}
PROMPTS = (
    {"question": (80, 1.0), "documents": (6000, 0.3), "system text": (3500, 0.0), "time": (20, 1.0),
     "tools": (2500, 0.01)},
    {"question": (60, 1.0), "profile": (300, 0.1), "documents": (8000, 0.15)},
    {"news": (9000, 0.9), "question": (90, 1.0), "rules": (1200, 0.02)},
    {"b": (700, 0.2), "e": (900, 0.35), "a": (120, 0.05), "d": (4000, 0.5), "c": (650, 0.1)},
    {"q": (1500, 0.9), "p": (300, 0.4), "r": (900, 0.8), "s": (400, 0.7)},
    {"only": (500, 0.4)},
    {"x": (0, 0.1), "y": (400, 0.0), "z": (400, 1.0)},
)  # fmt: skip


@exercise(
    "19.best_order",
    right="no order of these prompts lets more tokens be read from the cache.",
    todo="replace `...` by the list of names, then run this cell again",
)
def best_order(run: Run) -> str | None:
    run.explain = _explain
    for parts in PROMPTS:
        got = run(parts)
        if isinstance(got, tuple):
            got = list(got)
        if not isinstance(got, list) or not all(isinstance(name, str) for name in got):
            return f"return the names in a list, from the front of the prompt, not {short(got)}"
        if sorted(got) != sorted(parts):
            return _names(got, parts)
        best = max(prices.read_per_request(order, parts) for order in permutations(parts))
        if prices.read_per_request(got, parts) < best - 1e-6:
            return _mistake(got, parts, best)
    return None


def _explain(error):
    if isinstance(error, ZeroDivisionError):
        return "it divides by 0: a part that never changes has probability 0"
    return None


def _names(got, parts):
    missing = [name for name in parts if name not in got]
    if missing:
        return f"every part has to be sent, and {missing[0]!r} is missing"
    return "every part is sent once: a name stands in the list that is no part, or twice"


def _mistake(got, parts, best):
    """What is wrong with an order that is not the best one."""
    always = [i for i, name in enumerate(got) if parts[name][1] == 1]
    behind = (
        [name for name in got[always[0] + 1 :] if parts[name][1] < 1 and parts[name][0]] if always else []
    )
    if behind:
        return (
            f"{got[always[0]]!r} changes with every request, and {behind[0]!r} stands after it: nothing "
            f"after it is ever read from the cache"
        )
    read = prices.read_per_request(got, parts)
    shown = f"{', '.join(got)}: {read:,.0f} tokens are read where {best:,.0f} could be"
    changing = [name for name in got if parts[name][1] < 1]
    rates = [parts[name][1] for name in changing]
    sizes = [parts[name][0] for name in changing]
    if rates == sorted(rates):
        return f"{shown}. “What changes least goes first” forgets the sizes: a long part is worth more"
    if sizes == sorted(sizes, reverse=True):
        return (
            f"{shown}. “The longest goes first” forgets the changes; tokens · (1 − probability), which may "
            f"give the same order, forgets that a change spoils all that stands after it"
        )
    if rates == sorted(rates, reverse=True):
        return f"{shown}. What changes most stands first: it is the wrong way round"
    return f"{shown}. Take two neighbors and ask what exchanging them gains and loses"
