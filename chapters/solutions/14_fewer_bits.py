"""Solutions of chapter 14."""

import numpy as np


def encode_q8_0(x):
    """float32 (n, 32) → uint8 (n, 34): a float16 scale, then 32 int8."""
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)  # (n, 1)
    inverse = np.where(scale == 0, np.float32(0), 1 / np.where(scale == 0, np.float32(1), scale))
    y = x * inverse  # (n, 32), −127 … 127
    whole = np.floor(np.abs(y))
    codes = np.copysign(whole + (np.abs(y) - whole >= 0.5), y).astype(np.int8)  # a half goes away from 0
    return np.concatenate([scale.astype(np.float16).view(np.uint8), codes.view(np.uint8)], axis=1)


def decode_q8_0(blocks):
    """uint8 (n, 34) → float32 (n, 32)."""
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)  # (n, 1)
    return blocks[:, 2:].view(np.int8) * scale


# Break it: add the zero point where the codes are read. `without_zero_point` becomes
#
#     def with_zero_point(x):
#         return per_channel(x, 8)
#
# and a test needs a text of more than one group.
