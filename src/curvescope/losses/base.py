"""Base class of losses: sums over terms, which the caller divides once by the total weight of the terms.

For outputs z, targets y and weights w of one batch, every loss computes the sum Σ_t w_t ℓ_t(z), its gradient
in z, its Hessian applied to a direction in z, and Σ_t w_t. So the mean does not depend on batching, order or
padding of the data. Targets are a tensor, or, for a custom loss, a tree of tensors (a tuple or a dictionary),
each with the sequences on axis 0.

Flags and methods describe further abilities of a loss: `takes_head`, `has_root`, `diagonal`, `joint_root`,
`layout`, `term_weights`, `class_axis`. Engines and operators check these instead of the loss's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.hessian_terms import LossPart as Part
from curvescope.core.tensors import Tree
from curvescope.kernels.head import LinearHead


class TermLayout(NamedTuple):
    """Positions of terms in outputs: with `axis` moved to the end, `number` equal parts of every sequence."""

    number: int
    axis: int = -1  # negative: counted from the last

    def split(self, z: Tensor) -> Tensor:
        """Reshape outputs (B, …) to terms (B, number, entries of a term)."""
        return z.movedim(self.axis, -1).reshape(len(z), self.number, -1)

    def join(self, terms: Tensor, shape: Sequence[int]) -> Tensor:
        """Reshape terms (…, B, number, entries of a term) to outputs (…, *shape)."""
        if len(shape) < 2:
            return terms.reshape(*terms.shape[:-3], *shape)
        last = list(shape)
        last.append(last.pop(self.axis))
        return terms.reshape(*terms.shape[:-3], *last).movedim(-1, self.axis)


class Loss(ABC):
    """Sum over terms, with its first two derivatives in the outputs."""

    name: str
    convex: bool = True  # True if convex in the outputs, so that the GGN is positive semi-definite
    has_outputs: bool = (
        True  # True if the loss is a function of outputs, so that H = GGN + functional Hessian
    )
    is_mean: bool = True  # True if divided by the total weight of the terms; False for a plain sum
    has_root: bool = False  # True if `root` is implemented
    diagonal: bool = False  # True if the Hessian in the outputs is diagonal
    joint_root: bool = False  # True if one vector of `root` may serve all terms of a sequence
    notes: tuple[str, ...] = ()  # notes for users

    @abstractmethod
    def sum(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> Tensor:
        """Return Σ_t w_t ℓ_t, a scalar that is twice differentiable in `outputs`."""

    @abstractmethod
    def total_weight(self, targets: Tree, weights: Tensor | None) -> float:
        """Return Σ_t w_t; without weights, the number of terms."""

    @abstractmethod
    def gradient(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> Tensor:
        """Return ∂(sum)/∂z, in the outputs' shape."""

    @abstractmethod
    def hessian_product(
        self, outputs: Tensor, targets: Tree, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """Apply ∂²(sum)/∂z² to directions of shape (…, *outputs.shape)."""

    @property
    def options(self) -> dict[str, Any]:
        """Current settings by name: plain values and tensors."""
        return {}

    # ------------------------------------------------------------------------------------------- single terms

    def term_outer_product(
        self, outputs: Tensor, targets: Tree, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """Apply the empirical Fisher in the outputs, Σ_t w_t r_t r_tᵀ with r_t = ∂ℓ_t/∂z, to `direction`."""
        raise UsageError(f"the loss {self.name!r} has no separate terms, which an empirical Fisher needs")

    def root_gradient(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> Tensor:
        """Return Σ_t √w_t r_t, from which outer products of terms follow if terms do not share outputs."""
        return self.gradient(outputs, targets, None if weights is None else weights.to(outputs.dtype).sqrt())

    def layout(self, outputs: Tensor) -> TermLayout | None:
        """Positions of the terms in the outputs; None if terms share outputs."""
        return None

    def term_weights(self, targets: Tree, weights: Tensor | None) -> Tensor | None:
        """Weight w_t of every term, (B, …); None if weights of a batch cannot exclude single terms."""
        return None

    # --------------------------------------------------------------------------- square roots and likelihoods

    def root(self, outputs: Tensor, targets: Tree, weights: Tensor | None, noise: Tensor) -> Tensor:
        """Return R ε, term by term, for ε of shape (…, *outputs.shape) and R Rᵀ = ∂²(sum)/∂z²."""
        raise UsageError(
            f"the square root of the Hessian of the loss {self.name!r} in the outputs is unknown",
            hint="cs.exact_diagonal supports any loss, method='hutchinson' any operator",
        )

    def sample_targets(self, outputs: Tensor, targets: Tree, source: torch.Generator) -> Tensor:
        """Draw targets from the model's distribution; ignored targets stay ignored."""
        raise no_likelihood(f"a log-likelihood, which the loss {self.name!r} is not")

    # --------------------------------------------------------------------- logits, and a head that makes them

    def class_axis(self, outputs: Tensor) -> int | None:
        """Axis of the classes, counted from the last, if the outputs are logits; else None."""
        return None

    def takes_head(self, targets: Tree, axis: int) -> bool:
        """Return True if `head_sum` and `head_curvature` support these targets.

        Args:
            targets: Targets of a batch.
            axis: Axis of the classes in the model's outputs: -1 or 1.
        """
        return False

    def head_sum(self, head: LinearHead, targets: Tree, weights: Tensor | None, *, part: Part) -> Tensor:
        """Return Σ_t w_t ℓ_t of the head's outputs, or for `functional` ⟨its fixed gradient, outputs⟩."""
        raise NotImplementedError

    def head_curvature(
        self, head: LinearHead, targets: Tree, weights: Tensor | None
    ) -> Callable[[Sequence[Tensor]], list[Tensor | None]]:
        """Return the head's Gauss-Newton product: from tangents (k, …) of h, W, b to cotangents."""
        raise NotImplementedError


class SettingsLoss(Loss):
    """Loss with the settings of a torch module, which are read in every call."""

    settings: Any

    @property
    def is_mean(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """False if the reduction is a sum."""
        return self.settings.reduction != "sum"

    @property
    def convex(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True unless a class or an entry has a negative weight."""
        weights = (getattr(self.settings, name, None) for name in ("weight", "pos_weight"))
        return not any(weight is not None and bool((weight < 0).any()) for weight in weights)

    has_root = convex  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    def refuse_drawing(self) -> None:
        """Raise if the loss with these settings is not a negative log-likelihood."""
        for option in ("weight", "pos_weight", "label_smoothing"):
            value = getattr(self.settings, option, None)
            if isinstance(value, Tensor) or value:
                raise no_likelihood(f"a log-likelihood, which {self.name} with {option} is not")


def no_likelihood(what: str) -> UsageError:
    """Return the error for drawing targets from a loss that is not a log-likelihood."""
    return UsageError(
        f"a Monte-Carlo Fisher needs {what}",
        hint="use K-FAC with kind='ggn' or 'empirical', or cs.GGN and cs.EmpiricalFisher",
    )


def check_one_tensor(targets: Tree) -> None:
    """Raise unless the targets are one tensor."""
    if not isinstance(targets, Tensor):
        raise ShapeError(
            f"expected targets as one tensor, got a {type(targets).__name__}",
            hint="only cs.CustomLoss supports a tuple or dictionary of targets",
        )


def expand_weights(weights: Tensor, targets: Tensor) -> Tensor:
    """Expand weights per term or per sequence to the targets' shape."""
    if weights.dim() > targets.dim() or any(
        w not in (1, t) for w, t in zip(weights.shape, targets.shape, strict=False)
    ):
        raise ShapeError(
            f"expected one weight per term or sequence of targets {tuple(targets.shape)}, "
            f"got shape {tuple(weights.shape)}"
        )
    missing = targets.dim() - weights.dim()
    return weights.reshape(*weights.shape, *[1] * missing).expand(targets.shape)
