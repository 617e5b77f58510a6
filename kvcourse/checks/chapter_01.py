"""The exercise of chapter 01."""

from kvcourse.checks import Run, exercise, is_number, short


@exercise(
    "01.positions_processed",
    right=(
        "2,000 + 300 tokens take 644,850 positions without a cache and 2,299 with one. "
        "Your formula holds for every prompt and count we tried."
    ),
    todo="replace `...` by the count for each case, then run this cell again",
)
def positions_processed(run: Run) -> str | None:
    """``positions_processed(prompt, new, cached)``: positions that pass through in ``new`` steps."""
    for prompt, new in ((2000, 300), (6, 4), (5, 1), (1, 1), (1, 7), (2000, 0)):
        for cached in (False, True):
            got = run(prompt, new, cached)
            want = _cached(prompt, new) if cached else _naive(prompt, new)
            if not is_number(got) or got != want:
                return f"{_asked(prompt, new, cached)}: {_mistake(got, want, prompt, new, cached)}"
    return None


def _naive(prompt, new):
    return sum(prompt + step for step in range(new))  # written as the loop runs, not as the formula


def _cached(prompt, new):
    return prompt + new - 1 if new else 0


def _asked(prompt, new, cached):
    return f"prompt {prompt:,}, new {new:,}, {'with' if cached else 'without'} a cache"


def _mistake(got, want, prompt, new, cached):
    """The line for a wrong count. The mistakes are tried from the most to the least specific."""
    if not is_number(got):
        return f"expected the number {want:,}, got {short(got)}"
    if new == 0:
        return f"no token is asked for, so no pass is made: expected 0, got {short(got)}"
    known = _cached_mistakes(prompt, new) if cached else _naive_mistakes(prompt, new)
    for value, line in known:
        if got == value:
            return line
    return (
        f"expected {want:,}, got {short(got)}. Write down what each of the first three steps passes, then add"
    )


def _naive_mistakes(prompt, new):
    return (
        (
            sum(prompt + step for step in range(1, new + 1)),
            "every step is one position too long. The first pass sees the prompt alone, "
            "and the last new token is written down but never read",
        ),
        (
            prompt * new,
            "you count the prompt at every step, but the text grows: step i also passes the i tokens "
            "written before it",
        ),
        (
            _cached(prompt, new),
            "that is the count with a cache. Without one, every step passes the whole text",
        ),
        (prompt + new, "that is the length of the finished text. Each step passes all of it so far, again"),
        (
            (prompt + new) * new,
            "you pass the finished text at every step. At step i only prompt + i tokens exist",
        ),
        (
            new * (new - 1) // 2,
            "you count the new tokens only, but every step passes the prompt as well",
        ),
    )


def _cached_mistakes(prompt, new):
    return (
        (
            prompt + new,
            "one too many. The last new token is chosen and returned; no pass reads it any more",
        ),
        (
            new,
            "you forgot the prompt: it passes through once, and that pass gives the first new token",
        ),
        (
            new - 1,
            "you forgot the prompt: it passes through once, and that pass gives the first new token",
        ),
        (
            _naive(prompt, new),
            "that is the count without a cache. With one, a step passes only the token it does not know yet",
        ),
        (
            prompt * new,
            "you pass the prompt at every step, but it passes once; its keys and values are kept",
        ),
    )
