"""Influence of training sequences on predictions, and a check of its accuracy.

For a model and its data, the study computes the score of every training sequence for every query
(`scores`), at a damping by a stated rule and at other dampings. For two small models at a minimum
(`retraining`), it compares the scores with retraining without a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from curvescope.algorithms import TraceEstimate
from curvescope.algorithms.estimates.trace import accurate_trace
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.operators import GGN
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import FinishedPieces, Piece, State, work_through
from curvescope.runs.study import Plan, Step
from curvescope.runs.study_result import Shown
from curvescope.studies.common.planning import PlannedMatrix, probed, together
from curvescope.studies.influence.analysis import (
    CASES,
    STEPS,
    LeftOut,
    Minimum,
    Predicted,
    RetrainingCase,
    Scores,
    asked,
    held_out,
    leave_out,
    losses,
    make_case,
    minimize,
    predict,
    read,
    score,
)
from curvescope.studies.problem_config import ModelOnData, make_problem, notes_of, sequences_there


def score_notes(scores: list[Scores]) -> list[str]:
    """Return notes on the scores at the chosen damping."""
    found = []
    for i, one in enumerate(scores, start=1):
        if not one.converged[0]:
            found.append(f"query {i}: the linear system has not converged; ± bounds the remaining error")
        if float(np.abs(one.values[0]).max()) > one.query_loss:
            found.append(
                f"query {i}: the largest score exceeds the query's loss, so the linear prediction is not "
                "valid; only the order of the scores is meaningful"
            )
    return found


DIAGONAL = "diagonal"
ACCURACY = 0.05  # half the interval of the mean diagonal, over the mean diagonal
MOST_PROBES = 256  # maximum number of probes for the mean diagonal, unless `num_probes` is larger
AUTO, NONE = "auto", "none"
# Settings that a user changes for a model, data or query of their own.
OWN = ("model", "revision", "data", "query")


@dataclass(frozen=True)
class Config(ModelOnData):
    """Data, queries, dampings and retraining. The defaults take about three minutes on one core."""

    tokens: int = setting(
        512, "tokens of a text, in total; of labeled texts and images, ⌈tokens / seq_len⌉ items"
    )
    seq_len: int = setting(16, "tokens of one sequence")
    dtype: str = setting("float64", "float32 or float64")
    query: tuple[str, ...] = setting(
        (), "query texts; for 'words=>others' only the loss of the part after =>", option=True
    )
    num_queries: int = setting(2, "sequences held out as queries, if there is no query text", least=1)
    blocks: tuple[str, ...] = setting(
        (), "globs of parameters that may change; default: the last layer, '*' for all"
    )
    damping: float = setting(1.0, "δ, in units of the GGN's mean diagonal")
    other_dampings: tuple[float, ...] = setting((0.1, 10.0), "other dampings to compare, in the same units")
    tol: float = setting(1e-6, "relative residual that counts as converged")
    max_products: int = setting(1000, "maximum products for one query and damping", least=1)
    num_probes: int = setting(
        16, "minimum number of probes for the mean diagonal; more are drawn until it is known to 5 %", least=2
    )
    cases: tuple[str, ...] = setting(
        (AUTO,), "small models to retrain, or none; auto: all, unless you set your own model, data or query"
    )
    num_removed: int = setting(20, "sequences left out, each with its own training run", least=4)
    num_checked: int = setting(6, "queries of the small models", least=2)
    draws: int = setting(1000, "resamples of the bootstrap", least=50)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not d > 0 for d in (self.damping, *self.other_dampings, self.tol)):
            raise UsageError("expected damping, other_dampings and tol above 0")
        own = any(getattr(self, name) != getattr(Config, name) for name in OWN)
        words: dict[tuple[str, ...], tuple[str, ...]] = {(AUTO,): () if own else tuple(CASES), (NONE,): ()}
        object.__setattr__(self, "cases", words.get(self.cases, self.cases))
        for name in self.cases:
            if name not in CASES:
                raise UsageError(f"cases: expected {', '.join(CASES)}, got {name!r}")


@dataclass(frozen=True)
class Comparison(Result):
    """Predicted and measured changes of Q queries without each of R sequences of a small model."""

    case: str
    removed: np.ndarray  # (R,)
    texts: list[str]  # texts of the removed sequences
    query_loss: np.ndarray  # (Q,) at the minimum
    num_sequences: int
    num_parameters: int
    minimum: Minimum
    predicted: dict[str, np.ndarray]  # by method: (Q, R)
    residual: dict[str, float]
    ridge: float
    near: np.ndarray  # (Q, R) training continued from the minimum
    again: np.ndarray  # (Q, R) trained again from the same start
    moved: np.ndarray  # (R, 2) ‖Δθ‖ of both
    objective: np.ndarray  # (R, 2)
    gradient_norm: np.ndarray  # (R, 2)
    left_out: list[str]  # blocks without Kronecker factors

    @property
    def elsewhere(self) -> np.ndarray:
        """True if retraining ended at another minimum than continued training: (R,)."""
        lower, upper = self.objective.min(axis=1), self.objective.max(axis=1)
        return upper - lower > 1e-6 * np.abs(upper)


@dataclass(frozen=True)
class Influence(Shown):
    """Scores of training sequences for queries, and their comparison with retraining."""

    model: str
    data: str
    loss: float
    blocks: list[str]
    num_parameters: int
    mean_diagonal: float  # mean diagonal of the GGN
    units: list[float]  # dampings in units of the mean diagonal; the first is the chosen one
    texts: list[str]  # of the training sequences
    queries: list[str]
    scores: list[Scores]  # by query
    comparisons: dict[str, Comparison]
    draws: int
    seed: int
    mean_diagonal_interval: tuple[float, float] = (math.nan, math.nan)  # 95 %; nan in older results


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Influence:
    """Score the sequences of the data, and retrain small models."""
    whole = make_problem(cfg)
    problem, queries = (whole, asked(whole, cfg.query)) if cfg.query else held_out(whole, cfg.num_queries)
    blocks = cfg.blocks or last_layer(whole)
    size = whole.space(*blocks).size
    cases = {name: make_case(name, cfg.num_checked, cfg.seed) for name in cfg.cases}
    pieces = _score_pieces(cfg, problem, queries, blocks)
    pieces += [piece for name, case in cases.items() for piece in _case_pieces(cfg, name, case)]
    contents = fingerprint(problem.model, problem.batches, *(query.batches for query in queries))
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    name, total = whole.batches.name, found.take(TraceEstimate, DIAGONAL)
    scores = [found.take(Scores, f"query.{i}") for i in range(len(queries))]
    return Influence(
        model=problem.model.name,
        data=name,
        loss=problem.loss_value(),
        blocks=list(blocks),
        num_parameters=size,
        mean_diagonal=total.value / size,
        units=[cfg.damping, *cfg.other_dampings],
        texts=read(problem, name),
        queries=list(cfg.query) or [read(query, name)[0] for query in queries],
        scores=scores,
        comparisons={name: _comparison(cfg, name, case, found) for name, case in cases.items()},
        draws=cfg.draws,
        seed=cfg.seed,
        mean_diagonal_interval=(total.low / size, total.high / size),
        notes=[*notes_of(cfg, whole), *_data_notes(cfg, whole), *score_notes(scores)],
    )


def _data_notes(cfg: Config, whole: Problem) -> list[str]:
    """Return notes on the part of the text that was read, and on retraining if there was none."""
    taken, there = whole.batches.num_sequences, sequences_there(cfg, whole.model) or 0
    found = []
    if taken < there:
        found.append(f"{taken} of {there} sequences of the text are used (--tokens for more)")
    if not cfg.cases:
        ask = f"--set cases={','.join(CASES)} retrains them, to check such scores"
        found.append(f"no small models were retrained without a sequence: {ask}")
    return found


def last_layer(problem: Problem) -> tuple[str, ...]:
    """Blocks of the last layer; all blocks if the model has no layers."""
    layers = int(problem.model.facts.get("n_layers", 0))
    return (f"L{layers - 1}.*",) if layers else ("*",)


def _score_pieces(
    cfg: Config, problem: Problem, queries: list[Problem], blocks: tuple[str, ...]
) -> list[Piece]:
    """Return the pieces: the mean diagonal, then one for each query."""
    options: Any = {"engine": cfg.engine, "checkpoint": cfg.checkpoint}
    units = (cfg.damping, *cfg.other_dampings)

    def diagonal() -> Result:
        G, most = GGN(problem, *blocks, **options), max(cfg.num_probes, MOST_PROBES)
        return accurate_trace(G, accuracy=ACCURACY, fewest=cfg.num_probes, most=most, seed=cfg.seed)

    def scored(query: Problem, found: Result) -> Scores:
        assert isinstance(found, TraceEstimate)
        mean = found.value / problem.space(*blocks).size
        if not mean > 0:
            raise UsageError(
                f"the GGN of {', '.join(blocks)} has no curvature on these data: its trace is {found.value:g}"
            )
        dampings = [unit * mean for unit in units]
        limits: Any = {"tol": cfg.tol, "max_products": cfg.max_products}
        return score(problem, query, *blocks, dampings=dampings, **limits, **options)

    pieces = [Piece(DIAGONAL, diagonal, "mean diagonal of the GGN")]
    for i, query in enumerate(queries):
        work = partial(scored, query)
        pieces.append(Piece(f"query.{i}", work, f"query {i + 1}", kind="queries", needs=(DIAGONAL,)))
    return pieces


def _removed(cfg: Config, case: RetrainingCase) -> np.ndarray:
    """Return the sequences to leave out, chosen by the seed."""
    total = case.problem.batches.num_sequences
    source = np.random.default_rng(cfg.seed & 0xFFFFFFFF)
    return np.sort(source.permutation(total)[: cfg.num_removed])


def _case_pieces(cfg: Config, name: str, case: RetrainingCase) -> list[Piece]:
    """Return the pieces: training, predictions, and one for each sequence left out."""

    def predicted(minimum: Result) -> Predicted:
        assert isinstance(minimum, Minimum)
        return predict(case, minimum)

    def without(sequence: int, minimum: Result) -> LeftOut:
        assert isinstance(minimum, Minimum)
        return leave_out(case, minimum, sequence)

    minimum = f"{name}.minimum"
    train = partial(minimize, case, case.start, steps=STEPS)
    pieces = [Piece(minimum, train, f"{name}: training")]
    pieces.append(Piece(f"{name}.predicted", predicted, f"{name}: predictions", needs=(minimum,)))
    for i in _removed(cfg, case).tolist():
        words = f"{name}: without sequence {i}"
        pieces.append(
            Piece(
                f"{name}.without.{i}",
                partial(without, i),
                words,
                kind=f"trainings ({name})",
                needs=(minimum,),
            )
        )
    return pieces


def _comparison(cfg: Config, name: str, case: RetrainingCase, found: FinishedPieces) -> Comparison:
    removed = _removed(cfg, case)
    each = [found.take(LeftOut, f"{name}.without.{i}") for i in removed]
    predicted = found.take(Predicted, f"{name}.predicted")
    minimum = found.take(Minimum, f"{name}.minimum")
    texts = read(case.problem, name)
    return Comparison(
        case=CASES[name],
        removed=removed,
        texts=[texts[i] for i in removed],
        query_loss=losses(case, minimum.theta),
        num_sequences=len(texts),
        num_parameters=case.problem.space().size,
        minimum=minimum,
        predicted={method: values[:, removed] for method, values in predicted.values.items()},
        residual=predicted.residual,
        ridge=predicted.ridge,
        near=np.stack([one.near for one in each], axis=1),
        again=np.stack([one.again for one in each], axis=1),
        moved=np.stack([one.moved for one in each]),
        objective=np.stack([one.objective for one in each]),
        gradient_norm=np.stack([one.gradient_norm for one in each]),
        left_out=predicted.left_out,
    )


# Seconds: first training, and each sequence left out.
TRAINED = {"MLP": (4.0, 1.6), "Transformer": (12.0, 3.9)}


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """Plan the mean diagonal, a system for each query and damping, and gradients."""
    queries, dampings = len(cfg.query) or cfg.num_queries, 1 + len(cfg.other_dampings)
    part = PlannedMatrix(problem, "ggn", cfg.blocks or last_layer(problem))
    diagonal = min(problem.model.size_of(*problem.space(*part.space)), max(cfg.num_probes, MOST_PROBES))
    systems = together("systems", [part], queries * dampings * cfg.max_products)
    return [
        probed("mean diagonal", part, diagonal),
        systems._replace(made=queries),
        Step("gradients", "gradient", 2 * queries, spaces=(part.space,)),
    ]


def seconds(cfg: Config) -> float:
    """Seconds for training the small models."""
    return sum(first + cfg.num_removed * each for first, each in map(TRAINED.__getitem__, cfg.cases))


def blocks(cfg: Config) -> tuple[str, ...]:
    """Parameters of a product; by default the last layer."""
    return cfg.blocks or ("*",)


PLAN = Plan(
    steps,
    (
        {"max_products": 300},
        {"max_products": 100, "num_removed": 10},
        {"max_products": 50, "num_removed": 6, "num_queries": 1},
        {"max_products": 20, "num_removed": 4, "num_queries": 1},
    ),
    blocks,
    seconds,
    sequences=8,
)
