"""Many small networks of one shape trained side by side, each with its own weights and step size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from curvescope.core.tensors import IGNORED

Optimizer = Literal["gradient descent", "Adam"]
BETAS, EPS = (0.9, 0.999), 1e-8


def train_together(
    modules: Sequence[nn.Module], X: Tensor, targets: Tensor, *, rates: Tensor, steps: int, how: Optimizer
) -> Tensor:
    """Mean cross-entropy before every step and after the last, of whole batches.

    Args:
        modules: N of one shape, their parameters the beginnings.
        X: (N, n, T, d), the inputs of each.
        targets: (n, T), the same for all.
        rates: (N,) step sizes.

    Returns:
        (N, steps + 1).
    """
    names = [name for name, _ in modules[0].named_parameters()]
    theta = {name: torch.stack([m.get_parameter(name).detach() for m in modules]) for name in names}

    def loss(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        logits = functional_call(modules[0], parameters, (inputs,))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    slopes = vmap(grad_and_value(loss))
    first = {name: torch.zeros_like(W) for name, W in theta.items()}
    second = {name: torch.zeros_like(W) for name, W in theta.items()}
    losses = []
    for step in range(1, steps + 2):
        g, value = slopes(theta, X)
        losses.append(value)
        if step > steps:
            break
        for name in names:
            move = g[name]
            if how == "Adam":
                first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * move
                second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * move**2
                mean, square = first[name] / (1 - BETAS[0] ** step), second[name] / (1 - BETAS[1] ** step)
                move = mean / (square.sqrt() + EPS)
            theta[name] = theta[name] - rates.view(-1, *[1] * (move.dim() - 1)) * move
    return torch.stack(losses, dim=1)
