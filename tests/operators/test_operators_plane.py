"""Losses on planes: quadratics with known answers, a network against autograd, normalized directions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from polynomials import problem_of
from torch import nn

import curvescope as cs
from curvescope.core.errors import UsageError
from curvescope.core.result import Result

A = torch.tensor([[3.0, 1.0, 0.0], [1.0, -2.0, 0.5], [0.0, 0.5, 1.0]], dtype=torch.float64)
a = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
U, V = (torch.tensor(x, dtype=torch.float64) for x in ([2.0, 0.0, 0.0], [1.0, 1.0, 0.0]))


def quadratic(w):
    return 2.0 + a @ w + w @ A @ w / 2


def network(cuts=(9,)):
    source = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=source, dtype=torch.float64))
    x, y = (torch.randn(9, n, generator=source, dtype=torch.float64) for n in (3, 2))
    return cs.Problem(module, list(zip(x.split(list(cuts)), y.split(list(cuts)), strict=True)), "mse_mean")


@pytest.mark.parametrize("normalize", ["none", "orthonormal"])
def test_a_quadratic_is_predicted_everywhere(normalize):
    found = cs.loss_plane(problem_of(quadratic, 3), U, V, normalize=normalize, num_points=5)
    np.testing.assert_allclose(found.loss, found.quadratic, atol=1e-12)
    assert (found.verdicts >= 0).all()
    assert found.cosine == pytest.approx(1 / math.sqrt(2))
    u, v = (U, V) if normalize == "none" else (U / 2, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    np.testing.assert_allclose(found.slope, [a @ u, a @ v])
    np.testing.assert_allclose(found.curvature, [[u @ A @ u, u @ A @ v], [v @ A @ u, v @ A @ v]])
    np.testing.assert_allclose(found.lengths, [float(u.norm()), float(v.norm())])
    x, y = found.a[1], found.b[3]
    assert found.loss[1, 3] == pytest.approx(float(quadratic(x * u + y * v)))


def test_where_the_quadratic_holds():
    problem = problem_of(lambda w: 1 + (w**2).sum() / 2 + (w[0] ** 4) / 24, 2)
    e = torch.eye(2, dtype=torch.float64)
    found = cs.loss_plane(problem, e[0], e[1], span=(-2.0, 2.0), num_points=9)
    x, y = np.meshgrid(found.a, found.b, indexing="ij")
    holds = x**4 / 24 <= 0.1 * (x**2 + y**2) / 2
    away = (x != 0) | (y != 0)
    np.testing.assert_array_equal(found.verdicts[away] > 0, holds[away])
    frame = found.to_frame()
    assert len(frame) == 81
    assert set(frame["quadratic_holds"]) == {"holds", "fails", "below rounding"}


def test_a_network_against_autograd_and_other_batches():
    problem = network()
    found = cs.loss_plane(problem, "gradient", "random", num_points=3, span=(-0.5, 0.5))
    g = problem.gradient()
    H = torch.autograd.functional.hessian(lambda v: _loss(problem, v), _theta(problem))
    u = -g / g.norm()
    assert found.slope[0] == pytest.approx(-float(g.norm()))
    assert found.curvature[0, 0] == pytest.approx(float(u @ H @ u))
    assert found.curvature[0, 1] == found.curvature[1, 0]
    assert found.loss[2, 1] == pytest.approx(float(_loss(problem, _theta(problem) + 0.5 * u)))
    other = cs.loss_plane(network((2, 7)), "gradient", "random", num_points=3, span=(-0.5, 0.5))
    np.testing.assert_allclose(other.loss, found.loss, rtol=1e-10)


def _theta(problem):
    return problem.space().gather({k: p.detach() for k, p in problem.named_parameters()})


def _loss(problem, vector):
    """Differentiable in the vector over all parameters."""
    parts, total = problem.space().to_dict(vector), 0.0
    tree = {}
    for block in problem.space():
        part = parts[block.name]
        tree[block.parameter] = part
    for batch in problem.batches:
        z = torch.func.functional_call(problem.model.module, tree, (batch.inputs,))
        total = total + (z - batch.targets).square().sum()
    return total / problem.num_terms


def test_filters_are_as_long_as_those_of_the_parameters():
    problem = network()
    found = cs.loss_plane(problem, "random", "random", normalize="filters", num_points=3)
    assert "Li et al. 2018" in found.normalize
    assert (found.a.min(), found.a.max()) == (-1.0, 1.0)
    module = problem.model.module
    wanted = math.sqrt(sum(float(m.weight.detach().norm()) ** 2 for m in module if isinstance(m, nn.Linear)))
    np.testing.assert_allclose(found.lengths, wanted)
    d = {name: torch.ones_like(p) for name, p in problem.named_parameters()}
    used = cs.operators.taylor.filter_normalized(problem, problem.space().gather(d))
    tree = problem.space().scatter(used)
    torch.testing.assert_close(tree["0.weight"].norm(dim=1), module[0].weight.detach().norm(dim=1))
    assert not tree["0.bias"].any()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("gradient", "gradient"), "parallel"),
        ((torch.ones(3), "gradient"), "expected a vector of 26 entries"),
        (("random", torch.zeros(26)), "a direction that is not zero"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence(given, words):
    with pytest.raises(UsageError, match=words):
        cs.loss_plane(network(), *given)


def test_an_unknown_way_to_normalize_is_refused():
    with pytest.raises(UsageError, match="expected normalize of orthonormal, filters, none, got 'filter'"):
        cs.loss_plane(network(), "gradient", "random", normalize="filter")


def test_it_is_drawn_and_saved(tmp_path):
    wall = lambda w: 1 + (w**2).sum() / 2 + torch.where(w[0] < 0.5, 0.0, math.nan)  # noqa: E731
    e = torch.eye(2, dtype=torch.float64)
    found = cs.loss_plane(problem_of(wall, 2), e[0], e[1], span=(-1.0, 1.0), num_points=5)
    assert (found.verdicts[-1] == -1).all()
    again = Result.load(found.save(tmp_path))
    assert again.plot().get_xlabel() == "a: given"
