"""The history of a monitored run, as a result that can be shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from curvescope.monitor import messages
from curvescope.monitor.diagnosis import RunFinding, diagnose_run
from curvescope.monitor.run_history import RunHistory
from curvescope.runs.study_result import Line, Shown
from curvescope.viz.interactive import Scene

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Monitored(Shown):
    """The history of a run and of its blocks, column by column."""

    model: str
    data: str
    loss_name: str
    num_terms: float
    num_parameters: int
    every: int
    budget: float
    history: dict[str, np.ndarray]  # (S,) each, see `columns.COLUMNS`
    blocks: dict[str, np.ndarray]  # (R,) each, see `columns.BLOCK_COLUMNS`
    left_out: list[str]  # of each measurement: parts that the budget did not allow
    steps: dict[str, np.ndarray] = field(default_factory=dict)  # (N,) each, see `columns.STEP_COLUMNS`
    end: dict[str, float] = field(default_factory=dict)  # see `monitor.ending`; empty where nobody wrote it

    @property
    def findings(self) -> list[RunFinding]:
        """Findings from the history, worst first."""
        return diagnose_run(self.run_history)

    @property
    def run_history(self) -> RunHistory:
        """The columns, as the diagnosis takes them."""
        return RunHistory(self.history, self.blocks, self.steps)

    def summary(self) -> list[Line]:
        """The numbers to look at first."""
        return messages.summary(self)

    def opening(self) -> str:
        """The course of the run in sentences."""
        return messages.opening(self)

    def captions(self) -> dict[str, str]:
        """Captions of the figures and tables, by name."""
        return messages.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """The history, one row a measurement; blocks, one row a block and measurement."""
        import pandas as pd

        history = pd.DataFrame({**self.history, "left_out": self.left_out})
        steps = {"steps": pd.DataFrame(self.steps)} if len(self.steps.get("step", ())) else {}
        return {"history": history, "blocks": pd.DataFrame(self.blocks), **steps}

    def block_map(self, column: str) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Names of blocks, steps (S,), and a column of theirs (B, S), each cell as it was last measured."""
        names = list(dict.fromkeys(self.blocks["block"].tolist()))
        steps = np.unique(self.blocks["step"])
        cells = np.full((len(names), len(steps)), np.nan)
        rows = {name: i for i, name in enumerate(names)}
        for name, step, value in zip(*(self.blocks[c] for c in ("block", "step", column)), strict=True):
            cells[rows[str(name)], np.searchsorted(steps, step)] = value
        for j in range(1, len(steps)):
            cells[:, j] = np.where(np.isnan(cells[:, j]), cells[:, j - 1], cells[:, j])
        return names, steps, cells

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.monitor import figures

        return figures.draw(self)

    def scenes(self) -> dict[str, Scene]:
        """Scenes by name, with switches."""
        from curvescope.monitor import figures

        return figures.scenes(self)
