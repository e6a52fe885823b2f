"""matplotlib figures as plotly's JSON: what is drawn is what is carried over."""

import json

import matplotlib as mpl
import numpy as np
import pytest

from curvescope.viz import interactive


@pytest.fixture
def axes():
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2)
    yield figure, axes
    plt.close(figure)


def test_lines_bands_and_bars(axes):
    figure, (one, two) = axes
    one.loglog([1, 10], [2, 200], "--", color="#ff0000", label="σ$^2$")
    one.fill_between([1, 10], [1, 100], [3, 300], alpha=0.2)
    one.errorbar([1, 10], [2, 200], yerr=[1, 20], fmt="o", label="points")
    one.axvline(3, color="black")
    two.bar([0, 1], [3, 4], width=0.5, label="bars")
    two.stairs([3, 4], [0, 1, 2], label="σ$^2$")
    found = interactive.scene(figure)
    layout, data = found["layout"], found["data"]
    assert layout["xaxis"]["type"] == "log"
    assert layout["yaxis2"]["type"] == "linear"
    (line,) = (t for t in data if t.get("name") == "σ<sup>2</sup>" and t["xaxis"] == "x")
    assert (line["x"], line["y"]) == ([1, 10], [2, 200])
    assert line["line"] == {"color": "rgba(255,0,0,1)", "width": pytest.approx(1.5), "dash": "dash"}
    named = [t for t in data if t.get("name") == "σ<sup>2</sup>"]
    assert [t["showlegend"] for t in named] == [False, True] or [t["showlegend"] for t in named] == [
        True,
        False,
    ]
    assert sum(t.get("fill") == "toself" for t in data) == 2
    (bars,) = (t for t in data if t.get("name") == "bars")
    assert max(v for v in bars["y"] if v is not None) == 4
    (steps,) = (t for t in named if t["xaxis"] == "x2")
    assert steps["x"] == [0, 0, 1, 1, 2, 2]
    assert steps["y"] == [0, 3, 3, 4, 4, 0]
    (rule,) = layout["shapes"]
    assert (rule["x0"], rule["xref"], rule["yref"]) == (3, "x", "y domain")
    json.dumps(found, allow_nan=False)


def test_texts_pictures_and_titles(axes):
    figure, (one, two) = axes
    one.imshow(np.arange(4.0).reshape(2, 2))
    one.set_title("left", loc="left")
    one.text(0.5, 0.5, "inside", transform=one.transAxes)
    two.semilogx([1, 100], [0, 1])
    two.annotate("ten", (10, 0.5))
    found = interactive.scene(figure)["layout"]
    (picture,) = found["images"]
    assert (picture["x"], picture["y"], picture["sizex"]) == (-0.5, -0.5, 2)
    assert picture["source"].startswith("data:image/png;base64,")
    words = {note["text"]: note for note in found["annotations"]}
    assert words["left"]["xanchor"] == "left"
    assert words["inside"]["xref"] == "x domain"
    assert words["ten"]["x"] == pytest.approx(1.0)  # plotly wants the logarithm


def test_color_bars_and_hidden_axes_are_left_out(axes):
    figure, (one, two) = axes
    figure.colorbar(one.imshow(np.eye(2)), ax=one)
    two.set_visible(False)
    assert "xaxis2" not in interactive.scene(figure)["layout"]


def test_the_page_needs_no_network(axes):
    pytest.importorskip("plotly")
    figure, (one, _) = axes
    one.plot([0, 1], [0, np.nan], label="</script>")
    html = interactive.page("a <title>", {"one": interactive.scene(figure)}, {"one": "what & why"})
    assert "a &lt;title&gt;" in html
    assert "what &amp; why" in html
    script = html.rsplit("<script>", 1)[1]
    assert script.index("</script>") > script.index("Plotly.newPlot")
    assert "src=" not in html.split("</script>", 1)[1]
