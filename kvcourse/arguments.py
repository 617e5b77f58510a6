"""Checks of arguments that several modules share."""

import operator


def count(number, name, least=1):
    """`number` as an int of at least `least`; a one-line TypeError or ValueError that names it otherwise."""
    try:
        if isinstance(number, bool):
            raise TypeError
        value = operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is {number!r}: give a whole number of at least {least}") from None
    if value < least:
        raise ValueError(f"{name} is {value}: give at least {least}")
    return value
