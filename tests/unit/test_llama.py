"""Llama in NumPy: its operations by hand, the whole pass against loops, float32, names, one-line errors."""

import math
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse import config as configs
from kvcourse import ops, weights
from kvcourse.models import llama

# float32 carries 24 bits: 1.2e-7 relative for one rounding, a few of them in a row in one operation.
CLOSE = dict(rtol=2e-6, atol=2e-6)
# A whole pass of the tiny models here, logits of about 5: two orders of adding up differ by 1e-6 to 1e-5.
PASS = dict(rtol=0, atol=1e-4)

TINY = configs.ModelConfig(
    name="tiny-llama", architecture="llama", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
    hidden_size=20, intermediate_size=28, vocab_size=50, max_seq_len=300, rope_theta=1e4,
)  # fmt: skip
SHAPES = {
    "one KV head a query head": dict(num_heads=3, num_kv_heads=3),
    "grouped": dict(),
    "one KV head": dict(num_kv_heads=1),
    "untied": dict(tied_embeddings=False),
    "nine on three": dict(num_heads=9, num_kv_heads=3, head_dim=4, num_layers=1),
}
IDS = np.random.default_rng(1).integers(50, size=23)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def random_params(config, seed=0):
    """Weights large enough that attention is uneven and every part counts; norms off 1."""
    random = np.random.default_rng(seed)
    return {
        name: random.uniform(0.5, 1.5, shape).astype(np.float32)
        if len(shape) == 1
        else random.standard_normal(shape, dtype=np.float32) * np.float32(0.4)
        for name, shape in llama.param_shapes(config).items()
    }


def small(seed=0, **changes):
    config = replace(TINY, **changes)
    return llama.Llama(config, random_params(config, seed))


# --- the operations ------------------------------------------------------------------------------


def test_rms_norm_by_hand():
    """(3, 4): squares 9 and 16, their mean 12.5."""
    got = ops.rms_norm(np.array([[3, 4]], np.float32), np.array([1, 10], np.float32), eps=0.0)
    np.testing.assert_allclose(got, [[3 / math.sqrt(12.5), 40 / math.sqrt(12.5)]], **CLOSE)


def test_rms_norm_is_the_formula_on_any_leading_axes():
    x, weight = normal(2, 5, 64) * 3 + 1, normal(64, seed=1)
    before, wide = x.copy(), x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * weight
    got = ops.rms_norm(x, weight, eps=1e-3)
    np.testing.assert_allclose(got, expected, **CLOSE)
    assert got.dtype == np.float32 and np.array_equal(x, before)


def test_rms_norm_neither_centers_nor_divides_by_zero():
    ones = np.ones(8, np.float32)
    np.testing.assert_allclose(ops.rms_norm(np.full((1, 8), 5, np.float32), ones), 1, rtol=1e-5)
    assert np.array_equal(ops.rms_norm(np.zeros((1, 8), np.float32), ones), np.zeros((1, 8)))


def test_swiglu_by_hand():
    """silu(0) = 0, silu(1) = 1 / (1 + 1/e) = 0.7311; gates first, then what they multiply."""
    got = ops.swiglu_inplace(np.array([[0, 1, 7, 2]], np.float32))
    np.testing.assert_allclose(got, [[0, 2 / (1 + math.exp(-1))]], **CLOSE)


def test_swiglu_is_the_formula_in_place_and_silent_where_exp_overflows():
    gate_up = np.concatenate([np.linspace(-200, 200, 801, dtype=np.float32), normal(801)])[None]
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = ops.swiglu_inplace(gate_up)
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, **CLOSE)
    assert got.dtype == np.float32 and np.shares_memory(got, gate_up) and got.shape == (1, 801)


def turned(x, positions, theta):
    """Pair j, (x[j], x[j + d/2]), as one complex number times e^(i · position · theta^(−2j/d))."""
    half = x.shape[-1] // 2
    pairs = x[..., :half].astype(np.float64) + 1j * x[..., half:]
    angles = np.asarray(positions)[:, None] * theta ** (-2 * np.arange(half) / x.shape[-1])
    pairs = pairs * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("head_dim, theta", [(2, 1e4), (8, 1e4), (64, 1e5), (10, 5e5)])
def test_rotary_is_a_complex_product(head_dim, theta):
    """The same object goes forward, far ahead (its tables grow) and back; 100,000 needs float64 angles."""
    rotate = ops.Rotary(head_dim, theta)
    edge = rotate.TABLE  # the first position that is in no table
    for positions in (
        [0], [5, 3, 9], range(250, 270), [edge], [1_000, 100_000], [-3, 2], [edge - 1], [edge - 1, edge],
        [edge, edge + 1], [0, 255, 256, 99_999],
    ):  # fmt: skip
        positions = np.array(positions)
        x = normal(3, len(positions), head_dim)
        before, got = x.copy(), rotate(x, positions)
        assert got.dtype == np.float32 and got.shape == x.shape and np.array_equal(x, before)
        np.testing.assert_allclose(got, turned(x, positions, theta), **CLOSE)
        wide = rotate(x.astype(np.float64), positions)
        assert wide.dtype == np.float64
        np.testing.assert_allclose(wide, turned(x, positions, theta), rtol=0, atol=1e-10)


@given(st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 4000))
def test_rotated_scores_depend_on_the_distance_alone(i, j, shift):
    """In float64, where the only rounding is that of an angle of at most 8,000: 1e-12."""
    rotate = ops.Rotary(8, 1e4)
    q, k = normal(1, 1, 8).astype(np.float64), normal(1, 1, 8, seed=1).astype(np.float64)

    def score(at, to):
        return float((rotate(q, np.array([at])) * rotate(k, np.array([to]))).sum())

    assert score(i, j) == pytest.approx(score(i + shift, j + shift), abs=1e-9)


def test_rotation_leaves_position_0_and_every_length():
    x = normal(2, 6, 8)
    got = ops.Rotary(8, 1e4)(x, np.arange(6))
    assert np.array_equal(got[:, 0], x[:, 0]) and not np.allclose(got[:, 1], x[:, 1])
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), **CLOSE)


def test_attention_with_wider_values_and_a_scale_of_its_own():
    q, k, v = normal(4, 3, 6), normal(2, 8, 6, seed=1), normal(2, 8, 5, seed=2)
    got = ops.attention(q, k, v, start=5, scale=0.3)
    assert got.shape == (4, 3, 5) and got.dtype == np.float32
    for head in range(4):
        for t in range(3):
            seen = 5 + t + 1
            scores = 0.3 * (k[head // 2, :seen].astype(np.float64) @ q[head, t])
            w = np.exp(scores - scores.max())
            np.testing.assert_allclose(got[head, t], w @ v[head // 2, :seen] / w.sum(), **CLOSE)


# --- the whole pass ------------------------------------------------------------------------------


def written_out(config, params, ids):
    """Llama with a loop over positions and heads, in float64, from the formulas: logits (T, vocab)."""
    p = {name.removeprefix("model."): w.astype(np.float64) for name, w in params.items()}
    norm = lambda x, w: x / math.sqrt((x @ x) / len(x) + config.norm_eps) * w  # noqa: E731
    states = [p["embed_tokens.weight"][i] for i in ids]
    group, T = config.num_heads // config.num_kv_heads, len(ids)
    for layer in range(config.num_layers):
        w = {n.split(".")[-2]: a for n, a in p.items() if n.startswith(f"layers.{layer}.")}
        inputs = [norm(x, w["input_layernorm"]) for x in states]
        q, k, v = (
            np.array([(w[f"{x}_proj"] @ h).reshape(-1, config.head_dim) for h in inputs]) for x in "qkv"
        )  # each (T, heads or KV heads, head_dim)
        q, k = (turned(x.swapaxes(0, 1), range(T), config.rope_theta).swapaxes(0, 1) for x in (q, k))
        for t in range(T):
            heads = []
            for head in range(config.num_heads):
                scores = k[: t + 1, head // group] @ q[t, head] / math.sqrt(config.head_dim)
                share = np.exp(scores - scores.max())
                heads.append(share / share.sum() @ v[: t + 1, head // group])
            states[t] = states[t] + w["o_proj"] @ np.concatenate(heads)
            h = norm(states[t], w["post_attention_layernorm"])
            gate = w["gate_proj"] @ h
            states[t] = states[t] + w["down_proj"] @ (gate / (1 + np.exp(-gate)) * (w["up_proj"] @ h))
    head = p.get("lm_head.weight", p["embed_tokens.weight"])
    return np.array([head @ norm(x, p["norm.weight"]) for x in states])


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_loops(shape):
    config = replace(TINY, **SHAPES[shape])
    params = random_params(config)
    got = llama.Llama(config, params)(IDS)
    assert got.shape == (23, 50) and got.dtype == np.float32 and np.abs(got).max() > 1
    np.testing.assert_allclose(got, written_out(config, params, IDS), **PASS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [kv.ContiguousCache, kv.GrowingCache, kv.ConcatenatingCache, kv.PagedCache])
def test_cached_is_uncached_in_odd_chunks(shape, kind):
    """Beyond position 256 too, where the rotation's tables grow in the middle of the sequence."""
    model = small(**SHAPES[shape])
    ids = np.random.default_rng(2).integers(50, size=290)
    expected, cache, low = model(ids), kind.for_model(model), 0
    for n in (3, 2, 5, 100, 1, 130, 1, 47, 1):
        got = model(ids[low : low + n], cache)
        np.testing.assert_allclose(got, expected[low : low + n], **PASS)
        low += n
    assert low == len(ids) == cache.seq_len


def test_a_rewound_cache_goes_on_from_there():
    model, cache = small(), kv.ContiguousCache.for_model(small())
    model(IDS, cache)
    cache.truncate(7)
    np.testing.assert_allclose(model(IDS[7:9], cache), model(IDS)[7:9], **PASS)


def test_two_sequences_in_one_pass():
    model = small()
    caches = [kv.ContiguousCache.for_model(model) for _ in range(2)]
    model(IDS[:4], caches[0])
    model(IDS[:9], caches[1])
    got = model([*IDS[4:6], IDS[9]], kv.BatchView(caches, [2, 1]))
    np.testing.assert_allclose(got, model(IDS)[[4, 5, 9]], **PASS)


def test_rows_are_rows_of_all_logits():
    model = small()
    for rows in ([-1], [0, 3], [22], []):
        np.testing.assert_allclose(model(IDS, rows=rows), model(IDS)[rows], **PASS)


def test_a_tap_shows_keys_before_they_are_rotated():
    model, tap = small(), kv.Tap(TINY)
    logits = model(IDS, tap)
    np.testing.assert_allclose(logits, model(IDS), **PASS)
    cache = kv.ContiguousCache.for_model(model)
    model(IDS, cache)
    for layer in range(2):
        rotated = model.rotate(tap.keys[layer], np.arange(23))
        np.testing.assert_allclose(rotated, cache.keys_values(layer)[0], **PASS)
        np.testing.assert_allclose(tap.values[layer], cache.keys_values(layer)[1], **PASS)
    assert not np.allclose(tap.keys[0], cache.keys_values(0)[0], atol=0.1)


def test_float32_through_the_whole_pass(monkeypatch):
    """One float64 scalar anywhere would turn all that follows into float64."""
    seen = []
    for name in ("rms_norm", "swiglu_inplace", "attention"):
        plain = getattr(ops, name)

        def watched(*args, plain=plain, **kwargs):
            result = plain(*args, **kwargs)
            seen.extend(a.dtype for a in (*args, result) if isinstance(a, np.ndarray))
            return result

        monkeypatch.setattr(ops, name, watched)
    model, cache = small(), kv.ContiguousCache.for_model(small())
    turned = model.rotate(normal(4, 1, 6), np.array([3]))
    assert {a.dtype for a in (model(IDS), model(IDS, cache), model([1], cache), turned)} == {
        np.dtype(np.float32)
    }
    assert len(seen) > 20 and set(seen) == {np.dtype(np.float32)}


# --- parameters ----------------------------------------------------------------------------------


def test_param_shapes_by_hand():
    """4 query heads and 2 KV heads of 6, width 20, inner 28."""
    shapes = llama.param_shapes(replace(TINY, num_layers=1, tied_embeddings=False))
    prefix = "model.layers.0."
    assert shapes == {
        "model.embed_tokens.weight": (50, 20),
        f"{prefix}input_layernorm.weight": (20,),
        f"{prefix}self_attn.q_proj.weight": (24, 20),
        f"{prefix}self_attn.k_proj.weight": (12, 20),
        f"{prefix}self_attn.v_proj.weight": (12, 20),
        f"{prefix}self_attn.o_proj.weight": (20, 24),
        f"{prefix}post_attention_layernorm.weight": (20,),
        f"{prefix}mlp.gate_proj.weight": (28, 20),
        f"{prefix}mlp.up_proj.weight": (28, 20),
        f"{prefix}mlp.down_proj.weight": (20, 28),
        "model.norm.weight": (20,),
        "lm_head.weight": (50, 20),
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_as_many_numbers_as_the_config_counts(shape):
    config = replace(TINY, **SHAPES[shape])
    assert sum(math.prod(s) for s in llama.param_shapes(config).values()) == config.num_parameters


@pytest.mark.parametrize("shape", SHAPES)
def test_params_are_the_given_ones_bit_for_bit(shape):
    config = replace(TINY, **SHAPES[shape])
    given_, model = random_params(config), llama.Llama(config, random_params(config))
    assert model.params.keys() == given_.keys()
    assert all(np.array_equal(model.params[name], given_[name]) for name in given_)
    assert {a.dtype for a in model.params.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    "name, change, error, words",
    [
        ("model.norm.weight", None, ValueError, "tiny-llama: the weights lack model.norm.weight"),
        ("lm_head.weight", None, ValueError, "tiny-llama: the weights lack lm_head.weight"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            lambda a: a[:6],
            ValueError,
            r"k_proj.weight has shape \(6, 20\), the config says \(12, 20\)",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            lambda a: a.astype(np.float64),
            TypeError,
            "up_proj.weight is float64: convert it to float32",
        ),
    ],
)
def test_weights_that_do_not_fit(name, change, error, words):
    config = replace(TINY, tied_embeddings=False)
    params = random_params(config)
    array = params.pop(name)
    if change:
        params[name] = change(array)
    with pytest.raises(error, match=words) as caught:
        llama.Llama(config, params)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        dict(architecture="qwen2", qkv_bias=True),
        dict(architecture="qwen3", qk_norm=True),
        dict(architecture="gemma3", norms_per_layer=4),
        dict(architecture="mistral", sliding_window=16),
        dict(architecture="gpt2"),
        dict(head_dim=5),
        dict(rope_theta=None),
    ],
)
def test_shapes_that_this_llama_does_not_compute(changes):
    config = replace(TINY, **changes)
    with pytest.raises(ValueError, match="tiny-llama") as caught:
        llama.Llama(config, weights.random_params(llama.param_shapes(config)))
    assert "\n" not in str(caught.value)


# --- errors of a call ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids, error, words",
    [
        ([], ValueError, "no token ids"),
        ([5, 50], ValueError, "token id 50 is outside the vocabulary of tiny-llama, 0 … 49"),
        ([1.5], TypeError, "ids are float64"),
        ("It was", TypeError, "ids is the text 'It was': give the token ids"),
    ],
)
def test_wrong_ids_change_nothing(ids, error, words):
    model, cache = small(), kv.ContiguousCache.for_model(small())
    model(IDS, cache)
    for where in (cache, None):
        with pytest.raises(error, match=words) as caught:
            model(ids, where)
        assert "\n" not in str(caught.value)
    assert (cache.seq_len, cache.pending) == (23, 0)
    np.testing.assert_allclose(model([7], cache)[-1], model([*IDS, 7])[-1], **PASS)


def test_more_tokens_than_positions():
    model = small()
    with pytest.raises(ValueError, match="301 tokens are more than the 300 positions of tiny-llama: shorten"):
        model([1] * 301)
    cache = kv.ContiguousCache.for_model(small(max_seq_len=400))
    model([1] * 299, cache)
    with pytest.raises(kv.CacheFull, match="position 300 is outside the 300 positions of tiny-llama: "):
        model([1] * 2, cache)
    assert (cache.seq_len, cache.pending) == (299, 0)


def test_a_cache_of_another_models_shape():
    model, cache = small(), kv.ContiguousCache.for_model(small(num_kv_heads=1))
    with pytest.raises(ValueError, match=r"\(2, 1, 6\).* does not fit tiny-llama, \(2, 2, 6\): .*for_model"):
        model(IDS, cache)
    assert (cache.seq_len, cache.pending) == (0, 0)


@pytest.mark.parametrize("moment", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_pass_leaves_the_cache_as_it_was(moment, monkeypatch):
    model, cache = small(), kv.ContiguousCache.for_model(small())
    model(IDS, cache)
    calls = []

    def interrupted(x):
        calls.append(1)
        if len(calls) == 2:  # in layer 1, after layer 0 has written its rows
            raise moment
        return x[..., : x.shape[-1] // 2]

    with monkeypatch.context() as patch:
        patch.setattr(llama.ops, "swiglu_inplace", interrupted)
        with pytest.raises(moment):
            model([1, 2, 3], cache)
    assert (cache.seq_len, cache.pending) == (23, 0)
    np.testing.assert_allclose(model([9], cache)[-1], model([*IDS, 9])[-1], **PASS)


# --- with generate and random_model --------------------------------------------------------------


def test_a_long_prompt_passes_in_chunks(monkeypatch):
    """So that the memory of a pass does not grow with the prompt; the text is the same as without a cache."""
    model, passes = small(), []
    forward = llama.Llama._forward

    def counted(self, ids, *args):
        passes.append(len(ids))
        return forward(self, ids, *args)

    ids = np.random.default_rng(3).integers(50, size=250)
    expected = kv.generate(model, ids, 4, use_cache=False)
    monkeypatch.setattr(llama.Llama, "_forward", counted)
    monkeypatch.setattr(sys.modules["kvcourse.generate"], "PREFILL_CHUNK", 100)
    assert kv.generate(model, ids, 4) == expected
    assert passes == [100, 100, 50, 1, 1, 1]


def test_random_llamas_of_a_catalogue_shape_repeat_by_seed():
    changes = dict(num_layers=1, vocab_size=60, hidden_size=36, num_heads=6, num_kv_heads=2, head_dim=8)
    one, same, other = (kv.random_model("smollm2-135m", seed=s, **changes) for s in (1, 1, 2))
    assert type(one) is llama.Llama and one.config.cache_shape == (1, 2, 8)
    assert np.array_equal(one([1, 2]), same([1, 2])) and not np.array_equal(one([1, 2]), other([1, 2]))
    with pytest.raises(ValueError, match="qwen3-4b is a qwen3 shape: this course sizes it"):
        kv.random_model("qwen3-4b", num_layers=1)
