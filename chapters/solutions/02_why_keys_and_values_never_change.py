"""Solutions of chapter 02."""


def first_changed_position(layer, j, causal):
    """With the mask nothing before j ever sees token j; without it everything has, after one layer."""
    if causal or layer == 0:
        return j
    return 0


def positions_from_the_start(params):
    """Break it, put right: position i is row i of wpe, however long the text is or becomes."""
    return params
