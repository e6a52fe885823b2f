"""On quadratics every optimizer goes where it must, in as many steps as it must."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from optimizers_known import Quadratic, symmetric
from torch import nn

import curvescope as cs
from curvescope import optim
from curvescope.core.errors import CurvescopeError
from curvescope.optim.block_sgd import signed_product
from curvescope.optim.objective import StepObjective

VALUES = torch.tensor([0.5, 1.0, 2.0, 3.0, 5.0, 8.0], dtype=torch.float64)
B = torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0, 2.0], dtype=torch.float64)


def test_newton_takes_one_step_of_n_products():
    f = Quadratic(symmetric(VALUES), B, (2, 4))
    opt = optim.NewtonCG(f.parts, radius=100.0, tolerance=1e-12, max_products=None)
    opt.step(f)
    torch.testing.assert_close(f.x, f.solution)
    assert opt.work == {"steps": 1, "losses": 2, "gradients": 1, "products": 6, "block_products": 0}


@pytest.mark.parametrize("distinct", [1, 2, 3])
def test_newton_needs_as_many_products_as_there_are_eigenvalues(distinct):
    f = Quadratic(symmetric(VALUES[:distinct].repeat(6 // distinct)), B, (6,))
    opt = optim.NewtonCG(f.parts, radius=100.0, tolerance=1e-10, max_products=None)
    opt.step(f)
    torch.testing.assert_close(f.x, f.solution)
    assert opt.work["products"] == distinct


def test_newton_of_half_a_rate_goes_half_the_way():
    f = Quadratic(symmetric(VALUES), B, (6,))
    opt = optim.NewtonCG(f.parts, lr=0.5, radius=100.0, tolerance=1e-12, max_products=None)
    for _ in range(3):
        opt.step(f)
    torch.testing.assert_close(f.x, (1 - 0.5**3) * f.solution)


def test_a_region_grows_until_the_solution_lies_in_it():
    f = Quadratic(symmetric(VALUES), 10 * B, (6,))
    opt = optim.NewtonCG(f.parts, radius=0.5, tolerance=1e-12, max_products=None)
    before, lengths = f.x, []
    for _ in range(3):
        opt.step(f)
        lengths.append(float((f.x - before).norm()))
        before = f.x
    assert lengths == pytest.approx([0.5, 1.0, 2.0])
    for _ in range(8):
        opt.step(f)
    torch.testing.assert_close(f.x, f.solution)


def test_newton_follows_negative_curvature_to_the_boundary():
    """A saddle: the step has the length of the radius, mostly along the one direction that bends down."""
    A = torch.diag(torch.tensor([1.0, 2.0, -0.5], dtype=torch.float64))
    f = Quadratic(A, torch.tensor([0.3, 0.1, 0.02], dtype=torch.float64), (3,))
    opt = optim.NewtonCG(f.parts, radius=4.0, tolerance=1e-12, max_products=None)
    opt.step(f)
    assert float(f.x.norm()) == pytest.approx(4.0)
    assert opt.state["region"]["end"] == "negative curvature"
    assert abs(float(f.x[2])) > 3.5
    assert opt.radius == 8.0
    fallen = [float(opt.step(f)) for _ in range(3)]
    assert fallen == sorted(fallen, reverse=True)


def test_a_step_that_breaks_its_promise_is_taken_back():
    """√(1 + x²) far out is nearly flat: Newton's step from x = 2 would go to −8."""
    x = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    opt = optim.NewtonCG([x], radius=20.0)
    opt.step(lambda: (1 + x**2).sqrt().sum())
    assert float(x.detach()) == 2.0
    assert not opt.accepted
    assert opt.ratio < 0
    assert opt.radius == pytest.approx(10.0 / 4)
    for _ in range(8):
        opt.step(lambda: (1 + x**2).sqrt().sum())
    assert abs(float(x.detach())) < 1e-8
    assert opt.accepted


def test_a_loss_that_is_not_finite_is_stepped_back_from():
    x = nn.Parameter(torch.tensor([0.1], dtype=torch.float64))
    opt = optim.NewtonCG([x], radius=5.0)
    for _ in range(10):
        opt.step(lambda: (x - x.log()).sum())  # x ≤ 0 has none
    assert float(x.detach()) == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [1e-30, 1e15])
def test_newton_does_not_mind_the_scale_of_the_loss(scale):
    """In float32, whose range squares of such gradients leave."""
    A = symmetric(VALUES)
    f = Quadratic((scale * A).float(), (scale * B).float(), (2, 4))
    opt = optim.NewtonCG(f.parts, radius=100.0, tolerance=1e-4, max_products=12)
    opt.step(f)
    assert opt.accepted
    torch.testing.assert_close(f.x, torch.linalg.solve(A, B).float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("share", [0.5, 1.0, 1.9])
def test_descent_shrinks_every_direction_at_the_known_rate(share):
    f = Quadratic(symmetric(VALUES), B, (2, 4))
    opt = optim.SharpnessGD(f.parts, lr=share, first_products=6, num_products=2)
    for _ in range(5):
        opt.step(f)
    power = torch.linalg.matrix_power(torch.eye(6, dtype=torch.float64) - share / 8 * f.A, 5)
    torch.testing.assert_close(f.x - f.solution, -power @ f.solution)
    assert opt.sharpness == pytest.approx(8.0)
    assert opt.work == {"steps": 5, "losses": 5, "gradients": 5, "products": 14, "block_products": 0}


def test_twice_the_bound_is_the_edge():
    """At c = 2 the sharpest direction neither grows nor shrinks; beyond, it grows."""
    for share, grows in ((1.95, False), (2.05, True)):
        f = Quadratic(symmetric(VALUES), B, (6,))
        opt = optim.SharpnessGD(f.parts, lr=share, first_products=6)
        for _ in range(150):
            opt.step(f)
        assert (float((f.x - f.solution).norm()) > 1.0) == grows


def test_sharpness_is_found_from_few_products_of_each_step():
    f = Quadratic(symmetric(VALUES), B, (6,))
    opt = optim.SharpnessGD(f.parts, lr=0.5, first_products=1, num_products=2)
    seen = []
    for _ in range(12):
        opt.step(f)
        seen.append(opt.sharpness)
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(seen))
    assert seen[-1] == pytest.approx(8.0, rel=1e-6)


def test_scaling_the_loss_changes_no_step():
    found = []
    for scale in (1.0, 100.0):
        f = Quadratic(scale * symmetric(VALUES), scale * B, (2, 4))
        opts = [optim.SharpnessGD(f.parts), optim.BlockSGD(f.parts, 0.5)]
        for opt in opts:
            for _ in range(4):
                opt.step(f)
        found.append(f.x)
    torch.testing.assert_close(*found)


def test_blocks_that_do_not_interact_converge_as_if_alone():
    """Curvatures 1 and 1000 apart: each block is done in the steps that it needs."""
    A = torch.block_diag(symmetric(VALUES[:2]), 1000 * symmetric(VALUES[:4]))
    f = Quadratic(A, B, (2, 4))
    opt = optim.BlockSGD(f.parts, lr=1.0, every=1, first_products=4, floor=1e-9)
    for _ in range(3):
        opt.step(f)
    assert opt.curvatures() == pytest.approx([1.0, 3000.0])
    for part, top in ((slice(0, 2), 1.0), (slice(2, 6), 3000.0)):
        n = part.stop - part.start
        shrunk = torch.linalg.matrix_power(torch.eye(n, dtype=torch.float64) - A[part, part] / top, 3)
        torch.testing.assert_close((f.x - f.solution)[part], -shrunk @ f.solution[part])


def test_signs_leave_the_blocks_of_the_diagonal_in_the_mean():
    """Over all signs of three blocks, the mean of s_b (H (s ⊙ v))_b is H_bb v_b."""
    A, sizes = symmetric(VALUES), (1, 2, 3)
    f = Quadratic(A, B, sizes)
    objective = StepObjective(f(), f.parts, lambda what: None)
    objective.gradient(curved=True)
    v = list(B.split(sizes))
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    found = [torch.cat(signed_product(objective, v, s)) for s in signs]
    blocks = [A[i : i + n, i : i + n] @ u for i, n, u in zip((0, 1, 3), sizes, v, strict=True)]
    torch.testing.assert_close(torch.stack(found).mean(0), torch.cat(blocks))
    assert not torch.allclose(found[0], torch.cat(blocks))


def test_blocks_measured_together_are_those_measured_apart_where_they_do_not_interact():
    """Two products a step, of either sign of the largest curvature."""
    A = torch.block_diag(symmetric(VALUES[:2]), -1000 * symmetric(VALUES[:4]))
    f = Quadratic(A, B, (2, 4))
    opt = optim.BlockSGD(f.parts, lr=0.0, every=1, measure="together")
    for _ in range(150):
        opt.step(f)
    top = [float(torch.linalg.eigvalsh(part).abs().max()) for part in (A[:2, :2], A[2:, 2:])]
    assert opt.curvatures() == pytest.approx(top, rel=1e-6)
    assert opt.work["products"] == 5 + 2 * 149
    assert opt.work["block_products"] == 0


def test_a_state_without_the_way_to_measure_is_loaded():
    f = Quadratic(symmetric(VALUES), B, (2, 4))
    opt = optim.BlockSGD(f.parts)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["measure"]
    opt.load_state_dict(saved)
    opt.step(f)
    assert opt.work["block_products"] > 0


def test_two_over_the_number_of_blocks_is_stable_and_sharp():
    """H = 𝟙𝟙ᵀ + small: every block of one entry has curvature 1, all of them together B of it."""
    A = torch.ones(4, 4, dtype=torch.float64) + 1e-6 * torch.eye(4, dtype=torch.float64)
    for lr, stable in ((0.49, True), (0.51, False)):
        f = Quadratic(A, A @ torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=torch.float64), (1, 1, 1, 1))
        opt, first = optim.BlockSGD(f.parts, lr=lr), float(f().detach())
        for _ in range(200):
            opt.step(f)
        assert (float(f().detach()) < first) == stable


@pytest.mark.parametrize(
    "make",
    [
        lambda parts: optim.HutchinsonAdam(parts, lr=1.0, betas=(0.0, 0.0), eps=0.0),
        lambda parts: optim.ClippedNewton(parts, lr=1.0, betas=(0.0, 0.0), scale=1.0),
    ],
)
def test_a_diagonal_quadratic_takes_one_step(make):
    f = Quadratic(torch.diag(VALUES), VALUES * B / 3, (2, 4))
    make(f.parts).step(f)
    torch.testing.assert_close(f.x, B / 3)


def test_entries_are_clipped_and_negative_curvature_is_left_by_the_sign():
    A = torch.diag(torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64))
    f = Quadratic(A, torch.tensor([0.2, 20.0, 1e-6], dtype=torch.float64), (3,))
    optim.ClippedNewton(f.parts, lr=0.5, betas=(0.0, 0.0), scale=1.0).step(f)
    assert f.x.tolist() == pytest.approx([0.05, 0.5, 0.5])


def test_squares_of_probes_are_rows_of_the_hessian():
    """The mean of (z ⊙ Hz)² is Σ_j H_ij², as the docstring says."""
    f = Quadratic(symmetric(VALUES), B, (6,))
    opt = optim.HutchinsonAdam(f.parts, lr=0.0, betas=(0.9, 0.999))
    for _ in range(600):
        opt.step(f)
    state = opt.state[f.parts[0]]
    mean = state["square"] / (1 - 0.999 ** state["measured"])
    torch.testing.assert_close(mean, f.A.square().sum(1), rtol=0.15, atol=0.0)


def test_kfac_is_newton_on_linear_regression():
    """There the curvature is a Kronecker product: one step with lr 1 and next to no damping fits the data."""
    torch.manual_seed(0)
    X = torch.randn(12, 3, dtype=torch.float64)
    Y = X @ torch.randn(3, 2, dtype=torch.float64) + 0.7
    net = nn.Linear(3, 2).double()
    options = {"damping": 1e-12, "max_change": None, "kind": "ggn"}
    opt = optim.KFACDescent(net.parameters(), lr=1.0, **options)
    opt.step(lambda: cs.Problem(net, [(X, Y)], "mse_mean"))
    assert float(nn.functional.mse_loss(net(X), Y).detach()) < 1e-18


def test_kfac_steps_are_bounded():
    """lr² dᵀg, which is dᵀg of the whole step at lr 1, becomes the bound."""
    torch.manual_seed(0)
    X, Y = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    fallen = []
    for bound in (None, 1e-4):
        torch.manual_seed(1)
        net = nn.Linear(3, 2).double()
        problem, before = (
            cs.Problem(net, [(X, Y)], "mse_mean"),
            [p.detach().clone() for p in net.parameters()],
        )
        g = torch.autograd.grad(nn.functional.mse_loss(net(X), Y), list(net.parameters()))
        optim.KFACDescent(net.parameters(), lr=1.0, max_change=bound, kind="ggn").step(lambda p=problem: p)
        pairs = zip(before, net.parameters(), g, strict=True)
        fallen.append(sum(float(((old - new.detach()) * slope).sum()) for old, new, slope in pairs))
    assert fallen[1] == pytest.approx(math.sqrt(1e-4 * fallen[0]))


@pytest.mark.parametrize("make", [optim.SharpnessGD, optim.BlockSGD])
def test_a_loss_without_curvature_has_no_rate(make):
    x = nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt = make([x])
    with pytest.raises(CurvescopeError, match="no learning rate can be derived"):
        opt.step(lambda: x.sum())
