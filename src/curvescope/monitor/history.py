"""The rows that a monitor has seen: in memory, and in its folder where it has one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch import Tensor

from curvescope.monitor.columns import BLOCK_COLUMNS, COLUMNS, TEXT
from curvescope.monitor.files import Files, Row
from curvescope.runs.live_history import BLOCKS, HISTORY, STEPS

if TYPE_CHECKING:
    import pandas as pd

MOST_LOSSES = 1000  # of training steps, that wait on their device


def _loss_rows(losses: Sequence[tuple[int, float]]) -> list[Row]:
    return [{"step": step, "loss": loss} for step, loss in losses]


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
        self.losses: list[tuple[int, float]] = []
        if files is not None:
            self.losses = [(row["step"], row["loss"]) for row in files.read(STEPS)]
        self._saved_losses = len(self.losses)
        self._new_losses: list[tuple[int, Tensor | float]] = []  # not read from the device yet
        self._whole = True  # the files hold all earlier rows
        self.block_rows: list[Row] = [row for row in blocks if row["step"] <= self.last_row_step]
        self._rewrite()  # without the piece of a row that a killed process may have left

    def _rewrite(self) -> None:
        if self.files is not None and (self.files.folder / BLOCKS).exists():
            self.files.rewrite(HISTORY, self.rows)
            self.files.rewrite(BLOCKS, self.block_rows)
            self.files.rewrite(STEPS, _loss_rows(self.losses))

    def add_loss(self, step: int, loss: Tensor | float) -> None:
        """Keep the loss of a training step; its number is read when the next measurement is made."""
        self._new_losses.append((step, loss.detach().clone() if isinstance(loss, Tensor) else loss))
        if len(self._new_losses) >= MOST_LOSSES:
            self._read_losses()

    def last_loss(self, step: int) -> float:
        """The loss of a training step; nan if it was not told."""
        self._read_losses()
        return self.losses[-1][1] if self.losses and self.losses[-1][0] == step else math.nan

    def _read_losses(self) -> None:
        new, self._new_losses = self._new_losses, []
        self.losses += [(step, float(loss)) for step, loss in new]

    def add(self, row: Mapping[str, Any], blocks: Mapping[str, Mapping[str, float]]) -> Row:
        """A measurement, its blocks by name; the row with nan for what was not measured."""
        whole = {**dict.fromkeys(COLUMNS, math.nan), TEXT: "", **row}
        empty = dict.fromkeys(BLOCK_COLUMNS, math.nan)
        rows = [{**empty, **numbers, "step": row["step"], "block": name} for name, numbers in blocks.items()]
        self.rows.append(whole)
        self.block_rows += rows
        self._unsaved = whole, rows
        return whole

    def save(self) -> None:
        """Write the last measurement and losses; after a write that failed, all of them again."""
        self._read_losses()
        if self.files is None or (self._unsaved is None and self._saved_losses == len(self.losses)):
            return
        row, blocks = self._unsaved or ({}, [])
        was_whole, self._whole = self._whole, False
        self.files.go_on()
        if was_whole:
            if self._saved_losses < len(self.losses):
                self.files.append(STEPS, _loss_rows(self.losses[self._saved_losses :]))
            if row:
                self.files.append(BLOCKS, blocks)  # first, so that every step in the history has its blocks
                self.files.append(HISTORY, [row])
        else:
            self.files.rewrite(STEPS, _loss_rows(self.losses))
            self.files.rewrite(BLOCKS, self.block_rows)
            self.files.rewrite(HISTORY, self.rows)
        self._whole, self._unsaved, self._saved_losses = True, None, len(self.losses)

    def leave_folder(self) -> Path | None:
        """Forget all rows and the folder, which stays as it is; the folder."""
        folder = None if self.files is None else self.files.folder
        self.files, self.rows, self.block_rows, self.losses = None, [], [], []
        return folder

    @property
    def last_row_step(self) -> int:
        """Step of the last measurement; −1 before the first."""
        return self.rows[-1]["step"] if self.rows else -1

    def rewind(self, step: int) -> bool:
        """Drop the rows of this step and later ones, because the loop continues from here.

        Returns:
            False, with nothing dropped, if that would delete all rows of a finished run.
        """
        self.losses = [(at, loss) for at, loss in self.losses if at < step]
        if self.last_row_step < step and self._saved_losses == len(self.losses):
            return True
        if self.files is not None and self.files.finished and self.rows and step <= self.rows[0]["step"]:
            return False
        self.rows = [row for row in self.rows if row["step"] < step]
        self.block_rows = [row for row in self.block_rows if row["step"] < step]
        if self.files is not None:
            self.files.go_on()
        self._saved_losses = len(self.losses)
        self._rewrite()
        return True

    def step_arrays(self) -> dict[str, np.ndarray]:
        """Steps and losses (N,) of the training steps that told theirs."""
        self._read_losses()
        losses = np.array(self.losses, float).reshape(-1, 2)
        return {"step": losses[:, 0], "loss": losses[:, 1]}

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
