"""Solutions of chapter 07."""

import numpy as np


def append_growing(passes, capacity):
    """Copy old rows only when the array is full; doubling it makes that ever rarer."""
    array = np.zeros((capacity, passes[0].shape[1]), np.float32)
    seq_len = bytes_copied = 0
    for new in passes:
        stop = seq_len + len(new)
        if stop > len(array):
            larger = np.zeros((max(2 * len(array), stop), array.shape[1]), np.float32)
            larger[:seq_len] = array[:seq_len]  # only the rows that count
            bytes_copied += array[:seq_len].nbytes
            array = larger
        array[seq_len:stop] = new
        seq_len = stop
    return array[:seq_len], bytes_copied


# Break it: ask for the views at every step, from the arrays that are there now. `Quick.store` becomes
#
#     def store(self, layer, k, v):
#         return super().store(layer, k, v)
#
# and `self.views` goes: a view belongs to one array for as long as it lives.
