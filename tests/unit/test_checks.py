"""Checks say what is wrong in one line, whatever the reader's function does, and never stop the notebook."""

import numpy as np
import pytest

import kvcourse.checks.chapter_00  # noqa: F401 - registered before the registry is copied below
from kvcourse import checks, progress
from kvcourse.checks import Run, Verdict, check, exercise, find, verdict

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
    assert outcome.message == f"with an array of shape (2, 2), float64, axis=1 your function raised {said}"


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
    assert outcome.message.endswith("your function changed its input: work on a copy")


def test_a_missing_return_on_one_path():
    outcome = verdict(NAME, lambda values, axis: good(values, axis) if axis == 1 else None)
    assert outcome.message == (
        "with [1, 2, 3], axis=0 your function returned None: is a `return` missing on one path?"
    )


def test_a_value_the_check_cannot_use_is_shown():
    outcome = verdict(NAME, lambda values, axis: good(values, axis) if axis == 1 else "three")
    assert outcome.status == "wrong"
    assert "your function returned 'three' (str), which this check cannot use (TypeError" in outcome.message


def test_a_called_function_is_not_a_function():
    assert verdict(NAME, 3) == Verdict("wrong", "give the function itself, without parentheses, not 3 (int)")


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
            (lambda prompt, new: "ten", "expected 10, got 'ten'"),
        ],
    )
    def test_typical_mistakes(self, function, named):
        outcome = verdict("00.total_tokens", function)
        assert outcome.status == "wrong" and named in outcome.message
