"""Primer D, from GPT-2 to Llama: what rotation does to a query and a key, pair by pair.

Pair j of a vector x is (x[j], x[j + head_dim / 2]), as in Hugging Face's files, and position n turns it by
n · theta^(−2j / head_dim) radians (Su et al. 2021, "RoFormer", equation 34). Everything is float64.
"""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go

from kvcourse.figures import template as look

FARTHEST = 64  # positions of the panel, and so its largest distance
SHOWN = 7  # positions on a circle of the still
HIDDEN = 3  # degrees: an arrow turned by less lies over the one before the rotation


def frequencies(head_dim, theta):
    """Radians that each pair turns per position, float64 (head_dim / 2,), fastest first."""
    return float(theta) ** -(np.arange(0, head_dim, 2) / head_dim)


def frequency_table(head_dim, theta, longest, pairs):
    """Lines of text, one for each pair: its turn per position, its full turn, and its turn in a whole text.

    longest  positions in the longest text of the model
    """
    lines = [f"{'pair':>4}{'a position':>13}{'once around in':>23}{f'in {longest:,} positions':>25}"]
    for j in pairs:
        f = frequencies(head_dim, theta)[j]
        turns = longest * f / (2 * math.pi)
        whole = f"{turns:,.1f} turns" if turns >= 1 else f"{math.degrees(longest * f):,.1f}°"
        lines.append(f"{j:>4}{math.degrees(f):>12.4f}°{2 * math.pi / f:>16,.1f} tokens{whole:>25}")
    return "\n".join(lines)


# --- the picture of the rotation ---------------------------------------------------------------


def circles_figure(head_dim, theta, pairs):
    """One circle for each of `pairs`: where a pair that points right at position 0 is at positions 0 … 6."""
    figure = look.new_figure("", "", height=270, grid=False)
    for place, j in enumerate(pairs):
        middle, f = 3.2 * place, frequencies(head_dim, theta)[j]
        figure.add_trace(_circle(middle))
        angles = [n * f for n in range(SHOWN)]
        figure.add_trace(
            go.Scatter(
                x=_rounded(middle + math.cos(a) for a in angles),
                y=_rounded(math.sin(a) for a in angles),
                mode="markers",
                marker={"color": look.KEY, "size": 9, "line": {"color": look.PAPER, "width": 1}},
                hovertext=[f"pair {j}, position {n}: {math.degrees(a):.1f}°" for n, a in enumerate(angles)],
                hovertemplate="%{hovertext}<extra></extra>",
                showlegend=False,
            )
        )
        figure.add_trace(_arrow(middle, 0, look.KEY, f"pair {j} at position 0", dash="solid"))
        figure.add_trace(_numbers(middle, f))
        figure.add_annotation(
            x=middle, y=-1.65, text=f"pair {j}: {math.degrees(f):.2g}° a position", showarrow=False
        )
    width = 3.2 * (len(pairs) - 1)
    figure.update_xaxes(visible=False, range=[-1.5, width + 2])
    figure.update_yaxes(visible=False, range=[-1.8, 1.45], scaleanchor="x")
    return figure.update_layout(margin={"l": 10, "r": 10, "t": 10, "b": 10})


def _numbers(middle, f):
    """The positions beside their points: all where there is room for them, else the first and the last."""
    every = range(SHOWN) if f * 1.28 > 0.2 else (0, SHOWN - 1)
    labels = {n: str(n) for n in every}
    if (SHOWN - 1) * f * 1.28 < 0.2:  # even these two would cover each other
        labels = {(SHOWN - 1) / 2: f"0 … {SHOWN - 1}"}
    out = 1.28 if len(labels) > 1 else 1.42
    return go.Scatter(
        x=_rounded(middle + out * math.cos(n * f) for n in labels),
        y=_rounded(out * math.sin(n * f) for n in labels),
        text=list(labels.values()),
        mode="text",
        textfont={"color": look.INK, "size": look.TEXT_SIZE},
        hoverinfo="skip",
        showlegend=False,
    )


def circles_text(head_dim, theta, pairs):
    """How far each of these pairs has turned at the last position drawn."""
    last = SHOWN - 1
    turned = [
        f"pair {j} {math.degrees(last * f):.1f}°"
        for j, f in ((j, frequencies(head_dim, theta)[j]) for j in pairs)
    ]
    return f"From position 0 to position {last}: {', '.join(turned)}."


# --- the panel: one pair, two positions ------------------------------------------------------------


def pair_view(q, k, theta, pair, query, key, shift):
    """What one pair of a query and a key adds to the head's score, and the score over the distance.

    q, k            (head_dim,) before any rotation
    query, key      their positions; `shift` is added to both
    angles are degrees, `part` and `score` are what pair and head give at the chosen positions, `parts`
    and `scores` the same at distances 0 … FARTHEST, `lowest` and `highest` bound every pair's line
    """
    q, k, half = q.astype(np.float64), k.astype(np.float64), len(q) // 2
    f = frequencies(len(q), theta)
    product = (q[:half] + 1j * q[half:]) * (k[:half] - 1j * k[half:]) / math.sqrt(len(q))
    # (distances, pairs): a pair's part is |q| |k| cos(angle between them) / √head_dim.
    every = (product * np.exp(1j * np.arange(FARTHEST + 1)[:, None] * f)).real
    now = _added_at(q, k, f, query + shift, key + shift)
    angle_of = {
        name: math.degrees(math.atan2(x[pair + half], x[pair])) for name, x in (("query", q), ("key", k))
    }
    step = math.degrees(f[pair])
    turned = {name: angle_of[name] + step * (at + shift) for name, at in (("query", query), ("key", key))}
    return {
        "pair": pair,
        "query": query + shift,
        "key": key + shift,
        "distance": query - key,
        "step": step,
        "before": angle_of,
        "turned": turned,
        "between": _between(turned["query"] - turned["key"]),
        "part": float(now[pair]),
        "score": float(now.sum()),
        "parts": every[:, pair].tolist(),
        "scores": every.sum(axis=1).tolist(),
        "lowest": float(min(every.min(), every.sum(axis=1).min())),
        "highest": float(max(every.max(), every.sum(axis=1).max())),
    }


def _added_at(q, k, f, query, key):
    """Each pair's part of the score, (pairs,), by rotating both vectors at their own positions."""
    half = len(q) // 2
    turned = [
        (
            x[:half] * np.cos(at * f) - x[half:] * np.sin(at * f),
            x[:half] * np.sin(at * f) + x[half:] * np.cos(at * f),
        )
        for x, at in ((q, query), (k, key))
    ]
    (q_1, q_2), (k_1, k_2) = turned
    return (q_1 * k_1 + q_2 * k_2) / math.sqrt(len(q))


def _between(degrees):
    """The angle between two directions, 0 … 180."""
    return abs((degrees + 180) % 360 - 180)


def pair_figure(data):
    """Left the pair's two arrows, before the rotation dotted; right its part and the score."""
    figure = look.new_figure("", "", height=400)
    figure.add_trace(_circle(0))
    caption = "before and after alike"
    for name, letter, color in (("key", "K", look.KEY), ("query", "Q", look.QUERY)):
        before, turned = (math.radians(data[what][name]) for what in ("before", "turned"))
        if _between(data["turned"][name] - data["before"][name]) > HIDDEN:
            hover = f"{name} before the rotation: {data['before'][name] % 360:.0f}°"
            figure.add_trace(_arrow(0, before, color, hover, dash="dot", length=0.75).update(opacity=0.6))
            caption = "dotted: before"
        hover = f"{name} at position {data[name]:,}: {data['turned'][name] % 360:.0f}°"
        figure.add_trace(_arrow(0, turned, color, hover, dash="solid"))
        # Where the two arrows lie close together their letters would cover each other.
        out = 1.18 if letter == "K" or data["between"] > 15 else 1.42
        figure.add_annotation(
            x=round(out * math.cos(turned), 4),
            y=round(out * math.sin(turned), 4),
            text=f"<b>{letter}</b>",
            font={"color": color, "size": 16},
            showarrow=False,
        )
    figure.add_annotation(x=0, y=-1.6, text=f"pair {data['pair']}; {caption}", showarrow=False)
    distances = list(range(FARTHEST + 1))
    figure.add_trace(
        _line(distances, data["scores"], "the head's score", "solid").update(xaxis="x2", yaxis="y2")
    )
    figure.add_trace(
        _line(distances, data["parts"], "this pair's part", "dot").update(xaxis="x2", yaxis="y2")
    )
    if 0 <= data["distance"] <= FARTHEST:
        figure.add_trace(
            go.Scatter(
                x=[data["distance"]] * 2,
                y=[round(data["score"], 2), round(data["part"], 2)],
                mode="markers",
                name="chosen distance",
                marker={"color": look.INK, "size": 12, "symbol": ["circle", "circle-open"]},
                hovertemplate="distance %{x}: %{y}<extra></extra>",
                xaxis="x2",
                yaxis="y2",
            )
        )
    room = 0.06 * (data["highest"] - data["lowest"])
    figure.update_xaxes(visible=False, range=[-1.45, 1.45], domain=[0, 0.38])
    figure.update_yaxes(visible=False, range=[-1.8, 1.5], scaleanchor="x")
    return figure.update_layout(
        xaxis2=look.axis_like(figure, "xaxis")
        | {"domain": [0.47, 1], "anchor": "y2", "range": [-1, FARTHEST + 1], "dtick": 8}
        | {"title": {"text": "distance from query to key (positions)"}},
        yaxis2=look.axis_like(figure, "yaxis")
        | {"anchor": "x2", "range": [data["lowest"] - room, data["highest"] + room]}
        | {"title": {"text": "score"}},
        legend={"x": 1, "xanchor": "right"},
    )


def pair_text(data):
    """Where both point, the angle between them, the pair's part and the score, and what the mask says."""
    q, k = (data["turned"][name] % 360 for name in ("query", "key"))
    masked = " The key comes after the query, so the mask hides it." if data["distance"] < 0 else ""
    return (
        f"Pair {data['pair']} turns {data['step']:.2g}° a position. "
        f"Query at {data['query']:,}: {q:.0f}°; key at {data['key']:,}: {k:.0f}°; "
        f"{data['between']:.0f}° apart. Distance {_signed(data['distance'], 0)}: the pair adds "
        f"{_signed(data['part'], 1)}, the head's score is {_signed(data['score'], 1)}.{masked}"
    )


def _signed(value, digits):
    """2.0 as "2.0", −2.0 with a real minus."""
    return f"{value:.{digits}f}".replace("-", "−")


def _line(x, y, name, dash):
    return go.Scatter(
        x=x,
        y=_rounded(y),
        name=name,
        mode="lines",
        line={"color": look.INK, "width": 2.5, "dash": dash},
        hovertemplate=f"{name} at distance %{{x}}: %{{y}}<extra></extra>",
    )


def _circle(middle):
    around = [k * math.pi / 60 for k in range(121)]
    return go.Scatter(
        x=_rounded(middle + math.cos(a) for a in around),
        y=_rounded(math.sin(a) for a in around),
        mode="lines",
        line={"color": look.MASKED, "width": 1},
        hoverinfo="skip",
        showlegend=False,
    )


def _arrow(middle, angle, color, hover, *, dash, length=1.0):
    return go.Scatter(
        x=_rounded([middle, middle + length * math.cos(angle)]),
        y=_rounded([0, length * math.sin(angle)]),
        mode="lines+markers",
        line={"color": color, "width": 3, "dash": dash},
        marker={
            "symbol": "arrow",
            "angleref": "previous",
            "size": [0, 14],
            "color": color,
            "line": {"width": 0},
            "opacity": 1,  # plotly's own for markers of different sizes is 0.7
        },
        hovertext=hover,
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=False,
    )


def _rounded(values):
    return [round(float(value), 4) for value in values]
