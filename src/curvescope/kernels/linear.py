"""Linear map y = x Wᵀ + b whose second derivative accumulates inside its matrix products.

The first derivative is dx = g W, dW = gᵀ x, db = Σ g. For cotangents a, A, α of these,

    hg = a Wᵀ + x Aᵀ + α,     hx = g A,     hW = gᵀ a,

and hg is written once: each further term is added by the product that computes it. (Autograd computes all
terms, and then reads and writes them again.) hx is not needed before the backward pass reaches the map
itself, with a cotangent h of y; it is computed there as dx = h W + g A. Until then only references to g and A
are stored (`Late`), and no tensor of the size of x. Graphs built only for a second derivative need the graph
of dW and db, but not their values: `numbers=False` skips that product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from curvescope.kernels.autograd import Function
from curvescope.kernels.backends import (
    Tensors,
    forward_mode,
    launch,
    recorded,
    refuse_batched,
    refuse_third,
    transformed,
)
from curvescope.kernels.tensors import given


def stands_for_leaf(t: Tensor) -> Tensor:
    """Mark t as a copy of a leaf, so that the values of its derivative are not computed either."""
    t.stands_for_leaf = True  # pyright: ignore[reportAttributeAccessIssue]
    return t


def is_of_leaf(t: Tensor) -> bool:
    """Return True if t is a leaf of the graph, a view of one, or marked as a copy of one."""
    base = t if t._base is None else t._base
    return base.is_leaf or getattr(base, "stands_for_leaf", False)


def twin(leaf: Tensor) -> Tensor:
    """Create a second leaf with the same values, which first derivatives use instead of the leaf.

    The second derivative in a weight has two parts, one through the first derivative and one through the
    output, and half of a backward pass lies between them. With two leaves, the first part of all weights, a
    full vector, need not wait for the second.
    """
    leaf.twin = leaf.detach().requires_grad_()  # pyright: ignore[reportAttributeAccessIssue]
    return leaf.twin  # pyright: ignore[reportAttributeAccessIssue]


def twin_of(t: Tensor) -> Tensor:
    """Return the twin of a leaf, or t itself if it has none."""
    return getattr(t, "twin", t)


def linear(
    x: Tensor, W: Tensor, b: Tensor | None = None, *, second_order: bool = True, numbers: bool = True
) -> Tensor:
    """x Wᵀ + b for x (…, d), W (V, d) of any strides, b (V,).

    Args:
        second_order: False records only the derivative of the first ones in the cotangent of y.
        numbers: If False, dW and db are zeros when a graph is built; second derivatives through them are
            still right.
    """
    if transformed() or forward_mode() or not torch.is_grad_enabled():
        return F.linear(x, W, b)
    return _Linear.apply(x, W, b, second_order, numbers)[0]


@final
class DeferredTerms:
    """Deferred terms g A of a map's dx, stored as pairs by its derivative and consumed in the same pass."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, Tensor, Tensor]] = []

    def add(self, g: Tensor, A: Tensor) -> None:
        """Store a term that is added to dx later in this pass."""
        self._noted.append((torch._C._current_graph_task_id(), g, A))

    def take_all(self) -> list[tuple[Tensor, Tensor]]:
        """Return and clear the terms of this pass; drop terms left by an aborted pass."""
        now, noted, self._noted = torch._C._current_graph_task_id(), self._noted, []
        return [(g, A) for task, g, A in noted if task == now]


class _Linear(Function):
    """x, W, b ↦ y, and an empty token tensor that orders the derivative before the map."""

    @staticmethod
    def forward(x: Tensor, W: Tensor, b: Tensor | None, second_order: bool, numbers: bool) -> Any:
        y = F.linear(x, W, b)
        y = torch.ops.aten._unsafe_view(
            y, y.shape
        )  # of a sum that nobody has; as a view it could not be written to
        return y, x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, W, _, *ctx.how = inputs
        ctx.late = DeferredTerms()
        ctx.save_for_backward(x, W, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        g, late = cotangents[0], ctx.late.take_all()
        needs, (x, W, token), (second_order, numbers) = ctx.needs_input_grad[:3], ctx.saved_tensors, ctx.how
        if g is None and not late:
            return (None,) * 5
        if not recorded():
            held, along = [g for g, _ in late], [A for _, A in late]
            return *launch(_first(needs), (x, W, *held), (g, *along)), None, None
        assert g is not None, "terms are deferred only if no graph is built"
        refuse_batched(g)
        x, W, token = (x, twin_of(W), token) if second_order else (x.detach(), W.detach(), None)
        return *_LinearGradient.apply(g, x, W, token, needs, numbers, ctx.late), None, None


class _LinearGradient(Function):
    """g, x, W ↦ dx, dW, db; None where not needed."""

    @staticmethod
    def forward(
        g: Tensor,
        x: Tensor,
        W: Tensor,
        token: Tensor | None,
        needs: tuple[bool, ...],
        numbers: bool,
        late: DeferredTerms,
    ) -> Any:
        dx, dW, db = _first((needs[0], *(need and numbers for need in needs[1:])))((x, W), (g[None],))
        if not numbers:
            nothing = g.new_zeros(())
            dW = nothing.expand(1, *W.shape) if needs[1] else None
            db = nothing.expand(1, W.shape[0]) if needs[2] else None
        return tuple(None if t is None else t[0] for t in (dx, dW, db))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.late = inputs[-1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> Any:
        refuse_third()
        needs, A = ctx.needs_input_grad[:3], directions[1]
        if needs[1] and A is not None and not recorded():
            ctx.late.add(ctx.saved_tensors[0], A)
            needs = (needs[0], False, needs[2])
        if all(t is None for t in directions) or not any(needs):
            return (None,) * 7
        return *launch(_second(needs), ctx.saved_tensors, directions), *(None,) * 4


def _first(needs: tuple[bool, ...]) -> Any:
    """dx, dW, db of cotangents h (k, …, V), as `launch` calls it; terms g A of dx have g as constants."""

    def core(constants: Tensors, directions: Tensors) -> Tensors:
        x, W, *held = map(given, constants)
        h, *along = directions
        rows = None if h is None else h.reshape(len(h), -1, h.shape[-1])
        dx = _sum_of_products(x, rows, W, held, along) if needs[0] else None
        dW = _each(lambda r: torch.mm(r.t(), _rows(x)), rows) if needs[1] and rows is not None else None
        return dx, dW, rows.sum(dim=1) if needs[2] and rows is not None else None

    return core


def _sum_of_products(
    x: Tensor, rows: Tensor | None, W: Tensor, held: Sequence[Tensor], along: Tensors
) -> Tensor:
    """h W + Σ g A, (k, *x.shape), one direction after the other; each product adds to the one before."""
    directions = [given(A) for A in along]
    k = len(directions[0]) if rows is None else len(rows)
    total = x.new_empty(k, _rows(x).shape[0], x.shape[-1])
    for j, out in enumerate(total):
        terms = [] if rows is None else [(rows[j], W)]
        terms += [(_rows(g), A[j]) for g, A in zip(held, directions, strict=True)]
        for number, (left, right) in enumerate(terms):
            out.addmm_(left, right) if number else torch.mm(left, right, out=out)
    return total.view(k, *x.shape)


def _second(needs: tuple[bool, ...]) -> Any:
    """hg, hx, hW of cotangents a (k, …, d), A (k, V, d), α (k, V), None where it is zero."""

    def core(constants: Tensors, directions: Tensors) -> Tensors:
        g, x, W = map(given, constants)
        a, A, alpha = directions
        a = None if a is None else a.reshape(len(a), -1, a.shape[-1])
        hg = _tangent(_rows(x), W, a, A, alpha) if needs[0] else None
        hx = _each(lambda A: torch.mm(_rows(g), A).view(x.shape), A) if needs[1] and A is not None else None
        hW = _each(lambda a: torch.mm(_rows(g).t(), a), a) if needs[2] and a is not None else None
        return None if hg is None else hg.view(len(hg), *g.shape), hx, hW

    return core


def _each(product: Callable[[Tensor], Tensor], directions: Tensor) -> Tensor:
    """Compute the products of k directions (k, …), with one matrix product each."""
    if len(directions) == 1:
        return product(directions[0])[None]
    return torch.stack([product(direction) for direction in directions])


def _tangent(x: Tensor, W: Tensor, a: Tensor | None, A: Tensor | None, alpha: Tensor | None) -> Tensor:
    """a Wᵀ + x Aᵀ + α, (k, T, V), one direction after the other."""
    k = next(len(t) for t in (a, A, alpha) if t is not None)
    total = x.new_empty(k, len(x), len(W))
    for j, out in enumerate(total):
        terms = [(a[j], W.t())] if a is not None else []
        terms += [(x, A[j].t())] if A is not None else []
        start = None if alpha is None else alpha[j]
        if not terms:
            out.copy_(given(start))
        for number, (left, right) in enumerate(terms):
            if number:
                out.addmm_(left, right)
            elif start is None:
                torch.mm(left, right, out=out)
            else:
                torch.addmm(start, left, right, out=out)
    return total


def _rows(x: Tensor) -> Tensor:
    """Reshape (…, d) to a matrix."""
    return x.reshape(-1, x.shape[-1])
