"""Typical wrong answers of primer D."""

import numpy as np


def _angles(x, positions, theta, dtype=np.float64):
    head_dim = x.shape[-1]
    frequencies = (theta ** (-np.arange(0, head_dim, 2) / head_dim)).astype(dtype)
    return positions.astype(dtype)[:, None] * frequencies


def _turned(x, angles):
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _neighbors(x, positions, theta):
    angles = _angles(x, positions, theta)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def _other_way(x, positions, theta):
    return _turned(x, -_angles(x, positions, theta))


def _degrees(x, positions, theta):
    return _turned(x, np.radians(_angles(x, positions, theta)))


def _to_degrees(x, positions, theta):
    return _turned(x, np.degrees(_angles(x, positions, theta)))


def _angles_in_float32(x, positions, theta):
    return _turned(x, _angles(x, positions, theta, np.float32))


def _float64(x, positions, theta):
    return _turned(x.astype(np.float64), _angles(x, positions, theta))


def _rows_counted(x, positions, theta):
    return _turned(x, _angles(x, np.arange(len(positions)), theta))


def _half_the_exponent(x, positions, theta):
    j = np.arange(x.shape[-1] // 2)
    return _turned(x, positions[:, None] * theta ** (-j / x.shape[-1]))


def _growing(x, positions, theta):
    j = np.arange(x.shape[-1] // 2)
    return _turned(x, positions[:, None] * theta ** (2 * j / x.shape[-1]))


def _from_one(x, positions, theta):
    j = np.arange(1, x.shape[-1] // 2 + 1)
    return _turned(x, positions[:, None] * theta ** (-2 * j / x.shape[-1]))


def _all_alike(x, positions, theta):
    return _turned(x, positions[:, None] * np.ones(x.shape[-1] // 2))


def _swapped(x, positions, theta):
    return np.concatenate(np.split(_turned(x, _angles(x, positions, theta)), 2, axis=-1)[::-1], axis=-1)


def _written_as_neighbors(x, positions, theta):
    halves = np.split(_turned(x, _angles(x, positions, theta)), 2, axis=-1)
    return np.stack(halves, axis=-1).reshape(x.shape)


def _mirrored(x, positions, theta):
    angles = _angles(x, positions, theta)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin - b * cos], axis=-1)


def _overwritten(x, positions, theta):
    angles = _angles(x, positions, theta)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = np.split(x, 2, axis=-1)
    a = a * cos - b * sin
    return np.concatenate([a, a * sin + b * cos], axis=-1)


def _another_scale(x, positions, theta):
    return _turned(x, _angles(x, positions, theta)) / x.dtype.type(np.sqrt(x.shape[-1]))


def _turned_backward_pairs(x, positions, theta):
    return _turned(x, _angles(x, positions, theta)[:, ::-1])


def _unchanged(x, positions, theta):
    return x.copy()


def _one_half(x, positions, theta):
    return np.split(_turned(x, _angles(x, positions, theta)), 2, axis=-1)[0]


def _in_place(x, positions, theta):
    x[:] = _turned(x, _angles(x, positions, theta))
    return x


WRONG = {
    "d.rotate": [
        (_neighbors, "you turn neighbors"),
        (_other_way, "turned the other way"),
        (_degrees, "taken for degrees"),
        (_to_degrees, "turned into degrees"),
        (_angles_in_float32, "compute angles in float64"),
        (_float64, "but float64"),
        (lambda *given: _float64(*given).astype(np.float16), "the result holds float16: expected x's own"),
        (_rows_counted, "rows are counted"),
        (_half_the_exponent, "the exponent is −j / head_dim"),
        (_growing, "with a minus"),
        (_from_one, "counted from 1"),
        (_all_alike, "all pairs turn alike"),
        (_swapped, "in the wrong order"),
        (_written_as_neighbors, "written back as neighbors"),
        (_mirrored, "with a plus"),
        (_overwritten, "made from the turned first one"),
        (_another_scale, "keeps the length of each pair"),
        (_turned_backward_pairs, "but is not where it belongs"),
        (_unchanged, "nothing is turned"),
        (_one_half, "only one half comes back"),
        (_in_place, "changed its input"),
    ],
}
