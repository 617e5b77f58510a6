"""Typical wrong answers of chapter 05, each with words its message must hold."""

import numpy as np


def _equal_bits(cached_logits, uncached_logits):
    return np.array_equal(cached_logits, uncached_logits)


def _allclose_as_it_is(cached_logits, uncached_logits):
    return np.allclose(cached_logits, uncached_logits)


def _same_tokens(cached_logits, uncached_logits):
    return bool((cached_logits.argmax(axis=-1) == uncached_logits.argmax(axis=-1)).all())


def _wide(cached_logits, uncached_logits):
    return bool(np.abs(cached_logits - uncached_logits).max() < 1)


def _mean(cached_logits, uncached_logits):
    return bool(np.abs(cached_logits - uncached_logits).mean() < 1e-3)


def _nothing_is_larger(cached_logits, uncached_logits):
    return not (np.abs(cached_logits - uncached_logits) > 3e-4).any()


def _a_hundredth(cached_logits, uncached_logits):
    return bool(np.abs(cached_logits - uncached_logits).max() < 1e-2)


def _without_abs(cached_logits, uncached_logits):
    return bool((cached_logits - uncached_logits).max() < 3e-4)


def _best_logits(cached_logits, uncached_logits):
    return bool(np.abs(cached_logits.max(axis=-1) - uncached_logits.max(axis=-1)).max() < 3e-4)


WRONG = {
    "05.same_answers": [
        (_equal_bits, "is too strict"),
        (_allclose_as_it_is, "shrinks with the logit"),
        (_same_tokens, "not the tokens"),
        (_wide, "a tolerance far below that"),
        (_mean, "a mean over everything"),
        (_nothing_is_larger, "Every comparison with NaN is False"),
        (_a_hundredth, "16-bit rounding moves its logits"),
        (_without_abs, "take the absolute value first"),
        (_best_logits, "shows one logit among thousands"),
        (lambda cached, uncached: np.abs(cached - uncached) < 1e-3, "expected True or False"),
    ],
}
