"""Jacobian of all outputs with respect to the parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Self

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.engines import Engine, EngineName
from curvescope.models.parameter_selection import Params
from curvescope.problem import Problem


class Jacobian(LinearOperator):
    """J = ∂z/∂θ: (outputs of all batches, one after the other) × (entries of the chosen blocks)."""

    def __init__(self, problem: Problem, *blocks: Params, engine: EngineName = "auto"):
        if not isinstance(problem, Problem):
            raise UsageError(f"expected a cs.Problem, got {type(problem).__name__}")
        self.problem, self.engine = problem, Engine(problem, engine)
        self.dtype, self.device = problem.dtype, problem.device
        self.space = self.columns = problem.space(*blocks)
        with torch.no_grad():
            self.output_shapes = [tuple(problem.outputs(b).shape) for b in problem.placed_batches("outputs")]
        self.shape = (sum(prod(shape) for shape in self.output_shapes), self.space.size)

    def block(self, columns: Params) -> Self:
        """Return the columns of the blocks that match."""
        other = copy.copy(self)
        other.space = other.columns = self.problem.space(columns)
        other.shape = (self.shape[0], other.space.size)
        return other

    def _matmat(self, V: Tensor) -> Tensor:
        return self.engine.consistent(lambda: self._push(V))

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.engine.consistent(lambda: self._pull(U))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Declare the model and the data constant inside; raise at the end if they have changed."""
        with self.engine.frozen():
            yield

    def _push(self, V: Tensor) -> Tensor:
        tangents = self.space.scatter_columns(V)
        batches = self.problem.placed_batches("Jacobian")
        return torch.cat([self.engine.jacobian(batch, tangents)[1].flatten(1).T for batch in batches])

    def _pull(self, U: Tensor) -> Tensor:
        total = torch.zeros(self.space.size, U.shape[1], dtype=self.dtype, device=self.device)
        start = 0
        for shape, batch in zip(self.output_shapes, self.problem.placed_batches("Jacobian"), strict=True):
            cotangents = U[start : start + prod(shape)].T.reshape(-1, *shape)
            tree = self.engine.jacobian_transpose(batch, self.space.parameter_names, cotangents)
            total += self.space.gather_columns(tree, U.shape[1])
            start += prod(shape)
        return total
