"""A density at another width without products, and on a logarithmic axis."""

from __future__ import annotations

import numpy as np
import pytest
from algorithms_known import Counting, with_spectrum
from scipy.integrate import trapezoid

from curvescope.algorithms import spectral_density
from curvescope.algorithms.spectra.log_density import LogDensity
from curvescope.core.errors import ShapeError, UsageError

DECADES = np.r_[10.0 ** np.linspace(-4, 2, 60), np.zeros(20)]


def log_integral(rho: LogDensity) -> float:
    return float(trapezoid(rho.density, np.log10(rho.grid)))


@pytest.mark.parametrize("psd", [False, True])
def test_another_width_is_what_a_new_run_would_give_and_takes_no_product(psd):
    op = Counting(with_spectrum(DECADES, psd=psd))
    rho = spectral_density(op, num_probes=3, num_steps=12)
    before = op.columns
    wide = rho.with_width(7.5)
    assert op.columns == before
    again = spectral_density(op, num_probes=3, num_steps=12, width=7.5)
    for name in ("grid", "density", "stderr", "nodes"):
        np.testing.assert_allclose(getattr(wide, name), getattr(again, name), atol=1e-12)
    assert wide.width == again.width == 7.5
    np.testing.assert_array_equal(rho.with_width(2.0, grid=wide.grid).grid, wide.grid)


def test_wrong_widths():
    rho = spectral_density(with_spectrum(DECADES), num_probes=2, num_steps=5)
    for width in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="finite width above 0"):
            rho.with_width(width)
    with pytest.raises(UsageError, match="for width, got 'a'"):
        rho.with_width("a")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match="grid of finite points"):
        rho.with_width(1.0, grid=np.zeros((2, 2)))


def test_log_axis_of_all_eigenvalues():
    rho = spectral_density(with_spectrum(DECADES, psd=True), num_steps=80).on_log_axis(threshold=1e-5)
    assert rho.exact
    assert rho.below.value == rho.below.low == rho.below.high == pytest.approx(0.25)
    assert rho.below_interval == (rho.below.value, rho.below.value)
    assert log_integral(rho) == pytest.approx(0.75, abs=1e-3)
    inside = (rho.grid > 1e-3) & (rho.grid < 10)
    np.testing.assert_allclose(rho.density[inside], 0.75 / 6, rtol=0.05)  # evenly over six decades
    assert not rho.stderr.any()


def test_log_axis_by_lanczos_meets_its_error():
    op = with_spectrum(DECADES, psd=True)
    exact = spectral_density(op, num_steps=80)
    errors, held = [], []
    for seed in range(5):
        found = spectral_density(op, num_probes=5, num_steps=30, seed=seed).on_log_axis(threshold=0.01)
        low, high = found.below_interval
        truth = exact.on_log_axis(threshold=0.01).below.value
        errors.append(found.below.value - truth)
        held.append(low <= truth <= high)
        assert found.below.low <= found.below.value <= found.below.high
        assert log_integral(found) == pytest.approx(1 - found.below.value, abs=1e-3)
    assert np.mean(held) >= 0.9
    assert abs(np.mean(errors)) < 0.1


def test_log_axis_in_a_frame_and_a_figure(tmp_path):
    rho = spectral_density(with_spectrum(DECADES, psd=True), num_probes=3, num_steps=20).on_log_axis()
    assert rho.threshold == pytest.approx(1e-7 * 100, rel=1e-6)
    frame = rho.to_frame()
    assert list(frame) == ["eigenvalue", "density", "stderr", "low", "high"]
    np.testing.assert_allclose(np.diff(np.log(rho.grid)), np.log(rho.grid[1] / rho.grid[0]))
    ax = rho.plot()
    assert ax.get_xscale() == "log"
    assert "% of eigenvalues" in ax.texts[0].get_text()
    again = LogDensity.load(rho.save(tmp_path))
    assert again.below == rho.below


def test_log_axis_is_refused():
    with pytest.raises(UsageError, match="declared psd"):
        spectral_density(with_spectrum(DECADES), num_probes=2, num_steps=5).on_log_axis()
    rho = spectral_density(with_spectrum(DECADES, psd=True), num_probes=2, num_steps=5)
    with pytest.raises(UsageError, match="no eigenvalue was found above the threshold 1e\\+03"):
        rho.on_log_axis(threshold=1e3)
    with pytest.raises(UsageError, match="finite width above 0"):
        rho.on_log_axis(width=0.0)
