"""Trace, norm and ends of one block: written out, or from Lanczos and probes outside its Krylov space."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algorithms_known import uniform, with_spectrum

from curvescope.algorithms.blocks.probes import extreme_ends, own_probes
from curvescope.core.errors import UsageError
from curvescope.core.operator import Matrix
from selection import some

DOMINATED = np.r_[40.0, uniform(-0.5, 0.5, 119)]
SPECTRA = {
    "dominated": DOMINATED,
    "mixed": np.r_[10.0, 7, 5, -6, -4, uniform(-0.5, 0.5, 115)],
    "flat": uniform(-1, 1, 120),
}
SEEDS = range(80)


@pytest.mark.parametrize("spectrum", some(list(SPECTRA.values()), 1), ids=SPECTRA)
def test_intervals_hold_and_nothing_is_biased(spectrum):
    op = with_spectrum(spectrum)
    found = [own_probes(op, num_probes=6, num_steps=8, seed=seed) for seed in SEEDS]
    for name, truth in {"trace": spectrum.sum(), "norm": np.linalg.norm(spectrum)}.items():
        low, high, value = (
            np.array([getattr(f, f"{name}{end}") for f in found]) for end in ("_low", "_high", "")
        )
        assert 0.89 <= np.mean((low <= truth) & (truth <= high)) <= 1
        error = value.std() / math.sqrt(len(value))
        assert abs(value.mean() - truth) < 4 * error + 1e-3 * abs(truth)
    assert all(f.num_products == 14 for f in found)
    low, high = np.array([(f.ends.low, f.ends.high) for f in found]).T
    assert np.mean(low <= spectrum.min()) >= 0.9  # 0.95 of either end
    assert np.mean(spectrum.max() <= high) >= 0.9
    ritz = np.array([f.ends.values for f in found])
    assert (ritz[:, 0] >= spectrum.min() - 1e-12).all()
    assert (ritz[:, 1] <= spectrum.max() + 1e-12).all()
    gap = np.abs(np.sort(spectrum)[:, None, None] - ritz).min(axis=0)
    assert (gap <= np.array([f.ends.residuals for f in found]) + 1e-12).all()


def test_a_dominating_eigenvalue_is_taken_out():
    op, truth = with_spectrum(DOMINATED), np.linalg.norm(DOMINATED)
    plain, lanczos = own_probes(op, num_probes=14), own_probes(op, num_probes=6, num_steps=8)
    assert lanczos.num_products == plain.num_products
    assert lanczos.norm_stderr < 0.02 * plain.norm_stderr
    assert abs(lanczos.norm - truth) < 0.1
    assert lanczos.ends.values[1] == pytest.approx(40, rel=1e-6)
    assert lanczos.ends.high < 40.5


@pytest.mark.parametrize("options", [{"max_exact": 120}, {"num_steps": 100, "num_probes": 20}])
def test_small_blocks_are_written_out(options):
    op = with_spectrum(SPECTRA["mixed"])
    found = own_probes(op, **options)
    assert found.exact
    assert found.num_products == 120
    assert found.trace == found.trace_low == found.trace_high == pytest.approx(SPECTRA["mixed"].sum())
    assert found.norm == found.norm_low == found.norm_high == pytest.approx(np.linalg.norm(SPECTRA["mixed"]))
    assert found.trace_stderr == found.norm_stderr == 0
    np.testing.assert_allclose(found.ends.values, [-6, 10])
    np.testing.assert_allclose([found.ends.low, found.ends.high], [-6, 10])
    assert not own_probes(op, max_exact=119).exact


def test_blocks_without_curvature_and_of_low_rank():
    nothing = own_probes(Matrix(torch.zeros(50, 50, dtype=torch.float64)), num_steps=5)
    assert nothing.trace == nothing.trace_high == nothing.norm_high == nothing.ends.high == 0
    u = torch.linspace(1, 2, 50, dtype=torch.float64)
    one = own_probes(Matrix(torch.outer(u, u), symmetric=True, psd=True), num_steps=5)
    assert one.trace == pytest.approx(float(u @ u))
    assert one.trace_high - one.trace_low < 1e-9
    np.testing.assert_allclose([one.ends.values[1], one.ends.high], float(u @ u))


@pytest.mark.parametrize("options", [{"max_exact": 90}, {"num_steps": 8}], ids=["exact", "Lanczos"])
@pytest.mark.parametrize("psd", [False, True])
def test_a_block_that_is_nothing_but_rounding_is_zero(options, psd):
    """Products of such a block are of some small matrix, which is not symmetric: of a key bias, for one."""
    rounding = 1e-9 * torch.randn(90, 90, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = own_probes(Matrix(rounding, symmetric=True, psd=psd), **options)
    assert found.trace == found.norm == 0
    assert found.trace_low <= 0 < found.trace_high
    assert 0 == found.norm_low < found.norm_high
    assert not found.ends.values.any()
    assert found.ends.low <= 0 < found.ends.high
    small = own_probes(with_spectrum(1e-9 * SPECTRA["mixed"][:90], psd=psd), **options)
    assert small.ends.values[1] == pytest.approx(1e-8, rel=0.01)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_any_scale(scale):
    op = with_spectrum(SPECTRA["mixed"])
    far, near = (own_probes(Matrix(op.A * c, symmetric=True), num_steps=8) for c in (scale, 1.0))
    for name in ("trace", "trace_stderr", "norm", "norm_stderr", "norm_low", "norm_high", "trace_low"):
        assert getattr(far, name) / scale == pytest.approx(getattr(near, name), rel=1e-6)
    assert far.ends.high / scale == pytest.approx(near.ends.high, rel=1e-6)
    assert far.ends.low / scale == pytest.approx(near.ends.low, rel=1e-6)


def test_ends_of_a_positive_semi_definite_operator_are_not_negative():
    op = with_spectrum(np.abs(DOMINATED), psd=True)
    found = extreme_ends(op, num_steps=6, seed=2)
    assert 0 <= found.low <= np.abs(DOMINATED).min() <= found.values[0]
    with pytest.raises(UsageError, match="symmetric"):
        extreme_ends(Matrix(torch.ones(3, 2, dtype=torch.float64)))
