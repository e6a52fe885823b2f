"""Sources of curvature: H = H_o + Σ over sources, where each norm, attention and feed-forward network is a
source.

The split is exact (`operators.sources`); every number comes from second derivatives. For every source the
study measures the trace, the Frobenius norm, extreme eigenvalues and the share of ‖H‖², and for layers a map
of their coupling. Traces, norms and shares come from random vectors that are shared by all sources, or are
exact for a model with at most `max_exact` parameters. Eigenvalues come from Lanczos steps on each source.
Finished pieces are stored in `state`.

With H = Σ_s A_s over the GGN and the sources of the functional Hessian, ‖H‖² = Σ_s ⟨A_s, H⟩, so that

    share of s = ⟨A_s, H⟩ / ‖H‖²,    Σ_s share = 1.

A share is negative if a source cancels a part of the others. For random signs v, E⟨A_s v, H v⟩ = ⟨A_s, H⟩, E
vᵀ A_s v = tr A_s and E‖A_s v‖² = ‖A_s‖². For a small problem v runs over all unit vectors, so nothing is
estimated. A source is exactly symmetric, so the asymmetry of Vᵀ A_s V measures its rounding error. A source
no larger than its rounding error is reported as zero, with its size as the error.
"""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms import BlockNorms, block_norms
from curvescope.algorithms.accurate_sums import is_rounding
from curvescope.algorithms.blocks.probes import Ends, extreme_ends
from curvescope.algorithms.columns import column_dots
from curvescope.algorithms.estimates.intervals import (
    NeighborCosines,
    column_norms,
    form_interval,
    mean_interval,
    mean_square,
)
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import Progress, track
from curvescope.core.result import Result
from curvescope.core.seeds import probes
from curvescope.models.curvature_sources import outside_blocks
from curvescope.operators import GGN, FunctionalSources, Hessian
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import FinishedPieces, Piece, State, work_through
from curvescope.runs.study import Plan, Step
from curvescope.runs.study_result import Shown
from curvescope.studies.common.planning import PlannedMatrix, probed
from curvescope.studies.problem_config import ModelOnData, make_problem, notes_of

HESSIAN, OUTER = "H", "GGN"
TOGETHER = 2**22  # most entries of vectors that are multiplied at once


@dataclass(frozen=True)
class SourceEstimate:
    """Estimate with standard error and 95 % interval. If the value is exact, the interval has length zero."""

    value: float
    stderr: float
    low: float
    high: float


@dataclass(frozen=True)
class Shares(Result):
    """Products of P vectors with H, the GGN and every source; `residual` is the error of their sum."""

    names: list[str]  # H, GGN, then the sources
    forms: np.ndarray  # (P, S) vᵀ A_s v
    squares: np.ndarray  # (P, S) ‖A_s v‖²
    inner: np.ndarray  # (P, S) ⟨A_s v, H v⟩
    residual: float  # largest ‖H V − Σ A_s V‖ / ‖H V‖ over batches V of the vectors
    exact: bool  # True if the vectors are all unit vectors: then sums over P replace means
    ends: np.ndarray | None = None  # (S, 2) λ_min and λ_max, if exact
    rounding: np.ndarray | None = None  # (S,) True if a matrix is only rounding error; None in older results
    # (P − 1, S) of neighboring A_s v if there are few vectors; see `mean_square`.
    cosines: np.ndarray | None = None

    def is_zero(self, name: str) -> bool:
        """Return True if H, the GGN or a source is only rounding error."""
        return self.rounding is not None and bool(self.rounding[self.names.index(name)])

    def trace(self, name: str) -> SourceEstimate:
        """tr A_s."""
        return self._shown(name, self._trace(name), signed=True)

    def norm(self, name: str) -> SourceEstimate:
        """‖A_s‖."""
        return self._shown(name, self._norm(name), signed=False)

    def _shown(self, name: str, estimate: SourceEstimate, *, signed: bool) -> SourceEstimate:
        """Return the estimate, or zero with its size as error if the matrix is only rounding error."""
        if not self.is_zero(name):
            return estimate
        size = float(np.nanmax(np.abs([estimate.value, estimate.low, estimate.high])))
        return SourceEstimate(0.0, size, -size if signed else 0.0, size)

    def _trace(self, name: str) -> SourceEstimate:
        samples = self.forms[:, self.names.index(name)]
        if self.exact:
            total = float(samples.sum())
            return SourceEstimate(total, 0.0, total, total)
        mean, stderr = samples.mean(), samples.std(ddof=1) / np.sqrt(len(samples))
        length = float(np.sqrt(self.squares[:, self.names.index(name)].mean()))
        low, high = form_interval(float(mean), float(stderr), length, len(samples) - 1)
        return SourceEstimate(float(mean), float(stderr), low, high)

    def _norm(self, name: str) -> SourceEstimate:
        squared = self.squares[:, self.names.index(name)]
        if self.exact:
            root = float(np.sqrt(squared.sum()))
            return SourceEstimate(root, 0.0, root, root)
        cosines = None if self.cosines is None else self.cosines[:, self.names.index(name)]
        found = mean_square(np.sqrt(squared), cosines)
        return SourceEstimate(
            float(found.root), float(found.root_stderr), float(found.low), float(found.high)
        )

    def share(self, *names: str) -> SourceEstimate:
        """⟨A_s, H⟩ / ‖H‖² summed over the named sources, with a jackknife error over the vectors."""
        chosen = [self.names.index(name) for name in names if not self.is_zero(name)]
        top, bottom = self.inner[:, chosen].sum(axis=1), self.squares[:, self.names.index(HESSIAN)]
        value = float(top.sum() / bottom.sum()) if bottom.sum() else 0.0
        count = len(top)
        if self.exact or count < 2 or not bottom.sum():
            return SourceEstimate(
                value, 0.0 if self.exact else np.nan, *(2 * [value if self.exact else np.nan])
            )
        without = (top.sum() - top) / (bottom.sum() - bottom)
        stderr = float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))
        low, high = mean_interval(np.asarray(value), np.asarray(stderr), count - 1)
        return SourceEstimate(value, stderr, float(low), float(high))


def measure_shares(problem: Problem, *, num_probes: int, max_exact: int, seed: int) -> Shares:
    """Multiply H, the GGN and all sources with the same vectors."""
    H, G, S = Hessian(problem), GGN(problem), FunctionalSources(problem)
    n, names = H.shape[0], [HESSIAN, OUTER, *S]
    exact = n <= max_exact
    count, width = (n, n) if exact else (num_probes, max(1, TOGETHER // n))
    kind = {"dtype": problem.dtype, "device": problem.device}
    sums: list[np.ndarray] = []
    uneven = np.zeros((2, len(names)))
    residual, ends = 0.0, None
    neighbors = [NeighborCosines(count) for _ in names]
    for first in track(range(0, count, width), "shares"):
        some = min(width, count - first)
        V = torch.eye(n, **kind) if exact else probes(n, some, first=first, seed=seed, **kind)
        products = [H @ V, G @ V, *S.products(V).values()]
        sums.append(_sums(V, products))
        for own, product in zip(neighbors, products, strict=True):
            own.add(product, column_norms(product))
        residual = max(residual, _residual(products))
        uneven += np.array([_uneven(V, A) for A in products]).T
        ends = np.array([_dense_ends(A) for A in products]) if exact else None
    forms, squares, inner = np.concatenate(sums, axis=1)
    rounding = np.array([is_rounding(np.array([size]), lost) for lost, size in np.sqrt(uneven.T)])
    if ends is not None:
        ends[rounding] = 0.0
    gathered = [cosines for own in neighbors if (cosines := own.gathered()) is not None]
    beside = np.stack(gathered, axis=1) if gathered and not exact else None
    return Shares(names, forms, squares, inner, residual, exact, ends, rounding, beside)


def _sums(V: Tensor, products: list[Tensor]) -> np.ndarray:
    """vᵀ A v, ‖A v‖² and ⟨A v, H v⟩ for every column v and every A; H is the first: (3, columns, A)."""
    sums = [
        torch.stack([column_dots(V, AV), column_dots(AV, AV), column_dots(products[0], AV)])
        for AV in products
    ]
    return torch.stack(sums, dim=-1).double().cpu().numpy()


def _uneven(V: Tensor, AV: Tensor) -> tuple[float, float]:
    """Return the squares of ‖K − Kᵀ‖ / 2 and ‖K‖, where K = Vᵀ A V."""
    K = (V.T @ AV).double()
    return float(((K - K.T) / 2).square().sum()), float(K.square().sum())


def _residual(products: list[Tensor]) -> float:
    """‖H V − Σ A V‖ / ‖H V‖, where the first product is H V."""
    rest = products[0].double()
    size = float(rest.norm())
    for AV in products[1:]:
        rest = rest - AV
    return float(rest.norm()) / size if size else 0.0


def _dense_ends(A: Tensor) -> tuple[float, float]:
    values = torch.linalg.eigvalsh((A + A.T).double() / 2)
    return float(values[0]), float(values[-1])


NAMED = 3  # most blocks outside of layers whose names are listed
LAYER = re.compile(r"L(\d+)\.(.+)")
TWICE = 2  # factor of Lanczos steps on H relative to a source, because its eigenvalues are the main result


@dataclass(frozen=True)
class Config(ModelOnData):
    """Settings of the study. The defaults take under a minute on a CPU."""

    tokens: int = setting(
        256, "tokens read from a text; for labeled texts and images: ⌈tokens / seq_len⌉ examples"
    )
    num_probes: int = setting(
        8, "random vectors for traces, norms and shares, shared by all sources", least=2
    )
    num_steps: int = setting(
        8, "Lanczos steps for both ends of the GGN and of each source, twice as many for H; 0: none", least=0
    )
    eigenvalues: tuple[str, ...] = setting(
        ("*",), "glob patterns of the matrices (H, GGN, sources) whose λ_max and λ_min are computed"
    )
    num_map_probes: int = setting(2, "random vectors per layer for the map of couplings; 0: no map", least=0)
    max_exact: int = setting(
        256, "with at most this many parameters, compute exact matrices instead of estimates", least=0
    )


@dataclass(frozen=True)
class Propagation(Shown):
    """The Hessian of a model as a sum over sources, for one data set."""

    model: str
    data: str
    loss_name: str
    loss: float
    num_terms: float
    num_parameters: int
    shares: Shares
    ends: dict[str, Ends]  # of H, the GGN and each source; empty without Lanczos steps
    coupling: BlockNorms | None  # between layers
    outside: list[str] = field(default_factory=list)  # blocks in no source; empty in older results

    @property
    def sources(self) -> list[str]:
        """Names of the sources, without H and the GGN."""
        return self.shares.names[2:]

    def ends_of(self, name: str) -> tuple[float, float, float, float]:
        """Return λ_max, its error, λ_min, its error (it contains an eigenvalue); nan if not computed."""
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
        """Return a lower bound of λ_min and an upper bound of λ_max, each with 95 % confidence; nan if not
        computed.

        `ends_of` bounds them from the other side, because Lanczos values never lie outside the spectrum.
        """
        top, error, low, low_error = self.ends_of(name)
        if name in self.ends and not self.shares.is_zero(name):
            return self.ends[name].low, self.ends[name].high
        return low - low_error, top + error


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Propagation:
    """Split the Hessian and measure every source."""
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
    """Run the study on a given problem; only the settings of the measurements are used."""
    operators = operators_of(problem)
    layers = layer_slices(problem)
    ends = partial(_ends, operators, num_steps=cfg.num_steps, seed=cfg.seed)
    pieces = [Piece("shares", partial(_shares, problem, cfg), "traces, norms and shares of all sources")]
    selected = selected_ends(cfg, problem)
    pieces += [Piece(f"ends.{name}", partial(ends, name), f"eigenvalues of {name}") for name in selected]
    coupled = cfg.num_map_probes > 0 and len(layers) > 1
    if coupled:
        probes = {"num_probes": cfg.num_map_probes, "seed": cfg.seed}
        work = partial(block_norms, operators[HESSIAN].in_blocks(), layers, **probes)
        pieces.append(Piece("coupling", work, "couplings between layers"))
    contents = fingerprint(problem.model, problem.batches)
    results = work_through(pieces, contents=contents, progress=progress, state=state)
    return _result(problem, results, selected, notes, coupled=coupled)


def _shares(problem: Problem, cfg: Config) -> Shares:
    return measure_shares(problem, num_probes=cfg.num_probes, max_exact=cfg.max_exact, seed=cfg.seed)


def _ends(operators: dict[str, LinearOperator], name: str, *, num_steps: int, seed: int) -> Ends:
    steps = TWICE * num_steps if name == HESSIAN else num_steps
    return extreme_ends(operators[name], num_steps=steps, seed=seed)


def operators_of(problem: Problem) -> dict[str, LinearOperator]:
    """Return H, the GGN and every source as operators."""
    return {HESSIAN: Hessian(problem), OUTER: GGN(problem), **FunctionalSources(problem)}


def selected_ends(cfg: Config, problem: Problem) -> list[str]:
    """Return the names of the operators whose eigenvalues are computed; none if matrices are exact."""
    known = list(operators_of(problem))
    selected = [name for name in known if any(fnmatch.fnmatchcase(name, glob) for glob in cfg.eigenvalues)]
    if cfg.eigenvalues and not selected:
        hint = f"known: {', '.join(known)}"
        raise UsageError(f"eigenvalues: nothing matches {', '.join(cfg.eigenvalues)}", hint=hint)
    return selected if cfg.num_steps and problem.space().size > cfg.max_exact else []


def layer_slices(problem: Problem) -> dict[str, slice]:
    """Return the slice of each layer in a vector with one block after the other; other blocks form runs."""
    runs: list[tuple[str | None, dict[str, slice]]] = []
    for name, where in problem.space().in_blocks().slices.items():
        match = LAYER.fullmatch(name)
        layer = match[1] if match else None
        if not runs or runs[-1][0] != layer:
            runs.append((layer, {}))
        runs[-1][1][name] = where
    slices: dict[str, slice] = {}
    for layer, blocks in runs:
        places = list(blocks.values())
        named = _of_blocks(list(blocks)) if layer is None else f"L{layer}"
        named = f"{named}, {next(iter(blocks))}" if named in slices else named
        slices[named] = slice(places[0].start, places[-1].stop)
    return slices


def _of_blocks(names: list[str]) -> str:
    """Join block names as `E, P`; of many, name the first and the last."""
    return ", ".join(names) if len(names) <= NAMED else f"{names[0]} … {names[-1]}"


def _result(
    problem: Problem, results: FinishedPieces, ends: list[str], notes: list[str], *, coupled: bool
) -> Propagation:
    varying = {block.name for block in problem.space()}
    return Propagation(
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        loss=problem.loss_value(),
        num_terms=problem.num_terms,
        num_parameters=problem.space().size,
        shares=results.take(Shares, "shares"),
        ends={name: results.take(Ends, f"ends.{name}") for name in ends},
        coupling=results.take(BlockNorms, "coupling") if coupled else None,
        outside=[name for name in outside_blocks(problem.model) if name in varying],
        notes=notes,
    )


# ------------------------------------------------------------------------------------------------------- plan


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """Planned products: shares of all sources together, eigenvalues of each, and the map."""
    size, layers = problem.space().size, layer_slices(problem)
    exact = size <= cfg.max_exact
    vectors, columns = (size, size) if exact else (cfg.num_probes, max(1, TOGETHER // size))
    planned = [
        Step(f"shares, {name}", kind, vectors, columns=min(columns, vectors), made=1)
        for name, kind in (("H", "hessian"), ("GGN", "ggn"), ("sources", "sources"))
    ]
    kinds = {HESSIAN: "hessian", OUTER: "ggn"}
    for name in selected_ends(cfg, problem):
        count = cfg.num_steps * (TWICE if name == HESSIAN else 1)
        planned.append(Step(f"eigenvalues of {name}", kinds.get(name, "source"), count, basis=count + 1))
    if cfg.num_map_probes and len(layers) > 1:
        planned.append(
            probed("couplings", PlannedMatrix(problem, "hessian"), cfg.num_map_probes, times=len(layers))
        )
    return planned


PLAN = Plan(
    steps,
    (
        {"num_probes": 6},
        {"num_probes": 4, "num_steps": 6, "num_map_probes": 1},
        {"num_probes": 4, "num_steps": 4, "num_map_probes": 1},
        {"num_probes": 2, "num_steps": 0, "num_map_probes": 0},
    ),
)
