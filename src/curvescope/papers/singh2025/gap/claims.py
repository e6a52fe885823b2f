"""What the slides say about the GGN, and sentences of ours, next to what was measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from curvescope.algorithms.estimates.intervals import student
from curvescope.papers.singh2025.gap.courses import FAMILIES, TASKS
from curvescope.papers.singh2025.rules import OURS, SLIDES
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Origin

if TYPE_CHECKING:
    from curvescope.papers.singh2025.gap.study import Gaps

THEOREM: Origin = ("Hoffman and Wielandt", "ours")
LOSS = {"mse": "squared error", "cross_entropy": "cross-entropy"}
SMALL = 0.1  # of ‖H‖: a share that is nearly gone
ROUNDING = 1e-9


def of(result: Gaps) -> list[Claim]:
    """All claims, with verdicts computed from the numbers."""
    return [
        *(_worse(result, task, step) for task in TASKS for step in (result.steps[0], result.steps[-1])),
        *(_vanishes(result, task) for task in TASKS),
        _bound(result),
        _drawn(result),
        _large_loss(result),
        _late(result),
        _too_little(result),
        _queries_and_keys(result),
    ]


def gaps(result: Gaps, family: str, task: str, step: int) -> np.ndarray:
    """|1 − λ_max(H_o)/λ_max(H)| of all seeds."""
    return np.array([abs(result.pair(place, step).gap().value) for place in result.places(family, task)])


def mean_interval(samples: np.ndarray) -> tuple[float, float, float]:
    """Mean and 95 % interval by Student's t; not known from one sample."""
    half = (
        student(len(samples) - 1) * samples.std(ddof=1) / math.sqrt(len(samples))
        if len(samples) > 1
        else math.nan
    )
    return float(samples.mean()), float(samples.mean() - half), float(samples.mean() + half)


def _worse(result: Gaps, task: str, step: int) -> Claim:
    """By the ratio of the two families' errors, seed by seed, in logarithms."""
    transformer, mlp = (gaps(result, family, task, step) for family in FAMILIES)
    mean, low, high = mean_interval(np.log(transformer / mlp))
    when = "after training" if step else "at first"
    words = f"the GGN's λ_max is a worse approximation for Transformers than for MLPs, {LOSS[task]}, {when}"
    measured = (
        f"missed: {100 * np.median(transformer):.3g} % and {100 * np.median(mlp):.3g} % (medians); ratio "
        f"{math.exp(mean):.3g} ({math.exp(low):.2g} to {math.exp(high):.2g})"
    )
    return Claim(words, "worse", measured, HOLDS if low > 0 else FAILS if high < 0 else OPEN, *SLIDES)


def _vanishes(result: Gaps, task: str) -> Claim:
    """The functional share where the loss is least, of all models on a task."""
    places = [place for family in FAMILIES for place in result.places(family, task)]
    first, last = (
        [result.pair(place, step) for place in places] for step in (result.steps[0], result.steps[-1])
    )
    share = np.array([pair.share().value for pair in last])
    norms = np.array([b.functional.norm / a.functional.norm for a, b in zip(first, last, strict=True)])
    losses = np.array([b.loss / a.loss for a, b in zip(first, last, strict=True)])
    measured = (
        f"loss × {np.median(losses):.1e}, ‖H_f‖ × {np.median(norms):.1e} (medians); share of ‖H‖ left "
        f"{share.min():.2g} to {share.max():.2g}"
    )
    verdict = HOLDS if share.max() < SMALL else FAILS if share.min() > SMALL else OPEN
    words = f"the functional Hessian vanishes beside the GGN as the loss does, {LOSS[task]}"
    return Claim(words, "share → 0", measured, verdict, *OURS)


def _bound(result: Gaps) -> Claim:
    """Over all small models and steps, whose spectra are exact."""
    pairs = [pair for course in result.courses.values() for pair in course.pairs.values()]
    ratios = np.array([pair.wasserstein().value / pair.share().value for pair in pairs])
    measured = f"{ratios.min():.2g} to {ratios.max():.2g} times the share, {len(ratios)} models"
    verdict = HOLDS if ratios.max() <= 1 + ROUNDING else FAILS
    words = "W₁ between the spectra of H and GGN is at most the functional share, in units of ‖H‖/√n"
    return Claim(words, "at most 1 times", measured, verdict, *THEOREM)


def _drawn(result: Gaps) -> Claim:
    words = "with targets drawn from the model the functional Hessian vanishes on the average"
    draws = result.bundled.draws
    if draws is None:
        return Claim(words, "0", "no draws", OPEN, *OURS)
    value, error = draws.expectation()
    half = student(draws.gram.shape[1] - 1) * error
    measured = f"‖E H_f‖²/E‖H_f‖² = {value:.3f} ({value - half:.3f} to {value + half:.3f}), bundled model"
    return Claim(words, "0", measured, HOLDS if abs(value) <= half else FAILS, *OURS)


def _large_loss(result: Gaps) -> Claim:
    words = "at fixed parameters the functional Hessian is larger where the loss is"
    found = result.bundled.targets
    if not found:
        return Claim(words, "larger", "no other targets", OPEN, *OURS)
    low, high = found["predicted"], found["random"]
    measured = (
        f"‖H_f‖ = {low.functional.norm:.3g} at loss {low.loss:.2f} (predicted targets), "
        f"{high.functional.norm:.3g} at loss {high.loss:.2f} (random), bundled model"
    )
    apart = high.functional.norm_low > low.functional.norm_high
    other = high.functional.norm_high < low.functional.norm_low
    return Claim(words, "larger", measured, HOLDS if apart else FAILS if other else OPEN, *OURS)


def _late(result: Gaps) -> Claim:
    """Share at the first and at the last checkpoint of the bundled model."""
    names = result.bundled.checkpoints
    first, last = (result.bundled.pair(names[i]).share() for i in (0, -1))
    each = [result.bundled.pair(name) for name in names]
    measured = ", ".join(
        f"{name} {pair.share().value:.2f} ± {pair.share().error:.2f}"
        for name, pair in zip(names, each, strict=True)
    )
    away = 2 * math.hypot(first.error, last.error)
    verdict = (
        HOLDS if last.value < first.value - away and last.value < 0.5 else FAILS if last.value > 0.5 else OPEN
    )
    words = "the functional Hessian matters early in training and not late, bundled model"
    return Claim(words, "share falls below one half", measured, verdict, *OURS)


def _too_little(result: Gaps) -> Claim:
    """The sign of the gap, over checkpoints of the bundled model."""
    pairs = {name: result.bundled.pair(name) for name in result.bundled.checkpoints}
    measured = ", ".join(f"{name} {100 * pair.gap().value:+.3g} %" for name, pair in pairs.items())
    ends = [pair.gap_interval() for pair in pairs.values()]
    verdict = (
        HOLDS if all(low > 0 for low, _ in ends) else FAILS if any(high < 0 for _, high in ends) else OPEN
    )
    return Claim(
        "the GGN has too small a λ_max, bundled model",
        "1 − λ_max(H_o)/λ_max(H) > 0",
        measured,
        verdict,
        *OURS,
    )


def _queries_and_keys(result: Gaps) -> Claim:
    """Functional shares of blocks at the last checkpoint."""
    last = result.bundled.checkpoints[-1]
    shares = {block: result.bundled.pair(last, block).share() for block in result.bundled.blocks[1:]}
    own = [number for block, number in shares.items() if block.endswith(("W_Q", "W_K"))]
    rest = [number for block, number in shares.items() if not block.endswith(("W_Q", "W_K"))]
    measured = ", ".join(f"{block} {n.value:.2f} ± {n.error:.2f}" for block, n in shares.items())
    words = "the functional Hessian has a larger share in query and key blocks than in others, bundled model"
    if not own or not rest:
        return Claim(words, "larger", measured, OPEN, *OURS)
    least = min(n.value - 2 * n.error for n in own) > max(n.value + 2 * n.error for n in rest)
    below = max(n.value for n in own) < max(n.value for n in rest)
    return Claim(words, "larger", measured, HOLDS if least else FAILS if below else OPEN, *OURS)
