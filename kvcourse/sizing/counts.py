"""Counting positions and rows: what a loop computes, what a growing cache copies and reserves."""

from kvcourse.sizing.units import at_least


def positions_processed(prompt, new, cached):
    """How many positions pass through the model to write `new` tokens after `prompt` tokens.

    Without a cache step i passes all prompt + i positions through; with one, the
    prompt goes once and then every written token but the last, which is never read.
    """
    (prompt,), (new,) = at_least(1, prompt=prompt), at_least(0, new=new)
    if new == 0:
        return 0
    if cached:
        return prompt + new - 1
    return new * prompt + new * (new - 1) // 2


STRATEGIES = ("concatenate", "double", "preallocate")  # ways to keep a growing sequence in one array


def rows_copied(strategy, seq_len, prompt=1, capacity=16):
    """Old rows a cache has moved until it holds `seq_len` tokens: `prompt` in one pass, then one a pass.

    One row stands for a token's keys and values in all layers, so bytes are rows times
    `kv_bytes_per_token`.

    concatenate  every pass after the first moves all rows there are: prompt + … + (seq_len − 1)
    double       room for `capacity` rows at first, then for twice as many, or as many as the
                 pass needs: c + 2c + 4c + … = c·2^k − c, where c is the capacity after the prompt
                 and k doublings reach seq_len. Below 2·seq_len (Cormen et al., "Introduction to
                 Algorithms", dynamic tables).
    preallocate  0

    Raises ValueError for an unknown strategy, prompt > seq_len, or anything below 1.
    """
    prompt, seq_len, capacity = _growth(strategy, seq_len, prompt, capacity)
    if strategy == "preallocate":
        return 0
    if strategy == "concatenate":
        return seq_len * (seq_len - 1) // 2 - prompt * (prompt - 1) // 2
    return _doubled(seq_len, prompt, capacity) - _doubled(prompt, prompt, capacity)


def rows_reserved(strategy, seq_len, max_seq_len, prompt=1, capacity=16):
    """Rows there is room for when a cache of at most `max_seq_len` holds `seq_len` tokens.

    Arguments and growth as in `rows_copied`; the last doubling stops at `max_seq_len`.
    Raises ValueError as there, and when the tokens or the first capacity exceed `max_seq_len`.
    """
    prompt, seq_len, capacity = _growth(strategy, seq_len, prompt, capacity)
    (max_seq_len,) = at_least(1, max_seq_len=max_seq_len)
    for name, value in (("seq_len", seq_len), ("capacity", capacity if strategy == "double" else 1)):
        if value > max_seq_len:
            raise ValueError(
                f"{name} {value:,} is above max_seq_len {max_seq_len:,}: reserve more, or hold less"
            )
    if strategy == "preallocate":
        return max_seq_len
    if strategy == "concatenate":
        return seq_len
    return min(_doubled(seq_len, prompt, capacity), max_seq_len)


def _growth(strategy, seq_len, prompt, capacity):
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}: choose one of {', '.join(STRATEGIES)}")
    prompt, capacity = at_least(1, prompt=prompt, capacity=capacity)
    (seq_len,) = at_least(prompt, seq_len=seq_len)
    return prompt, seq_len, capacity


def _doubled(seq_len, prompt, capacity):
    """The first of c, 2c, 4c … that holds seq_len rows, where c is the capacity after the prompt."""
    first = capacity if prompt <= capacity else max(2 * capacity, prompt)
    return first << ((seq_len - 1) // first).bit_length()
