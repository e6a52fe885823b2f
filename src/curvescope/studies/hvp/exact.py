"""How far a product is from float64: double backward, and Jᵀ (∂²ℓ/∂z²) J v, on a small batch."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvescope.core.parts import MATRICES, MatrixName
from curvescope.models.running.double import exact as kept_double
from curvescope.studies.hvp.contenders import CONTENDERS, Tree
from curvescope.studies.hvp.models import logits, plain_attention

FEW = (2, 128)  # sequences and positions


def matrix_of(contender: str) -> MatrixName:
    """Whose product a contender makes."""
    for matrix in MATRICES:
        if matrix in contender:
            return matrix
    return "hessian"


def few(x: Tensor) -> Tensor:
    """The small batch of a batch."""
    sequences, positions = FEW
    return x[:sequences, :positions]


def distance(name: str, module: nn.Module, x: Tensor, y: Tensor, v: Tree, want: Tree) -> float:
    """‖found − exact‖ / ‖exact‖ of a contender's product with v, one parameter after the other."""
    product = CONTENDERS[name](module, x, y)
    found = product.leave(product.times(product.enter(v)))
    gap = norm = 0.0
    for ours, exact in zip(found, want, strict=True):
        exact = exact.to(ours.device)
        gap += float((ours.detach().double() - exact).square().sum())
        norm += float(exact.square().sum())
    return math.sqrt(gap / norm)


def exact_product(matrix: MatrixName, module: nn.Module, x: Tensor, y: Tensor, v: Tree) -> Tree:
    """H v, GGN v or their difference in float64, on the CPU."""
    module = copy.deepcopy(module).double()
    params, v = list(module.parameters()), [t.double() for t in v]
    with plain_attention(module):
        with kept_double(torch.float64, casts=True):
            z = logits(module, x)
        if matrix == "hessian":
            return _on_cpu(_hessian(z, y, params, v))
        G = _on_cpu(_ggn(z, y, params, v, again=matrix == "functional"))
        if matrix == "ggn":
            return G
        return [a - b for a, b in zip(_on_cpu(_hessian(z, y, params, v)), G, strict=True)]


def _hessian(z: Tensor, y: Tensor, params: Tree, v: Tree) -> Tree:
    """∇⟨∇L, v⟩."""
    loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
    first = torch.autograd.grad(loss, params, create_graph=True)
    return torch.autograd.grad(first, params, v)


def _ggn(z: Tensor, y: Tensor, params: Tree, v: Tree, *, again: bool) -> Tree:
    """Jᵀ B J v, with J v as the derivative of Jᵀ u in u; `again` leaves the graph of z."""
    u = torch.zeros_like(z, requires_grad=True)
    pulled = torch.autograd.grad(z, params, u, create_graph=True)
    (Jv,) = torch.autograd.grad(pulled, u, v)
    del pulled
    leaf = z.detach().requires_grad_()
    loss = F.cross_entropy(leaf.flatten(0, 1), y.flatten())
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (BJv,) = torch.autograd.grad(slope, leaf, Jv)
    return torch.autograd.grad(z, params, BJv, retain_graph=again)


def _on_cpu(tree: Tree) -> Tree:
    return [t.cpu() for t in tree]
