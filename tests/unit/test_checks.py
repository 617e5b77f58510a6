"""Checks say what is wrong in one line, whatever the reader's function does, and never stop the notebook."""

import numpy as np
import pytest

# Registered before the registry is copied below.
import kvcourse.checks.chapter_00  # noqa: F401
import kvcourse.checks.chapter_01  # noqa: F401
import kvcourse.checks.chapter_a  # noqa: F401
from kvcourse import checks, progress
from kvcourse.checks import Run, Verdict, check, exercise, find, short, verdict
from kvcourse.config import lookup

# The registry is the package's; these names belong to a chapter that does not exist.
NAME = "test.largest"


@pytest.fixture(autouse=True)
def record(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCOURSE_PROGRESS", str(tmp_path / "progress.json"))


@pytest.fixture(autouse=True)
def largest(monkeypatch):
    """An exercise on arrays: ``largest(values, axis=...)``."""
    monkeypatch.setattr(checks, "_EXERCISES", dict(checks._EXERCISES))

    @exercise(NAME, right="the largest value is found")
    def largest(run: Run):
        if run(np.array([[1.0, 3.0], [2.0, 0.0]]), axis=1)[0] != 3:
            return "axis 1 runs along a row"
        if run([1, 2, 3], axis=0) + 0 != 3:
            return "a list is a sequence of numbers too"
        return None


def good(values, axis):
    return np.asarray(values).max(axis=axis)


def test_right():
    assert verdict(NAME, good) == Verdict("right", "the largest value is found")
    assert str(verdict(NAME, good)) == "right: the largest value is found"


def test_a_mistake_is_named():
    assert verdict(NAME, lambda values, axis: np.asarray(values).max(axis=0)) == Verdict(
        "wrong", "axis 1 runs along a row"
    )


def not_implemented(values, axis):
    raise NotImplementedError


@pytest.mark.parametrize(
    "stub", [None, ..., lambda values, axis: None, lambda values, axis: ..., not_implemented]
)
def test_an_unfilled_exercise_is_not_done(stub):
    outcome = verdict(NAME, stub)
    assert outcome.status == "not done"
    assert str(outcome).startswith("not done yet: ")


def raises(error):
    def function(values, axis):
        raise error

    return function


class Panic(BaseException):
    """Like the tokenizer's PanicException, which is no Exception."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (SystemExit(3), "SystemExit: 3"),
        (Panic("no such byte"), "Panic: no such byte"),
        (RuntimeError(), "RuntimeError: no message"),
    ],
)
def test_an_error_of_the_reader_is_one_line_with_the_input(error, said):
    outcome = verdict(NAME, raises(error))
    assert outcome.status == "wrong"
    # The mistake comes first, the input behind it.
    called = "called with an array of shape (2, 2), float64, axis=1"
    assert outcome.message == f"your function raised {said} ({called})"


def test_the_reader_can_still_interrupt():
    with pytest.raises(KeyboardInterrupt):
        verdict(NAME, raises(KeyboardInterrupt()))


def test_endless_recursion_is_an_error_like_any_other():
    def endless(values, axis):
        return endless(values, axis)

    assert "RecursionError" in verdict(NAME, endless).message


def test_wrong_arguments():
    assert "unexpected keyword argument 'axis'" in verdict(NAME, lambda values: values).message


def changes_array(values, axis):
    values = np.asarray(values)
    values.sort()
    return good(values, axis)


def changes_list(values, axis):
    result = good(values, axis)
    if isinstance(values, list):
        values.append(4)
    return result


@pytest.mark.parametrize("function", [changes_array, changes_list])
def test_a_changed_input_is_caught(function):
    outcome = verdict(NAME, function)
    assert outcome.status == "wrong"
    assert outcome.message.startswith("your function changed its input: work on a copy (called with ")


def test_a_missing_return_on_one_path():
    outcome = verdict(NAME, lambda values, axis: good(values, axis) if axis == 1 else None)
    assert outcome.message == (
        "your function returned None: is a `return` missing on one path? (called with [1, 2, 3], axis=0)"
    )


def test_a_value_the_check_cannot_use_is_shown():
    outcome = verdict(NAME, lambda values, axis: good(values, axis) if axis == 1 else "three")
    assert outcome.status == "wrong"
    assert "your function returned 'three' (str), which this check cannot use (TypeError" in outcome.message


@pytest.mark.parametrize("number", [np.float64(3), np.array(3.0), np.int64(3)])
def test_numpys_numbers_within_a_container_come_as_pythons(monkeypatch, number):
    seen = []
    monkeypatch.setattr(checks, "_EXERCISES", dict(checks._EXERCISES))

    @exercise("test.container", right="kept")
    def container(run: Run):
        seen.append(run())

    assert verdict("test.container", lambda: {"A": [(number, "words")]}).status == "right"
    assert seen == [{"A": [(3, "words")]}] and type(seen[0]["A"][0][0]) in (int, float)


def test_functions_and_models_are_called_by_their_names(monkeypatch):
    monkeypatch.setattr(checks, "_EXERCISES", dict(checks._EXERCISES))

    @exercise("test.called", right="kept")
    def called(run: Run):
        run(lookup("llama-3.1-8b"), good, [].append)

    message = verdict("test.called", lambda *given: 1 / 0).message
    assert message.endswith("division by zero (called with llama-3.1-8b, good, append)")


def test_a_called_function_is_not_a_function():
    assert verdict(NAME, 3) == Verdict("wrong", "give the function itself, without parentheses, not 3")


def generator():
    yield 1


class Unprintable:
    def __repr__(self):
        raise ValueError("no repr")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2300, "2,300"),
        (2.5, "2.5"),
        ("ten", "'ten' (str)"),
        (True, "True (bool)"),
        (np.zeros((2, 3)), "an array of shape (2, 3), float64"),
        ([np.zeros(2), np.ones(2)], "[array([0., 0.]), array([1., 1.])] (list)"),
        (generator(), "<generator object generator> (generator)"),
        (list(range(1000)), repr(list(range(1000)))[:60] + "… (list)"),
        (10**100, f"{10**100:,}"[:60] + "…"),
        # Python, and so pytest for the name of the case, refuses to print more than 4,300 digits.
        pytest.param(10**5000, "<no text: ValueError>", id="huge"),
        (Unprintable(), "<no text: ValueError> (Unprintable)"),
    ],
)
def test_a_value_in_a_message_is_short_and_the_same_in_every_run(value, text):
    assert short(value) == text


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


def test_the_error_of_the_reader_is_named_whatever_its_text():
    assert verdict(NAME, raises(Mute())).message.startswith(
        "your function raised Mute: <no text: ValueError>"
    )
    assert " 0x" not in verdict(NAME, raises(ValueError(object()))).message
    assert len(verdict(NAME, raises(ValueError("long" * 1000))).message) < 400


class Quits:
    def __eq__(self, other):
        raise SystemExit

    def __sub__(self, other):
        raise SystemExit

    __add__ = __getitem__ = __sub__


class QuitsAndIsUnprintable(Quits, Unprintable):
    pass


@pytest.mark.parametrize("value", [Quits(), QuitsAndIsUnprintable(), Unprintable()])
@pytest.mark.parametrize("name", [NAME, "00.total_tokens", "01.positions_processed", "a.one_head"])
def test_no_value_of_the_reader_stops_a_check(name, value):
    outcome = verdict(name, lambda *args, **kwargs: value)
    assert outcome.status == "wrong"
    assert " 0x" not in outcome.message and "\n" not in outcome.message


class AlwaysEqual:
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


@pytest.mark.parametrize("name", ["00.total_tokens", "01.positions_processed"])
def test_an_object_that_equals_everything_is_no_number(name):
    assert verdict(name, lambda *args: AlwaysEqual()).status == "wrong"


def test_a_numpy_scalar_gets_the_line_of_the_number():
    seen = []

    @exercise("test.scalar", right="yes")
    def scalar(run):
        seen.append(run())

    for value in (np.int64(3), np.float32(3), np.bool_(True), np.array(3)):
        verdict("test.scalar", lambda value=value: value)
    assert [type(value) for value in seen] == [int, float, bool, int]


def test_every_message_is_one_line():
    functions = [good, None, raises(ValueError("a\nb")), changes_list, lambda values, axis: "x\ny", 3]
    assert all("\n" not in str(verdict(NAME, function)) for function in functions)


def test_models_and_caches_are_handed_over_as_they_are(monkeypatch):
    class Model:
        pass

    model = Model()

    @exercise("test.model", right="yes")
    def uses_model(run):
        return None if run(model, [1]) is model else "another model"

    assert verdict("test.model", lambda model, ids: model).status == "right"


def test_nested_arrays_are_compared_too():
    @exercise("test.nested", right="yes")
    def nested(run):
        run({"k": [np.zeros(2)]}, (np.zeros(1),))

    def spoil(cache, rest):
        cache["k"][0][1] = 5
        return 1

    assert verdict("test.nested", spoil).status == "wrong"
    assert verdict("test.nested", lambda cache, rest: 1).status == "right"


def test_nan_in_an_input_is_not_a_change():
    @exercise("test.nan", right="yes")
    def with_nan(run):
        run(np.array([float("nan")]))

    assert verdict("test.nan", lambda values: 1).status == "right"


def test_check_prints_one_line_and_records_only_a_pass(capsys):
    check(NAME, None)
    check(NAME, lambda values, axis: np.asarray(values).max(axis=0))
    assert progress.passed() == {}
    check(NAME, good)
    assert list(progress.passed()) == [NAME]
    assert capsys.readouterr().out.splitlines() == [
        "not done yet: fill in the function above and run both cells again",
        "not right: axis 1 runs along a row",
        "right: the largest value is found",
    ]


def test_verdict_records_nothing():
    verdict(NAME, good)
    assert progress.passed() == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("total", "has no chapter"),
        ("00.no_such", "chapter 00 has: 00.total_tokens"),
        ("77.anything", "chapter 77 has: none"),
    ],
)
def test_an_unknown_check_names_what_there_is(name, message):
    with pytest.raises(KeyError, match=message):
        find(name)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="check 'test.largest' is registered twice"):

        @exercise(NAME, right="")
        def other(run):
            return None


class TestChapter00:
    def test_right(self):
        assert verdict("00.total_tokens", lambda prompt, new: prompt + new).status == "right"

    @pytest.mark.parametrize(
        ("function", "named"),
        [
            (lambda prompt, new: new, "only the new tokens"),
            (lambda prompt, new: prompt * new, "you multiply"),
            (lambda prompt, new: prompt + new - 1, "one off"),
            (lambda prompt, new: prompt + new + 1, "one off"),
            (lambda prompt, new: "ten", "expected 10, got 'ten' (str)"),
            (lambda prompt, new: prompt - new, "expected 10, got 2"),
            (lambda prompt, new: np.array([prompt + new]), "expected 10, got an array of shape (1,), int64"),
            (lambda prompt, new: np.int64(prompt + new + 5), "expected 10, got 15"),
        ],
    )
    def test_typical_mistakes(self, function, named):
        outcome = verdict("00.total_tokens", function)
        assert outcome.status == "wrong" and named in outcome.message


class TestChapter01:
    @pytest.mark.parametrize(
        ("function", "named"),
        [
            (lambda *_: np.int64(2300), "that is the length of the finished text"),
            (lambda *_: 2000**300, "expected 644,850, got 2,037,035,"),
            (
                lambda *_: generator(),
                "expected the number 644,850, got <generator object generator> (generator)",
            ),
            (lambda *_: list(range(1000)), "got [0, 1, 2, 3"),
            (lambda *_: True, "expected the number 644,850, got True (bool)"),
        ],
    )
    def test_the_line_is_short_and_names_the_value(self, function, named):
        outcome = verdict("01.positions_processed", function)
        assert outcome.status == "wrong" and named in outcome.message
        assert len(outcome.message) < 250


def test_an_error_in_the_head_is_named_before_its_four_inputs():
    outcome = verdict("a.one_head", lambda *given: given[0] @ given[0])
    assert outcome.message.startswith("your function raised ValueError: matmul")
