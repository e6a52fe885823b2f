"""Many runs at once: every seed with every learning rate, as one stack of parameters.

The gradient of a stack is vmap of the gradient of one network, the steps of Adam and of SGD go entry by
entry, so a run does not know of the others. Runs of one seed take the same batches. A run that diverges has a
loss of infinity and disturbs no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Optimizer = Literal["adam", "sgd"]
MOMENTUM = 0.9  # of SGD
BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam


class Flat(NamedTuple):
    """A network as a function of one vector of n parameters."""

    network: nn.Module
    names: list[str]
    shapes: list[torch.Size]
    digits: int

    @property
    def sizes(self) -> list[int]:
        """Entries of each parameter."""
        return [shape.numel() for shape in self.shapes]

    def tree(self, theta: Tensor) -> dict[str, Tensor]:
        """The vector (n,), cut into parameters."""
        parts = theta.split(self.sizes)
        return {name: part.view(shape) for name, part, shape in
                zip(self.names, parts, self.shapes, strict=True)}  # fmt: skip

    def logits(self, tree: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """At the positions that count, from "=" to the last but one: (B, D + 1, V)."""
        return functional_call(self.network, tree, (tokens,))[:, 2 * self.digits + 1 : -1]

    def loss_of(self, tree: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the digits of the sum."""
        z, following = self.logits(tree, tokens), tokens[:, 2 * self.digits + 2 :]
        return nn.functional.cross_entropy(z.flatten(0, 1), following.flatten())

    def loss(self, theta: Tensor, tokens: Tensor) -> Tensor:
        """The same, of a vector."""
        return self.loss_of(self.tree(theta), tokens)


def flatten(network: nn.Module, digits: int) -> tuple[Flat, Tensor]:
    """A network as a function, and its parameters (n,)."""
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    flat = Flat(network, list(parameters), [p.shape for p in parameters.values()], digits)
    return flat, torch.cat([p.flatten() for p in parameters.values()])


class Courses(NamedTuple):
    """Runs of S seeds with R rates."""

    loss: Tensor  # (S, R, K) at the looks, infinite where it is not finite
    kept: Tensor  # (C, S, R, n) parameters at the checkpoints


def train(
    flat: Flat,
    start: Tensor,
    batches: Tensor,
    rates: Sequence[float],
    optimizer: Optimizer,
    *,
    evaluated: Tensor,
    looks: Sequence[int],
    checkpoints: Sequence[int],
) -> Courses:
    """Train from `start` (S, n) on the tokens `batches` (S, steps, B, T), with each rate and no schedule.

    Args:
        evaluated: tokens (N, T) whose loss is looked at.
        looks: steps after which it is; 0 is before the first.
        checkpoints: steps after which parameters are kept.
    """
    steps = batches.shape[1]
    theta = start[:, None].repeat(1, len(rates), 1)
    lr = torch.tensor(list(rates), dtype=theta.dtype, device=theta.device)[:, None]
    move = STEPS[optimizer](theta, lr)
    gradient = vmap(vmap(grad(flat.loss), in_dims=(0, None)), in_dims=(0, 0))
    value = vmap(vmap(flat.loss, in_dims=(0, None)), in_dims=(0, None))
    losses, kept = [], []
    for step in range(steps + 1):
        if step in looks:
            losses.append(value(theta, evaluated))
        if step in checkpoints:
            kept.append(theta)
        if step < steps:
            theta = move(theta, gradient(theta, batches[:, step]))
    found = torch.stack(losses, dim=-1)
    return Courses(found.nan_to_num(math.inf, math.inf), torch.stack(kept))


Move = Callable[[Tensor, Tensor], Tensor]
"""Parameters and gradients, (S, R, n) each, to the parameters after a step."""


def adam(theta: Tensor, lr: Tensor) -> Move:
    """θ − η m̂ / (√v̂ + ε), as torch.optim.Adam."""
    m, v, count = torch.zeros_like(theta), torch.zeros_like(theta), 0
    first, second = BETAS

    def move(theta: Tensor, g: Tensor) -> Tensor:
        nonlocal count
        count += 1
        m.lerp_(g, 1 - first)
        v.mul_(second).addcmul_(g, g, value=1 - second)
        root = v.sqrt().div_(math.sqrt(1 - second**count)).add_(EPS)
        return theta - lr / (1 - first**count) * m / root

    return move


def sgd(theta: Tensor, lr: Tensor) -> Move:
    """θ − η b with b ← 0.9 b + g, as torch.optim.SGD with momentum."""
    b = torch.zeros_like(theta)

    def move(theta: Tensor, g: Tensor) -> Tensor:
        return theta - lr * b.mul_(MOMENTUM).add_(g)

    return move


STEPS: dict[Optimizer, Callable[[Tensor, Tensor], Move]] = {"adam": adam, "sgd": sgd}
