"""The panel of chapter 18: in which order should the parts of a prompt stand?"""

from __future__ import annotations

import ipywidgets

from kvcourse.figures import chapter_18 as figures
from kvcourse.widgets.panel import Panel


def _key(part):
    return part.split()[0]


def layout_panel() -> Panel:
    """The prompt-layout bench: a place for each part, which of them change, and who comes in between.

    Controls: `others`, and for each part `<first word>_place` (1 … 5) and `<first word>_changes`.
    """
    parts = list(figures.SIZES)
    controls = {
        "others": ipywidgets.IntSlider(value=0, min=0, max=12, description="strangers in between (prompts)")
    }
    for number, part in enumerate(parts, 1):
        controls[f"{_key(part)}_place"] = ipywidgets.Dropdown(
            value=number, options=list(range(1, len(parts) + 1)), description=f"{part}: place"
        )
        controls[f"{_key(part)}_changes"] = ipywidgets.Checkbox(
            value=part in ("timestamp", "user turn"), indent=False, description=f"{part} changes"
        )

    def compute(others, **values):
        places = {part: values[f"{_key(part)}_place"] for part in parts}
        changes = {part: values[f"{_key(part)}_changes"] for part in parts}
        return figures.layout(others, places, changes)

    panel = Panel(
        "prompt layout",
        controls,
        compute=compute,
        figure=figures.layout_figure,
        describe=figures.layout_text,
    )
    # A part's place and its check box share a row: two of 46 % fit side by side, 52 % and 46 % do not.
    for name, control in controls.items():
        control.layout.width = "52%" if name == "others" else "46%"
    return panel
