"""The one plotly template of the course: colors with a fixed meaning, sizes, and a theme that follows
JupyterLab.

A reader who has seen chapter 02 reads the pictures of chapter 18 without a legend, so a color means one thing
everywhere and is never the only thing that tells two marks apart (each has a label, a dash or a hatch as
well).

How one figure serves the light and the dark theme: Python does not know which theme the reader has, and
plotly accepts no CSS variable as a color. So everything drawn in the foreground color (text, axis lines,
"this machine") is drawn in the sentinel ``INK``, everything in the page's color in the sentinel ``PAPER``.
plotly writes colors as inline styles of SVG elements, ``style="fill: rgb(1, 2, 3)"``, and the style sheet
``THEME_CSS`` replaces exactly those by JupyterLab's own variables. Other colors stay what they are. Without
the style sheet the figure is a readable light one. (Its last rule is about printed lines: JupyterLab breaks
them anywhere, and "2,048" became "2," and "048".) Two limits: heat map cells and WebGL traces are pixels,
not SVG, so they must not use ``INK`` or ``PAPER`` (leave a cell out, it shows the page); and a color with an
opacity is still recognized, because plotly writes the opacity apart.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import plotly.graph_objects as go

KEY = "#0072B2"  # blue, label K
VALUE = "#E69F00"  # orange, label V
QUERY = "#009E73"  # green, label Q
MASKED = "#BBBBBB"  # masked, not visible: hatched
WRONG = "#D55E00"  # wasted, evicted, wrong: cross-hatched or x
PUBLISHED = "#999999"  # somebody else's measurement: dashed, source in the hover text
# What a pass moves and computes, in bars and areas of bytes or seconds, each with its label.
WEIGHTS = "#56B4E9"  # sky blue
CACHES = KEY  # keys and values together: hatched
ARITHMETIC = "#CC79A7"  # purple

INK = "#010203"  # the theme's text color, see above; no picture needs this almost-black for itself
PAPER = "#fdfcfb"  # the theme's page color
HERE = INK  # this machine's measurement: black in light, white in dark; solid line with points

NEW_OPACITY = 1.0  # new this step: full strength, bold outline
CACHED_OPACITY = 0.45  # cached, read again: thin outline
HATCH = "/"  # pattern of masked bars
CROSS_HATCH = "x"  # pattern of wasted bars

MAX_WIDTH = 980  # px
MAX_HEIGHT = 420  # px
HEIGHT = 380  # px, when nothing else is asked for
TEXT_SIZE = 14  # px, the smallest text of a figure

CONFIG = {"displayModeBar": False, "displaylogo": False, "showTips": False}

# 25 % gray is visible on white and on JupyterLab's dark gray, so grid lines need no sentinel.
_GRID = "rgba(128,128,128,0.25)"

THEME_CSS = """
.js-plotly-plot [style*="fill: rgb(1, 2, 3)"] {
  fill: var(--jp-ui-font-color0, var(--vscode-foreground, #111)) !important }
.js-plotly-plot [style*="stroke: rgb(1, 2, 3)"] {
  stroke: var(--jp-ui-font-color0, var(--vscode-foreground, #111)) !important }
.js-plotly-plot [style*="fill: rgb(253, 252, 251)"] {
  fill: var(--jp-layout-color0, var(--vscode-editor-background, #fff)) !important }
.js-plotly-plot [style*="stroke: rgb(253, 252, 251)"] {
  stroke: var(--jp-layout-color0, var(--vscode-editor-background, #fff)) !important }
.kv-text { color: var(--jp-ui-font-color0, var(--vscode-foreground, inherit)); font-size: 14px;
  line-height: 1.45; max-width: 980px; padding: 2px 0 4px; overflow-wrap: break-word }
.jp-RenderedText pre { word-break: normal !important; overflow-wrap: break-word !important }
""".strip()


def _axis() -> dict:
    return {
        "automargin": True,
        "gridcolor": _GRID,
        "linecolor": INK,
        "showline": True,
        "ticks": "outside",
        "tickcolor": INK,
        "zeroline": False,
        "title": {"standoff": 10, "font": {"size": TEXT_SIZE}},
        "tickfont": {"size": TEXT_SIZE},
        # The exponent form 1k / 1M is read at a glance; "B" for 10^9 would be read as bytes here.
        "exponentformat": "SI",
        "separatethousands": True,
    }


TEMPLATE = go.layout.Template(
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": TEXT_SIZE, "color": INK, "family": "system-ui, -apple-system, Segoe UI, sans-serif"},
        "colorway": [KEY, VALUE, QUERY, WRONG, "#56B4E9", "#CC79A7"],
        "margin": {"l": 60, "r": 20, "t": 20, "b": 50},
        "xaxis": _axis(),
        "yaxis": _axis(),
        "hovermode": "closest",
        # namelength -1: a hover label never cuts a name off.
        "hoverlabel": {
            "bgcolor": PAPER,
            "bordercolor": INK,
            "font": {"size": TEXT_SIZE, "color": INK},
            "namelength": -1,
        },
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        "dragmode": False,
        "bargap": 0.15,
    }
)


def cells(x: Sequence[int], y: Sequence[float], *, length: float = 0.94, **trace) -> go.Bar:
    """A rectangle of this length along x around each (x, y), drawn as a horizontal bar: the cells of a heat
    map can be neither outlined nor hatched. ``trace`` goes to ``go.Bar``; its ``hovertext`` is what is shown,
    its ``textfont`` the theme's text color when nothing else is asked for.
    """
    # Without a color plotly chooses one for the light page, unreadable in the dark theme.
    trace.setdefault("textfont", {"color": INK, "size": TEXT_SIZE})
    return go.Bar(
        x=[length] * len(x),
        y=list(y),
        base=[column - length / 2 for column in x],
        orientation="h",
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertemplate="%{hovertext}<extra></extra>",
        **trace,
    )


def plain(text: str) -> str:
    """Text for a label or a hover of a figure as it stands: plotly would read "<b>" or "&amp;" as markup."""
    return html.escape(text, quote=False)


def new_figure(
    x_title: str,
    y_title: str,
    *,
    height: int = HEIGHT,
    log_x: bool = False,
    log_y: bool = False,
    grid: bool = True,
) -> go.Figure:
    """An empty figure with the course's template.

    ``x_title`` and ``y_title`` name the axes with their units ("time of one step (ms)"); a log axis gets
    ", log scale" behind its title. ``height`` is in px, at most 420.
    ``grid=False`` for heat maps. Raises ``ValueError`` above that.
    """
    if height > MAX_HEIGHT:
        raise ValueError(
            f"height={height} px is above the {MAX_HEIGHT} px a figure may have: show less in one figure"
        )
    figure = go.Figure()
    figure.update_layout(template=TEMPLATE, height=height)
    figure.update_xaxes(title_text=x_title + (", log scale" if log_x else ""))
    figure.update_yaxes(title_text=y_title + (", log scale" if log_y else ""))
    if not grid:
        figure.update_xaxes(showgrid=False)
        figure.update_yaxes(showgrid=False)
    # dtick 1 labels whole decades only: plotly's "2" and "5" in between would be read as 2 and 5.
    if log_x:
        figure.update_xaxes(type="log", dtick=1)
    if log_y:
        figure.update_yaxes(type="log", dtick=1)
    return figure


def axis_like(figure: go.Figure, axis: str) -> dict:
    """The template's settings of "xaxis" or "yaxis", for a second axis: plotly gives them to the first."""
    return figure.layout.template.layout[axis].to_plotly_json()


def published(x: Sequence, y: Sequence, *, name: str, source: str, unit: str = "") -> go.Scatter:
    """A line of somebody else's measurement: gray, dashed, with the source (and its hardware) in the hover
    text."""
    line = _line(x, y, name, unit, f"<br>source: {source}")
    return line.update(
        line={"color": PUBLISHED, "dash": "dash", "width": 2}, marker={"symbol": "circle-open", "size": 7}
    )


def here(x: Sequence, y: Sequence, *, name: str, unit: str = "", color: str = HERE) -> go.Scatter:
    """A line measured (or computed) on this machine: solid, with points, in the theme's text color."""
    return _line(x, y, name, unit).update(line={"color": color, "width": 2.5}, marker={"size": 7})


def _line(x: Sequence, y: Sequence, name: str, unit: str, more: str = "") -> go.Scatter:
    shown = "%{y:,} " + unit if unit else "%{y:,}"
    hover = f"{name}: {shown} at %{{x:,}}{more}<extra></extra>"
    return go.Scatter(x=list(x), y=list(y), name=name, mode="lines+markers", hovertemplate=hover)


def heat_map(
    z: Sequence[Sequence[float]],
    *,
    hover: Sequence[Sequence[str]],
    color: str = KEY,
    largest: float | None = None,
    bar_title: str = "",
) -> go.Heatmap:
    """A heat map in one color in which exact zero is the bare page and the smallest non-zero is clearly
    tinted.

    ``z`` is a rectangle of rounded numbers >= 0 as plain lists; ``hover`` has the same shape and says each
    cell in whole words. ``largest`` fixes the upper end of the scale, so that moving a control does not
    change what a color means. A zero cell is left out (``None``) rather than colored, so it shows the page in
    either theme; the scale itself starts at 35 % strength. Raises ``ValueError`` for a negative or non-finite
    number.
    """
    rows = [[float(cell) for cell in row] for row in z]
    for row in rows:
        for cell in row:
            if not math.isfinite(cell) or cell < 0:
                raise ValueError(
                    f"heat map cell {cell} is not a finite number >= 0: pass norms, not differences"
                )
    top = largest if largest is not None else max((cell for row in rows for cell in row), default=0.0)
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return go.Heatmap(
        z=[[cell if cell != 0 else None for cell in row] for row in rows],
        text=[list(row) for row in hover],
        hovertemplate="%{text}<extra></extra>",
        hoverongaps=True,
        zmin=0,
        zmax=top if top > 0 else 1,
        xgap=1,
        ygap=1,
        colorscale=[[0, f"rgba({red},{green},{blue},0.35)"], [1, f"rgba({red},{green},{blue},1)"]],
        colorbar={
            "title": {"text": bar_title, "side": "right", "font": {"size": TEXT_SIZE}},
            "thickness": 14,
            "outlinewidth": 0,
        },
    )
