"""Statements about exact spectra, and the rules that give a verdict from what was measured.

Sensitive means that a median over draws moves by a factor of ten or more over the values that were tried.
A statement that is true in some settings and false in others holds under conditions, which are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from curvescope.papers.singh2025.exact_spectra.pairs import pair_claims
from curvescope.papers.singh2025.rules import CONDITIONS, OURS, SLIDES, factor, slope
from curvescope.runs.shown import FAILS, HOLDS, Claim
from curvescope.studies.exact_spectra import ExactSpectra, analysis, study

ROUNDING = 1e-12  # of the largest eigenvalue
SENSITIVE = 10.0
FLAT = 2.0  # a factor below which a median counts as unmoved
BIASED = {"bulk": "|b|", "size": "the largest |outlier|", "ratio": "the largest |outlier| over |b|"}
LARGE_FIRST = ": where 2x₀² is above the largest outlier before"


def verdicts(found: ExactSpectra) -> list[Claim]:
    """Every claim next to what was measured."""
    first = [*_closed_forms(found), *_moved(found), *_biased(found), *_gauss_newton(found)]
    return first + pair_claims(found)


def _closed_forms(found: ExactSpectra) -> Iterator[Claim]:
    """Closed against dense spectra, degenerate cases included."""
    for kind, published in (
        (analysis.CASE_ATTENTION, "±b, each d_K − 1 times, and three outliers"),
        (analysis.LINEAR, "±b, each m − 1 times, and two outliers"),
        (analysis.RELU, "two linear networks, one for each sign of the input"),
    ):
        errors = {name: error for name, error in found.spectra.errors().items() if name.startswith(kind)}
        worst = max(errors.values())
        measured = f"largest error of an eigenvalue {worst:.1e} of λ_max in {len(errors)} cases"
        yield Claim(f"spectrum of {kind}", published, measured, HOLDS if worst < ROUNDING else FAILS, *SLIDES)


def _moved(found: ExactSpectra) -> Iterator[Claim]:
    """What moves the condition number, and the spectrum."""
    for varied in (study.NORM_Q, study.NORM_K, study.BOTH):
        yield _norms(found, varied)
    values, kappa = found.sweeps.of(study.ANGLE).medians("condition")
    measured = f"κ from {kappa.min():.3g} to {kappa.max():.3g}, largest at {values[kappa.argmax()]:g}°"
    verdict = HOLDS if values[kappa.argmax()] == 90 and factor(kappa) >= SENSITIVE else FAILS
    published = "κ is worst where w_Q and w_K are orthogonal"
    yield Claim("condition number κ and the angle", published, measured, verdict, *OURS)
    for varied, published in (
        (study.TARGET, "κ is sensitive to the targets"),
        (study.LENGTH, "κ is sensitive to the length, from 16 tokens on"),
    ):
        values, kappa = found.sweeps.of(varied).medians("condition")
        kappa = kappa[values >= 16] if varied == study.LENGTH else kappa
        measured = f"κ from {kappa.min():.3g} to {kappa.max():.3g}"
        yield Claim(f"condition number κ and {varied}", published, measured, _sensitive(kappa), *OURS)
    yield _outlier_token(found)


def _norms(found: ExactSpectra, varied: str) -> Claim:
    """Sensitive, with the range where κ is flat and the exponent where it is not."""
    values, kappa = found.sweeps.of(varied).medians("condition")
    small, large = values < 0.2, values > 4
    measured = (
        f"κ from {kappa.min():.3g} to {kappa.max():.3g}; below 0.2 by a factor of "
        f"{factor(kappa[small]):.3g}, above 4 as the power {slope(values[large], kappa[large]):.2g}"
    )
    verdict = _sensitive(kappa)
    if verdict == HOLDS and factor(kappa[small]) < FLAT:
        verdict, measured = CONDITIONS, f"{measured}: where attention is not uniform"
    return Claim(f"condition number κ and {varied}", "κ is sensitive to it", measured, verdict, *SLIDES)


def _outlier_token(found: ExactSpectra) -> Claim:
    one = found.sweeps.of(study.OUTLIER)
    (values, size), (_, bulk) = one.medians("size"), one.medians("bulk")
    measured = (
        f"one token times {values[-1]:g}: outliers times {size[-1] / size[0]:.3g} (power "
        f"{slope(values, size):.2g}), bulk times {bulk[-1] / bulk[0]:.3g}"
    )
    return Claim("outlier activations", "they move the spectrum", measured, _sensitive(size), *SLIDES)


def _biased(found: ExactSpectra) -> Iterator[Claim]:
    """A bias on the first token, where that is like the others and where it is large."""
    moves = {}
    for name in (study.BIAS, study.LARGE_BIAS):
        one = found.sweeps.of(name)
        medians = {column: one.medians(column)[1] for column in ("bulk", "size")}
        moves[name] = {column: found[-1] / found[0] for column, found in medians.items()}
        moves[name]["ratio"] = moves[name]["size"] / moves[name]["bulk"]
    for claim, column, grows, source, condition in (
        ("a bias shrinks the bulk", "bulk", False, SLIDES, ""),
        ("a bias grows the outliers", "size", True, SLIDES, LARGE_FIRST),
        ("a bias parts outliers from bulk", "ratio", True, OURS, ""),
    ):
        true = [(one[column] > 1) == grows for one in moves.values()]
        measured = (
            f"times {moves[study.BIAS][column]:.3g} for a first token like the others, times "
            f"{moves[study.LARGE_BIAS][column]:.3g} for x₀ = {study.LARGE:g}"
        )
        verdict = HOLDS if all(true) else CONDITIONS if any(true) else FAILS
        measured += condition if verdict == CONDITIONS else ""
        published = f"a larger bias at the first token {'grows' if grows else 'shrinks'} "
        yield Claim(claim, published + BIASED[column], measured, verdict, *source)


def _gauss_newton(found: ExactSpectra) -> Iterator[Claim]:
    """λ_max of the GGN: attention worse than an MLP, setting by setting, as the intervals say."""
    differences = found.gaps.differences()
    for match in dict.fromkeys(found.gaps.match):
        own = {key[1:]: found for key, (_, _, found) in differences.items() if key[0] == match}
        worse = [key for key, one in own.items() if one.low > 0]
        better = [key for key, one in own.items() if one.high < 0]
        measured = f"worse in {len(worse)} of {len(own)} settings, better in {len(better)}"
        if better:
            scales = ", ".join(f"{scale:g}" for scale in sorted({scale for scale, _ in better}))
            measured += f" (weights of scale {scales})"
        verdict = HOLDS if len(worse) == len(own) else CONDITIONS if worse else FAILS
        yield Claim(
            f"λ_max of the GGN, {match}",
            "a worse approximation of λ_max for attention than for an MLP of as many parameters",
            measured,
            verdict,
            *SLIDES,
        )
    yield _residuals(found)


def _residuals(found: ExactSpectra) -> Claim:
    """The gap vanishes with the loss."""
    gaps, rho = found.gaps, np.unique(found.gaps.residual)
    attention = np.array(gaps.kind) == analysis.GAUSS_NEWTON_ATTENTION
    medians = [float(np.median(gaps.gap[attention & (gaps.residual == one)])) for one in rho]
    rising = all(a < b for a, b in pairwise(medians))
    each = ", ".join(f"{gap:.2g} at ρ = {one:g}" for gap, one in zip(medians, rho, strict=True))
    claim, published = "λ_max of the GGN and the loss", "the GGN's λ_max is as good as the loss is small"
    return Claim(claim, published, f"gap of attention {each}", HOLDS if rising else FAILS, *OURS)


def _sensitive(medians: np.ndarray) -> str:
    return HOLDS if factor(medians) >= SENSITIVE else FAILS
