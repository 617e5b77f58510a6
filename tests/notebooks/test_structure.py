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


def good_cells():
    """The cells of a chapter that breaks no rule."""
    five = "\n".join(["<details><summary>Why?</summary>Because.</details>"] * 5)
    cells = [
        markdown("# 99 · A chapter", "title"),
        markdown("## Objectives\n- one\n- two\n- three", "objectives"),
        code("import kvcourse as kv", "imports"),
    ]
    for number in range(3):
        cells += [
            markdown(f"## Round {number}", "round"),
            code(f'kv.predict("99.k{number}", "How many?")'),
            code(f'kv.reveal("99.k{number}", {number})', outputs=[shown("Answer: 1.")]),
        ]
    for tag in ("main-widget", "exercise", "break-it", "recap", "changes"):
        cells.append(markdown(f"## {tag}", tag))
        cells += [code("1 + 1"), markdown("It is two.")]
    cells += [markdown("## Questions\n" + five, "questions"), markdown("## Engines", "engines")]
    cells += [code("print(2)", outputs=[shown("2")]) for _ in range(3)]
    return cells


def page_of(cells, path="chapters/99_made_up.ipynb", **metadata):
    cells = [dict(cell) for cell in cells]
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
BROKEN = [
    (rules.sections, without("recap"), "0 sections tagged 'recap'"),
    (rules.sections, without("round"), "0 sections tagged 'round'"),
    (rules.order, swapped("changes", "questions"), "sections come as"),
    (rules.order, swapped("title", "exercise"), "'exercise' stands before the first round"),
    (rules.size, lambda cells: cells[:20], "20 cells, expected 30 to 60"),
    (rules.size, plus(code("x = 1\n" * 26)), "26 lines in a code cell"),
    (rules.imports, plus(code("from os import path")), "2 cells import something"),
    (rules.no_set_up, plus(code("!pip install torch")), "!"),
    (rules.no_set_up, plus(code("sys.path.append('..')")), "sys.path"),
    (rules.compared, plus(code("1", "nbval-skip")), "nbval-skip"),
    (rules.compared, plus(code("# NBVAL_IGNORE_OUTPUT\n1")), "NBVAL_IGNORE_OUTPUT"),
    (rules.compared, plus(code("1", IGNORED)), "not tagged 'timing'"),
    (rules.compared, plus(*[code("1", IGNORED, "timing")] * 12), "are compared, expected at least 60%"),
    (rules.outputs_small_and_clean, plus(code("1", outputs=[shown("x" * 300_000)])), "bytes of outputs"),
    (rules.outputs_small_and_clean, plus(code("1", outputs=[shown("/home/me/x")])), "'/home/'"),
    (rules.outputs_small_and_clean, plus(code("1", outputs=[shown("at 0x7f3a2b1c")])), "0x7f3a2b1c"),
    (
        rules.outputs_small_and_clean,
        plus(code("1", outputs=[{"output_type": "stream", "name": "stderr", "text": "oh"}])),
        "stderr",
    ),
    (
        rules.no_widget_state,
        plus(
            code(
                "1",
                outputs=[
                    {
                        "output_type": "display_data",
                        "data": {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}},
                    }
                ],
            )
        ),
        "a widget view is stored",
    ),
    (rules.folded_answers, plus(markdown("<details>one</details>", "questions")), "1 folded answers"),
    (rules.objectives, plus(markdown("- only one", "objectives")), "1 objectives listed"),
    (rules.predictions, plus(code('kv.predict("99.new", "?")')), "'99.new' is never revealed"),
    (rules.predictions, plus(code('kv.reveal("99.new", 1)')), "revealed but never asked"),
    (rules.predictions, plus(code('kv.predict("99.k0", "?")')), "'99.k0' is asked twice"),
    (rules.predictions, plus(markdown("## Round", "round")), "3 predictions for 4 rounds"),
    (rules.claims, plus(markdown("So it is.", "claim-C01")), "shows nothing"),
    (rules.claims, plus(code("x = 1", "claim-C01")), "shows nothing"),
    (rules.headings, plus(markdown("#### Deep")), "level 4 follows level"),
    (rules.links, plus(markdown("[there](nowhere.ipynb)")), "nowhere.ipynb leads nowhere"),
    (rules.links, plus(markdown("![](99.png)")), "no alt text"),
    (rules.greedy_texts, plus(code("print(kv.generate(m, i))", outputs=[shown("a")])), "not tagged 'greedy'"),
    (rules.greedy_texts, plus(code("1", "greedy", outputs=[shown("a")])), "0 greedy texts listed"),
]


@pytest.mark.parametrize("rule, change, words", BROKEN, ids=[words for _, _, words in BROKEN])
def test_a_broken_rule_is_seen(rule, change, words):
    found = list(rule(page_of(change(good_cells()))))
    assert any(re.search(re.escape(words), line) for line in found), found


def test_rules_about_the_whole_file():
    unexecuted = page_of(good_cells())
    unexecuted.code[3]["execution_count"] = None
    assert list(rules.executed(unexecuted))
    assert list(rules.no_widget_state(page_of(good_cells(), widgets={"state": {}})))
    assert list(rules.kernel(page_of(good_cells(), kernelspec={"name": "conda-env"})))
    entry = {"model": "austen-gpt2", "prompt": "a"}
    assert list(rules.greedy_texts(page_of(good_cells(), kvcourse={"greedy": [entry]})))


def test_a_chapter_is_held_to_its_claims():
    missing = list(rules.claims(page_of(good_cells(), "chapters/03_masks.ipynb")))
    assert missing == ["C10 is not shown", "C11 is not shown", "C12 is not shown"]


def test_every_rule_is_broken_somewhere():
    seen = {rule for rule, _, _ in BROKEN} | {rules.executed, rules.kernel}
    assert seen == set(rules.RULES)
