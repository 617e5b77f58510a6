"""The widgets of chapter 01: text that appears as it is generated, and the main panel."""

from __future__ import annotations

import html
from functools import partial

import ipywidgets

from kvcourse.figures import chapter_01 as figures
from kvcourse.widgets.panel import Panel


class LiveText(ipywidgets.HTML):
    """A page that grows while a model writes: the prompt in bold, the new text, and one line below.

    ``show(new_text, note)`` replaces what is shown. It is no live region: a screen reader would read the
    whole text again at every token. The cell that uses it prints the finished text as well.
    """

    def __init__(self, prompt: str) -> None:
        super().__init__()
        self._prompt = html.escape(prompt)
        self.add_class("kv-live-text")
        self.show("")

    def __repr__(self) -> str:
        return "<LiveText>"

    def show(self, new_text: str, note: str = "") -> None:
        """Show the prompt, ``new_text`` after it, and ``note`` under both. Plain text, escaped here."""
        self.value = (
            '<div style="max-width: 980px; white-space: pre-wrap; line-height: 1.5">'
            f"<b>{self._prompt}</b>{html.escape(new_text)}</div>"
            f'<div style="opacity: 0.7">{html.escape(note)}</div>'
        )


def loops_panel(measured=None) -> Panel:
    """The naive and the cached loop side by side: positions of each step, and the time until then.

    ``measured`` (the chapter's table, rows {"tokens", "without", "with"} in ms) adds this machine.
    """
    return Panel(
        "two loops",
        {
            "prompt": ipywidgets.IntSlider(value=500, min=1, max=8000, description="prompt (tokens)"),
            "new": ipywidgets.IntSlider(value=300, min=1, max=figures.MOST_NEW, description="new tokens"),
            "batch": ipywidgets.SelectionSlider(
                value=1, options=[1, 2, 3, 4, 8, 16, 32, 64], description="requests together"
            ),
            "times": ipywidgets.SelectionSlider(
                value=2, options=[2, 5, 10, 20, 40, 100], description="times as long"
            ),
            "where": ipywidgets.Dropdown(options=list(figures.machines(measured)), description="where"),
        },
        compute=partial(figures.loops, measured=measured),
        figure=figures.loops_figure,
        describe=figures.loops_text,
    )
