"""Chapter 16, paged allocation: the hand of 12 requests, maps of a memory over time, and the sentences.

Nothing here runs a model or looks at a clock. A "slot" has room for the keys and values of one token.

The hand: in each step the running requests write one token each, then one new request arrives. Nobody knows
how long its answer will be. It gets slots or is turned away, and writes its first token. Whoever has written
its last token leaves at the end of the step; whoever needs a slot and has none is cut short.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from kvcourse.figures import template as look
from kvcourse.paging import lognormal_workload, simulate_arrivals

SLOTS = 40
LONGEST = 16  # prompt and answer together, the limit of this model
ANSWER_LIMIT = 6
BLOCK = 4  # slots of a block
# (tokens of the prompt, tokens of the answer). Nobody may look at the second number before it is over.
HAND = (
    (2, 6), (4, 6), (2, 2), (9, 1), (5, 1), (9, 3), (10, 2), (2, 3), (2, 6), (10, 3), (4, 4), (4, 4),
)  # fmt: skip
STEPS = 15  # the last answer is complete after this many
# One piece for each request, exactly as long as it will be, so placed that all twelve fit: (start, slots).
HINDSIGHT = (
    (0, 8), (12, 10), (8, 4), (22, 10), (22, 6), (22, 12), (0, 12), (12, 5), (0, 8), (17, 13), (8, 8),
    (30, 8),
)  # fmt: skip

KINDS = {  # of a slot in a step -> label
    "held": "holds a token",
    "later": "reserved for later",
    "never": "reserved, never used",
    "round": "rounding",
    "gap": "gap",
    "open": "reserved, empty so far",
}
WASTE = ("later", "never", "round", "gap")
POLICIES = {  # name in the package -> in words
    "reserve_max": "reserve the longest",
    "reserve_answer": "reserve prompt + longest answer",
    "buddy": "buddy",
    "paged": "paged",
}
KNOWS = "knows the answers"  # one piece, exactly as long as it will be: nobody can do this

# Thickness of a bar of a map, in lines. Without it plotly takes it from the distance of a trace's own bars:
# what occurs in distant lines only would be drawn over several of them.
_THICK = 0.88

_CLEAR = "rgba(0,0,0,0)"
_PALE = "rgba(213, 94, 0, 0.3)"  # vermilion


def _hatched(shape, color=look.WRONG, background=_CLEAR):
    pattern = {"shape": shape, "fgcolor": color, "bgcolor": background, "size": 6, "solidity": 0.35}
    return {"color": background, "pattern": pattern}


MARKERS = {
    "held": {"color": look.KEY},
    "later": _hatched("."),
    "never": _hatched(look.CROSS_HATCH, background=_PALE),
    "round": _hatched("|"),
    "gap": _hatched("-"),
    "open": _hatched(look.HATCH, color=look.MASKED),
}


# --- the hand -------------------------------------------------------------------------------------


@dataclass
class Request:
    """One request of the hand: its slots, in the order of its tokens, and what became of it.

    asked  slots that it was given on purpose; a buddy region has more
    fate   "waiting", "running", "complete", "cut short" or "turned away"
    """

    number: int
    prompt: int
    answer: int
    slots: list = field(default_factory=list)
    asked: int = 0
    fate: str = "waiting"
    scattered: bool = False  # turned away although enough slots were free, in no single piece

    @property
    def last_step(self):
        """The step that writes the last token of its answer."""
        return self.number + self.answer - 1

    def tokens(self, step):
        """Tokens that it holds at the end of a step."""
        return self.prompt + step - self.number + 1


def first_fit(free, n, every=1):
    """The first run of n free slots that starts at a multiple of `every`; None if there is none."""
    for start in range(0, len(free) - n + 1, every):
        if all(free[start : start + n]):
            return list(range(start, start + n))
    return None


def free_blocks(free, n):
    """The slots of the first n free blocks, wherever they lie; None if there are fewer."""
    starts = [start for start in range(0, len(free), BLOCK) if free[start]]
    return [start + i for start in starts[:n] for i in range(BLOCK)] if len(starts) >= n else None


def slots_for(policy, request, free):
    """(slots or None, how many were asked for) when a request arrives; `free` has one boolean a slot."""
    if not isinstance(policy, str):  # a reader's moves
        move = policy[request.number]
        return (list(range(move[0], move[0] + move[1])), move[1]) if move else (None, request.prompt + 1)
    if policy == "paged":
        wanted = request.prompt + 1
        return free_blocks(free, -(-wanted // BLOCK)), wanted
    wanted = {
        "reserve_max": LONGEST,
        "reserve_answer": request.prompt + ANSWER_LIMIT,
        "buddy": request.prompt + ANSWER_LIMIT,
        KNOWS: request.prompt + request.answer,
    }[policy]
    if policy == "buddy":  # a power of two, at a multiple of its size
        size = 1 << (wanted - 1).bit_length()
        return first_fit(free, size, every=size), wanted
    return first_fit(free, wanted), wanted


def play(policy, hand=HAND, steps=STEPS):
    """The hand under a policy, or under a reader's moves: (start, slots) or None for each request so far.

    Returns (requests, rows). rows[t] has an entry for each slot in step t: None or (kind, request number),
    with the kinds of KINDS. What nobody knows yet, because the request still runs, is "open".
    """
    requests = [Request(number, *lengths) for number, lengths in enumerate(hand)]
    taken, running = [], []
    for step in range(steps):
        for request in list(running):
            if not _room(policy, request, step, running):
                request.fate = "cut short"
                running.remove(request)
        if step < len(requests):
            _arrive(policy, requests[step], running)
        taken.append([(request, list(request.slots)) for request in running])
        for request in list(running):
            if step == request.last_step:
                request.fate = "complete"
                running.remove(request)
    return requests, [_row(step, now, requests) for step, now in enumerate(taken)]


def _free(running):
    free = [True] * SLOTS
    for request in running:
        for slot in request.slots:
            free[slot] = False
    return free


def _arrive(policy, request, running):
    free = _free(running)
    slots, request.asked = slots_for(policy, request, free)
    if slots is None:
        request.fate = "turned away"
        enough = sum(free) >= request.asked
        # A reader may turn away what would have fitted; a rule never does.
        request.scattered = enough and (isinstance(policy, str) or first_fit(free, request.asked) is None)
    else:
        request.slots, request.fate = slots, "running"
        running.append(request)


def _room(policy, request, step, running):
    """Whether the token of this step has a slot; under paging a new block is taken when it needs one."""
    if request.tokens(step) <= len(request.slots):
        return True
    more = free_blocks(_free(running), 1) if policy == "paged" else None
    request.slots += more or []
    return bool(more)


def _row(step, taken, requests):
    row = [None] * SLOTS
    for request, slots in taken:
        held, last = request.tokens(step), request.prompt + request.answer
        over = request.fate != "running"
        for place, slot in enumerate(slots):
            if place < held:
                kind = "held"
            elif not over:
                kind = "open"
            elif place < last:
                kind = "later"
            else:
                # A last block is rounding, and so is what a buddy region has beyond what was asked for.
                kind = "never" if place < request.asked else "round"
            row[slot] = kind, request.number
    if step < len(requests) and requests[step].scattered:
        row = [("gap", None) if cell is None else cell for cell in row]
    return row


def fates(requests):
    """{"complete": n, "cut short": n, "turned away": n}"""
    return {fate: sum(r.fate == fate for r in requests) for fate in ("complete", "cut short", "turned away")}


def slot_steps(rows):
    """How many slots, summed over the steps, were of each kind: {kind: count}, without those just free."""
    counts = dict.fromkeys(("held", *WASTE), 0)
    for row in rows:
        for cell in row:
            if cell and cell[0] in counts:
                counts[cell[0]] += 1
    return counts


def segments(row):
    """A row as runs of equal cells: (start, length, kind, request number)."""
    runs = []
    for slot, cell in enumerate(row):
        if cell is None:
            continue
        if runs and runs[-1][0] + runs[-1][1] == slot and runs[-1][2:] == cell:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, *cell)
        else:
            runs.append((slot, 1, *cell))
    return runs


def hand_table():
    """What each policy makes of the hand, as text: answers in full, and slot-steps of each kind of waste."""
    lines = [f"{'':>32}{'complete':>10}{'held':>7}{'later':>7}{'never':>7}{'rounding':>10}{'gaps':>6}"]
    for policy, words in {**POLICIES, KNOWS: KNOWS}.items():
        requests, rows = play(policy)
        counts = slot_steps(rows)
        cells = "".join(
            f"{counts[kind]:>{width}}" for kind, width in zip(("held", *WASTE), (7, 7, 7, 10, 6), strict=True)
        )
        lines.append(f"{words:>32}{fates(requests)['complete']:>10}{cells}")
    return "\n".join(lines)


# --- a map ------------------------------------------------------------------------------------------


def map_figure(rows, kinds, proposal=None):
    """Slots left to right, steps top to bottom; a request's number stands in the tokens it holds.

    kinds     which of KINDS stand in the legend
    proposal  (step, start, slots): outlined, where the reader would put the request that has just arrived
    """
    figure = look.new_figure("slot", "step", height=look.MAX_HEIGHT, grid=False)
    found = {kind: [] for kind in KINDS}
    for step, row in enumerate(rows):
        for start, length, kind, number in segments(row):
            found[kind].append((step, start, length, number))
    for kind in kinds:
        figure.add_trace(_bars(found[kind], kind))
    if proposal:
        step, start, length = proposal
        outline = {"color": _CLEAR, "line": {"color": look.INK, "width": 2.5}}
        box = {"x": [length], "y": [step], "base": [start - 0.5], "marker": outline, "orientation": "h"}
        figure.add_bar(**box, width=_THICK, name="your choice", hovertemplate="your choice<extra></extra>")
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(range=[-0.5, SLOTS - 0.5], dtick=4, ticks="", showgrid=True)
    return figure.update_yaxes(range=[STEPS - 0.5, -0.5], dtick=1, ticks="")


def _bars(found, kind):
    bar = look.cells(
        [start + (length - 1) / 2 for _, start, length, _ in found],
        [step for step, _, _, _ in found],
        name=KINDS[kind],
        hovertext=[
            f"step {step}, slots {start} … {start + length - 1}: {KINDS[kind]}"
            + ("" if number is None else f", request {number}")
            for step, start, length, number in found
        ],
        text=["" if kind != "held" else str(number) for _, _, _, number in found],
        textfont={"color": "#ffffff", "size": look.TEXT_SIZE},
        marker=MARKERS[kind],
        width=_THICK,
    )
    # `cells` makes cells of one length; these are as long as their runs, with a thin line between two.
    bar.x = [length - 0.1 for _, _, length, _ in found]
    bar.base = [start - 0.45 for _, start, _, _ in found]
    return bar


def policy_map(policy):
    """What the panel of the policies shows: the hand as this policy plays it."""
    requests, rows = play(policy)
    return {"policy": policy, "requests": requests, "rows": rows}


def policy_figure(data):
    """The map of a policy."""
    return map_figure(data["rows"], ("held", *WASTE))


def policy_text(data):
    """Who fitted, and what the slots held."""
    requests, counts = data["requests"], slot_steps(data["rows"])
    away = [str(r.number) for r in requests if r.fate == "turned away"]
    used = sum(counts.values()) - counts["gap"]
    parts = [f"{counts[kind]} {KINDS[kind]}" for kind in WASTE[:-1] if counts[kind]]
    if counts["gap"]:
        parts.append(f"and outside of them {counts['gap']} in gaps")
    words = {**POLICIES, KNOWS: KNOWS}[data["policy"]]
    return (
        f"{words[0].upper()}{words[1:]}: {fates(requests)['complete']} of {len(requests)} answered in full; "
        f"turned away: {', '.join(away) or 'nobody'}. Slots that requests had, summed over the steps: "
        f"{used}. Of these {counts['held']} held a token ({counts['held'] / used:.0%}). "
        f"The others: {', '.join(parts)}."
    )


# --- the reader's hand ----------------------------------------------------------------------------


def hand(start, slots, *, moves):
    """What the reader sees: the steps so far, and the request that has just arrived.

    start, slots  where it would go; moves: (start, slots) or None for each request before it
    """
    step = len(moves)
    over = step == len(HAND)
    requests, rows = play([*moves, None], steps=step + 1) if not over else play(moves)
    if not over:
        rows[step] = [cell if cell and cell[0] != "gap" else None for cell in rows[step]]
    data = {"moves": list(moves), "requests": requests, "rows": rows, "over": over}
    if not over:
        # What is running counts as open, so that no hatch tells how long its answer will be.
        data |= {"step": step, "start": start, "slots": slots, "prompt": HAND[step][0]}
        data["problem"] = problem(rows[step], start, slots, HAND[step][0])
        data["first_free"] = next((slot for slot, cell in enumerate(rows[step]) if cell is None), start)
    return data


def problem(row, start, slots, prompt):
    """Why a request with this prompt cannot go there, in words; None if it can."""
    if slots < prompt + 1:
        return f"{slots} slots are too few: the prompt alone has {prompt}, and an answer at least 1"
    if start + slots > SLOTS:
        return f"slots {start} … {start + slots - 1} do not exist: the last one is {SLOTS - 1}"
    for slot in range(start, start + slots):
        if row[slot]:
            return f"slot {slot} is taken by request {row[slot][1]}"
    return None


def hand_figure(data):
    """The map up to now; when all have come, with each kind of waste."""
    if data["over"]:
        return map_figure(data["rows"], ("held", *WASTE))
    proposal = data["step"], data["start"], min(data["slots"], SLOTS - data["start"])
    return map_figure(data["rows"], ("held", "later", "never", "gap", "open"), proposal)


def hand_text(data):
    """The question of this step, or the result."""
    count = fates(data["requests"])
    if data["over"]:
        answers = ", ".join(str(answer) for _, answer in HAND)
        return (
            f"All {len(HAND)} have come. You answered {count['complete']} in full, cut {count['cut short']} "
            f"short and turned {count['turned away']} away. Their answers had {answers} tokens: "
            f"start over to use that."
        )
    step, start, slots = data["step"], data["start"], data["slots"]
    where = f"slots {start} … {start + slots - 1} are free: it can go there"
    away = sum(move is None for move in data["moves"])
    return (
        f"Step {step}: request {step} arrives, a prompt of {data['prompt']} tokens; its answer has 1 to "
        f"{ANSWER_LIMIT}. {(data['problem'] or where).capitalize()}. So far {count['complete']} answered in "
        f"full, {count['cut short']} cut short, {away} turned away."
    )


# --- recorded: two real services --------------------------------------------------------------------

TRACES = {"azure-conv": "Azure, chat", "azure-code": "Azure, code"}


def azure_table(results):
    """What a recorded `kvcourse bench paging` found on the public traces, as text.

    Shares of the memory that hold a token, at the end of each request, over all steps of all requests, and in
    a full memory; requests at once in that, and how often one gave way; and the share of samples in which
    somebody waits when all requests come at their own time.
    """
    lines = [
        f"{'':>34}{'at the end':>12}{'all steps':>11}{'full memory':>13}{'at once':>9}{'gave way':>10}"
        f"{'somebody waits':>16}"
    ]
    for name, title in TRACES.items():
        found = results["allocation"][name]
        prompt, answer = (found[key] / found["requests"] for key in ("prompt_tokens", "answer_tokens"))
        lines.append(
            f"{title}: {found['requests']:,} requests, on average {prompt:,.0f} tokens in and {answer:,.0f} "
            f"out; limits {found['max_seq_len']:,} and {found['max_answer']:,}"
        )
        for policy, shares in found["policies"].items():
            run = shares["all_at_once"]
            lines.append(
                f"{POLICIES[policy]:>34}{100 * shares['end']:>10.1f} %{100 * shares['life']:>9.1f} %"
                f"{100 * run['shares']['held']:>11.1f} %{run['running']:>9.1f}{run['put_back']:>10}"
                f"{100 * shares['as_they_came']['crowded']:>14.1f} %"
            )
    return "\n".join(lines)


# --- a busy server ------------------------------------------------------------------------------------

REQUESTS = 200  # of a setting of the panel; all of them wait from the start
SHARE_NAMES = ("held", "later", "never", "rounding", "gap", "free")  # of kvcourse.paging's `shares`
ROWS = 16  # lines into which the panel's memory is cut

# Somebody else's: Kwon et al. 2023 (the vLLM paper), figure 2, OPT models on A100 GPUs:
# percent of the KV memory that holds tokens, in Orca as they rebuilt it (reserving the longest) and in vLLM.
PAPER_HELD = {"reserve_max": 20.4, "paged": 96.3}


def busy_table(runs):
    """{policy: Arrivals} as text: requests at once, and shares of the memory while somebody waits, in %."""
    widths = dict(zip(SHARE_NAMES, (7, 7, 7, 10, 6, 6), strict=True))
    lines = [f"{'':>32}{'at once':>9}" + "".join(f"{kind:>{width}}" for kind, width in widths.items())]
    for policy, run in runs.items():
        shares = run.shares()
        cells = "".join(f"{100 * shares[kind]:>{width}.0f}" for kind, width in widths.items())
        lines.append(f"{POLICIES[policy]:>32}{run.mean('running'):>9.0f}{cells}")
    return "\n".join(lines)


def shares_figure(runs):
    """One bar a policy: what the memory holds while somebody waits. The paper's shares as open circles."""
    figure = look.new_figure("share of the memory (%)", "", height=300)
    names = [POLICIES[policy] for policy in runs]
    shares = {policy: run.shares() for policy, run in runs.items()}
    for kind, own in zip(SHARE_NAMES, _KIND_OF[:-1], strict=False):
        label = KINDS[own]
        values = [round(100 * shares[policy][kind], 1) for policy in runs]
        hover = [f"{name}: {value} % {label}" for name, value in zip(names, values, strict=True)]
        figure.add_bar(
            x=values, y=names, orientation="h", name=label, marker=MARKERS[own],
            hovertext=hover, hovertemplate="%{hovertext}<extra></extra>",
        )  # fmt: skip
    source = "Kwon et al. 2023, figure 2: OPT models on A100 GPUs"
    theirs = look.published(
        list(PAPER_HELD.values()), [POLICIES[policy] for policy in PAPER_HELD],
        name="held, in the vLLM paper", source=source, unit="",
    )  # fmt: skip
    theirs.update(
        mode="markers",
        marker={"symbol": "circle-open", "size": 11, "color": look.PUBLISHED, "line": {"width": 3}},
        hovertemplate="the paper: %{x} % held<br>source: " + source + "<extra></extra>",
    )  # fmt: skip
    figure.add_trace(theirs)
    figure.update_layout(barmode="stack", legend={"traceorder": "normal"})
    figure.update_xaxes(range=[0, 100])
    return figure.update_yaxes(autorange="reversed", ticks="")


def shares_text(runs):
    """The sentence under it."""
    parts = [f"{POLICIES[policy]} {100 * run.shares()['held']:.0f} %" for policy, run in runs.items()]
    return f"Of the memory hold a token, while somebody waits: {', '.join(parts)}."


def busy(prompt, answer, memory, block, policy):
    """What the main panel shows: a memory in which all requests of a workload want to be.

    prompt, answer  medians of the lengths, tokens; memory: slots; block: slots of a block; policy: its name
    """
    runs, at_once = {}, {}
    for name in POLICIES:
        runs[name] = _simulated(prompt, answer, memory, block, name)
        at_once[name] = runs[name].mean("running")
    run = runs[policy]
    crowded = [sample for sample, full in enumerate(run.crowded.tolist()) if full] or [0]
    return {
        "policy": policy,
        "block": block,
        "memory": memory,
        "at_once": at_once,
        "shares": run.shares(),
        "put_back": run.put_back,
        "rows": run.kinds(crowded[len(crowded) // 2]).reshape(ROWS, -1).tolist(),
        "waits": bool(run.crowded.any()),
    }


@functools.lru_cache(maxsize=64)
def _simulated(prompt, answer, memory, block, policy):
    prompts, answers = lognormal_workload(REQUESTS, 16, prompt, answer)
    return simulate_arrivals(
        [0] * REQUESTS, prompts, answers, policy, memory, block_size=block, sample_every=50, maps=True
    )


def busy_figure(data):
    """Left, the memory at one moment, cut into lines; right, how many requests are there at once."""
    figure = look.new_figure("slot in its line", "first slot of the line", height=look.MAX_HEIGHT, grid=False)
    length = data["memory"] // ROWS
    found = {kind: [] for kind in ("held", *WASTE)}
    for line, row in enumerate(data["rows"]):
        cells = [(_KIND_OF[number], None) if _KIND_OF[number] else None for number in row]
        for start, run, kind, _ in segments(cells):
            found[kind].append((line, start, run))
    for kind, runs in found.items():
        figure.add_bar(
            x=[run for _, _, run in runs],
            y=[line for line, _, _ in runs],
            base=[start for _, start, _ in runs],
            orientation="h", width=_THICK, name=KINDS[kind], marker=MARKERS[kind],
            hovertext=[f"{run} slots: {KINDS[kind]}" for _, _, run in runs],
            hovertemplate="%{hovertext}<extra></extra>",
        )  # fmt: skip
    names = [_SHORT[policy] for policy in POLICIES]
    values = [round(data["at_once"][policy], 1) for policy in POLICIES]
    chosen = [policy == data["policy"] for policy in POLICIES]
    figure.add_bar(
        x=names, y=values, xaxis="x2", yaxis="y2", showlegend=False, text=[f"{value:g}" for value in values],
        textposition="outside", textfont={"size": look.TEXT_SIZE, "color": look.INK}, cliponaxis=False,
        marker={
            "color": [look.KEY if it else _PALE_KEY for it in chosen],
            "line": {"color": look.INK, "width": [2 if it else 0 for it in chosen]},
        },
        hovertemplate="%{x}: %{y} requests at once<extra></extra>",
    )  # fmt: skip
    figure.update_layout(
        barmode="overlay",
        xaxis={"domain": [0, 0.59], "range": [0, length], "ticks": ""},
        yaxis={
            "range": [ROWS - 0.5, -0.5], "ticks": "", "tickvals": list(range(0, ROWS, 4)),
            "ticktext": [f"{line * length:,}" for line in range(0, ROWS, 4)],
        },
        xaxis2={
            **look.axis_like(figure, "xaxis"), "domain": [0.685, 1], "anchor": "y2", "ticks": "",
            "tickangle": 0,
        },
        yaxis2={
            **look.axis_like(figure, "yaxis"), "anchor": "x2", "range": [0, 1.15 * max(values)],
            "title": {"text": "requests at once, mean"},
        },
    )  # fmt: skip
    return figure


def busy_text(data):
    """Requests at once, and what the memory holds while somebody waits."""
    policy, shares = data["policy"], data["shares"]
    others = ", ".join(f"{_SHORT[p]} {data['at_once'][p]:.1f}" for p in POLICIES if p != policy)
    words = POLICIES[policy] + (f", blocks of {data['block']:,}" if policy == "paged" else "")
    wasted = [
        f"{100 * shares[kind]:.1f} % {'gaps' if own == 'gap' else KINDS.get(own, 'free')}"
        for kind, own in list(zip(SHARE_NAMES, _KIND_OF, strict=True))[1:]
        if shares[kind] >= 0.0005
    ]
    text = (
        f"{words[0].upper()}{words[1:]}: on average {data['at_once'][policy]:.1f} requests at once in "
        f"{data['memory']:,} slots (the others: {others}). While somebody waits, "
        f"{100 * shares['held']:.1f} % hold a token; {', '.join(wasted)}."
    )
    if not data["waits"]:
        text = text.replace("While somebody waits,", f"All {REQUESTS} fit and nobody waits:")
    if policy == "paged" and data["put_back"]:
        text += f" {data['put_back']} times a running request had to give its blocks back."
    return text


_SHORT = {"reserve_max": "longest", "reserve_answer": "answer", "buddy": "buddy", "paged": "paged"}
_KIND_OF = ("held", "later", "never", "round", "gap", None)  # of the numbers in `Arrivals.kinds`
_PALE_KEY = f"rgba(0, 114, 178, {look.CACHED_OPACITY})"
