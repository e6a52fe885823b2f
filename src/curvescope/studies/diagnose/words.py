"""A diagnosis in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.core.numbers import plural, rounded
from curvescope.runs.shown import Line

if TYPE_CHECKING:
    from curvescope.studies.diagnose.study import Diagnosis

NOTHING = "nothing unusual"


def summary(found: Diagnosis) -> list[Line]:
    """The verdict, then every finding: name, number, severity with its meaning."""
    lines = [("diagnosis", "", verdict(found))]
    for check in found.findings:
        place = f" ({check.where})" if check.where else ""
        lines.append((check.name, check.number, f"{check.severity}: {check.meaning}{place}"))
    return lines


def opening(found: Diagnosis) -> str:
    """How much was found, and the worst of it."""
    looked = f"{_looked(found, ' (', ')')} on {found.num_terms:g} terms of {found.data}"
    if not found.unusual:
        return f"Nothing unusual in {looked}; what is told of the learning rate is its ceiling."
    worst = found.unusual[0]
    place = f" ({worst.where})" if worst.where else ""
    counts = verdict(found).partition(";")[0]
    return f"Of {looked}, {counts}. The first: {worst.meaning}{place}."


def verdict(found: Diagnosis) -> str:
    """`2 faults, 1 warning` or that nothing is unusual, and of how many checks."""
    counts = {kind: sum(c.severity == kind for c in found.unusual) for kind in ("fault", "warning", "note")}
    told = ", ".join(plural(count, kind) for kind, count in counts.items() if count)
    return f"{told or NOTHING}; {_looked(found, ', ')}, loss {rounded(found.whole.loss)}"


def _looked(found: Diagnosis, begin: str, end: str = "") -> str:
    """`13 checks, 3 not looked at`."""
    left = sum(check.severity == "not looked at" for check in found.checks)
    looked = plural(len(found.checks) - left, "check")
    return f"{looked}{begin}{left} not looked at{end}" if left else looked


def captions(found: Diagnosis) -> dict[str, str]:
    """What each figure and table shows."""
    return {
        "findings": "What was found, worst first: its number and error, what it means, what one would do, "
        "and "
        "the evidence that it rests on.",
        "checks": "Every check: its value over its limit, with the error; unusual lies to the right of the "
        "line, "
        "by more than the error. Not looked at: what does not apply to this model, with the reason.",
        "layers": "Norm of the Hessian's rows of each layer's matrices, from shared probes, and norm of the "
        "gradient.",
        "blocks": "λ_max of every matrix by itself with its residual, and the learning rate that descent on "
        "it alone allows (2/λ_max, more with momentum); at most `high`, 95 times in 100.",
        "heads": "Liveness (1: equal weights, 0: all on one key), weight on the first token, what the head "
        "writes over the median head, and the change of the loss without it where it was ablated.",
        "sequences": "Loss, gradient norm and trace of the GGN of every sequence; `copy_of` is the first "
        "equal one.",
        "parts": "λ_max on disjoint parts of the data.",
    }
