"""The loss landscape as the sample grows (petrov2025 and its follow-up), beside the control that it needs.

L_k is the mean loss of k samples, a sample being a sequence that weighs as much as any other. Measured are
|L_{k+1} − L_k| at w*, where it says nothing of curvature, and around w*, where the law has three terms: loss,
gradient and Hessian. Only what was computed from second derivatives is called curvature.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.operators.samples.per_sample import per_sample
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Shown
from curvescope.runs.study import Cost, Plan
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.landscape.analysis import (
    Budget,
    Direct,
    Effort,
    Gradients,
    Growth,
    Hessians,
    Norms,
    Power,
    Subspace,
    budget,
    growth,
    law,
    measure_gradients,
    measure_hessians,
    measure_norms,
    measure_subspace,
    root_mean_square,
    simulate,
    subset,
)
from curvescope.studies.setting import ModelOnData, make_problem, notes_of

if TYPE_CHECKING:
    pass

FEWEST = 8  # sequences


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to look at and how hard. The defaults take less than a minute on two cores."""

    tokens: int = setting(8192, "of a text; labeled texts and images: ⌈tokens / seq_len⌉ of them")
    seq_len: int = setting(16, "tokens of one sequence, which is a sample")
    batch_size: int = setting(64, "sequences of one batch; changes no number beyond rounding")
    blocks: tuple[str, ...] = setting(("*",), "the parameters that are moved and differentiated, by globs")
    num_orders: int = setting(200, "random orders of the samples, and draws of the control")
    num_curved: int = setting(64, "samples whose gradients and Hessians are measured, at most")
    num_probes: int = setting(4, "random vectors of the Hessians' traces and norms, at least 3")
    radii: tuple[float, ...] = setting(
        (0.0, 0.005, 0.01, 0.015, 0.02, 0.05),
        "s of the points w* + N(0, s² I), in units of the rms parameter",
    )
    num_pairs: int = setting(8, "pairs of points w* ± δ of each radius, and of the subspace")
    num_subsets: int = setting(8, "subsets whose mean gradient is measured, of each size")
    num_norms: int = setting(3, "samples whose Hessian's spectral norm is measured")
    num_steps: int = setting(8, "power iterations of each")
    dimension: int = setting(2, "of the eigen-subspace")
    max_products: int = setting(20, "most products for its eigenvectors")
    rise: float = setting(0.02, "σ in the subspace: ½ σ² ‖Uᵀ H_x U‖ is this for the sharpest sample")
    tolerances: tuple[float, ...] = setting((0.1, 0.05, 0.02), "of |L_{k+1} − L_k|, to budget data for")

    def __post_init__(self) -> None:
        as_tuples(self, "blocks", "radii", "tolerances")
        super().__post_init__()
        at_least(self, 1, "num_norms", "dimension", "max_products")
        at_least(self, 2, "num_orders", "num_pairs", "num_subsets", "num_steps")
        at_least(self, 3, "num_probes")
        at_least(self, FEWEST, "num_curved")
        for name, low in (("radii", min(self.radii)), ("tolerances", min(self.tolerances))):
            if low < 0 or (name == "tolerances" and low == 0):
                raise UsageError(f"{name}: expected numbers that are not negative, got {low}")


@dataclass(frozen=True)
class Losses(Result):
    """Of every sequence that counts, at w*."""

    values: np.ndarray


@dataclass(frozen=True)
class Curvature(Result):
    """Of the samples whose Hessians are measured."""

    losses: np.ndarray  # (S,) at w*
    hessians: Hessians
    norms: Norms


@dataclass(frozen=True)
class Laws(Result):
    """k(k + 1) E(L_{k+1} − L_k)² around w*, radius by radius: the three terms and their errors."""

    s: np.ndarray  # (Q,)
    terms: np.ndarray  # (Q, 3) loss, gradient, Hessian
    errors: np.ndarray  # (Q, 3)
    total_errors: np.ndarray  # (Q,)


@dataclass(frozen=True)
class Landscape(Shown):
    """One model on one set of data."""

    model: str
    data: str
    loss_name: str
    num_parameters: int
    rms: float  # of the parameters
    growth: Growth
    budget: Budget
    gradients: Gradients
    curvature: Curvature
    laws: Laws
    direct: list[Direct]
    subspace: Subspace


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Landscape:
    """Measure losses, then gradients and Hessians of some of the samples, then points around w*."""
    problem = make_problem(cfg)
    problem.space(*cfg.blocks)  # a pattern that matches nothing is found before the work
    counted = per_sample(problem).sequences
    if len(counted) < FEWEST:
        raise UsageError(
            f"expected at least {FEWEST} sequences with a term that counts, got {len(counted)}",
            hint="more tokens, or a smaller seq_len",
        )
    source = np.random.default_rng([cfg.seed, 0])
    chosen = np.sort(source.permutation(counted)[: cfg.num_curved])
    curved, rms = subset(problem, chosen), root_mean_square(problem, *cfg.blocks)
    pieces = [
        Piece("losses", lambda: Losses(per_sample(problem).losses()), "losses of all samples"),
        Piece("gradients", partial(_gradients, curved, cfg), "gradients of single samples"),
        Piece("curvature", partial(_curvature, curved, cfg, rms), "Hessians of single samples", _answer),
        *(
            Piece(f"radius.{i}", partial(_direct, curved, cfg, r * rms), f"losses at radius {r:g}")
            for i, r in enumerate(cfg.radii)
        ),
        Piece("subspace", partial(_subspace, curved, cfg), "the eigen-subspace"),
    ]
    contents = fingerprint(problem.model, problem.batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    return _result(cfg, problem, rms, found)


def _gradients(curved: Problem, cfg: Config) -> Gradients:
    samples = per_sample(curved, *cfg.blocks)
    S = samples.num_samples
    sizes = sorted({2, max(2, S // 8), max(2, S // 2)})
    return measure_gradients(samples, sizes, cfg.num_subsets, cfg.seed)


def _curvature(curved: Problem, cfg: Config, rms: float) -> Curvature:
    samples = per_sample(curved, *cfg.blocks)
    losses = samples.losses()
    hessians = measure_hessians(samples, cfg.num_probes, cfg.seed)
    length = rms * np.sqrt(samples.space.size)  # ‖δ‖ of s = rms
    power = Power(cfg.num_norms, cfg.num_steps, cfg.seed)
    radii = [r * length for r in (max(cfg.radii),) if r > 0]
    return Curvature(
        losses, hessians, measure_norms(curved, cfg.blocks, losses, hessians.frobenius, radii, power)
    )


def _answer(found: Result) -> str:
    assert isinstance(found, Curvature)
    traces = found.hessians.traces_of(np.arange(found.hessians.traces.shape[1]))
    return f"tr H of single samples: {traces.mean():.4g} in the mean, {traces.std():.3g} from one to the next"


def _direct(curved: Problem, cfg: Config, s: float) -> Direct:
    return simulate(curved, cfg.blocks, s, cfg.num_pairs, cfg.seed)


def _subspace(curved: Problem, cfg: Config) -> Subspace:
    effort = Effort(cfg.dimension, cfg.max_products, cfg.rise, cfg.num_pairs, cfg.seed)
    return measure_subspace(curved, cfg.blocks, effort)


def _result(cfg: Config, problem: Problem, rms: float, found: Finished) -> Landscape:
    losses, curvature = found.take(Losses, "losses").values, found.take(Curvature, "curvature")
    gradients = found.take(Gradients, "gradients")
    every = [law(r * rms, curvature.losses, gradients, curvature.hessians) for r in cfg.radii]
    laws = Laws(
        s=np.array(cfg.radii) * rms,
        terms=np.array([one.terms for one in every]),
        errors=np.array([one.errors for one in every]),
        total_errors=np.array([one.total_error for one in every]),
    )
    return Landscape(
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        num_parameters=problem.space(*cfg.blocks).size,
        rms=rms,
        growth=growth(losses, num_orders=cfg.num_orders, seed=cfg.seed),
        budget=budget(losses, cfg.tolerances, seed=cfg.seed),
        gradients=gradients,
        curvature=curvature,
        laws=laws,
        direct=[found.take(Direct, f"radius.{i}") for i in range(len(cfg.radii))],
        subspace=found.take(Subspace, "subspace"),
        notes=notes_of(cfg, problem),
    )


# ------------------------------------------------------------------------------------------------------- plan

ALONE = 4.0  # what a sample's own product costs more than its share of a product of all of them
POINT = 0.3  # what losses at a point cost, in products


def cost(cfg: Config, problem: Problem) -> Cost:
    """Products of single samples, of the mean Hessian, and losses at points, in products over all data."""
    there = max(1, -(-cfg.tokens // cfg.seq_len))
    share = min(1.0, cfg.num_curved / there)
    own = cfg.num_probes + cfg.dimension + 2  # and the gradients, twice
    points = 2 * cfg.num_pairs * (len(cfg.radii) + 1)
    power = cfg.num_norms * cfg.num_steps * (len(cfg.radii) + 2) / max(cfg.num_curved, 1)
    each = ALONE * (own + power) + cfg.max_products + POINT * points
    return Cost(4 + len(cfg.radii), share * each)


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product."""
    return cfg.blocks


PLAN = Plan(
    blocks,
    cost,
    (
        {"num_curved": 32, "num_pairs": 6, "max_products": 20, "num_norms": 3},
        {
            "tokens": 4096, "num_curved": 24, "num_pairs": 4, "max_products": 16, "num_norms": 2,
            "dimension": 2,
        },
        {
            "tokens": 2048, "num_curved": 16, "num_pairs": 3, "num_probes": 3, "max_products": 12,
            "num_norms": 2, "num_steps": 5, "dimension": 1,
        },
        {
            "tokens": 1024, "num_curved": 8, "num_pairs": 2, "num_probes": 3, "max_products": 8,
            "num_norms": 1, "num_steps": 4, "dimension": 1,
        },
    ),
)  # fmt: skip
