"""Typical wrong answers of chapter 13."""

import numpy as np


def _own(up, out):
    heads, v, _ = up.shape
    return out.reshape(heads, v, -1)


def _right(up, out):
    return up.swapaxes(1, 2) @ _own(up, out)


def _not_transposed(up, out):
    return up @ _own(up, out)


def _strided_rows(up, out):
    heads, v, _ = up.shape
    return up.swapaxes(1, 2) @ out.reshape(v, heads, -1).swapaxes(0, 1)


def _other_head(up, out):
    return up.swapaxes(1, 2) @ _own(up, out)[::-1]


def _scaled(up, out):
    return _right(up, out) * up.shape[1] ** -0.5


WRONG = {
    "13.absorb_output": [
        (lambda up, out: _right(up, out).sum(axis=0), "one matrix for all heads"),
        (lambda up, out: _right(up, out).swapaxes(1, 2), "transpose of each head's matrix"),
        (lambda up, out: np.concatenate(list(_right(up, out))), "one below the other"),
        (lambda up, out: _right(up, out).swapaxes(0, 1), "heads and rank in the wrong order"),
        (_not_transposed, "up_values is not transposed"),
        (_strided_rows, "wrong rows of `out`"),
        (_other_head, "output rows of another head"),
        (lambda up, out: np.repeat(_right(up, out)[:1], len(up), axis=0), "matrix of head 0"),
        (_scaled, "no scale belongs here"),
        (lambda up, out: -_right(up, out), "-1 times what it should be"),
        (lambda up, out: _right(up, out).astype(np.float32), "right to the digits of float32"),
        (lambda up, out: _right(up, out) + np.eye(*_right(up, out).shape[1:]), "the sum over v"),
    ]
}
