"""The colors and the template are what the course's visual language says, and stay readable."""

import itertools

import numpy as np
import plotly.graph_objects as go
import pytest

from kvcourse.figures import chapter_00, chapter_02, chapter_04, chapter_05, chapter_a
from kvcourse.figures import template as look

# The table of the visual language: meaning -> color.
DOCUMENTED = {
    "KEY": "#0072B2",
    "VALUE": "#E69F00",
    "QUERY": "#009E73",
    "MASKED": "#BBBBBB",
    "WRONG": "#D55E00",
    "PUBLISHED": "#999999",
}


def _numbers(tree, name):
    """All values stored under ``name`` anywhere in a nested dict."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _numbers(value, name)
        elif key == name:
            yield value


def _rgb(color):
    return ", ".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))


@pytest.mark.parametrize(("name", "color"), DOCUMENTED.items())
def test_colors_are_the_documented_ones(name, color):
    assert getattr(look, name) == color


def test_no_two_meanings_share_a_color():
    colors = [*DOCUMENTED.values(), look.INK, look.PAPER]
    assert len({color.lower() for color in colors}) == len(colors)


def test_cached_is_45_percent_and_new_is_full():
    assert (look.NEW_OPACITY, look.CACHED_OPACITY) == (1.0, 0.45)
    assert look.HATCH != look.CROSS_HATCH


@pytest.mark.parametrize("color", [look.INK, look.PAPER])
@pytest.mark.parametrize("what", ["fill", "stroke"])
def test_the_style_sheet_replaces_both_sentinels(color, what):
    # plotly writes inline styles through the browser, which spells colors exactly like this.
    assert f'[style*="{what}: rgb({_rgb(color)})"]' in look.THEME_CSS


def test_template_is_transparent_and_14_px():
    layout = look.TEMPLATE.layout.to_plotly_json()
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"
    sizes = list(_numbers(layout, "size"))
    assert sizes and min(sizes) >= 14
    assert layout["font"]["color"] == look.INK
    assert layout["hoverlabel"]["bgcolor"] == look.PAPER
    assert layout["xaxis"]["automargin"] and layout["yaxis"]["automargin"]
    assert look.CONFIG["displayModeBar"] is False


def test_new_figure_names_axes_and_marks_log_axes():
    figure = look.new_figure("tokens", "time (ms)", log_y=True)
    assert figure.layout.xaxis.title.text == "tokens"
    assert figure.layout.yaxis.title.text == "time (ms), log scale"
    assert figure.layout.yaxis.type == "log"
    assert figure.layout.xaxis.type is None
    assert figure.layout.height == look.HEIGHT <= 420


def test_new_figure_refuses_a_tall_figure():
    with pytest.raises(ValueError, match=r"height=421 px is above the 420 px"):
        look.new_figure("x", "y", height=421)


def test_published_and_here_cannot_be_confused():
    published = look.published([1, 2], [3, 4], name="laptop", source="source 1, 8 threads", unit="ms")
    here = look.here([1, 2], [3, 4], name="here", unit="ms")
    assert published.line.dash == "dash" and here.line.dash is None
    assert published.line.color == look.PUBLISHED and here.line.color == look.HERE
    assert "source: source 1, 8 threads" in published.hovertemplate
    assert here.mode == published.mode == "lines+markers"


def test_heat_map_leaves_exact_zero_out_and_tints_the_smallest():
    z = [[0.0, 1e-9], [-0.0, 2.0]]
    trace = look.heat_map(z, hover=[["a", "b"], ["c", "d"]])
    assert [list(row) for row in trace.z] == [[None, 1e-9], [None, 2.0]]
    # 1e-9 of 2 is drawn at the bottom of the scale, which must still be seen on the bare page.
    lowest = float(trace.colorscale[0][1].rstrip(")").split(",")[-1])
    assert lowest >= 0.3
    assert trace.zmin == 0 and trace.zmax == 2.0
    assert [list(row) for row in trace.text] == [["a", "b"], ["c", "d"]]


def test_heat_map_scale_does_not_move_when_fixed():
    assert look.heat_map([[0.5]], hover=[["a"]], largest=3).zmax == 3
    assert look.heat_map([[0.0]], hover=[["a"]]).zmax > 0  # all zero: no division by nothing


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_heat_map_refuses_what_a_norm_cannot_be(bad):
    with pytest.raises(ValueError, match="not a finite number >= 0"):
        look.heat_map([[bad]], hover=[["a"]])


def test_colorway_starts_with_the_course_colors():
    first = look.TEMPLATE.layout.colorway[:4]
    assert first == (look.KEY, look.VALUE, look.QUERY, look.WRONG)


def test_key_value_query_differ_in_lightness_for_people_who_see_no_color():
    def lightness(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for one, other in itertools.combinations([look.KEY, look.VALUE, look.QUERY], 2):
        low, high = sorted([lightness(one), lightness(other)])
        assert (high + 0.05) / (low + 0.05) > 1.4


def test_helpers_make_figures_that_plotly_accepts():
    figure = look.new_figure("x", "y")
    figure.add_trace(look.here([1], [2], name="a"))
    assert isinstance(figure, go.Figure) and len(figure.data) == 1


def test_cells_are_written_in_the_themes_color():
    """A digit in plotly's own color is dark gray on the dark page."""
    drawn = look.cells([2], [5], length=0.8, text=["7"], hovertext=["seven"])
    assert drawn.textfont.color == look.INK and drawn.textfont.size == look.TEXT_SIZE
    assert (drawn.x, drawn.base, drawn.y) == ((0.8,), (1.6,), (5,))
    assert look.cells([2], [5], textfont={"color": "#fff"}).textfont.color == "#fff"


def test_token_texts_are_no_markup():
    """Tokens such as "<b>" or "&lt;" are shown as they are, in every figure that names tokens."""
    assert look.plain('a <b> & "q"') == 'a &lt;b&gt; &amp; "q"'
    pieces = ["<b>", "&lt;", "x"]
    weights = np.full((1, 1, 3, 3), 1 / 3, np.float32)
    before = np.zeros((1, 1, 3, 4), np.float32)
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    rows = np.ones((1, 1, 3), np.float32)
    passed = chapter_04.Pass(
        "decode", 2, tuple(pieces), "<b>", (0, 0, 1), weights[:, :, 2:], keys=rows, values=rows, head_dim=4
    )
    two = np.stack([logits, logits])

    def word(token):
        return pieces[token]

    drawn = {
        "00": chapter_00.next_token_figure(chapter_00.next_token(two, pieces, [0, 1, 2], 1, 1.0)),
        "a": chapter_a.attention_figure(chapter_a.attention(weights, pieces, 0, 0, 2)),
        "a triangle": chapter_a.triangle_figure(pieces),
        "02": chapter_02.change_figure(chapter_02.change(before, before + 1, pieces, 0)),
        "04": chapter_04.steps_figure(chapter_04.steps({1: [passed]}, 0, 1, 0, 0)),
        "05": chapter_05.compare_figure(
            chapter_05.compare(0, "float32", False, two, dict.fromkeys(chapter_05.FORMATS, two), word)
        ),
    }
    for name, figure in drawn.items():
        texts = list(strings(figure.to_plotly_json()))
        assert any("&lt;b&gt;" in text for text in texts), name
        assert not any("<b>" in text for text in texts), name


def strings(value):
    """Every text in a figure, wherever it stands."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)


def test_a_second_axis_gets_the_settings_of_the_first():
    figure = look.new_figure("x", "y")
    assert look.axis_like(figure, "xaxis") == look.TEMPLATE.layout.xaxis.to_plotly_json() != {}
