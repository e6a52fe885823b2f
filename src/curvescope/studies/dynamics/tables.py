"""The tables of the study `dynamics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.dynamics.edge import approach
from curvescope.studies.dynamics.spikes import SIGNALS, false_alarms, onset, warned

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.dynamics.course import Course
    from curvescope.studies.dynamics.study import Dynamics

SEEN = (
    "step", "loss", "grad_norm", "lambda_max", "lambda_max_error", "lambda_min", "lambda_min_error", "trace",
    "trace_stderr", "ggn_lambda_max", "ggn_gap", "lr", "lr_lambda_max", "threshold", "lr_sharpness",
    "sharpness_threshold", "grad_share", "curvature_along_gradient", "overlap",
)  # fmt: skip
OF_CHECKPOINTS = ("loss", "grad_norm", *SEEN[3:11], "grad_share", "curvature_along_gradient", "converged")


def of(result: Dynamics) -> dict[str, pd.DataFrame]:
    """`claims`, `runs`, `measurements`, `alarms`; or `checkpoints` and `blocks`."""
    import pandas as pd

    if result.sequence is not None:
        return _of_sequence(result)
    found = {
        "claims": pd.DataFrame(result.claims()),
        "runs": pd.DataFrame([_row(run) for run in result.courses.values()]),
        "measurements": pd.concat([_measurements(run) for run in result.courses.values()]),
    }
    if result.of("spikes"):
        found["alarms"] = pd.DataFrame(alarm_rows(result))
    return found


def _row(run: Course) -> dict[str, Any]:
    way, spike = approach(run), onset(run)
    reached = None if way.reached is None else int(way.steps[way.reached])
    return {
        "run": run.name,
        "optimizer": run.optimizer,
        "lr": run.lr[-1] if len(run.lr) else np.nan,
        "steps": len(run.loss) - 1,
        "first_loss": run.loss[0],
        "last_loss": run.loss[-1],
        "lambda_max_first": run.column("lambda_max")[0],
        "lambda_max_last": run.column("lambda_max")[-1],
        "reached": np.nan if reached is None else reached,
        "after": np.median(way.after) if len(way.after) else np.nan,
        "spike": np.nan if spike is None else spike,
    }


def _measurements(run: Course) -> pd.DataFrame:
    import pandas as pd

    found = pd.DataFrame({name: run.column(name) for name in SEEN})
    found.insert(0, "run", run.name)
    if len(run.evaluated):
        found["accuracy"], found["held_out_accuracy"] = run.accuracy, run.held_out_accuracy
        found["held_out_loss"] = run.held_out_loss
    return found


def alarm_rows(result: Dynamics) -> list[dict[str, Any]]:
    """One row a signal: spikes it warned of, by how many steps, and false alarms."""
    above = [run for run in result.of("spikes", "above") if onset(run) is not None]
    leads = {signal: [] for signal in SIGNALS}
    for run in above:
        for one in warned(run):
            leads[one.signal].append(one.lead)
    groups = {"below": result.of("spikes", "below"), "at_edge": result.of("edge")}
    false = {name: false_alarms([c for c in runs if onset(c) is None]) for name, runs in groups.items()}
    rows = []
    for signal, words in SIGNALS.items():
        early = [lead for lead in leads[signal] if lead]
        row: dict[str, Any] = {"signal": signal, "spikes": len(above), "warned": len(early)}
        row["lead_steps"] = float(np.median(early)) if early else np.nan
        for name, counts in false.items():
            row |= {f"false_{name}": counts[signal][0], f"measured_{name}": counts[signal][1]}
        rows.append(row | {"meaning": words})
    return rows


def _of_sequence(result: Dynamics) -> dict[str, pd.DataFrame]:
    import pandas as pd

    sequence = result.sequence
    assert sequence is not None
    table = pd.DataFrame({name: sequence.column(name) for name in OF_CHECKPOINTS})
    table.insert(0, "step", sequence.steps)
    table.insert(0, "checkpoint", sequence.names)
    blocks = [
        pd.DataFrame(one.blocks).assign(checkpoint=name)
        for name, one in zip(sequence.names, sequence.seen, strict=True)
    ]
    columns = ["checkpoint", "block", "lambda_max", "lambda_max_error", "converged", "trace", "trace_stderr"]
    return {"checkpoints": table, "blocks": pd.concat(blocks).reindex(columns=columns)}
