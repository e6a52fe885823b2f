"""Check blocks of the Hessian and its parts on a few positions against plain autograd in float64.

In H v, for v over all parameters, rows of a block are mostly its couplings to other blocks: for queries and
keys at initialization H_bb is a ten-thousandth of them. So here v is normally distributed in one block b and
zero elsewhere. (Random signs can all be equal in a small block, and a norm after the block would cancel
them.) The error of a column is measured on its own rows,

    ‖(ours − right)_b‖ / ‖right_b‖ = ‖(ours − right)_bb v‖ / ‖right_bb v‖,

and on all rows. Denominators are at least a thousandth of the column, and 1e-5 of the average column per
entry: smaller values may be rounding errors only. A block is left out if plain autograd in the operator's own
precision, or the operator a rounding away, is off by a thirtieth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace, by_role
from curvescope.core.hessian_terms import MatrixName
from curvescope.core.number_format import plural
from curvescope.core.seeds import generator, probes
from curvescope.data.batches import Batch
from curvescope.engines.reference_forward import reference_sample
from curvescope.operators.base import CurvatureOperator
from curvescope.problem import Problem
from curvescope.runs.verification.autograd_reference import (
    FAR,
    SEED,
    TIMES,
    TOLERANCE,
    global_norm,
    matrix_name,
    on_problem,
    plain_product,
    plain_products,
    rounding_of_operator,
    space_like,
)
from curvescope.runs.verification.checks import ErrorCheck

ENTRIES = {"hessian": 2**22, "ggn": 2**21, "functional": 2**21}  # most entries of all columns together
LEAST, MOST = 4, 64  # columns
OF_COLUMN, OF_ALL = 1e-3, 1e-5  # smallest denominators, relative to the column and to the average column


class _ColumnError(NamedTuple):
    """Error of one column: the block, the error and its bound."""

    name: str
    error: float
    allowed: float


def check_columns(op: CurvatureOperator, exact: Problem) -> list[ErrorCheck]:
    """Check the operator's own products on a few positions; no checks if the loss has no terms."""
    kind, problem = matrix_name(op), op.problem
    if kind is None or not problem.loss.has_outputs:
        return []
    few = reference_sample(problem).batch
    part = Problem(problem.model, [few], problem.loss, params="*").at(problem.point)
    names = draw_blocks(
        op.space, most=max(LEAST, min(MOST, ENTRIES[kind] // op.shape[0])), stream=list(kind.encode())
    )
    E = _block_columns(op.space, names).to(op.device)
    local = on_problem(op, part)
    ours, right = local @ E.to(op.dtype), _reference_product(kind, exact, few, op.space, E.double())
    sizes = _denominators(right, op.space, names)
    errors, limit = _relative_errors(ours - right, sizes, op.space, names), TOLERANCE[op.dtype]
    allowed = [[limit, limit]] * len(names)
    if any(not error <= limit for errors_of_column in errors for error in errors_of_column):
        plain = plain_products(kind, part, op.space, E.to(op.dtype))
        gaps = [*(found - right for found in plain), rounding_of_operator(local, E.to(op.dtype), ours)]
        off = [_relative_errors(gap, sizes, op.space, names) for gap in gaps]
        columns = zip(*off, strict=True)
        allowed = [[max(limit, TIMES * max(pair)) for pair in zip(*ways, strict=True)] for ways in columns]
    worst = _worst_column(names, errors, allowed)
    words = (
        f"{plural(len(names), 'product')} with random numbers in one block, on a few positions, against "
        f"plain autograd in float64: errors of the block's own rows and of all rows, relative to the same "
        f"rows of the reference; the worst is {worst.name}"
    )
    return [ErrorCheck("columns", worst.error, worst.allowed, words)]


def draw_blocks(space: ParamSpace, *, most: int, stream: list[int]) -> list[str]:
    """Draw the names of up to `most` blocks, one of each role before a second of any; keep their order."""
    names = [block.name for block in space if block.size]
    if len(names) <= most:
        return names
    source, turns = generator(SEED, *stream), {}
    for blocks in by_role(block for block in space if block.size).values():
        order = torch.randperm(len(blocks), generator=source).tolist()
        turns |= {blocks[i].name: turn for turn, i in enumerate(order)}
    drawn = [names[i] for i in torch.randperm(len(names), generator=source).tolist()]
    picked = set(sorted(drawn, key=lambda name: turns[name])[:most])
    return [name for name in names if name in picked]


def _block_columns(space: ParamSpace, names: list[str]) -> Tensor:
    """Return columns (n, k): column j has normal numbers in the j-th block, zeros elsewhere."""
    E, drawn = torch.zeros(space.size, len(names)), probes(space.size, 1, seed=SEED, kind="gaussian")[:, 0]
    for j, rows in enumerate(_block_slices(space, names)):
        E[rows, j] = drawn[rows].to(E)
    return E


def _block_slices(space: ParamSpace, names: list[str]) -> list[Tensor]:
    """Return the positions of blocks in a vector."""
    blocks = {block.name: block for block in space}
    return [space.positions(blocks[name]) for name in names]


def _reference_product(kind: MatrixName, exact: Problem, few: Batch, space: ParamSpace, E: Tensor) -> Tensor:
    """Return the product of plain autograd in float64."""
    batch = few.map(exact.placed)
    terms = exact.loss.total_weight(batch.targets, batch.weights) if exact.loss.is_mean else 1.0
    return plain_product(kind, exact, batch, space_like(exact, space), E) / terms


def _denominators(right: Tensor, space: ParamSpace, names: list[str]) -> list[list[float]]:
    """Return ‖right_b‖ and ‖right‖ of every column, raised to the smallest denominators."""
    rows = _block_slices(space, names)
    roots = [len(r) ** 0.5 for r in rows]
    sizes = [global_norm(column) for column in right.unbind(1)]
    even = OF_ALL * sum(size / root for size, root in zip(sizes, roots, strict=True)) / len(names)
    sizes = [max(size, even * root) for size, root in zip(sizes, roots, strict=True)]
    columns = zip(right.unbind(1), rows, sizes, strict=True)
    return [[max(global_norm(column[r]), OF_COLUMN * size), size] for column, r, size in columns]


def _relative_errors(
    gap: Tensor, sizes: list[list[float]], space: ParamSpace, names: list[str]
) -> list[list[float]]:
    """Return Return ‖gap_b‖ / ‖right_b‖ and ‖gap‖ / ‖right‖ of every column."""
    columns = zip(gap.unbind(1), _block_slices(space, names), sizes, strict=True)
    gaps = [((global_norm(column[rows]), global_norm(column)), both) for column, rows, both in columns]
    return [[g / s if s else g for g, s in zip(some, both, strict=True)] for some, both in gaps]


def _worst_column(names: list[str], errors: list[list[float]], allowed: list[list[float]]) -> _ColumnError:
    """Return the column nearest to its bound, or furthest beyond it; undefined numbers come first."""
    columns = zip(names, errors, allowed, strict=True)
    gaps = [_ColumnError(name, e, a) for name, es, limits in columns for e, a in zip(es, limits, strict=True)]
    reliable = [gap for gap in gaps if gap.allowed <= FAR] or [_ColumnError("none", 0.0, FAR)]
    return max(reliable, key=lambda gap: gap.error / gap.allowed if gap.error == gap.error else torch.inf)
