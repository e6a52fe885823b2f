"""What is said about λ_max and the norms of weights, next to rank correlations; every verdict is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Origin
from curvescope.studies.weight_norms.random_models import ROLES

if TYPE_CHECKING:
    from curvescope.studies.weight_norms.study import WeightNorms

SLIDES: Origin = ("slides, 'Cracking the Hessian'", "paper")
OURS: Origin = ("ours", "ours")
FAMILY = {"pre": "with norms", "none": "without norms"}


def judge(result: WeightNorms) -> list[Claim]:
    """All claims: over random models, then over training."""
    found = [claim for norm in result.random for claim in _random(result, norm)]
    within = result.correlation("within", "all", "spectral")
    found.append(
        _claim("over training λ_max of a block follows the spectral norm of its own weights", [within], OURS)
    )
    pooled = result.correlation("blocks", "all", "spectral")
    words = "over blocks and checkpoints, larger spectral norms of weights go with larger λ_max"
    return [*found, _claim(words, [pooled], OURS)]


def _random(result: WeightNorms, norm: str) -> list[Claim]:
    family = f"random Transformers {FAMILY[norm]}"

    def of(*roles: str) -> list[Correlation]:
        return [result.correlation(norm, role, "spectral") for role in roles]

    return [
        _claim(
            f"λ_max follows the spectral norms of query and key weights, {family}", of("W_Q", "W_K"), SLIDES
        ),
        _claim(
            f"λ_max follows the spectral norms of value and output weights, {family}", of("W_V", "W_O"), OURS
        ),
        _claim(f"λ_max follows the spectral norms of feed-forward weights, {family}", of("W_1", "W_2"), OURS),
        _spectral_tells_more(result, norm, family),
    ]


def _claim(words: str, found: list[Correlation], origin: Origin) -> Claim:
    """It holds if all intervals are above zero, and fails if one is below; nan decides nothing."""
    measured = "ρ = " + ", ".join(one.words for one in found)
    if all(one.low > 0 for one in found):
        return Claim(words, "ρ > 0", measured, HOLDS, *origin)
    return Claim(words, "ρ > 0", measured, FAILS if any(one.high < 0 for one in found) else OPEN, *origin)


def _spectral_tells_more(result: WeightNorms, norm: str, family: str) -> Claim:
    """By the role whose norms tell most of λ_max, where there is something to compare."""
    best = max(ROLES, key=lambda role: abs(result.correlation(norm, role, "frobenius").value))
    found = result.correlation(norm, best, "difference")
    words = f"the spectral norm of weights tells more of λ_max than the Frobenius norm, {family}"
    measured = f"{best}: ρ larger by {found.words}"
    verdict = HOLDS if found.low > 0 else FAILS if found.high < 0 else OPEN
    return Claim(words, "more", measured, verdict, *OURS)
