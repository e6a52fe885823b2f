"""Many small blocks at once against their dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.algorithms import equal_blocks
from curvescope.core.operator import Matrix

M, W = 6, 40


def blocks(seed: int = 0) -> torch.Tensor:
    """Different scales, one zero, one of rank 1, one the identity."""
    A = torch.randn(M, W, W, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    A = (A + A.mT) * 10.0 ** torch.arange(-2, M - 2)[:, None, None]
    A[1] = 0
    A[2] = torch.outer(A[3, 0], A[3, 0])
    A[4] = torch.eye(W)
    return A


def operator(A: torch.Tensor) -> Matrix:
    return Matrix(torch.block_diag(*A), symmetric=True)


def test_blocks_that_are_written_out():
    A = blocks()
    found = equal_blocks(operator(A), W, num_steps=38)
    truth = torch.linalg.eigvalsh(A).numpy()
    assert found.exact
    np.testing.assert_allclose(found.values, truth[:, [0, -1]], atol=1e-10)
    np.testing.assert_allclose(found.trace, truth.sum(1), atol=1e-9)
    assert found.num_products == W


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lanczos_in_all_blocks(dtype: torch.dtype):
    A = blocks().to(dtype)
    found = equal_blocks(operator(A), W, num_steps=26, num_probes=12, seed=1)
    truth = torch.linalg.eigvalsh(A.double()).numpy()
    scale = np.abs(truth).max(1, keepdims=True) + 1e-300
    slack = 1e-5 if dtype == torch.float32 else 1e-12
    assert not found.exact
    gap = np.abs(truth[:, :, None] - found.values[:, None]).min(1)  # an eigenvalue within the residual
    assert (gap <= found.residuals + slack * scale).all()
    assert (
        np.abs(found.values - truth[:, [0, -1]])[[0, 1, 2, 3, 5], 1] <= 0.01 * scale[[0, 1, 2, 3, 5], 0]
    ).all()
    assert (np.abs(found.trace - truth.sum(1)) <= 5 * found.trace_stderr + 10 * slack * W * scale[:, 0]).all()
    for i in (0, 2, 3, 5):
        u = found.vectors[i].double()
        assert (
            float((A[i].double() @ u - found.values[i, 1] * u).norm())
            <= found.residuals[i, 1] + slack * scale[i, 0] * 10
        )


def test_a_block_of_nothing_and_one_of_ones():
    found = equal_blocks(operator(blocks()), W, num_steps=5)
    np.testing.assert_allclose(found.values[1], 0, atol=1e-14)
    np.testing.assert_allclose(found.values[4], 1, atol=1e-12)
    assert found.trace[1] == 0
    assert found.trace[4] == pytest.approx(W, abs=5 * found.trace_stderr[4] + 1e-9)


@pytest.mark.parametrize(
    "options", [{"size": 7}, {"size": 0}, {"size": W, "num_steps": 0}, {"size": W, "num_probes": 1}]
)
def test_bad_input(options: dict[str, int]):
    with pytest.raises(cs.UsageError):
        equal_blocks(operator(blocks()), **options)
