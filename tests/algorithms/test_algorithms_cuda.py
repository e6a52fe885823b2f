"""The algorithms on a GPU give what they give on the CPU: short probes are drawn there, vectors stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms_known import SPECTRA, with_spectrum

from curvescope.algorithms import (
    block_density,
    block_traces,
    diagonal,
    eigsh,
    frobenius_norm,
    solve,
    spectral_density,
    spectral_norm,
    trace,
)
from curvescope.core.operator import Matrix
from curvescope.core.seeds import LONG, probes

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SLICES = {"a": slice(0, 90), "b": slice(90, 110), "c": slice(110, 200)}


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def pair(request) -> tuple[Matrix, Matrix]:
    op = with_spectrum(SPECTRA["outliers"], dtype=request.param)
    return op, Matrix(op.A.cuda(), symmetric=True)


def near(op: Matrix) -> float:
    return 1e-8 if op.dtype is torch.float64 else 1e-3


def test_eigenpairs(pair):
    cpu, gpu = pair
    for which in ("LA", "LM", "BE"):
        ours, theirs = eigsh(gpu, 4, which=which, max_basis=20), eigsh(cpu, 4, which=which, max_basis=20)
        assert ours.converged
        np.testing.assert_allclose(ours.values, theirs.values, atol=100 * near(cpu))
    assert eigsh(gpu, 3, max_basis=250).num_products == 200  # written out


def test_densities(pair):
    cpu, gpu = pair
    options = {"num_probes": 3, "num_steps": 25, "width": 1.0, "grid": np.linspace(-5, 100, 50)}
    ours, theirs = block_density(gpu, SLICES, **options), block_density(cpu, SLICES, **options)
    for name in SLICES:
        np.testing.assert_allclose(ours[name].density, theirs[name].density, atol=near(cpu))
    whole = [spectral_density(op, **options, reorthogonalize=False).moments for op in (gpu, cpu)]
    np.testing.assert_allclose(whole[0], whole[1], rtol=near(cpu))


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
def test_traces(pair, method):
    cpu, gpu = pair
    ours, theirs = trace(gpu, num_probes=12, method=method), trace(cpu, num_probes=12, method=method)
    np.testing.assert_allclose(ours.samples, theirs.samples, rtol=near(cpu))


def test_entries_and_norms(pair):
    cpu, gpu = pair
    options = {"num_probes": 6}
    for estimator in (diagonal, lambda op, **options: block_traces(op, SLICES, **options)):
        ours, theirs = estimator(gpu, **options), estimator(cpu, **options)
        np.testing.assert_allclose(ours.values, theirs.values, atol=100 * near(cpu))
        np.testing.assert_allclose(ours.stderr, theirs.stderr, atol=100 * near(cpu))
    assert frobenius_norm(gpu).value == pytest.approx(frobenius_norm(cpu).value, rel=near(cpu))
    assert spectral_norm(gpu).value == pytest.approx(100, rel=near(cpu))
    wide = Matrix(gpu.A[:90].contiguous(), symmetric=False)
    assert spectral_norm(wide).value == pytest.approx(
        float(torch.linalg.matrix_norm(wide.A, 2)), rel=near(cpu)
    )


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_solutions(pair, method):
    cpu, gpu = pair
    b = probes(200, 2, seed=0, dtype=cpu.dtype)
    found = solve(gpu, b.cuda(), method=method, damping=5.0)
    assert found.converged
    np.testing.assert_allclose(found.x, solve(cpu, b, method=method, damping=5.0).x, atol=10 * near(cpu))


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_long_probes_are_drawn_on_the_gpu_column_by_column(kind):
    n = 2 * LONG + 5
    V = probes(n, 3, seed=1, kind=kind, dtype=torch.float32, device="cuda")
    again = probes(n, 1, seed=1, first=2, kind=kind, dtype=torch.float32, device="cuda")
    assert torch.equal(V[:, 2:], again)
    moments = V.double().T @ V.double() / n
    torch.testing.assert_close(moments.cpu(), torch.eye(3, dtype=torch.float64), atol=8 / n**0.5, rtol=0)
    assert V.double().mean(dim=0).abs().max() < 5 / n**0.5
    short = [probes(LONG - 1, 2, seed=1, kind=kind, device=d).cpu() for d in ("cpu", "cuda")]
    assert torch.equal(*short)
