"""Primer B: its picture and exercises, and that what its cells print does not hang on a rounding."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import checks, evaluation, ops, paths
from kvcourse.bench.chapter_code import tagged_code
from kvcourse.checks import chapter_b as exercise
from kvcourse.figures import chapter_b as figures
from kvcourse.figures import template
from kvcourse.widgets import chapter_b as widgets

NOTEBOOK = paths.chapters_dir() / "primers" / "b_floats_and_perplexity.ipynb"

every_16_bit_pattern = np.arange(1 << 16, dtype=np.uint16)


# --- numbers and patterns --------------------------------------------------------------


def stored_by_numpy(value, format):
    with np.errstate(over="ignore"):
        if format == "bfloat16":
            return float(ops.round_to_bfloat16(np.float32(value)))
        return float(np.array(value).astype(format))


# Numbers that are float32 already: NumPy then rounds once on the way to either 16-bit format.
float32s = st.floats(width=32, allow_nan=False)


@pytest.mark.parametrize("format", figures.FORMATS)
@given(value=float32s)
def test_nearest_rounds_as_numpy_does(format, value):
    assert figures.nearest(value, format) == stored_by_numpy(value, format)


def test_nearest_at_every_tie_of_float16():
    numbers = every_16_bit_pattern[:0x7C00].view(np.float16).astype(np.float64)
    for tie in ((numbers[:-1] + numbers[1:]) / 2).tolist() + [65520.0, 65519.99]:
        assert figures.nearest(tie, "float16") == stored_by_numpy(tie, "float16")
        assert figures.nearest(-tie, "float16") == -stored_by_numpy(tie, "float16")


@given(value=st.floats(allow_nan=False))
def test_nearest_float32_of_any_double(value):
    with np.errstate(over="ignore"):
        assert figures.nearest(value, "float32") == float(np.float64(value).astype(np.float32))


def values_of_patterns(format):
    if format == "float16":
        return every_16_bit_pattern.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signaling NaNs among them
        return (every_16_bit_pattern.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("format", ["float16", "bfloat16"])
def test_every_16_bit_pattern_there_and_back(format):
    for bits, value in enumerate(values_of_patterns(format).tolist()):
        got = figures.number(bits, format)
        if math.isnan(value):
            assert math.isnan(got)
            continue
        assert got == value and math.copysign(1, got) == math.copysign(1, value)
        assert figures.pattern(value, format) == bits


@given(value=float32s)
def test_float32_pattern_is_its_memory(value):
    bits = int(np.float32(value).view(np.uint32))
    assert figures.pattern(value, "float32") == bits
    assert figures.number(bits, "float32") == value


@pytest.mark.parametrize("format", ["float32", "float16"])
@given(value=st.floats(width=16, allow_nan=False))
def test_neighbors_are_numpys(format, value):
    dtype = np.dtype(format).type
    below, above = figures.neighbors(value, format)
    with np.errstate(over="ignore"):
        assert below == float(np.nextafter(dtype(value), dtype(-np.inf)))
        assert above == float(np.nextafter(dtype(value), dtype(np.inf)))


def test_limits_are_numpys_and_bfloat16s():
    for format in ("float32", "float16"):
        info = np.finfo(format)
        assert figures.largest(format) == float(info.max)
        assert figures.smallest_normal(format) == float(info.smallest_normal)
        assert figures.smallest(format) == float(info.smallest_subnormal)
    values = values_of_patterns("bfloat16")
    assert figures.largest("bfloat16") == values[0x7F7F]
    assert figures.smallest_normal("bfloat16") == values[0x0080]
    assert figures.smallest("bfloat16") == values[0x0001]


# --- the panel -------------------------------------------------------------------------

NUMBERS = {"a logit": 13.421344757080078, "minus a third": -1 / 3, "2,049": 2049.0, "65,504": 65504.0}


@pytest.mark.parametrize(
    "choice, power, format, words",
    [
        ("a logit", 0, "bfloat16", "13.421 is stored as 13.4375, off by 0.12 %. Bits: 2^3 × (1 + 87/128)"),
        ("2,049", 0, "float16", "stored as 2,048, off by 0.049 %. Bits: 2^11 × (1 + 0/1,024)"),
        ("2,049", 0, "float16", "Beside it: 2,047 and 2,050."),
        ("2,049", 0, "float32", "stored as 2,049, exactly"),
        ("2,049", 5, "float16", "beyond the largest number, 65,504, and becomes ∞."),
        ("minus a third", 32, "float16", "and becomes −∞."),
        ("65,504", 0, "float16", "Beside it: 65,472 and ∞."),
        (
            "a logit",
            -32,
            "float16",
            "nearer to 0 than to the smallest number, 5.96046448e−08, and becomes 0.",
        ),
        ("a logit", -20, "float16", "Bits: 2^−14 × (0 + 215/1,024), a subnormal."),
        ("minus a third", 0, "bfloat16", "Bits: −2^−2 × (1 + 43/128)"),
    ],
)
def test_sentences_by_hand(choice, power, format, words):
    assert words in figures.bits_text(figures.bits(NUMBERS, choice, power, format))


def test_line_at_a_power_of_two_has_the_near_gap_half_as_wide():
    marks = figures.line_marks(figures.bits(NUMBERS, "2,049", 0, "float16"))
    assert marks["ticks"] == [(-0.5, 2047.0), (0.0, 2048.0), (1.0, 2050.0)]
    assert (marks["exact"], marks["stored"]) == (0.5, 0.0)


def test_line_at_the_ends_keeps_the_order():
    for choice, power in (("65,504", 0), ("65,504", 1), ("minus a third", 32)):
        marks = figures.line_marks(figures.bits(NUMBERS, choice, power, "float16"))
        ordered = sorted(marks["ticks"])
        assert [number for _, number in ordered] == sorted(number for _, number in marks["ticks"])
        assert all(math.isfinite(place) and abs(place) <= 1 for place, _ in ordered)
        assert math.isfinite(marks["exact"])


def test_cells_are_the_bits_part_by_part():
    data = figures.bits(NUMBERS, "a logit", 0, "bfloat16")
    drawing = figures.bits_figure(data)
    sign, exponent, fraction, cut_off, *_ = drawing.data
    for row, (format, (exponent_bits, fraction_bits)) in enumerate(figures.FORMATS.items()):
        texts = [
            "".join(t for t, y in zip(part.text, part.y, strict=True) if y == row)
            for part in drawing.data[:3]
        ]
        assert [len(text) for text in texts] == [1, exponent_bits, fraction_bits]
        assert "".join(texts) == data["rows"][format]["bits"]
    assert data["rows"]["bfloat16"]["bits"] == f"{0x4157:016b}"  # 13.4375 = 1.6796875 × 8
    assert cut_off.marker.pattern.shape == template.HATCH
    frame = drawing.layout.shapes[0]
    assert frame.x1 - frame.x0 == pytest.approx(16.1) and frame.y0 < 1 < frame.y1


def test_the_number_is_in_the_color_of_wrong_only_when_it_becomes_infinite():
    for power, wrong in ((0, False), (-32, False), (5, True)):
        drawing = figures.bits_figure(figures.bits(NUMBERS, "2,049", power, "float16"))
        (cross,) = (trace for trace in drawing.data if trace.name == "the number itself")
        assert (cross.marker.color == template.WRONG) is wrong


def test_panel_is_fast_at_every_extreme_and_refuses_nothing_to_choose():
    panel = widgets.bits_panel(NUMBERS)
    panel.set(power=1)
    seconds = []
    for choice in NUMBERS:
        for format in figures.FORMATS:
            for power in (-32, 0, 32):
                start = time.process_time()  # of this process alone: others may be busy
                text = panel.set(choice=choice, power=power, format=format)
                seconds.append(time.process_time() - start)
                assert text.startswith(f"{format}, {choice}") and "does not work" not in text
    assert sorted(seconds)[len(seconds) // 2] < 0.1  # the median: a collection of garbage may hold up a few
    with pytest.raises(ValueError, match="no numbers: give at least one"):
        widgets.bits_panel({})


# --- the exercises ---------------------------------------------------------------------


def rounded_by(add, keep_nan=True):
    def function(x):
        out = exercise._rounded(x, add)
        return np.where(np.isnan(x), x, out) if keep_nan else out

    return function


def truncated_nan(x):
    """Right, except that a NaN is cut off, so that one with a short fraction turns infinite."""
    return np.where(np.isnan(x), exercise._rounded(x, 0), ops.round_to_bfloat16(x))


@pytest.mark.parametrize(
    "function, words",
    [
        (rounded_by(0), "you cut the lower 16 bits off"),
        (rounded_by(0x8000), "you go away from 0"),
        (rounded_by(0x7FFF), "you go towards 0"),
        (lambda x: ops.round_to_bfloat16(np.abs(x)), "the sign is lost"),
        (
            lambda x: (exercise._bits(x) + 0x7FFF + (exercise._bits(x) >> 16 & 1)).view(np.float32),
            "still there",
        ),
        (lambda x: exercise._rounded(x, 0x8000 - (exercise._bits(x) >> 16 & 1)), "ties go to the odd"),
        (lambda x: ops.round_to_bfloat16(x) * np.float32(0.5), "compare their bits"),
        (lambda x: (exercise._bits(x) & exercise.UPPER).astype(np.float32), ".astype converts"),
        (
            lambda x: np.where(np.isinf(x), np.float32(np.nan), ops.round_to_bfloat16(x)),
            "infinity became NaN",
        ),
        (lambda x: exercise._bits(ops.round_to_bfloat16(x)), "holds the bits as whole numbers"),
        (lambda x: ops.round_to_bfloat16(x).astype(np.float64), "not float32 (9,)"),
        (lambda x: ops.round_to_bfloat16(x)[:1], "not float32 (9,)"),
        (truncated_nan, "the NaN with the bits 7f800001 became inf"),
    ],
)
def test_every_mistake_of_rounding_is_named(function, words):
    outcome = checks.verdict("b.to_bfloat16", function)
    assert outcome.status == "wrong"
    assert words in outcome.message


def test_rounding_into_the_given_memory_is_named():
    def in_place(x):
        bits = x.view(np.uint32)
        bits += 0x7FFF + (bits >> 16 & 1)
        bits &= np.uint32(exercise.UPPER)
        return x

    assert "changed its input" in checks.verdict("b.to_bfloat16", in_place).message


def test_torch_passes_the_check():
    import torch

    def by_torch(x):
        return torch.from_numpy(x).to(torch.bfloat16).to(torch.float32).numpy()

    assert checks.verdict("b.to_bfloat16", by_torch).status == "right"


def per_character(logits, ids, characters):
    return evaluation.bits_per_character(evaluation.next_token_log_probs(logits, ids), characters)


def nats_per_token(logits, ids, characters):
    return -float(evaluation.next_token_log_probs(logits, ids).mean())


def overflowing(logits, ids, characters):
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.exp(logits)
        p = (powers / powers.sum(axis=-1, keepdims=True))[np.arange(len(ids) - 1), ids[1:]]
    return float(-np.log2(p).sum() / characters)


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda *g: -per_character(*g), "the sign"),
        (lambda *g: per_character(*g) * math.log(2), "these are nats"),
        (lambda *g: per_character(*g) * math.log(2) ** 2, "you multiplied by ln 2"),
        (lambda *g: per_character(*g) * g[2], "the sum over the text"),
        (lambda *g: nats_per_token(*g) / math.log(2), "these are bits per token"),
        (nats_per_token, "these are nats per token"),
        (lambda *g: nats_per_token(*g) / math.log(2) / g[2], "you took the mean over tokens and then"),
        (lambda *g: nats_per_token(*g) / g[2], "you took the mean over tokens and in nats"),
        (lambda *g: math.exp(nats_per_token(*g)), "this is the perplexity"),
        (lambda logits, ids, n: per_character(logits[:-1], [0, *ids[:-2]], n) * 0 + 99, "Print ln p"),
        (overflowing, "exp overflows in float32"),
        (lambda *g: evaluation.next_token_log_probs(*g[:2]), "not one number"),
    ],
)
def test_every_mistake_of_bits_per_character_is_named(function, words):
    outcome = checks.verdict("b.bits_per_character", function)
    assert outcome.status == "wrong"
    assert words in outcome.message


@pytest.mark.parametrize("rows, columns", [("all", "all"), ("first", "first"), ("later", "first")])
def test_a_missing_shift_is_named_in_each_form(rows, columns):
    def unshifted(logits, ids, characters):
        log_p = evaluation.log_probabilities(logits)
        log_p = {"all": log_p, "first": log_p[:-1], "later": log_p[1:]}[rows]
        ids = ids if columns == "all" else ids[:-1]
        return -float(log_p[np.arange(len(ids)), ids].sum()) / math.log(2) / characters

    assert "row t predicts token t + 1" in checks.verdict("b.bits_per_character", unshifted).message


def test_the_checks_oracle_is_the_packages():
    for text in exercise.TEXTS:
        given_text = exercise._text(*text)
        # 1e-5: the package adds up in float32, the check in float64.
        assert exercise._bits_per_character(*given_text) == pytest.approx(
            per_character(*given_text), rel=1e-5
        )


def test_wrong_numbers_differ_from_the_right_one_and_from_each_other():
    """By far more than the tolerance on the first text: no line is the wrong one."""
    given_text = exercise._text(*exercise.TEXTS[0])
    lines = {}
    for wrong, line in exercise._wrong_numbers(*given_text):
        lines.setdefault(line, []).append(wrong)
    right = exercise._bits_per_character(*given_text)
    values = [(right, "right")] + [(wrong, line) for line, wrongs in lines.items() for wrong in wrongs]
    for i, (one, its_line) in enumerate(values):
        for other, other_line in values[:i]:
            assert its_line == other_line or abs(one / other - 1) > 10 * exercise.TOLERANCE


# --- the page's definitions --------------------------------------------------------------


@pytest.fixture(scope="module")
def page():
    return {
        name: tagged_code(NOTEBOOK, tag)[name]
        for tag, names in (
            ("plain-floats", ("fields", "number")),
            ("plain-sums", ("one_by_one", "pairwise")),
            ("plain-evaluation", ("log_probabilities",)),
        )
        for name in names
    }


@pytest.mark.parametrize("format", ["float16", "bfloat16"])
def test_the_pages_number_is_the_panels_for_every_pattern(page, format):
    for bits in range(1 << 16):
        one, other = page["number"](bits, *figures.FORMATS[format]), figures.number(bits, format)
        assert one == other or (math.isnan(one) and math.isnan(other))


@given(value=float32s)
def test_the_pages_number_reads_a_float32(page, value):
    assert page["number"](int(np.float32(value).view(np.uint32)), 8, 23) == value


@given(bits=st.integers(0, 2**32 - 1))
def test_fields_are_the_digits_of_the_pattern(page, bits):
    sign, exponent, fraction = page["fields"](bits, 8, 23)
    assert f"{sign:b}{exponent:08b}{fraction:023b}" == f"{bits:032b}"


def weight_products():
    wte = kv.load_model("austen-gpt2").params["wte.weight"]
    return wte[:1000, 0] * wte[:1000, 1]


def test_sums_are_exact_where_nothing_rounds_and_cumsum_goes_one_by_one(page):
    whole = np.arange(1, 1001, dtype=np.float32)
    assert page["one_by_one"](whole) == page["pairwise"](whole) == 500_500
    shuffled = np.random.default_rng(1)
    for _ in range(20):
        numbers = shuffled.permutation(weight_products())
        got = page["one_by_one"](numbers)
        assert got.dtype == np.float32 and got == np.cumsum(numbers)[-1]


def test_log_probabilities_equal_the_packages(page):
    logits = 20 * np.random.default_rng(0).standard_normal((5, 2048), dtype=np.float32)
    assert np.array_equal(page["log_probabilities"](logits), evaluation.log_probabilities(logits))


# --- what is compared does not hang on a rounding ----------------------------------------


@pytest.fixture(scope="module")
def read():
    """The page's text, and its logits in two ways that round differently: one pass, and chunks of 100."""
    model, tokenizer = kv.load_model("austen-gpt2"), kv.load_tokenizer("austen-gpt2")
    held_out = (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(held_out)[:1024]
    cache = kv.ContiguousCache.for_model(model)
    chunks = [model(ids[low : low + 100], cache) for low in range(0, 1024, 100)]
    return model, tokenizer, ids, model(ids), np.concatenate(chunks)


def assert_clear(pairs, decimals):
    """Printed with these decimals, a number is 10 × its own rounding noise away from the next tie."""
    for one, other in pairs:
        to_a_tie = abs((one * 10**decimals) % 1 - 0.5) / 10**decimals
        assert to_a_tie > 10 * abs(one - other), (one, other)


def figures_of(model, ids, logits, characters):
    """(decimals, number) of what rounds 4 and 5 print of one model."""
    log_p = evaluation.next_token_log_probs(logits, ids)
    bits = evaluation.bits_per_character(log_p, characters)
    return [(1, evaluation.perplexity(log_p)), (2, bits), (0, bits * characters)]


def test_perplexities_and_bits_are_no_rounding_ties(read):
    model, tokenizer, ids, together, in_chunks = read
    characters = len(tokenizer.decode(ids[1:]))
    draft = kv.load_model("austen-gpt2-draft")
    cache = kv.ContiguousCache.for_model(draft)
    draft_chunks = np.concatenate([draft(ids[low : low + 100], cache) for low in range(0, 1024, 100)])
    for owner, one, other in ((model, together, in_chunks), (draft, draft(ids), draft_chunks)):
        pairs = zip(
            figures_of(owner, ids, one, characters), figures_of(owner, ids, other, characters), strict=True
        )
        for (decimals, a), (_, b) in pairs:
            assert_clear([(a, b)], decimals)
    one, other = (evaluation.next_token_log_probs(logits, ids) for logits in (together, in_chunks))
    assert_clear([(float(one.mean(dtype=float)), float(other.mean(dtype=float)))], 3)
    assert_clear([(evaluation.perplexity(one[:64]), evaluation.perplexity(other[:64]))], 0)
    # In float16 each probability is good to 2⁻⁹ or so, a mean of 64 logarithms to less.
    assert abs(evaluation.perplexity(one[:64]) % 1 - 0.5) > 59 * 2**-9
    assert_clear([(float(one.sum(dtype=float)), float(other.sum(dtype=float)))], 0)
    assert_clear(zip(one[8:14].tolist(), other[8:14].tolist(), strict=True), 2)
    assert_clear(zip(np.exp(one[8:14]).tolist(), np.exp(other[8:14]).tolist(), strict=True), 4)


def gaps(rows):
    """Largest minus second largest of each row of (rows, n)."""
    ordered = np.sort(rows, axis=-1)
    return ordered[:, -1] - ordered[:, -2]


def test_printed_first_choices_are_clear(read):
    *_, together, in_chunks = read
    assert gaps(together[8:14]).min() > 100 * np.abs(together - in_chunks).max()


def test_the_product_underflows_well_before_and_after_the_named_token(read):
    """25 and 234 tokens: representable one token earlier, there no longer, both by more than a factor 1.6."""
    _, _, ids, together, _ = read
    running = np.cumsum(evaluation.next_token_log_probs(together, ids), dtype=np.float64)
    for count, bits in ((25, 150), (234, 1075)):
        assert running[count - 2] > -bits * math.log(2) + 0.5
        assert running[count - 1] < -bits * math.log(2) - 0.5


def test_the_largest_logits_are_no_ties(read):
    *_, together, in_chunks = read
    assert_clear([(float(together.max()), float(in_chunks.max()))], 3)
    assert_clear([(float(together[:64].max()), float(in_chunks[:64].max()))], 1)


def test_the_rows_that_overflow_in_float16_are_clear(read):
    *_, together, in_chunks = read
    rows = together[:64].astype(np.float64)
    noise = 10 * np.abs(together - in_chunks).max()
    # The float16 neighbors around ln 65,520 are 11.0859375, whose power is 65,252, and 11.09375, whose power
    # is 65,764: what decides is to which of them the logit is rounded.
    beyond = (11.0859375 + 11.09375) / 2
    assert np.abs(rows - beyond).min() > noise
    sums = np.log(np.exp(rows).sum(axis=-1))
    assert np.abs(sums - math.log(65520)).min() > 1 / 64 + noise  # logits are rounded by up to 1/256
    has_nan = (rows > beyond).any(axis=-1)
    all_zero = (sums > math.log(65520)) & ~has_nan
    assert (has_nan.sum(), all_zero.sum()) == (7, 4)
    assert (rows[all_zero].argmax(axis=-1) != 0).all()  # argmax of a row of zeros names token 0
    # Where several powers are infinite, argmax names the first of them.
    first_infinite = (rows > beyond).argmax(axis=-1)
    assert (first_infinite == rows.argmax(axis=-1))[has_nan].sum() == 6


def test_weights_in_bfloat16_change_the_bits_by_what_the_page_prints(read):
    model, tokenizer, ids, together, in_chunks = read
    characters = len(tokenizer.decode(ids[1:]))
    params = {name: ops.round_to_bfloat16(weights) for name, weights in model.params.items()}
    rounded = type(model)(model.config, params)
    cache = kv.ContiguousCache.for_model(rounded)
    rounded_chunks = np.concatenate([rounded(ids[low : low + 100], cache) for low in range(0, 1024, 100)])
    changes, rounded_bits = [], []
    for plain, other in ((together, rounded(ids)), (in_chunks, rounded_chunks)):
        bits = [per_character(logits, ids, characters) for logits in (plain, other)]
        changes.append(100 * abs(bits[1] / bits[0] - 1))
        rounded_bits.append(bits[1])
    assert_clear([tuple(changes), tuple(rounded_bits)], 3)


def test_bfloat16_takes_three_bits_of_the_weights_and_they_are_000_in_one_of_eight(read):
    model, *_ = read
    patterns = np.concatenate([weights.reshape(-1).view(np.uint32) for weights in model.params.values()])
    assert not (patterns & 0x1FFF).any()  # float32 has 13 fraction bits more than float16
    assert (patterns & 0xE000 == 0).mean() == pytest.approx(1 / 8, abs=0.001)  # 5.5 million weights: ± 0.0001


def test_mean_rounding_errors_are_no_ties(read):
    model, _, ids, *_ = read
    tap = kv.Tap(model.config)
    model(ids, tap)
    cache = kv.ContiguousCache.for_model(model)
    for low in range(0, 1024, 100):
        model(ids[low : low + 100], cache)
    stacked = [np.stack(parts) for parts in zip(*map(cache.keys_values, range(6)), strict=True)]
    for arrays in ((tap.keys, stacked[0]), (tap.values, stacked[1])):
        in_16 = [np.abs(a.astype(np.float16).astype(np.float32) / a - 1).mean(dtype=float) for a in arrays]
        in_bf = [np.abs(ops.round_to_bfloat16(a) / a - 1).mean(dtype=float) for a in arrays]
        assert all((np.abs(a) < 2.0**-14).mean() < 0.9 * 0.01 / 100 for a in arrays)
        assert_clear([(100 * in_16[0], 100 * in_16[1])], 3)
        assert_clear([(100 * in_bf[0], 100 * in_bf[1])], 2)


# --- the solutions ------------------------------------------------------------------------


def test_solutions_equal_the_package():
    names = {}
    path = paths.chapters_dir() / "solutions" / "b_floats_and_perplexity.py"
    exec(compile(path.read_text(encoding="utf-8"), path.name, "exec"), names)
    x = (every_16_bit_pattern.astype(np.uint32) << 16 | 0x8000).view(np.float32)
    got, expected = names["to_bfloat16"](x), ops.round_to_bfloat16(x)
    assert got.dtype == np.float32 and np.array_equal(got, expected, equal_nan=True)
    for text in exercise.TEXTS:
        given_text = exercise._text(*text)
        assert names["bits_per_character"](*given_text) == pytest.approx(per_character(*given_text), rel=1e-5)
