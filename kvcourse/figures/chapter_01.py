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
    `measured` are the chapter's rows from this machine, in milliseconds; its entry is called
    disturbed when one of them is.
    """
    meets = BOOK_STEP_MS / (BOOK_PREFILL_MS / BOOK_PREFILL_TOKENS)
    known = {
        H100: ([1, meets, BOOK_PREFILL_TOKENS], [BOOK_STEP_MS, BOOK_STEP_MS, BOOK_PREFILL_MS]),
        LAPTOP: ([1, *TOKENS], [float(np.median(BLOG_WITH_MS)), *BLOG_WITHOUT_MS]),
    }
    if measured:
        step = float(np.median([row["with"] for row in measured]))
        tokens, without = _columns(measured, "without")
        known[HERE + _disturbed(measured)] = ([1, *tokens], [step, *without])
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


# --- which positions pass how often ------------------------------------------------------


def passes_figure(times):
    """Bars: how often each position of the text went through the model, the first time and again."""
    figure = look.new_figure("position in the text", "passes it went through", height=300)
    for name, heights, color, shape in (
        ("first time", [min(t, 1) for t in times], look.INK, ""),
        ("again", [max(t - 1, 0) for t in times], look.WRONG, look.CROSS_HATCH),
    ):
        figure.add_bar(y=heights, name=name, marker={"color": color, "pattern": {"shape": shape}})
    return figure.update_layout(barmode="stack")


def passes_text(times):
    """The sentence under the bars."""
    first = sum(t > 0 for t in times)
    return f"{sum(times):,} positions processed: {first} for the first time and {sum(times) - first:,} again."


# --- the main panel ------------------------------------------------------------------


def loops(prompt, new, batch, times, where, measured=None):
    """Everything the main panel shows, as plain numbers."""
    machine = machines(measured)[where]
    without, cached = two_loops(machine, prompt, new, batch)
    # Step 2 is always among the points: there the line with a cache drops from the prompt to one position.
    shown = np.unique([*np.linspace(0, new - 1, min(new, 60)).round().astype(int), min(1, new - 1)])
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
    kept.update(mode="lines", legendgroup="c", line={"shape": "hv"})
    figure.add_traces([wasted.update(legendgroup="w"), kept])
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
        xaxis={"domain": [0, 0.43]},
        xaxis2={**look.axis_like(figure, "xaxis"), "domain": [0.57, 1], "anchor": "y2"},
        yaxis={"rangemode": "tozero"},
        yaxis2={**look.axis_like(figure, "yaxis"), "anchor": "x2", "rangemode": "tozero"},
    )
    figure.layout.xaxis2.title.text = "new tokens written"
    figure.layout.yaxis2.title.text = "time until then (s), estimated"
    figure.update_xaxes(tickformat=",")  # without it plotly writes 4,000 beside 14k
    figure.update_yaxes(tickformat=",")
    return figure


def loops_text(data):
    """The sentence under the main panel."""
    without, cached = data["without_s"][-1], data["cached_s"][-1]
    who = "one request" if data["batch"] == 1 else f"{data['batch']} requests together"
    ratio = _times(without / cached)
    if data["at"] is None:
        meets = f"{data['times']} times as long is not reached within {MOST_NEW:,} new tokens"
    else:
        meets = f"{data['times']} times as long from {_count(data['at'], 'new token')} on"
    return (
        f"{data['where']}, {who}, prompt {data['prompt']:,}, new {data['new']:,}: "
        f"{_count(data['total'], 'position')} in {_seconds(without)} without a cache, "
        f"{data['cached_total']:,} in {_seconds(cached)} with one, {ratio}; {meets}." + _past_the_end(data)
    )


def _past_the_end(data):
    if data["where"] == H100 or data["prompt"] + data["new"] - 1 <= 1024:
        return ""
    return " GPT-2 has 1,024 positions, so beyond them this is what a longer model would take."


def _count(number, word):
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def _times(ratio):
    """Three digits; as many times as one is the same time."""
    said = f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"
    return "the same time" if said == "1" else f"{said} times"


def _seconds(seconds):
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


# --- one step against the length -------------------------------------------------------


def step_figure(measured=None, recorded=None):
    """Time of one step by tokens already there: the blog's two lines, a recorded run's, this machine's.

    An open symbol is without a cache, a filled one with. Both published runs are gray and dashed:
    the recorded one was measured on another machine than the reader's, too.

    measured  rows {"tokens", "without", "with"} in milliseconds, or None
    recorded  (rows of the same form, label), or None
    """
    figure = look.new_figure("tokens already there", "time of one step (ms)", log_x=True, log_y=True)
    runs = [("blog", "circle", TOKENS, {"without": BLOG_WITHOUT_MS, "with": BLOG_WITH_MS}, BLOG)]
    if recorded:
        rows, label = recorded
        columns = {kind: _columns(rows, kind)[1] for kind in ("without", "with")}
        runs.append(("recorded run", "square", _columns(rows, "with")[0], columns, label))
    for who, symbol, tokens, columns, source in runs:
        for kind, shape in (("without", f"{symbol}-open"), ("with", symbol)):
            line = look.published(tokens, columns[kind], name=f"{who}, {kind}", source=source, unit="ms")
            figure.add_trace(line.update(marker={"symbol": shape, "size": 9}))
    if measured:
        for kind, color, symbol in (("without", look.WRONG, "x"), ("with", look.HERE, "circle")):
            name = f"here, {kind}{_disturbed(measured)}"
            line = look.here(*_columns(measured, kind), name=name, unit="ms", color=color)
            figure.add_trace(line.update(marker={"symbol": symbol}))
    ticks = [16, 32, 64, 128, 256, 512, 1000]
    figure.update_xaxes(tickvals=ticks, ticktext=[f"{t:,}" for t in ticks])
    return figure


def step_table(rows):
    """The chapter's table as text: this machine's rows beside the blog's. Disturbed rows say so."""
    lines = [
        f"{'':>12}{'here':>32}{'blog':>32}",
        f"{'tokens there':>12}" + f"{'without':>12}{'with':>10}{'ratio':>10}" * 2,
    ]
    for row, without, with_ in zip(rows, BLOG_WITHOUT_MS, BLOG_WITH_MS, strict=True):
        ours = f"{row['without']:9,.0f} ms{row['with']:7.1f} ms{row['without'] / row['with']:9.1f}x"
        theirs = f"{without:9,} ms{with_:7} ms{without / with_:9.1f}x"
        lines.append(f"{row['tokens']:>12,}{ours}{theirs}" + "   here disturbed" * bool(row.get("why")))
    return "\n".join(lines)


def quoted(rows, recorded, label):
    """(rows, where from): this machine's rows, or the recorded ones when one of these was disturbed."""
    if _disturbed(rows):
        return recorded, f"the run {label}, because the one here was disturbed"
    return rows, "the run here"


def _disturbed(rows):
    return " (disturbed)" if any(row.get("why") for row in rows) else ""


def recorded_rows(results):
    """Rows of a `kvcourse bench numpy`, in ms: {"tokens", "without", "with"}.

    "without" is the chapter's plain pass with logits for every row, "with" the cached step.
    """
    timed = {"without": "plain", "with": "cached"}
    columns = {name: results["seconds"][key] for name, key in timed.items()}
    return [
        {"tokens": n, **{name: column[i] * 1000 for name, column in columns.items()}}
        for i, n in enumerate(results["lengths"])
    ]


def step_text(measured):
    """The sentence under the steps: how each of this machine's lines changes from end to end."""
    first, last = measured[0], measured[-1]
    grown = {kind: last[kind] / first[kind] for kind in ("without", "with")}
    text = (
        f"From {first['tokens']} to {last['tokens']:,} tokens a step grows {grown['without']:.0f} times "
        f"without a cache and {grown['with']:.1f} times with one; at {last['tokens']:,} the ratio of the two "
        f"is {last['without'] / last['with']:.0f}."
    )
    return text + " Disturbed, not to be quoted." * bool(_disturbed(measured))


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


def parts_scaled(config, anchor_tokens, anchor_ms, tokens=None, every_row=False):
    """The FLOPs' two parts as times: scaled so that their sum is `anchor_ms` at `anchor_tokens`.

    Counts logits for one row, or with `every_row` for all.
    Returns {"tokens", "linear", "both"} in milliseconds, lists, rounded.
    """
    tokens = tokens or sorted({*TOKENS, *range(50, 1001, 50)})

    def counted(count):
        return flops_parts(config, count, logit_rows=count if every_row else 1)

    rate = anchor_ms / sum(counted(anchor_tokens))
    parts = [counted(t) for t in tokens]
    return {
        "tokens": list(tokens),
        "linear": [round(linear * rate, 2) for linear, _ in parts],
        "both": [round((linear + square) * rate, 2) for linear, square in parts],
    }


def blog_over_flops(config):
    """(figure, sentence): the blog's times without a cache over the FLOPs, scaled to meet at 512 tokens.

    The blog's loop computes logits for every row, so the FLOPs count them too.
    """
    parts = parts_scaled(config, 512, BLOG_WITHOUT_MS[3], every_row=True)
    curve = look.published(TOKENS, BLOG_WITHOUT_MS, name="blog, without cache", source=BLOG, unit="ms")
    asked = [TOKENS[2], TOKENS[4]], [BLOG_WITHOUT_MS[2], BLOG_WITHOUT_MS[4]]
    return parts_figure(parts, [curve]), parts_text(parts, "the blog", *asked)


def here_over_flops(config, rows):
    """(figure, sentence): the same with this machine's `rows`, whose passes give one row of logits."""
    tokens, ms = _columns(rows, "without")
    parts = parts_scaled(config, tokens[3], ms[3])
    curve = look.here(tokens, ms, name="here, without cache" + _disturbed(rows), unit="ms")
    text = parts_text(parts, "this machine", [tokens[2], tokens[4]], [ms[2], ms[4]])
    text += " Disturbed, not to be quoted." * bool(_disturbed(rows))
    return parts_figure(parts, [curve]), text


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


def attend_table(found):
    """What the parts of `attend` take, as text: one line a length, and the growth between them.

    found  rows {"tokens", "whole", "chunks", "products", "why"}, ms of all layers together;
           "why" is empty, or says what disturbed the row, which then gives no growth
    """
    columns = {
        "whole matrix": lambda row: row["whole"],
        "in chunks": lambda row: row["chunks"],
        "size costs": lambda row: row["whole"] - row["chunks"],
        "products": lambda row: row["products"],
        "sweeps": lambda row: row["chunks"] - row["products"],
    }
    lines = [f"{'tokens':>14}" + "".join(f"{name:>14}" for name in columns)]
    for before, row in zip([None, *found], found, strict=False):
        if before:
            times = [_growth(before, row, value) for value in columns.values()]
            squared = f"T² {(row['tokens'] / before['tokens']) ** 2:.1f}x"
            lines.append(f"{squared:>14}" + "".join(f"{t:>14}" for t in times))
        cells = "".join(f"{_milliseconds(value(row)):>14}" for value in columns.values())
        lines.append(f"{row['tokens']:>14,}{cells}" + "   disturbed" * bool(row["why"]))
    return "\n".join(lines)


def _milliseconds(value):
    """Two timings' difference can come out below zero: then the machine was too busy to tell."""
    return f"{value:,.0f} ms" if value >= 0 else "cannot tell"


def _growth(before, row, value):
    if before["why"] or row["why"] or value(before) < 1 or value(row) < 1:
        return "-"  # below 1 ms of a pass the difference of two timings is noise
    return f"{value(row) / value(before):.1f}x"
