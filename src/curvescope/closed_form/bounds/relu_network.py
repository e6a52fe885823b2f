"""Fully connected ReLU networks under cross-entropy: exact Hessian of one sample, and its bounds.

z = relu(… relu(x W_1) W_2 …) W_n, no biases, ℓ = cross-entropy of softmax(z). With x_p the input of layer p,
G_p = ∂z/∂h_p the slope of the logits in its pre-activations h_p = x_p W_p, M_pq = ∂x_q/∂h_p for p < q,
B = diag(π) − π πᵀ for the probabilities π, and g = π − y:

    GGN        (p, q):          x_pa x_qb (G_p B G_qᵀ)_hk
    functional (p, q), p < q:   x_pa (M_pq)_hb (G_q g)_k,   0 for p = q

The formulas hold if no pre-activation is zero. `printed.bounds` has the bound of arXiv 2409.11995, which
keeps W_p in the product of layer p and omits the functional Hessian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import BlockMatrix, Pair, symmetric
from curvescope.closed_form.bounds.head import BlockBounds, block_bounds
from curvescope.closed_form.bounds.sums import ROUNDING, spectral_norm
from curvescope.closed_form.objectives import class_targets
from curvescope.closed_form.softmax import softmax_covariance
from curvescope.core.errors import ShapeError

LOSS_CURVATURE, LOSS_SLOPE = 0.5, sqrt(2)  # ‖diag(π) − π πᵀ‖ and |π − y| are at most these


@dataclass(frozen=True)
class ReluNetworkPoint:
    """One forward and one backward pass at a sample, float64; lists run over the layers."""

    inputs: list[Tensor]  # x_p (n_p,)
    slopes: list[Tensor]  # G_p (n_{p+1}, C)
    passages: dict[tuple[int, int], Tensor]  # M_pq (n_{p+1}, n_q) for p < q
    B: Tensor  # (C, C)
    g: Tensor  # (C,)

    def hessian(self, *, functional: bool = True) -> BlockMatrix:
        """Return the Hessian in the weights W_1, W_2, …, or the GGN."""
        names = _names(self.inputs)
        blocks: dict[Pair, Tensor] = {}
        for p, one in enumerate(names):
            for q, two in enumerate(names[p:], start=p):
                middle = self.slopes[p] @ self.B @ self.slopes[q].mT
                block = torch.einsum("a,b,hk->ahbk", self.inputs[p], self.inputs[q], middle)
                if functional and p < q:
                    ends = self.inputs[p], self.passages[p, q], self.slopes[q] @ self.g
                    block = block + torch.einsum("a,hb,k->ahbk", *ends)
                blocks[one, two] = block
        sizes = {name: len(x) * len(G) for name, x, G in zip(names, self.inputs, self.slopes, strict=True)}
        return symmetric(blocks, sizes, self.g)


def relu_network_point(x: Tensor, weights: Sequence[Tensor], target: Tensor) -> ReluNetworkPoint:
    """Run the network at one sample x (n_1,) with weights (n_p, n_{p+1}); the target is a class, or (C,)."""
    x, weights = _checked(x, weights)
    inputs, masks = [x], []
    for W in weights[:-1]:
        h = inputs[-1] @ W
        inputs.append(torch.relu(h))
        masks.append((h > 0).double())
    z, last = inputs[-1] @ weights[-1], len(weights) - 1
    one = torch.eye(len(z)).to(z)
    slopes = [one]
    for p in reversed(range(last)):
        slopes.insert(0, masks[p][:, None] * (weights[p + 1] @ slopes[0]))
    passages = {}
    for p in range(last):
        passages[p, p + 1] = torch.diag(masks[p])
        for q in range(p + 1, last):
            passages[p, q + 1] = passages[p, q] @ weights[q] * masks[q]
    y, _ = class_targets(target[None], z[None])
    probabilities = torch.softmax(z, 0)
    return ReluNetworkPoint(
        inputs, slopes, passages, softmax_covariance(probabilities, one), probabilities - y[0]
    )


def a_priori_network_bounds(x: Tensor, weights: Sequence[Tensor], *, functional: bool = True) -> BlockBounds:
    """Return bounds from |x| and the norms of the weights, for any target.

    b_pq = ½ |x|² Π_{s≠p}‖W_s‖ Π_{s≠q}‖W_s‖ + √2 |x| Π_{s≠p,q}‖W_s‖, the second term for p ≠ q and of the
    functional Hessian. Without it the whole is ½ |x|² Σ_p Π_{s≠p}‖W_s‖².
    """
    x, weights = _checked(x, weights)
    size, norms = x.norm(), [float(spectral_norm(W)) for W in weights]
    n = range(len(norms))
    without = x.new_tensor([prod(norms[s] for s in n if s != p) for p in n])
    table = LOSS_CURVATURE * size**2 * torch.outer(without, without)
    if functional:
        both = [[prod(norms[s] for s in n if s not in (p, q)) * (p != q) for q in n] for p in n]
        table = table + LOSS_SLOPE * size * x.new_tensor(both)
    return block_bounds(_names(weights), table * (1 + ROUNDING))


def measured_network_bounds(at: ReluNetworkPoint, *, functional: bool = True) -> BlockBounds:
    """Return bounds from one forward and one backward pass; they are exact for either part of a block.

    b_pq = |x_p||x_q| ‖G_p B G_qᵀ‖ + |x_p| ‖M_pq‖ |G_q g|, the second term for p < q.
    """
    table = at.g.new_zeros(len(at.inputs), len(at.inputs))
    for p, one in enumerate(at.inputs):
        for q, two in enumerate(at.inputs[p:], start=p):
            value = one.norm() * two.norm() * spectral_norm(at.slopes[p] @ at.B @ at.slopes[q].mT)
            if functional and p < q:
                value = value + one.norm() * spectral_norm(at.passages[p, q]) * (at.slopes[q] @ at.g).norm()
            table[p, q] = table[q, p] = value
    return block_bounds(_names(at.inputs), table * (1 + ROUNDING))


def _names(layers: Sequence[Tensor]) -> list[str]:
    return [f"W_{p + 1}" for p in range(len(layers))]


def _checked(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Convert to float64, and check that the shapes fit together."""
    shapes = [tuple(W.shape) for W in weights]
    width = tuple(x.shape)
    for shape in shapes or [()]:
        if len(width) != 1 or len(shape) != 2 or shape[0] != width[0]:
            raise ShapeError(
                f"expected x (n_1,) and weights (n_p, n_{{p+1}}), got {tuple(x.shape)}, {shapes}"
            )
        width = shape[1:]
    return x.double(), [W.double() for W in weights]
