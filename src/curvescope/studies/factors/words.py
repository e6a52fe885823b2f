"""What is said about approximations: the numbers to look at first, captions, notes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.factors import claims
from curvescope.studies.factors.tables import optimizers

if TYPE_CHECKING:
    from curvescope.studies.factors.descent import Tuned
    from curvescope.studies.factors.study import Factors


def opening(result: Factors) -> str:
    """Whether the angle from the GGN ranks what approximations do."""
    found = []
    for outcome in claims.outcomes(result):
        one = claims.correlation(result, "angle", outcome)
        said = "follows" if one.low > 0 else "goes against" if one.high < 0 else "is not shown to follow"
        found.append(f"{outcome} {said} the angle from the GGN (ρ = {one.words})")
    sentence = "; ".join(found)
    return f"Over {plural(len(result.approximations), 'approximation')}, {sentence}."


def summary(result: Factors) -> list[Line]:
    """Distances at the beginning and the end, losses of the optimizers, then the claims."""
    count = f"{plural(sum(result.sizes), 'parameter')} in {plural(len(result.blocks), 'block')}"
    first, last = result.loss.mean(axis=0)[[0, -1]]
    ends = f"loss {first:.3f} → {last:.3f} in {result.checkpoints[-1]} steps of Adam"
    found: list[Line] = [("network", "", f"{count}, {plural(len(result.loss), 'seed')}, {ends}")]
    for name in result.approximations:
        G, H = (result.of(measure, name).mean(axis=0) for measure in ("angle", "angle_hessian"))
        words = f"angle from the GGN, first to last checkpoint; from the Hessian {H[0]:.0f}° → {H[-1]:.0f}°"
        found.append((name, f"{G[0]:.0f}° → {G[-1]:.0f}°", words))
    for row in sorted(optimizers(result), key=lambda row: row["loss"]) if result.tuned else []:
        steps = result.courses.shape[-1] - 1
        words = f"[{row['low']:.2g}, {row['high']:.2g}] after {steps} steps, lr {row['lr']:.2g}"
        found.append((f"step by {row['approximation']}", f"loss {row['loss']:.2g}", words))
    found += [("note", "", note) for note in result.notes]
    return [*found, *((c.verdict, "", f"{c.claim}: {c.measured}") for c in result.claims())]


def notes(tuned: list[Tuned]) -> list[str]:
    """What a reader should know of the tuning."""
    return [
        f"{one.method}: {plural(len(one.loss), 'trial')} did not settle the rate and the damping"
        for one in tuned
        if not one.settled
    ]


def captions(result: Factors) -> dict[str, str]:
    """What each figure and table shows."""
    measures = (
        "frobenius: ‖A − B‖/‖B‖; angle: between them, in degrees; divergence: logarithm of the "
        "arithmetic over the geometric mean of the eigenvalues of (A + α)⁻¹(B + β); lost: the part of the "
        f"quadratic model's decrease that no step along (A + α)⁻¹g reaches; α and β are {result.damping:g} "
        "times the mean diagonals. B is the GGN, or where it is said the Hessian"
    )
    found = {
        "distances": "Distances of whole matrices over training: means over seeds, bands are 95 % intervals. "
        f"{measures}.",
        "blocks": "Angles from the GGN's own blocks and from the Hessian's, at the last checkpoint: means "
        "over seeds. An approximation that is block-diagonal has no part between blocks.",
        "whole": f"Every seed, checkpoint and approximation. {measures}. decrease: of the loss, by the best "
        "of all tried lengths and dampings of one step.",
        "parts": f"Single blocks: means over seeds. {measures}.",
        "correlations": "Spearman's ρ over approximations of distance with outcome, a mean over seeds and "
        "checkpoints; 95 % intervals by the bootstrap over seeds and approximations. For runs the distance "
        "is a mean over checkpoints.",
        "claims": "What is said about approximations, with verdicts from the intervals.",
        "outcomes": "Outcome against distance: the loss of each optimizer at the end, where they are run, "
        "against its mean distance, and the share of the largest single step's decrease, a mean over "
        "checkpoints; 95 % intervals over seeds. ρ as in the table of correlations.",
    }
    if result.tuned:
        found |= {
            "optimizers": f"Optimizers θ ← θ − lr (A + δ)⁻¹ g, A made anew every {result.every} steps, δ a "
            "multiple of its mean diagonal; tuned alike on a seed of their own. loss: geometric mean over "
            "seeds at the end, with its 95 % interval; settled: no neighbor of rate and damping is better; "
            "distances are means over seeds and checkpoints.",
            "trials": "Loss at the end for every rate and damping that was tried.",
        }
    return found
