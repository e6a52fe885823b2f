"""Study `scaling`: train a grid of models, and test power laws of loss and curvature in model and data size.

Every cell is a small Transformer of some width. It is trained for a fixed number of steps on sequences of a
Markov language whose lowest possible loss is known. After training, the study measures the loss, the held-out
loss and the Hessian, by second derivatives. It fits laws over N and D in log space (`laws`), each with an
interval and tests of whether it is a law. The data needed for a tolerance come from the exact law of a mean
(`needed`), not from a fitted exponent. Finished cells are stored in `state`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.data.tasks.random_sequences import markov_entropy_rate, markov_transitions
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Shown
from curvescope.studies.scaling import analysis


class GridSize(NamedTuple):
    """Default sizes of a grid."""

    widths: tuple[int, ...]
    sequences: tuple[int, ...]
    seeds: int
    steps: int
    layers: int
    heads: int


GRIDS = {
    "small": GridSize((8, 12, 16, 24), (8, 32, 128, 512), seeds=3, steps=200, layers=1, heads=2),
    "large": GridSize(
        (16, 32, 64, 128, 256), (16, 64, 256, 1024, 4096, 16384), seeds=5, steps=2000, layers=2, heads=4
    ),
}


@dataclass(frozen=True)
class Config(BaseConfig):
    """Models and amounts of data. The defaults take a few minutes on a CPU."""

    grid: Literal["small", "large"] = setting("small", "small takes minutes on a CPU; large is for a GPU")
    widths: tuple[int, ...] = setting((), "widths of the models; by default those of the grid")
    sequences: tuple[int, ...] = setting(
        (), f"training sequences, {analysis.LENGTH} tokens each; by default those of the grid"
    )
    seeds: int = setting(
        0, "repetitions of each cell with new weights and data; 0: the grid's default", least=0
    )
    steps: int = setting(0, "training steps, the same for all cells; 0: the grid's default", least=0)
    lr: float = setting(1e-2, "peak learning rate of AdamW")
    weight_decay: float = setting(0.01, "weight decay of matrices")
    batch_size: int = setting(16, "sequences per training step", least=1)
    curvature_on: Literal["train", "held_out"] = setting(
        "train", "data of the loss whose Hessian is measured"
    )
    measured: int = setting(128, "most sequences for the Hessian", least=1)
    num_probes: int = setting(6, "random vectors for traces and norms", least=2)
    num_steps: int = setting(
        48, "Lanczos steps for λ_max and λ_min of H; a third as many for the GGN and the rest", least=1
    )
    max_exact: int = setting(
        0, "with at most this many parameters, compute exact matrices instead of estimates", least=0
    )
    held_out: int = setting(512, "sequences for the held-out loss and its variance", least=2)
    fresh: int = setting(4096, "further sequences that check the sample size", least=2)
    tolerance: float = setting(0.02, "tolerated change of the mean loss by one more sequence, in nats")
    draws: int = setting(1000, "bootstrap samples", least=50)
    device: str = setting("cpu", "device: cpu, cuda, …")
    seed: int = setting(0, "seed of the language and of everything random")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, fewest in {"widths": 2, "sequences": 1}.items():
            for value in getattr(self, name):
                if value < fewest or (name == "widths" and value % self.size.heads):
                    raise UsageError(
                        f"{name}: expected at least {fewest}, widths in multiples of {self.size.heads}, "
                        f"got {value}"
                    )
        if not self.tolerance > 0 or not self.lr > 0:
            raise UsageError(f"expected a positive tolerance and lr, got {self.tolerance} and {self.lr}")

    @property
    def size(self) -> GridSize:
        """Default sizes of the chosen grid."""
        return GRIDS[self.grid]

    @property
    def num_train_steps(self) -> int:
        """Number of training steps."""
        return self.steps or self.size.steps

    def places(self) -> list[tuple[int, int, int]]:
        """Return (width, sequences, seed) of all cells."""
        widths, sequences = self.widths or self.size.widths, self.sequences or self.size.sequences
        return list(
            product(sorted(set(widths)), sorted(set(sequences)), range(self.seeds or self.size.seeds))
        )


@dataclass(frozen=True)
class Scaling(Shown):
    """All cells of a grid, and the fitted laws."""

    grid: str
    curvature_on: str
    steps: int
    measured: int  # most sequences for a Hessian
    least_loss: float  # the entropy rate of the language, in nats
    cells: list[analysis.GridCell]
    laws: list[analysis.PowerLaw]

    def values(self, quantity: str) -> np.ndarray:
        """(cells, 2) value and error of a quantity, in the order of the cells."""
        return np.array([analysis.QUANTITIES[quantity].of(cell) for cell in self.cells])

    def variable(self, name: str) -> np.ndarray:
        """N or D of every cell."""
        return np.array([c.num_parameters if name == "N" else c.tokens for c in self.cells], dtype=float)

    def law(self, quantity: str, variable: str) -> analysis.PowerLaw:
        """Return the law of a quantity over N or D."""
        return next(law for law in self.laws if (law.quantity, law.variable) == (quantity, variable))


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Scaling:
    """Train and measure the cells of the grid, then fit the laws."""
    places = [analysis.CellPosition(*place) for place in cfg.places()]
    pieces = [Piece(p.name, partial(analysis.measure_cell, cfg, p), _spoken(p)) for p in places]
    results = work_through(pieces, progress=progress, state=state)
    cells = [results.take(analysis.GridCell, place.name) for place in places]
    return Scaling(
        grid=cfg.grid,
        curvature_on=cfg.curvature_on,
        steps=cfg.num_train_steps,
        measured=cfg.measured,
        least_loss=markov_entropy_rate(markov_transitions(analysis.VOCAB, seed=cfg.seed)),
        cells=cells,
        laws=fit_laws(cells, draws=cfg.draws, seed=cfg.seed),
        notes=notes(cfg),
    )


def fit_laws(cells: list[analysis.GridCell], *, draws: int, seed: int) -> list[analysis.PowerLaw]:
    """Fit every quantity over N at fixed D, and over D at fixed N."""
    size = {
        "N": np.array([cell.num_parameters for cell in cells], dtype=float),
        "D": np.array([cell.tokens for cell in cells], dtype=float),
    }
    return [
        analysis.fit_law(
            name,
            variable,
            size[variable],
            size["D" if variable == "N" else "N"],
            np.array([quantity.of(cell)[0] for cell in cells]),
            draws=draws,
            seed=seed,
        )
        for name, quantity in analysis.QUANTITIES.items()
        for variable in analysis.VARIABLES
    ]


def notes(cfg: Config) -> list[str]:
    """Return notes on how the numbers were made."""
    texts = []
    if cfg.curvature_on == "train" and max(p[1] for p in cfg.places()) > cfg.measured:
        texts.append(f"the Hessian is measured on the first {cfg.measured} sequences of the training data")
    if (cfg.seeds or cfg.size.seeds) < 2:
        texts.append("one seed per cell: differences between cells cannot be distinguished from chance")
    return texts


def _spoken(place: analysis.CellPosition) -> str:
    return f"width {place.width}, {place.sequences} sequences, seed {place.seed}"
