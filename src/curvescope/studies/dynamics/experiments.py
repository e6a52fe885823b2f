"""The runs of which every experiment is made, each a piece of work of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from curvescope.algorithms.spectra.lanczos import eigsh
from curvescope.core.errors import CurvescopeError
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.studies.dynamics.course import Course, Recipe, follow
from curvescope.studies.dynamics.networks import modular_addition, problem_of
from curvescope.studies.dynamics.settings import Config
from curvescope.studies.dynamics.networks import SMALL

SHORT, FEW = 20, 10  # measurements of a run of spikes or grokking, and of warmup
GROKKED = 2  # networks of grokking
TWICE = 2  # times as many networks of warmup, of which the first are measured on their way
ACCURACY = 1e-3  # of λ_max at the start, relative


class Planned(NamedTuple):
    """A run that is to be made."""

    experiment: str
    name: str  # also of its piece
    work: Callable[[], Course]


def planned(cfg: Config) -> list[Planned]:
    """All runs of the experiments, in their order."""
    makers = {"edge": _edge, "adam": _adam, "warmup": _warmup, "spikes": _spikes, "grokking": _grokking}
    return [run for experiment in dict.fromkeys(cfg.experiments) for run in makers[experiment](cfg)]


def start_sharpness(problem: Problem, seed: int) -> float:
    """λ_max of the Hessian before training, from which learning rates are chosen."""
    found = eigsh(Hessian(problem), 1, which="LA", tol=ACCURACY, vectors=False, seed=seed)
    if not found.values[0] > 0:
        raise CurvescopeError(
            f"expected positive curvature to choose a learning rate by, {problem.model.name!r} has "
            f"λ_max = {found.values[0]:.3g}"
        )
    return float(found.values[0])


def seeds_of(cfg: Config, times: int = 1) -> range:
    """Of the small model; one that was named is what it is."""
    return range(cfg.seed, cfg.seed + (times * cfg.num_seeds if cfg.model == SMALL else 1))


def _edge(cfg: Config) -> list[Planned]:
    def work(edge: float, name: str) -> Course:
        problem = problem_of(cfg, seed=cfg.seed)
        recipe = Recipe("gd", 2 / (edge * start_sharpness(problem, cfg.seed)), cfg.steps)
        return follow(problem, recipe, every=cfg.every, name=name, seed=cfg.seed, num_probes=cfg.num_probes)

    names = [f"edge-{edge:g}" for edge in cfg.edges]
    return [
        Planned("edge", name, partial(work, *pair, name))
        for *pair, name in zip(cfg.edges, names, strict=True)
    ]


def _adam(cfg: Config) -> list[Planned]:
    def work() -> Course:
        problem = problem_of(cfg, seed=cfg.seed)
        recipe = Recipe("adam", cfg.adam_lr, cfg.steps, beta2=cfg.beta2)
        return follow(problem, recipe, every=cfg.every, name="adam", seed=cfg.seed, num_probes=cfg.num_probes)

    return [Planned("adam", "adam", work)]


def _warmup(cfg: Config) -> list[Planned]:
    def work(seed: int, warmup: int, name: str) -> Course:
        problem = problem_of(cfg, seed=seed, norm="post", layers=2, loss="cross_entropy")
        recipe = Recipe("adam", cfg.warmup_lr, 2 * cfg.warmup_steps, warmup, beta2=cfg.beta2)
        every = max(1, recipe.steps // FEW) if seed == cfg.seed else recipe.steps
        return follow(problem, recipe, every=every, name=name, seed=seed, num_probes=cfg.num_probes)

    ways = {"without": 0, "with": cfg.warmup_steps}
    return [
        Planned("warmup", name, partial(work, seed, steps, name))
        for seed in seeds_of(cfg, TWICE)
        for way, steps in ways.items()
        for name in [f"warmup-{way}-{seed}"]
    ]


def _spikes(cfg: Config) -> list[Planned]:
    def work(seed: int, end: float, name: str) -> Course:
        problem = problem_of(cfg, seed=seed)
        recipe = Recipe("gd", end * 2 / start_sharpness(problem, seed), cfg.spike_steps, cfg.spike_steps)
        every = max(1, recipe.steps // SHORT)
        return follow(problem, recipe, every=every, name=name, seed=seed, num_probes=cfg.num_probes)

    ways = {"above": cfg.above, "below": cfg.below}
    return [
        Planned("spikes", name, partial(work, seed, end, name))
        for seed in seeds_of(cfg)
        for way, end in ways.items()
        for name in [f"spikes-{way}-{seed}"]
    ]


def _grokking(cfg: Config) -> list[Planned]:
    def work(seed: int, name: str) -> Course:
        problem, evaluate = modular_addition(cfg, seed)
        recipe = Recipe("adamw", cfg.grok_lr, cfg.grok_steps, 10, beta2=0.98, weight_decay=cfg.weight_decay)
        every = max(1, recipe.steps // SHORT)
        return follow(
            problem, recipe, every=every, name=name, seed=seed, num_probes=cfg.num_probes, evaluate=evaluate
        )

    seeds = range(cfg.seed, cfg.seed + min(GROKKED, cfg.num_seeds))
    return [
        Planned("grokking", f"grokking-{seed}", partial(work, seed, f"grokking-{seed}")) for seed in seeds
    ]
