"""Solutions of chapter 19."""

from itertools import permutations


def best_order(parts):
    """Try all orders. For parts that change independently, exchanging two neighbors shows a shorter way:

        sorted(parts, key=lambda name: -tokens * (1 - changes) / changes)

    with changes = 0 first: a part is worth its tokens times the number of requests that it is expected to
    stay as it is.
    """

    def read(order):
        still, tokens = 1.0, 0.0
        for name in order:
            length, changes = parts[name]
            still *= 1 - changes
            tokens += still * length
        return tokens

    return list(max(permutations(parts), key=read))


# Break it: a request's blocks become the newest from the last to the first, so that the first ends newest.
#
#     for block in reversed(ids):
#         held[block] = None
#         held.move_to_end(block)
