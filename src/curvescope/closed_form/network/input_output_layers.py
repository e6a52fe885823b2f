"""Input and output layers as primitives: embedding, positions, unembedding, mean over tokens."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import INPUT, Pair
from curvescope.closed_form.network.primitives import Primitive, Tree, choose, rows
from curvescope.core.errors import ShapeError


@final
class Embedding(Primitive):
    """Rows of E for tokens (B, T): x_0 = E[tokens]. Linear; its own input is empty."""

    label = "embedding"

    def __init__(self, x: Tensor, params: Tree, *, tokens: Tensor):
        self.x, self.tokens = x, tokens
        self.parameters = {"E": params["E"]}
        self.output = params["E"][tokens]

    def jvp(self, dx: Tensor, dtheta: Tree) -> Tensor:
        return self.local(dtheta)["E"][self.tokens]

    def vjp(self, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.zeros_like(self.x), {"E": self._selector().mT @ rows(g)}

    def curve(self, g: Tensor, dx: Tensor, dtheta: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.zeros_like(self.x), {}

    def jacobian(self) -> dict[str, Tensor]:
        d = self.output.shape[-1]
        columns = torch.zeros(self.output.numel(), self.x.numel()).to(self.output)
        return {INPUT: columns, "E": torch.kron(self._selector(), torch.eye(d).to(self.output))}

    def curvature(self, g: Tensor) -> dict[str, dict[Pair, Tensor]]:
        return {}

    def _selector(self) -> Tensor:
        """Return one-hot rows of the tokens: (B T, V)."""
        words = self.parameters["E"].shape[0]
        return torch.nn.functional.one_hot(self.tokens.reshape(-1), words).to(self.output)


@final
class Positions(Primitive):
    """x + P[:T] for x (B, T, d). Linear."""

    label = "positions"

    def __init__(self, x: Tensor, params: Tree):
        self.x, self.parameters = x, {"P": params["P"]}
        self.T = x.shape[1]
        if params["P"].shape[0] < self.T:
            raise ShapeError(f"expected at most {params['P'].shape[0]} positions, got {self.T}")
        self.output = x + params["P"][: self.T]

    def jvp(self, dx: Tensor, dtheta: Tree) -> Tensor:
        return dx + self.local(dtheta)["P"][: self.T]

    def vjp(self, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rest = self.parameters["P"].shape[0] - self.T
        return g, {"P": torch.nn.functional.pad(g.sum(0), (0, 0, 0, rest))}

    def curve(self, g: Tensor, dx: Tensor, dtheta: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.zeros_like(self.x), {}

    def jacobian(self) -> dict[str, Tensor]:
        P, n = self.parameters["P"], self.x.numel()
        first = torch.eye(P.numel()).to(P)[: self.T * P.shape[1]]
        return {INPUT: torch.eye(n).to(P), "P": first.repeat(self.x.shape[0], 1)}

    def curvature(self, g: Tensor) -> dict[str, dict[Pair, Tensor]]:
        return {}


@final
class Linear(Primitive):
    """y = x W + b, or x Wᵀ if `transposed` (a tied unembedding, W = E). Bilinear: one source."""

    def __init__(
        self,
        x: Tensor,
        params: Tree,
        *,
        weight: str = "U",
        bias: str = "b_U",
        transposed: bool = False,
        label: str = "unembedding",
    ):
        self.x, self.label, self.weight, self.bias, self.transposed = x, label, weight, bias, transposed
        self.parameters = choose(params, "", (weight, bias))
        self.W = params[weight].mT if transposed else params[weight]
        y = x @ self.W
        self.output = y + params[bias] if bias in self.parameters else y

    def jvp(self, dx: Tensor, dtheta: Tree) -> Tensor:
        d = self.local(dtheta)
        dy = dx @ self.W + self.x @ self._turn(d[self.weight])
        return dy + d[self.bias] if self.bias in d else dy

    def vjp(self, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        grads = {self.weight: self._turn(rows(self.x).mT @ rows(g))}
        if self.bias in self.parameters:
            grads[self.bias] = rows(g).sum(0)
        return g @ self.W.mT, grads

    def curve(self, g: Tensor, dx: Tensor, dtheta: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        dW = self._turn(self.local(dtheta)[self.weight])
        return g @ dW.mT, {self.weight: self._turn(rows(dx).mT @ rows(g))}

    def jacobian(self) -> dict[str, Tensor]:
        x, W = rows(self.x), self.W
        I_L, I_o = torch.eye(len(x)).to(W), torch.eye(W.shape[1]).to(W)
        J = torch.einsum("ia,oz->ioza" if self.transposed else "ia,oz->ioaz", x, I_o)
        jacobian = {
            INPUT: torch.einsum("ij,ao->ioja", I_L, W).reshape(len(x) * len(I_o), -1),
            self.weight: J.reshape(len(x) * len(I_o), -1),
        }
        if self.bias in self.parameters:
            jacobian[self.bias] = I_o.repeat(len(x), 1)
        return jacobian

    def curvature(self, g: Tensor) -> dict[str, dict[Pair, Tensor]]:
        """K_xW[i a; b o] = δ_ab g_io."""
        I_d = torch.eye(self.W.shape[0]).to(g)
        block = torch.einsum("ab,io->iaob" if self.transposed else "ab,io->iabo", I_d, rows(g))
        return {self.label: {(INPUT, self.weight): block.reshape(self.x.numel(), -1)}}

    def _turn(self, W: Tensor) -> Tensor:
        return W.mT if self.transposed else W


@final
class MeanOverTokens(Primitive):
    """x (B, T, d) ↦ its mean over T, (B, d). Linear, without parameters."""

    label = "mean"

    def __init__(self, x: Tensor):
        self.x, self.parameters, self.output = x, {}, x.mean(1)

    def jvp(self, dx: Tensor, dtheta: Tree) -> Tensor:
        return dx.mean(1)

    def vjp(self, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return (g[:, None] / self.x.shape[1]).expand(self.x.shape), {}

    def curve(self, g: Tensor, dx: Tensor, dtheta: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.zeros_like(self.x), {}

    def jacobian(self) -> dict[str, Tensor]:
        B, T, d = self.x.shape
        rows = torch.eye(d).to(self.x).repeat(1, T) / T
        return {INPUT: torch.block_diag(*[rows] * B)}

    def curvature(self, g: Tensor) -> dict[str, dict[Pair, Tensor]]:
        return {}
