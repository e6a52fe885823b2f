"""Objective of one step: a loss with its graph, its gradient, and products with its curvature.

With L(θ) the loss that a closure returned, z the outputs it was made of and J = ∂z/∂θ:

    hessian   ∇²L v            one more backward pass through the graph of the gradient
    ggn       Jᵀ (∂²L/∂z²) J v   three backward passes: J v by transposing twice, the loss, Jᵀ
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.finite_differences import difference_error
from curvescope.core.operator import LinearOperator
from curvescope.core.seeds import generator
from curvescope.core.tensors import constant_rows, graph_leaves
from curvescope.engines.vjp import refuse_once_differentiable
from curvescope.kernels.function_mode import PlainAttention
from curvescope.problem import Problem

Curvature = Literal["hessian", "ggn"]
ClosureResult = Tensor | tuple[Tensor, Tensor] | Mapping[str, Any] | Problem | Any
Closure = Callable[[], ClosureResult]
"""Closure for `step`: it returns the loss with its graph, (loss, outputs), an object with `.loss` or the key
"loss" like outputs of Hugging Face models, or a `cs.Problem`.
"""
AUTOGRAD_ERRORS = {  # text in PyTorch's message: its meaning here, and a hint
    "through the graph a second time": (
        "the graph of the loss is gone", "leave loss.backward() out of the closure",
    ),
    "does not currently support double backward": (
        "a compiled module has no second derivative", "call the module itself in the closure: net._orig_mod",
    ),
}  # fmt: skip


class LossParts(NamedTuple):
    """A loss, its outputs if known, and its problem if there is one."""

    loss: Tensor
    outputs: list[Tensor]
    problem: Problem | None


def parts_of(made: ClosureResult) -> LossParts:
    """Return the parts of a closure's result; the loss must be one real number."""
    if isinstance(made, Problem):
        return _of_problem(made)
    loss, outputs = made if type(made) is tuple and len(made) == 2 else (made, None)
    if not isinstance(loss, Tensor):
        loss = loss.get("loss") if isinstance(loss, Mapping) else getattr(loss, "loss", loss)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            "expected a closure that returns the loss as a tensor of one number, (loss, outputs), an "
            f"object with a loss, or a cs.Problem, got {_words(made if loss is None else loss)}"
        )
    return LossParts(loss.reshape(()), [] if outputs is None else [outputs], None)


def _of_problem(problem: Problem) -> LossParts:
    """L(θ) over all batches of a problem, as one graph."""
    sums, outputs = [], []
    for batch in problem.placed_batches("loss"):
        outputs.append(problem.outputs(batch))
        sums.append(problem.loss.sum(outputs[-1], batch.targets, batch.weights))
    return LossParts(torch.stack(sums).sum() / problem.num_terms, outputs, problem)


def _words(made: object) -> str:
    return f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__


@final
class StepObjective:
    """Loss at the parameters of a step. Vectors are lists of tensors, one per parameter.

    `parameters` are those of the optimizer that are in the graph of the loss.

    Args:
        made: Result of the closure.
        parameters: Parameters that the optimizer trains.
        count: Called with "gradients", "products" or "block_products" for each one computed.
    """

    def __init__(self, made: ClosureResult, parameters: Sequence[Tensor], count: Callable[[str], None]):
        self.loss, self.outputs, self.problem = parts_of(made)
        self._count = count
        if not self.loss.requires_grad:
            raise UsageError(
                "the loss has no graph",
                hint="return the loss itself, not loss.item() and not under torch.no_grad()",
            )
        if not bool(torch.isfinite(self.loss)):
            raise CurvescopeError(
                f"the loss is {float(self.loss.detach())}", hint="use a smaller lr, or check the data"
            )
        used = {id(leaf) for leaf in graph_leaves(self.loss)} | {
            id(self.loss)
        }  # the loss may be a parameter itself
        self.parameters = [p for p in parameters if id(p) in used]
        if not self.parameters:
            raise UsageError("the loss depends on none of the optimizer's parameters")
        _refuse_hooks(self.parameters)
        self.check: Callable[[], None] | None = None  # called once, before the first product
        self._gradient: list[Tensor] = []
        self._along: tuple[list[Tensor], list[Tensor], list[Tensor]] | None = None

    def gradient(self, *, curved: bool) -> list[Tensor]:
        """∇L; `curved` keeps its graph, for products and further gradients."""
        self._count("gradients")
        if curved:
            refuse_once_differentiable(self.loss)
        self._gradient = _grad([self.loss], self.parameters, create_graph=curved, retain_graph=curved)
        return [g.detach() for g in self._gradient]

    def product(self, v: Sequence[Tensor], curvature: Curvature = "hessian") -> list[Tensor]:
        """Return ∇²L v, or the product with the generalized Gauss-Newton matrix."""
        self._count("products")
        return self._ggn(v) if curvature == "ggn" else self._hessian(v, range(len(self.parameters)))

    def block_product(self, index: int, v: Tensor) -> Tensor:
        """Return the product with the diagonal block of the Hessian for one parameter."""
        self._count("block_products")
        return self._hessian([v], [index])[0]

    def drawn_gradient(self, loss: Tensor) -> list[Tensor]:
        """Return the gradient of another loss of the same outputs."""
        self._count("gradients")
        return _grad([loss], self.parameters)

    def _hessian(self, v: Sequence[Tensor], at: Sequence[int]) -> list[Tensor]:
        check, self.check = self.check, None
        if check is not None:
            check()
        parameters = [self.parameters[i] for i in at]
        bent = [(self._gradient[i], u) for i, u in zip(at, v, strict=True) if self._gradient[i].requires_grad]
        if not bent:
            return [torch.zeros_like(p) for p in parameters]
        ends, directions = zip(*bent, strict=True)
        return _grad(ends, parameters, directions)

    def _ggn(self, v: Sequence[Tensor]) -> list[Tensor]:
        if not self.outputs:
            raise UsageError(
                "a Gauss-Newton product needs the outputs", hint="return (loss, outputs), or a cs.Problem"
            )
        if self._along is None:
            slope = _grad([self.loss], self.outputs, create_graph=True)
            u = [torch.zeros_like(z, requires_grad=True) for z in self.outputs]
            self._along = slope, u, _grad(self.outputs, self.parameters, u, create_graph=True)
        slope, u, pulled = self._along
        connected = [(p, d) for p, d in zip(pulled, v, strict=True) if p.requires_grad]
        ends, directions = zip(*connected, strict=True)
        Jv = _grad(ends, u, directions)
        bent = [(s, t) for s, t in zip(slope, Jv, strict=True) if s.requires_grad]
        if not bent:
            return [torch.zeros_like(p) for p in self.parameters]
        ends, directions = zip(*bent, strict=True)
        HJv = _grad(ends, self.outputs, directions)
        return _grad(self.outputs, self.parameters, HJv)


def refuse_wrong_functions(objective: StepObjective, closure: Closure, names: Sequence[str]) -> None:
    """Raise if custom functions, or backward hooks of modules, make Hessian products wrong.

    One product is compared with finite differences of the gradient.

    Args:
        objective: The loss of this step.
        closure: Returns the loss again, at changed parameters.
        names: Names of the custom functions in its graph.
    """
    parameters, source = objective.parameters, generator(0)
    original = [p.detach().clone() for p in parameters]
    v = [
        torch.randn(p.shape, generator=source).to(p) * (float(p.square().mean().sqrt()) or 1.0)
        for p in original
    ]
    at = {id(p): d for p, d in zip(parameters, v, strict=True)}
    for leaf, row in constant_rows(objective.loss):
        if id(leaf) in at:
            at[id(leaf)][row] = 0
    product = objective._hessian(v, range(len(v)))

    def slopes(step: float) -> list[Tensor]:
        try:
            for p, x, d in zip(parameters, original, v, strict=True):
                p.data.copy_(
                    x + step * d
                )  # through .data, because autograd still needs the graph of this step
            with torch.enable_grad(), PlainAttention():
                return _grad([parts_of(closure()).loss], parameters, retain_graph=False)
        finally:
            for p, x in zip(parameters, original, strict=True):
                p.data.copy_(x)

    error = difference_error(product, slopes, original[0].dtype)
    if error is not None:
        raise CurvescopeError(
            f"the loss of the closure uses {', '.join(names)}: expected H v, got products that differ from a "
            f"finite difference by {error:.1%}",
            hint="write a backward that is differentiable itself; remove backward hooks of modules",
        )


@final
class StepCurvature(LinearOperator):
    """The curvature of an objective as an operator on flat vectors, or of the block of one parameter."""

    symmetric = True

    def __init__(
        self, objective: StepObjective, curvature: Curvature = "hessian", *, block: int | None = None
    ):
        self.objective, self.block = objective, block
        self.curvature: Curvature = curvature
        self.parameters = objective.parameters if block is None else [objective.parameters[block]]
        n = sum(p.numel() for p in self.parameters)
        self.shape, self.psd = (n, n), False
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device

    def _matmat(self, V: Tensor) -> Tensor:
        return torch.stack([self._product(v) for v in V.T], dim=1)

    def _product(self, v: Tensor) -> Tensor:
        parts = unflatten(v, self.parameters)
        if self.block is not None:
            return flatten([self.objective.block_product(self.block, parts[0])])
        return flatten(self.objective.product(parts, self.curvature))


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate all entries of the tensors: (n,)."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten(v: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector (n,) into the shapes of these tensors."""
    ends = torch.tensor([0, *(t.numel() for t in like)]).cumsum(0).tolist()
    return [v[i:j].reshape(t.shape) for (i, j), t in zip(pairwise(ends), like, strict=True)]


def _grad(
    ends: Sequence[Tensor],
    to: Sequence[Tensor],
    weights: Sequence[Tensor] | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool = True,
) -> list[Tensor]:
    """∂(Σ weights · ends)/∂to, zero if autograd finds no path."""
    options = {"create_graph": create_graph, "retain_graph": retain_graph, "allow_unused": True}
    try:
        gradients = torch.autograd.grad(ends, to, weights, **options)
    except RuntimeError as error:
        explanation = next((words for text, words in AUTOGRAD_ERRORS.items() if text in str(error)), None)
        if explanation is None:
            raise
        raise UsageError(explanation[0], hint=explanation[1]) from error
    return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, to, strict=True)]


def _refuse_hooks(parameters: Sequence[Tensor]) -> None:
    """Raise for hooks on gradients, such as clipping: products would not belong to a matrix, or would skip
    the hook.
    """
    for p in parameters:
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"a parameter of shape {tuple(p.shape)} has a hook on its gradient, which would change "
                "curvature too",
                hint="remove it; use a smaller lr or a smaller loss instead of clipping",
            )
