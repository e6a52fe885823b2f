"""What is certain of a density at few steps: bounds, ends, and the share of eigenvalues that is resolved."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from curvescope.algorithms import spectral_density
from curvescope.core.operator import Matrix

SIZE = 120
SPECTRA = {
    "bulk and outliers": np.concatenate([np.linspace(-1, 1, SIZE - 3), [30.0, 60.0, 100.0]]),
    "even": np.linspace(-3, 8, SIZE),
    "psd": np.concatenate([np.zeros(SIZE // 2), np.geomspace(1e-4, 50, SIZE - SIZE // 2)]),
}


def operator(name: str) -> Matrix:
    """A matrix with this spectrum and random eigenvectors."""
    source = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=source, dtype=torch.float64))[0]
    values = torch.as_tensor(SPECTRA[name])
    return Matrix((Q * values) @ Q.T, symmetric=True, psd=bool((values >= 0).all()))


@pytest.mark.parametrize("num_steps", [5, 16, 40])
@pytest.mark.parametrize("name", list(SPECTRA))
def test_the_smoothed_measure_of_the_probes_lies_in_its_certain_bounds(name, num_steps):
    A = operator(name)
    few = spectral_density(A, num_probes=2, num_steps=num_steps)
    every = spectral_density(A, num_probes=2, num_steps=SIZE - 1)  # the same probes, all of their measure
    ends = SPECTRA[name][[0, -1]]
    grid = few.smoothed(ends=ends)[0]
    density = every.smoothed(grid, few.width, ends=ends)[1]
    low, high = few.certain_bounds(grid, ends=ends)
    slack = 1e-6 * density.max()
    assert (low <= density + slack).all()
    assert (density <= high + slack).all()


@pytest.mark.parametrize("name", list(SPECTRA))
def test_a_smoothed_density_ends_with_the_spectrum(name):
    found = spectral_density(operator(name), num_probes=1, num_steps=8)
    low, high = found.ends()
    grid, density, _ = found.smoothed()
    assert (grid[0], grid[-1]) == (low, high)
    assert low == (0.0 if found.psd else found.extremes[0])
    assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=2e-3)
    wide = np.linspace(low - 10, high + 10, 400)
    outside = (wide < low) | (wide > high)
    assert not found.smoothed(wide)[1][outside].any()
    assert found.smoothed(ends=np.array([200.0]))[0][-1] == 200.0


def test_more_steps_resolve_more():
    few, many = (spectral_density(operator("even"), num_probes=2, num_steps=n, width=0.4) for n in (5, 60))
    assert few.resolved < 0.2
    assert many.resolved > 0.9


def test_what_is_narrower_than_the_kernel_is_not_resolved():
    found = spectral_density(operator("bulk and outliers"), num_probes=1, num_steps=16)
    assert found.width > 2  # the bulk is from −1 to 1
    assert found.resolved < 0.05
    assert found.with_width(0.3).resolved > 0.8


def test_words_do_not_say_what_is_not_known():
    found = spectral_density(operator("bulk and outliers"), num_probes=1, num_steps=6)
    assert "0 to 100 %" not in found.words
    size = found.within(0.9)
    assert np.isfinite(size)
    assert (np.abs(SPECTRA["bulk and outliers"]) <= size).mean() > 0.8
    assert found.within(1.0) >= size


def test_a_figure_is_gray_where_something_is_open():
    areas = {}
    for num_steps in (8, SIZE):
        ax = spectral_density(operator("even"), num_probes=1, num_steps=num_steps).plot(log_y=False)
        areas[num_steps] = len(ax.collections)
        plt.close(ax.figure)
    assert areas[8] == areas[SIZE] + 1  # all eigenvalues: nothing is open


@pytest.mark.parametrize(
    ("name", "num_steps", "solid"), [("even", 60, True), ("bulk and outliers", 16, False)]
)
def test_a_peak_that_is_the_kernels_is_dotted(name, num_steps, solid):
    found = spectral_density(operator(name), num_probes=2, num_steps=num_steps, width=2.0 if solid else None)
    ax = found.plot()
    line = ax.lines[0].get_ydata()
    plt.close(ax.figure)
    assert np.isfinite(line[np.argmax(found.smoothed()[1])]) == solid
