"""Figures of chapter 18: what a prompt finds in the cache and what that saves. Plain data in, figures out."""

from __future__ import annotations

import plotly.graph_objects as go

from kvcourse import sizing
from kvcourse.config import catalogue
from kvcourse.figures import template as look
from kvcourse.paging.prompt_layout import Part, visits

# --- the prompt-layout bench ------------------------------------------------------------

SIZES = {"system text": 310, "tools": 900, "documents": 1600, "timestamp": 40, "user turn": 160}  # tokens
POOL = 600  # blocks
MODEL = "llama-3.1-8b"  # whose arithmetic the saving is counted in
_NARROW = ("timestamp", "user turn")  # too narrow for a name above them


def layout(others, places, changes):
    """Three requests with the same parts, through one pool.

    others   prompts of strangers, 1,000 tokens each, between two of ours
    places   {part: its place}, 1 … 5; a part that leaves its place of `SIZES` goes to the given one
    changes  {part: whether it is another text in each request}
    """
    order = _in_order(places)
    parts = [Part(name, SIZES[name], changes[name]) for name in order]
    found = visits(parts, others=others, num_blocks=POOL)
    last = found[-1]
    config = catalogue()[MODEL]
    computed = sizing.forward_flops(config, last.tokens - last.hit, last.hit).total
    whole = sizing.forward_flops(config, last.tokens).total
    return {
        "parts": [(part.name, part.tokens, part.changes) for part in parts],
        "visits": [(v.tokens, v.hit, v.miss, v.part, v.reason) for v in found],
        "others": others,
        "saved_flops": 1 - computed / whole,
    }


def _in_order(places):
    """Parts by place. Of two with one number, one that moved up stands before, one that moved down after."""

    def key(item):
        home, name = item
        place = places[name]
        return place, (place > home) - (place < home)

    return [name for _, name in sorted(enumerate(SIZES, 1), key=key)]


def layout_figure(data):
    """One row a request: parts from left to right, what is read again and what is computed."""
    figure = look.new_figure("token of the prompt", "", height=360, grid=False)
    for cached, name in ((True, "cached, read again"), (False, "computed")):
        rows = [segment for segment in _segments(data) if segment["cached"] == cached]
        figure.add_trace(_bars(rows, name, cached))
    misses = [(miss, number, reason) for number, (_, _, miss, _, reason) in enumerate(data["visits"], 1)]
    figure.add_trace(
        go.Scatter(
            x=[miss for miss, _, _ in misses],
            y=[number for _, number, _ in misses],
            name="why no more is cached",
            mode="markers",
            marker={"symbol": "x", "size": 13, "color": look.WRONG},
            hovertext=[f"request {number}: {reason}" for _, number, reason in misses],
            hovertemplate="%{hovertext}<extra></extra>",
            cliponaxis=False,
        )
    )
    _name_parts(figure, data)
    total = sum(tokens for _, tokens, _ in data["parts"])
    figure.update_xaxes(range=[0, total], tickformat=",")
    figure.update_yaxes(
        range=[3.5, -0.75],
        tickvals=[1, 2, 3],
        ticktext=[f"request {number}\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}" for number in (1, 2, 3)],
        showline=False,
        ticks="",
    )
    return figure.update_layout(
        barmode="overlay", legend={"y": -0.24, "yanchor": "top"}, margin={"t": 8, "r": 44}, bargap=0.3
    )


def _segments(data):
    """Pieces of bars, cut at the parts' borders and where the hit ends."""
    for number, (_, hit, _, _, _) in enumerate(data["visits"], 1):
        start = 0
        for name, tokens, _ in data["parts"]:
            stop = start + tokens
            for low, high, cached in (
                (start, min(stop, hit), True),
                (max(start, hit), stop, False),
            ):
                if low < high:
                    yield {"row": number, "name": name, "low": low, "high": high, "cached": cached}
            start = stop


def _bars(rows, name, cached):
    return go.Bar(
        x=[row["high"] - row["low"] for row in rows],
        base=[row["low"] for row in rows],
        y=[row["row"] for row in rows],
        orientation="h",
        name=name,
        marker={
            # The strength is part of the color: the legend ignores an opacity of its own.
            "color": f"rgba(0,114,178,{look.CACHED_OPACITY})" if cached else look.KEY,
            "line": {"color": look.INK, "width": 1 if cached else 2.5},
        },
        hovertext=[
            f"request {row['row']}, {row['name']}: tokens {row['low']:,} … {row['high'] - 1:,} {name}"
            for row in rows
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _name_parts(figure, data):
    total, start, narrow = sum(tokens for _, tokens, _ in data["parts"]), 0, []
    for name, tokens, changes in data["parts"]:
        middle, text = start + tokens / 2, f"<i>{name}: new</i>" if changes else name
        start += tokens
        if name in _NARROW:
            narrow.append((middle, text))
        else:
            text = text.replace("system text", "system")  # the whole name is wider than the part
            figure.add_annotation(x=middle, y=0.42, text=text, showarrow=False, yanchor="middle")
    # A name hangs beside a line, toward the middle. Of two in one half the outer one hangs higher, so
    # that no line crosses a name.
    both_left = all(middle < total / 2 for middle, _ in narrow)
    both_right = all(middle >= total / 2 for middle, _ in narrow)
    for number, (middle, text) in enumerate(narrow):
        high = both_left and number == 0 or both_right and number == 1
        _name_narrow(figure, middle, text, 0.42 - 0.38 * (2 if high else 1), middle < total / 2)


def _name_narrow(figure, x, text, y, leftward):
    anchor = "left" if leftward else "right"
    figure.add_annotation(x=x, y=y, text=text, showarrow=False, yanchor="middle", xanchor=anchor)
    line = {"color": look.INK, "width": 1}
    figure.add_shape(type="line", x0=x, x1=x, y0=y - 0.15, y1=0.64, line=line)


def layout_text(data):
    """The sentence under the panel."""
    tokens, hit, _, part, reason = data["visits"][-1]
    others = data["others"]
    between = f"{others} prompt{'s' * (others != 1)} of strangers between two of ours"
    order = ", ".join(name + ("*" if changes else "") for name, _, changes in data["parts"])
    share = f"{hit:,} of {tokens:,} tokens are cached ({hit / tokens:.1%})"
    saved = f"which saves {data['saved_flops']:.1%} of its prefill's arithmetic (Llama 3.1 8B)"
    return (
        f"Order (* new in each request): {order}; {between}. Request 3: {share}, {saved}. "
        f"Why no more: {reason}, in the {part}."
    )


# --- times --------------------------------------------------------------------------------

# (source, with model and hardware where it names them; tokens; the first read; the later ones), times as
# they print them. The blog's tokens are those that it reused and computed; it calls them “~5,900”.
PUBLISHED = (
    ("the book chapter: model and card not said", 2000, "95 ms", ("21 ms",)),
    ("the blog: Qwen2.5-1.5B, RTX 5070 Ti, vLLM", 5937, "311 ms", ("30 ms", "27 ms")),
    ("  the same with prefix caching off", 5937, "351 ms", ("344 ms", "341 ms")),
    ("the course page: qwen2.5:3b on a laptop", 3951, "14.35 s", ("0.09 s",)),
    ("the course page, another check: Ollama", 1130, "2.53 s", ("0.04 s",)),
)
PUBLISHED_WORD = {0.25: 0.78, 0.50: 0.55, 0.75: 0.28}  # the course page: second read ÷ first read
PUBLISHED_TOKENS = 3951
PUBLISHED_MODEL = "qwen2.5-3b"


def published_table():
    """The published times, one line each: theirs, not ours."""
    lines = [f"{'':<46}{'tokens':>7}{'first read':>12}{'later ones':>16}{'first ÷ last':>14}"]
    for source, tokens, first, later in PUBLISHED:
        ratio = _two_digits(_seconds(first) / _seconds(later[-1]))
        lines.append(f"{source:<46}{tokens:>7,}{first:>12}{', '.join(later):>16}{ratio:>14}")
    return "\n".join(lines)


def _two_digits(ratio):
    """More would not be in the times: 0.09 s is anything from 0.085 to 0.095."""
    return f"{ratio:.1f}" if ratio < 10 else f"{float(f'{ratio:.2g}'):.0f}"


def _seconds(text):
    number, unit = text.split()
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit]


def work_left(name, tokens, where):
    """Share of a prefill's arithmetic that is left when the first `where` of its tokens are cached.

    name is in the catalogue; the cached part is a whole number of tokens, rounded down.
    """
    config, past = catalogue()[name], int(tokens * where)
    left, whole = (sizing.forward_flops(config, tokens - cached, cached) for cached in (past, 0))
    return left.total / whole.total


def word_figure(measured, work):
    """Second read ÷ first read by the place of the changed word.

    measured  {place: ratio} of this machine
    work      {place: share of the arithmetic that is left} of our model and prompts
    """
    where = sorted(PUBLISHED_WORD)
    x = [round(100 * place) for place in where]
    figure = look.new_figure("place of the changed word (% of the prompt)", "second read ÷ first read")
    figure.add_trace(
        go.Scatter(
            x=[0, 100],
            y=[1, 0],
            name="share of tokens after it",
            mode="lines",
            line={"color": look.INK, "dash": "dot", "width": 1.5},
            hovertemplate="%{y:.2f} of the tokens come after %{x} %<extra></extra>",
        )
    )
    figure.add_trace(
        go.Scatter(
            x=[0, *x, 100],
            y=[1, *(round(work[place], 3) for place in where), 0],
            name="share of our model's arithmetic",
            mode="lines",
            line={"color": look.ARITHMETIC, "shape": "spline", "width": 2},
            hovertemplate="%{y:.2f} of the arithmetic comes after %{x} %<extra></extra>",
        )
    )
    figure.add_trace(
        look.published(
            x,
            [PUBLISHED_WORD[place] for place in where],
            name="the course page",
            source="course page: qwen2.5:3b on a laptop, 3,951 tokens",
        )
    )
    figure.add_trace(look.here(x, [round(measured[place], 2) for place in where], name="this machine"))
    figure.update_xaxes(range=[0, 100], dtick=25)
    return figure.update_yaxes(range=[0, 1.05], dtick=0.25)


def word_text(measured):
    """The sentence under the figure."""
    told = ", ".join(f"{ratio:.2f} at {100 * place:.0f} %" for place, ratio in sorted(measured.items()))
    return f"With one word changed the second read took this much of the first: {told}."
