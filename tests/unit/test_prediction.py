"""The prediction box, the reader's guess and the line that reveals the answer."""

import json
import math

import ipywidgets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourse import progress
from kvcourse.widgets import Prediction, predict, reveal
from kvcourse.widgets.prediction import compare, parse_number, say


@pytest.fixture(autouse=True)
def record(tmp_path, monkeypatch):
    file = tmp_path / "progress.json"
    monkeypatch.setenv("KVCOURSE_PROGRESS", str(file))
    return file


@pytest.mark.parametrize(
    ("typed", "number"),
    [
        ("300", 300),
        (" 1,000 ", 1000),
        ("1 000", 1000),
        ("2.5", 2.5),
        ("1e3", 1000),
        ("40x", 40),
        ("40 %", 40),
        ("-3", -3),
        (".5", 0.5),
        ("12 ms", 12),
        ("7 tokens", 7),
        ("1,234,567.5", 1234567.5),
        ("12\u202f000 tokens", 12000),
        ("1_000", 1000),
        ("10k", 10_000),
        ("2.5 M", 2_500_000),
        ("3 million tokens", 3_000_000),
        ("\N{MINUS SIGN}5", -5),
        ("~40", 40),
        ("≈ 40 %", 40),
    ],
)
def test_what_people_type_for_a_number(typed, number):
    assert parse_number(typed) == number
    assert isinstance(parse_number(typed), type(number))


@pytest.mark.parametrize("typed", ["many", "1..5", "12-15", "1/2", "ten 10", "nan", "inf", "x2", "", "1½"])
def test_what_is_not_a_number(typed):
    with pytest.raises(ValueError, match="is not a number: type digits, for example"):
        parse_number(typed)


# What one reader means by these is not what another one reads; each was once recorded as some number.
@pytest.mark.parametrize(
    "typed", ["1,5", "1.000,5", "1.234,567", "5 4", "1,0000", "1000,000", "1,00,000", "5,"]
)
def test_separators_stand_between_groups_of_three(typed):
    with pytest.raises(ValueError, match="is not a number: type digits, for example 2.5 or 1000"):
        parse_number(typed)


@pytest.mark.parametrize("typed", ["9" * 400, "1e308 k", "x" * 400])
def test_a_long_entry_is_not_repeated_whole(typed):
    with pytest.raises(ValueError, match="is not a number") as caught:
        parse_number(typed)
    assert len(str(caught.value)) < 120


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_printed_float_is_read_back(number):
    assert math.isclose(parse_number(repr(number)), number, rel_tol=1e-15, abs_tol=0)


@given(st.integers(-(2**52), 2**52))
def test_every_shown_integer_is_read_back(number):
    assert parse_number(say(number)) == number


def test_a_number_is_recorded_and_restored(record):
    box = Prediction("01.steps", "How many?", unit="steps")
    assert box.answer is None and box.note == ""
    box.box.value = "1,000 steps"
    assert box.answer == 1000 and box.note == "Recorded: 1,000"
    assert json.loads(record.read_text())["predictions"] == {"01.steps": 1000}
    again = Prediction("01.steps", "How many?", unit="steps")
    assert again.box.value == "1000" and again.note == "Your earlier guess."


def test_a_wrong_entry_keeps_the_earlier_guess():
    box = Prediction("01.steps", "How many?")
    box.box.value = "12"
    box.box.value = "a dozen"
    assert box.answer == 12
    assert box.note == (
        "'a dozen' is not a number: type digits, for example 2.5 or 1000; your earlier guess, 12, stays"
    )
    box.box.value = ""
    box.box.value = "1,5"
    assert box.answer is None
    assert box.note == "'1,5' is not a number: type digits, for example 2.5 or 1000"


def test_an_emptied_box_takes_the_guess_back():
    box = Prediction("01.steps", "How many?")
    box.box.value = "12"
    box.box.value = "  "
    assert box.answer is None and box.note == "No guess."


def test_a_choice_starts_empty_and_is_recorded():
    box = Prediction("01.why", "Why?", kind="choice", options=["the mask", "the positions"])
    assert box.box.value is None and isinstance(box.box, ipywidgets.RadioButtons)
    box.box.value = "the mask"
    assert progress.prediction("01.why") == "the mask"
    again = Prediction("01.why", "Why?", kind="choice", options=["the mask", "the positions"])
    assert again.box.value == "the mask"


def test_an_option_that_is_gone_is_not_restored():
    progress.record_prediction("01.why", "an old option")
    box = Prediction("01.why", "Why?", kind="choice", options=["a", "b"])
    assert box.box.value is None and box.note == ""


def test_text_is_recorded():
    box = Prediction("01.word", "Which?", kind="text")
    box.box.value = " quadratic "
    assert box.answer == "quadratic"


def test_the_label_carries_the_unit_and_the_box_the_question():
    box = Prediction("01.steps", "How many steps?", unit="steps").box
    assert box.description == "Your guess (steps):"
    assert box.tooltip == "How many steps?"
    assert box.style.description_width == "initial"


def test_repr_is_fixed_whatever_was_typed():
    box = Prediction("01.steps", "How many?")
    box.box.value = "3"
    assert repr(box) == "<Prediction: 01.steps>" == box._repr_mimebundle_()["text/plain"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key": "01.a", "kind": "letter"}, "kind='letter' is not one of number, choice, text"),
        ({"key": "01.a", "kind": "choice"}, r"'01.a' is a choice without options: pass options="),
        ({"key": "steps"}, "'steps' names no chapter: write it like '01.crossover'"),
    ],
)
def test_an_author_is_told_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        Prediction(question="?", **arguments)


def test_predict_shows_the_box(capsys):
    predict("01.steps", "How many?")
    assert "<Prediction: 01.steps>" in capsys.readouterr().out


def test_unwritable_progress_is_said_beside_the_box(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCOURSE_PROGRESS", str(tmp_path / "file" / "progress.json"))
    box = Prediction("01.steps", "How many?")
    box.box.value = "5"
    assert box.note.startswith("Recorded: 5 Your progress cannot be saved in ")
    assert compare(progress.prediction("01.steps"), 5) == "Your guess: 5. Answer: 5: exactly right."


@pytest.mark.parametrize(
    ("guess", "answer", "line"),
    [
        (None, 300, "Your guess: no guess. Answer: 300 ms."),
        ("", 300, "Your guess: no guess. Answer: 300 ms."),
        (300, 300, "Your guess: 300 ms. Answer: 300 ms: exactly right."),
        (270, 300, "Your guess: 270 ms. Answer: 300 ms: 10 % too low."),
        (301, 300.4, "Your guess: 301 ms. Answer: 300 ms: less than 1 % too high."),
        (3000, 300, "Your guess: 3,000 ms. Answer: 300 ms: 10 times too high."),
        (2, 96.4, "Your guess: 2 ms. Answer: 96.4 ms: 48 times too low."),
        (0, 5, "Your guess: 0 ms. Answer: 5 ms: off by 5."),
        (-1, 5, "Your guess: -1 ms. Answer: 5 ms: off by 6."),
        (5, 0, "Your guess: 5 ms. Answer: 0 ms: off by 5."),
        (-4, -5, "Your guess: -4 ms. Answer: -5 ms: 20 % too low."),
        (1e-320, 1e308, "Your guess: 1e-320 ms. Answer: 1e+308 ms: off by 1e+308."),
        (1e308, 1e-320, "Your guess: 1e+308 ms. Answer: 1e-320 ms: off by 1e+308."),
        (1e-200, 2e-200, "Your guess: 1e-200 ms. Answer: 2e-200 ms: 2 times too low."),
        (10**309, math.inf, f"Your guess: {10**309:,}. Answer: inf ms: not what you said."),
        ("many", 300, "Your guess: many. Answer: 300 ms: not what you said."),
    ],
)
def test_compare_numbers(guess, answer, line):
    assert compare(guess, answer, "ms") == line


def test_compare_words():
    assert compare("the Mask", "the mask") == "Your guess: the Mask. Answer: the mask: as you said."
    assert compare("a", "b") == "Your guess: a. Answer: b: not what you said."


def test_numpy_answers_read_like_python_ones():
    assert compare(None, np.float32(2.5)) == compare(None, 2.5)
    assert compare(None, np.int64(2000)) == "Your guess: no guess. Answer: 2,000."


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567, "1,234,567"), (0.0, "0"), (2.0, "2"), (1234.5, "1,234"), (0.01234, "0.0123"), (1e-7, "1e-07")],
)
def test_numbers_in_prose(value, text):
    assert say(value) == text


def test_reveal_prints_one_line_and_never_stops(capsys):
    reveal("01.never_asked", 12, "tokens")
    assert capsys.readouterr().out == "Your guess: no guess. Answer: 12 tokens.\n"
