"""Chapter 06's patients and probes: every bug is one line, every two are told apart, at the stated price."""

import ast
import difflib
import inspect
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import diagnosis
from kvcourse.diagnosis import bugs, probes, specimen

# Two programs, one model: logits differ by the order of sums, about 1e-5; a wrong one differs by 1 and more.
TOLERANCE = 2e-4
MARGIN = 5  # between a measured difference and the nearest limit of an outcome, so that no processor moves it
CHEAPEST = {"prefill", "truncate", "layers", "dye + reset"}


@pytest.fixture(scope="module")
def table(model):
    return diagnosis.symptoms(model)


# --- the specimen -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["austen-gpt2", "austen-gpt2-draft"])
def test_the_specimen_is_the_packages_model_and_cache(name):
    model = kv.load_model(name)
    mine = specimen.Cache(model.config, 30)
    package = kv.ContiguousCache.for_model(model, 30)
    ids = np.random.default_rng(6).integers(0, model.config.vocab_size, 60).tolist()

    def passed(tokens):
        got = specimen.gpt2(tokens, model.params, model.config, mine)
        expected = model(tokens, package)
        assert got.dtype == np.float32 and np.abs(got - expected).max() < TOLERANCE
        assert mine.seq_len == package.seq_len

    for length in (3, 2, 5, 1, 1):
        passed([ids.pop() for _ in range(length)])
    for back in (7, 7, 2):
        for cache in (mine, package):
            cache.truncate(back)
        passed([ids.pop() for _ in range(3)])
    for cache in (mine, package):
        cache.reset()
    passed([ids.pop() for _ in range(30)])  # to the last row
    for layer in range(model.config.num_layers):
        for got, expected in zip((mine.k, mine.v), package.keys_values(layer), strict=True):
            assert np.abs(got[layer] - expected).max() < TOLERANCE


def test_the_text_that_is_changed_is_the_module_that_is_imported():
    assert diagnosis.source() == inspect.getsource(specimen)
    assert "def gpt2" in diagnosis.source() and callable(diagnosis.faulty("right").gpt2)


def test_a_full_specimen_loses_a_row_without_a_word_and_three_with_an_error(model):
    """The page's "break it". The check of its last cell is a line of its own in with_line."""
    session = diagnosis.Session(model, specimen)
    session.passed(probes.TEXT[:1] * diagnosis.MAX_TOKENS)
    before = session.cache.k.copy()
    session.passed(probes.TEXT[:1])
    assert np.array_equal(before, session.cache.k)
    with pytest.raises(ValueError):
        session.passed(probes.TEXT[:3])


# --- the bugs -----------------------------------------------------------------------------


@pytest.mark.parametrize("letter", diagnosis.LETTERS)
def test_a_bug_is_one_line_that_stands_once_where_it_says(letter):
    bug, before = diagnosis.bug_of(letter), diagnosis.source().split("\n")
    assert before.count(bug.old) == 1 and "\n" not in bug.old + bug.new
    after = [bug.new if line == bug.old else line for line in before]
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert changed == [f"- {bug.old}", f"+ {bug.new}"]
    assert max(len(bug.new), len(bug.old)) <= 110
    where = _function_of_line(before.index(bug.old) + 1)
    assert bug.where == where


def _function_of_line(number):
    tree = ast.parse(diagnosis.source())
    for node in tree.body:
        inner = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
        for function in inner:
            if isinstance(function, ast.FunctionDef) and function.lineno <= number <= function.end_lineno:
                return function.name if function is node else f"{node.name}.{function.name}"
    raise AssertionError(number)


def test_names_and_letters():
    names = [bug.name for bug in bugs.BUGS.values()]
    assert len(set(names)) == len(names) == len(diagnosis.SUSPECTS) >= 8
    assert "".join(diagnosis.LETTERS) == "ABCDEFGHIJKL"
    # The list of suspects, and the order of the lines in the program, do not give the letters away.
    lines = diagnosis.source().split("\n")
    by_letter = [lines.index(diagnosis.bug_of(letter).old) for letter in diagnosis.LETTERS]
    for order in (names, by_letter):
        in_place = sum(one == other for one, other in zip(order, sorted(order, key=_key), strict=True))
        assert in_place <= 3


def _key(value):
    return value.lower() if isinstance(value, str) else value


@pytest.mark.parametrize("letter", diagnosis.LETTERS)
def test_a_bug_changes_what_the_program_does(letter, table):
    assert table[letter] != table["right"]


def test_a_letter_or_a_line_that_there_is_not():
    with pytest.raises(KeyError, match="no bug 'M': the letters are A … L"):
        diagnosis.faulty("M")
    with pytest.raises(ValueError, match="has 0 lines 'self.seq_len = 1'"):
        diagnosis.with_line("        self.seq_len = 1", "")
    with pytest.raises(ValueError, match="with its indentation"):
        diagnosis.with_line("self.seq_len = 0", "")


def test_only_letters_that_are_named_rightly_are_shown():
    assert diagnosis.named_rightly(None) == diagnosis.named_rightly({}) == "0 of 12 letters named rightly"
    said = diagnosis.named_rightly({"B": "float16 rows", "A": "float16 rows"})
    assert said.split("\n") == [
        "B, float16 rows, in Cache.__init__",
        "- dtype = np.float32",
        "+ dtype = np.float16",
        "1 of 12 letters named rightly",
    ]


@pytest.mark.parametrize("letter", diagnosis.LETTERS)
def test_a_diff_shows_two_different_lines(letter):
    where, old, new = diagnosis.diff(letter).split("\n")
    assert old[2:] != new[2:] and (old[:2], new[:2]) == ("- ", "+ ")
    assert not (old[2:].startswith(" ") and new[2:].startswith(" "))


def test_a_diff_keeps_an_indentation_that_is_the_bug():
    assert diagnosis.diff("F").split("\n")[1:] == [
        "- cache.seq_len += len(ids)",
        "+     cache.seq_len += len(ids)",
    ]


def test_a_reset_that_keeps_the_count_leaves_the_rows_too(model):
    """Question 1 of the page: the first text goes on counting, so its words can come back."""
    session = diagnosis.Session(model, diagnosis.faulty("C"))
    session.passed(probes.TEXT[:8])
    before = session.cache.k.copy()
    session.cache.reset()
    assert np.array_equal(session.cache.k, before) and session.cache.seq_len == 8
    got = session.passed(probes.OTHER)
    assert np.abs(got - model(probes.TEXT[:8] + probes.OTHER)[8:]).max() < TOLERANCE


# --- the probes ---------------------------------------------------------------------------


def test_every_two_bugs_are_told_apart_and_each_from_the_right_cache(table):
    for one, other in combinations(table, 2):
        assert table[one] != table[other], (one, other)
    assert diagnosis.confused(table, list(diagnosis.PROBES)) == []


def test_the_reference_set_is_the_only_cheapest_one(table):
    """By trying all 1,024 sets, with the price summed here."""
    working = {}
    for size in range(len(diagnosis.PROBES) + 1):
        for chosen in combinations(diagnosis.PROBES, size):
            rows = {tuple(row[name] for name in chosen) for row in table.values()}
            if len(rows) == len(table):
                price = sum(
                    diagnosis.PROBES[p].under_test + diagnosis.PROBES[p].without_cache for p in chosen
                )
                working[frozenset(chosen)] = price
    lowest = min(working.values())
    assert [chosen for chosen, price in working.items() if price == lowest] == [CHEAPEST]
    assert lowest == diagnosis.cost(CHEAPEST) == 16 + 16 + 24 + 16
    assert len(CHEAPEST) >= 3
    assert frozenset.intersection(*working) == {"layers"}  # the hint: the only one that no set can leave out


def test_taking_the_best_next_probe_is_not_enough(table):
    """The hint of exercise 1: most pairs per position, one after the other, ends above the lowest price."""
    chosen = []
    while left := len(diagnosis.confused(table, chosen)):
        gain = {
            name: (left - len(diagnosis.confused(table, [*chosen, name]))) / probe.cost
            for name, probe in diagnosis.PROBES.items()
            if name not in chosen
        }
        chosen.append(max(gain, key=gain.get))
    assert diagnosis.cost(chosen) > diagnosis.cost(CHEAPEST)


@pytest.mark.parametrize("name", diagnosis.PROBES)
def test_a_cost_is_the_positions_that_are_passed(name, model):
    passed = {"cached": 0, "uncached": 0}

    class Counting:
        config, params = model.config, model.params

        def __call__(self, ids, cache=None):
            passed["uncached"] += len(ids)
            return model(ids, cache)

    def gpt2(ids, *rest):
        passed["cached"] += len(ids)
        return specimen.gpt2(ids, *rest)

    said = diagnosis.outcome(Counting(), SimpleNamespace(Cache=specimen.Cache, gpt2=gpt2), name)
    assert said in ("same", "clean")
    probe = diagnosis.PROBES[name]
    assert passed == {"cached": probe.under_test, "uncached": probe.without_cache}
    assert probe.cost == sum(passed.values())


def test_a_new_cache_for_each_probe_and_a_known_name(model):
    with pytest.raises(KeyError, match="no probe 'dy': the kit has prefill, step"):
        diagnosis.outcome(model, specimen, "dy")
    for _ in range(2):
        assert diagnosis.outcome(model, specimen, "dye + reset") == "clean"


def test_no_rounding_moves_an_outcome(model, monkeypatch):
    """Every difference behind an outcome is at least MARGIN times away from each limit."""
    sizes = []

    def recorded(got, expected):
        sizes.append(float(np.abs(got - expected).max()))
        return word(got, expected)

    word = probes.compared
    monkeypatch.setattr(probes, "compared", recorded)
    again = diagnosis.symptoms(model)
    assert len(sizes) > 100
    for size in sizes:
        for limit in (probes.SAME, probes.CLOSE):
            assert not limit / MARGIN < size < limit * MARGIN, size
    assert {row["prefill"] for row in again.values()} == {"same", "close", "wrong", "error"}


def test_compared_at_its_limits():
    zero = np.zeros(3, np.float32)
    for size, word in ((0, "same"), (9e-5, "same"), (2e-4, "close"), (0.04, "close"), (0.06, "wrong")):
        assert diagnosis.compared(zero + np.float32(size), zero) == word
    assert diagnosis.compared(np.array([0, np.nan], np.float32), zero[:2]) == "NaN"


def test_texts_do_not_hang_on_a_near_tie(model):
    """The two best logits are 1e-3 apart or more, 100 times a cached-uncached difference, in each step up to
    the first token that differs from the right text, and one beyond."""
    expected = diagnosis.written_without_cache(model)
    assert list(expected) == kv.generate(model, probes.TEXT[:8], max_new_tokens=12, use_cache=False)
    for letter in [*diagnosis.LETTERS, "right"]:
        session, unread, ids = diagnosis.Session(model, diagnosis.faulty(letter)), probes.TEXT[:8], []
        if letter == "F":  # an error in its first pass
            continue
        for _ in expected:
            logits = session.passed(unread)[-1]
            best = np.sort(logits)[-2:]
            rounding = 1.3e-3 if letter == "B" else 1e-5  # what float16 rows change; the order of sums
            assert best[1] - best[0] > 10 * rounding and best[1] - best[0] > 1e-3, (letter, len(ids))
            unread = [int(logits.argmax())]
            ids += unread
        assert tuple(ids) == diagnosis.written(model, diagnosis.faulty(letter))


def test_the_texts_are_the_sentences_they_are_said_to_be():
    tok = kv.load_tokenizer("austen-gpt2")
    assert tok.decode(probes.TEXT) == "Elizabeth opened the letter, and read it through with"
    assert tok.decode(probes.TEXT[:8]) == "Elizabeth opened the letter, and"
    assert tok.decode(probes.OTHER) == "The carriage was at the door, and"


def test_the_dye_finds_unwritten_rows_and_only_those(table):
    """Predicted from the lines, not read from the table: a pass that reads a row before or past its own."""
    reads_unwritten = {"read before written", "one row too many"}
    dyed = {letter for letter in diagnosis.LETTERS if table[letter]["dye"].startswith("NaN")}
    assert {diagnosis.bug_of(letter).name for letter in dyed} == reads_unwritten
    again = {letter for letter in diagnosis.LETTERS if table[letter]["dye + truncate"] == "NaN 2"}
    assert {diagnosis.bug_of(letter).name for letter in again} == {"truncate keeps one"}
    again = {letter for letter in diagnosis.LETTERS if table[letter]["dye + reset"] == "NaN 2"}
    assert {diagnosis.bug_of(letter).name for letter in again} == {"reset keeps the count"}


@pytest.mark.parametrize("bad, said", [(0, "layer 1"), (3, "layer 4"), (5, "same")])
def test_attention_of_one_layer_shows_in_the_rows_of_the_next(model, bad, said):
    """Round 3 of the page: after the last layer no row is stored."""
    line = "    out = attend(q, keys, values, cache.seq_len)  # (heads, T, head_dim)"
    start = f"0 if layer == {bad} else cache.seq_len"
    program = diagnosis.with_line(line, line.replace("cache.seq_len", start))
    assert diagnosis.outcome(model, program, "layers") == said
    assert diagnosis.outcome(model, program, "step") == "wrong"


def test_count_per_layer_is_silent_where_there_is_room(model):
    """Question 4 of the page."""
    program = diagnosis.faulty("F")
    cache = program.Cache(model.config, 1024)
    logits = program.gpt2(probes.TEXT[:8], model.params, model.config, cache)
    assert cache.seq_len == 6 * 8 and diagnosis.compared(logits, model(probes.TEXT[:8])) == "wrong"


def test_a_probe_that_there_is_not():
    with pytest.raises(KeyError, match="no probe 'x': the kit has prefill"):
        diagnosis.cost(["prefill", "x"])
    with pytest.raises(TypeError, match="give a list of names"):
        diagnosis.cost("prefill")
