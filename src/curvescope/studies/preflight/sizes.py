"""Predict the amount of data that a study needs for a precision, and check the prediction on other data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.number_format import between, rounded
from curvescope.models.model import Model
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.runs.study import Plan
from curvescope.sampling import SampleSize, SizeCheck, check_sample_sizes, sample_sizes
from curvescope.sampling.errors import Quantity
from curvescope.sampling.groups import taken
from curvescope.sampling.statistics import SIZES
from curvescope.studies.problem_config import TASK, ModelOnData, make_problem, sequences_there

PILOT, CHECKED = 1, 1  # parts of the data used for the prediction and for the check
NUM_PROBES = 8
COLUMNS = ("number", "tokens", "sequences", "range of tokens", "pilot", "on other data")


@final
@dataclass(frozen=True)
class DataForecast:
    """Sample sizes for the Hessian's main numbers, and a check of the prediction on data it did not use."""

    study: str
    tokens: int  # default of the study's setting
    sizes: dict[Quantity, SampleSize]
    checks: dict[Quantity, SizeCheck]  # empty if there are no other data
    available: float  # tokens of the text; inf if more can be generated

    @property
    def answer(self) -> str:
        """Number of tokens, in one line."""
        most = max(self.sizes.values(), key=lambda size: size.num_terms)
        precision = f"{100 * most.precision:g} %"
        if not np.isfinite(most.num_terms):
            return f"to {precision}: {most.quantity} needs more data than can be predicted from this pilot"
        line = f"to {precision}: --tokens {_whole(most.num_terms)}, which {most.quantity} needs"
        if self.checks:
            count = sum(check.held for check in self.checks.values())
            line += f"; the prediction held on other data for {count} of {len(self.checks)} numbers"
        else:
            line += "; not checked: there are no other data"
        if most.num_terms > self.available:
            line += f"; the text has {rounded(self.available)}"
        return line

    def rows(self) -> list[list[str]]:
        """Return a row for every number, with the columns COLUMNS."""
        return [
            [
                size.quantity,
                rounded(size.num_terms, 2),
                rounded(size.num_sequences, 2),
                between(size.low, size.high, 2),
                f"{100 * size.error:.0f} % on {size.pilot.num_terms:,.0f}",
                self.checks[quantity].words if quantity in self.checks else "–",
            ]
            for quantity, size in self.sizes.items()
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes and checks as plain data."""
        return {
            quantity: {
                "precision": size.precision,
                "tokens": size.num_terms,
                "tokens_low": size.low,
                "tokens_high": size.high,
                "sequences": size.num_sequences,
                "num_probes": size.num_probes,
                "pilot_tokens": size.pilot.num_terms,
                "pilot_error": size.error,
                "held": self.checks[quantity].held if quantity in self.checks else None,
            }
            for quantity, size in self.sizes.items()
        }


def _whole(tokens: float) -> str:
    return f"{int(float(f'{tokens:.2g}')):d}"


def data_needed(
    study: str, plan: Plan[Any], cfg: ModelOnData, precision: float, *, model: Model | None = None
) -> DataForecast:
    """Compute the tokens that a study needs for a precision of the trace, norm and extreme eigenvalues of its
    Hessian.

    Draws up to twice the study's data: half for the pilot, half for the check.

    Args:
        precision: relative; 0.1 for 10 %.
        model: the model of the configuration, if it is loaded already.
    """
    problem, available = _more_data(cfg, model)
    count = problem.batches.num_sequences
    half = count * PILOT // (PILOT + CHECKED)
    checked = half >= SIZES[0]
    pilot = taken(problem, np.arange(half)) if checked else problem
    how: dict[str, Any] = {"engine": cfg.engine, "checkpoint": cfg.checkpoint}
    blocks = plan.blocks(cfg)
    sizes = sample_sizes(
        Hessian(pilot, *blocks, **how), precision=precision, num_probes=NUM_PROBES, seed=cfg.seed
    )
    checks = {}
    if checked:
        others = Hessian(taken(problem, np.arange(half, count)), *blocks, **how)
        checks = check_sample_sizes(sizes, others, num_probes=NUM_PROBES, seed=cfg.seed + 1)
    return DataForecast(study, cfg.tokens, sizes, checks, available)


def _more_data(cfg: ModelOnData, model: Model | None) -> tuple[Problem, float]:
    """Return the problem on twice the data if the text has them, and the number of available tokens."""
    problem = make_problem(cfg, model)
    if cfg.data.startswith(TASK):
        return problem, np.inf
    there = sequences_there(cfg, problem.model)
    tokens = (PILOT + CHECKED) * cfg.tokens
    try:
        return make_problem(replace(cfg, tokens=tokens), problem.model), np.inf if there is None else float(
            there * cfg.seq_len
        )
    except CurvescopeError:  # the text has fewer tokens
        return problem, float(problem.num_terms)


def precision_of(text: str) -> float:
    """Parse a precision: `10%`, `10 %` and `0.1` give 0.1."""
    words = text.strip()
    try:
        value = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise UsageError(f"expected a precision such as 10% or 0.1, got {text!r}")
    return value
