"""Chapter 13, latent attention: what a head gets back from a latent, and the rows of three models.

Nothing here runs a model or looks at a clock.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from kvcourse import sizing
from kvcourse.figures import template as look

RANKS = [8, 16, 32, 48, 64, 96, 128, 192, 256]  # of the panel
HEADS, HEAD_DIM, LAYERS = 4, 64, 6  # of austen-gpt2
TOKENS = 16  # that the panel shows, at equal distances
KINDS = ("keys", "values")


# --- the main panel ------------------------------------------------------------------------


def rank_state(bases, rows, perplexities, full):
    """What the panel needs, computed once.

    bases         float (layers, width, width): directions, a row each, strongest first, at right angles;
                  width = 2 · HEADS · HEAD_DIM
    rows          float (layers, T, width): keys of all heads, then values, of T ≥ TOKENS tokens of a text
    perplexities  {rank: perplexity with latents of that rank}; `full` without a latent
    """
    centered = rows - rows.mean(axis=1, keepdims=True)
    positions = np.arange(TOKENS) * (rows.shape[1] // TOKENS)
    return {
        "bases": bases,
        "positions": positions,
        "shown": centered[:, positions],
        "covariance": centered.swapaxes(1, 2) @ centered / rows.shape[1],
        "perplexities": perplexities,
        "full": full,
    }


def rank_view(state, rank, layer, head, show):
    """One head's keys or values (`show`) as they are and as a latent of `rank` numbers gives them back.

    `latent` (rank, TOKENS), `true`, `rebuilt` and `missing` (HEAD_DIM, TOKENS) are distances from the mean.
    `kept` is 1 − variance of what is missing / variance, of all heads' keys and values and of this head.
    """
    down, shown = state["bases"][layer, :rank], state["shown"][layer]
    latent = shown @ down.T  # (TOKENS, rank)
    rebuilt = latent @ down  # (TOKENS, width)
    spread, lost = _variances(state["covariance"][layer], down)
    start = (HEADS * KINDS.index(show) + head) * HEAD_DIM
    one, half = slice(start, start + HEAD_DIM), HEADS * HEAD_DIM
    parts = {"keys": slice(0, half), "values": slice(half, None), "head": one}
    return {
        "rank": rank,
        "layer": layer,
        "head": head,
        "show": show,
        "positions": state["positions"],
        "latent": np.abs(latent.T),
        "true": np.abs(shown[:, one].T),
        "rebuilt": np.abs(rebuilt[:, one].T),
        "missing": np.abs((shown - rebuilt)[:, one].T),
        "kept": {name: float(1 - lost[part].sum() / spread[part].sum()) for name, part in parts.items()},
        "perplexity": state["perplexities"][rank],
        "full": state["full"],
    }


def _variances(covariance, down):
    """Variance of each column, and of what is missing of it: the diagonals of C and (1 − P) C (1 − P),
    where P = downᵀ · down."""
    across = covariance @ down.T  # (width, rank)
    inside = down @ across  # (rank, rank)
    lost = np.diag(covariance) - 2 * (across * down.T).sum(axis=1) + ((inside @ down) * down).sum(axis=0)
    return np.diag(covariance), lost


def rank_figure(data):
    """Four heat maps, positions left to right: latent, one head as it is, as it comes back, the rest."""
    figure = look.new_figure("", "", height=400, grid=False)
    axes, layout = {axis: look.axis_like(figure, axis) for axis in ("xaxis", "yaxis")}, {}
    for place in range(4):
        suffix, left = str(place + 1) if place else "", 0.06 + 0.245 * place
        figure.add_trace(
            go.Heatmap(
                x=data["positions"].tolist(),
                zmin=0,
                showscale=False,
                xaxis=f"x{suffix}",
                yaxis=f"y{suffix}",
                hovertemplate="position %{x}, number %{y}: %{z:.2f}<extra></extra>",
            )
        )
        more = {"anchor": f"y{suffix}", "title": {"text": "position"}, "showgrid": False}
        layout[f"xaxis{suffix}"] = {**axes["xaxis"], **more, "domain": [left, left + 0.19]}
        more = {"anchor": f"x{suffix}", "autorange": "reversed", "showgrid": False}
        layout[f"yaxis{suffix}"] = {**axes["yaxis"], **more, "title": {"text": "" if place else "number"}}
        figure.add_annotation(
            x=left + 0.095, y=1, xref="paper", yref="paper", xanchor="center", yanchor="bottom",
            showarrow=False,
        )  # fmt: skip
    rank_update(figure.update_layout(**layout, margin={"t": 34}), data)
    return figure


def rank_update(figure, data):
    """Put `data` into a figure of `rank_figure`: a new one would take too long for a control that moves."""
    color = look.KEY if data["show"] == "keys" else look.VALUE
    # The first direction is far stronger than the rest: at its scale the others would be bare.
    usual, largest = float(np.percentile(data["latent"], 98)), float(data["true"].max())
    maps = (
        (f"latent, rank {data['rank']}", data["latent"], look.CACHES, usual),
        (f"{data['show'][:-1]} of head {data['head']}", data["true"], color, largest),
        ("from the latent", data["rebuilt"], color, largest),
        ("missing", data["missing"], look.WRONG, largest),
    )
    for trace, title, (text, numbers, tint, top) in zip(
        figure.data, figure.layout.annotations, maps, strict=True
    ):
        trace.z, trace.zmax, trace.colorscale = numbers.round(3).tolist(), top, _from_zero(tint)
        title.text = text


def _from_zero(color):
    """A scale from the page's color: `template.heat_map` starts at 35 %, which would show a rest of a tenth
    as more than a third of what it is the rest of."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return [[0, f"rgba({red},{green},{blue},0.03)"], [1, f"rgba({red},{green},{blue},1)"]]


def rank_text(data):
    """The sentence under the panel."""
    rank, kept = data["rank"], data["kept"]
    sizes = [LAYERS * numbers * 2 for numbers in (rank, 2 * HEADS * HEAD_DIM, 2 * HEAD_DIM)]
    return (
        f"Rank {rank} in all layers: {sizes[0]:,} B a token in 16 bits, against {sizes[1]:,} B with all "
        f"heads and {sizes[2]:,} B with one KV head; perplexity {data['perplexity']:.1f}, without a latent "
        f"{data['full']:.1f}. Layer {data['layer']} keeps {kept['keys']:.0%} of its keys and "
        f"{kept['values']:.0%} of its values, head {data['head']} {kept['head']:.0%} of its {data['show']}."
    )


# --- what a token leaves ---------------------------------------------------------------------


def _numbers(config):
    """Numbers that one layer keeps of a token."""
    if config.latent:
        return config.latent.kv_lora_rank + config.latent.qk_rope_head_dim
    return 2 * config.num_kv_heads * config.head_dim


def token_figure(configs):
    """A rectangle for each model: numbers a layer wide, layers high. Its area is the cache of a token."""
    figure = look.new_figure("numbers that a layer keeps of a token", "layers", height=360)
    left, ticks = 0, []
    for name, config in configs.items():
        width = _numbers(config)
        size = sizing.kv_bytes_per_token(config, 2)
        figure.add_trace(
            go.Bar(
                x=[left + width / 2],
                y=[config.num_layers],
                width=[width],
                marker={
                    "color": look.CACHES,
                    "pattern": {
                        "shape": look.HATCH,
                        "solidity": 0.25,
                        "fgcolor": look.CACHES,
                        "bgcolor": f"rgba(0, 114, 178, {look.CACHED_OPACITY})",
                    },
                    "line": {"color": look.INK, "width": 1},
                },
                hovertemplate=(
                    f"{name}: {width:,} numbers × {config.num_layers} layers × 2 B = {size:,} B"
                    "<extra></extra>"
                ),
                showlegend=False,
            )
        )
        figure.add_annotation(
            x=left + width / 2, y=config.num_layers, yanchor="bottom", showarrow=False,
            text=f"{name}<br>{size / 1024:.1f} KiB in 16 bits",
        )  # fmt: skip
        ticks.append((left + width / 2, f"{width:,}"))
        left += width + 700
    figure.update_xaxes(tickvals=[x for x, _ in ticks], ticktext=[text for _, text in ticks], showgrid=False)
    return figure.update_yaxes(range=[0, 78])


def token_text(configs):
    """The sentence under it; `configs` has "GPT-2 small", which the blog counts in float32."""
    parts = []
    for name, config in configs.items():
        size = sizing.kv_bytes_per_token(config, 2)
        parts.append(f"{name} {_numbers(config):,} × {config.num_layers}, {size / 1024:.1f} KiB")
    float32 = sizing.kv_bytes_per_token(configs["GPT-2 small"], 4)
    return (
        f"The area, numbers a layer × layers, is a token's cache, in 16 bits: {'; '.join(parts)}. "
        f"GPT-2 small in float32, as the blog counts it: {float32 / 1024:.1f} KiB."
    )
