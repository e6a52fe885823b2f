"""Full Hessian matrix of a one-block Vision Transformer, before and after training, over seeds.

The study measures what 'Closing the Curvature Gap' (arXiv 2510.16927) shows in figures: every entry of the
exact Hessian on one training batch, for the whole network and its self-attention; norms of parameter blocks
and their Hessian blocks during training; and for how many seeds the paper's observations hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.data.batches import Batches
from curvescope.data.tasks.pictures import PICTURES, Pictures, check_pictures
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import FinishedPieces, Piece, State, work_through
from curvescope.runs.study_result import Shown
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


def setting_notes(cfg: Config, networks: Sequence[Network]) -> list[str]:
    """Return notes on how the Hessians were computed."""
    found = [
        "the paper does not state the number of heads, learning rate, number of epochs or "
        "initialization; these are our choices, see the settings"
    ]
    if cfg.data == "digits" and cfg.patch_size is None:
        found.append(
            "patches of 2 × 2, because the paper's 4 × 4 would leave four patches per image of 8 × 8"
        )
    late = [str(network.training.seed) for network in networks if not network.training.reached]
    if late:
        found.append(
            f"seed {', '.join(late)}: validation accuracy stays below {cfg.until:.0%}, so the trained "
            "Hessian is that of the last step"
        )
    return found


@dataclass(frozen=True)
class Config(BaseConfig):
    """Images, network and training. The defaults take about four minutes."""

    data: str = setting(
        "digits",
        f"pictures: {', '.join(PICTURES)} (all but digits by the package datasets), or images:FOLDER",
    )
    num_images: int | None = setting(
        None, "number of images, a fifth of them for validation; default: all of digits, else 10,000"
    )
    patch_size: int | None = setting(None, "patch size in pixels; default: 4, and 2 for digits (8 × 8)")
    d_model: int = setting(16, "width", least=1)
    d_ff: int = setting(64, "width of the feed-forward network", least=1)
    n_heads: int = setting(1, "heads of the attention", least=1)
    init: Literal["xavier", "scaled", "gpt2"] = setting("xavier", "initialization of weights, see the zoo")
    seeds: int = setting(
        5, "number of trained networks, each with its own weights and order of images", least=1
    )
    steps: int = setting(1000, "training steps with AdamW", least=1)
    until: float = setting(0.5, "validation accuracy; the trained Hessian is that of the first step above it")
    batch_size: int = setting(128, "images per step; the Hessian uses the batch of the first step", least=1)
    lr: float = setting(3e-3, "learning rate after the warm-up, with cosine decay")
    weight_decay: float = setting(0.01, "of matrices")
    num_points: int = setting(
        12, "number of steps at which norms are measured: 0, then logarithmically spaced", least=2
    )
    num_probes: int = setting(8, "random vectors for the norm of a group of blocks", least=2)
    num_steps: int = setting(8, "Lanczos steps that first remove the largest eigenvalues", least=1)
    dtype: Literal["float32", "float64"] = setting(
        "float32", "data type of weights and Hessian; float64 takes twice as long"
    )
    device: str = setting("cpu", "cpu, cuda, …")
    seed: int = setting(0, "seed of the first network; the others use the next seeds")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pictures(self.data)
        if not 0 <= self.until < 1:
            raise UsageError(f"until: expected an accuracy from 0 to below 1, got {self.until}")

    @property
    def points(self) -> list[int]:
        """Steps at which norms are measured, including the first and the last."""
        spaced = np.geomspace(1, self.steps, self.num_points - 1).round().astype(int).tolist()
        return list(dict.fromkeys([0, *spaced, self.steps]))


@dataclass(frozen=True)
class Network(Result):
    """Training, Hessians and norms of the network of one seed."""

    training: Trained
    initial: Dense
    trained: Dense
    norms: Norms

    @property
    def stages(self) -> dict[str, Dense]:
        """The two Hessians by name."""
        return {"initial": self.initial, "trained": self.trained}


@dataclass(frozen=True)
class FullHessian(Shown):
    """Result for all networks; images are stored for the first one."""

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
    """Train the networks and compute their full Hessians."""
    data = read_pictures(cfg)
    seeds = range(cfg.seed, cfg.seed + cfg.seeds)
    problems = {seed: make_problem(cfg, seed, data) for seed in seeds}
    pieces = [piece for seed in seeds for piece in _pieces(cfg, seed, problems[seed], data)]
    batches = Batches.from_tensors(data.images, data.classes)
    held = Batches.from_tensors(data.validation_images, data.validation_classes)
    found = work_through(pieces, contents=fingerprint(batches, held), progress=progress, state=state)
    return _result(cfg, problems[cfg.seed], data, [_network(found, seed) for seed in seeds])


def _pieces(cfg: Config, seed: int, problem: Problem, data: Pictures) -> list[Piece]:
    """Return the pieces of a network: training, the Hessian before and after it, and norms."""
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


def _network(found: FinishedPieces, seed: int) -> Network:
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
