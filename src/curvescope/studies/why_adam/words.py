"""What is said about the study: the numbers to look at first, captions, notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.why_adam.claims import correlations
from curvescope.studies.why_adam.comparison import contrast, verdict
from curvescope.studies.why_adam.comparison import words as interval_words
from curvescope.studies.why_adam.curvature import MEASURES
from curvescope.studies.why_adam.ensemble import MOMENTUM
from curvescope.studies.why_adam.tuning import LAST, Tuned

if TYPE_CHECKING:
    from curvescope.studies.why_adam.study import WhyAdam


def summary(result: WhyAdam) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    gaps = {name: contrast(result.gaps([name])) for name in result.configurations}
    order = sorted(gaps, key=lambda name: -gaps[name][0])
    found: list[Line] = [
        (f"gap of {name}", f"{gaps[name][0]:+.3f}", f"95 % {interval_words(gaps[name])}") for name in order
    ]
    found += [(claim.verdict, "", f"{claim.claim}: {claim.measured}") for claim in result.claims()]
    return [*found, *(("note", "", note) for note in result.notes)]


def opening(result: WhyAdam) -> str:
    """The range of gaps, and what ranks them."""
    means = {name: float(result.gap(name).mean()) for name in result.configurations}
    least, most = min(means, key=lambda name: means[name]), max(means, key=lambda name: means[name])
    return (
        f"After {result.steps} steps with tuned rates SGD's loss is {10 ** means[least]:.2f} ({least}) to "
        f"{10 ** means[most]:.2f} ({most}) times Adam's. {_verdicts(result)}"
    )


def captions(result: WhyAdam) -> dict[str, str]:
    """What each figure and table shows."""
    how = (
        f"Gap: log₁₀ (final loss with SGD / with Adam) after {result.steps} steps of {result.batch_size} "
        f"sums, a factor of {10:g} is 1. SGD has momentum {MOMENTUM:g}; neither has a schedule or weight "
        f"decay. The final loss is the mean of the last {LAST} looks at sums that are the same for all. "
        "The rate of a seed is the best one of the other seeds, on a grid that grows until it is inside"
    )
    ends = f"95 % intervals over {plural(result.num_seeds, 'seed')}"
    measures = "; ".join(f"{name}: {said}" for name, said in MEASURES.items())
    curvature = (
        f"Exact, from dense blocks of all weight matrices on {result.num_measured} sums. {measures}. "
        "Spectra are compared by their Jensen–Shannon divergence in bits"
    )
    return {
        "gap": f"{how}. Across: heterogeneity of the GGN before training. {curvature}. Bars are {ends}. "
        f"{_verdicts(result)} Correlation over configurations that were chosen, not cause.",
        "along": f"Heterogeneity of the GGN along the chosen runs. {curvature}. Bars are {ends}.",
        "tuning": f"Final loss against learning rate, means over seeds where all are "
        f"finite; a dot for every seed, losses above 3 are not shown. {how}.",
        "gaps": f"{how}. low and high: {ends}; lr: the rate that most seeds have.",
        "correlations": "Spearman's ρ of heterogeneity with the gap over configurations, of means over "
        f"seeds; interval: a bootstrap that draws configurations and seeds, {result.draws} draws. adam "
        "and sgd: means over checkpoints of the chosen runs.",
        "changes": "What changes in the gap and in heterogeneity at the start (GGN) between configurations "
        "that differ in one thing: mean over pairs and seeds; Student's 95 % interval over "
        "seeds for these networks, over pairs too for others.",
        "pairs": "The same of each pair, over seeds.",
        "heterogeneity": f"{curvature}. low and high: {ends}.",
        "blocks": "Mean |λ| of each block at the start, geometric mean over seeds.",
        "rates": f"All rates tried: mean final loss, runs that diverged, seeds that have it. {how}.",
    }


def _verdicts(result: WhyAdam) -> str:
    """What the figure decides, in a sentence."""
    found = [
        f"{one.measure} ρ = {one.found.words}, {verdict(one.found.low, one.found.high)}"
        for one in correlations(result)
        if one.when == "start" and one.among == "all"
    ]
    return f"That heterogeneity ranks the gap: {'; '.join(found)}."


def notes(runs: Mapping[str, Tuned]) -> list[str]:
    """What a reader should know of the runs."""
    found = []
    edge = [name for name, run in runs.items() if run.at_edge]
    if edge:
        found.append(f"the best rate is still the end of the grid for {', '.join(edge)}")
    lost = [name for name, run in runs.items() if np.isinf(run.loss).any()]
    if lost:
        found.append(f"a run at the rate of the other seeds diverged for {', '.join(lost)}")
    return found
