"""torch.nn's losses of classes, which lie on axis 1 of the outputs: CrossEntropyLoss and NLLLoss.

With log-probabilities l_t of position t (the outputs themselves, or their log_softmax), every form of both is

    ℓ_t = −Σ_c Q_tc l_tc,   N = Σ_t n_t

    classes y_t, class weights v        Q_tc = (1 − ε) v_c [c = y_t] + (ε/C) v_c,   n_t = v_{y_t}
    class probabilities q_t             Q_tc = v_c ((1 − ε) q_tc + ε/C),            n_t = 1

with ε the label_smoothing. For logits the gradient is s_t p_t − Q_t, s_t = Σ_c Q_tc, and the Hessian is
s_t (diag p_t − p_t p_tᵀ); for log-probabilities they are −Q_t and zero. Ignored positions have Q_t = 0 and
n_t = 0.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvescope.core.errors import ShapeError, UsageError
from curvescope.losses import softmax
from curvescope.losses.base import Loss, check_one_tensor, expand_weights, no_likelihood
from curvescope.losses.torch_entries import LINEAR, has_negative

SUM_OF_PROBABILITIES = 1e-3  # how far from one


@final
class ClassLoss(Loss):
    """A CrossEntropyLoss or NLLLoss; its settings are read whenever it is asked."""

    def __init__(self, module: nn.CrossEntropyLoss | nn.NLLLoss):
        self.module, self.name = module, type(module).__name__
        self.logits = isinstance(module, nn.CrossEntropyLoss)
        self.notes = () if self.logits else (LINEAR.format(self.name),)

    @property
    def divided(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Not where the module's reduction is a sum."""
        return self.module.reduction != "sum"

    @property
    def convex(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Unless a class has a negative weight."""
        return not has_negative(self.module.weight)

    @property
    def _smoothing(self) -> float:
        return getattr(self.module, "label_smoothing", 0.0)

    def sum(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        self._check(outputs, targets)
        losses = self._losses(outputs, targets)
        return losses.sum() if weights is None else (losses * expand_weights(weights, losses)).sum()

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ℓ_t, zero where the target is ignored."""
        v, axis = self.module.weight, _axis(outputs)
        if targets.is_floating_point() or (v is not None and self._smoothing):
            return softmax.soft(outputs, self._shares(outputs, targets), axis)
        counted = self._counted(targets)
        classes = torch.where(counted, targets.long(), 0).unsqueeze(1)
        if self.logits:
            losses = softmax.hard(outputs, classes, axis, smoothing=self._smoothing)
        else:
            losses = -outputs.gather(axis, classes).squeeze(1)
        return torch.where(counted, losses if v is None else losses * v.to(outputs)[classes.squeeze(1)], 0)

    def total_weight(self, targets: Tensor, weights: Tensor | None) -> float:
        check_one_tensor(targets)
        n = self._counts(targets)
        return float((n if weights is None else n * expand_weights(weights, n)).sum(dtype=torch.float64))

    def gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """s_t p_t − Q_t, or −Q_t."""
        return self._slope(outputs, targets) * self._weights(outputs, targets, weights)

    def hessian_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """s_t (diag p_t − p_t p_tᵀ) u_t, or zero."""
        if not self.logits:
            return torch.zeros_like(direction)
        axis = _axis(outputs)
        s = self._shares(outputs, targets).sum(axis, keepdim=True)
        return s * softmax.curved(outputs, direction, axis) * self._weights(outputs, targets, weights)

    def term_outer_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        r = self.root_gradient(outputs, targets, weights)
        return r * (r * direction).sum(_axis(outputs), keepdim=True)

    def root_gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """√(w_t n_t) r_t, with r_t the slope of ℓ_t / n_t."""
        if self.module.weight is not None and self._smoothing:
            raise UsageError(
                f"an empirical Fisher needs terms with one weight each, which {self.name} with both class "
                "weights and label_smoothing does not have"
            )
        n = self._counts(targets).to(outputs).unsqueeze(1)
        w = torch.as_tensor(self._weights(outputs, targets, weights), dtype=outputs.dtype)
        scale = torch.where(n > 0, w.to(n.device) / n.clamp(min=torch.finfo(n.dtype).tiny), 0)
        return self._slope(outputs, targets) * scale.sqrt()

    @property
    def rooted(self) -> bool:
        """Where no weight is negative."""
        return self.convex

    def root(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, noise: Tensor) -> Tensor:
        """√s_t (diag √p_t − p_t √p_tᵀ) ε_t, or zero."""
        if not self.logits:
            return torch.zeros_like(noise)
        axis = _axis(outputs)
        s = self._shares(outputs, targets).sum(axis, keepdim=True) * self._weights(outputs, targets, weights)
        return s.sqrt() * softmax.root(outputs, noise, axis)

    def slots(self, outputs: Tensor) -> int | None:
        """One for each sequence, where that has one position; more do not lie one behind the other."""
        return 1 if outputs[0].numel() == outputs.shape[1] else None

    def sample_targets(self, outputs: Tensor, targets: Tensor, source: torch.Generator) -> Tensor:
        """One class per position; ignored ones stay ignored, probabilities become those of one class."""
        for option in ("weight", "label_smoothing"):
            if isinstance(x := getattr(self.module, option, None), Tensor) or x:
                raise no_likelihood(f"a log-likelihood, which {self.name} with {option} is not")
        self._check(outputs, targets)
        z = outputs.detach().movedim(1, -1)
        p = (z.softmax(-1) if self.logits else z.exp()).cpu().double()
        if float((p.sum(-1) - 1).abs().max()) > SUM_OF_PROBABILITIES:
            raise UsageError(
                f"expected log-probabilities as outputs for {self.name}, their exponentials do not sum to 1",
                hint="end the model in log_softmax over axis 1, or use CrossEntropyLoss",
            )
        drawn = torch.multinomial(p.flatten(0, -2), 1, generator=source).view(p.shape[:-1]).to(targets.device)
        if targets.is_floating_point():
            return F.one_hot(drawn, outputs.shape[1]).movedim(-1, 1).to(targets.dtype)
        return torch.where(self._counted(targets), drawn, targets.long())

    def _slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        Q = self._shares(outputs, targets)
        return softmax.slope(outputs, Q, _axis(outputs)) if self.logits else -Q

    def _shares(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Q, in the outputs' shape."""
        self._check(outputs, targets)
        v, eps, C = self.module.weight, self._smoothing, outputs.shape[1]
        if targets.is_floating_point():
            q = targets
        else:
            classes = torch.where(self._counted(targets), targets.long(), 0)
            q = F.one_hot(classes, C).movedim(-1, 1).to(outputs)
        Q = (1 - eps) * q + eps / C
        if v is not None:
            Q = Q * v.to(outputs).reshape(-1, *[1] * (outputs.dim() - 2))
        return Q if targets.is_floating_point() else Q * self._counted(targets).unsqueeze(1)

    def _counted(self, targets: Tensor) -> Tensor:
        return targets.long() != self.module.ignore_index

    def _counts(self, targets: Tensor) -> Tensor:
        """n_t."""
        if targets.is_floating_point():
            return torch.ones_like(targets.select(1, 0)) if targets.dim() > 1 else targets.new_ones(())
        counted = self._counted(targets)
        if self.module.weight is None:
            return counted.double()
        v = self.module.weight.detach().to(targets.device)
        return v[torch.where(counted, targets.long(), 0).clamp(0, len(v) - 1)].double() * counted

    def _weights(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor | Any:
        """Of every position, broadcastable to the outputs."""
        if weights is None:
            return 1.0
        one = targets.select(1, 0) if targets.is_floating_point() else targets
        return expand_weights(weights, one).to(outputs.dtype).unsqueeze(1)

    def _check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise unless the targets are classes of outputs of that shape, or their probabilities."""
        check_one_tensor(targets)
        shape = outputs.shape[:1] + outputs.shape[2:]
        soft = targets.is_floating_point() and self.logits
        if outputs.dim() < 2 or targets.is_complex() or targets.shape != (outputs.shape if soft else shape):
            kinds = " or real " + str(tuple(outputs.shape)) if self.logits else ""
            raise ShapeError(
                f"expected integer targets {tuple(shape)}{kinds} for outputs {tuple(outputs.shape)}, whose "
                f"classes torch's {self.name} has on axis 1, got "
                f"{str(targets.dtype).removeprefix('torch.')} {tuple(targets.shape)}",
                hint="loss='cross_entropy' has them on the last axis, as language models do",
            )
        v = self.module.weight
        if v is not None and v.shape != outputs.shape[1:2]:
            raise ShapeError(
                f"expected one weight for each of {outputs.shape[1]} classes in {self.name}, "
                f"got {tuple(v.shape)}"
            )
        if targets.is_floating_point() and not soft:
            raise ShapeError(f"expected integer targets for {self.name}, got {targets.dtype}")
        if soft or not targets.numel():
            return
        own = targets.long()[self._counted(targets)]
        C = outputs.shape[1]
        if own.numel() and (int(own.min()) < 0 or int(own.max()) >= C):
            raise UsageError(
                f"expected targets below {C} (or ignore_index {self.module.ignore_index}), "
                f"got values from {int(own.min())} to {int(own.max())}"
            )


def _axis(outputs: Tensor) -> int:
    """That of the classes, counted from the last, as directions have axes in front."""
    return 1 - outputs.dim()
