"""Solutions of chapter 05."""

import numpy as np


def same_answers(cached_logits, uncached_logits):
    """Rounding moves these logits by about 2e-5, float16 rows by 1e-3: the limit lies between. NaN fails."""
    return bool(np.abs(cached_logits - uncached_logits).max() < 3e-4)
