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


ENTRIES = list(listed())


def margins(model, prompt, max_new_tokens):
    """Smallest gap between the two best logits along a greedy text, largest cached-uncached difference."""
    cache, given, ids = kv.ContiguousCache.for_model(model), prompt, list(prompt)
    smallest_gap, largest_difference = np.inf, 0.0
    for _ in range(max_new_tokens):
        cached, uncached = model(given, cache, rows=[-1])[0], model(ids, rows=[-1])[0]
        second, best = np.partition(uncached, -2)[-2:]
        smallest_gap = min(smallest_gap, float(best - second))
        largest_difference = max(largest_difference, float(np.abs(cached - uncached).max()))
        given = [kv.greedy(uncached)]
        ids += given
    return smallest_gap, largest_difference


def test_there_are_greedy_texts():
    assert ENTRIES  # without one, the test below would be skipped and say nothing


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_near_tie_along_the_text(entry, skip_without):
    skip_without(entry["model"])
    model, tokenizer = kv.load_model(entry["model"]), kv.load_tokenizer(entry["model"])
    prompt = tokenizer.encode(entry["prompt"], allowed_special="all")
    gap, difference = margins(model, prompt, entry["max_new_tokens"])
    assert difference > 0, "the two passes agree to the last bit: is the cache used?"
    assert gap >= FACTOR * difference, f"gap {gap:.5f}, difference {difference:.6f}: choose another text"


def test_a_near_tie_is_seen():
    """Where the two best tokens share one row of the output matrix, their logits tie."""
    model, tokenizer = kv.load_model("austen-gpt2-draft"), kv.load_tokenizer("austen-gpt2-draft")
    prompt = tokenizer.encode("It is a truth universally")
    second, best = np.argsort(model(prompt, rows=[-1])[0])[-2:]
    assert margins(model, prompt, 4)[0] > 0
    embedding = model.params["wte.weight"].copy()
    embedding[second] = embedding[best]
    tied = type(model)(model.config, model.params | {"wte.weight": embedding})
    gap, difference = margins(tied, prompt, 4)  # the first pass is the same with and without a cache
    assert gap < FACTOR * difference
