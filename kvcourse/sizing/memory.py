"""Bytes of caches and weights, and how many tokens and requests fit. Whole numbers throughout."""

import math
import numbers as kinds

from kvcourse.sizing.units import at_least, format_bytes

# Bytes that a group of numbers takes: (bytes, numbers). q8_0 and q4_0 are ggml's: a float16 scale and
# 32 numbers of 8 or 4 bits (llama.cpp, ggml/src/ggml-common.h: block_q8_0 is 34 bytes, block_q4_0 18).
NUMBER_FORMATS = {
    "float32": (4, 1),
    "float16": (2, 1),
    "bfloat16": (2, 1),
    "fp8": (1, 1),
    "q8_0": (34, 32),
    "q4_0": (18, 32),
}


def bytes_of(numbers, dtype):
    """Bytes of so many numbers in a format of `NUMBER_FORMATS`.

    Raises ValueError for an unknown format, or a count that leaves a group of 32 unfilled.
    """
    check_format(dtype)
    (numbers,) = at_least(0, numbers=numbers)
    size, group = NUMBER_FORMATS[dtype]
    if numbers % group:
        raise ValueError(
            f"{numbers:,} numbers are not whole groups of {group}, which {dtype} needs: choose another format"
        )
    return numbers // group * size


def rounded_up_bytes_of(numbers, dtype):
    """As `bytes_of`, but for numbers that do not fill their last group a whole group is counted."""
    check_format(dtype)
    return bytes_of(_blocks(numbers, NUMBER_FORMATS[dtype][1]), dtype)


def check_format(dtype):
    """Raise ValueError, in one line, unless dtype is one of `NUMBER_FORMATS`."""
    if not isinstance(dtype, str) or dtype not in NUMBER_FORMATS:
        raise ValueError(f"format {dtype!r} is not known: use one of {', '.join(NUMBER_FORMATS)}")


def kv_bytes_per_token(config, bytes_per_number=2):
    """Bytes a cache keeps of one token: 2 · layers · KV heads · head_dim · bytes per number.

    A model with latent attention keeps kv_lora_rank + qk_rope_head_dim numbers a layer instead.

    bytes_per_number  a number above 0, or a format's name such as "q8_0" (then whole bytes)

    Raises ValueError for a model with sliding windows: there it depends on the length, see `kv_bytes`.
    """
    if config.sliding_window is not None:
        raise ValueError(
            f"{config.name} has layers that keep at most {config.sliding_window:,} tokens, so a token has no "
            f"size of its own: use kv_bytes(config, seq_len)"
        )
    if isinstance(bytes_per_number, str):
        return config.num_layers * _row_bytes(config, bytes_per_number)
    number = isinstance(bytes_per_number, kinds.Real) and not isinstance(bytes_per_number, bool)
    if not number or not 0 < bytes_per_number < math.inf:
        raise ValueError(
            f"bytes_per_number is {bytes_per_number!r}: give a number above 0, such as 2 for float16"
        )
    return config.num_layers * sum(_row_widths(config)) * bytes_per_number


def kv_bytes(config, seq_len, dtype="float16"):
    """Bytes of the keys and values that a step sees which is as far as `seq_len` tokens.

    A layer with a sliding window sees at most that many tokens, so it needs no more rows. (Engines
    hold a few more or less: between steps transformers keeps one row less, vLLM reserves room for
    the tokens of one pass besides.)
    """
    (seq_len,) = at_least(0, seq_len=seq_len)
    return _row_bytes(config, dtype) * sum(_rows(config, seq_len))


def kv_bytes_reserved(config, seq_len, dtype="float16", max_seq_len=None, block_size=1):
    """Bytes set aside for a sequence of `seq_len` tokens.

    max_seq_len  room for that many tokens is set aside from the start, whatever is used
    block_size   room is set aside in whole blocks of that many tokens

    Raises ValueError when seq_len is above max_seq_len.
    """
    (seq_len,), (block_size,) = at_least(0, seq_len=seq_len), at_least(1, block_size=block_size)
    if max_seq_len is not None:
        (max_seq_len,) = at_least(1, max_seq_len=max_seq_len)
        if seq_len > max_seq_len:
            raise ValueError(f"seq_len {seq_len:,} is above max_seq_len {max_seq_len:,}: reserve more")
        seq_len = max_seq_len
    return _row_bytes(config, dtype) * sum(_blocks(rows, block_size) for rows in _rows(config, seq_len))


def weight_bytes(config, dtype="float16"):
    """Bytes of all trained numbers (all experts) in one format.

    Real files mix formats: in a q4_0 file norms stay in float32, and often the embedding in another
    format.
    """
    return rounded_up_bytes_of(config.num_parameters, dtype)


def free_after_weights(config, memory_bytes, dtype="float16", keep_free=0):
    """Bytes left for caches on a device of `memory_bytes`. Raises ValueError when the weights do not fit."""
    memory_bytes, keep_free = at_least(0, memory_bytes=memory_bytes, keep_free=keep_free)
    weights = weight_bytes(config, dtype)
    if weights + keep_free > memory_bytes:
        kept = f" and {format_bytes(keep_free, 'GB')} are kept free" if keep_free else ""
        raise ValueError(
            f"{config.name} in {dtype} takes {format_bytes(weights, 'GB')}{kept}, the memory is "
            f"{format_bytes(memory_bytes, 'GB')}: use fewer bits, a larger device or several"
        )
    return memory_bytes - weights - keep_free


def tokens_that_fit(config, free_bytes, dtype="float16", block_size=1):
    """Tokens whose keys and values fit into `free_bytes`, in whole blocks. No sliding windows."""
    (free_bytes,), (block_size,) = at_least(0, free_bytes=free_bytes), at_least(1, block_size=block_size)
    per_block = kv_bytes_per_token(config, dtype) * block_size
    return free_bytes // per_block * block_size


def requests_that_fit(config, free_bytes, seq_len, dtype="float16", block_size=1, shared_prefix=0):
    """Sequences of `seq_len` tokens whose caches fit into `free_bytes` at once.

    block_size     room is taken in whole blocks of that many tokens
    shared_prefix  the first tokens, the same in all sequences, are stored once (whole blocks of them)
    """
    (seq_len,), (free_bytes,) = at_least(1, seq_len=seq_len), at_least(0, free_bytes=free_bytes)
    shared, own = shared_and_own_bytes(config, seq_len, dtype, block_size, shared_prefix)
    return max(free_bytes - shared, 0) // own


def shared_and_own_bytes(config, seq_len, dtype="float16", block_size=1, shared_prefix=0):
    """(bytes stored once for all sequences, bytes of each): arguments as in `requests_that_fit`.

    A layer with a window W sees of a sequence's own tokens, those after the prefix, at most W.
    Raises ValueError when the prefix is not shorter than the sequence.
    """
    seq_len, block_size = at_least(1, seq_len=seq_len, block_size=block_size)
    (shared_prefix,) = at_least(0, shared_prefix=shared_prefix)
    if shared_prefix >= seq_len:
        raise ValueError(
            f"shared_prefix {shared_prefix:,} is not below the sequence's {seq_len:,} tokens: "
            f"at least one token is the sequence's own"
        )
    whole = shared_prefix // block_size * block_size  # a block that is partly shared is nobody's
    row = _row_bytes(config, dtype)
    shared = sum(_blocks(rows, block_size) for rows in _rows(config, whole))
    own = sum(_blocks(rows, block_size) for rows in _rows(config, seq_len - whole))
    return row * shared, row * own


def _rows(config, seq_len):
    """Rows each layer needs of a sequence of so many tokens."""
    return [seq_len if window is None else min(seq_len, window) for window in config.layer_windows]


def _row_widths(config):
    """Widths of the vectors that one layer keeps of one token: keys and values, or latent and rotated key."""
    if config.latent:
        return config.latent.kv_lora_rank, config.latent.qk_rope_head_dim
    return config.num_kv_heads * config.head_dim, config.num_kv_heads * config.head_dim


def _row_bytes(config, dtype):
    """Bytes of one token's row in one layer. Groups of 32 run along a head: it must hold whole ones."""
    check_format(dtype)
    group = NUMBER_FORMATS[dtype][1]
    heads = (
        (config.latent.kv_lora_rank, config.latent.qk_rope_head_dim) if config.latent else (config.head_dim,)
    )
    for width in heads:
        if width % group:
            raise ValueError(
                f"{config.name}: a head of {width} numbers is not whole groups of {group}, which {dtype} "
                f"needs: choose another format"
            )
    return sum(bytes_of(width, dtype) for width in _row_widths(config))


def _blocks(rows, block_size):
    return -(-rows // block_size) * block_size
