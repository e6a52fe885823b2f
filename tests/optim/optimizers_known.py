"""Optimizers by name, a small network for them, and quadratics whose answers are known."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import curvescope as cs
from curvescope import optim
from curvescope.optim import CurvatureOptimizer

Make = Callable[..., CurvatureOptimizer]
OPTIMIZERS: dict[str, Make] = {
    "newton": partial(optim.NewtonCG, max_products=4),
    "newton-ggn": partial(optim.NewtonCG, curvature="ggn", max_products=4),
    "sharpness": partial(optim.SharpnessGD, every=2),
    "block": partial(optim.BlockSGD, every=2, momentum=0.5),
    "block-together": partial(optim.BlockSGD, every=2, momentum=0.5, measure="together"),
    "hutchinson": partial(optim.HutchinsonAdam, every=2),
    "clipped": partial(optim.ClippedNewton, lr=0.02, every=2),
    "clipped-ggn": partial(optim.ClippedNewton, lr=0.02, every=2, estimate="ggn"),
    "clipped-bartlett": partial(optim.ClippedNewton, lr=0.02, every=2, estimate="bartlett"),
    "kfac": partial(optim.KFACDescent, every=2, momentum=0.5),
}
PROBLEMS = ("clipped-bartlett", "kfac")  # whose closures return a problem


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    X = torch.randn(12, 3, generator=source, dtype=torch.float64)
    return X, torch.randint(0, 3, (12,), generator=source)


def closure_for(name: str, net: nn.Module) -> Callable[[], Any]:
    """The mean cross-entropy of the net: with its outputs, or as a problem."""
    X, y = data()
    if name in PROBLEMS:
        return lambda: cs.Problem(net, [(X, y)])

    def closure() -> tuple[Tensor, Tensor]:
        z = net(X)
        return nn.functional.cross_entropy(z, y), z

    return closure


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in net.parameters()])


class Quadratic:
    """½ xᵀAx − bᵀx in parameters that are cut from x."""

    def __init__(self, A: Tensor, b: Tensor, sizes: tuple[int, ...]):
        self.A, self.b = A, b
        self.parts = [nn.Parameter(torch.zeros(n, dtype=A.dtype)) for n in sizes]

    @property
    def x(self) -> Tensor:
        return torch.cat([p.detach() for p in self.parts])

    def __call__(self) -> Tensor:
        x = torch.cat(list(self.parts))
        return 0.5 * x @ self.A @ x - self.b @ x

    @property
    def solution(self) -> Tensor:
        return torch.linalg.solve(self.A, self.b)


def symmetric(values: Tensor, seed: int = 0) -> Tensor:
    """A matrix with these eigenvalues."""
    source = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=source, dtype=values.dtype))
    return Q @ torch.diag(values) @ Q.T
