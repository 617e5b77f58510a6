"""What a notebook of the course must be. Each rule returns its complaints, one line each.

A rule takes a `Page` (path and notebook as a dict); `complaints(page)` runs them all.
"""

import ast
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CHAPTERS = REPOSITORY / "chapters"

# claims.md of the course's design: which chapter shows which claim.
CLAIMS = {
    "01": ["C01", "C02", "C03", "C04"],
    "02": ["C05", "C06", "C07", "C08", "C09"],
    "03": ["C10", "C11", "C12"],
    "04": ["C14", "C15", "C16"],
    "05": ["C18", "C19", "C20", "C21"],
    "07": ["C13", "C17", "C22", "C23"],
    "08": ["C24", "C25", "C26", "C27", "C28", "C30", "C31", "C32", "C33", "C35"],
    "09": ["C36", "C37", "C38", "C39", "C40"],
    "10": ["C41", "C44"],
    "11": ["C42", "C43", "C45"],
    "12": ["C46"],
    "13": ["C34", "C47"],
    "14": ["C28", "C29", "C48"],
    "15": ["C49", "C50"],
    "16": ["C51", "C52", "C53", "C54"],
    "17": ["C55"],
    "18": ["C32", "C56", "C57", "C58", "C59", "C60", "C63"],
    "19": ["C61", "C62"],
}

# Tags of the markdown cells that open a section: (tag, least, most).
SECTIONS = {
    "chapter": [
        ("title", 1, 1), ("objectives", 1, 1), ("round", 3, 5), ("main-widget", 1, 1), ("exercise", 1, 2),
        ("break-it", 1, 1), ("recap", 1, 1), ("changes", 1, 1), ("questions", 1, 1), ("engines", 1, 1),
    ],
    "primer": [
        ("title", 1, 1), ("skip-if", 1, 1), ("objectives", 1, 1), ("round", 3, 5), ("main-widget", 1, 1),
        ("exercise", 1, 2), ("break-it", 1, 1), ("recap", 1, 1), ("questions", 1, 1),
    ],
    "start": [
        ("title", 1, 1), ("widget", 1, 1), ("prediction", 1, 1), ("exercise", 1, 1), ("map", 1, 1),
        ("progress", 1, 1),
    ],
}  # fmt: skip
# Sections that come one after the other; those not named here may stand anywhere in between.
ORDER = {
    "chapter": ["title", "objectives", "round", "recap", "changes", "questions", "engines"],
    "primer": ["title", "skip-if", "objectives", "round", "recap", "questions"],
    "start": ["title", "progress"],
}
CELLS = {"chapter": (30, 60), "primer": (12, 60), "start": (12, 60)}
MAX_LINES = 25
MAX_OUTPUT_BYTES = 300_000
COMPARED_SHARE = 0.6


@dataclass(frozen=True)
class Page:
    path: Path
    notebook: dict

    @cached_property
    def kind(self):
        if self.path.parent.name == "primers":
            return "primer"
        return "start" if self.path.stem.startswith("00_") else "chapter"

    @property
    def cells(self):
        return self.notebook["cells"]

    @property
    def code(self):
        return [cell for cell in self.cells if cell["cell_type"] == "code"]

    @property
    def markdown(self):
        return [cell for cell in self.cells if cell["cell_type"] == "markdown"]


def source(cell):
    return "".join(cell["source"])


def tags(cell):
    return cell["metadata"].get("tags", [])


def first_line(cell):
    return source(cell).strip().split("\n")[0][:60]


def load(path):
    return Page(path, json.loads(path.read_text(encoding="utf-8")))


def all_pages():
    paths = (p for p in CHAPTERS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    return [load(path) for path in sorted(paths)]


def complaints(page):
    """All that is wrong with a page, as lines "rule: what"."""
    return [f"{rule.__name__}: {line}" for rule in RULES for line in rule(page)]


def sections(page):
    counts = {}
    for cell in page.markdown:
        for tag in tags(cell):
            counts[tag] = counts.get(tag, 0) + 1
    for tag, least, most in SECTIONS[page.kind]:
        if not least <= counts.get(tag, 0) <= most:
            yield f"{counts.get(tag, 0)} sections tagged {tag!r}, expected {least} to {most}"


def order(page):
    known = ORDER[page.kind]
    met = [tag for cell in page.markdown for tag in tags(cell) if tag in known]
    if met != sorted(met, key=known.index):
        yield f"sections come as {', '.join(met)}"
    optional = {tag for tag, _, _ in SECTIONS[page.kind]} - set(known)
    seen_round = page.kind == "start"
    for cell in page.markdown:
        seen_round |= "round" in tags(cell)
        for tag in set(tags(cell)) & optional:
            if not seen_round:
                yield f"section {tag!r} stands before the first round"


def size(page):
    least, most = CELLS[page.kind]
    if not least <= len(page.cells) <= most:
        yield f"{len(page.cells)} cells, expected {least} to {most}"
    for cell in page.code:
        lines = len(source(cell).splitlines())
        if lines > MAX_LINES and "shows-source" not in tags(cell):
            yield f"{lines} lines in a code cell (at most {MAX_LINES}): {first_line(cell)}"


def imports(page):
    importing = []
    for cell in page.code:
        nodes = ast.walk(ast.parse(source(cell)))
        if any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes):
            importing.append(cell)
    if len(importing) != 1 or "imports" not in tags(importing[0]):
        yield f"{len(importing)} cells import something: exactly one should, tagged 'imports'"


def no_set_up(page):
    for cell in page.code:
        found = re.search(r"\bpip\b|sys\.path|os\.chdir|^\s*[!%]", source(cell), re.MULTILINE)
        if found:
            yield f"{found.group()!r} in a cell: {first_line(cell)}"


def executed(page):
    counts = [cell["execution_count"] for cell in page.code]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}: run `make chapters`"


def no_widget_state(page):
    if "widgets" in page.notebook["metadata"]:
        yield "metadata.widgets is stored"
    for cell in page.code:
        for output in cell["outputs"]:
            if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
                yield f"a widget view is stored: {first_line(cell)}"


def compared(page):
    ignored = [cell for cell in page.code if "nbval-ignore-output" in tags(cell)]
    share = 1 - len(ignored) / max(len(page.code), 1)
    if share < COMPARED_SHARE:
        yield f"{share:.0%} of the code cells are compared, expected at least {COMPARED_SHARE:.0%}"
    for cell in page.code:
        if "nbval-ignore-output" in tags(cell) and "timing" not in tags(cell):
            yield f"ignored, but not tagged 'timing': {first_line(cell)}"
        other = {t for t in tags(cell) if t.startswith("nbval-")} - {"nbval-ignore-output"}
        marker = re.search(r"^\s*#\s*(NBVAL_\w+|PYTEST_VALIDATE_\w+)", source(cell), re.MULTILINE)
        if other or marker:
            yield f"not compared by other means ({sorted(other) or marker.group()}): {first_line(cell)}"


def outputs_small_and_clean(page):
    size = len(json.dumps([cell["outputs"] for cell in page.code]))
    if size > MAX_OUTPUT_BYTES:
        yield f"{size:,} bytes of outputs, at most {MAX_OUTPUT_BYTES:,}"
    for cell in page.code:
        for output in cell["outputs"]:
            if output["output_type"] == "error" or output.get("name") == "stderr":
                yield f"an error or stderr is stored: {first_line(cell)}"
            text = json.dumps(output)
            found = re.search(r"/home/|/root/|/Users/|/tmp/|[A-Z]:\\\\\\\\|0x[0-9a-f]{6,}|Warning", text)
            if found:
                yield f"{found.group()!r} in an output: {first_line(cell)}"


def kernel(page):
    name = page.notebook["metadata"].get("kernelspec", {}).get("name")
    if name != "python3":
        yield f"kernel is {name!r}, expected 'python3'"


def folded_answers(page):
    for cell in page.markdown:
        for tag in {"skip-if", "questions"} & set(tags(cell)):
            answers = source(cell).count("<details>")
            if answers != 5 or source(cell).count("</details>") != 5:
                yield f"{answers} folded answers in {tag!r}, expected 5"


def objectives(page):
    for cell in page.markdown:
        if "objectives" in tags(cell):
            listed = len(re.findall(r"^\s*(?:[-*]|\d+\.) ", source(cell), re.MULTILINE))
            if not 3 <= listed <= 5:
                yield f"{listed} objectives listed, expected 3 to 5"


def called_with(page, function):
    """First arguments of every call kv.<function>("…") in the notebook."""
    found = []
    for cell in page.code:
        for node in ast.walk(ast.parse(source(cell))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr == function and node.args and isinstance(node.args[0], ast.Constant):
                    found.append(node.args[0].value)
    return found


def predictions(page):
    asked, revealed = called_with(page, "predict"), called_with(page, "reveal")
    for key in sorted(set(asked) ^ set(revealed)):
        yield f"{key!r} is {'never revealed' if key in asked else 'revealed but never asked'}"
    for key in {key for key in asked if asked.count(key) > 1}:
        yield f"{key!r} is asked twice"
    rounds = sum("round" in tags(cell) for cell in page.markdown)
    if len(set(asked)) < rounds:
        yield f"{len(set(asked))} predictions for {rounds} rounds"


def claims(page):
    shown = set()
    for cell in page.cells:
        for tag in tags(cell):
            if not tag.startswith("claim-"):
                continue
            shown.add(tag.removeprefix("claim-"))
            if cell["cell_type"] != "code" or not cell["outputs"] or not cell["execution_count"]:
                yield f"{tag} stands on a cell that shows nothing: {first_line(cell)}"
    if page.kind == "chapter":
        for claim in CLAIMS.get(page.path.stem[:2], []):
            if claim not in shown:
                yield f"{claim} is not shown"


def headings(page):
    level = 0
    for cell in page.markdown:
        text = re.sub(r"```.*?```", "", source(cell), flags=re.DOTALL)
        for mark in re.findall(r"^(#+) ", text, re.MULTILINE):
            if len(mark) > level + 1:
                yield f"a heading of level {len(mark)} follows level {level}: {first_line(cell)}"
            level = len(mark)


def links(page):
    for cell in page.markdown:
        text = re.sub(r"```.*?```|`[^`]*`", "", source(cell), flags=re.DOTALL)
        for image, alt, target in re.findall(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", text):
            if image and not alt.strip():
                yield f"image {target} has no alt text"
            if not re.match(r"https?:|#", target):
                if not (page.path.parent / target.split("#")[0]).exists():
                    yield f"link to {target} leads nowhere"


def greedy_texts(page):
    listed = page.notebook["metadata"].get("kvcourse", {}).get("greedy", [])
    tagged = sum("greedy" in tags(cell) for cell in page.code)
    if bool(listed) != bool(tagged):
        yield f"{tagged} cells tagged 'greedy', {len(listed)} greedy texts listed in metadata.kvcourse.greedy"
    for entry in listed:
        if set(entry) != {"model", "prompt", "max_new_tokens"}:
            yield f"a greedy text needs model, prompt and max_new_tokens, found {sorted(entry)}"
    for cell in page.code:
        writes = "generate(" in source(cell) and "sampler=" not in source(cell)
        shown = "nbval-ignore-output" not in tags(cell) and cell["outputs"]
        if writes and shown and "greedy" not in tags(cell):
            yield f"shows greedy text and is not tagged 'greedy': {first_line(cell)}"


RULES = [
    sections, order, size, imports, no_set_up, executed, no_widget_state, compared,
    outputs_small_and_clean, kernel, folded_answers, objectives, predictions, claims, headings, links,
    greedy_texts,
]  # fmt: skip
