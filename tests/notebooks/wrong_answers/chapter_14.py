"""Typical wrong answers of chapter 14."""

import numpy as np


def _away(y):
    whole = np.floor(np.abs(y))
    return np.copysign(whole + (np.abs(y) - whole >= 0.5), y)


def _encoder(top=127, rounded=False, rounding=_away, axis=1, size=np.abs):
    """The right encoder with one step exchanged."""

    def encode_q8_0(x):
        scale = size(x).max(axis=axis, keepdims=True) / np.float32(top) * np.ones((len(x), 1), np.float32)
        used = scale.astype(np.float16).astype(np.float32) if rounded else scale
        inverse = np.where(used == 0, np.float32(0), 1 / np.where(used == 0, np.float32(1), used))
        codes = rounding(x * inverse).clip(-128, 127).astype(np.int8)
        return np.concatenate([scale.astype(np.float16).view(np.uint8), codes.view(np.uint8)], axis=1)

    return encode_q8_0


_right = _encoder()


def _shifted(x):
    blocks = _right(x)
    blocks[:, 2:] += 128
    return blocks


def _not_a_number(x):
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
        codes = np.nan_to_num(_away(x / scale), nan=5).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), codes.view(np.uint8)], axis=1)


def _wide_scale(x):
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.concatenate([scale.view(np.uint8), _right(x)[:, 2:]], axis=1)


def _scale(blocks):
    return blocks[:, :2].copy().view(np.float16)


WRONG = {
    "14.encode_q8_0": [
        (_encoder(rounding=np.rint), "even neighbor, as np.rint does"),
        (_encoder(rounding=lambda y: np.floor(y + np.float32(0.5))), "a half was rounded up"),
        (_encoder(rounding=np.trunc), "cut off, not rounded"),
        (_encoder(rounded=True), "rounded to float16 before the division"),
        (_encoder(top=128), "divide by 127"),
        (_encoder(axis=None), "one scale for all blocks"),
        (_encoder(size=np.array), "largest magnitude"),
        (_shifted, "shifted by 128"),
        (lambda x: _right(x)[:, 2:], "scale's two bytes are missing"),
        (lambda x: _right(x).view(np.int8), "the array holds int8"),
        (lambda x: np.roll(_right(x), -2, axis=1), "it comes first"),
        (lambda x: np.concatenate([_right(x)[:, 1::-1], _right(x)[:, 2:]], axis=1), "in the other order"),
        (_wide_scale, "stored in four bytes"),
        (_not_a_number, "zeros: block 0, the code of number 0 is 5, expected 0"),
        (lambda x: _right(x).tolist(), "return an array"),
    ],
    "14.decode_q8_0": [
        (lambda b: b[:, 2:] * _scale(b).astype(np.float32), "they are signed"),
        (lambda b: b.view(np.int8) * _scale(b).astype(np.float32), "the first two bytes are the scale"),
        (lambda b: b[:, 2:].view(np.int8).astype(np.float32), "multiply each block by its scale"),
        (lambda b: b[:, 2:].view(np.int8) * _scale(b), "turn the scale into float32 first"),
        (
            lambda b: (b[:, 2:].view(np.int8) * _scale(b)).astype(np.float32),
            "the product was rounded to float16",
        ),
        (lambda b: b[:, 2:].view(np.int8) * _scale(b).astype(np.float64), "holds float64, expected float32"),
        (
            lambda b: b[:, 2:].view(np.int8) * b[:, 1::-1].copy().view(np.float16).astype(np.float32),
            "read in the other order",
        ),
    ],
}
