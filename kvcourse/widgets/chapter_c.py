"""The panel of primer C: rows, matrix and device, and what bounds their product."""

from __future__ import annotations

import ipywidgets

from kvcourse import sizing
from kvcourse.figures import chapter_c as figures
from kvcourse.widgets.panel import Panel


def bound_panel(here: sizing.Device, here_launch: float) -> Panel:
    """Rows, matrix and device: memory, arithmetic or launch, whichever takes longest.

    here         this computer as `figures.this_computer` makes it
    here_launch  what a call of a small product costs on it, in seconds
    """
    published = {key: device for key, device in sizing.devices().items() if not key.startswith("cpu")}
    devices = {**published, "here": here}
    matrices = figures.matrices()

    def compute(rows, matrix, device):
        launch = here_launch if device == "here" else figures.LAUNCH_SECONDS
        return figures.bound(rows, matrices[matrix], devices[device], launch)

    return Panel(
        "what bounds a product",
        {
            "rows": ipywidgets.SelectionSlider(
                options=[(f"{n:,}", n) for n in figures.ROWS], value=1, description="rows"
            ),
            "matrix": ipywidgets.Dropdown(
                options=list(matrices), value=list(matrices)[1], description="matrix"
            ),
            "device": ipywidgets.Dropdown(
                options=[(device.name, key) for key, device in devices.items()], description="device"
            ),
        },
        compute=compute,
        figure=figures.bound_figure,
        describe=figures.bound_text,
    )
