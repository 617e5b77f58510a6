"""Solutions of chapter 16."""


def slot_mapping(block_table, start, stop, block_size):
    """The entry of the table, times block_size, plus the place in the block."""
    return [block_table[p // block_size] * block_size + p % block_size for p in range(start, stop)]


def needs_block(position, block_size):
    """Tokens 0 … position − 1 fill their blocks to the last slot exactly here."""
    return position % block_size == 0


# Break it: a block goes to the free list when its last holder has given it back, and not before.
#
#     def give_back(self, table):
#         for block in table:
#             self.ref_count[block] -= 1
#             if self.ref_count[block] == 0:
#                 self.free.append(block)
