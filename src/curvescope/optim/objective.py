"""What one step minimises: a loss with its graph, its gradient, and products with its curvature.

With L(θ) the loss that a closure returned, z the outputs it was made of and J = ∂z/∂θ:

    hessian   ∇²L v            one more backward pass through the graph of the gradient
    ggn       Jᵀ (∂²L/∂z²) J v   three backward passes: J v by transposing twice, the loss, Jᵀ
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import grad

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.operator import LinearOperator
from curvescope.problem import Problem

Curvature = Literal["hessian", "ggn"]
Made = Tensor | tuple[Tensor, Tensor] | Problem
Closure = Callable[[], Made]
"""What `step` is given: it returns the loss with its graph; (loss, outputs); or a `cs.Problem`."""
FREED = "through the graph a second time"  # of PyTorch's message


class Parts(NamedTuple):
    """A loss, the outputs it is made of where they are known, and the problem where there is one."""

    loss: Tensor
    outputs: list[Tensor]
    problem: Problem | None


def parts_of(made: Made) -> Parts:
    """The loss of what a closure returned, one real number."""
    if isinstance(made, Problem):
        return _of_problem(made)
    loss, outputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            "expected a closure that returns the loss as a tensor of one number, (loss, outputs), or a "
            f"cs.Problem, got {_words(loss)}"
        )
    return Parts(loss.reshape(()), [] if outputs is None else [outputs], None)


def _of_problem(problem: Problem) -> Parts:
    """L(θ) over all batches of a problem, as one graph."""
    sums, outputs = [], []
    for batch in problem.placed_batches("loss"):
        outputs.append(problem.outputs(batch))
        sums.append(problem.loss.sum(outputs[-1], batch.targets, batch.weights))
    return Parts(torch.stack(sums).sum() / problem.num_terms, outputs, problem)


def _words(made: object) -> str:
    return f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__


@final
class Objective:
    """A loss at the parameters of a step. Vectors are lists of tensors, one for each parameter.

    Args:
        made: What the closure returned.
        parameters: Those that the optimiser moves.
        count: Called with "gradients", "products" or "block_products" whenever one is taken.
    """

    def __init__(self, made: Made, parameters: Sequence[Tensor], count: Callable[[str], None]):
        self.loss, self.outputs, self.problem = parts_of(made)
        self.parameters, self._count = list(parameters), count
        if not self.loss.requires_grad:
            raise UsageError(
                "the loss has no graph",
                hint="return the loss itself, not loss.item() and not under torch.no_grad()",
            )
        if not bool(torch.isfinite(self.loss)):
            raise CurvescopeError(
                f"the loss is {float(self.loss.detach())}", hint="use a smaller lr, or look at the data"
            )
        self._gradient: list[Tensor] = []
        self._along: tuple[list[Tensor], list[Tensor], list[Tensor]] | None = None

    def gradient(self, *, curved: bool) -> list[Tensor]:
        """∇L; `curved` keeps its graph, for products and further gradients."""
        self._count("gradients")
        try:
            found = grad(
                self.loss, self.parameters, create_graph=curved, retain_graph=curved, allow_unused=True
            )
        except RuntimeError as error:
            if FREED not in str(error):
                raise
            raise UsageError(
                "the graph of the loss is gone", hint="leave loss.backward() out of the closure"
            ) from error
        if all(g is None for g in found):
            raise UsageError("the loss depends on none of the optimiser's parameters")
        self._gradient = _filled(found, self.parameters)
        return [g.detach() for g in self._gradient]

    def product(self, v: Sequence[Tensor], curvature: Curvature = "hessian") -> list[Tensor]:
        """∇²L v, or that of the generalised Gauss-Newton matrix."""
        self._count("products")
        return self._ggn(v) if curvature == "ggn" else self._hessian(v, range(len(self.parameters)))

    def block_product(self, index: int, v: Tensor) -> Tensor:
        """The Hessian's block of one parameter, with itself."""
        self._count("block_products")
        return self._hessian([v], [index])[0]

    def drawn_gradient(self, loss: Tensor) -> list[Tensor]:
        """The gradient of another loss of the same outputs."""
        self._count("gradients")
        return _filled(grad(loss, self.parameters, retain_graph=True, allow_unused=True), self.parameters)

    def _hessian(self, v: Sequence[Tensor], at: Sequence[int]) -> list[Tensor]:
        parameters = [self.parameters[i] for i in at]
        bent = [(self._gradient[i], u) for i, u in zip(at, v, strict=True) if self._gradient[i].requires_grad]
        if not bent:
            return [torch.zeros_like(p) for p in parameters]
        ends, directions = zip(*bent, strict=True)
        return _filled(grad(ends, parameters, directions, retain_graph=True, allow_unused=True), parameters)

    def _ggn(self, v: Sequence[Tensor]) -> list[Tensor]:
        if not self.outputs:
            raise UsageError(
                "a Gauss-Newton product needs the outputs", hint="return (loss, outputs), or a cs.Problem"
            )
        if self._along is None:
            slope = _filled(grad(self.loss, self.outputs, create_graph=True), self.outputs)
            u = [torch.zeros_like(z, requires_grad=True) for z in self.outputs]
            pulled = grad(self.outputs, self.parameters, u, create_graph=True, allow_unused=True)
            self._along = slope, u, _filled(pulled, self.parameters)
        slope, u, pulled = self._along
        moved = [(p, d) for p, d in zip(pulled, v, strict=True) if p.requires_grad]
        ends, directions = zip(*moved, strict=True)
        Jv = _filled(grad(ends, u, directions, retain_graph=True, allow_unused=True), u)
        bent = [(s, t) for s, t in zip(slope, Jv, strict=True) if s.requires_grad]
        if not bent:
            return [torch.zeros_like(p) for p in self.parameters]
        ends, directions = zip(*bent, strict=True)
        HJv = _filled(
            grad(ends, self.outputs, directions, retain_graph=True, allow_unused=True), self.outputs
        )
        found = grad(self.outputs, self.parameters, HJv, retain_graph=True, allow_unused=True)
        return _filled(found, self.parameters)


@final
class StepCurvature(LinearOperator):
    """The curvature of an objective as an operator on flat vectors, or of the block of one parameter."""

    symmetric = True

    def __init__(self, objective: Objective, curvature: Curvature = "hessian", *, block: int | None = None):
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
    """All entries, one tensor after the other: (n,)."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten(v: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a vector (n,), in the shapes of these tensors."""
    ends = torch.tensor([0, *(t.numel() for t in like)]).cumsum(0).tolist()
    return [v[i:j].reshape(t.shape) for (i, j), t in zip(pairwise(ends), like, strict=True)]


def _filled(found: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Zeros where autograd found no way."""
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, like, strict=True)]
