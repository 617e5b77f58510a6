"""Typical wrong answers of chapter 15."""


def _answer(positions=None, slot=None):
    """The right answer with one of its two parts exchanged."""

    def held_slots(seq_len, num_sinks, window, slack):
        sizes = (num_sinks, window, slack)
        return {
            p: (slot or _slot)(p, *sizes) if p >= num_sinks else p
            for p in (positions or _positions)(seq_len, *sizes)
        }

    return held_slots


def _slot(p, num_sinks, window, slack):
    return num_sinks + (p - num_sinks) % (window + slack)


def _positions(seq_len, num_sinks, window, slack):
    return [p for p in range(seq_len) if p < num_sinks or p >= seq_len - window]


def _newest(more):
    return lambda seq_len, s, w, _: [p for p in range(seq_len) if p < s or p >= seq_len - w - more]


def _list(seq_len, num_sinks, window, slack):
    return _positions(seq_len, num_sinks, window, slack)


def _sinks_moved(seq_len, num_sinks, window, slack):
    return {p: p % (window + slack) + 1 for p in _positions(seq_len, num_sinks, window, slack)}


WRONG = {
    "15.held_slots": [
        (_answer(slot=lambda p, s, w, k: s + (p - s) % w), "modulo the window"),
        (_answer(slot=lambda p, s, w, k: (p - s) % (w + k)), "add num_sinks"),
        (_answer(slot=lambda p, s, w, k: p % (w + k)), "the ring begins after the sinks"),
        (_answer(slot=lambda p, s, w, k: s + p % (w + k)), "take num_sinks off before the remainder"),
        (_answer(slot=lambda p, s, w, k: p % (s + w + k)), "runs over the sinks"),
        (_answer(slot=lambda p, s, w, k: p), "expected"),
        (_answer(positions=_newest(1)), "is one too many"),
        (_answer(positions=_newest(-1)), "is missing: the window is the newest"),
        (_answer(positions=lambda n, s, w, k: range(max(n - w, s), n)), "held for good"),
        (
            _answer(positions=lambda n, s, w, k: [p for p in range(n) if p < s or p >= n - w - k]),
            "rows of the slack",
        ),
        (
            _answer(positions=lambda n, s, w, k: [p for p in range(n) if p < s or p >= n - w + s]),
            "do not count as part of the window",
        ),
        (_answer(positions=lambda n, s, w, k: [*_positions(n, s, w, k), n]), "the last of 20 tokens is 19"),
        (_sinks_moved, "the slot of its own number"),
        (_list, "return a dictionary"),
    ]
}
