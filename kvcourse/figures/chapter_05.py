"""Chapter 05, the same answers?: logits of two passes compared, and the figure of the main panel.

Logits here are float32 (steps, vocab_size), one row for each step, both passes given the same tokens.
"""

from __future__ import annotations

import numpy as np

from kvcourse.figures import template as look

# Source: “The KV cache and the systems around it”, section “Is it actually correct?”: 100 greedy
# tokens of GPT-2 small in NumPy, float32.
BLOG_TOKENS, BLOG_DIFFERENCE = 100, 0.0027

FORMATS = ["float32", "float16", "bfloat16"]
# A float32 difference is all rounding, and its digits change with the processor: said as below this.
_FLOAT32_BELOW = 0.001

BEST = 10  # tokens shown of the vocabulary
_DIFFERENCE = "#CC79A7"  # free of a meaning in the course's palette


def margins(logits):
    """The gap between the two best logits of each row: (steps, vocab) → (steps,)."""
    best_two = np.partition(logits, -2, axis=-1)[:, -2:]
    return best_two[:, 1] - best_two[:, 0]


def differences(cached, uncached):
    """The largest |cached − uncached| of each row: two (steps, vocab) → (steps,)."""
    return np.abs(cached - uncached).max(axis=-1)


def flip_possible(margin, difference):
    """Whether another token could win: margin ≤ 2 · difference, elementwise.

    The best logit falls by at most the difference, the second rises by at most as much.
    """
    return margin <= 2 * difference


# --- the main panel ------------------------------------------------------------------


def compare(step, rows, close, uncached, cached, words):
    """Everything the panel shows at one step, as plain numbers.

    step      which row of the logits
    rows      the format of the cached rows, a key of `cached`
    close     whether the left plot shows the two best tokens only
    uncached  logits (steps, vocab)
    cached    {format: logits (steps, vocab)}
    words     word of a token id, a function
    """
    one, other = uncached[step], cached[rows][step]
    shown = np.argsort(-one, kind="stable")[: 2 if close else BEST]
    margin, difference = margins(uncached), differences(cached[rows], uncached)
    possible = flip_possible(margin, difference)
    happened = cached[rows].argmax(axis=-1) != uncached.argmax(axis=-1)
    return {
        "step": step,
        "rows": rows,
        "close": close,
        "words": [repr(words(int(token))) for token in shown],
        "uncached": _plain(one[shown]),
        "cached": _plain(other[shown]),
        "winner": repr(words(int(other.argmax()))),
        "margin": float(margin[step]),
        "difference": float(difference[step]),
        "possible": bool(possible[step]),
        "happened": bool(happened[step]),
        "margins": _plain(margin),
        # An exact 0 has no place on a log axis.
        "doubled": [value if value > 0 else None for value in _plain(2 * difference)],
        "possible_steps": np.flatnonzero(possible).tolist(),
        "flipped_steps": np.flatnonzero(happened).tolist(),
    }


def _plain(values):
    return [float(f"{value:.6g}") for value in values]


def compare_figure(data):
    """Left: the best logits of both passes. Right: margin and 2 × difference of all steps, log scale."""
    figure = look.new_figure("logit", "", height=400)
    places = list(range(len(data["words"])))
    for name, values, symbol, size in (
        ("uncached pass", data["uncached"], "circle-open", 15),
        ("cached pass", data["cached"], "circle", 6),
    ):
        pairs = zip(data["words"], values, strict=True)
        hover = [f"{look.plain(word)}, {name}: {value:,.4f}" for word, value in pairs]
        marker = {"symbol": symbol, "size": size, "color": look.INK, "line": {"width": 2}}
        figure.add_scatter(
            x=values,
            y=places,
            mode="markers",
            name=name,
            marker=marker,
            text=hover,
            hovertemplate="%{text}<extra></extra>",
        )
    figure.update_yaxes(
        tickmode="array",
        tickvals=places,
        ticktext=[look.plain(word) for word in data["words"]],
        range=[len(places) - 0.4, -0.6],
        showgrid=False,
    )
    figure.update_xaxes(domain=[0, 0.4], nticks=5, range=_window(data))
    _add_strip(figure, data)
    return figure


def _window(data):
    """The logits shown: all of the ten best, or closely the two best."""
    if data["close"]:
        middle = sum(data["uncached"]) / 2
        half = 1.2 * max(data["margin"] / 2 + data["difference"], 0.001)
        return [middle - half, middle + half]
    values = data["uncached"] + data["cached"]
    edge = 0.08 * max(max(values) - min(values), 0.1)
    return [min(values) - edge, max(values) + edge]


def _add_strip(figure, data):
    steps = list(range(len(data["margins"])))
    lines = (
        ("margin", data["margins"], look.INK, "solid"),
        ("2 × difference", data["doubled"], _DIFFERENCE, "dot"),
    )
    for name, values, color, dash in lines:
        figure.add_scatter(
            x=steps, y=values, name=name, mode="lines", line={"color": color, "width": 2, "dash": dash},
            hovertemplate=f"step %{{x}}: {name} %{{y:.3g}}<extra></extra>", xaxis="x2", yaxis="y2",
        )  # fmt: skip
    for name, chosen, symbol in (
        ("flip possible", data["possible_steps"], "x-thin"),
        ("token flipped", data["flipped_steps"], "square-open"),
    ):
        marker = {
            "symbol": symbol,
            "size": 13,
            "color": look.WRONG,
            "line": {"width": 2.5, "color": look.WRONG},
        }
        figure.add_scatter(
            x=chosen, y=[data["margins"][step] for step in chosen], name=name, mode="markers", marker=marker,
            hovertemplate=f"step %{{x}}: {name}<extra></extra>", xaxis="x2", yaxis="y2",
        )  # fmt: skip
    here = {"color": look.INK, "width": 1, "dash": "dash"}
    figure.add_scatter(
        x=[data["step"]] * 2, y=[1e-6, 30], name="this step", mode="lines", line=here, hoverinfo="skip",
        xaxis="x2", yaxis="y2",
    )  # fmt: skip
    axes = figure.layout.template.layout
    figure.update_layout(
        xaxis2={
            **axes.xaxis.to_plotly_json(),
            "domain": [0.56, 1],
            "anchor": "y2",
            "range": [-2, len(steps) + 1],
        },
        yaxis2={
            **axes.yaxis.to_plotly_json(),
            "anchor": "x2",
            "type": "log",
            "dtick": 1,
            "range": [-6, 1.5],
            "exponentformat": "power",
        },
    )
    figure.layout.xaxis2.title.text = "step"
    figure.layout.yaxis2.title.text = "logits, log scale"


def compare_text(data):
    """The sentence under the panel."""
    start = (
        f"Step {data['step']}, {data['rows']} rows: margin {data['margin']:.3f}, difference {_said(data)}: "
    )
    best = data["words"][0]
    if data["happened"]:
        return start + f"a flip is possible, and it happens, {best} becomes {data['winner']}."
    if data["possible"]:
        return start + f"a flip is possible, but both passes choose {best}."
    return start + f"no flip is possible, both passes choose {best}."


def _said(data):
    """The difference: two digits, so that twice of it agrees with the verdict; for float32 a bound."""
    if data["rows"] == "float32" and data["difference"] < _FLOAT32_BELOW:
        return f"below {_FLOAT32_BELOW}"
    return f"{data['difference']:.2g}"
