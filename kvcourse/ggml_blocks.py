"""ggml's blocks of 32 numbers, the way llama.cpp's files and caches store them: bytes → float32.

Source: llama.cpp, ggml/src/ggml-common.h (`block_q4_1`, `block_q8_0`) and ggml-quants.c
(`dequantize_row_q4_1`, `dequantize_row_q8_0`).
"""

import numpy as np

NUMBERS = 32  # in a block


def decode_q8_0(blocks):
    """uint8 (…, 34 · n) → float32 (…, 32 · n): a float16 scale d, then 32 int8; a number is d · code."""
    flat = blocks.reshape(-1, 34)
    scale = _floats(flat[:, :2])
    return (flat[:, 2:].view(np.int8) * scale).reshape(*blocks.shape[:-1], -1)


def decode_q4_1(blocks):
    """uint8 (…, 20 · n) → float32 (…, 32 · n): float16 scale d and minimum m, then 16 bytes of codes.

    Byte j holds the codes of numbers j (low half) and j + 16; a number is d · code + m.
    """
    flat = blocks.reshape(-1, 20)
    scale_minimum, codes = _floats(flat[:, :4]), flat[:, 4:]
    out = np.empty((len(flat), NUMBERS), np.float32)
    # Written into the one output array: a matrix of weights is read twice as fast as with temporaries.
    np.bitwise_and(codes, 15, out=out[:, :16], casting="unsafe")
    np.right_shift(codes, 4, out=out[:, 16:], casting="unsafe")
    out *= scale_minimum[:, :1]
    out += scale_minimum[:, 1:]
    return out.reshape(*blocks.shape[:-1], -1)


DECODERS = {"q4_1": decode_q4_1, "q8_0": decode_q8_0}


def _floats(columns):
    """float16 numbers in pairs of bytes, little-endian in every ggml file, as float32."""
    return columns.copy().view("<f2").astype(np.float32)
