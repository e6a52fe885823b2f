"""Preconditioners of PyTorch's optimizers, read from their settings and state.

    SGD       P = I                                          g = 1 − dampening
    RMSprop   P = √v + ε, centered: √(v − m²) + ε              g = 1
    Adam(W)   P = (1 − β₁ᵗ) (√(v / (1 − β₂ᵗ)) + ε)             g = 1 − β₁, momentum β₁

with v the running mean of squared gradients as it is now. If groups have different learning rates, P is
divided by their ratio to the largest one. An entry whose v is zero never had a gradient: it does not move,
and its row of P^(−½) is zero. Other optimizers of torch raise an error.

Descent on a quadratic with a fixed preconditioner, and the learning rate up to which it is stable.

A step of an optimizer with a fixed preconditioner P on ½ θᵀ H θ, in coordinates where S = P^(−½) H P^(−½):

    heavy ball   θ' = θ − η m',               m' = β m + g S θ        η λ_max(S) < 2 (1 + β) / g
    Nesterov     θ' = θ − η S θ − η β m',     m' = β m + S θ          η λ_max(S) < 2 (1 + β) / (1 + 2 β)
    decoupled    θ' = (I − η W) θ − η m',     m' = β m + g S θ        the first, with S + (1 + β)/g · W

where g = 1 for sums of gradients, and 1 − β for running means; W is a diagonal weight decay. A mode zᵗ x of
the first and the last has z² − z b + c = 0 with b = xᵀ((1 + β) I − η W − η g S) x and c = β (1 − η xᵀ W x)
for a unit vector x, so that |z| < 1 for all modes if |b| < 1 + c for all x, and the bound is where z = −1.
Directions of negative curvature grow at any η.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError
from curvescope.core.operator import Diagonal, LinearOperator


@dataclass(frozen=True)
class Descent:
    """Coefficients of an optimizer's recurrence, see above."""

    name: str
    inverse_root: LinearOperator | None  # P^(−½), or None for the identity
    learning_rate: float | None = None  # η: the largest one of all groups
    momentum: float = 0.0  # β
    nesterov: bool = False
    gain: float = 1.0  # g
    coupled: Tensor | None = None  # (n,) weight decay in the gradient: added to H
    decoupled: Tensor | None = None  # (n,) weight decay outside the gradient, divided by the largest η
    assumed: list[str] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        """c of η λ_max < c."""
        if self.nesterov:
            return 2 * (1 + self.momentum) / (1 + 2 * self.momentum)
        return 2 * (1 + self.momentum) / self.gain

    @property
    def formula(self) -> str:
        """Return the bound as text."""
        if self.momentum == 0 and self.gain == 1:
            return "2 / λ_max"
        if self.nesterov:
            return "2 (1 + β) / ((1 + 2 β) λ_max)"
        if self.gain == 1:
            return "2 (1 + β) / λ_max"
        mean = self.gain == 1 - self.momentum
        return "2 (1 + β) / ((1 − β) λ_max)" if mean else "2 (1 + β) / ((1 − dampening) λ_max)"


Group = Mapping[str, Any]
Denominator = Callable[[Group, Mapping[str, Any]], Tensor]
FIXED_PRECONDITIONER = "the preconditioner is held fixed, although the optimizer keeps adapting it"


def read_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], space: ParamSpace
) -> Descent:
    """Read the descent of an optimizer over the entries of a space; parameters are matched by identity."""
    kind = type(optimizer)
    if kind not in _READERS:
        known = ", ".join(reader.__name__ for reader in _READERS)
        raise UsageError(
            f"expected an optimizer of torch that is one of {known}, got {kind.__module__}.{kind.__name__}",
            hint="pass P as an operator with inverse_root, or P^(−½) as a function",
        )
    groups = _groups(optimizer, parameters, space)
    if any(group.get("maximize") for group in groups.values()):
        raise UsageError("expected an optimizer that minimizes, got maximize=True")
    largest = max(float(group["lr"]) for group in groups.values())
    if largest <= 0:
        raise UsageError(f"expected a learning rate above 0, got {largest:g}")
    lr_ratio = {name: float(group["lr"]) / largest for name, group in groups.items()}
    assumed = _assumed(optimizer, groups, lr_ratio)
    return _READERS[kind](_Reading(optimizer, parameters, space, groups, lr_ratio), largest, assumed)


def _groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], space: ParamSpace
) -> dict[str, Group]:
    """Group of each parameter of the space."""
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name in space.parameter_names:
        if id(parameters[name]) not in of:
            raise UsageError(
                f"{type(optimizer).__name__} does not train {name}, which is part of the operator",
                hint="choose the blocks that it trains, or create it with the parameters of this model",
            )
    return {name: of[id(parameters[name])] for name in space.parameter_names}


def _assumed(
    optimizer: torch.optim.Optimizer, groups: Mapping[str, Group], share: Mapping[str, float]
) -> list[str]:
    assumptions = ["every step uses the gradient of this operator's data"]
    trained = sum(len(group["params"]) for group in optimizer.param_groups)
    if trained > len(groups):
        assumptions.append(f"{trained - len(groups)} other parameters of the optimizer do not change")
    if set(share.values()) != {1.0}:
        assumptions.append("learning rates of groups stay in proportion; the bound is for the largest")
    return assumptions


class _Reading:
    """An optimizer's state and settings, as vectors of the space."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Tensor],
        space: ParamSpace,
        groups: Mapping[str, Group],
        share: Mapping[str, float],
    ):
        self.optimizer, self.parameters, self.space = optimizer, parameters, space
        self.groups, self.share = groups, share

    def one(self, setting: str, what: str) -> Any:
        """Return a setting that must be the same in all groups."""
        values = {_plain(group[setting]) for group in self.groups.values()}
        if len(values) > 1:
            raise UsageError(
                f"expected one {what} for all parameters, got {', '.join(map(str, sorted(values)))}",
                hint="take the operator of the blocks of one group",
            )
        return values.pop()

    def state(self, name: str) -> Mapping[str, Any]:
        """Return the optimizer's state of a parameter."""
        state = self.optimizer.state.get(self.parameters[name], {})
        adam = isinstance(self.optimizer, torch.optim.Adam)  # a fused one may skip its first step
        if not state or (adam and float(state["step"]) == 0):
            raise UsageError(
                f"{type(self.optimizer).__name__} has no state of {name} yet",
                hint="take a step with it first",
            )
        return state

    def vector(self, values: Callable[[str], Tensor | float]) -> Tensor:
        """(n,) from a tensor of each parameter's shape, or a number."""
        space = self.space
        tree = {
            name: torch.as_tensor(_local_entries(values(name)), dtype=space.dtype, device=space.device)
            .detach()
            .expand(space.shapes[name])
            .contiguous()
            for name in space.parameter_names
        }
        return space.gather(tree)

    def decay(self, *, apart: bool = False) -> Tensor | None:
        """(n,) weight decay in the gradient, or outside it, then over the largest rate; None if there is
        none.
        """
        decays = {
            name: float(group["weight_decay"]) if self._is_decoupled(group) == apart else 0.0
            for name, group in self.groups.items()
        }
        if not any(decays.values()):
            return None
        return self.vector(lambda name: decays[name] * (self.share[name] if apart else 1.0))

    def _is_decoupled(self, group: Group) -> bool:
        """Return True if weight decay is decoupled from the gradient: AdamW, or an Adam group with that
        option.
        """
        requested = bool(group.get("decoupled_weight_decay", False))
        return requested or isinstance(self.optimizer, torch.optim.AdamW)

    def inverse_root(
        self, denominator: Denominator | None, never_moved: Tensor | None = None
    ) -> Diagonal | None:
        """P^(−½), from the denominator of the gradient; None if that is one, and zero for still entries."""
        if denominator is None and set(self.share.values()) == {1.0}:
            return None
        P = self.vector(lambda name: 1.0 if denominator is None else denominator(*self.of(name)))
        root = (self.vector(lambda name: self.share[name]) / P).sqrt()
        root = root if never_moved is None else root.masked_fill(never_moved, 0.0)
        if not bool(torch.isfinite(root).all()):
            raise UsageError(
                "the optimizer divides by zero: squared gradients and eps are both zero somewhere",
                hint="set eps above 0",
            )
        return Diagonal(root)

    def of(self, name: str) -> tuple[Group, Mapping[str, Any]]:
        """Settings and state of a parameter."""
        return self.groups[name], self.state(name)


def _local_entries(value: Any) -> Any:
    """This rank's entries of a tensor that may be a DTensor."""
    return value.to_local() if hasattr(value, "to_local") else value


def _plain(setting: Any) -> Any:
    """Return a setting with numbers instead of tensors of one entry, so that equal settings compare equal."""
    if isinstance(setting, (tuple, list)):
        return tuple(float(entry) for entry in setting)
    return setting.item() if isinstance(setting, Tensor) else setting


def _sgd(reading: _Reading, rate: float, assumed: list[str]) -> Descent:
    momentum, nesterov = (
        float(reading.one("momentum", "momentum")),
        bool(reading.one("nesterov", "kind of momentum")),
    )
    gain = 1 - float(reading.one("dampening", "dampening")) if momentum else 1.0
    words = f"{'Nesterov ' if nesterov else ''}momentum {momentum:g}" if momentum else ""
    return Descent(
        name=f"SGD with {words}" if words else "SGD",
        inverse_root=reading.inverse_root(None),
        learning_rate=rate,
        momentum=momentum,
        nesterov=nesterov and momentum > 0,
        gain=gain,
        coupled=reading.decay(),
        assumed=assumed,
    )


def _rmsprop(reading: _Reading, rate: float, assumed: list[str]) -> Descent:
    def under_root(group: Group, state: Mapping[str, Any]) -> Tensor:
        v = state["square_avg"] - (state["grad_avg"] ** 2 if group["centered"] else 0.0)
        return v.clamp_min(0)

    def denominator(group: Group, state: Mapping[str, Any]) -> Tensor:
        return under_root(group, state).sqrt() + group["eps"]

    never_moved, notes = _never_moved(reading, lambda _, state: state["square_avg"], under_root)
    return Descent(
        name="RMSprop",
        inverse_root=reading.inverse_root(denominator, never_moved),
        learning_rate=rate,
        momentum=float(reading.one("momentum", "momentum")),
        coupled=reading.decay(),
        assumed=[*assumed, *notes, FIXED_PRECONDITIONER],
    )


def _never_moved(
    reading: _Reading, squares: Denominator, under_root: Denominator
) -> tuple[Tensor, list[str]]:
    """Return a mask (n,) of entries that never had a gradient, and notes on them and on entries dominated by
    ε.

    Args:
        squares: running mean of squared gradients: zero in an entry that never had a gradient.
        under_root: what the optimizer takes the root of before it adds ε.
    """
    never_moved = reading.vector(lambda name: squares(*reading.of(name))) == 0
    root = reading.vector(lambda name: under_root(*reading.of(name)).sqrt())
    eps = reading.vector(lambda name: float(reading.groups[name]["eps"]))
    faint, notes = ~never_moved & (root < eps), []
    if bool(never_moved.any()):
        notes.append(f"{int(never_moved.sum())} entries never had a gradient and do not move")
    if bool(faint.any()):
        notes.append(
            f"√v is below eps in {int(faint.sum())} entries: only eps limits their steps, and a large "
            f"value may come from them alone"
        )
    return never_moved, notes


def _squares(group: Group, state: Mapping[str, Any]) -> Tensor:
    """Return v of a parameter, or its running maximum (AMSGrad)."""
    return state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]


def _adam(reading: _Reading, rate: float, assumed: list[str]) -> Descent:
    beta, _ = reading.one("betas", "pair of betas")

    def denominator(group: Group, state: Mapping[str, Any]) -> Tensor:
        beta_1, beta_2 = (float(b) for b in group["betas"])
        t = float(state["step"])
        return (1 - beta_1**t) * ((_squares(group, state) / (1 - beta_2**t)).sqrt() + group["eps"])

    never_moved, notes = _never_moved(reading, _squares, _squares)
    decoupled = reading.decay(apart=True)
    if decoupled is not None:
        notes.append("decoupled weight decay is part of λ_max")
    return Descent(
        name=type(reading.optimizer).__name__,
        inverse_root=reading.inverse_root(denominator, never_moved),
        learning_rate=rate,
        momentum=beta,
        gain=1 - beta,
        coupled=reading.decay(),
        decoupled=decoupled,
        assumed=[*assumed, *notes, FIXED_PRECONDITIONER],
    )


_READERS: dict[type[torch.optim.Optimizer], Callable[[_Reading, float, list[str]], Descent]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.RMSprop: _rmsprop,
}
