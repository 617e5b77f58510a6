"""The panel of chapter 08: the capacity planner."""

from __future__ import annotations

import ipywidgets

from kvcourse import config as configs
from kvcourse import sizing
from kvcourse.figures import chapter_08 as figures
from kvcourse.widgets.panel import Panel

FIRST = sizing.Plan()


def planner_panel(*models) -> Panel:
    """Model, card, formats, context, users, shared prefix: what fits, and what to change.

    ``models`` are ModelConfigs of the reader's own, listed before the catalogue's; one that is called like
    a model of the catalogue takes its place. The panel starts with the first of them. Raises ValueError for
    an empty name, and for a name that two of them have.
    """
    names = [model.name for model in models]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"models are told apart by their names, got {names}: give each one of its own")
    own = dict(zip(names, models, strict=True))
    controls = _controls([*own, *(name for name in configs.catalogue() if name not in own)], *names[:1])

    def plan_of(**values):
        return sizing.Plan(**values | {"model": own.get(values["model"], values["model"])})

    def read(text):
        plan = sizing.Plan.from_text(text, own)
        if plan.block_size != 1:
            raise ValueError(f"block_size is {plan.block_size}: this planner counts single tokens, give 1")
        values = {name: getattr(plan, name) for name in controls} | {"model": plan.config.name}
        for name, value in values.items():
            _offer(controls[name], value)
        return values

    return Panel(
        "capacity planner",
        controls,
        compute=lambda **values: figures.planner(plan_of(**values)),
        figure=figures.planner_figure,
        describe=figures.planner_text,
        as_text=(lambda values: plan_of(**values).text(), read),
    )


def _controls(models, first=FIRST.model):
    def choice(options, value, label):
        return ipywidgets.Dropdown(options=list(options), value=value, description=label)

    def number(value, least, step, label):
        return ipywidgets.BoundedIntText(value=value, min=least, max=10**8, step=step, description=label)

    cards = [key for key, device in sizing.devices().items() if device.memory_bytes]
    return {
        "model": choice(models, first, "model"),
        "memory": choice([*cards, "80 GB", "80 GiB"], FIRST.memory, "card"),
        "weights": choice([*figures.FORMATS, "16 GB"], FIRST.weights, "weights in"),
        "cache_dtype": choice(figures.FORMATS, FIRST.cache_dtype, "cache in"),
        "keep_free": choice(["0 GB", "2 GB", "4 GB", "8 GB", "8 %", "10 %"], FIRST.keep_free, "keep free"),
        "users": ipywidgets.IntSlider(value=FIRST.users, min=1, max=1024, description="users at once"),
        "context": number(FIRST.context, 1, 1, "tokens a request"),
        "shared_prefix": number(FIRST.shared_prefix, 0, 1, "of them shared by all"),
    }


def _offer(control, value):
    """Make a pasted value, such as a card of "96 GB", one of a drop-down's options; the choice stays."""
    if isinstance(control, ipywidgets.Dropdown) and value not in control.options:
        chosen = control.value
        control.options = [*control.options, value]
        control.value = chosen
