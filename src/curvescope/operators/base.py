"""Base class of all curvature operators: a problem, row and column spaces, and a sum over batches.

Weight decay w_b for block b and damping λ add a diagonal to an operator: C + diag(w) + λ I. For the Hessian
this is the Hessian of

    L(θ) + ½ Σ_b w_b ‖θ_b‖² + ½ λ ‖θ‖².
"""

from __future__ import annotations

import copy
import fnmatch
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Self

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.operator import LinearOperator
from curvescope.core.operator.first_product_hooks import notify_first_product
from curvescope.core.ranks import Division, current_division
from curvescope.engines import Engine, EngineName, ProductForm
from curvescope.losses.custom import unsplit
from curvescope.models.model import Model
from curvescope.models.parameter_selection import Params
from curvescope.operators.samples.batch_coupling import cut_sequences, refuse_cuts
from curvescope.problem import Problem, check_finite


class CurvatureOperator(LinearOperator):
    """C = (1/N) Σ_batches C_batch + diag(w) + λ I over the parameters of a problem, or a block of it.

    Rows and columns are spaces of named blocks; a product streams over the batches and holds one batch and a
    bounded number of columns in memory. The model is not changed.

    Args:
        engine: How products are executed; see docs/conventions.md.
        chunk: Number of columns at a time; by default chosen from the free memory.
        checkpoint: Recompute layers instead of storing them: less memory, two to three times the time
            (docs/performance.md).
        damping: λ of C + λ I, at least 0.
        weight_decay: w of C + diag(w): a number for all blocks, or numbers by globs of blocks. "matrices"
            means all blocks with two axes or more: `{"matrices": 0.1}`.
    """

    problem: Problem
    space: ParamSpace
    columns: ParamSpace

    def __init__(
        self,
        problem: Problem,
        *blocks: Params,
        engine: EngineName = "auto",
        chunk: int | None = None,
        checkpoint: bool = False,
        damping: float = 0.0,
        weight_decay: WeightDecay = 0.0,
    ):
        if not isinstance(problem, Problem):
            raise UsageError(f"expected a cs.Problem, got {type(problem).__name__}")
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise UsageError(f"expected a chunk of at least 1 column, got {chunk!r}")
        if self.needs_outputs and not problem.loss.has_outputs:
            raise unsplit(type(self).__name__)
        problem.check_structure()
        self.problem, self.chunk = problem, chunk
        self.engine = Engine(problem, engine, checkpoint=checkpoint)
        self.dtype, self.device = problem.dtype, problem.device
        self.shift = shift(problem.model, damping, weight_decay)
        self._set_spaces(problem.space(*blocks), None)

    def _set_spaces(self, rows: ParamSpace, columns: ParamSpace | None) -> None:
        self.space, self.columns = rows, rows if columns is None else columns
        self.shape = (self.space.size, self.columns.size)
        left, right = map(self.problem.model.shards, (self.space, self.columns))
        if left is not None and right is not None:
            self.shards, self.shape = (left, right), (left.length, right.length)
        self.symmetric = self.space.segments == self.columns.segments
        self.psd = self.symmetric and self.always_psd

    always_psd: bool = False
    needs_outputs: bool = True  # True if products need the outputs separately from the loss

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the model's parameters with the names that its optimizer has."""
        return self.problem.model.named_parameters()

    def block(self, rows: Params, columns: Params | None = None) -> Self:
        """Return the operator between the blocks that match `rows` and those that match `columns`.

        `H.block("L0.W_Q", "L0.W_K")` is rectangular, `H.block("L0.*")` square and symmetric. Names are looked
        up in all blocks of the problem, even if this operator has a selection of them.
        """
        other = copy.copy(self)
        chosen = self.problem.space(rows)
        other._set_spaces(chosen, None if columns is None else self.problem.space(columns))
        return other

    def on(self, problem: Problem) -> Self:
        """Return the same operator on other data of the same model, with a new engine."""
        other = copy.copy(self)
        other.problem, other.engine = problem, self.engine.of(problem)
        return other

    def in_blocks(self) -> Self:
        """Return the same operator with rows and columns in block order."""
        if not (self.space.whole or self.columns.whole):
            return self
        other = copy.copy(self)
        other._set_spaces(self.space.in_blocks(), self.columns.in_blocks())
        return other

    @property
    @abstractmethod
    def form(self) -> ProductForm:
        """Form that is summed over the batches."""

    def _matmat(self, V: Tensor) -> Tensor:
        return self._stream(V, self.space, self.columns)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self._stream(U, self.columns, self.space)

    def _stream(self, V: Tensor, rows: ParamSpace, columns: ParamSpace) -> Tensor:
        """Compute (1/N) Σ_batches; ranks that divide their products compute a part each."""
        notify_first_product(self)
        division = self._division()
        total, N = (
            self.undivided(V, rows, columns)
            if division is None
            else division.undivided(self, V, rows, columns)
        )
        return self.completed(total, N, V, rows, columns)

    def _division(self) -> Division | None:
        """Return the division of products over ranks; None for sharded parameters, which are handled
        separately.
        """
        return current_division() if self.problem.model.spread is None else None

    def undivided(self, V: Tensor, rows: ParamSpace, columns: ParamSpace) -> tuple[Tensor, float]:
        """Return Σ_batches applied to V, and N; with fewer columns at a time if memory is short."""
        check = partial(refuse_cuts, self.problem) if cut_sequences(self.problem) else None
        label, chunk = type(self).__name__, self.chunk
        return self.engine.sum_over_batches(
            self.form, V, rows, columns, label=label, chunk=chunk, check=check
        )

    def completed(self, total: Tensor, N: float, V: Tensor, rows: ParamSpace, columns: ParamSpace) -> Tensor:
        """Turn the sum over batches into the product with V, in place: divide by N and add the diagonal."""
        total.div_(N)
        check_finite(total, self.problem, V)
        return total if self.shift is None else self.shift.add_to(total, V, rows, columns)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Declare the model and the data constant inside; raise at the end if they have changed."""
        division = self._division()
        with self.engine.frozen() if division is None else division.frozen(self):
            yield


MATRICES = "matrices"
WeightDecay = float | Mapping[str, float]


class DiagonalShift:
    """diag(w) + λ I over all parameters of a model; zero outside the entries shared by rows and columns.

    Args:
        damping: λ, at least 0.
        weight_decay: w for all blocks, or by globs of blocks; "matrices" are those with two axes or more.
            Blocks without a match have none; if several match, the last one counts.
    """

    def __init__(self, model: Model, damping: float, weight_decay: WeightDecay):
        by_block = _by_block(model, check_not_negative("damping", damping), weight_decay)
        self.weights = {name: _weight(model, name, by_block) for name in dict(model.named_parameters())}
        values = set(by_block.values())
        self.uniform = values.pop() if len(values) == 1 else None

    def diagonal(self, space: ParamSpace) -> Tensor:
        """λ + w of every entry of a space, (n,)."""
        column = torch.ones(space.size, 1, dtype=space.dtype, device=space.device)
        return self.add_to(torch.zeros_like(column), column, space, space)[:, 0]

    def add_to(self, product: Tensor, V: Tensor, rows: ParamSpace, columns: ParamSpace) -> Tensor:
        """Add the product of the shift with V (n, k) to `product` (m, k)."""
        if self.uniform is not None and rows.segments == columns.segments:
            return torch.add(product, V, alpha=self.uniform)
        directions = columns.scatter_columns(V)
        shared = [name for name in columns.parameter_names if name in rows.shapes]
        tree = {name: (directions[name] * self.weights[name]).contiguous() for name in shared}
        return product + rows.gather_columns(tree, V.shape[1])


def shift(model: Model, damping: float, weight_decay: WeightDecay) -> DiagonalShift | None:
    """Return the shift, or None if it is zero."""
    none = damping == 0 and not isinstance(weight_decay, Mapping) and weight_decay == 0
    return None if none else DiagonalShift(model, damping, weight_decay)


def _by_block(model: Model, damping: float, weight_decay: WeightDecay) -> dict[str, float]:
    """λ + w_b for every block."""
    if not isinstance(weight_decay, Mapping):
        return dict.fromkeys(model.blocks, damping + check_not_negative("weight_decay", weight_decay))
    weights = dict.fromkeys(model.blocks, 0.0)
    for pattern, value in weight_decay.items():
        number = check_not_negative(f"weight_decay of {pattern!r}", value)
        if pattern == MATRICES:
            matched = [name for name, block in model.blocks.items() if len(block.shape) > 1]
        else:
            matched = [name for name in model.blocks if fnmatch.fnmatchcase(name, str(pattern))]
        if not matched:
            raise UsageError(
                f"no block matches {pattern!r} of weight_decay",
                hint=near_misses(str(pattern), [MATRICES, *model.blocks]),
            )
        weights |= dict.fromkeys(matched, number)
    return {name: damping + value for name, value in weights.items()}


def _weight(model: Model, parameter: str, by_block: Mapping[str, float]) -> float | Tensor:
    """Return the factor of a parameter: a number, or a tensor of its shape if its blocks differ."""
    blocks = {name: block for name, block in model.blocks.items() if block.parameter == parameter}
    values = {by_block[name] for name in blocks}
    if len(values) < 2:
        return values.pop() if values else 0.0
    factor = torch.zeros(model.get_parameter(parameter).shape, dtype=model.dtype, device=model.device)
    for name, block in blocks.items():
        block.view(factor).fill_(by_block[name])
    return factor


def check_not_negative(name: str, value: float) -> float:
    """Return a finite number that is not negative, or raise."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(f"expected a finite {name} of at least 0, got {value!r}")
    return number
