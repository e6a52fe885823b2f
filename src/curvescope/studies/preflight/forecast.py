"""The forecast of a study: its steps, measured and added up."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import final

from curvescope.core.config import Config
from curvescope.models.model import Model
from curvescope.problem import Problem
from curvescope.runs.study import Plan, Step, Study
from curvescope.studies.preflight.bench import Clock
from curvescope.studies.preflight.measure import Measured, measure
from curvescope.studies.preflight.predict import Prediction, kinds_of, predict
from curvescope.studies.setting import ModelOnData, make_problem


@final
@dataclass(frozen=True)
class Forecast:
    """What a study will take on a problem, and what that was measured on.

    Attributes:
        stepwise: whether the study says its steps; if not, it is the most that it may take.
    """

    study: str
    cfg: ModelOnData
    problem: Problem
    measured: Measured
    prediction: Prediction
    stepwise: bool


def forecast(
    name: str,
    study: Study[Config],
    cfg: Config,
    *,
    clock: Clock = time.perf_counter,
    model: Model | None = None,
) -> Forecast | None:
    """Measure a few products, and add up; None where the study says nothing of what it takes.

    Args:
        clock: what seconds are measured by.
        model: that of the configuration, where it is loaded already.
    """
    if study.plan is None or not isinstance(cfg, ModelOnData):
        return None
    problem = make_problem(cfg, model)
    plan = study.plan
    steps = steps_of(plan, cfg, problem)
    measured = measure(problem, cfg, kinds_of(steps), clock)
    seconds = plan.cost(cfg, problem).seconds
    prediction = predict(problem, steps, measured, seconds)
    return Forecast(name, cfg, problem, measured, prediction, plan.steps is not None)


def steps_of(plan: Plan[Config], cfg: Config, problem: Problem) -> list[Step]:
    """The steps of a plan; of one without, all products as one."""
    if plan.steps is not None:
        return plan.steps(cfg, problem)
    products = plan.cost(cfg, problem).products
    return [Step("products", "hessian", products, most=products, spaces=(plan.blocks(cfg),))]
