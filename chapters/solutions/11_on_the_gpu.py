"""Solutions of chapter 11."""

import torch


def sweep(make, batches):
    """The error is never named and its clause is left; the rows are let go before the next try."""
    found = {}
    for batch in batches:
        try:
            found[batch] = make(batch).nbytes  # the rows have no name, so they are gone with this line
        except torch.OutOfMemoryError:
            found[batch] = None
    return found


# Break it: the position lies in a tensor. `decode_step` is that step: its lengths are read by the recorded
# operations and moved by the last of them, and a mask made from them hides the rows that do not count.
