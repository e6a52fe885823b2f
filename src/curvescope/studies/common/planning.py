"""What algorithms take, as steps of a plan: how many products, of how many columns, and how large a basis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from curvescope.algorithms.checks import GIB
from curvescope.algorithms.columns import columns_at_once
from curvescope.algorithms.spectra.lanczos import basis_size
from curvescope.core.parts import MATRIX_SYMBOLS
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.problem import Problem
from curvescope.runs.study import Step

Globs = tuple[str, ...]
# Products of eigsh in float32 until it is sure, over trained and untrained models and their three operators:
# 27 to 48 for one to three at the high end, 41 to 114 for two to six at both ends.
ONE_END, BOTH_ENDS = (25, 5), (40, 8)  # and for each
MAX_GIB = 8  # of the bases of a density


class PlannedMatrix(NamedTuple):
    """The Hessian or one of its parts, over some parameters."""

    problem: Problem
    kind: str
    space: Globs = ()

    @property
    def operator(self) -> CurvatureOperator:
        """The operator; nothing is computed."""
        return OPERATORS[self.kind](self.problem, *self.space)

    @property
    def psd(self) -> bool:
        """Whether it has no eigenvalue below zero."""
        return self.operator.psd

    def named(self, what: str) -> str:
        """`density of H`."""
        return f"{what} of {MATRIX_SYMBOLS[self.kind]}"


def density(what: str, part: PlannedMatrix, num_probes: int, num_steps: int) -> Step:
    """`spectral_density`: probes in lock step, as many as a product takes and memory holds bases of."""
    op = part.operator
    basis = (num_steps + 1) * op.shape[0] * torch.finfo(op.dtype).bits // 8
    columns = max(1, min(num_probes, columns_at_once(op), MAX_GIB * GIB // basis))
    return _step(what, part, num_probes * num_steps, columns=columns, basis=num_steps + 1)


def eigenvalues(what: str, part: PlannedMatrix, k: int, most: int) -> Step:
    """`eigsh`: k at the high end of a positive semi-definite operator, else at both ends."""
    first, each = ONE_END if part.psd else BOTH_ENDS
    basis = basis_size(part.operator, k)
    return _step(what, part, min(first + each * k, most), basis=basis)._replace(most=most)


def probed(what: str, part: PlannedMatrix, num_probes: int, *, times: int = 1) -> Step:
    """Probes, as many at once as a product takes; all of it so many times."""
    columns = max(1, min(num_probes, columns_at_once(part.operator)))
    return _step(what, part, times * num_probes, columns=columns)


def lanczos(what: str, part: PlannedMatrix, num_steps: int) -> Step:
    """One vector after the other."""
    return _step(what, part, num_steps, basis=num_steps + 1)


def planned_own_probes(
    what: str, parts: Sequence[PlannedMatrix], num_probes: int, num_steps: int, exact: int
) -> list[Step]:
    """`own_probes` of every operator: those with at most `exact` rows are written out, others estimated."""
    least = max(exact, num_probes + num_steps if num_steps else 0)
    sizes = {part: part.problem.space(*part.space).size for part in parts}
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
    """Operators of one kind, one after the other."""
    spaces = tuple(part.space for part in parts)
    name = parts[0].named(what)
    return Step(name, parts[0].kind, products, columns=columns, basis=basis, spaces=spaces)


def _step(what: str, part: PlannedMatrix, products: float, *, columns: int = 1, basis: int = 0) -> Step:
    return together(what, [part], products, columns=columns, basis=basis)
