"""Chapter 06: the outcomes of a chosen set of probes, and who is still confused with whom."""

from __future__ import annotations

import plotly.graph_objects as go

from kvcourse.figures import template as look

# From an outcome to the strength of its color; the word in the cell says the same.
STRENGTH = {"same": 0, "clean": 0, "close": 1, "other": 2, "wrong": 2, "error": 2}
SIGN = {"error": "× "}  # no logits at all; as strong a color as wrong ones
_SHADES = ("rgba(213,94,0,0)", "rgba(213,94,0,0.25)", "rgba(213,94,0,0.55)")


def strength(outcome: str) -> int:
    """0 for what a right cache says too, 1 for close, 2 for all that is plainly wrong."""
    return STRENGTH.get(outcome, 2)


def kit(table, costs, letter, chosen):
    """The data of one setting of the panel.

    table    {letter or "right": {probe: outcome}}
    costs    {probe: positions passed}
    letter   the row to look at
    chosen   names of the chosen probes, in any order
    """
    names = [name for name in costs if name in chosen]
    groups = {}  # outcomes of the chosen probes -> the letters that have them
    for one, row in table.items():
        groups.setdefault(tuple(row[name] for name in names), []).append(one)
    alike = {one: [other for other in group if other != one] for group in groups.values() for one in group}
    return {
        "table": table,
        "costs": costs,
        "letter": letter,
        "chosen": names,
        "cost": sum(costs[name] for name in names),
        "alike": {one: alike[one] for one in table},
        "groups": list(groups.values()),
        "confused": sum(len(group) * (len(group) - 1) // 2 for group in groups.values()),
        "pairs": len(table) * (len(table) - 1) // 2,
    }


def kit_figure(data) -> go.Figure:
    """One row a letter, one column a probe; the last column names those it is confused with."""
    rows, columns = list(data["table"]), list(data["costs"])
    last = len(columns)
    figure = look.new_figure("", "", height=look.MAX_HEIGHT, grid=False)
    shown = [[_cell(data, row, name) for name in columns] for row in rows]
    figure.add_trace(
        go.Heatmap(
            z=[[strength(text) if text else None for text in line] for line in shown],
            x=list(range(last)), y=list(range(len(rows))), zmin=0, zmax=2, showscale=False, xgap=1, ygap=1,
            colorscale=[[0, _SHADES[0]], [0.5, _SHADES[1]], [1, _SHADES[2]]], hoverinfo="skip",
        )
    )  # fmt: skip
    words, marks = _words(data, rows, columns, shown)
    figure.add_trace(_text(words))
    figure.add_trace(_text(marks, textposition="middle right"))
    figure.add_trace(_text([(-0.85, y, row, named(row)) for y, row in enumerate(rows)]))
    at = rows.index(data["letter"])
    figure.add_shape(
        type="rect", x0=-1.15, x1=last + 1.15, y0=at - 0.5, y1=at + 0.5, line={"color": look.INK, "width": 2}
    )
    ticks = [f"{name.replace(' + ', ' +<br>')}<br>{data['costs'][name]}" for name in columns]
    ticks = [text if text.count("<br>") > 1 else f"<br>{text}" for text in ticks]  # all three lines high
    figure.update_xaxes(
        tickvals=[*range(last), last + 0.15], ticktext=[*ticks, "<br>confused<br>with"],
        range=[-1.2, last + 1.2], side="top", showline=False, ticks="", fixedrange=True,
    )  # fmt: skip
    figure.update_yaxes(
        range=[len(rows) - 0.5, -0.5], showticklabels=False, showline=False, ticks="", fixedrange=True,
    )  # fmt: skip
    figure.update_layout(showlegend=False, margin={"t": 10, "b": 10, "l": 10, "r": 10})
    return figure


def _cell(data, row, name):
    return data["table"][row][name] if name in data["chosen"] else ""


def _words(data, rows, columns, shown):
    """(x, y, text, hover) of the words in the cells, and of the names at the right."""
    words = [
        (x, y, SIGN.get(text, "") + text or "·", f"{rows[y]}, {columns[x]}: {text or 'not run'}")
        for y, line in enumerate(shown)
        for x, text in enumerate(line)
    ]
    marks = []
    for y, row in enumerate(rows):
        alike = data["alike"][row]
        said = f"{row}: told from all others" if not alike else f"{row}: same outcomes as {', '.join(alike)}"
        marks.append((len(columns) - 0.45, y, _short(alike), said))
    return words, marks


def _short(alike):
    """The first names of a group, so that the column stays narrow."""
    if not alike:
        return "–"
    return " ".join(alike) if len(alike) <= 5 else f"{' '.join(alike[:4])} +{len(alike) - 4}"


def _text(points, **more):
    x, y, text, hover = (list(column) for column in zip(*points, strict=True))
    return go.Scatter(
        x=x, y=y, text=text, mode="text", textfont={"color": look.INK, "size": look.TEXT_SIZE},
        customdata=hover, hovertemplate="%{customdata}<extra></extra>", **more,
    )  # fmt: skip


def kit_text(data) -> str:
    """What the chosen probes cost, who is still confused, and what they say of the chosen letter."""
    if not data["chosen"]:
        return f"No probe chosen: all {data['pairs']} pairs are confused."
    row, names = data["table"][data["letter"]], data["chosen"]
    said = ", ".join(f"{name}: {row[name]}" for name in names)
    cost = f"Probes {' and '.join(names)}" if len(names) < 3 else f"{len(names)} probes"
    if not data["confused"]:
        told = f"all {data['pairs']} pairs told apart"
    else:
        group = next(group for group in data["groups"] if len(group) > 1)
        told = f"{data['confused']} of {data['pairs']} pairs still confused, such as {pair(*group[:2])}"
    return f"{cost}, cost {data['cost']} positions: {told}. {named(data['letter'])}: {said}."


def named(letter: str) -> str:
    """A letter, or the words for the row without a bug."""
    return "The right cache" if letter == "right" else letter


def pair(one: str, other: str) -> str:
    """ "A and C", or "J and the right cache"; the order stays the table's."""
    return f"{one} and {'the right cache' if other == 'right' else other}"


def outcomes(table, names) -> str:
    """The outcomes of some probes as a table of text, a row for each letter."""
    width = max(12, *(len(name) + 2 for name in names))
    lines = ["       " + "".join(f"{name:<{width}}" for name in names)]
    for letter, row in table.items():
        lines.append(f"{letter:<7}" + "".join(f"{row[name]:<{width}}" for name in names))
    return "\n".join(line.rstrip() for line in lines)
