"""What is said about runs and checkpoints: the numbers to look at first, captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import rounded, with_error
from curvescope.runs.shown import Line
from curvescope.studies.dynamics.edge import NEAR, approach
from curvescope.studies.dynamics.grokking import GENERALIZED, MEMORIZED
from curvescope.studies.dynamics.spikes import SPIKE

if TYPE_CHECKING:
    from curvescope.studies.dynamics.course import Course
    from curvescope.studies.dynamics.sequence import Sequence
    from curvescope.studies.dynamics.study import Dynamics


def summary(result: Dynamics) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    found = _sequence(result) if result.sequence is not None else []
    found += [_edge(run) for run in [*result.of("edge"), *result.of("adam")]]
    found += [(claim.verdict, claim.claim, claim.measured) for claim in result.claims()]
    return [*found, *(("note", "", note) for note in result.notes)]


def _edge(run: Course) -> Line:
    way = approach(run)
    rate, threshold = float(run.lr[-1]), float(np.nanmax(run.column("sharpness_threshold")))
    bound = f"{threshold:.0f}/η = {threshold / rate:.4g}"
    if way.reached is None:
        words = (
            f"η times the sharpness over {threshold:.0f}, at the last measurement; {bound} was not reached"
        )
        return (run.name, f"{way.ratio[-1]:.2f}", words)
    words = f"median of η times the sharpness over {threshold:.0f}, from step {way.steps[way.reached]} on, "
    return (run.name, f"{np.median(way.after):.2f}", words + f"where {bound} was reached")


def _sequence(result: Dynamics) -> list[Line]:
    one = result.sequence
    assert one is not None
    found: list[Line] = []
    for label, name, error, words in (
        ("λ_max", "lambda_max", "lambda_max_error", "± holds an eigenvalue"),
        ("trace", "trace", "trace_stderr", "± is a standard error"),
    ):
        each = [with_error(*pair) for pair in zip(one.column(name), one.column(error), strict=True)]
        ways = ", ".join(f"{at} {value}" for at, value in zip(one.names[:-1], each[:-1], strict=True))
        before = f", before: {ways}" if ways else ""
        found.append((label, each[-1], f"at {one.names[-1]}{before}; {words}"))
    losses = ", ".join(f"{name} {loss:.4g}" for name, loss in zip(one.names, one.column("loss"), strict=True))
    blocks, values = one.block_map()
    if blocks and np.isfinite(values[:, -1]).any():
        top = int(np.nanargmax(values[:, -1]))
        words = f"λ_max {rounded(values[top, -1])} at {one.names[-1]}, the largest of {one.followed()}"
        found.append(("sharpest block", blocks[top], words))
    return [("loss", f"{one.column('loss')[-1]:.4g}", f"{result.data}: {losses}"), *found]


def over_checkpoints(one: Sequence) -> str:
    """What the loss and both ends of the spectrum do from the first checkpoint to the last."""
    loss, top, error = (one.column(name) for name in ("loss", "lambda_max", "lambda_max_error"))
    ends = [with_error(float(top[i]), float(error[i])) for i in (0, -1)]
    said = (
        f"From {one.names[0]} to {one.names[-1]} the loss goes from {loss[0]:.3g} to {loss[-1]:.3g} and "
        f"λ_max from {ends[0]} to {ends[1]}"
    )
    peak = int(np.nanargmax(top)) if np.isfinite(top).any() else 0
    if 0 < peak < len(top) - 1:
        said += f", highest at {one.names[peak]} ({rounded(float(top[peak]))})"
    return f"{said}."


HOW = (
    "All runs are deterministic and on all of the data at once; measured by the monitor on the same data, "
    "λ_max with its error, before the step of that number"
)


def captions(result: Dynamics) -> dict[str, str]:
    """What each figure and table shows."""
    if result.sequence is not None:
        return {
            "checkpoints": "Every checkpoint, measured as the monitor measures: both ends of the spectrum "
            "with their errors, trace ± standard error over probes, λ_max of the GGN, ‖H − H_o‖/‖H‖, the "
            "share of the gradient in the top eigenspace.",
            "blocks": f"λ_max of {result.sequence.followed()} and trace of every block, at every checkpoint.",
            "over_checkpoints": "λ_max, λ_min and trace with their errors, and the loss, over checkpoints.",
            "block_map": f"λ_max of {result.sequence.followed()} at every checkpoint, in logarithmic "
            "colors; empty where it is not positive.",
        }
    band = f"{100 * NEAR:.0f} %"
    return {
        "claims": "What papers say of such runs, and what was measured here; every verdict is computed.",
        "runs": f"{HOW}. reached: the step at which η times the sharpness is at its threshold beyond its "
        "error; after: its median from there on, over the threshold; spike: the first step whose loss is "
        f"{SPIKE:g} times the lowest before.",
        "measurements": f"{HOW}; columns as in the monitor's history.",
        "alarms": f"Spikes are steps whose loss is {SPIKE:g} times the lowest before. warned: spikes before "
        "which a number was beyond its threshold without a break; lead: since how many steps (median); "
        "false: measurements beyond it in runs without a spike, below the ceiling and at the edge.",
        "edge": f"Gradient descent. {HOW}. Dashed: 2/η; the band is {band} around it. Below: the loss of "
        "every step.",
        "adam": "Adam: λ_max of P^(−½) H P^(−½), P Adam's own diagonal, against 2(1 + β₁)/((1 − β₁) η), "
        f"dashed; the band is {band} around it; λ_max of H itself. Below: the loss of every step.",
        "warmup": "Adam without a warm-up and with it: loss of every step (top), and η times the "
        "preconditioned sharpness of the first network over its threshold (bottom).",
        "spikes": "Gradient descent whose learning rate rises above the ceiling, or stays below it: loss of "
        "every step, η λ_max with its threshold dashed, and when each number was beyond its threshold. "
        "Vertical: the first step of the spike.",
        "grokking": "Addition modulo p: accuracy on the pairs that are trained on and on the others; λ_max, "
        f"and λ_max over the loss. Shaded: from memorized ({100 * MEMORIZED:.0f} %) to generalized "
        f"({100 * GENERALIZED:.0f} %).",
    }
