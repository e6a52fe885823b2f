"""Recompute layers instead of storing their intermediate results: a product in the memory of a few layers.

For a layer y = f(x, θ), only x and the cotangent g of y are stored. With s = ⟨g, f(x, θ)⟩ the first backward
is ∇s in (x, θ), and the second derivative along u is the gradient of ⟨∇s, u⟩ in (g, x, θ). Both are made from
f itself, so a product costs about twice as much. PyTorch's own checkpoints do not reach the graph of the
gradient, which is what takes the memory here.

A recomputed layer must be a function of its tensor arguments and of its own parameters. Other inputs have no
derivative, and may differ when the layer is recomputed: a mask set on the layers, a growing cache, a tensor
inside of an object, an activation that a hook passes to the loss. `Trace` finds lost derivatives in one pass
on a few positions. `RecomputeCheck` compares the outputs of recomputed layers with the original ones in every
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.tensors import graph_leaves
from curvescope.engines.tensor_digest import same_sums, sums
from curvescope.kernels.backends import refuse_third
from curvescope.kernels.linear import twin_of
from curvescope.models.curvature_sources import repeated_layers
from curvescope.models.model import Model
from curvescope.models.running.eager import eager
from curvescope.models.running.keep_float64 import exact
from curvescope.models.running.patching import Change, parameters_at, patched
from curvescope.models.running.torch_checkpoints import passing_through

Context = Callable[[], AbstractContextManager[Any]]
Tensors = Sequence[Tensor | None]
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # names that every module has


def checkpointed(
    model: Model, inside: Callable[[nn.Module], Context], recompute_check: RecomputeCheck
) -> list[Change]:
    """Return changes that make the model's repeated layers recompute their intermediate results.

    Args:
        model: The model with the layers.
        inside: Context in which a layer is recomputed, such as our kernels.
        repeats: Compares recomputed outputs with the original ones.
    """

    def forward(make: Callable[..., _LayerCall], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        call = make(leaves, tree)
        return call.return_value(_Layer.apply(call, *filter(_is_real, leaves), *layer.parameters()))

    return _in_place(model, inside, recompute_check, forward)


def traced(model: Model, inside: Callable[[nn.Module], Context], trace: Trace) -> list[Change]:
    """Return changes like `checkpointed`, for one pass that a trace observes."""

    def forward(make: Callable[..., _LayerCall], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        call, call_leaves = make(leaves, tree), trace.enter([*filter(_is_real, leaves), *layer.parameters()])
        return call.return_value(trace.leave(call_leaves, call.run(call_leaves)))

    return _in_place(model, inside, RecomputeCheck(), forward)


def _in_place(
    model: Model,
    inside: Callable[[nn.Module], Context],
    recompute_check: RecomputeCheck,
    forward: Callable[..., Any],
) -> list[Change]:
    """Return changes that replace the forward of each repeated layer."""
    layers = repeated_layers(model.module)
    if not layers:
        raise UsageError("expected a model with repeated layers to checkpoint, found none")

    def context(layer: nn.Module) -> Context:
        around = inside(layer)

        @contextmanager
        def again() -> Iterator[None]:
            casts = exact(model.dtype, casts=model.casts)
            with torch.enable_grad(), passing_through(), eager(layer), around(), casts:
                yield

        return again

    made = {
        layer: partial(_LayerCall, model, layer, model.whole_forward(layer), context(layer), recompute_check)
        for layer in layers
    }
    return [Change(vars(layer), "forward", partial(forward, make, layer)) for layer, make in made.items()]


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _LayerCall:
    """One call of a layer as a function of tensors: its differentiable inputs, then its parameters.

    Attributes and buffers are restored for every recomputation, because a model may set values that belong to
    a batch, such as a mask, on its layers.
    """

    def __init__(
        self,
        model: Model,
        layer: nn.Module,
        forward: Callable[..., Any],
        inside: Context,
        recompute_check: RecomputeCheck,
        leaves: list[Any],
        tree: Any,
    ):
        self._model, self._layer, self._run = model, layer, forward
        self._inside, self._repeats = inside, recompute_check
        self._state = _state(layer)
        self._names = [name for name, _ in layer.named_parameters()]
        self._moving = [i for i, x in enumerate(leaves) if _is_real(x)]
        self._fixed, self._tree = [None if _is_real(x) else x for x in leaves], tree
        self._other_outputs: list[Any] = []
        self._real: list[bool] = []
        self._outputs: Any = None
        self._sums: Tensor | None = None

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs that are real tensors."""
        leaves, count = list(self._fixed), len(self._moving)
        for i, x in zip(self._moving, tensors[:count], strict=True):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, self._tree)
        parameters = dict(zip(self._names, tensors[count:], strict=True))
        state = [change for change in self._state if change.holder.get(change.name) is not change.value]
        with patched([*state, *parameters_at(self._layer, parameters)]):
            returned = self._run(*args, **kwargs)  # without hooks, which ran when the layer was called
        if _arguments_written(leaves, self._tree, args, kwargs):
            raise lost_derivatives_error(
                self._model, "writes into a list or a dictionary among its arguments"
            )
        outputs, self._outputs = tree_flatten(returned)
        self._real = [_is_real(x) for x in outputs]
        self._other_outputs = [None if _is_real(x) else x for x in outputs]
        return tuple(filter(_is_real, outputs))

    def first_outputs(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs of the first call."""
        check_held_values(self._model, [*self._fixed, *(change.value for change in self._state)])
        outputs = self.run(tensors)
        self._sums = self._repeats.sums(outputs)
        return outputs

    @contextmanager
    def again(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Recompute the outputs, in the context for their derivatives."""
        with self._inside():
            outputs = self.run(tensors)
            assert self._sums is not None, "the first call comes before a recomputation"
            self._repeats.compare(outputs, self._sums)
            yield outputs

    def return_value(self, outputs: Sequence[Tensor]) -> Any:
        """Return the layer's return value, with these tensors instead of its own."""
        tensors = iter(outputs)
        leaves = [
            next(tensors) if real else x for x, real in zip(self._other_outputs, self._real, strict=True)
        ]
        return tree_unflatten(leaves, self._outputs)


def _arguments_written(leaves: list[Any], tree: Any, args: Any, kwargs: Any) -> bool:
    """Return True if a call has changed containers among its arguments."""
    current, spec = tree_flatten((args, kwargs))
    return spec != tree or any(a is not b for a, b in zip(current, leaves, strict=True))


def _state(layer: nn.Module) -> list[Change]:
    """Return changes that restore the attributes and buffers of a layer, except modules, functions and
    torch's own.
    """
    return [
        Change(holder, name, value)
        for part in layer.modules()
        for holder in (vars(part), part._buffers)
        for name, value in holder.items()
        if name not in _MODULE_ATTRIBUTES and not callable(value)
    ]


class _Layer(torch.autograd.Function):
    """x, θ ↦ y."""

    @staticmethod
    def forward(ctx: Any, call: _LayerCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call.first_outputs(tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        tensors = map(twin_of, ctx.saved_tensors)
        return None, *_LayerGradient.apply(ctx.call, ctx.needs_input_grad[1:], *cotangents, *tensors)


class _LayerGradient(torch.autograd.Function):
    """g, x, θ ↦ ∇⟨g, f⟩ in x and θ, None where not needed."""

    @staticmethod
    def forward(ctx: Any, call: _LayerCall, needs: tuple[bool, ...], *tensors: Tensor) -> Any:
        ctx.call, ctx.needs = call, needs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(_gradient(call, needs, _leaves(tensors, needs), create_graph=False))

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> Any:
        refuse_third()
        leaves = _leaves(ctx.saved_tensors, ctx.needs)
        first = _gradient(ctx.call, ctx.needs, leaves, create_graph=True)
        pairs = [(f, u) for f, u in zip(first, directions, strict=True) if f is not None and u is not None]
        pairs = [(f, u) for f, u in pairs if f.requires_grad]
        if not pairs:
            return (None,) * (2 + len(leaves))
        needed = [x for x, need in zip(leaves, ctx.needs_input_grad[2:], strict=True) if need]
        gradients = iter(
            torch.autograd.grad([f for f, _ in pairs], needed, [u for _, u in pairs], allow_unused=True)
        )
        return None, None, *(next(gradients) if need else None for need in ctx.needs_input_grad[2:])


def _leaves(tensors: Sequence[Tensor], needs: tuple[bool, ...]) -> list[Tensor]:
    """Return leaves for the cotangents, and for the x and θ that are differentiated."""
    front = len(tensors) - len(needs)
    return [t.detach().requires_grad_(i < front or needs[i - front]) for i, t in enumerate(tensors)]


def _gradient(
    call: _LayerCall, needs: tuple[bool, ...], leaves: list[Tensor], *, create_graph: bool
) -> Tensors:
    """Return ∇⟨g, f⟩ in the x and θ that are needed; the cotangents g come first among the leaves."""
    cotangents, tensors = leaves[: len(leaves) - len(needs)], leaves[len(leaves) - len(needs) :]
    with call.again(tensors) as outputs:
        needed = [x for x, need in zip(tensors, needs, strict=True) if need]
        pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
        gradients = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                needed,
                [g for _, g in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
        )
    return [next(gradients) if need else None for need in needs]


SUM_TOLERANCE = {torch.float64: 1e-10}  # relative to Σ |y|; 1e-4 in float32, where order and TF32 may differ


@final
class RecomputeCheck:
    """Comparison of recomputed outputs by their sums: r'ᵀ Y r and Σ |y|, Y the rows of an output, r and r'
    random.
    """

    def __init__(self) -> None:
        self._different: list[Tensor] = []  # one boolean per recomputed layer

    @torch.no_grad()
    def sums(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the sums of the outputs of one call: (outputs, 2)."""
        rows = [sums(y) for y in outputs]
        return torch.stack([x.to(rows[0]) for x in rows]) if rows else torch.zeros(0, 2)

    @torch.no_grad()
    def compare(self, outputs: Sequence[Tensor], then: Tensor) -> None:
        """Record if the outputs have the given sums, without waiting for the device."""
        if not outputs or (outputs[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return  # replays are checked separately
        same = same_sums(self.sums(outputs), then, SUM_TOLERANCE.get(then.dtype, 1e-4))
        self._different.append(~same.all())

    def all_equal(self) -> bool:
        """Return True if all values compared since the last call were equal."""
        different, self._different = self._different, []
        return not different or not bool(torch.stack(different).any())


@final
class Trace:
    """Replace all inputs of layers by leaves, to detect derivatives that bypass them."""

    def __init__(self, model: Model):
        self._model = model
        self._inside: dict[int, Tensor] = {}

    def enter(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Detach the tensors that a layer is called with, and remember them as its leaves."""
        leaves = [t.detach().requires_grad_() for t in tensors]
        self._inside |= {id(t): t for t in leaves}
        return leaves

    def leave(self, own_leaves: Iterable[Tensor], outputs: Iterable[Tensor]) -> list[Tensor]:
        """Check that the outputs of a layer depend on its own leaves alone, and return them."""
        own_ids, outputs = {id(t) for t in own_leaves}, list(outputs)
        if any(id(leaf) not in own_ids for y in outputs for leaf in graph_leaves(y)):
            raise self._refused(
                "uses a tensor that is not an argument (from an attribute, object or closure)"
            )
        return [y.detach().requires_grad_() for y in outputs]

    def check(self, ends: Iterable[Tensor]) -> None:
        """Raise if a result depends on the intermediate results of a layer."""
        if any(id(leaf) in self._inside for end in ends for leaf in graph_leaves(end)):
            raise self._refused("passes intermediate results on (to a hook, an object, another loss)")

    def _refused(self, why: str) -> UsageError:
        return lost_derivatives_error(self._model, why)


def lost_derivatives_error(model: Model, why: str) -> UsageError:
    """Return the error for a layer whose derivatives depend on more than its arguments and results."""
    return UsageError(
        f"a layer of {model.name} {why}; recomputing layers would lose its derivatives",
        hint=_alternatives(model),
    )


def check_held_values(model: Model, values: Iterable[Any]) -> None:
    """Raise if a value that a layer holds, other than its tensors, depends on the leaves of this pass."""
    moving = [t for value in values for t in _tensors(value) if t.requires_grad and t.grad_fn is not None]
    if not moving:
        return
    replaced = [p for p in model.module.parameters() if not isinstance(p, nn.Parameter)]
    leaves = {id(leaf) for p in replaced for leaf in ([p] if p.grad_fn is None else graph_leaves(p))}
    if any(id(leaf) in leaves for t in moving for leaf in graph_leaves(t)):
        raise lost_derivatives_error(
            model, "holds a tensor that is not an argument (in an attribute or an object)"
        )


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Iterate over the tensors in a value, in containers, and in plain objects, some levels deep."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module | type):
        inner = value.values() if isinstance(value, dict) else value
        if not isinstance(inner, list | tuple | set) and not isinstance(value, dict):
            inner = getattr(value, "__dict__", {}).values()
        for item in list(inner):
            yield from _tensors(item, depth - 1)


def recompute_error(model: Model) -> CurvescopeError:
    """Return the error for layers that gave different outputs when they were recomputed."""
    return CurvescopeError(
        f"a layer of {model.name} gives different outputs when it is recomputed: it stores something "
        f"between calls (a mask, a cache, …)",
        hint=_alternatives(model),
    )


def _alternatives(model: Model) -> str:
    if model.widening is not None:
        return "cs.load(…, dtype='float32')"
    return "checkpoint=False"
