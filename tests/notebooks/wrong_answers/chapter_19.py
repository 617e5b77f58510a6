"""Typical wrong answers of chapter 19."""

import math


def _by(key, reverse=False):
    def best_order(parts):
        return sorted(parts, key=lambda name: key(*parts[name]), reverse=reverse)

    return best_order


def _decay(changes):
    """log(1 − changes), −1 / the mean lifetime of a decay: plausible, and not what counts here."""
    return math.log(1 - changes) if 0 < changes < 1 else -math.inf if changes else -1e-9


def _volatile_last(order):
    """The order of `order`, but what changes with every request at the end."""
    return lambda parts: sorted(order(parts), key=lambda name: parts[name][1] == 1)


WRONG = {
    "19.best_order": [
        (_by(lambda tokens, changes: changes), "forgets the sizes"),
        (_volatile_last(_by(lambda tokens, changes: -tokens)), "forgets the changes"),
        (_volatile_last(_by(lambda tokens, changes: -changes)), "the wrong way round"),
        (lambda parts: list(parts), "nothing after it is ever read"),
        (_by(lambda tokens, changes: tokens), "nothing after it is ever read"),
        (_volatile_last(lambda parts: sorted(parts, reverse=True)), "two neighbors"),
        (_by(lambda tokens, changes: tokens / _decay(changes)), "two neighbors"),
        (_by(lambda tokens, changes: -tokens * (1 - changes) / changes), "divides by 0"),
        (lambda parts: [name for name in parts if parts[name][1] < 1], "is missing"),
        (lambda parts: [*parts, *parts], "is sent once"),
        (lambda parts: ", ".join(parts), "in a list"),
        (lambda parts: {name: 0 for name in parts}, "in a list"),
    ]
}
