"""Exact diagonals of curvature operators, without probes.

Let J_x = ∂z_x/∂θ be the Jacobian of a sequence x, which sums over all uses of a weight. With the matrix of
the loss in the outputs as columns, M_x = Σ_k r_k r_kᵀ (`roots`),

    diag(Jᵀ M J) = (1/N) Σ_x Σ_k (J_xᵀ r_k)²,

exactly. It takes one reverse pass for each column, many at a time through one forward pass. If all blocks are
linear maps, as in an MLP, passes end at the layers' outputs: with inputs a and output gradients g of a
layer's rows, (Jᵀ r)² is (Σ_rows a gᵀ)², and for a single row a² (g²)ᵀ, which is summed over columns first.

Cross-entropy of T counted targets among V classes has T V columns. So for a block with fewer entries,
products with unit vectors are cheaper, and for the Hessian they are the only method. The cost is predicted
before the computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.progress import track
from curvescope.core.result import Result, Tabular
from curvescope.data.batches import Batch
from curvescope.engines import Engine
from curvescope.engines.memory import columns_at_once
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import GGN, EmpiricalFisher, MonteCarloFisher
from curvescope.operators.kronecker.cotangents import Curvature
from curvescope.operators.kronecker.moments import eigenvalues_in
from curvescope.operators.kronecker.stream import search_layers
from curvescope.operators.roots import RootColumns, fisher_columns, ggn_columns, mean_of_columns
from curvescope.operators.samples.batch_coupling import refuse_coupled
from curvescope.operators.samples.per_sample import PerSample
from curvescope.operators.samples.stacked import Graph

DiagonalMethod = Literal["outputs", "entries"]
PASSES = 200_000  # default limit of reverse passes
PER_PRODUCT = 2  # reverse passes of a product with one vector
CPU_BYTES = 64 * 2**20  # memory of the gradients of one pass
MAX_COLUMNS = 32  # unit vectors at a time


@dataclass(frozen=True)
class DiagonalCost(Result):
    """Number of reverse passes of an exact diagonal, and its method."""

    passes: int
    method: str  # `outputs`: one or two passes per column in the outputs; `entries`: a product per entry

    def __str__(self) -> str:
        return f"{self.passes:,} reverse passes, by {self.method}"


@dataclass(frozen=True)
class ExactDiagonal(Tabular):
    """Diagonal entries, exact up to rounding, in the order of the operator's vectors."""

    values: Tensor  # (n,) in the operator's dtype and on its device
    names: list[str]  # B blocks
    sizes: np.ndarray  # (B,) entries of each
    matrix: str
    cost: DiagonalCost
    order: np.ndarray | None = None  # (n,) position of each entry, block after block; None if in block order

    def block(self, name: str) -> Tensor:
        """Return the entries of one block, row-major in its shape."""
        if name not in self.names:
            raise UsageError(f"no block is called {name!r}", hint=f"one of {', '.join(self.names)}")
        ends = np.cumsum(self.sizes)
        i = self.names.index(name)
        entries = slice(ends[i] - self.sizes[i], ends[i])
        return self.values[entries if self.order is None else torch.as_tensor(self.order[entries])]

    def table(self) -> Any:
        """One row per block: its trace, and the mean, median and largest entry."""
        parts = [self.block(name).double().cpu().numpy() for name in self.names]
        kinds: dict[str, Callable[[np.ndarray], float]] = {
            "trace": np.sum,
            "mean": np.mean,
            "median": np.median,
            "max": np.max,
        }
        columns = {kind: [float(statistic(part)) for part in parts] for kind, statistic in kinds.items()}
        return {"block": self.names, "entries": self.sizes, **columns}


def diagonal_cost(op: CurvatureOperator, method: DiagonalMethod | None = None) -> DiagonalCost:
    """Predict the cost of `exact_diagonal` with the given method, by default the cheaper one."""
    _check(op, method)
    entries = DiagonalCost(PER_PRODUCT * op.shape[0], "entries")
    if method == "entries" or not _has_columns(op):
        return entries
    outputs = DiagonalCost(_count(op), "outputs")
    return outputs if method == "outputs" or outputs.passes <= entries.passes else entries


def exact_diagonal(
    op: CurvatureOperator, *, method: DiagonalMethod | None = None, max_passes: int = PASSES
) -> ExactDiagonal:
    """Compute the diagonal of a curvature operator, or of a block of it, exactly and without probes.

    Memory: a quarter of the free memory, on a CPU at most 64 MiB.

    Args:
        op: `cs.GGN(problem, …)`, a Fisher, or any other curvature operator with the same rows and columns.
        method: Method: `outputs`, for the GGN and the Fishers, or `entries`; by default the cheaper one.
        max_passes: Limit of reverse passes; a higher predicted cost raises before the computation
            (`diagonal_cost`).
    """
    cost = diagonal_cost(op, method)
    if cost.passes > max_passes:
        raise UsageError(
            f"the exact diagonal of {op!r} takes {cost}, more than max_passes = {max_passes:,}",
            hint="max_passes=…, a smaller block, less data, or cs.diagonal(op, method='roots') for a GGN",
        )
    values = _by_outputs(op) if cost.method == "outputs" else _by_entries(op)
    return diagonal_result(values, op, cost)


def diagonal_result(values: np.ndarray | Tensor, op: CurvatureOperator, cost: DiagonalCost) -> ExactDiagonal:
    """Make the result, with the names and positions of the operator's blocks."""
    space = op.space
    names, sizes = [block.name for block in space], np.array([block.size for block in space])
    order = torch.cat([space.positions(block) for block in space]).numpy() if space.whole else None
    tensor = torch.as_tensor(values).to(op.device, op.dtype)
    return ExactDiagonal(tensor, names, sizes, type(op).__name__, cost, order)


def _check(op: CurvatureOperator, method: DiagonalMethod | None) -> None:
    if not isinstance(op, CurvatureOperator) or not op.symmetric:
        raise UsageError(f"expected a curvature operator with the same rows and columns, got {op!r}")
    if method is not None and method not in get_args(DiagonalMethod):
        raise UsageError(f"expected method to be one of 'outputs', 'entries', got {method!r}")
    if method == "outputs" and not _has_columns(op):
        raise UsageError(f"{type(op).__name__} does not have the form Jᵀ M J", hint="method='entries'")


def _has_columns(op: CurvatureOperator) -> bool:
    return isinstance(op, GGN | EmpiricalFisher | MonteCarloFisher)


def _columns(op: CurvatureOperator, z: Tensor, batch: Batch, drawn: list[Tensor] | None) -> RootColumns:
    """Return the columns of a root of the operator's matrix in the outputs z of some sequences."""
    loss = op.problem.loss
    if isinstance(op, GGN):
        return ggn_columns(loss, z, batch)
    if drawn is None:
        return fisher_columns(loss, z, batch)
    sets = [Batch(batch.inputs, targets.to(z.device), batch.weights) for targets in drawn]
    return mean_of_columns([fisher_columns(loss, z, drawn_targets) for drawn_targets in sets])


def _drawn(op: CurvatureOperator) -> list[Tensor] | None:
    """Draw the targets of every sequence of the data: (S, 1, …)."""
    if not isinstance(op, MonteCarloFisher):
        return None
    return [targets[:, i : i + 1] for targets in op.drawn for i in range(targets.shape[1])]


def _count(op: CurvatureOperator) -> int:
    """Number of passes for the columns of all sequences; unit columns need two passes each."""
    total, drawn, problem = 0, _drawn(op), op.problem
    numbered = 0
    with torch.no_grad():
        for batch in problem.placed_batches("outputs"):
            z = problem.outputs(batch)
            for i in range(batch.num_sequences):
                targets = None if drawn is None else list(drawn[numbered])
                columns = _columns(op, z[i : i + 1], batch[i : i + 1], targets)
                total += columns.number * (1 if columns.times is None else 2)
                numbered += 1
    return total


def _by_outputs(op: CurvatureOperator) -> np.ndarray:
    total = _by_layers(op) if isinstance(op, GGN) and op.problem.loss.has_root else None
    total = _by_samples(op) if total is None else total
    return total if op.shift is None else total + op.shift.diagonal(op.space).double().cpu().numpy()


def _by_layers(op: GGN) -> np.ndarray | None:
    """Compute the diagonal from inputs and output gradients of linear layers; None for other blocks."""
    problem, exact = op.problem, Curvature("ggn", "separate")
    refuse_coupled(problem)
    engine = Engine(problem, "autograd")
    search = engine.consistent(lambda: search_layers(problem, op.space.blocks, exact, joint=False))
    if len(search.layers) < len(op.space):
        return None

    def squares() -> list[Tensor]:
        return eigenvalues_in(problem, search.layers, exact, [None] * len(search.layers), joint=False)

    diagonal = torch.empty(op.space.size, 1, dtype=torch.float64)
    for layer, values in zip(search.layers, engine.consistent(squares), strict=True):
        entries = op.space.view(diagonal, layer.blocks[0])
        entries.copy_(values.reshape(entries.shape))
    return diagonal[:, 0].numpy()


def _by_samples(op: CurvatureOperator) -> np.ndarray:
    """Compute the diagonal from full gradients of every sequence."""
    samples = PerSample(op.problem, op.space, "sequence", op.chunk, cpu_bytes=CPU_BYTES)
    drawn = _drawn(op)
    sequences = samples.sequences

    def work(graph: Graph, rows: slice, group: int) -> Tensor:
        targets = None
        if drawn is not None:
            targets = list(torch.cat([drawn[x] for x in sequences[rows]], dim=1))
        return graph.squares(_columns(op, graph.outputs, graph.batch, targets), group)

    total, shares = np.zeros(op.shape[0]), samples.shares
    for rows, values in samples.stream("exact diagonal", work):
        total += shares[rows] @ values.double().cpu().numpy()
    return total


def _by_entries(op: CurvatureOperator) -> np.ndarray:
    """Compute the diagonal from products with unit vectors."""
    n, width = op.shape[0], min(MAX_COLUMNS, op.chunk or columns_at_once(op.problem))
    values = np.empty(n)
    with op.frozen():
        for start in track(range(0, n, width), "exact diagonal"):
            stop = min(start + width, n)
            entries, columns = torch.arange(start, stop), torch.arange(stop - start)
            V = torch.zeros(n, stop - start, dtype=op.dtype, device=op.device)
            V[entries, columns] = 1
            values[start:stop] = (op @ V)[entries, columns].double().cpu().numpy()
    return values
