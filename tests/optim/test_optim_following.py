"""The curvature that sets a rate is followed where it goes: within a space, and out of it."""

from __future__ import annotations

import pytest
import torch
from optimizers_known import Quadratic, symmetric
from torch import Tensor, nn

from curvescope import optim
from curvescope.algorithms.spectra.subspace_tracking import follow_ends
from curvescope.core.errors import UsageError
from curvescope.core.operator import Matrix
from curvescope.optim.curvature_tracking import follow, pursue

WAYS = {
    "sharpness": lambda parts, **options: optim.SharpnessGD(parts, every=1, **options),
    "apart": lambda parts, **options: optim.BlockSGD(parts, every=1, **options),
    "together": lambda parts, **options: optim.BlockSGD(parts, every=1, measure="together", **options),
}
ALL = pytest.mark.parametrize("way", WAYS)


def found_by(opt: optim.CurvatureOptimizer) -> float:
    return opt.curvatures()[0] if isinstance(opt, optim.BlockSGD) else opt.sharpness


def largest(loss, x: Tensor) -> float:
    H = torch.autograd.functional.hessian(loss, x.detach())
    return float(torch.linalg.eigvalsh(H).abs().max())


@ALL
def test_few_products_find_the_top_in_the_end(way):
    """Of a hundred eigenvalues 1, …, 100, with the least that each takes."""
    h = torch.linspace(1, 100, 100, dtype=torch.float64)
    x = nn.Parameter(torch.ones(100, dtype=torch.float64))
    opt = WAYS[way]([x], lr=0.1, num_products=2, first_products=2)
    for _ in range(100):
        opt.step(lambda: (h * x**2).sum() / 2)
    assert found_by(opt) == pytest.approx(100, rel=0.03)


@ALL
def test_one_product_would_look_nowhere_else(way):
    with pytest.raises(UsageError, match="num_products of at least 2"):
        WAYS[way]([nn.Parameter(torch.ones(2))], num_products=1)


@ALL
def test_curvature_that_comes_up_elsewhere_is_found(way):
    """5x² + (y² − 9)²/4: the second bends twice as much in the end, and shares no space with the first."""
    x = nn.Parameter(torch.tensor([1.0, 0.1], dtype=torch.float64))

    def loss(x: Tensor) -> Tensor:
        return 5 * x[0] ** 2 + (x[1] ** 2 - 9) ** 2 / 4

    opt = WAYS[way]([x], lr=1.0)
    for _ in range(40):
        opt.step(lambda: loss(x))
    assert found_by(opt) == pytest.approx(largest(loss, x), rel=0.05)
    assert float(loss(x.detach())) < 1e-10


@ALL
def test_batches_of_other_features_have_their_own_curvature(way):
    """Each batch bends the loss along one entry, another every time."""
    x = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    opt = WAYS[way]([x], lr=1.0)
    for i in range(8):
        opt.step(lambda i=i: (x[i % 4] - 1 - i % 4) ** 2 / 2)
        assert 0.6 < found_by(opt) < 1.0 + 1e-12


@ALL
def test_sparse_features_are_learned(way):
    """Four topics of three features each, in turn: rates are those of the topic, and the loss stays small."""
    source = torch.Generator().manual_seed(0)
    X = torch.zeros(40, 12, dtype=torch.float64)
    for i in range(40):
        X[i, 3 * (i // 10) : 3 * (i // 10) + 3] = torch.randn(3, generator=source, dtype=torch.float64)
    y = torch.randn(40, generator=source, dtype=torch.float64)
    w = nn.Parameter(torch.zeros(12, dtype=torch.float64))
    b = nn.Parameter(torch.zeros((), dtype=torch.float64))
    opt = WAYS[way]([w, b], lr=0.3)
    losses = []
    for k in range(60):
        rows = slice(k % 4 * 10, k % 4 * 10 + 10)
        losses.append(float(opt.step(lambda rows=rows: ((X[rows] @ w + b - y[rows]) ** 2).mean() / 2)))
    assert max(losses) < 2
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_from_an_eigenvector_it_is_exact_and_a_bound_otherwise():
    A = symmetric(torch.tensor([-6.0, 0.5, 1.0, 2.0, 5.0], dtype=torch.float64))
    vectors = torch.linalg.eigh(A).eigenvectors
    fresh = torch.ones(5, dtype=torch.float64)
    size, top = follow(Matrix(A), vectors[:, 0], fresh, 2)
    assert size == pytest.approx(6.0, rel=1e-12)
    assert abs(float(top @ vectors[:, 0])) == pytest.approx(1.0, rel=1e-12)
    for products in (2, 3, 4):
        bound, _ = follow(Matrix(A), fresh, vectors[:, 1] + vectors[:, 3], products)
        assert bound <= 6.0 * (1 + 1e-12)


def test_a_fall_is_looked_into():
    """Two products see little of 100; the search goes on, since 100 was known."""
    d = torch.tensor([2.0, 1.9, 1.8, 1.7, 100.0, 1.0], dtype=torch.float64)
    known, fresh = torch.eye(6, dtype=torch.float64)[0], torch.tensor([0, 1, 1, 1, 1e-3, 0]).double()
    options = {"num_products": 2, "first_products": 4}
    assert pursue(Matrix(torch.diag(d)), known, fresh, last=2.0, **options)[0] < 5
    assert pursue(Matrix(torch.diag(d)), known, fresh, last=100.0, **options)[0] == pytest.approx(100.0)


def test_what_the_monitor_follows_leaves_its_space_too():
    """From an exact eigenvector of another block, with a gradient inside that block."""
    A = torch.block_diag(
        symmetric(torch.tensor([1.0, 10.0]).double()), symmetric(torch.arange(2.0, 102, 5).double())
    )
    followed = torch.linalg.eigh(A[:2, :2]).eigenvectors[:, 1]
    followed = torch.cat([followed, torch.zeros(20, dtype=torch.float64)])[None]
    found = follow_ends(Matrix(A), followed, followed)
    assert found.values[0] == pytest.approx(97.0, rel=0.02)


@pytest.mark.parametrize(
    ("way", "what", "count"),
    [
        ("sharpness", "products", 10 + 2 * 3),
        ("apart", "block_products", (1 + 2 * 1) + (5 + 2 * 2)),
        ("together", "products", 5 + 2 * 2),
    ],
)
def test_costs_are_those_of_the_docstring(way, what, count):
    """Of three measurements; a block of one number is known by one product."""
    f = Quadratic(symmetric(torch.arange(1.0, 13.0).double()), torch.ones(12).double(), (1, 11))
    opt = WAYS[way](f.parts, lr=0.0)
    for _ in range(3):
        opt.step(f)
    assert opt.work[what] == count
