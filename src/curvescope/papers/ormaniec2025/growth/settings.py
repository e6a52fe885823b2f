"""The sweeps of the paper: which network, which loss, which scales of the embeddings, which exponents.

Common to all: 64 sums of two numbers of five digits in one batch, d = 128, one head, ReLU, and 20 repeats
with weights N(0, 0.64/d). Names are experiment, norm, loss, grid and depth, as in the published result files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from curvescope.core.errors import UsageError, near_misses
from curvescope.core.parts import SYMBOLS, Symbol

Family = Literal["softmax", "linear", "mlp"]
PARTS: tuple[Symbol, ...] = tuple(SYMBOLS.values())
WIDTH, VOCABULARY, CONTEXT = 128, 12, 18
REPEATS = 20

GRIDS = {
    "log": np.logspace(-2, 1, 20),
    "linear": np.linspace(0.1, 10, 20),
    "linear_short": np.linspace(0.1, 1, 20),
    "log_short": np.logspace(-1, 0, 20),
}


@dataclass(frozen=True)
class Experiment:
    """One sweep."""

    name: str
    family: Family
    depth: int
    grid: str
    norm: Literal["none", "pre"] = "none"

    @property
    def sigmas(self) -> np.ndarray:
        """Standard deviations of the embeddings' entries."""
        return GRIDS[self.grid]

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks that are measured in every layer."""
        return ("W",) if self.family == "mlp" else ("W_V", "W_Q")

    @property
    def rows(self) -> list[tuple[str, Symbol, int]]:
        """Everything that is measured at one scale: block, part and layer, counted from 0."""
        return [
            (block, part, layer) for block in self.blocks for part in PARTS for layer in range(self.depth)
        ]

    @property
    def slow(self) -> bool:
        """Whether one scale is worth being stored by itself."""
        return self.family == "softmax" and self.depth > 1

    def is_zero(self, block: str, part: str, layer: int) -> bool:
        """Whether a part is zero by structure: the network is linear in the block, up to ReLU."""
        if part != "H_f" or self.norm == "pre":
            return False
        last = layer == self.depth - 1
        return self.family == "mlp" or (last and (self.family == "linear" or block == "W_V"))


def _all() -> dict[str, Experiment]:
    found = [Experiment(f"softmax_none_ce_log_L{depth}", "softmax", depth, "log") for depth in range(1, 6)]
    found += [
        Experiment("softmax_none_ce_linear_L1", "softmax", 1, "linear"),
        Experiment("softmax_none_ce_linear_short_L1", "softmax", 1, "linear_short"),
        Experiment("softmax_pre_ce_log_L1", "softmax", 1, "log", norm="pre"),
    ]
    found += [
        Experiment(f"linattn_none_mse_log_short_L{depth}", "linear", depth, "log_short")
        for depth in range(1, 4)
    ]
    found += [Experiment(f"mlp_L{depth}", "mlp", depth, "log") for depth in range(1, 6)]
    return {experiment.name: experiment for experiment in found}


EXPERIMENTS = _all()


def chosen(patterns: Sequence[str]) -> list[Experiment]:
    """The experiments that match the globs, in the order of the table; one without a match is an error."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in EXPERIMENTS):
            raise UsageError(
                f"experiments: expected globs of the sweeps' names, got {pattern!r}",
                hint=near_misses(pattern, list(EXPERIMENTS)),
            )
    return [e for name, e in EXPERIMENTS.items() if any(fnmatchcase(name, glob) for glob in patterns)]


@dataclass(frozen=True)
class Law:
    """A range of scales in which a block is fitted by a power of σ, and what the power should be."""

    regime: str
    low: float
    high: float
    claimed: float | None  # the exponent that the paper draws or prints, if any
    expected: float | None  # the exponent that theory gives in this regime; None where there is no law
    tolerance: float


def laws(experiment: Experiment, block: str, part: str, layer: int) -> list[Law]:
    """The fits of one curve, none if it is exactly zero."""
    if experiment.is_zero(block, part, layer):
        return []
    if experiment.family == "mlp":
        return [Law("all σ", 0.01, 10, 2, 2, 0.01)]
    if experiment.family == "linear":
        return _linear_attention(experiment, part, layer)
    if experiment.norm == "pre":
        return _pre_norm(block, part)
    return _softmax(experiment, block, part)


def _softmax(experiment: Experiment, block: str, part: str) -> list[Law]:
    """Laws of small σ, where F' in W_Q is of order σ³ and in W_V of order σ, and F'' in W_Q of order σ⁵.

    They are limits σ → 0, and how far they reach was read off the measured curves: one layer leaves them near
    σ = 1, three near 0.1, five near 0.03. The longer ranges are fitted too, as claims without an expectation.
    Beyond σ = 1 attention and loss saturate. H_f of W_V in an inner layer comes from later scores, σ³;
    the paper claims nothing there.
    """
    expected = {("W_Q", "H_o"): 6, ("W_Q", "H_f"): 5, ("W_Q", "H"): 5, ("W_V", "H_f"): 3}.get(
        (block, part), 2
    )
    claimed = None if (block, part) == ("W_V", "H_f") else expected
    if experiment.grid == "linear":
        return [Law("large σ", 1, 10, claimed, None, 0.05)]
    if experiment.grid == "linear_short":
        return [Law("σ ≤ 1/2", 0.1, 0.5, claimed, None, 0.05), Law("σ ≤ 1", 0.1, 1, claimed, None, 0.05)]
    deep = experiment.depth > 3
    return [
        Law("small σ", 0.01, 0.03 if deep else 0.1, claimed, expected, 0.05),
        *([Law("σ ≤ 0.1", 0.01, 0.1, claimed, None, 0.05)] if deep else []),
        Law("σ ≤ 1", 0.01, 1, claimed, expected if experiment.depth == 1 else None, 0.05),
        Law("large σ", 1, 10, claimed, None, 0.05),
    ]


def _linear_attention(experiment: Experiment, part: str, layer: int) -> list[Law]:
    """The output is homogeneous of degree 3^D in the embeddings, so H_o ~ σ^(2·3^D).

    H_f is residual times second derivative: σ^(3^D) while the targets dominate the residual, twice that when
    the output does. H follows H_f where that is the larger.
    """
    degree = 3**experiment.depth
    tolerance = {1: 0.1, 2: 0.3, 3: 1.5}[experiment.depth]
    if part == "H_o" or layer == experiment.depth - 1:
        return [Law("all σ", 0.1, 1, 2 * degree, 2 * degree, tolerance)]
    return [
        Law("small σ", 0.1, 0.3, 2 * degree, degree, tolerance),
        Law("large σ", 0.5, 1, 2 * degree, 2 * degree, tolerance),
    ]


def _pre_norm(block: str, part: str) -> list[Law]:
    """Attention sees normalized tokens: flat, until the stream outgrows attention's output and the norms
    behind divide by σ, once for every derivative of the stream.

    The claimed exponents are the published fits over the whole range. Where the plateau ends was read off the
    measured curves.
    """
    printed = {
        ("W_V", "H_o"): -1.2, ("W_V", "H_f"): -1.3, ("W_V", "H"): -1.2,
        ("W_Q", "H_o"): -1.2, ("W_Q", "H_f"): -0.7, ("W_Q", "H"): -0.6,
    }[block, part]  # fmt: skip
    tail = -1 if block == "W_Q" and part != "H_o" else -2
    return [
        Law("plateau", 0.01, 0.05, printed, 0, 0.15),
        Law("all σ", 0.01, 10, printed, None, 0.1),
        Law("large σ", 1, 10, printed, tail, 0.1),
    ]
