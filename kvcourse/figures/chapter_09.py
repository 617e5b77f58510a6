"""Chapter 09, prefill and decode: passes on a roofline, published times, and the figures of measured ones.

Nothing here runs a model or looks at a clock. Quoted, each with its hardware: times of "The KV cache and
prefix caching" (a book chapter), a slope of the page on the KV cache of the course "System Design and AI
Engineering", and a table of "KV cache" (an encyclopedia entry; only its words are used).
"""

from __future__ import annotations

import plotly.graph_objects as go

from kvcourse import config, measure, sizing
from kvcourse.figures import template as look

BOOK = "“The KV cache and prefix caching”: Llama 3.1 8B on one H100"
COURSE = "course page on the KV cache: qwen2.5:3b in Ollama, Apple M4, 30 shuffled calls"

# BOOK: one decode step, reading a 2,000-token prompt (without the fixed part), and time to first token with
# 0 and with 1,800 of 2,000 tokens cached; all in milliseconds.
BOOK_STEP_MS, BOOK_PREFILL_MS, BOOK_PREFILL_TOKENS = 7.0, 80.0, 2000
BOOK_COLD, BOOK_WARM = (2000, 95.0), (200, 21.0)  # (tokens to compute, ms)
BOOK_CONTEXT, BOOK_LONG = 2300, 32_000  # tokens
BOOK_WEIGHTS = 16_000_000_000  # bytes

# COURSE: tokens a second after an empty prompt, and their change with 1,000 prompt tokens.
COURSE_SPEED, COURSE_SLOPE, COURSE_LONGEST = 41.0, -1.1, 7900
# COURSE: seconds to read a prompt of so many tokens, the first time and again.
COURSE_REREAD_TOKENS, COURSE_FIRST_S, COURSE_AGAIN_S = 1130, 2.53, 0.04

MODELS = {
    "Llama 3.1 8B": "llama-3.1-8b",
    "Llama 3.1 70B": "llama-3.1-70b",
    "Llama 2 7B": "llama-2-7b",
    "Qwen2.5 1.5B": "qwen2.5-1.5b",
    "Qwen2.5 3B": "qwen2.5-3b",
}
# By the name on the axis and in the sentence; the key is the table's.
DEVICES = {
    "H100": "h100-sxm",
    "H200": "h200",
    "A100 80 GB": "a100-80gb",
    "L4": "l4",
    "RTX 4090": "rtx-4090",
    "RTX 3060": "rtx-3060",
}
# What the panel's sliders offer: close together where the page asks something, wide apart beyond.
PROMPTS = [*range(100, 1001, 100), 1500, 2000, 2300, 3000, 4000, 8000, 16_000, 32_000, 64_000, 128_000]
CACHED = [*range(0, 1001, 100), 1500, 1600, 1700, 1800, 1900, 3000, 4000, 8000, 16_000, 32_000, 64_000]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]

# How far the axes reach, in powers of ten: every pass of the panel lies within.
_FLOP_PER_BYTE, _TFLOPS = (-0.4, 5.6), (-1.2, 3.6)


# Kinds of passes in the panel, and their marks.
COLD, WARM, ALONE, TOGETHER = "cold prefill", "warm prefill", "decode", "batched decode"
SYMBOLS = {COLD: "circle-open", WARM: "circle", ALONE: "square", TOGETHER: "diamond"}


# --- the main panel ------------------------------------------------------------------


def passes(model, device, prompt, cached, batch):
    """Everything the panel shows: up to four passes of a model (16 bits) on a device.

    model, device   keys of MODELS and DEVICES
    prompt, cached  tokens of the prompt, and how many of them are in the cache already; the last one is
                    always computed
    batch           requests in the batched decode step, each with `prompt` cached tokens
    """
    shape, card = config.lookup(MODELS[model]), sizing.device(DEVICES[device])
    cached = min(cached, prompt - 1)
    asked = [(COLD, "prefill, nothing cached", prompt, 0, 1)]
    if cached:
        asked.append((WARM, f"prefill, {cached:,} cached", prompt - cached, cached, 1))
    asked.append((ALONE, "decode", 1, prompt, 1))
    if batch > 1:
        asked.append((TOGETHER, f"decode, batch of {batch}", 1, prompt, batch))
    held = sizing.weight_bytes(shape) + batch * sizing.kv_bytes(shape, prompt + 1)
    return {
        "model": model,
        "device": device,
        "prompt": prompt,
        "cached": cached,
        "batch": batch,
        "max_seq_len": shape.max_seq_len,
        "bandwidth": card.bandwidth,
        "peak": card.peak(),
        "ridge": card.ridge,
        "held": held,
        "memory": card.memory_bytes,
        "passes": [_pass(shape, card, *what) for what in asked],
    }


def _pass(shape, card, kind, name, new, past, batch):
    """One pass as plain numbers: intensity, what the roof allows, and the seconds of each part."""
    work = sizing.work(shape, new, past, batch)
    took = sizing.pass_time(work, card)
    return {
        "kind": kind,
        "name": name,
        "new": new,
        "past": past,
        "batch": batch,
        "intensity": work.intensity,
        "flops": sizing.roofline(card, work.intensity),
        "weights": took.weights,
        "caches": took.caches,
        "compute": took.compute,
        "total": took.total,
        "bound": took.bound,
    }


def passes_figure(data):
    """Left: the roof of the device, and each pass on it. Right: what each pass's time goes to."""
    figure = look.new_figure("FLOP for each byte moved", "TFLOP/s", log_x=True, log_y=True, height=400)
    figure.add_trace(_roof(data))
    figure.add_trace(_ridge(data))
    found = {one["kind"]: one for one in data["passes"]}
    for kind in SYMBOLS:  # always all four, so that traces keep their place
        figure.add_trace(_dot(kind, found.get(kind)))
    figure.add_trace(_book_dots(data))
    for bar in _split(data["passes"]):
        figure.add_trace(bar)
    rows = list(range(len(data["passes"])))
    figure.update_layout(
        barmode="overlay",  # each bar has its own place already
        xaxis={"domain": [0, 0.52], "range": _FLOP_PER_BYTE},
        yaxis={"range": _TFLOPS},
        xaxis2={
            **look.axis_like(figure, "xaxis"),
            "domain": [0.72, 1],
            "anchor": "y2",
            "range": [0, 104],
            "dtick": 25,
        },
        yaxis2={
            **look.axis_like(figure, "yaxis"),
            "anchor": "x2",
            "range": [max(rows) + 0.6, -0.6],
            "tickvals": rows,
            "ticktext": [_row_label(one) for one in data["passes"]],
            "showgrid": False,
            "ticks": "",
        },
        legend={"font": {"size": look.TEXT_SIZE}},
    )
    figure.layout.xaxis2.title.text = "of the pass’s time (%)"
    return figure


def _roof(data):
    """The line that no pass can be above: bandwidth times intensity, then the peak."""
    low, high = (10**end for end in _FLOP_PER_BYTE)
    x = [low, data["ridge"], high]
    y = [low * data["bandwidth"], data["peak"], data["peak"]]
    line = look.here([round(v, 4) for v in x], [_tera(v) for v in y], name=f"roof of the {data['device']}")
    return line.update(
        mode="lines", hovertemplate="roof: %{y:,} TFLOP/s at %{x:,} FLOP per byte<extra></extra>"
    )


def _ridge(data):
    return go.Scatter(
        x=[round(data["ridge"], 4)] * 2,
        y=[10 ** _TFLOPS[0], _tera(data["peak"])],
        name="ridge",
        mode="lines",
        line={"color": look.INK, "width": 1.5, "dash": "dot"},
        hovertemplate="ridge: %{x:,.0f} FLOP per byte<extra></extra>",
    )


def _dot(kind, one):
    """One pass on the roof; without points, and so without a legend entry, where there is no such pass."""
    at = [] if one is None else [one]
    trace = go.Scatter(
        x=[round(p["intensity"], 4) for p in at],
        y=[_tera(p["flops"]) for p in at],
        name=at[0]["name"] if at else kind,
        mode="markers",
        showlegend=bool(at),
        marker={
            "symbol": SYMBOLS[kind],
            "size": 13,
            "color": look.ARITHMETIC if kind in (COLD, WARM) else look.WEIGHTS,
            "line": {"color": look.ARITHMETIC if kind == COLD else look.INK, "width": 2},
        },
        hovertemplate="%{text}<extra></extra>",
        text=[f"{p['name']}: {p['intensity']:,.2f} FLOP per byte, {p['bound']} bound" for p in at],
    )
    return trace


def _book_dots(data):
    """The book's two passes, where the panel stands on its model and card: under the roof."""
    shown = (data["model"], data["device"]) == ("Llama 3.1 8B", "H100")
    points = book_points() if shown else []
    trace = look.published(
        [round(x, 4) for x, _, _ in points],
        [_tera(y) for _, y, _ in points],
        name="book’s times",
        source=BOOK,
    )
    hover = "book, %{text}: %{y:,} TFLOP/s at %{x:,} FLOP per byte<br>source: " + BOOK + "<extra></extra>"
    marker = {"symbol": "x-thin", "size": 11, "line": {"color": look.PUBLISHED, "width": 3}}
    return trace.update(mode="markers", text=[what for _, _, what in points], hovertemplate=hover).update(
        marker=marker, showlegend=bool(points)
    )


def book_points():
    """[(FLOP per byte, FLOP/s reached, what)] of the book's prefill and of its decode step."""
    shape, found = config.lookup("llama-3.1-8b"), []
    for new, past, ms, what in (
        (BOOK_PREFILL_TOKENS, 0, BOOK_PREFILL_MS, "prefill of 2,000 tokens in 80 ms"),
        (1, BOOK_CONTEXT, BOOK_STEP_MS, "decode after 2,300 tokens in 7 ms"),
    ):
        work = sizing.work(shape, new, past)
        found.append((work.intensity, work.flops.total / ms * 1000, what))
    return found


def _split(rows):
    """Bars: moving weights and caches above, arithmetic below, in percent of the longer of the two."""
    for key, name, color, shape, place, starts in (
        ("weights", "reading weights", look.WEIGHTS, "", -0.18, None),
        ("caches", "reading and writing caches", look.CACHES, look.HATCH, -0.18, "weights"),
        ("compute", "arithmetic", look.ARITHMETIC, ".", 0.18, None),
    ):
        yield go.Bar(
            x=[_percent(one[key], one) for one in rows],
            base=[_percent(one[starts], one) if starts else 0 for one in rows],
            y=[row + place for row in range(len(rows))],
            width=0.34,
            orientation="h",
            name=name,
            # White on the bar's own color: a pattern cannot follow the theme, and this need not.
            marker={
                "color": color,
                "pattern": {
                    "shape": shape,
                    "fillmode": "overlay",
                    "fgcolor": "#ffffff",
                    "size": 8,
                    "solidity": 0.2,
                },
            },
            xaxis="x2",
            yaxis="y2",
            hovertemplate="%{text}<extra></extra>",
            text=[f"{one['name']}: {name} {measure.format_seconds(one[key])}" for one in rows],
            textposition="none",
        )


def _row_label(one):
    return f"{one['kind']}<br>{measure.format_seconds(one['total'])} "


def _percent(part, one):
    return round(100 * part / one["total"], 2)


def _tera(flops):
    return float(f"{flops / 1e12:.5g}")


def passes_text(data):
    """The sentence under the panel: what each pass is bound by, and its predicted time."""
    what = "; ".join(_pass_words(one) for one in data["passes"])
    where = f"{data['model']} on the {data['device']}, prompt {data['prompt']:,}"
    return f"{where}: {what}.{_limits(data)}"


def _pass_words(one):
    named = f"prefill of {one['new']:,} after {one['past']:,} cached" if one["kind"] == WARM else one["name"]
    bound = f"{one['bound']} bound, {measure.format_seconds(one['total'])}"
    text = f"{named}: {intensity(one['intensity'])} FLOP per byte, {bound}"
    if one["batch"] > 1:
        share = one["caches"] / (one["weights"] + one["caches"])
        text += f", {'over 99%' if share > 0.99 else f'{share:.0%}'} of the bytes are caches"
    return text


def _limits(data):
    """What the arithmetic ignores: the positions the model has, and the memory of the card."""
    notes = ""
    if data["prompt"] + 1 > data["max_seq_len"]:
        notes += f" The model has {data['max_seq_len']:,} positions: beyond them this is arithmetic only."
    if data["memory"] is not None and data["held"] > data["memory"]:
        needed, there = (f"{count / 1e9:,.0f} GB" for count in (data["held"], data["memory"]))
        notes += f" Weights and caches take {needed}, the card has {there}: it does not fit."
    return notes


def intensity(value):
    """FLOP per byte as text: 1.06, 30.2, 1,897."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


# --- measured lines ---------------------------------------------------------------------


def disturbed(rows):
    """Empty, or one line on what disturbed measured rows.

    rows  {"tokens", "why", …}; `why` as of kvcourse.measure
    """
    return measure.disturbed_line([(f"{row['tokens']:,} tokens", row["why"]) for row in rows], "calls")


def growths(rows, recorded):
    """({"first", "step"}, where from): how both times grow from 500 to 1,000 prompt tokens.

    rows      as for `latency_figure`; the fastest call of each length counts
    recorded  a RecordedRun of "numpy", whose 512 and 1,000 tokens are taken when a row is disturbed
    """
    if not disturbed(rows):
        return {key: _fastest(rows, 1000, key) / _fastest(rows, 500, key) for key in ("first", "step")}, (
            "the run here"
        )
    at, seconds_of = recorded.results["lengths"].index, recorded.results["seconds"]
    kinds = {"first": seconds_of["uncached"], "step": seconds_of["cached"]}
    found = {key: values[at(1000)] / values[at(512)] for key, values in kinds.items()}
    return found, (
        f"the run {recorded.label}, 512 → 1,000 tokens (1.95 times the tokens), "
        "because the one here was disturbed"
    )


def straighter(residuals):
    """The name of the fit with the smaller residuals, or None where they differ by less than a fifth."""
    spread = {name: _spread(values) for name, values in residuals.items()}
    return None if max(spread.values()) < 1.2 * min(spread.values()) else min(spread, key=spread.get)


def latency_figure(rows, first, step, recorded):
    """Left: time to first token by the prompt. Right: time per token after it. Points and fitted lines.

    rows         {"tokens", "first", "step", "why"} in milliseconds
    first, step  (slope, intercept) of the two lines, in milliseconds
    recorded     a RecordedRun of "numpy"; its steps are drawn, its passes did other work (all logits)
    """
    figure = look.new_figure("prompt (tokens)", "time to first token (ms)")
    note = ", disturbed" if disturbed(rows) else ""
    x = [row["tokens"] for row in rows]
    ends = [0, max(x)]
    for key, (slope, intercept), axes in (
        ("first", first, {}),
        ("step", step, {"xaxis": "x2", "yaxis": "y2"}),
    ):
        points = look.here(x, [round(row[key], 2) for row in rows], name=f"here{note}", unit="ms")
        line = look.here(ends, [round(intercept + slope * n, 3) for n in ends], name="fitted line", unit="ms")
        line.update(mode="lines", line={"width": 1.5, "dash": "dot"})
        for trace in (points.update(mode="markers", marker={"size": 9, "symbol": "circle-open"}), line):
            figure.add_trace(trace.update(showlegend=key == "first", **axes))
    theirs = recorded.results["lengths"], [round(1000 * s, 2) for s in recorded.results["seconds"]["cached"]]
    line = look.published(*theirs, name="recorded run (right)", source=recorded.label, unit="ms")
    figure.add_trace(line.update(xaxis="x2", yaxis="y2"))
    tallest = max(*theirs[1], *(row["step"] for row in rows))
    figure.update_layout(
        xaxis={"domain": [0, 0.43], "range": [0, 1050]},
        # The fitted line may start below zero, which no time can.
        yaxis={"rangemode": "tozero", "zeroline": True, "zerolinecolor": look.INK, "zerolinewidth": 1},
        xaxis2={**look.axis_like(figure, "xaxis"), "domain": [0.57, 1], "anchor": "y2", "range": [0, 1050]},
        yaxis2={**look.axis_like(figure, "yaxis"), "anchor": "x2", "range": [0, round(1.15 * tallest, 3)]},
    )
    figure.layout.xaxis2.title.text = "prompt (tokens)"
    figure.layout.yaxis2.title.text = "time per token (ms)"
    return figure.update_xaxes(tickformat=",")


def latency_text(rows):
    """The sentence under it: how both times grow to the longest prompt, from the shortest and from half."""
    shortest, longest = (end(row["tokens"] for row in rows) for end in (min, max))
    half = longest // 2
    first, step = (
        [_fastest(rows, longest, key) / _fastest(rows, tokens, key) for tokens in (shortest, half)]
        for key in ("first", "step")
    )
    text = (
        f"From {shortest:,} to {longest:,} prompt tokens the time to first token grows {first[0]:.1f} times "
        f"and the time per token {step[0]:.2f} times; from {half:,}, {first[1]:.2f} and {step[1]:.2f} times."
    )
    return text + (f" {disturbed(rows).capitalize()}." if disturbed(rows) else "")


def _fastest(rows, tokens, key):
    return min(row[key] for row in rows if row["tokens"] == tokens)


def residual_figure(tokens, residuals, note=""):
    """How far each point lies from its straight line, in percent of the mean, for several fits.

    tokens     x of the points
    residuals  {name: percents}, two fits
    """
    figure = look.new_figure("tokens already there", "off the straight line (% of the mean)")
    order = sorted(range(len(tokens)), key=lambda i: tokens[i])
    styles = ((look.INK, "circle"), (look.WRONG, "x"))
    for (name, values), (color, symbol) in zip(residuals.items(), styles, strict=True):
        line = look.here(
            [tokens[i] for i in order], [round(values[i], 2) for i in order], name=name + note, color=color
        )
        hover = f"{name}: %{{y:+}} % at %{{x:,}} tokens<extra></extra>"
        figure.add_trace(line.update(marker={"symbol": symbol, "size": 9}, hovertemplate=hover))
    figure.update_yaxes(zeroline=True, zerolinecolor=look.INK, zerolinewidth=1)
    return figure.update_xaxes(tickformat=",")


def residual_text(residuals):
    """The sentence under it: the spread of each fit's residuals."""
    spread = {name: _spread(values) for name, values in residuals.items()}
    said = " and ".join(f"{name} {value:.1f} % of its mean" for name, value in spread.items())
    return f"Off its straight line, root mean square: {said}."


def _spread(values):
    return (sum(value * value for value in values) / len(values)) ** 0.5
