"""Statements about pairs ±λ of eigenvalues: where they are exact, where only the outliers' sizes are near."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from curvescope.papers.singh2025.rules import CONDITIONS, OURS, SLIDES
from curvescope.runs.shown import FAILS, HOLDS, Claim
from curvescope.studies.exact_spectra import ExactSpectra, bundled, ladder, sweeps
from curvescope.studies.exact_spectra.intervals import median

NEAR = 0.8  # of P: sizes of partners differ by a fifth of their sum
SAME = 1e-9
M = ladder.NUM_UNITS
FIRST, LAST = "1-D attention", "+ tokens, cross-entropy"


def pair_claims(found: ExactSpectra) -> list[Claim]:
    """Exact pairs, outliers, and the ladder."""
    claims = [_bulk(found), _outliers(found), *_functional(found), _wide_heads(found), *_ladder(found)]
    return claims + list(_real(found))


def _bulk(found: ExactSpectra) -> Claim:
    share = found.pairings.of("1-D attention", ladder.EXACT)
    expected = 2 * (M - 1) / (2 * M + 1)
    measured = f"{share.min():.3f} to {share.max():.3f} of all eigenvalues are exact; ±b is {expected:.3f}"
    verdict = HOLDS if np.abs(share - expected).max() < SAME else FAILS
    return Claim("the bulk is paired", "eigenvalues ±b, 2(d_K − 1) of 2 d_K + 1", measured, verdict, *SLIDES)


def _outliers(found: ExactSpectra) -> Claim:
    """P of the three outliers over everything that was varied."""
    best, where = 0.0, ""
    for varied in sweeps.AXES:
        values, middle = found.sweeps.of(varied).medians("pairing")
        if middle.max() > best:
            best, where = float(middle.max()), f"{varied} = {values[middle.argmax()]:.3g}"
    typical = median(found.pairings.of("1-D attention", ladder.OUTLIERS))
    measured = f"P = {typical} for normal weights and unit residuals, at most {best:.2f} in a sweep ({where})"
    verdict = HOLDS if typical.low >= NEAR else CONDITIONS if best >= NEAR else FAILS
    if verdict == CONDITIONS:
        measured += ": where the GGN is small beside b"
    return Claim("outliers are paired", "outliers come in pairs ±λ", measured, verdict, *SLIDES)


def _functional(found: ExactSpectra) -> Iterator[Claim]:
    for rung in ("linear network", "ReLU network", "1-D attention"):
        P = found.pairings.of(rung, ladder.FUNCTIONAL)
        verdict = HOLDS if np.abs(P - 1).max() < SAME else FAILS
        measured = f"P from {P.min():.3f} to {P.max():.3f}"
        if verdict == FAILS:
            measured += ": the softmax's third moment and the coupling with w_V are in no pair"
        yield Claim(f"H_f is paired, {rung}", "its whole spectrum is ±λ", measured, verdict, *OURS)


def _wide_heads(found: ExactSpectra) -> Claim:
    wide, narrow = (found.pairings.of(rung, ladder.EXACT) for rung in ("d = 2, d_K = 8, W_O", "d = d_K = 4"))
    expected = 8 * (M - 4 + 1) / (8 * M)  # d = 2: ±σ_1, ±σ_2 of two products, d_K − 2d + 1 times each
    measured = (
        f"exact pairs {wide.min():.3f} to {wide.max():.3f} at d = 2, d_K = 8, up to {narrow.max():.3f} at "
        "d = d_K = 4"
    )
    exact, none = np.abs(wide - expected).max() < SAME, not narrow.any()
    verdict = CONDITIONS if exact and none else HOLDS if exact else FAILS
    measured += f"; d_K − 2d + 1 copies of each ±σ(Γ) are {expected:.3f}: for d_K ≥ 2d" if exact else ""
    return Claim(
        "pairs survive d > 1", "the bulk of attention with matrices is ±σ(Γ)", measured, verdict, *OURS
    )


def _ladder(found: ExactSpectra) -> Iterator[Claim]:
    """Does pairing decay from rung to rung? Exact pairs and P are asked apart."""
    for quantity, label, source in (
        (ladder.EXACT, "exact pairs", SLIDES),
        (ladder.ALL, "pairing P of H", OURS),
        (ladder.FUNCTIONAL, "pairing P of H_f", OURS),
    ):
        first, last = (median(found.pairings.of(name, quantity)) for name in (FIRST, LAST))
        verdict = HOLDS if last.high < first.low else FAILS
        measured = f"{first} for {FIRST}, {last} for two layers of two heads on tokens"
        if verdict == FAILS:
            measured += "; intervals do not lie below" if last.value < first.value else "; it grows"
        published = "it decays when they are dropped one by one"
        yield Claim(f"{label} as assumptions are dropped", published, measured, verdict, *source)


def _real(found: ExactSpectra) -> Iterator[Claim]:
    """The bundled model beside the control, if it was looked at."""
    control = median(found.pairings.of(ladder.CONTROL, ladder.OUTLIERS))
    for part in bundled.PARTS:
        values = {
            revision: found.pairings.of(bundled.rung_name(revision, part), ladder.OUTLIERS)
            for revision in bundled.REVISIONS
        }
        if not all(len(one) and np.isfinite(one).all() for one in values.values()):
            continue
        near = {revision: float(one[0]) >= NEAR for revision, one in values.items()}
        each = ", ".join(f"{one[0]:.3f} ({revision})" for revision, one in values.items())
        verdict = HOLDS if all(near.values()) else CONDITIONS if any(near.values()) else FAILS
        measured = f"P of the three largest of each sign {each}; a random matrix has {control}"
        if verdict == CONDITIONS:
            measured += f": {', '.join(revision for revision, is_near in near.items() if is_near)} only"
        yield Claim(
            f"outliers of {bundled.NAME}, {part}", "outliers come in pairs ±λ", measured, verdict, *SLIDES
        )
