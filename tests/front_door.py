"""What every way in has to meet: a user's own scalar, differentiated twice by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvescope as cs
from oracles import relative_error

Scalar = Callable[[], Tensor]


def assert_meets_autograd(
    problems: Sequence[cs.Problem],
    named: dict[str, Tensor],
    total: Scalar,
    *,
    outputs: Scalar | None = None,
    of_outputs: Callable[[Tensor], Tensor] | None = None,
    tolerance: float = 1e-9,
) -> None:
    """Value, gradient, H v, GGN v and functional v of problems cut differently, before and after a step.

    Args:
        problems: The same data in other batches.
        named: The leaves, by the names that the problems have for them.
        total: The whole loss as the user computes it.
        outputs: The outputs on all data; without them only H is compared.
        of_outputs: The whole loss from those outputs.
        tolerance: Relative.
    """
    space, whole = problems[0].space(), outputs is not None
    parts = [
        (p, cs.Hessian(p), cs.GGN(p) if whole else None, cs.FunctionalHessian(p) if whole else None)
        for p in problems
    ]
    for step in range(2):
        v = torch.randn(space.size, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        value, slope, bend = _autograd(named, total, space.scatter(v))
        Gv = None
        if outputs is not None and of_outputs is not None:
            Gv = space.gather(_gauss_newton(named, outputs, of_outputs, space.scatter(v)))
        for problem, H, G, functional in parts:
            assert abs(problem.loss_value() - float(value)) <= tolerance * abs(float(value))
            assert relative_error(problem.gradient(), space.gather(slope)) < tolerance
            Hv = H @ v
            size = tolerance * float(Hv.norm())
            assert relative_error(Hv, space.gather(bend)) < tolerance
            if Gv is not None and G is not None and functional is not None:
                assert float((G @ v - Gv).norm()) <= size
                assert float((functional @ v - (Hv - Gv)).norm()) <= size
        if step == 0:
            assert relative_error(_difference(problems[0], v), space.gather(bend)) < 1e-5
        _step(named)


def _autograd(named: dict[str, Tensor], total: Scalar, v: dict[str, Tensor]) -> tuple:
    """The value, the gradient and H v, by differentiating twice in reverse."""
    leaves = list(named.values())
    with torch.enable_grad(), twice_differentiable():
        value = total()
        first = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
        s = sum((g * v[name]).sum() for g, name in zip(first, named, strict=True) if g is not None)
        second = torch.autograd.grad(s, leaves, allow_unused=True)
    trees = [
        {n: x.detach() for n, x in zip(named, some, strict=True) if x is not None} for some in (first, second)
    ]
    return value.detach(), *trees


def _gauss_newton(
    named: dict[str, Tensor],
    outputs: Scalar,
    of_outputs: Callable[[Tensor], Tensor],
    v: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Jᵀ B J v with B the Hessian of the loss in all outputs, J row by row."""
    leaves = list(named.values())
    z = outputs()
    rows = [torch.autograd.grad(x, leaves, retain_graph=True, allow_unused=True) for x in z.flatten()]
    J = torch.stack([torch.cat([_flat(g, p) for g, p in zip(row, leaves, strict=True)]) for row in rows])
    Jv = J @ torch.cat([v[name].flatten() for name in named])
    BJv = torch.autograd.functional.hvp(of_outputs, z.detach(), Jv.view(z.shape))[1]
    found = J.T @ BJv.flatten()
    parts = found.split([p.numel() for p in leaves])
    return {name: part.view(p.shape) for name, part, p in zip(named, parts, leaves, strict=True)}


def _flat(g: Tensor | None, p: Tensor) -> Tensor:
    return torch.zeros(p.numel(), dtype=p.dtype) if g is None else g.flatten()


def _difference(problem: cs.Problem, v: Tensor, h: float = 1e-5) -> Tensor:
    """(∇L(θ + h v) − ∇L(θ − h v)) / 2h."""
    theta = problem.space().gather({k: p.detach() for k, p in problem.named_parameters()})
    return (problem.at(theta + h * v).gradient() - problem.at(theta - h * v).gradient()) / (2 * h)


def _step(named: dict[str, Tensor]) -> None:
    """Other numbers in the same tensors."""
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in named.values():
            p += 0.1 * torch.randn(p.shape, generator=source, dtype=p.dtype)


def twice_differentiable() -> AbstractContextManager[None]:
    """Attention as PyTorch can differentiate it twice."""
    return sdpa_kernel(SDPBackend.MATH)


def leaves_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters by name."""
    return dict(module.named_parameters())
