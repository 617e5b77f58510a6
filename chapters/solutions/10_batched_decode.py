"""Solutions of chapter 10."""

import numpy as np


def batch_inputs(real):
    """Every row counts its own tokens: a running sum does it wherever the padding stands."""
    columns = np.arange(real.shape[1])
    positions = np.maximum(np.cumsum(real, axis=1) - 1, 0)  # padding before the first token: 0, not −1
    causal = columns <= columns[:, None]  # (T, T)
    itself = columns == columns[:, None]  # so that no row of the mask is empty
    visible = causal & real[:, None] | itself  # (B, T, T)
    last = columns[-1] - np.argmax(real[:, ::-1], axis=1)  # (B,): the first token seen from the right
    return positions, visible, last


# Break it: let padding see itself. `Strict.begin` becomes
#
#     def begin(self, T):
#         return super().begin(T)
#
# A large negative number in place of −inf would do as well: an empty row then takes the mean of all values,
# which nobody reads.
