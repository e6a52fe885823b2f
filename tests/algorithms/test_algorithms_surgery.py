"""Removal and rounding of weights: against minima of the quadratic found by brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvescope.algorithms.surgery.grids import Grid, compensated, grid
from curvescope.algorithms.surgery.removal import (
    UPDATE_INTERVAL,
    damped_inverse,
    diagonal_saliencies,
    eliminate,
    remove,
    remove_by_products,
    saliencies,
)
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import Matrix


def system(n: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights (n,) and a positive definite matrix with strong couplings."""
    source = torch.Generator().manual_seed(seed)
    A = torch.randn(n, n + 2, generator=source, dtype=torch.float64)
    return torch.randn(n, generator=source, dtype=torch.float64), A @ A.T / n


def least_change(H: Tensor, fixed: Tensor, to: Tensor) -> Tensor:
    """argmin ½ δᵀ H δ with δ given at `fixed`, from the equations of Lagrange: none of the inverse of H."""
    n, k = len(H), len(fixed)
    C = torch.zeros(k, n, dtype=H.dtype)
    C[torch.arange(k), fixed] = 1
    whole = torch.cat([torch.cat([H, C.T], 1), torch.cat([C, torch.zeros(k, k, dtype=H.dtype)], 1)])
    return torch.linalg.solve(whole, torch.cat([torch.zeros(n, dtype=H.dtype), to]))[:n]


def loss(H: Tensor, delta: Tensor) -> float:
    return float(delta @ H @ delta) / 2


@pytest.mark.parametrize("removed", [[3], [0, 7], [11, 2, 5, 4], list(range(12))])
def test_removal_is_the_minimum_under_its_constraint(removed):
    w, H = system()
    Q = torch.tensor(removed)
    found = remove(w, torch.linalg.inv(H), Q)
    wanted = least_change(H, Q, -w[Q])
    torch.testing.assert_close(found.delta, wanted, rtol=1e-8, atol=1e-10)
    assert found.increase == pytest.approx(loss(H, wanted), rel=1e-9)
    assert bool(((w + found.delta)[Q] == 0).all())


def test_the_step_of_one_weight_has_the_factor_w_q_that_slides_leave_out():
    w, H = system()
    inverse, q = torch.linalg.inv(H), 5
    slide = -inverse[:, q] / inverse[q, q]
    found = remove(w, inverse, torch.tensor([q])).delta
    torch.testing.assert_close(found, w[q] * slide)
    assert float((w + slide)[q]) != pytest.approx(0, abs=0.1)  # w_q − 1
    assert float(saliencies(w, inverse.diagonal())[q]) == pytest.approx(loss(H, found))


def test_saliencies_are_what_single_removals_cost():
    w, H = system()
    inverse = torch.linalg.inv(H)
    each = [remove(w, inverse, torch.tensor([q])).increase for q in range(12)]
    torch.testing.assert_close(saliencies(w, inverse.diagonal()), torch.tensor(each, dtype=torch.float64))
    alone = [loss(H, -w[q] * torch.eye(12, dtype=torch.float64)[q]) for q in range(12)]
    torch.testing.assert_close(diagonal_saliencies(w, H.diagonal()), torch.tensor(alone, dtype=torch.float64))
    assert (saliencies(w, inverse.diagonal()) <= diagonal_saliencies(w, H.diagonal())).all()


def greedy(w: Tensor, H: Tensor, count: int) -> tuple[list[int], Tensor]:
    """Every weight that is left is tried at every step, by brute force."""
    gone: list[int] = []
    delta = torch.zeros_like(w)
    for _ in range(count):
        tried = {}
        for q in set(range(len(w))) - set(gone):
            Q = torch.tensor([*gone, q])
            tried[q] = least_change(H, Q, -w[Q])
        gone.append(min(tried, key=lambda q: loss(H, tried[q])))
        delta = tried[gone[-1]]
    return gone, delta


def test_elimination_is_greedy_and_ends_where_removal_of_its_set_does():
    w, H = system()
    inverse = torch.linalg.inv(H)
    wanted, delta = greedy(w, H, 7)
    found = eliminate(w, inverse, 7)
    assert found.order.tolist() == wanted
    together = remove(w, inverse, found.order)
    torch.testing.assert_close(together.delta, delta, rtol=1e-8, atol=1e-10)
    assert float(found.increases.sum()) == pytest.approx(together.increase, rel=1e-9)
    assert eliminate(w, inverse, 0).order.tolist() == []


def test_elimination_goes_on_behind_its_updates():
    w, H = system(UPDATE_INTERVAL + 30)
    inverse = torch.linalg.inv(H)
    found = eliminate(w, inverse, len(w))
    assert sorted(found.order.tolist()) == list(range(len(w)))
    for k in (UPDATE_INTERVAL + 1, UPDATE_INTERVAL + 20):
        part = remove(w, inverse, found.order[:k]).increase
        assert float(found.increases[:k].sum()) == pytest.approx(part, rel=1e-7)


def test_damping_is_a_share_of_the_mean_diagonal():
    _, H = system()
    inverse, shift = damped_inverse(H, 0.1)
    assert shift == pytest.approx(0.1 * float(H.diagonal().mean()))
    torch.testing.assert_close(inverse @ (H + shift * torch.eye(12, dtype=H.dtype)), torch.eye(12).double())
    with pytest.raises(UsageError, match="positive definite"):
        damped_inverse(H - 100 * torch.eye(12, dtype=H.dtype), 0.0)
    with pytest.raises(UsageError, match="at least 0"):
        damped_inverse(H, -1.0)
    with pytest.raises(ShapeError, match="rows and columns"):
        remove(torch.zeros(3), H, torch.tensor([0]))


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_grids_are_symmetric_and_hold_zero_and_the_largest(bits):
    W = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    W[:, 2] = 0
    for steps, largest in (("column", W.abs().amax(0)), ("tensor", W.abs().max().expand(4))):
        found = grid(W, bits, steps)
        rounded = found.rounded(W)
        assert bool(((rounded - W).abs() <= found.step / 2 + 1e-12).all())
        assert rounded.unique().numel() <= 4 * (2**bits - 1)
        torch.testing.assert_close(found.rounded(-W), -rounded)
        torch.testing.assert_close(found.step[0] * (2 ** (bits - 1) - 1), largest[0])
        assert bool((rounded[:, 2] == 0).all())
    with pytest.raises(UsageError, match="2 bits"):
        grid(W, 1)


def rounded_one_by_one(w: Tensor, H: Tensor, own: Grid) -> Tensor:
    """Fix a weight at its point, move the free ones to the minimum of the quadratic, and so on."""
    moved, fixed = w.clone(), []
    for i in range(len(w)):
        fixed.append(i)
        target = torch.stack([*moved[:i], own.rounded(moved[i : i + 1])[0]])
        Q = torch.tensor(fixed)
        moved = w + least_change(H, Q, target - w[Q])
    return moved


def test_compensated_rounding_is_sequential_brain_surgery():
    W = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    _, H = system(8)
    own = grid(W, 3)
    found = compensated(W, torch.linalg.inv(H), own)
    for j in range(3):
        wanted = rounded_one_by_one(W[:, j], H, Grid(own.step[j : j + 1], own.most))
        torch.testing.assert_close(found.W[:, j], wanted, rtol=1e-8, atol=1e-8)
    delta = found.W - W
    assert found.increase == pytest.approx(sum(loss(H, delta[:, j]) for j in range(3)), rel=1e-9)
    plain = own.rounded(W) - W
    assert found.increase < sum(loss(H, plain[:, j]) for j in range(3))


def test_a_block_with_steps_row_by_row_is_its_matrix():
    """With H = A ⊗ I the entries of a matrix, row-major, are rounded as its columns are."""
    W = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    _, A = system(5)
    own = grid(W, 4)
    H = torch.kron(A, torch.eye(2, dtype=torch.float64))
    flat = Grid(own.step.expand(5, 2).reshape(-1, 1), own.most)
    found = compensated(W.reshape(-1, 1), torch.linalg.inv(H), flat)
    torch.testing.assert_close(found.W.reshape(5, 2), compensated(W, torch.linalg.inv(A), own).W)
    with pytest.raises(ShapeError, match="inverse"):
        compensated(W, torch.linalg.inv(H), own)


@pytest.mark.parametrize("removed", [[3], [11, 2, 5, 4], list(range(12)), []])
def test_removal_by_products_is_that_of_the_matrix(removed):
    w, H = system()
    Q = torch.tensor(removed, dtype=torch.int64)
    inverse, shift = damped_inverse(H, 0.1)
    wanted = remove(w, inverse, Q)
    op = Matrix(H, symmetric=True, psd=True)
    found, residual = remove_by_products(w, op, Q, damping=shift, tol=1e-12)
    torch.testing.assert_close(found.delta, wanted.delta, rtol=1e-8, atol=1e-8)
    assert found.increase == pytest.approx(wanted.increase, rel=1e-8)
    assert residual < 1e-10
    rough, residual = remove_by_products(w, op, Q, damping=shift, max_products=2)
    assert bool(((w + rough.delta)[Q] == 0).all())
    assert rough.increase >= wanted.increase - 1e-12
