"""Cost of algorithms as steps of a plan: number of products, number of columns, and size of the basis.

`costs` returns the cost of each step of a plan, in products of the whole operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from glob import escape
from typing import NamedTuple

import torch

from curvescope.algorithms.checks import GIB
from curvescope.algorithms.columns import columns_at_once
from curvescope.algorithms.spectra.lanczos import basis_size
from curvescope.core.hessian_terms import MATRIX_SYMBOLS
from curvescope.models.curvature_sources import find_sources
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.problem import Problem
from curvescope.runs.study import Step
from curvescope.sampling.errors import WARM_STEPS
from curvescope.sampling.statistics import SIZES

Globs = tuple[str, ...]
# Products of eigsh in float32 until convergence, for trained and untrained models and their three
# operators: 27 to 48 for one to three at the high end, 41 to 114 for two to six at both ends.
ONE_END, BOTH_ENDS = (25, 5), (40, 8)  # first: fixed cost, second: cost per eigenvalue
MAX_GIB = 8  # memory limit for the bases of a density
# Time of a product by kind, relative to a product of the whole Hessian on the same data.
RELATIVE = {"loss": 0.3, "gradient": 0.7}
EACH_SOURCE = 0.1  # of a product with all sources at once, on top of 1
OF_BLOCK = 1 / 3  # time of a product of one block; the mean over the blocks of tiny-gpt is 0.31


class Cost(NamedTuple):
    """Cost of one or several steps, in products of the whole operator with one vector on all data."""

    products: float  # expected products
    most: float  # maximum products, if convergence is slow
    graphs: float  # graphs to build before

    def __add__(self, other: Cost) -> Cost:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cost(self.products + other.products, self.most + other.most, self.graphs + other.graphs)

    def __mul__(self, share: float) -> Cost:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cost(*(share * number for number in self))


def costs(steps: Sequence[Step], problem: Problem, blocks: Globs) -> list[Cost]:
    """Return the cost of each step.

    Args:
        blocks: parameters of a whole product; a product over other parameters counts OF_BLOCK.
    """
    found, known = list[Cost](), set[tuple[str, Globs]]()
    for step in steps:
        each = RELATIVE.get(step.kind, 1.0) * step.share
        if step.kind == "sources":
            each *= 1 + EACH_SOURCE * len(find_sources(problem.model))
        if set(step.spaces).isdisjoint({(), ("*",), blocks}):
            each *= OF_BLOCK
        operators = {(step.kind, space) for space in step.spaces}
        graphs = step.made * len(operators) or len(operators - known)
        most = max(step.products, step.most)
        found.append(Cost(each * step.products, each * most, each * graphs))
        known |= operators
    return found


class PlannedMatrix(NamedTuple):
    """The Hessian or one of its parts, over some parameters."""

    problem: Problem
    kind: str
    space: Globs = ()

    @property
    def operator(self) -> CurvatureOperator:
        """Build the operator without computing anything."""
        return OPERATORS[self.kind](self.problem, *self.space)

    @property
    def psd(self) -> bool:
        """Return True if the matrix has no negative eigenvalue."""
        return self.operator.psd

    def named(self, what: str) -> str:
        """Return a label such as `density of H`."""
        return f"{what} of {MATRIX_SYMBOLS[self.kind]}"


def density(what: str, part: PlannedMatrix, num_probes: int, num_steps: int) -> Step:
    """Step for `spectral_density`: probes run together, as many as fit into one product and into memory."""
    op = part.operator
    basis = (num_steps + 1) * op.shape[0] * torch.finfo(op.dtype).bits // 8
    columns = max(1, min(num_probes, columns_at_once(op), MAX_GIB * GIB // basis))
    return _step(what, part, num_probes * num_steps, columns=columns, basis=num_steps + 1)


def eigenvalues(what: str, part: PlannedMatrix, k: int, most: int) -> Step:
    """Step for `eigsh`: k eigenvalues at the high end of a semi-definite operator, else at both ends."""
    first, each = ONE_END if part.psd else BOTH_ENDS
    basis = basis_size(part.operator, k)
    return _step(what, part, min(first + each * k, most), basis=basis)._replace(most=most)


def probed(what: str, part: PlannedMatrix, num_probes: int, *, times: int = 1) -> Step:
    """Step for random probes, as many at once as fit into one product, repeated `times` times."""
    columns = max(1, min(num_probes, columns_at_once(part.operator)))
    return _step(what, part, times * num_probes, columns=columns)


def lanczos(what: str, part: PlannedMatrix, num_steps: int) -> Step:
    """Step for Lanczos with one vector at a time."""
    return _step(what, part, num_steps, basis=num_steps + 1)


def planned_own_probes(
    what: str, parts: Sequence[PlannedMatrix], num_probes: int, num_steps: int, exact: int
) -> list[Step]:
    """Steps for `own_probes`: operators with at most `exact` rows are computed in full, others estimated."""
    least = max(exact, num_probes + num_steps if num_steps else 0)
    sizes = {part: part.problem.model.size_of(*part.problem.space(*part.space)) for part in parts}
    written = [part for part in parts if sizes[part] <= least]
    others = [part for part in parts if sizes[part] > least]
    found = []
    if written:
        total = sum(sizes[part] for part in written)
        found.append(together(f"{what}, written out,", written, total, columns=max(1, total // len(written))))
    if others and num_steps:
        found.append(together(f"{what}, Lanczos,", others, num_steps * len(others), basis=num_steps + 1))
    if others:
        columns = min(num_probes, *(columns_at_once(part.operator) for part in others))
        found.append(together(f"{what}, probes,", others, num_probes * len(others), columns=columns))
    return found


def together(
    what: str, parts: Sequence[PlannedMatrix], products: float, *, columns: int = 1, basis: int = 0
) -> Step:
    """Step for several operators of one kind in sequence."""
    spaces = tuple(part.space for part in parts)
    name = parts[0].named(what)
    return Step(name, parts[0].kind, products, columns=columns, basis=basis, spaces=spaces)


def sampled_ends(what: str, part: PlannedMatrix, piece: str, *, ends: int = 1) -> Step:
    """Extreme eigenvalues on quarters and halves of the data, warm-started, and their span on all groups.

    Products are in those on all data; the operators on parts are built anew.
    """
    warm = WARM_STEPS + ends
    parts = sum(SIZES[:-1])
    products = (len(SIZES) - 1) * warm + ends * (1 + parts)
    return owned(_step(what, part, products)._replace(made=len(SIZES)), piece)


def owned(step: Step, *pieces: str) -> Step:
    """A step whose products belong to these pieces of work, which are named by globs."""
    return step._replace(pieces=tuple(escape(name) if "*" not in name else name for name in pieces))


def _step(what: str, part: PlannedMatrix, products: float, *, columns: int = 1, basis: int = 0) -> Step:
    return together(what, [part], products, columns=columns, basis=basis)
