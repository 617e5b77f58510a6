"""Typical wrong answers of chapter 10."""

import numpy as np


def _inputs(positions=None, visible=None, last=None):
    """The right answer with one of its three parts exchanged: each a function of `real`."""

    def batch_inputs(real):
        B, T = real.shape
        parts = (positions or _own, visible or _seen, last or _newest)
        return tuple(part(real) for part in parts)

    return batch_inputs


def _own(real):
    return np.maximum(np.cumsum(real, axis=1) - 1, 0)


def _seen(real):
    T = real.shape[1]
    return np.tri(T, dtype=bool) & real[:, None] | np.eye(T, dtype=bool)


def _newest(real):
    T = real.shape[1]
    return T - 1 - np.argmax(real[:, ::-1], axis=1)


def _columns(real):
    return np.tile(np.arange(real.shape[1]), (len(real), 1))


def _triangle(real):
    T = real.shape[1]
    return np.tile(np.tri(T, dtype=bool), (len(real), 1, 1))


def _without_triangle(real):
    T = real.shape[1]
    return np.repeat(real[:, None], T, axis=1) | np.eye(T, dtype=bool)


def _turned(real):
    return _seen(real).swapaxes(1, 2)


def _empty_rows(real):
    return np.tri(real.shape[1], dtype=bool) & real[:, None] & real[:, :, None]


def _blind(real):
    T = real.shape[1]
    return (np.tri(T, k=-1, dtype=bool) & real[:, None]) | (np.eye(T, dtype=bool) & ~real[:, None])


def _shared(real):
    return _columns(real), _triangle(real), np.full(len(real), real.shape[1] - 1)


def _two_arrays(real):
    return _own(real), _seen(real)


WRONG = {
    "10.batch_inputs": [
        (_shared, "Positions not shifted"),
        (_inputs(positions=lambda real: np.cumsum(real, axis=1)), "take 1 away"),
        (_inputs(positions=lambda real: np.cumsum(real, axis=1) - 1), "negative"),
        (_inputs(positions=lambda real: np.cumsum(real, axis=1)[:, ::-1] - 1), "expected 0"),
        (_inputs(positions=lambda real: np.where(real, _own(real), 99)), "padding got position 99"),
        (_inputs(positions=lambda real: _own(real).astype(float)), "expected whole numbers"),
        (_inputs(visible=_triangle), "padding not masked"),
        (_inputs(visible=_without_triangle), "which comes later. Keep the triangle"),
        (_inputs(visible=_turned), "The mask is turned around"),
        (_inputs(visible=_empty_rows), "a softmax over nothing is NaN"),
        (_inputs(visible=_blind), "does not see itself"),
        (_inputs(visible=lambda real: _seen(real)[0]), "visible has shape"),
        (_inputs(last=lambda real: np.full(len(real), real.shape[1] - 1)), "The last column holds padding"),
        (_inputs(last=lambda real: real.sum(axis=1) - 1), "only if no padding stands before it"),
        (_inputs(last=lambda real: _newest(real) + 1), "Columns count from 0"),
        (_two_arrays, "return three arrays"),
    ]
}
