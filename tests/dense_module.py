"""Value, gradient, Hessian and its parts for the cross-entropy of any module, dense, by double backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import curvescope as cs
from adapters_cases import KeepDouble

Logits = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Truth:
    """In the order of the parameters, each flattened; `parameters` are where it was taken."""

    parameters: dict[str, Tensor]
    value: float
    gradient: Tensor
    hessian: Tensor
    ggn: Tensor
    functional: Tensor

    def order(self, space: cs.ParamSpace) -> Tensor:
        """Where the entries of a space lie."""
        sizes = [p.numel() for p in self.parameters.values()]
        first = dict(zip(self.parameters, torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
        return torch.cat(
            [first[b.parameter] + b.positions(self.parameters[b.parameter].shape) for b in space.segments]
        )


def dense_truth(logits: Logits, parameters: Mapping[str, Tensor], y: Tensor) -> Truth:
    """Of the mean cross-entropy over targets other than −100; casts to float32 inside are left out."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    points = list(leaves.values())
    with KeepDouble():
        z = logits(leaves)
    z, counted = z.flatten(0, -2), y.flatten() != -100
    z, y = z[counted], y.flatten()[counted]
    loss = torch.nn.functional.cross_entropy(z, y)
    P = z.detach().softmax(-1)
    G = (P - torch.nn.functional.one_hot(y, z.shape[-1])) / len(y)
    B = torch.block_diag(*(torch.diag_embed(P) - P[:, :, None] * P[:, None, :])) / len(y)
    J = _rows(z.flatten(), points)
    return Truth(
        {name: p.detach() for name, p in leaves.items()},
        float(loss.detach()),
        _flat(torch.autograd.grad(loss, points, retain_graph=True, allow_unused=True), points),
        _second(loss, points),
        J.T @ B @ J,
        _second((G * z).sum(), points),
    )


def _second(s: Tensor, points: list[Tensor]) -> Tensor:
    first = torch.autograd.grad(s, points, create_graph=True, allow_unused=True)
    return _rows(_flat(first, points), points)


def _flat(found: tuple[Tensor | None, ...], points: list[Tensor]) -> Tensor:
    pairs = zip(found, points, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def _rows(f: Tensor, points: list[Tensor]) -> Tensor:
    """∂f/∂points, one row for each entry."""
    if not f.requires_grad:
        return torch.zeros(len(f), sum(p.numel() for p in points), dtype=f.dtype)
    eye = torch.eye(len(f), dtype=f.dtype)
    found = torch.autograd.grad(f, points, eye, retain_graph=True, allow_unused=True, is_grads_batched=True)
    pairs = zip(found, points, strict=True)
    return torch.cat([f.new_zeros(len(f), p.numel()) if g is None else g.flatten(1) for g, p in pairs], 1)
