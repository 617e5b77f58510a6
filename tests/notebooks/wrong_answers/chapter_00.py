"""Typical wrong answers of chapter 00."""

WRONG = {
    "00.total_tokens": [
        (lambda prompt, new: new, "you count only the new tokens"),
        (lambda prompt, new: prompt * new, "you multiply"),
        (lambda prompt, new: prompt + new - 1, "one off"),
    ],
}
