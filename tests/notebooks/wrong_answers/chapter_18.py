"""Typical wrong answers of chapter 18."""

from kvcourse.paging import block_hash


def _answer(
    parent=lambda names: names[-1],
    salted=lambda i: i == 0,
    adapted=lambda i: True,
    name=block_hash,
    stop=lambda n, size: n - size + 1,
    first=lambda start, size: start,
    root=None,
):
    """The right answer with one of its parts exchanged."""

    def block_names(token_ids, block_size, salt, adapter):
        names = []
        for i, start in enumerate(range(0, stop(len(token_ids), block_size), block_size)):
            before = parent(names) if names else root
            tokens = token_ids[first(start, block_size) : start + block_size]
            names.append(name(before, tokens, salt if salted(i) else None, adapter if adapted(i) else None))
        return names

    return block_names


WRONG = {
    "18.block_names": [
        (_answer(parent=lambda names: None), "the parent is left out"),
        (_answer(parent=lambda names: names[0]), "block 0 as its parent"),
        (_answer(stop=lambda n, size: n), "a block that is not full"),
        (_answer(salted=lambda i: True), "the salt is in every block"),
        (_answer(salted=lambda i: False), "the salt is in no block"),
        (_answer(adapted=lambda i: False), "the adapter is in no block"),
        (_answer(adapted=lambda i: i == 0), "the adapter is in the first block only"),
        (_answer(name=lambda p, t, s, a: hash((p, tuple(t), s, a))), "Python's hash()"),
        (_answer(parent=lambda names: None, first=lambda start, size: 0), "all tokens from the start"),
        (_answer(stop=lambda n, size: n - size), "names for"),
        (_answer(first=lambda start, size: start + 1), "has another name"),
        (_answer(root=b""), 'block 0 has b"" as its parent'),
        (lambda *given: [name.hex() for name in _answer()(*given)], "give the 32 bytes of block_hash"),
        (lambda *given: b"".join(_answer()(*given)), "return a list"),
    ]
}
