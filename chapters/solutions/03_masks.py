"""Solutions of chapter 03."""

import numpy as np


def causal_mask(start, T):
    """Row r belongs to position start + r and sees keys 0 … start + r."""
    return np.arange(start + T)[None, :] <= start + np.arange(T)[:, None]  # (1, start + T) against (T, 1)


def masked_cells(chunks):
    """Row r of a chunk misses the T − 1 − r keys after its own, whatever came before."""
    return sum(T * (T - 1) // 2 for T in chunks)
