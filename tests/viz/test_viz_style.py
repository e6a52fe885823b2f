"""The look of figures: one for all of them, on whatever ground and wherever they are saved."""

from dataclasses import dataclass
from io import BytesIO

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt

from curvescope.runs.study_result import Shown
from curvescope.viz import history, notebook, spectrum, style


@dataclass(frozen=True)
class Drawn(Shown):
    """A result with one figure that sets nothing itself."""

    def summary(self):
        return []

    def captions(self):
        return {}

    def tables(self):
        return {}

    def figures(self):
        figure, ax = plt.subplots()
        ax.plot([1, 2], [3, 4])
        ax.plot([1, 2], [4, 5], color="black")
        return {"one": figure}


@pytest.fixture
def figure():
    before = dict(mpl.rcParams)
    found = Drawn().figures()["one"]
    assert dict(mpl.rcParams) == before
    yield found
    plt.close(found)


def test_figures_of_results_have_the_look(figure):
    (ax,) = figure.axes
    assert ax.lines[0].get_color() == style.BLUE
    assert [line.get_linestyle() for line in ax.lines] == ["-", "-"]  # a color of one's own stays solid
    assert not ax.spines["top"].get_visible()


def test_ticks_that_are_made_when_it_is_saved_have_it_too(figure):
    (ax,) = figure.axes
    ax.set_xlim(0, 1000)
    figure.savefig(BytesIO(), format="svg")
    sizes = {label.get_fontsize() for label in [*ax.get_xticklabels(), *ax.get_yticklabels()]}
    assert sizes == {8.0}


def test_symbols_of_a_figure_are_set():
    @style.styled
    def draw():
        figure, ax = plt.subplots()
        ax.plot([1, 2], label="λ_max, H")
        ax.legend()
        ax.set_title("λ_min", loc="left")
        return {"one": figure}

    (ax,) = draw()["one"].axes
    assert ax.get_title("left") == r"$\lambda_{\mathrm{min}}$"
    assert ax.get_legend().get_texts()[0].get_text() == r"$\lambda_{\mathrm{max}}$, H"
    plt.close(ax.figure)


def test_sizes_that_a_figure_sets_stay():
    @style.styled
    def draw():
        figure, ax = plt.subplots()
        ax.tick_params(labelsize=6)
        return {"one": figure}

    (ax,) = draw()["one"].axes
    assert ax.get_xticklabels()[0].get_fontsize() == 6
    plt.close(ax.figure)


@pytest.mark.parametrize(("color", "ink"), [("#ffffcc", "black"), ("#800026", "white"), ("#053061", "white")])
def test_words_are_read_on_colors(color, ink):
    assert style.ink(mpl.colors.to_rgb(color)) == ink


def test_notebooks_have_the_same_colors():
    assert notebook.COLORS == style.MANY


def test_an_eigenvalue_far_away_does_not_squeeze_the_panels():
    figure, axes = plt.subplots(1, 2, layout="constrained")
    edges = np.linspace(-1, 1, 5)
    for ax in axes:
        share = np.linspace(0, 1, 4)
        spectrum.cumulative(ax, edges, (share, share), linear=0.1, nodes=np.array([1e4]))
    figure.draw_without_rendering()
    assert all(ax.get_xlim()[1] > 1e4 for ax in axes)
    assert all(ax.get_position().width > 0.3 for ax in axes)
    plt.close(figure)


@pytest.mark.parametrize("ground", ["#ffffff", "#171b22"])
def test_lines_of_scenes_are_seen_on_light_and_dark_pages(ground):
    def light(color):
        parts = np.array(mpl.colors.to_rgb(color))
        parts = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return parts @ [0.2126, 0.7152, 0.0722] + 0.05

    for name in ("hessian", "ggn", "quadratic"):
        a, b = light(style.on_screen(style.LOOKS[name].color)), light(ground)
        assert max(a, b) / min(a, b) > 3


def test_signs_are_kept_in_maps_over_steps():
    figure, (ax,) = history.panels(1)
    values = np.array([[1.0, 10.0], [-5.0, np.nan]])
    history.step_map(ax, np.array([0, 1]), ["a", "b"], values, label="trace")
    figure.draw_without_rendering()
    image = ax.collections[0]
    assert image.get_cmap().name == style.SIGNED
    assert np.ma.getmaskarray(image.get_array()).tolist() == [[False, False], [False, True]]
    r, _, b, _ = image.to_rgba(np.array([-5.0]))[0]
    assert b > r
    plt.close(figure)


def test_cells_of_a_map_hold_their_values_and_empty_ones_nothing():
    figure, ax = style.subplots(figsize=(2, 2))
    ax.imshow(np.array([[0.0, 1.0], [np.nan, 0.5]]), cmap="gray")
    style.write_cells(ax, "{:.1f}".format)
    shown = {text.get_position(): (text.get_text(), text.get_color()) for text in ax.texts}
    assert {place: words for place, (words, _) in shown.items()} == {
        (0, 0): "0.0",
        (1, 0): "1.0",
        (1, 1): "0.5",
    }
    assert (shown[0, 0][1], shown[1, 0][1]) == ("white", "black")
    plt.close(figure)
