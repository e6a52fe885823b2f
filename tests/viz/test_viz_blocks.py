"""Figures of blocks: numbers that can be told apart, names that do not touch."""

import itertools

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import LogNorm, SymLogNorm

from curvescope.core.number_format import below_noise, plural
from curvescope.viz import blocks


@pytest.fixture(autouse=True)
def _figures_are_closed():
    mpl.use("Agg")
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.parametrize("scale", [1e-9, 1e-5, 1e-3, 1e-2, 1.0, 1e2, 1e3, 1e5, 1e8])
def test_neighbors_are_told_apart_at_any_magnitude(scale):
    values = [scale * x for x in (1.435, 1.131, 1.059, 9.994, 9.5, -1.435)]
    found = [blocks.cell_text(value) for value in values]
    assert len(set(found)) == len(found)
    assert max(map(len, found)) <= 8
    np.testing.assert_allclose([float(text) for text in found], values, rtol=5e-3)


def test_cells_of_round_numbers():
    assert [blocks.cell_text(x) for x in (0.0, 1435.2, 13.11, 0.03141, 1.44e6)] == [
        *("0", "1435", "13.1", "0.0314", "1.44e6")
    ]
    assert blocks.cell_text(float("nan")) == "nan"


@pytest.mark.parametrize(
    "norm", [LogNorm(2e-4, 3.0), SymLogNorm(3e-3, vmin=-40.0, vmax=40.0), LogNorm(1, 1e9)]
)
def test_ticks_of_a_color_bar_are_few_and_inside(norm):
    ticks = blocks.color_ticks(norm)
    assert 1 <= len(ticks) <= 5
    assert all(norm.vmin <= tick <= norm.vmax for tick in ticks)
    assert (0.0 in ticks) == (norm.vmin < 0)


@pytest.mark.parametrize(("layers", "inches"), [(1, 6), (6, 4), (12, 4), (48, 3)])
def test_names_of_blocks_do_not_touch(layers, inches):
    import matplotlib.pyplot as plt

    names = ["E", "P", *(f"L{i}.W_{role}" for i in range(layers) for role in "QKVO12"), "U"]
    figure, ax = plt.subplots(figsize=(inches, inches), layout="constrained")
    blocks.heat_map(ax, names, np.ones((len(names),) * 2), color_bar=False)
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in ax.get_yticklabels() if label.get_text()]
    assert len(boxes) >= 5
    assert all(b.y1 <= a.y0 + 1 for a, b in itertools.pairwise(boxes))
    assert all(box.x0 >= 0 for box in boxes)


def test_words_of_numbers():
    assert [plural(1, "probe"), plural(16, "probe"), plural(1024, "block")] == [
        *("1 probe", "16 probes", "1,024 blocks")
    ]
    assert below_noise(0.0, 3.21) == "< 3.3"
    assert below_noise(2.5, 3.21) == 2.5
    assert below_noise(0.0, 0.0) == 0.0


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("size", [0.0, 1e-320, 1e-250, 1e-150, 1e-17])
def test_bars_of_zeros_and_of_rounding_are_drawn(size):
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(3, 2))
    values = np.array([size, -size / 2, 0.0])
    blocks.bars(ax, ["a", "b", "c"], {"trace": (values, values, values)})
    figure.canvas.draw()
    assert ax.get_yscale() == ("symlog" if size > blocks.NOTHING else "linear")
    assert blocks.largest([*values, float("nan")]) == (size if size > blocks.NOTHING else 1.0)
