"""The panels of chapter 16: the reader as allocator, the policies at the same hand, and a busy server."""

from __future__ import annotations

import ipywidgets

from kvcourse.figures import chapter_16 as figures
from kvcourse.widgets.panel import Panel


class Hand(Panel):
    """The reader places 12 requests, one after the other.

    The sliders say where the request that has just arrived would go, the buttons decide. `moves` holds
    what was decided so far: (first slot, slots) or None for each request. After each decision the first
    slider stands at the first free slot.
    """

    def __init__(self) -> None:
        self.moves: list[tuple[int, int] | None] = []
        super().__init__(
            "be the allocator",
            {
                "start": ipywidgets.IntSlider(
                    value=0, min=0, max=figures.SLOTS - 1, description="first slot"
                ),
                "slots": ipywidgets.IntSlider(
                    value=8, min=1, max=figures.LONGEST, description="slots for prompt and answer"
                ),
            },
            compute=lambda start, slots: figures.hand(start, slots, moves=self.moves),
            figure=figures.hand_figure,
            describe=figures.hand_text,
        )
        self.buttons = {}
        for name, action in (
            ("Put it there", self.place),
            ("Turn it away", self.turn_away),
            ("Take back", self.take_back),
            ("Start over", self.start_over),
        ):
            button = ipywidgets.Button(description=name, layout=ipywidgets.Layout(width="auto"))
            button.on_click(lambda _, action=action: action())
            self.buttons[name] = button
        row = ipywidgets.HBox(
            list(self.buttons.values()), layout=ipywidgets.Layout(flex_flow="row wrap", grid_gap="4px 12px")
        )
        self.children = (self.children[0], row, *self.children[1:])

    def place(self) -> str:
        """Give the request that arrived the sliders' slots, if they are free; return the sentence."""
        if self.data["over"]:
            return self.text
        if self.data["problem"]:
            self._readout.text = f"Not put there. {figures.hand_text(self.data)}"
            return self.text
        return self._move((self.values["start"], self.values["slots"]))

    def turn_away(self) -> str:
        """Send the request that has arrived away; return the sentence."""
        return self.text if self.data["over"] else self._move(None)

    def take_back(self) -> str:
        """Undo the last decision; return the sentence."""
        del self.moves[-1:]
        return self._next()

    def start_over(self) -> str:
        """A new game; return the sentence."""
        self.moves.clear()
        return self._next()

    def _move(self, move) -> str:
        self.moves.append(move)
        return self._next()

    def _next(self) -> str:
        self._refresh()
        return self.text if self.data["over"] else self.set(start=self.data["first_free"])


def hand_panel() -> Hand:
    """12 requests, 40 slots, and the reader decides."""
    return Hand()


def policy_panel() -> Panel:
    """The same hand as each policy plays it: the map of its slots over the steps."""
    options = [(words, name) for name, words in {**figures.POLICIES, figures.KNOWS: figures.KNOWS}.items()]
    return Panel(
        "the policies play the same hand",
        {"policy": ipywidgets.Dropdown(options=options, value="reserve_max", description="policy")},
        compute=figures.policy_map,
        figure=figures.policy_figure,
        describe=figures.policy_text,
    )


def server_panel() -> Panel:
    """A memory in which 200 requests want to be: lengths, memory, block size and policy → map and numbers."""

    def choose(label, options, value):
        named = [(f"{option:,}", option) for option in options]
        return ipywidgets.SelectionSlider(value=value, options=named, description=label)

    options = [(words, name) for name, words in figures.POLICIES.items()]
    return Panel(
        "a busy server",
        {
            "prompt": choose("prompts, median (tokens)", (50, 100, 200, 390, 800, 1600), 390),
            "answer": choose("answers, median (tokens)", (9, 36, 72, 144, 288), 144),
            "memory": choose("memory (slots)", (8192, 16384, 32768), 16384),
            "block": choose("block (slots)", (8, 16, 32, 64, 256, 1024), 16),
            "policy": ipywidgets.Dropdown(options=options, value="reserve_max", description="policy"),
        },
        compute=figures.busy,
        figure=figures.busy_figure,
        describe=figures.busy_text,
    )
