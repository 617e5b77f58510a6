"""Typical wrong answers of chapter 02."""

WRONG = {
    "02.first_changed_position": [
        (lambda layer, j, causal: j, "in layer 1 its key knows"),
        (lambda layer, j, causal: j if causal else 0, "no position has looked at another one"),
        (lambda layer, j, causal: 0 if layer else j, "cannot notice token 4"),
        (lambda layer, j, causal: j if layer == 0 or not causal else j + 1, "itself changes as well"),
        (lambda layer, j, causal: max(0, j - layer), "leaks one position per layer"),
        (lambda layer, j, causal: 0, "made from its own token and position"),
        # Right for j = 4, and wrong for one of the others.
        (lambda layer, j, causal: min(j, 4) if causal or layer == 0 else 0, "expected 7, got 4"),
        (lambda layer, j, causal: max(j, 1) if causal or layer == 0 else 0, "position 0 itself changes"),
        (lambda layer, j, causal: min(j, 10) if causal or layer == 0 else 0, "expected 11, got 10"),
        (lambda layer, j, causal: j if causal or layer == 0 else j + 1, "expected 0, got 5"),
        (lambda layer, j, causal: list(range(j, 12)), "expected the position 4"),
    ],
}
