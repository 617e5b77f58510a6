"""The widgets of chapter 03: cells to mark before the answer, and the mask of a chunk."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import ipywidgets
import numpy as np

from kvcourse import ops, progress
from kvcourse.figures import chapter_03 as figures
from kvcourse.figures import template as look
from kvcourse.widgets.panel import Panel
from kvcourse.widgets.views import Readout

_CSS = f"""<style>
.kv-marks .kv-cell {{ border: 1px solid var(--jp-ui-font-color2, #666); padding: 0 4px; height: 32px;
  margin: 0; align-items: center }}
.kv-marks .kv-before {{ background: {look.KEY}73 }}
.kv-marks .kv-new {{ background: {look.KEY}; border-width: 3px }}
.kv-marks .kv-new span {{ color: #fff !important }}
.kv-marks .kv-masked {{
  background: repeating-linear-gradient(135deg, {look.MASKED}99 0 1px, transparent 1px 14px) }}
.kv-marks .kv-cell:focus-within {{ outline: 3px solid {look.VALUE}; outline-offset: 1px }}
</style>"""


class Marks(ipywidgets.VBox):
    """A grid of check boxes, one a cell of the mask of T rows after ``start`` positions: the reader marks
    cells, and what is marked is kept in the record as a prediction.

    ``key`` is "chapter.name" ("03.wrong_cells"). Each box is named by its positions ("q3·k1"), takes Tab and
    Space, and is drawn as the right mask draws its cell: keys of before, new keys, masked. No mark at all is
    a valid state and counts as no guess. Raises ``ValueError`` for a key without a chapter, ``start`` below
    0 or ``T`` below 1, ``TypeError`` for a key that is no text and sizes that are no whole numbers.
    """

    def __init__(self, key: str, question: str, start: int, T: int) -> None:
        if not isinstance(key, str):
            raise TypeError(f"prediction key {_short(key)} is no text: write it like '03.wrong_cells'")
        if not key.partition(".")[2]:
            raise ValueError(f"prediction key {key!r} names no chapter: write it like '03.wrong_cells'")
        start, T = _whole("start", start, least=0), _whole("T", T, least=1)
        self.key, self.start, self.T = key, start, T
        self.boxes = {}  # (position of the query, position of the key) -> check box
        rows = []
        for row, sees in enumerate(ops.causal_mask(start, T).tolist()):
            query = start + row
            rows.append(_row_label(query, sees))
            for column, seen in enumerate(sees):
                self.boxes[query, column] = _box(query, column, start, seen)
                rows.append(self.boxes[query, column])
        known = str(progress.prediction(key) or "").split()
        for cell, box in self.boxes.items():
            box.value = figures.name(*cell) in known
        self._note = Readout(text=self._said("Your earlier marks"))
        for box in self.boxes.values():
            box.observe(self._changed, names="value")
        grid = ipywidgets.GridBox(
            rows,
            layout=ipywidgets.Layout(
                grid_template_columns=f"max-content repeat({start + T}, 92px)",
                grid_gap="3px",
                align_items="center",
                width="max-content",
                max_width="100%",
                padding="4px",
            ),
        )
        style = ipywidgets.HTML(_CSS, layout=ipywidgets.Layout(display="none"))
        super().__init__(
            children=[style, Readout(text=question), grid, self._note],
            layout=ipywidgets.Layout(
                width="100%",
                max_width="980px",
                border_left=f"4px solid {look.QUERY}",
                padding="2px 0 2px 12px",
            ),
        )
        self.add_class("kv-marks")
        self.add_class("kv-prediction")  # its boxes get the keyboard, see views.Readout

    def __repr__(self) -> str:
        return f"<Marks: {self.key}>"

    @property
    def marked(self) -> list[tuple[int, int]]:
        """The marked cells, (position of the query, position of the key), row by row."""
        return sorted(cell for cell, box in self.boxes.items() if box.value)

    @property
    def note(self) -> str:
        """The line under the grid."""
        return self._note.text

    def mark(self, cells: Iterable[tuple[int, int]]) -> str:
        """Mark exactly these cells, as if the reader had; return the line under the grid.

        Raises ``ValueError`` for a cell outside the grid, ``TypeError`` for what holds no cells, and then
        changes nothing.
        """
        last = self.start + self.T - 1
        way_out = f"give pairs (query, key), such as [({self.start}, 0)]"
        if not isinstance(cells, Iterable):
            raise TypeError(f"cells is {_short(cells)}: {way_out}, or [] for no mark")
        wanted = list(cells)
        for cell in wanted:
            if not (isinstance(cell, tuple) and all(map(_is_whole, cell)) and cell in self.boxes):
                grid = f"queries are {self.start} … {last}, keys 0 … {last}"
                raise ValueError(f"{_short(cell)} is no cell: {grid}; {way_out}")
        for cell, box in self.boxes.items():
            box.value = cell in wanted
        return self.note

    def against(self, truth: np.ndarray) -> str:
        """The marks beside the truth, in one line; without a mark "no guess".

        truth  boolean (T, start + T), True in the cells that should be marked. Raises ``ValueError`` for
               another shape.
        """
        truth = np.asarray(truth)
        if truth.shape != (self.T, self.start + self.T):
            raise ValueError(f"the truth has shape {truth.shape}: give ({self.T}, {self.start + self.T})")
        return figures.marks_text(self.marked, truth, self.start)

    def _changed(self, change: dict) -> None:
        names = " ".join(figures.name(*cell) for cell in self.marked)
        progress.record_prediction(self.key, names or None)
        self._note.text = " ".join(filter(None, [self._said("Recorded"), progress.notice()]))

    def _said(self, before: str) -> str:
        names = [figures.name(*cell) for cell in self.marked]
        if not names:
            return "No cell marked."
        return f"{before}: {len(names)} of {len(self.boxes)} cells, {', '.join(names)}."


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _whole(name: str, value: Any, least: int) -> int:
    refused = f"{name} is {_short(value)}: give a whole number of at least {least}, such as {name}=3"
    if not _is_whole(value):
        raise TypeError(refused)
    if value < least:
        raise ValueError(refused)
    return int(value)


def _short(value: Any) -> str:
    """A value for a message, on one short line."""
    said = " ".join(repr(value).split())
    return said if len(said) <= 40 else said[:40] + "…"


def _box(query: int, key: int, start: int, seen: bool) -> ipywidgets.Checkbox:
    what = ("before" if key < start else "new") if seen else "masked"
    box = ipywidgets.Checkbox(
        description=figures.name(query, key),
        tooltip=f"query of position {query}, key of position {key}",
        indent=False,
        layout=ipywidgets.Layout(width="100%"),
    )
    for css in ("kv-cell", f"kv-{what}"):
        box.add_class(css)
    return box


def _row_label(query: int, sees: list[bool]) -> ipywidgets.Label:
    return ipywidgets.Label(f"position {query}, mask {' '.join(str(int(seen)) for seen in sees)}")


def mark_cells(key: str, question: str, start: int, T: int) -> Marks:
    """A grid to mark cells in (see ``Marks``), as the last expression of a cell."""
    return Marks(key, question, start, T)


def mask_panel(num_heads: int) -> Panel:
    """The mask of T new tokens after ``start`` others, and PyTorch's ``is_causal`` triangle over it.

    num_heads  of the model whose scores' shape is named
    """
    half = figures.LONGEST // 2
    return Panel(
        "the mask of a chunk",
        {
            "start": ipywidgets.IntSlider(value=2, min=0, max=half, description="start (tokens there)"),
            "T": ipywidgets.IntSlider(value=3, min=1, max=half, description="T (new tokens)"),
            "overlay": ipywidgets.Checkbox(value=False, description="lay the is_causal triangle over it"),
        },
        compute=partial(figures.chunk, num_heads=num_heads),
        figure=figures.chunk_figure,
        describe=figures.chunk_text,
    )
