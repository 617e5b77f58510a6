"""The needle task on a tokenizer of single bytes and models whose answers are known beforehand."""

import re
import types

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import needle

TEXT = "It was a fine day. Nobody said so. " * 200  # sentences of 19 and 16 bytes


@pytest.fixture(scope="module")
def tokenizer(bytes_tokenizer):
    return bytes_tokenizer()


# --- the prompt -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [280, 1000])
def test_the_prompt_hides_the_number_in_the_text_and_asks_for_it(tokenizer, length):
    ids, answer = needle.prompt(tokenizer, TEXT, length, 0.5, seed=3)
    assert len(ids) + len(answer) == length
    written, number = tokenizer.decode(ids), tokenizer.decode(answer)
    assert re.fullmatch(r"\d{5}", number) and len(answer) == 5
    assert written.startswith("<|im_start|>user\nRead this text.\n\n")
    assert written.endswith("<|im_start|>assistant\nThe pass key mentioned in the text is ")
    assert written.count(number) == written.count(f". Remember this: the pass key is {number}. ") == 1
    assert ids.count(256) == 2 and ids.count(257) == 1  # the control tokens, not their letters


@pytest.mark.parametrize("depth", [0, 0.1, 0.5, 0.77, 1])
def test_the_needle_lies_at_the_sentence_end_nearest_to_its_depth(tokenizer, depth):
    ids, _ = needle.prompt(tokenizer, TEXT, 1000, depth, seed=3)
    before, after = re.split(r" Remember this: the pass key is \d{5}\.", tokenizer.decode(ids))
    before = before.removeprefix("<|im_start|>user\nRead this text.\n\n")
    text = before + after.partition("\n\nWhat is")[0]
    assert text in TEXT and before.endswith(".")
    # The longest sentence has 19 bytes: an end inside the text is at most half of it away, 19 at its ends.
    assert abs(len(before) - depth * len(text)) <= (19 if depth in (0, 1) else 9.5)


def test_a_text_without_a_full_stop_is_cut_at_the_depth_itself(tokenizer):
    ids, _ = needle.prompt(tokenizer, "la " * 2000, 400, 0.5, seed=0)
    before, _, after = tokenizer.decode(ids).partition(" Remember this")
    text = len(before) - 34 + after.index("\n\nWhat") - len(": the pass key is 12345.")
    assert len(before) - 34 == text // 2


def test_the_seed_chooses_number_and_place(tokenizer):
    varied = " ".join(str(i) + "." for i in range(3000))
    made = [needle.prompt(tokenizer, varied, 500, 0.5, seed=seed) for seed in (0, 1, 0)]
    assert made[0] == made[2]
    assert made[0][1] != made[1][1] and made[0][0][34:60] != made[1][0][34:60]


SENTENCES = "".join(f" I see {i:04}." for i in range(3000))  # of 12 bytes each


def around(number):
    """What stands before the text, in it and after it; \0 and \1 for the two control tokens."""
    return (
        "\0user\nRead this text.\n\n",
        f" Remember this: the pass key is {number}.",
        "\n\nWhat is the pass key mentioned in the text?\1\n"
        "\0assistant\nThe pass key mentioned in the text is ",
    )


def test_a_prompt_written_by_hand(tokenizer):
    """The recorded run is made of these prompts, so a seed must go on giving the same: NumPy's generator
    of seed 0 draws the digits 8 6 5 2 3, and then one of the first 2,000 tokens."""
    random = np.random.default_rng(0)
    assert random.integers(0, 10, 5).tolist() == [8, 6, 5, 2, 3]
    head, hidden, tail = around(86523)
    room = 500 - 5 - len(head + hidden + tail)
    hay = SENTENCES[random.integers(0, 2000) :][:room]
    cut = hay.index(".", room // 2 - 6) + 1  # an end at most half a sentence from the middle
    expected = (head + hay[:cut] + hidden + hay[cut:] + tail).replace("\0", "<|im_start|>")
    ids, answer = needle.prompt(tokenizer, SENTENCES, 500, 0.5, seed=0)
    assert tokenizer.decode(ids) == expected.replace("\1", "<|im_end|>")
    assert tokenizer.decode(answer) == "86523"


def test_a_text_that_is_just_long_enough_begins_at_its_first_token(tokenizer):
    head, hidden, tail = around(12345)
    text = SENTENCES[: 500 - 5 - len(head + hidden + tail)]
    ids, _ = needle.prompt(tokenizer, text, 500, 1, seed=0)
    assert tokenizer.decode(ids).startswith(f"<|im_start|>{head[1:]}{text[:-20]}")
    with pytest.raises(ValueError, match="give a longer text"):
        needle.prompt(tokenizer, text[1:], 500, 1, seed=0)


def test_a_control_token_in_the_text_is_read_as_plain_text(tokenizer):
    ids, _ = needle.prompt(tokenizer, "<|im_end|>. " * 400, 500, 0.5, seed=0)
    assert ids.count(257) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 1.5}, "depth is 1.5: give 0"),
        ({"depth": float("nan")}, "depth is nan"),
        ({"length": 100}, r"length is 100: question and needle leave no text, give \d+"),
        ({"text": "Short."}, r"the text has 6 tokens, \d+ are needed: give a longer text"),
    ],
)
def test_what_cannot_be_asked_is_refused(tokenizer, change, message):
    asked = {"text": TEXT, "length": 500, "depth": 0.5, "seed": 0} | change
    with pytest.raises(ValueError, match=message):
        needle.prompt(tokenizer, **asked)


def test_the_length_named_in_the_error_is_the_shortest(tokenizer):
    with pytest.raises(ValueError) as error:
        needle.prompt(tokenizer, TEXT, 100, 0.5, seed=0)
    shortest = int(re.search(r"give (\d+)", str(error.value))[1])
    ids, answer = needle.prompt(tokenizer, TEXT, shortest, 0.5, seed=0)
    assert len(ids) + len(answer) == shortest
    assert shortest == len("".join(around(12345))) + 8 + 5  # eight tokens of text
    with pytest.raises(ValueError, match="leave no text"):
        needle.prompt(tokenizer, TEXT, shortest - 1, 0.5, seed=0)


def test_a_tokenizer_that_joins_digits_is_refused(bytes_tokenizer):
    pairs = [f"{i:02}".encode() for i in range(100)]
    with pytest.raises(ValueError, match=r"bytes writes \d{5} as 3 tokens: the task needs one a digit"):
        needle.prompt(bytes_tokenizer(*pairs), TEXT, 500, 0.5, seed=0)


# --- the answer -----------------------------------------------------------------------


class Counts:
    """A stand-in for a model: after token t it says t + 1 with probability 1/2, any other of 9 with 1/16."""

    config = types.SimpleNamespace(vocab_size=9)

    def __init__(self):
        self.passes = []

    def __call__(self, ids, cache, rows):
        self.passes.append(len(ids))
        logits = np.full((len(ids), 9), np.log(1 / 16), np.float32)
        logits[np.arange(len(ids)), np.array(ids) + 1] = np.log(1 / 2)
        return logits[rows]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize(
    ("answer", "found", "log_prob"),
    [
        ([4, 5, 6], True, np.log(1 / 2)),
        ([4, 5, 7], False, (2 * np.log(1 / 2) + np.log(1 / 16)) / 3),
        ([5, 6, 7], False, (np.log(1 / 16) + 2 * np.log(1 / 2)) / 3),  # teacher forcing: right again after it
    ],
)
def test_found_means_that_every_token_is_the_likeliest(chunk, answer, found, log_prob):
    model = Counts()
    assert needle.ask(model, [0, 1, 2, 3], answer, "a cache", chunk) == (
        found,
        pytest.approx(log_prob),
    )
    assert sum(model.passes) == 6 and max(model.passes) <= chunk  # the last token is never passed


def test_found_is_what_greedy_decoding_would_write(model):
    """On a trained model: its own greedy continuation is found, another one is not."""
    ids = kv.load_tokenizer("austen-gpt2").encode("It is a truth universally acknowledged")
    written = kv.generate(model, ids, 6)
    for answer, found in ((written, True), ([*written[:-1], (written[-1] + 1) % 2048], False)):
        cache = kv.ContiguousCache.for_model(model, 64)
        assert needle.ask(model, ids, answer, cache, 4)[0] is found
        assert cache.seq_len == len(ids) + 5


def test_the_chunk_does_not_change_the_answer(model):
    """A cache that keeps everything: ln p agrees but for float32's rounding; 1e-4 is ten times that."""
    ids = kv.load_tokenizer("austen-gpt2").encode("It is a truth universally acknowledged")
    logs = []
    for chunk in (1, 3, 64):
        cache = kv.ContiguousCache.for_model(model, 64)
        logs.append(needle.ask(model, ids, [5, 6, 7], cache, chunk)[1])
    assert logs == pytest.approx([logs[0]] * 3, rel=1e-4)


@pytest.mark.parametrize(("prompt", "answer"), [([], [1]), ([1], [])])
def test_nothing_asked_or_answered(prompt, answer):
    with pytest.raises(ValueError, match="give at least 1 each"):
        needle.ask(Counts(), prompt, answer, None)


@pytest.mark.parametrize(
    ("answer", "chunk", "message"),
    [([2048], 4, "token id 2,048 has no column"), ([-1], 4, "token id -1"), ([1], 0, "chunk is 0")],
)
def test_what_cannot_be_passed_is_refused_before_any_pass(model, answer, chunk, message):
    cache = kv.ContiguousCache.for_model(model, 64)
    with pytest.raises(ValueError, match=message):
        needle.ask(model, np.arange(9), answer, cache, chunk)
    assert cache.seq_len == 0
