"""``SharedFigureWidget``: plotly's ``FigureWidget`` that brings plotly.js to the page once, not once a figure.

Plotly's own widget carries all of plotly.js, 5 MB, in the state of every single figure, and the browser parses it
again for each: measured here about 3 s a figure on two busy cores, and never given back when a cell is run
again. Here one hidden widget a kernel holds the source, a page evaluates it once, and each figure carries a
loader of a few lines that hands over to plotly's unchanged front end. Nothing is fetched from a network.
"""

from __future__ import annotations

import ipywidgets
import plotly
import plotly.graph_objects as go
import traitlets

_LOADER = """
async function frontEnd(model) {
  const page = (globalThis.kvcoursePlotly ??= {});
  const version = model.get("_plotly_version");
  page[version] ??= (async () => {
    const holder = await model.widget_manager.get_model(model.get("_plotly_source"));
    const url = URL.createObjectURL(new Blob([holder.get("source")], { type: "text/javascript" }));
    try { return (await import(url)).default; } finally { URL.revokeObjectURL(url); }
  })();
  try { return await page[version]; } catch (error) { delete page[version]; throw error; }
}
export default () => {
  let figure;
  return {
    async initialize(context) {
      figure = (await frontEnd(context.model))();
      return figure.initialize(context);
    },
    render(context) { return figure.render(context); },
  };
};
"""


class _PlotlySource(ipywidgets.Widget):
    source = traitlets.Unicode().tag(sync=True)


_holder: _PlotlySource | None = None


def _source_id() -> str:
    """The model id of this kernel's holder of plotly.js; made on first use and again after ``Widget.close_all``."""
    global _holder
    if _holder is None or _holder.comm is None:
        _holder = _PlotlySource(source=str(go.FigureWidget._esm))
    return _holder.model_id


class SharedFigureWidget(go.FigureWidget):
    """A ``FigureWidget`` in everything but the size of its state (some kB instead of 5 MB)."""

    _esm = _LOADER
    _plotly_version = traitlets.Unicode(plotly.__version__).tag(sync=True)
    _plotly_source = traitlets.Unicode().tag(sync=True)

    @traitlets.default("_plotly_source")
    def _find_source(self) -> str:
        return _source_id()
