"""The exercises of chapter 08."""

import itertools
import math

from kvcourse import sizing
from kvcourse.checks import Run, exercise, is_number, short
from kvcourse.config import ModelConfig, lookup

# Each part of the product is another number here, so that no two mistakes give the same one.
ODD = ModelConfig("odd", "llama", 7, 9, 3, 20, 45, 50, 11, 13)


@exercise(
    "08.kv_bytes_per_token",
    right=(
        "73,728 bytes for GPT-2 in float32, 131,072 for Llama 3.1 8B in 16 bits, 147,456 for Qwen3-4B, whose "
        "heads are wider than its width divided by their number."
    ),
    todo="replace `...` by the product, then run this cell again",
)
def kv_bytes_per_token(run: Run) -> str | None:
    """``kv_bytes_per_token(config, bytes_per_number)`` → bytes of one token's keys and values."""
    shapes = [("gpt2", 4), ("llama-3.1-8b", 2), ("qwen3-4b", 2), ("qwen2.5-3b", 34 / 32)]
    cases = [*((lookup(name), size) for name, size in shapes), (ODD, 5)]
    got = []
    for config, size in cases:
        got.append(run(config, size))
        if not is_number(got[-1]):
            return f"{_case(config, size)}: return a number of bytes, not {short(got[-1])}"
    for (config, size), answer in zip(cases, got, strict=True):
        want = sizing.kv_bytes_per_token(config, size)
        if answer != want:
            named = _mistake(cases, got, config) or f"expected {want:,.0f} bytes"
            return f"{_case(config, size)}: {answer:,.10g} is not right: {named}"
    return None


def _case(config, size):
    return f"{config.name}, {size:g} byte{'s' * (size != 1)} a number"


def _mistake(cases, got, shown):
    """The line for the fewest mistakes that explain all answers together, or None."""
    found = []
    for chosen in itertools.product(*map(range, (3, 2, 6, 5, 3))):
        parts = [_parts(config, size) for config, size in cases]
        values = [math.prod(part[i][0] for part, i in zip(case, chosen, strict=True)) for case in parts]
        if all(math.isclose(value, answer) for value, answer in zip(values, got, strict=True)):
            place = next(i for i, (config, _) in enumerate(cases) if config is shown)
            named = [part[i][1] for part, i in zip(parts[place], chosen, strict=True)]
            found.append([line for line in named if line])
    return "; ".join(min(found, key=len)) if found else None


def _parts(c, size):
    """The factors of the product: each as it should be, and as it is when something was forgotten."""
    apart = c.hidden_size / c.num_heads
    width = f"hidden_size / num_heads is {apart:g}, the heads have {c.head_dim} numbers: take config.head_dim"
    shortcut = (
        "2 · layers · hidden_size holds only where every query head has keys and values of its own: take "
        "num_kv_heads · head_dim"
    )
    return (
        ((2, ""), (1, "the factor 2 is missing: a key and a value"), (3, "queries are not kept: 2, not 3")),
        ((c.num_layers, ""), (1, "num_layers is missing: every layer keeps its own rows")),
        (
            (c.num_kv_heads * c.head_dim, ""),
            (c.num_heads * c.head_dim, f"{c.num_heads} are the query heads: take num_kv_heads"),
            (c.num_kv_heads * apart, width),
            (c.hidden_size, shortcut),
            (c.head_dim, "num_kv_heads is missing: head_dim is one head"),
            (c.num_kv_heads, "head_dim is missing"),
        ),
        (
            (size, ""),
            (1, "these are numbers, not bytes: bytes_per_number is missing"),
            (2, "2 bytes are written into it: take bytes_per_number"),
            (4, "4 bytes are written into it: take bytes_per_number"),
            (int(size), "bytes_per_number may be a fraction, such as 34 / 32: do not round it"),
        ),
        ((1, ""), (1 / 1024, "give bytes, not KiB"), (8, "give bytes, not bits")),
    )


# What three sources print: (bytes by their words, unit, the figure they print, its digits, model, bits).
# The blog's table, the blog below its batch table, and the course page.
_A = sizing.kv_bytes(lookup("llama-3.1-70b"), 128_000)
_B = 256 * sizing.kv_bytes(lookup("gpt2"), 513)
_C = sizing.kv_bytes(lookup("qwen2.5-3b"), 8000, "q8_0")
CLAIMS = {
    "A": {"bytes": _A, "unit": "GiB", "printed": 40, "digits": 0, "grouped": 8, "k": 1.024},
    "B": {"bytes": _B, "unit": "GiB", "printed": 4.6, "digits": 1, "grouped": 1, "k": None},
    "C": {"bytes": _C, "unit": "GB", "printed": 0.16, "digits": 2, "grouped": 8, "k": None},
}
READINGS = (
    "as it stands",
    "1K is 1,024",
    "GB and GiB exchanged",
    "1,000 MiB to the GiB",
    "query heads counted",
)


def figure_under(claim, reading):
    """The figure of CLAIMS[claim] in its unit under one of READINGS; None where it does not apply."""
    c = CLAIMS[claim]
    units = {"GB": 1000**3, "GiB": 1024**3}
    plain = c["bytes"] / units[c["unit"]]
    if reading == "as it stands":
        return plain
    if reading == "1K is 1,024":
        return plain * c["k"] if c["k"] else None
    if reading == "GB and GiB exchanged":
        return c["bytes"] / units["GB" if c["unit"] == "GiB" else "GiB"]
    if reading == "1,000 MiB to the GiB":
        return c["bytes"] / 1024**2 / 1000
    return plain * c["grouped"]


@exercise(
    "08.audits",
    right=(
        "A holds with 1K = 1,024 (1,000 MiB to the GiB is the same sum there: 40,000 MiB), B divides MiB by "
        "1,000 where a GiB has 1,024, and C is right as it stands. "
        "Not every figure that you check is wrong."
    ),
    todo="return the three pairs, then run this cell again",
)
def audits(run: Run) -> str | None:
    """``audits()`` → {"A": (figure, reading), "B": …, "C": …}."""
    got = run()
    if not isinstance(got, dict) or set(got) != set(CLAIMS):
        return f"return a dict with the keys A, B and C, not {short(got)}"
    for claim, answer in got.items():
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            return f"{claim}: give a pair, the figure and the reading, not {short(answer)}"
        figure, reading = answer
        mistake = _figure_mistake(claim, figure) or _reading_mistake(claim, reading)
        if mistake:
            return f"{claim}: {mistake}"
    return None


def _figure_mistake(claim, figure):
    c = CLAIMS[claim]
    if not is_number(figure):
        return f"the figure must be a number of {c['unit']}, got {short(figure)}"
    step = 10 ** -(c["digits"] + 1)  # one digit more than the source prints, or any number of them
    want = figure_under(claim, "as it stands")
    if abs(figure - want) <= 0.6 * step:
        return None
    if math.isclose(figure, round(want, c["digits"])):
        return f"{short(figure)} has too few digits: give one more than the source prints"
    for reading in READINGS[1:]:
        value = figure_under(claim, reading)
        if value is not None and abs(figure - value) <= 0.6 * step:
            return f"{short(figure)} is the figure with “{reading}”: first take the words as they stand"
    if claim == "C" and abs(figure - c["bytes"] * 32 / 34 / 1000**3) <= 0.6 * step:
        return f"{short(figure)} counts 1 byte a number: in q8_0 32 numbers take 34"
    for name, factor in (("bytes", c["bytes"] / want), ("MiB or MB", 1024), ("MiB or MB", 1000)):
        if abs(figure / factor - want) <= 0.02 * want:
            return f"{short(figure)} is in {name}: the source prints {c['unit']}"
    return (
        f"expected another figure than {short(figure)} {c['unit']}: bytes of a token, times tokens, times "
        f"sequences"
    )


def _reading_mistake(claim, reading):
    c = CLAIMS[claim]
    if not isinstance(reading, str) or reading not in READINGS:
        return f"the reading {short(reading)} is none of: {'; '.join(READINGS)}"
    value = figure_under(claim, reading)
    if value is None:
        return f"there is no K in this claim, so “{reading}” changes nothing"
    if round(value, c["digits"]) != c["printed"]:
        return f"“{reading}” gives {value:,.{c['digits'] + 1}f} {c['unit']}, the source prints {c['printed']}"
    return None
