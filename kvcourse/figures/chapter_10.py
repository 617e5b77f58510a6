"""Chapter 10, batched decode: what a batch reads, computes and pads, a published sweep, and the figures.

Nothing here runs a model or looks at a clock. One source is quoted, with its hardware: the table of batch
sizes in "The KV cache and the systems around it" (a blog post).
"""

from __future__ import annotations

import plotly.graph_objects as go

from kvcourse import config, measure, sizing
from kvcourse.figures import blog_sweep
from kvcourse.figures import template as look

BLOG_BATCHES, BLOG_MS = blog_sweep.BATCHES, blog_sweep.STEP_MS
BLOG_TOKENS_S, BLOG_KV_MIB = blog_sweep.TOKENS_S, blog_sweep.KV_MIB
CONTEXT = blog_sweep.CONTEXT  # tokens each sequence holds, in the sweep on this machine too

BATCHES = [1, 2, 4, 8, 16, 32]  # of the sweep on this machine
GPT2 = config.lookup("gpt2")

MODELS = {
    "Llama 3.1 8B": "llama-3.1-8b",
    "GPT-2 124M": "gpt2",
    "Qwen2.5 3B": "qwen2.5-3b",
    "Llama 2 7B": "llama-2-7b",
}
DEVICES = {
    "H100 (80 GB)": "h100-sxm",
    "L4 (24 GB)": "l4",
    "RTX 4090 (24 GB)": "rtx-4090",
    "RTX 3060 Laptop (6 GB)": "rtx-3060-laptop",
}
MOST_USERS = 256  # the largest batch of the panel

PALE = f"rgba(0, 114, 178, {look.CACHED_OPACITY})"  # a key that is there already
AXIS = {"showgrid": False, "ticks": "", "dtick": 1, "linewidth": 1}
# Gray on the bare page, so that it is seen in both themes.
HATCHED = {"shape": look.HATCH, "fgcolor": look.MASKED, "bgcolor": "rgba(0,0,0,0)", "solidity": 0.15}
CELL = 0.9  # height of a cell; plotly's own depends on which rows a kind of cell occurs in


# --- one pass over several texts -------------------------------------------------------


def mask_figure(names, lengths):
    """Who sees whom when prompts of these lengths lie end to end: one triangle for each text."""
    figure = look.new_figure("row of the key in the pass", "row of the query", grid=False)
    owner = [text for text, n in enumerate(lengths) for _ in range(n)]
    seen, never = [], []
    for query, text in enumerate(owner):
        for key, other in enumerate(owner):
            if key <= query:
                (seen if text == other else never).append((key, query))
    for places, name, marker in (
        (seen, "same text, seen", {"color": look.KEY}),
        (never, "another text, never computed", {"color": look.MASKED, "pattern": HATCHED}),
    ):
        hover = [
            f"query: {names[owner[y]]}, position {_place(owner, y)}<br>"
            f"key: {names[owner[x]]}, position {_place(owner, x)}<br>{name}"
            for x, y in places
        ]
        bars = look.cells(
            [x for x, _ in places],
            [y for _, y in places],
            name=name,
            hovertext=hover,
            width=CELL,
            marker=marker,
        )
        figure.add_trace(bars)
    ends = [-0.6, len(owner) - 0.4]
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(**AXIS, range=ends)
    return figure.update_yaxes(**AXIS, range=ends[::-1])


def _place(owner, row):
    return row - owner.index(owner[row])


def mask_text(lengths):
    """The sentence under it."""
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    total = sum(lengths)
    return (
        f"{len(lengths)} triangles of {_listed(lengths)} rows: {pairs} pairs are seen. As one text, "
        f"{total} rows would have {total * (total + 1) // 2}, and {total * total} without a mask."
    )


def _listed(numbers):
    words = [f"{n:,}" for n in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def rectangle_figure(names, lengths, new):
    """The rectangle after `new` decode steps: a row for each text, its position written into each cell."""
    figure = look.new_figure("column", "", height=60 + 70 + 55 * len(names), grid=False)
    widest = max(lengths)
    groups = {"prompt": [], "new": [], "padding": []}
    for row, n in enumerate(lengths):
        padding = widest - n
        for column in range(widest + new):
            kind = "padding" if column < padding else "prompt" if column < widest else "new"
            groups[kind].append((column, row, max(column - padding, 0)))
    for kind, name, marker, ink in (
        ("prompt", "token of the prompt", {"color": PALE}, look.INK),
        ("new", "token of a later step", {"color": look.KEY}, "#ffffff"),
        ("padding", "padding, masked", {"color": look.MASKED, "pattern": HATCHED}, look.INK),
    ):
        cells = groups[kind]
        hover = [
            f"{names[row]}, column {column}: " + (name if kind == "padding" else f"position {position}")
            for column, row, position in cells
        ]
        bars = look.cells(
            [column for column, _, _ in cells],
            [row for _, row, _ in cells],
            name=name,
            hovertext=hover,
            text=["" if kind == "padding" else str(position) for _, _, position in cells],
            width=CELL,
            marker=marker,
            textfont={"color": ink, "size": look.TEXT_SIZE},
        )
        figure.add_trace(bars)
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(**AXIS, range=[-0.6, widest + new - 0.4])
    labels = [look.plain(name) for name in names]
    figure.update_yaxes(**AXIS, range=[len(names) - 0.5, -0.5])
    return figure.update_yaxes(tickvals=list(range(len(names))), ticktext=labels)


def rectangle_text(lengths):
    """The sentence under it: the positions in the first column of decode."""
    widest = max(lengths)
    padding = sum(widest - n for n in lengths)
    return (
        f"{widest * len(lengths)} cells in prefill, {padding} of them padding. Column {widest}, the first of "
        f"decode, holds positions {_listed(lengths)}, a token of each."
    )


# --- the sweep ---------------------------------------------------------------------------


def blog_floor_ms(batch, tokens=CONTEXT):
    """Milliseconds that the bytes of a step of the blog's table take at least, on its card."""
    card = sizing.device(blog_sweep.DEVICE)
    return sizing.step_time(GPT2, card, tokens, batch).memory * 1000


def sweep_rows(timed):
    """Rows for the table and the figure.

    timed  {batch: {"step", "weights", "caches": Timing}}: a whole step, its products with weights alone,
           its products with keys and values alone; batch 1 is among them

    The bandwidth of the floor is that of the weights at batch 1, since a product of one row reads each weight
    once and does next to nothing else, or that of a whole step where one was faster. Everything in float32.
    """
    traffic = {
        batch: sizing.pass_bytes(GPT2, 1, CONTEXT, batch=batch, dtype="float32", weights_dtype="float32")
        for batch in timed
    }
    # No step may undercut its own floor, in whatever quiet moment it ran.
    steps = [traffic[batch].total / found["step"].min for batch, found in timed.items()]
    bandwidth = max(traffic[1].weights / timed[1]["weights"].min, *steps)  # bytes a second
    rows = []
    for batch, found in timed.items():
        ms = {name: timing.min * 1000 for name, timing in found.items()}
        rows.append(
            {
                "batch": batch,
                **ms,
                "bytes": traffic[batch].total,
                "floor": traffic[batch].total / bandwidth * 1000,
                "rate": batch / ms["step"] * 1000,
                "why": next((t.why for t in found.values() if t.why), ""),
            }
        )
    return rows, bandwidth


def sweep_table(rows, bandwidth):
    """This machine's sweep as text: the floor by bytes, the replayed products, the step, tokens a second."""
    lines = [
        f"{'':>9}{'floor: bytes':>22}{'replayed products (ms)':>32}{'step':>10}{'step ÷':>9}"
        f"{'tokens a second':>20}",
        f"{'sequences':>9}{'÷ %.0f GB/s' % (bandwidth / 1e9):>22}{'weights':>12}{'caches':>10}{'sum':>10}"
        f"{'(ms)':>10}{'floor':>9}{'each':>10}{'all':>10}",
    ]
    for row in rows:
        floor = f"{row['bytes'] / 1e6:,.0f} MB {row['floor']:7.1f} ms"
        products = f"{row['weights']:12.1f}{row['caches']:10.1f}{row['weights'] + row['caches']:10.1f}"
        lines.append(
            f"{row['batch']:>9}{floor:>22}{products}{row['step']:10.1f}{row['step'] / row['floor']:9.1f}"
            f"{row['rate'] / row['batch']:10.1f}{row['rate']:10.0f}" + "   disturbed" * bool(row["why"])
        )
    for row in rows:
        if row["why"]:
            lines.append(f"disturbed at {row['batch']}, do not quote: {row['why']}")
    return "\n".join(lines)


def disturbed(rows):
    """Empty, or one line on how many sizes of the sweep were disturbed, and how the first."""
    return measure.disturbed_line([(str(row["batch"]), row["why"]) for row in rows], "sizes")


def sweep_figure(rows):
    """Left: time of a step against the batch. Right: tokens a second of all. Both with the blog's."""
    figure = look.new_figure("sequences", "time of a step (ms)", log_x=True, log_y=True)
    batches = [row["batch"] for row in rows]
    floors = [round(blog_floor_ms(batch), 3) for batch in BLOG_BATCHES]
    blog = dict(name="blog, RTX 3060, float16", source=blog_sweep.SOURCE)
    pairs = (
        (look.here(batches, _rounded(rows, "step"), name="here, float32", unit="ms"), False),
        (_floor(batches, _rounded(rows, "floor"), "floor by bytes, here", look.INK), False),
        (look.published(BLOG_BATCHES, BLOG_MS, unit="ms", **blog), False),
        (_floor(BLOG_BATCHES, floors, "floor by bytes, 336 GB/s", look.PUBLISHED), False),
        (look.here(batches, _rounded(rows, "rate"), name="here, float32", unit="tokens/s"), True),
        (look.published(BLOG_BATCHES, BLOG_TOKENS_S, unit="tokens/s", **blog), True),
    )
    for trace, right in pairs:
        if right:
            trace.update(xaxis="x2", yaxis="y2", showlegend=False)
        figure.add_trace(trace)
    axis = {**figure.layout.template.layout.xaxis.to_plotly_json(), "type": "log", "dtick": 1}
    figure.update_layout(
        xaxis={"domain": [0, 0.44]},
        xaxis2={**axis, "domain": [0.57, 1], "anchor": "y2"},
        yaxis2={**axis, "anchor": "x2"},
    )
    figure.layout.xaxis2.title.text = "sequences, log scale"
    figure.layout.yaxis2.title.text = "tokens a second, all, log scale"
    for axis in (figure.layout.xaxis, figure.layout.xaxis2):
        axis.tickvals, axis.range = [1, 8, 32, 256], [-0.1, 2.55]
    return figure


def _rounded(rows, key):
    return [round(row[key], 2) for row in rows]


def _floor(x, y, name, color):
    return go.Scatter(
        x=list(x),
        y=list(y),
        name=name,
        mode="lines",
        line={"color": color, "width": 1.5, "dash": "dot"},
        hovertemplate=name + ": %{y:,} ms at %{x} sequences<extra></extra>",
    )


def sweep_text(rows):
    """The sentence under it."""
    first, last = rows[0], rows[-1]
    times, rates = ([row / column[0] for row in column] for column in (BLOG_MS, BLOG_TOKENS_S))
    text = (
        f"Here {last['batch']} sequences take {last['step'] / first['step']:.1f} times as long as one and "
        f"give {last['rate'] / first['rate']:.1f} times the tokens; the blog's 32 take {times[2]:.1f} times "
        f"as long for {rates[2]:.1f} times the tokens, its 256 take {times[-1]:.1f} times "
        f"as long for {rates[-1]:.1f} times as many."
    )
    return text + (f" {disturbed(rows).capitalize()}." if disturbed(rows) else "")


# --- the main panel ------------------------------------------------------------------------


def users(batch, context, model, device):
    """A decode step of `batch` sequences with `context` tokens each, everything in 16 bits.

    model, device  keys of MODELS and DEVICES

    `steps` holds, for 1 … MOST_USERS sequences, milliseconds of reading weights, of reading caches, and
    of arithmetic, each at the published peak; `room` how many sequences fit beside the weights.
    """
    shape, card = config.lookup(MODELS[model]), sizing.device(DEVICES[device])
    least = [sizing.step_time(shape, card, context, n) for n in range(1, MOST_USERS + 1)]
    try:
        free = sizing.free_after_weights(shape, card.memory_bytes)
        room = sizing.requests_that_fit(shape, free, context + 1)
    except ValueError:  # the weights alone are too large
        room = 0
    return {
        "batch": batch,
        "context": context,
        "model": model,
        "device": device,
        "weights": [step.weights * 1000 for step in least],
        "caches": [step.caches * 1000 for step in least],
        "compute": [(step.compute or 0) * 1000 for step in least],
        "total": [step.total * 1000 for step in least],
        "room": room,
        "limit": shape.max_seq_len,
    }


def users_figure(data):
    """Left: milliseconds of a step, weights and caches stacked. Right: tokens a second of all."""
    figure = look.new_figure("sequences", "a step takes at least (ms)")
    batches = [1, *range(2, MOST_USERS + 1, 2)]
    weights, caches, total = ([data[key][n - 1] for n in batches] for key in ("weights", "caches", "total"))
    memory = [a + b for a, b in zip(weights, caches, strict=True)]
    hover = "%{y} ms for %{x} sequences<extra></extra>"
    for y, name, color, fill, shape in (
        (weights, "reading weights", look.WEIGHTS, "tozeroy", ""),
        (memory, "reading caches", look.CACHES, "tonexty", look.HATCH),
    ):
        figure.add_trace(
            go.Scatter(
                x=batches,
                y=_digits(y),
                name=name,
                mode="lines",
                fill=fill,
                line={"color": color, "width": 2},
                fillpattern={"shape": shape, "fgcolor": color, "solidity": 0.25},
                hovertemplate=name + " (and what lies below): " + hover,
            )
        )
    arithmetic = [data["compute"][n - 1] for n in batches]
    line = _floor(batches, _digits(arithmetic), "arithmetic, at the same time", look.ARITHMETIC)
    figure.add_trace(line.update(line_width=3.5))  # it has to be seen on the blue of the weights
    rates = [n / ms * 1000 for n, ms in zip(batches, total, strict=True)]
    figure.add_trace(
        look.here(batches, _digits(rates), name="tokens a second", unit="tokens/s").update(
            mode="lines", xaxis="x2", yaxis="y2", showlegend=False
        )
    )
    _mark_chosen(figure, data)
    axis = figure.layout.template.layout.xaxis.to_plotly_json()
    figure.update_layout(
        xaxis={"domain": [0, 0.44], "range": [0, MOST_USERS]},
        xaxis2={**axis, "domain": [0.57, 1], "anchor": "y2", "range": [0, MOST_USERS]},
        yaxis2={**axis, "anchor": "x2", "rangemode": "tozero", "tickformat": ","},
        yaxis={"rangemode": "tozero"},
        legend={"traceorder": "normal"},
    )
    figure.layout.xaxis2.title.text = "sequences"
    figure.layout.yaxis2.title.text = "tokens a second, all together"
    return figure.update_xaxes(dtick=64)


def _mark_chosen(figure, data):
    """A ring at the chosen batch in both halves, and a hatched part where memory ends."""
    batch = data["batch"]
    ms = data["total"][batch - 1]
    for x, y, more in (
        (batch, ms, {}),
        (batch, batch / ms * 1000, {"xaxis": "x2", "yaxis": "y2", "showlegend": False}),
    ):
        figure.add_trace(
            go.Scatter(
                x=[x],
                y=_digits([y]),
                name="chosen",
                mode="markers",
                hovertemplate="chosen<extra></extra>",
                marker={"size": 12, "color": look.PAPER, "line": {"color": look.INK, "width": 3}},
                **more,
            )
        )
    room, tops = data["room"], (max(data["total"]), max(n / t * 1000 for n, t in enumerate(data["total"], 1)))
    x = [min(room, MOST_USERS), MOST_USERS]
    for top, more in zip(tops, ({}, {"xaxis": "x2", "yaxis": "y2", "showlegend": False}), strict=True):
        figure.add_trace(
            go.Scatter(
                x=x,
                y=_digits([top, top]),
                name="does not fit",
                mode="lines",
                fill="tozeroy",
                line={"width": 0, "color": look.WRONG},
                fillcolor="rgba(213,94,0,0.10)",
                hoverinfo="skip",
                fillpattern={
                    "shape": look.CROSS_HATCH,
                    "fgcolor": look.WRONG,
                    "fgopacity": 0.5,
                    "solidity": 0.1,
                    "fillmode": "overlay",
                },
                **more,
            )
        )


def _digits(values):
    return [float(f"{value:.4g}") for value in values]


def users_text(data):
    """The sentence under the panel."""
    batch = data["batch"]
    weights, caches, compute, total = (
        data[key][batch - 1] for key in ("weights", "caches", "compute", "total")
    )
    name = f"{data['model']} on {data['device']}, {batch} sequence{'s' * (batch > 1)} "
    name += f"of {data['context']:,} tokens"
    if data["context"] >= data["limit"]:
        return f"{name}: the model has {data['limit']:,} positions, and the next token would need one more."
    split = f"{weights:.2f} for the weights and {caches:.2f} for the caches"
    if compute > weights + caches:
        split += f", but {compute:.2f} for the arithmetic"
    speed = f"{1000 / total:,.0f} tokens a second for each, {batch / total * 1000:,.0f} for all"
    room = data["room"]
    fits = ("" if batch <= room else "It does not fit: ") + f"there is room for {room:,}."
    fits = fits[0].upper() + fits[1:]
    return f"{name}: a step takes at least {total:.2f} ms, {split}; so at most {speed}. {fits}"


def largest_batch(data, limit_ms):
    """The largest batch of the panel whose step takes at most `limit_ms` and that fits; 0 if none does."""
    within = [n for n, ms in enumerate(data["total"], 1) if ms <= limit_ms and n <= data["room"]]
    return max(within, default=0)
