"""Chapter 14, fewer bits: real keys and values, formats, what they cost in a recorded run, a server's memory.

Nothing here runs a model or looks at a clock. Recorded figures come in as the `results` of a run of
`kvcourse bench quality` (see `kvcourse.bench.quality`); what is not in it is shown as not recorded. One
source is quoted: the page on the KV cache of the course "System Design and AI Engineering".
"""

from __future__ import annotations

import math

import numpy as np

from kvcourse import config, evaluation, sizing
from kvcourse.caches import formats
from kvcourse.figures import template as look

SMOLLM2 = config.lookup("smollm2-135m")

# The course page: (tokens of the reserved window, bytes that the server reported for the loaded model).
SERVER = ((2048, 2.046e9), (8192, 2.262e9), (32768, 2.793e9))
SERVER_ROUNDING = 0.5e6  # bytes: the figures are printed to 0.001 GB

# Name in prose → formats of keys and of values, as the recorded run names them; gN: groups of N channels.
FORMATS = {
    "16 bits": ("float16", "float16"),
    "fp8": ("fp8", "fp8"),
    "q8_0": ("q8_0", "q8_0"),
    "8 bits per token": ("int8/token", "int8/token"),
    "q4_0": ("q4_0", "q4_0"),
    "4 bits per token": ("int4/token", "int4/token"),
    "4 bits per token, groups of 32": ("int4/token g32", "int4/token g32"),
    "4 bits, keys per channel": ("int4/channel", "int4/token g32"),
    "2 bits per token, groups of 32": ("int2/token g32", "int2/token g32"),
    "2 bits, keys per channel": ("int2/channel", "int2/token g32"),
}
LAYOUTS = {  # name in prose → what shares a scale among keys, among values
    "keys per channel, values per token": ("channel", "token"),
    "both per token": ("token", "token"),
    "both per channel": ("channel", "channel"),
    "keys per token, values per channel": ("token", "channel"),
}
BITS, GROUPS, RESIDUALS = (2, 4, 8), (32, 64), (0, 32, 128)
MOST_MORE = 20  # %, the end of the axis of `needles_figure`
HEAD = 1  # the KV head that the pictures show
SHOWN = 192  # tokens of the panel's pictures: whole groups of 32 and 64, and beyond a residual of 128
TOKENS = 1024  # for which the panel gives the bytes of a cache with a residual


# --- the recorded run -------------------------------------------------------------------


def name_of(keys, values, residual=0):
    """The name of a run: "q8_0", "K int2/channel V int2/token g32 R128"."""
    name = keys if keys == values else f"K {keys} V {values}"
    return name + (f" R{residual}" if residual else "")


def recorded(results, section, name):
    """(perplexity, mean extra cost of a token in nats, its standard error) of a run, or None.

    The cost is compared token by token with that of 16 bits on the same text. The standard error is
    that of the mean of these differences: much smaller than that of either mean, for both meet the
    same easy and hard tokens.
    """
    runs = results.get(section, {}).get("runs", {})
    if name not in runs or "float16" not in runs:
        return None
    log_probs, exact = (np.array(runs[which]["log_probs"]) for which in (name, "float16"))
    extra = exact - log_probs  # nats
    error = float(extra.std(ddof=1)) / math.sqrt(len(extra))
    return evaluation.perplexity(log_probs), float(extra.mean()), error


def bits_table(results):
    """Real caches, a line for each format: bytes a token, tokens left in 16 bits, perplexity, extra cost."""
    head = f"{'':<44}{'bytes':>8}{'of 16':>8}{'tail':>10}{'perplexity':>12}   extra cost of a token"
    lines = [head, f"{'':<44}{'a token':>8}{'bits':>8}{'(tokens)':>10}{'':>12}   (nats ± standard error)"]
    for label, pair in FORMATS.items():
        for residual in RESIDUALS:
            found = recorded(results, "bits", name_of(*pair, residual))
            if found is not None:
                lines.append(_bits_line(results, label, pair, residual, found))
    return "\n".join(lines)


def _bits_line(results, label, pair, residual, found):
    size = results["bits"]["runs"][name_of(*pair, residual)]["bytes_per_token"]
    group = 32 if "channel" in "".join(pair) else 1
    tail = f"{residual}" if group == 1 else f"{residual}–{residual + group - 1}"
    name = label + (f", residual {residual}" if residual else "")
    cost = "" if label == "16 bits" else f"   {found[1]:+.3f} ± {found[2]:.3f}"
    share = size / sizing.kv_bytes_per_token(SMOLLM2)
    return f"{name:<44}{size:>8,.0f}{share:>8.3f}{tail:>10}{found[0]:>12.1f}{cost}"


def layout_pair(bits, layout, group=32):
    """Formats of keys and values in a layout, as the recorded run names them."""
    token = f"int{bits}/token" + (" g32" if group == 32 else "")
    channel = f"int{bits}/channel" if group == 32 else ""  # none with 64 tokens was recorded
    return tuple({"token": token, "channel": channel}[part] for part in LAYOUTS[layout])


def layouts(results):
    """{(bits, layout): (perplexity, extra nats, standard error)}, every token quantized before it is read."""
    found = {}
    for bits in (4, 2):
        for layout in LAYOUTS:
            cost = recorded(results, "fake_bits", name_of(*layout_pair(bits, layout)))
            if cost is not None:
                found[bits, layout] = cost
    return found


def layouts_figure(found, exact):
    """Perplexity of the four layouts at 4 and 2 bits, and of 16 bits, `exact`."""
    figure = look.new_figure("perplexity", "", height=300, log_x=True)
    for bits, symbol, color in ((4, "circle", look.INK), (2, "diamond", look.WRONG)):
        names = [layout for layout in LAYOUTS if (bits, layout) in found]
        values = [round(found[bits, layout][0], 1) for layout in names]
        figure.add_scatter(
            x=values,
            y=names,
            mode="markers+text",
            name=f"{bits} bits",
            marker={"size": 12, "symbol": symbol, "color": color},
            text=[f"{value:.1f}" for value in values],
            textposition="middle right",
            hovertemplate=f"{bits} bits, %{{y}}: perplexity %{{x:.1f}}<extra></extra>",
        )
    line = {"color": look.INK, "dash": "dot", "width": 2}
    figure.add_scatter(
        x=[round(exact, 1)] * 2,
        y=[list(LAYOUTS)[0], list(LAYOUTS)[-1]],
        mode="lines",
        name=f"16 bits: {exact:.1f}",
        line=line,
        hoverinfo="skip",
    )
    ticks = [30, 50, 100, 200]
    figure.update_xaxes(range=[math.log10(25), math.log10(280)], tickvals=ticks, dtick=None)
    return figure.update_yaxes(range=[3.5, -0.5], categoryorder="array", categoryarray=list(LAYOUTS))


def layouts_text(found, exact):
    """The sentence under it."""
    parts = []
    for bits in (2, 4):
        order = sorted((cost[0], layout) for (b, layout), cost in found.items() if b == bits)
        (least, best), (most, worst) = order[0], order[-1]
        parts.append(f"at {bits} bits from {least / exact:.2f} ({best}) to {most / exact:.2f} ({worst})")
    return f"Perplexity, times that of 16 bits: {'; '.join(parts)}."


def needle_counts(results, keys, values, residual=0):
    """{length: (found, asked, mean ln p of a digit)} of a format, in the lengths that were recorded."""
    name, counts = name_of(keys, values, residual), {}
    for run in results.get("needles", {}).get("runs", {}).values():
        if run["cache"] == name:
            records = run["records"]
            mean = float(np.mean([record["log_prob"] for record in records]))
            counts[run["length"]] = sum(record["found"] for record in records), len(records), mean
    return dict(sorted(counts.items()))


def needles_by_depth(results, keys, values, residual, length):
    """{depth: (found, asked, mean ln p of a digit)} of a format at one length."""
    run = results.get("needles", {}).get("runs", {}).get(f"{name_of(keys, values, residual)} at {length}")
    depths = {}
    for record in run["records"] if run else []:
        depths.setdefault(record["depth"], []).append(record)
    return {
        depth: (sum(r["found"] for r in part), len(part), float(np.mean([r["log_prob"] for r in part])))
        for depth, part in sorted(depths.items())
    }


def needle_cost(results, keys, values, residual=0):
    """(mean ln p a digit below 16 bits, its standard error) over the needles that both were asked.

    Needle by needle, as in `recorded`: both meet the same easy and hard ones.
    """
    graded = _graded(results, name_of(keys, values, residual))
    exact = _graded(results, "float16")
    extra = np.array([exact[needle] - graded[needle] for needle in graded if needle in exact])
    return float(extra.mean()), float(extra.std(ddof=1)) / math.sqrt(len(extra))


def _graded(results, name):
    """{(length, depth, seed): mean ln p of a digit} of a cache."""
    runs = [run for run in results["needles"]["runs"].values() if run["cache"] == name]
    return {(run["length"], r["depth"], r["seed"]): r["log_prob"] for run in runs for r in run["records"]}


def needle_rows(results):
    """[(name, {length: (found, asked, mean ln p)}, cost, graded)] of all formats with needles.

    cost as `recorded`, graded as `needle_cost`.
    """
    rows = []
    for label, pair in FORMATS.items():
        for residual in RESIDUALS:
            counts = needle_counts(results, *pair, residual)
            if counts:
                name = label + (f", residual {residual}" if residual else "")
                cost = recorded(results, "bits", name_of(*pair, residual))
                rows.append((name, counts, cost, needle_cost(results, *pair, residual)))
    return rows


def needle_table(rows):
    """Found needles by length, the mean ln p of a digit over all and what is lost of it, the perplexity."""
    lengths = sorted({length for _, counts, *_ in rows for length in counts})
    head = f"{'':<40}" + "".join(f"{f'{length:,}':>8}" for length in lengths)
    lines = [head + f"{'all':>10}{'ln p':>7}{'below 16 bits':>15}{'perplexity':>12}"]
    for name, counts, cost, (lost, uncertain) in rows:
        cells = [f"{counts[n][0]} of {counts[n][1]}" if n in counts else "–" for n in lengths]
        found, asked, mean = total(counts)
        perplexity = "–" if cost is None else f"{cost[0]:.1f}"
        row = f"{name:<40}" + "".join(f"{cell:>8}" for cell in cells) + f"{f'{found} of {asked}':>10}"
        # Adding 0 takes the sign off a rounded −0.00.
        below = "" if name == "16 bits" else f"{round(lost, 2) + 0:.2f} ± {uncertain:.2f}"
        lines.append(row + f"{mean:>7.2f}{below:>15}{perplexity:>12}")
    return "\n".join(lines)


def total(counts):
    """(found, asked, mean ln p) over all lengths of a format."""
    found, asked = (sum(part[i] for part in counts.values()) for i in (0, 1))
    return found, asked, sum(part[1] * part[2] for part in counts.values()) / asked


def _label_side(point, points):
    """Right of a point, but for one at the edge, and one with another point where its label would stand."""
    x, y = point
    if x == MOST_MORE:
        return "bottom left"
    covered = any(0 < other - x < 2 and abs(height - y) < 8 for other, height in points)
    return "bottom right" if covered else "middle right"


def needles_figure(rows):
    """What a format costs in perplexity against the needles found; beyond MOST_MORE it stands at the edge."""
    figure = look.new_figure("perplexity, more than in 16 bits (%)", "needles found (%)")
    places = {}  # (x, y) → labels: formats in one place share a point
    for name, counts, cost, _ in rows:
        if cost is not None:
            found, asked, _ = total(counts)
            more, share = 100 * math.expm1(cost[1]), 100 * found / asked
            label = name.replace("keys per channel", "K channel").replace("groups of 32", "g 32")
            label += "" if more <= MOST_MORE else f": {more:.0f} %"
            point = round(min(max(more, 0), MOST_MORE), 1), round(share, 1)
            near = next((p for p in places if abs(p[0] - point[0]) < 0.5 and abs(p[1] - point[1]) < 4), point)
            places.setdefault(near, []).append(label)
    figure.add_scatter(
        x=[x for x, _ in places],
        y=[y for _, y in places],
        mode="markers+text",
        showlegend=False,
        marker={"size": 12, "color": look.INK},
        text=["<br>".join(labels) for labels in places.values()],
        textposition=[_label_side(point, places) for point in places],
        hovertext=[", ".join(labels) for labels in places.values()],
        hovertemplate="%{hovertext}: %{y} % of the needles found<extra></extra>",
    )
    ticks = list(range(0, MOST_MORE + 1, 5))
    names = [*map(str, ticks[:-1]), f"≥ {MOST_MORE}"]
    figure.update_xaxes(range=[-0.7, MOST_MORE + 0.7], tickvals=ticks, ticktext=names, dtick=None)
    return figure.update_yaxes(range=[-12, 118])


def needles_text(rows):
    """The sentence under it."""
    parts = []
    for name, counts, cost, _ in rows:
        if cost is not None:
            found, asked, _ = total(counts)
            parts.append(f"{name} {100 * math.expm1(cost[1]):+.1f} % and {found} of {asked}")
    return "Perplexity and needles: " + "; ".join(parts) + "."


# --- keys and values, before and after ----------------------------------------------------


def channel_sizes(rows):
    """Mean magnitude of each channel over the tokens: rows (…, T, head_dim) → (…, head_dim)."""
    return np.abs(rows).mean(axis=-2)


def two_maps(left, right, names, colors, largest=(None, None), first=0, border=None):
    """Two matrices (T, head_dim) side by side as magnitudes, positions left to right, channels downward.

    largest  the upper end of each color scale, or None: its largest number
    first    position of the first row
    border   draw a line in the right one before this position, or None
    """
    figure = look.new_figure("position", "channel", height=400, grid=False)
    for axis, rows, name, color, end in zip(("", "2"), (left, right), names, colors, largest, strict=True):
        exact = np.abs(rows.T)  # (head_dim, T)
        sizes = np.where(exact > 0, np.maximum(exact.round(3), 0.001), 0)  # only an exact 0 is the bare page
        hover = [[""]] * len(sizes)
        trace = look.heat_map(sizes.tolist(), hover=hover, color=color, largest=end)
        hovered = f"{name}: channel %{{y}}, position %{{x}}: %{{z:.3f}}<extra></extra>"
        trace.update(
            x0=first, text=None, hovertemplate=hovered, xgap=0, ygap=0, xaxis=f"x{axis}", yaxis=f"y{axis}"
        )
        trace.colorbar.update(x=1.0 if axis else 0.41, thickness=12)
        figure.add_trace(trace)
        figure.add_annotation(
            text=look.plain(name),
            x=0,
            y=1.02,
            xref=f"x{axis} domain",
            yref="paper",
            yanchor="bottom",
            showarrow=False,
        )
    for second in ("xaxis2", "yaxis2"):
        figure.layout[second] = look.axis_like(figure, second[:5]) | {"showgrid": False}
    figure.update_layout(
        xaxis={"domain": [0, 0.4]},
        xaxis2={"domain": [0.6, 1], "title": {"text": "position"}},
        yaxis2={"anchor": "x2"},
        margin={"t": 34},
    )
    if border is not None:
        line = {"color": look.INK, "width": 2, "dash": "dot"}
        ends = {"x0": border - 0.5, "x1": border - 0.5, "y0": 0, "y1": 1}
        figure.add_shape(type="line", xref="x2", yref="paper", line=line, **ends)
    return figure.update_yaxes(autorange="reversed")


def scale_end(rows):
    """Where a color scale ends: 98 % of the magnitudes lie below.

    One channel in 64 would take the whole scale: it may saturate, so that the others can be seen.
    """
    return float(f"{np.quantile(np.abs(rows), 0.98):.2g}")


def loudest(rows, head):
    """(channel, its mean magnitude, the middle channel's) of one head's rows (T, head_dim)."""
    sizes = channel_sizes(rows[head])
    return int(sizes.argmax()), float(sizes.max()), float(np.median(sizes))


def maps_text(keys, values, layer, head):
    """The sentence under keys and values of one head, each (layers, KV heads, T, head_dim)."""
    parts = []
    for name, rows in (("keys", keys), ("values", values)):
        channel, size, middle = loudest(rows[layer], head)
        parts.append(
            f"the loudest channel of the {name} is {channel}, {size / middle:.0f} times the middle one"
        )
    return f"Layer {layer}, KV head {head}: {parts[0]}; {parts[1]}."


def format_of(bits, sharing, group):
    """The format of one array in the panel."""
    return formats.PerToken(bits, group) if sharing == "token" else formats.PerChannel(bits, group)


def rounding(rows, results, bits, layout, group, residual, layer, matrix):
    """Everything the panel shows, from plain values.

    rows     {"keys", "values"}: float32 (layers, KV heads, T, head_dim), keys rotated
    results  of the recorded run
    """
    pair = [format_of(bits, part, group) for part in LAYOUTS[layout]]
    before = rows[matrix][layer][:, :SHOWN]  # (KV heads, T, head_dim)
    unit = math.lcm(*(form.tokens for form in pair))
    stop = (before.shape[1] - residual) // unit * unit  # tokens that are quantized
    form = pair[0] if matrix == "keys" else pair[1]
    after = before.copy()
    after[:, :stop] = form.decode(form.encode(before[:, :stop]))
    exact, off = before[HEAD, :stop], (after - before)[HEAD, :stop]
    heads, head_dim = before.shape[0], before.shape[2]
    size = len(rows[matrix]) * sum(part.bytes_per_token(heads, head_dim) for part in pair)
    whole = 4 * len(rows[matrix]) * heads * head_dim  # K and V, 2 bytes a number
    held = (TOKENS - residual) // unit * unit
    return {
        "before": before[HEAD],
        "after": after[HEAD],
        "error": float(np.linalg.norm(off) / np.linalg.norm(exact)),
        "bytes": size,
        "average": (held * size + (TOKENS - held) * whole) / TOKENS,
        "whole": whole,
        "cost": panel_cost(results, bits, layout, group, residual),
        **{"bits": bits, "layout": layout, "group": group, "residual": residual},
        **{"layer": layer, "matrix": matrix, "stop": stop},
    }


def panel_cost(results, bits, layout, group, residual):
    """(perplexity, that of 16 bits, which setting) of a combination; None where none was recorded."""
    name = name_of(*layout_pair(bits, layout, group), residual)
    every, newest = "every token quantized before it is read", "the newest tokens in 16 bits"
    places = [("bits", newest)]
    if residual == 0:
        # A real cache that quantizes token by token has no tail, and is the same thing.
        places = [("fake_bits", every), *([("bits", every)] if layout == "both per token" else [])]
    for section, setting in places:
        found = recorded(results, section, name)
        if found is not None:
            return found[0], recorded(results, section, "float16")[0], setting
    return None


def rounding_figure(data):
    """The chosen matrix before and after, on one scale."""
    color = look.KEY if data["matrix"] == "keys" else look.VALUE
    whole = data["stop"] == SHOWN
    after = f"after, {data['bits']} bits" + ("" if whole else " up to the line, then 16")
    names = f"{data['matrix']}, before", after
    ends = (scale_end(data["before"]),) * 2
    border = None if whole else data["stop"]
    return two_maps(data["before"], data["after"], names, (color, color), ends, border=border)


def rounding_text(data):
    """The sentence under the panel: error, bytes, perplexity."""
    start = f"{data['bits']} bits, {data['layout']}, groups of {data['group']}, residual {data['residual']}: "
    size = f"{data['bytes']:,.0f} B a quantized token, {data['bytes'] / data['whole']:.3f} of 16 bits"
    if data["average"] != data["bytes"]:
        size += f"; {data['average']:,.0f} B on average over {TOKENS:,} tokens"
    matrix = f"{data['matrix']} of layer {data['layer']}, KV head {HEAD}"
    wrong = f"The {matrix}, are off by {100 * data['error']:.1f} % at positions 0–{data['stop'] - 1}"
    if data["cost"] is None:
        cost = "No perplexity was recorded for this combination"
    else:
        perplexity, exact, setting = data["cost"]
        cost = f"Perplexity {perplexity:.1f} against {exact:.1f} in 16 bits ({setting}; recorded)"
    return f"{start}{size}. {wrong}. {cost}."


# --- a server that reserves its window ----------------------------------------------------


def segments():
    """Bytes for each more token of the window, between neighbors of `SERVER`: (least, as printed, most)."""
    found = []
    for (tokens, size), (more, larger) in zip(SERVER, SERVER[1:], strict=False):
        slope = (larger - size) / (more - tokens)
        reach = 2 * SERVER_ROUNDING / (more - tokens)
        found.append((slope - reach, slope, slope + reach))
    return found


def fitted():
    """Bytes a token of the straight line with the least squares through all three."""
    tokens, sizes = np.array(SERVER).T
    return float(np.polyfit(tokens, sizes, 1)[0])
