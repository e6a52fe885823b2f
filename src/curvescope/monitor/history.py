"""The rows that a monitor has seen: in memory, and in its folder where it has one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from curvescope.core.errors import UsageError
from curvescope.monitor.columns import BLOCK_COLUMNS, COLUMNS, TEXT
from curvescope.monitor.files import Files, Row
from curvescope.runs.growing import BLOCKS, HISTORY

if TYPE_CHECKING:
    import pandas as pd


@final
class History:
    """One row a measurement, and one a block and measurement; no step is there twice."""

    def __init__(self, files: Files | None = None):
        self.files = files
        empty = dict.fromkeys(COLUMNS, math.nan)  # a row of another version may lack a column
        self.rows: list[Row] = [] if files is None else [{**empty, **row} for row in files.read(HISTORY)]
        blocks = [] if files is None else files.read(BLOCKS)
        self.block_rows: list[Row] = [row for row in blocks if row["step"] <= self.last_step]
        self._rewrite()  # without the piece of a row that a killed process may have left

    def _rewrite(self) -> None:
        if self.files is not None and (self.files.folder / BLOCKS).exists():
            self.files.rewrite(HISTORY, self.rows)
            self.files.rewrite(BLOCKS, self.block_rows)

    def add(self, row: Mapping[str, Any], blocks: Mapping[str, Mapping[str, float]]) -> Row:
        """A measurement, its blocks by name; the row with nan for what was not measured."""
        whole = {**dict.fromkeys(COLUMNS, math.nan), TEXT: "", **row}
        empty = dict.fromkeys(BLOCK_COLUMNS, math.nan)
        rows = [{**empty, **found, "step": row["step"], "block": name} for name, found in blocks.items()]
        self.rows.append(whole)
        self.block_rows += rows
        if self.files is not None:
            self.files.go_on()
            self.files.append(BLOCKS, rows)  # first: what the history has, is whole
            self.files.append(HISTORY, [whole])
        return whole

    @property
    def last_step(self) -> int:
        """Of the last measurement; −1 before the first."""
        return self.rows[-1]["step"] if self.rows else -1

    def rewind(self, step: int) -> None:
        """Drop what an earlier process measured at this step or later: the loop goes on from here.

        Raises:
            UsageError: The run was finished there.
        """
        if self.last_step < step:
            return
        if self.files is not None and self.files.finished:
            raise UsageError(
                f"the run in {self.files.folder} is finished, up to step {self.last_step}, "
                f"and this is step {step}",
                hint="choose another out, or remove it",
            )
        self.rows = [row for row in self.rows if row["step"] < step]
        self.block_rows = [row for row in self.block_rows if row["step"] < step]
        self._rewrite()

    def frame(self) -> pd.DataFrame:
        """One row a measurement."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=[*COLUMNS, TEXT])

    def block_frame(self) -> pd.DataFrame:
        """One row a block and measurement."""
        import pandas as pd

        return pd.DataFrame(self.block_rows, columns=list(BLOCK_COLUMNS))

    def arrays(self) -> dict[str, np.ndarray]:
        """Columns of numbers, (S,) each."""
        return {name: np.array([row[name] for row in self.rows], float) for name in COLUMNS}

    def block_arrays(self) -> dict[str, np.ndarray]:
        """Columns of numbers, and names of blocks, (R,) each."""
        kinds = {name: str if name == "block" else float for name in BLOCK_COLUMNS}
        return {name: np.array([row[name] for row in self.block_rows], kind) for name, kind in kinds.items()}
