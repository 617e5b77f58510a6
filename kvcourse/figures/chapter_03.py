"""The pictures of chapter 03: the mask of a chunk, the cells a reader marks, and rows that came out wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import plotly.graph_objects as go

from kvcourse import ops
from kvcourse.figures import template as look

LONGEST = 12  # positions that the panel has room for
AXIS = {"showgrid": False, "ticks": "", "dtick": 1, "linewidth": 4}
BEFORE, NEW, MASKED, EARLIER = "key there before, seen", "new key, seen", "masked", "row of an earlier pass"
WRONG = "is_causal differs"
# The key's color at the strength of a cached row; as a marker's opacity it would not show in the legend.
PALE = f"rgba({', '.join(str(int(look.KEY[i : i + 2], 16)) for i in (1, 3, 5))}, {look.CACHED_OPACITY})"
ON_BLUE, CLEAR = "#ffffff", "rgba(0,0,0,0)"
# Thin and faint, so that the digit on it can be read in the dark theme, where it is white.
HATCH = {"shape": look.HATCH, "fgcolor": look.MASKED, "fgopacity": 0.7, "solidity": 0.12, "size": 10}


def top_left(start: int, T: int) -> np.ndarray:
    """Boolean (T, start + T): the triangle that starts in the corner top left, row r sees keys 0 … r.

    Source: the definition of ``is_causal=True`` in the documentation of PyTorch's
    ``scaled_dot_product_attention``.
    """
    return np.tri(T, start + T, dtype=bool)


# --- the mask of a chunk -------------------------------------------------------------------


def chunk(start: int, T: int, overlay: bool, num_heads: int) -> dict:
    """The mask of T rows after ``start`` positions, and what ``is_causal=True`` makes of it, as plain values.

    Every cell is (position of the query, position of the key, what it is). ``wrong`` are the cells in which
    the two masks differ; the drawing shows them with ``overlay``.
    """
    mask = ops.causal_mask(start, T)
    wrong = np.argwhere(mask != top_left(start, T))
    return {
        "start": start,
        "T": T,
        "overlay": overlay,
        "shape": (num_heads, T, start + T),
        "cells": [
            (start + row, key, (BEFORE if key < start else NEW) if seen else MASKED)
            for row, sees in enumerate(mask.tolist())
            for key, seen in enumerate(sees)
        ],
        "wrong": [(start + row, key) for row, key in wrong.tolist()],
    }


def chunk_figure(data: dict, positions: int = LONGEST) -> go.Figure:
    """The rows of the chunk in their place within the whole triangle, on axes that never move.

    positions  how many of them the axes have room for
    """
    height = min(look.MAX_HEIGHT, 180 + 20 * positions)  # px
    figure = look.new_figure("position of the key (K)", "position of the query (Q)", height=height)
    crossed = set(data["wrong"]) if data["overlay"] else set()
    styles = {
        BEFORE: ("1", look.INK, {"color": PALE}, 1),
        NEW: ("1", ON_BLUE, {"color": look.KEY}, 3),
        MASKED: ("0", look.INK, {"color": look.PAPER, "pattern": HATCH}, 1),
    }
    for kind, (digit, color, marker, line) in styles.items():
        cells = [(query, key) for query, key, what in data["cells"] if what == kind]
        digits = ["" if cell in crossed else digit for cell in cells]
        outline = {"color": look.INK, "width": line}
        figure.add_trace(_cells(cells, kind, digits, color, marker, outline))
    earlier = [(query, key) for query in range(data["start"]) for key in range(query + 1)]
    outline = {"color": look.MASKED, "width": 1}
    figure.add_trace(_cells(earlier, EARLIER, [""] * len(earlier), look.INK, {"color": look.PAPER}, outline))
    if data["overlay"]:
        colors = [look.INK if key < data["start"] else ON_BLUE for _, key in data["wrong"]]
        outline = {"color": look.WRONG, "width": 3}
        crosses = ["×"] * len(colors)
        figure.add_trace(_cells(data["wrong"], WRONG, crosses, colors, {"color": CLEAR}, outline))
    ticks = {"tickvals": list(range(positions)), **AXIS}
    figure.update_layout(barmode="overlay", bargap=0.06)
    figure.update_xaxes(range=[-0.5, positions - 0.5], linecolor=look.KEY, **ticks)
    figure.update_yaxes(range=[positions - 0.5, -0.5], linecolor=look.QUERY, **ticks)
    return figure


def _cells(cells: list, name: str, text: list, color: str | list, marker: dict, line: dict) -> go.Bar:
    return look.cells(
        [key for _, key in cells],
        [query for query, _ in cells],
        name=name,
        text=text,
        constraintext="none",
        textfont={"color": color, "size": look.TEXT_SIZE},
        marker={**marker, "line": line},
        hovertext=[f"query {query}, key {key}: {name}" for query, key in cells],
    )


def rows_text(data: dict) -> str:
    """One sentence: what the rows see, and how many cells are masked."""
    masked, cells = _masked(data), len(data["cells"])
    seen = _seen(data)
    return f"{seen[0].upper()}{seen[1:]}; {masked} of {_count(cells)} masked ({masked / cells:.0%})."


def chunk_text(data: dict) -> str:
    """One sentence: shape, masked cells, what the rows see, and with the overlay what is wrong."""
    start, masked, cells = data["start"], _masked(data), len(data["cells"])
    text = (
        f"start {start}, T {data['T']}: scores {data['shape']}, {_count(cells)} a head, {masked} masked "
        f"({masked / cells:.0%}); {_seen(data)}."
    )
    if not data["overlay"]:
        return text
    if not data["wrong"]:
        return f"{text} is_causal=True draws the same mask."
    # Both triangles have T rows and the lower one sees `start` keys more in each.
    return f"{text} is_causal=True hides {_count(len(data['wrong']))} more: {start} in each row."


def _masked(data: dict) -> int:
    return sum(what == MASKED for _, _, what in data["cells"])


def _seen(data: dict) -> str:
    queries = range(data["start"], data["start"] + data["T"])
    rows = [f"position {query} sees {_span(0, query)}" for query in queries]
    return ", ".join(rows if len(rows) <= 3 else [rows[0], "…", rows[-1]])


def _span(first: int, last: int) -> str:
    return f"key {first}" if first == last else f"keys {first}–{last}"


def _count(cells: int) -> str:
    return f"{cells} cell" + ("" if cells == 1 else "s")


# --- the cells that a reader marks --------------------------------------------------------


def name(query: int, key: int) -> str:
    """A cell's name by positions: ``q3·k1``."""
    return f"q{query}·k{key}"


def marks_text(marked: Iterable[tuple[int, int]], wrong: np.ndarray, start: int) -> str:
    """The reader's marks against the truth, in one line.

    marked  (position of the query, position of the key) of each marked cell
    wrong   boolean (T, start + T), True in the cells that should be marked
    """
    marked = sorted(marked)
    truth = [(start + row, key) for row, key in np.argwhere(wrong).tolist()]
    if not marked:
        return f"No cell marked: no guess. {_listed(truth, wrong, start)}"
    missed = [cell for cell in truth if cell not in marked]
    extra = [cell for cell in marked if cell not in truth]
    if not missed and not extra:
        return f"Exactly right: you marked all {_count(len(truth))} and no other."
    found = len(truth) - len(missed)
    parts = [f"You marked {_count(len(marked))}, {found} of the {len(truth)} that differ."]
    if missed:
        parts.append(f"Missed: {', '.join(name(*cell) for cell in missed)}.")
    if extra:
        parts.append(f"Marked, but the same in both: {', '.join(name(*cell) for cell in extra)}.")
    return " ".join(parts)


def _listed(truth: list, wrong: np.ndarray, start: int) -> str:
    if not truth:
        return "No cell differs."
    rows = []
    for row, cells in enumerate(wrong):
        keys = np.flatnonzero(cells)
        if keys.size:
            rows.append(f"position {start + row}: keys {', '.join(map(str, keys))}")
    return f"{_count(len(truth))} differ: {'; '.join(rows)}."


# --- rows that came out wrong ---------------------------------------------------------


def changes_figure(changes: Sequence[float], chunk_size: int) -> go.Figure:
    """The largest change of a logit at each position, with a line where a chunk begins.

    changes  one number >= 0 per position, rounded
    """
    figure = look.new_figure("position", "largest change of a logit", height=300)
    figure.add_trace(
        go.Bar(
            x=list(range(len(changes))),
            y=list(changes),
            name="top-left mask against the right one",
            marker={
                "color": look.PAPER,
                "line": {"color": look.WRONG, "width": 1.5},
                "pattern": {"shape": look.CROSS_HATCH, "fgcolor": look.WRONG, "solidity": 0.4},
            },
            hovertemplate="position %{x}: a logit changed by %{y}<extra></extra>",
        )
    )
    for begin in range(chunk_size, len(changes), chunk_size):
        line = {"color": look.INK, "width": 1, "dash": "dot"}
        figure.add_shape(type="line", x0=begin - 0.5, x1=begin - 0.5, y0=0, y1=1, yref="paper", line=line)
    figure.update_xaxes(range=[-0.6, len(changes) - 0.4], dtick=chunk_size, showgrid=False)
    figure.update_yaxes(rangemode="tozero")
    return figure


def changes_text(changes: Sequence[float], chunk_size: int) -> str:
    """One sentence: where the first drawn change is, and how large the changes are from there on."""
    changed = [position for position, change in enumerate(changes) if change > 0]
    if not changed:
        return f"Chunks of {chunk_size}: no logit changed."
    first, last = changed[0], len(changes) - 1
    least, most = min(changes[first:]), max(changes[first:])
    return (
        f"Chunks of {chunk_size}: positions 0–{first - 1} are unchanged; at positions {first}–{last} "
        f"every row changed, its most changed logit by {least:.1f} to {most:.1f}."
    )
