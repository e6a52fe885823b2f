"""Random columns and products with many columns, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.sums import column_dots, norms, summing_dtype, to_numpy
from curvescope.algorithms.vectors import columns_of, fresh, vector_bytes
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import track
from curvescope.core.seeds import Probe, probes

__all__ = [
    "column_blocks",
    "column_dots",
    "columns_at_once",
    "gather_samples",
    "mean_and_stderr",
    "norms",
    "probe_batches",
    "summing_dtype",
    "to_numpy",
]

MAX_COLUMNS = 64
MAX_COLUMN_BYTES = 2**30  # of one batch of columns, unless a single column is larger
# On a CPU, products with columns of 34 KB are six times as fast 64 at a time as one at a time, those with
# 0.5 MB twice as fast 8 at a time and slower 16 at a time, and of 2 MB two are as good as any number. So more
# than these would take memory and no less time.
CPU_BLOCK_BYTES = 6 * 2**20
CPU_PAIR_BYTES = 8 * 2**20  # of a column, up to which two at a time pay


def columns_at_once(op: LinearOperator) -> int:
    """How many columns one product gets: at most 64, and on a CPU at most 6 MiB of them, else 1 GiB.

    Two on a CPU where a column has at most 8 MiB; longer ones go alone.
    """
    column = vector_bytes(op)
    if op.device.type != "cpu":
        return max(1, min(MAX_COLUMNS, MAX_COLUMN_BYTES // column))
    return min(MAX_COLUMNS, max(2 if column <= CPU_PAIR_BYTES else 1, CPU_BLOCK_BYTES // column))


def probe_batches(
    op: LinearOperator, num_probes: int, *, seed: int, kind: Probe = "rademacher", first: int = 0, what: str
) -> Iterator[Tensor]:
    """Probes `first, …` of the operator's size, in batches (n, c) on its device.

    Column j depends on (seed, j) alone, so the batches do not change a result. One memory serves all of
    them: a batch may be overwritten, and is gone when the next is asked for.
    """
    width, n = min(columns_at_once(op), num_probes), op.local_shape[1]
    memory = fresh(op, n * width)
    for block in track(list(column_blocks(op, num_probes)), what):
        count = block.stop - block.start
        columns = memory[: n * count].view(n, count)
        where = {"out": columns, "pieces": columns_of(op)}
        yield probes(op.shape[1], count, seed=seed, first=first + block.start, kind=kind, **where)


def column_blocks(op: LinearOperator, count: int) -> Iterator[slice]:
    """The columns 0, …, count − 1 in order, as many at a time as one product gets."""
    width = columns_at_once(op)
    for start in range(0, count, width):
        yield slice(start, min(start + width, count))


def mean_and_stderr(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the first axis and its standard error; one sample has an unknown error, nan.

    Samples are scaled by a power of two first, which changes no digit, so that no square is out of range.
    """
    count = samples.shape[0]
    mean = samples.mean(axis=0)
    if count == 1:
        return mean, np.full_like(mean, np.nan)
    top = np.abs(samples).max(axis=0)
    unit = np.where((top > 0) & np.isfinite(top), np.exp2(np.frexp(top)[1].clip(-1000, 1000)), 1.0)
    return mean, (samples / unit).std(axis=0, ddof=1) * unit / np.sqrt(count)


def gather_samples(pieces: Sequence[Tensor]) -> np.ndarray:
    """Samples of all batches one after the other, moved to the CPU once."""
    return to_numpy(torch.cat(list(pieces)))
