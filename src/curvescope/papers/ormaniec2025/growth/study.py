"""Growth: Frobenius norms of the blocks of W_Q and W_V against the scale σ of the embeddings.

H = H_o + H_f, GGN and functional Hessian, in all sweeps of the paper: softmax attention of depth 1
to 5, on logarithmic and linear grids, pre-norm, linear attention of depth 1 to 3, and linear MLPs. Everything
is in float64. Layers are counted from 0. What is exact and what comes from probes stands in `points`;
by default one draw of the embeddings is scaled along σ, so that curves are smooth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.papers.claims import Claim
from curvescope.papers.ormaniec2025.growth.draws import Source, sweep_tokens
from curvescope.papers.ormaniec2025.growth.points import measure
from curvescope.papers.ormaniec2025.growth.settings import EXPERIMENTS, REPEATS, Experiment, chosen
from curvescope.papers.ormaniec2025.growth.slopes import Slope, slopes
from curvescope.papers.ormaniec2025.growth.streams import PROBES
from curvescope.papers.setting import FigureConfig
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Finished, Piece, State, work_through

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Config(FigureConfig):
    """Which sweeps and how hard; what is None is the profile's.

    `quick` has 3 repeats, every second scale and 4 probes; `full` 20 repeats, all scales, and 20 probes on a
    GPU, 4 on a CPU. With `replay` weights, embeddings and probes are the paper's own.
    """

    experiments: tuple[str, ...] = setting(("*",), "globs over the sweeps, e.g. softmax_none_ce_log_L[12]")
    repeats: int | None = setting(None, "of every sweep; by default 3 (quick) or 20 (full)")
    probes: int | None = setting(None, "of a block in an inner layer; by default 4, or 20 (full, on a GPU)")
    every: int | None = setting(None, "2 takes every second scale; by default 2 (quick) or 1 (full)")
    redraw: bool | None = setting(
        None, "new embeddings at every scale, as the paper has; by default with replay"
    )
    exact: bool = setting(True, "the last layer in closed form; without, from probes, as in the paper")
    seed: int = setting(0, "of weights, embeddings and probes, without replay")

    def __post_init__(self) -> None:
        if isinstance(self.experiments, str):
            object.__setattr__(self, "experiments", (self.experiments,))
        super().__post_init__()
        chosen(self.experiments)
        for name in ("repeats", "probes", "every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.replay and (self.num_repeats > REPEATS or self.num_probes > PROBES):
            raise UsageError(
                f"replay: the paper has {REPEATS} repeats and {PROBES} probes, more was asked for"
            )
        if self.replay and self.redraw is False:
            raise UsageError("redraw: expected true or nothing with replay, the paper draws at every scale")

    @property
    def num_repeats(self) -> int:
        """Repeats of every sweep."""
        return self.repeats or (3 if self.profile == "quick" else REPEATS)

    @property
    def num_probes(self) -> int:
        """Probes of a block in an inner layer."""
        many = self.profile == "full" and torch.device(self.device).type != "cpu"
        return self.probes or (PROBES if many else 4)

    @property
    def step(self) -> int:
        """One in how many scales is looked at."""
        return self.every or (2 if self.profile == "quick" else 1)


@dataclass(frozen=True)
class Points(Result):
    """Norms at some scales of one repeat, in the order of the experiment's rows."""

    frobenius: np.ndarray  # (scales, rows)
    stderr: np.ndarray  # (scales, rows) over probes, 0 where exact


@dataclass(frozen=True)
class Sweep(Result):
    """One sweep: all repeats."""

    experiment: str
    indices: np.ndarray  # (S,) of the scales in the paper's grid
    sigma: np.ndarray  # (S,)
    frobenius: np.ndarray  # (repeats, S, rows)
    stderr: np.ndarray  # (repeats, S, rows)
    slopes: list[list[Any]]  # rows of the table of exponents, as `Slope`

    @property
    def setting(self) -> Experiment:
        """The experiment."""
        return EXPERIMENTS[self.experiment]

    def table_of_slopes(self) -> list[Slope]:
        """The exponents."""
        return [Slope(*row) for row in self.slopes]

    def curve(self, block: str, part: str, layer: int) -> np.ndarray:
        """Norms of a block, (repeats, S)."""
        return self.frobenius[:, :, [tuple(row) for row in self.setting.rows].index((block, part, layer))]


@dataclass(frozen=True)
class Growth(Shown):
    """All sweeps that were asked for."""

    settings: dict[str, Any]
    sweeps: dict[str, Sweep]

    def claims(self) -> list[Claim]:
        """The paper's exponents, published and measured, sweeps and layers of one kind together."""
        from curvescope.papers.ormaniec2025.growth.words import claims

        return claims(self)

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        from curvescope.papers.ormaniec2025.growth.words import summary

        return summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        from curvescope.papers.ormaniec2025.growth.words import captions

        return captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Every norm, and every exponent."""
        import pandas as pd

        growth = pd.concat([_frame(sweep) for sweep in self.sweeps.values()], ignore_index=True)
        exponents = [
            {"experiment": name, **row._asdict()}
            for name, sweep in self.sweeps.items()
            for row in sweep.table_of_slopes()
        ]
        columns = ["experiment", *Slope._fields]
        return {"growth": growth, "slopes": pd.DataFrame(exponents, columns=columns)}

    def figures(self) -> dict[str, Figure]:
        """One figure per sweep; drawing computes nothing."""
        from curvescope.papers.ormaniec2025.growth import figures

        return figures.draw(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Growth:
    """Measure the sweeps.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name, one for each scale of a deep network or each repeat of the others;
            filled as the study goes, used when it goes on.
    """
    tokens = sweep_tokens().to(cfg.device)
    redraw = bool(cfg.redraw) or cfg.replay
    weights = lru_cache(1)(Source.weights)  # one draw for all pieces of a repeat
    pieces = []
    for experiment in chosen(cfg.experiments):
        for repeat in range(cfg.num_repeats):
            source = Source(experiment, repeat, cfg.seed, cfg.replay, redraw, cfg.device)
            pieces += [
                Piece(name, partial(_points, cfg, source, weights, tokens, indices))
                for name, indices in _pieces(cfg, experiment, repeat)
            ]
    found = work_through(pieces, progress=progress, state=state)
    sweeps = {e.name: _sweep(cfg, e, found) for e in chosen(cfg.experiments)}
    return Growth({**cfg.to_dict(), **_meaning(cfg)}, sweeps)


def _meaning(cfg: Config) -> dict[str, int]:
    """What the profile said about what was left open."""
    return {"repeats": cfg.num_repeats, "probes": cfg.num_probes, "every": cfg.step}


def _indices(cfg: Config, experiment: Experiment) -> list[int]:
    return list(range(0, len(experiment.sigmas), cfg.step))


def _pieces(cfg: Config, experiment: Experiment, repeat: int) -> Iterator[tuple[str, list[int]]]:
    """Names of pieces and the scales in each."""
    name, indices = f"{experiment.name}.r{repeat:02d}", _indices(cfg, experiment)
    if not experiment.slow:
        yield name, indices
        return
    for index in indices:
        yield f"{name}.s{index:02d}", [index]


def _points(
    cfg: Config,
    source: Source,
    weights: Callable[[Source], dict[str, torch.Tensor]],
    tokens: torch.Tensor,
    indices: list[int],
) -> Points:
    with torch.no_grad():
        found = [
            measure(source, index, weights(source), tokens, probes=cfg.num_probes, exact=cfg.exact)
            for index in indices
        ]
    return Points(np.stack([norm for norm, _ in found]), np.stack([stderr for _, stderr in found]))


def _sweep(cfg: Config, experiment: Experiment, found: Finished) -> Sweep:
    repeats = [
        [found.take(Points, name) for name, _ in _pieces(cfg, experiment, repeat)]
        for repeat in range(cfg.num_repeats)
    ]
    frobenius = np.stack([np.concatenate([p.frobenius for p in pieces]) for pieces in repeats])
    stderr = np.stack([np.concatenate([p.stderr for p in pieces]) for pieces in repeats])
    indices = np.array(_indices(cfg, experiment))
    sigma = experiment.sigmas[indices]
    exponents = slopes(experiment, sigma, frobenius, lenient=cfg.profile == "quick")
    return Sweep(experiment.name, indices, sigma, frobenius, stderr, [list(row) for row in exponents])


def _frame(sweep: Sweep) -> pd.DataFrame:
    """One row per block, part, layer, scale and repeat."""
    import pandas as pd

    repeats, scales, _ = sweep.frobenius.shape
    parts = [
        pd.DataFrame(
            {
                "experiment": sweep.experiment,
                "block": block,
                "part": part,
                "layer": layer,
                "sigma": np.tile(sweep.sigma, repeats),
                "repeat": np.repeat(np.arange(repeats), scales),
                "frobenius": sweep.frobenius[:, :, k].ravel(),
                "stderr": sweep.stderr[:, :, k].ravel(),
            }
        )
        for k, (block, part, layer) in enumerate(sweep.setting.rows)
    ]
    return pd.concat(parts, ignore_index=True)
