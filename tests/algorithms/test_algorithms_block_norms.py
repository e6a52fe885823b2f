"""The map of blocks against the norms of a dense matrix's blocks."""

import numpy as np
import pytest
import torch

from curvescope.algorithms import block_norms
from curvescope.core.errors import UsageError
from curvescope.core.operator import Matrix

SLICES = {"a": slice(0, 5), "b": slice(5, 6), "c": slice(6, 14)}


def random_matrix(seed: int) -> torch.Tensor:
    A = torch.randn(14, 14, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return A + A.T


def exact_map(A: torch.Tensor) -> np.ndarray:
    return np.array([[float(A[r, c].norm()) for c in SLICES.values()] for r in SLICES.values()])


def test_map_is_within_four_standard_errors_of_every_block_norm():
    A = random_matrix(0)
    found = block_norms(Matrix(A), SLICES, num_probes=400, seed=1)
    assert found.names == list(SLICES)
    assert (np.abs(found.frobenius - exact_map(A)) <= 4 * found.stderr + 1e-12).all()
    assert found.stderr.max() < 0.2 * found.frobenius.max()


def test_error_bars_are_calibrated():
    A = random_matrix(2)
    truth = exact_map(A)[0, 2] ** 2
    squares = []
    for seed in range(200):
        found = block_norms(Matrix(A), SLICES, num_probes=6, seed=seed)
        squares.append((found.squared[0, 2] - truth) / (2 * found.frobenius[0, 2] * found.stderr[0, 2]))
    assert 0.7 < np.std(squares) < 1.6
    assert abs(np.mean(squares)) < 0.5


def test_a_block_of_one_column_is_exact():
    A = random_matrix(3)
    found = block_norms(Matrix(A), SLICES, num_probes=2)
    np.testing.assert_allclose(found.frobenius[:, 1], exact_map(A)[:, 1], rtol=1e-12)
    np.testing.assert_allclose(found.stderr[:, 1], 0, atol=1e-12)


def test_zero_blocks_are_zero_and_the_table_has_every_pair():
    A = torch.zeros(14, 14, dtype=torch.float64)
    A[0, 0] = 2.0
    found = block_norms(Matrix(A), SLICES, num_probes=3)
    assert found.frobenius[0, 0] == pytest.approx(2.0)
    assert found.frobenius[1:].max() == 0
    assert len(found.to_frame()) == 9


def test_no_probes_is_refused():
    with pytest.raises(UsageError, match="num_probes"):
        block_norms(Matrix(random_matrix(0)), SLICES, num_probes=0)
