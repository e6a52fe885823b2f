"""Where curvature comes from: H = H_o + Σ over sources, each norm, attention and feed-forward network.

The split is exact (`operators.sources`), and nothing here stands for curvature that is no second derivative.
Every source has a trace, a Frobenius norm, extreme eigenvalues and its share of ‖H‖², and layers a map of how
strongly they are coupled. Traces, norms and shares are from vectors that all sources see, or exact for a
model with at most `max_exact` parameters; eigenvalues from Lanczos steps on each source. Pieces are stored in
`state` as they are done.
"""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from curvescope.algorithms import BlockNorms, block_norms
from curvescope.algorithms.blocks.probes import Ends, extreme_ends
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import Progress
from curvescope.models.sources import find_sources, outside_blocks
from curvescope.operators import GGN, FunctionalSources, Hessian
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Shown
from curvescope.runs.study import Cost, Plan, Step
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.common.planning import PlannedMatrix, probed
from curvescope.studies.propagation.analysis import HESSIAN, OUTER, TOGETHER, Shares, measure_shares
from curvescope.studies.setting import ModelOnData, make_problem, notes_of

if TYPE_CHECKING:
    pass

NAMED = 3  # blocks outside of layers whose names are written out
LAYER = re.compile(r"L(\d+)\.(.+)")
TWICE = 2  # Lanczos steps on H for one on each source: its ends are the first numbers to look at


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to look at and how hard. The defaults take under a minute on a CPU."""

    tokens: int = setting(256, "of a text; labeled texts and images: ⌈tokens / seq_len⌉ of them")
    num_probes: int = setting(8, "random vectors of traces, norms and shares, which all sources see")
    num_steps: int = setting(
        8, "Lanczos steps for both ends of the GGN and each source, twice for H; 0: none"
    )
    eigenvalues: tuple[str, ...] = setting(("*",), "globs: whose λ_max and λ_min, of H, GGN and the sources")
    num_map_probes: int = setting(2, "random vectors on each layer for the map of couplings; 0: no map")
    max_exact: int = setting(256, "a model with at most so many parameters is written out, not estimated")

    def __post_init__(self) -> None:
        as_tuples(self, "eigenvalues")
        super().__post_init__()
        at_least(self, 2, "num_probes")
        at_least(self, 0, "num_steps", "num_map_probes", "max_exact")


@dataclass(frozen=True)
class Propagation(Shown):
    """The Hessian of a model as a sum over sources, on one set of data."""

    model: str
    data: str
    loss_name: str
    loss: float
    num_terms: float
    num_parameters: int
    shares: Shares
    ends: dict[str, Ends]  # of H, the GGN and each source; empty without Lanczos steps
    coupling: BlockNorms | None  # between layers
    outside: list[str] = field(default_factory=list)  # blocks in no source; not known of older results

    @property
    def sources(self) -> list[str]:
        """Without H and the GGN."""
        return self.shares.names[2:]

    def ends_of(self, name: str) -> tuple[float, float, float, float]:
        """λ_max, its error, λ_min, its error: an eigenvalue lies within an error; nan where not asked for."""
        if self.shares.is_zero(name) and (self.shares.ends is not None or name in self.ends):
            size = self.shares.norm(name).high
            return 0.0, size, 0.0, size
        if self.shares.ends is not None:
            low, high = self.shares.ends[self.shares.names.index(name)].tolist()
            return high, 0.0, low, 0.0
        if name not in self.ends:
            return math.nan, math.nan, math.nan, math.nan
        (low, high), (low_error, high_error) = self.ends[name].values, self.ends[name].residuals
        return float(high), float(high_error), float(low), float(low_error)

    def bounds_of(self, name: str) -> tuple[float, float]:
        """λ_min is at least the first, λ_max at most the second, each 95 times in 100; nan if not asked for.

        From the other side `ends_of` bounds them: Lanczos steps never go beyond the spectrum.
        """
        top, error, low, low_error = self.ends_of(name)
        if name in self.ends and not self.shares.is_zero(name):
            return self.ends[name].low, self.ends[name].high
        return low - low_error, top + error


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Propagation:
    """Split the Hessian and measure every source.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    problem = make_problem(cfg)
    return measure(problem, cfg, notes_of(cfg, problem), progress=progress, state=state)


def measure(
    problem: Problem,
    cfg: Config,
    notes: list[str],
    *,
    progress: Progress | None = None,
    state: State | None = None,
) -> Propagation:
    """The study on a problem of one's own; of the settings, those of the probes count."""
    operators = operators_of(problem)
    layers = layer_slices(problem)
    ends = partial(_ends, operators, num_steps=cfg.num_steps, seed=cfg.seed)
    pieces = [Piece("shares", partial(_shares, problem, cfg), "traces, norms and shares of all sources")]
    asked = asked_ends(cfg, problem)
    pieces += [Piece(f"ends.{name}", partial(ends, name), f"eigenvalues of {name}") for name in asked]
    coupled = cfg.num_map_probes > 0 and len(layers) > 1
    if coupled:
        probes = {"num_probes": cfg.num_map_probes, "seed": cfg.seed}
        work = partial(block_norms, operators[HESSIAN].in_blocks(), layers, **probes)
        pieces.append(Piece("coupling", work, "couplings between layers"))
    contents = fingerprint(problem.model, problem.batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    return _result(problem, found, asked, notes, coupled=coupled)


def _shares(problem: Problem, cfg: Config) -> Shares:
    return measure_shares(problem, num_probes=cfg.num_probes, max_exact=cfg.max_exact, seed=cfg.seed)


def _ends(operators: dict[str, LinearOperator], name: str, *, num_steps: int, seed: int) -> Ends:
    steps = TWICE * num_steps if name == HESSIAN else num_steps
    return extreme_ends(operators[name], num_steps=steps, seed=seed)


def operators_of(problem: Problem) -> dict[str, LinearOperator]:
    """H, the GGN, and every source."""
    return {HESSIAN: Hessian(problem), OUTER: GGN(problem), **FunctionalSources(problem)}


def asked_ends(cfg: Config, problem: Problem) -> list[str]:
    """The operators whose eigenvalues are asked for; none where matrices are written out."""
    known = list(operators_of(problem))
    asked = [name for name in known if any(fnmatch.fnmatchcase(name, glob) for glob in cfg.eigenvalues)]
    if cfg.eigenvalues and not asked:
        hint = f"known: {', '.join(known)}"
        raise UsageError(f"eigenvalues: nothing matches {', '.join(cfg.eigenvalues)}", hint=hint)
    return asked if cfg.num_steps and problem.space().size > cfg.max_exact else []


def layer_slices(problem: Problem) -> dict[str, slice]:
    """Where each layer lies in a vector with one block after the other; other blocks in runs."""
    runs: list[tuple[str | None, dict[str, slice]]] = []
    for name, where in problem.space().in_blocks().slices.items():
        match = LAYER.fullmatch(name)
        layer = match[1] if match else None
        if not runs or runs[-1][0] != layer:
            runs.append((layer, {}))
        runs[-1][1][name] = where
    found: dict[str, slice] = {}
    for layer, blocks in runs:
        places = list(blocks.values())
        named = _of_blocks(list(blocks)) if layer is None else f"L{layer}"
        named = f"{named}, {next(iter(blocks))}" if named in found else named
        found[named] = slice(places[0].start, places[-1].stop)
    return found


def _of_blocks(names: list[str]) -> str:
    """`E, P`; of many the first and the last."""
    return ", ".join(names) if len(names) <= NAMED else f"{names[0]} … {names[-1]}"


def _result(
    problem: Problem, found: Finished, ends: list[str], notes: list[str], *, coupled: bool
) -> Propagation:
    varying = {block.name for block in problem.space()}
    return Propagation(
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        loss=problem.loss_value(),
        num_terms=problem.num_terms,
        num_parameters=problem.space().size,
        shares=found.take(Shares, "shares"),
        ends={name: found.take(Ends, f"ends.{name}") for name in ends},
        coupling=found.take(BlockNorms, "coupling") if coupled else None,
        outside=[name for name in outside_blocks(problem.model) if name in varying],
        notes=notes,
    )


# ------------------------------------------------------------------------------------------------------- plan

SOURCE = 1.0  # products of the Hessian that one of a single source takes
EACH = 0.1  # and what each adds when all of them are asked for at once


def cost(cfg: Config, problem: Problem) -> Cost:
    """Shares of all sources together, eigenvalues of each, and the map."""
    count, size = len(find_sources(problem.model)) + 1, problem.space().size
    exact = size <= cfg.max_exact
    vectors = size if exact else cfg.num_probes
    layers, asked = len(layer_slices(problem)), asked_ends(cfg, problem)
    coupling = cfg.num_map_probes * layers
    steps = cfg.num_steps * (len(asked) + (TWICE - 1) * (HESSIAN in asked))
    products = vectors * (2 + SOURCE + EACH * count) + SOURCE * steps + coupling
    return Cost(1 + len(asked) + (coupling > 0 and layers > 1), products)


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """The same step by step."""
    size, layers = problem.space().size, layer_slices(problem)
    exact = size <= cfg.max_exact
    vectors, columns = (size, size) if exact else (cfg.num_probes, max(1, TOGETHER // size))
    found = [
        Step(f"shares, {name}", kind, vectors, columns=min(columns, vectors), made=1)
        for name, kind in (("H", "hessian"), ("GGN", "ggn"), ("sources", "sources"))
    ]
    kinds = {HESSIAN: "hessian", OUTER: "ggn"}
    for name in asked_ends(cfg, problem):
        count = cfg.num_steps * (TWICE if name == HESSIAN else 1)
        found.append(Step(f"eigenvalues of {name}", kinds.get(name, "source"), count, basis=count + 1))
    if cfg.num_map_probes and len(layers) > 1:
        found.append(
            probed("couplings", PlannedMatrix(problem, "hessian"), cfg.num_map_probes, times=len(layers))
        )
    return found


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product: all."""
    return ("*",)


PLAN = Plan(
    blocks,
    cost,
    (
        {"tokens": 128},
        {"tokens": 64, "num_probes": 6},
        {"tokens": 64, "num_probes": 4, "num_steps": 6, "num_map_probes": 1},
        {"tokens": 32, "num_probes": 4, "num_steps": 4, "num_map_probes": 1},
        {"tokens": 32, "num_probes": 2, "num_steps": 0, "num_map_probes": 0},
    ),
    steps,
)
