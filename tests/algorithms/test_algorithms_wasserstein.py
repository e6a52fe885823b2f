"""Distances between spectra: point masses against scipy, sorted eigenvalues, the theorem above them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algorithms_known import uniform, with_spectrum
from scipy.stats import wasserstein_distance

import curvescope as cs
from curvescope.algorithms.estimates.intervals import jackknife, ratio_of_norms
from curvescope.algorithms.spectra.wasserstein import point_distance, wasserstein
from curvescope.core.operator import Matrix


@pytest.mark.parametrize(("count", "other"), [(1, 1), (3, 7), (20, 5)])
def test_point_masses_have_the_distance_of_scipy(count: int, other: int):
    source = np.random.default_rng(count)
    x, y = np.round(source.normal(size=count), 1), np.round(source.normal(size=other), 1)  # some are equal
    v, w = source.dirichlet(np.ones(count)), source.dirichlet(np.ones(other))
    expected = wasserstein_distance(x, y, u_weights=v, v_weights=w)
    assert math.isclose(point_distance(x, v, y, w), expected, rel_tol=1e-12)


def test_exact_spectra_move_in_order():
    one, other = uniform(-1, 3, 40), uniform(-2, 2, 40, seed=1)
    p, q = (cs.spectral_density(with_spectrum(values)) for values in (one, other))
    found = wasserstein(p, q)
    assert math.isclose(found.value, np.abs(np.sort(one) - np.sort(other)).mean(), rel_tol=1e-10)
    assert (found.low, found.high, found.stderr, found.unresolved) == (found.value, found.value, 0, 0)
    assert wasserstein(p, p).value == 0
    assert math.isclose(wasserstein(q, p).value, found.value, rel_tol=1e-12)


def test_quadratures_hold_the_truth_within_their_errors():
    """And ‖A − B‖_F / √n is above it (Hoffman and Wielandt)."""
    A = with_spectrum(np.r_[uniform(-0.1, 1, 118), 8.0, 12.0])
    shift = with_spectrum(uniform(-0.8, 0.9, 120, seed=2), seed=3)
    B = Matrix(A.A + shift.A, symmetric=True)
    values = [torch.linalg.eigvalsh(M.A).numpy() for M in (A, B)]
    truth = float(np.abs(values[0] - values[1]).mean())
    assert truth <= float(shift.A.norm()) / math.sqrt(120)
    p, q = (cs.spectral_density(M, num_probes=6, num_steps=30, seed=1) for M in (A, B))
    found = wasserstein(p, q)
    assert found.low <= truth <= found.high
    assert abs(found.value - truth) <= 4 * found.stderr + found.unresolved
    coarse = wasserstein(*(cs.spectral_density(M, num_probes=6, num_steps=8, seed=1) for M in (A, B)))
    assert found.unresolved < 0.5 * coarse.unresolved  # more steps leave less open


def test_the_bounds_of_few_steps_hold_for_every_probe():
    """With one probe, what is unresolved bounds the difference to the probe's own measures."""
    A, B = with_spectrum(uniform(-1, 1, 80)), with_spectrum(uniform(-0.4, 0.3, 80, seed=4), seed=5)
    coarse = wasserstein(*(cs.spectral_density(M, num_probes=1, num_steps=10) for M in (A, B)))
    fine = wasserstein(*(cs.spectral_density(M, num_probes=1, num_steps=79) for M in (A, B)))
    assert math.isnan(coarse.stderr)
    ends = 0.02  # beyond the outermost nodes nothing is bounded
    assert abs(coarse.value - fine.value) <= coarse.unresolved + ends
    assert coarse.unresolved > 5 * fine.unresolved


def test_fewer_steps_are_those_of_a_shorter_run():
    """Nodes and weights hold the whole recurrence."""
    A, B = with_spectrum(uniform(-1, 1, 80)), with_spectrum(np.r_[uniform(-0.4, 0.3, 79), 5.0], seed=5)
    each = [
        wasserstein(*(cs.spectral_density(M, num_probes=3, num_steps=steps) for M in (A, B)))
        for steps in range(5, 11)
    ]
    values = [one.value for one in each]
    assert math.isclose(each[-1].least, min(values), rel_tol=1e-9)
    assert math.isclose(each[-1].most, max(values), rel_tol=1e-9)
    assert each[-1].error >= max(abs(value - values[-1]) for value in values) > 0
    exact = wasserstein(*(cs.spectral_density(M, num_steps=80) for M in (A, B)))
    assert exact.error == 0


def test_spectra_from_other_numbers_of_probes_are_refused():
    A = with_spectrum(uniform(-1, 1, 80))
    p, q = (cs.spectral_density(A, num_probes=count, num_steps=5) for count in (2, 3))
    with pytest.raises(cs.UsageError, match="same number of probes"):
        wasserstein(p, q)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    samples = np.random.default_rng(0).normal(size=9)
    without = (samples.sum() - samples) / 8
    stderr, bias = jackknife(samples.mean(), without)
    assert math.isclose(stderr, samples.std(ddof=1) / 3, rel_tol=1e-12)
    assert abs(bias) < 1e-14
    value, error = ratio_of_norms(4 * samples**2, samples**2)
    assert math.isclose(value, 2.0, rel_tol=1e-12)
    assert error < 1e-14
    assert math.isnan(ratio_of_norms(samples**2, 0 * samples)[0])
