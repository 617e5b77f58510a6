"""The exercise of chapter 18."""

from kvcourse.checks import Run, exercise, short
from kvcourse.paging import block_hash, block_hashes

# (tokens, block_size, salt, adapter)
CASES = (
    (48, 16, None, None),
    (35, 16, None, None),  # a last block of 3
    (15, 16, None, None),  # not one full block
    (12, 4, "tenant 7", None),
    (12, 4, None, "poet"),
    (13, 4, "tenant 7", "poet"),
    (0, 4, "tenant 7", "poet"),
)


@exercise(
    "18.block_names",
    right=(
        "each name hangs on the one before; only full blocks have one; the salt goes in at the front, the "
        "adapter everywhere."
    ),
    todo="replace `...` by the list of names, then run this cell again",
)
def block_names(run: Run) -> str | None:
    """``block_names(token_ids, block_size, salt, adapter)`` → [name of block 0, name of block 1, …]."""
    for tokens, size, salt, adapter in CASES:
        # Two equal blocks in a row would hide a missing parent, equal first tokens much else.
        ids = [(7 * i * i + 3 * i + 11) % 2048 for i in range(tokens)]
        got = run(ids, size, salt, adapter)
        mistake = _mistake(got, ids, size, salt, adapter)
        if mistake:
            where = f"{tokens} tokens in blocks of {size}, salt {salt!r}, adapter {adapter!r}"
            return f"{mistake} ({where})"
    return None


def _mistake(got, ids, size, salt, adapter):
    want = block_hashes(ids, size, salt, adapter)
    if not isinstance(got, (list, tuple)):
        return f"return a list of names, not {short(got)}"
    got = list(got)
    if any(isinstance(name, int) for name in got):
        return (
            "the names are whole numbers: Python's hash() differs from process to process for a salt, and "
            "anybody can find two prompts with the same one. Use block_hash"
        )
    other = next((name for name in got if not isinstance(name, bytes)), b"")
    if not isinstance(other, bytes):
        return f"a name is {short(other)}: give the 32 bytes of block_hash as they are"
    if got == want:
        return None
    full = len(ids) // size
    if len(got) == full + 1:
        return (
            f"{full + 1} names for {full} full blocks: a block that is not full can still change, it has none"
        )
    if len(got) != full:
        return f"{len(got)} names for {full} full blocks"
    for names, mistake in _known(ids, size, salt, adapter):
        if got == names:
            return mistake
    block = next(i for i in range(full) if got[i] != want[i])
    return (
        f"block {block} has another name than block_hash gives for its parent (block 0: None), its "
        f"{size} tokens, its salt and its adapter"
    )


def _known(ids, size, salt, adapter):
    """Names that a known mistake gives, and the line that tells it."""
    blocks = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]

    def chain(parent=lambda names: names[-1], salted=lambda i: i == 0, adapted=lambda i: True, root=None):
        names = []
        for i, tokens in enumerate(blocks):
            before = parent(names) if names else root
            names.append(
                block_hash(before, tokens, salt if salted(i) else None, adapter if adapted(i) else None)
            )
        return names

    yield (
        chain(parent=lambda names: None),
        "the parent is left out: a block's name must stand for everything before it, or two prompts that "
        "meet in the middle get each other's rows",
    )
    yield chain(root=b""), 'block 0 has b"" as its parent: nothing stands before it, so give None'
    yield (
        chain(parent=lambda names: names[0]),
        "every block has block 0 as its parent: the parent is the block just before",
    )
    yield (
        chain(salted=lambda i: True),
        "the salt is in every block: the first is enough, all later names contain it through their parent",
    )
    yield (
        chain(salted=lambda i: False),
        "the salt is in no block: two tenants would read each other's rows",
    )
    yield (
        chain(adapted=lambda i: False),
        "the adapter is in no block: rows computed by one variant of the model would be read by another",
    )
    yield (
        chain(adapted=lambda i: i == 0),
        "the adapter is in the first block only. That keeps variants apart too; give it with every block, "
        "as block_hash asks, so that the names agree with the engine's",
    )
    whole = [ids[: (i + 1) * size] for i in range(len(blocks))]
    yield (
        [block_hash(None, t, salt if i == 0 else None, adapter) for i, t in enumerate(whole)],
        "each name hashes all tokens from the start. It tells prompts apart as well, but the work grows with "
        "the square of the prompt: hash the parent's name and this block's tokens",
    )
