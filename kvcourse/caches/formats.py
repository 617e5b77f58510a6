"""How rows of numbers are written with fewer bits: encode to bytes, decode to float32. Pure functions.

Every format turns rows (num_kv_heads, n, head_dim) float32 into a dict of arrays whose second axis
counts units of `tokens` rows, and back. Codes, scales and zero points are all in the dict, so
that the bytes counted are the bytes needed.
"""

from dataclasses import dataclass

import numpy as np


class Format:
    """`encode(rows)` → {part: array (num_kv_heads, n / tokens, …)}, `decode(parts)` → rows float32.

    tokens  rows that share a unit: 1, or the group of a per-channel format; n is a multiple of it
    str(f)  its name, as `by_name` takes it where there is one
    """

    tokens = 1

    def encode(self, rows):
        """Rows float32 (num_kv_heads, n, head_dim) as bytes.

        Raises TypeError for another dtype; ValueError for another shape, for rows that are not whole
        units, and, where numbers share a scale, for NaN, infinity or a scale beyond float16.
        """
        rows = np.asarray(rows)
        if rows.dtype != np.float32:
            raise TypeError(f"rows are {rows.dtype}: use .astype(np.float32)")
        if rows.ndim != 3 or rows.shape[1] % self.tokens:
            expected = f"(num_kv_heads, a multiple of {self.tokens} tokens, head_dim)"
            raise ValueError(f"rows {rows.shape} do not fit {self}: expected {expected}")
        self.check_head_dim(rows.shape[2])
        return self._encode(rows)

    def decode(self, parts):
        """What `encode` gave as float32 (num_kv_heads, n, head_dim), a new array."""
        raise NotImplementedError

    def check_head_dim(self, head_dim):
        """Raise ValueError unless heads of that many numbers can be written."""

    def bytes_per_token(self, num_kv_heads, head_dim):
        """Bytes of one token's row in one layer, K or V alone, scales and zero points included."""
        parts = self.encode(np.zeros((num_kv_heads, self.tokens, head_dim), np.float32))
        return sum(part.nbytes for part in parts.values()) / self.tokens


@dataclass(frozen=True)
class Float16(Format):
    """2 bytes a number: what engines call an unquantized cache. Beyond ±65,504 a number is infinite."""

    def __str__(self):
        return "float16"

    def _encode(self, rows):
        with np.errstate(over="ignore"):
            return {"numbers": rows.astype(np.float16)}

    def decode(self, parts):
        return parts["numbers"].astype(np.float32)


# --- ggml's blocks of 32: llama.cpp, ggml/src/ggml-quants.c, quantize_row_q8_0_ref and _q4_0_ref -------

BLOCK = 32


class _Blocks(Format):
    """Runs of 32 numbers of one head, each with a float16 scale in front: {"blocks": uint8}."""

    def check_head_dim(self, head_dim):
        if head_dim % BLOCK:
            raise ValueError(
                f"head_dim {head_dim} is not a multiple of {BLOCK}, the numbers in a block of {self}: "
                f"use a format such as int8/token or fp8"
            )

    def _blocks(self, rows):
        """Rows as (num_kv_heads, n, blocks, 32)."""
        return rows.reshape(*rows.shape[:2], rows.shape[2] // BLOCK, BLOCK)

    def _joined(self, stored, codes):
        """Scales (…, blocks, 1) float16 and codes (…, blocks, bytes): one row of bytes a token."""
        both = np.concatenate([stored.view(np.uint8), codes.view(np.uint8)], axis=-1)
        return {"blocks": both.reshape(*both.shape[:2], both.shape[2] * both.shape[3])}

    def _parted(self, parts, size):
        """(scales float32 (…, blocks, 1), codes uint8 (…, blocks, size − 2))."""
        stored = parts["blocks"]
        blocks = stored.reshape(*stored.shape[:2], stored.shape[2] // size, size)
        return blocks[..., :2].copy().view(np.float16).astype(np.float32), blocks[..., 2:]

    def _rows(self, blocks):
        """What `_blocks` took apart: (num_kv_heads, n, head_dim)."""
        return blocks.reshape(*blocks.shape[:2], blocks.shape[2] * BLOCK)


@dataclass(frozen=True)
class Q8_0(_Blocks):
    """34 bytes for 32 numbers: a float16 scale d, then 32 int8. A number is d · code."""

    def __str__(self):
        return "q8_0"

    def _encode(self, rows):
        blocks = self._blocks(rows)
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
        stored = _float16(scale, self)
        codes = round_half_away(blocks * _inverse(scale)).astype(np.int8)
        return self._joined(stored, codes)

    def decode(self, parts):
        scale, codes = self._parted(parts, 34)
        return self._rows(codes.view(np.int8) * scale)


@dataclass(frozen=True)
class Q4_0(_Blocks):
    """18 bytes for 32 numbers: a float16 scale d, then 16 bytes; byte j holds numbers j (low) and j + 16.

    A number is d · (code − 8). The number of largest magnitude gets code 0, so d has the opposite sign.
    """

    def __str__(self):
        return "q4_0"

    def _encode(self, rows):
        blocks = self._blocks(rows)
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
        scale = largest / np.float32(-8)
        stored = _float16(scale, self)
        codes = np.trunc(blocks * _inverse(scale) + np.float32(8.5)).astype(np.uint8).clip(0, 15)
        return self._joined(stored, codes[..., :16] | codes[..., 16:] << 4)

    def decode(self, parts):
        scale, codes = self._parted(parts, 18)
        both = np.concatenate([codes & 15, codes >> 4], axis=-1).view(np.int8) - np.int8(8)
        return self._rows(both * scale)


def _float16(scale, form):
    """Scales, or minima, as they are stored. ValueError where one is NaN or infinite in float16."""
    with np.errstate(over="ignore"):
        stored = scale.astype(np.float16)
    if not np.isfinite(stored).all():
        worst = scale[~np.isfinite(stored)][0]
        raise ValueError(
            f"a scale or minimum of {worst:.4g} does not fit in float16: {form} takes finite numbers whose "
            f"scale stays below 65,504, look where the rows come from"
        )
    return stored


def _inverse(scale):
    """1 / scale; 0 where that is no number, for scales of 0 or nearly."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def round_half_away(x):
    """C's roundf: a half goes away from 0. NumPy's rint would send it to the even neighbor."""
    size = np.abs(x)
    whole = np.floor(size)
    return np.copysign(whole + np.floor(2 * (size - whole)), x)


# --- fp8 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FP8(Format):
    """1 byte a number: e4m3, a sign, 4 exponent bits (bias 7), 3 fraction bits; no scale.

    Clamped to ±448, the largest, infinities too; rounded to the nearest, a tie to the even code. There
    is no infinity, and 0x7F is NaN, which stays NaN.
    Source: Micikevicius et al. 2022, "FP8 formats for deep learning", table 1.
    """

    def __str__(self):
        return "fp8"

    def _encode(self, rows):
        size = np.where(np.isnan(rows), 0, np.minimum(np.abs(rows), np.float32(448)))
        # 2^exponent ≤ size, or the smallest normal's. frexp calls the exponent of 0 a 0, so 0 is lifted.
        exponent = np.maximum(np.frexp(np.maximum(size, np.float32(2**-9)))[1] - 1, -6)
        eighths = np.rint(np.ldexp(size, 3 - exponent))  # 8 … 16, and 0 … 8 below the smallest normal
        codes = ((exponent + 7) * 8 + eighths - 8).astype(np.uint8)  # 16 eighths carry into the exponent
        codes[np.isnan(rows)] = 0x7F
        return {"codes": codes | np.signbit(rows).astype(np.uint8) << 7}

    def decode(self, parts):
        return _FP8_VALUES.take(parts["codes"])


def _fp8_values():
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    size[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


_FP8_VALUES = _fp8_values()


# --- integers with a scale and a zero point: KIVI (Liu et al. 2024), section 3.1 ------------------------


class _Integers(Format):
    """`bits` a number: 8, 4 or 2; {"codes": uint8, "scale": float16, "least": float16}."""

    def __post_init__(self):
        if type(self.bits) is not int or self.bits not in (8, 4, 2):  # a NumPy integer cannot shift a byte
            raise ValueError(f"bits is {self.bits!r}: use 8, 4 or 2")

    def _check_count(self, name, count):
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise ValueError(f"{name} is {count!r}: give a whole number, at least 1")


@dataclass(frozen=True)
class PerToken(_Integers):
    """`bits` a number; each run of `group` channels of one token shares a float16 scale and minimum.

    bits   8, 4 or 2
    group  channels; None: the whole head
    """

    bits: int
    group: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.group is not None:
            self._check_count("group", self.group)

    def __str__(self):
        return f"int{self.bits}/token" + (f" in groups of {self.group}" if self.group else "")

    def check_head_dim(self, head_dim):
        if head_dim % (self.group or 1) or head_dim * self.bits % 8:
            least = 8 // self.bits if self.group is None else np.lcm(self.group, 8 // self.bits)
            raise ValueError(
                f"head_dim {head_dim} does not fit {self}: it must be a multiple of {least}, "
                f"whole groups in whole bytes"
            )

    def _encode(self, rows):
        heads, n, head_dim = rows.shape
        group = self.group or head_dim
        grouped = rows.reshape(heads, n, head_dim // group, group)
        codes, scale, least = _quantized(grouped, self, axis=3)
        packed = _packed(codes.reshape(rows.shape), self.bits)
        return {"codes": packed, "scale": scale[..., 0], "least": least[..., 0]}

    def decode(self, parts):
        codes = _unpacked(parts["codes"], self.bits)
        grouped = codes.reshape(*parts["scale"].shape, codes.shape[2] // parts["scale"].shape[2])
        rows = _dequantized(grouped, parts["scale"][..., None], parts["least"][..., None])
        return rows.reshape(codes.shape)


@dataclass(frozen=True)
class PerChannel(_Integers):
    """`bits` a number; each channel of `tokens` consecutive tokens shares a float16 scale and minimum.

    A unit is written when its last token is there: one channel's scale needs them all.
    """

    bits: int
    tokens: int = 32

    def __post_init__(self):
        super().__post_init__()
        self._check_count("tokens", self.tokens)

    def __str__(self):
        return f"int{self.bits}/channel" + (f" of {self.tokens} tokens" if self.tokens != 32 else "")

    def check_head_dim(self, head_dim):
        if self.tokens * head_dim * self.bits % 8:
            raise ValueError(f"{self.tokens} tokens of head_dim {head_dim} are no whole bytes in {self}")

    def _encode(self, rows):
        heads, n, head_dim = rows.shape
        units = n // self.tokens
        codes, scale, least = _quantized(rows.reshape(heads, units, self.tokens, head_dim), self, axis=2)
        packed = _packed(codes.reshape(heads, units, self.tokens * head_dim), self.bits)
        return {"codes": packed, "scale": scale[:, :, 0], "least": least[:, :, 0]}

    def decode(self, parts):
        heads, units, head_dim = parts["scale"].shape
        codes = _unpacked(parts["codes"], self.bits).reshape(heads, units, self.tokens, head_dim)
        rows = _dequantized(codes, parts["scale"][:, :, None], parts["least"][:, :, None])
        return rows.reshape(heads, units * self.tokens, head_dim)


def _quantized(x, form, axis):
    """(codes uint8 0 … 2^bits − 1, scale, least), the latter two float16, over one axis, kept as 1."""
    least = _float16(x.min(axis=axis, keepdims=True), form)
    steps = np.float32(2**form.bits - 1)
    scale = _float16((x.max(axis=axis, keepdims=True) - least) / steps, form)
    # Codes fit the scale and minimum as they are stored, after rounding to float16.
    codes = np.rint((x - least) * _inverse(scale.astype(np.float32)))
    return codes.clip(0, steps).astype(np.uint8), scale, least


def _dequantized(codes, scale, least):
    """codes · scale + least, written over codes, float32."""
    codes *= scale.astype(np.float32)
    codes += least.astype(np.float32)
    return codes


def _packed(codes, bits):
    """8 / bits neighbors in one byte, the first in the lowest bits. The last axis shrinks."""
    per_byte = codes.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 8, 8 // bits)
    out = per_byte[..., 0].copy()
    for place in range(1, 8 // bits):
        out |= per_byte[..., place] << (bits * place)
    return out


def _codes_of_a_byte(bits):
    """The 8 / bits codes that each byte holds, the first in the lowest bits: float32 (256, 8 / bits)."""
    shifts = np.arange(0, 8, bits)
    return (np.arange(256)[:, None] >> shifts & 2**bits - 1).astype(np.float32)


_CODES = {bits: _codes_of_a_byte(bits) for bits in (8, 4, 2)}


def _unpacked(packed, bits):
    """What `_packed` packed, as float32: looked up, several times as fast as shifting bits."""
    return _CODES[bits].take(packed, axis=0).reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))


def by_name(name):
    """The format of a name: float16, fp8, q8_0, q4_0; int8, int4, int2 with /token or /channel.

    Raises ValueError for a name that is not known.
    """
    simple = {"float16": Float16(), "fp8": FP8(), "q8_0": Q8_0(), "q4_0": Q4_0()}
    if name in simple:
        return simple[name]
    number, _, layout = str(name).partition("/")
    kinds = {"token": PerToken, "channel": PerChannel}
    if number not in ("int8", "int4", "int2") or layout not in kinds:
        known = ", ".join(simple)
        raise ValueError(f"format {name!r} is not known: use {known}, or such as int4/token, int2/channel")
    return kinds[layout](int(number[3:]))
