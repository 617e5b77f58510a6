"""Every exercise: the solution passes, the stub is "not done", typical mistakes are named."""

import ast
import importlib.util

import numpy as np
import pytest
import rules
import wrong_answers

import kvcourse as kv
from kvcourse import checks

PAGES = rules.all_pages()
EXERCISES = [(page, name) for page in PAGES for name in dict.fromkeys(rules.called_with(page, "check"))]
NAMES = [name for _, name in EXERCISES]


def function_of(page, check_name):
    """The name of the function a notebook hands to kv.check(check_name, …)."""
    for cell in page.code:
        for node in ast.walk(ast.parse(rules.source(cell))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "check":
                if node.args[0].value == check_name:
                    return node.args[1].id
    raise AssertionError(f"{page.path.name} has no kv.check({check_name!r}, …)")


def stub(page, function):
    """The reader's function as it stands in the notebook, unfilled."""
    found = None
    for cell in page.code:
        for node in ast.parse(rules.source(cell)).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                found = node
    namespace = {"np": np, "kv": kv}
    exec(compile(ast.Module([found], []), page.path.name, "exec"), namespace)
    return namespace[function]


def solution(page, function):
    path = rules.CHAPTERS / "solutions" / f"{page.path.stem}.py"
    spec = importlib.util.spec_from_file_location(f"solution_{page.path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def test_every_notebook_has_an_exercise():
    assert {page.path.stem for page, _ in EXERCISES} == {page.path.stem for page in PAGES}


def test_nothing_is_left_over():
    """A check, a solution file or wrong answers whose page no longer asks for them would test nothing."""
    written = set()
    for path in sorted((rules.REPOSITORY / "kvcourse" / "checks").glob("chapter_*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        written |= {call.args[0].value for call in calls if rules.called_name(call) == "exercise"}
    solutions = {path.stem for path in (rules.CHAPTERS / "solutions").glob("*.py")}
    assert written == set(NAMES)
    assert set(wrong_answers.WRONG) == set(NAMES)
    assert solutions == {page.path.stem for page, _ in EXERCISES}


@pytest.mark.parametrize("page, name", EXERCISES, ids=NAMES)
def test_the_solution_is_right(page, name):
    verdict = checks.verdict(name, solution(page, function_of(page, name)))
    assert verdict.status == "right", verdict


@pytest.mark.parametrize("page, name", EXERCISES, ids=NAMES)
def test_the_stub_is_not_done(page, name):
    verdict = checks.verdict(name, stub(page, function_of(page, name)))
    assert verdict.status == "not done", verdict


@pytest.mark.parametrize("name", NAMES)
def test_typical_mistakes_are_named(name):
    mistakes = wrong_answers.WRONG[name]
    assert len(mistakes) >= 2
    messages = []
    for function, words in mistakes:
        verdict = checks.verdict(name, function)
        assert verdict.status == "wrong" and words in verdict.message, verdict
        assert "\n" not in verdict.message
        messages.append(verdict.message)
    assert len(set(messages)) == len(messages), "two mistakes get the same message"
