"""The exercise of chapter 15."""

from kvcourse.checks import Run, exercise, short

# (seq_len, num_sinks, window, slack)
CASES = (
    (20, 2, 5, 3),  # long: the ring has been overwritten twice
    (7, 2, 5, 3),  # the window is full for the first time
    (8, 2, 5, 3),
    (13, 0, 4, 0),  # no sinks, no slack
    (5, 4, 8, 7),  # short: the window would reach back into the sinks
    (3, 4, 8, 7),  # not even all sinks are there
    (1, 1, 1, 0),
    (10_000, 4, 252, 63),
)


@exercise(
    "15.held_slots",
    right=(
        "sinks and the newest `window`, each in its slot: position p of the ring lies in slot "
        "num_sinks + (p − num_sinks) mod (window + slack)."
    ),
    todo="replace `...` by the dictionary, then run this cell again",
)
def held_slots(run: Run) -> str | None:
    """``held_slots(seq_len, num_sinks, window, slack)`` → {position: slot}."""
    for case in CASES:
        got = run(*case)
        if not isinstance(got, dict):
            return f"return a dictionary {{position: slot}}, not {short(got)}"
        mistake = _position_mistake(set(got), *case) or _slot_mistake(got, *case)
        if mistake:
            seq_len, num_sinks, window, slack = case
            return f"{mistake} (seq_len {seq_len:,}, num_sinks {num_sinks}, window {window}, slack {slack})"
    return None


def _position_mistake(got, seq_len, num_sinks, window, slack):
    sinks = set(range(min(num_sinks, seq_len)))

    def newest(n):
        return sinks | set(range(max(seq_len - n, num_sinks), seq_len))

    want = newest(window)
    if got == want:
        return None
    if seq_len in got:
        return f"position {seq_len} is listed, but the last of {seq_len:,} tokens is {seq_len - 1}"
    if got == want - sinks:
        return f"the sinks, positions 0 … {len(sinks) - 1}, are missing: they are held for good"
    if got == newest(window + 1):
        return f"position {seq_len - window - 1} is one too many: the window counts the newest token itself"
    if got == newest(window - 1):
        return f"position {seq_len - window} is missing: the window is the newest {window}, not {window - 1}"
    if got == newest(window + slack):
        return "rows of the slack are listed: they lie there still, but the newest token does not see them"
    if got == newest(window - num_sinks):
        return "the sinks do not count as part of the window: there are num_sinks + window rows in all"
    extra, missing = sorted(got - want, key=str), sorted(want - got)
    if extra:
        return f"position {short(extra[0])} is listed, and the newest token does not see it"
    return f"position {missing[0]} is missing, and the newest token sees it"


def _slot_mistake(got, seq_len, num_sinks, window, slack):
    ring = window + slack

    def slots(rule):
        return {p: p if p < num_sinks else rule(p) for p in got}

    want = slots(lambda p: num_sinks + (p - num_sinks) % ring)
    if got == want:
        return None
    position = next(p for p in sorted(want) if got[p] != want[p])
    where = f"position {position:,} in slot {short(got[position])}, expected {want[position]}"
    if position < num_sinks:
        return f"{where}: a sink lies in the slot of its own number"
    for rule, name in (
        (
            lambda p: num_sinks + (p - num_sinks) % window,
            "modulo the window; the ring has window + slack slots, and with fewer a pass of several tokens "
            "overwrites rows it needs",
        ),
        (lambda p: (p - num_sinks) % ring, "the slots of the sinks come first: add num_sinks"),
        (
            lambda p: p % ring,
            "the ring begins after the sinks: take num_sinks off the position, and add it after",
        ),
        (
            lambda p: num_sinks + p % ring,
            "count from the first position that is no sink: take num_sinks off before the remainder",
        ),
        (
            lambda p: p % (ring + num_sinks),
            "a ring over all slots runs over the sinks, which never move: it has window + slack slots",
        ),
    ):
        if got == slots(rule):
            return f"{where}: {name}"
    return where
