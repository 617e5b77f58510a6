"""The panel of chapter 06: choose probes, see which letters they tell apart."""

from __future__ import annotations

import ipywidgets

from kvcourse.figures import chapter_06 as figures
from kvcourse.widgets.panel import Panel

AT_FIRST = ("prefill",)  # the probe that the reader has met first


def control(name: str) -> str:
    """A probe's name as the name of a control: "dye + reset" becomes "dye_reset"."""
    return name.replace(" + ", "_")


def kit_panel(table, costs) -> Panel:
    """Choose a letter and a set of probes.

    ``table`` is {letter or "right": {probe: outcome}}, ``costs`` {probe: positions passed}.
    """
    controls = {
        "letter": ipywidgets.Dropdown(options=list(table), description="letter"),
        **{
            control(name): ipywidgets.Checkbox(value=name in AT_FIRST, description=f"{name} ({costs[name]})")
            for name in costs
        },
    }

    def compute(letter, **boxes):
        return figures.kit(table, costs, letter, [name for name in costs if boxes[control(name)]])

    return Panel("diagnosis kit", controls, compute, figures.kit_figure, figures.kit_text)
