"""A loss is a sum over terms; whoever uses it divides once by the total weight of the terms.

With outputs z, targets y and weights w of one batch, every loss gives the sum Σ_t w_t ℓ_t(z), its gradient
in z, its Hessian applied to a direction in z, and Σ_t w_t. So the mean does not depend on how the data is
cut into batches, ordered or padded. Targets are a tensor, or, for a loss of your own, a tree of tensors
(a tuple or a dictionary), each with the sequences on axis 0.

A loss states what else it can do by flags and methods, and engines and operators ask for these, not for its
name: `takes_head`, `rooted`, `diagonal`, `together`, `layout`, `term_weights`, `class_axis`.
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
    """Terms in outputs: with `axis` moved to the end, `number` equal pieces of every sequence."""

    number: int
    axis: int = -1  # counted from the last

    def split(self, z: Tensor) -> Tensor:
        """Outputs (B, …) as their terms (B, number, entries of a term)."""
        return z.movedim(self.axis, -1).reshape(len(z), self.number, -1)

    def join(self, terms: Tensor, shape: Sequence[int]) -> Tensor:
        """Terms (…, B, number, entries of a term) as outputs (…, *shape)."""
        if len(shape) < 2:
            return terms.reshape(*terms.shape[:-3], *shape)
        last = list(shape)
        last.append(last.pop(self.axis))
        return terms.reshape(*terms.shape[:-3], *last).movedim(-1, self.axis)


class Loss(ABC):
    """Sum over terms, and its first two derivatives in the outputs."""

    name: str
    convex: bool = True  # in the outputs, so that the GGN is positive semi-definite
    splits: bool = True  # into a function of outputs, so that H is GGN + functional Hessian
    divided: bool = True  # by the total weight of its terms; False for a plain sum
    rooted: bool = False  # `root` is known
    diagonal: bool = False  # the Hessian in the outputs is
    together: bool = False  # one vector of `root` may stand for all terms of a sequence at once
    notes: tuple[str, ...] = ()  # what a reader should know

    @abstractmethod
    def sum(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> Tensor:
        """Σ_t w_t ℓ_t, a scalar; differentiable twice in `outputs`."""

    @abstractmethod
    def total_weight(self, targets: Tree, weights: Tensor | None) -> float:
        """Σ_t w_t: the number of terms when there are no weights."""

    @abstractmethod
    def gradient(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> Tensor:
        """∂(sum)/∂z, in the outputs' shape."""

    @abstractmethod
    def hessian_product(
        self, outputs: Tensor, targets: Tree, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """∂²(sum)/∂z² applied to directions of shape (…, *outputs.shape)."""

    @property
    def options(self) -> dict[str, Any]:
        """The settings as they are now, plain values and tensors by name."""
        return {}

    # ------------------------------------------------------------------------------------------- single terms

    def term_outer_product(
        self, outputs: Tensor, targets: Tree, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """Σ_t w_t r_t r_tᵀ applied to `direction`, r_t = ∂ℓ_t/∂z: the empirical Fisher in the outputs."""
        raise UsageError(f"the loss {self.name!r} has no separate terms, which an empirical Fisher needs")

    def root_gradient(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> Tensor:
        """Σ_t √w_t r_t. If terms do not share outputs, the outer product of terms is made of it."""
        return self.gradient(outputs, targets, None if weights is None else weights.to(outputs.dtype).sqrt())

    def layout(self, outputs: Tensor) -> TermLayout | None:
        """Positions of the terms in the outputs, if each term has outputs of its own."""
        return None

    def term_weights(self, targets: Tree, weights: Tensor | None) -> Tensor | None:
        """w_t of every term, (B, …), if the weights of a batch may have this shape and leave out any term."""
        return None

    # --------------------------------------------------------------------------- square roots and likelihoods

    def root(self, outputs: Tensor, targets: Tree, weights: Tensor | None, noise: Tensor) -> Tensor:
        """R ε for ε of shape (…, *outputs.shape), with R Rᵀ = ∂²(sum)/∂z²; term by term."""
        raise UsageError(
            f"the square root of the Hessian of the loss {self.name!r} in the outputs is unknown",
            hint="cs.exact_diagonal supports any loss, method='hutchinson' any operator",
        )

    def sample_targets(self, outputs: Tensor, targets: Tree, source: torch.Generator) -> Tensor:
        """Targets drawn from the model's own distribution, with the ignored ones of `targets` kept."""
        raise no_likelihood(f"a log-likelihood, which the loss {self.name!r} is not")

    # --------------------------------------------------------------------- logits, and a head that makes them

    def class_axis(self, outputs: Tensor) -> int | None:
        """The axis of the classes, counted from the last, if the outputs are logits."""
        return None

    def takes_head(self, targets: Tree, axis: int) -> bool:
        """Return True if `head_sum` and `head_curvature` exist for targets like these.

        Args:
            targets: Of a batch.
            axis: Where the model puts the classes of its linear head: -1, or 1.
        """
        return False

    def head_sum(self, head: LinearHead, targets: Tree, weights: Tensor | None, *, part: Part) -> Tensor:
        """Σ_t w_t ℓ_t of the head's outputs, or, for `functional`, ⟨its gradient held fixed, outputs⟩."""
        raise NotImplementedError

    def head_curvature(
        self, head: LinearHead, targets: Tree, weights: Tensor | None
    ) -> Callable[[Sequence[Tensor]], list[Tensor | None]]:
        """The Gauss-Newton product of the head: tangents (k, …) of h, W and b to their cotangents."""
        raise NotImplementedError


class SettingsLoss(Loss):
    """A loss with the settings of a module of torch, which are read at every call."""

    settings: Any

    @property
    def divided(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """False if the reduction is a sum."""
        return self.settings.reduction != "sum"

    @property
    def convex(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True unless a class or an entry has a negative weight."""
        weights = (getattr(self.settings, name, None) for name in ("weight", "pos_weight"))
        return not any(weight is not None and bool((weight < 0).any()) for weight in weights)

    rooted = convex  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    def refuse_drawing(self) -> None:
        """Raise if the settings make the loss something else than a negative log-likelihood."""
        for option in ("weight", "pos_weight", "label_smoothing"):
            value = getattr(self.settings, option, None)
            if isinstance(value, Tensor) or value:
                raise no_likelihood(f"a log-likelihood, which {self.name} with {option} is not")


def no_likelihood(what: str) -> UsageError:
    """Error for drawing targets from a loss that is not a log-likelihood."""
    return UsageError(
        f"a Monte-Carlo Fisher needs {what}",
        hint="use K-FAC with kind='ggn' or 'empirical', or cs.GGN and cs.EmpiricalFisher",
    )


def check_one_tensor(targets: Tree) -> None:
    """Raise unless the targets are a tensor, for a loss that takes no trees."""
    if not isinstance(targets, Tensor):
        raise ShapeError(
            f"expected targets as one tensor, got a {type(targets).__name__}",
            hint="a tuple or dictionary of targets is for a loss of your own: cs.CustomLoss",
        )


def expand_weights(weights: Tensor, targets: Tensor) -> Tensor:
    """Weights in the targets' shape, from one weight per term or per sequence."""
    if weights.dim() > targets.dim() or any(
        w not in (1, t) for w, t in zip(weights.shape, targets.shape, strict=False)
    ):
        raise ShapeError(
            f"expected one weight per term or sequence of targets {tuple(targets.shape)}, "
            f"got shape {tuple(weights.shape)}"
        )
    missing = targets.dim() - weights.dim()
    return weights.reshape(*weights.shape, *[1] * missing).expand(targets.shape)
