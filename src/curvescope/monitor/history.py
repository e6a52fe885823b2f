"""The rows that a monitor has seen: in memory, and in its folder where it has one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

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
        no_block = dict.fromkeys(BLOCK_COLUMNS, math.nan)
        blocks = [] if files is None else [{**no_block, **row} for row in files.read(BLOCKS)]
        self._unsaved: tuple[Row, list[Row]] | None = None  # the last measurement
        self._whole = True  # the files hold all earlier rows
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
        self._unsaved = whole, rows
        return whole

    def save(self) -> None:
        """Write the last measurement; after a write that failed, all of them again."""
        if self.files is None or self._unsaved is None:
            return
        row, blocks = self._unsaved
        was_whole, self._whole = self._whole, False
        self.files.go_on()
        if was_whole:
            self.files.append(BLOCKS, blocks)  # first, so that every step in the history has its blocks
            self.files.append(HISTORY, [row])
        else:
            self.files.rewrite(BLOCKS, self.block_rows)
            self.files.rewrite(HISTORY, self.rows)
        self._whole = True

    def leave_folder(self) -> Path | None:
        """Forget all rows and the folder, which stays as it is; the folder."""
        folder = None if self.files is None else self.files.folder
        self.files, self.rows, self.block_rows = None, [], []
        return folder

    @property
    def last_step(self) -> int:
        """Of the last measurement; −1 before the first."""
        return self.rows[-1]["step"] if self.rows else -1

    def rewind(self, step: int) -> bool:
        """Drop the rows of this step and later ones, because the loop goes on from here.

        Returns:
            False, with nothing dropped, if that would delete all rows of a finished run.
        """
        if self.last_step < step:
            return True
        if self.files is not None and self.files.finished and step <= self.rows[0]["step"]:
            return False
        self.rows = [row for row in self.rows if row["step"] < step]
        self.block_rows = [row for row in self.block_rows if row["step"] < step]
        if self.files is not None:
            self.files.go_on()
        self._rewrite()
        return True

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
