"""The grid of the study `scaling`: widths × data sizes × seeds, and how hard each cell is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import at_least, setting
from curvescope.core.errors import UsageError
from curvescope.studies.scaling.cell import LENGTH, VOCAB



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
