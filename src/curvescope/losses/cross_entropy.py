"""Cross-entropy over the last axis of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.tensors.targets import IGNORED
from curvescope.kernels.cross_entropy import HeadCurvature, cross_entropy_head
from curvescope.kernels.head import LinearHead
from curvescope.losses import softmax
from curvescope.losses.base import Loss, Part, check_one_tensor, expand_weights, no_likelihood


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """ℓ_t = −Σ_c q_tc log softmax(z_t)_c with q_t = (1 − ε) one-hot(y_t) + ε / C.

    A term is one counted target: outputs (B, …, C), integer targets (B, …), −100 does not count;
    ε is `label_smoothing`.
    """

    label_smoothing: float = 0.0
    name = "cross_entropy"
    takes_head = True

    def __post_init__(self) -> None:
        if not isinstance(self.label_smoothing, Real) or not 0 <= self.label_smoothing < 1:
            raise UsageError(f"expected a label_smoothing in [0, 1), got {self.label_smoothing}")

    def sum(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        _check(outputs.shape, targets)
        classes = targets.long().clamp(min=0)[..., None]
        losses = softmax.hard(outputs, classes, -1, smoothing=self.label_smoothing)
        losses = torch.where(is_counted(targets), losses, 0)
        return losses.sum() if weights is None else (losses * _weights(targets, weights, outputs)).sum()

    def total_weight(self, targets: Tensor, weights: Tensor | None) -> float:
        check_one_tensor(targets)
        counted = is_counted(targets)
        if weights is None:
            return float(counted.count_nonzero())
        return float((expand_weights(weights, targets) * counted).sum(dtype=torch.float64))

    def gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """w_t (p_t − q_t)."""
        return self._residual(outputs, targets) * _weights(targets, weights, outputs)[..., None]

    def hessian_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """w_t (diag p_t − p_t p_tᵀ) u_t."""
        _check(outputs.shape, targets)
        return softmax.curved(outputs, direction, -1) * _weights(targets, weights, outputs)[..., None]

    def term_outer_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        r = self._residual(outputs, targets)
        return r * (r * direction).sum(-1, keepdim=True) * _weights(targets, weights, outputs)[..., None]

    @property
    def rooted(self) -> bool:
        """Always."""
        return True

    def root(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, noise: Tensor) -> Tensor:
        """R_t ε_t with R_t = √w_t (diag √p_t − p_t √p_tᵀ), for which R Rᵀ = w (diag p − p pᵀ)."""
        _check(outputs.shape, targets)
        w = _weights(targets, weights, outputs)
        return w.sqrt()[..., None] * softmax.root(outputs, noise, -1)

    def slots(self, outputs: Tensor) -> int:
        """One for each position."""
        return outputs[0].numel() // outputs.shape[-1]

    def sample_targets(self, outputs: Tensor, targets: Tensor, source: torch.Generator) -> Tensor:
        """One class per position from softmax(z_t); ignored positions stay ignored."""
        if self.label_smoothing:
            raise no_likelihood("label_smoothing=0: a smoothed loss is no log-likelihood")
        _check(outputs.shape, targets)
        p = outputs.detach().softmax(-1).reshape(-1, outputs.shape[-1])
        drawn = torch.multinomial(p.cpu(), 1, generator=source).to(targets.device).reshape(targets.shape)
        return torch.where(is_counted(targets), drawn, targets.long())

    def head_sum(self, head: LinearHead, targets: Tensor, weights: Tensor | None, *, part: Part) -> Tensor:
        terms = self._terms(head, targets, weights)
        return cross_entropy_head(*_flat(head), *terms, label_smoothing=self.label_smoothing, part=part)

    def head_curvature(
        self, head: LinearHead, targets: Tensor, weights: Tensor | None
    ) -> Callable[[Sequence[Tensor]], list[Tensor | None]]:
        """Of z = h Wᵀ + b: ż from the tangents, w_t (diag p_t − p_t p_tᵀ) ż_t, and back to h, W and b."""
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
        """Targets and weights in one row."""
        _check(head.shape, targets)
        if weights is not None:
            weights = expand_weights(weights, targets).to(head.h.dtype).reshape(-1)
        return targets.reshape(-1).long(), weights

    def _residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """p_t − q_t, zero where the target is ignored."""
        _check(outputs.shape, targets)
        counted = is_counted(targets)
        q = torch.zeros_like(outputs)
        q.scatter_(-1, targets.long().clamp(min=0)[..., None], 1 - self.label_smoothing)
        q = q + self.label_smoothing / outputs.shape[-1]
        return softmax.slope(outputs, q, -1) * counted[..., None]


def is_counted(targets: Tensor) -> Tensor:
    """Where a target is a class; compared as int64, since −100 is 156 among bytes."""
    return targets.long() != IGNORED


def _weights(targets: Tensor, weights: Tensor | None, outputs: Tensor) -> Tensor:
    counted = is_counted(targets).to(outputs.dtype)
    return counted if weights is None else counted * expand_weights(weights, targets).to(outputs.dtype)


def _flat(head: LinearHead) -> LinearHead:
    return head._replace(h=head.h.reshape(-1, head.h.shape[-1]))


def _check(shape: tuple[int, ...], targets: Tensor) -> None:
    """Raise unless the targets are classes of outputs of that shape."""
    check_one_tensor(targets)
    if targets.is_floating_point() or targets.is_complex() or shape[:-1] != targets.shape:
        raise ShapeError(
            f"expected integer targets {tuple(shape[:-1])} for outputs {tuple(shape)}, "
            f"got {str(targets.dtype).removeprefix('torch.')} {tuple(targets.shape)}",
            hint="targets align with outputs; nothing is shifted here; nn.CrossEntropyLoss() has classes on "
            "axis 1, and takes their probabilities",
        )
    if targets.numel():
        counted = targets.long()[is_counted(targets)]
        if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= shape[-1]):
            raise UsageError(
                f"expected targets below {shape[-1]} (or {IGNORED} to ignore one), "
                f"got values from {int(counted.min())} to {int(counted.max())}"
            )
