"""Frobenius norms of all blocks A_bc, diagonal or not, with error bars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from curvescope.algorithms.checks import (
    block_shard,
    block_sizes,
    check_choice,
    check_count,
    check_slices,
    check_square,
    fixed_operator,
)
from curvescope.algorithms.columns import column_blocks, to_numpy
from curvescope.algorithms.estimates.intervals import (
    ENOUGH,
    NeighborCosines,
    column_norms,
    mean_square,
    student,
)
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import track
from curvescope.core.result import Tabular
from curvescope.core.seeds import Probe, probes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class BlockNorms(Tabular):
    """‖A_bc‖_F for all pairs of blocks; between `low` and `high` 95 times in 100, see `intervals`."""

    names: list[str]  # B blocks
    sizes: np.ndarray  # (B,) entries of each block
    frobenius: np.ndarray  # (B, B) square root of the unbiased estimate of ‖A_bc‖²
    stderr: np.ndarray  # (B, B) of frobenius, to first order; nan with a single probe
    squared: np.ndarray  # (B, B)
    num_products: int
    seed: int
    low: np.ndarray | None = None  # (B, B) nan with a single probe; None in results of version 0.1
    high: np.ndarray | None = None
    probe: str = "rademacher"

    @property
    def is_bound(self) -> bool:
        """True if fewer than ten probes were drawn for each block, so that `low` and `high` are a bound."""
        return self.num_products < ENOUGH * len(self.names)

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the 95 % intervals; of results without them, Student's."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        half = student(self.num_products // len(self.names) - 1) * self.stderr
        return np.maximum(self.frobenius - half, 0.0), self.frobenius + half

    def table(self) -> Any:
        """One row per pair of blocks."""
        rows, columns = np.indices(self.frobenius.shape)
        low, high = self.interval
        return {
            "row": np.array(self.names, dtype=object)[rows.ravel()],
            "column": np.array(self.names, dtype=object)[columns.ravel()],
            "frobenius": self.frobenius.ravel(),
            "stderr": self.stderr.ravel(),
            "low": low.ravel(),
            "high": high.ravel(),
        }

    def plot(self, ax: Axes | None = None) -> Axes:
        """Root mean square entry of every block, as a heat map on a logarithmic scale."""
        from curvescope.viz import blocks

        entries = np.sqrt(np.outer(self.sizes, self.sizes))
        return blocks.heat_map(ax, self.names, self.frobenius / entries, label="root mean square entry")


@fixed_operator
def block_norms(
    op: LinearOperator,
    slices: Mapping[str, slice] | None = None,
    *,
    num_probes: int = 4,
    probe: Probe = "rademacher",
    seed: int = 0,
) -> BlockNorms:
    """Estimate the norms of all blocks from probes that are nonzero on one block each.

    For v on block c with independent entries of variance one, E‖(A v)_b‖² = ‖A_bc‖²: one product gives a
    whole column of the map, and B · num_probes of them all of it. (A probe that is nonzero on several blocks
    would mix the blocks of a row.)

    Args:
        slices: where each block lies; by default the blocks of `op.space`.
    """
    check_square(op, "block_norms")
    check_count("num_probes", num_probes, at_least=1)
    check_choice("probe", probe, get_args(Probe))
    op, blocks = check_slices(op, slices)
    lengths = np.empty((num_probes, len(blocks), len(blocks)))
    sizes = block_sizes(op, blocks)
    cosines = np.zeros((num_probes - 1, len(blocks), len(blocks))) if 1 < num_probes < ENOUGH else None
    for c, (name, entries) in enumerate(track(list(blocks.items()), "block map")):
        options: dict[str, Any] = {"seed": seed, "kind": probe, "shard": block_shard(op, name)}
        neighbors = [NeighborCosines(num_probes) for _ in blocks]
        for columns in column_blocks(op, num_probes):
            V = torch.zeros(op.local_shape[1], columns.stop - columns.start, dtype=op.dtype, device=op.device)
            probes(sizes[name], V.shape[1], first=columns.start, out=V[entries], **options)
            AV = op @ V
            norms = [column_norms(AV[rows]) for rows in blocks.values()]
            lengths[columns, :, c] = to_numpy(torch.stack(norms, dim=1))
            for of_block, rows, sizes_of_block in zip(neighbors, blocks.values(), norms, strict=True):
                of_block.add(AV[rows], sizes_of_block)
        if cosines is not None and sizes[name] > 1:  # a block with one column is exact
            gathered = [of_block.gathered() for of_block in neighbors]
            cosines[:, :, c] = np.stack([values for values in gathered if values is not None], axis=1)
    squares = mean_square(lengths, cosines)
    return BlockNorms(
        names=list(blocks),
        sizes=np.array(list(sizes.values())),
        frobenius=squares.root,
        stderr=squares.root_stderr,
        squared=squares.squared,
        num_products=num_probes * len(blocks),
        seed=seed,
        low=squares.low,
        high=squares.high,
        probe=probe,
    )
