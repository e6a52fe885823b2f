"""The functional Hessian of a batch, source by source.

For parts y = f(x, θ) of a network, cotangents λ = ∂ℓ/∂y, and D the derivative of (x, θ) by all parameters,

    H_f = Σ_f Dᵀ (λ · f'') D

exactly. Each call of a part is one node of the graph here, and its inside is differentiated apart. One
reverse pass through the gradient brings D v to every node and gives the rest, what no node holds; a node
keeps its own (λ · f'') D v, which a second reverse pass, one for each source, takes back to the parameters.
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
from curvescope.engines.run import PlainRunner
from curvescope.engines.vjp import gradient
from curvescope.kernels.substitute import PlainAttention
from curvescope.models.running.exchange import Change, exchanged, parameters_at
from curvescope.models.sources import REST, Called
from curvescope.problem import Leaves, Problem

NEAR = {torch.float32: 1e-3, torch.float64: 1e-9}  # of the sum of norms: sources may cancel
Found = dict[str, Sequence[Tensor | None]]
Along = Callable[[Sequence[Tensor]], Found]
"""One tangent in the order of the columns to results in that of the rows."""
SourceWork = Callable[[Sequence[Tensor], Sequence[str], int], Found]
"""Tangents (k, *shape) in the order of the columns, the sources wanted, and how many tangents to treat at
once, to results in the order of the rows."""


def functional_sources(
    problem: Problem, parts: Mapping[str, tuple[Called, ...]], batch: Batch, rows: Names, columns: Names
) -> SourceWork:
    """Σ over terms of each source's share of the functional Hessian."""
    calls: list[_Call] = []
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
    first, into = gradient(s, [leaves[name] for name in columns]), [leaves[name] for name in rows]

    def along(wanted: Sequence[str], v: Sequence[Tensor]) -> Found:
        try:
            # asked for the derivative by G too, autograd passes every node on its way
            found: Found = {REST: _pull(first, v, [*into, *ends])[:-1]}
            for name in wanted:
                if name != REST:
                    own = [call for call in calls if call.source == name and call.local]
                    x, u = [x for call in own for x in call.inputs], [u for call in own for u in call.local]
                    found[name] = _pull(x, u, into)
            return found
        finally:
            for call in calls:
                call.local = []

    return lambda v, wanted, group: _grouped(partial(along, wanted), v, group)


def _grouped(along: Along, v: Sequence[Tensor], group: int) -> Found:
    """Results of k tangents, `group` at a time: (k, *shape) each. What is missing is so for all of them."""
    several = [_together(along, some) for some in zip(*(x.split(group) for x in v), strict=True)]
    return several[0] if len(several) == 1 else _joined(torch.cat, several)


def _together(along: Along, v: Sequence[Tensor]) -> Found:
    """Results of some tangents: every operation on all of them at once, or one tangent after the other."""
    missing: dict[str, list[bool]] = {}

    def whole(*one: Tensor) -> list[Tensor]:
        found = along(one)
        missing.update({name: [x is None for x in some] for name, some in found.items()})
        return [x for some in found.values() for x in some if x is not None]

    k = v[0].shape[0]
    if k > 1:
        try:
            made = iter(torch.vmap(whole)(*v))
            return {name: [None if gone else next(made) for gone in some] for name, some in missing.items()}
        except RuntimeError:
            pass  # an operation without a rule for several
    return _joined(torch.stack, [along([x[j] for x in v]) for j in range(k)])


def _joined(join: Callable[[list[Tensor]], Tensor], several: list[Found]) -> Found:
    """Results of several tangents as one."""
    return {
        name: [
            None if some[0] is None else join([required(x) for x in some])
            for some in zip(*(found[name] for found in several), strict=True)
        ]
        for name in several[0]
    }


def refuse_unless_whole(problem: Problem, parts: Mapping[str, tuple[Called, ...]], batch: Batch) -> None:
    """Raise where the sources do not add up to the functional Hessian, on one direction of all parameters.

    A part may be given something that is none of its arguments, or give what it does not return.
    """
    names = tuple(dict(problem.named_parameters()))
    v = [_random(problem.get_parameter(name), i)[None] for i, name in enumerate(names)]
    whole = second_derivative(problem, PlainRunner(problem), batch, "functional", names, names)
    truth = results(whole, v, 1, len(names))
    found = functional_sources(problem, parts, batch, names, names)(v, list(parts), 1)
    size = rest = 0.0
    for i, x in enumerate(truth):
        terms = [each[i] for each in found.values()]
        given = [term for term in terms if term is not None]
        size += sum(float(term.norm()) for term in given)
        left = sum(given) - (0 if x is None else x)  # pyright: ignore[reportOperatorIssue]
        rest += float(left.norm()) if isinstance(left, Tensor) else 0.0
    if rest > NEAR[problem.dtype] * size:
        raise CurvescopeError(
            f"the sources of {problem.model.name} do not add up to the functional Hessian of its Hessian: a "
            "part is given something that is none of its arguments, or gives what it does not return (by an "
            "attribute, a closure, an object of another kind)",
            hint="pass and return tensors, in tuples, lists or dictionaries",
        )


def _random(like: Tensor, index: int) -> Tensor:
    found = torch.randn(like.shape, generator=generator(0, index), dtype=torch.float32)
    return found.to(like)


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
    outputs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, into, given, retain_graph=True, allow_unused=True)


# ------------------------------------------------------------------------------------------------- a node


class _Call:
    """One call of a part: a function of its real inputs and of its owner's parameters.

    `inputs` are these as they stand in the graph of the outputs, `leaves` the same cut off from it, `outputs`
    what the part makes of the leaves, and `local` (λ · f'') D v after a reverse pass through the gradient.
    """

    def __init__(self, source: str, inputs: list[Tensor]):
        self.source, self.inputs = source, inputs
        self.leaves: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.local: list[Tensor | None] = []


def _call(
    calls: list[_Call], source: str, called: Called, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """What `original` returns, as one node."""
    given, tree = tree_flatten((args, kwargs))
    moving = [i for i, x in enumerate(given) if _is_real(x)]
    parameters = dict(called.owner.named_parameters())
    call = _Call(source, [*(given[i] for i in moving), *parameters.values()])
    returned: list[Any] = []

    def run(leaves: list[Tensor]) -> list[Tensor]:
        inside = list(given)
        for i, leaf in zip(moving, leaves, strict=False):
            inside[i] = leaf
        own = dict(zip(parameters, leaves[len(moving) :], strict=True))
        inner_args, inner_kwargs = tree_unflatten(inside, tree)
        with exchanged(parameters_at(called.owner, own)):
            returned.append(original(*inner_args, **inner_kwargs))
        return [x for x in tree_flatten(returned[0])[0] if _is_real(x)]

    found = iter(_Value.apply(call, run, *call.inputs))
    calls.append(call)
    outputs, shape = tree_flatten(returned[0])
    return tree_unflatten([next(found) if _is_real(x) else x for x in outputs], shape)


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _Value(torch.autograd.Function):
    """x, θ ↦ y."""

    @staticmethod
    def forward(ctx: Any, call: _Call, run: Callable[[list[Tensor]], list[Tensor]], *tensors: Tensor) -> Any:
        ctx.call = call
        with torch.enable_grad():
            call.leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
            call.outputs = run(call.leaves)
        return tuple(y.detach() for y in call.outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            return None, None, *_Gradient.apply(ctx.call, *cotangents)
        return None, None, *_gradient(ctx.call, cotangents, create_graph=False)


class _Gradient(torch.autograd.Function):
    """λ ↦ ∇⟨λ, f⟩ in x and θ; its derivative in λ goes on, that in x and θ is kept by the call."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *cotangents: Tensor) -> Any:
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
        found = _pull(ctx.first, directions, [*ctx.cotangents, *moving])
        local = iter(found[count:])
        call.local = [next(local) if leaf.requires_grad else None for leaf in call.leaves]
        return None, *found[:count]


def _gradient(call: _Call, cotangents: Sequence[Tensor], *, create_graph: bool) -> list[Tensor | None]:
    """∇⟨λ, f⟩ in those of x and θ that move."""
    wanted = [leaf for leaf in call.leaves if leaf.requires_grad]
    pairs = [(y, c) for y, c in zip(call.outputs, cotangents, strict=True) if y.requires_grad]
    if not wanted or not pairs:
        return [None] * len(call.leaves)
    outputs, given = zip(*pairs, strict=True)
    found = iter(
        torch.autograd.grad(
            outputs, wanted, given, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
    )
    return [next(found) if leaf.requires_grad else None for leaf in call.leaves]
