"""Bytes as people write them, and whole numbers checked: "80 GB" is 80 · 1000³, "80 GiB" is 80 · 1024³."""

import operator
import re
from decimal import Decimal

UNITS = {
    "B": 1,
    "kB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4,
    "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4,
}  # fmt: skip
# Commas separate thousands only: "7,5 GB", a decimal comma, must not become 75 GB.
_WRITTEN = re.compile(r"\s*(\d{1,3}(?:,\d{3}){1,6}|\d{1,18})(\.\d{1,18})?\s*([A-Za-z]+)\s*", re.ASCII)


def parse_bytes(text):
    """Whole bytes from "80 GB", "81,559 MiB" or a number of bytes; exact.

    Raises ValueError in one line for another unit (GB and GiB differ by 7 %, so "80 G" is refused),
    a negative amount, or one that is no whole number of bytes.
    """
    if not isinstance(text, str):
        return at_least(0, bytes=text)[0]
    match = _WRITTEN.fullmatch(text)
    if not match or match[3] not in UNITS:
        raise ValueError(
            f"{text!r:.60} is no amount of memory: write a number and one of {', '.join(UNITS)}, "
            f"as in '80 GB'"
        )
    amount = Decimal(match[1].replace(",", "") + (match[2] or "")) * UNITS[match[3]]
    if amount != int(amount):
        raise ValueError(f"{text!r} is {amount} bytes: give a whole number of bytes")
    return int(amount)


def format_bytes(count, unit="GiB", digits=2):
    """Bytes in one unit, thousands separated: format_bytes(301_465_600, "MiB", 1) = "287.5 MiB"."""
    if unit not in UNITS:
        raise ValueError(f"unit {unit!r} is not known: use one of {', '.join(UNITS)}")
    whole = operator.index(count) if hasattr(count, "__index__") else count  # NumPy's integers too
    amount = Decimal(whole) / UNITS[unit]  # a float would round large counts
    return f"{amount:,.{0 if unit == 'B' else digits}f} {unit}"


def at_least(limit, **values):
    """The values as Python ints, which do not overflow; ValueError below the limit, TypeError for 1.5."""
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} is {value!r}: it must be a whole number, at least {limit}")
        if operator.index(value) < limit:
            raise ValueError(f"{name} is {value}: it must be at least {limit}")
    return [operator.index(value) for value in values.values()]
