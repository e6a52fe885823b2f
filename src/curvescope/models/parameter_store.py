"""The parameters θ of a problem: the model's own or replacements, and leaves to differentiate in.

Three kinds of models store their parameters differently; this module hides the difference:

    plain     Leaves share memory with the parameters.
    widened   Parameters are stored in half precision. A leaf is float32 without memory of its own, and
              layers convert their weights when they are called (`models.running.weights.widening`).
    sharded   Each rank holds pieces. Leaves are pieces, layers gather full parameters when they are called
              (`models.running.weights.gathering`), and sums over terms are added over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar, final

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, ShapeError, UsageError
from curvescope.core.ranks.shard_layout import ShardGroup
from curvescope.core.tensors import graph_nodes, lookup_option
from curvescope.models.model import Model
from curvescope.models.running.aliased_parameters import RefuseAliased, aliased_error, refuse_unwidened
from curvescope.models.running.patching import locked, thawed
from curvescope.models.running.torch_checkpoints import RefuseReentrant
from curvescope.models.running.weights.widening import HALVES, WIDE

T = TypeVar("T")
Leaves = dict[str, Tensor]


@final
class ParameterStore:
    """θ by name: the model's own parameters, some of them replaced by those of a point.

    Args:
        model: The model that owns the parameters.
        point: Tensors that replace some parameters, by name; they are read at every use.
    """

    def __init__(self, model: Model, point: Mapping[str, Tensor] | None = None):
        self.model = model
        self.point: Mapping[str, Tensor] = point or {}
        self._shapes = _shapes(model)

    @property
    def values(self) -> Leaves:
        """The current value of every parameter of θ."""
        return {**dict(self.model.named_parameters()), **self.point}

    @property
    def spread(self) -> ShardGroup | None:
        """The ranks that hold pieces of the parameters, for a sharded model."""
        return self.model.spread

    def at(self, given: Mapping[str, Tensor]) -> ParameterStore:
        """Return a store in which the given tensors replace the named parameters.

        If the model stores its weights in half precision, given tensors may be in half precision, too: the
        model's own tensors are used directly, others are converted, which makes a copy.
        """
        parameters, kind, device = dict(self.model.named_parameters()), self.model.dtype, self.model.device
        point = {**self.point, **given}
        for name, value in given.items():
            if name not in parameters or value.shape != parameters[name].shape:
                shape = tuple(parameters[name].shape) if name in parameters else "no such parameter"
                raise ShapeError(f"{name}: expected {shape}, got a tensor of {tuple(value.shape)}")
            half = self.model.widening is not None and value.dtype in HALVES
            if (value.dtype != kind and not half) or value.device != device:
                raise ShapeError(f"{name}: expected {kind} on {device}, got {value.dtype} on {value.device}")
            if half and value is parameters[name]:
                del point[name]
            elif half:
                point[name] = value.detach().to(WIDE)
        store = ParameterStore(self.model, point)
        store._shapes = self._shapes
        return store

    def check_structure(self) -> None:
        """Raise if the module's parameters have other names or shapes than when the store was made."""
        if _shapes(self.model) != self._shapes:
            raise CurvescopeError(
                f"the parameters of {self.model.name} have other names or shapes than when it was loaded",
                hint="make a new Problem of the module",
            )

    def check_plain(self, what: str) -> None:
        """Raise if the parameters are sharded or stored in half precision.

        Args:
            what: The computation that needs this, for the error.
        """
        if self.spread is not None:
            raise UsageError(
                f"{what}: not supported for a model that is sharded over ranks",
                hint="use curvature operators and gradients, or load the full model on one rank",
            )
        if self.model.widening is not None:
            raise UsageError(
                f"{what}: not supported for weights stored in half precision",
                hint="cs.load(…, dtype='float32'); products with Hessian, GGN and functional "
                "Hessian are supported",
            )

    # ------------------------------------------------------------------------------------ sums over the ranks

    def added(self, value: Tensor) -> Tensor:
        """Return the sum of a small tensor over the ranks of a sharded model; else the tensor itself."""
        return value if self.spread is None else self.spread.sum(value)

    def agreed(self, condition: bool) -> bool:
        """Return True if a condition holds on every rank of a sharded model."""
        return condition if self.spread is None else self.spread.all(condition, self.model.device)

    # ------------------------------------------------------------------------------------------------- leaves

    def differentiable(
        self, names: tuple[str, ...], run: Callable[[Leaves], T], ends: Callable[[T], Sequence[Tensor | None]]
    ) -> tuple[Leaves, T]:
        """Return leaves for the named parameters, and the result of `run` on them.

        A module may hold a parameter a second time (in a closure or a list) where leaves do not replace it;
        then the module's own parameter is the leaf.

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
        aliased = self._aliased(leaves, [end for end in ends(result) if end is not None])
        if self.model.widening is not None:
            refuse_unwidened(self.model.name, aliased, ends(result))
        if not aliased:
            return leaves, result
        if any(p is q for p in aliased.values() for q in frozen):
            raise UsageError(
                f"the module also holds {min(aliased)!r} in a closure or a list, and it is frozen, so "
                f"derivatives in it cannot be computed",
                hint="module.requires_grad_(True)",
            )
        if not aliased.keys().isdisjoint(self.point):
            raise aliased_error(min(aliased.keys() & self.point.keys()))
        leaves |= aliased
        return leaves, run(leaves)

    def refusing_aliased(self) -> AbstractContextManager[object]:
        """Context in which a pass raises if it reads a parameter that the point replaces."""
        return RefuseAliased(dict(self.model.named_parameters()), self.point) if self.point else nullcontext()

    def _leaf(self, name: str, value: Tensor) -> Tensor:
        """Return a leaf at a parameter's value, in the dtype in which it is used."""
        widening = self.model.widening
        if widening is not None and value.dtype != self.model.dtype:
            return widening.leaf(name, value)
        return value.detach().requires_grad_()

    def _aliased(self, leaves: Leaves, ends: list[Tensor]) -> Leaves:
        """Return the parameters with leaves that the graph also reaches directly.

        Raises:
            UsageError: An embedding in the graph scales its gradients, or makes them sparse.
        """
        names = {id(p): name for name, p in self.model.named_parameters() if name in leaves}
        aliased = {}
        for node in (node for end in ends if end.requires_grad for node in graph_nodes(end)):
            leaf, option = getattr(node, "variable", None), lookup_option(node)
            if option is not None:
                raise UsageError(
                    f"expected dense, unscaled gradients, but {self.model.name} calls an embedding with "
                    f"{option}=True",
                    hint=f"{option}=False gives the same outputs",
                )
            if id(leaf) in names:
                aliased[names[id(leaf)]] = leaf
        return aliased


def _shapes(model: Model) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in model.named_parameters()}
