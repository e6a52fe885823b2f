"""The spectrum of a model: density, extreme eigenvalues, traces and norms of every block.

For the Hessian H and its parts H = H_o + H_f. Each piece is stored in `state` when it is done, so a
run that was stopped resumes from there and ends with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.hessian_terms import MATRIX_SYMBOLS, TITLES
from curvescope.core.number_format import below_noise, with_error
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import FinishedPieces, Piece, Planned, State, work_through
from curvescope.runs.study import Plan, Selection, Step
from curvescope.runs.study_result import Line, Shown
from curvescope.sampling import Sampled
from curvescope.studies.common.planning import (
    OF_BLOCK,
    PlannedMatrix,
    density,
    eigenvalues,
    owned,
    probed,
    sampled_ends,
)
from curvescope.studies.common.sampling import (
    NUM_PROBES,
    OFF,
    SampledExtremes,
    SampledNumbers,
    columns_of,
    line,
    notes_of_sampling,
    sampled_extremes,
    sampled_norms,
    sampled_sums,
)
from curvescope.studies.problem_config import SampledOnData, make_problem, notes_of, sequences_there

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Config(SampledOnData):
    """Settings of the study. The defaults take about a minute on a CPU."""

    blocks: tuple[str, ...] = setting(("*",), "the parameters of the operators, by globs")
    map_blocks: tuple[str, ...] = setting(
        ("E", "P", "L*.W_*", "U", "W_*"), "of those, the blocks of the map; all if none matches"
    )
    operators: tuple[str, ...] = setting(
        ("hessian", "ggn", "functional"), "some of hessian, ggn, functional; the Hessian is always among them"
    )
    num_probes: int = setting(4, "random vectors of each density", least=1)
    num_steps: int = setting(40, "Lanczos steps of each of them, at least 3", least=1)
    num_eigenvalues: int = setting(3, "extreme eigenvalues at each end", least=1)
    num_trace_probes: int = setting(32, "random vectors of the traces, which all blocks share", least=1)
    num_map_probes: int = setting(4, "random vectors of each block of the map", least=1)
    max_products: int = setting(400, "most products for the extreme eigenvalues of one operator")

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.operators if name not in OPERATORS]
        if unknown or "hessian" not in self.operators:
            got = ", ".join(map(str, self.operators)) or "none"
            raise UsageError(f"operators: expected hessian, and ggn or functional beside it, got {got}")


@dataclass(frozen=True)
class Part(Result):
    """Results of one operator."""

    density: SpectralDensity
    extremes: Eigenpairs  # both ends, ascending; of the GGN the upper end
    traces: BlockTraces
    map: BlockNorms
    sampled: dict[str, Sampled] = field(default_factory=dict)  # lambda_max, lambda_min, trace, norm
    sampled_norms: dict[str, Sampled] = field(default_factory=dict)  # of the blocks with the largest norms

    @property
    def trace(self) -> tuple[float, float]:
        """Estimate and standard error of the trace: samples of blocks, summed probe by probe."""
        total = self.traces.total
        return total.value, total.stderr

    def headlines(self) -> dict[str, Sampled]:
        """Return all numbers that have a sampling error, by name."""
        return {**self.sampled, **{f"norm of {block}": n for block, n in self.sampled_norms.items()}}

    def headline(self, name: str, value: float, numerical: float) -> str:
        """Format a number with one standard error, or its order of magnitude if it is not settled."""
        return self.sampled[name].headline if name in self.sampled else with_error(value, numerical)

    def columns_at(self, i: int) -> dict[str, float]:
        """Columns of eigenvalue i and its residual; the outermost have a sampling error too."""
        names = {0: "lambda_min", len(self.extremes.values) - 1: "lambda_max"}
        number = self.sampled.get(names.get(i, ""))
        value, residual = float(self.extremes.values[i]), float(self.extremes.residuals[i])
        return columns_of(number, "eigenvalue", value, residual)


@dataclass(frozen=True)
class Spectrum(Shown):
    """Result: the Hessian and its two parts, on one model and one set of data."""

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
        """Headline numbers: label, value, words."""
        H, G, F = (self.parts.get(name) for name in OPERATORS)
        assert H is not None
        ends = H.extremes.values
        unsure = _unsure(H.extremes)
        ratio = f"{abs(ends[0] / ends[-1]):.2g} of the largest, in size{unsure}"
        words = f"over {self.num_terms:g} terms of {self.data}"
        return [
            _line("λ_max", H, "lambda_max", ends[-1], 0.0, f"largest eigenvalue of the Hessian{unsure}"),
            _line("λ_min", H, "lambda_min", ends[0], 0.0, ratio),
            _line(
                "trace",
                H,
                "trace",
                *H.trace,
                "" if G is None else f"of the GGN {G.headline('trace', *G.trace)}",
            ),
            *([line("‖H‖", H.sampled["norm"], "Frobenius norm")] if "norm" in H.sampled else []),
            *([] if F is None else self._functional(F)),
            ("loss", f"{self.loss:.4f}", f"{self.loss_name} {words}"),
            ("‖gradient‖", f"{self.gradient_norm:.3g}", f"over {self.num_parameters:,} parameters"),
            *(("note", "", note) for note in self.notes),
        ]

    def _functional(self, F: Part) -> list[Line]:
        """Line of the functional Hessian's largest eigenvalue in size, at either end."""
        at = int(np.abs(F.extremes.values).argmax())
        value, name = float(F.extremes.values[at]), "lambda_min" if at == 0 else "lambda_max"
        words = "its largest eigenvalue in size"
        return [_line("functional Hessian", F, name, value, 0.0, words)]

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables by name, for CSV files and the report."""
        headline = {"headline": self._headline()} if self.parts["hessian"].sampled else {}
        return headline | {
            "extremes": self._extremes(), "traces": self._traces(), "block_norms": self._norms()
        }  # fmt: skip

    def _extremes(self) -> pd.DataFrame:
        import pandas as pd

        rows = [
            {
                "operator": MATRIX_SYMBOLS[name],
                **part.columns_at(i),
                "converged": bool(part.extremes.converged_mask[i]),
                "verified": part.extremes.converged,
            }
            for name, part in self.parts.items()
            for i in range(len(part.extremes.values))
        ]
        return pd.DataFrame(rows)

    def _headline(self) -> pd.DataFrame:
        import pandas as pd

        rows = [
            {"operator": MATRIX_SYMBOLS[name], "quantity": quantity, **number.columns("value")}
            for name, part in self.parts.items()
            for quantity, number in part.headlines().items()
        ]
        return pd.DataFrame(rows)

    def _traces(self) -> pd.DataFrame:
        import pandas as pd

        table = pd.DataFrame({"block": self.parts["hessian"].traces.names})
        for name, part in self.parts.items():
            low, high = part.traces.interval
            psd, title = part.traces.psd, f"tr {MATRIX_SYMBOLS[name]}"
            pairs = zip(part.traces.values.tolist(), high.tolist(), strict=True)
            table[title] = [below_noise(*pair) if psd else pair[0] for pair in pairs]
            table[f"{title}_numerical_low"], table[f"{title}_numerical_high"] = low, high
        return table

    def _norms(self) -> pd.DataFrame:
        import pandas as pd

        first = self.parts["hessian"].map
        table = pd.DataFrame({"block": first.names, "parameters": first.sizes})
        for name, part in self.parts.items():
            title, (low, high) = f"‖{MATRIX_SYMBOLS[name]}‖", part.map.interval
            table[title] = np.diag(part.map.frobenius)
            table[f"{title}_numerical_low"], table[f"{title}_numerical_high"] = np.diag(low), np.diag(high)
        return table


def _line(label: str, part: Part, name: str, value: float, numerical: float, words: str) -> Line:
    """Line of a headline number, with its verdict first if a sampling error is known."""
    if name in part.sampled:
        return line(label, part.sampled[name], words)
    error = "; ± is one standard error over probes (numerical)" if numerical else ""
    return label, with_error(value, numerical), f"{words}{error}"


def _unsure(pairs: Eigenpairs) -> str:
    """Return a clause on extreme eigenvalues that are not certain, or an empty string."""
    if pairs.converged:
        return ""
    if pairs.converged_mask.all():
        return "; an eigenvalue to its tolerance, but the run did not verify that none lies beyond"
    return "; not all converged, see the residuals"


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Spectrum:
    """Measure the three operators.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; a run that is resumed reads them.
    """
    problem = make_problem(cfg)
    how: dict[str, Any] = {"engine": cfg.engine, "checkpoint": cfg.checkpoint}
    operators = {
        name: make(problem, *cfg.blocks, **how) for name, make in OPERATORS.items() if name in cfg.operators
    }
    mapped(problem.space(*cfg.blocks).in_blocks().slices, cfg)  # raises if a pattern matches nothing

    def pieces(cfg: Config) -> list[Piece]:
        return [
            Piece(
                f"{name}.{piece}",
                partial(work, op),
                f"{piece} of the {TITLES[name]}",
                partial(answer, name),
                needs=tuple(f"{name}.{other}" for other in NEEDS.get(piece, ())),
            )
            for name, op in operators.items()
            if name in cfg.operators
            for piece, work in _pieces(cfg, name).items()
        ]

    contents, planned = fingerprint(problem.model, problem.batches), Planned(cfg, problem, pieces)
    finished = work_through(pieces(cfg), contents=contents, progress=progress, state=state, planned=planned)
    whole = {name: all(f"{name}.{piece}" in finished for piece in _pieces(cfg, name)) for name in operators}
    parts = {name: _part(finished, name, cfg) for name in operators if whole[name]}
    reason = finished.take(SampledExtremes, "hessian.extremes").sampled.reason
    text = sequences_there(cfg, problem.model) is not None
    notes = [*notes_of(cfg, problem), *notes_of_sampling(cfg, reason, text=text)]
    return _result(problem, operators["hessian"], parts, notes)


def answer(name: str, result: Result) -> str:
    """Summarize the result of a piece of an operator in one line."""
    symbol = MATRIX_SYMBOLS[name]
    if isinstance(result, SpectralDensity):
        low, high = result.extremes
        return f"{symbol}: eigenvalues from {low:.3g} or less to {high:.3g} or more"
    if isinstance(result, SampledNumbers):
        return f"{symbol}: {'; '.join(f'{n.quantity} {n.headline}' for n in result.numbers.values())}"
    if isinstance(result, SampledExtremes):
        result = result.pairs
    if isinstance(result, Eigenpairs):
        ends = f"λ_max {result.values[-1]:.4g}"
        return f"{symbol}: {ends}" if name == "ggn" else f"{symbol}: {ends}, λ_min {result.values[0]:.4g}"
    if isinstance(result, BlockTraces):
        return f"{symbol}: trace {with_error(result.total.value, result.total.stderr)}"
    return f"{symbol}: the map is done"


def _part(finished: FinishedPieces, name: str, cfg: Config) -> Part:
    ends = finished.take(SampledExtremes, f"{name}.extremes")
    pieces = _pieces(cfg, name)
    sums, norms = (
        finished.take(SampledNumbers, f"{name}.{piece}").numbers if piece in pieces else {}
        for piece in ("sampling", "ranking")
    )
    return Part(
        density=finished.take(SpectralDensity, f"{name}.density"),
        extremes=ends.pairs,
        traces=finished.take(BlockTraces, f"{name}.traces"),
        map=finished.take(BlockNorms, f"{name}.map"),
        sampled={**ends.sampled.numbers, **sums},
        sampled_norms=norms,
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


NEEDS = {"sampling": ("traces",), "ranking": ("map",)}
MOST_RANKED = 4  # blocks with the largest norms whose order is checked on other data


def _pieces(cfg: Config, name: str) -> dict[str, Callable[..., Result]]:
    """Return the pieces of one operator, by name."""
    pieces: dict[str, Callable[..., Result]] = {
        "density": lambda op: spectral_density(
            op, num_probes=cfg.num_probes, num_steps=cfg.num_steps, seed=cfg.seed
        ),
        "extremes": lambda op: _extremes(op, cfg),
        "traces": lambda op: block_traces(op, num_probes=cfg.num_trace_probes, seed=cfg.seed),
        "map": lambda op: _map(op.in_blocks(), cfg),
    }
    if cfg.sampling:
        pieces["sampling"] = lambda op, traces: _sums(op, traces, cfg)
    if cfg.sampling and name == "hessian":
        pieces["ranking"] = lambda op, norms: _ranked_norms(op, norms, cfg)
    return pieces


def _sums(op: CurvatureOperator, traces: BlockTraces, cfg: Config) -> SampledNumbers:
    total = traces.total
    return sampled_sums(op, cfg, trace=(total.value, total.stderr, len(total.samples)))


def _ranked_norms(op: CurvatureOperator, norms: BlockNorms, cfg: Config) -> SampledNumbers:
    """Measure norms of the largest diagonal blocks with their sampling errors."""
    first = np.argsort(-np.diag(norms.frobenius))[:MOST_RANKED]
    return sampled_norms(op, [norms.names[i] for i in first], cfg)


def _extremes(op: CurvatureOperator, cfg: Config) -> SampledExtremes:
    """Extreme eigenvalues, ascending: of both ends, or the highest if the operator is positive semi-definite.

    Such an operator has many eigenvalues near zero, which a Krylov method does not separate.
    """
    k = min(cfg.num_eigenvalues if op.psd else 2 * cfg.num_eigenvalues, op.shape[0])
    which = "LA" if op.psd else "BE"
    pairs = eigsh(op, k, which=which, vectors=cfg.sampling, max_products=cfg.max_products, seed=cfg.seed)
    order = np.argsort(pairs.values, kind="stable")
    pairs = replace(
        pairs,
        vectors=None if pairs.vectors is None else pairs.vectors[:, order.copy()],
        **{name: getattr(pairs, name)[order] for name in ("values", "residuals", "converged_mask")},
    )
    sampled = sampled_extremes(op, pairs, cfg) if cfg.sampling else SampledNumbers(reason=OFF)
    return SampledExtremes(replace(pairs, vectors=None), sampled)


def _map(op: CurvatureOperator, cfg: Config) -> BlockNorms:
    return block_norms(op, mapped(op.space.slices, cfg), num_probes=cfg.num_map_probes, seed=cfg.seed)


def mapped(slices: dict[str, slice], cfg: Config) -> dict[str, slice]:
    """Blocks that match `map_blocks`; all of them if none does."""
    matching = {
        name: rows
        for name, rows in slices.items()
        if any(fnmatchcase(name, pattern) for pattern in cfg.map_blocks)
    }
    return matching or slices


# ------------------------------------------------------------------------------------------------------- plan


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """Return the steps of a run: density, eigenvalues, traces and map of every operator."""
    columns = len(mapped(problem.space(*cfg.blocks).in_blocks().slices, cfg))
    planned = []
    for name in [name for name in OPERATORS if name in cfg.operators]:
        part = PlannedMatrix(problem, name, cfg.blocks)
        k = cfg.num_eigenvalues if part.psd else 2 * cfg.num_eigenvalues
        planned += [
            owned(density("density", part, cfg.num_probes, cfg.num_steps), f"{name}.density"),
            owned(eigenvalues("eigenvalues", part, k, cfg.max_products), f"{name}.extremes"),
            owned(probed("traces", part, cfg.num_trace_probes), f"{name}.traces"),
            owned(probed("block map", part, cfg.num_map_probes, times=columns), f"{name}.map"),
        ]
        if cfg.sampling:
            planned += [
                sampled_ends("parts of the data", part, f"{name}.extremes", ends=1 if part.psd else 2),
                owned(probed("trace and norm on groups", part, NUM_PROBES), f"{name}.sampling"),
            ]
        if cfg.sampling and name == "hessian":
            products = NUM_PROBES * min(MOST_RANKED, columns)
            ranked = Step("norms on groups", part.kind, products, share=OF_BLOCK, spaces=(part.space,))
            planned.append(owned(ranked, f"{name}.ranking"))
    return planned


def blocks(cfg: Config) -> tuple[str, ...]:
    """Return the globs of the parameters of a product."""
    return cfg.blocks


ALONE = {"operators": ("hessian",)}
SMALLEST = {
    "num_probes": 1, "num_steps": 16, "num_eigenvalues": 1, "num_trace_probes": 6, "num_map_probes": 1,
    "max_products": 30,
}  # fmt: skip
PLAN = Plan(
    steps,
    (
        {"num_probes": 3, "num_trace_probes": 24, "num_map_probes": 2, "max_products": 250},
        {
            "num_probes": 2, "num_steps": 30, "num_eigenvalues": 2, "num_trace_probes": 16,
            "num_map_probes": 1, "max_products": 120,
        },
        {
            "num_probes": 2, "num_steps": 20, "num_eigenvalues": 1, "num_trace_probes": 12,
            "num_map_probes": 1, "max_products": 60,
        },
        {
            "num_probes": 1, "num_steps": 20, "num_eigenvalues": 1, "num_trace_probes": 8,
            "num_map_probes": 1, "max_products": 40,
        },
        SMALLEST,
    ),
    blocks,
    selections=(
        Selection({**SMALLEST, "operators": ("hessian", "ggn")}, "the Hessian and the GGN"),
        Selection({**SMALLEST, **ALONE}, "the Hessian alone"),
        Selection(
            {**SMALLEST, **ALONE, "map_blocks": ("E", "P", "U")},
            "the Hessian alone, without the map of the layers' blocks",
        ),
        Selection(
            {
                **SMALLEST, **ALONE, "map_blocks": ("E", "P", "U"), "num_steps": 6, "num_trace_probes": 3,
                "max_products": 12,
            },
            "extreme eigenvalues, trace and density of the Hessian, each from few products",
        ),
    ),
)  # fmt: skip
