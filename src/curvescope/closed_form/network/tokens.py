"""Norms and feed-forward layers as primitives: the same map at every token, x (…, d)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import INPUT, Pair
from curvescope.closed_form.ffn.layer import activation, ffn_curvature, ffn_jacobian, ffn_output, ffn_point
from curvescope.closed_form.network.primitives import Primitive, Tree, choose, rows
from curvescope.closed_form.norms import (
    NormKind,
    norm_curvature,
    norm_curvature_product,
    norm_gain_curvature,
    norm_jacobian,
    norm_output,
    norm_point,
    scaled,
)


@final
class NormPrimitive(Primitive):
    """y = γ ∘ x̂ + β, with optional γ and β at `prefix` + g and b. One source of curvature."""

    def __init__(self, x: Tensor, params: Tree, *, prefix: str, kind: NormKind, eps: float):
        self.x, self.prefix, self.label = x, prefix, prefix.removesuffix(".")
        self.parameters = choose(params, prefix, ("g", "b"))
        self.gamma, self.beta = self.parameters.get(prefix + "g"), self.parameters.get(prefix + "b")
        self.at = norm_point(x, kind=kind, eps=eps)
        self.output = norm_output(self.at, self.gamma, self.beta)

    def jvp(self, dx: Tensor, dtheta: Tree) -> Tensor:
        d = self.local(dtheta)
        dy = scaled(self.at.apply(dx), self.gamma)
        dy = dy + d["g"] * self.at.x_hat if "g" in d else dy
        return dy + d["b"] if "b" in d else dy

    def vjp(self, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        grads = {"g": _over_tokens(g * self.at.x_hat), "b": _over_tokens(g)}
        return self.at.apply(scaled(g, self.gamma)), self.named(grads)

    def curve(self, g: Tensor, dx: Tensor, dtheta: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        d = self.local(dtheta)
        h_x, h_gamma = norm_curvature_product(self.at, g, dx, gamma=self.gamma, dgamma=d.get("g"))
        return h_x, self.named({"g": _over_tokens(h_gamma)})

    def jacobian(self) -> dict[str, Tensor]:
        d = self.x.shape[-1]
        J = norm_jacobian(self.at, self.gamma).reshape(-1, d, d)
        diagonal = torch.diag_embed(self.at.x_hat).reshape(-1, d)
        jacobian = {"g": diagonal, "b": torch.eye(d).to(J).repeat(len(J), 1)}
        return {INPUT: torch.block_diag(*J)} | self.named(jacobian)

    def curvature(self, g: Tensor) -> dict[str, dict[Pair, Tensor]]:
        d = self.x.shape[-1]
        K = norm_curvature(self.at, g, self.gamma).reshape(-1, d, d)
        blocks: dict[Pair, Tensor] = {(INPUT, INPUT): torch.block_diag(*K)}
        if self.gamma is not None:
            blocks[INPUT, self.prefix + "g"] = norm_gain_curvature(self.at, g).reshape(-1, d)
        return {self.label: blocks}


@final
class FeedForwardPrimitive(Primitive):
    """y = z W_2 + b_2, z = a(x W_1 + b_1) or a(x W_g) ∘ (x W_u), parameters under `prefix`.

    Two sources of curvature: `activation` (a″) and `bilinear` (the products).
    """

    ROLES = ("W_1", "b_1", "W_g", "b_g", "W_u", "b_u", "W_2", "b_2")

    def __init__(self, x: Tensor, params: Tree, *, prefix: str, activation_name: str):
        self.x, self.prefix, self.label = x, prefix, prefix + "ffn"
        self.parameters = choose(params, prefix, self.ROLES)
        theta = self.local(self.parameters)
        self.at = ffn_point(x, theta, activation=activation(activation_name))
        self.output = self._unflat(ffn_output(self.at))

    def jvp(self, dx: Tensor, dtheta: Tree) -> Tensor:
        d = self.local(dtheta)
        _, dz = self._hidden_tangents(dx, d)
        dy = dz @ self.at.W_2 + self.at.z @ d["W_2"]
        return self._unflat(dy + d["b_2"] if "b_2" in d else dy)

    def vjp(self, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        g = rows(g)
        R = g @ self.at.W_2.mT
        g_x = torch.zeros_like(self.at.x)
        grads = {"W_2": self.at.z.mT @ g, "b_2": g.sum(0)}
        for branch in self.at.branches:
            U = R * branch.slope
            g_x = g_x + U @ branch.W.mT
            grads[branch.weight] = self.at.x.mT @ U
            if branch.bias is not None:
                grads[branch.bias] = U.sum(0)
        return g_x.reshape(self.x.shape), self.named(grads)

    def curve(self, g: Tensor, dx: Tensor, dtheta: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        """Apply dU^α = (g dW_2ᵀ) ∘ D^α + Σ_β S^{αβ} dh^β for U^α = R ∘ D^α, and the product rule."""
        d = self.local(dtheta)
        g, dx = rows(g), rows(dx)
        hidden, dz = self._hidden_tangents(dx, d)
        R, dR = g @ self.at.W_2.mT, g @ d["W_2"].mT
        h_x = torch.zeros_like(self.at.x)
        gradients = {"W_2": dz.mT @ g}
        for a, branch in enumerate(self.at.branches):
            U, dU = R * branch.slope, dR * branch.slope
            for b, dh in enumerate(hidden):
                dU = dU + R * self.at.bend(a, b) * dh
            h_x = h_x + dU @ branch.W.mT + U @ d[branch.weight].mT
            gradients[branch.weight] = self.at.x.mT @ dU + dx.mT @ U
            if branch.bias is not None:
                gradients[branch.bias] = dU.sum(0)
        return h_x.reshape(self.x.shape), self.named(gradients)

    def jacobian(self) -> dict[str, Tensor]:
        jacobian = ffn_jacobian(self.at)
        return {self.name(role): J for role, J in jacobian.items()}

    def curvature(self, g: Tensor) -> dict[str, dict[Pair, Tensor]]:
        sources = ffn_curvature(self.at, g)
        return {
            f"{self.label}.{source}": {
                (self.name(a), self.name(b)): block for (a, b), block in blocks.items()
            }
            for source, blocks in sources.items()
        }

    def _hidden_tangents(self, dx: Tensor, d: Tree) -> tuple[list[Tensor], Tensor]:
        """Return dh^α = dx W^α + x dW^α + db^α for each branch, and dz = Σ_α D^α dh^α."""
        dx = rows(dx)
        tangents = []
        for branch in self.at.branches:
            dh = dx @ branch.W + self.at.x @ d[branch.weight]
            tangents.append(dh if branch.bias is None else dh + d[branch.bias])
        slopes = (branch.slope for branch in self.at.branches)
        return tangents, sum(
            (D * dh for D, dh in zip(slopes, tangents, strict=True)), torch.zeros_like(self.at.z)
        )

    def _unflat(self, y: Tensor) -> Tensor:
        return y.reshape(*self.x.shape[:-1], y.shape[-1])


def _over_tokens(u: Tensor) -> Tensor:
    return rows(u).sum(0)
