"""Typical wrong answers of chapter 03."""

import numpy as np


def _compared(compare):
    """A mask from the positions of keys (a row) and queries (a column)."""
    return lambda start, T: compare(np.arange(start + T)[None, :], start + np.arange(T)[:, None], start)


WRONG = {
    "03.causal_mask": [
        (lambda start, T: np.tri(T, start + T, dtype=bool), "corner top left"),
        (_compared(lambda key, query, start: key < query), "no row sees its own key"),
        (_compared(lambda key, query, start: key <= query + 1), "one key too many"),
        (lambda start, T: np.tri(start + T, dtype=bool)[start:].T, "transposed: the shape is (5, 3)"),
        (_compared(lambda key, query, start: key >= query), "transposed: row r sees key start + r and later"),
        (lambda start, T: np.ones((T, start + T), dtype=bool), "all ones"),
        (_compared(lambda key, query, start: key > query), "the wrong way round"),
        (lambda start, T: np.tri(start + T, dtype=bool), "that is the whole triangle"),
        (lambda start, T: np.tri(T, dtype=bool), "columns of the 2 keys that are there before"),
        (lambda start, T: np.ones((start, T), dtype=bool), "3 queries in rows and 5 keys in columns"),
        (lambda start, T: np.tri(start + T)[start:], "the cells are right, but the dtype is float64"),
        (lambda start, T: np.zeros((T, start + T)), "the dtype is float64, not bool"),
        (lambda start, T: [[True] * (start + T)] * T, "a mask is a NumPy array"),
        (
            _compared(lambda key, query, start: key <= start + 0 * query),
            "row 1, which belongs to position 3, must see key 3",
        ),
        (lambda start, T: np.tri(start + T, dtype=bool)[start:], "you make the whole triangle"),
    ],
    "03.masked_cells": [
        (lambda chunks: sum(T * (T + 1) // 2 for T in chunks), "a row sees its own key"),
        (lambda chunks: sum(chunks) * (sum(chunks) - 1) // 2, "keys of earlier chunks are never masked"),
        (lambda chunks: sum(T * (T - 1) for T in chunks), "twice too many"),
        (lambda chunks: sum(chunks) * (sum(chunks) + 1) // 2, "cells that are seen"),
        (lambda chunks: sum(T - 1 for T in chunks), "expected 7 masked cells, got 5"),
        (lambda chunks: [T * (T - 1) // 2 for T in chunks], "a count is a number"),
    ],
}
