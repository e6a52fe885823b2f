"""Statements of the slides about exact spectra, each with a verdict from the study `exact_spectra`.

Sensitive means that a median over draws changes by a factor of ten or more over the tested values. A
statement that is true in some settings and false in others holds under conditions, which are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.papers.common import OURS, Claimed, FigureConfig
from curvescope.papers.singh2025 import SLIDES
from curvescope.runs.resumable_loop import State
from curvescope.runs.study import Study
from curvescope.runs.study_result import FAILS, HOLDS, Claim
from curvescope.studies import exact_spectra
from curvescope.studies.common.statistics import log_slope, median_interval
from curvescope.studies.exact_spectra import ExactSpectra, analysis, study

PROFILES: dict[str, dict[str, int]] = {
    "quick": {},
    "full": {"num_seeds": 100, "num_draws": 400, "num_rung_draws": 100, "bundled_tokens": 512},
}
STATED = "statements of the slides are compared, but none of their numbers"
CONDITIONS = "holds under conditions"
ROUNDING = 1e-12  # relative to the largest eigenvalue
SENSITIVE = 10.0
FLAT = 2.0  # a median that changes by less than this factor counts as unchanged
BIASED = {"bulk": "|b|", "size": "the largest |outlier|", "ratio": "the largest |outlier| over |b|"}
LARGE_FIRST = ": if 2x₀² is above the largest outlier without the bias"
NEAR = 0.8  # of P: the sizes of two partners differ by at most a fifth of their sum
SAME = 1e-9
M = study.NUM_UNITS
FIRST, LAST = "1-D attention", "+ tokens, cross-entropy"


@dataclass(frozen=True)
class Config(FigureConfig):
    """The profile sets the numbers of draws; the other settings are those of the study."""

    head_size: int | None = setting(None, "d_K of attention and neurons of the two-layer networks; default 8")
    num_seeds: int | None = setting(None, "draws for every varied value; default 8, in full 100")
    num_draws: int | None = setting(None, "draws for λ_max of H and of the GGN; default 40, in full 400")
    num_rung_draws: int | None = setting(None, "draws for every case of the pairing; default 16, in full 100")
    bundled_tokens: int | None = setting(
        None, "tokens for the bundled model, 0: skip it; default 64, in full 512"
    )
    seed: int = setting(0, "seed of the first draw; the others follow")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.of_study()  # raises the errors of the study

    def of_study(self) -> exact_spectra.Config:
        """Return the settings of the study: the given ones, else those of the profile."""
        own = {name: value for name, value in self.to_dict().items() if value is not None}
        given = {name: own[name] for name in exact_spectra.Config().to_dict() if name in own}
        return exact_spectra.Config.from_dict({**PROFILES[self.profile], **given})


@dataclass(frozen=True)
class ClaimedSpectra(Claimed):
    """Result of the study as a figure of the slides."""

    NAME = "exact_spectra"

    measured: exact_spectra.ExactSpectra

    def claims(self) -> list[Claim]:
        """Return every claim with its verdict."""
        found = self.measured
        return [
            *_closed_forms(found), *_sensitivities(found), *_biased(found),
            *_gauss_newton(found), _bulk(found),
            _outliers(found), *_functional(found), _wide_heads(found), *_ladder(found), *_real(found),
        ]  # fmt: skip


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> ClaimedSpectra:
    """Compute everything that is not stored in `state`."""
    result = exact_spectra.run(cfg.of_study(), progress=progress, state=state)
    return ClaimedSpectra(result, notes=[*result.notes, STATED])


def factor(values: np.ndarray) -> float:
    """Largest over smallest value."""
    return float(values.max() / values.min()) if len(values) else np.nan


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Exponent of y ∝ xᵃ by least squares in logarithms."""
    return log_slope(x, y) if len(x) > 1 else np.nan


def _closed_forms(result: ExactSpectra) -> Iterator[Claim]:
    """Compare closed-form with dense spectra, including degenerate cases."""
    for kind, published in (
        (analysis.CASE_ATTENTION, "±b, each d_K − 1 times, and three outliers"),
        (analysis.LINEAR, "±b, each m − 1 times, and two outliers"),
        (analysis.RELU, "two linear networks, one for each sign of the input"),
    ):
        errors = {name: error for name, error in result.spectra.errors().items() if name.startswith(kind)}
        worst = max(errors.values())
        measured = f"largest error of an eigenvalue {worst:.1e} of λ_max in {len(errors)} cases"
        yield Claim(f"spectrum of {kind}", published, measured, HOLDS if worst < ROUNDING else FAILS, *SLIDES)


def _sensitivities(result: ExactSpectra) -> Iterator[Claim]:
    """Check the sensitivity of the condition number and of the spectrum."""
    for varied in (study.NORM_Q, study.NORM_K, study.BOTH):
        yield _norms(result, varied)
    values, kappa = result.sweeps.of(study.ANGLE).medians("condition")
    measured = f"κ from {kappa.min():.3g} to {kappa.max():.3g}, largest at {values[kappa.argmax()]:g}°"
    verdict = HOLDS if values[kappa.argmax()] == 90 and factor(kappa) >= SENSITIVE else FAILS
    published = "κ is largest if w_Q and w_K are orthogonal"
    yield Claim("condition number κ and the angle", published, measured, verdict, *OURS)
    for varied, published in (
        (study.TARGET, "κ is sensitive to the targets"),
        (study.LENGTH, "κ is sensitive to the length, from 16 tokens on"),
    ):
        values, kappa = result.sweeps.of(varied).medians("condition")
        kappa = kappa[values >= 16] if varied == study.LENGTH else kappa
        measured = f"κ from {kappa.min():.3g} to {kappa.max():.3g}"
        yield Claim(f"condition number κ and {varied}", published, measured, _sensitive(kappa), *OURS)
    yield _outlier_token(result)


def _norms(result: ExactSpectra, varied: str) -> Claim:
    """Check sensitivity to a norm, with the range where κ is flat and the exponent beyond."""
    values, kappa = result.sweeps.of(varied).medians("condition")
    small, large = values < 0.2, values > 4
    measured = (
        f"κ from {kappa.min():.3g} to {kappa.max():.3g}; it changes below 0.2 by a factor of "
        f"{factor(kappa[small]):.3g}, and above 4 with the power {slope(values[large], kappa[large]):.2g}"
    )
    verdict = _sensitive(kappa)
    if verdict == HOLDS and factor(kappa[small]) < FLAT:
        verdict, measured = CONDITIONS, f"{measured}: if attention is not uniform"
    return Claim(f"condition number κ and {varied}", "κ is sensitive to it", measured, verdict, *SLIDES)


def _outlier_token(result: ExactSpectra) -> Claim:
    one = result.sweeps.of(study.OUTLIER)
    (values, size), (_, bulk) = one.medians("size"), one.medians("bulk")
    measured = (
        f"one token scaled by {values[-1]:g}: outliers × {size[-1] / size[0]:.3g} (power "
        f"{slope(values, size):.2g}), bulk × {bulk[-1] / bulk[0]:.3g}"
    )
    return Claim("outlier activations", "they change the spectrum", measured, _sensitive(size), *SLIDES)


def _biased(result: ExactSpectra) -> Iterator[Claim]:
    """Check a bias on the first token, if that token is like the others and if it is large."""
    moves = {}
    for name in (study.BIAS, study.LARGE_BIAS):
        one = result.sweeps.of(name)
        medians = {column: one.medians(column)[1] for column in ("bulk", "size")}
        moves[name] = {column: found[-1] / found[0] for column, found in medians.items()}
        moves[name]["ratio"] = moves[name]["size"] / moves[name]["bulk"]
    for claim, column, grows, source, condition in (
        ("a bias shrinks the bulk", "bulk", False, SLIDES, ""),
        ("a bias grows the outliers", "size", True, SLIDES, LARGE_FIRST),
        ("a bias separates outliers from the bulk", "ratio", True, OURS, ""),
    ):
        true = [(one[column] > 1) == grows for one in moves.values()]
        measured = (
            f"× {moves[study.BIAS][column]:.3g} for a first token like the others, × "
            f"{moves[study.LARGE_BIAS][column]:.3g} for x₀ = {study.LARGE:g}"
        )
        verdict = HOLDS if all(true) else CONDITIONS if any(true) else FAILS
        measured += condition if verdict == CONDITIONS else ""
        published = f"a larger bias at the first token {'grows' if grows else 'shrinks'} "
        yield Claim(claim, published + BIASED[column], measured, verdict, *source)


def _gauss_newton(result: ExactSpectra) -> Iterator[Claim]:
    """Compare λ_max of the GGN for attention and for an MLP, setting by setting, with intervals."""
    differences = result.gaps.differences()
    for match in dict.fromkeys(result.gaps.match):
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
            "a worse approximation of λ_max for attention than for an MLP with as many parameters",
            measured,
            verdict,
            *SLIDES,
        )
    yield _residuals(result)


def _residuals(result: ExactSpectra) -> Claim:
    """Check that the gap vanishes with the loss."""
    gaps, rho = result.gaps, np.unique(result.gaps.residual)
    attention = np.array(gaps.kind) == analysis.GAUSS_NEWTON_ATTENTION
    medians = [float(np.median(gaps.gap[attention & (gaps.residual == one)])) for one in rho]
    rising = all(a < b for a, b in pairwise(medians))
    each = ", ".join(f"{gap:.2g} at ρ = {scale:g}" for gap, scale in zip(medians, rho, strict=True))
    claim, published = "λ_max of the GGN and the loss", "the GGN's λ_max is more accurate for a smaller loss"
    return Claim(claim, published, f"gap of attention {each}", HOLDS if rising else FAILS, *OURS)


def _sensitive(medians: np.ndarray) -> str:
    return HOLDS if factor(medians) >= SENSITIVE else FAILS


def _bulk(result: ExactSpectra) -> Claim:
    share = result.pairings.of("1-D attention", study.EXACT)
    expected = 2 * (M - 1) / (2 * M + 1)
    measured = f"{share.min():.3f} to {share.max():.3f} of all eigenvalues are exact; ±b is {expected:.3f}"
    verdict = HOLDS if np.abs(share - expected).max() < SAME else FAILS
    return Claim("the bulk is paired", "eigenvalues ±b, 2(d_K − 1) of 2 d_K + 1", measured, verdict, *SLIDES)


def _outliers(result: ExactSpectra) -> Claim:
    """Pairing P of the three outliers over all varied quantities."""
    best, where = 0.0, ""
    for varied in study.AXES:
        values, middle = result.sweeps.of(varied).medians("pairing")
        if middle.max() > best:
            best, where = float(middle.max()), f"{varied} = {values[middle.argmax()]:.3g}"
    typical = median_interval(result.pairings.of("1-D attention", study.OUTLIERS))
    measured = f"P = {typical} for normal weights and unit residuals, at most {best:.2f} in a sweep ({where})"
    verdict = HOLDS if typical.low >= NEAR else CONDITIONS if best >= NEAR else FAILS
    if verdict == CONDITIONS:
        measured += ": if the GGN is small relative to b"
    return Claim("outliers are paired", "outliers come in pairs ±λ", measured, verdict, *SLIDES)


def _functional(result: ExactSpectra) -> Iterator[Claim]:
    for rung in ("linear network", "ReLU network", "1-D attention"):
        P = result.pairings.of(rung, study.FUNCTIONAL)
        verdict = HOLDS if np.abs(P - 1).max() < SAME else FAILS
        measured = f"P from {P.min():.3f} to {P.max():.3f}"
        if verdict == FAILS:
            measured += ": the softmax's third moment and the coupling with w_V are unpaired"
        yield Claim(f"H_f is paired, {rung}", "its whole spectrum is ±λ", measured, verdict, *OURS)


def _wide_heads(result: ExactSpectra) -> Claim:
    wide, narrow = (result.pairings.of(rung, study.EXACT) for rung in ("d = 2, d_K = 8, W_O", "d = d_K = 4"))
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


def _ladder(result: ExactSpectra) -> Iterator[Claim]:
    """Check whether pairing decays as assumptions are dropped; exact pairs and P are separate claims."""
    for quantity, label, source in (
        (study.EXACT, "exact pairs", SLIDES),
        (study.ALL, "pairing P of H", OURS),
        (study.FUNCTIONAL, "pairing P of H_f", OURS),
    ):
        first, last = (median_interval(result.pairings.of(name, quantity)) for name in (FIRST, LAST))
        verdict = HOLDS if last.high < first.low else FAILS
        measured = f"{first} for {FIRST}, {last} for two layers of two heads on tokens"
        if verdict == FAILS:
            measured += "; intervals overlap" if last.value < first.value else "; it grows"
        published = "it decays as they are dropped one by one"
        yield Claim(f"{label} as assumptions are dropped", published, measured, verdict, *source)


def _real(result: ExactSpectra) -> Iterator[Claim]:
    """Compare the bundled model with the random control, if it was measured."""
    control = median_interval(result.pairings.of(study.CONTROL, study.OUTLIERS))
    for part in study.PARTS:
        values = {
            revision: result.pairings.of(study.rung_name(revision, part), study.OUTLIERS)
            for revision in study.REVISIONS
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
            f"outliers of {study.NAME}, {part}", "outliers come in pairs ±λ", measured, verdict, *SLIDES
        )


STUDY = Study(Config, run)
