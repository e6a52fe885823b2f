"""The settings of the study `factors`, and the small Transformer that it is about."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.data.tasks import task_data
from curvescope.models.load import load
from curvescope.models.zoo import TransformerConfig
from curvescope.problem import Problem
from curvescope.studies.factors.matrices import APPROXIMATIONS

DIGITS, HEADS = 2, 2
TUNING = 0  # the seed on which rates and dampings are tuned, before those of the runs
FULL = {
    "layers": 2,
    "width": 12,
    "sequences": 64,
    "seeds": 8,
    "checkpoints": (0, 3, 10, 30, 100, 300, 1000),
    "every": 5,
}
"""What the profile `full` takes instead of the defaults."""


@dataclass(frozen=True)
class Config(BaseConfig):
    """Which network, and how long. The defaults take a few minutes on a CPU."""

    layers: int = setting(1, "of the Transformer")
    width: int = setting(8, "of its stream; a multiple of 4, the feed-forward layer is twice as wide")
    sequences: int = setting(48, "sums that it is trained on, all at every step")
    seeds: int = setting(3, "of weights and sums, each with a training of its own")
    checkpoints: tuple[int, ...] = setting((0, 3, 10, 30, 100, 300), "steps of Adam after which is measured")
    lr: float = setting(0.01, "of Adam, on whose way the checkpoints lie")
    approximations: tuple[str, ...] = setting(tuple(APPROXIMATIONS), "of those that are known")
    damping: float = setting(0.1, "of the distances that invert, in units of the mean diagonal")
    dampings: tuple[float, ...] = setting((0.01, 0.1, 1.0, 10.0), "tried by single steps, in these units")
    steps: int = setting(60, "of every optimizer; 0: none is run")
    every: int = setting(10, "steps between one curvature and the next")
    trials: int = setting(16, "most runs to tune the rate and the damping of an optimizer")
    draws: int = setting(1000, "of the bootstrap")
    workers: int = setting(1, "processes of one thread that share the work; 1: none but this one")
    seed: int = setting(0, "of everything random")

    def __post_init__(self) -> None:
        as_tuples(self, "checkpoints", "approximations", "dampings")
        super().__post_init__()
        at_least(self, 1, "layers", "sequences", "every", "workers")
        at_least(self, 2, "seeds", "trials")
        at_least(self, 0, "steps")
        at_least(self, 50, "draws")
        if self.width < 4 or self.width % 4:
            raise UsageError(f"width: expected a multiple of 4, got {self.width}")
        if len(self.checkpoints) < 2 or any(a >= b for a, b in pairwise((-1, *self.checkpoints))):
            raise UsageError(f"expected checkpoints from 0 on that grow, got {self.checkpoints}")
        if not self.dampings or any(not value > 0 for value in (self.lr, self.damping, *self.dampings)):
            raise UsageError("expected lr, damping and dampings above 0")
        for name in self.approximations:
            if name not in APPROXIMATIONS:
                hint = near_misses(name, list(APPROXIMATIONS))
                raise UsageError(f"expected an approximation, got {name!r}", hint=hint)
        if len(set(self.approximations)) < max(len(self.approximations), 3):
            raise UsageError(f"expected three approximations or more, each once, got {self.approximations}")


def make_problem(cfg: Config, number: int) -> Problem:
    """The Transformer at random weights, on sums of two numbers of two digits.

    It is pre-norm, and all that it learns is the matrix of a linear map: norms have no gains, positions are
    rotary, nothing has a bias. So every parameter is in a block, and every block has factors.
    """
    seed = 1000 * cfg.seed + number
    shape = TransformerConfig(
        n_layers=cfg.layers,
        d_model=cfg.width,
        n_heads=HEADS,
        d_ff=2 * cfg.width,
        n_ctx=3 * DIGITS + 3,
        vocab_size=12,
        norm_affine=False,
        positions="rope",
        bias_qkv=False,
        bias_o=False,
        bias_ff=False,
        init="scaled",
        seed=seed,
    )
    data = task_data("addition", num_sequences=cfg.sequences, digits=DIGITS, seed=seed)
    return Problem(load(shape, dtype="float64"), data)
