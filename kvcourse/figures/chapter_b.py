"""The picture of primer B: one number in three formats, bit by bit, and its neighbors on the number line."""

from __future__ import annotations

import math
from collections.abc import Mapping

import plotly.graph_objects as go

from kvcourse.figures import template as look

# Exponent bits and fraction bits; in front of both stands one bit for the sign.
FORMATS = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}

# Not the colors of K, V or Q, which mean something else on every page, nor close to one; pale, so that digits
# in the theme's text color stay readable on them.
EXPONENT = "rgba(204,121,167,0.4)"
FRACTION = "rgba(128,128,128,0.25)"

LABELS = 140  # px left of the cells, room for "−3.17859644e−07"


# --- numbers and patterns of bits ------------------------------------------------------


def largest(format: str) -> float:
    """The largest finite number of a format."""
    exponent_bits, fraction_bits = FORMATS[format]
    return (2.0 - 2.0**-fraction_bits) * 2.0 ** (2 ** (exponent_bits - 1) - 1)


def smallest_normal(format: str) -> float:
    """The smallest positive number that still has all significant bits."""
    return 2.0 ** (2 - 2 ** (FORMATS[format][0] - 1))


def smallest(format: str) -> float:
    """The smallest positive number, a subnormal."""
    return smallest_normal(format) * 2.0 ** -FORMATS[format][1]


def nearest(value: float, format: str) -> float:
    """`value` rounded to the format, a tie to the even neighbor; beyond the largest number, infinity.

    Source: IEEE 754-2019, section 4.3.1. Computed in Python floats: they have 53 significant bits, so
    scaling by a power of two is exact and `round` sees the very tie.
    """
    if not math.isfinite(value) or value == 0:
        return value
    exponent = math.frexp(max(abs(value), smallest_normal(format)))[1] - 1
    step = math.ldexp(1.0, exponent - FORMATS[format][1])
    rounded = math.copysign(round(abs(value) / step) * step, value)
    return rounded if abs(rounded) <= largest(format) else math.copysign(math.inf, value)


def pattern(stored: float, format: str) -> int:
    """The bits of a number that the format has, as one whole number. No NaN."""
    exponent_bits, fraction_bits = FORMATS[format]
    sign = int(math.copysign(1.0, stored) < 0) << (exponent_bits + fraction_bits)
    if math.isinf(stored):
        return sign | ((1 << exponent_bits) - 1) << fraction_bits
    size, least = abs(stored), smallest_normal(format)
    if size < least:
        return sign | int(size / smallest(format))
    doublings = math.frexp(size)[1] - math.frexp(least)[1]
    fraction = int((size / (least * 2.0**doublings) - 1) * 2**fraction_bits)
    return sign | (doublings + 1) << fraction_bits | fraction


def number(bits: int, format: str) -> float:
    """What a pattern of bits stands for: the inverse of `pattern`."""
    exponent_bits, fraction_bits = FORMATS[format]
    sign = -1.0 if bits >> (exponent_bits + fraction_bits) else 1.0
    exponent = bits >> fraction_bits & (1 << exponent_bits) - 1
    fraction = (bits & (1 << fraction_bits) - 1) / 2**fraction_bits
    if exponent == 0:
        return sign * fraction * smallest_normal(format)
    if exponent == (1 << exponent_bits) - 1:
        return math.nan if fraction else sign * math.inf
    return sign * (1 + fraction) * smallest_normal(format) * 2.0 ** (exponent - 1)


def neighbors(stored: float, format: str) -> tuple[float, float]:
    """The next smaller and the next larger number of the format; infinity has itself above it."""
    size = abs(stored)
    if size == 0:
        return -smallest(format), smallest(format)
    inner = number(pattern(size, format) - 1, format)
    outer = size if math.isinf(size) else number(pattern(size, format) + 1, format)
    return (inner, outer) if stored > 0 else (-outer, -inner)


# --- the panel -------------------------------------------------------------------------


def bits(numbers: Mapping[str, float], choice: str, power: int, format: str) -> dict:
    """Everything the panel shows of one number, as plain values.

    numbers  the choices: what the reader sees → its value
    power    the number is multiplied by 2 to this power before it is rounded
    format   a key of FORMATS

    `rows` has for every format the stored number and its bits as text; `stored`, `below` and `above` are
    those of the chosen format.
    """
    exact = math.ldexp(numbers[choice], power)
    stored = nearest(exact, format)
    below, above = neighbors(stored, format)
    rows = {}
    for name, (exponent_bits, fraction_bits) in FORMATS.items():
        held = nearest(exact, name)
        width = 1 + exponent_bits + fraction_bits
        rows[name] = {"stored": held, "bits": f"{pattern(held, name):0{width}b}"}
    return {
        "choice": choice,
        "power": power,
        "format": format,
        "exact": exact,
        "stored": stored,
        "below": below,
        "above": above,
        "rows": rows,
    }


def shown(value: float, digits: int = 9) -> str:
    """A number for the panel; nine digits tell any two float32 numbers apart."""
    return f"{value:,.{digits}g}".replace("-", "−").replace("inf", "∞")


def bits_figure(data: dict) -> go.Figure:
    """Above: the bits in all three formats, the chosen one framed. Below: the number and its neighbors."""
    figure = look.new_figure("", "", height=look.MAX_HEIGHT, grid=False)
    names = list(data["rows"])
    for part, color in (("sign", look.PAPER), ("exponent", EXPONENT), ("fraction", FRACTION)):
        figure.add_trace(_cells(data, part, color))
    figure.add_trace(_cut_off(data))
    row = names.index(data["format"])
    width = 1 + sum(FORMATS[data["format"]])
    figure.add_shape(
        type="rect",
        x0=-0.55,
        x1=width - 0.45,
        y0=row - 0.47,
        y1=row + 0.47,
        line={"color": look.INK, "width": 2.5},
    )
    labels = [f"{name}<br>{shown(data['rows'][name]['stored'])}" for name in names]
    axis = figure.layout.template.layout.xaxis.to_plotly_json()
    figure.update_layout(
        barmode="overlay",
        xaxis={"visible": False, "range": [-0.8, 31.8], "domain": [0, 1]},
        yaxis={
            "domain": [0.42, 1],
            "range": [2.55, -0.55],
            "tickvals": [0, 1, 2],
            "ticktext": labels,
            "ticks": "",
            "showline": False,
            "automargin": False,  # else the cells move whenever a number gets longer
        },
        xaxis2={**axis, "domain": [0.02, 0.98], "anchor": "y2", "range": [-1.35, 1.35], "showgrid": False},
        yaxis2={"domain": [0, 0.26], "anchor": "x2", "visible": False, "range": [-1, 1.6]},
        margin={"t": 12, "l": LABELS, "b": 50},
    )
    _number_line(figure, data)
    return figure


def _parts(format: str) -> dict[str, range]:
    exponent_bits, fraction_bits = FORMATS[format]
    return {
        "sign": range(1),
        "exponent": range(1, 1 + exponent_bits),
        "fraction": range(1 + exponent_bits, 1 + exponent_bits + fraction_bits),
    }


def _cells(data: dict, part: str, color: str) -> go.Bar:
    cells = [(row, column, name) for row, name in enumerate(data["rows"]) for column in _parts(name)[part]]
    texts = [data["rows"][name]["bits"][column] for _, column, name in cells]
    return look.cells(
        [column for _, column, _ in cells],
        [row for row, _, _ in cells],
        length=0.9,
        width=0.8,
        name=part,
        text=texts,
        constraintext="none",
        marker={"color": color, "line": {"color": look.INK, "width": 2 if part == "sign" else 0.5}},
        hovertext=[
            f"{name}, {part}: bit {column} is {text}"
            for (_, column, name), text in zip(cells, texts, strict=True)
        ],
    )


def _cut_off(data: dict) -> go.Bar:
    row = list(data["rows"]).index("bfloat16")
    return go.Bar(
        x=[15.9],
        y=[row],
        base=[15.55],
        width=0.8,
        orientation="h",
        name="rounded away in bfloat16",
        marker={
            "color": look.PAPER,
            "pattern": {"shape": look.HATCH, "fgcolor": look.MASKED, "solidity": 0.3},
            "line": {"color": look.MASKED, "width": 1},
        },
        hovertemplate="a bfloat16 has only the upper 16 bits<extra></extra>",
    )


def line_marks(data: dict) -> dict:
    """Where the number line has its marks, in steps of the wider of the two gaps around the stored number.

    `ticks` are (place, number) pairs; `exact` and `stored` the places of the number and of what is stored.
    At a power of two the gap towards zero is half as wide. Beyond the largest number there is no scale: the
    places then only keep the order.
    """
    stored, below, above = data["stored"], data["below"], data["above"]
    if math.isinf(stored):
        end = math.copysign(1.0, stored)
        last = end * largest(data["format"])
        return {"ticks": [(-0.7 * end, last), (0.9 * end, stored)], "exact": 0.4 * end, "stored": 0.9 * end}
    gap = max(gap for gap in (above - stored, stored - below) if math.isfinite(gap))
    ticks = [(-1.0 if math.isinf(below) else (below - stored) / gap, below), (0.0, stored)]
    ticks.append((1.0 if math.isinf(above) else (above - stored) / gap, above))
    return {"ticks": ticks, "exact": round((data["exact"] - stored) / gap, 6), "stored": 0.0}


def _number_line(figure: go.Figure, data: dict) -> None:
    marks = line_marks(data)
    figure.layout.xaxis2.update(
        tickvals=[place for place, _ in marks["ticks"]],
        ticktext=[shown(number) for _, number in marks["ticks"]],
        ticklen=10,
        tickwidth=2,
    )
    # Rounding is no error; what becomes infinite is.
    color = look.WRONG if math.isinf(data["stored"]) else look.INK
    cross = {"symbol": "x", "size": 11, "color": color}
    dot = {"symbol": "circle", "size": 13, "color": look.INK}
    for name, key, height, marker in (
        ("the number itself", "exact", 0.6, cross),
        ("what is stored", "stored", -1, dot),
    ):
        figure.add_trace(
            go.Scatter(
                x=[marks[key]],
                y=[height],
                mode="markers",
                name=name,
                marker=marker,
                cliponaxis=False,
                xaxis="x2",
                yaxis="y2",
                hovertemplate=f"{name}: {shown(data[key])}<extra></extra>",
            )
        )
    figure.add_annotation(
        ax=marks["exact"],
        ay=0.45,
        x=marks["stored"],
        y=-0.6,
        xref="x2",
        yref="y2",
        axref="x2",
        ayref="y2",
        text="",
        arrowhead=2,
        arrowwidth=2,
        arrowcolor=color,
    )


def bits_text(data: dict) -> str:
    """One sentence: what is stored, what its bits say, how far off it is, and its neighbors."""
    format, exact, stored = data["format"], data["exact"], data["stored"]
    scaled = f" × 2^{shown(data['power'])}" if data["power"] else ""
    start = f"{format}, {data['choice']}{scaled}: {shown(exact, 5)}"
    if math.isinf(stored):
        return f"{start} is beyond the largest number, {shown(largest(format))}, and becomes {shown(stored)}."
    if stored == 0 and exact != 0:
        least = shown(smallest(format))
        return f"{start} is nearer to 0 than to the smallest number, {least}, and becomes 0."
    off = abs(stored - exact)
    error = f"off by {shown(100 * off / abs(exact), 2)} %" if off else "exactly"
    return (
        f"{start} is stored as {shown(stored)}, {error}. Bits: {reading(stored, format)}. "
        f"Beside it: {shown(data['below'])} and {shown(data['above'])}."
    )


def reading(stored: float, format: str) -> str:
    """What the bits of a finite number say, in the numbers that stand in them: "2^3 × (1 + 87/128)"."""
    exponent_bits, fraction_bits = FORMATS[format]
    word = pattern(abs(stored), format)
    exponent, fraction = word >> fraction_bits, word & (1 << fraction_bits) - 1
    bias = 2 ** (exponent_bits - 1) - 1
    sign = "−" if stored < 0 else ""
    share = f"{fraction:,}/{2**fraction_bits:,}"
    if exponent == 0:
        return f"{sign}2^{shown(1 - bias)} × (0 + {share})" + (", a subnormal" if fraction else "")
    return f"{sign}2^{shown(exponent - bias)} × (1 + {share})"
