"""Traces from random probes: Hutchinson, Hutch++ and XTrace, each with an interval that covers the truth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch

from curvescope.algorithms.checks import check_choice, check_count, check_slices, check_square, of_one_matrix
from curvescope.algorithms.columns import (
    column_blocks,
    column_dots,
    columns_at_once,
    gather_samples,
    mean_and_stderr,
    probe_batches,
    to_numpy,
)
from curvescope.algorithms.estimates.intervals import mean_interval, positive_interval
from curvescope.algorithms.estimates.sketch import range_sketch, small_matrices
from curvescope.algorithms.estimates.xtrace import leave_one_out
from curvescope.algorithms.sums import add_up
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Result
from curvescope.core.seeds import Probe
from curvescope.viz import blocks, estimates

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Method = Literal["hutchinson", "hutch++", "xtrace"]
FEWEST: dict[str, int] = {"hutchinson": 1, "hutch++": 6, "xtrace": 4}


@dataclass(frozen=True)
class TraceEstimate(Result):
    """Trace of an operator: the mean of `samples`, with its standard error (nan for one sample).

    The truth lies between `low` and `high` 95 times in 100, see `intervals`; nan for one sample.
    """

    value: float
    stderr: float
    samples: np.ndarray  # one for each probe that the error is taken over
    num_products: int
    method: str
    probe: str
    seed: int
    low: float = math.nan
    high: float = math.nan

    def to_frame(self) -> pd.DataFrame:
        """One row per sample."""
        import pandas as pd

        return pd.DataFrame({"sample": np.arange(1, len(self.samples) + 1), "trace": self.samples})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Samples, their mean and its 95 % interval."""
        return estimates.samples(ax, self.samples, self.value, (self.low, self.high), label="trace")


@dataclass(frozen=True)
class BlockTraces(Result):
    """Traces of diagonal blocks, all from the same probes.

    Of a positive semi-definite operator no value is negative: a mean below zero is noise, and the value is 0.
    """

    names: list[str]  # B blocks
    values: np.ndarray  # (B,)
    stderr: np.ndarray  # (B,)
    samples: np.ndarray  # (probes, B)
    num_products: int
    seed: int
    low: np.ndarray | None = None  # (B,) ends of the 95 % interval; None in results of version 0.1
    high: np.ndarray | None = None
    psd: bool = False  # samples below zero are noise
    probe: str = "rademacher"

    @property
    def noise(self) -> np.ndarray:
        """(B,) Share of each value that may be noise: half the interval over the value, at most 1."""
        low, high = self.interval
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (high - low) / 2 / np.abs(self.values)
        return np.where(np.isnan(share), np.where(high > low, 1.0, 0.0), np.minimum(share, 1.0))

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the 95 % intervals, (B,) each; nan from one probe."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        return mean_interval(self.values, self.stderr, len(self.samples) - 1)

    @property
    def total(self) -> TraceEstimate:
        """The trace of all blocks together, summed probe by probe."""
        samples = self.samples.sum(axis=1)
        mean, stderr = mean_and_stderr(samples)
        low, high = mean_interval(mean, stderr, len(samples) - 1, nonnegative=self.psd)
        value = max(float(mean), 0.0) if self.psd else float(mean)
        ends = {"low": float(low), "high": float(high)}
        return TraceEstimate(
            value, float(stderr), samples, self.num_products, "hutchinson", self.probe, self.seed, **ends
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per block."""
        import pandas as pd

        low, high = self.interval
        columns = {"block": self.names, "trace": self.values, "stderr": self.stderr}
        return pd.DataFrame({**columns, "low": low, "high": high})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Trace of every block with its 95 % interval, on a logarithmic scale with both signs."""
        return blocks.bars(ax, self.names, {"trace": (self.values, *self.interval)}, label="trace")


@of_one_matrix
def trace(
    op: LinearOperator,
    *,
    num_probes: int = 32,
    method: Method = "hutchinson",
    probe: Probe = "rademacher",
    seed: int = 0,
) -> TraceEstimate:
    """Trace of a square operator from `num_probes` products, without bias.

    Memory: for the c columns that one product takes (`columns_at_once`) 2c vectors, the probes and what a
    product returns, whatever the number of probes; besides these num_probes / 3 vectors for "hutch++" and
    num_probes / 2 for "xtrace", twice that if the operator is not symmetric.

    Args:
        num_probes: number of products; Hutch++ uses two thirds of them, XTrace all of them, to take out the
            dominant eigenspace. At least 6 and 4 for these.
        method: "hutchinson", the mean of vᵀ A v; "hutch++" (Meyer and others 2021), exact on a basis Q of
            A S and Hutchinson outside of it; "xtrace" (Epperly, Tropp and Webber 2024), the mean over i of
            Hutch++ with probe i left out of the sketch and used outside of it. The error of Hutch++ is
            that of its part outside, over num_probes // 3 probes or a few more. The leave-one-out estimates
            of XTrace depend on each other, which its error allows for, see `xtrace`.
        probe: signs, or Gaussian: these have the larger variance, 2 ‖A‖_F², and where one eigenvalue of an
            indefinite operator dominates, samples so skewed that intervals hold less often.
    """
    check_square(op, "trace")
    check_choice("method", method, get_args(Method))
    check_choice("probe", probe, get_args(Probe))
    check_count(f"num_probes for {method}", num_probes, at_least=FEWEST[method])
    if method == "xtrace":
        return _xtrace(op, num_probes, probe, seed)
    estimate = {"hutchinson": _hutchinson, "hutch++": _hutch_plus_plus}[method]
    inside, samples, products = estimate(op, num_probes, probe, seed)
    outside, stderr = mean_and_stderr(samples)
    around = positive_interval if op.psd and outside > 0 else mean_interval
    low, high = around(outside, stderr, len(samples) - 1)
    return TraceEstimate(
        value=float((inside + samples).mean()),
        stderr=float(stderr),
        samples=inside + samples,
        num_products=products,
        method=method,
        probe=probe,
        seed=seed,
        low=float(inside + low),
        high=float(inside + high),
    )


@of_one_matrix
def block_traces(
    op: LinearOperator,
    slices: Mapping[str, slice] | None = None,
    *,
    num_probes: int = 32,
    probe: Probe = "rademacher",
    seed: int = 0,
) -> BlockTraces:
    """Traces of all diagonal blocks from the same probes: Σ_{i in block} vᵢ (A v)ᵢ.

    Args:
        slices: rows of each block by name; by default the blocks of `op.space`.
    """
    check_square(op, "block_traces")
    check_count("num_probes", num_probes, at_least=1)
    check_choice("probe", probe, get_args(Probe))
    blocks = check_slices(op, slices)
    pieces = []
    for V in probe_batches(op, num_probes, seed=seed, kind=probe, what="block traces"):
        product = op @ V
        pieces.append(torch.stack([column_dots(V[rows], product[rows]) for rows in blocks.values()], dim=1))
    samples = gather_samples(pieces)
    values, stderr = mean_and_stderr(samples)
    low, high = mean_interval(values, stderr, num_probes - 1, nonnegative=op.psd)
    if op.psd:
        values = np.maximum(values, 0.0)
    return BlockTraces(list(blocks), values, stderr, samples, num_probes, seed, low, high, op.psd, probe)


Outside = tuple[float, np.ndarray, int]  # what is known exactly, samples of the rest, products


def _hutchinson(op: LinearOperator, num_probes: int, kind: Probe, seed: int) -> Outside:
    batches = probe_batches(op, num_probes, seed=seed, kind=kind, what="trace")
    return 0.0, gather_samples([column_dots(V, op @ V) for V in batches]), num_probes


def _hutch_plus_plus(op: LinearOperator, num_probes: int, kind: Probe, seed: int) -> Outside:
    """tr(Qᵀ A Q), and gᵀ P A P g for each outer probe g, with P = I − Q Qᵀ and Q = orth(A S)."""
    if num_probes >= op.shape[0]:  # signs of few entries coincide, and would look like certainty
        exact = np.trace(to_numpy(op.dense(chunk=columns_at_once(op))))
        return float(exact), np.zeros(num_probes // 3), op.shape[0]
    count = num_probes // 3
    outer = num_probes - 2 * count
    Q = range_sketch(op, count, kind=kind, seed=seed).Q
    inside = sum(float(column_dots(Q[:, b], op @ Q[:, b]).sum()) for b in column_blocks(op, count))
    pieces = []
    for G in probe_batches(op, outer, seed=seed, kind=kind, first=count, what="trace"):
        G.addmm_(Q, add_up(Q.T @ G), alpha=-1)
        pieces.append(column_dots(G, op @ G))
    return inside, gather_samples(pieces), 2 * count + outer


def _xtrace(op: LinearOperator, num_probes: int, kind: Probe, seed: int) -> TraceEstimate:
    """From Y = A Ω = Q R and A Q, see `xtrace`; as many products as rows write the operator out."""
    count, n = num_probes // 2, op.shape[0]
    if count >= n:
        value = float(np.trace(to_numpy(op.dense(chunk=columns_at_once(op)))))
        return TraceEstimate(
            value, 0.0, np.full(count, value), n, "xtrace", kind, seed, low=value, high=value
        )
    sketch = range_sketch(op, count, kind=kind, seed=seed)
    samples, stderr = leave_one_out(*small_matrices(op, sketch, kind, seed), eps=torch.finfo(op.dtype).eps)
    samples, stderr = samples / sketch.scale, stderr / sketch.scale
    mean = samples.mean()
    low, high = mean_interval(mean, np.asarray(stderr), count - 1, nonnegative=op.psd)
    value = max(float(mean), 0.0) if op.psd else float(mean)
    ends = {"low": float(low), "high": float(high)}
    return TraceEstimate(value, stderr, samples, 2 * count, "xtrace", kind, seed, **ends)
