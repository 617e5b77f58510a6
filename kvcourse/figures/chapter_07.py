"""Chapter 07, preallocate: what three ways of growing copy and reserve, published times, and the figures.

Nothing here runs a model or looks at a clock. Everything counted in bytes is GPT-2 124M in float32,
72 KiB a token. One source is quoted, with its hardware: the table "preallocating vs concatenating" of
"The KV cache and the systems around it" (a blog post).
"""

from __future__ import annotations

import plotly.graph_objects as go

from kvcourse import config, sizing
from kvcourse.figures import template as look

BLOG = "“The KV cache and the systems around it”: laptop CPU, NumPy, 8 threads, fastest of 7 runs"

# Time of one step by tokens already there, GPT-2 124M in NumPy, in milliseconds (BLOG).
TOKENS = [128, 512, 1000]
BLOG_CONCATENATING_MS = [25, 33, 36]
BLOG_PREALLOCATED_MS = [23, 22, 24]

KIB, MIB, GIB = 2**10, 2**20, 2**30
GPT2 = config.lookup("gpt2")
MOST = GPT2.max_seq_len
TOKEN_BYTES = sizing.kv_bytes_per_token(GPT2, bytes_per_number=4)

CONCATENATE, DOUBLE, PREALLOCATE = "concatenate", "double", "preallocate"
WAYS = {"concatenating": CONCATENATE, "doubling": DOUBLE, "preallocated": PREALLOCATE}


def size(count):
    """Bytes in the unit that fits, exact below a MiB: 0 B, 72 KiB, 34.9 MiB, 34.3 GiB."""
    if count < MIB:
        return f"{count / KIB:,.0f} KiB" if count and count % KIB == 0 else f"{count:,} B"
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def extra_ms():
    """What concatenating adds to a step by the blog's table: [2, 11, 12] ms at 128, 512 and 1,000 tokens."""
    return [a - b for a, b in zip(BLOG_CONCATENATING_MS, BLOG_PREALLOCATED_MS, strict=True)]


# --- the main panel ------------------------------------------------------------------


def growing(length, way, capacity):
    """Everything the panel shows for a text of `length` tokens, written one at a time.

    way       a key of WAYS
    capacity  rows at first, for doubling

    `copied[n − 1]` are the old rows that step n moves, `reserved[n − 1]` the rows there is room for after
    it, and `moment[n − 1]` the rows of old and new arrays together at the fullest moment of it.
    """
    strategy, steps = WAYS[way], range(1, length + 1)
    totals = [0, *(sizing.rows_copied(strategy, n, capacity=capacity) for n in steps)]
    copied = [now - before for before, now in zip(totals, totals[1:], strict=False)]
    reserved = [sizing.rows_reserved(strategy, n, MOST, capacity=capacity) for n in steps]
    before = [capacity if strategy == DOUBLE else 0, *reserved[:-1]]
    moment = [
        now + (old if strategy == CONCATENATE or (strategy == DOUBLE and moved) else 0)
        for now, old, moved in zip(reserved, before, copied, strict=True)
    ]
    return {
        "length": length,
        "way": way,
        "capacity": capacity,
        "copied": copied,
        "reserved": reserved,
        "moment": moment,
        "total": totals[-1],
    }


def growing_figure(data):
    """Left: bytes that each step copies. Right: bytes held, reserved, and old and new together."""
    figure = look.new_figure("tokens held", "copied by this step (MiB)")
    steps = list(range(1, data["length"] + 1))
    figure.add_trace(_copies(steps, data))
    held = [_mib(n) for n in steps]
    x, reserved = _corners(steps, data["reserved"])
    empty = {"shape": look.CROSS_HATCH, "fillmode": "overlay", "fgcolor": look.WRONG, "fgopacity": 0.6}
    below = look.here([0, *steps], [0, *held], name="held")  # where the area of the empty rows ends
    for trace in (
        below.update(mode="lines", line={"width": 0}, showlegend=False),
        look.here(x, reserved, name="reserved, still empty", color=look.WRONG).update(
            mode="lines", fill="tonexty", fillcolor="rgba(213,94,0,0.08)", fillpattern=empty
        ),
        look.here([0, *steps], [0, *held], name="held").update(mode="lines"),
        look.here(*_moments(steps, data), name="old and new at once", color=look.WRONG).update(
            mode="lines", line={"dash": "dot"}
        ),
    ):
        trace.update(xaxis="x2", yaxis="y2", hovertemplate=_hover(trace.name))
        figure.add_trace(trace)
    figure.update_layout(
        xaxis={"domain": [0, 0.43], "range": [0, MOST]},
        xaxis2={**look.axis_like(figure, "xaxis"), "domain": [0.57, 1], "anchor": "y2", "range": [0, MOST]},
        yaxis={"range": [0, 75]},
        yaxis2={**look.axis_like(figure, "yaxis"), "anchor": "x2", "range": [0, 150]},
    )
    figure.layout.xaxis2.title.text = "tokens held"
    figure.layout.yaxis2.title.text = "memory (MiB)"
    return figure.update_xaxes(tickformat=",", dtick=256)


def _copies(steps, data):
    """A line where every step copies, a spike with a marker where few do."""
    name = "old rows copied"
    if data["way"] != "doubling":
        line = look.here(steps, [_mib(rows) for rows in data["copied"]], name=name, color=look.WRONG)
        return line.update(mode="lines", hovertemplate=_hover(name))
    x, y, symbols = [0], [0], ["circle"]
    for n, rows in zip(steps, data["copied"], strict=True):
        if rows:
            x, y = [*x, n, n, n], [*y, 0, _mib(rows), 0]
    x, y = [*x, steps[-1]], [*y, 0]
    symbols = [7 if value else 0 for value in y]
    line = look.here(x, y, name=name, color=look.WRONG)
    return line.update(marker={"size": symbols}, hovertemplate=_hover(name))


def _corners(steps, rows):
    """The line of a staircase: each height at its first and its last step only."""
    x, y = [], []
    for n, now in zip(steps, rows, strict=True):
        if len(y) > 1 and y[-1] == y[-2] == _mib(now):
            x[-1] = n
        else:
            x, y = [*x, *([n] if y else [0, n])], [*y, *([_mib(now)] if y else [_mib(now)] * 2)]
    return x, y


def _moments(steps, data):
    """A vertical stroke where a step needs more than it keeps; a line where every step does."""
    if data["way"] == "concatenating":
        return steps, [_mib(rows) for rows in data["moment"]]
    x, y = [], []
    for n, moment, reserved in zip(steps, data["moment"], data["reserved"], strict=True):
        if moment > reserved:
            x, y = [*x, n, n, None], [*y, _mib(reserved), _mib(moment), None]
    return x, y


def _hover(name):
    return f"{name}: %{{y:,}} MiB at %{{x:,}} tokens<extra></extra>"


def _mib(rows):
    return round(rows * TOKEN_BYTES / MIB, 4)


def growing_text(data):
    """The sentence under the panel, in exact bytes."""
    length, total = data["length"], data["total"]
    held, reserved = length, data["reserved"][-1]
    way = data["way"] + (f" from {_rows(data['capacity'])}" if data["way"] == "doubling" else "")
    last = data["copied"][-1]
    copied = f"the last step copied {size(last * TOKEN_BYTES)} ({_rows(last, 'old ')}), all steps together "
    copied += f"{size(total * TOKEN_BYTES)} ({_rows(total)}, {total / length:.2f} for each one held)"
    moment = size(max(data["moment"]) * TOKEN_BYTES)
    return (
        f"{way[0].upper()}{way[1:]}, {length:,} token{'s one at a time' * (length > 1)}: {copied}; "
        f"{size(held * TOKEN_BYTES)} held, {size(reserved * TOKEN_BYTES)} reserved "
        f"({reserved / held:,.2f} times), and at most {moment} at one moment."
    )


def _rows(count, which=""):
    return f"{count:,} {which}row{'s' * (count != 1)}"


# --- one step against the length -------------------------------------------------------


def blog_extra_figure():
    """The blog's extra time over two lines through zero, along the bytes: one meets it at 512, one at 1,000.

    Each published time is rounded to 1 ms, so a difference of two is known within 1 ms.
    """
    figure = look.new_figure("bytes copied by the step (MiB)", "extra time of the step (ms)")
    copied = [_mib(tokens) for tokens in TOKENS]
    for anchor, dash in ((1, "dot"), (2, "dashdot")):
        rate = extra_ms()[anchor] / copied[anchor]
        figure.add_trace(
            go.Scatter(
                x=[0, *copied],
                y=[0, *(round(rate * mib, 2) for mib in copied)],
                name=f"as the bytes, through {TOKENS[anchor]:,} tokens",
                mode="lines",
                line={"color": look.INK, "width": 1.5, "dash": dash},
                hovertemplate="as the bytes: %{y} ms at %{x} MiB<extra></extra>",
            )
        )
    line = look.published(
        copied, extra_ms(), name="blog, concatenating − preallocated", source=BLOG, unit="ms"
    )
    error = {"type": "constant", "value": 1, "color": look.PUBLISHED, "thickness": 2, "width": 6}
    figure.add_trace(line.update(error_y=error, marker={"size": 9}))
    return figure.update_yaxes(rangemode="tozero")


def blog_extra_text():
    """The sentence under it: what the bytes give at the other point."""
    extra, copied = extra_ms(), [tokens * TOKEN_BYTES for tokens in TOKENS]
    up, down = extra[1] * copied[2] / copied[1], extra[2] * copied[1] / copied[2]
    return (
        f"If the extra time went with the bytes, {extra[1]} ms at 512 tokens would be {up:.1f} ms at 1,000, "
        f"where the blog has {extra[2]}; and {extra[2]} ms at 1,000 would be {down:.1f} ms at 512, where it "
        f"has {extra[1]}. Whiskers: both times are rounded to 1 ms."
    )


def step_rows(timed):
    """Rows for `step_table` from {(name, tokens): Timing}, the fastest call of each, in milliseconds."""
    rows = []
    for tokens in TOKENS:
        found = {name: timing for (name, length), timing in timed.items() if length == tokens}
        row = {name: timing.min * 1000 for name, timing in found.items()}
        rows.append({"tokens": tokens, **row, "why": next((t.why for t in found.values() if t.why), "")})
    return rows


def step_table(rows):
    """This machine's steps beside the blog's, as text.

    rows  {"tokens", "concatenating", "growing", "preallocated"} in milliseconds, and "why": empty, or what
          disturbed the row
    """
    lines = [
        f"{'':>12}{'here':>48}{'blog':>32}",
        f"{'tokens there':>12}{'concatenating':>15}{'growing':>11}{'preallocated':>14}{'extra':>8}"
        f"{'concatenating':>15}{'preallocated':>14}{'extra':>7}",
    ]
    for row, slow, fast in zip(rows, BLOG_CONCATENATING_MS, BLOG_PREALLOCATED_MS, strict=True):
        ours = f"{row['concatenating']:12.1f} ms{row['growing']:8.1f} ms{row['preallocated']:11.1f} ms"
        share = row["concatenating"] / row["preallocated"] - 1
        theirs = f"{slow:12} ms{fast:11} ms{slow / fast - 1:+7.0%}"
        lines.append(
            f"{row['tokens']:>12,}{ours}{share:+8.0%}{theirs}" + "   here disturbed" * bool(row["why"])
        )
    for row in rows:
        if row["why"]:
            lines.append(f"disturbed at {row['tokens']:,}, do not quote: {row['why']}")
    return "\n".join(lines)


def copy_table(rows):
    """The copies of one step alone, as text.

    rows  {"tokens", "bytes", "fresh", "again", "faults", "extra", "why"}: bytes copied; ms into fresh arrays
          and into arrays that were there; page faults of a fresh round (None: the system does not say);
          ms that concatenating added to the whole step (below zero the machine was too busy to tell).
          At least two; the last line compares the growth of the last two.
    """
    head = f"{'tokens there':>12}{'copied':>11}{'into arrays there':>26}{'into fresh ones':>18}"
    lines = [f"{head}{'page faults':>13}{'whole step':>13}"]
    for row in rows:
        rate = f"({2 * row['bytes'] / row['again'] / 1e6:.0f} GB/s)"
        faults = "not told" if row["faults"] is None else f"{row['faults']:,.0f}"
        alone = f"{row['again']:12.1f} ms {rate:>10}{row['fresh']:15.1f} ms{faults:>13}"
        whole = f"{row['extra']:+.1f} ms" if row["extra"] >= 0 else "cannot tell"
        lines.append(
            f"{row['tokens']:>12,}{size(row['bytes']):>11}{alone}{whole:>13}"
            + "   disturbed" * bool(row["why"])
        )
    return "\n".join([*lines, _extra_growth(*rows[-2:])])


def _extra_growth(before, last):
    grown = f"{before['tokens']:,} → {last['tokens']:,}: bytes {last['bytes'] / before['bytes']:.2f} times, "
    if before["why"] or last["why"] or min(before["extra"], last["extra"]) <= 0:
        return grown + "extra time of the whole step: cannot tell, the machine was busy"
    return grown + f"extra time of the whole step {last['extra'] / before['extra']:.2f} times"


def touched_table(rows):
    """What the system has put in place after each act, as text.

    rows  {"act", "used", "resident"}: what was done, bytes of rows written so far, bytes in memory more
          than before the reservation
    """
    lines = [f"{'':>30}{'rows written':>14}{'in memory':>12}"]
    for row in rows:
        used, resident = (f"{row[key] / MIB:.1f} MiB" for key in ("used", "resident"))
        lines.append(f"{row['act']:>30}{used:>14}{resident:>12}")
    return "\n".join(lines)
