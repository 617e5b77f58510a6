"""Typical wrong answers of chapter 06."""

RIGHT = {
    "A": "mask skipped", "B": "float16 rows", "C": "reset keeps the count", "D": "read before written",
    "E": "top-left mask", "F": "count per layer", "G": "positions from 1", "H": "truncate keeps one",
    "I": "heads merged wrongly", "J": "one row too many", "K": "positions restart", "L": "K and V swapped",
}  # fmt: skip


def _swapped(one, other):
    return RIGHT | {one: RIGHT[other], other: RIGHT[one]}


WRONG = {
    "06.cheapest_probes": [
        (lambda: ["prefill", "step", "chunk"], "C and H have the same outcome"),
        (lambda: ["layers", "reset", "truncate"], "D and I have the same outcome"),
        (
            lambda: ["prefill", "step", "layers", "dye + truncate", "dye + reset"],
            "told apart, for 83 positions. A cheaper set",
        ),
        (lambda: ["layers", "reset", "truncate", "dye"], "told apart, for 73 positions. A cheaper set"),
        (lambda: ["layers", "layers"], "'layers' stands in your set twice"),
        (lambda: ["layer"], "there is no probe 'layer'"),
        (lambda: "prefill", "expected a list of names of probes"),
        (lambda: 72, "expected a list of names of probes, got 72"),
    ],
    "06.diagnose": [
        (
            lambda: _swapped("E", "K"),
            "E is not 'positions restart': under 'layers' that bug would be 'layer 0', and E is 'layer 1'",
        ),
        (lambda: _swapped("C", "H"), "C is not 'truncate keeps one': under 'reset' that bug would be 'same'"),
        (lambda: RIGHT | {"A": "the mask"}, "A: 'the mask' (str) is none of the twelve names"),
        (lambda: RIGHT | {"M": "mask skipped"}, "'M' (str) is no letter of the kit"),
        (lambda: list(RIGHT.values()), "expected a dict from letters to names"),
    ],
}
