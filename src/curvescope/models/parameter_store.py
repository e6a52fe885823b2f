"""The parameters θ of a problem: a model's own or others in their place, and leaves to differentiate in.

Three kinds of models keep their parameters differently, and a problem should not have to know which it has:

    plain      leaves share memory with the parameters
    widened    parameters are kept in half precision; a leaf is float32 and has no memory of its own, and
               layers make their wide weights when they are called (`models.running.weights.widening`)
    sharded    each rank holds pieces; leaves are pieces, layers gather whole parameters when they are
               called (`models.running.weights.gathering`), and sums over terms are added over the ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar, final

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, ShapeError, UsageError
from curvescope.core.ranks.spread import Spread
from curvescope.core.tensors import lookup_option, nodes
from curvescope.models.model import Model
from curvescope.models.running.exchange import locked, thawed
from curvescope.models.running.held import RefuseHeld, moved, refuse_half
from curvescope.models.running.torch_checkpoints import RefuseReentrant
from curvescope.models.running.weights.widening import HALVES, WIDE

T = TypeVar("T")
Leaves = dict[str, Tensor]


@final
class ParameterStore:
    """θ by name: the model's own parameters, and those of a point in the place of some.

    Args:
        model: Whose parameters they are.
        point: Tensors in the place of some parameters, by name; they are read at every use.
    """

    def __init__(self, model: Model, point: Mapping[str, Tensor] | None = None):
        self.model = model
        self.point: Mapping[str, Tensor] = point or {}
        self._shapes = _shapes(model)

    @property
    def values(self) -> Leaves:
        """θ, every parameter as it is now."""
        return {**dict(self.model.named_parameters()), **self.point}

    @property
    def spread(self) -> Spread | None:
        """The ranks that hold pieces of the parameters, for a sharded model."""
        return self.model.spread

    def at(self, given: Mapping[str, Tensor]) -> ParameterStore:
        """The same parameters with others in the place of those that are named.

        In a model whose weights are kept in half precision, given ones may be in half precision, too: the
        model's own tensors are taken as they are, others are widened, which makes a copy.
        """
        own, kind, device = dict(self.model.named_parameters()), self.model.dtype, self.model.device
        point = {**self.point, **given}
        for name, value in given.items():
            if name not in own or value.shape != own[name].shape:
                wanted = tuple(own[name].shape) if name in own else "no such parameter"
                raise ShapeError(f"{name}: expected {wanted}, got a tensor of {tuple(value.shape)}")
            half = self.model.widening is not None and value.dtype in HALVES
            if (value.dtype != kind and not half) or value.device != device:
                raise ShapeError(f"{name}: expected {kind} on {device}, got {value.dtype} on {value.device}")
            if half and value is own[name]:
                del point[name]
            elif half:
                point[name] = value.detach().to(WIDE)
        moved_store = ParameterStore(self.model, point)
        moved_store._shapes = self._shapes
        return moved_store

    def check_structure(self) -> None:
        """Raise if the module's parameters have other names or shapes than when the store was made."""
        if _shapes(self.model) != self._shapes:
            raise CurvescopeError(
                f"the parameters of {self.model.name} have other names or shapes than when it was loaded",
                hint="make a new Problem of the module as it is now",
            )

    def check_plain(self, what: str) -> None:
        """Raise unless the parameters are whole and of the type in which they are used.

        Args:
            what: The computation that needs this, for the error.
        """
        if self.spread is not None:
            raise UsageError(
                f"{what}: not for a model that is spread over ranks",
                hint="curvature operators and gradients are; or load the whole model",
            )
        if self.model.widening is not None:
            raise UsageError(
                f"{what}: not for weights that are kept in half precision",
                hint="cs.load(…, dtype='float32'); products with Hessian, GGN, functional Hessian take them",
            )

    # ------------------------------------------------------------------------------------ sums over the ranks

    def added(self, partial: Tensor) -> Tensor:
        """The sum of a small tensor over the ranks of a sharded model; else the tensor itself."""
        return partial if self.spread is None else self.spread.added(partial)

    def agreed(self, holds: bool) -> bool:
        """Return True if something holds on every rank of a sharded model; else whether it holds here."""
        return holds if self.spread is None else self.spread.all(holds, self.model.device)

    # ------------------------------------------------------------------------------------------------- leaves

    def differentiable(
        self, names: tuple[str, ...], run: Callable[[Leaves], T], ends: Callable[[T], Sequence[Tensor | None]]
    ) -> tuple[Leaves, T]:
        """Leaves for the named parameters, and what `run` makes of them.

        A module may hold a parameter in a second way (a closure, a list) that leaves do not reach; then the
        module's own parameter is the leaf.

        Args:
            names: Parameters.
            run: A function of their leaves.
            ends: The tensors in its result that will be differentiated.
        """
        values = self.values
        leaves = {name: self._leaf(name, values[name]) for name in names}
        frozen = [
            p
            for p in map(dict(self.model.named_parameters()).get, names)
            if p is not None and not p.requires_grad
        ]
        with locked(self.model.module), RefuseReentrant(), thawed(frozen):
            result = run(leaves)
        held = self._held(leaves, [end for end in ends(result) if end is not None])
        if self.model.widening is not None:
            refuse_half(self.model.name, held, ends(result))
        if not held:
            return leaves, result
        if any(p is q for p in held.values() for q in frozen):
            raise UsageError(
                f"the module holds {min(held)!r} in a second way (a closure or a list), and it is frozen, so "
                "that derivatives in it cannot be followed",
                hint="module.requires_grad_(True)",
            )
        if not held.keys().isdisjoint(self.point):
            raise moved(min(held.keys() & self.point.keys()))
        leaves |= held
        return leaves, run(leaves)

    def refusing_held(self) -> AbstractContextManager[object]:
        """Context in which a pass raises if it reads a parameter that the point replaces."""
        return RefuseHeld(dict(self.model.named_parameters()), self.point) if self.point else nullcontext()

    def _leaf(self, name: str, value: Tensor) -> Tensor:
        """A leaf at a parameter's value, in the type that it is used in."""
        widening = self.model.widening
        if widening is not None and value.dtype != self.model.dtype:
            return widening.leaf(name, value)
        return value.detach().requires_grad_()

    def _held(self, leaves: Leaves, ends: list[Tensor]) -> Leaves:
        """The module's own parameters among those that have leaves, if the graph reaches them.

        Raises:
            UsageError: An embedding in the graph scales its gradients, or makes sparse ones.
        """
        own = {id(p): name for name, p in self.model.named_parameters() if name in leaves}
        found = {}
        for node in (node for end in ends if end.requires_grad for node in nodes(end)):
            leaf, option = getattr(node, "variable", None), lookup_option(node)
            if option is not None:
                raise UsageError(
                    f"expected gradients of the loss, dense ones: {self.model.name} calls an embedding with "
                    f"{option}=True",
                    hint=f"{option}=False gives the same outputs",
                )
            if id(leaf) in own:
                found[own[id(leaf)]] = leaf
        return found


def _shapes(model: Model) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in model.named_parameters()}
