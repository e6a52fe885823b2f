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
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.data.tasks.random_sequences import markov_entropy_rate, markov_transitions
from curvescope.runs.shown import Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.scaling.analysis import (
    LENGTH,
    QUANTITIES,
    VARIABLES,
    VOCAB,
    Cell,
    Law,
    Place,
    fit_law,
    measure_cell,
)

if TYPE_CHECKING:
    pass


class Size(NamedTuple):
    """What a grid has unless a setting says otherwise."""

    widths: tuple[int, ...]
    sequences: tuple[int, ...]
    seeds: int
    steps: int
    layers: int
    heads: int


GRIDS = {
    "small": Size((8, 12, 16, 24), (8, 32, 128, 512), seeds=3, steps=200, layers=1, heads=2),
    "large": Size(
        (16, 32, 64, 128, 256), (16, 64, 256, 1024, 4096, 16384), seeds=5, steps=2000, layers=2, heads=4
    ),
}


@dataclass(frozen=True)
class Config(BaseConfig):
    """Which models and how much data. The defaults take a few minutes on a CPU."""

    grid: Literal["small", "large"] = setting("small", "minutes on a CPU; large is for a card")
    widths: tuple[int, ...] = setting((), "of the models; by default those of the grid")
    sequences: tuple[int, ...] = setting((), f"of training data, {LENGTH} tokens each; by default the grid's")
    seeds: int = setting(0, "repetitions of each cell, with weights and data of its own; 0: the grid's")
    steps: int = setting(0, "of training, the same for all cells; 0: the grid's")
    lr: float = setting(1e-2, "of AdamW, at its height")
    weight_decay: float = setting(0.01, "of matrices")
    batch_size: int = setting(16, "sequences of a step")
    curvature_on: Literal["train", "held_out"] = setting("train", "the data whose loss has the Hessian")
    measured: int = setting(128, "at most so many sequences for the Hessian")
    num_probes: int = setting(6, "random vectors for traces and norms")
    num_steps: int = setting(48, "Lanczos steps for λ_max and λ_min of H; a third of them for its parts")
    max_exact: int = setting(0, "a model with at most so many parameters is written out, not estimated")
    held_out: int = setting(512, "sequences for the held-out loss and its variance")
    fresh: int = setting(4096, "further sequences that check the data needed")
    tolerance: float = setting(0.02, "nats by which one more sequence may move the mean loss")
    draws: int = setting(1000, "of the bootstrap")
    device: str = setting("cpu", "cpu, cuda, …")
    seed: int = setting(0, "of the language, and of everything random")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "seeds", "steps", "max_exact")
        at_least(self, 1, "batch_size", "measured", "num_steps")
        at_least(self, 2, "num_probes", "held_out", "fresh")
        at_least(self, 50, "draws")
        for name, fewest in {"widths": 2, "sequences": 1}.items():
            for value in getattr(self, name):
                if value < fewest or (name == "widths" and value % self.size.heads):
                    raise UsageError(
                        f"{name}: expected at least {fewest}, widths by {self.size.heads}s, got {value}"
                    )
        if not self.tolerance > 0 or not self.lr > 0:
            raise UsageError(f"expected a positive tolerance and lr, got {self.tolerance} and {self.lr}")

    @property
    def size(self) -> Size:
        """The grid by its name."""
        return GRIDS[self.grid]

    @property
    def num_train_steps(self) -> int:
        """Steps of training."""
        return self.steps or self.size.steps

    def places(self) -> list[tuple[int, int, int]]:
        """(width, sequences, seed) of all cells."""
        widths, sequences = self.widths or self.size.widths, self.sequences or self.size.sequences
        return list(
            product(sorted(set(widths)), sorted(set(sequences)), range(self.seeds or self.size.seeds))
        )


# ------------------------------------------------------------------------------------------------------ study


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
