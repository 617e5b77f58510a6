"""Solutions of chapter 18."""

from kvcourse.paging import block_hash


def block_names(token_ids, block_size, salt, adapter):
    """Full blocks only, each name hangs on the one before; the salt in the first, the adapter in all."""
    names = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        first = not names
        parent = None if first else names[-1]
        tokens = token_ids[start : start + block_size]
        names.append(block_hash(parent, tokens, salt if first else None, adapter))
    return names


# Break it: the name of a block must contain its parent's name,
#
#     def chained(parent, tokens):
#         return block_hash(parent, tokens)
