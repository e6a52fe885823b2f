"""Losses for classes: cross-entropy of logits, and negative log-likelihood of log-probabilities.

With log-probabilities l_t of position t (the outputs, or their log_softmax), both losses have the form

    ℓ_t = −Σ_c Q_tc l_tc,   N = Σ_t w_t n_t

    classes y_t, class weights v        Q_tc = (1 − ε) v_c [c = y_t] + (ε/C) v_c,   n_t = v_{y_t}
    class probabilities q_t             Q_tc = v_c ((1 − ε) q_tc + ε/C),            n_t = 1

with ε the label_smoothing. For logits the gradient is s_t p_t − Q_t, s_t = Σ_c Q_tc, and the Hessian is
s_t (diag p_t − p_t p_tᵀ); for log-probabilities they are −Q_t and zero. Ignored positions have Q_t = 0 and
n_t = 0. The classes are on the last axis of the outputs, as in language models, or on axis 1, as in torch;
inside this module they are always last.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor, nn

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.tensors import IGNORED
from curvescope.kernels.cross_entropy import HeadCurvature, cross_entropy_head
from curvescope.kernels.head import LinearHead
from curvescope.losses import softmax
from curvescope.losses.base import (
    Part,
    SettingsLoss,
    TermLayout,
    check_one_tensor,
    expand_weights,
)

LINEAR = (
    "{} is linear in the outputs, log-probabilities, so the GGN is zero, and the Hessian is the functional "
    "part; CrossEntropyLoss of logits has both parts"
)
SUM_OF_PROBABILITIES = 1e-3  # allowed difference from one


class ClassLoss(SettingsLoss):
    """−Σ_c Q_tc l_tc, with the settings of torch's module."""

    settings: nn.CrossEntropyLoss | nn.NLLLoss
    soft_targets: bool = False  # class probabilities are targets, too
    _classes_last: bool  # the classes are on the last axis, else on axis 1

    @abstractmethod
    def _losses(self, z: Tensor, targets: Tensor) -> Tensor:
        """ℓ_t, zero for ignored targets."""

    @abstractmethod
    def _slope(self, z: Tensor, Q: Tensor) -> Tensor:
        """∂ℓ_t/∂z_t."""

    @abstractmethod
    def _probabilities(self, z: Tensor) -> Tensor:
        """p_t, in the outputs' dtype or a wider one."""

    @property
    def label_smoothing(self) -> float:
        """ε."""
        return getattr(self.settings, "label_smoothing", 0.0)

    @property
    def options(self) -> dict[str, Any]:
        at = self.settings
        own = {"weight": at.weight, "ignore_index": at.ignore_index, "reduction": at.reduction}
        return {"axis": -1 if self._classes_last else 1, "label_smoothing": self.label_smoothing, **own}

    def sum(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        z, targets = self._checked(outputs, targets)
        losses = self._losses(z, targets)
        return (
            losses.sum() if weights is None else (losses * expand_weights(weights, losses).to(losses)).sum()
        )

    def total_weight(self, targets: Tensor, weights: Tensor | None) -> float:
        check_one_tensor(targets)
        if weights is None and self.settings.weight is None and not targets.is_floating_point():
            return float(self._counted(targets).count_nonzero())
        return float(self.term_weights(targets, weights).sum(dtype=torch.float64))

    def term_weights(self, targets: Tensor, weights: Tensor | None) -> Tensor:
        """w_t n_t of every position."""
        n = self._counts(targets)
        return n if weights is None else n * expand_weights(weights, n)

    def gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """w_t (s_t p_t − Q_t), or −w_t Q_t."""
        z, targets, r = self._residual(outputs, targets)
        return self._back(r if weights is None else r * _of_positions(weights, r), z)

    def term_outer_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """Σ_t (w_t/n_t) r_t r_tᵀ u, with r_t / n_t the slope of a term of weight w_t n_t."""
        z, targets, r = self._residual(outputs, targets)
        inner = (r * self._front(direction, z)).sum(-1, keepdim=True)
        return self._back(r * inner * self._per_term(z, targets, weights), z)

    def root_gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """√(w_t n_t) r_t, with r_t the slope of ℓ_t / n_t."""
        z, targets, r = self._residual(outputs, targets)
        return self._back(r * self._per_term(z, targets, weights).sqrt(), z)

    def _residual(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the checked outputs and targets, and ∂ℓ_t/∂z_t."""
        z, targets = self._checked(outputs, targets)
        return z, targets, self._slope(z, self._shares(z, targets))

    def layout(self, outputs: Tensor) -> TermLayout:
        """One term for each position."""
        axis = self._axis(outputs)
        return TermLayout(outputs[0].numel() // outputs.shape[axis], axis)

    def sample_targets(self, outputs: Tensor, targets: Tensor, source: torch.Generator) -> Tensor:
        """Draw one class per position; ignored ones stay ignored, class probabilities become one-hot."""
        self.refuse_drawing()
        z, targets = self._checked(outputs.detach(), targets)
        p = self._probabilities(z)
        drawn = torch.multinomial(p.reshape(-1, p.shape[-1]).cpu(), 1, generator=source)
        drawn = drawn.to(targets.device).reshape(p.shape[:-1])
        if targets.is_floating_point():
            return self._back(torch.zeros_like(targets).scatter_(-1, drawn[..., None], 1.0), z)
        return torch.where(self._counted(targets), drawn, targets.long())

    # ------------------------------------------------------------------------------------- meaning of targets

    def _counted(self, targets: Tensor) -> Tensor:
        """Return a mask of the targets that are classes; it compares int64, because −100 is 156 in bytes."""
        return targets.long() != self.settings.ignore_index

    def _classes(self, targets: Tensor) -> Tensor:
        """Classes y_t, with class 0 for ignored targets."""
        return torch.where(self._counted(targets), targets.long(), 0)

    def _class_weights(self, like: Tensor) -> Tensor | None:
        v = self.settings.weight
        return None if v is None else v.detach().to(like)

    def _shares(self, z: Tensor, targets: Tensor) -> Tensor:
        """Q, in the outputs' shape."""
        v, eps, C = self._class_weights(z), self.label_smoothing, z.shape[-1]
        if targets.is_floating_point():
            Q = targets if not eps else (1 - eps) * targets + eps / C
            return Q if v is None else Q * v
        Q = torch.zeros_like(z).scatter_(-1, self._classes(targets)[..., None], 1 - eps)
        Q = Q + eps / C if eps else Q
        Q = Q if v is None else Q * v
        return Q * self._counted(targets)[..., None]

    def _mass(self, z: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """w_t s_t = w_t Σ_c Q_tc for every position, with an axis of length one for the classes."""
        v, eps = self._class_weights(z), self.label_smoothing
        if targets.is_floating_point():
            s = self._shares(z, targets).sum(-1)
        else:
            s = self._counted(targets).to(z.dtype)
            s = s if v is None else s * ((1 - eps) * v[self._classes(targets)] + eps * v.mean())
        return (s if weights is None else s * expand_weights(weights, s).to(s))[..., None]

    def _counts(self, targets: Tensor) -> Tensor:
        """n_t."""
        if targets.is_floating_point():
            one = targets if targets.dim() < 2 else targets.select(-1 if self._classes_last else 1, 0)
            return torch.ones_like(one, dtype=_widest(targets))
        counted, v = self._counted(targets), self.settings.weight
        if v is None:
            return counted.to(_widest(targets))
        v = v.detach().to(targets.device, _widest(targets))
        return v[self._classes(targets).clamp(0, len(v) - 1)] * counted

    def _per_term(self, z: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """w_t / n_t, zero for ignored targets; with an axis of length one for the classes."""
        if self.settings.weight is not None and self.label_smoothing:
            raise UsageError(
                f"an empirical Fisher needs one weight per term, and {self.name} with both class weights and "
                "label_smoothing does not have it"
            )
        soft = targets.is_floating_point()
        n = z.new_ones(z.shape[:-1]) if soft else self._counts(targets).to(z)
        scale = torch.where(n > 0, 1 / n.clamp(min=torch.finfo(n.dtype).tiny), 0)
        return (scale if weights is None else scale * expand_weights(weights, scale).to(scale))[..., None]

    # --------------------------------------------------------------------------------------- axes and checks

    def _axis(self, outputs: Tensor) -> int:
        return -1 if self._classes_last else 1 - outputs.dim()

    def _front(self, direction: Tensor, z: Tensor) -> Tensor:
        """Move the classes of a direction (…, *outputs.shape) to the last axis."""
        return direction if self._classes_last else direction.movedim(1 - z.dim(), -1)

    def _back(self, x: Tensor, z: Tensor) -> Tensor:
        """Move the classes of a tensor (…, *z.shape) from the last axis to the axis of the outputs."""
        return x if self._classes_last else x.movedim(-1, 1 - z.dim())

    def _checked(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets with the classes on the last axis; raise unless they fit."""
        axis = self._axis(outputs)
        z = outputs if self._classes_last else outputs.movedim(axis, -1) if outputs.dim() > 1 else outputs
        self._check(z.shape, targets, outputs.shape)
        self._check_classes(targets, z.shape[-1])
        if not targets.is_floating_point():
            return z, targets
        if self._classes_last:  # torch accepts any numbers, which may be targets of a regression
            _check_probabilities(targets)
        return z, targets.movedim(axis, -1)

    def _check(self, shape: torch.Size, targets: Tensor, given: Sequence[int]) -> None:
        """Raise unless targets have the shape of classes, or of their probabilities.

        Args:
            shape: Shape of the outputs, with the classes last.
            targets: Targets as given by the user.
            given: Original shape of the outputs.
        """
        check_one_tensor(targets)
        soft = self.soft_targets and targets.is_floating_point()
        expected = tuple(given) if soft else tuple(shape[:-1])
        is_valid = tuple(targets.shape) == expected and not targets.is_complex()
        if (
            not is_valid
            or (targets.is_floating_point() and not soft)
            or (len(given) < 2 and not self._classes_last)
        ):
            kinds = f" or class probabilities {tuple(given)}" if self.soft_targets else ""
            axis_note = "" if self._classes_last else f" (torch's {self.name} has classes on axis 1)"
            hint = (
                "targets align with outputs, nothing is shifted; nn.CrossEntropyLoss() has classes on axis 1"
            )
            raise ShapeError(
                f"expected integer targets {tuple(shape[:-1])}{kinds} for outputs {tuple(given)}{axis_note}, "
                f"got "
                f"{str(targets.dtype).removeprefix('torch.')} {tuple(targets.shape)}",
                hint=hint if self._classes_last else "loss='cross_entropy' has classes on the last axis",
            )

    def _check_classes(self, targets: Tensor, C: int) -> None:
        """Raise unless there is a weight for each class, and each counted target is a class."""
        v = self.settings.weight
        if v is not None and v.shape != (C,):
            raise ShapeError(
                f"expected one weight for each of {C} classes in {self.name}, got {tuple(v.shape)}"
            )
        if targets.is_floating_point() or not targets.numel():
            return
        counted = targets.long()[self._counted(targets)]
        if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= C):
            raise UsageError(
                f"expected targets below {C} (or ignore_index {self.settings.ignore_index}), "
                f"got values from {int(counted.min())} to {int(counted.max())}"
            )


@final
class CrossEntropy(ClassLoss):
    """ℓ_t = −Σ_c q_tc log softmax(z_t)_c with q_t = (1 − ε) one-hot(y_t) + ε / C.

    A term is one counted target. Outputs are (B, …, C), targets are integers (B, …), of which −100 does not
    count, or class probabilities (B, …, C). It equals `nn.CrossEntropyLoss`, which has the classes on axis 1.

    Args:
        label_smoothing: ε.
        weight: One number per class, (C,), that multiplies losses and counts of its targets.
        ignore_index: A target that does not count.
        reduction: "mean", or "sum" for a sum that is not divided by the number of terms.
    """

    name = "cross_entropy"
    soft_targets = True
    joint_root = True

    def __init__(
        self,
        label_smoothing: float = 0.0,
        *,
        weight: Tensor | None = None,
        ignore_index: int = IGNORED,
        reduction: str = "mean",
    ):
        if not isinstance(label_smoothing, Real) or not 0 <= label_smoothing < 1:
            raise UsageError(f"expected a label_smoothing in [0, 1), got {label_smoothing}")
        options: Any = {"ignore_index": ignore_index, "reduction": reduction}
        self.settings = nn.CrossEntropyLoss(weight, label_smoothing=float(label_smoothing), **options)
        self._classes_last = True

    @classmethod
    def of(cls, module: nn.CrossEntropyLoss) -> CrossEntropy:
        """Make the loss of torch's module, with classes on axis 1; its settings are read in every call."""
        loss = cls()
        loss.settings, loss._classes_last = module, False
        return loss

    def hessian_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """w_t s_t (diag p_t − p_t p_tᵀ) u_t."""
        z, targets = self._checked(outputs, targets)
        curved = softmax.curved(z, self._front(direction, z), -1) * self._mass(z, targets, weights)
        return self._back(curved, z)

    def root(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, noise: Tensor) -> Tensor:
        """R_t ε_t with R_t = √(w_t s_t) (diag √p_t − p_t √p_tᵀ), for which R Rᵀ = w s (diag p − p pᵀ)."""
        z, targets = self._checked(outputs, targets)
        root = self._mass(z, targets, weights).sqrt() * softmax.root(z, self._front(noise, z), -1)
        return self._back(root, z)

    def root_columns(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """p_t and w_t s_t of every position, (B, T, C) and (B, T): columns of R are √(w s p_c) (e_c − p)."""
        z, targets = self._checked(outputs, targets)
        p = z.softmax(-1)
        return p.reshape(len(z), -1, z.shape[-1]), self._mass(z, targets, weights).reshape(len(z), -1)

    def class_axis(self, outputs: Tensor) -> int:
        """The last axis, or torch's axis 1."""
        return self._axis(outputs)

    def takes_head(self, targets: Tensor, axis: int) -> bool:
        """True for classes, unless there are both class weights and label_smoothing."""
        if not isinstance(targets, Tensor) or targets.is_floating_point() or not self.label_smoothing < 1:
            return False
        fits_axis = (
            axis == (-1 if self._classes_last else 1) or targets.dim() == 1
        )  # one axis besides the sequences
        return fits_axis and (self.settings.weight is None or not self.label_smoothing)

    def head_sum(self, head: LinearHead, targets: Tensor, weights: Tensor | None, *, part: Part) -> Tensor:
        terms = self._terms(head, targets, weights)
        return cross_entropy_head(*_flat(head), *terms, label_smoothing=self.label_smoothing, part=part)

    def head_curvature(
        self, head: LinearHead, targets: Tensor, weights: Tensor | None
    ) -> Callable[[Sequence[Tensor]], list[Tensor | None]]:
        """Return the curvature of z = h Wᵀ + b: tangents to ż, to w_t s_t (diag p_t − p_t p_tᵀ) ż_t, and back
        to h, W and b.
        """
        curvature = HeadCurvature(*_flat(head), *self._terms(head, targets, weights))

        def times(tangents: Sequence[Tensor]) -> list[Tensor | None]:
            h_dot, W_dot, *b_dot = tangents
            back = curvature.times(h_dot.flatten(1, -2), W_dot, b_dot[0] if b_dot else None)
            shapes = [None if x is None else x.shape for x in head]
            return [
                None if c is None or shape is None else c.reshape(-1, *shape)
                for c, shape in zip(back, shapes, strict=True)
            ]

        return times

    def _terms(
        self, head: LinearHead, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Flatten targets and weights for the kernel."""
        self._check(torch.Size(head.shape), targets, head.shape)
        self._check_classes(targets, head.shape[-1])
        if weights is not None:
            weights = expand_weights(weights, targets).to(head.h.dtype).reshape(-1)
        v, y = self._class_weights(head.h), targets.reshape(-1).long()
        if v is not None:
            class_weights = v[self._classes(y)]
            weights = class_weights if weights is None else class_weights * weights
        return y if self.settings.ignore_index == IGNORED else y.where(self._counted(y), IGNORED), weights

    def _losses(self, z: Tensor, targets: Tensor) -> Tensor:
        v = self._class_weights(z)
        if targets.is_floating_point() or (v is not None and self.label_smoothing):
            return softmax.soft(z, self._shares(z, targets), -1)
        classes = self._classes(targets)
        losses = softmax.hard(z, classes[..., None], -1, smoothing=self.label_smoothing)
        return torch.where(self._counted(targets), losses if v is None else losses * v[classes], 0)

    def _slope(self, z: Tensor, Q: Tensor) -> Tensor:
        return softmax.slope(z, Q, -1)

    def _probabilities(self, z: Tensor) -> Tensor:
        return z.softmax(-1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CrossEntropy):
            return NotImplemented
        mine, theirs = self.options, other.options
        v, w = mine.pop("weight"), theirs.pop("weight")
        return mine == theirs and (v is w if v is None or w is None else torch.equal(v, w))

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        default = CrossEntropy().options
        changed = {name: x for name, x in self.options.items() if isinstance(x, Tensor) or x != default[name]}
        return f"CrossEntropy({', '.join(f'{name}={x!r}' for name, x in changed.items())})"


@final
class NegativeLogLikelihood(ClassLoss):
    """`nn.NLLLoss`: outputs are log-probabilities, whose classes are on axis 1."""

    name = "NLLLoss"
    notes = (LINEAR.format("NLLLoss"),)

    def __init__(self, module: nn.NLLLoss):
        self.settings, self._classes_last = module, False

    def hessian_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """Zero."""
        return torch.zeros_like(direction)

    def root(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, noise: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros_like(noise)

    def _losses(self, z: Tensor, targets: Tensor) -> Tensor:
        v, classes = self._class_weights(z), self._classes(targets)
        losses = -z.gather(-1, classes[..., None]).squeeze(-1)
        return torch.where(self._counted(targets), losses if v is None else losses * v[classes], 0)

    def _slope(self, z: Tensor, Q: Tensor) -> Tensor:
        return -Q

    def _probabilities(self, z: Tensor) -> Tensor:
        p = z.cpu().double().exp()
        if float((p.sum(-1) - 1).abs().max()) > SUM_OF_PROBABILITIES:
            raise UsageError(
                f"expected log-probabilities as outputs for {self.name}, but their exponentials do not sum "
                f"to 1",
                hint="end the model in log_softmax over axis 1, or use CrossEntropyLoss",
            )
        return p


def _check_probabilities(targets: Tensor) -> None:
    """Raise unless the targets are class probabilities."""
    if not targets.numel():
        return
    low, gap = float(targets.min()), float((targets.sum(-1) - 1).abs().max())
    if low < 0 or gap > SUM_OF_PROBABILITIES:
        raise UsageError(
            f"expected integer targets or class probabilities, got numbers of at least {low:.4g} whose sum "
            f"over the classes is off 1 by up to {gap:.4g}",
            hint="loss='mse_mean' compares outputs with real numbers",
        )


def _of_positions(weights: Tensor, z: Tensor) -> Tensor:
    """Weights of all positions, with an axis of length one for the classes."""
    return expand_weights(weights, z[..., 0]).to(z.dtype)[..., None]


def _widest(x: Tensor) -> torch.dtype:
    """Double precision, if the device supports it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def _flat(head: LinearHead) -> LinearHead:
    return head._replace(h=head.h.reshape(-1, head.h.shape[-1]))
