"""Chapter 11, on the GPU: a decode step split into weights, caches and waiting for launches, and the tables.

Nothing here imports PyTorch, runs a model or looks at a clock. One source is quoted, with its hardware: the
batched decode step of "The KV cache and the systems around it" (a blog post), its table and its memory.
"""

from __future__ import annotations

import dataclasses
import math

import plotly.graph_objects as go

from kvcourse import config, measure, sizing
from kvcourse.figures import blog_sweep
from kvcourse.figures import template as look

BLOG_BATCHES, BLOG_MS, BLOG_CONTEXT = blog_sweep.BATCHES, blog_sweep.STEP_MS, blog_sweep.CONTEXT

BLOG_ROWS = 520  # rows that the blog's arrays reserve for each sequence
BLOG_CARD = 6 * 2**30  # bytes of its card
# What the CUDA driver keeps for a process before the first tensor: about 300 MB by a PyTorch maintainer
# (pytorch/pytorch issue 107667, 2023); older releases took more.
CONTEXT_BYTES = 300_000_000

# The launches of the blog's code, counted on the page: so many a layer, and so many before and after.
LAUNCHES_A_LAYER, LAUNCHES_AROUND = 16, 4
FUSED_A_LAYER = 12  # the bias added within the product: four fewer
WAYS = {  # name -> (launches a layer, launches around the layers)
    "one by one": (LAUNCHES_A_LAYER, LAUNCHES_AROUND),
    "bias within the product": (FUSED_A_LAYER, LAUNCHES_AROUND),
    "one graph": (0, 1),
}
MODELS = {"GPT-2 124M": "gpt2", "GPT-2 XL": "gpt2-xl", "Llama 3.1 8B": "llama-3.1-8b"}
DEVICES = {
    "RTX 3060 laptop": "rtx-3060-laptop",
    "RTX 4090": "rtx-4090",
    "L4": "l4",
    "A100 80 GB": "a100-80gb",
    "H100": "h100-sxm",
}
FORMATS = ["float16", "float32"]
CONTEXTS = [128, 256, 512, 1024, 2048, 4096, 8192]
MOST = 512  # sequences of the panel's largest batch
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
MIB, GIB = 2**20, 2**30


def launches(model, way):
    """Launches of one decode step of a model, a key of the catalogue, in a way of WAYS."""
    a_layer, around = WAYS[way]
    return a_layer * config.lookup(model).num_layers + around


def launch_cost():
    """Seconds a launch takes at most by the blog's table: a whole step of one sequence over its launches."""
    return BLOG_MS[0] / 1000 / launches("gpt2", "one by one")


# --- the main panel ------------------------------------------------------------------


def step(batch, context, model, device, dtype, way, cost, share, measured=()):
    """Everything the panel shows: the predicted time of one decode step, split, at many batches.

    batch, context  sequences, and tokens of each in the cache
    model, device   keys of MODELS and DEVICES
    dtype           a format of weights and caches, one of FORMATS
    way             how the step's work is launched, a key of WAYS
    cost            microseconds a launch
    share           percent of the published bandwidth that reading reaches
    measured        lines of `measured_line`; those of this model and context are shown
    """
    shape = config.lookup(MODELS[model])
    card = sizing.device(DEVICES[device])
    slower = dataclasses.replace(card, bandwidth=card.bandwidth * share / 100)
    count = launches(MODELS[model], way)

    def at(sequences):
        took = sizing.step_time(
            shape, slower, context, sequences, dtype, dtype, launch_seconds=count * cost / 1e6
        )
        return _parts(took)

    every = {sequences: at(sequences) for sequences in sorted({*BATCHES, batch})}
    held = sizing.weight_bytes(shape, dtype) + batch * sizing.kv_bytes(shape, context + 1, dtype)
    return {
        "batch": batch,
        "context": context,
        "model": model,
        "device": device,
        "dtype": dtype,
        "way": way,
        "launches": count,
        "cost": cost,
        "share": share,
        "every": every,
        "bound_below": _first_free(at),
        "held": held,
        "memory": card.memory_bytes,
        "max_seq_len": shape.max_seq_len,
        "measured": [
            line
            for line in measured
            if (line["model"], line["context"]) == (model, context)
            and line.get("device", device) == device
            and line.get("dtype", dtype) == dtype
        ],
    }


def _parts(took):
    """A PassTime as milliseconds that add up to its total: beside the bytes, what is left to wait."""
    compute = took.compute or 0.0
    arithmetic = max(0.0, compute - took.memory)
    waiting = max(0.0, took.launches - max(took.memory, compute))
    parts = {"weights": took.weights, "caches": took.caches, "arithmetic": arithmetic, "waiting": waiting}
    return {name: part * 1000 for name, part in parts.items()} | {
        "total": took.total * 1000,
        "launches": took.launches * 1000,
        "bound": took.bound,
    }


def _first_free(at, most=1 << 16):
    """The first batch whose step does not wait for launches, or None up to `most`. A step grows with it."""
    if at(most)["bound"] == "launches":
        return None
    low, high = 0, most  # `low` waits (or is 0), `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle)["bound"] == "launches" else (low, middle)
    return high


PARTS = (  # key, name, color, pattern
    ("weights", "reading weights", look.WEIGHTS, ""),
    ("caches", "reading and writing caches", look.CACHES, look.HATCH),
    ("arithmetic", "arithmetic beyond that", look.ARITHMETIC, "."),
    ("waiting", "waiting for launches", look.WRONG, look.CROSS_HATCH),
)


def step_figure(data):
    """Left: what a step's time goes to, in percent, batch by batch. Right: its time, and measured ones."""
    figure = look.new_figure("sequences in the batch", "of the step’s time (%)", height=420)
    for key, name, color, pattern in PARTS:
        figure.add_trace(_bar(data, key, name, color, pattern))
    batches = sorted(data["every"])
    totals = [round(data["every"][b]["total"], 4) for b in batches]
    for trace in (
        look.here(batches, totals, name="predicted step", unit="ms").update(mode="lines"),
        _launch_line(data, batches),
        _chosen(data),
        *(_measured(line) for line in data["measured"]),
    ):
        figure.add_trace(trace.update(xaxis="x2", yaxis="y2"))
    launching = data["every"][data["batch"]]["launches"]
    shown = [*totals, launching, *(ms for line in data["measured"] for ms in line["ms"])]
    low, high = min(shown) / 1.6, max(shown) * 1.6
    figure.update_layout(
        barmode="stack",
        legend={"traceorder": "normal"},  # plotly would turn it round for stacked bars
        bargap=0.25,
        xaxis={"domain": [0, 0.44], "type": "category"},
        yaxis={"range": [0, 102], "dtick": 25},
        xaxis2={
            **look.axis_like(figure, "xaxis"),
            "domain": [0.57, 1],
            "anchor": "y2",
            "type": "log",
            "tickvals": BATCHES[::2],
            "ticktext": [str(b) for b in BATCHES[::2]],
            "range": [-0.1, 2.8],
        },
        yaxis2={
            **look.axis_like(figure, "yaxis"),
            "anchor": "x2",
            "type": "log",
            "range": _decades(low, high),
        },
    )
    figure.layout.yaxis2.update(_log_ticks(low, high))
    figure.layout.xaxis2.title.text = "sequences in the batch, log scale"
    figure.layout.yaxis2.title.text = "time of one step (ms), log scale"
    return figure


def _bar(data, key, name, color, pattern):
    """One part at the panel's batches; the chosen batch outlined."""
    shown = [*BATCHES] if data["batch"] in BATCHES else sorted({*BATCHES, data["batch"]})
    parts = [data["every"][b] for b in shown]
    chosen = [3 if b == data["batch"] else 0 for b in shown]
    return go.Bar(
        x=[str(b) for b in shown],
        y=[round(100 * part[key] / part["total"], 2) for part in parts],
        name=name,
        marker={
            "color": color,
            "line": {"color": look.INK, "width": chosen},
            # Overlay keeps the bar's color under the pattern; white lines are seen on it in both themes.
            "pattern": {
                "shape": pattern,
                "fillmode": "overlay",
                "fgcolor": "rgba(255,255,255,0.7)",
                "size": 7,
            },
        },
        text=[f"batch {b}: {name} {part[key]:,.2f} ms" for b, part in zip(shown, parts, strict=True)],
        textposition="none",
        hovertemplate="%{text}<extra></extra>",
    )


def _launch_line(data, batches):
    launching = round(next(iter(data["every"].values()))["launches"], 4)
    return go.Scatter(
        x=[batches[0], batches[-1]],
        y=[launching] * 2,
        name="launches alone",
        mode="lines",
        line={"color": look.WRONG, "width": 2, "dash": "dashdot"},
        hovertemplate=f"{data['launches']} launches: %{{y:,}} ms<extra></extra>",
    )


def _chosen(data):
    one = data["every"][data["batch"]]
    return go.Scatter(
        x=[data["batch"]],
        y=[round(one["total"], 4)],
        name="this batch",
        mode="markers",
        showlegend=False,
        marker={"symbol": "circle-open", "size": 15, "color": look.INK, "line": {"width": 3}},
        hovertemplate="batch %{x}: predicted %{y:,} ms<extra></extra>",
    )


def _measured(line):
    x, y = line["batch"], [round(ms, 3) for ms in line["ms"]]
    if line["kind"] == "published":
        return look.published(x, y, name=line["name"], source=line["label"], unit="ms")
    drawn = look.here(x, y, name=line["name"], unit="ms")
    symbol = "square" if line["kind"] == "recorded" else "diamond"
    hover = f"{line['name']}: %{{y:,}} ms at %{{x}}<br>{look.plain(line['label'])}<extra></extra>"
    return drawn.update(line={"dash": "dot", "width": 1.5}, marker={"symbol": symbol}, hovertemplate=hover)


def _decades(low, high):
    return [round(math.log10(low), 4), round(math.log10(high), 4)]


def _log_ticks(low, high):
    """Ticks at 1, 2, 5, 10 …: within one or two decades, whole decades alone would label too little."""
    values = [digit * 10.0**power for power in range(-4, 6) for digit in (1, 2, 5)]
    kept = [value for value in values if low <= value <= high]
    if len(kept) > 8:
        kept = [value for value in kept if f"{value:g}".strip("0.").startswith("1")]
    return {"tickvals": kept, "ticktext": [f"{value:,g}" for value in kept]}


def step_text(data):
    """The sentence under the panel: the parts of the chosen step, and where it stops waiting for launches."""
    one, batch = data["every"][data["batch"]], data["batch"]
    who = f"{batch:,} sequence{'s' * (batch > 1)} of {data['context']:,} tokens"
    parts = [f"weights {one['weights']:.2f} ms", f"caches {one['caches']:.2f} ms"]
    if one["arithmetic"]:
        parts.append(f"arithmetic beyond that {one['arithmetic']:.2f} ms")
    named = f"{data['launches']} launch{'es' * (data['launches'] > 1)}"
    parts.append(f"waiting for {named} {one['waiting']:.2f} ms")
    speed = f"{one['total']:.2f} ms a step, {batch / one['total'] * 1000:,.0f} tokens/s"
    return (
        f"{data['model']} in {data['dtype']} on the {data['device']}, {who}: {', '.join(parts)}; together "
        f"{speed}. {_bound_words(data)}{_table_words(data)}{_limits(data)}"
    )


def _bound_words(data):
    first = data["bound_below"]
    if first is None:
        return "It is launch bound at every batch."
    if first == 1:
        return "It is launch bound at no batch."
    return f"It is launch bound up to a batch of {first - 1:,}."


def _table_words(data):
    """The blog's own figure, where its table has this step."""
    if data["way"] == "one by one" and blog_line() in data["measured"] and data["batch"] in BLOG_BATCHES:
        return f" The blog measured {BLOG_MS[BLOG_BATCHES.index(data['batch'])]} ms."
    return ""


def _limits(data):
    """What the arithmetic ignores: the positions the model has, and the memory of the card."""
    notes = ""
    if data["context"] + 1 > data["max_seq_len"]:
        notes += f" The model has {data['max_seq_len']:,} positions: beyond them this is arithmetic only."
    if data["held"] > data["memory"]:
        held, there = (f"{data[key] / GIB:.1f} GiB" for key in ("held", "memory"))
        notes += f" It does not fit: {held} on a card of {there}."
    return notes


# --- measured lines ---------------------------------------------------------------------


def measured_line(kind, name, label, context, batches, ms, model="GPT-2 124M", **only):
    """A measured sweep for the panel: milliseconds of one step by batch.

    kind   "here", "recorded" or "published"
    name   its entry in the legend; `label` says in the hover what it was measured on
    only   device=…, dtype=…: shown only where the panel stands on these
    """
    sweep = {"context": context, "batch": list(batches), "ms": list(ms), "model": model}
    return {"kind": kind, "name": name, "label": label, **sweep, **only}


def blog_line():
    """The blog's table, shown on its card and in its precision."""
    return measured_line(
        "published",
        "blog",
        blog_sweep.SOURCE,
        BLOG_CONTEXT,
        BLOG_BATCHES,
        BLOG_MS,
        device="RTX 3060 laptop",
        dtype="float16",
    )


def recorded_lines(runs):
    """Lines for the panel from runs of `kvcourse bench torch`: one for each format, length and way."""
    lines = []
    for run in runs:
        points = run.results["points"]
        for dtype, context, mode in dict.fromkeys((p["dtype"], p["context"], p["mode"]) for p in points):
            found = [p for p in points if (p["dtype"], p["context"], p["mode"]) == (dtype, context, mode)]
            lines.append(
                measured_line(
                    "recorded",
                    f"recorded: {run.results['device']}, {mode}",
                    recorded_label(run),
                    context,
                    [p["batch"] for p in found],
                    [p["seconds"] * 1000 for p in found],
                    dtype=dtype,
                )
            )
    return lines


def recorded_label(run):
    """What a recorded run was measured on: the device itself, GPU or processor, and the day."""
    return f"recorded {run.date}: {run.results['device']}"


def recorded_table(runs):
    """The first length of every recorded run, as text; and, where no GPU has run yet, how to record one."""
    lines = []
    for run in runs:
        points, context = run.results["points"], run.results["contexts"][0]
        for dtype in run.results["dtypes"]:
            for mode in ("eager", "graph"):
                found = [p for p in points if (p["dtype"], p["context"], p["mode"]) == (dtype, context, mode)]
                steps = ", ".join(f"{p['batch']}: {p['seconds'] * 1000:.2f} ms" for p in found)
                if steps:
                    lines.append(f"{recorded_label(run)}, {dtype}, {context} tokens each, {mode}: {steps}")
    if not any("gpu" in run.machine for run in runs):
        lines.append("no recorded run of a GPU yet: `kvcourse bench torch --out` writes one")
    return "\n".join(lines)


# --- tables ----------------------------------------------------------------------------


def blog_table():
    """The blog's steps beside the time that their bytes take at the card's bandwidth, as text."""
    shape, card = config.lookup("gpt2"), sizing.device("rtx-3060-laptop")
    lines = [f"{'sequences':>9}{'bytes alone':>13}{'blog':>9}{'blog ÷ bytes':>14}"]
    for batch, ms in zip(BLOG_BATCHES, BLOG_MS, strict=True):
        floor = sizing.step_time(shape, card, BLOG_CONTEXT, batch).memory * 1000
        lines.append(f"{batch:>9}{floor:>10.2f} ms{ms:>6.1f} ms{ms / floor:>14.1f}")
    return "\n".join(lines)


def blog_growth(low, high):
    """From one batch of the blog's table to another: how many times the bytes of a step, and its time."""
    shape, card = config.lookup("gpt2"), sizing.device("rtx-3060-laptop")
    few, many = (sizing.step_time(shape, card, BLOG_CONTEXT, batch).memory for batch in (low, high))
    ms = dict(zip(BLOG_BATCHES, BLOG_MS, strict=True))
    return many / few, ms[high] / ms[low]


def device_table(model="gpt2"):
    """Reading a model's weights once in 16 bits, beside its launches at the blog's cost, as text."""
    weight_bytes = sizing.weight_bytes(config.lookup(model))
    lines = [f"{'':>16}{'weights':>11}{'launches':>11}{'longer':>10}"]
    for name, key in DEVICES.items():
        weights, launching = _weights_and_launches(name, model)
        longer = "launches" if launching > weights else "weights"
        texts = (measure.format_seconds(value) for value in (weights, launching))
        note = "   does not fit" * (weight_bytes > sizing.device(key).memory_bytes)
        lines.append(f"{name:>16}" + "".join(f"{text:>11}" for text in texts) + f"{longer:>10}{note}")
    return "\n".join(lines)


def longer_of_both(device, model="gpt2"):
    """Seconds of reading the weights once or of the launches, whichever is longer in device_table."""
    return max(_weights_and_launches(device, model))


def _weights_and_launches(device, model):
    launching = launches(model, "one by one") * launch_cost()
    took = sizing.step_time(config.lookup(model), sizing.device(DEVICES[device]), 0, launch_seconds=launching)
    return took.weights, took.launches


def sweep_table(rows):
    """Steps measured here, as text: rows {"batch", "ms", "why"}; `why` as of kvcourse.measure."""
    lines = [f"{'sequences':>9}{'one step':>12}{'per sequence':>14}"]
    for row in rows:
        note = "   disturbed" * bool(row["why"])
        lines.append(f"{row['batch']:>9}{row['ms']:>9.1f} ms{row['ms'] / row['batch']:>11.1f} ms{note}")
    lines += [f"disturbed at {row['batch']}, do not quote: {row['why']}" for row in rows if row["why"]]
    return "\n".join(lines)
