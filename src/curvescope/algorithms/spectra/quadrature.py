"""Spectral measures of diagonal blocks: nodes and weights, from Lanczos or from the full block.

The columns of one product may belong to different blocks: a column that is zero outside block b gives, in the
rows of b, the product with that diagonal block. So all blocks advance in lock step. If a block is only
rounding errors (`is_rounding`), its eigenvalues are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import frobenius_length, is_rounding, sum_over_ranks, to_numpy
from curvescope.algorithms.checks import GIB, block_shard, block_sizes
from curvescope.algorithms.columns import columns_at_once
from curvescope.algorithms.krylov_storage import DEFAULT_GIB, Where, place_basis
from curvescope.algorithms.spectra.krylov import Recurrence, Tridiagonals
from curvescope.algorithms.vectors import check_finite
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import track
from curvescope.core.seeds import Probe, probes


@dataclass(frozen=True)
class Measure:
    """One probability measure on the eigenvalues for each probe; a single one when it is exact."""

    nodes: np.ndarray  # (P, S)
    weights: np.ndarray  # (P, S), each row sums to one
    num_products: int
    exact: bool
    orthogonality: float  # largest overlap of two vectors of a basis; nan if none was measured


@dataclass(frozen=True)
class Job:
    """Probes `first, …, first + count − 1` of one block, run together."""

    name: str
    rows: slice  # position of the block, or of this rank's part of it, in a vector
    first: int
    count: int
    near: int | None = None  # vectors of a basis on the device, if some are in host memory

    @property
    def size(self) -> int:
        """Number of the block's rows on this rank."""
        return self.rows.stop - self.rows.start


def exact_measures(op: LinearOperator, blocks: Mapping[str, slice]) -> dict[str, Measure]:
    """Eigenvalues of each diagonal block with equal weights, from products with unit vectors."""
    sizes = block_sizes(op, blocks)
    units = [(name, i) for name, size in sizes.items() for i in range(size)]
    matrices = {
        name: torch.zeros(size, size, dtype=op.dtype, device=op.device) for name, size in sizes.items()
    }
    block_rows = {name: _own_rows(op, name, size) for name, size in sizes.items()}
    width = columns_at_once(op)
    for start in track(range(0, len(units), width), "small blocks"):
        batch = units[start : start + width]
        columns = torch.zeros(op.local_shape[1], len(batch), dtype=op.dtype, device=op.device)
        for column, (name, i) in enumerate(batch):
            columns[blocks[name], column] = (block_rows[name] == i).to(op.device, op.dtype)
        product = op @ columns
        for column, (name, i) in enumerate(batch):
            matrices[name][block_rows[name], i] = product[blocks[name], column]
    return {name: _eigenvalue_measure(to_numpy(sum_over_ranks(matrix))) for name, matrix in matrices.items()}


def _own_rows(op: LinearOperator, name: str, size: int) -> Tensor:
    """Return the rows of a block that this rank holds."""
    shard = block_shard(op, name)
    return torch.arange(size) if shard is None else shard.positions()


def _eigenvalue_measure(A: np.ndarray) -> Measure:
    check_finite(A)
    nodes = np.linalg.eigvalsh(A / 2 + A.T / 2)[None]  # the sum may be out of range
    nodes = np.zeros_like(nodes) if is_rounding(A, frobenius_length(A / 2 - A.T / 2)) else nodes
    return Measure(nodes, np.full_like(nodes, 1 / nodes.size), nodes.size, True, 0.0)


def lanczos_measures(
    op: LinearOperator,
    blocks: Mapping[str, slice],
    *,
    num_probes: int,
    num_steps: int,
    probe: Probe,
    seed: int,
    reorthogonalize: bool,
    max_gib: float | None,
    basis: Where,
) -> dict[str, Measure]:
    """Lanczos quadrature of each diagonal block for each probe; blocks have more than num_steps rows."""
    vectors = num_steps + 1 if reorthogonalize else 2
    groups = list(_grouped(op, blocks, num_probes, vectors, max_gib, basis))
    rules: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in blocks}
    real: set[str] = set()  # blocks that are not only rounding errors
    overlaps = dict.fromkeys(blocks, 0.0)
    recurrences: list[Recurrence] = []
    columns: Tensor | None = None
    steps = [(group, step) for group in groups for step in range(num_steps)]
    for group, step in track(steps, "spectral density"):
        if step == 0:
            recurrences, columns = [], None  # free the last group's memory first
            recurrences = [_started(op, job, num_steps, probe, seed, reorthogonalize) for job in group]
            columns = _buffer(op, group)
        _advance(op, group, recurrences, columns)
        if step == num_steps - 1:
            real |= _finish(group, recurrences, rules, overlaps)
    measures = {}
    for name, pieces in rules.items():
        nodes, weights = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        nodes = nodes if name in real else np.zeros_like(nodes)
        measures[name] = Measure(nodes, weights, num_probes * num_steps, False, overlaps[name])
    return measures


def _finish(
    group: list[Job],
    recurrences: list[Recurrence],
    measures: dict[str, list[tuple[np.ndarray, np.ndarray]]],
    overlaps: dict[str, float],
) -> set[str]:
    """Add the result of every job to its block; return the blocks that are not only rounding errors."""
    real = set()
    for job, recurrence in zip(group, recurrences, strict=True):
        tridiagonals = recurrence.finish()
        measures[job.name].append(tridiagonals.quadrature())
        overlaps[job.name] = float(np.maximum(overlaps[job.name], tridiagonals.orthogonality))  # nan stays
        if not _all_rounding(tridiagonals, recurrence.asymmetry):
            real.add(job.name)
    return real


def _all_rounding(tridiagonals: Tridiagonals, asymmetry: np.ndarray) -> bool:
    """Return True if the matrix is rounding in the Krylov space of every column."""
    return all(
        is_rounding(np.concatenate([a, b[:-1], b[:-1]]), float(uneven))
        for a, b, uneven in zip(tridiagonals.alpha, tridiagonals.beta, asymmetry, strict=True)
    )


def _started(
    op: LinearOperator, job: Job, num_steps: int, probe: Probe, seed: int, reorthogonalize: bool
) -> Recurrence:
    options = {"reorthogonalize": reorthogonalize, "near": job.near}
    recurrence = Recurrence(op, job.size, job.count, num_steps, **options)
    size = block_sizes(op, {job.name: job.rows})[job.name]
    probe_options = {"out": recurrence.vectors, "shard": block_shard(op, job.name)}
    probes(size, job.count, seed=seed, first=job.first, kind=probe, **probe_options)
    recurrence.begin()
    return recurrence


def _buffer(op: LinearOperator, group: list[Job]) -> Tensor | None:
    """Columns (n, c) for the products of a group, zero outside the blocks; none for one whole vector."""
    total = sum(job.count for job in group)
    if total == 1 and block_sizes(op, {group[0].name: group[0].rows})[group[0].name] == op.shape[1]:
        return None
    return torch.zeros(op.local_shape[1], total, dtype=op.dtype, device=op.device)


def _advance(
    op: LinearOperator, group: list[Job], recurrences: list[Recurrence], columns: Tensor | None
) -> None:
    """One product with the columns of all jobs, each in the rows of its block."""
    if columns is None:
        recurrences[0].advance(op @ recurrences[0].vectors)
        return
    positions, next_column = [], 0
    for job in group:
        positions.append(slice(next_column, next_column + job.count))
        next_column += job.count
    for job, position, recurrence in zip(group, positions, recurrences, strict=True):
        columns[job.rows, position] = recurrence.vectors
    product = op @ columns
    for job, position, recurrence in zip(group, positions, recurrences, strict=True):
        recurrence.advance(product[job.rows, position])


def _grouped(
    op: LinearOperator,
    blocks: Mapping[str, slice],
    num_probes: int,
    vectors: int,
    max_gib: float | None,
    where: Where,
) -> Iterator[list[Job]]:
    """Jobs that run together: as many columns as one product takes and as the memory holds bases of.

    A basis that exceeds the memory runs alone, as does one that is partly in host memory.
    """
    width = columns_at_once(op)
    group_budget = (DEFAULT_GIB if max_gib is None else max_gib) * GIB
    group: list[Job] = []
    budget_left, columns = group_budget, width
    ranks = 1 if op.shards is None else op.shards[0].spread.ranks
    sizes = block_sizes(op, blocks)
    for name, rows in blocks.items():
        what = f"one probe of {name or 'the operator'}"
        num_rows = -(-sizes[name] // ranks)
        placement = place_basis(op, num_rows, vectors, where=where, max_gib=max_gib, what=what)
        runs_alone = placement.near is not None or placement.num_bytes > group_budget
        next_probe = 0
        while next_probe < num_probes:
            fitting = (
                int(budget_left == group_budget) if runs_alone else int(budget_left // placement.num_bytes)
            )
            count = min(num_probes - next_probe, columns, fitting)
            if count == 0:
                yield group
                group, budget_left, columns = [], group_budget, width
                continue
            group.append(Job(name, rows, next_probe, count, placement.near))
            budget_left = 0 if runs_alone else budget_left - count * placement.num_bytes
            next_probe, columns = next_probe + count, columns - count
    yield group
