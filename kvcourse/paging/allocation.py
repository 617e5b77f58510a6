"""How much memory a policy takes for a request: the share that holds real tokens at the end of its life.

Four policies. The first three reserve one run of neighboring slots before the answer's length is known:

    reserve_max     max_seq_len slots for every request
    reserve_answer  prompt + max_answer slots, never more than max_seq_len
    buddy           the same, rounded up to a power of two; memory is split into halves and merged again
    paged           blocks of block_size slots, taken when a token needs one, anywhere in memory

A slot holds the keys and values of one token. What a request will not write in the end is known only
afterwards; the functions here look at the finished answer to say it. `arrivals.simulate_arrivals` lets
requests come and go in a memory with addresses. (Kwon et al. 2023, "Efficient Memory Management for Large
Language Model Serving with PagedAttention", sections 3.1 and 4.)
"""

import math

import numpy as np

from kvcourse.arguments import count

MOST = 2**24  # tokens of a request, more than any model takes: sums of them stay exact in int64
POLICIES = ("reserve_max", "reserve_answer", "buddy", "paged")


def lognormal_workload(
    n, seed=0, prompt_median=390, answer_median=144, sigma=1.0, max_prompt=3072, max_answer=1024
):
    """(prompt lengths, answer lengths) of n requests, int64 arrays of shape (n,): many short, a few long.

    Logarithms are normal with the given medians and standard deviation `sigma`; lengths are rounded to
    whole tokens. Clipped: prompts to 1 … max_prompt, answers to 1 … max_answer, so that with the
    defaults no request is longer than 4,096. About 2 % of the prompts and 2.5 % of the answers are.

    Raises TypeError or ValueError in one line for n < 1, a median outside its limits, a negative sigma.
    """
    n, max_prompt, max_answer = (
        count(n, "n"),
        count(max_prompt, "max_prompt"),
        count(max_answer, "max_answer"),
    )
    for name, median, most in (
        ("prompt_median", prompt_median, max_prompt),
        ("answer_median", answer_median, max_answer),
    ):
        if not 1 <= median <= most:
            raise ValueError(f"{name} is {median}: give 1 … {most:,}")
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma is {sigma}: give 0 or more")
    random = np.random.default_rng(seed)
    lengths = []
    for median, most in ((prompt_median, max_prompt), (answer_median, max_answer)):
        drawn = np.rint(np.minimum(random.lognormal(math.log(median), sigma, n), most))
        lengths.append(np.maximum(drawn, 1).astype(np.int64))
    return tuple(lengths)


def reserved_slots(prompt_lengths, answer_lengths, policy, max_seq_len=4096, max_answer=1024, block_size=16):
    """Slots that each request occupies when its last token is written: int64 (n,).

    Arguments and errors as `simulate_allocation`.
    """
    rules = Rules(policy, max_seq_len, max_answer, block_size)
    prompts, answers = rules.checked(prompt_lengths, answer_lengths)
    return rules.taken(prompts, prompts + answers)


def simulate_allocation(
    prompt_lengths, answer_lengths, policy, max_seq_len=4096, max_answer=1024, block_size=16, over="end"
):
    """Share of the occupied memory that holds real tokens, 0 … 1, all requests together.

    prompt_lengths, answer_lengths  tokens of each request, 1 … 2^24 each; so are the limits
    policy       "reserve_max", "reserve_answer", "buddy" or "paged"
    max_seq_len  the longest request, prompt and answer together
    max_answer   the longest answer
    block_size   slots of a block, for "paged"
    over         "end": each request as it stands when its last token is written, Σ tokens ÷ Σ slots
                 "life": each request in every step of its life, from the prompt alone to the whole answer.
                 Two effects, which nearly cancel with `lognormal_workload`: on average half of the answer
                 is not there yet, and a request with a long answer, which wastes less, lives longer.

    Raises ValueError or TypeError in one line: an unknown policy, lengths that are not whole numbers or
    not of one length, a request or an answer above its limit (it names the first one).
    """
    rules = Rules(policy, max_seq_len, max_answer, block_size)
    prompts, answers = rules.checked(prompt_lengths, answer_lengths)
    if over == "end":
        return float((prompts + answers).sum() / rules.taken(prompts, prompts + answers).sum())
    if over != "life":
        raise ValueError(f"over is {over!r}: choose 'end' or 'life'")
    steps = answers + 1  # the prompt alone, then one more token a step
    held = prompts * steps + answers * steps // 2
    if policy == "paged":
        totals = prompts + answers
        taken = rules.block_size * (
            _block_sum(totals, rules.block_size) - _block_sum(prompts - 1, rules.block_size)
        )
    else:
        taken = rules.taken(prompts, prompts + answers) * steps
    return float(held.sum() / taken.sum())


def _block_sum(n, size):
    """Σ ceil(k / size) for k = 1 … n, an array of n."""
    whole = n // size
    return size * whole * (whole + 1) // 2 + (n - whole * size) * (whole + 1)


class Rules:
    """A policy and its limits, checked: how many slots a request gets."""

    def __init__(self, policy, max_seq_len, max_answer, block_size):
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}: choose one of {', '.join(POLICIES)}")
        self.policy = policy
        self.max_seq_len = _size(max_seq_len, "max_seq_len")
        self.max_answer = _size(max_answer, "max_answer")
        self.block_size = _size(block_size, "block_size")

    def checked(self, prompt_lengths, answer_lengths):
        """Both as int64 arrays of one length, every request within the limits."""
        prompts, answers = _lengths(prompt_lengths, "prompt"), _lengths(answer_lengths, "answer")
        if len(prompts) != len(answers) or not len(prompts):
            raise ValueError(
                f"{len(prompts):,} prompts and {len(answers):,} answers: give one of each for every request"
            )
        for found, limit, what, name in (
            (answers, self.max_answer, "an answer", "max_answer"),
            (prompts + answers, self.max_seq_len, "prompt and answer", "max_seq_len"),
        ):
            if found.max() > limit:
                i = int(np.argmax(found > limit))
                raise ValueError(
                    f"request {i} has {what} of {found[i]:,} tokens, {name} is {limit:,}: "
                    f"clip the lengths or raise {name}"
                )
        return prompts, answers

    def asked(self, prompts, tokens):
        """Slots asked for, before rounding to a size that the memory hands out: the first three policies."""
        if self.policy == "reserve_max":
            return np.full_like(prompts, self.max_seq_len)
        if self.policy == "paged":
            return tokens
        return np.minimum(prompts + self.max_answer, self.max_seq_len)

    def taken(self, prompts, tokens):
        """Slots occupied by requests of these prompts that have written `tokens`: int64 arrays."""
        asked = self.asked(prompts, tokens)
        if self.policy == "paged":
            return -(-asked // self.block_size) * self.block_size
        return _power_of_two(asked) if self.policy == "buddy" else asked


def _lengths(lengths, what):
    found = np.asarray(lengths)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise TypeError(f"{what} lengths must be a flat list of whole numbers, one for each request")
    if found.size and found.min() < 1:
        i = int(np.argmax(found < 1))
        raise ValueError(f"request {i} has {what} length {found[i]}: give at least 1 token")
    if found.size and found.max() > MOST:
        i = int(np.argmax(found > MOST))
        raise ValueError(f"request {i} has {what} length {found[i]:,}: give at most {MOST:,} tokens")
    return found.astype(np.int64)


def _size(number, name):
    value = count(number, name)
    if value > MOST:
        raise ValueError(f"{name} is {value:,}: give at most {MOST:,} tokens")
    return value


def _power_of_two(n):
    """The smallest powers of two that are at least n, exact: int64 array."""
    powers = 2 ** np.arange(63, dtype=np.int64)
    return powers[np.searchsorted(powers, n)]
