"""A comparison in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.core.numbers import MOST_DIGITS, plural, rounded, to_error
from curvescope.runs.shown import Line
from curvescope.studies.compare.quantities import EQUAL, LARGER, OPEN, QUANTITIES, SMALLER, Estimate

if TYPE_CHECKING:
    from curvescope.studies.compare.settings import Config
    from curvescope.studies.compare.study import Comparison

MOST = 8  # blocks that are named in a note
WIDEST = 2.0  # a ratio is told where the ends of its interval are less than so many times apart


def summary(found: Comparison) -> list[Line]:
    """Every quantity of every side against the first."""
    first, lines = found.sides[0], []
    for number, side in enumerate(found.sides[1:], start=1):
        for name in QUANTITIES:
            before, after = _shown(first.quantity(name)), _shown(side.quantity(name))
            label = name if len(found.sides) == 2 else f"{name}, {side.name}"
            words = changed(found.difference(number, name), found.ratio(number, name))
            lines.append((label, f"{before} → {after}", words))
    return lines


def _shown(found: Estimate) -> str:
    return to_error(found.value, found.error)


def changed(difference: Estimate, ratio: Estimate) -> str:
    """`larger by 3.2 (2.9 to 3.6), 2.1-fold`."""
    if difference.verdict == EQUAL:
        return EQUAL
    interval = f"{rounded(difference.low, 3)} to {rounded(difference.high, 3)}"
    if difference.verdict == OPEN:
        return f"not decided: the difference is within {interval}"
    fold = f", {_fold(ratio.value, 3)}" if _is_known(ratio) else ""
    if rounded(difference.low, 3) == rounded(difference.high, 3):
        return f"{difference.verdict} by {rounded(abs(difference.value), 3)}{fold}"
    return f"{difference.verdict}: the difference is within {interval}{fold}"


def _is_known(ratio: Estimate) -> bool:
    """Whether a ratio is known well enough to be a number in a sentence."""
    return ratio.value > 0 and ratio.low > 0 and ratio.high <= WIDEST * ratio.low


def opening(found: Comparison) -> str:
    """One sentence for every side but the first."""
    return " ".join(_sentence(found, number) for number in range(1, len(found.sides)))


def _sentence(found: Comparison, number: int) -> str:
    verdicts = {name: found.difference(number, name).verdict for name in QUANTITIES}
    sides = f"{found.sides[number].name} against {found.sides[0].name}"
    if set(verdicts.values()) == {EQUAL}:
        return f"{sides}: equal in all {len(verdicts)} quantities."
    parts = []
    for verdict in (LARGER, SMALLER, EQUAL, OPEN):
        names = [_folded(found, number, name) for name, word in verdicts.items() if word == verdict]
        if names:
            parts.append(f"{verdict}: {', '.join(names)}")
    return f"{sides}: {'; '.join(parts)}."


def _folded(found: Comparison, number: int, name: str) -> str:
    difference, ratio = found.difference(number, name), found.ratio(number, name)
    decided = difference.verdict in (LARGER, SMALLER)
    return f"{name} ({_fold(ratio.value, 2)})" if decided and _is_known(ratio) else name


def _fold(ratio: float, digits: int) -> str:
    """`2.1-fold`, `1.02-fold`: so many digits, or as many as tell it from one."""
    texts = [rounded(ratio, count) for count in range(digits, MOST_DIGITS + 1)]
    return f"{next((text for text in texts if text.rstrip('0') != '1.'), texts[-1])}-fold"


def notes(cfg: Config, found: Comparison, own: list[str]) -> list[str]:
    """What a reader should know of how these were compared."""
    said = list(own)
    several = len(cfg.datasets) < 2
    if several and not found.alike:
        counts = " and ".join(f"{side.num_terms:g} ({side.name})" for side in found.sides)
        said.append(
            "the models read the data as different tokens or targets, so that neither losses, which are per "
            f"term, nor what follows from them are of one scale; terms: {counts}"
        )
    for side, names in found.alone.items():
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        said.append(
            f"only {side} has {', '.join(names[:MOST])}{more}: without a partner, they are not compared"
        )
    said.append(
        "intervals are those of the estimates on this sample of the data; what another sample would change "
        "is not in them (--seed draws another)"
    )
    return said


def captions(found: Comparison) -> dict[str, str]:
    """What each figure and table shows."""
    first = found.sides[0]
    probes = plural(len(first.whole.hessian.trace_samples), "probe")
    exact = first.whole.hessian.exact
    how = "exact, from the whole matrix" if exact else f"from {probes} and Lanczos, the same for every side"
    return {
        "quantities": f"Every quantity of every side, {how}; bars are intervals that are meant to hold it 95 "
        "times in 100. The functional share is ‖H_f‖/‖H‖, the λ_max gap 1 − λ_max(H_o)/λ_max(H).",
        "density": "Spectral densities of the Hessian and of the GGN, by stochastic Lanczos quadrature, "
        "under a kernel; bands are 95 % intervals over probes. The axis is logarithmic on both sides of 0.",
        "block_ratios": f"Frobenius norm of every diagonal block of the Hessian over that of {first.name}, "
        "by layer and role; in parentheses where it is not decided which is larger.",
        "block_sharpness": "λ_max of every block on every side; bars are intervals.",
        "differences": f"Every quantity less that of {first.name}, with the interval of the difference; it "
        "is decided where that does not hold zero. Ratios, of what is above zero, with their intervals.",
        "sides": "The quantities of every side, with their intervals.",
        "blocks": f"Diagonal blocks of the Hessian against those of {first.name}: values, ratios with their "
        "intervals, and whether it is decided which is larger.",
        "without_partner": "Blocks that some side does not have; they are not compared.",
    }
