"""The exercises of chapter 14: 32 numbers into 34 bytes of q8_0, and back."""

import numpy as np

from kvcourse.caches import formats
from kvcourse.checks import Run, exercise, short

SIZE, NUMBERS = 34, 32


@exercise(
    "14.encode_q8_0",
    right="all bytes are those of llama.cpp's reference, ties and zeros included.",
    todo="replace `...` by the blocks, then run this cell again",
)
def encode_q8_0(run: Run) -> str | None:
    """``encode_q8_0(x)``: float32 (n, 32) → uint8 (n, 34)."""
    for name, x in _numbers():
        got = run(x)
        mistake = _encode_mistake(got, x)
        if mistake:
            return f"{name}: {mistake}"
    return None


@exercise(
    "14.decode_q8_0",
    right="every number is its code times its block's scale, bit for bit.",
    todo="replace `...` by the numbers, then run this cell again",
)
def decode_q8_0(run: Run) -> str | None:
    """``decode_q8_0(blocks)``: uint8 (n, 34) → float32 (n, 32)."""
    for name, x in _numbers():
        blocks = _encoded(x)
        got = run(blocks)
        mistake = _decode_mistake(got, blocks)
        if mistake:
            return f"{name}: {mistake}"
    return None


def _numbers():
    """(name, float32 (n, 32)) of every text of the check."""
    random = np.random.default_rng(14)
    plain = random.standard_normal((6, NUMBERS)).astype(np.float32)
    yield "ordinary numbers", plain
    ties = random.integers(-126, 127, (2, NUMBERS)) + np.float32(0.5)
    ties[:, 0] = 127, -127  # so that the scale is 1 and a half stays a half
    yield "halves at scale 1", ties.astype(np.float32)
    yield "zeros", np.zeros((2, NUMBERS), np.float32)
    yield "large and small blocks", plain * np.float32(10) ** np.arange(-4, 2, dtype=np.float32)[:, None]
    negative = -np.abs(plain)
    yield "no positive number", negative


def _encoded(x):
    return formats.Q8_0().encode(x[:, None])["blocks"][:, 0]


def _encode_mistake(got, x):
    want = _encoded(x)
    form = _form_mistake(got, want.shape, np.uint8)
    if form:
        return _shape_hint(got, x) or form
    if np.array_equal(got, want):
        return None
    for words, other in _wrong_blocks(x):
        if other.shape == want.shape and np.array_equal(got, other) and not np.array_equal(other, want):
            return words
    block, byte = (int(index) for index in np.argwhere(got != want)[0])
    what = f"byte {byte} of the scale" if byte < 2 else f"the code of number {byte - 2}"
    found, wanted = int(got[block, byte]), int(want[block, byte])
    if byte >= 2:
        found, wanted = (int(np.uint8(code).view(np.int8)) for code in (found, wanted))
    return f"block {block}, {what} is {found}, expected {wanted}"


def _form_mistake(got, shape, dtype):
    if not isinstance(got, np.ndarray):
        return f"return an array, not {short(got)}"
    if got.shape != shape:
        return f"the array has shape {got.shape}, expected {shape}"
    if got.dtype != dtype:
        return f"the array holds {got.dtype}, expected {np.dtype(dtype).name}"
    return None


def _shape_hint(got, x):
    if not isinstance(got, np.ndarray) or got.ndim != 2 or len(got) != len(x):
        return None
    if got.shape[1] == NUMBERS:
        return "32 bytes a block: the scale's two bytes are missing, and without them nobody can decode"
    if got.shape[1] == 36:
        return "36 bytes a block: the scale is stored in four bytes, q8_0 stores a float16 in two"
    if got.shape == (len(x), SIZE) and got.dtype == np.int8:
        return "the array holds int8: `.view(np.uint8)` shows the same bytes as uint8"
    return None


def _wrong_blocks(x):
    """(the mistake in words, the blocks it gives) of typical mistakes."""
    most = np.abs(x).max(axis=1, keepdims=True)
    scale = most / np.float32(127)
    away = formats.round_half_away

    def blocks(scale, codes, stored=None):
        stored = (scale if stored is None else stored).astype(np.float16).view(np.uint8)
        return np.concatenate([stored, codes.clip(-128, 127).astype(np.int8).view(np.uint8)], axis=1)

    def times(scale, x=x):
        return x * np.where(scale == 0, 0, 1 / np.where(scale == 0, 1, scale)).astype(np.float32)

    rounded = scale.astype(np.float16).astype(np.float32)
    shift = (away(times(scale)).astype(np.int16) + 128).astype(np.uint8).view(np.int8)
    good = blocks(scale, away(times(scale)))
    yield (
        "a half was rounded to the even neighbor, as np.rint does: here a half goes away from 0",
        (blocks(scale, np.rint(times(scale)))),
    )
    yield (
        "a half was rounded up: that makes −2.5 a −2, it should be −3, away from 0",
        (blocks(scale, np.floor(times(scale) + np.float32(0.5)))),
    )
    yield (
        "the codes were cut off, not rounded: astype(np.int8) drops the fraction",
        (blocks(scale, np.trunc(times(scale)))),
    )
    yield (
        "the scale was rounded to float16 before the division: codes are made with the float32 scale",
        (blocks(scale, away(times(rounded)))),
    )
    yield (
        "the scale is max |x| / 128: the largest code is 127, so divide by 127",
        (blocks(most / np.float32(128), away(times(most / np.float32(128))))),
    )
    yield (
        "the codes are shifted by 128: q8_0 stores signed codes, int8 from −127 to 127",
        (np.concatenate([good[:, :2], shift.view(np.uint8)], axis=1)),
    )
    yield "the scale stands after the codes: it comes first", np.roll(good, -2, axis=1)
    yield (
        "the scale's two bytes are in the other order: float16's `.view(np.uint8)` gives the right one",
        (np.concatenate([good[:, 1::-1], good[:, 2:]], axis=1)),
    )
    one = np.full_like(scale, scale.max())
    yield (
        "one scale for all blocks: each block of 32 has its own, so take the maximum over axis 1",
        (blocks(one, away(times(one)))),
    )
    top = x.max(axis=1, keepdims=True) / np.float32(127)
    yield (
        "the scale comes from the largest number, not from the largest magnitude: max of |x|",
        (blocks(top, away(times(top)))),
    )


def _decode_mistake(got, blocks):
    want = formats.Q8_0().decode({"blocks": blocks[:, None]})[:, 0]
    if isinstance(got, np.ndarray) and got.shape == (len(blocks), SIZE):
        return "34 numbers a block: the first two bytes are the scale, not codes"
    form = _form_mistake(got, want.shape, np.float32)
    if form:
        wide = getattr(got, "dtype", None)
        if wide == np.float16:
            return f"{form}: float16 times int8 is rounded once more, turn the scale into float32 first"
        return form
    if np.array_equal(got, want):
        return None
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    unsigned = blocks[:, 2:] * scale
    if np.array_equal(got, unsigned):
        return "the codes were read as 0 … 255: they are signed, `.view(np.int8)` reads them so"
    if np.array_equal(got, blocks[:, 2:].view(np.int8).astype(np.float32)):
        return "these are the codes: multiply each block by its scale"
    swapped = blocks[:, 1::-1].copy().view(np.float16).astype(np.float32)
    if np.array_equal(got, blocks[:, 2:].view(np.int8) * swapped, equal_nan=True):
        return "the scale's two bytes were read in the other order"
    half = (blocks[:, 2:].view(np.int8) * scale.astype(np.float16)).astype(np.float32)
    if np.array_equal(got, half):
        return "the product was rounded to float16: turn the scale into float32 first"
    block, number = (int(index) for index in np.argwhere(got != want)[0])
    return f"block {block}, number {number} is {got[block, number]:.6g}, expected {want[block, number]:.6g}"
