"""Every greedy text that a notebook compares is safe from rounding.

On another processor sums are added in another order. Where the two best logits nearly tie,
that could flip a token and the strict run would fail for no fault of the reader's. So along
every listed text the smallest gap between the two best logits must be at least 100 times the
largest difference between the cached and the uncached pass on this machine.
"""

import json

import numpy as np
import pytest

import kvcourse as kv

FACTOR = 100


def listed():
    for path in sorted(kv.paths.chapters_dir().rglob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for entry in notebook["metadata"].get("kvcourse", {}).get("greedy", []):
            yield pytest.param(entry, id=f"{path.stem}: {entry['prompt'][:30]}")


@pytest.mark.parametrize("entry", list(listed()))
def test_no_near_tie_along_the_text(entry):
    model, tokenizer = kv.load_model(entry["model"]), kv.load_tokenizer(entry["model"])
    prompt = tokenizer.encode(entry["prompt"], allowed_special="all")
    cache, given, ids = kv.ContiguousCache.for_model(model), prompt, list(prompt)
    smallest_gap, largest_difference = np.inf, 0.0
    for _ in range(entry["max_new_tokens"]):
        cached, uncached = model(given, cache, rows=[-1])[0], model(ids, rows=[-1])[0]
        second, best = np.partition(uncached, -2)[-2:]
        smallest_gap = min(smallest_gap, float(best - second))
        largest_difference = max(largest_difference, float(np.abs(cached - uncached).max()))
        given = [kv.greedy(uncached)]
        ids += given
    assert smallest_gap >= FACTOR * largest_difference, (
        f"gap {smallest_gap:.5f}, difference {largest_difference:.6f}: choose another text"
    )
