"""Numbers of the diagonal blocks of one operator: the estimate of each block, and its row in a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from curvescope.algorithms import BlockTraces, Eigenpairs, SpectralDensity
from curvescope.algorithms.blocks.heterogeneity import Heterogeneity
from curvescope.algorithms.blocks.probes import Ends, OwnProbes
from curvescope.core.number_format import below_noise
from curvescope.core.result import Result
from curvescope.sampling import Ranking, Sampled, rank
from curvescope.studies.common.sampling import columns_of


class Sharpness(NamedTuple):
    """The extreme eigenvalues of a block; nan if not known."""

    largest: float
    error: float  # residual: there is an eigenvalue within it
    high: float  # λ_max is at most this, 95 times in 100
    smallest: float
    smallest_error: float
    low: float = math.nan  # λ_min is at least this, 95 times in 100

    @property
    def ceiling(self) -> float:
        """2/λ_max, the learning rate that a block allows, from the upper end of λ_max if it is known."""
        top = self.largest if math.isnan(self.high) else self.high
        return 2 / top if self.largest > 0 else math.nan


@dataclass(frozen=True)
class Part(Result):
    """Results of the diagonal blocks of one operator; a number that was not measured is empty."""

    traces: BlockTraces  # from shared probes
    norms: dict[str, OwnProbes]
    extremes: dict[str, Eigenpairs]  # lowest and highest; of a positive semi-definite operator the highest
    densities: dict[str, SpectralDensity]
    heterogeneity: Heterogeneity | None
    whole: Ends | None = None  # ends of the spectrum of all blocks together; None in results of version 0.1
    sampled: dict[str, Sampled] = field(
        default_factory=dict
    )  # of all blocks together: lambda_max, trace, norm
    sampled_blocks: dict[str, Sampled] = field(default_factory=dict)  # λ_max of the sharpest blocks

    def trace_of(self, name: str) -> tuple[float, float, str]:
        """Trace of a block, its standard error, and the kind of its probes.

        The kind is "exact", "own" if the block has two or more probes of its own, or "shared"; it is "" for a
        block without a trace. The choice does not depend on the errors, because the smaller of two estimated
        errors may be small by chance.
        """
        value, stderr, _, _, probes = self._chosen(name)
        return value, stderr, probes

    def trace_interval(self, name: str) -> tuple[float, float]:
        """Ends of the 95 % interval of `trace_of`; nan from one probe."""
        return self._chosen(name)[2:4]

    def _chosen(self, name: str) -> tuple[float, float, float, float, str]:
        own, t = self.norms.get(name), self.traces
        shared = name in t.names
        if own is not None and not (shared and math.isnan(own.trace_stderr)):
            words = "exact" if own.exact else "own"
            return own.trace, own.trace_stderr, own.trace_low, own.trace_high, words
        if not shared:
            return math.nan, math.nan, math.nan, math.nan, ""
        i = t.names.index(name)
        low, high = (float(end[i]) for end in t.interval)
        return float(t.values[i]), float(t.stderr[i]), low, high, "shared"

    def is_noise(self, name: str) -> bool:
        """Return True if the interval of the trace includes zero, or is not known."""
        low, high = self.trace_interval(name)
        return not (low > 0 or high < 0 or low == high)

    def noise(self, name: str) -> float:
        """Share of the trace that may be noise: half its interval over its size, at most 1."""
        low, high = self.trace_interval(name)
        value, half = abs(self.trace_of(name)[0]), (high - low) / 2
        return 0.0 if half == 0 else 1.0 if math.isnan(half) or half >= value else half / value

    @property
    def trace(self) -> tuple[float, float]:
        """Trace of all blocks together: estimate and standard error, summed probe by probe."""
        total = self.traces.total
        return total.value, total.stderr

    def sharpness(self, name: str) -> Sharpness:
        """The extreme eigenvalues of a block: converged ones if they were measured, else its Ritz values."""
        if name in self.extremes and not self._is_zero(name):
            pair = self.extremes[name]
            both = len(pair.values) > 1
            top, error = float(pair.values[-1]), float(pair.residuals[-1])
            low = (float(pair.values[0]), float(pair.residuals[0])) if both else (math.nan, math.nan)
            high, least = (top + error, low[0] - low[1]) if pair.converged else (math.nan, math.nan)
            return Sharpness(top, error, high, *low, least)
        own = self.norms.get(name)
        if own is None or own.ends is None:
            return Sharpness(*[math.nan] * 5)
        (smallest, top), (low_error, error) = own.ends.values.tolist(), own.ends.residuals.tolist()
        low = own.ends.low
        if self.traces.psd and not own.exact:  # few steps do not separate the many eigenvalues near zero
            smallest = low_error = low = math.nan
        return Sharpness(top, error, own.ends.high, smallest, low_error, low)

    def _is_zero(self, name: str) -> bool:
        """Return True if the curvature of a block is zero up to rounding."""
        own = self.norms.get(name)
        return own is not None and own.ends is not None and not own.ends.values.any()

    def ranking(self) -> list[str]:
        """Names of the blocks whose λ_max is known, the sharpest first."""
        known = {name: self.sharpness(name).largest for name in dict.fromkeys([*self.norms, *self.extremes])}
        return sorted((n for n, top in known.items() if not math.isnan(top)), key=lambda n: -known[n])

    @property
    def order(self) -> Ranking:
        """Order of the sharpest blocks, and the blocks that could be first on other data."""
        return rank(self.sampled_blocks)

    def row(self, name: str) -> dict[str, Any]:
        """Row of the table of blocks: all numbers of one block."""
        columns = self._eigenvalues(name)
        value, stderr, low, high, probes = self._chosen(name)
        columns |= {
            "trace": below_noise(value, high) if self.traces.psd else value,
            "trace_numerical": stderr,
        }
        columns |= {"trace_low": low, "trace_high": high, "probes": probes, "noise": self._noise(name)}
        if name in self.norms:
            own = self.norms[name]
            columns |= {"norm": own.norm, "norm_numerical": own.norm_stderr}
            columns |= {"norm_low": own.norm_low, "norm_high": own.norm_high}
        return columns

    def _noise(self, name: str) -> float:
        """Return `noise`, or nan if the trace has no interval."""
        probes, low = self.trace_of(name)[2], self.trace_interval(name)[0]
        return math.nan if not probes or math.isnan(low) else self.noise(name)

    def _eigenvalues(self, name: str) -> dict[str, Any]:
        s = self.sharpness(name)
        if math.isnan(s.largest):
            return {}
        columns: dict[str, Any] = dict(columns_of(None, "lambda_max", s.largest, s.error))
        if name in self.sampled_blocks:
            errors = columns_of(self.sampled_blocks[name], "lambda_max", s.largest, s.error)
            columns |= {**errors, "lambda_max": s.largest, "lambda_max_numerical": s.error}
        columns |= {"lambda_max_bound": s.high, "ceiling": s.ceiling}
        columns |= columns_of(None, "lambda_min", s.smallest, s.smallest_error)
        columns |= {"lambda_min_bound": s.low}
        if name in self.extremes:
            pair = self.extremes[name]
            columns |= {
                "spectral_norm": 0.0 if self._is_zero(name) else float(np.abs(pair.values).max()),
                "converged": "yes" if pair.converged else "no",
            }
        return columns
