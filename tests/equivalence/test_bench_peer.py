"""The peer of `kvcourse bench numpy` computes what the package computes, call after call."""

import numpy as np
import pytest

from kvcourse import loading
from kvcourse.bench import numpy_gpt2
from kvcourse.bench.transformers_gpt2 import TransformersGPT2, peer_of

TOLERANCE = 1e-4  # float32 from the same weights, sums in another order, logits of size about 1


@pytest.fixture(scope="module", params=["gpt2", "smollm2-135m"])
def pair(request):
    model = loading.random_model(request.param, **numpy_gpt2.QUICK_SHAPE)
    return model, peer_of(model, threads=None)


@pytest.mark.parametrize("attention", TransformersGPT2.ATTENTION)
@pytest.mark.parametrize("storage", ["dynamic", "static"])
def test_every_cached_step_finds_the_same_tokens(pair, storage, attention):
    model, peer = pair
    ids = list(range(50))
    call = peer.cached_step(ids, storage, attention)
    expected = model(ids, rows=[-1])
    for _ in range(3):  # a cache that was not cropped would answer differently the second time
        np.testing.assert_allclose(call(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("attention", TransformersGPT2.ATTENTION)
def test_the_uncached_pass_gives_all_rows(pair, attention):
    model, peer = pair
    ids = list(range(40))
    np.testing.assert_allclose(peer.uncached(ids, attention)(), model(ids), rtol=0, atol=TOLERANCE)
