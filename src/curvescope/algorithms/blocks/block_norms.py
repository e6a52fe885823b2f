"""The map of blocks: the Frobenius norm of every block A_bc, diagonal or not, with error bars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from curvescope.algorithms.checks import (
    block_pieces,
    block_sizes,
    check_choice,
    check_count,
    check_slices,
    check_square,
    of_one_matrix,
)
from curvescope.algorithms.columns import column_blocks, to_numpy
from curvescope.algorithms.estimates.intervals import column_norms, mean_square, student
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.core.seeds import Probe, probes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class BlockNorms(Result):
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
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the 95 % intervals; of results without them, Student's."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        half = student(self.num_products // len(self.names) - 1) * self.stderr
        return np.maximum(self.frobenius - half, 0.0), self.frobenius + half

    def to_frame(self) -> pd.DataFrame:
        """One row per pair of blocks."""
        import pandas as pd

        rows, columns = np.indices(self.frobenius.shape)
        low, high = self.interval
        return pd.DataFrame(
            {
                "row": np.array(self.names, dtype=object)[rows.ravel()],
                "column": np.array(self.names, dtype=object)[columns.ravel()],
                "frobenius": self.frobenius.ravel(),
                "stderr": self.stderr.ravel(),
                "low": low.ravel(),
                "high": high.ravel(),
            }
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Root mean square entry of every block, as a heat map on a logarithmic scale."""
        from curvescope.viz import blocks

        entries = np.sqrt(np.outer(self.sizes, self.sizes))
        return blocks.heat_map(ax, self.names, self.frobenius / entries, label="root mean square entry")


@of_one_matrix
def block_norms(
    op: LinearOperator,
    slices: Mapping[str, slice] | None = None,
    *,
    num_probes: int = 4,
    probe: Probe = "rademacher",
    seed: int = 0,
) -> BlockNorms:
    """Norms of all blocks from probes that live on one block each.

    For v on block c with independent entries of variance one, E‖(A v)_b‖² = ‖A_bc‖²: one product gives a
    whole column of the map, and B · num_probes of them all of it. (A probe on all blocks at once would mix a
    row's blocks.)

    Args:
        slices: where each block lies; by default the blocks of `op.space`.
    """
    check_square(op, "block_norms")
    check_count("num_probes", num_probes, at_least=1)
    check_choice("probe", probe, get_args(Probe))
    op, found = check_slices(op, slices)
    lengths = np.empty((num_probes, len(found), len(found)))
    sizes = block_sizes(op, found)
    for c, (name, columns) in enumerate(track(list(found.items()), "block map")):
        where: dict[str, Any] = {"seed": seed, "kind": probe, "pieces": block_pieces(op, name)}
        for some in column_blocks(op, num_probes):
            V = torch.zeros(op.local_shape[1], some.stop - some.start, dtype=op.dtype, device=op.device)
            probes(sizes[name], V.shape[1], first=some.start, out=V[columns], **where)
            AV = op @ V
            lengths[some, :, c] = to_numpy(torch.stack([column_norms(AV[b]) for b in found.values()], dim=1))
    norms = mean_square(lengths)
    return BlockNorms(
        names=list(found),
        sizes=np.array(list(sizes.values())),
        frobenius=norms.root,
        stderr=norms.root_stderr,
        squared=norms.squared,
        num_products=num_probes * len(found),
        seed=seed,
        low=norms.low,
        high=norms.high,
        probe=probe,
    )
