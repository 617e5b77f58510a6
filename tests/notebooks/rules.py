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
# The sections that ORDER does not name stand between the first of these and the second.
BETWEEN = {"chapter": ("round", "recap"), "primer": ("round", "recap"), "start": ("title", "progress")}
# What a section must hold: functions that its code calls, and patterns of its Markdown.
CALLS = {
    "round": ("predict", "reveal"), "prediction": ("predict", "reveal"), "break-it": ("predict", "reveal"),
    "exercise": ("check",), "main-widget": ("set",), "widget": ("set",),
}  # fmt: skip
WORDS = {
    "title": (r"\b\d+ minutes\b", r"You need"),
    "recap": (r"^\|[-| :]+\|$",),  # the line under the head of a table
}
CELLS = {"chapter": (30, 60), "primer": (12, 60), "start": (12, 60)}
MAX_LINES = 25
# Absolute paths, addresses, warnings; a figure's random id; arrays stored as raw bits.
NOT_IN_OUTPUTS = re.compile(
    r"/(?:home|root|Users|tmp|usr|var|opt|mnt|srv|private)/|\b[A-Z]:\\\w|0x[0-9a-f]{6,}|Warning\b"
    rf"|FigureWidget\(|\"bdata\"|{re.escape(str(REPOSITORY))}"
)
MAX_OUTPUT_BYTES = 300_000
COMPARED_SHARE = 0.6
# Why an output may differ from run to run: a clock or a memory gauge, or the last digits of rounded sums.
NOT_COMPARED = {"timing", "rounding"}


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


def calls(cell, function):
    """Every call of kv.<function>(…), <function>(…) or panel.<function>(…) in a code cell."""
    if cell["cell_type"] != "code":
        return []
    found = [node for node in ast.walk(ast.parse(source(cell))) if isinstance(node, ast.Call)]
    return [call for call in found if called_name(call) == function]


def called_name(call):
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def named_in(cell, function):
    """The constant first arguments of these calls: keys of predictions, names of checks."""
    arguments = [call.args[0] for call in calls(cell, function) if call.args]
    return [argument.value for argument in arguments if isinstance(argument, ast.Constant)]


def is_compared(cell):
    return "nbval-ignore-output" not in tags(cell)


def is_panel(cell):
    """A code cell whose output is a panel."""
    shown = [output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", [])]
    return any("".join(text).startswith("<Panel: ") for text in shown)


def split(page, tag):
    """The cells of each section with this tag, up to the Markdown cell that opens the next section."""
    names, found, inside = {name for name, _, _ in SECTIONS[page.kind]}, [], False
    for cell in page.cells:
        opened = names & set(tags(cell)) if cell["cell_type"] == "markdown" else set()
        if opened:
            inside = tag in opened
            found += [[]] if inside else []
        if inside:
            found[-1].append(cell)
    return found


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
    known, names = ORDER[page.kind], {name for name, _, _ in SECTIONS[page.kind]}
    met = [tag for cell in page.markdown for tag in tags(cell) if tag in names]
    fixed = [tag for tag in met if tag in known]
    if fixed != sorted(fixed, key=known.index):
        yield f"sections come as {', '.join(fixed)}"
    opening, closing = BETWEEN[page.kind]
    for place, tag in enumerate(met):
        if tag not in known and opening not in met[:place]:
            yield f"section {tag!r} stands before the first {opening!r}"
        if tag not in known and closing in met[:place]:
            yield f"section {tag!r} stands behind {closing!r}"


def contents(page):
    for tag, functions in CALLS.items():
        for cells in split(page, tag):
            for function in functions:
                if not any(calls(cell, function) for cell in cells):
                    yield f"{function}() is not called under {first_line(cells[0])!r} ({tag})"
    for tag, patterns in WORDS.items():
        for cells in split(page, tag):
            text = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")
            for pattern in patterns:
                if not re.search(pattern, text, re.MULTILINE):
                    yield f"nothing matches {pattern!r} under {first_line(cells[0])!r} ({tag})"


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


def cell_ids(page):
    """An id a cell keeps diffs small, and nbformat 4.5 wants them unique."""
    ids = [cell.get("id") for cell in page.cells]
    if None in ids or len(set(ids)) < len(ids):
        yield "cells without an id, or two with the same one: run `make chapters`"


def panels_are_moved(page):
    """A panel's first picture is not compared; what it says after a control was set is."""
    places = [place for place, cell in enumerate(page.cells) if is_panel(cell)] + [len(page.cells)]
    for place, following in zip(places, places[1:], strict=False):
        between = page.cells[place + 1 : following]
        if not any(calls(cell, "set") and is_compared(cell) and cell["outputs"] for cell in between):
            yield f"no compared cell sets a control of the panel in: {first_line(page.cells[place])}"


def no_widget_state(page):
    if "widgets" in page.notebook["metadata"]:
        yield "metadata.widgets is stored"
    for cell in page.code:
        for output in cell["outputs"]:
            if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
                yield f"a widget view is stored: {first_line(cell)}"


def compared(page):
    # A cell without outputs would be compared with nothing, so it does not count.
    counted = [cell for cell in page.code if is_compared(cell) and cell["outputs"]]
    share = len(counted) / max(len(page.code), 1)
    if share < COMPARED_SHARE:
        yield f"{share:.0%} of the code cells are compared, expected at least {COMPARED_SHARE:.0%}"
    for cell in page.code:
        if is_compared(cell) == bool(NOT_COMPARED & set(tags(cell))):
            reasons = " or ".join(sorted(NOT_COMPARED))
            yield f"ignored, but not tagged {reasons}, or the reverse: {first_line(cell)}"
        other = {tag for tag in tags(cell) if tag.startswith("nbval-") or tag == "raises-exception"}
        other -= {"nbval-ignore-output"}
        marker = re.search(r"^\s*#+\s*(NBVAL_\w+|PYTEST_VALIDATE_\w+)", source(cell), re.MULTILINE)
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
            # ensure_ascii off and backslashes undone: a path of Windows as it is read on the page.
            text = json.dumps(output, ensure_ascii=False).replace("\\\\", "\\")
            found = NOT_IN_OUTPUTS.search(text)
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
    return [name for cell in page.code for name in named_in(cell, function)]


def predictions(page):
    asked, revealed = {}, {}
    for place, cell in enumerate(page.cells):
        for function, met in (("predict", asked), ("reveal", revealed)):
            if len(named_in(cell, function)) < len(calls(cell, function)):
                yield f"write the key of {function}() out as a string: {first_line(cell)}"
            for key in named_in(cell, function):
                if key in met:
                    yield f"{key!r} is {'asked' if met is asked else 'revealed'} twice"
                met[key] = place
    for key in sorted(set(asked) ^ set(revealed)):
        yield f"{key!r} is {'never revealed' if key in asked else 'revealed but never asked'}"
    for key in sorted(set(asked) & set(revealed)):
        if revealed[key] <= asked[key]:
            yield f"{key!r} is revealed before the reader could answer"
    # A grid of cells to mark is a prediction too; its answer is the line that `against` prints.
    marked = [place for place, cell in enumerate(page.cells) for _ in calls(cell, "mark_cells")]
    answered = [place for place, cell in enumerate(page.cells) for _ in calls(cell, "against")]
    if len(marked) != len(answered) or any(a <= m for m, a in zip(marked, answered, strict=False)):
        yield f"{len(marked)} grids of cells to mark, {len(answered)} later cells with their against()"


def claims(page):
    shown, known = set(), {claim for listed in CLAIMS.values() for claim in listed}
    for cell in page.cells:
        for tag in tags(cell):
            if not tag.startswith("claim-"):
                continue
            if tag.removeprefix("claim-") not in known:
                yield f"{tag} is no claim of the list"
            shown.add(tag.removeprefix("claim-"))
            if cell["cell_type"] != "code" or not cell["outputs"] or not cell["execution_count"]:
                yield f"{tag} stands on a cell that shows nothing: {first_line(cell)}"
    if page.kind == "chapter":
        for claim in CLAIMS.get(page.path.stem[:2], []):
            if claim not in shown:
                yield f"{claim} is not shown"


def headings(page):
    level, titles = 0, 0
    for cell in page.markdown:
        text = re.sub(r"```.*?```", "", source(cell), flags=re.DOTALL)
        titles += len(re.findall(r"^# ", text, re.MULTILINE))
        for mark in re.findall(r"^(#+) ", text, re.MULTILINE):
            if len(mark) > level + 1:
                yield f"a heading of level {len(mark)} follows level {level}: {first_line(cell)}"
            level = len(mark)
    if titles != 1:
        yield f"{titles} headings of level 1, expected the title alone"


def links(page):
    for cell in page.markdown:
        text = re.sub(r"```.*?```|`[^`]*`", "", source(cell), flags=re.DOTALL)
        for image, alt, target in re.findall(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", text):
            if image and not alt.strip():
                yield f"image {target} has no alt text"
            if not re.match(r"https?:|#", target):
                if not (page.path.parent / target.split("#")[0]).exists():
                    yield f"link to {target} leads nowhere"
        if re.search(r"<img(?![^>]*\balt=\"[^\"]+\")", text):
            yield f"an <img> has no alt text: {first_line(cell)}"


def greedy_texts(page):
    listed = page.notebook["metadata"].get("kvcourse", {}).get("greedy", [])
    tagged = sum("greedy" in tags(cell) for cell in page.code)
    if bool(listed) != bool(tagged):
        yield f"{tagged} cells tagged 'greedy', {len(listed)} greedy texts listed in metadata.kvcourse.greedy"
    for entry in listed:
        if set(entry) != {"model", "prompt", "max_new_tokens"}:
            yield f"a greedy text needs model, prompt and max_new_tokens, found {sorted(entry)}"
        elif not any(entry["prompt"] in source(cell) for cell in page.code):
            yield f"no cell holds the listed prompt {entry['prompt']!r}"
    writers = greedy_functions(page)
    for cell in page.code:
        writes = writes_greedily(ast.parse(source(cell)), writers)
        if writes and is_compared(cell) and cell["outputs"] and "greedy" not in tags(cell):
            yield f"shows greedy text and is not tagged 'greedy': {first_line(cell)}"


def writes_text(page, cell):
    """Whether a code cell writes text, greedily or with a sampler: what it shows must not depend on
    how often it has run."""
    if cell["cell_type"] != "code" or not cell["outputs"]:
        return False
    tree = ast.parse(source(cell))
    calls_of = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    samples = any(called_name(call) in ("generate", "sampled") for call in calls_of)
    return "greedy" in tags(cell) or samples or writes_greedily(tree, greedy_functions(page))


def greedy_functions(page):
    """Names of the page's functions that write greedily, themselves or through one another."""
    nodes = [node for cell in page.code for node in ast.walk(ast.parse(source(cell)))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    names = set()
    while found := {f.name for f in functions if writes_greedily(f, names)} - names:
        names |= found
    return names


def writes_greedily(tree, writers):
    """Whether code takes the likeliest token again and again, or calls something that does.

    That is kv.generate without another sampler, argmax or kv.greedy within a loop, or one of the
    page's own `writers`. An argmax outside a loop is one choice, not a text.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called_name(node) == "generate":
            samplers = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "sampler"]
            if samplers in ([], ["kv.greedy"]):
                return True
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in writers:
            return True
        if isinstance(node, (ast.For, ast.While)):
            names = {called_name(call) for call in ast.walk(node) if isinstance(call, ast.Call)}
            if names & {"argmax", "greedy"}:
                return True
    return False


RULES = [
    sections, order, contents, size, imports, no_set_up, executed, cell_ids, no_widget_state, compared,
    panels_are_moved, outputs_small_and_clean, kernel, folded_answers, objectives, predictions, claims,
    headings, links, greedy_texts,
]  # fmt: skip
