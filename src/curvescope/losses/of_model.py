"""The loss of a model whose outputs are a loss already, one number for each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.tensors.trees import Tree
from curvescope.losses.base import Loss


def unsplit(what: str) -> UsageError:
    """What is said where outputs would be needed, and only their loss is known."""
    return UsageError(
        f"{what} needs the model's outputs and their loss apart, which loss_fn(model, batch) does not show",
        hint="give the loss of the outputs: cs.Problem(model, data, loss=…), e.g. a cs.CustomLoss",
    )


@dataclass(frozen=True)
class ModelLoss(Loss):
    """L = (1/N) Σ_b N_b f_b, N = Σ_b N_b, for outputs f_b (1,) and weights N_b; or the plain sum of f_b."""

    divided: bool = True
    name = "loss_fn"
    splits = False
    convex = False

    def sum(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> Tensor:
        return outputs.sum() if weights is None else (outputs * weights.to(outputs)).sum()

    def total_weight(self, targets: Tree, weights: Tensor | None) -> float:
        return float(len(targets)) if weights is None else float(weights.sum(dtype=torch.float64))

    def gradient(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> NoReturn:
        raise unsplit("the functional part")

    def hessian_product(
        self, outputs: Tensor, targets: Tree, weights: Tensor | None, direction: Tensor
    ) -> NoReturn:
        raise unsplit("the GGN")
