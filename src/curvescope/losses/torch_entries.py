"""torch.nn's losses that compare outputs and targets entry by entry, counted as torch counts them.

    ℓ(z, y) = Σ_i w_i ℓ_i(z_i, y_i),   ∂²ℓ/∂z² = diag(w_i ℓ_i''),   divided by the number of entries

A term is one entry; of a `batchmean` it is one sequence, and of a `sum` nothing is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvescope.core.errors import ShapeError, UsageError
from curvescope.losses import softmax
from curvescope.losses.base import Loss, check_one_tensor, expand_weights, no_likelihood

ZERO = "so the GGN is zero, and the Hessian is the functional part"
FLAT = f"L1Loss has no second derivative in the outputs but zero, {ZERO}"
LINEAR = (
    f"{{}} is linear in the outputs, log-probabilities, {ZERO}; CrossEntropyLoss of logits has both parts"
)
Draw = Callable[[Any, Tensor, torch.Generator], Tensor]
"""Targets from the module, the outputs and a source of random numbers."""


@dataclass(frozen=True)
class Rule:
    """What is to be known of a class: the loss of each entry, and the distribution whose likelihood it is."""

    entries: Callable[[Any, Tensor, Tensor], Tensor]
    draw: Draw | None = None
    note: str | None = None  # what a reader should know
    shares: bool = False  # targets are probabilities, from 0 to 1
    outputs_too: bool = False  # and so are the outputs


@final
class EntryLoss(Loss):
    """A loss module of torch.nn that is a sum over entries; its settings are read whenever it is asked."""

    def __init__(self, module: Any, rule: Rule):
        self.module, self.rule, self.name = module, rule, type(module).__name__
        self.notes = () if rule.note is None else (rule.note,)

    @property
    def divided(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Not where the module's reduction is a sum."""
        return self.module.reduction != "sum"

    @property
    def convex(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Unless an entry has a negative weight."""
        return not any(has_negative(getattr(self.module, name, None)) for name in ("weight", "pos_weight"))

    @property
    def _by_sequence(self) -> bool:
        return self.module.reduction == "batchmean"

    def sum(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        found = self._entries(outputs, targets)
        return found.sum() if weights is None else (found * self._weights(outputs, weights)).sum()

    def total_weight(self, targets: Tensor, weights: Tensor | None) -> float:
        check_one_tensor(targets)
        if weights is None:
            return float(len(targets) if self._by_sequence else targets.numel())
        if self._by_sequence:
            return float(self._weights(targets, weights).flatten(1)[:, 0].sum(dtype=torch.float64))
        return float(self._weights(targets, weights).sum(dtype=torch.float64))

    def gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        return self._derivative(outputs, targets, order=1) * self._weights(outputs, weights)

    def hessian_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """w_i ℓ_i'' u_i."""
        return self._derivative(outputs, targets, order=2) * self._weights(outputs, weights) * direction

    def term_outer_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        r = self._derivative(outputs, targets, order=1)
        inner = r * direction
        if self._by_sequence and outputs.dim() > 1:
            inner = inner.sum(tuple(range(1 - outputs.dim(), 0)), keepdim=True)
        return r * inner * self._weights(outputs, weights)

    @property
    def rooted(self) -> bool:
        """Where no weight is negative: the losses of `RULES` are convex."""
        return self.convex

    def root(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, noise: Tensor) -> Tensor:
        """√(w_i ℓ_i'') ε_i."""
        bend = self._derivative(outputs, targets, order=2) * self._weights(outputs, weights)
        return bend.clamp(min=0).sqrt() * noise

    def slots(self, outputs: Tensor) -> int:
        """One for each entry, or for each sequence."""
        return 1 if self._by_sequence else outputs[0].numel()

    def sample_targets(self, outputs: Tensor, targets: Tensor, source: torch.Generator) -> Tensor:
        if self.rule.draw is None:
            return super().sample_targets(outputs, targets, source)
        for option in ("weight", "pos_weight"):
            if getattr(self.module, option, None) is not None:
                raise no_likelihood(f"a log-likelihood, which {self.name} with {option} is not")
        self._check(outputs, targets)
        return self.rule.draw(self.module, outputs.detach(), source).to(outputs)

    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._check(outputs, targets)
        return self.rule.entries(self.module, outputs, targets)

    def _derivative(self, outputs: Tensor, targets: Tensor, *, order: int) -> Tensor:
        """ℓ_i' or ℓ_i'' of every entry, without weights."""
        with torch.enable_grad():
            z = outputs.detach().requires_grad_()
            found = self._entries(z, targets)
            for i in range(order):
                if not found.requires_grad:
                    return torch.zeros_like(outputs)
                (found,) = torch.autograd.grad(found.sum(), z, create_graph=i + 1 < order)
        return found.detach()

    def _weights(self, outputs: Tensor, weights: Tensor | None) -> Tensor | Any:
        """Of every entry, broadcastable to the outputs."""
        if weights is None:
            return 1.0
        if self._by_sequence and weights.dim() != 1:
            raise ShapeError(
                f"expected one weight per sequence, ({outputs.shape[0]},), got {tuple(weights.shape)}",
                hint="a term of reduction='batchmean' is one sequence",
            )
        found = expand_weights(weights, outputs)
        return found.to(outputs.dtype) if outputs.is_floating_point() else found

    def _check(self, outputs: Tensor, targets: Tensor) -> None:
        check_one_tensor(targets)
        if outputs.shape != targets.shape or not targets.is_floating_point():
            raise ShapeError(
                f"expected real targets of the outputs' shape {tuple(outputs.shape)}, "
                f"got {str(targets.dtype).removeprefix('torch.')} {tuple(targets.shape)}",
                hint=f"{self.name} compares entry by entry"
                + ("; y.double() makes real numbers" if outputs.shape == targets.shape else ""),
            )
        for option in ("weight", "pos_weight"):
            own = getattr(self.module, option, None)
            if own is not None and not _fits(own.shape, outputs.shape[1:]):
                raise ShapeError(
                    f"expected a {option} of {self.name} that fits the entries {tuple(outputs.shape[1:])} of "
                    f"one sequence, got {tuple(own.shape)}",
                    hint="weights of sequences belong to the data: (inputs, targets, weights)",
                )
        if self.rule.shares:
            _check_shares(targets, "targets", self.name)
        if self.rule.outputs_too:
            _check_shares(outputs, "outputs", self.name)


def _fits(shape: tuple[int, ...], one: tuple[int, ...]) -> bool:
    """Whether a weight is broadcast to every sequence alike."""
    shape = shape[1:] if len(shape) == len(one) + 1 and shape[0] == 1 else shape
    return len(shape) <= len(one) and all(s in (1, o) for s, o in zip(shape[::-1], one[::-1], strict=False))


def has_negative(weight: Tensor | None) -> bool:
    """Whether some weight is below zero."""
    return weight is not None and bool((weight < 0).any())


def _check_shares(values: Tensor, what: str, name: str) -> None:
    low, high = (float(x) for x in values.detach().aminmax()) if values.numel() else (0.0, 0.0)
    if low < 0 or high > 1:  # not a number passes: the product will say so
        hint = "BCEWithLogitsLoss takes logits" if what == "outputs" else None
        raise UsageError(f"expected {what} from 0 to 1 for {name}, got {low:.4g} to {high:.4g}", hint=hint)


def _plain(function: Callable[..., Tensor], *options: str) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """The loss of each entry by torch's function, with options of the module."""

    def entries(module: Any, z: Tensor, y: Tensor) -> Tensor:
        given = {name: getattr(module, name) for name in options}
        return function(z, y, reduction="none", **{k: _given(v, z) for k, v in given.items()})

    return entries


def _two_classes(module: Any, z: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of logits 0 and z with weights 1 − y and y, that of z times pos_weight."""
    own = y if module.pos_weight is None else y * module.pos_weight.to(z)
    found = softmax.soft(torch.stack([torch.zeros_like(z), z], -1), torch.stack([1 - y, own], -1), -1)
    return found if module.weight is None else found * module.weight.to(z)


def _given(value: Any, z: Tensor) -> Any:
    return value.to(z) if isinstance(value, Tensor) else value


def _normal(module: Any, z: Tensor, source: torch.Generator) -> Tensor:
    """z + ξ / √2: the Gaussian whose negative log-likelihood is (z − y)²."""
    return z.cpu().double() + torch.randn(z.shape, generator=source, dtype=torch.float64) * 0.5**0.5


def _coins(module: Any, z: Tensor, source: torch.Generator, *, logits: bool) -> Tensor:
    p = (z.sigmoid() if logits else z).cpu().double()
    return (torch.rand(z.shape, generator=source, dtype=torch.float64) < p).double()


def _counts(module: Any, z: Tensor, source: torch.Generator) -> Tensor:
    rate = (z.exp() if module.log_input else z + module.eps).cpu().double()
    return torch.poisson(rate, generator=source)


RULES: dict[type[nn.Module], Rule] = {
    nn.MSELoss: Rule(_plain(F.mse_loss), _normal),
    nn.L1Loss: Rule(_plain(F.l1_loss), note=FLAT),
    nn.HuberLoss: Rule(_plain(F.huber_loss, "delta")),
    nn.SmoothL1Loss: Rule(_plain(F.smooth_l1_loss, "beta")),
    nn.BCELoss: Rule(
        _plain(F.binary_cross_entropy, "weight"), partial(_coins, logits=False), shares=True, outputs_too=True
    ),
    nn.BCEWithLogitsLoss: Rule(_two_classes, partial(_coins, logits=True), shares=True),
    nn.KLDivLoss: Rule(_plain(F.kl_div, "log_target"), note=LINEAR.format("KLDivLoss")),
    nn.PoissonNLLLoss: Rule(_plain(F.poisson_nll_loss, "log_input", "full", "eps"), _counts),
    nn.SoftMarginLoss: Rule(_plain(F.soft_margin_loss)),
}
"""By class."""
