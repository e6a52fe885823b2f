"""The functional Hessian of a batch, source by source.

For parts y = f(x, θ) of a network, cotangents λ = ∂ℓ/∂y, and D the derivative of (x, θ) by all parameters,

    H_f = Σ_f Dᵀ (λ · f'') D

exactly. Each call of a part is one node of the graph, and is differentiated separately. One reverse pass
through the gradient computes D v at every node, and the remaining terms outside of all nodes. A node stores
its (λ · f'') D v. A second reverse pass for each source maps it to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvescope.core.errors import CurvescopeError
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch
from curvescope.engines.batch_products import Names, required, results, second_derivative
from curvescope.engines.module_runner import Runner
from curvescope.engines.vjp import gradient
from curvescope.kernels.function_mode import PlainAttention
from curvescope.models.curvature_sources import REST, MethodCall
from curvescope.models.running.patching import Change, parameters_at, patched
from curvescope.problem import Leaves, Problem

TOLERANCE = {
    torch.float32: 1e-3,
    torch.float64: 1e-9,
}  # relative to the sum of norms, because sources may cancel
SourceProducts = dict[str, Sequence[Tensor | None]]
TangentProduct = Callable[[Sequence[Tensor]], SourceProducts]
"""Function from one tangent in the order of the columns to results in the order of the rows."""
SourceWork = Callable[[Sequence[Tensor], Sequence[str], int], SourceProducts]
"""Function of tangents (k, *shape) in the order of the columns, the sources, and the number of tangents per
pass; it returns results in the order of the rows."""


def functional_sources(
    problem: Problem, parts: Mapping[str, tuple[MethodCall, ...]], batch: Batch, rows: Names, columns: Names
) -> SourceWork:
    """Build the product with each source's part of the functional Hessian."""
    calls: list[_PartCall] = []
    ends: list[Tensor] = []
    changes = [
        Change(vars(called.owner), called.method, partial(_call, calls, name, called, original))
        for name, several in parts.items()
        for called in several
        if (original := getattr(called.owner, called.method))
    ]

    def scalar(leaves: Leaves) -> Tensor:
        calls.clear()
        ends.clear()
        with PlainAttention():
            z = problem.outputs(batch, leaves, changes=changes)
        G = problem.loss.gradient(z.detach(), batch.targets, batch.weights)
        ends.append(G.detach().requires_grad_())
        return (ends[0] * z).sum()

    leaves, s = problem.differentiable(tuple(dict.fromkeys(rows + columns)), scalar, lambda s: [s])
    gradients, into = gradient(s, [leaves[name] for name in columns]), [leaves[name] for name in rows]

    def along(wanted: Sequence[str], v: Sequence[Tensor]) -> SourceProducts:
        try:
            # with the derivative in G as an output, autograd visits every node
            products: SourceProducts = {REST: _pull(gradients, v, [*into, *ends])[:-1]}
            for name in wanted:
                if name != REST:
                    local_calls = [call for call in calls if call.source == name and call.local]
                    x, u = (
                        [x for call in local_calls for x in call.inputs],
                        [u for call in local_calls for u in call.local],
                    )
                    products[name] = _pull(x, u, into)
            return products
        finally:
            for call in calls:
                call.local = []

    return lambda v, wanted, group: _grouped(partial(along, wanted), v, group)


def _grouped(along: TangentProduct, v: Sequence[Tensor], group: int) -> SourceProducts:
    """Return the results for k tangents, `group` at a time: (k, *shape) each."""
    products = [
        _batched(along, group_of_tangents)
        for group_of_tangents in zip(*(x.split(group) for x in v), strict=True)
    ]
    return products[0] if len(products) == 1 else _concatenated(torch.cat, products)


def _batched(along: TangentProduct, v: Sequence[Tensor]) -> SourceProducts:
    """Return the results for some tangents, with vmap if possible, else one after the other."""
    missing: dict[str, list[bool]] = {}

    def flat(*tangent: Tensor) -> list[Tensor]:
        results = along(tangent)
        missing.update({name: [x is None for x in values] for name, values in results.items()})
        return [x for values in results.values() for x in values if x is not None]

    k = v[0].shape[0]
    if k > 1:
        try:
            stacked = iter(torch.vmap(flat)(*v))
            return {
                name: [None if is_missing else next(stacked) for is_missing in values]
                for name, values in missing.items()
            }
        except RuntimeError:
            pass  # an operation without a batching rule
    return _concatenated(torch.stack, [along([x[j] for x in v]) for j in range(k)])


def _concatenated(join: Callable[[list[Tensor]], Tensor], parts: list[SourceProducts]) -> SourceProducts:
    """Join the results for several tangents."""
    return {
        name: [
            None if values[0] is None else join([required(x) for x in values])
            for values in zip(*(products[name] for products in parts), strict=True)
        ]
        for name in parts[0]
    }


def check_sources_add_up(problem: Problem, parts: Mapping[str, tuple[MethodCall, ...]], batch: Batch) -> None:
    """Raise if the sources do not add up to the functional Hessian in a random direction.

    This happens if a part uses tensors other than its arguments, or passes on tensors that it does not
    return.
    """
    names = tuple(dict(problem.named_parameters()))
    v = [_random(problem.get_parameter(name), i)[None] for i, name in enumerate(names)]
    product = second_derivative(problem, Runner(problem), batch, "functional", names, names)
    truth = results(product, v, names)
    products = functional_sources(problem, parts, batch, names, names)(v, list(parts), 1)
    size = residual = 0.0
    for i, x in enumerate(truth):
        terms = [result[i] for result in products.values()]
        present = [term for term in terms if term is not None]
        size += sum(float(term.norm()) for term in present)
        difference = sum(present) - (0 if x is None else x)  # pyright: ignore[reportOperatorIssue]
        residual += float(difference.norm()) if isinstance(difference, Tensor) else 0.0
    if residual > TOLERANCE[problem.dtype] * size:
        raise CurvescopeError(
            f"the sources of {problem.model.name} do not add up to its functional Hessian: a part uses a "
            f"tensor that is not an argument, or passes on one that it does not return (by an attribute, a "
            f"closure, another object)",
            hint="pass and return tensors, in tuples, lists or dictionaries",
        )


def _random(like: Tensor, index: int) -> Tensor:
    numbers = torch.randn(like.shape, generator=generator(0, index), dtype=torch.float32)
    return numbers.to(like)


def _pull(
    sources: Sequence[Tensor | None], cotangents: Sequence[Tensor | None], into: list[Tensor]
) -> Sequence[Tensor | None]:
    pairs = [
        (s, c)
        for s, c in zip(sources, cotangents, strict=True)
        if s is not None and c is not None and s.requires_grad
    ]
    if not pairs:
        return [None] * len(into)
    outputs, present_cotangents = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, into, present_cotangents, retain_graph=True, allow_unused=True)


# ------------------------------------------------------------------------------------------------- a node


class _PartCall:
    """One call of a part: a function of its real inputs and of its owner's parameters.

    `inputs` are these tensors in the graph of the outputs, `leaves` are detached copies, `outputs` the part's
    outputs on the leaves, and `local` is (λ · f'') D v after a reverse pass through the gradient.
    """

    def __init__(self, source: str, inputs: list[Tensor]):
        self.source, self.inputs = source, inputs
        self.leaves: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.local: list[Tensor | None] = []


def _call(
    calls: list[_PartCall],
    source: str,
    called: MethodCall,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return the result of `original` as one node of the graph."""
    arguments, tree = tree_flatten((args, kwargs))
    moving = [i for i, x in enumerate(arguments) if _is_real(x)]
    parameters = dict(called.owner.named_parameters())
    call = _PartCall(source, [*(arguments[i] for i in moving), *parameters.values()])
    returned: list[Any] = []

    def run(leaves: list[Tensor]) -> list[Tensor]:
        inside = list(arguments)
        for i, leaf in zip(moving, leaves, strict=False):
            inside[i] = leaf
        parameters_of = dict(zip(parameters, leaves[len(moving) :], strict=True))
        inner_args, inner_kwargs = tree_unflatten(inside, tree)
        with patched(parameters_at(called.owner, parameters_of)):
            returned.append(original(*inner_args, **inner_kwargs))
        return [x for x in tree_flatten(returned[0])[0] if _is_real(x)]

    values = iter(_Value.apply(call, run, *call.inputs))
    calls.append(call)
    outputs, shape = tree_flatten(returned[0])
    return tree_unflatten([next(values) if _is_real(x) else x for x in outputs], shape)


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _Value(torch.autograd.Function):
    """x, θ ↦ y."""

    @staticmethod
    def forward(
        ctx: Any, call: _PartCall, run: Callable[[list[Tensor]], list[Tensor]], *tensors: Tensor
    ) -> Any:
        ctx.call = call
        with torch.enable_grad():
            call.leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
            call.outputs = run(call.leaves)
        return tuple(y.detach() for y in call.outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            return None, None, *_PartGradient.apply(ctx.call, *cotangents)
        return None, None, *_gradient(ctx.call, cotangents, create_graph=False)


class _PartGradient(torch.autograd.Function):
    """λ ↦ ∇⟨λ, f⟩ in x and θ; the derivative in λ is passed on, the one in x and θ is stored in the call."""

    @staticmethod
    def forward(ctx: Any, call: _PartCall, *cotangents: Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            ctx.cotangents = [c.detach().requires_grad_() for c in cotangents]
            ctx.first = _gradient(call, ctx.cotangents, create_graph=True)
        return tuple(None if g is None else g.detach() for g in ctx.first)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> Any:
        call, count = ctx.call, len(ctx.cotangents)
        moving = [leaf for leaf in call.leaves if leaf.requires_grad]
        gradients = _pull(ctx.first, directions, [*ctx.cotangents, *moving])
        local = iter(gradients[count:])
        call.local = [next(local) if leaf.requires_grad else None for leaf in call.leaves]
        return None, *gradients[:count]


def _gradient(call: _PartCall, cotangents: Sequence[Tensor], *, create_graph: bool) -> list[Tensor | None]:
    """Return ∇⟨λ, f⟩ in the x and θ that are differentiated."""
    leaves = [leaf for leaf in call.leaves if leaf.requires_grad]
    pairs = [(y, c) for y, c in zip(call.outputs, cotangents, strict=True) if y.requires_grad]
    if not leaves or not pairs:
        return [None] * len(call.leaves)
    outputs, present_cotangents = zip(*pairs, strict=True)
    gradients = iter(
        torch.autograd.grad(
            outputs,
            leaves,
            present_cotangents,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    )
    return [next(gradients) if leaf.requires_grad else None for leaf in call.leaves]
