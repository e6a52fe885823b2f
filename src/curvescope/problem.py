"""A problem: model + data + loss + the total weight of its terms. Curvature is a property of this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.progress import track
from curvescope.data.batches import Batch, Batches, as_batches
from curvescope.losses import Loss, as_loss
from curvescope.models.load import load
from curvescope.models.model import Model, evaluating


class Problem:
    """L(θ) = (1/N) Σ_t w_t ℓ_t(θ) over the terms t of all batches, N = Σ_t w_t.

    The sum is divided once, so batch sizes, order and padding do not change anything. The model is
    evaluated in eval mode and left as it was.
    """

    def __init__(self, model: Any, batches: Any, loss: str | Loss = "cross_entropy"):
        self.model: Model = load(model)
        self.batches: Batches = as_batches(batches)
        self.loss: Loss = as_loss(loss)
        if not self.num_terms > 0:
            raise UsageError(
                "expected at least one term that counts, but every target is ignored or weighs nothing"
            )

    @cached_property
    def num_terms(self) -> float:
        """N: the total weight of the terms."""
        return sum(self.loss.total_weight(b.targets, b.weights) for b in self.batches)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.model.device

    def space(self, *patterns: str) -> ParamSpace:
        """Vectors over the model's blocks that match the globs."""
        return self.model.space(*patterns)

    def placed_batches(self, what: str) -> Iterator[Batch]:
        """The batches on the model's device, real numbers in its type; shows progress when slow."""
        for batch in track(self.batches, what):
            yield batch.map(self.placed)

    def placed(self, tensor: Tensor) -> Tensor:
        """A tensor on the model's device, in its type where it holds real numbers."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def outputs(self, batch: Batch, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """The model's outputs on a placed batch, in eval mode."""
        with evaluating(self.model.module):
            return self.model.forward(parameters or {}, batch.inputs)

    def value(self) -> float:
        """L(θ) at the model's parameters."""
        total = 0.0
        with torch.no_grad():
            for batch in self.placed_batches("loss"):
                total += float(self.loss.sum(self.outputs(batch), batch.targets, batch.weights))
        return total / self.num_terms

    def gradient(self, *patterns: str) -> Tensor:
        """∇L(θ) over the blocks that match the globs: (n,)."""
        space = self.space(*patterns)
        total = torch.zeros(space.size, dtype=self.dtype, device=self.device)
        for batch in self.placed_batches("gradient"):
            with differentiating():
                leaves = self.leaves(space.parameters)
                loss = self.loss.sum(self.outputs(batch, leaves), batch.targets, batch.weights)
                if not loss.requires_grad:
                    continue
                found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            total += space.gather({k: g for k, g in zip(leaves, found, strict=True) if g is not None})
        return total / self.num_terms

    def leaves(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """The named parameters as leaves of a new graph; they share memory with the model's own."""
        parameters = self.model.parameters
        return {name: parameters[name].detach().requires_grad_() for name in names}

    def __repr__(self) -> str:
        return f"Problem({self.model.name!r}, {self.batches!r}, {self.loss.name})"


@contextmanager
def differentiating() -> Iterator[None]:
    """Derivatives are recorded inside, even where the caller is in no_grad or inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def check_finite(total: Tensor, problem: Problem) -> None:
    """Raise when a product has infinite or undefined entries."""
    if not bool(torch.isfinite(total.sum())) and not bool(torch.isfinite(total).all()):
        raise CurvescopeError(
            f"the product is not finite; the loss at these parameters is {problem.value():.4g}",
            hint="look for diverged weights, or use dtype='float64'",
        )
