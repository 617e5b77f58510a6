"""Chapter 06: the kit's panel, its sentence, and the checks that name the mistake."""

import importlib.util
import json
import time

import pytest

import kvcourse as kv
from kvcourse import checks, diagnosis, paths
from kvcourse.figures import chapter_06 as figures
from kvcourse.figures import template
from kvcourse.widgets import chapter_06 as widgets

PAGE = paths.chapters_dir() / "06_break_the_cache.ipynb"

# Three rows and the right one, two probes: X and Y differ in "two" only, Z is like the right cache in "one".
SMALL = {
    "X": {"one": "wrong", "two": "same"},
    "Y": {"one": "wrong", "two": "NaN 1"},
    "Z": {"one": "same", "two": "close"},
    "right": {"one": "same", "two": "same"},
}
COSTS = {"one": 10, "two": 7}


@pytest.fixture(scope="module")
def table():
    return diagnosis.symptoms(kv.load_model("austen-gpt2"))


@pytest.fixture(scope="module")
def solution():
    path = paths.chapters_dir() / "solutions" / "06_break_the_cache.py"
    spec = importlib.util.spec_from_file_location("solution_06", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the panel ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chosen, cost, confused",
    [([], 0, 6), (["one"], 10, 2), (["two"], 7, 1), (["two", "one"], 17, 0)],
)
def test_confused_pairs_by_hand(chosen, cost, confused):
    data = figures.kit(SMALL, COSTS, "X", chosen)
    assert (data["cost"], data["confused"], data["pairs"]) == (cost, confused, 6)
    assert data["alike"]["X"] == [other for other in SMALL if other != "X" and _alike("X", other, chosen)]


def _alike(one, other, chosen):
    return all(SMALL[one][name] == SMALL[other][name] for name in chosen)


def test_the_sentence_says_cost_pairs_and_outcomes():
    assert figures.kit_text(figures.kit(SMALL, COSTS, "Z", ["one"])) == (
        "Probes one, cost 10 positions: 2 of 6 pairs still confused, such as X and Y. Z: one: same."
    )
    assert figures.kit_text(figures.kit(SMALL, COSTS, "right", ["two"])) == (
        "Probes two, cost 7 positions: 1 of 6 pairs still confused, such as X and the right cache. "
        "The right cache: two: same."
    )
    assert "all 6 pairs told apart" in figures.kit_text(figures.kit(SMALL, COSTS, "X", ["one", "two"]))
    assert (
        figures.kit_text(figures.kit(SMALL, COSTS, "X", [])) == "No probe chosen: all 6 pairs are confused."
    )


def test_an_outcome_that_was_not_paid_for_is_not_drawn():
    drawn = figures.kit_figure(figures.kit(SMALL, COSTS, "Y", ["one"]))
    map_, words, marks, names = drawn.data
    assert [list(row) for row in map_.z] == [[2, None], [2, None], [0, None], [0, None]]
    assert list(words.text) == ["wrong", "·", "wrong", "·", "same", "·", "same", "·"]
    assert list(marks.text) == ["Y", "X", "right", "Z"]
    assert list(names.text) == list(SMALL)
    frame = drawn.layout.shapes[0]  # around the whole row, its name and those it is confused with
    assert frame.y0 < names.y[1] == words.y[2] == marks.y[1] < frame.y1
    assert frame.x0 < min(names.x) and frame.x1 > max(marks.x)
    assert drawn.layout.height <= template.MAX_HEIGHT


def test_an_error_has_another_sign_than_a_wrong_answer():
    table = {"X": {"one": "wrong"}, "right": {"one": "error"}}
    words = figures.kit_figure(figures.kit(table, {"one": 10}, "X", ["one"])).data[1]
    assert list(words.text) == ["wrong", "× error"]
    assert list(words.customdata) == ["X, one: wrong", "right, one: error"]


def test_the_table_of_words():
    assert figures.outcomes(SMALL, ["one", "two"]).split("\n") == [
        "       one         two",
        "X      wrong       same",
        "Y      wrong       NaN 1",
        "Z      same        close",
        "right  same        same",
    ]


def test_every_outcome_has_its_strength(table):
    harmless = {"same", "clean"}
    for row in table.values():
        for outcome in row.values():
            assert (figures.strength(outcome) == 0) == (outcome in harmless)
    assert figures.strength("close") == 1 and figures.strength("layer 0") == 2


def test_the_panel_at_its_extremes_and_quickly(table):
    costs = {name: probe.cost for name, probe in diagnosis.PROBES.items()}
    panel = widgets.kit_panel(table, costs)
    boxes = {widgets.control(name): name for name in costs}
    assert list(panel.controls) == ["letter", *boxes]
    assert panel.data["chosen"] == ["prefill"]  # nothing is given away at first
    times, last = [], panel.text
    for letter in [*diagnosis.LETTERS[1:], "right"]:
        start = time.process_time()  # of this process alone: others may be busy
        text = panel.set(letter=letter)
        times.append(time.process_time() - start)
        assert text != last and "does not work" not in text
        last = text
    assert min(times) < 0.1  # the course's limit for a repaint
    assert "No probe chosen: all 78 pairs" in panel.set(**dict.fromkeys(boxes, False))
    assert "cost 335 positions: all 78 pairs told apart" in panel.set(**dict.fromkeys(boxes, True))
    one = dict.fromkeys(boxes, False) | {"dye_reset": True}
    assert panel.set(letter="C", **one).endswith("C: dye + reset: NaN 2.")


# --- the exercises --------------------------------------------------------------------------


def test_the_solutions_pass(solution, table):
    for name in ("cheapest_probes", "diagnose"):
        assert checks.verdict(f"06.{name}", getattr(solution, name)).status == checks.RIGHT
    assert sorted(solution.cheapest_by_trying(table)) == sorted(solution.cheapest_probes())
    assert diagnosis.named_rightly(solution.diagnose()).endswith("12 of 12 letters named rightly")


def test_the_solution_of_break_it_raises_where_the_program_was_silent(solution):
    changed = solution.with_a_check(diagnosis.source())
    assert changed != diagnosis.source()
    namespace = {}
    exec(changed, namespace)
    model = kv.load_model("austen-gpt2-draft")
    cache = namespace["Cache"](model.config, 4)
    namespace["gpt2"]([1, 2, 3, 4], model.params, model.config, cache)
    with pytest.raises(ValueError, match="5 tokens do not fit into 4 rows"):
        namespace["gpt2"]([5], model.params, model.config, cache)


def test_a_wrong_name_is_answered_with_a_probe_that_tells_the_two_apart(solution, table):
    names = solution.diagnose()
    for letter in diagnosis.LETTERS:
        for other in diagnosis.LETTERS:
            if other != letter:
                verdict = checks.verdict("06.diagnose", lambda x=letter, y=other: names | {x: names[y]})
                assert verdict.status == checks.WRONG and verdict.message.startswith(f"{letter} is not")
                probe, claimed, seen = verdict.message.split("'")[3:8:2]
                assert (table[letter][probe], table[other][probe]) == (seen, claimed) and seen != claimed
                assert names[letter] not in verdict.message  # the right name is not given away


def test_an_unfinished_dict_that_is_right_so_far_is_not_called_wrong(solution):
    two = dict(list(solution.diagnose().items())[:2])
    said = checks.verdict("06.diagnose", lambda: two)
    assert said.status == checks.NOT_DONE
    assert str(said) == (
        "not done yet: right so far, 2 of 12 letters. No name yet for C, D, E, F, G, H, I, J, K, L"
    )
    assert checks.verdict("06.diagnose", lambda: two | {"C": two["A"]}).status == checks.WRONG


def test_the_check_never_names_a_cheaper_set():
    every = checks.verdict("06.cheapest_probes", lambda: list(diagnosis.PROBES))
    assert every.status == checks.WRONG and "72" not in every.message
    assert every.message == "they are all told apart, for 335 positions. A cheaper set does it too"


@pytest.mark.parametrize("name", ["06.cheapest_probes", "06.diagnose"])
def test_a_stub_is_not_done(name):
    assert checks.verdict(name, lambda: ...).status == checks.NOT_DONE


# --- the page -------------------------------------------------------------------------------


def test_the_page_does_not_give_the_letters_away():
    """No text, code or output of the committed page connects the letters of the exercise with their names."""
    page = json.loads(PAGE.read_text(encoding="utf-8"))
    text = "\n".join("".join(cell["source"]) for cell in page["cells"])
    assert "0 of 12 letters named rightly" in json.dumps(page)
    for letter in diagnosis.LETTERS:
        bug = diagnosis.bug_of(letter)
        assert f"{letter}: {bug.name}" not in text and f"{letter}, {bug.name}" not in text
        if bug.name != "truncate keeps one":  # built in round 4, without its letter
            assert bug.new.strip() not in text


def test_the_pages_texts_are_the_kits():
    tok = kv.load_tokenizer("austen-gpt2")
    source = "".join("".join(cell["source"]) for cell in json.loads(PAGE.read_text("utf-8"))["cells"])
    for ids in (diagnosis.TEXT, diagnosis.OTHER):
        assert f'tok.encode("{tok.decode(ids)}")' in source
        assert tok.encode(tok.decode(ids)) == ids
