"""Traces from random probes: Hutchinson, Hutch++ and XTrace, each with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import sum_over_ranks
from curvescope.algorithms.checks import check_choice, check_count, check_slices, check_square, fixed_operator
from curvescope.algorithms.columns import (
    column_blocks,
    column_dots,
    columns_at_once,
    gather_samples,
    mean_and_stderr,
    probe_batches,
    to_numpy,
)
from curvescope.algorithms.estimates.intervals import (
    ENOUGH,
    column_norms,
    form_interval,
    mean_interval,
    mean_square,
)
from curvescope.algorithms.estimates.xtrace import leave_one_out, range_sketch, small_matrices
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Tabular
from curvescope.core.seeds import Probe
from curvescope.viz import blocks, estimates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Method = Literal["hutchinson", "hutch++", "xtrace"]
FEWEST: dict[str, int] = {"hutchinson": 1, "hutch++": 6, "xtrace": 4}


@dataclass(frozen=True)
class TraceEstimate(Tabular):
    """Trace of an operator: the mean of `samples`, with its standard error (nan for one sample).

    The true value lies between `low` and `high` 95 times in 100, see `intervals`; nan for one sample. If
    `is_bound`, too few probes were drawn for that: the ends are then a bound. That of `hutchinson` holds at
    least as often, except with two or three probes of a matrix with one dominating pair of entries; with such
    a pair the bound of `xtrace` and `hutch++` from six to eight products held 0.74 to 0.89.
    """

    value: float
    stderr: float
    samples: np.ndarray  # one per probe that enters the error
    num_products: int
    method: str
    probe: str
    seed: int
    low: float = math.nan
    high: float = math.nan

    @property
    def is_bound(self) -> bool:
        """True if fewer than ten samples scatter, so that `low` and `high` are a bound."""
        return len(self.samples) < ENOUGH and self.stderr != 0

    def table(self) -> Any:
        """One row per sample."""
        return {"sample": np.arange(1, len(self.samples) + 1), "trace": self.samples}

    def plot(self, ax: Axes | None = None) -> Axes:
        """Samples, their mean and its 95 % interval."""
        return estimates.samples(ax, self.samples, self.value, (self.low, self.high), label="trace")


@dataclass(frozen=True)
class BlockTraces(Tabular):
    """Traces of diagonal blocks, all from the same probes.

    For a positive semi-definite operator no value is negative: a mean below zero is noise, and the value is
    0.
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
    lengths: np.ndarray | None = None  # (B,) root mean square of ‖(A v)_b‖; None in results of version 0.1

    @property
    def noise(self) -> np.ndarray:
        """(B,) Share of each value that may be noise: half the interval over the value, at most 1."""
        low, high = self.interval
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (high - low) / 2 / np.abs(self.values)
        return np.where(np.isnan(share), np.where(high > low, 1.0, 0.0), np.minimum(share, 1.0))

    @property
    def is_bound(self) -> bool:
        """True if fewer than ten probes were drawn, so that `low` and `high` are a bound."""
        return len(self.samples) < ENOUGH

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
        length = 0.0 if self.lengths is None else math.hypot(*self.lengths)
        degrees = len(samples) - 1
        low, high = form_interval(float(mean), float(stderr), length, degrees, nonnegative=self.psd)
        value = max(float(mean), 0.0) if self.psd else float(mean)
        ends = {"low": low, "high": high}
        return TraceEstimate(
            value, float(stderr), samples, self.num_products, "hutchinson", self.probe, self.seed, **ends
        )

    def table(self) -> Any:
        """One row per block."""
        low, high = self.interval
        columns = {"block": self.names, "trace": self.values, "stderr": self.stderr}
        return {**columns, "low": low, "high": high}

    def plot(self, ax: Axes | None = None) -> Axes:
        """Trace of every block with its 95 % interval, on a logarithmic scale with both signs."""
        return blocks.bars(ax, self.names, {"trace": (self.values, *self.interval)}, label="trace")


@fixed_operator
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
        probe: Signs, or Gaussian. Gaussian probes have the larger variance, 2 ‖A‖_F². If one eigenvalue of an
            indefinite operator dominates, their samples are so skewed that intervals hold less often.
    """
    check_square(op, "trace")
    check_choice("method", method, get_args(Method))
    check_choice("probe", probe, get_args(Probe))
    check_count(f"num_probes for {method}", num_probes, at_least=FEWEST[method])
    if method == "xtrace":
        return _xtrace(op, num_probes, probe, seed)
    if method == "hutch++":
        return _hutch_plus_plus(op, num_probes, probe, seed)
    samples, lengths = _forms(op, num_probes, probe, seed)
    return _hutchinson(op, samples, lengths, probe, seed)


def accurate_trace(
    op: LinearOperator, *, accuracy: float, fewest: int = 16, most: int = 256, seed: int = 0
) -> TraceEstimate:
    """Hutchinson's trace from as many probes as make half its interval at most `accuracy` times the value.

    The number of probes is doubled until the interval is narrow enough or `most` probes are drawn; earlier
    probes are reused. For an operator of at most `most` rows the trace is computed exactly instead.
    """
    check_square(op, "accurate_trace")
    check_count("fewest", fewest, at_least=1)
    if op.shape[0] <= most:
        return _exact(op, 1, "hutchinson", "rademacher", seed)
    samples, lengths = np.empty(0), np.empty(0)
    count = min(fewest, most)
    while True:
        more = _forms(op, count - len(samples), "rademacher", seed, first=len(samples))
        samples, lengths = np.append(samples, more[0]), np.append(lengths, more[1])
        estimate = _hutchinson(op, samples, lengths, "rademacher", seed)
        if count >= most or estimate.high - estimate.low <= 2 * accuracy * abs(estimate.value):
            return estimate
        count = min(2 * count, most)


@fixed_operator
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
    op, blocks = check_slices(op, slices)
    pieces, sizes = [], []
    for V in probe_batches(op, num_probes, seed=seed, kind=probe, what="block traces"):
        product = op @ V
        pieces.append(torch.stack([column_dots(V[rows], product[rows]) for rows in blocks.values()], dim=1))
        sizes.append(torch.stack([column_norms(product[rows]) for rows in blocks.values()], dim=1))
    samples, lengths = gather_samples(pieces), mean_square(gather_samples(sizes)).root
    values, stderr = mean_and_stderr(samples)
    each = zip(values.tolist(), stderr.tolist(), lengths.tolist(), strict=True)
    ends = [form_interval(*numbers, num_probes - 1, nonnegative=op.psd) for numbers in each]
    low, high = np.array(ends).reshape(-1, 2).T
    if op.psd:
        values = np.maximum(values, 0.0)
    fields = (values, stderr, samples, num_probes, seed, low, high, op.psd, probe, lengths)
    return BlockTraces(list(blocks), *fields)


def _forms(
    op: LinearOperator, count: int, kind: Probe, seed: int, *, first: int = 0, without: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """vᵀ A v and ‖A v‖ for the probes `first, …`, (count,) each.

    Args:
        without: orthonormal columns Q that are projected out of the probes first.
    """
    forms, lengths = [], []
    for V in probe_batches(op, count, seed=seed, kind=kind, first=first, what="trace"):
        if without is not None:
            V.addmm_(without, sum_over_ranks(without.T @ V), alpha=-1)
        product = op @ V
        forms.append(column_dots(V, product))
        lengths.append(column_norms(product))
        del product  # before the next one is made
    return gather_samples(forms), gather_samples(lengths)


def _hutchinson(
    op: LinearOperator, samples: np.ndarray, lengths: np.ndarray, kind: Probe, seed: int
) -> TraceEstimate:
    """Mean of the forms, and its interval."""
    mean, stderr = mean_and_stderr(samples)
    norm, positive = float(mean_square(lengths).root), op.psd and float(mean) > 0
    low, high = form_interval(float(mean), float(stderr), norm, len(samples) - 1, positive=positive)
    ends = {"low": low, "high": high}
    return TraceEstimate(float(mean), float(stderr), samples, len(samples), "hutchinson", kind, seed, **ends)


def _exact(op: LinearOperator, count: int, method: Method, kind: Probe, seed: int) -> TraceEstimate:
    """Compute the trace exactly from the full matrix, as `count` equal samples."""
    n, value = op.shape[0], float(np.trace(to_numpy(op.to_dense(chunk=columns_at_once(op)))))
    return TraceEstimate(value, 0.0, np.full(count, value), n, method, kind, seed, low=value, high=value)


def _hutch_plus_plus(op: LinearOperator, num_probes: int, kind: Probe, seed: int) -> TraceEstimate:
    """tr(Qᵀ A Q), and gᵀ P A P g for each outer probe g, with P = I − Q Qᵀ and Q = orth(A S)."""
    if num_probes >= op.shape[0]:  # sign vectors with few entries coincide, which would look like certainty
        return _exact(op, num_probes // 3, "hutch++", kind, seed)
    count = num_probes // 3
    outer = num_probes - 2 * count
    Q = range_sketch(op, count, kind=kind, seed=seed).Q
    inside = sum(float(column_dots(Q[:, b], op @ Q[:, b]).sum()) for b in column_blocks(op, count))
    samples, lengths = _forms(op, outer, kind, seed, first=count, without=Q)
    mean, stderr = map(float, mean_and_stderr(samples))
    norm = float(mean_square(lengths).root)
    low, high = form_interval(mean, stderr, norm, outer - 1, nonnegative=op.psd and mean > 0)
    ends = {"low": inside + low, "high": inside + high}
    samples, products = inside + samples, 2 * count + outer
    return TraceEstimate(float(samples.mean()), stderr, samples, products, "hutch++", kind, seed, **ends)


def _xtrace(op: LinearOperator, num_probes: int, kind: Probe, seed: int) -> TraceEstimate:
    """Estimate the trace from Y = A Ω = Q R and A Q, see `xtrace`; exactly if there are as many products as
    rows.
    """
    count = num_probes // 2
    if count >= op.shape[0]:
        return _exact(op, count, "xtrace", kind, seed)
    sketch = range_sketch(op, count, kind=kind, seed=seed)
    eps = torch.finfo(op.dtype).eps
    samples, stderr, norm = leave_one_out(*small_matrices(op, sketch, kind, seed), eps=eps)
    samples, stderr, norm = samples / sketch.scale, stderr / sketch.scale, norm / sketch.scale
    mean = samples.mean()
    bound = norm if count < ENOUGH else 0.0  # the sketch contains dominating eigenvalues
    low, high = form_interval(float(mean), stderr, bound, count - 1, nonnegative=op.psd)
    value = max(float(mean), 0.0) if op.psd else float(mean)
    ends = {"low": float(low), "high": float(high)}
    return TraceEstimate(value, stderr, samples, 2 * count, "xtrace", kind, seed, **ends)
