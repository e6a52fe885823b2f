"""The whole Hessian of a one-block vision Transformer, written out before and after training, over seeds.

What 'Closing the Curvature Gap' (arXiv 2510.16927) shows in pictures, with numbers: every entry of the exact
Hessian on one training batch, of the whole network and of its self-attention; norms of parameter blocks and
of their Hessian blocks through the first steps of training; and which of the paper's observations hold, seed
by seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.data.batches import Batches
from curvescope.data.tasks.pictures import Pictures
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Claim, Line, Shown
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.full_hessian import claims, dense, norms, tables, words
from curvescope.studies.full_hessian.dense import Dense
from curvescope.studies.full_hessian.norms import Norms
from curvescope.studies.full_hessian.settings import Config
from curvescope.studies.full_hessian.training import Trained, at, make_problem, read_pictures, train_one

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


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

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def claims(self) -> list[Claim]:
        """What the paper says of its pictures, and in how many networks it is so."""
        return claims.of(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Pairs of blocks, norms through the training, the training itself, the stripe, and the claims."""
        return tables.of(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.studies.full_hessian import figures

        return figures.draw(self)


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
        return dense.measure(at(problem, found.trained_weights), keep=first)

    return [
        Piece(f"training.{seed}", partial(train_one, cfg, seed, data), f"training {of}", kind="trainings"),
        Piece(
            f"initial.{seed}", partial(dense.measure, problem, keep=first), f"Hessian {of}, initial",
            kind="Hessians",
        ),
        Piece(f"trained.{seed}", trained, f"Hessian {of}, trained", kind="Hessians", needs=needs),
        Piece(
            f"norms.{seed}", partial(norms.measure, problem, cfg), f"norms {of}", kind="norms", needs=needs
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
        notes=words.notes(cfg, networks),
    )
