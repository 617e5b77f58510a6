"""The exercise of chapter 02."""

import numpy as np

from kvcourse.checks import Run, exercise, is_number, short
from kvcourse.figures.chapter_02 import depends_on

_LAYERS, _T = 6, 12


@exercise(
    "02.first_changed_position",
    right=(
        "with the mask the change starts at j in every layer; without it, at j in layer 0 and at 0 above. "
        "Your function agrees with the masks themselves, for 6 layers and 12 positions."
    ),
    todo="replace `...` by the first position whose key changes, then run this cell again",
)
def first_changed_position(run: Run) -> str | None:
    """``first_changed_position(layer, j, causal)``: the first position whose K and V change with token j."""
    masks = {True: np.tri(_T, dtype=bool), False: np.ones((_T, _T), dtype=bool)}
    for causal in (True, False):
        reach = depends_on(masks[causal], _LAYERS)  # (layers, positions, tokens)
        for layer in (0, 1, 2, _LAYERS - 1):
            for j in (4, 7, 0, _T - 1):
                got = run(layer, j, causal)
                want = int(np.flatnonzero(reach[layer, :, j])[0])
                if not is_number(got) or got != want:
                    return f"{_asked(layer, j, causal)}: {_mistake(got, want, layer, j, causal)}"
    return None


def _asked(layer, j, causal):
    return f"layer {layer}, token {j} changed, mask {'on' if causal else 'off'}"


def _mistake(got, want, layer, j, causal):
    """The line for a wrong position, the most specific first."""
    if not is_number(got):
        return f"expected the position {want}, got {short(got)}"
    if want == j and got == j + 1:
        return f"position {j} itself changes as well: its row is made from token {j}"
    if causal and layer == 0:
        return f"in layer 0 a key is made from its own token and position: expected {want}, got {short(got)}"
    if causal and got == j - layer:
        return (
            "that is a mask that leaks one position per layer; this one shows a row nothing that comes after"
        )
    if causal and got == 0:
        return f"position 0 sees only itself, in every layer, so it cannot notice token {j}"
    if not causal and layer == 0:
        return (
            "before layer 0 no position has looked at another one, mask or no mask: "
            f"expected {want}, got {short(got)}"
        )
    if not causal and got == j:
        return (
            f"without the mask position 0 saw token {j} in layer 0 already, so in layer {layer} its key knows"
        )
    return f"expected {want}, got {short(got)}. Ask which tokens position 0 has seen before this layer"
