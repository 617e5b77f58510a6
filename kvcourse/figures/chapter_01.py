"""Chapter 01, the waste: published tables, a model of time, and the figures made of them.

Nothing here runs a model or looks at a clock. Two sources are quoted, each with its hardware:
the table of "The KV cache and the systems around it" (a blog post) and two times of "The KV
cache and prefix caching" (a book chapter).
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from kvcourse import sizing
from kvcourse.figures import template as look

BLOG = "“The KV cache and the systems around it”: laptop CPU, NumPy, 8 threads, fastest of 7 runs"
BOOK = "“The KV cache and prefix caching”: Llama-3.1-8B on one H100"

# Time of one step by tokens already there, GPT-2 124M in NumPy, in milliseconds (BLOG).
TOKENS = [16, 128, 256, 512, 1000]
BLOG_WITHOUT_MS = [37, 167, 435, 795, 2400]
BLOG_WITH_MS = [20, 23, 24, 22, 24]

# BOOK: a pass over a 2,000-token prompt, and one decode step, in milliseconds.
BOOK_PREFILL_TOKENS, BOOK_PREFILL_MS, BOOK_STEP_MS = 2000, 80.0, 7.0

H100 = "H100, Llama-3.1-8B (book)"
LAPTOP = "laptop, GPT-2 124M (blog)"
HERE = "this machine, GPT-2 124M"

MOST_NEW = 12_000  # tokens the panel writes at most; also how far it looks for a crossing


def machines(measured=None):
    """{name: (positions, ms)}: what one pass takes by the number of positions in it.

    Each entry is a line through known points, flat before the first, and proportional to the
    positions after the last. The book gives two numbers; the line through zero and its prefill
    meets the decode step at 175 positions, and no pass is shorter than a decode step.
    `measured` are the rows of `step_rows`, milliseconds, from this machine.
    """
    meets = BOOK_STEP_MS / (BOOK_PREFILL_MS / BOOK_PREFILL_TOKENS)
    known = {
        H100: ([1, meets, BOOK_PREFILL_TOKENS], [BOOK_STEP_MS, BOOK_STEP_MS, BOOK_PREFILL_MS]),
        LAPTOP: ([1, *TOKENS], [float(np.median(BLOG_WITH_MS)), *BLOG_WITHOUT_MS]),
    }
    if measured:
        step = float(np.median([row["with"] for row in measured]))
        tokens, without = _columns(measured, "without")
        known[HERE] = ([1, *tokens], [step, *without])
    return known


def pass_ms(machine, positions):
    """Milliseconds of a pass over `positions` positions (a number or an array), float64.

    machine  (positions, ms) of `machines`
    """
    known, times = machine
    inside = np.interp(positions, known, times)
    beyond = np.asarray(positions, dtype=float) * (times[-1] / known[-1])
    return np.where(np.asarray(positions) > known[-1], beyond, inside)


def two_loops(machine, prompt, new, batch=1):
    """Cumulated milliseconds after 1 … `new` steps, without and with a cache: two arrays (new,).

    `batch` requests of the same length go through the model together, so a step passes
    batch × (prompt + i) positions without a cache, and batch with one.
    """
    steps = np.arange(new)
    without = np.cumsum(pass_ms(machine, batch * (prompt + steps)))
    first, later = pass_ms(machine, batch * prompt), pass_ms(machine, batch)
    return without, first + later * steps


def crossing(machine, prompt, times, batch=1, most=MOST_NEW):
    """The fewest new tokens at which the naive loop has taken `times` as long, or None up to `most`."""
    without, cached = two_loops(machine, prompt, most, batch)
    reached = np.flatnonzero(without >= times * cached)
    return int(reached[0]) + 1 if reached.size else None


# --- the main panel ------------------------------------------------------------------


def loops(prompt, new, batch, times, where, measured=None):
    """Everything the main panel shows, as plain numbers."""
    machine = machines(measured)[where]
    without, cached = two_loops(machine, prompt, new, batch)
    shown = np.unique(np.linspace(0, new - 1, min(new, 60)).round().astype(int))
    at = crossing(machine, prompt, times, batch)
    return {
        "prompt": prompt,
        "new": new,
        "batch": batch,
        "times": times,
        "where": where,
        "steps": (shown + 1).tolist(),
        "positions": (batch * (prompt + shown)).tolist(),
        "cached_positions": [batch * (prompt if i == 0 else 1) for i in shown.tolist()],
        "without_s": (without[shown] / 1000).round(4).tolist(),
        "cached_s": (cached[shown] / 1000).round(4).tolist(),
        "at": at,
        "at_s": None if at is None or at > new else round(float(without[at - 1]) / 1000, 4),
        "total": batch * sizing.positions_processed(prompt, new, cached=False),
        "cached_total": batch * sizing.positions_processed(prompt, new, cached=True),
    }


def loops_figure(data):
    """Left: positions of each step, as areas. Right: time until then. The crossing is a dotted line."""
    figure = look.new_figure("new tokens written", "positions in this step")
    steps = data["steps"]
    wasted = look.here(steps, data["positions"], name="without cache", color=look.WRONG)
    hatched = {"shape": look.CROSS_HATCH, "fillmode": "replace"}
    wasted.update(mode="lines", fill="tozeroy", fillpattern=hatched)
    kept = look.here(steps, data["cached_positions"], name="with cache")
    figure.add_traces([wasted.update(legendgroup="w"), kept.update(mode="lines", legendgroup="c")])
    for values, name, color, group in (
        (data["without_s"], "without cache", look.WRONG, "w"),
        (data["cached_s"], "with cache", look.INK, "c"),
    ):
        line = look.here(steps, values, name=name, unit="s", color=color)
        line.update(mode="lines", xaxis="x2", yaxis="y2", legendgroup=group, showlegend=False)
        figure.add_trace(line)
    met = data["at_s"] is not None
    figure.add_trace(
        go.Scatter(
            x=[data["at"]] * 2 if met else [],
            y=[0, data["at_s"]] if met else [],
            name=f"{data['times']} times as long",
            mode="lines+markers",
            line={"color": look.INK, "dash": "dot", "width": 2},
            marker={"symbol": ["line-ew", "x"], "size": 10},
            hovertemplate=f"{data['times']} times as long from %{{x:,}} new tokens on<extra></extra>",
            xaxis="x2",
            yaxis="y2",
        )
    )
    figure.update_layout(
        xaxis={"domain": [0, 0.45]},
        xaxis2={**_like(figure.layout.template, "xaxis"), "domain": [0.56, 1], "anchor": "y2"},
        yaxis={"rangemode": "tozero"},
        yaxis2={**_like(figure.layout.template, "yaxis"), "anchor": "x2", "rangemode": "tozero"},
    )
    figure.layout.xaxis2.title.text = "new tokens written"
    figure.layout.yaxis2.title.text = "time until then (s), estimated"
    return figure


def _like(template, axis):
    return template.layout[axis].to_plotly_json()


def loops_text(data):
    """The sentence under the main panel."""
    without, cached = data["without_s"][-1], data["cached_s"][-1]
    who = "one request" if data["batch"] == 1 else f"{data['batch']} requests together"
    ratio = without / cached
    if data["at"] is None:
        meets = f"{data['times']} times as long is not reached within {MOST_NEW:,} new tokens"
    else:
        meets = f"{data['times']} times as long from {_count(data['at'], 'new token')} on"
    return (
        f"{data['where']}, {who}, prompt {data['prompt']:,}, new {data['new']:,}: "
        f"{data['total']:,} positions in {_seconds(without)} without a cache, "
        f"{data['cached_total']:,} in {_seconds(cached)} with one, {ratio:.3g} times; {meets}."
        + _past_the_end(data)
    )


def _past_the_end(data):
    if data["where"] == H100 or data["prompt"] + data["new"] - 1 <= 1024:
        return ""
    return " GPT-2 has 1,024 positions, so beyond them this is what a longer model would take."


def _count(number, word):
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def _seconds(seconds):
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


# --- one step against the length -------------------------------------------------------


def step_figure(measured=None, recorded=None):
    """Time of one step by tokens already there: the blog's two lines, a recorded run's, this machine's.

    measured  rows {"tokens", "without", "with"} in milliseconds, or None
    recorded  (rows of the same form, label), or None
    """
    figure = look.new_figure("tokens already there", "time of one step (ms)", log_x=True, log_y=True)
    figure.add_trace(look.published(TOKENS, BLOG_WITHOUT_MS, name="blog, without", source=BLOG, unit="ms"))
    figure.add_trace(look.published(TOKENS, BLOG_WITH_MS, name="blog, with", source=BLOG, unit="ms"))
    if recorded:
        rows, label = recorded
        for kind, symbol in (("without", "square"), ("with", "diamond")):
            line = look.here(*_columns(rows, kind), name=f"recorded, {kind}", unit="ms")
            line.update(line={"dash": "dot"}, marker={"symbol": symbol})
            figure.add_trace(line.update(hovertemplate=f"%{{y:,}} ms at %{{x:,}}<br>{label}<extra></extra>"))
    if measured:
        figure.add_trace(
            look.here(*_columns(measured, "without"), name="here, without", unit="ms", color=look.WRONG)
        )
        figure.add_trace(look.here(*_columns(measured, "with"), name="here, with", unit="ms"))
    ticks = [16, 32, 64, 128, 256, 512, 1000]
    figure.update_xaxes(tickvals=ticks, ticktext=[f"{t:,}" for t in ticks])
    return figure


def recorded_rows(results):
    """Rows of a `kvcourse bench numpy`, in ms: {"tokens", "without", "with", "package"}.

    "without" is the chapter's plain pass, "with" the cached step, "package" the package's own
    pass without a cache, which attends 128 queries at a time.
    """
    timed = {"without": "plain", "with": "cached", "package": "uncached"}
    columns = {name: results["seconds"][key] for name, key in timed.items()}
    return [
        {"tokens": n, **{name: column[i] * 1000 for name, column in columns.items()}}
        for i, n in enumerate(results["lengths"])
    ]


def step_text(measured):
    """The sentence under the steps: how each of this machine's lines changes from end to end."""
    first, last = measured[0], measured[-1]
    grown = {kind: last[kind] / first[kind] for kind in ("without", "with")}
    return (
        f"From {first['tokens']} to {last['tokens']:,} tokens a step grows {grown['without']:.0f} times "
        f"without a cache and {grown['with']:.1f} times with one; at {last['tokens']:,} the ratio of the two "
        f"is {last['without'] / last['with']:.0f}."
    )


def _columns(rows, kind):
    return [row["tokens"] for row in rows], [round(row[kind], 1) for row in rows]


# --- linear and quadratic parts --------------------------------------------------------


def flops_parts(config, tokens, whole_square=True, logit_rows=1):
    """(linear, attention) FLOPs of one pass over `tokens` tokens without a cache.

    The chapter's plain attention multiplies the whole square of scores and masks half of it
    away afterwards (`whole_square`); `sizing.forward_flops` counts the allowed half.
    """
    flops = sizing.forward_flops(config, tokens, logit_rows=logit_rows)
    if not whole_square:
        return flops.linear, flops.attention
    heads = config.num_heads * config.head_dim
    return flops.linear, config.num_layers * 2 * 2 * tokens * tokens * heads


def parts_scaled(config, anchor_tokens, anchor_ms, tokens=None):
    """The FLOPs' two parts as times: scaled so that their sum is `anchor_ms` at `anchor_tokens`.

    Returns {"tokens", "linear", "both"} in milliseconds, lists, rounded.
    """
    tokens = tokens or sorted({*TOKENS, *range(50, 1001, 50)})
    rate = anchor_ms / sum(flops_parts(config, anchor_tokens))
    parts = [flops_parts(config, t) for t in tokens]
    return {
        "tokens": list(tokens),
        "linear": [round(linear * rate, 2) for linear, _ in parts],
        "both": [round((linear + square) * rate, 2) for linear, square in parts],
    }


def parts_figure(parts, curves):
    """The two parts as stacked areas under measured curves.

    parts   what `parts_scaled` gives
    curves  plotly traces of measurements, from `template.published` and `template.here`
    """
    figure = look.new_figure("tokens in the pass", "time of one pass (ms)")
    for values, name, color, fill, pattern in (
        (parts["linear"], "FLOPs that grow with T", "#56B4E9", "tozeroy", ""),
        (parts["both"], "FLOPs that grow with T × T, on top", "#CC79A7", "tonexty", look.HATCH),
    ):
        figure.add_trace(
            go.Scatter(
                x=parts["tokens"],
                y=values,
                name=name,
                mode="lines",
                fill=fill,
                line={"color": color, "width": 1},
                fillpattern={"shape": pattern, "fillmode": "overlay"},
                hovertemplate=f"up to here: %{{y:,}} ms at %{{x:,}} tokens<extra>{name}</extra>",
            )
        )
    figure.add_traces(list(curves))
    return figure


def parts_text(parts, name, tokens, measured_ms):
    """One sentence: what the scaled FLOPs give at each of `tokens`, beside the measured milliseconds."""
    said = [
        f"{parts['both'][parts['tokens'].index(t)]:,.0f} ms at {t:,} where {name} has {ms:,.0f}"
        for t, ms in zip(tokens, measured_ms, strict=True)
    ]
    return "The scaled FLOPs give " + ", ".join(said[:-1]) + f" and {said[-1]}."
