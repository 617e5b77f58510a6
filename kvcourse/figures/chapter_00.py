"""The pictures of chapter 00: the next token as bars, and the course's colors with their fixed meanings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from kvcourse import ops
from kvcourse.figures import template as look

BARS = 8  # how many tokens the figure has room for
AXIS_ENDS = {10: 2, 25: 5, 50: 10, 100: 25}  # %: where the axis may end, and its ticks then
SHOWN_BEFORE = 6  # how many of the tokens read the sentence repeats


def quoted(piece: str) -> str:
    """A token's text in quotes, so that its leading space shows, with a line break as a visible sign."""
    return f"“{piece}”".replace("\n", "⏎")


def next_token(
    logits: np.ndarray, pieces: Sequence[str], ids: Sequence[int], read: int, temperature: float
) -> dict:
    """The likeliest next tokens after the first ``read`` tokens of a text, and the text's own next token.

    logits       float32 (T, vocab_size) of the whole text, row r belongs to position r
    pieces       (vocab_size,) the text of every token
    ids          (T,) the text's own tokens
    read         1 … T − 1
    temperature  above 0; probabilities are softmax(logits / temperature)

    Returns plain values: ``rows``, a list of at most ``BARS`` dicts (label, percent, place, own), likeliest
    first. The text's own token is always among them, in the last row when it is not one of the likeliest.
    Raises ``ValueError`` when there is no token after ``read``.
    """
    if not 1 <= read < len(ids):
        raise ValueError(f"read is {read}: it must lie in 1 … {len(ids) - 1}, so that a next token exists")
    probabilities = ops.softmax(logits[read - 1] * np.float32(1 / temperature))  # (vocab_size,)
    order = np.argsort(-probabilities, kind="stable")
    own = ids[read]
    own_place = int(np.flatnonzero(order == own)[0])
    shown = [int(token) for token in order[:BARS]]
    if own_place >= BARS:
        shown[-1] = own  # the last row is then a token from further down, and its label says so
    rows = [
        {
            "label": quoted(pieces[token]),
            "percent": round(100 * float(probabilities[token]), 1),
            "place": own_place + 1 if token == own else place + 1,
            "own": token == own,
        }
        for place, token in enumerate(shown)
    ]
    return {
        "rows": rows,
        "read": read,
        "temperature": temperature,
        "before": ("…" if read > SHOWN_BEFORE else "")
        + "".join(pieces[token] for token in ids[max(0, read - SHOWN_BEFORE) : read]),
        "vocab_size": len(pieces),
    }


def next_token_figure(data: dict) -> go.Figure:
    """Bars of ``next_token``'s rows: filled for the text's own next token, outlined for all others.

    The axis ends at the next of ``AXIS_ENDS`` above the longest bar, and its title says where.
    """
    end = next(end for end in AXIS_ENDS if end >= data["rows"][0]["percent"])
    figure = look.new_figure(
        f"probability of being the next token (%); this axis ends at {end} %", "", height=360
    )
    for own, name, fill in (
        (False, "likeliest next tokens", look.PAPER),
        (True, "the token the novel goes on with", look.INK),
    ):
        rows = [(place, row) for place, row in enumerate(data["rows"]) if row["own"] == own]
        figure.add_bar(
            x=[row["percent"] for _, row in rows],
            y=[place for place, _ in rows],
            orientation="h",
            name=name,
            marker={"color": fill, "line": {"color": look.INK, "width": 1.5}},
            text=[percent_text(row["percent"]) for _, row in rows],
            textposition="outside",
            cliponaxis=False,
            customdata=[[look.plain(row["label"]), row["place"]] for _, row in rows],
            hovertemplate="%{customdata[0]}: %{x} %, place %{customdata[1]:,}<extra></extra>",
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(range=[0, 1.08 * end], tickvals=list(range(0, end + 1, AXIS_ENDS[end])))
    figure.update_yaxes(
        range=[BARS - 0.5, -0.5],  # the likeliest on top
        tickvals=list(range(len(data["rows"]))),
        ticktext=[_tick(row) for row in data["rows"]],
        ticks="",
    )
    return figure


def _tick(row: dict) -> str:
    # The last row may hold a token from far down; its place says that rows are left out between.
    label = look.plain(row["label"])
    return label if row["place"] <= BARS else f"{label} (place {row['place']:,})"


def percent_text(percent: float) -> str:
    """``"12 %"``, ``"4.3 %"``, and ``"under 0.1 %"`` for what would be rounded to nothing."""
    if percent < 0.1:
        return "under 0.1 %"
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.1f} %"


def next_token_text(data: dict) -> str:
    """One sentence with the likeliest next token and the novel's own."""
    best = data["rows"][0]
    own = next(row for row in data["rows"] if row["own"])
    before = data["before"].replace("\n", "⏎")
    tokens = "1 token" if data["read"] == 1 else f"{data['read']} tokens"
    start = (
        f"{tokens} read, up to “{before}”: at temperature {data['temperature']:g} the model gives "
        f"{best['label']} {percent_text(best['percent'])}"
    )
    if best["own"]:
        return f"{start}, and the novel goes on with it."
    return (
        f"{start}; the novel goes on with {own['label']}, {percent_text(own['percent'])}, "
        f"place {own['place']:,} of {data['vocab_size']:,}."
    )


LEGEND = (  # the meaning written under the mark, the letter on it, the bar's looks
    ("key", "K", {"color": look.KEY}),
    ("value", "V", {"color": look.VALUE}),
    ("query", "Q", {"color": look.QUERY}),
    ("new<br>this step", "", {"color": look.KEY, "line": {"color": look.INK, "width": 3}}),
    (
        "cached,<br>read again",
        "",
        {"color": look.KEY, "opacity": look.CACHED_OPACITY, "line": {"color": look.INK, "width": 1}},
    ),
    (
        "masked,<br>not visible",
        "",
        {"color": look.PAPER, "pattern": {"shape": look.HATCH, "fgcolor": look.MASKED, "solidity": 0.4}},
    ),
    (
        "wasted,<br>wrong",
        "",
        {"color": look.PAPER, "pattern": {"shape": look.CROSS_HATCH, "fgcolor": look.WRONG, "solidity": 0.4}},
    ),
)
LEGEND_TEXT = (
    "Blue with a K is a key, orange with a V a value, green with a Q a query. Full strength, bold outline: "
    "new this step. Pale: cached and read again. Gray hatching is masked, vermilion cross-hatching is "
    "wasted or wrong. A gray dashed line was measured elsewhere, a solid line with points on this machine."
)


def legend() -> go.Figure:
    """The course's marks side by side, each over its meaning."""
    figure = look.new_figure("", "", height=150)
    for place, (_, letter, marker) in enumerate(LEGEND):
        figure.add_bar(
            x=[place],
            y=[1],
            width=0.7,
            marker=marker,
            text=[f"<b>{letter}</b>"],
            textposition="inside",
            insidetextanchor="middle",
            textfont={"size": 22, "color": "#FFFFFF" if letter != "V" else "#000000"},
            hoverinfo="skip",
        )
    first = len(LEGEND)
    for place, line in (
        (first, look.published([], [], name="", source="")),
        (first + 1, look.here([], [], name="")),
    ):
        line.update(
            x=[place - 0.3, place, place + 0.3], y=[0.25, 0.45, 0.85], hovertemplate=None, hoverinfo="skip"
        )
        figure.add_trace(line)
    figure.update_layout(showlegend=False, barmode="overlay", margin={"l": 10, "r": 10, "t": 10, "b": 50})
    figure.update_yaxes(visible=False, range=[0, 1.05])
    figure.update_xaxes(
        range=[-0.5, first + 1.5],
        tickvals=list(range(first + 2)),
        ticktext=[meaning for meaning, _, _ in LEGEND] + ["measured<br>elsewhere", "measured<br>here"],
        showline=False,
        ticks="",
        showgrid=False,
    )
    return figure
