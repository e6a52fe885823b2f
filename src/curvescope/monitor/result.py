"""What a monitor has seen, as a result that can be shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from curvescope.runs.shown import Line, Shown

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

    def summary(self) -> list[Line]:
        """The numbers to look at first."""
        from curvescope.monitor import words

        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        from curvescope.monitor import words

        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """The history, one row a measurement; blocks, one row a block and measurement."""
        import pandas as pd

        history = pd.DataFrame({**self.history, "left_out": self.left_out})
        return {"history": history, "blocks": pd.DataFrame(self.blocks)}

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.monitor import figures

        return figures.draw(self)
