"""Names beside points: none on another, none on a mark, and what has no number says so."""

import itertools

import matplotlib as mpl
import numpy as np
import pytest

from curvescope.viz import trajectory as viz
from selection import pairs


@pytest.fixture(autouse=True)
def _figures_are_closed():
    mpl.use("Agg")
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def crowded(num_tokens=14, num_points=7, spread=0.15):
    """Directions, states and names of tokens that lie close together."""
    draw = np.random.default_rng(0).normal
    tokens = [f" word{i}" for i in range(num_tokens - 1)] + [" word0"]
    words = spread * draw(size=(num_tokens, 3))
    words[-1] = words[0]
    return words, spread * draw(size=(num_tokens, num_points, 3)), tokens


def boxes(figure):
    """Name and place of every text on every axes, as drawn, without the lines that lead to it."""
    from matplotlib.text import Text

    figure.canvas.draw()
    for ax in figure.axes:
        yield [(text.get_text(), Text.get_window_extent(text)) for text in ax.texts]


@pytest.mark.parametrize(("kind", "spread"), pairs(["grid", "path"], [0.15, 3.0]))
def test_names_of_points_do_not_lie_on_each_other(kind, spread):
    words, states, tokens = crowded(spread=spread)
    words[0] += 1.0
    if kind == "grid":
        figure = viz.path_grid(words, states[:, ::2], tokens, token=3, panels={"input": 0, "end": 3})
    else:
        names = ["in", "L0.mid", "L0.out", "L1.mid", "L1.out", "L2.mid", "L2.out"]
        figure = viz.single_path(words, states[3], tokens, token=3, names=names, target=4)
    width, height = figure.bbox.size
    for found in boxes(figure):
        assert len(found) >= 6
        for (one, a), (two, b) in itertools.combinations(found, 2):
            across, up = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
            assert min(across, up) < 2, f"{one} lies on {two}"
        assert all(b.x0 > -2 and b.y0 > -2 and b.x1 < width + 2 and b.y1 < height + 2 for _, b in found)


def test_a_token_twice_in_a_prompt_has_its_direction_named_once():
    words, states, tokens = crowded(spread=3.0)
    figure = viz.single_path(words, states[3, :1], tokens, token=3, names=["in"], target=None)
    for found in boxes(figure):
        assert [name for name, _ in found].count("␣word0") == 1


def test_what_has_no_number_is_gray_and_its_words_can_be_read():
    import matplotlib.pyplot as plt

    _, ax = plt.subplots()
    values = np.array([[1.0, 2.0], [np.nan, np.nan]])
    viz.token_map(ax, ["a", "b"], ["in", "L0.out"], values, label="", words=[["x", "y"], ["u", "v"]])
    assert ax.get_facecolor() == (0.9, 0.9, 0.9, 1.0)
    assert {text.get_text(): text.get_color() for text in ax.texts} == {
        "x": "black", "y": "white", "u": "black", "v": "black"
    }  # fmt: skip
