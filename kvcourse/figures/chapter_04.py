"""Chapter 04, a cache in NumPy: one pass through a cache, drawn row by row.

Nothing here runs a model: `kvcourse.widgets.chapter_04.record` does, and hands over its passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from kvcourse.figures import template as look
from kvcourse.figures.chapter_a import quoted

FULL = 50  # % of attention weight, the strongest cell
STRONGEST = 0.6  # opacity of such a cell: the number written in it stays readable in both themes

LANES = {"Q": 0, "K": 1, "V": 2}
FIRST_ROW = 3.6  # lane of the first row of weights, below a gap
TOP, BOTTOM = 8, 96  # px around the lanes
LANE = 31  # px: a lane stays where it is when rows of weights come and go under it


@dataclass(frozen=True)
class Pass:
    """What one pass left, of all layers and heads.

    kind     "prefill" or "decode"
    start    rows in the cache before it
    pieces   (start + T,) the text of every token read so far
    next     the text of the token chosen after it, None while the prompt is not read to its end
    written  (start + T,) number of the pass that wrote each row
    weights  attention weights, float32 (num_layers, num_heads, T, start + T)
    keys, values  lengths of the rows, float32 (num_layers, num_heads, start + T)
    head_dim numbers in a row
    """

    kind: str
    start: int
    pieces: tuple[str, ...]
    next: str | None
    written: tuple[int, ...]
    weights: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    head_dim: int

    @property
    def new(self) -> int:
        """T, the tokens of this pass."""
        return len(self.pieces) - self.start


def steps(passes, step, chunk, layer, head):
    """Everything the panel shows of one step, as plain values.

    passes  {chunk: [Pass, …]}, as many passes for each chunk size
    """
    shown = passes[chunk][step]
    T, tokens = shown.new, len(shown.pieces)
    percent = 100 * shown.weights[layer, head].astype(np.float64)
    last = percent[-1]
    return {
        "step": step,
        "layer": layer,
        "head": head,
        "kind": shown.kind,
        "start": shown.start,
        "T": T,
        "tokens": tokens,
        "pieces": list(shown.pieces),
        "next": shown.next,
        "written": list(shown.written),
        "q": (shown.weights.shape[1], T, shown.head_dim),
        "k": (shown.weights.shape[1], tokens, shown.head_dim),
        "scores": (shown.weights.shape[1], T, tokens),
        "masked": T * (T - 1) // 2,
        "percent": percent.round(1).tolist(),
        "best": int(last.argmax()),
        "best_percent": float(last.max()),
        "lengths": {
            "K": shown.keys[layer, head].round(2).tolist(),
            "V": shown.values[layer, head].round(2).tolist(),
        },
        "most": max(len(taken[-1].pieces) for taken in passes.values()),
    }


def steps_figure(data):
    """Three lanes of rows (Q, K, V) over the positions; under them the weights, masked cells hatched."""
    highest, lowest = -0.7, FIRST_ROW + data["T"] - 0.4
    height = TOP + BOTTOM + round(LANE * (lowest - highest))
    figure = look.new_figure("position and token", "", height=height, grid=False)
    start, tokens = data["start"], data["tokens"]
    cached, new = list(range(start)), list(range(start, tokens))
    figure.add_trace(_rows(data, "Q", new, look.QUERY, fresh=True))
    for name, color in (("K", look.KEY), ("V", look.VALUE)):
        figure.add_trace(_rows(data, name, cached, color, fresh=False))
        figure.add_trace(_rows(data, name, new, color, fresh=True))
    figure.add_trace(_weights(data))
    figure.add_trace(_masked(data))
    figure.add_trace(_chosen(data))
    rows = [FIRST_ROW + r for r in range(data["T"])]
    figure.update_layout(
        barmode="overlay", bargap=0, showlegend=False, margin={"t": TOP, "b": BOTTOM, "l": 128}
    )
    figure.update_xaxes(
        range=[-0.6, data["most"] + 2.6],
        tickvals=list(range(data["most"])),
        ticktext=[_tick(data["pieces"], place) for place in range(data["most"])],
        tickangle=-45,
        automargin=False,
    )
    figure.update_yaxes(
        range=[lowest, highest],
        tickvals=[*LANES.values(), *rows],
        ticktext=["Q  new", "K  keys", "V  values", *(f"weights of {start + r}" for r in range(data["T"]))],
        ticks="",
        automargin=False,  # the lanes stay where they are when labels get longer
    )
    return figure


def steps_text(data):
    """One sentence: what was written and read, the shapes, the mask, and the choice."""
    one, last = data["T"] == 1, data["tokens"] - 1
    new = data["pieces"][data["start"] :]
    who = f"token {quoted(new[0])} at position {last}"
    if not one:
        who = f"tokens {quoted(new[0])} … {quoted(new[-1])} at positions {data['start']}–{last}"
    written = f"row {last}" if one else f"rows {data['start']}–{last}"
    read = "row 0" if last == 0 else f"rows 0–{last}"
    cells = data["T"] * data["tokens"]
    then = "nothing is chosen yet" if data["next"] is None else f"next token {quoted(data['next'])}"
    return (
        f"Step {data['step']}, {data['kind']}: {who} write{'s' if one else ''} {written} and "
        f"read{'s' if one else ''} {read}; q {data['q']}, K and V {data['k']}, scores {data['scores']}, "
        f"{data['masked']} of {cells} cell{'' if cells == 1 else 's'} masked; in layer {data['layer']}, head "
        f"{data['head']}, query {last} looks most at row {data['best']} "
        f"{quoted(data['pieces'][data['best']])} ({data['best_percent']:.0f} %); {then}."
    )


def _tick(pieces, place):
    return f"{place} {look.plain(quoted(pieces[place]))}" if place < len(pieces) else str(place)


def _rows(data, name, places, color, *, fresh):
    if name == "Q":
        hover = [f"query of position {p}, used in this step only" for p in places]
    else:
        word, lengths = {"K": "key", "V": "value"}[name], data["lengths"][name]
        told = "new" if fresh else "read again"
        hover = [
            f"{word} of position {p}, {told}: written in step {data['written'][p]}, length {lengths[p]:g}"
            for p in places
        ]
    return look.cells(
        places,
        [LANES[name]] * len(places),
        length=0.86,
        width=0.72,
        marker={
            "color": color,
            "opacity": look.NEW_OPACITY if fresh else look.CACHED_OPACITY,
            "line": {"color": look.INK, "width": 3 if fresh else 1},
        },
        hovertext=hover,
    )


def _weights(data):
    start, cells = data["start"], []
    for r, row in enumerate(data["percent"]):
        cells += [(r, c, row[c]) for c in range(start + r + 1)]
    red, green, blue = (int(look.QUERY[i : i + 2], 16) for i in (1, 3, 5))
    strength = [round(STRONGEST * min(share / FULL, 1), 3) for _, _, share in cells]
    hover = [f"query {start + r} gives value {c} a weight of {share:g} %" for r, c, share in cells]
    return _cells([(r, c) for r, c, _ in cells]).update(
        marker={
            "color": [f"rgba({red},{green},{blue},{s})" for s in strength],
            "line": {"color": look.INK, "width": 1},
        },
        text=[f"{share:.0f}" if round(share) else "<1" for _, _, share in cells],
        hovertext=hover,
    )


def _masked(data):
    start, T, tokens = data["start"], data["T"], data["tokens"]
    cells = [(r, c) for r in range(T) for c in range(start + r + 1, tokens)]
    return _cells(cells).update(
        marker={
            "color": look.PAPER,
            "line": {"color": look.MASKED, "width": 1},
            "pattern": {"shape": look.HATCH, "fgcolor": look.MASKED, "solidity": 0.4},
        },
        hovertext=[f"query {start + r} may not see key {c}: masked" for r, c in cells],
    )


def _cells(cells):
    return look.cells(
        [c for _, c in cells], [FIRST_ROW + r for r, _ in cells], width=0.9, constraintext="none"
    )


def _chosen(data):
    text = "nothing chosen yet" if data["next"] is None else f"→ {look.plain(quoted(data['next']))}"
    return go.Scatter(
        x=[data["tokens"] - 0.4],
        y=[FIRST_ROW + data["T"] - 1],  # the last query's row: from it comes the choice
        text=[text],
        mode="text",
        textposition="middle right",
        textfont={"color": look.INK, "size": 16},
        hoverinfo="skip",
        cliponaxis=False,
    )
