"""The smaller caches in whole models, against plain attention with the mask, or the rows, that they mean."""

from dataclasses import replace

import numpy as np
import pytest
from small_models import make_model

import kvcourse as kv
from kvcourse import ops
from kvcourse.caches.formats import PerChannel, PerToken
from kvcourse.tap import masked_attention

# Logits reach about 5 here, and float32 sums in another order move them by about 1e-5. A window one token
# too long moves every row by 0.2 or more.
TOLERANCE = 2e-4

GPT2 = kv.ModelConfig("small", "gpt2", 2, 3, 3, 8, 24, 48, 40, 48)
LLAMA = kv.ModelConfig("small-llama", "llama", 2, 6, 2, 8, 24, 48, 40, 48, rope_theta=1e3)


MODELS = {config.architecture: make_model(config) for config in (GPT2, LLAMA)}
LONG = make_model(replace(LLAMA, max_seq_len=400))
IDS = np.random.default_rng(5).integers(0, 40, 120).tolist()


def logits_in_chunks(model, ids, cache, longest, seed=0):
    random, parts, start = np.random.default_rng(seed), [], 0
    while start < len(ids):
        n = min(int(random.integers(1, longest + 1)), len(ids) - start)
        parts.append(model(ids[start : start + n], cache))
        start += n
    return np.concatenate(parts)


def window_mask(T, window, sinks):
    i, j = np.arange(T)[:, None], np.arange(T)[None, :]
    return (j <= i) & ((j > i - window) | (j < sinks))


# --- sliding --------------------------------------------------------------------------------------------

WINDOWS = [(1, 0, 0), (8, 0, 0), (8, 4, 0), (8, 4, 3), (5, 2, 7), (16, 1, 15), (1, 3, 2)]


@pytest.mark.parametrize("window, sinks, slack", WINDOWS)
def test_learned_positions_a_window_is_a_mask(window, sinks, slack):
    """GPT-2 adds positions to the tokens, so nothing is turned: sinks are masked in at their own places."""
    model, ids = MODELS["gpt2"], IDS[:48]
    expected = model(ids, kv.Tap(model.config, mask=window_mask(48, window, sinks)))
    for longest in (1, slack + 1):
        cache = kv.SlidingCache.for_model(model, window=window, num_sinks=sinks, slack=slack)
        got = logits_in_chunks(model, ids, cache, longest)
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(kv.CacheFull, match="was trained with 48 positions"):
        model([1], cache)


@pytest.mark.parametrize("window, sinks, slack", [w for w in WINDOWS if w[1] == 0])
def test_rotary_positions_a_window_without_sinks_is_a_mask(window, sinks, slack):
    """Only differences of positions enter: on a model with room for the whole text the mask says the same."""
    expected = LONG(IDS, kv.Tap(LONG.config, mask=window_mask(len(IDS), window, 0)))
    model = MODELS["llama"]  # the same weights, 48 positions: the stream passes them by
    for longest in (1, slack + 1):
        cache = kv.SlidingCache.for_model(model, window=window, num_sinks=0, slack=slack)
        got = logits_in_chunks(model, IDS, cache, longest)
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
    assert cache.seq_len == 120 and cache.num_rows == window


class Streaming:
    """StreamingLLM, section 3.2, written out: un-rotated keys are evicted with np.concatenate, and keys and
    query are turned anew at every step to their places within the cache. One token a pass."""

    unlimited = True

    def __init__(self, config, window, sinks):
        self.config, self.window, self.sinks, self.seq_len = config, window, sinks, 0
        self.rows = {}

    def begin(self, n):
        assert n == 1
        return np.array([self.seq_len])

    def attend(self, layer, q, k, v, rotate):
        old = self.rows.get(layer, (k[:, :0], v[:, :0]))
        k, v = (np.concatenate([rows, new], axis=1) for rows, new in zip(old, (k, v), strict=True))
        if k.shape[1] > self.sinks + self.window:
            k, v = (np.concatenate([a[:, : self.sinks], a[:, self.sinks + 1 :]], axis=1) for a in (k, v))
        self.rows[layer] = k, v
        places = np.arange(k.shape[1])
        everything = np.ones((1, len(places)), bool)
        return masked_attention(rotate(q, places[-1:]), rotate(k, places), v, everything)

    def commit(self):
        self.seq_len += 1


@pytest.mark.parametrize("window, sinks, slack", WINDOWS)
def test_rotary_positions_sinks_are_streaming_llm_s(window, sinks, slack):
    model = MODELS["llama"]
    expected = logits_in_chunks(model, IDS, Streaming(model.config, window, sinks), 1)
    for longest in (1, slack + 1):
        cache = kv.SlidingCache.for_model(model, window=window, num_sinks=sinks, slack=slack)
        got = logits_in_chunks(model, IDS, cache, longest)
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("longest", [1, 4, 8])
@pytest.mark.parametrize("sinks", [0, 4])
def test_visible_keys_are_exactly_the_sinks_and_the_window(sinks, longest):
    """Seen from outside: queries of zeros weigh all keys alike, and the value of token j is a 1 in place j,
    so the output shows which tokens were seen, and 1 / weight is how many."""
    window, N = 8, 40
    config = kv.ModelConfig("tiny", "llama", 1, 1, 1, N, N, 8, 8, N, rope_theta=1e4)
    cache = kv.SlidingCache(config, window=window, num_sinks=sinks, slack=longest - 1)
    random, values, seen = np.random.default_rng(longest), np.eye(N, dtype=np.float32), []
    while len(seen) < N:
        n = min(int(random.integers(1, longest + 1)), N - len(seen))
        rows = slice(len(seen), len(seen) + n)
        cache.begin(n)
        keys = random.standard_normal((1, n, N)).astype(np.float32)
        seen += list(cache.attend(0, np.zeros_like(keys), keys, values[None, rows], ops.Rotary(N, 1e4))[0])
        cache.commit()
    for i in (0, 3, 6, 7, 8, 9, window + sinks - 1, window + sinks, 2 * window, 39):  # W − 1, W, W + 1, 2W …
        visible = np.flatnonzero(seen[i]).tolist()
        assert visible == [j for j in range(i + 1) if j < sinks or j > i - window]
        assert len(visible) == min(i + 1, sinks + window) == round(1 / seen[i].max())


def test_a_batch_of_sliding_streams_is_each_of_them_alone():
    model = MODELS["llama"]

    def make():
        return [
            kv.SlidingCache.for_model(model, window=8, num_sinks=4, slack=3),
            kv.SlidingCache.for_model(model, window=5, num_sinks=0, slack=7),
            kv.SlidingCache.for_model(model, window=16, num_sinks=1, slack=15),
        ]

    together, alone, start = make(), make(), [0, 0, 0]
    random = np.random.default_rng(3)
    for _ in range(25):  # two of the streams pass the model's 48 positions
        lengths = [int(random.integers(1, cache.max_pass + 1)) for cache in together]
        parts = [(IDS * 4)[s : s + n] for s, n in zip(start, lengths, strict=True)]
        view = kv.BatchView(together, lengths)
        got = model(sum(parts, []), view)
        expected = np.concatenate([model(part, c) for part, c in zip(parts, alone, strict=True)])
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
        start = [s + n for s, n in zip(start, lengths, strict=True)]
    assert max(start) > 100


@pytest.mark.parametrize("kind", [kv.SlidingCache, kv.HeavyHitterCache])
def test_generate_passes_a_long_prompt_in_chunks_that_the_cache_takes(kind):
    model = MODELS["llama"]
    options = (
        dict(window=60, slack=5, num_sinks=0)
        if kind is kv.SlidingCache
        else dict(heavy=9, recent=51, chunk=6)
    )
    model = LONG
    cache = kind.for_model(model, **options)  # holds 60 rows: nothing of 30 + 20 is forgotten
    assert kv.generate(model, IDS[:30], 20, cache=cache) == kv.generate(model, IDS[:30], 20)
    assert cache.seq_len == 49


def test_a_tap_looks_at_a_stream_beyond_the_model_s_positions():
    model = MODELS["llama"]
    cache, other = (kv.SlidingCache.for_model(model, window=8, num_sinks=2, slack=3) for _ in "ab")
    tap = kv.Tap(model.config, cache=cache)
    for start in range(0, 100, 4):
        assert np.array_equal(model(IDS[start : start + 4], tap), model(IDS[start : start + 4], other))
    assert cache.seq_len == 100 and tap.queries.shape == (2, 6, 4, 8)


def test_generate_goes_on_beyond_the_model_s_positions():
    cache = kv.SlidingCache.for_model(MODELS["llama"], window=20, num_sinks=2, slack=5)
    new = kv.generate(MODELS["llama"], IDS[:40], 100, cache=cache)
    assert len(new) == 100 and cache.seq_len == 139 and cache.num_rows == 22
    with pytest.raises(ValueError, match="the limit is 48"):
        kv.generate(MODELS["llama"], IDS[:40], 100)


# --- quantized ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [(1,) * 48, (3, 2, 5, 16, 1, 21)])
@pytest.mark.parametrize("architecture", MODELS)
def test_in_float16_a_quantized_cache_is_the_plain_one_rounded(architecture, chunks):
    """Keys and values are rounded by up to 2^-11 = 0.0005 of themselves, and logits of about 5 move by about
    0.01, through two layers."""
    model, start = MODELS[architecture], 0
    plain, rounded = (kind.for_model(model, **options) for kind, options in (
        (kv.ContiguousCache, {}), (kv.QuantizedCache, dict(keys="float16", values="float16"))))  # fmt: skip
    for n in chunks:
        one, other = (model(IDS[start : start + n], cache) for cache in (plain, rounded))
        assert 0 < np.abs(one - other).max() < 0.05
        start += n
    assert rounded.nbytes_used * 2 == plain.nbytes_used


@pytest.mark.parametrize(
    "options",
    [
        dict(keys=PerChannel(4, 4), values=PerToken(4)),
        dict(keys=PerChannel(2, 8), values=PerToken(2), residual=6),
        dict(keys="int4/token", values="fp8", residual=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", MODELS)
def test_fewer_bits_change_the_logits_through_the_rows_alone(architecture, options):
    """Put back into a plain cache, the rows as they are held give the next token the same logits, up to
    the float16 of that token's own row, one of 38: less than in the test above. The rounding of the
    rows themselves moves the logits by 0.1 and more."""
    model = MODELS[architecture]
    cache, plain = kv.QuantizedCache.for_model(model, **options), kv.ContiguousCache.for_model(model)
    logits_in_chunks(model, IDS[:37], cache, 7)
    rows = [cache.keys_values(layer) for layer in range(2)]
    keys, values = (np.stack(parts) for parts in zip(*rows, strict=True))
    plain.load({"layout": plain.layout, "dtype": "float32", "start": 0, "keys": keys, "values": values})
    got, expected = model([7], cache), model([7], plain)
    assert np.abs(got - expected).max() < 2e-3
    assert np.abs(got - model([*IDS[:37], 7])[-1]).max() > 0.05


def test_a_pass_sees_its_own_rows_before_they_are_quantized_or_after():
    """At once as in llama.cpp: one token's own value comes back rounded. In groups: as float16."""
    config = replace(LLAMA, num_heads=2, num_kv_heads=2)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 1, 8)).astype(np.float32) for _ in range(3))

    def first_output(**options):
        cache = kv.QuantizedCache(config, **options)
        cache.begin(1)
        return cache.attend(0, q, k, v)

    rounded = PerToken(2).decode(PerToken(2).encode(v))
    assert np.array_equal(first_output(keys="fp8", values=PerToken(2)), rounded)
    halves = v.astype(np.float16).astype(np.float32)
    assert np.array_equal(first_output(keys=PerChannel(2, 4), values=PerToken(2)), halves)
    assert np.array_equal(first_output(keys="fp8", values=PerToken(2), residual=1), halves)


def test_a_quantized_text_does_not_depend_on_its_chunks_where_rows_are_written_at_once():
    model = make_model(replace(LLAMA, head_dim=32))
    rows = []
    for longest in (1, 9):
        cache = kv.QuantizedCache.for_model(model, keys="q8_0", values="q4_0")
        rows.append(logits_in_chunks(model, IDS[:48], cache, longest)[-1])
    # A number near the middle of two codes may fall to either side: 1/15 of a block's largest, now and then.
    assert np.abs(rows[0] - rows[1]).max() < 0.05 * np.abs(rows[0]).max()


# --- heavy hitters --------------------------------------------------------------------------------------


def test_heavy_hitters_are_the_plain_cache_until_they_evict():
    model, start = MODELS["llama"], 0
    cache = kv.HeavyHitterCache.for_model(model, heavy=20, recent=20, chunk=9)
    plain = kv.ContiguousCache.for_model(model)
    for n in (3, 2, 5, 9, 1, 7, 9, 4):
        one, other = (model(IDS[start : start + n], c) for c in (cache, plain))
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)
        start += n
    assert cache.num_rows == start == 40


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("heavy, recent", [(4, 3), (0, 5), (6, 1)])
def test_heavy_hitters_are_algorithm_1_written_out(heavy, recent, chunk):
    """Per layer and KV head: a set of tokens, a sum of attention for each; evict the smallest sums among
    all but the newest. With more tokens a pass, all of it is seen and eviction waits for its end."""
    config, N, random = replace(LLAMA, max_seq_len=60), 60, np.random.default_rng(1)
    rotate = ops.Rotary(8, 1e3)
    Q, K, V = (2 * random.standard_normal((2, heads, N, 8)).astype(np.float32) for heads in (6, 2, 2))
    cache = kv.HeavyHitterCache(config, heavy=heavy, recent=recent, chunk=chunk)
    kept = {(layer, head): [] for layer in (0, 1) for head in (0, 1)}
    sums = np.zeros((2, 2, N))
    turned_q, turned_k = (np.stack([rotate(x, np.arange(N)) for x in rows]) for rows in (Q, K))
    for start in range(0, N, chunk):
        new = slice(start, start + chunk)
        cache.begin(chunk)
        out = [cache.attend(layer, *(a[layer][:, new] for a in (Q, K, V)), rotate) for layer in (0, 1)]
        cache.commit()
        for (layer, head), tokens in kept.items():
            tokens += range(start, start + chunk)
            for i in range(start, start + chunk):
                seen = [j for j in tokens if j <= i]
                for query in range(3 * head, 3 * head + 3):
                    scores = turned_k[layer, head, seen].astype(np.float64) @ turned_q[layer, query, i]
                    weights_ = np.exp(scores / np.sqrt(8))
                    weights_ /= weights_.sum()
                    sums[layer, head, seen] += weights_
                    expected = weights_ @ V[layer, head, seen]
                    np.testing.assert_allclose(out[layer][query, i - start], expected, rtol=0, atol=1e-5)
            while len(tokens) > heavy + recent:
                tokens.remove(min(tokens[: len(tokens) - recent], key=lambda j: sums[layer, head, j]))
            assert cache.key_positions(layer)[head].tolist() == tokens
        assert cache.num_rows == min(start + chunk, heavy + recent)
