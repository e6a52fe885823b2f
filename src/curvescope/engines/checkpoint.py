"""Layers whose inside is computed again instead of being kept: a product in the memory of a few layers.

Of a layer y = f(x, θ) only x and the cotangent g of y are kept. With s = ⟨g, f(x, θ)⟩ the first backward is
∇s in (x, θ), and the second derivative along u is the gradient of ⟨∇s, u⟩ in (g, x, θ). Both are made from f
itself, so a product costs about twice as much. PyTorch's own checkpoints do not reach the graph of the
gradient, which is what takes the memory here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvescope.core.errors import UsageError
from curvescope.engines.recompute_check import Repeats, Trace, refuse_moving, refused
from curvescope.kernels.backends import refuse_third
from curvescope.kernels.linear import twin_of
from curvescope.models.model import Model
from curvescope.models.running.double import exact
from curvescope.models.running.eager import eager
from curvescope.models.running.exchange import Change, exchanged, parameters_at
from curvescope.models.running.torch_checkpoints import passing_through
from curvescope.models.sources import repeated_layers

Context = Callable[[], AbstractContextManager[Any]]
Tensors = Sequence[Tensor | None]
_TORCHS = frozenset(vars(nn.Module()))  # names that every module has


def checkpointed(model: Model, inside: Callable[[nn.Module], Context], repeats: Repeats) -> list[Change]:
    """The model's repeated layers keep nothing of their inside while these changes hold.

    Args:
        model: Whose layers they are.
        inside: What a layer runs in when it is computed again, such as our kernels.
        repeats: Compares what they give then with what they give now.
    """

    def forward(make: Callable[..., _Call], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        call = make(leaves, tree)
        return call.whole(_Layer.apply(call, *filter(_is_real, leaves), *layer.parameters()))

    return _in_place(model, inside, repeats, forward)


def traced(model: Model, inside: Callable[[nn.Module], Context], trace: Trace) -> list[Change]:
    """The model's repeated layers as `checkpointed` takes them, for one pass in which a trace looks on."""

    def forward(make: Callable[..., _Call], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        call, own = make(leaves, tree), trace.enter([*filter(_is_real, leaves), *layer.parameters()])
        return call.whole(trace.leave(own, call.run(own)))

    return _in_place(model, inside, Repeats(), forward)


def _in_place(
    model: Model,
    inside: Callable[[nn.Module], Context],
    repeats: Repeats,
    forward: Callable[..., Any],
) -> list[Change]:
    """Layers whose forward is another, which is given how a call of the layer is made."""
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
        layer: partial(_Call, model, layer, model.whole_forward(layer), context(layer), repeats)
        for layer in layers
    }
    return [Change(vars(layer), "forward", partial(forward, make, layer)) for layer, make in made.items()]


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _Call:
    """One call of a layer as a function of tensors: its inputs that move, then its parameters.

    What stood in its attributes and buffers stands there again whenever it is computed: a network may put on
    its layers what belongs to a batch, a mask say, and by then that of another batch.
    """

    def __init__(
        self,
        model: Model,
        layer: nn.Module,
        forward: Callable[..., Any],
        inside: Context,
        repeats: Repeats,
        leaves: list[Any],
        tree: Any,
    ):
        self._model, self._layer, self._run = model, layer, forward
        self._inside, self._repeats = inside, repeats
        self._state = _state(layer)
        self._names = [name for name, _ in layer.named_parameters()]
        self._moving = [i for i, x in enumerate(leaves) if _is_real(x)]
        self._fixed, self._tree = [None if _is_real(x) else x for x in leaves], tree
        self._rest: list[Any] = []
        self._real: list[bool] = []
        self._outputs: Any = None
        self._sums: Tensor | None = None

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs that are real tensors."""
        leaves, count = list(self._fixed), len(self._moving)
        for i, x in zip(self._moving, tensors[:count], strict=True):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, self._tree)
        parameters = dict(zip(self._names, tensors[count:], strict=True))
        state = [change for change in self._state if change.holder.get(change.name) is not change.value]
        with exchanged([*state, *parameters_at(self._layer, parameters)]):
            found = self._run(*args, **kwargs)  # without hooks: they had their turn when the layer was called
        if _written(leaves, self._tree, args, kwargs):
            raise refused(self._model, "writes into a list or a dictionary that it is called with")
        outputs, self._outputs = tree_flatten(found)
        self._real = [_is_real(x) for x in outputs]
        self._rest = [None if _is_real(x) else x for x in outputs]
        return tuple(filter(_is_real, outputs))

    def first(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs where the layer is called."""
        refuse_moving(self._model, [*self._fixed, *(change.value for change in self._state)])
        outputs = self.run(tensors)
        self._sums = self._repeats.sums(outputs)
        return outputs

    @contextmanager
    def again(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """The outputs where it is computed again, and what their derivatives are taken in."""
        with self._inside():
            outputs = self.run(tensors)
            assert self._sums is not None, "called before it is computed again"
            self._repeats.compare(outputs, self._sums)
            yield outputs

    def whole(self, outputs: Sequence[Tensor]) -> Any:
        """What the layer itself returned, with these tensors in it."""
        given = iter(outputs)
        leaves = [next(given) if real else x for x, real in zip(self._rest, self._real, strict=True)]
        return tree_unflatten(leaves, self._outputs)


def _written(leaves: list[Any], tree: Any, args: Any, kwargs: Any) -> bool:
    """Whether containers among the arguments of a call hold something else than before it."""
    now, spec = tree_flatten((args, kwargs))
    return spec != tree or any(a is not b for a, b in zip(now, leaves, strict=True))


def _state(layer: nn.Module) -> list[Change]:
    """Attributes and buffers of a layer as they are: what is no module, function or matter of torch's own."""
    return [
        Change(holder, name, value)
        for part in layer.modules()
        for holder in (vars(part), part._buffers)
        for name, value in holder.items()
        if name not in _TORCHS and not callable(value)
    ]


class _Layer(torch.autograd.Function):
    """x, θ ↦ y."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call.first(tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        tensors = map(twin_of, ctx.saved_tensors)
        return None, *_Gradient.apply(ctx.call, ctx.needs_input_grad[1:], *cotangents, *tensors)


class _Gradient(torch.autograd.Function):
    """g, x, θ ↦ ∇⟨g, f⟩ in x and θ, None where not needed."""

    @staticmethod
    def forward(ctx: Any, call: _Call, needs: tuple[bool, ...], *tensors: Tensor) -> Any:
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
        wanted = [x for x, need in zip(leaves, ctx.needs_input_grad[2:], strict=True) if need]
        found = iter(
            torch.autograd.grad([f for f, _ in pairs], wanted, [u for _, u in pairs], allow_unused=True)
        )
        return None, None, *(next(found) if need else None for need in ctx.needs_input_grad[2:])


def _leaves(tensors: Sequence[Tensor], needs: tuple[bool, ...]) -> list[Tensor]:
    """Cotangents, and of x and θ those that move, to be differentiated in."""
    front = len(tensors) - len(needs)
    return [t.detach().requires_grad_(i < front or needs[i - front]) for i, t in enumerate(tensors)]


def _gradient(call: _Call, needs: tuple[bool, ...], leaves: list[Tensor], *, create_graph: bool) -> Tensors:
    """∇⟨g, f⟩ in those of x and θ that are needed; the cotangents g come first among the leaves."""
    cotangents, tensors = leaves[: len(leaves) - len(needs)], leaves[len(leaves) - len(needs) :]
    with call.again(tensors) as outputs:
        wanted = [x for x, need in zip(tensors, needs, strict=True) if need]
        pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
        )
    return [next(found) if need else None for need in needs]
