"""Random columns, and products with many columns in batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import column_dots, norms, summing_dtype, to_numpy
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
MAX_COLUMN_BYTES = 2**30  # bytes of one batch of columns, unless a single column is larger
# On a CPU, products with columns of 34 KB are six times as fast 64 at a time as one at a time, those with 0.5
# MB twice as fast 8 at a time and slower 16 at a time, and with 2 MB two at a time are as fast as any number.
# More columns would take memory and save no time.
CPU_BLOCK_BYTES = 6 * 2**20
CPU_PAIR_BYTES = 8 * 2**20  # largest column for which two at a time are faster


def columns_at_once(op: LinearOperator) -> int:
    """Number of columns in one product: at most 64, and at most 6 MiB on a CPU or 1 GiB on a GPU.

    On a CPU it is two if a column has at most 8 MiB, and one for longer columns.
    """
    column = vector_bytes(op)
    if op.device.type != "cpu":
        return max(1, min(MAX_COLUMNS, MAX_COLUMN_BYTES // column))
    return min(MAX_COLUMNS, max(2 if column <= CPU_PAIR_BYTES else 1, CPU_BLOCK_BYTES // column))


def probe_batches(
    op: LinearOperator, num_probes: int, *, seed: int, kind: Probe = "rademacher", first: int = 0, what: str
) -> Iterator[Tensor]:
    """Probes `first, …` of the operator's size, in batches (n, c) on its device.

    Column j depends only on (seed, j), so results do not depend on the batches. All batches share one buffer:
    the caller may overwrite a batch, and the next one replaces it.
    """
    width, n = min(columns_at_once(op), num_probes), op.local_shape[1]
    buffer = fresh(op, n * width)
    for block in track(list(column_blocks(op, num_probes)), what):
        count = block.stop - block.start
        columns = buffer[: n * count].view(n, count)
        options = {"out": columns, "shard": columns_of(op)}
        yield probes(op.shape[1], count, seed=seed, first=first + block.start, kind=kind, **options)


def column_blocks(op: LinearOperator, count: int) -> Iterator[slice]:
    """Yield the columns 0, …, count − 1 in order, in groups for one product."""
    width = columns_at_once(op)
    for start in range(0, count, width):
        yield slice(start, min(start + width, count))


def mean_and_stderr(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over the first axis and its standard error; for one sample the error is unknown, nan.

    Samples are first scaled by a power of two, which is exact, so that no square is out of range.
    """
    count = samples.shape[0]
    mean = samples.mean(axis=0)
    if count == 1:
        return mean, np.full_like(mean, np.nan)
    top = np.abs(samples).max(axis=0)
    unit = np.where((top > 0) & np.isfinite(top), np.exp2(np.frexp(top)[1].clip(-1000, 1000)), 1.0)
    return mean, (samples / unit).std(axis=0, ddof=1) * unit / np.sqrt(count)


def gather_samples(pieces: Sequence[Tensor]) -> np.ndarray:
    """Concatenate the samples of all batches and copy them to the CPU at once."""
    return to_numpy(torch.cat(list(pieces)))
