"""Divergences between spectra against known ones, and their errors."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.algorithms.blocks.heterogeneity import WIDTH, heterogeneity, spectra_divergence
from curvescope.core.errors import UsageError
from curvescope.core.operator import Matrix


def _spectrum(*eigenvalues):
    return cs.spectral_density(Matrix(torch.diag(torch.tensor(eigenvalues, dtype=torch.float64))))


def test_point_masses_have_the_divergence_of_two_gaussians():
    """Broadened point masses are Gaussians in asinh(λ / c), whose divergence an integral gives."""
    from scipy.integrate import quad

    for a, b in [(1.0, 1.2), (1.0, 1.5), (-2.0, 2.5), (0.0, 3.0), (1.0, 1000.0)]:
        found = heterogeneity({"a": _spectrum(a, a), "b": _spectrum(b, b)}).divergence[0, 1]
        c = max(abs(a), abs(b))
        p, q = NormalDist(math.asinh(a / c), WIDTH), NormalDist(math.asinh(b / c), WIDTH)

        def term(x, p=p, q=q):
            one, other = p.pdf(x), q.pdf(x)
            middle = (one + other) / 2
            return sum(y * math.log2(y / middle) for y in (one, other) if y > 0) / 2

        ends = sorted([p.mean, q.mean])
        exact = quad(term, ends[0] - 8 * WIDTH, ends[1] + 8 * WIDTH, limit=500, points=ends)[0]
        assert found == pytest.approx(exact, abs=1e-6)


def test_equal_spectra_have_no_divergence_and_far_ones_one_bit():
    far = heterogeneity({"a": _spectrum(-5.0), "b": _spectrum(4.0), "c": _spectrum(-5.0)}, width=0.05)
    assert far.divergence[0, 2] == 0
    assert far.divergence[0, 1] == pytest.approx(1)
    assert far.mean == pytest.approx(2 / 3)
    scaled = heterogeneity({"a": _spectrum(-5e6), "b": _spectrum(4e6), "c": _spectrum(-5e6)}, width=0.05)
    np.testing.assert_allclose(scaled.divergence, far.divergence)  # no unit of curvature is set apart
    empty = heterogeneity({"a": _spectrum(0.0), "b": _spectrum(0.0)})
    assert empty.mean == 0


def test_half_the_mass_moved_is_less_than_a_bit():
    """p = δ_a, q = (δ_a + δ_b) / 2: 1 − (3/4) log₂(3) + 1/2 − … = 0.3113 bits."""
    found = heterogeneity({"p": _spectrum(1.0, 1.0), "q": _spectrum(1.0, -1.0)}, width=0.02)
    exact = 0.5 * math.log2(1 / 0.75) + 0.5 * (0.5 * math.log2(0.5 / 0.75) + 0.5 * math.log2(0.5 / 0.25))
    assert found.divergence[0, 1] == pytest.approx(exact, abs=1e-6)


def test_the_error_of_a_divergence_is_calibrated():
    """Over seeds, the deviation from the exact spectra's divergence is about the error that is told."""
    source = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(60, 60, generator=source, dtype=torch.float64))[0]
    spectra = {"a": torch.linspace(-1, 2, 60), "b": torch.linspace(-1, 1, 60) ** 3 * 3}
    ops = {name: Matrix((A := Q @ torch.diag(x.double()) @ Q.T) / 2 + A.T / 2) for name, x in spectra.items()}
    exact = {n: cs.spectral_density(op, num_steps=60) for n, op in ops.items()}
    truth = heterogeneity(exact).divergence[0, 1]
    scores = []
    for seed in range(12):
        options = {"num_probes": 6, "num_steps": 12, "seed": seed}
        found = heterogeneity({n: cs.spectral_density(op, **options) for n, op in ops.items()})
        value = found.divergence[0, 1] - found.bias[0, 1]
        scores.append((value - truth) / found.stderr[0, 1])
    z = np.array(scores)
    assert np.abs(z).max() < 4.5
    assert 0.6 < np.sqrt((z**2).mean()) < 1.6


def test_spectra_to_compare_are_checked():
    with pytest.raises(UsageError, match="at least two"):
        heterogeneity({"a": _spectrum(1.0)})
    A = Matrix(torch.eye(10, dtype=torch.float64))
    ops = {str(n): cs.spectral_density(A, num_probes=n, num_steps=4) for n in (2, 3)}
    with pytest.raises(UsageError, match="same number of probes"):
        heterogeneity(ops)
    single = {n: cs.spectral_density(A, num_probes=1, num_steps=4) for n in "ab"}
    assert math.isnan(heterogeneity(single).mean_stderr)


def test_eigenvalues_have_the_divergence_of_their_exact_densities():
    source = np.random.default_rng(0)
    spectra = [source.standard_normal(n) * scale for n, scale in ((7, 1.0), (4, 30.0), (5, 0.0))]
    densities = {str(i): _spectrum(*values) for i, values in enumerate(spectra)}
    found = heterogeneity(densities).divergence
    for a in range(3):
        for b in range(3):
            assert spectra_divergence(spectra[a], spectra[b]) == pytest.approx(found[a, b], abs=1e-9)
