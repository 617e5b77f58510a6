"""Every notebook keeps the rules of rules.py, and every rule can be broken."""

import re

import pytest
import rules

from kvcourse import checks

PAGES = rules.all_pages()
NAMES = [page.path.stem for page in PAGES]


def test_there_are_notebooks():
    assert {"00_start_here", "01_the_waste", "a_tokens_attention_logits"} <= set(NAMES)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_notebook_keeps_every_rule(page):
    assert rules.complaints(page) == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_check_exists(page):
    for name in rules.called_with(page, "check"):
        assert checks.find(name).name == name


# --- the rules themselves -------------------------------------------------------------


def markdown(text, *tags):
    return {"cell_type": "markdown", "metadata": {"tags": list(tags)}, "source": text}


def code(text, *tags, outputs=()):
    return {
        "cell_type": "code",
        "metadata": {"tags": list(tags)},
        "source": text,
        "outputs": list(outputs),
        "execution_count": None,
    }


def shown(text):
    return {"output_type": "stream", "name": "stdout", "text": text}


def display(text, mime="text/plain"):
    return {"output_type": "display_data", "data": {mime: text}}


def good_cells():
    """The cells of a chapter that breaks no rule."""
    five = "\n".join(["<details><summary>Why?</summary>Because.</details>"] * 5)
    cells = [
        markdown("# 99 · A chapter\n**60 minutes.** You need: nothing.", "title"),
        markdown("## Objectives\n- one\n- two\n- three", "objectives"),
        code("import kvcourse as kv", "imports"),
    ]
    for number in range(3):
        cells += [
            markdown(f"## Round {number}", "round"),
            code(f'kv.predict("99.k{number}", "How many?")', outputs=[display("<Prediction: 99.k>")]),
            code(f'kv.reveal("99.k{number}", {number})', outputs=[shown("Answer: 1.")]),
        ]
    cells += [
        markdown("## Panel", "main-widget"),
        code("panel", outputs=[display("<Panel: rows>")]),
        code("print(panel.set(rows=2))", outputs=[shown("Two rows.")]),
        markdown("## Exercise", "exercise"),
        code('kv.check("99.rows", rows)', outputs=[shown("not done yet")]),
        markdown("## Break it", "break-it"),
        code('kv.predict("99.broken", "What will it do?")', outputs=[display("<Prediction: 99.broken>")]),
        code('kv.reveal("99.broken", "stop")', outputs=[shown("Answer: stop.")]),
        markdown("## Recap\n| a | b |\n|---|---|\n| 1 | 2 |", "recap"),
        markdown("## Changes", "changes"),
        markdown("Nothing."),
    ]
    cells += [markdown("## Questions\n" + five, "questions"), markdown("## Engines", "engines")]
    cells += [code("print(2)", outputs=[shown("2")]) for _ in range(5)]
    return cells


def page_of(cells, path="chapters/99_made_up.ipynb", **metadata):
    cells = [{"id": f"c{number}"} | cell for number, cell in enumerate(cells)]
    code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(code_cells, 1):
        cell["execution_count"] = number
    metadata = {"kernelspec": {"name": "python3"}} | metadata
    return rules.Page(rules.REPOSITORY / path, {"cells": cells, "metadata": metadata})


def test_the_made_up_chapter_is_good():
    assert rules.complaints(page_of(good_cells())) == []


def without(tag):
    return lambda cells: [cell for cell in cells if tag not in cell["metadata"]["tags"]]


def plus(*cells):
    return lambda old: [*old, *cells]


def swapped(first, second):
    def swap(cells):
        places = {tag: i for i, cell in enumerate(cells) for tag in cell["metadata"]["tags"]}
        cells[places[first]], cells[places[second]] = cells[places[second]], cells[places[first]]
        return cells

    return swap


IGNORED = "nbval-ignore-output"
PANEL = code("panel", outputs=[display("<Panel: rows>")])
BROKEN = [
    (rules.sections, without("recap"), "0 sections tagged 'recap'"),
    (rules.sections, without("round"), "0 sections tagged 'round'"),
    (rules.order, swapped("changes", "questions"), "sections come as"),
    (rules.order, swapped("title", "exercise"), "'exercise' stands before the first 'round'"),
    (rules.order, swapped("recap", "break-it"), "'break-it' stands behind 'recap'"),
    (rules.size, lambda cells: cells[:20], "20 cells, expected 30 to 60"),
    (rules.size, plus(code("x = 1\n" * 26)), "26 lines in a code cell"),
    (rules.imports, plus(code("from os import path")), "2 cells import something"),
    (rules.no_set_up, plus(code("!pip install torch")), "!"),
    (rules.no_set_up, plus(code("sys.path.append('..')")), "sys.path"),
    (rules.compared, plus(code("1", "nbval-skip")), "nbval-skip"),
    (rules.compared, plus(code("1", "raises-exception")), "raises-exception"),
    (rules.compared, plus(*[code("x = 1")] * 12), "are compared, expected at least 60%"),
    (rules.compared, plus(code("## NBVAL_SKIP\n1")), "NBVAL_SKIP"),
    (rules.compared, plus(code("# NBVAL_IGNORE_OUTPUT\n1")), "NBVAL_IGNORE_OUTPUT"),
    (rules.compared, plus(code("1", IGNORED)), "not tagged rounding or timing"),
    (rules.compared, plus(code("1", "timing", outputs=[shown("1")])), "or the reverse"),
    (rules.compared, plus(*[code("1", IGNORED, "timing")] * 12), "are compared, expected at least 60%"),
    (rules.outputs_small_and_clean, plus(code("1", outputs=[shown("x" * 300_000)])), "bytes of outputs"),
    (rules.outputs_small_and_clean, plus(code("1", outputs=[shown("/home/me/x")])), "'/home/'"),
    (rules.outputs_small_and_clean, plus(code("1", outputs=[shown("at 0x7f3a2b1c")])), "0x7f3a2b1c"),
    (rules.outputs_small_and_clean, plus(code("1", outputs=[shown("C:\\Users\\me")])), "'C:"),
    (
        rules.outputs_small_and_clean,
        plus(code("1", outputs=[shown(f"in {rules.REPOSITORY}")])),
        "in an output",
    ),
    (rules.outputs_small_and_clean, plus(code("1", outputs=[shown("UserWarning: old")])), "'Warning'"),
    (rules.outputs_small_and_clean, plus(code("1", outputs=[display("FigureWidget({}")])), "'FigureWidget('"),
    (
        rules.outputs_small_and_clean,
        plus(code("1", outputs=[display({"y": {"bdata": "AA=="}}, "application/vnd.plotly.v1+json")])),
        "bdata",
    ),
    (
        rules.outputs_small_and_clean,
        plus(code("1", outputs=[{"output_type": "error", "ename": "E", "evalue": "", "traceback": []}])),
        "an error or stderr is stored",
    ),
    (
        rules.outputs_small_and_clean,
        plus(code("1", outputs=[{"output_type": "stream", "name": "stderr", "text": "oh"}])),
        "stderr",
    ),
    (
        rules.no_widget_state,
        plus(code("1", outputs=[display({"model_id": "a"}, "application/vnd.jupyter.widget-view+json")])),
        "a widget view is stored",
    ),
    (rules.folded_answers, plus(markdown("<details>one</details>", "questions")), "1 folded answers"),
    (rules.objectives, plus(markdown("- only one", "objectives")), "1 objectives listed"),
    (rules.predictions, plus(code('kv.predict("99.new", "?")')), "'99.new' is never revealed"),
    (rules.predictions, plus(code('kv.reveal("99.new", 1)')), "revealed but never asked"),
    (rules.predictions, plus(code('kv.predict("99.k0", "?")')), "'99.k0' is asked twice"),
    (rules.predictions, plus(code('kv.reveal("99.k0", 1)')), "'99.k0' is revealed twice"),
    (
        rules.predictions,
        plus(code('kv.reveal("99.new", 1)'), code('kv.predict("99.new", "?")')),
        "'99.new' is revealed before the reader could answer",
    ),
    (rules.predictions, plus(code('marks = w.mark_cells("99.m", "?")')), "1 grids of cells to mark, 0 later"),
    (
        rules.predictions,
        plus(code("marks.against(x)"), code('marks = w.mark_cells("99.m", "?")')),
        "1 grids of cells to mark, 1 later",
    ),
    (rules.predictions, plus(code('kv.predict(f"99.{x}", "?")')), "write the key of predict() out"),
    (
        rules.contents,
        plus(markdown("## Fourth", "round")),
        "predict() is not called under '## Fourth' (round)",
    ),
    (
        rules.contents,
        plus(markdown("## Fourth", "round"), code('predict("99.x", "?")'), markdown("## B", "break-it")),
        "reveal() is not called under '## Fourth' (round)",
    ),
    (
        rules.contents,
        plus(markdown("## Bug", "break-it")),
        "predict() is not called under '## Bug' (break-it)",
    ),
    (rules.contents, plus(markdown("## Task", "exercise")), "check() is not called under '## Task'"),
    (rules.contents, plus(markdown("## P", "main-widget")), "set() is not called under '## P' (main-widget)"),
    (rules.contents, plus(markdown("## In words", "recap")), "under '## In words' (recap)"),
    (rules.contents, plus(markdown("# 98 · No minutes", "title")), "minutes"),
    (rules.panels_are_moved, plus(PANEL), "no compared cell sets a control of the panel in: panel"),
    (
        rules.panels_are_moved,
        plus(PANEL, code("print(panel.set(rows=1))", IGNORED, "timing", outputs=[shown("1")])),
        "no compared cell sets a control",
    ),
    (rules.cell_ids, plus({"id": "c0"} | markdown("Twice.")), "two with the same one"),
    (rules.cell_ids, plus({"id": None} | markdown("None.")), "cells without an id"),
    (rules.claims, plus(markdown("So it is.", "claim-C01")), "shows nothing"),
    (rules.claims, plus(code("x = 1", "claim-C01")), "shows nothing"),
    (rules.claims, plus(code("1", "claim-C99", outputs=[shown("1")])), "claim-C99 is no claim of the list"),
    (rules.headings, plus(markdown("#### Deep")), "level 4 follows level"),
    (rules.headings, plus(markdown("# Another title")), "2 headings of level 1"),
    (rules.links, plus(markdown("[there](nowhere.ipynb)")), "nowhere.ipynb leads nowhere"),
    (rules.links, plus(markdown("![](99.png)")), "image 99.png has no alt text"),
    (rules.links, plus(markdown('<img src="99.png" alt="">')), "an <img> has no alt text"),
    *(
        (rules.greedy_texts, plus(*cells), "not tagged 'greedy'")
        for cells in (
            [code("print(kv.generate(m, i))", outputs=[shown("a")])],
            [code("print(kv.generate(m, i, sampler=kv.greedy))", outputs=[shown("a")])],
            [code("while True:\n    ids.append(np.argmax(m(ids)[-1]))", outputs=[shown("a")])],
            [
                code("def write(m, i):\n    for _ in i:\n        i += [kv.greedy(m(i)[-1])]"),
                code("def twice(m, i):\n    write(m, i)\n    write(m, i)"),
                code("print(twice(m, i))", outputs=[shown("a")]),
            ],
        )
    ),
    (rules.greedy_texts, plus(code("1", "greedy", outputs=[shown("a")])), "0 greedy texts listed"),
]


@pytest.mark.parametrize(
    "rule, change, words", BROKEN, ids=[f"{rule.__name__}: {w}" for rule, _, w in BROKEN]
)
def test_a_broken_rule_is_seen(rule, change, words):
    found = list(rule(page_of(change(good_cells()))))
    assert any(re.search(re.escape(words), line) for line in found), found


def test_rules_about_the_whole_file():
    unexecuted = page_of(good_cells())
    unexecuted.code[3]["execution_count"] = None
    assert list(rules.executed(unexecuted))
    assert list(rules.no_widget_state(page_of(good_cells(), widgets={"state": {}})))
    assert list(rules.kernel(page_of(good_cells(), kernelspec={"name": "conda-env"})))


def greedy_page(entry):
    cells = [*good_cells(), code('print(kv.generate(m, "It is"))', "greedy", outputs=[shown("a")])]
    return page_of(cells, kvcourse={"greedy": [entry]})


def test_listed_greedy_texts_are_those_of_the_page():
    entry = {"model": "austen-gpt2", "prompt": "It is", "max_new_tokens": 5}
    assert list(rules.greedy_texts(greedy_page(entry))) == []
    assert "no cell holds" in next(rules.greedy_texts(greedy_page(entry | {"prompt": "It was"})))
    assert "needs model" in next(rules.greedy_texts(greedy_page({"model": "austen-gpt2", "prompt": "It is"})))


def test_what_is_no_greedy_text():
    for text in (
        "print(kv.generate(m, i, sampler=kv.sampled(seed=1)))",
        "print(np.argmax(m(i)[-1]))",
        "for step in range(3):\n    print(step)",
    ):
        assert list(rules.greedy_texts(page_of([*good_cells(), code(text, outputs=[shown("a")])]))) == []


def test_a_chapter_is_held_to_its_claims():
    missing = list(rules.claims(page_of(good_cells(), "chapters/03_masks.ipynb")))
    assert missing == ["C10 is not shown", "C11 is not shown", "C12 is not shown"]


def test_every_rule_is_broken_somewhere():
    seen = {rule for rule, _, _ in BROKEN} | {rules.executed, rules.kernel}
    assert seen == set(rules.RULES)
