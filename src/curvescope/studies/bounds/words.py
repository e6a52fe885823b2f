"""What is said about bounds: names of instances, the numbers to look at first, captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.bounds.comparisons import Comparisons
from curvescope.studies.bounds.estimates import REPAIRED
from curvescope.studies.bounds.measures import CORRECTED, NONE, PRINTED, WHOLE

if TYPE_CHECKING:
    from curvescope.studies.bounds.study import Bounds

HEAD, KEYLESS, CLUSTERS = "random head", "head without keys", "two clusters"
BLOCK, CLOSING, STACK, ROW = "random block", "block with small W_2", "stack", "one row"
NETWORK = "ReLU network"
WEIGHTS, DATA, DEPTH = "weights", "data", "depth"
NO_STACK = (
    "there is no bound for a stack of several blocks: its norm is measured, and of each block alone, with "
    "the rest of the stack as its loss, there is one"
)


def network(num_layers: int) -> str:
    """The name of a ReLU network."""
    return f"{NETWORK}, {plural(num_layers, 'layer')}"


def summary(result: Bounds) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    there = [name for name in PRINTED if name in result.bounds.bound]
    found = [_line(name, result.bounds.chosen(bound=name)) for name in there]
    found += [
        _line(name, result.bounds.chosen(bound=name)) for name in CORRECTED if name in result.bounds.bound
    ]
    printed = [one for one in set(result.estimates.bound) if one not in (*CORRECTED, REPAIRED)]
    estimates = result.estimates.chosen(bound=printed)
    names = [
        q if b in PRINTED else f"{q} ({b})" for q, b in zip(estimates.quantity, estimates.bound, strict=True)
    ]
    violated = sorted({name for name, fails in zip(names, estimates.violated, strict=True) if fails})
    found.append(
        (
            "estimates that fail",
            f"{len(violated)} of {len(set(names))}",
            f"of what the printed proofs use: {', '.join(violated) or 'none'}",
        )
    )
    stack = result.bounds.chosen(bound=NONE, quantity=WHOLE)
    if len(stack.true):
        each = [f"{np.median(stack.true[stack.scale == n]):.3g} ({n:g})" for n in np.unique(stack.scale)]
        found.append(("‖H‖ by depth", ", ".join(each), "median over seeds, number of blocks in brackets"))
    return [*found, *(("note", "", note) for note in result.notes)]


def _line(name: str, found: Comparisons) -> Line:
    """How often a bound is violated, and how far it is from the truth where it is not."""
    count, violated = len(found.true), int(found.violated.sum())
    ratio = found.ratio[found.true > 0]
    words = f"bound over truth: median {np.median(ratio):.3g}, from {ratio.min():.3g} to {ratio.max():.3g}"
    if violated:
        worst = int(np.argmin(np.where(found.true > 0, found.ratio, np.inf)))
        words += f"; worst: {found.instance[worst]}, {found.varied[worst]} {found.scale[worst]:g}"
    return (name, f"violated {violated} of {count}", words)


def captions(result: Bounds) -> dict[str, str]:
    """What each figure and table shows."""
    seeds = plural(result.num_seeds, "random instance")
    exact = "True norms are exact: of all eigenvalues of the Hessian, written out in closed form."
    ratio = "The slack is bound over truth: above 1 it holds, below 1 it is violated."
    return {
        "bounds": f"Every bound of every instance next to the true norm. {exact} Certified: from the "
        "matrices of one forward pass, block by block.",
        "slack": f"{ratio} Lines are medians over {seeds}, bands their range, the shaded part is violation; "
        f"over the scale of weights and of data. {exact}",
        "adversarial": f"{ratio} Without keys and at zero loss the printed bound does not see W_Q. Two "
        "tokens that share the attention exceed 1/L, and ‖Z_1‖ its estimate by as much. The estimate of ξ_21 "
        "vanishes with W_2, the derivative does not. Small weights make the precursor's bound smaller than "
        "the GGN of one layer, and than the Hessian of two.",
        "depth": f"Left: ‖H‖ of stacks of post-norm blocks, which no bound covers, and of the largest part "
        f"in one block. Right: slack of the bound of each block alone; {seeds}.",
        "estimates": f"{ratio} What the proofs of Theorems 1 and 6 estimate, printed and repaired: median "
        "and range over all instances in the figure, by kind of instance in the table.",
    }
