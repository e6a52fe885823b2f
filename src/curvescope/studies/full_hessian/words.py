"""What is said about the whole Hessian: the numbers to look at first, captions, notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.full_hessian.claims import brightest_ratio, spread
from curvescope.studies.full_hessian.settings import Config

if TYPE_CHECKING:
    from curvescope.studies.full_hessian.study import FullHessian, Network


def summary(result: FullHessian) -> list[Line]:
    """The numbers to look at first: label, value, words."""
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
            f"of {result.num_validation} validation pictures, after {min(steps)} to {max(steps)} steps",
        ),
    ]
    for stage in ("initial", "trained"):
        largest = spread([float(network.stages[stage].max_abs.max()) for network in networks])
        bright = spread([brightest_ratio(network.stages[stage]) for network in networks])
        stripe = spread([network.stages[stage].stripe_ratio for network in networks])
        found += [
            (f"largest entry, {stage}", str(largest), "mean over networks [95 % interval]"),
            (f"value–value, {stage}", str(bright), "times the next pair of Q, K, V, root mean square entry"),
            (f"QK stripe, {stage}", str(stripe), "entries on the stripe over those off it"),
        ]
    found += [("claim", claim.verdict, f"{claim.claim}: {claim.measured}") for claim in result.claims()]
    return [*found, *(("note", "", note) for note in result.notes)]


def notes(cfg: Config, networks: Sequence[Network]) -> list[str]:
    """What a reader should know of how the Hessians were made."""
    found = [
        "the paper does not say how many heads, which learning rate, how many epochs or which "
        "initialization: these are choices of ours, see the settings"
    ]
    if cfg.data == "digits" and cfg.patch_size is None:
        found.append("patches of 2 × 2, since the paper's 4 × 4 would leave four of a picture of 8 × 8")
    late = [str(network.training.seed) for network in networks if not network.training.reached]
    if late:
        found.append(
            f"seed {', '.join(late)}: validation accuracy stays below {cfg.until:.0%}, so the trained "
            "Hessian is that of the last step"
        )
    return found


def captions(result: FullHessian) -> dict[str, str]:
    """What each figure and table shows."""
    first = result.networks[0]
    exact = (
        f"exact, in {result.dtype}, on one training batch of {plural(result.batch_size, 'picture')}; "
        f"{result.num_parameters:,} parameters"
    )
    step, accuracy = first.training.trained_step, first.training.trained_accuracy
    when = f"initial, and after {step} steps with {accuracy:.0%} validation accuracy"
    many = plural(len(result.networks), "network")
    return {
        "hessian_entries": f"log10(|entry| + 1e-6) of the Hessian, {exact}. Top: the whole network, a pixel "
        "is the mean over up to 4 × 4 entries of a pair of blocks. Bottom: self-attention, every entry. "
        f"Left and right: {when}, of the first network. Colors from −6 to the largest entry of both.",
        "hessian_pairs": "Root mean square entry of every pair of blocks, initial and trained: geometric "
        f"mean over {many}. The table has a row per seed, stage and pair: Frobenius norm, root mean square, "
        "brightness (the mean of log10(|entry| + 1e-6), what the eye sees) and largest entry.",
        "hessian_norms": "Norms through training, on the batch of the first step: of the parameters of a "
        "group of blocks (left) and of its diagonal Hessian block (right). Lines: geometric mean over "
        f"{many}; bands: least and largest of them. The table has the 95 % interval of every estimate; "
        "groups of at most 64 parameters are exact. Dotted: where the trained Hessians were taken.",
        "hessian_stripe": "Left: entries of the query–key block at equal coordinates of keys (the stripe) "
        f"over those at different ones, root mean squares, each of {many}. Right: the largest entry of the "
        "whole Hessian, with the ends of the published color bars.",
        "hessian_networks": "Every Hessian: when, its loss and validation accuracy, norm, largest entry, and "
        "the stripe: ratio of root mean square entries on it and off it, and the share of ‖H_QK‖² in A ⊗ I.",
        "hessian_accuracy": "Share of validation pictures that are classified rightly, through training.",
        "hessian_claims": "What the paper says of its pictures, and in how many networks it is so; ratios "
        "with 95 % intervals over networks. Holds: in all of them.",
    }
