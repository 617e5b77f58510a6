"""Bills of hosted caches, by hand."""

from dataclasses import replace

import pytest

from kvcourse.sizing import prices
from kvcourse.sizing.prices import (
    ANTHROPIC_1_HOUR,
    ANTHROPIC_5_MINUTES,
    OPENAI_5_MINUTES,
    OPENAI_30_MINUTES,
    Request,
    Usage,
)

BARE = prices.Rules("bare", read=0.25, write=1.0, lifetime=100, minimum=1, output=4.0)


def used(requests, rules=BARE):
    return [(u.read, u.written, u.plain, u.output) for u in prices.bill(requests, rules)]


def request(at, *parts, output=0, marks=None):
    """A request at this time; a part is written "name:tokens"."""
    pairs = tuple((name, int(tokens)) for name, tokens in (part.split(":") for part in parts))
    return Request(at, pairs, output, marks)


def test_only_the_beginning_is_read():
    found = used(
        [request(0, "a:10", "b:20", "c:5"), request(1, "a:10", "x:20", "c:5"), request(2, "x:20", "a:10")]
    )
    assert found == [(0, 35, 0, 0), (10, 25, 0, 0), (0, 30, 0, 0)]


def test_the_longest_of_several_beginnings_is_read():
    requests = [
        request(0, "a:10"),
        request(1, "a:10", "b:20"),
        request(2, "a:10", "b:20", "c:1"),
        request(3, "a:10", "c:1"),
    ]
    assert [u[0] for u in used(requests)] == [0, 10, 30, 10]


def test_a_use_starts_the_lifetime_anew():
    a = "a:10"
    assert [u[0] for u in used([request(at, a, f"{at}:3") for at in (0, 100, 200, 301, 401)])] == [
        0,
        10,
        10,
        0,
        10,
    ]


def test_lifetime_of_a_longer_beginning_ends_on_its_own():
    requests = [request(0, "a:10", "b:20"), request(90, "a:10", "c:7"), request(150, "a:10", "b:20")]
    assert [u[0] for u in used(requests)] == [0, 10, 10]


def test_steps_and_minimum():
    rules = replace(BARE, step=128, minimum=1024)
    short, long = (
        [request(at, "a:1023", f"{at}:1") for at in (0, 1)],
        [request(at, "a:1200", f"{at}:9") for at in (0, 1)],
    )
    assert used(short, rules) == [(0, 1024, 0, 0), (0, 1024, 0, 0)]  # a alone is below the minimum
    assert used(long, rules) == [(0, 1152, 57, 0), (1152, 0, 57, 0)]  # 9 · 128 = 1,152


def test_the_minimum_is_compared_with_what_the_steps_leave():
    """1,010 tokens are 7 · 128 = 896, below a minimum of 1,000; 1,030 are 1,024."""
    rules = replace(BARE, step=128, minimum=1000)
    assert used([request(at, "a:1010") for at in (0, 1)], rules) == [(0, 0, 1010, 0)] * 2
    assert used([request(at, "a:1030") for at in (0, 1)], rules) == [(0, 1024, 6, 0), (1024, 0, 6, 0)]


def test_without_rules_everything_is_plain():
    (usage,) = prices.bill([request(0, "a:10", "b:3", output=2)])
    assert usage == Usage(0, 0, 13, 2) and usage.prompt == 13
    assert prices.cost(usage) == 13 + 2 * 5 and prices.cost(usage, output=1.5) == 16


def test_marks():
    rules = replace(ANTHROPIC_5_MINUTES, minimum=5)
    asked = [request(at, "a:10", f"q{at}:3", output=1, marks=(1,)) for at in (0, 1)]
    assert used(asked, rules) == [(0, 10, 3, 1), (10, 0, 3, 1)]
    # Marked at the end only, a beginning that is not a whole earlier prompt is never found.
    asked = [request(at, "a:10", f"q{at}:3") for at in (0, 1)]
    assert used(asked, rules) == [(0, 13, 0, 0), (0, 13, 0, 0)]
    # Two marks: the first for others, the second for the next turn.
    asked = [
        request(0, "a:10", "b:4", marks=(1, 2)),
        request(1, "a:10", "b:4", "c:2", marks=(1, 3)),
        request(2, "a:10", "z:1", marks=(1,)),
    ]
    assert used(asked, rules) == [(0, 14, 0, 0), (14, 2, 0, 0), (10, 0, 1, 0)]
    assert used([request(0, "a:10", marks=())], rules) == [(0, 0, 10, 0)]


def test_a_read_renews_a_beginning_that_the_request_does_not_mark():
    """Marked at 0 s, read at 200 s; at 400 s it was used 200 s ago, at 701 s 301 s ago."""
    rules = replace(ANTHROPIC_5_MINUTES, minimum=5)
    asked = [request(0, "a:10", marks=(1,)), *(request(at, "a:10", marks=()) for at in (200, 400, 701))]
    assert used(asked, rules) == [(0, 10, 0, 0), (10, 0, 0, 0), (10, 0, 0, 0), (0, 0, 10, 0)]


def test_a_mark_within_what_is_read_writes_nothing():
    rules, parts = replace(ANTHROPIC_5_MINUTES, minimum=5), ("a:10", "b:4", "c:2")
    asked = [request(0, *parts, marks=(3,)), request(1, *parts, "d:1", marks=(1,))]
    assert used(asked, rules) == [(0, 16, 0, 0), (16, 0, 1, 0)]


def test_a_mark_before_the_first_part_keeps_nothing():
    asked = [request(at, "a:10", marks=(0,)) for at in (0, 1)]
    assert used(asked, replace(ANTHROPIC_5_MINUTES, minimum=5)) == [(0, 0, 10, 0)] * 2


def test_equal_names_of_other_lengths_are_other_texts():
    assert used([request(0, "a:10"), request(1, "a:30")]) == [(0, 10, 0, 0), (0, 30, 0, 0)]


def test_a_mark_below_the_minimum_keeps_nothing():
    asked = [request(at, "a:10", "b:4", marks=(1,)) for at in (0, 1)]
    assert used(asked, replace(ANTHROPIC_5_MINUTES, minimum=11)) == [(0, 0, 14, 0)] * 2


def test_cost_by_hand():
    usage = Usage(read=100, written=40, plain=10, output=3)
    assert prices.cost(usage, ANTHROPIC_5_MINUTES) == pytest.approx(10 + 50 + 10 + 15)
    assert prices.cost(usage, ANTHROPIC_1_HOUR) == pytest.approx(10 + 80 + 10 + 15)
    assert prices.cost(usage, OPENAI_5_MINUTES) == pytest.approx(10 + 40 + 10 + 15)
    assert prices.cost(usage, OPENAI_30_MINUTES) == pytest.approx(10 + 50 + 10 + 15)


def test_a_conversation_sends_everything_again():
    requests = prices.conversation(turns=3, prefix=6000, question=200, answer=300, gap=60)
    assert [r.at for r in requests] == [0, 60, 120] and {r.output for r in requests} == {300}
    assert used(requests, OPENAI_5_MINUTES) == [
        (0, 6144, 56, 300),
        (6144, 512, 44, 300),
        (6656, 512, 32, 300),
    ]
    assert used(requests, ANTHROPIC_5_MINUTES) == [
        (0, 6200, 0, 300),
        (6200, 500, 0, 300),
        (6700, 500, 0, 300),
    ]


def test_caching_never_discounts_output():
    for rules in (OPENAI_5_MINUTES, OPENAI_30_MINUTES, ANTHROPIC_5_MINUTES, ANTHROPIC_1_HOUR):
        usage = Usage(0, 0, 0, 7)
        assert prices.cost(usage, rules) == prices.cost(usage) == 35


def test_fields_add_up():
    usage = Usage(read=6144, written=512, plain=44, output=300)
    assert prices.openai_fields(usage) == {
        "prompt_tokens": 6700, "completion_tokens": 300, "prompt_tokens_details": {"cached_tokens": 6144},
    }  # fmt: skip
    fields = prices.anthropic_fields(usage)
    assert (
        fields.pop("output_tokens") == 300 and sum(fields.values()) == 6700 and fields["input_tokens"] == 44
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: replace(OPENAI_5_MINUTES, read=-1), "read is -1"),
        (lambda: replace(OPENAI_5_MINUTES, lifetime=-1), "lifetime is -1"),
        (lambda: replace(OPENAI_5_MINUTES, step=0), "step is 0"),
        (lambda: replace(OPENAI_5_MINUTES, minimum=0), "minimum is 0"),
        (lambda: prices.bill([request(5, "a:1"), request(4, "a:1")]), "in order of time"),
        (lambda: prices.bill([request(0, "a:-1")]), "a part has -1 tokens"),
        (lambda: prices.bill([request(0, "a:1", marks=(2,))], ANTHROPIC_1_HOUR), "from 0 to 1"),
        (lambda: prices.bill([request(0, "a:1", marks=(2,))]), "from 0 to 1"),
        (lambda: prices.bill([request(0, "a:1", output=-5)]), "an answer has -5 tokens"),
        (lambda: prices.bill([Request(0, (("a", 1500.5),))]), "a part has 1500.5 tokens"),
        (lambda: prices.bill([request(float("nan"), "a:1")]), "in order of time"),
        (lambda: replace(OPENAI_5_MINUTES, read=float("nan")), "read is nan"),
        (lambda: replace(OPENAI_5_MINUTES, step=1.5), "step is 1.5"),
        (lambda: prices.conversation(-1, 1, 1, 1, 1), "turns is -1"),
    ],
)
def test_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
