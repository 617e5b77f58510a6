"""The names of full blocks: a SHA-256 chain, so that one name stands for all tokens up to its block's end.

Blocks of two prompts have the same name only if the prompts agree from the first token to the end of that
block, in the salt and in the adapter. A digest is the same in every process and on every machine, which
Python's own hash() is not, and nobody can choose two token lists that share one, as anybody can for hash().
"""

import operator
import struct
from hashlib import sha256

from kvcourse.arguments import count

MAX_TOKEN = 2**32 - 1  # ids are hashed as 4 bytes each


def block_hash(parent, tokens, salt=None, adapter=None):
    """The name of one full block, 32 bytes: SHA-256 over the fields that are given.

    parent   name of the block before, None for the first block of a prompt
    tokens   the block's token ids, 0 … 2^32 − 1
    salt     str, bytes or int that keeps strangers apart; give it with the first block only, all later
             names contain it through their parent
    adapter  str, bytes or int: the fine-tuned variant that computed the block, given with every block

    Every field is written as tag, length, content, so that no two choices of fields give the same
    bytes: a token can never be read as part of the parent or of a salt. vLLM hashes the same fields
    (`hash_block_tokens` in vllm/v1/core/kv_cache_utils.py).

    Raises TypeError or ValueError for a parent, token, salt or adapter of another kind or size. The kind of
    tokens that pass as small integers (True, a byte of a bytes) is looked at by `block_hashes` only.
    """
    if not (parent is None or isinstance(parent, bytes)):
        raise TypeError(f"parent is {parent!r}: give the bytes that block_hash() returned, or None")
    fields = b"" if parent is None else _field(b"P", parent)
    fields += _field(b"T", pack(tokens))
    if salt is not None:
        fields += _field(b"S", label(salt, "salt"))
    if adapter is not None:
        fields += _field(b"A", label(adapter, "adapter"))
    return sha256(fields).digest()


def block_hashes(token_ids, block_size=16, salt=None, adapter=None):
    """The names of all full blocks of a prompt, in order: a list of 32-byte digests.

    A last block that is not full has no name: len(token_ids) // block_size are returned.
    Raises TypeError or ValueError as `block_hash`, and for a block_size below 1.
    """
    block_size = count(block_size, "block_size")
    ids, names = checked_ids(token_ids), []
    for start in range(0, len(ids) - block_size + 1, block_size):
        first = not names
        name = block_hash(
            None if first else names[-1], ids[start : start + block_size], salt if first else None, adapter
        )
        names.append(name)
    return names


def _field(tag, content):
    return tag + len(content).to_bytes(8, "little") + content


def pack(tokens):
    """Token ids as bytes, 4 each, little-endian."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        checked_ids(tokens)  # names the bad one
        raise


def label(value, name):
    """A salt or adapter as bytes; the first byte tells its type, so that "1", b"1" and 1 differ."""
    if isinstance(value, str):
        return b"s" + value.encode(errors="surrogatepass")
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, int) and not isinstance(value, bool):
        return b"i%d" % value
    raise TypeError(f"{name} is {value!r}: give a str, bytes or int, or None for none")


def checked_ids(token_ids, unnamed=False):
    """Token ids as a list of ints. With `unnamed`, None may stand for a token whose id nobody knows.

    Raises TypeError for what is no whole number, ValueError outside 0 … 2^32 − 1, naming the first bad one.
    """
    if isinstance(token_ids, str | bytes):
        raise TypeError(f"token ids are {token_ids[:20]!r}: give the ids that tokenizer.encode(text) returns")
    try:
        if isinstance(token_ids, bytearray | set | frozenset | dict):
            raise TypeError  # a list could be made of it, but not of token ids in their order
        ids = list(token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids)
    except TypeError:
        raise TypeError(f"token ids are {token_ids!r}: give a flat list of token ids") from None
    if not {type(i) for i in ids} <= {int}:
        ids = [None if unnamed and i is None else _whole(i) for i in ids]
    known = [i for i in ids if i is not None] if unnamed else ids
    if known and not (min(known) >= 0 and max(known) <= MAX_TOKEN):
        bad = next(i for i in known if not 0 <= i <= MAX_TOKEN)
        raise ValueError(f"token id {bad:,} is outside 0 … {MAX_TOKEN:,}: was it made by the tokenizer?")
    return ids


def _whole(number):
    try:
        if isinstance(number, bool):
            raise TypeError
        return operator.index(number)
    except TypeError:
        raise TypeError(f"token id {number!r} is not a whole number: give a flat list of token ids") from None
