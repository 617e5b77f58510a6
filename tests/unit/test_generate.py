"""Cached and uncached loops write the same text; samplers draw from what they say."""

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import ops

MODEL = kv.load_model("austen-gpt2")
TOKENIZER = kv.load_tokenizer("austen-gpt2")
PROMPT = TOKENIZER.encode("It is a truth universally acknowledged")


def test_greedy_text_is_the_same_with_and_without_cache():
    assert kv.generate(MODEL, PROMPT, 40) == kv.generate(MODEL, PROMPT, 40, use_cache=False)


def test_running_twice_gives_the_same_text():
    """Also when sampled: the stream starts anew with each sampler."""
    for sampler in (lambda: kv.greedy, lambda: kv.sampled(0.9, 0.95, seed=3)):
        first, second = (kv.generate(MODEL, PROMPT, 20, sampler=sampler()) for _ in range(2))
        assert first == second and len(first) == 20


def test_a_given_cache_is_continued():
    cache = kv.ContiguousCache.for_model(MODEL)
    MODEL(PROMPT[:4], cache)
    assert kv.generate(MODEL, PROMPT[4:], 10, cache=cache) == kv.generate(MODEL, PROMPT, 10)
    assert cache.seq_len == len(PROMPT) + 9  # the tenth token was chosen, not read


def test_stop_ends_the_text_and_is_not_returned():
    text = kv.generate(MODEL, PROMPT, 20)
    stop = text[6]
    assert kv.generate(MODEL, PROMPT, 20, stop=stop) == text[: text.index(stop)]


def test_on_token_sees_each_token_as_it_is_chosen():
    seen = []
    assert kv.generate(MODEL, PROMPT, 5, on_token=seen.append) == seen


def test_no_tokens_asked_for():
    assert kv.generate(MODEL, PROMPT, 0) == []


@pytest.mark.parametrize("use_cache", [True, False])
def test_too_long_an_answer_is_refused_before_any_work(use_cache):
    with pytest.raises(ValueError, match="need 1,025 positions, the limit is 1,024: shorten"):
        kv.generate(MODEL, [1] * 24, 1002, use_cache=use_cache)


def test_a_refused_call_leaves_the_cache_alone():
    cache = kv.ContiguousCache.for_model(MODEL, max_seq_len=20)
    MODEL([1, 2, 3], cache)
    with pytest.raises(ValueError, match="need 21 positions, the limit is 20"):
        kv.generate(MODEL, [4], 18, cache=cache)
    assert cache.seq_len == 3


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(max_new_tokens=-1), "max_new_tokens is -1"),
        (dict(use_cache=False, cache=kv.ContiguousCache.for_model(MODEL)), "use_cache=False"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        kv.generate(MODEL, PROMPT, **arguments)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(stop="<|im_end|>"), "stop is '<|im_end|>': give a token id, 0 … 2,047"),
        (dict(stop=2048), "stop is 2048: give a token id"),
        (dict(stop=[1]), r"stop is \[1\]: give a token id"),
        (dict(max_new_tokens=2.5), "max_new_tokens is 2.5: it is not a whole number of tokens"),
        (dict(sampler="greedy"), "sampler is 'greedy': give a function"),
        (dict(on_token=3), "on_token is 3: give a function"),
    ],
)
def test_what_would_fail_later_is_refused_before_any_work(arguments, words):
    """A stop that is no token never stops; a sampler that is none would fail after the prompt has passed."""
    cache = kv.ContiguousCache.for_model(MODEL)
    with pytest.raises((ValueError, TypeError), match=words.replace("|", r"\|")):
        kv.generate(MODEL, PROMPT, cache=cache, **arguments)
    assert cache.seq_len == 0


def test_a_long_prompt_passes_in_chunks(monkeypatch):
    """Its logits are the same, and no pass has more tokens than a cache or PREFILL_CHUNK allows."""
    ids = np.random.default_rng(0).integers(2048, size=600).tolist()
    expected, passes, forward = kv.generate(MODEL, ids, 8, use_cache=False), [], type(MODEL)._forward

    def counted(self, ids, *rest):
        passes.append(len(ids))
        return forward(self, ids, *rest)

    monkeypatch.setattr(type(MODEL), "_forward", counted)
    assert kv.generate(MODEL, ids, 8) == expected
    assert passes == [256, 256, 88] + [1] * 7
    passes.clear()
    kv.generate(MODEL, ids, 2, cache=kv.SlidingCache.for_model(MODEL, window=100, slack=149))
    assert passes == [150] * 4 + [1]


@pytest.mark.parametrize(
    "arguments", [dict(temperature=0), dict(temperature=-1), dict(top_p=0), dict(top_p=1.5)]
)
def test_impossible_samplers(arguments):
    with pytest.raises(ValueError, match="it must"):
        kv.sampled(**arguments)


def test_sampling_draws_with_the_softmax_probabilities():
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    choose = kv.sampled(temperature=0.7, seed=0)
    counts = np.bincount([choose(logits) for _ in range(20_000)], minlength=4) / 20_000
    # The standard deviation of a share at 20,000 draws is at most 0.0036.
    np.testing.assert_allclose(counts, ops.softmax(logits / np.float32(0.7)), atol=0.015)


def test_top_p_draws_only_the_likeliest():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    choose = kv.sampled(top_p=0.7, seed=0)
    assert {choose(logits) for _ in range(500)} == {0, 1}
    assert kv.sampled(top_p=1e-9)(logits) == 0


@pytest.mark.parametrize("chosen", [None, 2048, -1, 3.0, "a"])
def test_a_sampler_must_return_a_token_id(chosen):
    with pytest.raises(ValueError, match="the sampler returned .*must return a token id, 0 … 2,047"):
        kv.generate(MODEL, PROMPT, 3, sampler=lambda logits: chosen)


def test_tokens_are_plain_ints():
    text = kv.generate(MODEL, np.array(PROMPT), 3, sampler=np.argmax)
    assert [type(token) for token in text] == [int] * 3


@pytest.mark.parametrize("ids, error", [("It was", TypeError), ([1.9], TypeError), ([], ValueError)])
def test_wrong_prompts_are_refused_as_the_model_refuses_them(ids, error):
    with pytest.raises(error, match="token id"):
        kv.generate(MODEL, ids, 3)


def test_a_batch_is_not_one_sequence():
    view = kv.BatchView([kv.ContiguousCache.for_model(MODEL)], [1])
    with pytest.raises(TypeError, match="BatchView: generate continues one sequence"):
        kv.generate(MODEL, PROMPT, 3, cache=view)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_samplers_refuse_logits_that_are_not_finite(bad):
    with pytest.raises(ValueError, match="a sampler needs finite logits"):
        kv.sampled()(np.array([0, bad, 1], np.float32))


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e6, np.float64(1)])
def test_extreme_temperatures(temperature):
    logits = np.array([1, 5, -np.inf, 3], np.float32)
    drawn = {kv.sampled(temperature, seed=s)(logits) for s in range(20)}
    assert drawn == {1} if temperature < 1 else 2 not in drawn
