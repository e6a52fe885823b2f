"""Losses that compare outputs and targets entry by entry: squared error, and those of torch.nn.

    ℓ(z, y) = Σ_i w_i ℓ_i(z_i, y_i),   ∂²ℓ/∂z² = diag(w_i ℓ_i'')

A term is one entry, and the sum is divided by the number of entries. With `batchmean`, and in the squared
error of the theory, a term is one sequence. With `reduction="sum"` the sum is not divided.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvescope.core.errors import ShapeError, UsageError
from curvescope.losses import softmax
from curvescope.losses.base import (
    SettingsLoss,
    TermLayout,
    check_one_tensor,
    expand_weights,
)

ZERO = "so the GGN is zero, and the Hessian is the functional Hessian"
FLAT = f"the second derivative of L1Loss in the outputs is zero, {ZERO}"
LINEAR = (
    f"KLDivLoss is linear in the outputs, log-probabilities, {ZERO}; "
    "CrossEntropyLoss of logits has both parts"
)


class ElementwiseLoss(SettingsLoss):
    """Σ_i w_i ℓ_i with the settings of torch's module."""

    diagonal = True

    @property
    @abstractmethod
    def by_sequence(self) -> bool:
        """Return True if a term is one sequence, False if it is one entry."""

    @abstractmethod
    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ℓ_i."""

    @abstractmethod
    def _derivative(self, outputs: Tensor, targets: Tensor, *, order: int) -> Tensor:
        """ℓ_i' or ℓ_i'' of every entry."""

    def sum(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        self._check(outputs, targets)
        losses = self._entries(outputs, targets)
        return losses.sum() if weights is None else (losses * self._weights(outputs, weights)).sum()

    def total_weight(self, targets: Tensor, weights: Tensor | None) -> float:
        check_one_tensor(targets)
        if weights is None:
            return float(len(targets) if self.by_sequence else targets.numel())
        wide = self._weights(targets, weights)
        return float((wide.flatten(1)[:, 0] if self.by_sequence else wide).sum(dtype=torch.float64))

    def term_weights(self, targets: Tensor, weights: Tensor | None) -> Tensor | None:
        """One weight for each entry."""
        if self.by_sequence:
            return None
        return torch.ones_like(targets) if weights is None else expand_weights(weights, targets)

    def gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """w_i ℓ_i'."""
        self._check(outputs, targets)
        return self._derivative(outputs, targets, order=1) * self._weights(outputs, weights)

    def hessian_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """w_i ℓ_i'' u_i."""
        self._check(outputs, targets)
        return self._derivative(outputs, targets, order=2) * self._weights(outputs, weights) * direction

    def term_outer_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        self._check(outputs, targets)
        r = self._derivative(outputs, targets, order=1)
        inner = r * direction
        if self.by_sequence and outputs.dim() > 1:
            inner = inner.sum(tuple(range(1 - outputs.dim(), 0)), keepdim=True)
        return r * inner * self._weights(outputs, weights)

    def root(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, noise: Tensor) -> Tensor:
        """√(w_i ℓ_i'') ε_i."""
        self._check(outputs, targets)
        bend = self._derivative(outputs, targets, order=2) * self._weights(outputs, weights)
        return bend.clamp(min=0).sqrt() * noise

    def layout(self, outputs: Tensor) -> TermLayout:
        """One term for each entry, or for each sequence."""
        return TermLayout(1 if self.by_sequence else outputs[0].numel())

    def _weights(self, outputs: Tensor, weights: Tensor | None) -> Any:
        """Weights of every entry."""
        if weights is None:
            return 1.0
        if self.by_sequence and weights.dim() != 1:
            raise ShapeError(
                f"expected one weight per sequence, ({outputs.shape[0]},), got {tuple(weights.shape)}",
                hint=f"a term of {self.name} is one sequence; 'mse_mean', and torch's losses with "
                "reduction='mean', support one weight per entry",
            )
        wide = expand_weights(weights, outputs)
        return wide.to(outputs.dtype) if outputs.is_floating_point() else wide

    def _check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise unless outputs and targets fit."""
        check_one_tensor(targets)
        if outputs.shape != targets.shape or not targets.is_floating_point():
            raise ShapeError(
                f"expected real targets of the outputs' shape {tuple(outputs.shape)}, "
                f"got {str(targets.dtype).removeprefix('torch.')} {tuple(targets.shape)}",
                hint=f"{self.name} compares entry by entry"
                + ("; y.double() makes real numbers" if outputs.shape == targets.shape else ""),
            )


@final
class SquaredError(ElementwiseLoss):
    """ℓ_n = c ‖z_n − y_n‖² for sequence n, with outputs and targets of the same shape (B, …).

    `theory`: a term is one sequence and c = 1/(L d_V), the inverse number of entries of a sequence. `mean`:
    every entry is a term with c = 1, as in `nn.MSELoss`. After the division by the number of terms, both are
    the mean over entries unless weights differ between sequences. Their empirical Fishers have different
    terms.
    """

    joint_root = True

    def __init__(self, normalization: Literal["theory", "mean"] = "theory"):
        if normalization not in ("theory", "mean"):
            raise UsageError(f"expected 'theory' or 'mean', got {normalization!r}")
        self.normalization, self.settings = normalization, nn.MSELoss()

    @classmethod
    def of(cls, module: nn.MSELoss) -> SquaredError:
        """Make the loss of torch's module, whose reduction is read in every call."""
        loss = cls("mean")
        loss.settings = module
        return loss

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Name of the loss, as in `Problem(loss=…)`."""
        return "mse" if self.by_sequence else "mse_mean"

    @property
    def by_sequence(self) -> bool:
        return self.normalization == "theory"

    @property
    def options(self) -> dict[str, Any]:
        return {"normalization": self.normalization, "reduction": self.settings.reduction}

    def sample_targets(self, outputs: Tensor, targets: Tensor, source: torch.Generator) -> Tensor:
        """z + σ ξ with σ² = 1/(2c): the Gaussian whose negative log-likelihood is ℓ."""
        noise = torch.randn(outputs.shape, generator=source, dtype=torch.float64)
        return outputs.detach() + noise.to(outputs) * (2 * self._scale(outputs)) ** -0.5

    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._scale(outputs) * (outputs - targets) ** 2

    def _derivative(self, outputs: Tensor, targets: Tensor, *, order: int) -> Tensor:
        c = self._scale(outputs)
        return 2 * c * (outputs - targets) if order == 1 else torch.full_like(outputs, 2 * c)

    def _scale(self, outputs: Tensor) -> float:
        """c."""
        return 1 / max(prod(outputs.shape[1:]), 1) if self.by_sequence else 1.0

    def __eq__(self, other: object) -> bool:
        return self.options == other.options if isinstance(other, SquaredError) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"SquaredError({self.normalization!r})"


Draw = Callable[[Any, Tensor, torch.Generator], Tensor]
"""Function that draws targets from the module, the outputs and a random generator."""


@dataclass(frozen=True)
class ElementwiseRule:
    """Properties of one of torch's loss classes: the loss of each entry, and how to draw targets."""

    entries: Callable[[Any, Tensor, Tensor], Tensor]
    draw: Draw | None = None
    note: str | None = None  # note for users
    targets_are_probabilities: bool = False  # targets are probabilities, from 0 to 1
    outputs_are_probabilities: bool = False  # and so are the outputs


@final
class TorchElementwise(ElementwiseLoss):
    """Loss module of torch.nn with a rule in `RULES`; autograd computes the derivatives of its entries."""

    def __init__(self, module: Any):
        self.settings, self.rule, self.name = module, RULES[type(module)], type(module).__name__
        self.notes = () if self.rule.note is None else (self.rule.note,)

    @property
    def by_sequence(self) -> bool:
        return self.settings.reduction == "batchmean"

    @property
    def options(self) -> dict[str, Any]:
        known = (
            "reduction",
            "weight",
            "pos_weight",
            "delta",
            "beta",
            "log_target",
            "log_input",
            "full",
            "eps",
        )
        return {name: getattr(self.settings, name) for name in known if hasattr(self.settings, name)}

    def sample_targets(self, outputs: Tensor, targets: Tensor, source: torch.Generator) -> Tensor:
        if self.rule.draw is None:
            return super().sample_targets(outputs, targets, source)
        self.refuse_drawing()
        self._check(outputs, targets)
        return self.rule.draw(self.settings, outputs.detach(), source).to(outputs)

    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.rule.entries(self.settings, outputs, targets)

    def _derivative(self, outputs: Tensor, targets: Tensor, *, order: int) -> Tensor:
        with torch.enable_grad():
            z = outputs.detach().requires_grad_()
            derivative = self._entries(z, targets)
            for i in range(order):
                if not derivative.requires_grad:
                    return torch.zeros_like(outputs)
                (derivative,) = torch.autograd.grad(derivative.sum(), z, create_graph=i + 1 < order)
        return derivative.detach()

    def _check(self, outputs: Tensor, targets: Tensor) -> None:
        super()._check(outputs, targets)
        for option in ("weight", "pos_weight"):
            weight = getattr(self.settings, option, None)
            if weight is not None and not _fits(weight.shape, outputs.shape[1:]):
                raise ShapeError(
                    f"expected a {option} of {self.name} that fits the entries {tuple(outputs.shape[1:])} of "
                    f"one sequence, got {tuple(weight.shape)}",
                    hint="weights of sequences belong to the data: (inputs, targets, weights)",
                )
        if self.rule.targets_are_probabilities:
            _check_probabilities(targets, "targets", self.name)
        if self.rule.outputs_are_probabilities:
            _check_probabilities(outputs, "outputs", self.name)


def _fits(shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> bool:
    """Return True if a weight is broadcast in the same way to every sequence."""
    shape = shape[1:] if len(shape) == len(weight_shape) + 1 and shape[0] == 1 else shape
    return len(shape) <= len(weight_shape) and all(
        s in (1, o) for s, o in zip(shape[::-1], weight_shape[::-1], strict=False)
    )


def _check_probabilities(values: Tensor, what: str, name: str) -> None:
    low, high = (float(x) for x in values.detach().aminmax()) if values.numel() else (0.0, 0.0)
    if low < 0 or high > 1:  # nan passes here, and the product raises
        hint = "BCEWithLogitsLoss takes logits" if what == "outputs" else None
        raise UsageError(f"expected {what} from 0 to 1 for {name}, got {low:.4g} to {high:.4g}", hint=hint)


def _plain(function: Callable[..., Tensor], *options: str) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """Return a function for the loss of each entry: torch's function with options of the module."""

    def entries(module: Any, z: Tensor, y: Tensor) -> Tensor:
        arguments = {name: getattr(module, name) for name in options}
        arguments = {name: x.to(z) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        return function(z, y, reduction="none", **arguments)

    return entries


def _two_classes(module: Any, z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of logits 0 and z with weights 1 − y and y · pos_weight."""
    positive = y if module.pos_weight is None else y * module.pos_weight.to(z)
    loss = softmax.soft(torch.stack([torch.zeros_like(z), z], -1), torch.stack([1 - y, positive], -1), -1)
    return loss if module.weight is None else loss * module.weight.to(z)


def _coins(module: Any, z: Tensor, source: torch.Generator, *, logits: bool) -> Tensor:
    p = (z.sigmoid() if logits else z).cpu().double()
    return (torch.rand(z.shape, generator=source, dtype=torch.float64) < p).double()


def _counts(module: Any, z: Tensor, source: torch.Generator) -> Tensor:
    rate = (z.exp() if module.log_input else z + module.eps).cpu().double()
    return torch.poisson(rate, generator=source)


RULES: dict[type[nn.Module], ElementwiseRule] = {
    nn.L1Loss: ElementwiseRule(_plain(F.l1_loss), note=FLAT),
    nn.HuberLoss: ElementwiseRule(_plain(F.huber_loss, "delta")),
    nn.SmoothL1Loss: ElementwiseRule(_plain(F.smooth_l1_loss, "beta")),
    nn.BCELoss: ElementwiseRule(
        _plain(F.binary_cross_entropy, "weight"),
        partial(_coins, logits=False),
        targets_are_probabilities=True,
        outputs_are_probabilities=True,
    ),
    nn.BCEWithLogitsLoss: ElementwiseRule(
        _two_classes, partial(_coins, logits=True), targets_are_probabilities=True
    ),
    nn.KLDivLoss: ElementwiseRule(_plain(F.kl_div, "log_target"), note=LINEAR),
    nn.PoissonNLLLoss: ElementwiseRule(_plain(F.poisson_nll_loss, "log_input", "full", "eps"), _counts),
    nn.SoftMarginLoss: ElementwiseRule(_plain(F.soft_margin_loss)),
}
"""Rules by class of torch.nn."""
