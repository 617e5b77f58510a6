"""The prediction box and the reveal: the reader commits to a guess before the cell that answers it runs.

Nothing here waits for the reader: an empty box is a valid state, the reveal then says "no guess".
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import ipywidgets
from IPython.display import display

from kvcourse import progress
from kvcourse.widgets.views import Readout

KINDS = ("number", "choice", "text")


# Separators stand between groups of three digits and nowhere else: "1,5" is one and a half to some readers,
# and "5 4" is two numbers.
_WHOLE = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ _\u00a0\u202f]\d{3})+|\d+"
_NUMBER = re.compile(rf"([+-]?\s*(?:(?:{_WHOLE})(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*)")
_MULTIPLES = {"k": 1e3, "K": 1e3, "thousand": 1e3, "M": 1e6, "million": 1e6, "billion": 1e9}


def parse_number(text: str) -> float | int:
    """The number a reader typed: ``"1,000"``, ``"1 000"``, ``"2.5"``, ``"1e3"``, ``"10k"``, ``"~40 %"``.

    ``k`` and ``M`` multiply by 1,000 and 1,000,000. A unit behind the number is ignored; the box says which
    unit is meant. Returns an ``int`` for a whole number below 2**53. Raises ``ValueError`` for anything else.
    """
    found = _NUMBER.fullmatch(text.strip().lstrip("~≈ ").replace("\N{MINUS SIGN}", "-"))
    number, unit = found.groups() if found else ("nan", "")
    value = float(re.sub(r"[,_\s]", "", number)) * _MULTIPLES.get(unit.partition(" ")[0], 1)
    if not math.isfinite(value) or any(char.isnumeric() or char in ".,+-" for char in unit):
        typed = text.strip()
        shown = typed if len(typed) <= 40 else typed[:40] + "…"
        raise ValueError(f"{shown!r} is not a number: type digits, for example 2.5 or 1000")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def say(value: Any, digits: int = 3) -> str:
    """A number for prose: integers with thousands separators, floats to ``digits`` significant digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if value and 1e-4 <= abs(value) < 1e15:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:,.{decimals}f}"
    return f"{value:.{digits}g}"


class Prediction(ipywidgets.VBox):
    """A question, a labeled box for the answer, and a line that says what was recorded.

    ``key`` is "chapter.name" ("01.crossover"); ``kind`` is "number", "choice" (needs ``options``) or "text";
    ``unit`` stands behind the box. The answer is kept in the reader's record and put back when the notebook
    is run again. Raises ``ValueError`` for an unknown kind, a choice without options, or a key without a
    chapter.
    """

    def __init__(
        self,
        key: str,
        question: str,
        kind: str = "number",
        options: Sequence[str] | None = None,
        unit: str = "",
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
        if kind == "choice" and not options:
            raise ValueError(f"prediction {key!r} is a choice without options: pass options=[...]")
        if not key.partition(".")[2]:
            raise ValueError(f"prediction key {key!r} names no chapter: write it like '01.crossover'")
        self.key, self.kind = key, kind
        self.box = self._make_box(options, unit)
        known = progress.prediction(key)
        if known is not None:
            self._restore(known)
        # The question is text of the page, in its own line; the short label on the box is what a screen
        # reader reads on the way to the box, so the question is repeated there as its tooltip.
        self._question = Readout(text=question)
        self._note = Readout(text="Your earlier guess." if self.box.value else "")
        self.box.observe(self._changed, names="value")
        super().__init__(
            children=[self._question, ipywidgets.HBox([self.box, self._note], layout=_ROW)],
            layout=ipywidgets.Layout(
                width="100%", max_width="980px", border_left="4px solid #009E73", padding="2px 0 2px 12px"
            ),
        )
        self.box.tooltip = question
        self.add_class("kv-prediction")

    def __repr__(self) -> str:
        return f"<Prediction: {self.key}>"

    @property
    def answer(self) -> float | int | str | None:
        """The recorded answer, ``None`` when there is none."""
        return progress.prediction(self.key)

    @property
    def note(self) -> str:
        """The line beside the box."""
        return self._note.text

    def _make_box(self, options: Sequence[str] | None, unit: str) -> ipywidgets.Widget:
        if self.kind == "choice":
            box = ipywidgets.RadioButtons(options=list(options or ()), value=None, description="Your guess:")
            box.layout.width = "max-content"
        else:
            label = f"Your guess ({unit}):" if unit else "Your guess:"
            # Not on every keystroke: half a number is not an answer. Enter or leaving the box records it.
            box = ipywidgets.Text(description=label, continuous_update=False, placeholder="type, then Enter")
            box.layout.width = f"{8 * len(label) + (170 if self.kind == 'number' else 420)}px"
        box.style.description_width = "initial"
        box.layout.max_width = "100%"
        return box

    def _restore(self, known: Any) -> None:
        if self.kind != "choice":
            self.box.value = str(known)
        elif known in self.box.options:
            self.box.value = known

    def _changed(self, change: Any) -> None:
        try:
            typed = self.box.value
            if self.kind == "number" and typed.strip():
                try:
                    value = parse_number(typed)
                except ValueError as error:
                    stays = "" if self.answer is None else f"; your earlier guess, {say(self.answer)}, stays"
                    raise ValueError(f"{error}{stays}") from None
                said = f"Recorded: {say(value)}"
            else:
                value = typed.strip() if typed else None
                said = "Recorded." if value else "No guess."
            progress.record_prediction(self.key, value)
            # A progress file that could not be saved is worth one line, once the guess itself is taken.
            self._note.text = " ".join(filter(None, [said, progress.notice()]))
        except ValueError as error:
            self._note.text = str(error)


_ROW = ipywidgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="4px 16px")


def predict(
    key: str, question: str, kind: str = "number", options: Sequence[str] | None = None, unit: str = ""
) -> None:
    """Show a prediction box (see ``Prediction``). Several may stand in one cell."""
    display(Prediction(key, question, kind=kind, options=options, unit=unit))


def reveal(key: str, answer: Any, unit: str = "", digits: int = 3) -> None:
    """Print the reader's guess beside the answer, in one line; see ``compare``."""
    print(compare(progress.prediction(key), answer, unit, digits))


def compare(guess: Any, answer: Any, unit: str = "", digits: int = 3) -> str:
    """One line: the guess, the answer, and for numbers how far off.

    ``digits`` are the significant digits shown of a float. Without a guess the line is the same every time.
    """
    behind = f" {unit}" if unit else ""
    if hasattr(answer, "item"):  # a NumPy scalar
        answer = answer.item()
    shown = f"{say(answer, digits)}{behind}"
    if guess is None or guess == "":
        return f"Your guess: no guess. Answer: {shown}."
    line = f"Your guess: {say(guess, digits)}{behind if _number(guess) else ''}. Answer: {shown}"
    if _number(guess) and _number(answer):
        return f"{line}: {_how_far(float(guess), float(answer))}."
    same = str(guess).strip().casefold() == str(answer).strip().casefold()
    return f"{line}: {'as you said' if same else 'not what you said'}."


def _number(value: Any) -> bool:
    # Within the range of a float, so that a ratio can be taken; False for nan as well.
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    )


def _how_far(guess: float, answer: float) -> str:
    if guess == answer:
        return "exactly right"
    ratio = guess / answer if answer else 0.0
    # A zero, two signs, or so far apart that a float cannot say it: no ratio to speak of.
    if not sys.float_info.min <= ratio <= sys.float_info.max:
        return f"off by {say(abs(guess - answer))}"
    way = "high" if abs(guess) > abs(answer) else "low"
    if 0.5 < ratio < 2:
        percent = abs(ratio - 1) * 100
        return f"{say(round(percent))} % too {way}" if percent >= 1 else f"less than 1 % too {way}"
    return f"{say(max(ratio, 1 / ratio), 2)} times too {way}"
