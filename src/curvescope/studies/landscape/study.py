"""The loss landscape as the sample grows (petrov2025 and its follow-up), next to a control.

L_k is the mean loss of k samples; a sample is a sequence, and all samples have equal weight. The study
measures |L_{k+1} − L_k| at w*, where it contains no curvature, and around w*, where the law has three terms:
loss, gradient and Hessian. Only numbers computed from second derivatives are called curvature.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.operators.samples.per_sample import per_sample
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import FinishedPieces, Piece, State, work_through
from curvescope.runs.study import Plan, Step
from curvescope.runs.study_result import Shown
from curvescope.studies.landscape.analysis import (
    EigenSubspace,
    Gradients,
    Hessians,
    IncrementGrowth,
    PairedLosses,
    PowerIteration,
    SampleBudget,
    SpectralNorms,
    SubspaceSettings,
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
from curvescope.studies.problem_config import ModelOnData, make_problem, notes_of

FEWEST = 8  # sequences


@dataclass(frozen=True)
class Config(ModelOnData):
    """Settings of the study. The defaults take less than a minute on two cores."""

    tokens: int = setting(
        8192, "tokens read from a text; for labeled texts and images: ⌈tokens / seq_len⌉ examples"
    )
    seq_len: int = setting(16, "tokens of one sequence; one sequence is one sample")
    batch_size: int = setting(64, "sequences of one batch; changes results only by rounding")
    blocks: tuple[str, ...] = setting(("*",), "parameters to perturb and differentiate, as glob patterns")
    num_orders: int = setting(200, "random orders of the samples, and draws of the control", least=2)
    num_curved: int = setting(64, "most samples whose gradients and Hessians are measured", least=FEWEST)
    num_probes: int = setting(4, "random vectors for the Hessians' traces and norms, at least 3", least=3)
    radii: tuple[float, ...] = setting(
        (0.0, 0.005, 0.01, 0.015, 0.02, 0.05),
        "standard deviations s of the points w* + N(0, s² I), in units of the rms parameter",
    )
    num_pairs: int = setting(8, "pairs of points w* ± δ at each radius and in the subspace", least=2)
    num_subsets: int = setting(8, "random subsets of each size whose mean gradient is measured", least=2)
    num_norms: int = setting(3, "samples whose Hessian's spectral norm is measured", least=1)
    num_steps: int = setting(8, "power iterations for each spectral norm", least=2)
    dimension: int = setting(2, "dimension of the subspace of top eigenvectors", least=1)
    max_products: int = setting(20, "most Hessian-vector products for these eigenvectors", least=1)
    rise: float = setting(0.02, "sets σ in the subspace: ½ σ² ‖Uᵀ H_x U‖ equals this for the sharpest sample")
    tolerances: tuple[float, ...] = setting(
        (0.1, 0.05, 0.02), "tolerances of |L_{k+1} − L_k| for which a sample size is computed"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("radii", min(self.radii)), ("tolerances", min(self.tolerances))):
            if low < 0 or (name == "tolerances" and low == 0):
                raise UsageError(f"{name}: expected numbers that are not negative, got {low}")


@dataclass(frozen=True)
class SampleLosses(Result):
    """Losses at w* of every sequence with at least one target."""

    values: np.ndarray


@dataclass(frozen=True)
class SampleCurvature(Result):
    """Losses, Hessians and spectral norms of the samples whose Hessians are measured."""

    losses: np.ndarray  # (S,) at w*
    hessians: Hessians
    norms: SpectralNorms


@dataclass(frozen=True)
class Laws(Result):
    """k(k + 1) E(L_{k+1} − L_k)² around w* at each radius: the three terms and their errors."""

    s: np.ndarray  # (Q,)
    terms: np.ndarray  # (Q, 3) loss, gradient, Hessian
    errors: np.ndarray  # (Q, 3)
    total_errors: np.ndarray  # (Q,)


@dataclass(frozen=True)
class Landscape(Shown):
    """Result for one model on one data set."""

    model: str
    data: str
    loss_name: str
    num_parameters: int
    rms: float  # root mean square of the parameters
    growth: IncrementGrowth
    budget: SampleBudget
    gradients: Gradients
    curvature: SampleCurvature
    laws: Laws
    direct: list[PairedLosses]
    subspace: EigenSubspace


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Landscape:
    """Measure losses, then gradients and Hessians of some of the samples, then points around w*."""
    problem = make_problem(cfg)
    problem.space(*cfg.blocks)  # raises before the work starts if a pattern matches no parameter
    counted = per_sample(problem).sequences
    if len(counted) < FEWEST:
        raise UsageError(
            f"expected at least {FEWEST} sequences with a target, got {len(counted)}",
            hint="use more tokens or a smaller seq_len",
        )
    source = np.random.default_rng([cfg.seed, 0])
    chosen = np.sort(source.permutation(counted)[: cfg.num_curved])
    curved, rms = subset(problem, chosen), root_mean_square(problem, *cfg.blocks)
    pieces = [
        Piece("losses", lambda: SampleLosses(per_sample(problem).losses()), "losses of all samples"),
        Piece("gradients", partial(_gradients, curved, cfg), "gradients of single samples"),
        Piece("curvature", partial(_curvature, curved, cfg, rms), "Hessians of single samples", _answer),
        *(
            Piece(
                f"radius.{i}",
                partial(simulate, curved, cfg.blocks, r * rms, cfg.num_pairs, cfg.seed),
                f"losses at radius {r:g}",
            )
            for i, r in enumerate(cfg.radii)
        ),
        Piece("subspace", partial(_subspace, curved, cfg), "subspace of top eigenvectors"),
    ]
    contents = fingerprint(problem.model, problem.batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    return _result(cfg, problem, rms, found)


def _gradients(curved: Problem, cfg: Config) -> Gradients:
    samples = per_sample(curved, *cfg.blocks)
    S = samples.num_samples
    sizes = sorted({2, max(2, S // 8), max(2, S // 2)})
    return measure_gradients(samples, sizes, cfg.num_subsets, cfg.seed)


def _curvature(curved: Problem, cfg: Config, rms: float) -> SampleCurvature:
    samples = per_sample(curved, *cfg.blocks)
    losses = samples.losses()
    hessians = measure_hessians(samples, cfg.num_probes, cfg.seed)
    length = rms * np.sqrt(samples.space.size)  # ‖δ‖ of s = rms
    power = PowerIteration(cfg.num_norms, cfg.num_steps, cfg.seed)
    radii = [r * length for r in (max(cfg.radii),) if r > 0]
    return SampleCurvature(
        losses, hessians, measure_norms(curved, cfg.blocks, losses, hessians.frobenius, radii, power)
    )


def _answer(curvature: Result) -> str:
    assert isinstance(curvature, SampleCurvature)
    traces = curvature.hessians.traces_of(np.arange(curvature.hessians.traces.shape[1]))
    return f"tr H of single samples: mean {traces.mean():.4g}, standard deviation {traces.std():.3g}"


def _subspace(curved: Problem, cfg: Config) -> EigenSubspace:
    effort = SubspaceSettings(cfg.dimension, cfg.max_products, cfg.rise, cfg.num_pairs, cfg.seed)
    return measure_subspace(curved, cfg.blocks, effort)


def _result(cfg: Config, problem: Problem, rms: float, results: FinishedPieces) -> Landscape:
    losses, curvature = (
        results.take(SampleLosses, "losses").values,
        results.take(SampleCurvature, "curvature"),
    )
    gradients = results.take(Gradients, "gradients")
    laws_by_radius = [law(r * rms, curvature.losses, gradients, curvature.hessians) for r in cfg.radii]
    laws = Laws(
        s=np.array(cfg.radii) * rms,
        terms=np.array([law_at.terms for law_at in laws_by_radius]),
        errors=np.array([law_at.errors for law_at in laws_by_radius]),
        total_errors=np.array([law_at.total_error for law_at in laws_by_radius]),
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
        direct=[results.take(PairedLosses, f"radius.{i}") for i in range(len(cfg.radii))],
        subspace=results.take(EigenSubspace, "subspace"),
        notes=notes_of(cfg, problem),
    )


ALONE = 4.0  # cost of one sample's own product, relative to its share of a batched product


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """Planned work: per-sample products and gradients, eigenvectors of the mean Hessian, losses."""
    sequences = max(1, -(-cfg.tokens // cfg.seq_len))
    share, spaces = min(1.0, cfg.num_curved / sequences), (cfg.blocks,)
    power = cfg.num_norms * cfg.num_steps * (len(cfg.radii) + 2)
    points = 2 * cfg.num_pairs * (len(cfg.radii) + 1)
    own = cfg.num_probes + cfg.dimension
    return [
        Step("Hessians of samples", "hessian", own, spaces=spaces, made=2, share=ALONE * share),
        Step("norms of samples", "hessian", power, spaces=spaces, share=ALONE / sequences),
        Step("gradients of samples", "gradient", 2, spaces=spaces, share=ALONE * share),
        Step("eigenvectors", "hessian", cfg.max_products, spaces=spaces, basis=cfg.max_products, share=share),
        Step("losses at points", "loss", points, spaces=spaces, share=share),
    ]


def blocks(cfg: Config) -> tuple[str, ...]:
    """Parameters that a product covers."""
    return cfg.blocks


PLAN = Plan(
    steps,
    (
        {"num_curved": 32, "num_pairs": 6, "max_products": 20, "num_norms": 3},
        {
            "num_curved": 24, "num_pairs": 4, "max_products": 16, "num_norms": 2,
            "dimension": 2,
        },
        {
            "num_curved": 16, "num_pairs": 3, "num_probes": 3, "max_products": 12,
            "num_norms": 2, "num_steps": 5, "dimension": 1,
        },
        {
            "num_curved": 8, "num_pairs": 2, "num_probes": 3, "max_products": 8,
            "num_norms": 1, "num_steps": 4, "dimension": 1,
        },
    ),
    blocks,
    sequences=64,
)  # fmt: skip
