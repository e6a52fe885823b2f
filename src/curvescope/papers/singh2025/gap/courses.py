"""A Transformer and an MLP of one size on one task, from their first weights until they have it by heart.

Inputs are normal numbers (sequences × positions × width) that both see alike, the MLP position by position.
Targets have nothing to do with the inputs: normal numbers for the squared error, classes for cross-entropy.
There are fewer of them than parameters, so that the loss can go to zero. Hessian and GGN are written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.data.batches import Batches
from curvescope.models.load import load
from curvescope.models.zoo.mlp import MLP, MLPConfig
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.problem import Problem
from curvescope.studies.gap.analysis import ALL, Effort, Pair, measure_pair
from curvescope.train import TrainConfig, train

FAMILIES = ("transformer", "mlp")
TASKS = ("mse", "cross_entropy")
WIDTH, OUT, LENGTH, SEQUENCES = 5, 3, 4, 5
HIDDEN = 13  # of the MLP: as many parameters as the Transformer, up to a few
WRITTEN = Effort(2, 1, 2, 3, 10_000, 0)


class Place(NamedTuple):
    """Which model, on which task, with which seed."""

    family: str
    task: str
    seed: int

    @property
    def name(self) -> str:
        """Of its piece of work."""
        return f"{self.family}.{self.task}.{self.seed}"


@dataclass(frozen=True)
class Course(Result):
    """One model at several steps of its training."""

    num_parameters: int
    pairs: dict[str, Pair]  # by step; of the whole model, exact

    def pair(self, step: int) -> Pair:
        """After so many steps."""
        return self.pairs[str(step)]


def module_of(place: Place) -> nn.Module:
    """The model, in float64."""
    if place.family == "mlp":
        cfg = MLPConfig(
            d_in=WIDTH, d_hidden=HIDDEN, d_out=OUT, depth=3, activation="gelu", bias=True, seed=place.seed
        )
        return MLP(cfg).double()
    cfg = TransformerConfig(
        n_layers=1, d_model=WIDTH, n_heads=1, d_ff=2 * WIDTH, n_ctx=LENGTH, inputs="continuous",
        outputs="regression", n_out=OUT, positions="learned", causal=False, init="scaled", seed=place.seed,
    )  # fmt: skip
    return Transformer(cfg).double()


def data_of(place: Place) -> Batches:
    """Inputs of the seed, the same for both families, and targets of the task."""
    source = generator(place.seed, 7)
    shape = (SEQUENCES, LENGTH)
    x = torch.randn(*shape, WIDTH, generator=source, dtype=torch.float64)
    real = torch.randn(*shape, OUT, generator=source, dtype=torch.float64)
    classes = torch.randint(0, OUT, shape, generator=source)
    return Batches.from_tensors(x, real if place.task == "mse" else classes, name=place.task)


def measure_course(place: Place, steps: tuple[int, ...]) -> Course:
    """Train the model, and write its Hessian and GGN out after each of these steps."""
    model, data = load(module_of(place)), data_of(place)
    loss = "mse_mean" if place.task == "mse" else "cross_entropy"
    cfg = TrainConfig(
        steps=max(*steps, 1), lr=1e-2, warmup=10, weight_decay=0.0, clip=10.0, snapshots=tuple(steps)
    )
    with torch.random.fork_rng(devices=[]):
        _, _, kept = train(model, data, cfg, loss=loss)
    problem = Problem(model, data, loss=loss)
    pairs = {str(step): measure_pair(problem.at(kept[step]), ALL, WRITTEN) for step in steps}
    return Course(model.num_parameters, pairs)
