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
    """

    tokens = 1

    def encode(self, rows):
        raise NotImplementedError

    def decode(self, parts):
        raise NotImplementedError

    def bytes_per_token(self, num_kv_heads, head_dim):
        """Bytes of one token's row in one layer, scales and zero points included."""
        parts = self.encode(np.zeros((num_kv_heads, self.tokens, head_dim), np.float32))
        return sum(part.nbytes for part in parts.values()) / self.tokens


@dataclass(frozen=True)
class Float16(Format):
    """2 bytes a number: what engines call an unquantized cache."""

    def encode(self, rows):
        return {"numbers": rows.astype(np.float16)}

    def decode(self, parts):
        return parts["numbers"].astype(np.float32)


# --- ggml's blocks of 32: llama.cpp, ggml/src/ggml-quants.c, quantize_row_q8_0_ref and _q4_0_ref -------

BLOCK = 32


@dataclass(frozen=True)
class Q8_0(Format):
    """34 bytes for 32 numbers: a float16 scale d, then 32 int8. A number is d · code."""

    def encode(self, rows):
        blocks = _blocks(rows)
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
        codes = _round_half_away(blocks * _inverse(scale)).astype(np.int8)
        return {"blocks": _joined(rows, scale.astype(np.float16).view(np.uint8), codes.view(np.uint8))}

    def decode(self, parts):
        blocks = parts["blocks"].reshape(-1, 34)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return _rows(parts["blocks"], blocks[:, 2:].view(np.int8) * scale)


@dataclass(frozen=True)
class Q4_0(Format):
    """18 bytes for 32 numbers: a float16 scale d, then 16 bytes; byte j holds numbers j (low) and j + 16.

    A number is d · (code − 8). The number of largest magnitude gets code 0, so d has the opposite sign.
    """

    def encode(self, rows):
        blocks = _blocks(rows)
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[:, None], axis=-1)
        scale = largest / np.float32(-8)
        codes = np.trunc(blocks * _inverse(scale) + np.float32(8.5)).astype(np.uint8).clip(0, 15)
        packed = codes[:, :16] | codes[:, 16:] << 4
        return {"blocks": _joined(rows, scale.astype(np.float16).view(np.uint8), packed)}

    def decode(self, parts):
        blocks = parts["blocks"].reshape(-1, 18)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).view(np.int8) - np.int8(8)
        return _rows(parts["blocks"], codes * scale)


def _blocks(rows):
    """(heads, n, head_dim) → (blocks, 32). Raises ValueError unless head_dim is whole blocks."""
    if rows.shape[-1] % BLOCK:
        raise ValueError(f"a head of {rows.shape[-1]} numbers is not whole blocks of {BLOCK}")
    return rows.reshape(-1, BLOCK)


def _joined(rows, *columns):
    return np.concatenate(columns, axis=1).reshape(*rows.shape[:2], -1)


def _rows(stored, numbers):
    return numbers.reshape(*stored.shape[:2], -1)


def _inverse(scale):
    with np.errstate(divide="ignore"):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _round_half_away(x):
    """C's roundf: a half goes away from 0. NumPy's rint would send it to the even neighbor."""
    size = np.abs(x)
    whole = np.floor(size)
    return np.copysign(whole + np.floor(2 * (size - whole)), x)


# --- fp8 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FP8(Format):
    """1 byte a number: e4m3, a sign, 4 exponent bits (bias 7), 3 fraction bits; no scale.

    Clamped to ±448, the largest; rounded to the nearest, a tie to the even code. There is no
    infinity, and 0x7F is NaN. Source: Micikevicius et al. 2022, "FP8 formats for deep learning", table 1.
    """

    def encode(self, rows):
        size = np.where(np.isnan(rows), 0, np.minimum(np.abs(rows), np.float32(448)))
        # 2^exponent ≤ size, or the smallest normal's. frexp calls the exponent of 0 a 0, so 0 is lifted.
        exponent = np.maximum(np.frexp(np.maximum(size, np.float32(2**-9)))[1] - 1, -6)
        eighths = np.rint(np.ldexp(size, 3 - exponent))  # 8 … 16, and 0 … 8 below the smallest normal
        codes = ((exponent + 7) * 8 + eighths - 8).astype(np.uint8)  # 16 eighths carry into the exponent
        codes[np.isnan(rows)] = 0x7F
        return {"codes": codes | np.signbit(rows).astype(np.uint8) << 7}

    def decode(self, parts):
        return _FP8_VALUES[parts["codes"]]


def _fp8_values():
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    size[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


_FP8_VALUES = _fp8_values()


# --- integers with a scale and a zero point: KIVI (Liu et al. 2024), section 3.1 ------------------------


@dataclass(frozen=True)
class PerToken(Format):
    """`bits` a number; each run of `group` channels of one token shares a float16 scale and minimum.

    bits   8, 4 or 2
    group  channels; None: the whole head
    """

    bits: int
    group: int | None = None

    def encode(self, rows):
        heads, n, head_dim = rows.shape
        grouped = rows.reshape(heads, n, -1, self.group or head_dim)
        codes, scale, least = _quantized(grouped, self.bits, axis=3)
        packed = _packed(codes.reshape(rows.shape), self.bits)
        return {"codes": packed, "scale": scale[..., 0], "least": least[..., 0]}

    def decode(self, parts):
        codes = _unpacked(parts["codes"], self.bits)
        grouped = codes.reshape(*parts["scale"].shape, -1)
        rows = _dequantized(grouped, parts["scale"][..., None], parts["least"][..., None])
        return rows.reshape(codes.shape)


@dataclass(frozen=True)
class PerChannel(Format):
    """`bits` a number; each channel of `tokens` consecutive tokens shares a float16 scale and minimum.

    A unit is written when its last token is there: one channel's scale needs them all.
    """

    bits: int
    tokens: int = 32

    def encode(self, rows):
        heads, n, head_dim = rows.shape
        grouped = rows.reshape(heads, n // self.tokens, self.tokens, head_dim)
        codes, scale, least = _quantized(grouped, self.bits, axis=2)
        packed = _packed(codes.reshape(heads, n // self.tokens, -1), self.bits)
        return {"codes": packed, "scale": scale[:, :, 0], "least": least[:, :, 0]}

    def decode(self, parts):
        heads, units, head_dim = parts["scale"].shape
        codes = _unpacked(parts["codes"], self.bits).reshape(heads, units, self.tokens, head_dim)
        rows = _dequantized(codes, parts["scale"][:, :, None], parts["least"][:, :, None])
        return rows.reshape(heads, units * self.tokens, head_dim)


def _quantized(x, bits, axis):
    """(codes uint8 0 … 2^bits − 1, scale, least), the latter two float16, over one axis, kept as 1."""
    least = x.min(axis=axis, keepdims=True).astype(np.float16)
    scale = ((x.max(axis=axis, keepdims=True) - least) / np.float32(2**bits - 1)).astype(np.float16)
    # Codes fit the scale and minimum as they are stored, after rounding to float16.
    codes = np.rint((x - least) * _inverse(scale.astype(np.float32)))
    return codes.clip(0, 2**bits - 1).astype(np.uint8), scale, least


def _dequantized(codes, scale, least):
    return codes * scale.astype(np.float32) + least.astype(np.float32)


def _packed(codes, bits):
    """8 / bits neighbours in one byte, the first in the lowest bits. The last axis shrinks."""
    if bits not in (2, 4, 8) or codes.shape[-1] * bits % 8:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits: use 2, 4 or 8 bits and whole bytes")
    per_byte = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    out = per_byte[..., 0].copy()
    for place in range(1, 8 // bits):
        out |= per_byte[..., place] << (bits * place)
    return out


def _unpacked(packed, bits):
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def by_name(name):
    """The format of a name: float16, fp8, q8_0, q4_0; int8, int4, int2 with /token or /channel."""
    simple = {"float16": Float16(), "fp8": FP8(), "q8_0": Q8_0(), "q4_0": Q4_0()}
    if name in simple:
        return simple[name]
    number, _, layout = name.partition("/")
    kinds = {"token": PerToken, "channel": PerChannel}
    if number not in ("int8", "int4", "int2") or layout not in kinds:
        known = ", ".join(simple)
        raise ValueError(f"format {name!r} is not known: use {known}, or such as int4/token, int2/channel")
    return kinds[layout](int(number[3:]))
