"""A needle in a haystack: a number hidden in a long text, and asked for at the end.

Perplexity is mostly a matter of the words just before. This task cannot be done from those: the
answer stands once, somewhere far back, and either the cache still gives it back or it does not.
As a pass key the task is from Mohtashami and Jaggi 2023, "Landmark Attention" (arXiv 2305.16300).
"""

import numpy as np

from kvcourse import evaluation

DIGITS = 5
STARTS = 2000  # the haystack begins at one of the first 2,000 tokens of the text
SHORTEST = 8  # tokens of text around the needle
_SPECIAL = {"<|im_start|>", "<|im_end|>"}
_HEAD = "<|im_start|>user\nRead this text.\n\n"
_NEEDLE = " Remember this: the pass key is {number}."
# The answer is begun for the model, up to the blank before the number: the digits alone are left to say.
_TAIL = (
    "\n\nWhat is the pass key mentioned in the text?<|im_end|>\n"
    "<|im_start|>assistant\nThe pass key mentioned in the text is "
)


def prompt(tokenizer, text, length, depth, seed):
    """(prompt ids, answer ids): `length` tokens together, two lists of int.

    tokenizer  of a chat model with ChatML's two control tokens, which writes each digit as one token
    text       what the needle is hidden in; one of its first 2,000 tokens is the first
    length     tokens of prompt and answer together
    depth      where the needle lies: 0 at the start of the text, 1 at its end, moved to the end of the
               nearest sentence
    seed       chooses the number and where the text begins

    Raises ValueError for a depth outside 0 … 1, a length or text that is too short, and a tokenizer
    that joins digits.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}: give 0 (start of the text) … 1 (its end)")
    random = np.random.default_rng(seed)
    number = "".join(str(digit) for digit in random.integers(0, 10, DIGITS))
    head, needle, tail, answer = (
        tokenizer.encode(part, allowed_special=_SPECIAL)
        for part in (_HEAD, _NEEDLE.format(number=number), _TAIL, number)
    )
    if len(answer) != DIGITS:
        raise ValueError(
            f"{tokenizer.name} writes {number} as {len(answer)} tokens: the task needs one a digit"
        )
    room = length - sum(map(len, (head, needle, tail, answer)))
    if room < SHORTEST:
        raise ValueError(
            f"length is {length}: question and needle leave no text, give {length + SHORTEST - room}"
        )
    hay = _haystack(tokenizer.encode_ordinary(text), room, random)
    cut = _nearest_sentence_end(tokenizer, hay, int(depth * len(hay)))
    return head + hay[:cut] + needle + hay[cut:] + tail, answer


def _haystack(ids, room, random):
    spare = len(ids) - room
    if spare < 0:
        raise ValueError(f"the text has {len(ids):,} tokens, {room:,} are needed: give a longer text")
    return ids[random.integers(0, min(STARTS, spare + 1)) :][:room]


def _nearest_sentence_end(tokenizer, ids, place):
    """Where, nearest to `place`, the token before ends with a full stop; `place` itself where none does."""
    ends = [i + 1 for i, token in enumerate(ids) if tokenizer.decode([token]).endswith(".")]
    return min(ends, key=lambda end: abs(end - place), default=place)


def ask(model, prompt, answer, cache, chunk=64):
    """(found, mean ln p of an answer token): what `prompt` made, passed in passes of `chunk`.

    One pass over prompt and answer tells what greedy decoding would write: it writes the answer
    exactly when every token of it is the likeliest at its place, given the prompt and the answer so
    far. (A cache that rounds or forgets at the end of a pass may differ a little from decoding token
    by token: see `evaluation.log_probs`.) ln p is the graded form, which falls before answers flip.

    found is a bool, ln p a float. Raises ValueError for an empty prompt or answer, and as
    `evaluation.log_probs` does.
    """
    if len(prompt) == 0 or len(answer) == 0:
        raise ValueError(f"{len(prompt)} prompt tokens and {len(answer)} of the answer: give at least 1 each")
    ids = evaluation.checked_text(model, [*prompt, *answer], cache, chunk)
    first = len(prompt) - 1  # the first row that predicts an answer token
    likeliest, log_probs = [], []
    for start in range(0, len(ids) - 1, chunk):
        part = ids[start : min(start + chunk, len(ids) - 1)]
        asked = list(range(max(first - start, 0), len(part)))
        logits = model(part, cache, rows=asked or [-1])
        if asked:
            expected = ids[start + 1 :][asked]
            likeliest += (logits.argmax(axis=1) == expected).tolist()
            logs = evaluation.log_probabilities(logits)
            log_probs += logs[np.arange(len(asked)), expected].tolist()
    return all(likeliest), float(np.mean(log_probs))
