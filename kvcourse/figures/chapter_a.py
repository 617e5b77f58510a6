"""The pictures of primer A: the causal triangle, and what one attention head looks at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from kvcourse.figures import template as look

FULL = 50  # %, the strongest color: rows after the first rarely give one key more; 10 must differ from 15

# A row of weights is what one query hands out, so weights have the query's color and never the key's.
WEIGHT = look.QUERY

# An axis says by its line whether it counts keys or queries; labels in these colors would be too dark to
# read in the dark theme.
KEY_LINE = {"linecolor": look.KEY, "linewidth": 4}
QUERY_LINE = {"linecolor": look.QUERY, "linewidth": 4}


def quoted(piece: str) -> str:
    """A token's text in quotes, so that its leading space shows, with a line break as a visible sign."""
    return f"“{piece}”".replace("\n", "⏎")


# --- the causal triangle -------------------------------------------------------------


def triangle_figure(pieces: Sequence[str]) -> go.Figure:
    """Which key each query may see: a cell a pair, the hatched ones masked.

    pieces  the text of T tokens
    """
    T = len(pieces)
    figure = look.new_figure("position of the key (K)", "position of the query (Q)", height=340)
    seen = [(row, column) for row in range(T) for column in range(row + 1)]
    masked = [(row, column) for row in range(T) for column in range(row + 1, T)]
    figure.add_trace(_cells(seen, "score kept", {"color": look.PAPER}, [f"q{r} · k{c}" for r, c in seen]))
    hatch = {"shape": look.HATCH, "fgcolor": look.MASKED, "solidity": 0.4}
    figure.add_trace(_cells(masked, "masked: the key comes later", {"color": look.PAPER, "pattern": hatch}))
    figure.update_layout(barmode="overlay", bargap=0.06)
    labels = [f"{position} {look.plain(quoted(piece))}" for position, piece in enumerate(pieces)]
    ticks = {"tickvals": list(range(T)), "ticktext": labels, "ticks": "", "showgrid": False}
    figure.update_xaxes(range=[-0.5, T - 0.5], **ticks, **KEY_LINE)
    figure.update_yaxes(range=[T - 0.5, -0.5], **ticks, **QUERY_LINE)
    return figure


def _cells(cells: list, name: str, marker: dict, text: list | None = None) -> go.Bar:
    return look.cells(
        [column for _, column in cells],
        [row for row, _ in cells],
        name=name,
        text=text,
        marker={**marker, "line": {"color": look.INK if text else look.MASKED, "width": 1}},
        hovertext=[f"query {row}, key {column}: {name}" for row, column in cells],
    )


def triangle_text(pieces: Sequence[str]) -> str:
    """The triangle in one sentence."""
    T = len(pieces)
    kept = T * (T + 1) // 2
    return (
        f"Of {T} × {T} = {T * T} scores {kept} are kept and {T * T - kept} masked: query 0 sees key 0 alone, "
        f"query {T - 1} sees keys 0 … {T - 1}."
    )


# --- what a head looks at ------------------------------------------------------------


def attention(weights: np.ndarray, pieces: Sequence[str], layer: int, head: int, query: int) -> dict:
    """Everything the panel shows of one head, as plain values.

    weights  attention weights, float32 (num_layers, num_heads, T, T), rows sum to 1
    pieces   (T,) the text of the tokens
    query    the row shown as bars, 0 … T − 1

    `percent` are all rows, rounded to 0.1 for the figure; `best` is the key with the largest weight in the
    chosen row. `first`, `before` and `own` are the shares that the head gives to position 0, to the token
    just before and to the row's own token, in percent, as means over rows 1 … T − 1 (row 0 has no choice).
    `even` is the mean over the same rows for a head that spreads its weight evenly.
    """
    chosen = 100 * weights[layer, head].astype(np.float64)
    T = len(pieces)
    return {
        "layer": layer,
        "head": head,
        "query": query,
        "pieces": list(pieces),
        "percent": chosen.round(1).tolist(),
        "best": int(chosen[query].argmax()),
        "best_percent": float(chosen[query].max()),
        "first": float(chosen[1:, 0].mean()),
        "before": float(np.diagonal(chosen, offset=-1).mean()),
        "own": float(np.diagonal(chosen)[1:].mean()),
        "even": float(np.mean([100 / (row + 1) for row in range(1, T)])),
    }


def attention_figure(data: dict) -> go.Figure:
    """Left: all rows as a heat map under its color scale, masked cells hatched, the chosen row framed.
    Right: that row as bars."""
    T, query, pieces = len(data["pieces"]), data["query"], data["pieces"]
    figure = look.new_figure("position of the key (K)", "position of the query (Q)", height=look.MAX_HEIGHT)
    visible = [[cell if c <= r else 0 for c, cell in enumerate(row)] for r, row in enumerate(data["percent"])]
    figure.add_trace(look.heat_map(visible, hover=_hover(data), color=WEIGHT, largest=FULL))
    figure.data[0].update(showscale=False)
    figure.add_trace(
        go.Bar(
            x=[T - 1 - row for row in range(T - 1)],
            y=list(range(T - 1)),
            base=[row + 0.5 for row in range(T - 1)],
            orientation="h",
            showlegend=False,
            marker={
                "color": look.PAPER,
                "line": {"width": 0},
                "pattern": {"shape": look.HATCH, "fgcolor": look.MASKED, "solidity": 0.3},
            },
            hovertemplate="masked: these keys come later<extra></extra>",
        )
    )
    figure.add_trace(_row_bars(data))
    figure.add_trace(_scale())
    frame = {"type": "rect", "x0": -0.5, "x1": query + 0.5, "y0": query - 0.5, "y1": query + 0.5}
    figure.add_shape(**frame, line={"color": look.INK, "width": 2.5})
    labels = [f"{look.plain(quoted(piece))} {position}" for position, piece in enumerate(pieces)]
    ticks = {"tickvals": list(range(T)), "ticks": "", "showgrid": False}
    axis = figure.layout.template.layout.xaxis.to_plotly_json()
    figure.update_layout(
        bargap=0,
        xaxis={"domain": [0, 0.49], "range": [-0.5, T - 0.5], "tickangle": 0, **ticks, **KEY_LINE},
        yaxis={"domain": [0, 0.84], "range": [T - 0.5, -0.5], **ticks, **QUERY_LINE, "ticktext": labels},
        xaxis2={**axis, "domain": [0.68, 1], "anchor": "y2", "range": [0, 105], "dtick": 25},
        yaxis2={**axis, "anchor": "x2", "range": [T - 0.5, -0.5], **ticks, **KEY_LINE, "ticktext": labels},
        xaxis3={**axis, **SCALE_AXIS, "domain": [0, 0.49], "anchor": "y3"},
        yaxis3={"domain": [0.93, 1], "anchor": "x3", "visible": False},
        margin={"t": 12},
    )
    figure.layout.xaxis2.title.text = f"weights of query {query}, {look.plain(quoted(pieces[query]))} (%)"
    return figure


SCALE_AXIS = {
    "range": [0, FULL],
    "tickvals": list(range(0, FULL + 1, 10)),
    "ticktext": [f"{percent}" for percent in range(0, FULL, 10)] + [f"≥ {FULL} %"],
    "tickangle": 0,
    "showgrid": False,
    "showline": False,
}


def _scale() -> go.Heatmap:
    # A heat map of its own, because plotly's color bar drops the transparency that tells weak from strong.
    steps = [percent + 0.5 for percent in range(FULL)]
    strip = look.heat_map([steps], hover=[[""] * FULL], color=WEIGHT, largest=FULL)
    strip.update(x=steps, y=[0], xaxis="x3", yaxis="y3", xgap=0, ygap=0, showscale=False)
    return strip.update(hoverinfo="skip", hovertemplate=None)


def _row_bars(data: dict) -> go.Bar:
    row = data["percent"][data["query"]][: data["query"] + 1]
    return go.Bar(
        x=row,
        y=list(range(len(row))),
        width=0.7,
        orientation="h",
        xaxis="x2",
        yaxis="y2",
        showlegend=False,
        marker={"color": WEIGHT, "line": {"color": look.INK, "width": 1}},
        hovertext=_hover(data)[data["query"]][: len(row)],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _hover(data: dict) -> list[list[str]]:
    pieces = [look.plain(piece) for piece in data["pieces"]]
    return [
        [
            f"query {r} {quoted(pieces[r])} gives key {c} {quoted(pieces[c])} {cell:g} %"
            if c <= r
            else f"query {r} {quoted(pieces[r])}, key {c} {quoted(pieces[c])}: masked"
            for c, cell in enumerate(row)
        ]
        for r, row in enumerate(data["percent"])
    ]


def attention_text(data: dict) -> str:
    """One sentence: where the chosen row looks most, and the head's habits over all rows."""
    pieces, query, best = data["pieces"], data["query"], data["best"]
    return (
        f"Layer {data['layer']}, head {data['head']}: token {query} {quoted(pieces[query])} looks most at "
        f"token {best} {quoted(pieces[best])} ({data['best_percent']:.0f} %). "
        f"Rows 1 … {len(pieces) - 1} on average: first token {data['first']:.0f} %, "
        f"token before {data['before']:.0f} %, own token {data['own']:.0f} %; "
        f"an even spread gives {data['even']:.0f} %."
    )
