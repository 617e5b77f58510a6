"""Write text token by token, with a cache or without, and the ways to choose a token."""

import numpy as np

from kvcourse import ops
from kvcourse.caches import ContiguousCache, KVCache
from kvcourse.caches.base import whole_number
from kvcourse.models.base import check_ids

PREFILL_CHUNK = 256  # tokens of a prompt that pass at once: bounds the memory of a pass


def greedy(logits):
    """The token with the largest logit. logits float32 (vocab_size,) → int."""
    return int(np.argmax(logits))


def sampled(temperature=1.0, top_p=1.0, seed=0):
    """A sampler that draws from the softmax of logits / temperature.

    Only the likeliest tokens that together reach probability `top_p` are drawn from
    (Holtzman et al. 2020, "nucleus sampling", section 3.1). Each call of `sampled`
    starts a random stream of its own, so that the same seed gives the same text.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: it must be above 0 (use kv.greedy for the limit)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: it must lie in 0 < top_p ≤ 1")
    random = np.random.default_rng(seed)

    def choose(logits):
        largest = logits.max()
        if not np.isfinite(largest):
            raise ValueError(
                f"the largest logit is {largest}: a sampler needs finite logits (or −inf to forbid a token)"
            )
        # The maximum is taken away before the division, so that no temperature overflows.
        with np.errstate(over="ignore"):  # −inf, a probability of 0, is what is meant
            scaled = (logits - largest) / float(temperature)
        probabilities = ops.softmax(scaled)
        order = np.argsort(-probabilities, kind="stable")
        reached = np.cumsum(probabilities[order], dtype=np.float64)
        kept = int(np.searchsorted(reached, top_p * reached[-1])) + 1
        place = np.searchsorted(reached[:kept], random.random() * reached[kept - 1], side="right")
        return int(order[min(place, kept - 1)])

    return choose


def generate(
    model, ids, max_new_tokens=100, use_cache=True, sampler=greedy, cache=None, stop=None, on_token=None
):
    """Write up to `max_new_tokens` tokens after `ids`; return them as a list of ints.

    With `use_cache` the prompt passes through the model once (prefill, a long one in chunks)
    and then one token a step (decode); without, the whole sequence at every step. `cache` may hold
    a sequence already, which `ids` then continue. `stop` is a token id that ends the
    text and is not returned. `on_token(id)` is called as each token is chosen.

    Raises, before any work and with the cache unchanged, ValueError for a negative count, a `stop`
    that is no token, and when prompt and answer together have more tokens than positions; TypeError
    for what is not of the kind named above. Raises ValueError for a sampler that returns anything
    but a token id.
    """
    ids = check_ids(ids, model.config).tolist()
    whole_number(max_new_tokens, "max_new_tokens", least=0)
    check_stop(stop, model.config)
    for name, function in (("sampler", sampler), ("on_token", on_token or greedy)):
        if not callable(function):
            raise TypeError(f"{name} is {function!r}: give a function, such as kv.greedy for the sampler")
    if cache is not None and not use_cache:
        raise ValueError("a cache was given with use_cache=False: leave one of them out")
    if cache is not None and not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}: generate continues one sequence, in a KVCache")
    if use_cache and cache is None:
        cache = ContiguousCache.for_model(model)
    _check_room(model, len(ids), max_new_tokens, cache)
    step = _cached_step(model, cache) if use_cache else _uncached_step(model)
    new, given = [], ids
    for _ in range(max_new_tokens):
        token = check_token(sampler(step(given)), model.config)
        if stop is not None and token == stop:
            break
        new.append(token)
        given = [token]
        if on_token is not None:
            on_token(token)
    return new


def _check_room(model, prompt, new, cache):
    """ValueError when the prompt and the new tokens do not fit behind what the cache holds."""
    held = cache.seq_len if cache is not None else 0
    limit = model.config.max_seq_len
    if cache is not None:
        # Learned positions end where they end, whatever the cache was made for.
        unlimited = cache.unlimited and model.config.rope_theta is not None
        limit = cache.max_seq_len if unlimited else min(cache.max_seq_len, limit)
    # The last token chosen is returned and never read, so it needs no position.
    needed = held + prompt + max(new - 1, 0)
    if needed > limit:
        raise ValueError(
            f"{held + prompt:,} prompt tokens and {new:,} new ones need {needed:,} positions, "
            f"the limit is {limit:,}: shorten the prompt or ask for fewer tokens"
        )


def check_stop(stop, config):
    """Raise ValueError unless `stop` is None or an id of the vocabulary."""
    if stop is not None and (not isinstance(stop, int | np.integer) or not 0 <= stop < config.vocab_size):
        raise ValueError(f"stop is {stop!r}: give a token id, 0 … {config.vocab_size - 1:,}")


def check_token(chosen, config):
    """What a sampler returned as an int; ValueError unless it is an id of the vocabulary."""
    if isinstance(chosen, int | np.integer) and 0 <= chosen < config.vocab_size:
        return int(chosen)
    raise ValueError(
        f"the sampler returned {chosen!r}: it must return a token id, 0 … {config.vocab_size - 1:,}"
    )


def _cached_step(model, cache):
    """Each call passes only the new tokens through: (vocab_size,) logits of the last one."""
    chunk = min(PREFILL_CHUNK, cache.max_pass or PREFILL_CHUNK)

    def step(given):
        for low in range(0, len(given), chunk):
            logits = model(given[low : low + chunk], cache, rows=[-1])
        return logits[0]

    return step


def _uncached_step(model):
    """Each call passes the whole sequence so far through."""
    sequence = []

    def step(given):
        sequence.extend(given)
        return model(sequence, rows=[-1])[0]

    return step
