"""Operator over ranks that each have a share of the data; every rank has full vectors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.ranks import gather_objects, in_step, rank_and_size, shared_errors
from curvescope.core.seeds import Probe
from curvescope.distributed.sums import (
    ProductRequest,
    add_over_ranks,
    describe_request,
    frozen_on_all,
    run_on_all_ranks,
    state_digest,
)
from curvescope.models.parameter_selection import Params
from curvescope.operators import Jacobian, MonteCarloFisher
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.diagonals import (
    PASSES,
    DiagonalCost,
    DiagonalMethod,
    ExactDiagonal,
    diagonal_result,
    exact_diagonal,
)
from curvescope.problem import Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Local = CurvatureOperator | Jacobian


@final
class DataParallel(LinearOperator):
    """Operator of all data, made of one operator per rank on that rank's share.

    C = (1/N) Σ_ranks Σ_batches C_batch + diag(w) + λ I with the N of all ranks. It equals the operator that a
    single process has for all data, whatever the shares are, also if a rank has no data. A product takes one
    small sum in which the ranks agree, then one sum over ranks of all its columns together. A Jacobian has
    the rows of rank 0, then those of rank 1, and so on.

    An error on one rank is raised on all ranks. Every product, or the start and end of `frozen()`, checks
    that all ranks have the same model. Every rank must compute the same products in the same order.
    Algorithms compute the same bits on all ranks, also if the ranks have different numbers of threads. To get
    the same for your own vectors and preconditioners, compute them inside `with op.frozen():`.

    Args:
        op: A curvature operator or a Jacobian on a problem with this rank's batches: those of
            `distributed.share`, or its own data (`distributed.numbered`).
        group: Ranks; by default all.
    """

    def __init__(self, op: Local, *, group: ProcessGroup | None = None):
        if not isinstance(op, CurvatureOperator | Jacobian):
            raise UsageError(
                f"expected a curvature operator or a Jacobian, got a {type(op).__name__}",
                hint="wrap the parts of a sum or a product, each by itself",
            )
        self.op, self.group = op, group
        self.space, self.columns, self.problem = op.space, op.columns, op.problem
        self.dtype, self.device = op.dtype, op.device
        self.symmetric, self.psd = op.symmetric, op.psd
        share = op.problem.batches.share
        self._empty = share is not None and share.empty
        self._agreed_state: list[int] | None = None  # state that all ranks agreed on, inside `frozen()`
        with in_step(group):
            rank, self._ranks = rank_and_size()
            with shared_errors():
                if isinstance(op, MonteCarloFisher) and share is None and self._ranks > 1:
                    raise UsageError(
                        "a Monte-Carlo Fisher draws targets by the number of a sequence among all data, "
                        "and these batches are not numbered",
                        hint="distributed.numbered(batches), or distributed.share(batches)",
                    )
            heights = gather_objects(0 if self._empty else op.shape[0])
        self._agree()
        self._first_row = sum(heights[:rank])
        by_rows = isinstance(op, Jacobian)
        self.shape = (sum(heights) if by_rows else op.shape[0], op.shape[1])

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Return the model's own parameters with their names."""
        return self.problem.model.named_parameters()

    def block(self, rows: Params, columns: Params | None = None) -> Self:
        """Return the operator between blocks; of a Jacobian, some of its columns."""
        op = self.op
        if isinstance(op, CurvatureOperator):
            return type(self)(op.block(rows, columns), group=self.group)
        if columns is not None:
            raise UsageError("a Jacobian has blocks of columns only, got rows too")
        return type(self)(op.block(rows), group=self.group)

    def in_blocks(self) -> LinearOperator:
        if not isinstance(self.op, CurvatureOperator):
            return super().in_blocks()
        reordered = self.op.in_blocks()
        return self if reordered is self.op else type(self)(reordered, group=self.group)

    def random_squares(self, count: int, *, probe: Probe, seed: int, at_once: int) -> Iterator[Tensor]:
        """Yield columns (n, k) whose mean is the diagonal of a GGN, without products; see
        `operators.curvature`.
        """
        squares = getattr(self.op, "random_squares", None)
        if squares is None or (self.problem.batches.share is None and self._ranks > 1):
            raise UsageError(
                f"expected a GGN on numbered shares of the data to draw squares of, got {self.op!r}"
            )
        own_squares = (
            iter(()) if not self._counts else squares(count, probe=probe, seed=seed, at_once=at_once)
        )
        shift = getattr(self.op, "shift", None)
        added = 0 if shift is None else shift.diagonal(self.space)[:, None]
        for start in range(0, count, at_once):
            width = min(at_once, count - start)

            def drawn(width: int = width) -> tuple[Tensor, float, list[int]]:
                if not self._counts:
                    return self._zeros(self.space.size, width), 0.0, self._state()
                N = self.problem.num_terms
                return (next(own_squares) - added) * N, N, self._state()

            part, N = run_on_all_ranks(drawn, device=self.device, group=self.group)
            yield add_over_ranks(part, self.group) / self._terms(N) + added

    def exact_diagonal(
        self, *, method: DiagonalMethod | None = None, max_passes: int = PASSES
    ) -> ExactDiagonal:
        """Return the diagonal, as `cs.exact_diagonal` does; each rank runs the passes of its own data."""
        op, cost = self.op, DiagonalCost(0, method or "outputs")
        if not isinstance(op, CurvatureOperator):
            raise UsageError("expected a curvature operator with a diagonal, got a Jacobian")
        plain = copy.copy(op)
        plain.shift = None

        def own() -> tuple[Tensor, float, list[int]]:
            nonlocal cost
            if not self._counts:
                return self._zeros(op.shape[0]).double(), 0.0, self._state()
            diagonal, N = exact_diagonal(plain, method=method, max_passes=max_passes), self.problem.num_terms
            cost = diagonal.cost
            return diagonal.values.double() * N, N, self._state()

        part, N = run_on_all_ranks(own, device=self.device, group=self.group)
        values = add_over_ranks(part, self.group) / self._terms(N)
        if op.shift is not None:
            values += op.shift.diagonal(op.space).double()
        return diagonal_result(values, op, cost)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Treat the products inside as one computation: raise on all ranks if one detects a change."""
        engines = [self.op.engine] if self._counts else []
        with frozen_on_all(engines, self.group):
            self._agree()
            before, self._agreed_state = self._agreed_state, self._state()
            try:
                yield
            finally:
                self._agreed_state = before
            self._agree()

    def _matmat(self, V: Tensor) -> Tensor:
        if isinstance(self.op, Jacobian):
            return self._pushed(V)
        return self._summed(V, self.op.space, self.op.columns)

    def _rmatmat(self, U: Tensor) -> Tensor:
        if isinstance(self.op, Jacobian):
            return self._pulled(U)
        return self._summed(U, self.op.columns, self.op.space)

    def _summed(self, V: Tensor, rows: ParamSpace, columns: ParamSpace) -> Tensor:
        op = self.op
        assert isinstance(op, CurvatureOperator)

        def own() -> tuple[Tensor, float, list[int]]:
            if not self._counts:
                return self._zeros(rows.size, V.shape[1]), 0.0, self._state()
            return *op.undivided(V, rows, columns), self._state()

        part, N = self._sum_over_ranks(own, lambda: describe_request(op, V, rows, columns))
        return op.completed(add_over_ranks(part, self.group), self._terms(N), V, rows, columns)

    def _pushed(self, V: Tensor) -> Tensor:
        """Return J V with this rank's rows filled in."""

        def own() -> tuple[Tensor, float, list[int]]:
            total = self._zeros(self.shape[0], V.shape[1])
            if not self._empty:
                total[self._own_rows()] = self.op._matmat(V)
            return total, 0.0, self._state()

        part, _ = self._sum_over_ranks(own, lambda: describe_request(self.op, V, self.op.columns))
        return add_over_ranks(part, self.group)

    def _pulled(self, U: Tensor) -> Tensor:
        """Return Jᵀ U: the sum over the rows of all ranks."""

        def own() -> tuple[Tensor, float, list[int]]:
            if self._empty:
                return self._zeros(self.shape[1], U.shape[1]), 0.0, self._state()
            return self.op._rmatmat(U[self._own_rows()]), 0.0, self._state()

        part, _ = self._sum_over_ranks(own, lambda: describe_request(self.op, U, self.op.columns))
        return add_over_ranks(part, self.group)

    def _sum_over_ranks(
        self, own: Callable[[], tuple[Tensor, float, list[int]]], ask: Callable[[], ProductRequest]
    ) -> tuple[Tensor, float]:
        """Return the sum over ranks of `own`, and the N of all ranks."""
        return run_on_all_ranks(own, device=self.device, group=self.group, ask=ask)

    @property
    def _counts(self) -> bool:
        """Return True if this rank has a term with nonzero weight."""
        return not self._empty and self.problem.num_terms > 0

    def _terms(self, N: float) -> float:
        """Divisor of a sum over ranks: 1 for a loss that is a plain sum."""
        return N if self.problem.loss.is_mean else 1.0

    def _own_rows(self) -> slice:
        return slice(self._first_row, self._first_row + self.op.shape[0])

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _state(self) -> list[int]:
        return state_digest(self.problem, data=False) if self._agreed_state is None else self._agreed_state

    def _agree(self) -> None:
        """Raise unless all ranks have the same model."""
        run_on_all_ranks(lambda: (True, 0.0, self._state()), device=self.device, group=self.group)


def value_and_gradient(
    problem: Problem, *patterns: Params, group: ProcessGroup | None = None
) -> tuple[float, Tensor]:
    """L(θ) = (1/N) Σ_ranks Σ_t w_t ℓ_t and its gradient, (n,), the same on every rank. All ranks must call
    it.

    Args:
        problem: Problem with this rank's share, as for `DataParallel`.
        patterns: Blocks of the gradient; by default all trained ones.
        group: Ranks; by default all.
    """
    batches, space = problem.batches, problem.space(*patterns)

    def own() -> tuple[tuple[Tensor, Tensor], float, list[int]]:
        words, N = state_digest(problem, data=False), problem.num_terms
        value = torch.zeros(1, dtype=torch.float64)
        if (batches.share is not None and batches.share.empty) or N == 0:
            return (value, torch.zeros(space.size, dtype=problem.dtype, device=problem.device)), 0.0, words
        found, gradient = problem.value_and_gradient(*patterns)
        return (value + found * N, gradient * N), N, words

    (value, gradient), N = run_on_all_ranks(own, device=problem.device, group=group)
    N = N if problem.loss.is_mean else 1.0
    total = add_over_ranks(value.to(problem.device), group)
    return float(total) / N, add_over_ranks(gradient, group) / N
