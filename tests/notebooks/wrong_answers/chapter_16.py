"""Typical wrong answers of chapter 16."""


def _slots(rule):
    def slot_mapping(block_table, start, stop, block_size):
        return [rule(block_table, p, start, block_size) for p in range(start, stop)]

    return slot_mapping


def _with_stop(table, start, stop, size):
    last = min(stop, len(table) * size - 1)
    return [table[p // size] * size + p % size for p in range(start, last + 1)]


WRONG = {
    "16.slot_mapping": [
        (_slots(lambda table, p, start, size: p), "that is the position itself"),
        (_slots(lambda table, p, start, size: table[0] * size + p), "blocks need not be adjacent"),
        (_slots(lambda table, p, start, size: table[p // size] * size), "add the place in it"),
        (_slots(lambda table, p, start, size: table[p // size] + p % size), "multiply it by block_size"),
        (
            _slots(lambda table, p, start, size: table[(p - start) // size] * size + (p - start) % size),
            "begins at position 0 of the sequence",
        ),
        (_slots(lambda table, p, start, size: sorted(table)[p // size] * size + p % size), "do not sort it"),
        (
            _slots(lambda table, p, start, size: table[p // size] * size + p),
            "not the position in the sequence",
        ),
        (_slots(lambda table, p, start, size: table[p % size] * size + p // size), "the block table has not"),
        (_slots(lambda table, p, start, size: (table[p // size], p % size)), "not a pair"),
        (_slots(lambda table, p, start, size: table[p // 16] * 16 + p % 16), "not always 16"),
        (_slots(lambda table, p, start, size: table[p // size] * size + p % float(size)), "a whole number"),
        (_with_stop, "stop is not"),
        (lambda table, start, stop, size: range(start, stop), "return a list"),
        (_slots(lambda table, p, start, size: table[p // size] * size + p % size + 1), "expected"),
    ],
    "16.needs_block": [
        (lambda position, block_size: (position + 1) % block_size == 0, "has just become full"),
        (lambda position, block_size: position == 0 or (position + 1) % block_size == 0, "a block early"),
        (lambda position, block_size: position > 0 and position % block_size == 0, "has no block yet"),
        (lambda position, block_size: position == 0 or position % block_size == 1, "a token late"),
        (lambda position, block_size: position == 0, "needs another one"),
        (lambda position, block_size: True, "has room for block_size tokens"),
        (lambda position, block_size: position < block_size, "its block is there already"),
        (lambda position, block_size: False, "would have no slot"),
        (lambda position, block_size: position % block_size, "return True or False"),
    ],
}
