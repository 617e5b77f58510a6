"""Whatever comes when, is cancelled, fails or is interrupted: every request that stays gets its own text."""

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import weights
from kvcourse.models import gpt2

CONFIG = kv.ModelConfig("tiny", "gpt2", 2, 2, 2, 8, 16, 32, 20, 64)
PARAMS = weights.random_params(gpt2.param_shapes(CONFIG), 1)
PARAMS = {name: array * np.float32(20) if array.ndim == 2 else array for name, array in PARAMS.items()}


class Shaky(gpt2.GPT2):
    """A model that an interrupt stops now and then: at the start of a pass, in a layer, or after it."""

    random = None

    def __call__(self, ids, cache=None, rows=None):
        if self.random is None:
            return super().__call__(ids, cache, rows)
        if self.random.random() < 0.1:
            raise KeyboardInterrupt
        logits = super().__call__(ids, cache, rows)
        if self.random.random() < 0.1:
            raise KeyboardInterrupt
        return logits

    def _forward(self, ids, positions, attend, rows):
        def shaky(layer, *arguments):
            out = attend(layer, *arguments)
            if self.random is not None and self.random.random() < 0.1:
                raise KeyboardInterrupt
            return out

        return super()._forward(ids, positions, shaky, rows)


def answer(model, request):
    """What the request must get, without an engine, blocks or interrupts."""

    def clear(logits):
        """Greedy, where no rounding can decide: logits of about 5, so float32 sums differ by about 1e-5."""
        second, first = np.sort(logits)[-2:]
        assert first - second > 1e-4
        return kv.greedy(logits)

    return kv.generate(model, request.ids, request.max_new_tokens, stop=request.stop, sampler=clear)


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed, sharing):
    random, model = np.random.default_rng(seed), Shaky(CONFIG, PARAMS)
    model.random = random
    blocks, size = int(random.integers(4, 14)), int(random.integers(2, 6))
    engine = kv.engine.Engine(model, blocks, size, sharing, max_batch=int(random.integers(1, 5)))
    beginning = random.integers(0, 20, 20).tolist()
    added, cancelled, interrupts = [], set(), 0
    for _ in range(150):
        if random.random() < 0.4 and len(added) < 25:
            prompt = beginning[: random.integers(0, 12)] + random.integers(0, 20, 3).tolist()
            room = blocks * size - len(prompt)
            if room > 0:
                new, stop = int(random.integers(1, min(room, 9) + 1)), int(random.integers(0, 20))
                added.append(engine.add(prompt, new, salt=int(random.integers(0, 2)), stop=stop))
        if added and random.random() < 0.03:
            request = added[random.integers(len(added))]
            if not request.finished:
                cancelled.add(request)
            engine.cancel(request)
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        engine.pool.manager.check_invariants()
        assert all(request.cache.pending == 0 for request in engine.running)
        assert len(engine.running) <= engine.max_batch
    model.random = None
    engine.run()
    assert engine.pool.manager.num_used == 0 and all(request.finished for request in added)
    assert interrupts > 10 and len(added) == 25
    for request in added:
        expected = answer(model, request)
        if request in cancelled:
            expected = expected[: len(request.new_ids)]
        assert request.new_ids == expected
