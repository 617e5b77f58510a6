"""Quantized formats: byte for byte the reference implementations', and by hand where there is none."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvcourse.caches import formats
from kvcourse.caches.formats import FP8, Float16, PerChannel, PerToken

REFERENCE = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}


# --- q8_0 and q4_0 against gguf -----------------------------------------------------------------------


def samples():
    random = np.random.default_rng(0)
    ties = random.integers(-127, 128, (3, 20, 64)) / 2  # with a scale of 1/2 or 1 every half is a tie
    ties[:, :, 0] = 127
    zeros = random.integers(-16, 17, (3, 20, 64)) / 4
    zeros[0] = 0
    zeros[1, :, 5] = -0.0
    yield "normal", random.standard_normal((3, 50, 64))
    yield "ten decades", random.standard_normal((3, 50, 64)) * 10 ** random.uniform(-6, 4, (3, 50, 1))
    yield "ties", ties
    yield "zeros", zeros
    yield "no scale in float16", np.full((1, 2, 64), 1e-8)
    yield "negative", np.full((1, 2, 64), -3e4)


def same_bytes(name, rows):
    form, stored = formats.by_name(name), formats.by_name(name).encode(rows)["blocks"]
    expected = gguf.quantize(rows, REFERENCE[name])
    assert stored.dtype == expected.dtype and np.array_equal(stored, expected)
    back = form.decode({"blocks": stored})
    assert back.dtype == np.float32 and np.array_equal(back, gguf.dequantize(expected, REFERENCE[name]))


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("rows", [pytest.param(rows, id=kind) for kind, rows in samples()])
def test_blocks_are_gguf_s_byte_for_byte(name, rows):
    same_bytes(name, rows.astype(np.float32))


# Below 1e-30 the inverse of a scale overflows, where the reference turns NaN into an int: no answer is right.
NUMBERS = st.one_of(
    st.floats(-1e5, 1e5, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0),
    st.integers(-20, 20).map(lambda n: n / 2),
    st.sampled_from([0.0, -0.0, 127.0, -8.0, 8.0]),
)


@pytest.mark.parametrize("name", REFERENCE)
@settings(max_examples=60, deadline=None)
@given(rows=hnp.arrays(np.float32, (1, 1, 32), elements=NUMBERS))
def test_any_block_is_gguf_s_byte_for_byte(name, rows):
    same_bytes(name, rows)


def test_blocks_by_hand():
    """A scale of 1/2: 127 codes reach 63.5. The largest of 4 bits, −8, gets code 0 and scale 1."""
    rows = np.zeros((1, 1, 32), np.float32)
    rows[0, 0, :4] = [63.5, 1.0, 0.25, -0.25]  # 0.25 is half a step: away from 0
    blocks = formats.by_name("q8_0").encode(rows)["blocks"][0, 0]
    assert blocks[:2].view(np.float16)[0] == 0.5
    assert blocks[2:].view(np.int8)[:5].tolist() == [127, 2, 1, -1, 0]
    rows[0, 0, :4] = [-8, 7, 0.5, -0.5]
    rows[0, 0, 16:18] = [1, -1]
    blocks = formats.by_name("q4_0").encode(rows)["blocks"][0, 0]
    assert blocks[:2].view(np.float16)[0] == 1.0
    assert blocks[2:6].tolist() == [0 | 9 << 4, 15 | 7 << 4, 9 | 8 << 4, 8 | 8 << 4]


# --- fp8 against torch --------------------------------------------------------------------------------


def as_torch(x):
    return torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn)


def same_as_torch(x):
    x = np.ascontiguousarray(x, np.float32).reshape(1, 1, -1)
    codes, expected = FP8().encode(x)["codes"], as_torch(x).view(torch.uint8).numpy()
    nan = np.isnan(x)
    assert np.array_equal(codes[~nan], expected[~nan])
    assert (codes[nan] & 0x7F == 0x7F).all() and (expected[nan] & 0x7F == 0x7F).all()
    assert np.array_equal(FP8().decode({"codes": codes}), as_torch(x).float().numpy(), equal_nan=True)


def test_fp8_decodes_all_256_codes_as_torch_does():
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(FP8().decode({"codes": codes}), expected, equal_nan=True)


def test_fp8_of_every_midpoint_and_its_neighbors():
    values = FP8().decode({"codes": np.arange(256, dtype=np.uint8)})
    values = np.sort(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    same_as_torch(np.concatenate([values, middles]))
    same_as_torch(np.nextafter(middles, np.float32(np.inf)))
    same_as_torch(np.nextafter(middles, np.float32(-np.inf)))


def test_fp8_of_random_bit_patterns():
    """Every exponent, subnormal float32 numbers, infinities and NaNs among them."""
    bits = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 448, 449, -1e30, 2**-10], np.float32)
    same_as_torch(np.concatenate([bits.view(np.float32), special]))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_fp8_of_any_number(numbers):
    same_as_torch(np.array(numbers, np.float32))


# --- integers with a scale and a minimum ----------------------------------------------------------------


def test_two_bits_per_token_by_hand():
    """KIVI, section 3.1: z = min, s = (max − min) / 3, code = round((x − z) / s)."""
    rows = np.array([[[-1.0, 2.0, 0.4, 0.6]]], np.float32)  # z = −1, s = 1: codes 0, 3, 1, 2
    parts = PerToken(2).encode(rows)
    assert parts["codes"].tolist() == [[[0 + 3 * 4 + 1 * 16 + 2 * 64]]]
    assert parts["scale"].tolist() == [[[1.0]]] and parts["least"].tolist() == [[[-1.0]]]
    assert PerToken(2).decode(parts).tolist() == [[[-1.0, 2.0, 0.0, 1.0]]]


def test_four_bits_per_channel_by_hand():
    """Two tokens share each channel's numbers: channel 0 is 0 … 15, channel 1 is −30 … 0 in steps of 2."""
    rows = np.array([[[0.0, 0.0], [15.0, -30.0]]], np.float32)
    form = PerChannel(4, tokens=2)
    parts = form.encode(rows)
    assert parts["scale"].tolist() == [[[1.0, 2.0]]] and parts["least"].tolist() == [[[0.0, -30.0]]]
    assert parts["codes"].tolist() == [[[0 + 15 * 16, 15 + 0 * 16]]]  # token by token
    assert form.decode(parts).tolist() == rows.tolist()


def test_groups_and_layouts_are_what_they_are_called():
    """A channel that is 100 times the others spoils its whole token, or nobody but itself."""
    random = np.random.default_rng(1)
    rows = random.uniform(-1, 1, (1, 32, 64)).astype(np.float32)
    rows[:, :, 5] *= 100

    def error(form):
        wrong = np.abs(form.decode(form.encode(rows)) - rows)
        return wrong[:, :, :5].max(), wrong[:, :, 32:].max()

    whole, groups, channels = (error(f) for f in (PerToken(4), PerToken(4, group=32), PerChannel(4)))
    assert whole[0] > 0.9 and whole[1] > 0.9  # a step is about 13, so the others are rounded to 0 or so
    assert groups[0] > 0.9 and groups[1] < 0.1  # a step of 2/15 in the second group
    assert channels[0] < 0.1 and channels[1] < 0.1


INTEGERS = [f for bits in (8, 4, 2) for f in (PerToken(bits), PerToken(bits, 32), PerChannel(bits, 16))]


def spans(form, a):
    """The numbers that share a scale, on the last axis."""
    heads, n, d = a.shape
    if isinstance(form, PerToken):
        return a.reshape(heads, n, -1, form.group or d)
    return a.reshape(heads, -1, form.tokens, d).swapaxes(2, 3)


@pytest.mark.parametrize("form", INTEGERS, ids=str)
@pytest.mark.parametrize("offset", [0, 40])
def test_integers_err_by_half_a_step_and_the_rounding_of_scale_and_minimum(form, offset):
    """Let m' and s' be what float16 makes of the minimum m and the step s = (max − m') / L, L = 2^bits − 1.

    A code in range is at most s' / 2 off. A number above the last code is off by at most L · |s − s'|,
    one below the first by at most |m − m'|. float16 rounds by 2^-11 of the number, or by 2^-25 where it
    is subnormal. Arithmetic in float32 adds less than 2^-20 of the largest number, in 256 steps.
    """
    random = np.random.default_rng(2)
    rows = random.standard_normal((3, 64, 64)) * np.exp(random.standard_normal((1, 1, 64))) + offset
    rows = rows.astype(np.float32)
    parts = form.encode(rows)
    x, y = spans(form, rows).astype(np.float64), spans(form, form.decode(parts)).astype(np.float64)
    steps = 2**form.bits - 1
    low, high = x.min(axis=-1), x.max(axis=-1)
    step = (high - low + np.abs(low) * 2**-11 + 2**-25) / steps
    rounding = 2**-11 * step + 2**-25
    limit = np.maximum((step + rounding) / 2, steps * rounding)
    limit = np.maximum(limit, np.abs(low) * 2**-11 + 2**-25) + np.abs(x).max() * 2**-20
    assert (np.abs(y - x).max(axis=-1) <= limit).all()
    # And the limit is no idle one: somewhere half of it is reached.
    assert (np.abs(y - x).max(axis=-1) >= limit / 2).any()


@pytest.mark.parametrize("form", [PerToken(8), PerChannel(8, 4)], ids=str)
def test_the_step_begins_at_the_minimum_as_it_is_stored(form):
    """Around 1,025.3 float16 holds whole numbers: a minimum of 1,025.3 is stored as 1,025, and 255 steps
    from there to 1,076.3 are 51.3 / 255 each, which the exact minimum would make 51 / 255."""
    rows = np.full((1, 4, 4), 1050, np.float32)
    for i in range(4):  # in every row and in every channel
        rows[0, i, i], rows[0, i, i - 1] = 1025.3, 1076.3
    parts = form.encode(rows)
    assert (parts["least"] == 1025).all() and (parts["scale"] == np.float16(51.3 / 255)).all()
    back = form.decode(parts)
    assert np.abs(back - rows).max() < 0.11  # half a step of 0.2; from the exact minimum it would be 0.3


def test_just_below_a_half_is_rounded_down():
    """Adding a half in float32 gives 1 for the last number below 0.5; the reference of ggml, roundf, 0."""
    below = np.nextafter(np.float32(0.5), np.float32(0))
    x = np.array([below, -below, 0.5, -0.5, 2.5, -2.5, 1 + below, 8388609], np.float32)
    assert formats.round_half_away(x).tolist() == [0, 0, 1, -1, 3, -3, 2, 8388609]


def test_equal_numbers_have_no_step():
    rows = np.full((1, 16, 8), 0.75, np.float32)
    for form in (PerToken(2), PerChannel(2, 16)):
        parts = form.encode(rows)
        assert not parts["scale"].any() and np.array_equal(form.decode(parts), rows)


# --- float16, bytes, names ------------------------------------------------------------------------------


def test_float16_overflows_without_a_warning():
    rows = np.array([[[1e5, -1e5, 65504.0, np.nan]]], np.float32)
    back = Float16().decode(Float16().encode(rows))
    assert np.array_equal(back, np.array([[[np.inf, -np.inf, 65504, np.nan]]], np.float32), equal_nan=True)


@pytest.mark.parametrize(
    "form, expected",  # bytes of one token of 3 heads of 64, counted by hand
    [
        ("float16", 3 * 64 * 2),
        ("fp8", 3 * 64),
        ("q8_0", 3 * 2 * 34),
        ("q4_0", 3 * 2 * 18),
        ("int8/token", 3 * (64 + 4)),
        ("int4/token", 3 * (32 + 4)),
        ("int2/token", 3 * (16 + 4)),
        (PerToken(2, 32), 3 * (16 + 2 * 4)),
        ("int4/channel", 3 * 64 * (32 / 2 + 4) / 32),
        ("int2/channel", 3 * 64 * (32 / 4 + 4) / 32),
        (PerChannel(2, 128), 3 * 64 * (128 / 4 + 4) / 128),
    ],
    ids=str,
)
def test_bytes_per_token(form, expected):
    form = formats.by_name(form) if isinstance(form, str) else form
    assert form.bytes_per_token(3, 64) == expected


@pytest.mark.parametrize(
    "name", ["float16", "fp8", "q8_0", "q4_0", "int8/token", "int4/token", "int2/channel"]
)
def test_a_name_gives_the_format_of_that_name(name):
    form = formats.by_name(name)
    assert str(form) == name and form == formats.by_name(name)


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("form", ["float16", "fp8", "q8_0", "q4_0", "int4/token"])
def test_shapes_come_back_and_nothing_is_written_to(form, n):
    rows = np.random.default_rng(0).standard_normal((2, n, 64)).astype(np.float32)
    before, form = rows.copy(), formats.by_name(form)
    parts = form.encode(rows)
    back = form.decode(parts)
    assert back.shape == rows.shape and back.dtype == np.float32 and np.array_equal(rows, before)
    # What is stored decodes once more to the same: decode changes nothing either.
    assert np.array_equal(form.decode(parts), back)


# --- what is refused ------------------------------------------------------------------------------------

SCALED = ["q8_0", "q4_0", "int8/token", "int2/channel"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, -3e38])
@pytest.mark.parametrize("name", SCALED)
def test_a_number_that_would_spoil_a_shared_scale_is_refused(name, bad):
    rows = np.ones((1, 32, 32), np.float32)
    rows[0, 3, 4] = bad
    with pytest.raises(ValueError, match="does not fit in float16: .* finite numbers") as caught:
        formats.by_name(name).encode(rows)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: formats.by_name("int3/token"), ValueError, "format 'int3/token' is not known: use float16"),
        (lambda: formats.by_name("int4"), ValueError, "format 'int4' is not known"),
        (lambda: formats.by_name("int4/row"), ValueError, "not known"),
        (lambda: formats.by_name(8), ValueError, "format 8 is not known"),
        (lambda: PerToken(3), ValueError, "bits is 3: use 8, 4 or 2"),
        (lambda: PerToken(4.0), ValueError, "bits is 4.0: use 8, 4 or 2"),
        (lambda: PerChannel(16), ValueError, "bits is 16"),
        (lambda: PerToken(4, 0), ValueError, "group is 0: give a whole number, at least 1"),
        (lambda: PerToken(4, 2.5), ValueError, "group is 2.5"),
        (lambda: PerChannel(4, 0), ValueError, "tokens is 0"),
    ],
)
def test_impossible_formats(make, error, words):
    with pytest.raises(error, match=words):
        make()


ROWS = np.zeros((2, 3, 48), np.float32)


@pytest.mark.parametrize(
    "form, rows, error, words",
    [
        ("q8_0", ROWS, ValueError, "head_dim 48 is not a multiple of 32, the numbers in a block of q8_0"),
        ("q4_0", ROWS, ValueError, "head_dim 48 is not a multiple of 32"),
        (PerToken(4, 32), ROWS, ValueError, "head_dim 48 does not fit int4/token in groups of 32"),
        (PerToken(2), ROWS[:, :, :3], ValueError, "head_dim 3 does not fit int2/token: .* multiple of 4"),
        (PerChannel(2, 1), ROWS[:, :, :3], ValueError, "1 tokens of head_dim 3 are no whole bytes"),
        ("int2/channel", ROWS, ValueError, r"\(2, 3, 48\) do not fit .* a multiple of 32 tokens"),
        ("fp8", ROWS[0], ValueError, r"rows \(3, 48\) do not fit fp8"),
        ("fp8", ROWS.astype(np.float64), TypeError, "rows are float64: use .astype"),
        ("q8_0", ROWS.astype(np.float16), TypeError, "rows are float16"),
    ],
)
def test_rows_that_do_not_fit(form, rows, error, words):
    form = formats.by_name(form) if isinstance(form, str) else form
    with pytest.raises(error, match=words) as caught:
        form.encode(rows)
    assert "\n" not in str(caught.value)
