"""The one-line exercise of chapter 00: it shows how an exercise and its check work."""

from kvcourse.checks import Run, exercise, is_number, short


@exercise(
    "00.total_tokens",
    right="the text has prompt + new tokens. Later chapters ask which of them the model had to process.",
    todo="replace `...` by one expression, then run this cell again",
)
def total_tokens(run: Run) -> str | None:
    """``total_tokens(prompt, new)``: how many tokens a text has after ``new`` were generated from
    ``prompt``."""
    for prompt, new in ((6, 4), (2000, 300), (5, 0)):
        got, right = run(prompt, new), prompt + new
        asked = f"{prompt:,} prompt tokens and {new:,} new ones"
        otherwise = f"{asked}: expected {right:,}, got {short(got)}"
        if not is_number(got):
            return otherwise
        if got == right:
            continue
        if got == new:
            return f"{asked}: you count only the new tokens, but the prompt is still part of the text"
        if got == prompt * new:
            return (
                f"{asked}: you multiply. The text grows by one token a step, so it has {right:,}, not {got:,}"
            )
        if got in (right - 1, right + 1):
            return f"{asked}: {got:,} is one off. Every step adds exactly one token, the first step too"
        return otherwise
    return None
