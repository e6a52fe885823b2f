"""What is said about the families and the bundled model: the numbers to look at first, tables, captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import plural
from curvescope.papers.singh2025.gap.claims import LOSS, gaps
from curvescope.papers.singh2025.gap.courses import FAMILIES, TASKS
from curvescope.runs.shown import Line
from curvescope.studies.gap.view import row

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.papers.singh2025.gap.study import Gaps


def summary(result: Gaps) -> list[Line]:
    """How much of λ_max the GGN misses, by family and task, and what the study says of the bundled model."""
    found: list[Line] = []
    for task in TASKS:
        for family in FAMILIES:
            first, last = (100 * np.median(gaps(result, family, task, result.steps[i])) for i in (0, -1))
            words = f"% of λ_max that the GGN misses at first, {last:.3g} % after {result.steps[-1]} steps"
            found.append((f"{family}, {LOSS[task]}", f"{first:.3g}", f"{words} (medians of seeds)"))
    return [*found, *result.bundled.summary()]


def tables(result: Gaps) -> dict[str, pd.DataFrame]:
    """One row per small model and step; those of the bundled model."""
    import pandas as pd

    rows = [
        {"family": family, "task": task, "seed": place.seed, "step": step, **row(result.pair(place, step))}
        for family in FAMILIES
        for task in TASKS
        for place in result.places(family, task)
        for step in result.steps
    ]
    own = {f"bundled_{name}": frame for name, frame in result.bundled.tables().items()}
    return {"families": pd.DataFrame(rows), **own}


def captions(result: Gaps) -> dict[str, str]:
    """What each figure and table shows."""
    sizes = sorted({course.num_parameters for course in result.courses.values()})
    what = (
        f"A Transformer and an MLP of {' and '.join(map(str, sizes))} parameters on the same inputs and "
        f"targets, trained for up to {result.steps[-1]} steps ({plural(result.seeds, 'seed')}); Hessian and "
        "GGN are written out, so that all numbers are exact."
    )
    own = {f"bundled_{name}": text for name, text in result.bundled.captions().items()}
    return {
        "families": f"{what} Left: how much of λ_max the GGN misses. Middle: functional share ‖H_f‖/‖H‖ "
        "against the loss. Right: Wasserstein distance of the spectra in units of ‖H‖/√n, which the share "
        "bounds.",
        **own,
    }
