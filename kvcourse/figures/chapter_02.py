"""Chapter 02, why keys and values never change: which positions a change reaches, and the pictures of it.

Nothing here runs a model. A mask is boolean (T, T), True where a row may see a column; a change
is an array (layers, positions) of lengths ‖ΔK‖ or ‖ΔV‖.
"""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go

from kvcourse.figures import template as look

CAUSAL = "causal: 0 … itself"
BIDIRECTIONAL = "bidirectional: all"
LEAKING = "leaking: one position ahead"
MASKS = (CAUSAL, BIDIRECTIONAL, LEAKING)

KEYS, VALUES = "keys", "values"

# Decades of the color scale. A changed position below the lowest is drawn at the lowest: still tinted, which
# only an exact zero is not.
LOWEST, HIGHEST = -5, 2


def mask_of(kind, T):
    """The mask (T, T) of one of MASKS."""
    masks = {
        CAUSAL: lambda: np.tri(T, dtype=bool),
        BIDIRECTIONAL: lambda: np.ones((T, T), dtype=bool),
        LEAKING: lambda: np.tri(T, k=1, dtype=bool),
    }
    return masks[kind]()


def depends_on(mask, layers):
    """The argument of the chapter as sets: boolean (layers, T, T).

    mask  boolean (T, T), True where a row may see a column
    Row i of layer l is True at the tokens that key and value of position i in layer l can depend
    on: in layer 0 its own, and from one layer to the next those of every row that its mask shows.
    """
    reach = np.eye(len(mask), dtype=bool)
    found = []
    for _ in range(layers):
        found.append(reach)
        reach = reach | (mask @ reach)
    return np.stack(found)


def lengths(before, after):
    """‖after − before‖ over all heads together, float64 (layers, T).

    before, after  keys or values (layers, heads, T, head_dim) of two passes over T tokens.
    0.0 where all numbers are the same bit for bit, and only there: squares are taken in float64,
    where the square of the smallest float32 difference does not vanish.
    """
    difference = np.asarray(after, dtype=np.float64) - before
    return np.sqrt((difference * difference).sum(axis=(1, 3)))


# --- a change, layer by position ---------------------------------------------------------


def change(before, after, pieces, j, which=KEYS):
    """What the heat map and its sentence show, as plain values.

    before, after  the arrays of `lengths`; pieces: the text's tokens as strings; j: the changed
    token; which: KEYS or VALUES. `levels` are the decimal logarithms to one digit, None for exact zero:
    rounding noise of another processor does not show in them.
    """
    changed = lengths(before, after)
    levels = [
        [round(math.log10(length), 1) if length else None for length in row] for row in changed.tolist()
    ]
    return {"levels": levels, "pieces": list(pieces), "j": j, "which": which}


def change_figure(data):
    """Layers from top to bottom, positions from left to right, one color on a logarithmic scale.

    An exact zero is the bare page; the smallest change drawn has a third of the full strength.
    """
    figure = look.new_figure("position and token", "layer", height=340, grid=False)
    levels, which = data["levels"], data["which"]

    def above(level):  # heat_map keeps 0 for exact zeros, so the scale starts a little above it
        return round(min(max(level, LOWEST), HIGHEST) - LOWEST + 0.01, 2)

    shown = [[0 if level is None else above(level) for level in row] for row in levels]
    color = look.KEY if which == KEYS else look.VALUE
    cells = look.heat_map(
        shown, hover=_hover(levels, which), color=color, largest=above(HIGHEST),
        bar_title=f"length of the {which}' change",
    )  # fmt: skip
    decades = list(range(LOWEST, HIGHEST + 1))
    cells.colorbar.update(
        tickvals=[above(decade) for decade in decades],
        ticktext=[f"{10.0**decade:.{max(0, -decade)}f}" for decade in decades],  # 0.00001, never 1e-05
    )
    figure.add_trace(cells)
    figure.update_yaxes(autorange="reversed", dtick=1)
    figure.update_xaxes(
        tickvals=list(range(len(data["pieces"]))),
        ticktext=[_tick(i, piece) for i, piece in enumerate(data["pieces"])],
        tickangle=0,
    )
    return figure


def _hover(levels, which):
    def say(layer, position, level):
        at = f"layer {layer}, position {position}"
        if level is None:
            return f"{at}: {which} exactly as before"
        return f"{at}: {which[:-1]} changed by about {10.0**level:.2g}"

    return [[say(i, t, level) for t, level in enumerate(row)] for i, row in enumerate(levels)]


def _tick(i, piece):
    """Number and token below a column: every other token a line lower, so that long neighbors stay apart."""
    return f"{i}<br>{'<br>' * (i % 2)}{_shown(piece)}"


def _shown(piece):
    return look.plain(piece.replace("\n", "⏎").strip()) or "␣"


def change_text(data):
    """The sentence under the heat map: the first and the last changed position of each layer."""
    which, j = data["which"], data["j"]
    spans = [span(row) for row in data["levels"]]
    if not any(spans):
        return f"Token {j} is the same in both texts: no {which} change in any layer."
    return f"Changing token {j} changes {which} " + _by_layer(spans) + "."


def span(row):
    """(first, last, how many) of the positions of one layer that are not None; None when all are."""
    found = [position for position, level in enumerate(row) if level is not None]
    return (found[0], found[-1], len(found)) if found else None


def _by_layer(spans):
    """ "at positions 4–11 in layers 1–5, and only position 4 in layer 0": later layers first."""
    groups = []  # [first layer, last layer, span]
    for layer, where in enumerate(spans):
        if groups and groups[-1][2] == where:
            groups[-1][1] = layer
        else:
            groups.append([layer, layer, where])
    said = [f"{_where(where)} in {_layers(first, last)}" for first, last, where in reversed(groups)]
    first, *others = said
    head = first.replace("only", "only at", 1) if first.startswith("only") else f"at {first}"
    return head + "".join(f", {other}" for other in others[:-1]) + (f", and {others[-1]}" if others else "")


def _layers(first, last):
    return f"layer {first}" if first == last else f"layers {first}–{last}"


def _where(where):
    if where is None:
        return "nowhere"
    first, last, count = where
    if count == 1:
        return f"only position {first}"
    holes = "" if count == last - first + 1 else f" ({count} of them)"
    return f"positions {first}–{last}{holes}"


# --- how often a row is read ---------------------------------------------------------------


def reads_figure(reads, prompt):
    """Bars: how often the query, the key and the value of each position are read in one layer.

    reads  {"Q": [...], "K": [...], "V": [...]}, one number a position; prompt: tokens of the prompt.
    """
    figure = look.new_figure("position in the text", "times read, one layer", height=320)
    for name, color in (("Q", look.QUERY), ("K", look.KEY), ("V", look.VALUE)):
        hover = f"{name} of position %{{x}}: read %{{y}} times<extra></extra>"
        letters = [name, *[""] * (len(reads[name]) - 1)]  # the order within a group, said once
        figure.add_trace(
            go.Bar(
                y=list(reads[name]), name=name, marker={"color": color}, hovertemplate=hover,
                text=letters, textposition="outside", textangle=0, cliponaxis=False,
            )
        )  # fmt: skip
    line = {"color": look.INK, "dash": "dot", "width": 1.5}
    figure.add_vline(x=prompt - 0.5, line=line)
    figure.add_annotation(
        x=prompt - 0.5, y=1, yref="paper", xanchor="left", showarrow=False, text=" new tokens", yanchor="top"
    )
    figure.update_xaxes(dtick=2)
    return figure


def reads_text(reads):
    """The sentence under the bars."""
    q, k, v = (reads[name] for name in "QKV")
    same = "each key, and each value as often," if list(k) == list(v) else "each key"
    once = "Every query is read once" if set(q) == {1} else f"Queries are read {min(q)} to {max(q)} times"
    return f"{once}; {same} {k[-1]} to {k[0]} times, the earlier the more often."
