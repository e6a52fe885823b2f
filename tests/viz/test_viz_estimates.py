"""Results of algorithms in notebooks: tables with the numbers, figures that show them, small boxes."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.viz.notebook import LIMIT, LONG

A = cs.Matrix(torch.diag(torch.tensor([5.0, 3.0, 2.0, 1.0, -1.0, -4.0], dtype=torch.float64)), symmetric=True)
SLICES = {"L0.W_Q": slice(0, 4), "L0.W_K": slice(4, 6)}
RESULTS = {
    "trace": lambda: cs.trace(A, num_probes=5),
    "one probe": lambda: cs.trace(A, num_probes=1),
    "eigsh": lambda: cs.eigsh(A, k=3),
    "density": lambda: cs.spectral_density(A, num_probes=2, num_steps=4),
    "block_traces": lambda: cs.block_traces(A, SLICES, num_probes=3),
    "block_map": lambda: cs.block_norms(A, SLICES, num_probes=2),
    "frobenius_norm": lambda: cs.frobenius_norm(A, num_probes=3),
    "diagonal": lambda: cs.diagonal(A, num_probes=3),
    "trace_function": lambda: cs.trace_function(A @ A, "log", damping=1.0, num_probes=3, num_steps=4),
}


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_has_a_table_a_figure_and_a_small_box(name):
    result = RESULTS[name]()
    assert len(result.to_frame())
    ax = plt.subplots()[1]
    assert result.plot(ax) is ax
    assert ax.has_data()
    shown = result._repr_html_()
    assert 'src="data:image/' in shown
    assert ("<table" in shown) == (len(result.to_frame()) <= LONG)
    assert len(shown) < LIMIT


def test_samples_and_their_mean_are_those_of_the_estimate():
    found = cs.trace(A @ A + A, num_probes=5, probe="gaussian")
    np.testing.assert_array_equal(found.to_frame()["trace"], found.samples)
    ax = found.plot()
    mean, points = ax.lines
    assert mean.get_ydata()[0] == found.value
    np.testing.assert_array_equal(points.get_ydata(), found.samples)


def test_the_band_of_a_norm_is_that_of_its_square():
    found = cs.frobenius_norm(A, num_probes=4, probe="gaussian")
    box = found.plot().patches[0].get_extents().transformed(plt.gca().transData.inverted())
    np.testing.assert_allclose([box.y0, box.y1], [found.low**2, found.high**2])


def test_eigenvalues_that_are_not_converged_are_hollow():
    from curvescope.viz.estimates import eigenvalues

    ax = eigenvalues(None, np.array([3.0, 2.0]), np.array([0.0, 0.5]), np.array([True, False]))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["converged", "not converged"]
    assert [line.get_markerfacecolor() for line in ax.lines if line.get_marker() == "o"] == [
        "#1565a8",
        "none",
    ]


def test_entries_are_drawn_from_the_largest_to_the_smallest():
    from curvescope.viz.estimates import POINTS, entries

    values = np.random.default_rng(0).normal(size=5 * POINTS)
    drawn = entries(None, values, label="entry").lines[0].get_ydata()
    assert len(drawn) == POINTS
    assert (drawn[0], drawn[-1]) == (values.max(), values.min())
    assert (np.diff(drawn) <= 0).all()
    entries(None, np.zeros(3), label="entry").figure.canvas.draw()
