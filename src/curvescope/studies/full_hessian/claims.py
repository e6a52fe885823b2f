"""What the paper says of its pictures, next to what was measured in every network.

The paper has one network and no numbers: a claim holds where it is so in all networks, fails where in none,
and is undecided in between. Intervals are over networks, of geometric means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.intervals import student
from curvescope.core.numbers import plural
from curvescope.runs.shown import FAILS, HOLDS, Claim
from curvescope.studies.full_hessian.dense import Dense

if TYPE_CHECKING:
    from curvescope.studies.full_hessian.study import FullHessian, Network

MIXED = "in part of the networks"
Q, K, V = "L0.W_Q", "L0.W_K", "L0.W_V"
PAIRS = ((Q, Q), (Q, K), (Q, V), (K, K), (K, V), (V, V))
DRAWN = ("Q", "K", "V", "norms", "feed-forward")  # groups of the paper's curves
FEED_FORWARD = ("L0.W_1", "L0.b_1", "L0.W_2", "L0.b_2")
MUCH = 3.0  # times, where the paper says much and no number
SEEN = 2.0  # times the rest: a stripe that stands out
DECADE = 0.5  # powers of ten on both sides of a size that is read off a color bar
INITIAL_SIZE, TRAINED_SIZE = -1.0, 1.0  # log10 of the color bars' upper ends
FIGURE, TEXT = "figure", "paper"


class Spread(NamedTuple):
    """The geometric mean over networks and its 95 % interval, not known from one network."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if not np.isfinite(self.low):
            return f"{self.mean:.3g}"
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def spread(values: Sequence[float]) -> Spread:
    """Of positive numbers, by Student's interval of their logarithms."""
    logs = np.log(np.asarray(values, dtype=float))
    half = student(len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)) if len(logs) > 1 else np.nan
    mean = logs.mean()
    return Spread(float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half)))


def of(result: FullHessian) -> list[Claim]:
    """All claims, with verdicts computed from the numbers."""
    return [
        _accurate(result),
        _brightest(result, "initial"),
        _brightest(result, "trained"),
        _largest(result),
        _others(result),
        _largest_weights(result),
        _stripe(result),
        _stripe_fades(result),
        _feed_forward(result, "initial"),
        _feed_forward(result, "trained"),
        _size(result, "initial", INITIAL_SIZE),
        _size(result, "trained", TRAINED_SIZE),
        _grow(result),
    ]


def verdict(so: Sequence[bool]) -> str:
    """In all networks, in none, or in some."""
    return HOLDS if all(so) else MIXED if any(so) else FAILS


def _counted(
    result: FullHessian,
    words: str,
    published: str,
    ratio: Callable[[Network], float],
    over: float,
    measured: str,
    source: str = FIGURE,
) -> Claim:
    """A claim that is so in a network where a ratio is above `over`."""
    ratios = [ratio(network) for network in result.networks]
    so = [value > over for value in ratios]
    found = f"{sum(so)} of {plural(len(so), 'network')}; {measured} {spread(ratios)}"
    return Claim(words, published, found, verdict(so), source)


def _accurate(result: FullHessian) -> Claim:
    so = [network.training.reached for network in result.networks]
    steps = [network.training.trained_step for network in result.networks]
    found = [network.training.trained_accuracy for network in result.networks]
    measured = (
        f"{sum(so)} of {plural(len(so), 'network')}; {min(found):.0%} to {max(found):.0%}, after "
        f"{min(steps)} to {max(steps)} steps"
    )
    return Claim(
        f"validation accuracy is past {result.until:.0%} after training",
        "> 50 %",
        measured,
        verdict(so),
        TEXT,
    )


def brightest_ratio(found: Dense) -> float:
    """Root mean square entry of value–value, over the largest of the other pairs of Q, K, V."""
    own, *others = (found.pick(found.rms, *pair) for pair in reversed(PAIRS))
    return own / max(others)


def output_ratio(found: Dense) -> float:
    """Root mean square entry of value–value, over that of value–output, a pair that the formulas lack."""
    return found.pick(found.rms, V, V) / found.pick(found.rms, V, "L0.W_O")


def _brightest(result: FullHessian, stage: str) -> Claim:
    output = spread([output_ratio(network.stages[stage]) for network in result.networks])
    return _counted(
        result,
        f"value–value is the brightest pair of Q, K, V, {stage}",
        "brightest",
        lambda network: brightest_ratio(network.stages[stage]),
        1.0,
        f"root mean square entry over that of value–output {output}, over the next pair of Q, K, V",
    )


def _levels(values: np.ndarray, network: Network) -> dict[str, float]:
    """Geometric mean over the steps of training of each group that the paper draws."""
    found = network.norms
    return {group: float(np.exp(np.log(found.of(values, group)[1:]).mean())) for group in DRAWN}


def keys_and_values_ratio(levels: dict[str, float]) -> float:
    """The smaller of keys and values over the largest of the rest."""
    return min(levels["K"], levels["V"]) / max(levels[group] for group in DRAWN if group not in ("K", "V"))


def _order(result: FullHessian, name: str) -> str:
    """The groups of the paper with their mean levels, the largest first."""
    levels = [_levels(getattr(network.norms, name), network) for network in result.networks]
    means = {group: spread([level[group] for level in levels]).mean for group in DRAWN}
    order = sorted(DRAWN, key=lambda group: -means[group])
    return ", ".join(f"{group} {means[group]:.2g}" for group in order)


def _largest(result: FullHessian) -> Claim:
    return _counted(
        result,
        "keys and values have the largest Hessian blocks through training",
        "largest",
        lambda network: keys_and_values_ratio(_levels(network.norms.hessian, network)),
        1.0,
        f"{_order(result, 'hessian')}; the smaller of K, V over the largest other",
        TEXT,
    )


def _others(result: FullHessian) -> Claim:
    return _counted(
        result,
        f"the other Hessian blocks are much smaller than keys and values (at least {MUCH:g} times)",
        "much smaller",
        lambda network: keys_and_values_ratio(_levels(network.norms.hessian, network)),
        MUCH,
        "the smaller of K, V over the largest other",
        TEXT,
    )


def _largest_weights(result: FullHessian) -> Claim:
    return _counted(
        result,
        "keys and values have the largest parameter norms through training",
        "largest",
        lambda network: keys_and_values_ratio(_levels(network.norms.weights, network)),
        1.0,
        f"{_order(result, 'weights')}; the smaller of K, V over the largest other",
        TEXT,
    )


def _stripe(result: FullHessian) -> Claim:
    share = spread([network.initial.stripe_share for network in result.networks])
    return _counted(
        result,
        f"query–key has a diagonal stripe at initialization (over {SEEN:g} times the rest)",
        "seen",
        lambda network: network.initial.stripe_ratio,
        SEEN,
        f"A ⊗ I holds {share.mean:.0%} of ‖H_QK‖²; entries on the stripe over those off it",
    )


def _stripe_fades(result: FullHessian) -> Claim:
    after = spread([network.trained.stripe_ratio for network in result.networks])
    return _counted(
        result,
        "the query–key stripe is weaker after training",
        "seen at initialization alone",
        lambda network: network.initial.stripe_ratio / network.trained.stripe_ratio,
        1.0,
        f"trained {after}; initial over trained",
    )


def feed_forward_ratio(found: Dense) -> float:
    """Root mean square entry of the whole matrix, over that of the feed-forward network's own blocks."""
    rows = [found.names.index(name) for name in FEED_FORWARD if name in found.names]
    size = sum(found.sizes[i] for i in rows)
    own = np.linalg.norm(found.frobenius[np.ix_(rows, rows)]) / size
    return found.norm / sum(found.sizes) / float(own)


def _feed_forward(result: FullHessian, stage: str) -> Claim:
    return _counted(
        result,
        f"blocks of the feed-forward network are small, {stage}",
        "small",
        lambda network: feed_forward_ratio(network.stages[stage]),
        1.0,
        "root mean square entry of the whole matrix over theirs",
    )


def _size(result: FullHessian, stage: str, power: float) -> Claim:
    """A network has the stated size where its largest entry is at most half a decade from it."""
    sizes = [float(network.stages[stage].max_abs.max()) for network in result.networks]
    so = [abs(np.log10(size) - power) <= DECADE for size in sizes]
    return Claim(
        f"the largest entry is about 1e{power:+.0f}, {stage} (within half a decade)",
        f"1e{power:+.0f} (color bar)",
        f"{sum(so)} of {plural(len(so), 'network')}; {spread(sizes)}",
        verdict(so),
        FIGURE,
    )


def _grow(result: FullHessian) -> Claim:
    return _counted(
        result,
        "entries grow from initialization to the trained network",
        "the largest 100 times (color bars)",
        lambda network: float(network.trained.max_abs.max() / network.initial.max_abs.max()),
        1.0,
        "largest entry, trained over initial",
    )
