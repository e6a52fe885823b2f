"""The blocks of a model, layer × role: trace, norms, extreme eigenvalues and density of each diagonal block.

And how different the blocks are from each other, the question of 'Why Transformers Need Adam: A Hessian
Perspective' (Zhang and others 2024). The traces of all blocks come from probes that they share. A shared
probe does not give ‖H_bb‖, because E‖(H v)_b‖² is the sum of ‖H_bc‖² over the whole row, so every norm has
probes of its own block, through the operator of that block, which costs a third of columns of the whole
one: nothing outside the block is differentiated. The same products give the trace once more, and the better
of the two is shown. Small blocks (biases, norms) have own probes too, fewer of them: from shared ones their
traces would be the noise of the rest of their rows. Pieces are stored in `state` as they are done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from curvescope.algorithms import (
    BlockTraces,
    Eigenpairs,
    SpectralDensity,
    block_traces,
    eigsh,
    spectral_density,
)
from curvescope.algorithms.blocks.heterogeneity import Heterogeneity, heterogeneity
from curvescope.algorithms.blocks.probes import OwnProbes, own_probes
from curvescope.core.blocks import Block, select
from curvescope.core.config import setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.numbers import with_error
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.operators.base import CurvatureOperator
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.setting import ModelOnData, make_problem, notes_of
from curvescope.studies.spectrum.study import OPERATORS, TITLES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Globs = tuple[str, ...]
R = TypeVar("R", bound=Result)
SMALL = 1000  # entries; blocks with fewer have num_small_probes


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to look at and how hard. The defaults take about a minute on a CPU."""

    operators: tuple[str, ...] = setting(("hessian", "ggn"), "some of hessian, ggn, functional")
    blocks: Globs = setting(("*",), "whose traces; single heads too, e.g. L*.h*.W_Q")
    norms: Globs | None = setting(None, "blocks with own probes and a Frobenius norm; by default all")
    extremes: Globs = setting((), "blocks with extreme eigenvalues and the spectral norm")
    density: Globs = setting((), "blocks with a spectral density, compared with each other")
    num_trace_probes: int = setting(16, "random vectors of the traces, which all blocks share")
    num_norm_probes: int = setting(8, "random vectors of each block's own")
    num_small_probes: int = setting(4, "of their own, for blocks with fewer than 1,000 entries")
    num_density_probes: int = setting(6, "random vectors of each density")
    num_steps: int = setting(40, "Lanczos steps of each of them")
    max_products: int = setting(200, "most products for the eigenvalues of one block")

    def __post_init__(self) -> None:
        for name in ("operators", "blocks", "norms", "extremes", "density"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        super().__post_init__()
        for name in self.operators:
            if name not in OPERATORS:
                raise UsageError(
                    f"operators: expected some of {', '.join(OPERATORS)}, got {name!r}",
                    hint=near_misses(str(name), list(OPERATORS)),
                )
        if not self.operators:
            raise UsageError("operators: expected at least one, got none")
        least = {"num_trace_probes": 1, "num_norm_probes": 1, "num_density_probes": 1, "num_steps": 3}
        for name, fewest in {**least, "num_small_probes": 1, "max_products": 4}.items():
            if getattr(self, name) < fewest:
                raise UsageError(f"{name}: expected at least {fewest}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Part(Result):
    """The diagonal blocks of one operator; what was not asked for is empty."""

    traces: BlockTraces  # from shared probes
    norms: dict[str, OwnProbes]
    extremes: dict[str, Eigenpairs]  # lowest and highest; of a positive semi-definite operator the highest
    densities: dict[str, SpectralDensity]
    heterogeneity: Heterogeneity | None

    def trace_of(self, name: str) -> tuple[float, float, str]:
        """Trace of a block, its standard error, and which probes gave it: those with the smaller error."""
        value, stderr, _, _, probes = self._best(name)
        return value, stderr, probes

    def trace_interval(self, name: str) -> tuple[float, float]:
        """Ends of the 95 % interval of `trace_of`; nan from one probe."""
        return self._best(name)[2:4]

    def _best(self, name: str) -> tuple[float, float, float, float, str]:
        found: list[tuple[float, float, float, float, str]] = []
        if name in self.traces.names:
            i, t = self.traces.names.index(name), self.traces
            low, high = (float(end[i]) for end in t.interval)
            found.append((float(t.values[i]), float(t.stderr[i]), low, high, "shared"))
        if name in self.norms:
            own = self.norms[name]
            found.append((own.trace, own.trace_stderr, own.trace_low, own.trace_high, "own"))
        nothing = (math.nan, math.nan, math.nan, math.nan, "")
        return min(found, key=lambda item: math.inf if math.isnan(item[1]) else item[1], default=nothing)

    def is_noise(self, name: str) -> bool:
        """Whether the interval of the trace includes zero, or is not known."""
        low, high = self.trace_interval(name)
        return not (low > 0 or high < 0 or low == high)

    @property
    def trace(self) -> tuple[float, float]:
        """Of all blocks together: estimate and standard error, summed probe by probe."""
        total = self.traces.total
        return total.value, total.stderr

    def row(self, name: str) -> dict[str, Any]:
        """Everything that is known about one block."""
        value, stderr, low, high, probes = self._best(name)
        found: dict[str, Any] = {"trace": value, "± trace": stderr, "trace low": low, "trace high": high}
        found |= {"probes": probes}
        if name in self.norms:
            own = self.norms[name]
            found |= {"‖·‖ F": own.norm, "± ‖·‖ F": own.norm_stderr}
            found |= {"‖·‖ F low": own.norm_low, "‖·‖ F high": own.norm_high}
        if name in self.extremes:
            pair = self.extremes[name]
            ends = {"λ min": pair.values[0] if len(pair.values) > 1 else math.nan, "λ max": pair.values[-1]}
            found |= ends | {"‖·‖ 2": float(np.abs(pair.values).max())}
            found |= {"residual": float(pair.residuals.max()), "converged": "yes" if pair.converged else "no"}
        return found


@dataclass(frozen=True)
class Blocks(Shown):
    """The blocks of a model, on one set of data."""

    model: str
    data: str
    loss_name: str
    loss: float
    num_terms: float
    names: list[str]  # every block that something was asked of
    sizes: np.ndarray  # entries of each
    parts: dict[str, Part]

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        size = dict(zip(self.names, self.sizes, strict=True))
        rows = [
            ("loss", f"{self.loss:.4f}", f"{self.loss_name} over {self.num_terms:g} terms of {self.data}")
        ]
        for operator, part in self.parts.items():
            t, title = part.traces, TITLES[operator]
            total = f"of {len(t.names)} blocks with {sum(size[n] for n in t.names):,} parameters"
            rows.append((f"trace, {title}", with_error(*part.trace), f"{total}; ± is a standard error"))
            noise = [n for n in t.names if part.is_noise(n)]
            if noise:
                named = ", ".join(noise[:4]) + (", …" if len(noise) > 4 else "")
                words = f"of {len(t.names)} blocks: the 95 % interval of their trace includes zero ({named})"
                rows.append(("within noise", str(len(noise)), words))
            curvature = np.array([part.trace_of(n)[0] / size[n] for n in t.names])
            top = int(np.abs(curvature).argmax())
            words = (
                f"its mean eigenvalue, the largest in size; the median block has {np.median(curvature):.2g}"
            )
            rows.append((t.names[top], f"{curvature[top]:.3g}", words))
            if part.extremes:
                name, pair = max(part.extremes.items(), key=lambda item: float(np.abs(item[1].values).max()))
                unsure = "" if pair.converged else "; not converged, see the residual"
                worst = pair.values[np.abs(pair.values).argmax()]
                rows.append(
                    (f"λ of {name}", f"{worst:.4g}", f"the largest in size of those asked for{unsure}")
                )
            if part.heterogeneity is not None:
                h = part.heterogeneity
                words = (
                    f"bits, mean over the pairs of {len(h.names)} blocks: 0 is equal spectra, 1 no overlap"
                )
                rows.append(("Jensen–Shannon", with_error(h.mean, h.mean_stderr), words))
        return [*rows, *(("note", "", note) for note in self.notes)]

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        first = next(iter(self.parts.values()))
        probes, steps = next((d.nodes.shape for d in first.densities.values() if not d.exact), (0, 0))
        lanczos = f" from {probes} probes of {steps} Lanczos steps" if probes else ""
        columns = (
            "trace and Frobenius norm ‖·‖ F with standard errors (±) and 95 % intervals (low, high); "
            "λ min, λ max and the spectral norm ‖·‖ 2 "
            "with the largest residual ‖A v − λ v‖: there is an eigenvalue within that distance."
        )
        found = {
            "traces": f"Trace of every diagonal block, from {len(first.traces.samples)} probes that all "
            "blocks share, or from its own where these say more (the table tells). Hatched: the 95 % "
            "interval includes zero.",
            "norms": "Frobenius norm of every diagonal block that was asked for, each from its own probes.",
            "extremes": "Extreme eigenvalues of diagonal blocks; bars are the residuals.",
            "densities": f"Density of the eigenvalues of diagonal blocks{lanczos}, broadened by a kernel "
            "of the width in each title; the band is a 95 % interval over probes.",
            "heterogeneity": "Jensen–Shannon divergence between the spectra of blocks, in bits: 0 is equal, "
            "1 is no overlap. Both spectra of a pair are broadened alike, by a quarter of the root mean "
            "square eigenvalue of the larger one. In the table: standard error and bias over probes.",
        }
        return found | {operator: f"{TITLES[operator]}: {columns}" for operator in self.parts}

    def tables(self) -> dict[str, pd.DataFrame]:
        """One table per operator, and one of divergences."""
        import pandas as pd

        base = pd.DataFrame({"block": self.names, "parameters": self.sizes})
        found = {
            operator: pd.concat([base, pd.DataFrame([part.row(name) for name in self.names])], axis=1)
            for operator, part in self.parts.items()
        }
        for frame in found.values():
            if "converged" in frame:
                frame["converged"] = frame["converged"].fillna("–")  # of a block that was not asked for
        pairs = [
            part.heterogeneity.to_frame().assign(operator=operator)
            for operator, part in self.parts.items()
            if part.heterogeneity is not None
        ]
        return found | ({"heterogeneity": pd.concat(pairs, ignore_index=True)} if pairs else {})

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.studies.blocks import figures

        return figures.draw(self)


Measure = Callable[[CurvatureOperator], Result]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Blocks:
    """Measure the blocks of every operator.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    problem = make_problem(cfg)
    operators = {
        name: OPERATORS[name](problem, *cfg.blocks, engine=cfg.engine, checkpoint=cfg.checkpoint)  # pyright: ignore[reportArgumentType]
        for name in cfg.operators
    }
    chosen = chosen_blocks(cfg, problem)
    pieces = [
        Piece(f"{name}.{piece}", partial(measure, op), f"{piece.replace('.', ' of ', 1)}, {TITLES[name]}")
        for name, op in operators.items()
        for piece, measure in _pieces(cfg, chosen).items()
    ]
    contents = fingerprint(problem.model, problem.batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    parts = {name: _part(name, found, chosen) for name in operators}
    return _result(problem, chosen, parts, notes_of(cfg, problem))


def chosen_blocks(cfg: Config, problem: Problem) -> dict[str, list[Block]]:
    """The blocks of every kind of piece; a pattern that matches nothing is found before the work.

    Patterns look among the blocks that have traces, and those of heads (L0.h*.W_Q) among the model's heads.
    """
    space = problem.space(*cfg.blocks)
    own = {block.name: block for block in space}
    heads = problem.model.heads
    return {
        "trace": list(space),
        "norm": list(space) if cfg.norms is None else select(cfg.norms, own, heads) if cfg.norms else [],
        "extremes": select(cfg.extremes, own, heads) if cfg.extremes else [],
        "density": select(cfg.density, own, heads) if cfg.density else [],
    }


def _pieces(cfg: Config, chosen: dict[str, list[Block]]) -> dict[str, Measure]:
    """What is measured of one operator: the traces of all blocks at once, the rest block by block."""
    work: dict[str, Measure] = {
        "norm": lambda op: own_probes(
            op,
            num_probes=cfg.num_small_probes if op.shape[0] < SMALL else cfg.num_norm_probes,
            seed=cfg.seed,
        ),
        "extremes": lambda op: _ends(op, cfg),
        "density": lambda op: spectral_density(
            op, num_probes=cfg.num_density_probes, num_steps=cfg.num_steps, seed=cfg.seed
        ),
    }
    found: dict[str, Measure] = {
        "traces": lambda op: block_traces(op, num_probes=cfg.num_trace_probes, seed=cfg.seed)
    }
    for kind, measure in work.items():
        for block in chosen[kind]:
            found[f"{kind}.{block.name}"] = partial(_of_block, measure, block.name)
    return found


def _of_block(measure: Measure, name: str, op: CurvatureOperator) -> Result:
    """A measure of one diagonal block, by the operator of that block."""
    return measure(op.block(name))


def _ends(op: CurvatureOperator, cfg: Config) -> Eigenpairs:
    """Lowest and highest eigenvalue; of a positive semi-definite block the highest: others crowd at 0."""
    k = 1 if op.psd else min(2, op.shape[0])
    which = "LA" if k == 1 else "BE"
    return eigsh(op, k, which=which, vectors=False, max_products=cfg.max_products, seed=cfg.seed)


def _part(operator: str, found: Finished, chosen: dict[str, list[Block]]) -> Part:
    def of(kind: str, result: type[R]) -> dict[str, R]:
        return {b.name: found.take(result, f"{operator}.{kind}.{b.name}") for b in chosen[kind]}

    densities = of("density", SpectralDensity)
    return Part(
        traces=found.take(BlockTraces, f"{operator}.traces"),
        norms=of("norm", OwnProbes),
        extremes=of("extremes", Eigenpairs),
        densities=densities,
        heterogeneity=heterogeneity(densities) if len(densities) > 1 else None,
    )


def _result(
    problem: Problem, chosen: dict[str, list[Block]], parts: dict[str, Part], notes: list[str]
) -> Blocks:
    asked = {block.name: block for blocks in chosen.values() for block in blocks}
    return Blocks(
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        loss=problem.value(),
        num_terms=problem.num_terms,
        names=list(asked),
        sizes=np.array([block.size for block in asked.values()]),
        parts=parts,
        notes=notes,
    )
