"""The panel of chapter 19."""

import ipywidgets

from kvcourse.figures import chapter_19 as figures
from kvcourse.widgets.panel import Panel


def bill_panel():
    """What a conversation costs, turn by turn, under the rules of two vendors."""
    return Panel(
        "the bill of a conversation",
        {
            "gap": ipywidgets.SelectionSlider(
                options=list(figures.GAPS), value="1 min", description="a question every"
            ),
            "rules": ipywidgets.Dropdown(
                options=list(figures.RULES), value="Anthropic, 5 minutes", description="rules"
            ),
            "turns": ipywidgets.IntSlider(value=12, min=1, max=30, description="turns"),
            "prefix": ipywidgets.IntSlider(
                value=6000, min=0, max=20000, step=250, description="before the first question (tokens)"
            ),
            "question": ipywidgets.IntSlider(
                value=200, min=50, max=2000, step=50, description="a question (tokens)"
            ),
            "answer": ipywidgets.IntSlider(
                value=300, min=50, max=2000, step=50, description="an answer (tokens)"
            ),
            "output": ipywidgets.IntSlider(
                value=5, min=1, max=10, description="an output token costs (input tokens)"
            ),
        },
        compute=figures.bills,
        figure=figures.bills_figure,
        describe=figures.bills_text,
    )
