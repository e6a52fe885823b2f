"""Low-rank matrices against dense ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from curvescope.core.errors import CurvescopeError
from curvescope.geometry import Factored
from curvescope.geometry.low_rank import factor_all


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("d", "e", "h"), [(30, 30, 5), (7, 12, 3), (4, 4, 6), (5, 5, 1)])
def test_singular_triples_are_those_of_the_dense_matrix(d, e, h):
    M = Factored(draw(d, h), draw(e, h, seed=1))
    U, s, Vh = torch.linalg.svd(M.to_dense())
    r = min(d, e, h)
    assert M.rank == r
    torch.testing.assert_close(M.singular_values, s[:r], rtol=0, atol=1e-12)
    torch.testing.assert_close(
        M.left @ torch.diag(M.singular_values) @ M.right.T, M.to_dense(), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(M.left.T @ M.left, torch.eye(r, dtype=torch.float64), rtol=0, atol=1e-13)
    overlap = (U[:, :r] * M.left).sum(0) * (Vh[:r].T * M.right).sum(0)
    torch.testing.assert_close(
        overlap, torch.ones(r, dtype=torch.float64)
    )  # the same pairs, with a joint sign


def test_eigenvalues_come_from_the_small_product():
    A, B = draw(20, 4), draw(20, 4, seed=1)
    dense = torch.linalg.eigvals(A @ B.T)
    dense = dense[dense.abs().argsort(descending=True)]
    found = Factored(A, B).eigenvalues
    assert float(dense[4:].abs().max()) < 1e-12
    for value in found:
        assert float((dense[:4] - value).abs().min()) < 1e-12
    assert bool((found.abs().diff() <= 1e-12).all())
    with pytest.raises(CurvescopeError, match="square"):
        _ = Factored(draw(3, 2), draw(4, 2)).eigenvalues


def test_the_null_space_is_never_listed():
    A, B = draw(40, 3) @ draw(3, 8, seed=1), draw(40, 8, seed=2)  # rank 3 in a head of 8
    found = Factored(A, B)
    assert found.rank == 3
    assert found.left.shape == (40, 3)
    assert Factored(0 * A, B).rank == 0
    assert Factored(0 * A, B).effective_rank == 0
    assert Factored(0 * A, B).num_for(0.99) == 0
    single = A.float().double()  # as weights kept in float32 are
    assert Factored(single, B).rank == 8
    assert Factored(single, B, noise=torch.finfo(torch.float32).eps).rank == 3


def test_scales_do_not_change_the_rank():
    for scale in (1e-200, 1e-20, 1e20):
        assert Factored(scale * draw(10, 4), draw(10, 4, seed=1)).rank == 4


def test_energy_coverage_and_effective_rank():
    s = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    Q = torch.linalg.qr(draw(9, 3))[0]
    M = Factored(Q * s, torch.linalg.qr(draw(9, 3, seed=1))[0])
    assert M.frobenius == pytest.approx(21**0.5)
    assert M.frobenius == pytest.approx(float(M.to_dense().norm()))
    np.testing.assert_allclose(M.energy_share, [16 / 21, 4 / 21, 1 / 21])
    p = np.array([16, 4, 1]) / 21
    assert M.effective_rank == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    np.testing.assert_allclose(M.coverage(), [16 / 21, 20 / 21, 1])
    np.testing.assert_allclose(M.coverage(energy=False), [4 / 7, 6 / 7, 1])
    assert [M.num_for(share) for share in (0.5, 0.9, 0.99, 1.0)] == [1, 2, 3, 3]
    assert M.num_for(0.8, energy=False) == 2
    equal = Factored(Q, torch.linalg.qr(draw(9, 3, seed=1))[0])
    assert equal.effective_rank == pytest.approx(3)


@pytest.mark.parametrize(("h", "k"), [(3, 5), (5, 3)])
def test_products_and_transposes(h, k):
    M, N = Factored(draw(12, h), draw(10, h, seed=1)), Factored(draw(10, k, seed=2), draw(8, k, seed=3))
    product = M @ N
    torch.testing.assert_close(product.to_dense(), M.to_dense() @ N.to_dense())
    assert product.A.shape[1] == 3
    torch.testing.assert_close(M.T.to_dense(), M.to_dense().T)
    with pytest.raises(CurvescopeError, match="rows on the right"):
        _ = M @ M


def test_a_batch_is_one_after_the_other():
    pairs = [(draw(10, 3, seed=i), draw(9, 3, seed=50 + i)) for i in range(4)]
    pairs.append((draw(6, 2), draw(6, 2, seed=1)))
    for found, (A, B) in zip(factor_all(pairs), pairs, strict=True):
        alone = Factored(A, B)
        torch.testing.assert_close(found.singular_values, alone.singular_values, rtol=0, atol=1e-13)
        torch.testing.assert_close(
            found.left @ torch.diag(found.singular_values) @ found.right.T, A @ B.T, rtol=0, atol=1e-12
        )


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(CurvescopeError, match="factors"):
        Factored(draw(4, 2), draw(4, 3))
