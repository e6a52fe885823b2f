"""The spectrum of a model: density, extreme eigenvalues, traces and norms of every block.

For the Hessian H and its parts H = H_o + H_f. Each piece is stored in `state` when it is done, so a
run that was stopped goes on from there and ends with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms import (
    BlockNorms,
    BlockTraces,
    Eigenpairs,
    SpectralDensity,
    block_norms,
    block_traces,
    eigsh,
    spectral_density,
)
from curvescope.core.config import at_least, setting
from curvescope.core.numbers import below_noise, rounded, with_error
from curvescope.core.operator import LinearOperator
from curvescope.core.parts import MATRIX_SYMBOLS, TITLES
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Line, Shown
from curvescope.runs.study import Cost, Plan, Step
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.common.planning import PlannedMatrix, density, eigenvalues, probed
from curvescope.studies.setting import ModelOnData, make_problem, notes_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to look at and how hard. The defaults take about a minute on a CPU."""

    blocks: tuple[str, ...] = setting(("*",), "the parameters of the operators, by globs")
    map_blocks: tuple[str, ...] = setting(
        ("E", "P", "L*.W_*", "U", "W_*"), "of those, the blocks of the map; all where none matches"
    )
    num_probes: int = setting(4, "random vectors of each density")
    num_steps: int = setting(40, "Lanczos steps of each of them, at least 3")
    num_eigenvalues: int = setting(3, "extreme eigenvalues at each end")
    num_trace_probes: int = setting(32, "random vectors of the traces, which all blocks share")
    num_map_probes: int = setting(4, "random vectors of each block of the map")
    max_products: int = setting(400, "most products for the extreme eigenvalues of one operator")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "num_probes", "num_steps", "num_eigenvalues", "num_trace_probes", "num_map_probes")


@dataclass(frozen=True)
class Part(Result):
    """One operator."""

    density: SpectralDensity
    extremes: Eigenpairs  # both ends, ascending; of the GGN the upper end
    traces: BlockTraces
    map: BlockNorms

    @property
    def trace(self) -> tuple[float, float]:
        """Estimate and standard error: the blocks' samples, summed probe by probe."""
        total = self.traces.total
        return total.value, total.stderr


@dataclass(frozen=True)
class Spectrum(Shown):
    """The Hessian and its two parts, on one model and one set of data."""

    model: str
    data: str
    loss_name: str
    loss: float
    gradient_norm: float
    num_terms: float
    num_parameters: int
    num_blocks: int
    parts: dict[str, Part]  # hessian, ggn, functional

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        H, G, F = (self.parts[name] for name in OPERATORS)
        ends = H.extremes.values
        unsure = _unsure(H.extremes)
        return [
            ("loss", f"{self.loss:.4f}", f"{self.loss_name} over {self.num_terms:g} terms of {self.data}"),
            ("‖gradient‖", f"{self.gradient_norm:.3g}", f"over {self.num_parameters:,} parameters"),
            ("λ_max", rounded(ends[-1]), f"largest eigenvalue of the Hessian{unsure}"),
            ("λ_min", rounded(ends[0]), f"{abs(ends[0] / ends[-1]):.2g} of the largest, in size{unsure}"),
            ("trace", with_error(*H.trace), f"of the GGN {with_error(*G.trace)}; ± is a standard error"),
            ("functional Hessian", rounded(max(abs(F.extremes.values))), "its largest eigenvalue in size"),
            *(("note", "", note) for note in self.notes),
        ]

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables by name, for CSV files and the report."""
        return {"extremes": self._extremes(), "traces": self._traces(), "block_norms": self._norms()}

    def _extremes(self) -> pd.DataFrame:
        import pandas as pd

        rows = [
            {
                "operator": MATRIX_SYMBOLS[name],
                "eigenvalue": value,
                "residual": part.extremes.residuals[i],
                "converged": bool(part.extremes.converged_mask[i]),
                "verified": part.extremes.converged,
            }
            for name, part in self.parts.items()
            for i, value in enumerate(part.extremes.values)
        ]
        return pd.DataFrame(rows)

    def _traces(self) -> pd.DataFrame:
        import pandas as pd

        table = pd.DataFrame({"block": self.parts["hessian"].traces.names})
        for name, part in self.parts.items():
            high = part.traces.interval[1]
            psd = part.traces.psd
            pairs = zip(part.traces.values.tolist(), high.tolist(), strict=True)
            table[f"tr {MATRIX_SYMBOLS[name]}"] = [below_noise(*pair) if psd else pair[0] for pair in pairs]
            table[f"± {MATRIX_SYMBOLS[name]}"] = part.traces.stderr
        return table

    def _norms(self) -> pd.DataFrame:
        import pandas as pd

        first = self.parts["hessian"].map
        table = pd.DataFrame({"block": first.names, "parameters": first.sizes})
        for name, part in self.parts.items():
            table[f"‖{MATRIX_SYMBOLS[name]}‖"] = np.diag(part.map.frobenius)
            table[f"± {MATRIX_SYMBOLS[name]}"] = np.diag(part.map.stderr)
        return table


def _unsure(found: Eigenpairs) -> str:
    """What is not certain about the extreme eigenvalues."""
    if found.converged:
        return ""
    if found.converged_mask.all():
        return "; an eigenvalue to its tolerance, but that none lies beyond was not verified in time"
    return "; not all converged, see the residuals"


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Spectrum:
    """Measure the three operators.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    problem = make_problem(cfg)
    how: dict[str, Any] = {"engine": cfg.engine, "checkpoint": cfg.checkpoint}
    operators = {name: make(problem, *cfg.blocks, **how) for name, make in OPERATORS.items()}
    mapped(problem.space(*cfg.blocks).in_blocks().slices, cfg)  # raises where a pattern matches nothing
    pieces = [
        Piece(f"{name}.{piece}", partial(work, op), f"{piece} of the {TITLES[name]}", partial(answer, name))
        for name, op in operators.items()
        for piece, work in _pieces(cfg).items()
    ]
    contents = fingerprint(problem.model, problem.batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    parts = {name: _part(found, name) for name in OPERATORS}
    return _result(problem, operators["hessian"], parts, notes_of(cfg, problem))


def answer(name: str, found: Result) -> str:
    """One line of what a piece of an operator says."""
    symbol = MATRIX_SYMBOLS[name]
    if isinstance(found, SpectralDensity):
        low, high = found.extremes
        return f"{symbol}: eigenvalues from {low:.3g} or less to {high:.3g} or more"
    if isinstance(found, Eigenpairs):
        ends = f"λ_max {found.values[-1]:.4g}"
        return f"{symbol}: {ends}" if name == "ggn" else f"{symbol}: {ends}, λ_min {found.values[0]:.4g}"
    if isinstance(found, BlockTraces):
        return f"{symbol}: trace {with_error(found.total.value, found.total.stderr)}"
    return f"{symbol}: the map is done"


def _part(found: Finished, name: str) -> Part:
    return Part(
        density=found.take(SpectralDensity, f"{name}.density"),
        extremes=found.take(Eigenpairs, f"{name}.extremes"),
        traces=found.take(BlockTraces, f"{name}.traces"),
        map=found.take(BlockNorms, f"{name}.map"),
    )


def _result(problem: Problem, H: CurvatureOperator, parts: dict[str, Part], notes: list[str]) -> Spectrum:
    return Spectrum(
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        loss=problem.loss_value(),
        gradient_norm=problem.model.norm(problem.gradient(*(block.name for block in H.space))),
        num_terms=problem.num_terms,
        num_parameters=H.shape[0],
        num_blocks=len(H.space),
        parts=parts,
        notes=notes,
    )


def _pieces(cfg: Config) -> dict[str, Callable[[CurvatureOperator], Result]]:
    """What is measured of one operator."""
    return {
        "density": lambda op: spectral_density(
            op, num_probes=cfg.num_probes, num_steps=cfg.num_steps, seed=cfg.seed
        ),
        "extremes": lambda op: _extremes(op, cfg),
        "traces": lambda op: block_traces(op, num_probes=cfg.num_trace_probes, seed=cfg.seed),
        "map": lambda op: _map(op.in_blocks(), cfg),
    }


def _extremes(op: LinearOperator, cfg: Config) -> Eigenpairs:
    """The lowest and highest eigenvalues, ascending; of a positive semi-definite operator the highest.

    The low end of such an operator is a crowd at zero, which no Krylov method tells apart.
    """
    k = min(cfg.num_eigenvalues if op.psd else 2 * cfg.num_eigenvalues, op.shape[0])
    which = "LA" if op.psd else "BE"
    found = eigsh(op, k, which=which, vectors=False, max_products=cfg.max_products, seed=cfg.seed)
    if which == "BE":
        return found
    backwards = {
        name: getattr(found, name)[::-1].copy() for name in ("values", "residuals", "converged_mask")
    }
    return replace(found, **backwards)


def _map(op: CurvatureOperator, cfg: Config) -> BlockNorms:
    return block_norms(op, mapped(op.space.slices, cfg), num_probes=cfg.num_map_probes, seed=cfg.seed)


def mapped(slices: dict[str, slice], cfg: Config) -> dict[str, slice]:
    """Blocks that match `map_blocks`; all of them when none does."""
    found = {
        name: rows
        for name, rows in slices.items()
        if any(fnmatchcase(name, pattern) for pattern in cfg.map_blocks)
    }
    return found or slices


# ------------------------------------------------------------------------------------------------------- plan

PIECES = 4  # of each operator


def cost(cfg: Config, problem: Problem) -> Cost:
    """Density, eigenvalues, traces and map of every operator."""
    columns = len(mapped(problem.space(*cfg.blocks).in_blocks().slices, cfg))
    density = cfg.num_probes * cfg.num_steps
    each = density + cfg.max_products + cfg.num_trace_probes + cfg.num_map_probes * columns
    return Cost(len(OPERATORS) * PIECES, len(OPERATORS) * each)


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """The same in the order in which it is done, of eigenvalues as many products as they usually take."""
    columns = len(mapped(problem.space(*cfg.blocks).in_blocks().slices, cfg))
    found = []
    for name in OPERATORS:
        part = PlannedMatrix(problem, name, cfg.blocks)
        k = cfg.num_eigenvalues if part.psd else 2 * cfg.num_eigenvalues
        found += [
            density("density", part, cfg.num_probes, cfg.num_steps),
            eigenvalues("eigenvalues", part, k, cfg.max_products),
            probed("traces", part, cfg.num_trace_probes),
            probed("block map", part, cfg.num_map_probes, times=columns),
        ]
    return found


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product."""
    return cfg.blocks


PLAN = Plan(
    blocks,
    cost,
    (
        {"tokens": 256, "num_probes": 3, "num_trace_probes": 24, "num_map_probes": 2, "max_products": 250},
        {
            "tokens": 128, "num_probes": 2, "num_steps": 30, "num_eigenvalues": 2, "num_trace_probes": 16,
            "num_map_probes": 1, "max_products": 120,
        },
        {
            "tokens": 64, "num_probes": 2, "num_steps": 20, "num_eigenvalues": 1, "num_trace_probes": 12,
            "num_map_probes": 1, "max_products": 60,
        },
        {
            "tokens": 64, "num_probes": 1, "num_steps": 20, "num_eigenvalues": 1, "num_trace_probes": 8,
            "num_map_probes": 1, "max_products": 40,
        },
        {
            "tokens": 32, "num_probes": 1, "num_steps": 16, "num_eigenvalues": 1, "num_trace_probes": 6,
            "num_map_probes": 1, "max_products": 30,
        },
    ),
    steps,
)  # fmt: skip
