"""What the paper and the article around it say about the propagation of curvature, and what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.papers.claims import Claim
from curvescope.papers.petrov2025.propagation.slopes import exponent, interval, sigma_slope, with_and_without
from curvescope.papers.petrov2025.propagation.variants import NORMS
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Origin
from curvescope.studies.propagation.shares import HESSIAN

if TYPE_CHECKING:
    from curvescope.papers.petrov2025.propagation.study import Spectrum, Sweeps

ARTICLE: Origin = ("article", "article")
OURS: Origin = ("ours, on a part that the article's table names", "ours")
ROUNDING = 1e-12


def of(result: Sweeps) -> list[Claim]:
    """All claims, with verdicts computed from the numbers."""
    whole = [s for name, s in result.spectra.items() if name.startswith("component.everything.")]
    return [
        _zero_blocks(whole),
        _dominance(whole),
        _bounded(result),
        *(_grows(result, norm) for norm in NORMS),
        _pre_norm(result),
        *(_component(result, name, words) for name, words in SWITCHED.items()),
        _adds_up(result),
    ]


SWITCHED = {
    "no residual": "residual connections lower the largest eigenvalue",
    "no norm": "normalization lowers the largest eigenvalue",
    "no feed-forward": "the feed-forward network raises the largest eigenvalue",
    "one head": "several heads lower the largest eigenvalue",
}
"""What a part may do, by what is switched off: the article's table names parts, the sentences are ours."""


def _zero_blocks(spectra: list[Spectrum]) -> Claim:
    """Pairs of blocks without a second derivative; the loss does not depend on key biases at all."""
    zero, keys, pairs = 0, 0, 0
    for s in spectra:
        empty = s.norms <= ROUNDING * s.norms.max()
        key = np.array([name.endswith(".b_K") for name in s.names])
        with_key = key[:, None] | key[None, :]
        zero, keys, pairs = zero + int(empty.sum()), keys + int((empty & with_key).sum()), pairs + empty.size
    measured = (
        f"{zero} of {pairs} pairs of blocks are zero, {keys} of them with a key bias, which no output sees"
    )
    verdict = HOLDS if zero - keys > 0.1 * pairs else FAILS
    return Claim("the Hessian of a block has many zero blocks", "many", measured, verdict, *ARTICLE)


def _dominance(spectra: list[Spectrum]) -> Claim:
    shares = np.array([(np.diag(s.norms) ** 2).sum() / (s.norms**2).sum() for s in spectra])
    mean, low, high = interval(shares)
    measured = f"diagonal blocks hold {100 * mean:.0f} % of ‖H‖² ({100 * low:.0f} to {100 * high:.0f})"
    verdict = HOLDS if low > 0.5 else FAILS if high < 0.5 else OPEN
    return Claim("diagonal blocks dominate", "dominance", measured, verdict, *ARTICLE)


def _bounded(result: Sweeps) -> Claim:
    mean, low, high = sigma_slope(result)
    measured = f"the norm's own source grows as σ^{mean:.2f} ({low:.2f} to {high:.2f}); theory −2"
    verdict = FAILS if high < -0.5 else HOLDS if low > -0.1 else OPEN
    return Claim("LayerNorm keeps curvature bounded", "bounded", measured, verdict, *ARTICLE)


def _grows(result: Sweeps, norm: str) -> Claim:
    mean, low, high = exponent(result, norm)
    measured = f"‖H‖ ∝ depth^{mean:.2f} ({low:.2f} to {high:.2f}) at initialization"
    verdict = HOLDS if low > 0 else FAILS if high < 0 else OPEN
    return Claim(
        f"the norm of the Hessian grows with depth, norms {norm}", "grows", measured, verdict, *ARTICLE
    )


def _pre_norm(result: Sweeps) -> Claim:
    ratios = np.array(
        [
            result.measured[f"depth.pre.{d}.{seed}"].ends_of(HESSIAN)[0]
            / result.measured[f"depth.post.{d}.{seed}"].ends_of(HESSIAN)[0]
            for d in result.depths
            for seed in range(result.seeds)
        ]
    )
    measured = (
        f"λ_max of pre- over post-norm: {ratios.min():.2g} to {ratios.max():.2g} at depths {result.depths}"
    )
    verdict = HOLDS if ratios.max() < 1 else FAILS if ratios.min() > 1 else OPEN
    return Claim("pre-norm has less curvature than post-norm", "use pre-norm", measured, verdict, *ARTICLE)


def _component(result: Sweeps, name: str, words: str) -> Claim:
    """Whether switching a part off moves λ_max the way that is said, with every seed."""
    found = {steps: with_and_without(result, name, steps) for steps in (0, result.steps)}
    measured = "; ".join(
        f"λ_max × {mean:.2g} ({low:.2g} to {high:.2g}) with {name}, {'trained' if steps else 'at first'}"
        for steps, (mean, low, high) in found.items()
    )
    lowers = "lower" in words
    right = all(low > 1 if lowers else high < 1 for _, low, high in found.values())
    wrong = all(high < 1 if lowers else low > 1 for _, low, high in found.values())
    return Claim(words, "named in a table", measured, HOLDS if right else FAILS if wrong else OPEN, *OURS)


def _adds_up(result: Sweeps) -> Claim:
    zoo = max(
        one.shares.residual for name, one in result.measured.items() if not name.startswith("training.")
    )
    trained = max(
        one.shares.residual for name, one in result.measured.items() if name.startswith("training.")
    )
    measured = f"to {zoo:.0e} in float64, to {trained:.0e} on the bundled model in float32"
    verdict = HOLDS if zoo < 1e-10 and trained < 1e-5 else FAILS
    return Claim("the Hessian is the GGN and a sum over sources", "exact", measured, verdict, "Theorems 3–5")
