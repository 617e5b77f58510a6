"""The engine's loop: who is admitted when, what is found, what a failing step leaves behind."""

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import weights
from kvcourse.engine import Engine, loop
from kvcourse.models import gpt2
from kvcourse.paging import OutOfBlocks

CONFIG = kv.ModelConfig("small", "gpt2", 2, 3, 3, 8, 24, 48, 40, 100)
PARAMS = weights.random_params(gpt2.param_shapes(CONFIG), 1)
MODEL = gpt2.GPT2(CONFIG, {name: array * 5 for name, array in PARAMS.items()})
IDS = np.random.default_rng(3).integers(0, 40, 100).tolist()


def engine_of(num_blocks=20, block_size=4, **options):
    return Engine(MODEL, num_blocks, block_size, **options)


def always(token):
    return lambda logits: token


def fails(logits):
    raise ZeroDivisionError


def state(engine):
    """Everything a step may change."""
    engine.pool.manager.check_invariants()
    requests = [*engine.running, *engine.waiting]
    caches = [None if r.cache is None else (r.cache.seq_len, r.cache.pending) for r in requests]
    return [(r.finished, list(r.new_ids), r.num_cached_tokens) for r in requests], caches


def test_a_request_gets_what_generate_writes():
    engine = engine_of()
    request = engine.add(IDS[:10], 6)
    assert (request.new_ids, request.finished, request.num_cached_tokens) == ([], False, None)
    assert request.seconds_to_first_token is None
    assert engine.run() == [request] and engine.run() == []
    assert request.new_ids == kv.generate(MODEL, IDS[:10], 6)
    assert request.finished and request.cache is None and request.num_cached_tokens == 0
    assert engine.pool.manager.num_used == 0 and engine.step() == []


def test_the_last_token_needs_no_room():
    """10 prompt tokens and 3 new ones are 12 rows: 3 blocks of 4, and one token more would need a fourth."""
    engine = engine_of(num_blocks=3)
    engine.add(IDS[:10], 3)
    engine.run()
    with pytest.raises(ValueError, match="10 prompt tokens and 4 new ones need 4 blocks of 4 .* has 3: "):
        engine.add(IDS[:10], 4)


def test_first_come_first_served():
    """10 blocks of 4. The second needs all of them and waits for the first; the third would fit and waits."""
    engine = engine_of(num_blocks=10)
    first, second, third = engine.add(IDS[:8], 5), engine.add(IDS[:36], 5), engine.add(IDS[50:52], 2)
    engine.step()
    engine.step()
    assert engine.running == [first] and list(engine.waiting) == [second, third]
    assert engine.run() == [first, second, third]


def test_admission_counts_what_the_running_ones_may_still_need():
    """6 blocks. The first may grow to 4 and holds 1 of them so far, so a second that needs 3 has to wait."""
    engine = engine_of(num_blocks=6)
    engine.add(IDS[:4], 13)  # 16 rows
    second = engine.add(IDS[10:20], 3)  # 12 rows
    for _ in range(12):
        engine.step()
        assert list(engine.waiting) == [second] and engine.pool.manager.num_free >= 2
    engine.run()
    assert second.new_ids == kv.generate(MODEL, IDS[10:20], 3)


def test_at_most_max_batch_run_at_once():
    engine, most = engine_of(num_blocks=40, max_batch=2), 0
    added = [engine.add(IDS[i : i + 3], 5) for i in range(5)]
    while engine.waiting or engine.running:
        engine.step()
        most = max(most, len(engine.running))
    assert most == 2 and all(request.finished for request in added)


def test_found_blocks_that_somebody_holds_cost_no_room():
    """Twice the same 17 tokens, 5 blocks each with the answer; 4 are shared, so 6 blocks do for both."""
    engine = engine_of(num_blocks=6)
    both = [engine.add(IDS[:17], 4) for _ in "ab"]
    engine.step()
    engine.step()
    assert engine.running == both and both[1].num_cached_tokens == 16
    plain = engine_of(num_blocks=6, prefix_caching=False)
    both = [plain.add(IDS[:17], 4) for _ in "ab"]
    plain.step()
    plain.step()
    assert plain.running == both[:1]


def test_blocks_held_under_another_salt_cost_room():
    """The same 17 tokens twice, 5 blocks each, nothing shared: with 9 blocks the second one waits."""
    engine = engine_of(num_blocks=9)
    first, second = engine.add(IDS[:17], 4), engine.add(IDS[:17], 4, salt="b")
    for _ in range(3):
        engine.step()
        assert engine.running == [first] and list(engine.waiting) == [second]
    assert engine.run() == [first, second]


def test_a_long_prompt_goes_in_chunks_and_the_next_one_waits_for_its_blocks(monkeypatch):
    """Chunks of 4: the first prompt takes three passes, and the second then finds 8 of its 12 tokens."""
    monkeypatch.setattr(loop, "PREFILL_CHUNK", 4)
    engine, passes = engine_of(), []
    forward = type(MODEL).__call__

    def counted(self, ids, view, **options):
        passes.append(view.lengths)
        return forward(self, ids, view, **options)

    monkeypatch.setattr(type(MODEL), "__call__", counted)
    first, second = engine.add(IDS[:12], 3), engine.add(IDS[:12], 3)
    assert [engine.step() for _ in range(3)] == [[], [], [first]]
    assert engine.run() == [first, second] and second.num_cached_tokens == 8
    assert passes == [[4], [4], [4], [1, 4], [1, 1], [1]]


def test_what_is_found_can_be_told_by_hand():
    engine = engine_of()
    first = engine.add(IDS[:21], 4)
    same, longer = engine.add(IDS[:21], 4), engine.add(IDS[:15] + [39, 1], 4)
    other = engine.add(IDS[:21], 4, salt="somebody else")
    engine.run()
    # 21 tokens: five whole blocks. The changed token 15 is in the fourth.
    assert [r.num_cached_tokens for r in (first, same, longer, other)] == [0, 20, 12, 0]
    assert first.new_ids == same.new_ids == other.new_ids


def test_a_stop_token_ends_the_text_and_is_not_returned():
    texts = kv.generate(MODEL, IDS[:5], 8)
    stop = next(token for token in texts if token != texts[0])
    engine = engine_of()
    request = engine.add(IDS[:5], 8, stop=stop)
    engine.run()
    assert request.new_ids == texts[: texts.index(stop)]
    never_one = engine.add(IDS[:5], 8, stop=texts[0])
    engine.run()
    assert never_one.new_ids == [] and never_one.seconds_to_first_token > 0


def test_each_request_has_its_sampler():
    engine = engine_of()
    requests = [engine.add(IDS[:4], 5, sampler=kv.sampled(seed=seed)) for seed in (1, 1, 2)]
    engine.run()
    expected = [kv.generate(MODEL, IDS[:4], 5, sampler=kv.sampled(seed=seed)) for seed in (1, 1, 2)]
    assert [request.new_ids for request in requests] == expected and expected[0] != expected[2]


def test_time_to_first_token_counts_the_waiting(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(loop, "_clock", lambda: next(clock))
    engine = engine_of(max_batch=1)
    first, second = engine.add(IDS[:4], 3), engine.add(IDS[:4], 3)  # added at 0 and 1
    engine.run()  # first tokens at 2 and 3: the clock is read once a request
    assert (first.seconds_to_first_token, second.seconds_to_first_token) == (2, 2)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (([], 3), ValueError, "no token ids"),
        (([40], 3), ValueError, "token id 40"),
        (("text", 3), TypeError, "ids is the text"),
        (([1], 0), ValueError, "max_new_tokens is 0: give at least 1"),
        (([1], 1.5), TypeError, "max_new_tokens is 1.5: give a whole number of at least 1"),
        (([1], 3, 1.5), TypeError, "salt is 1.5"),
        (([1], 3, None, 40), ValueError, "stop is 40"),
        (([1], 3, None, None, "greedy"), TypeError, "sampler is 'greedy'"),
        (([1] * 90, 12), ValueError, "need 101 positions, small has 100"),
        (([1] * 80, 2), ValueError, "need 21 blocks of 4 tokens, the pool has 20"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(arguments, error, message):
    engine = engine_of()
    with pytest.raises(error, match=message) as caught:
        engine.add(*arguments)
    assert "\n" not in str(caught.value)
    assert not engine.waiting and engine.pool.manager.num_used == 0


@pytest.mark.parametrize("size", [0, 1.5, True])
def test_sizes_are_checked(size):
    for options in ({"num_blocks": size}, {"block_size": size}, {"max_batch": size}):
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            engine_of(**options)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_pass_can_be_repeated(when, monkeypatch):
    """Before the model has computed anything, or after it has and its logits are lost."""
    engine = engine_of()
    requests = [engine.add(IDS[:10], 5), engine.add(IDS[20:31], 5)]
    engine.step()
    engine._admit()
    before = state(engine)
    original = type(MODEL).__call__

    def interrupted(self, *arguments, **options):
        if when == "after":
            original(self, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(MODEL), "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert state(engine)[0] == before[0]
    engine.run()
    assert [r.new_ids for r in requests] == [kv.generate(MODEL, ids, 5) for ids in (IDS[:10], IDS[20:31])]
    assert engine.pool.manager.num_used == 0


@pytest.mark.parametrize("sampler, error", [(fails, ZeroDivisionError), (always(99), ValueError)])
def test_a_sampler_that_fails_is_asked_again_and_can_be_cancelled(sampler, error):
    engine = engine_of()
    good, bad, last = engine.add(IDS[:5], 4), engine.add(IDS[:6], 4, sampler=sampler), engine.add(IDS[:7], 4)
    with pytest.raises(error):
        engine.run()
    lengths = good.cache.seq_len, bad.cache.seq_len
    with pytest.raises(error):
        engine.step()
    engine.pool.manager.check_invariants()
    assert bad.new_ids == [] and bad.cache.seq_len == 6 == lengths[1]
    engine.cancel(bad)
    assert bad.finished and bad.cache is None
    engine.run()
    assert [good.new_ids, last.new_ids] == [kv.generate(MODEL, IDS[:n], 4) for n in (5, 7)]
    assert engine.pool.manager.num_used == 0


def test_cancelling_anything():
    engine = engine_of(max_batch=1)
    running, waiting = engine.add(IDS[:5], 4), engine.add(IDS[:5], 4)
    engine.step()
    for request in (running, waiting, running):
        engine.cancel(request)
        assert request.finished
    assert len(running.new_ids) == 1 and engine.pool.manager.num_used == 0
    assert engine.run() == []


def test_a_sampler_may_cancel_any_request():
    """Its own, one whose turn in this step comes later, and one that waits: no token is made up for it."""
    engine, asked = engine_of(max_batch=2), []

    def canceller(number, *positions):
        """Token 3; the requests at these positions leave when it is asked for the number-th time."""

        def sampler(logits):
            asked.append(1)
            if len(asked) == number:
                for position in positions:
                    engine.cancel(requests[position])
            return 3

        return sampler

    requests = [engine.add(IDS[:6], 6, sampler=canceller(3, 1, 2))]
    requests += [engine.add(IDS[:6], 6), engine.add(IDS[:6], 6)]
    assert engine.run() == requests[:1] and requests[0].new_ids == [3] * 6
    assert requests[1].new_ids == kv.generate(MODEL, IDS[:6], 1) and requests[2].new_ids == []
    asked.clear()
    requests = [engine.add(IDS[:6], 2, sampler=canceller(2, 0))]  # on its last token
    assert engine.run() == [] and requests[0].new_ids == [3] and requests[0].finished
    assert engine.pool.manager.num_used == 0


@pytest.mark.parametrize("new", [1, 2])
def test_an_interrupt_right_after_the_last_token_ends_the_request(new, monkeypatch):
    engine = engine_of()
    request = engine.add(IDS[:6], new)

    def interrupted(request):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.run()
    assert engine.run() == [request] and engine.pool.manager.num_used == 0
    assert request.new_ids == kv.generate(MODEL, IDS[:6], new)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_around_a_choice_costs_no_token_and_gives_none_twice(when):
    class Interrupting(list):
        """Its append is stopped before or after the token is in."""

        def append(self, token):
            if when == "after":
                super().append(token)
            raise KeyboardInterrupt

    engine = engine_of()
    request = engine.add(IDS[:6], 4)
    engine.step()
    request.new_ids = Interrupting(request.new_ids)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    request.new_ids = list(request.new_ids)
    engine.run()
    assert request.new_ids == kv.generate(MODEL, IDS[:6], 4)


@pytest.mark.parametrize("what, error", [(None, TypeError), (3, TypeError), ("other", ValueError)])
def test_cancel_refuses_what_is_not_its_request(what, error):
    engine, other = engine_of(), engine_of()
    request = other.add(IDS[:6], 2)
    with pytest.raises(error, match="request") as caught:
        engine.cancel(request if what == "other" else what)
    assert "\n" not in str(caught.value) and not request.finished
    assert other.run() == [request]
    engine.cancel(request)  # it is over: nothing to refuse


def test_somebody_elses_blocks_do_not_make_it_wait_for_ever():
    engine = engine_of(num_blocks=3)
    request = engine.add(IDS[:8], 2)
    held = engine.pool.sequence(IDS[:4])
    with pytest.raises(OutOfBlocks, match="needs 3 blocks, 2 are free and nothing runs: free") as caught:
        engine.run()
    assert "\n" not in str(caught.value)
    held.free()
    engine.run()
    assert request.finished


def test_somebody_elses_blocks_stop_a_running_request_until_they_are_free():
    engine = engine_of(num_blocks=4)
    request = engine.add(IDS[:6], 6)  # 11 rows: 2 blocks now, a third one later
    engine.step()
    held = engine.pool.sequence(IDS[50:58])
    with pytest.raises(OutOfBlocks, match="1 block of 4 tokens needed, 0 of 4 are free: free"):
        engine.run()
    held.free()
    assert engine.run() == [request]
    assert request.new_ids == kv.generate(MODEL, IDS[:6], 6)


def test_one_pass_a_step_and_no_token_twice():
    """The rows of all passes, counted."""
    engine, rows = engine_of(), []

    class Counting:
        config = CONFIG

        def __call__(self, ids, cache, **options):
            rows.append(len(ids))
            return MODEL(ids, cache, **options)

    engine.model = Counting()
    engine.add(IDS[:10], 3)
    engine.add(IDS[:10], 3)
    engine.run()
    # 10; then 1 and the second prompt's two last tokens (8 were found); 1 and 1; 1.
    assert rows == [10, 3, 2, 1]
