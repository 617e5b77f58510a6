"""Chapter 19, eviction and cost: a workload of conversations, a trace's recorded counts, bills, the figures.

Nothing here runs a model or looks at a clock.
"""

import random
from dataclasses import replace
from itertools import accumulate, count

import plotly.graph_objects as go

from kvcourse import measure
from kvcourse.figures import template as look
from kvcourse.sizing import prices

POLICIES = {"lru": "LRU", "lfu": "LFU", "length": "length-aware"}
FORESIGHT = "foresight"

RULES = {
    rules.name: rules
    for rules in (
        prices.OPENAI_5_MINUTES,
        prices.OPENAI_30_MINUTES,
        prices.ANTHROPIC_5_MINUTES,
        prices.ANTHROPIC_1_HOUR,
    )
}
GAPS = {
    "10 s": 10, "1 min": 60, "4 min": 240, "6 min": 360, "20 min": 1200, "50 min": 3000, "2 h": 7200,
}  # fmt: skip

READ_COLOR = f"rgba(0, 114, 178, {look.CACHED_OPACITY})"  # a key that is there already
WRITTEN = {"shape": look.HATCH, "fillmode": "overlay", "fgcolor": "#ffffff", "solidity": 0.2}


# --- eviction -------------------------------------------------------------------------------


def conversations(number, seed=0):
    """Requests of so many conversations in order of arrival, each a list of block ids from the front.

    All begin with the same 4 blocks. A conversation starts every 5 s on average; each of its requests
    adds 1 to 8 new blocks to all before; it goes on with probability 0.6, after 60 s on average.
    """
    draw, fresh = random.Random(seed), count(4)
    requests, start = [], 0.0
    for _ in range(number):
        start += draw.expovariate(1 / 5)
        ids, at = [0, 1, 2, 3], start
        while True:
            ids = ids + [next(fresh) for _ in range(draw.randint(1, 8))]
            requests.append((at, ids))
            if draw.random() < 0.4:
                break
            at += draw.expovariate(1 / 60)
    return [ids for _, ids in sorted(requests)]


def policies_figure(capacities, rates, unlimited):
    """Share of blocks found against capacity, one line a policy.

    capacities  in blocks; rates  {policy: share at each}; unlimited  the share without a limit
    """
    figure = look.new_figure("capacity (blocks)", "blocks found (%)", log_x=True)
    styles = {"lru": ("solid", "circle"), "lfu": ("dash", "square"), "length": ("dot", "diamond")}
    for policy, shares in rates.items():
        dash, symbol = styles.get(policy, ("longdashdot", "triangle-up"))
        name = POLICIES.get(policy, policy)
        line = look.here(capacities, [round(100 * share, 1) for share in shares], name=name, unit="%")
        line.line.dash, line.marker.symbol = dash, symbol
        figure.add_trace(line)
    figure.add_hline(y=round(100 * unlimited, 1), line={"color": look.INK, "width": 1, "dash": "dot"})
    figure.add_annotation(
        x=0, xref="paper", xanchor="left", y=round(100 * unlimited, 1), yanchor="bottom", showarrow=False,
        text=f"without a limit {unlimited:.0%}", font={"size": look.TEXT_SIZE},
    )  # fmt: skip
    figure.update_xaxes(tickvals=list(capacities), ticktext=[f"{n:,}" for n in capacities])
    figure.update_yaxes(range=[0, max(100 * unlimited * 1.15, 10)])
    return figure


def policies_text(capacities, rates, unlimited, at):
    """The sentence under it: what each policy finds, the best first, at the capacities `at`."""
    pieces = []
    for capacity in at:
        place = capacities.index(capacity)
        ranked = sorted(rates, key=lambda policy: -rates[policy][place])
        shares = ", ".join(f"{POLICIES.get(policy, policy)} {rates[policy][place]:.1%}" for policy in ranked)
        pieces.append(f"{capacity:,} blocks: {shares}")
    return f"Found with {'; with '.join(pieces)}; without a limit {unlimited:.1%}."


def recorded_hits(trace):
    """What `kvcourse bench paging` counted on a public trace, from data/measurements.

    trace  "mooncake-conversation" or "mooncake-synthetic" (Qin et al., FAST'25; Apache-2.0)
    Returns {policy, "foresight" or "head_first": {capacity: hits}}, with accesses, requests, names, once and
    beginnings as that command describes them, and quarters {policy: {capacity: hits in each quarter of the
    requests}, "accesses": blocks that each quarter asks for}.
    """
    run = measure.recorded_runs("paging")[-1].results["replay"][trace]
    kinds = {**run["runs"], FORESIGHT: run["foresight"], "head_first": run["head_first"]}
    quarters = {p: {row["capacity"]: row["quarters"] for row in rows} for p, rows in run["runs"].items()}
    return {
        **{kind: {row["capacity"]: row["hits"] for row in rows} for kind, rows in kinds.items()},
        **{key: run[key] for key in ("requests", "names", "once", "beginnings")},
        "accesses": run["references"],
        "quarters": {**quarters, "accesses": run["quarters"]},
    }


def trace_text(hits):
    """One line on a trace: how many requests ask for how many blocks."""
    each = hits["accesses"] / hits["requests"]
    return (
        f"{hits['requests']:,} requests ask for {hits['accesses']:,} blocks, {each:.0f} each on average; "
        f"{hits['names']:,} different ones, {hits['once']:,} of them once"
    )


def quarters_table(hits, capacity):
    """Shares that the policies find in each quarter of a trace's requests, as text, a row for each."""
    rows = []
    for policy, name in POLICIES.items():
        pairs = zip(hits["quarters"][policy][capacity], hits["quarters"]["accesses"], strict=True)
        rows.append(f"{name:>14}" + "".join(f"{found / asked:>7.1%}" for found, asked in pairs))
    return "\n".join(rows)


def trace_rates(hits):
    """A trace's shares for `policies_figure`: capacities, {policy: shares}, share without a limit."""
    capacities = sorted(capacity for capacity in hits["lru"] if capacity is not None)
    rates = {
        policy: [hits[policy][capacity] / hits["accesses"] for capacity in capacities]
        for policy in (*POLICIES, FORESIGHT)
    }
    return capacities, rates, hits["lru"][None] / hits["accesses"]


def trace_table(hits, capacities=None):
    """A trace's hits as text, a row for each capacity; None stands for no limit."""
    policies = (*POLICIES, FORESIGHT)
    names = [POLICIES.get(policy, policy) for policy in policies]
    lines = [f"{'blocks':>9}" + "".join(f"{name:>21}" for name in names)]
    for capacity in capacities or [*trace_rates(hits)[0], None]:
        label = "no limit" if capacity is None else f"{capacity:,}"
        found = (hits[policy][capacity] for policy in policies)
        lines.append(f"{label:>9}" + "".join(f"{n:>13,} {n / hits['accesses']:>7.1%}" for n in found))
    return "\n".join(lines)


# --- the pool -----------------------------------------------------------------------------


def pool_figure(rows):
    """One bar an event: blocks that live requests hold, kept ones, empty ones.

    rows  (event, held, kept, empty)
    """
    figure = look.new_figure("blocks", "", height=90 + 45 * len(rows), grid=False)
    names = [look.plain(row[0]) for row in rows]
    for column, name, marker in (
        (1, "held by live requests", {"color": look.KEY, "line": {"color": look.INK, "width": 1.5}}),
        (2, "kept, can be taken", {"color": READ_COLOR}),
        (3, "empty", {"color": "rgba(0,0,0,0)", "line": {"color": look.MASKED, "width": 1}}),
    ):
        values = [row[column] for row in rows]
        figure.add_trace(
            go.Bar(
                x=values, y=names, orientation="h", name=name, marker=marker,
                text=[str(value) if value else "" for value in values], textposition="inside",
                insidetextanchor="middle", textangle=0,
                textfont={"color": "#ffffff" if column == 1 else look.INK, "size": look.TEXT_SIZE},
                hovertemplate="%{y}: %{x} blocks " + name + "<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(barmode="stack", legend={"traceorder": "normal"})
    figure.update_xaxes(range=[0, sum(rows[0][1:4])])
    return figure.update_yaxes(autorange="reversed", ticks="")


def pool_text(rows):
    """The sentence under it."""
    return (
        "Held, kept, empty: "
        + "; ".join(f"{event}: {held}, {kept}, {empty}" for event, held, kept, empty in rows)
        + "."
    )


# --- the bill ------------------------------------------------------------------------------


def bills(turns, gap, prefix, question, answer, output, rules):
    """A conversation's bill, turn by turn, with a vendor's rules and without any.

    gap  a key of GAPS; rules  a key of RULES; output  price of an output token in uncached input tokens
    """
    chosen = replace(RULES[rules], output=float(output))
    requests = prices.conversation(turns, prefix, question, answer, GAPS[gap])
    used = prices.bill(requests, chosen)
    plain = [prices.cost(usage, None, chosen.output) for usage in used]
    totals = {}
    for name, other in RULES.items():
        other = replace(other, output=float(output))
        totals[name] = sum(prices.cost(usage, other) for usage in prices.bill(requests, other))
    return {
        "turns": turns,
        "gap": gap,
        "rules": rules,
        "read": [usage.read * chosen.read for usage in used],
        "written": [usage.written * chosen.write for usage in used],
        "plain": [usage.plain for usage in used],
        "output": [usage.output * chosen.output for usage in used],
        "with": list(accumulate(prices.cost(usage, chosen) for usage in used)),
        "without": list(accumulate(plain)),
        "totals": totals,
        "tokens_read": sum(usage.read for usage in used),
        "tokens_prompt": sum(usage.prompt for usage in used),
    }


def bills_figure(data):
    """Left: what each turn costs, by kind of token. Right: the sum so far, with the rules and without."""
    figure = look.new_figure("turn", "cost of the turn (uncached input tokens)")
    turns = list(range(1, data["turns"] + 1))
    for key, name, marker in (
        ("output", "answer", {"color": look.ARITHMETIC}),
        ("plain", "input, plain", {"color": look.KEY}),
        (
            "written",
            "input, written",
            {"color": look.KEY, "pattern": WRITTEN},
        ),
        (
            "read",
            "input, read from the cache",
            {"color": READ_COLOR, "line": {"color": look.INK, "width": 1}},
        ),
    ):
        figure.add_trace(
            go.Bar(
                x=turns, y=[round(value, 1) or None for value in data[key]],  # no outline where nothing is
                name=name, marker=marker,
                hovertemplate="turn %{x}, " + name + ": %{y:,}<extra></extra>",
            )
        )  # fmt: skip
    lines = (("without", "no caching", look.WRONG, "dash"), ("with", "with these rules", look.INK, "solid"))
    for key, name, color, dash in lines:
        line = look.here(turns, [round(value, 1) for value in data[key]], name=name, color=color)
        line.line.dash = dash
        figure.add_trace(line.update(xaxis="x2", yaxis="y2"))
    figure.update_layout(
        barmode="stack",
        xaxis={"domain": [0, 0.44]},
        xaxis2={**look.axis_like(figure, "xaxis"), "domain": [0.58, 1], "anchor": "y2"},
        yaxis2={**look.axis_like(figure, "yaxis"), "anchor": "x2", "rangemode": "tozero"},
        legend={"traceorder": "normal"},
    )
    figure.layout.xaxis2.title.text = "turn"
    figure.layout.yaxis2.title.text = "sum so far (uncached input tokens)"
    return figure


def bills_text(data):
    """The sentence under it: the sum, against no caching, and which rules cost less than that.

    No vendor is compared with another: each one's tokens have a price of their own.
    """
    paid, plain = data["with"][-1], data["without"][-1]
    ratio = paid / plain
    cheaper = [f"{name} ({total:,.0f})" for name, total in data["totals"].items() if total < plain]
    verdict = f"{1 - ratio:.0%} less than" if ratio < 1 else f"{ratio - 1:.0%} more than"
    verdict = "as much as" if abs(ratio - 1) < 0.005 else verdict
    turns = "1 turn" if data["turns"] == 1 else f"{data['turns']} turns, one every {data['gap']}"
    text = (
        f"{turns}, {data['rules']}: {paid:,.0f}, {verdict} the "
        f"{plain:,.0f} without caching; {data['tokens_read']:,} of {data['tokens_prompt']:,} input tokens "
        f"are read. "
    )
    if not cheaper:
        return text + f"None of the {len(data['totals'])} rules costs less than no caching."
    return text + f"Less than no caching: {'; '.join(cheaper)}."
