"""Norms of known operators, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms_known import SPECTRA, Counting, with_spectrum

from curvescope.algorithms import SpectralNorm, frobenius_norm, spectral_norm
from curvescope.algorithms import columns as columns_module
from curvescope.core.errors import UsageError
from curvescope.core.operator import FunctionOperator, Matrix
from curvescope.core.seeds import generator


def with_singular_values(m: int, n: int, values, *, dtype=torch.float64) -> Matrix:
    r = len(values)
    U, _ = torch.linalg.qr(torch.randn(m, r, generator=generator(1), dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(n, r, generator=generator(2), dtype=torch.float64))
    return Matrix(((U * torch.as_tensor(values)) @ V.T).to(dtype), symmetric=False)


SINGULAR = np.r_[5.0, 4.9, np.linspace(1, 0, 78)]


@pytest.mark.parametrize("shape", [(90, 200), (200, 90), (150, 150)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_spectral_norm_of_rectangles(shape, dtype):
    op = Counting(with_singular_values(*shape, SINGULAR, dtype=dtype))
    found = spectral_norm(op)
    assert found.converged
    assert found.num_products == op.columns
    assert found.error <= found.tol * found.value
    assert abs(found.value - 5) <= found.error + 10 * torch.finfo(dtype).eps * 5


@pytest.mark.parametrize("name", SPECTRA)
def test_spectral_norm_of_symmetric_operators(name):
    op = Counting(with_spectrum(SPECTRA[name]))
    found = spectral_norm(op)
    assert found.converged
    assert found.num_products == op.columns
    assert found.value == pytest.approx(np.abs(SPECTRA[name]).max(), abs=1e-10)


def test_small_rectangles_and_zero():
    A = torch.randn(3, 5, generator=generator(0), dtype=torch.float64)
    assert spectral_norm(Matrix(A)).value == pytest.approx(float(torch.linalg.matrix_norm(A, 2)))
    assert spectral_norm(Matrix(torch.full((1, 1), -3.0))).value == pytest.approx(3)
    zero = spectral_norm(Matrix(torch.zeros(90, 100, dtype=torch.float64)))
    assert zero.value == zero.error == 0
    assert zero.converged


def test_spectral_norm_that_does_not_converge_says_so():
    op = Counting(with_singular_values(120, 150, np.linspace(1, 0.9, 120)))
    found = spectral_norm(op, max_products=12)
    assert not found.converged
    assert op.columns == found.num_products <= 12
    assert 0.9 < found.value < 1
    # there is a singular value within the error
    assert np.abs(np.linspace(1, 0.9, 120) - found.value).min() <= found.error


def test_spectral_norm_needs_transposed_products():
    op = FunctionOperator(lambda V: V, (80, 80))
    with pytest.raises(UsageError, match="no transposed product"):
        spectral_norm(op)


@pytest.mark.parametrize("shape", [(90, 200), (200, 90), (1, 7), (7, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_frobenius_norm_of_rectangles(shape, dtype):
    values = SINGULAR if min(shape) > 1 else [2.0]
    op = Counting(with_singular_values(*shape, values, dtype=dtype))
    found = frobenius_norm(op, num_probes=50)
    right = float(np.linalg.norm(values))
    assert op.columns == found.num_products == 50
    assert abs(found.value - right) < 4 * found.stderr + 1e-5
    assert abs(found.squared - right**2) < 4 * found.squared_stderr + 1e-5
    assert found.value == pytest.approx(found.squared**0.5)


def test_frobenius_error_bars_are_calibrated():
    op = with_singular_values(30, 50, np.linspace(1, 0, 20))
    right = float(np.linalg.norm(np.linspace(1, 0, 20)))
    runs = [frobenius_norm(op, num_probes=12, seed=seed) for seed in range(200)]
    assert 0.7 < np.std([(run.value - right) / run.stderr for run in runs]) < 1.4
    assert 0.7 < np.std([(run.squared - right**2) / run.squared_stderr for run in runs]) < 1.4
    mean, error = np.mean([run.squared for run in runs]), np.std([run.squared for run in runs]) / 200**0.5
    assert abs(mean - right**2) < 4 * error  # no bias


def test_frobenius_norm_zero_one_probe_and_batches(monkeypatch):
    zero = frobenius_norm(Matrix(torch.zeros(5, 6, dtype=torch.float64)))
    assert zero.value == zero.stderr == zero.squared == 0
    op = with_singular_values(30, 50, np.linspace(1, 0, 20))
    assert np.isnan(frobenius_norm(op, num_probes=1).stderr)
    whole = frobenius_norm(op, num_probes=10)
    monkeypatch.setattr(columns_module, "MAX_COLUMNS", 4)
    np.testing.assert_allclose(frobenius_norm(op, num_probes=10).samples, whole.samples, rtol=1e-12)


def test_wrong_options_and_saving(tmp_path):
    op = with_spectrum(SPECTRA["small"])
    with pytest.raises(UsageError, match="num_probes of at least 1, got -1"):
        frobenius_norm(op, num_probes=-1)
    with pytest.raises(UsageError, match="tol above 0"):
        spectral_norm(op, tol=-1.0)
    with pytest.raises(UsageError, match="max_products of at least 6"):
        spectral_norm(op, max_products=1)
    found = spectral_norm(op)
    assert SpectralNorm.load(found.save(tmp_path)) == found
