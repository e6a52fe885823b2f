"""Blocks of the Hessian and its parts on a few positions, against plain autograd in float64.

In H v, for v over all parameters, rows of a block are mostly its couplings to other blocks: of queries and
keys at their first values H_bb is a ten-thousandth of them. So here v is normally distributed in one block b
and zero elsewhere (signs are all alike in a small block now and then, which a norm behind it takes away), and
a column counts by its own rows,

    ‖(ours − right)_b‖ / ‖right_b‖ = ‖(ours − right)_bb v‖ / ‖right_bb v‖,

and as a whole. Rows count at least as a thousandth of their column, and as 1e-5 of what columns have on the
average, for each entry: what is less may be no more than rounding. So may a block in which plain autograd in
the operator's own precision, or the operator a rounding away, is off by a thirtieth; it is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace, by_role
from curvescope.core.numbers import plural
from curvescope.core.parts import MatrixName
from curvescope.core.seeds import generator, probes
from curvescope.data.batches import Batch
from curvescope.engines.reference_forward import few_positions
from curvescope.operators.base import CurvatureOperator
from curvescope.problem import Problem
from curvescope.runs.verified.checks import Check
from curvescope.runs.verified.plain import (
    FAR,
    SEED,
    TIMES,
    TOLERANCE,
    norm,
    on,
    own_rounding,
    part_of,
    plain_product,
    plain_products,
    spaced,
)

ENTRIES = {"hessian": 2**22, "ggn": 2**21, "functional": 2**21}  # of all columns together
LEAST, MOST = 4, 64  # columns
OF_COLUMN, OF_ALL = 1e-3, 1e-5  # what rows are measured by at least


class _Gap(NamedTuple):
    """Of one column: where it is off, how far and at most how far."""

    name: str
    error: float
    allowed: float


def check_columns(op: CurvatureOperator, exact: Problem) -> list[Check]:
    """The operator's own products on a few positions; nothing where the loss has no terms to take some of."""
    kind, problem = part_of(op), op.problem
    if kind is None or not problem.loss.splits:
        return []
    few = few_positions(problem).batch
    part = Problem(problem.model, [few], problem.loss, params="*").at(problem.point)
    names = chosen(
        op.space, most=max(LEAST, min(MOST, ENTRIES[kind] // op.shape[0])), stream=list(kind.encode())
    )
    E = _drawn(op.space, names).to(op.device)
    local = on(op, part)
    ours, right = local @ E.to(op.dtype), _right(kind, exact, few, op.space, E.double())
    sizes = _sizes(right, op.space, names)
    errors, limit = _ratios(ours - right, sizes, op.space, names), TOLERANCE[op.dtype]
    allowed = [[limit, limit]] * len(names)
    if any(not error <= limit for both in errors for error in both):
        plain = plain_products(kind, part, op.space, E.to(op.dtype))
        gaps = [*(found - right for found in plain), own_rounding(local, E.to(op.dtype), ours)]
        off = [_ratios(gap, sizes, op.space, names) for gap in gaps]
        columns = zip(*off, strict=True)
        allowed = [[max(limit, TIMES * max(two)) for two in zip(*ways, strict=True)] for ways in columns]
    worst = _worst(names, errors, allowed)
    words = (
        f"{plural(len(names), 'product')} with random numbers in one block, on a few positions, against "
        "plain autograd in float64: of the block's own rows, and of all, relative to the same rows of the "
        f"right product; the worst is {worst.name}"
    )
    return [Check("columns", worst.error, worst.allowed, words)]


def chosen(space: ParamSpace, *, most: int, stream: list[int]) -> list[str]:
    """Names of up to `most` blocks, drawn: one of each role before a second of any, in their order."""
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


def _drawn(space: ParamSpace, names: list[str]) -> Tensor:
    """(n, k): in column j normal numbers in the j-th block, zeros elsewhere."""
    E, drawn = torch.zeros(space.size, len(names)), probes(space.size, 1, seed=SEED, kind="gaussian")[:, 0]
    for j, rows in enumerate(_rows(space, names)):
        E[rows, j] = drawn[rows].to(E)
    return E


def _rows(space: ParamSpace, names: list[str]) -> list[Tensor]:
    """Positions of blocks in a vector."""
    blocks = {block.name: block for block in space}
    return [space.positions(blocks[name]) for name in names]


def _right(kind: MatrixName, exact: Problem, few: Batch, space: ParamSpace, E: Tensor) -> Tensor:
    """The product of plain autograd in float64."""
    batch = few.map(exact.placed)
    terms = exact.loss.total_weight(batch.targets, batch.weights) if exact.loss.divided else 1.0
    return plain_product(kind, exact, batch, spaced(exact, space), E) / terms


def _sizes(right: Tensor, space: ParamSpace, names: list[str]) -> list[list[float]]:
    """Of every column ‖right_b‖ and ‖right‖, or what they are measured by at least."""
    rows = _rows(space, names)
    roots = [len(r) ** 0.5 for r in rows]
    wholes = [norm(column) for column in right.unbind(1)]
    even = OF_ALL * sum(whole / root for whole, root in zip(wholes, roots, strict=True)) / len(names)
    wholes = [max(whole, even * root) for whole, root in zip(wholes, roots, strict=True)]
    columns = zip(right.unbind(1), rows, wholes, strict=True)
    return [[max(norm(column[r]), OF_COLUMN * whole), whole] for column, r, whole in columns]


def _ratios(gap: Tensor, sizes: list[list[float]], space: ParamSpace, names: list[str]) -> list[list[float]]:
    """‖gap_b‖ / ‖right_b‖ and ‖gap‖ / ‖right‖ of every column."""
    columns = zip(gap.unbind(1), _rows(space, names), sizes, strict=True)
    gaps = [((norm(column[rows]), norm(column)), both) for column, rows, both in columns]
    return [[g / s if s else g for g, s in zip(some, both, strict=True)] for some, both in gaps]


def _worst(names: list[str], errors: list[list[float]], allowed: list[list[float]]) -> _Gap:
    """What is nearest to its limit, or furthest beyond, undefined numbers first; of what can be told."""
    both = zip(names, errors, allowed, strict=True)
    gaps = [_Gap(name, e, a) for name, es, limits in both for e, a in zip(es, limits, strict=True)]
    told = [gap for gap in gaps if gap.allowed <= FAR] or [_Gap("none", 0.0, FAR)]
    return max(told, key=lambda gap: gap.error / gap.allowed if gap.error == gap.error else torch.inf)
