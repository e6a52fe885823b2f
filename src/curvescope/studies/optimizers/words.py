"""What is said about the comparison: the numbers to look at first, captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.optimizers.comparison import interval
from curvescope.studies.optimizers.contenders import CONTENDERS
from curvescope.studies.optimizers.tuning import SHARE

if TYPE_CHECKING:
    from curvescope.studies.optimizers.study import Compared


def summary(result: Compared) -> list[Line]:
    """Losses at the end of the budget, the lowest first."""
    found: list[Line] = []
    for arena in result.arenas:
        ends = {
            name: interval(np.array([c.final for c in result.of(arena, name)])) for name in result.optimizers
        }
        for name in sorted(ends, key=lambda name: ends[name][0]):
            mean, low, high = ends[name]
            course = result.of(arena, name)[0]
            edge = ", the last that was tried" if result.at_edge(arena, name) else ""
            steps, seconds = course.end("steps"), course.end("seconds")
            words = (
                f"[{low:.3f}, {high:.3f}] after {steps:.0f} steps in {seconds:.1f} s, "
                f"lr {course.rate:g}{edge}: {CONTENDERS[name].words}"
            )
            found.append((f"{arena}, {name}", f"{mean:.3f}", words))
    return [*found, *(("note", "", note) for note in result.notes)]


def captions(result: Compared) -> dict[str, str]:
    """What each figure and table shows."""
    first = f"{plural(len(result.rates), 'rate')} from {min(result.rates):g} to {max(result.rates):g}"
    tried = (
        f"tries {first} at {SHARE:g} of the budget, then, at all of it, the better half of them and rates "
        "beside the best until it lies between two that are no better"
        if result.searches
        else f"tries {first}"
    )
    how = (
        f"Every optimizer {tried}; by the held-out loss at the end, on a seed of their own. The best rate is "
        f"run on {plural(result.seeds, 'other seed')}, with weights and batches of each. The budget is the "
        "same work for all: forward passes 1, gradients 2, products 4, products of one tensor 1.5, all over 3"
    )
    ends = "low and high: Student's 95 % interval over seeds"
    return {
        "courses": "Held-out loss against steps, work (in gradients) and processor time: means over seeds, "
        "bands are 95 % intervals, of the mean's logarithm; below four seeds a line is a run. "
        f"{how}. A mean ends where its shortest run does. Held-out "
        "sums of addition are drawn anew, and some of them are among those of training.",
        "ends": f"At the end of the budget. {how}; {ends}. at_edge: the best rate is the smallest or the "
        "largest that was tried, and no verdict is given; products are whole ones of the Hessian; wall is by "
        "the clock.",
        "gaps": "Differences of held-out losses from SGD and from AdamW, paired over seeds, at the farthest "
        f"point of an axis that both reach; negative is lower. {ends}; lower: what that interval decides. "
        "Rates are tuned for the end of the budget: at equal steps, one that takes fewer steps by then is at "
        "its best and the other is not. Of many differences that are none, one in twenty is decided wrongly.",
        "trials": "Held-out loss at the end of every trial of the tuning; budget: of the run, as a share.",
    }
