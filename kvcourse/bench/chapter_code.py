"""The plain code of a chapter, taken from its notebook, so that a bench times what the reader reads."""

import json
import math

import numpy as np

from kvcourse import paths


def plain_gpt2():
    """Chapter 01's written-out forward pass: plain_gpt2(ids, params, config) → logits (T, vocab_size).

    None while the chapter does not exist. Raises ValueError when its cells tagged
    `plain-gpt2` do not define the function.
    """
    path = paths.chapters_dir() / "01_the_waste.ipynb"
    if not path.is_file():
        return None
    return tagged_code(path, "plain-gpt2").get("plain_gpt2") or _missing(path)


def tagged_code(path, tag):
    """Run the code cells of one tag, in order, with `np` and `math` at hand; return what they define."""
    with open(path, encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    names = {"np": np, "math": math}
    for cell in cells:
        if cell["cell_type"] == "code" and tag in cell["metadata"].get("tags", []):
            exec(compile("".join(cell["source"]), f"{path.name}:{tag}", "exec"), names)
    return names


def _missing(path):
    raise ValueError(f"{path.name} defines no plain_gpt2 in a cell tagged plain-gpt2: tag the cell that does")
