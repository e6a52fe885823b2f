"""Do curvature and loss follow power laws in model size and data size? A grid is trained, and asked.

Every cell is a zoo Transformer of some width, trained on so many sequences of a Markov language whose least
possible loss is known, for the same number of steps. At its end loss, held-out loss and the Hessian of the
loss are measured, by second derivatives. Laws over N and D are fitted in log space (`laws`), each with an
interval and tests of whether it is a law; the data that a tolerance needs come from the exact law of a mean
(`needed`), never from an exponent. Cells are stored in `state` as they are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.progress import Progress
from curvescope.data.tasks.markov import markov_entropy_rate, markov_transitions
from curvescope.runs.shown import Claim, Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.scaling import claims, words
from curvescope.studies.scaling.cell import Cell, Place, measure_cell
from curvescope.studies.scaling.laws import Law, fit_law
from curvescope.studies.scaling.quantities import QUANTITIES, VARIABLES, row
from curvescope.studies.scaling.setting import Config
from curvescope.studies.scaling.cell import VOCAB

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Scaling(Shown):
    """All cells of a grid, and the laws that were fitted."""

    grid: str
    curvature_on: str
    steps: int
    measured: int  # sequences of a Hessian, at most
    least_loss: float  # the entropy rate of the language, in nats
    cells: list[Cell]
    laws: list[Law]

    def values(self, quantity: str) -> np.ndarray:
        """(cells, 2) value and error of a quantity, in the order of the cells."""
        return np.array([QUANTITIES[quantity].of(cell) for cell in self.cells])

    def variable(self, name: str) -> np.ndarray:
        """N or D of every cell."""
        return np.array([c.num_parameters if name == "N" else c.tokens for c in self.cells], dtype=float)

    def law(self, quantity: str, variable: str) -> Law:
        """The law of a quantity over N or D."""
        return next(law for law in self.laws if (law.quantity, law.variable) == (quantity, variable))

    def claims(self) -> list[Claim]:
        """What is said about curvature and size, next to what was measured."""
        return claims.judge(self)

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """One row per cell and seed; one per quantity and variable."""
        import pandas as pd

        laws = [{f: getattr(law, f) for f in words.LAW_COLUMNS} for law in self.laws]
        return {"scaling": pd.DataFrame([row(cell) for cell in self.cells]), "laws": pd.DataFrame(laws)}

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.studies.scaling import figures

        return figures.draw(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Scaling:
    """Train and measure the cells of the grid, then fit the laws.

    Args:
        progress: called with (what, number, total) as each cell begins.
        state: finished cells by name; filled as the study goes, used when it goes on.
    """
    places = [Place(*place) for place in cfg.places()]
    pieces = [Piece(p.name, partial(measure_cell, cfg, p), _spoken(p)) for p in places]
    found = work_through(pieces, progress=progress, state=state)
    cells = [found.take(Cell, place.name) for place in places]
    return Scaling(
        grid=cfg.grid,
        curvature_on=cfg.curvature_on,
        steps=cfg.num_train_steps,
        measured=cfg.measured,
        least_loss=markov_entropy_rate(markov_transitions(VOCAB, seed=cfg.seed)),
        cells=cells,
        laws=fit_laws(cells, draws=cfg.draws, seed=cfg.seed),
        notes=notes(cfg),
    )


def fit_laws(cells: list[Cell], *, draws: int, seed: int) -> list[Law]:
    """Every quantity over N at fixed D, and over D at fixed N."""
    size = {
        "N": np.array([cell.num_parameters for cell in cells], dtype=float),
        "D": np.array([cell.tokens for cell in cells], dtype=float),
    }
    return [
        fit_law(
            name,
            variable,
            size[variable],
            size["D" if variable == "N" else "N"],
            np.array([quantity.of(cell)[0] for cell in cells]),
            draws=draws,
            seed=seed,
        )
        for name, quantity in QUANTITIES.items()
        for variable in VARIABLES
    ]


def notes(cfg: Config) -> list[str]:
    """What a reader should know of how the numbers were made."""
    found = []
    if cfg.curvature_on == "train" and max(p[1] for p in cfg.places()) > cfg.measured:
        found.append(f"the Hessian is that of the first {cfg.measured} sequences of the training data")
    if (cfg.seeds or cfg.size.seeds) < 2:
        found.append("one seed: what differs between cells cannot be told from chance within them")
    return found


def _spoken(place: Place) -> str:
    return f"width {place.width}, {place.sequences} sequences, seed {place.seed}"
