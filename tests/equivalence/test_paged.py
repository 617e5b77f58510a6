"""Blocks in any order, found or computed, alone or in a batch: the contiguous cache's answers.

Every pool starts as NaN and its free list is shuffled, so a row that is read before it was written, or from
a neighbor of the right block, shows.
"""

import random

import numpy as np
import pytest
from small_models import make_model

import kvcourse as kv

# As in test_cached_equals_uncached: logits of order 10, and float32 sums in another order (tiles, other
# shapes of matrix products) move them by about 2e-5. One wrong row moves them by 0.1 or more.
TOLERANCE = 2e-4
GPT2 = kv.ModelConfig("small", "gpt2", 2, 3, 3, 8, 24, 48, 40, 400)
LLAMA = kv.ModelConfig("small-llama", "llama", 2, 6, 2, 8, 24, 48, 40, 400, rope_theta=1e3)


MODELS = {config.architecture: make_model(config) for config in (GPT2, LLAMA)}
IDS = np.random.default_rng(5).integers(0, 40, 400).tolist()


def spoiled(pool, seed=0):
    """The pool with NaN in every slot and its free blocks in random order."""
    pool.keys[:] = pool.values[:] = np.nan
    queue = pool.manager._queue
    blocks = [queue.popleft() for _ in range(len(queue))]
    random.Random(seed).shuffle(blocks)
    for block in blocks:
        queue.append(block)
    return pool


# --- one sequence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 16, 64, 512])
@pytest.mark.parametrize("name", MODELS)
def test_any_chunks_give_the_contiguous_cache_s_logits(name, size):
    """Odd chunks, one long pass and single tokens; tiles of several blocks, a part of one, and one block."""
    model = MODELS[name]
    contiguous = kv.ContiguousCache.for_model(model)
    pool = spoiled(kv.PagedPool.for_model(model, -(-400 // size), block_size=size))
    cache, start = pool.sequence(), 0
    for n in (3, 2, 5, 1, 1, 260, 1, 17, 1, 1, 107, 1):
        chunk = IDS[start : start + n]
        expected = model(chunk, contiguous)
        np.testing.assert_allclose(model(chunk, cache), expected, rtol=0, atol=TOLERANCE)
        start += n
    assert start == 400 == cache.seq_len
    for layer in range(2):
        for held, expected in zip(cache.keys_values(layer), contiguous.keys_values(layer), strict=True):
            np.testing.assert_allclose(held, expected, rtol=0, atol=TOLERANCE)
    pool.manager.check_invariants()


@pytest.mark.parametrize("name", MODELS)
def test_a_found_prefix_a_fork_and_a_way_back(name):
    model, pool = MODELS[name], spoiled(kv.PagedPool.for_model(MODELS[name], 60, block_size=8))
    first = pool.sequence(IDS[:100])
    model(IDS[:100], first)
    other = IDS[:50] + IDS[200:250]
    second = pool.sequence(other)
    assert second.seq_len == 48
    expected = model(other)
    np.testing.assert_allclose(model(other[48:], second), expected[48:], rtol=0, atol=TOLERANCE)
    fork = first.fork()
    for cache, token in ((fork, 1), (first, 2)):
        logits = model([token], cache)[0]
        np.testing.assert_allclose(logits, model(IDS[:100] + [token])[-1], rtol=0, atol=TOLERANCE)
    fork.truncate(42)
    for ids in (IDS[:42] + IDS[300:310], IDS[:100] + [2, 7]):
        cache = fork if len(ids) == 52 else first
        logits = model(ids[cache.seq_len :], cache)[-1]
        np.testing.assert_allclose(logits, model(ids)[-1], rtol=0, atol=TOLERANCE)
    pool.manager.check_invariants()


def test_a_row_of_another_sequence_would_be_seen():
    """Otherwise the tests above would prove little: one wrong block in the table moves the logits."""
    model, pool = MODELS["llama"], kv.PagedPool.for_model(MODELS["llama"], 60, block_size=8)
    cache, other = pool.sequence(), pool.sequence()
    model(IDS[:50], cache)
    model(IDS[100:150], other)
    cache._seq.block_table[3] = other.block_table[3]
    difference = np.abs(model([1], cache) - model(IDS[:50] + [1])[-1]).max()
    assert difference > 100 * TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_generate_takes_the_rest_of_a_prompt_that_was_found(name):
    """Cold, then warm: the same text. Warm with the whole prompt, the found tokens would count twice."""
    model, prompt = MODELS[name], IDS[:20]
    pool, expected = kv.PagedPool.for_model(model, 20, block_size=8), kv.generate(model, prompt, 6)
    for found in (0, 16):
        cache = pool.sequence(prompt)
        assert cache.seq_len == found
        text = kv.generate(model, prompt[cache.seq_len :], 6, cache=cache)
        assert_same_texts(model, [(prompt, 6)], [text], [expected])
        assert cache.seq_len == 20 + 5
        cache.free()


# --- twenty requests ------------------------------------------------------------------------------------


def twenty_requests(ids, beginning):
    """Prompts of which many begin alike (0, 1 or 2 thirds of `beginning`), and answers of 3 to 9 tokens."""
    ends = [ids[len(ids) // 2 + 11 * i :][: 4 + 3 * (i % 5)] for i in range(20)]
    third = len(beginning) // 3
    return [(beginning[: third * (i % 3)] + end, 3 + i % 7) for i, end in enumerate(ends)]


def one_by_one(model, requests):
    return [kv.generate(model, ids, n) for ids, n in requests]


def assert_same_texts(model, requests, found, expected):
    """Identical, or different first where the reference's two tokens are closer than the tolerance."""
    for (ids, _), got, want in zip(requests, found, expected, strict=True):
        if got == want:
            continue
        place = next(i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
        logits = model(ids + want[:place])[-1]
        gap = logits[want[place]] - logits[got[place]]
        assert 0 <= gap < 2 * TOLERANCE, f"token {place} differs, and not by rounding: the gap is {gap}"
        print(f"a tie: token {place} differs, the two logits by {gap:.1e}")


def serve(model, requests, num_blocks, size, sharing, max_batch=8):
    """The engine's texts; its books are checked after every step. Returns also (hits, most at once)."""
    engine = kv.engine.Engine(model, num_blocks, size, sharing, max_batch)
    spoiled(engine.pool, seed=num_blocks)
    added = [engine.add(ids, n) for ids, n in requests]
    most = 0
    while engine.waiting or engine.running:
        engine.step()
        engine.pool.manager.check_invariants()
        most = max(most, len(engine.running))
    assert engine.pool.manager.num_used == 0 and all(request.finished for request in added)
    texts = [request.new_ids for request in added]
    return texts, sum(request.num_cached_tokens for request in added), most


@pytest.fixture(scope="module")
def austen():
    model, tokenizer = kv.load_model("austen-gpt2"), kv.load_tokenizer("austen-gpt2")
    text = (kv.paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text[:3000])
    requests = twenty_requests(ids, ids[:96])
    return model, requests, one_by_one(model, requests)


# Tokens of the largest request: 64 + 16 + 8, in blocks of 16 that is 6: the smallest pool holds just one.
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("num_blocks, size", [(6, 16), (14, 16), (70, 16), (100, 1), (60, 4), (5, 64)])
def test_twenty_requests_get_the_same_texts(austen, num_blocks, size, sharing):
    model, requests, expected = austen
    found, hits, most = serve(model, requests, num_blocks, size, sharing)
    assert_same_texts(model, requests, found, expected)
    assert (hits > 0) == sharing  # 32 or 64 tokens are shared, whole blocks at every size here
    if num_blocks * size > 1000:
        assert most >= 5  # one joins a step, and answers have 3 to 9 tokens


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("tokens", [128, 320, 1280])
def test_twenty_requests_with_grouped_heads(tokens, size, sharing):
    model = MODELS["llama"]
    requests = twenty_requests(IDS, IDS[:96])
    expected = one_by_one(model, requests)
    found, _, _ = serve(model, requests, tokens // size, size, sharing, max_batch=5)
    assert_same_texts(model, requests, found, expected)


def test_a_long_prompt_goes_in_chunks_beside_the_others():
    """390 tokens are two passes; the request that runs already gets a token in each of them."""
    model = MODELS["gpt2"]
    engine = kv.engine.Engine(model, 60)
    short = engine.add(IDS[:5], 6)
    engine.step()
    long = engine.add(IDS[:390], 4)
    engine.step()
    assert long.in_prefill and long.new_ids == [] and len(short.new_ids) == 2
    engine.step()
    assert not long.in_prefill and len(long.new_ids) == 1 and len(short.new_ids) == 3
    engine.run()
    assert_same_texts(
        model, [(IDS[:5], 6), (IDS[:390], 4)], [short.new_ids, long.new_ids],
        one_by_one(model, [(IDS[:5], 6), (IDS[:390], 4)]),
    )  # fmt: skip
