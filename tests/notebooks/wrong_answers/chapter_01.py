"""Typical wrong answers of chapter 01."""


def _naive(prompt, new):
    return sum(range(prompt, prompt + new))


WRONG = {
    "01.positions_processed": [
        (
            lambda prompt, new, cached: prompt + new - 1 if cached else _naive(prompt + 1, new),
            "every step is one position too long",
        ),
        (lambda prompt, new, cached: prompt + new - 1 if cached else prompt * new, "but the text grows"),
        (lambda prompt, new, cached: prompt + new - 1, "that is the count with a cache"),
        (lambda prompt, new, cached: prompt + new if cached else _naive(prompt, new), "one too many"),
        (lambda prompt, new, cached: new if cached else _naive(prompt, new), "you forgot the prompt"),
        (lambda prompt, new, cached: _naive(prompt, new), "that is the count without a cache"),
        (lambda prompt, new, cached: prompt * new if cached else _naive(prompt, new), "it passes once"),
        (lambda prompt, new, cached: prompt + new - 1 if cached else _naive(prompt, new), "no pass is made"),
    ],
}
