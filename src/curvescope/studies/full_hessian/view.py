"""Tables, claims, figures and captions of the study `full_hessian`.

The paper has one network and no numbers. A claim holds if it is true for all networks, fails if it is true
for none, and is open otherwise. Intervals are those of geometric means over networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.number_format import plural
from curvescope.runs.study_result import FAILS, HOLDS, Claim, Line, Tables
from curvescope.studies.common.statistics import geometric_interval
from curvescope.studies.full_hessian.analysis import ATTENTION, Dense
from curvescope.viz import style
from curvescope.viz.matrix import FLOOR, LABEL, colors, entries_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.full_hessian.analysis import Norms
    from curvescope.studies.full_hessian.study import FullHessian, Network


def tables(result: FullHessian) -> Tables:
    """Return every table by name."""
    found = {"pairs": _table_pairs, "norms": _table_norms, "networks": _network, "accuracy": _accuracy}
    rows = {name: [row for n in result.networks for row in make(n)] for name, make in found.items()}
    tables = {f"hessian_{name}": entries for name, entries in rows.items()}
    return tables | {"hessian_claims": [claim._asdict() for claim in result.claims()]}


def _table_pairs(network: Network) -> list[dict[str, Any]]:
    """Return one row per pair of blocks (upper triangle with the diagonal), for both Hessians."""
    return [
        {
            "seed": network.training.seed,
            "stage": stage,
            "row": one,
            "column": two,
            "rows": found.sizes[i],
            "columns": found.sizes[j],
            "frobenius": float(found.frobenius[i, j]),
            "rms": float(found.rms[i, j]),
            "brightness": float(found.brightness[i, j]),
            "max_abs": float(found.max_abs[i, j]),
        }
        for stage, found in network.stages.items()
        for i, one in enumerate(found.names)
        for j, two in enumerate(found.names)
        if i <= j
    ]


def _table_norms(network: Network) -> list[dict[str, Any]]:
    """Return one row per step and group of blocks."""
    found = network.norms
    return [
        {
            "seed": network.training.seed,
            "step": int(step),
            "group": group,
            "parameters": int(found.sizes[g]),
            "weights": float(found.weights[s, g]),
            "hessian": float(found.hessian[s, g]),
            "hessian_low": float(found.low[s, g]),
            "hessian_high": float(found.high[s, g]),
            "rms": float(found.hessian[s, g] / found.sizes[g]),
            "method": "exact" if found.exact[g] else "probes",
        }
        for s, step in enumerate(found.steps)
        for g, group in enumerate(found.groups)
    ]


def _network(network: Network) -> list[dict[str, Any]]:
    """Return one row per Hessian."""
    training = network.training
    steps = {"initial": 0, "trained": training.trained_step}
    accuracy = {"initial": float(training.accuracy[0]), "trained": training.trained_accuracy}
    return [
        {
            "seed": training.seed,
            "stage": stage,
            "step": steps[stage],
            "accuracy": accuracy[stage],
            "loss": found.loss,
            "frobenius": found.norm,
            "rms": found.norm / sum(found.sizes),
            "max_abs": float(found.max_abs.max()),
            "stripe_ratio": found.stripe_ratio,
            "stripe_share": found.stripe_share,
        }
        for stage, found in network.stages.items()
    ]


def _accuracy(network: Network) -> list[dict[str, Any]]:
    """Return one row per evaluation during training."""
    training = network.training
    return [
        {"seed": training.seed, "step": int(step), "accuracy": float(accuracy)}
        for step, accuracy in zip(training.evaluated, training.accuracy, strict=True)
    ]


MIXED = "in some of the networks"
Q, K, V = "L0.W_Q", "L0.W_K", "L0.W_V"
PAIRS = ((Q, Q), (Q, K), (Q, V), (K, K), (K, V), (V, V))
DRAWN = ("Q", "K", "V", "norms", "feed-forward")  # groups in the paper's figures
FEED_FORWARD = ("L0.W_1", "L0.b_1", "L0.W_2", "L0.b_2")
MUCH = 3.0  # factor for “much”, because the paper gives no number
SEEN = 2.0  # minimum ratio of the stripe to the rest
DECADE = 0.5  # tolerance, in powers of ten, of a size read off a color bar
INITIAL_SIZE, TRAINED_SIZE = -1.0, 1.0  # log10 of the color bars' upper ends
FIGURE, TEXT = "figure", "paper"


def claims(result: FullHessian) -> list[Claim]:
    """Return all claims, with verdicts computed from the numbers."""
    over_others = "the smaller of K, V over the largest other"
    share = geometric_interval([network.initial.stripe_share for network in result.networks])
    faded = geometric_interval([network.trained.stripe_ratio for network in result.networks])
    return [
        _accurate(result),
        _brightest(result, "initial"),
        _brightest(result, "trained"),
        _counted(
            result, "keys and values have the largest Hessian blocks through training", "largest",
            lambda network: _keys_and_values(network, "hessian"), 1.0,
            f"{_order(result, 'hessian')}; {over_others}", TEXT,
        ),
        _counted(
            result,
            f"the other Hessian blocks are much smaller than keys and values (at least {MUCH:g} times)",
            "much smaller", lambda network: _keys_and_values(network, "hessian"), MUCH, over_others, TEXT,
        ),
        _counted(
            result, "keys and values have the largest parameter norms through training", "largest",
            lambda network: _keys_and_values(network, "weights"), 1.0,
            f"{_order(result, 'weights')}; {over_others}", TEXT,
        ),
        _counted(
            result, f"query–key has a diagonal stripe at initialization (over {SEEN:g} times the rest)",
            "seen", lambda network: network.initial.stripe_ratio, SEEN,
            f"A ⊗ I contains {share.value:.0%} of ‖H_QK‖²; entries on the stripe divided by those off it",
        ),
        _counted(
            result, "the query–key stripe is weaker after training", "visible only at initialization",
            lambda network: network.initial.stripe_ratio / network.trained.stripe_ratio, 1.0,
            f"trained {faded}; initial divided by trained",
        ),
        _feed_forward(result, "initial"),
        _feed_forward(result, "trained"),
        _size(result, "initial", INITIAL_SIZE),
        _size(result, "trained", TRAINED_SIZE),
        _counted(
            result, "entries grow from initialization to the trained network",
            "the largest 100 times (color bars)",
            lambda network: float(network.trained.max_abs.max() / network.initial.max_abs.max()), 1.0,
            "largest entry, trained divided by initial",
        ),
    ]  # fmt: skip


def verdict(so: Sequence[bool]) -> str:
    """Verdict: holds in all networks, in none, or in some."""
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
    """Claim that is true for a network if a ratio is above `over`."""
    ratios = [ratio(network) for network in result.networks]
    so = [value > over for value in ratios]
    found = f"{sum(so)} of {plural(len(so), 'network')}; {measured} {geometric_interval(ratios)}"
    return Claim(words, published, found, verdict(so), source)


def _accurate(result: FullHessian) -> Claim:
    so = [network.training.reached for network in result.networks]
    steps = [network.training.trained_step for network in result.networks]
    found = [network.training.trained_accuracy for network in result.networks]
    measured = (
        f"{sum(so)} of {plural(len(so), 'network')}; {min(found):.0%} to {max(found):.0%}, after "
        f"{min(steps)} to {max(steps)} steps"
    )
    words = f"validation accuracy is above {result.until:.0%} after training"
    return Claim(words, "> 50 %", measured, verdict(so), TEXT)


def brightest_ratio(found: Dense) -> float:
    """Root mean square entry of value–value, divided by the largest of the other pairs of Q, K, V."""
    own, *others = (found.pick(found.rms, *pair) for pair in reversed(PAIRS))
    return own / max(others)


def _brightest(result: FullHessian, stage: str) -> Claim:
    """Compare value–value with the other pairs, and with value–output, which the formulas lack."""
    found = [network.stages[stage] for network in result.networks]
    output = geometric_interval([n.pick(n.rms, V, V) / n.pick(n.rms, V, "L0.W_O") for n in found])
    return _counted(
        result, f"value–value is the brightest pair of Q, K, V, {stage}", "brightest",
        lambda network: brightest_ratio(network.stages[stage]), 1.0,
        f"root mean square entry divided by that of value–output {output}; divided by the next pair of "
        "Q, K, V",
    )  # fmt: skip


def _levels(network: Network, name: str) -> dict[str, float]:
    """Geometric mean over the steps of training of a norm of each group that the paper draws."""
    values = getattr(network.norms, name)
    return {group: float(np.exp(np.log(network.norms.of(values, group)[1:]).mean())) for group in DRAWN}


def _keys_and_values(network: Network, name: str) -> float:
    """Smaller of keys and values divided by the largest other group."""
    levels = _levels(network, name)
    return min(levels["K"], levels["V"]) / max(levels[group] for group in DRAWN if group not in ("K", "V"))


def _order(result: FullHessian, name: str) -> str:
    """List the groups of the paper with their mean levels, the largest first."""
    levels = [_levels(network, name) for network in result.networks]
    means = {group: geometric_interval([level[group] for level in levels]).value for group in DRAWN}
    order = sorted(DRAWN, key=lambda group: -means[group])
    return ", ".join(f"{group} {means[group]:.2g}" for group in order)


def feed_forward_ratio(found: Dense) -> float:
    """Root mean square entry of the whole matrix, divided by that of the feed-forward blocks."""
    rows = [found.names.index(name) for name in FEED_FORWARD if name in found.names]
    size = sum(found.sizes[i] for i in rows)
    own = np.linalg.norm(found.frobenius[np.ix_(rows, rows)]) / size
    return found.norm / sum(found.sizes) / float(own)


def _feed_forward(result: FullHessian, stage: str) -> Claim:
    return _counted(
        result, f"blocks of the feed-forward network are small, {stage}", "small",
        lambda network: feed_forward_ratio(network.stages[stage]), 1.0,
        "root mean square entry of the whole matrix divided by theirs",
    )  # fmt: skip


def _size(result: FullHessian, stage: str, power: float) -> Claim:
    """Claim on the largest entry: true for a network within half a decade of the stated size."""
    sizes = [float(network.stages[stage].max_abs.max()) for network in result.networks]
    so = [abs(np.log10(size) - power) <= DECADE for size in sizes]
    words = f"the largest entry is about 1e{power:+.0f}, {stage} (within half a decade)"
    measured = f"{sum(so)} of {plural(len(so), 'network')}; {geometric_interval(sizes)}"
    return Claim(words, f"1e{power:+.0f} (color bar)", measured, verdict(so), FIGURE)


STAGES = ("initial", "trained")
DECADES = 5  # range of the color scale of pairs, below the largest


def figures(result: FullHessian) -> dict[str, Figure]:
    """Draw the entries, the pairs of blocks, norms during training, and the stripe with the sizes."""
    return {
        "hessian_entries": _entries(result),
        "hessian_pairs": _figure_pairs(result),
        "hessian_norms": _figure_norms(result),
        "hessian_stripe": _figure_stripe(result),
    }


def _entries(result: FullHessian) -> Figure:
    """Draw the whole network and attention in rows, initial and trained in columns, with one color scale."""
    stages = result.networks[0].stages
    largest = max(float(found.max_abs.max()) for found in stages.values())
    limits = (math.log10(FLOOR), math.log10(largest))
    figure, axes = style.subplots(2, 2, figsize=(15, 14.6))
    image = None
    for column, (stage, found) in zip(axes.T, stages.items(), strict=True):
        image = entries_map(column[0], found.picture, found.names, found.pixels, limits)
        column[0].set_title(f"Hessian, {stage}", pad=8)
        sizes = [found.sizes[found.names.index(name)] for name in ATTENTION]
        entries_map(column[1], colors(found.attention), ATTENTION, sizes, limits)
        column[1].set_title(f"Hessian (self-attention), {stage}", pad=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02)  # pyright: ignore[reportArgumentType]
    bar.set_label(LABEL)
    return figure


def _figure_pairs(result: FullHessian) -> Figure:
    """Draw root mean square entries as numbers, geometric means over the networks."""
    means = {
        stage: np.exp(np.mean([np.log(n.stages[stage].rms + FLOOR**2) for n in result.networks], axis=0))
        for stage in STAGES
    }
    names = [name.removeprefix("L0.") for name in result.networks[0].initial.names]
    top = max(float(values.max()) for values in means.values())
    figure, axes = style.subplots(1, 2, figsize=(17.5, 8.4))
    least = top * 10.0**-DECADES
    image = None
    for ax, (stage, values) in zip(axes, means.items(), strict=True):
        image = ax.imshow(values, norm="log", vmin=least, vmax=top, cmap="viridis", interpolation="nearest")
        style.write_cells(ax, _short, size=6.5)
        ax.set_xticks(range(len(names)), names, rotation=90)
        ax.set_yticks(range(len(names)), names)
        ax.tick_params(length=0)
        ax.set_title(stage)
    figure.colorbar(image, ax=axes, label="root mean square entry", shrink=0.8)  # pyright: ignore[reportArgumentType]
    return figure


def _short(value: float) -> str:
    """Format with two digits: 0.015, 4.4e-3."""
    if 0.01 <= value < 10:
        return f"{value:.2g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _figure_norms(result: FullHessian) -> Figure:
    figure, axes = style.subplots(1, 2, figsize=(12.5, 4.8))
    every = [network.norms for network in result.networks]
    _curves(axes[0], result, every, "weights", "norm of the parameters")
    _curves(axes[1], result, every, "hessian", "Frobenius norm of the Hessian block")
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _curves(ax: Axes, result: FullHessian, every: list[Norms], name: str, label: str) -> None:
    """Draw geometric means over networks with bands from minimum to maximum; step 0 has its own position."""
    steps = every[0].steps
    place = np.maximum(steps, 0.5)
    for g, group in enumerate(every[0].groups):
        logs = np.log(np.stack([getattr(one, name)[:, g] for one in every]))
        low, mean, high = (np.exp(f(logs, axis=0)) for f in (np.min, np.mean, np.max))
        ax.plot(place, mean, "o-", ms=3, lw=1.3, color=style.MANY[g], label=group)
        ax.fill_between(place, low, high, color=style.MANY[g], alpha=0.13, lw=0)
    for network in result.networks:
        ax.axvline(network.training.trained_step, color="0.5", ls=":", lw=0.8)
    ax.set_xscale("log")
    if name == "weights":
        ax.set_ylim(bottom=0)
    else:
        ax.set_yscale("log")
    powers = [10.0**i for i in range(math.floor(math.log10(max(int(steps[-1]), 1))) + 1)]
    ax.set_xticks([0.5, *powers], ["0", *(f"{power:g}" for power in powers)])
    ax.minorticks_off()
    ax.set(xlabel="step", ylabel=label)
    ax.grid(visible=True)


def _figure_stripe(result: FullHessian) -> Figure:
    figure, axes = style.subplots(1, 2, figsize=(10, 3.8))
    ratios = [[n.initial.stripe_ratio, n.trained.stripe_ratio] for n in result.networks]
    sizes = [[n.initial.max_abs.max(), n.trained.max_abs.max()] for n in result.networks]
    _slopes(axes[0], ratios, "QK block: on the stripe / off it")
    axes[0].axhline(1, color="0.6", lw=0.8, ls="--")
    _slopes(axes[1], sizes, "largest |entry|")
    for x, power in enumerate((INITIAL_SIZE, TRAINED_SIZE)):
        axes[1].plot([x - 0.12, x + 0.12], [10**power] * 2, color=style.ORANGE, lw=2)
    axes[1].plot([], [], color=style.ORANGE, lw=2, label="end of the published color bar")
    axes[1].set_yscale("log")
    axes[1].legend(loc="lower right")
    return figure


def _slopes(ax: Axes, rows: list[list[float]], label: str) -> None:
    """Draw a line per network from initial to trained."""
    for row in rows:
        ax.plot([0, 1], row, "o-", color=style.BLUE, ms=4, lw=1, alpha=0.8)
    ax.set_xticks([0, 1], STAGES)
    ax.set(xlim=(-0.4, 1.4), ylabel=label)
    ax.grid(visible=True)


def summary(result: FullHessian) -> list[Line]:
    """Return the key numbers: label, value, explanation."""
    networks = result.networks
    accuracy = [network.training.trained_accuracy for network in networks]
    steps = [network.training.trained_step for network in networks]
    found = [
        (
            "networks",
            str(len(networks)),
            f"one-block ViT of {result.num_parameters:,} parameters on {result.data}: {result.num_patches} "
            f"patches of {result.patch_size} × {result.patch_size}, post-norm, mean-pooled",
        ),
        (
            "trained",
            f"{min(accuracy):.0%} to {max(accuracy):.0%}",
            f"of {result.num_validation} validation images, after {min(steps)} to {max(steps)} steps",
        ),
    ]
    for stage in ("initial", "trained"):
        largest = geometric_interval([float(network.stages[stage].max_abs.max()) for network in networks])
        bright = geometric_interval([brightest_ratio(network.stages[stage]) for network in networks])
        stripe = geometric_interval([network.stages[stage].stripe_ratio for network in networks])
        found += [
            (f"largest entry, {stage}", str(largest), "mean over networks [95 % interval]"),
            (
                f"value–value, {stage}",
                str(bright),
                "ratio to the next pair of Q, K, V, root mean square entries",
            ),
            (f"QK stripe, {stage}", str(stripe), "entries on the stripe divided by those off it"),
        ]
    found += [("claim", claim.verdict, f"{claim.claim}: {claim.measured}") for claim in result.claims()]
    return [*found, *(("note", "", note) for note in result.notes)]


def captions(result: FullHessian) -> dict[str, str]:
    """Return a caption for each figure and table."""
    first = result.networks[0]
    exact = (
        f"exact, in {result.dtype}, on one training batch of {plural(result.batch_size, 'image')}; "
        f"{result.num_parameters:,} parameters"
    )
    step, accuracy = first.training.trained_step, first.training.trained_accuracy
    when = f"initial, and after {step} steps with {accuracy:.0%} validation accuracy"
    many = plural(len(result.networks), "network")
    return {
        "hessian_entries": f"log10(|entry| + 1e-6) of the Hessian, {exact}. Top: the whole network; a pixel "
        "is the mean over up to 4 × 4 entries of a pair of blocks. Bottom: self-attention, every entry. "
        f"Left and right: first network, {when}. Colors from −6 to the largest entry of both.",
        "hessian_pairs": "Root mean square entry of every pair of blocks, initial and trained: geometric "
        f"mean over {many}. The table has a row per seed, stage and pair: Frobenius norm, root mean square, "
        "brightness (the mean of log10(|entry| + 1e-6), the color in the figure) and largest entry.",
        "hessian_norms": "Norms during training, on the batch of the first step, of the parameters of a "
        "group of blocks (left) and of its diagonal Hessian block (right). Lines: geometric mean over "
        f"{many}; bands: minimum and maximum. The table has the 95 % interval of every estimate; "
        "groups of at most 64 parameters are exact. Dotted lines: steps of the trained Hessians.",
        "hessian_stripe": "Left: root mean square entries of the query–key block at equal coordinates of "
        f"keys (the stripe) divided by those at different ones, for each of {many}. Right: the largest "
        "entry of the whole Hessian, with the ends of the published color bars.",
        "hessian_networks": "Every Hessian: step, loss, validation accuracy, norm, largest entry, and "
        "the stripe: ratio of root mean square entries on it and off it, and the share of ‖H_QK‖² in A "
        "⊗ I.",
        "hessian_accuracy": "Validation accuracy during training.",
        "hessian_claims": "Claims of the paper about its figures, and the number of networks for which "
        "they are true; ratios with 95 % intervals over networks. Holds: true for all networks.",
    }
