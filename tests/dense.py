"""Dense truths for small problems.

Nothing here uses the package's losses, spaces or operators: losses are written out term by term, matrices
come from `torch.func` or double backward over the raw parameters, and the entries of a block are looked up
by slicing. A mistake would have to be made twice to go unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev

import curvescope as cs

IGNORED = -100

Data = list[tuple[Tensor, Tensor, Tensor | None]]


# ------------------------------------------------------------------------------------------ losses, by hand


def cross_entropy_terms(
    z: Tensor, y: Tensor | np.ndarray, smoothing: float = 0.0
) -> tuple[list[Tensor], list[tuple]]:
    """One loss per target that counts, and its index among the targets."""
    losses, places = [], []
    for place in product(*map(range, y.shape)):
        if int(y[place]) == IGNORED:
            continue
        logits = z[place]
        peak = logits.detach().max()
        log_sum = (logits - peak).exp().sum().log() + peak
        losses.append(log_sum - (1 - smoothing) * logits[int(y[place])] - smoothing * logits.mean())
        places.append(place)
    return losses, places


def sequence_error_terms(z: Tensor, y: Tensor) -> tuple[list[Tensor], list[tuple]]:
    """Mean squared error of each sequence."""
    return [((z[i] - y[i]) ** 2).mean() for i in range(len(z))], [(i,) for i in range(len(z))]


def entry_terms(
    penalty: Callable[[Tensor], Tensor], z: Tensor, y: Tensor
) -> tuple[list[Tensor], list[tuple]]:
    """A penalty of each entry's residual."""
    places = list(product(*map(range, y.shape)))
    return [penalty(z[place] - y[place]) for place in places], places


def pseudo_huber(r: Tensor) -> Tensor:
    """√(1 + r²) − 1."""
    return (1 + r * r).sqrt() - 1


TERMS: dict[str, Callable[[Tensor, Any], tuple[list[Tensor], list[tuple]]]] = {
    "cross_entropy": cross_entropy_terms,
    "smoothed": lambda z, y: cross_entropy_terms(z, y, 0.2),
    "mse": sequence_error_terms,
    "mse_mean": lambda z, y: entry_terms(lambda r: r * r, z, y),
    "custom": lambda z, y: entry_terms(pseudo_huber, z, y),
}


def weight_at(weights: Tensor | np.ndarray | None, place: tuple) -> float:
    """The weight of the term at `place`, from weights with as many axes or fewer."""
    if weights is None:
        return 1.0
    return float(weights[tuple(place[: weights.ndim])])


def weighted_terms(kind: str, z: Tensor, y: Any, w: Any) -> list[tuple[Tensor, float]]:
    """(ℓ_t, w_t) for every term of a batch; y and w are tensors or arrays."""
    losses, places = TERMS[kind](z, y)
    return [(loss, weight_at(w, place)) for loss, place in zip(losses, places, strict=True)]


def as_package_loss(kind: str) -> Any:
    """What is given to the package for the hand-written loss of that name."""
    if kind == "smoothed":
        return cs.CrossEntropy(label_smoothing=0.2)
    if kind == "custom":
        return cs.CustomLoss(
            lambda z, y, w: pseudo_huber(z - y).sum(),
            lambda y, w: y.numel(),
            terms=lambda z, y: pseudo_huber(z - y),
        )
    return kind


# ----------------------------------------------------------------------------------------- dense matrices


class Dense:
    """Value, gradient and every matrix of a problem, over raw parameters in the module's own order."""

    def __init__(self, module: nn.Module, data: Data, kind: str):
        self.module, self.data, self.kind = module, data, kind
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.theta = torch.cat([p.detach().flatten() for p in module.parameters()])
        self.total = sum(w for x, y, wt in data for _, w in weighted_terms(kind, self._z(x), y, wt))
        self.shapes_of_outputs = [self._z(x).shape for x, _, _ in data]
        self.targets = [  # arrays: inside torch.func, PyTorch before 2.11 cannot read the entries of tensors
            (y if y.is_floating_point() else y.numpy(), None if w is None else w.numpy()) for _, y, w in data
        ]

    def _z(self, x: Tensor, theta: Tensor | None = None) -> Tensor:
        theta = self.theta if theta is None else theta
        pieces = theta.split([shape.numel() for shape in self.shapes.values()])
        values = {
            name: piece.view(self.shapes[name]) for name, piece in zip(self.shapes, pieces, strict=True)
        }
        return functional_call(self.module, values, (x,))

    def outputs(self, theta: Tensor) -> Tensor:
        """All outputs, batch after batch, flat."""
        return torch.cat([self._z(x, theta).flatten() for x, _, _ in self.data])

    def loss_of_outputs(self, z: Tensor) -> Tensor:
        """(1/N) Σ w ℓ from flat outputs."""
        total, start = torch.zeros((), dtype=z.dtype), 0
        for shape, (y, w) in zip(self.shapes_of_outputs, self.targets, strict=True):
            part = z[start : start + shape.numel()].view(shape)
            total = total + sum(weight * loss for loss, weight in weighted_terms(self.kind, part, y, w))
            start += shape.numel()
        return total / self.total

    def value(self, theta: Tensor) -> Tensor:
        return self.loss_of_outputs(self.outputs(theta))

    def gradient(self, theta: Tensor | None = None) -> Tensor:
        return grad(self.value)(self.theta if theta is None else theta)

    @cached_property
    def hessian(self) -> Tensor:
        return jacfwd(grad(self.value))(self.theta)

    @cached_property
    def jacobian(self) -> Tensor:
        return jacrev(self.outputs)(self.theta)

    @cached_property
    def ggn(self) -> Tensor:
        middle = jacfwd(grad(self.loss_of_outputs))(self.outputs(self.theta))
        return self.jacobian.T @ middle @ self.jacobian

    @cached_property
    def functional(self) -> Tensor:
        """Σ_i ∂L/∂z_i ∇²z_i: the Hessian of Σ_i s_i z_i, the slopes s_i = ∂L/∂z_i held fixed."""
        slopes = self.slopes
        return jacfwd(grad(lambda theta: slopes @ self.outputs(theta)))(self.theta)

    @property
    def slopes(self) -> Tensor:
        """∂L/∂z_i of every output."""
        return grad(self.loss_of_outputs)(self.outputs(self.theta))

    def output_hessian(self, i: int) -> Tensor:
        """∇²z_i of one output."""
        return jacfwd(grad(lambda theta: self.outputs(theta)[i]))(self.theta)

    def fisher(self, targets: Sequence[Sequence[Tensor]] | None = None) -> Tensor:
        """(1/N) Σ_t w_t g_t g_tᵀ, one gradient at a time; the mean over several sets of targets."""
        sets = targets if targets is not None else [[y] for _, y, _ in self.data]
        total = torch.zeros(len(self.theta), len(self.theta), dtype=self.theta.dtype)
        for (x, _, w), drawn in zip(self.data, sets, strict=True):
            for y in drawn:
                theta = self.theta.clone().requires_grad_()
                for loss, weight in weighted_terms(self.kind, self._z(x, theta), y, w):
                    (g,) = torch.autograd.grad(loss, theta, retain_graph=True)
                    total += weight * torch.outer(g, g) / len(drawn)
        return total / self.total

    def entries(self, model: cs.Model, *names: str) -> Tensor:
        """Raw positions of the entries of the named blocks, found by slicing and not by `Block`."""
        starts, start = {}, 0
        for name, shape in self.shapes.items():
            starts[name] = start
            start += shape.numel()
        found = []
        for name in names or tuple(model.blocks):
            head, parameter = head_of(name)
            numbers = torch.arange(self.shapes[parameter].numel()).view(self.shapes[parameter])
            if head is not None:
                numbers = slice_of_head(numbers, parameter, head, model)
            found.append(starts[parameter] + numbers.flatten())
        return torch.cat(found)


def head_of(name: str) -> tuple[int | None, str]:
    parts = name.split(".")
    if len(parts) == 3 and parts[1].startswith("h") and parts[1][1:].isdigit():
        return int(parts[1][1:]), f"{parts[0]}.{parts[2]}"
    return None, name


def slice_of_head(numbers: Tensor, parameter: str, head: int, model: cs.Model) -> Tensor:
    """Columns of Q, K, V, rows of O; W_QK has d_model columns per head."""
    size = model.facts["d_model"] if parameter.endswith("W_QK") else model.facts["d_head"]
    own = slice(head * size, (head + 1) * size)
    return numbers[own] if parameter.endswith("W_O") else numbers[..., own]


def double_backward_hessian(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """The Hessian by reverse over reverse."""
    found = torch.autograd.functional.hessian(f, theta, vectorize=True)
    assert isinstance(found, Tensor)
    return found


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Largest entry of the difference, in units of the largest entry of the truth."""
    assert found.shape == truth.shape, (found.shape, truth.shape)
    scale = max(float(truth.abs().max()), 1e-300) if truth.numel() else 1.0
    return float((found - truth).abs().max()) / scale if truth.numel() else 0.0
