"""README, CONTRIBUTING, glossary and cards: links resolve, tables agree with the pages, terms in order."""

import re

import nbformat
import pytest

from kvcourse import paths

ROOT = paths.repository_dir()
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "chapters/GLOSSARY.md",
    "data/models/austen-gpt2/README.md",
    "data/models/austen-gpt2-draft/README.md",
)


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def links(name):
    """Targets of the document's relative links and images, without anchors."""
    found = re.findall(r"\]\(([^)\s]+)\)", text(name))
    return [target.partition("#")[0] for target in found if not target.startswith(("https://", "#"))]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_resolve(name):
    missing = [target for target in links(name) if not (ROOT / name).parent.joinpath(target).exists()]
    assert missing == []


def notebooks():
    chapters = paths.chapters_dir()
    found = (path.relative_to(ROOT).as_posix() for path in chapters.rglob("*.ipynb"))
    return sorted(name for name in found if ".ipynb_checkpoints" not in name)


def test_the_readme_lists_every_page_with_its_minutes():
    rows = {}
    for line in text("README.md").splitlines():
        if match := re.match(r"\|.*\]\((chapters/[^)]+\.ipynb)\).*\| (\d+) \|$", line):
            rows[match[1]] = int(match[2])
    minutes = {}
    for name in notebooks():
        minutes[name] = int(re.search(r"(\d+) minutes", nbformat.read(ROOT / name, 4).cells[0].source)[1])
    assert rows == minutes


def test_exactly_two_commands_stand_out():
    """Whatever else can be typed lies in a fold or in a later section."""
    section = text("README.md").partition("## Two commands")[2].partition("##")[0]
    block = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    assert [[line.split("#")[0].strip() for line in code.splitlines()] for code in block] == [
        ["make lab", "make test"]
    ]


def test_the_readme_s_picture_is_small_and_described():
    (described, picture), *others = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text("README.md"))
    assert not others
    assert len(described) > 40
    assert (ROOT / picture).stat().st_size < 200_000


def terms():
    """[(term, owning page)] in the glossary's order."""
    lines = [line for line in text("chapters/GLOSSARY.md").splitlines() if line.startswith("- ")]
    return [re.fullmatch(r"- \*\*(.+?)\*\*: .+\. \[\w+\]\((\S+\.ipynb)\)", line).groups() for line in lines]


def test_glossary_is_alphabetical_and_defines_each_term_once():
    names = [term.casefold() for term, _ in terms()]
    assert names == sorted(set(names))


def test_the_page_that_owns_a_term_uses_it():
    for term, page in terms():
        cells = nbformat.read(paths.chapters_dir() / page, 4).cells
        prose = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
        assert re.sub(r"\s+", " ", term).casefold() in re.sub(r"\s+", " ", prose).casefold(), term
