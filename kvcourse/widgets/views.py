"""The two views of a panel: a line of text and a figure. Their state lives in plain ipywidgets models.

Why not plotly's own ``FigureWidget``, measured here with plotly 7.1 and anywidget 0.11:

* It carries all of plotly.js, 5 MB, in the state of every figure: a notebook with five figures took 17 s
  to run, with one copy for the whole page 1 to 4 s (two busy cores). A cell run again leaks another copy.
* An anywidget that is not ready within 2 s, on a slow or busy laptop, drops every later change without a
  word (seen with the processor slowed down 8 times). Changes of a plain ipywidgets model are never dropped.

So both views only show what a plain model holds, and look at it again whenever it changes. Plotly.js comes
from the installed Python package through the kernel; nothing is fetched from a network.
"""

from __future__ import annotations

import json
from typing import Any

import anywidget
import ipywidgets
import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from kvcourse.figures.template import CONFIG, HEIGHT, TEMPLATE, THEME_CSS

# Air between a label and the handle of a slider that stands at its start.
_CONTROLS_CSS = ".kv-panel .widget-label { margin-right: 8px }"


class _Held(ipywidgets.Widget):
    """A model without a view: it holds a value of plain JSON."""

    value = traitlets.Any().tag(sync=True)


class _View(anywidget.AnyWidget):
    """A view of a ``_Held`` model, named by its id."""

    _css = THEME_CSS + _CONTROLS_CSS
    _state_id = traitlets.Unicode().tag(sync=True)

    def __init__(self, value: Any, **kwargs: Any) -> None:
        self._held = _Held(value=value)
        super().__init__(_state_id=self._held.model_id, **kwargs)

    def close(self) -> None:
        """Close the view and the model it shows."""
        super().close()
        self._held.close()


class Readout(_View):
    """One line of text that a screen reader announces when it changes (``role="status"``).

    ``ipywidgets.HTML`` replaces its whole content on a change, the live region included, and many screen
    readers then stay silent. This view keeps its element and changes only the text, which also needs no
    escaping.

    It also gives the keyboard to the controls around it. JupyterLab reacts to arrow keys and single letters
    all over a notebook ("d d" deletes a cell), so a drop-down in an output never sees them. It keeps its
    shortcuts off a focused element with the attribute that is set here; the element itself must have it, not
    a box around it.
    """

    _esm = """
    if (!globalThis.kvcourseKeys) {
      globalThis.kvcourseKeys = true;
      document.addEventListener("focusin", event => {
        if (event.target.closest?.(".kv-panel, .kv-prediction"))
          event.target.setAttribute("data-lm-suppress-shortcuts", "true");
      });
    }
    export default {
      async render({ model, el }) {
        el.setAttribute("role", "status");
        el.classList.add("kv-text");
        const held = await model.widget_manager.get_model(model.get("_state_id"));
        const show = () => { el.textContent = held.get("value"); };
        held.on("change:value", show);
        show();
        return () => held.off("change:value", show);
      }
    };
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(text)

    @property
    def text(self) -> str:
        """The line shown, plain text (HTML is shown as typed). Setting it changes the page in place."""
        return self._held.value

    @text.setter
    def text(self, text: str) -> None:
        self._held.value = text


class FigureView(_View):
    """Shows a plotly ``Figure``; ``show(figure)`` changes the plot on the page in place
    (``Plotly.react``)."""

    _esm = """
    async function loadPlotly(model) {
      const page = (globalThis.kvcoursePlotly ??= {});
      const version = model.get("_plotly_version");
      page[version] ??= (async () => {
        const holder = await model.widget_manager.get_model(model.get("_source_id"));
        const url = URL.createObjectURL(new Blob([holder.get("value")], { type: "text/javascript" }));
        try { await import(url); } finally { URL.revokeObjectURL(url); }
        return globalThis.Plotly;
      })();
      try { return await page[version]; } catch (error) { delete page[version]; throw error; }
    }
    export default {
      async render({ model, el }) {
        const held = await model.widget_manager.get_model(model.get("_state_id"));
        // The height is reserved at once, so that the page does not jump when plotly arrives.
        el.style.minHeight = `${held.get("value").layout.height}px`;
        const plotly = await loadPlotly(model);
        // A copy, because plotly writes defaults into what it is given.
        const draw = () => {
          const { data, layout, config } = structuredClone(held.get("value"));
          return plotly.react(el, data, layout, config);
        };
        held.on("change:value", draw);
        await draw();
        // The side bar changes the width without a resize of the window; a hidden plot has no width.
        const fit = new ResizeObserver(() => { if (el.offsetWidth) plotly.Plots.resize(el); });
        fit.observe(el);
        return () => { held.off("change:value", draw); fit.disconnect(); plotly.purge(el); };
      }
    };
    """
    _plotly_version = traitlets.Unicode(get_plotlyjs_version()).tag(sync=True)
    _source_id = traitlets.Unicode().tag(sync=True)
    _source: _Held | None = None  # this kernel's one copy of plotly.js

    def __init__(self, figure: go.Figure) -> None:
        # Made on first use, and again after `Widget.close_all()`.
        if FigureView._source is None or FigureView._source.comm is None:
            FigureView._source = _Held(value=get_plotlyjs())
        super().__init__(styled(figure), _source_id=FigureView._source.model_id)

    def show(self, figure: go.Figure) -> None:
        """Replace what is drawn; zoom and hidden traces of the reader stay."""
        self._held.value = styled(figure)


def styled(figure: go.Figure) -> dict[str, Any]:
    """The figure in the course's look, as plain JSON: ``data``, ``layout`` and ``config``."""
    content = json.loads(figure.to_json())
    layout = content["layout"]
    layout["template"] = _TEMPLATE
    layout["height"] = layout.get("height") or HEIGHT
    layout["autosize"] = True
    # Any constant: it tells plotly that zoom and hidden traces survive a change of the data.
    layout["uirevision"] = "kept"
    return {"data": content["data"], "layout": layout, "config": dict(CONFIG)}


_TEMPLATE = json.loads(go.Figure(layout={"template": TEMPLATE}).to_json())["layout"]["template"]
