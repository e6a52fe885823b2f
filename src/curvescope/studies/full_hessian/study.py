"""The whole Hessian of a one-block vision Transformer, written out before and after training, over seeds.

What 'Closing the Curvature Gap' (arXiv 2510.16927) shows in pictures, with numbers: every entry of the exact
Hessian on one training batch, of the whole network and of its self-attention; norms of parameter blocks and
of their Hessian blocks through the first steps of training; and which of the paper's observations hold, seed
by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.data.batches import Batches
from curvescope.data.tasks.pictures import PICTURES, Pictures, check_pictures
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Shown
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.full_hessian import analysis
from curvescope.studies.full_hessian.analysis import (
    Dense,
    Norms,
    Trained,
    at,
    make_problem,
    read_pictures,
    train_one,
)

if TYPE_CHECKING:
    pass


def setting_notes(cfg: Config, networks: Sequence[Network]) -> list[str]:
    """What a reader should know of how the Hessians were made."""
    found = [
        "the paper does not say how many heads, which learning rate, how many epochs or which "
        "initialization: these are choices of ours, see the settings"
    ]
    if cfg.data == "digits" and cfg.patch_size is None:
        found.append("patches of 2 × 2, since the paper's 4 × 4 would leave four of a picture of 8 × 8")
    late = [str(network.training.seed) for network in networks if not network.training.reached]
    if late:
        found.append(
            f"seed {', '.join(late)}: validation accuracy stays below {cfg.until:.0%}, so the trained "
            "Hessian is that of the last step"
        )
    return found


@dataclass(frozen=True)
class Config(BaseConfig):
    """Which network on which pictures, and how many of them. The defaults take about four minutes."""

    data: str = setting(
        "digits", f"pictures: {', '.join(PICTURES)}, or a folder; but for digits through the package datasets"
    )
    num_images: int | None = setting(
        None, "pictures, a fifth of them to validate; all of digits, else 10,000"
    )
    patch_size: int | None = setting(None, "pixels along a side of a patch; 4, and 2 for digits (8 × 8)")
    d_model: int = setting(16, "width")
    d_ff: int = setting(64, "width of the feed-forward network")
    n_heads: int = setting(1, "heads of the attention")
    init: Literal["xavier", "scaled", "gpt2"] = setting("xavier", "how weights are drawn, see the zoo")
    seeds: int = setting(5, "networks that are trained: own weights, own order of the pictures")
    steps: int = setting(1000, "of training, with AdamW")
    until: float = setting(0.5, "the trained Hessian is of the first step with more validation accuracy")
    batch_size: int = setting(128, "pictures of a step; the Hessian is that of the first step's")
    lr: float = setting(3e-3, "learning rate behind the warm-up; it falls along a cosine")
    weight_decay: float = setting(0.01, "of matrices")
    num_points: int = setting(12, "steps at which norms are taken: 0, then evenly in the logarithm")
    num_probes: int = setting(8, "random vectors for the norm of a group of blocks")
    num_steps: int = setting(8, "Lanczos steps before them, which take out the largest eigenvalues")
    dtype: Literal["float32", "float64"] = setting(
        "float32", "of weights and Hessian; float64 takes twice as long"
    )
    device: str = setting("cpu", "cpu, cuda, …")
    seed: int = setting(0, "of the first network; the others follow")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pictures(self.data)
        at_least(self, 1, "seeds", "steps", "batch_size", "d_model", "d_ff", "n_heads", "num_steps")
        at_least(self, 2, "num_points", "num_probes")
        if not 0 <= self.until < 1:
            raise UsageError(f"until: expected an accuracy from 0 to below 1, got {self.until}")

    @property
    def points(self) -> list[int]:
        """Steps at which norms are taken, the first and the last one among them."""
        spaced = np.geomspace(1, self.steps, self.num_points - 1).round().astype(int).tolist()
        return list(dict.fromkeys([0, *spaced, self.steps]))


# ------------------------------------------------------------------------------------------------------ study


@dataclass(frozen=True)
class Network(Result):
    """What was found of the network of one seed."""

    training: Trained
    initial: Dense
    trained: Dense
    norms: Norms

    @property
    def stages(self) -> dict[str, Dense]:
        """The two Hessians by their names."""
        return {"initial": self.initial, "trained": self.trained}


@dataclass(frozen=True)
class FullHessian(Shown):
    """Every network; the first one with its pictures."""

    data: str
    patch_size: int
    num_patches: int
    num_parameters: int
    num_validation: int
    batch_size: int
    until: float
    dtype: str
    networks: list[Network]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> FullHessian:
    """Train the networks and write their Hessians out.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    data = read_pictures(cfg)
    seeds = range(cfg.seed, cfg.seed + cfg.seeds)
    problems = {seed: make_problem(cfg, seed, data) for seed in seeds}
    pieces = [piece for seed in seeds for piece in _pieces(cfg, seed, problems[seed], data)]
    batches = Batches.from_tensors(data.images, data.classes)
    held = Batches.from_tensors(data.validation_images, data.validation_classes)
    found = work_through(pieces, contents=fingerprint(batches, held), progress=progress, state=state)
    return _result(cfg, problems[cfg.seed], data, [_network(found, seed) for seed in seeds])


def _pieces(cfg: Config, seed: int, problem: Problem, data: Pictures) -> list[Piece]:
    """Training, the Hessian before and after it, and norms in between."""
    of, needs, first = f"of network {seed - cfg.seed + 1}", (f"training.{seed}",), seed == cfg.seed

    def trained(found: Trained) -> Dense:
        return analysis.dense_measure(at(problem, found.trained_weights), keep=first)

    return [
        Piece(f"training.{seed}", partial(train_one, cfg, seed, data), f"training {of}", kind="trainings"),
        Piece(
            f"initial.{seed}", partial(analysis.dense_measure, problem, keep=first), f"Hessian {of}, initial",
            kind="Hessians",
        ),
        Piece(f"trained.{seed}", trained, f"Hessian {of}, trained", kind="Hessians", needs=needs),
        Piece(
            f"norms.{seed}", partial(analysis.norm_measure, problem, cfg), f"norms {of}", kind="norms",
            needs=needs,
        ),
    ]  # fmt: skip


def _network(found: Finished, seed: int) -> Network:
    return Network(
        found.take(Trained, f"training.{seed}"),
        found.take(Dense, f"initial.{seed}"),
        found.take(Dense, f"trained.{seed}"),
        found.take(Norms, f"norms.{seed}"),
    )


def _result(cfg: Config, problem: Problem, data: Pictures, networks: list[Network]) -> FullHessian:
    facts = problem.model.facts
    return FullHessian(
        data=cfg.data,
        patch_size=facts["patch_size"],
        num_patches=facts["n_ctx"],
        num_parameters=problem.model.num_parameters,
        num_validation=len(data.validation_classes),
        batch_size=cfg.batch_size,
        until=cfg.until,
        dtype=cfg.dtype,
        networks=networks,
        notes=setting_notes(cfg, networks),
    )
