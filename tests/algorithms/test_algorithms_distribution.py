"""Cumulative distributions with certain bounds, shares near zero, outliers, kernels that respect a sign."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms_known import SPECTRA, uniform, with_spectrum
from scipy.integrate import trapezoid

from curvescope.algorithms import SpectralDensity, spectral_density
from curvescope.core.operator import Matrix
from curvescope.core.seeds import probes
from selection import some


@pytest.mark.parametrize("name", ["outliers", "repeated", "rank three", "even", "normal"])
@pytest.mark.parametrize("seed", some(range(3), 1))
def test_bounds_hold_for_the_measure_of_each_probe(name, seed):
    eigenvalues = SPECTRA[name]
    op = with_spectrum(eigenvalues)
    found = spectral_density(op, num_probes=1, num_steps=12, seed=seed)
    values, U = np.linalg.eigh(op.A.numpy())
    start = probes(200, 1, seed=seed).numpy()[:, 0]
    weights = (U.T @ start) ** 2 / 200
    between = np.linspace(values[0] - 0.1, values[-1] + 0.1, 999)
    steps = found.cumulative(between)
    true = (weights[:, None] * (values[:, None] <= between)).sum(axis=0)
    assert (steps.low <= true + 1e-9).all()
    assert (true <= steps.high + 1e-9).all()
    assert (steps.low <= steps.share).all()
    assert (steps.share <= steps.high).all()
    assert (steps.high - steps.low).max() < 1
    np.testing.assert_allclose(steps.share, found.cdf(between), atol=1e-12)


def test_exact_distributions_have_no_error():
    eigenvalues = SPECTRA["small"]
    steps = spectral_density(with_spectrum(eigenvalues)).cumulative()
    np.testing.assert_allclose(steps.x, np.sort(eigenvalues), atol=1e-12)
    np.testing.assert_allclose(steps.share, np.arange(1, 31) / 30)
    np.testing.assert_array_equal(steps.low, steps.high)
    assert (steps.stderr == 0).all()


def test_share_near_zero():
    eigenvalues = np.r_[np.zeros(150), np.linspace(1, 10, 50)]
    found = spectral_density(with_spectrum(eigenvalues, psd=True), num_probes=16, num_steps=20)
    share = found.share_near_zero(0.5)
    assert abs(share.value - 0.75) <= 4 * share.stderr
    assert share.low - 4 * share.stderr <= 0.75 <= share.high + 4 * share.stderr
    assert share.low <= share.value <= share.high
    exact = spectral_density(with_spectrum(eigenvalues), num_steps=200).share_near_zero(0.5)
    assert (exact.value, exact.low, exact.high, exact.stderr) == (0.75, 0.75, 0.75, 0.0)
    assert spectral_density(with_spectrum(SPECTRA["zero"])).share_near_zero(1e-3).value == pytest.approx(1)


def test_outliers_are_listed_with_their_number():
    eigenvalues = np.r_[50.0, 20, 20, -30, uniform(-1, 1, 296)]
    found = spectral_density(with_spectrum(eigenvalues), num_probes=12, num_steps=40).outliers()
    np.testing.assert_allclose(found.values, [-30, 20, 50], atol=1e-6)
    assert (np.abs(found.count - [1, 2, 1]) <= 4 * found.count_stderr).all()
    assert (found.spread < 1e-6).all()
    exact = spectral_density(with_spectrum(eigenvalues), num_steps=300).outliers()
    np.testing.assert_allclose(exact.values, [-30, 20, 50], atol=1e-9)
    np.testing.assert_allclose(exact.count, [1, 2, 1])
    assert len(spectral_density(with_spectrum(uniform(-1, 1, 400)), num_steps=10).outliers().values) == 0


ISOLATED = {  # eigenvalues, and the most outliers that they have
    "decaying": (10.0 ** -np.linspace(0, 18, 120), 6),
    "flat": (np.linspace(0, 1, 120), 0),
    "uniform": (uniform(0, 1, 120), 0),
    "power law": (1 / np.arange(1.0, 121), 5),
    "two bulks": (np.r_[uniform(0, 0.1, 90), uniform(0.9, 1, 30)], 0),
    "repeated": (np.r_[[10.0] * 5, [-8.0] * 3, uniform(-1, 1, 112)], 2),
    "negative": (np.r_[-10.0, -10, 5, uniform(-1, 1, 117)], 2),
    "rank three": (np.r_[3.0, 2, -1, np.zeros(117)], 3),
    "constant": (np.full(120, 3.0), 0),
    "few rows": (uniform(0, 1, 12), 0),
}


@pytest.mark.parametrize("name", ISOLATED)
@pytest.mark.parametrize(("num_probes", "num_steps"), [(8, 12), (1, 20), (4, 40)])
def test_outliers_are_isolated_and_counted_within_their_error(name, num_probes, num_steps):
    eigenvalues, most = ISOLATED[name]
    op = with_spectrum(eigenvalues)
    for seed in range(3):
        density = spectral_density(op, num_probes=num_probes, num_steps=num_steps, seed=seed)
        found = density.outliers()
        assert len(found.values) <= most
        for value, count, stderr in zip(found.values, found.count, found.count_stderr, strict=True):
            near = np.abs(eigenvalues - value) < density.width / 2
            assert np.abs(eigenvalues[~near] - value).min() > 1.5 * density.width
            assert abs(count - near.sum()) <= 4 * stderr + 1e-9


@pytest.mark.parametrize("num_steps", [12, 200])
def test_all_eigenvalues_of_the_zero_operator_are_near_zero(num_steps):
    found = spectral_density(with_spectrum(SPECTRA["zero"]), num_steps=num_steps)
    share = found.share_near_zero()
    assert (share.value, share.low, share.high) == pytest.approx((1, 1, 1))
    assert len(found.outliers().values) == 0


def test_no_mass_below_zero_for_a_psd_operator():
    eigenvalues = np.r_[np.zeros(150), np.linspace(0, 10, 50)]
    found = spectral_density(with_spectrum(eigenvalues, psd=True), num_steps=20)
    assert found.psd
    grid, density, stderr = found.smoothed()
    assert grid.min() == 0
    assert density.shape == stderr.shape == grid.shape
    assert trapezoid(density, grid) == pytest.approx(1, abs=2e-3)
    assert (found.smoothed(np.linspace(-5, -0.01, 9))[1] == 0).all()
    assert (found.cumulative(np.array([-1.0, -1e-9])).high == 0).all()
    other = spectral_density(with_spectrum(eigenvalues), num_steps=20)
    assert other.smoothed()[0].min() == other.extremes[0]
    assert trapezoid(found.smoothed(np.linspace(0, 12, 4000), 0.05)[1], dx=12 / 3999) == pytest.approx(
        1, abs=2e-3
    )


def test_results_saved_before_the_sign_was_known_still_load(tmp_path):
    import json

    found = spectral_density(with_spectrum(SPECTRA["small"], psd=True))
    folder = found.save(tmp_path)
    tree = json.loads((folder / "result.json").read_text())
    del tree["fields"]["psd"]
    (folder / "result.json").write_text(json.dumps(tree))
    assert SpectralDensity.load(folder).psd is False


def test_cumulative_and_outliers_are_saved(tmp_path):
    found = spectral_density(Matrix(torch.diag(torch.arange(300.0).double())), num_probes=3, num_steps=9)
    steps = found.cumulative()
    np.testing.assert_array_equal(type(steps).load(steps.save(tmp_path / "c")).low, steps.low)
    assert (
        type(found.outliers()).load(found.outliers().save(tmp_path / "o")).values.shape
        == found.outliers().values.shape
    )
