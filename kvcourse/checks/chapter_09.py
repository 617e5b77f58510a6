"""The exercise of chapter 09."""

from kvcourse import config
from kvcourse.checks import Run, exercise, is_number, short

# Model, bytes of its weights, cached tokens of each request, bytes per number. The third comes out even in
# both answers; in the fourth, head_dim is not the width divided by the heads; in the last, one byte more
# than 20 requests shows who rounds before the last division.
CASES = (
    ("llama-3.1-8b", 16_000_000_000, 2300, 2),
    ("gpt2", 494_600_000, 300, 4),
    ("llama-3.1-8b", 2**34, 2048, 2),
    ("qwen3-4b", 8_000_000_000, 1000, 1),
    ("llama-2-7b", 13_480_000_000, 4000, 2),
    ("gpt2", 20 * 300 * 73_728 + 1, 300, 4),
)
BOOK_STEP_BYTES = 7e-3 * 3.35e12  # what an H100 could move in the book's 7 ms


def _row(shape, number, kv_heads=None, head_dim=None):
    """Bytes of one token's keys and values."""
    return 2 * shape.num_layers * (kv_heads or shape.num_kv_heads) * (head_dim or shape.head_dim) * number


# What somebody took for the bytes of a row, and the line for it. One holds only if it explains every case.
WRONG_ROWS = (
    (
        lambda shape, number: _row(shape, 1),
        "the bytes per number are missing: you count a row in numbers, the weights in bytes",
    ),
    (
        lambda shape, number: _row(shape, 2),
        "your rows have 2 bytes per number, whatever `bytes_per_number` says",
    ),
    (
        lambda shape, number: _row(shape, 4),
        "your rows have 4 bytes per number, whatever `bytes_per_number` says",
    ),
    (
        lambda shape, number: _row(shape, number) / 2,
        "a row is a key and a value: the factor 2 is missing",
    ),
    (
        lambda shape, number: _row(shape, number) * 2,
        "you count a row twice: a step reads the cached rows, and writes only its own",
    ),
    (
        lambda shape, number: _row(shape, number) / shape.num_layers,
        "each layer has rows of its own: the number of layers is missing",
    ),
    (
        lambda shape, number: _row(shape, number) / shape.num_kv_heads,
        "each KV head has rows of its own: their number is missing",
    ),
    (
        lambda shape, number: _row(shape, number, kv_heads=shape.num_heads),
        "you count the query heads (num_heads). The cache holds KV heads (num_kv_heads)",
    ),
    (
        lambda shape, number: _row(shape, number, head_dim=shape.hidden_size // shape.num_heads),
        "head_dim is not always the width divided by the heads: take config.head_dim",
    ),
)


@exercise(
    "09.doubling_context",
    right=(
        "one request of Llama 3.1 8B reads as much cache as weights from 122,071 tokens on, "
        "and a batch of 2,300 each with the 54th request."
    ),
    todo="replace `...` by the two divisions, then run this cell again",
)
def doubling_context(run: Run) -> str | None:
    """``doubling_context(config, weight_bytes, context, bytes_per_number)`` → (tokens, requests)."""
    answers = []
    for name, weights, context, number in CASES:
        got = run(config.lookup(name), weights, context, bytes_per_number=number)
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            return f"return two numbers, tokens and requests, not {short(got)}"
        if not all(is_number(value) for value in got):
            return f"both must be numbers, got {short(got[0])} and {short(got[1])}"
        answers.append(tuple(got))
    wrong = [case for case, got in zip(CASES, answers, strict=True) if got != _right(*case)]
    if not wrong:
        return None
    name, weights, context, number = wrong[0]
    where = f"{name}, {weights:,} bytes of weights, bytes per number {number}, {context:,} tokens a request"
    return f"{where}: {_wrong_bytes(answers) or _wrong_number(answers[CASES.index(wrong[0])], wrong[0])}"


def _right(name, weights, context, number):
    row = _row(config.lookup(name), number)
    return -(-weights // row), -(-weights // (context * row))


def _wrong_bytes(answers):
    """The line for answers that are one and the same wrong division in every case, however rounded."""
    if all(got == _right(*case)[::-1] for got, case in zip(answers, CASES, strict=True)):
        return "tokens first, then requests: yours are the other way around"
    for wrong_row, line in WRONG_ROWS:
        if all(_near(got, case, wrong_row) for got, case in zip(answers, CASES, strict=True)):
            return line
    name, _, _, number = CASES[0]
    if abs(answers[0][0] - BOOK_STEP_BYTES / _row(config.lookup(name), number)) <= 1:
        return (
            "that is where the 7 ms of the book's step double, which are longer than reading the weights "
            "takes at best: divide the bytes of the weights, not a time"
        )
    return None


def _near(got, case, row_of):
    name, weights, context, number = case
    row = row_of(config.lookup(name), number)
    exact = weights / row, weights / (context * row)
    return all(abs(value - right) <= 1 for value, right in zip(got, exact, strict=True))


def _wrong_number(got, case):
    """The line for one wrong pair whose bytes are right, or for a pair that nothing explains."""
    _, weights, context, number = case
    row = _row(config.lookup(case[0]), number)
    want, exact = _right(*case), (weights / row, weights / (context * row))
    if any(value != int(value) for value in got):
        return f"{got[0]:,} and {got[1]:,}: half a token cannot be cached. Round up to whole numbers"
    tokens, requests = (value - right for value, right in zip(got, want, strict=True))
    if weights % (context * row) == 0 and {tokens, requests} <= {0, 1}:
        return (
            f"{exact[0]:,.0f} tokens, and {exact[1]:,.0f} requests, are exactly as many bytes as the "
            f"weights: do not add one where the division comes out even"
        )
    if (tokens, got[1]) == (0, -(-(weights // row) // context)):
        return "the requests are rounded down on the way: divide the bytes once, and round up last"
    if {tokens, requests} <= {0, -1}:
        return (
            f"with {got[0]:,} tokens, or {got[1]:,} requests, the caches are still a little smaller than the "
            f"weights: round up"
        )
    if tokens == 0:
        return (
            f"the tokens are right. {context:,} of them are one request: "
            f"divide the weights by the bytes of {context:,} rows, and round up"
        )
    return (
        f"expected {want[0]:,} tokens and {want[1]:,} requests, got {got[0]:,} and {got[1]:,}: "
        f"bytes of the weights ÷ bytes of a row"
    )
