"""Chapter 08, how big: what sources print, the table of models, and the memory bar of the planner.

Nothing here runs a model or looks at a clock: everything is arithmetic on `kvcourse.sizing`.
"""

from __future__ import annotations

import plotly.graph_objects as go

from kvcourse import sizing
from kvcourse.figures import template as look

GB, GIB = 1000**3, 1024**3
MOST_DRAWN = 128  # caches drawn one by one; more of them become one bar
WHITE = "#ffffff"  # hatching on the blue of caches, in either theme
FORMATS = ("float32", "float16", "q8_0", "fp8", "q4_0")

# kind of a model's cache → marker. The order is that of the legend.
KINDS = {
    "a KV head for each query head": "circle",
    "grouped heads": "square",
    "windows": "diamond",
    "latent": "cross",
}


# --- the models ------------------------------------------------------------------------


def kind(config):
    """What makes a model's cache small, as one of KINDS."""
    if config.latent:
        return "latent"
    if config.sliding_window is not None:
        return "windows"
    return "a KV head for each query head" if config.num_kv_heads == config.num_heads else "grouped heads"


def models_table(configs, seq_len=32768):
    """A line of text for each model: shape, bytes of a token and of a long request, in 16 bits.

    A model with windows has no bytes per token; one with a latent has no KV heads.
    """
    lines = [
        f"{'':>17}{'layers':>7}{'query':>7}{'KV':>7}{'head_dim':>10}{'width ÷':>9}{'a token':>11}"
        f"{seq_len:>11,}",
        f"{'':>17}{'':>7}{'heads':>7}{'heads':>7}{'':>10}{'heads':>9}{'':>11}{'tokens':>11}",
    ]
    for config in configs:
        windows = config.sliding_window is not None
        token = "–" if windows else f"{sizing.kv_bytes_per_token(config) / 1024:,.1f} KiB"
        kv, width = ("–", "–") if config.latent else (config.num_kv_heads, config.head_dim)
        lines.append(
            f"{config.name:>17}{config.num_layers:>7}{config.num_heads:>7}{kv:>7}{width:>10}"
            f"{config.hidden_size / config.num_heads:>9.5g}{token:>11}"
            f"{sizing.kv_bytes(config, seq_len) / GIB:>7.2f} GiB"
        )
    return "\n".join(lines)


def models_figure(configs, seq_len=32768):
    """Cache of one request over the weights of its model, both in 16 bits, both axes logarithmic."""
    figure = look.new_figure(
        "weights (GB, 16 bits)", f"cache of {seq_len:,} tokens (GiB)", height=400, log_x=True, log_y=True
    )
    for name, symbol in KINDS.items():
        chosen = [config for config in configs if kind(config) == name]
        weights = [round(sizing.weight_bytes(config) / GB, 3) for config in chosen]
        caches = [round(sizing.kv_bytes(config, seq_len) / GIB, 3) for config in chosen]
        hover = [
            f"{config.name}: weights {x:,.1f} GB, cache {y:,.2f} GiB"
            for config, x, y in zip(chosen, weights, caches, strict=True)
        ]
        figure.add_trace(
            go.Scatter(
                x=weights,
                y=caches,
                name=name,
                mode="markers+text",
                text=[config.name for config in chosen],
                textposition=[_PLACES.get(config.name, "top center") for config in chosen],
                cliponaxis=False,
                marker={"symbol": symbol, "size": 11, "color": look.INK},
                hovertext=hover,
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    return figure.update_xaxes(range=[-0.9, 3.6]).update_yaxes(range=[-1, 1.5])


# Where a name above its mark would lie on another one.
_PLACES = {
    "llama-2-7b": "middle left",
    "llama-2-13b": "middle right",
    "qwen3-4b": "middle left",
    "llama-3.1-8b": "middle right",
    "mistral-7b-v0.1": "middle right",
    "gemma-3-4b": "bottom left",
    "qwen2.5-1.5b": "middle left",
    "gemma-3-27b": "bottom center",
}


def models_text(configs, seq_len=32768):
    """The sentence under it: the widest gap in each direction."""
    size = {config.name: sizing.kv_bytes(config, seq_len) / GIB for config in configs}
    weight = {config.name: sizing.weight_bytes(config) / GB for config in configs}
    made_for = {config.name: config.max_seq_len for config in configs}
    largest, heaviest = max(size, key=size.get), max(weight, key=weight.get)
    limit = f" (made for {made_for[largest]:,} tokens)" if made_for[largest] < seq_len else ""
    return (
        f"The largest cache of {seq_len:,} tokens is that of {largest}{limit}, {size[largest]:.1f} GiB "
        f"beside {weight[largest]:,.0f} GB of weights; {heaviest} has {weight[heaviest]:,.0f} GB of weights "
        f"and a cache of {size[heaviest]:.1f} GiB."
    )


# --- the planner -----------------------------------------------------------------------


def planner(plan):
    """The parts of a plan's memory in bytes, in the order in which the bar stacks them.

    placed   users whose caches fit
    caches   their bytes, beside the shared prefix
    no_room  bytes of the other users' caches
    """
    placed = min(plan.users, plan.requests_that_fit)
    return {
        "plan": plan,
        "placed": placed,
        "weights": plan.weight_bytes,
        "kept": plan.kept_bytes,
        "shared": plan.shared_bytes,
        "caches": placed * plan.own_bytes,
        "no_room": (plan.users - placed) * plan.own_bytes,
        "changes": plan.changes(),
    }


def planner_figure(data):
    """One stacked bar of what a plan takes, in GB, and the end of the card as a line."""
    figure = look.new_figure("memory (GB)", "", height=230, grid=False)
    plan, placed = data["plan"], data["placed"]
    fit, left_out = _count(placed, "cache"), _count(plan.users - placed, "cache")
    parts = (
        ("weights", "weights:", look.WEIGHTS, "", look.INK),
        ("kept", "kept free:", look.MASKED, look.HATCH, look.INK),
        ("shared", "shared prefix:", look.CACHES, "", look.INK),
        ("caches", f"{fit}:", look.CACHES, look.HATCH, WHITE),
        ("no_room", f"{left_out}, no room:", look.WRONG, look.CROSS_HATCH, look.INK),
    )
    start = 0
    for key, name, color, pattern, lines in parts:
        one_by_one = key == "caches" and 0 < placed <= MOST_DRAWN
        sizes = [plan.own_bytes] * placed if one_by_one else [data[key]]
        bar = _bar(sizes, start, f"{name} {_gb(data[key])}", color, pattern, lines)
        opacity = look.CACHED_OPACITY if key == "shared" else 1
        figure.add_trace(bar.update(opacity=opacity, showlegend=data[key] > 0))
        start += data[key]
    card = plan.memory_bytes / GB
    end = max(card * 1.05, start / GB * 1.02)
    line = {"color": look.INK, "width": 3}
    figure.add_shape(type="line", x0=card, x1=card, y0=-0.55, y1=0.55, line=line)
    figure.add_annotation(
        x=card,
        y=-0.62,
        text=f"end of the card: {card:,.2f} GB",
        showarrow=False,
        yanchor="top",
        xanchor="right" if card > end / 3 else "left",
    )
    figure.update_layout(barmode="overlay", bargap=0, xaxis={"range": [0, round(end, 4)]})
    return figure.update_yaxes(showticklabels=False, ticks="", range=[-1.1, 0.6], showline=False)


def _count(number, noun):
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _bar(sizes, start, name, color, pattern, lines):
    """Segments side by side from `start`, in bytes, hatched in the color `lines`; several are outlined."""
    return go.Bar(
        x=[round(size / GB, 6) for size in sizes],
        y=[0] * len(sizes),
        base=[round((start + sum(sizes[:i])) / GB, 6) for i in range(len(sizes))],
        width=0.9,
        orientation="h",
        name=name,
        marker={
            "color": color,
            "line": {"color": look.PAPER, "width": 1 if len(sizes) > 1 else 0},
            "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": lines},
        },
        hovertemplate=name + "<extra></extra>",
    )


def planner_text(data):
    """The sentence under the bar: what fits, and what to change where it does not."""
    plan = data["plan"]
    card = f"{_gb(plan.memory_bytes)} ({plan.memory_bytes / GIB:,.2f} GiB)"
    weights, kept = _gb(plan.weight_bytes), _gb(plan.kept_bytes)
    fixed = f"{plan.config.name}: weights {weights}, {kept} kept free, card {card}. "
    request = f"{_count(plan.users, 'request')} of {_count(plan.context, 'token')}"
    fit = plan.requests_that_fit
    if plan.free_bytes < 0:
        said = f"Weights and kept memory alone exceed the card by {_gb(-plan.free_bytes)}: no request fits. "
    elif plan.fits:
        take, fit_too = ("takes", "fits") if plan.users == 1 else ("take", "fit")
        said = f"{request} {take} {_gb(plan.cache_bytes)} and {fit_too}; at most {fit:,} would."
    else:
        need, left = _gb(plan.cache_bytes), _gb(plan.free_bytes)
        said = f"{request} would take {need}, and {left} are left: {fit:,} {'fits' if fit == 1 else 'fit'}. "
    return fixed + said + _advice(plan, data["changes"]) + _limit(plan)


def _advice(plan, changes):
    if plan.fits:
        return ""
    words = {
        "users": lambda value: _count(value, "user"),
        "context": lambda value: f"requests of {_count(value, 'token')}",
        "cache_dtype": lambda value: f"the cache in {value}",
        "weights": lambda value: f"the weights in {value}",
        "memory": lambda value: f"another card: {value}",
    }
    found = [words[field](value) for field, value in changes.items()]
    if not found:
        return "No single change here is enough: several cards, or a smaller model."
    return f"One of these is enough: {'; '.join(found)}."


def _limit(plan):
    limit = plan.config.max_seq_len
    if plan.context <= limit:
        return ""
    return f" But {plan.config.name} was made for {_count(limit, 'token')}."


def _gb(count):
    return f"{count / GB:,.2f} GB"
