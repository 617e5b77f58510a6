"""Chapter 15, forgetting: the recorded run as plain data, who may see whom, and the figures.

Nothing here runs a model or looks at a clock. "Rows" are the keys that a token sees, sinks included: a cache
of `rows` rows with `sinks` sinks has a window of rows − sinks.
"""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go

from kvcourse.figures import template as look

SINKS = [0, 1, 2, 4, 8]
ROWS = [64, 128, 256]
ROW_BYTES = 46_080  # SmolLM2, one token in all layers: 2 · 30 · 3 · 64 numbers of float32
SMOOTH = 128  # tokens over which a curve along the text is averaged
EVERY = 16  # tokens from one point of a curve to the next
BIN = 16  # positions in a cell of the attention map
FROM = 256  # queries from here on are counted: every window of ROWS is full by then

STREAMS = ("4 sinks, 252 window", "full")  # runs of the section `stream`
SHOWN = {  # runs of the other sections -> the name shown
    "full": "all keys",
    "float16": "all keys (in float16)",
    "4 sinks, 252 window": "4 sinks, 252 newest",
    "128 heavy, 128 recent": "128 heavy, 128 newest",
    "4 sinks, 124 window": "4 sinks, 124 newest",
    "64 heavy, 64 recent": "64 heavy, 64 newest",
}
HEAVY = [name for name in SHOWN if name != "float16"]  # of the section `heavy_hitters`, in this order
NEEDLES = ["float16", "4 sinks, 252 window", "128 heavy, 128 recent"]  # of the section `needles`
DEPTHS = (0.1, 0.5, 0.9)

# Somebody else's: Xiao et al. 2023 (StreamingLLM), table 2, Llama-2-7B, PG19: sinks -> perplexity.
PAPER_SINKS = {0: 3359.95, 1: 11.88, 2: 10.51, 4: 9.59, 8: 9.54}

PALE = f"rgba(0, 114, 178, {look.CACHED_OPACITY})"  # a key that is there already
SHARES = [[0, "rgba(0, 114, 178, 0.12)"], [1, look.KEY]]  # from paler on than other maps: 1 % is not 20 %
CROSSED = {"shape": look.CROSS_HATCH, "fgcolor": look.WRONG, "bgcolor": "rgba(0,0,0,0)", "solidity": 0.2}


def perplexity(log_probs):
    """exp(−mean) of a list of ln p."""
    return math.exp(-sum(log_probs) / len(log_probs))


def two_digits(number):
    """A number of at least 10 as a whole number with two digits that are not 0: 2,305 → 2,300."""
    unit = 10 ** (math.floor(math.log10(number)) - 1)
    return round(number / unit) * unit


def whole(perplexity):
    """A perplexity that was computed just now: whole below 100, two digits from there on.

    Processors differ by a hundred-thousandth, so more digits would be theirs.
    """
    return f"{perplexity:.0f}" if perplexity < 100 else f"{two_digits(perplexity):,}"


def short(perplexity):
    """A perplexity of the recorded run: one decimal below 100, whole from there on."""
    return f"{perplexity:.1f}" if perplexity < 100 else f"{perplexity:,.0f}"


# --- the recorded run --------------------------------------------------------------------------


def windows(results):
    """{"full" or (rows, sinks): list of ln p} of the section `windows` of a recorded run."""
    runs = results["windows"]["runs"].values()
    return {(run["rows"], run["sinks"]) if run["rows"] else "full": run["log_probs"] for run in runs}


def sinks_table(recorded, start=FROM):
    """Perplexity of the tokens from `start` on, by rows and by sinks among them, as text."""

    def of(key):
        return short(perplexity(recorded[key][start - 1 :]))

    last = len(recorded["full"])
    lines = [f"tokens {start} … {last:,}; all keys: {of('full')}", f"{'rows':>6}{'first tokens: 0':>18}"]
    lines[1] += "".join(f"{sinks:>8}" for sinks in SINKS[1:])
    for rows in sorted(ROWS, reverse=True):
        lines.append(f"{rows:>6}{of((rows, 0)):>18}" + "".join(f"{of((rows, s)):>8}" for s in SINKS[1:]))
    return "\n".join(lines)


def stream_table(stream):
    """Memory, the time of a step and perplexity of each thousand tokens, for both caches, as text."""
    lines = [
        f"{'':>8}{SHOWN[STREAMS[0]]:>32}{'all keys':>32}",
        f"{'':>8}" + f"{'perplexity of':>32}" * 2,
        f"{'tokens':>8}" + f"{'MiB':>10}{'a step':>10}{'the last 1k':>12}" * 2,
    ]
    runs = [stream["runs"][name] for name in STREAMS]
    before = 0
    for number, part in enumerate(runs[0]["thousands"]):
        line = f"{part['tokens']:>8,}"
        for run in runs:
            if number < len(run["thousands"]):
                row = run["thousands"][number]
                found = perplexity(run["log_probs"][before : row["tokens"]])
                line += f"{row['nbytes_used'] / 2**20:>10.1f}{row['step'] * 1000:>7.1f} ms{found:>12.1f}"
        lines.append(line)
        before = part["tokens"]
    reserved = runs[0]["thousands"][-1]["nbytes"] / 2**20
    lines.append(f"reserved for {SHOWN[STREAMS[0]]}, with the slack: {reserved:.1f} MiB")
    disturbed = [row["why"] for run in runs for row in run["thousands"] if row["why"]]
    return "\n".join(lines + [f"disturbed, do not quote the times: {why}" for why in disturbed[:1]])


def step_growth(stream, name):
    """How many times longer a step takes after the last thousand tokens than after the first."""
    thousands = stream["runs"][name]["thousands"]
    return thousands[-1]["step"] / thousands[0]["step"]


def heavy_table(section):
    """Perplexity with equal rows: sinks and window, heavy hitters and newest, all keys; as text."""
    lines = [f"{'':>22}{'rows':>6}{'perplexity':>12}"]
    for name in HEAVY:
        run = section["runs"][name]
        rows = "all" if name == "full" else str(run["rows"])
        lines.append(f"{SHOWN[name]:>22}{rows:>6}{perplexity(run['log_probs']):>12.1f}")
    return "\n".join(lines)


def needle_table(section):
    """Needles found by cache, length and depth, as text."""
    runs = section["runs"].values()
    lengths = sorted({run["length"] for run in runs})
    lines = [f"{'tokens':>8}  {'':<24}{'at 10 %':>9}{'at 50 %':>9}{'at 90 %':>9}{'p of a digit':>15}"]
    for length in lengths:
        for name in NEEDLES:
            run = section["runs"][f"{name} at {length}"]
            counts = []
            for depth in DEPTHS:
                hits = [record["found"] for record in run["records"] if record["depth"] == depth]
                counts.append(f"{sum(hits)} of {len(hits)}")
            mean = sum(record["log_prob"] for record in run["records"]) / len(run["records"])
            cells = "".join(f"{count:>9}" for count in counts)
            lines.append(f"{length:>8,}  {SHOWN[name]:<24}{cells}{math.exp(mean):>15.2f}")
    return "\n".join(lines)


def along(log_probs, width=SMOOTH, every=EVERY):
    """Perplexity along a text: (tokens, values), each over the `width` tokens up to that one.

    log_probs[t] is ln p of token t + 1; the first point is where `width` of them are there.
    """
    total = np.concatenate([[0.0], np.cumsum(np.asarray(log_probs, dtype=np.float64))])
    ends = np.arange(width, len(log_probs) + 1, every)
    means = (total[ends] - total[ends - width]) / width
    return ends.tolist(), [float(f"{value:.4g}") for value in np.exp(-means)]


# --- where the attention goes -------------------------------------------------------------


def share_figure(share):
    """Share of the attention that position 0 gets: (layers, heads), each a mean over queries.

    Two decimals of each are drawn, and nothing below 0.01.
    """
    cells = [[round(value, 2) if value >= 0.01 else 0 for value in row] for row in np.asarray(share).tolist()]
    figure = look.new_figure("head", "layer", height=look.MAX_HEIGHT, grid=False)
    hover = [
        [
            f"layer {layer}, head {head}: "
            + (f"{value:.0%}" if value else "less than 1 %")
            + " on position 0"
            for head, value in enumerate(row)
        ]
        for layer, row in enumerate(cells)
    ]
    heat = look.heat_map(cells, hover=hover, largest=1.0, bar_title="share of position 0")
    figure.add_trace(heat.update(colorscale=SHARES))
    figure.update_xaxes(dtick=1)
    return figure.update_yaxes(autorange="reversed", dtick=3)


def share_text(share):
    """The sentence under it."""
    share = np.asarray(share)
    none = [str(layer) for layer, row in enumerate(share) if row.max() < 0.1]
    half = int((share > 0.5).sum())
    return (
        f"Position 0 gets {share.mean():.0%} of the attention on average, and more than half of it in {half} "
        f"of {share.size} heads. In layers {', '.join(none)} no head gives it a tenth. "
        f"A head that gives it less than 1 % is left blank."
    )


# --- perplexity along a text -----------------------------------------------------------------


def curves_figure(curves, width=SMOOTH):
    """Perplexity along a text for several caches: {name: log-probabilities}, the first one the full cache."""
    figure = look.new_figure("token", f"perplexity of the last {width} tokens", log_y=True)
    figure.update_yaxes(tickformat=",")
    colors = (look.INK, look.WRONG, look.KEY, look.VALUE)
    for (name, log_probs), color, dash in zip(
        curves.items(), colors, ("solid", "solid", "dash", "dot"), strict=False
    ):
        figure.add_trace(_curve(log_probs, name, color, dash, width))
    return figure


def _curve(log_probs, name, color, dash="solid", width=SMOOTH):
    x, y = along(log_probs, width)
    return go.Scatter(
        x=x,
        y=y,
        name=name,
        mode="lines",
        line={"color": color, "width": 2.5, "dash": dash},
        hovertemplate=f"{name}: perplexity %{{y:,}} over the {width} tokens up to %{{x:,}}<extra></extra>",
    )


def curves_text(curves, start):
    """The sentence under it: perplexity of the tokens from `start` on."""
    parts = [f"{name}: {short(perplexity(list(values)[start - 1 :]))}" for name, values in curves.items()]
    text = "; ".join(parts)
    last = len(next(iter(curves.values())))
    return f"Perplexity of tokens {start} … {last:,}. {text[0].upper()}{text[1:]}."


# --- the ring ------------------------------------------------------------------------------------


def ring(seq_len, num_sinks, window, slack):
    """What lies in each slot after `seq_len` tokens, one token a pass: [(slot, position, kind)].

    kind  "sink", "window", "slack" (there, and no longer seen) or "empty"; position None where it is empty.
    """
    held = [None] * (num_sinks + window + slack)
    for position in range(seq_len):
        place = position if position < num_sinks else num_sinks + (position - num_sinks) % (window + slack)
        held[place] = position
    kinds = []
    for slot, position in enumerate(held):
        if position is None:
            kind = "empty"
        elif position < num_sinks:
            kind = "sink"
        else:
            kind = "window" if position >= seq_len - window else "slack"
        kinds.append((slot, position, kind))
    return kinds


def ring_figure(states, num_sinks, window, slack):
    """The slots at several lengths, a row each: the position that each slot holds is written into it."""
    figure = look.new_figure("slot", "tokens so far", height=70 + 60 + 48 * len(states), grid=False)
    groups = {"sink": [], "window": [], "slack": [], "empty": []}
    for row, seq_len in enumerate(states):
        for slot, position, kind in ring(seq_len, num_sinks, window, slack):
            groups[kind].append((slot, row, position))
    crossed = {"color": look.WRONG, "opacity": 0.9, "pattern": CROSSED}
    for kind, name, marker in (
        ("sink", "first tokens", {"color": look.KEY}),
        ("window", "seen by the newest token", {"color": PALE}),
        ("slack", "no longer seen by it", crossed),
        ("empty", "empty", {"color": "rgba(0,0,0,0)", "line": {"color": look.MASKED, "width": 1}}),
    ):
        cells = groups[kind]
        bars = look.cells(
            [slot for slot, _, _ in cells],
            [row for _, row, _ in cells],
            name=name,
            hovertext=[
                f"after {states[row]} tokens, slot {slot}: "
                + ("empty" if position is None else f"position {position}, {name}")
                for slot, row, position in cells
            ],
            text=["" if position is None else str(position) for _, _, position in cells],
            width=0.86,
            marker=marker,
            textfont={"color": "#ffffff" if kind == "sink" else look.INK, "size": look.TEXT_SIZE},
        )
        figure.add_trace(bars)
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(dtick=1, ticks="", range=[-0.6, num_sinks + window + slack - 0.4])
    labels = [str(seq_len) for seq_len in states]
    return figure.update_yaxes(
        tickvals=list(range(len(states))), ticktext=labels, ticks="", range=[len(states) - 0.5, -0.5]
    )


def ring_text(states, num_sinks, window, slack):
    """The sentence under it."""
    last = ring(states[-1], num_sinks, window, slack)
    seen = sorted(position for _, position, kind in last if kind in ("sink", "window"))
    old = sorted(position for _, position, kind in last if kind == "slack")
    text = f"After {states[-1]} tokens the newest one sees positions {_listed(seen)}"
    return text + (f"; {_listed(old)} lie there still." if old else ".")


def _listed(numbers):
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# --- the main panel ----------------------------------------------------------------------------------


def visible(T, rows, sinks):
    """Boolean (T, T): a query sees the first `sinks` tokens and the newest rows − sinks, itself included."""
    query, key = np.ogrid[:T, :T]
    return (key <= query) & ((key < sinks) | (query - key < rows - sinks))


def forgetting(sinks, rows, layer, *, weights, recorded):
    """What the panel shows.

    sinks, rows  of SINKS and ROWS; layer: whose attention is drawn
    weights      attention of the full cache, (layers, T, T), the mean over a layer's heads
    recorded     {"full": log-probabilities, (rows, sinks): log-probabilities} of the recorded run
    """
    T = weights.shape[1]
    seen = visible(T, rows, sinks)
    late = weights[layer][FROM:]  # (queries, keys)
    on_seen = float((late * seen[FROM:]).sum(axis=1).mean())
    chosen = recorded[rows, sinks]
    return {
        "sinks": sinks,
        "rows": rows,
        "layer": layer,
        "kept": on_seen,
        "first": float(late[:, 0].mean()),
        "map": _binned(weights[layer]),
        "evicted": _evicted(T, rows, sinks),
        "curve": along(chosen),
        "full": along(recorded["full"]),
        "perplexity": perplexity(chosen[FROM - 1 :]),
        "perplexity_full": perplexity(recorded["full"][FROM - 1 :]),
        "tokens": len(chosen),
    }


def _binned(weights):
    """(T / BIN rows, 1 + T / BIN columns): column 0 is position 0 alone, the others sums over BIN keys."""
    T = len(weights)
    rows = weights.reshape(T // BIN, BIN, T).mean(axis=1)  # a mean over BIN queries
    first, rest = rows[:, :1], rows.copy()
    rest[:, 0] = 0
    cells = np.concatenate([first, rest.reshape(len(rows), -1, BIN).sum(axis=2)], axis=1)
    causal = np.concatenate([np.ones((len(rows), 1), bool), np.tri(len(rows), dtype=bool)], axis=1)
    cells = np.round(cells.astype(np.float64), 3)  # a cell that is seen is never blank
    return np.where(causal, np.maximum(cells, 0.001), 0).tolist()


def _evicted(T, rows, sinks):
    """[(row of the map, first column, columns)]: cells of which the query in the middle sees no key."""
    found = []
    for row in range(T // BIN):
        oldest = row * BIN + BIN // 2 - (rows - sinks) + 1  # of the window of that query
        start = 0 if not sinks else 1
        stop = 1 + max(oldest, 0) // BIN  # cells whose last key lies before the window
        stop = 0 if oldest <= 0 else stop
        if stop > start:
            found.append((row, start, stop - start))
    return found


def forgetting_figure(data):
    """Left: the attention of one layer, evicted cells crossed out. Right: perplexity along the text."""
    figure = look.new_figure("key", "query", height=look.MAX_HEIGHT, grid=False)
    figure.add_trace(_map(data))
    row, first, columns = ([part[i] for part in data["evicted"]] for i in range(3))
    figure.add_trace(
        go.Bar(
            x=columns,
            y=row,
            base=[start - 0.5 for start in first],
            orientation="h",
            width=1,
            name="evicted",
            hoverinfo="skip",
            marker={"color": look.WRONG, "line": {"width": 0}, "pattern": CROSSED},
        )
    )
    axis = look.axis_like(figure, "xaxis")
    for curve, name, color in (("full", "all keys", look.INK), ("curve", _name(data), look.KEY)):
        x, y = data[curve]
        figure.add_trace(
            go.Scatter(
                x=x,
                y=y,
                name=name,
                mode="lines",
                line={"color": color, "width": 2.5, "dash": "solid" if curve == "full" else "dash"},
                hovertemplate=f"{name}: perplexity %{{y:,}} up to token %{{x:,}}<extra></extra>",
                xaxis="x2",
                yaxis="y2",
            )
        )
    cells = len(data["map"])
    ticks = list(range(0, cells * BIN, 128))
    marks = [10, 20, 50, 100] if data["sinks"] else [10, 100, 1_000, 10_000]
    figure.update_layout(
        xaxis={"domain": [0, 0.4], "range": [-0.5, cells + 0.5]},
        yaxis={"range": [cells - 0.5, -0.5]},
        xaxis2={**axis, "domain": [0.62, 1], "anchor": "y2", "range": [0, data["tokens"]]},
        # Without first tokens perplexity goes up to 11,000; with them it stays below 90.
        yaxis2={**axis, "anchor": "x2", "type": "log", "range": [1, 2 if data["sinks"] else 4.1]}
        | {"tickvals": marks, "ticktext": [f"{mark:,}" for mark in marks]},
        legend={"x": 0.5},
        showlegend=True,
    )
    figure.update_layout(
        xaxis={"tickvals": [0] + [t / BIN + 0.5 for t in ticks[1:]], "ticktext": [str(t) for t in ticks]},
        yaxis={"tickvals": [t / BIN - 0.5 for t in ticks], "ticktext": [str(t) for t in ticks]},
    )
    figure.layout.xaxis2.title.text = "token (recorded run)"
    figure.layout.yaxis2.title.text = f"perplexity of {SMOOTH} tokens, log scale"
    return figure


def _map(data):
    hover = []
    for row, cells in enumerate(data["map"]):
        queries = f"queries {row * BIN} … {row * BIN + BIN - 1}"
        line = [f"{queries}, position 0: {cells[0]:.1%} of their attention"]
        for column, value in enumerate(cells[1:]):
            keys = f"keys {max(column * BIN, 1)} … {column * BIN + BIN - 1}"
            line.append(f"{queries}, {keys}: {value:.1%} of their attention")
        hover.append(line)
    trace = look.heat_map(data["map"], hover=hover, largest=0.6, bar_title="share")
    trace.colorbar.update(x=0.41, xanchor="left", len=1, title_side="top")
    return trace.update(xgap=0, ygap=0, colorscale=SHARES)


def _name(data):
    sinks = data["sinks"]
    first = "" if not sinks else f"first {'one' if sinks == 1 else sinks} + "
    return f"{first}newest {data['rows'] - sinks}"


def forgetting_text(data):
    """The text under it: what the evicted keys would have got, and what leaving them out costs."""
    held = data["rows"] * ROW_BYTES / 2**20
    full = (data["tokens"] + 1) * ROW_BYTES / 2**20
    return (
        f"{_name(data).capitalize()}, {data['rows']} visible keys: {held:.1f} MiB however long the text "
        f"({full:.0f} MiB with all {data['tokens'] + 1:,} tokens). In "
        f"layer {data['layer']}, queries {FROM} … 511 give {data['first']:.0%} of their attention to "
        f"position 0 and {1 - data['kept']:.0%} to keys that this cache has evicted. Perplexity from token "
        f"{FROM} on: {short(data['perplexity'])}, with all keys {short(data['perplexity_full'])}."
    )
