"""Chapter 12, fewer heads: who reads whose keys, what a step reads, pooled models, and the figures.

Nothing here runs a model or looks at a clock.
"""

from __future__ import annotations

import math
from dataclasses import replace

import plotly.graph_objects as go

from kvcourse import config, sizing
from kvcourse.figures import template as look

AUSTEN = config.ModelConfig(
    name="austen-gpt2", architecture="gpt2", num_layers=6, num_heads=4, num_kv_heads=4, head_dim=64,
    hidden_size=256, intermediate_size=1024, vocab_size=2048, max_seq_len=1024,
)  # fmt: skip
MODELS = {
    "austen-gpt2": AUSTEN,
    "SmolLM2 135M": config.lookup("smollm2-135m"),
    "Llama 2 7B": config.lookup("llama-2-7b"),
}
KV_HEADS = [1, 2, 3, 4, 8, 9, 16, 32]  # of the panel: whatever divides 4, 9 or 32
POOLINGS = {"mean of the group": "mean", "first of the group": "first"}
CARD_BYTES, CARD = sizing.device("l4").memory_bytes, "an L4 (24 GB)"
PALE = f"rgba(0, 114, 178, {look.CACHED_OPACITY})"
PALE_TO_QUERY = [[0, "rgba(0, 158, 115, 0.08)"], [1, "rgba(0, 158, 115, 1)"]]  # 0.01 and 0.2 look different
FAINT = 0.002  # the smallest attention weight that is drawn
LAYERS_APART = 1.0  # between the row of query heads and the row of KV heads


def read_by(query_head, num_heads, num_kv_heads, order="repeat"):
    """The KV head that a query head reads: h div G after repeat, h mod KV heads after tile."""
    if order == "tile":
        return query_head % num_kv_heads
    return query_head // (num_heads // num_kv_heads)


# --- who reads what ------------------------------------------------------------------


def map_figure(num_heads, num_kv_heads, order="repeat"):
    """Query heads above, KV heads below, a line from each query head to the keys and values it reads."""
    figure = look.new_figure("", "", height=170, grid=False)
    width = num_heads / num_kv_heads
    places = [(kv + 0.5) * width - 0.5 for kv in range(num_kv_heads)]  # below the middle of its group
    for head in range(num_heads):
        kv = read_by(head, num_heads, num_kv_heads, order)
        wrong = kv != read_by(head, num_heads, num_kv_heads)
        figure.add_trace(
            go.Scatter(
                x=[head, round(places[kv], 4)],
                y=[LAYERS_APART, 0],
                mode="lines",
                line={
                    "color": look.WRONG if wrong else look.INK,
                    "width": 2,
                    "dash": "dash" if wrong else "solid",
                },
                hoverinfo="skip",
                showlegend=False,
            )
        )
    for name, xs, y, color in (
        ("query head", list(range(num_heads)), LAYERS_APART, look.QUERY),
        ("KV head", [round(x, 4) for x in places], 0, look.KEY),
    ):
        figure.add_trace(
            go.Scatter(
                x=xs,
                y=[y] * len(xs),
                mode="markers+text",
                text=[str(number) for number in range(len(xs))],
                textfont={"color": "#ffffff", "size": look.TEXT_SIZE},
                marker={"symbol": "square", "size": 32, "color": color},
                hovertext=[f"{name} {number}" for number in range(len(xs))],
                hovertemplate="%{hovertext}<extra></extra>",
                showlegend=False,
            )
        )
    figure.update_xaxes(visible=False, range=[-0.7, num_heads - 0.3])
    figure.update_yaxes(
        range=[-0.45, 1.45], showline=False, ticks="", tickvals=[1, 0], ticktext=["query heads", "KV heads"]
    )
    return figure.update_layout(margin={"t": 10, "b": 10})


def map_text(num_heads, num_kv_heads, order="repeat"):
    """The sentence under it."""
    groups = [[] for _ in range(num_kv_heads)]
    for head in range(num_heads):
        groups[read_by(head, num_heads, num_kv_heads, order)].append(str(head))
    told = [f"{_listed(group)} read KV head {kv}" for kv, group in enumerate(groups)]
    text = f"Query heads {'; '.join(told)}."
    if order == "tile":
        right = sum(read_by(h, num_heads, num_kv_heads) == h % num_kv_heads for h in range(num_heads))
        text += f" {right} of {num_heads} read their own, the other {num_heads - right} another group's."
    return text


def _listed(words):
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def attention_figure(pieces, weights, heads):
    """One map of attention weights for each query head: rows are queries, columns keys.

    pieces  the tokens as text; weights  one list of rows of rounded numbers for each of `heads`
    """
    figure = look.new_figure("", "query", height=400, grid=False)
    n, axis = len(pieces), look.axis_like(figure, "xaxis")
    names = [f"{number} {look.plain(piece.strip())}" for number, piece in enumerate(pieces)]
    gap = 0.03
    span = (1 - gap * (len(heads) - 1)) / len(heads)
    for number, (head, rows) in enumerate(zip(heads, weights, strict=True)):
        hover = [
            [
                f"query head {head}: {names[q]} looks at {names[k]} with weight {rows[q][k]:.2f}"
                if k <= q
                else f"{names[k]} comes later"
                for k in range(n)
            ]
            for q in range(n)
        ]
        # A weight that was rounded to 0 is still one that the query may see: only later keys are left bare.
        seen = [[max(rows[q][k], FAINT) if k <= q else 0 for k in range(n)] for q in range(n)]
        cells = look.heat_map(seen, hover=hover, color=look.QUERY, largest=1.0, bar_title="attention weight")
        cells.update(colorscale=PALE_TO_QUERY)
        suffix = "" if number == 0 else str(number + 1)
        cells.update(xaxis=f"x{suffix}", showscale=number == len(heads) - 1)
        figure.add_trace(cells)
        left = number * (span + gap)
        figure.layout[f"xaxis{suffix}"] = {
            **axis,
            "domain": [round(left, 4), round(left + span, 4)],
            "tickvals": list(range(n)),
            "ticktext": names,
            "tickangle": 90,
            "showgrid": False,
            "anchor": "y",
            "title": {"text": f"key, query head {head}"},
        }
    figure.update_yaxes(range=[n - 0.5, -0.5], tickvals=list(range(n)), ticktext=names)
    return figure.update_layout(margin={"b": 120})


def attention_text(pieces, weights, heads):
    """Where the last query of each head looks most."""
    told = []
    for head, rows in zip(heads, weights, strict=True):
        best = max(range(len(pieces)), key=lambda k: rows[-1][k])
        told.append(f"head {head} at position {best} ({pieces[best].strip()!r}, {rows[-1][best]:.2f})")
    return f"Same keys; the largest weight of the last query: {_listed(told)}."


# --- pooled models: before and after a little training -------------------------------


def label(kv_heads, pooling):
    """One of the recorded models in words."""
    if pooling == "none":
        return f"{kv_heads} KV heads, as trained"
    made = "the mean of each group" if pooling == "mean" else "the first of each group"
    return f"{kv_heads} KV head{'s' * (kv_heads > 1)}, {made}"


def curves(run):
    """[(label, steps, bits per character at each)] of a recorded run of `kvcourse bench heads`."""
    characters = run.results["characters"]
    return [
        (
            label(one["kv_heads"], one["pooling"]),
            [point["step"] for point in one["curve"]],
            [sum(point["nats"]) / math.log(2) / sum(characters) for point in one["curve"]],
        )
        for one in run.results["runs"]
    ]


def nats(run, kv_heads, pooling, point=-1):
    """That model's nats in each held-out window, at a point of its curve: 0 before training, −1 after it."""
    found = [one for one in run.results["runs"] if (one["kv_heads"], one["pooling"]) == (kv_heads, pooling)]
    return found[0]["curve"][point]["nats"]


def difference(run, kv_heads, point=-1):
    """(mean − first in bits per character, its standard error over the windows): the same windows, paired."""
    characters = run.results["characters"]
    pairs = zip(*(nats(run, kv_heads, how, point) for how in ("mean", "first")), characters, strict=True)
    each = [(a - b) / math.log(2) / c for a, b, c in pairs]
    mean = sum(each) / len(each)
    spread = math.sqrt(sum((x - mean) ** 2 for x in each) / (len(each) - 1))
    return mean, spread / math.sqrt(len(each))


def won_back(run, kv_heads, pooling=None):
    """(bits per character after training, the share of the conversion's cost that training won back).

    Of the pooling "mean" or "first"; without one, of that which ends lower. The cost is counted from the
    control before any training.
    """
    rows = {
        (one["kv_heads"], one["pooling"]): row[2]
        for one, row in zip(run.results["runs"], curves(run), strict=True)
    }
    ways = [bits for (n, how), bits in rows.items() if n == kv_heads and pooling in (None, how)]
    best = min(ways, key=lambda bits: bits[-1])
    return best[-1], (best[0] - best[-1]) / (best[0] - rows[4, "none"][0])


def curves_table(run):
    """The recorded run as text."""
    rows = curves(run)
    steps = rows[0][1]
    lines = [f"{'bits per character after':>38}" + "".join(f"{f'{step} steps':>12}" for step in steps)]
    for name, _, bits in rows:
        lines.append(f"{name:>38}" + "".join(f"{value:>12.3f}" for value in bits))
    return "\n".join(lines)


def curves_figure(run):
    """Held-out bits per character over the training steps, a line a model, named at its end."""
    figure = look.new_figure("training steps after the conversion", "bits per character, held out")
    for (name, steps, bits), one in zip(curves(run), run.results["runs"], strict=True):
        dash = {"none": "solid", "mean": "dash", "first": "dot"}[one["pooling"]]
        trace = look.here(steps, [round(value, 4) for value in bits], name=name, unit="bits per character")
        symbol = {4: "circle", 2: "square", 1: "diamond"}[one["kv_heads"]]
        color = {4: look.INK, 2: look.KEY, 1: look.ARITHMETIC}[one["kv_heads"]]
        trace.update(
            line={"dash": dash, "color": color}, marker={"symbol": symbol, "size": 9, "color": color}
        )
        figure.add_trace(trace)
    last = run.results["runs"][0]["curve"][-1]["step"]
    figure.update_xaxes(range=[-0.03 * last, 1.03 * last], tickvals=curves(run)[0][1])
    figure.update_layout(legend={"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"}, margin={"t": 30})
    return figure


def curves_text(run):
    """The sentence under it, with where it comes from."""
    told = []
    for kv_heads in (2, 1):
        bits, share = won_back(run, kv_heads)
        told.append(f"{kv_heads} KV head{'s' * (kv_heads > 1)} {bits:.2f}, {share:.0%} of the cost won back")
    control = curves(run)[0][2][-1]
    return (
        f"After {run.results['steps']} steps: {'; '.join(told)}; the control {control:.2f} bits per "
        f"character ({run.label})."
    )


# --- the main panel ------------------------------------------------------------------


def sharing(kv_heads, pooling, model, users, tokens, measured):
    """What so many KV heads mean for a model: who reads what, what a decode step reads, how many users fit.

    pooling, model  keys of POOLINGS and MODELS
    measured        {(KV heads, "mean" or "first"): {"bits": bits per character, "likeness": [of each query
                    head]}} of austen-gpt2; likeness is the cosine between the keys a head was trained with
                    and those it reads now

    `steps` holds for each number of KV heads that divides the model's (bytes of weights, of caches) of one
    decode step; everything in 16 bits.
    """
    shape = MODELS[model]
    possible = [n for n in KV_HEADS if shape.num_heads % n == 0]
    steps = {}
    for n in possible:
        read = sizing.pass_bytes(replace(shape, num_kv_heads=n), 1, tokens, batch=users)
        steps[n] = read.weights, read.cache_read
    data = {"kv_heads": kv_heads, "model": model, "users": users, "tokens": tokens, "shape": shape}
    data |= {"steps": steps, "pooling": pooling, "fits": None, "measured": None}
    if kv_heads in possible:
        chosen = replace(shape, num_kv_heads=kv_heads)
        free = sizing.free_after_weights(chosen, CARD_BYTES)
        data["fits"] = sizing.requests_that_fit(chosen, free, tokens + 1)
        if model == "austen-gpt2":
            data["measured"] = measured[kv_heads, POOLINGS[pooling]]
            data["control"] = measured[shape.num_heads, POOLINGS[pooling]]["bits"]
    return data


def sharing_figure(data):
    """Left: query heads by KV heads, a cell where one reads the other. Right: bytes of a decode step."""
    title = "KV head (in the cells: cosine of keys)" if data["measured"] else "KV head"
    figure = look.new_figure(title, "query head", grid=False)
    shape, chosen = data["shape"], data["kv_heads"]
    divides = chosen in data["steps"]
    heads = list(range(shape.num_heads))
    kv = [read_by(head, shape.num_heads, chosen) for head in heads] if divides else []
    alike = data["measured"]["likeness"] if data["measured"] else [1.0] * len(heads)
    shades = [round(0.15 + 0.85 * max(value, 0.0), 2) for value in alike]
    texts = [f"{value:.2f}" for value in alike] if data["measured"] else [""] * len(heads)
    figure.add_trace(
        look.cells(
            kv,
            heads[: len(kv)],
            width=0.9,
            showlegend=False,
            marker={"color": [f"rgba(0, 114, 178, {shade})" for shade in shades[: len(kv)]]},
            text=texts[: len(kv)],
            textfont={"color": ["#ffffff" if s > 0.55 else look.INK for s in shades], "size": look.TEXT_SIZE},
            hovertext=[f"query head {head} reads KV head {n}" for head, n in zip(heads, kv, strict=False)],
        )
    )
    names = [str(n) for n in data["steps"]]
    unit, size = ("GB", 1e9) if max(map(sum, data["steps"].values())) > 1e9 else ("MB", 1e6)
    for part, name, color, hatch in (
        (0, "weights", look.WEIGHTS, ""),
        (1, "caches", look.CACHES, look.HATCH),
    ):
        figure.add_trace(
            go.Bar(
                x=names,
                y=[float(f"{step[part] / size:.4g}") for step in data["steps"].values()],
                name=name,
                xaxis="x2",
                yaxis="y2",
                marker={
                    "color": color,
                    "pattern": {"shape": hatch, "solidity": 0.25},
                    "line": {"color": look.INK, "width": [3 if n == chosen else 0 for n in data["steps"]]},
                },
                hovertemplate=f"{name}: %{{y}} {unit} with %{{x}} KV heads<extra></extra>",
            )
        )
    axis = look.axis_like(figure, "xaxis")
    few = shape.num_heads <= 9
    figure.update_layout(
        barmode="stack",
        legend={"traceorder": "normal", "x": 0.56, "xanchor": "left"},
        xaxis={
            "domain": [0, 0.42],
            "range": [-0.6, shape.num_heads - 0.4],
            "tickvals": list(range(0, chosen if divides else 0, 1 if few else 4)),  # only heads that exist
        },
        yaxis={"range": [shape.num_heads - 0.4, -0.6], "dtick": 1 if few else 4},
        xaxis2={
            **axis,
            "domain": [0.56, 1],
            "anchor": "y2",
            "type": "category",
            "title": {"text": "KV heads"},
        },
        yaxis2={
            **axis,
            "anchor": "x2",
            "title": {"text": f"a decode step reads ({unit})"},
            "rangemode": "tozero",
        },
    )
    return figure


def sharing_text(data):
    """The sentence under the panel."""
    shape, n, model = data["shape"], data["kv_heads"], data["model"]
    if n not in data["steps"]:
        possible = ", ".join(map(str, data["steps"]))
        return (
            f"{model}: {shape.num_heads} query heads cannot be shared out evenly among {n} KV heads; "
            f"{possible} can."
        )
    group = shape.num_heads // n
    name = "MHA" if group == 1 else "MQA" if n == 1 else "GQA"
    chosen = replace(shape, num_kv_heads=n)
    per_token = sizing.kv_bytes_per_token(chosen)
    text = (
        f"{model} with {n} KV head{'s' * (n > 1)} ({name}, {group} query head{'s' * (group > 1)} on each): "
        f"{per_token:,} bytes a token in 16 bits. "
    )
    users, tokens = data["users"], data["tokens"]
    if tokens >= shape.max_seq_len:
        return text + f"The model has {shape.max_seq_len:,} positions: choose fewer tokens."
    weights, caches = data["steps"][n]
    text += (
        f"A step of {users} user{'s' * (users > 1)} with {tokens:,} tokens reads {_size(weights)} of weights "
        f"and {_size(caches)} of caches, {_share(caches / (weights + caches))} caches. Beside the weights "
        f"{CARD} holds {'only ' if data['fits'] < users else ''}{data['fits']:,} of them. "
    )
    if n == shape.num_kv_heads:
        own = data["measured"]
        return text + (f"As trained: {own['bits']:.2f} bits per character." if own else "As trained.")
    if data["measured"]:
        bits = data["measured"]["bits"]
        alike = ", ".join(f"{value:.2f}" for value in data["measured"]["likeness"])
        return text + (
            f"Pooled by the {data['pooling']}: {bits:.2f} bits per character instead of "
            f"{data['control']:.2f}. Cosines of the keys, query heads 0 … {shape.num_heads - 1}: {alike}."
        )
    return text + "Nobody trained it with so many: the loss is not known."


def _share(part):
    return f"{part:.0%}" if part >= 0.01 else "below 1%"


def _size(count):
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
