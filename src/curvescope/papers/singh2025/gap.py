"""Difference between GGN and Hessian for two families of models of one size, and for the bundled model.

All numbers of the small models are exact (`TrainedModel`). The study `gap` measures the bundled model over
its checkpoints, by block and with other targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn

from curvescope.algorithms.estimates.intervals import student
from curvescope.core.config import setting
from curvescope.core.number_format import plural
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.data.batches import Batches
from curvescope.models.load import load
from curvescope.models.zoo.mlp import MLP, MLPConfig
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.papers.common import OURS, FigureConfig, Judged, decided, prefixed
from curvescope.papers.singh2025 import SLIDES
from curvescope.problem import Problem
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study import Study
from curvescope.runs.study_result import FAILS, HOLDS, OPEN, Claim, Line, Origin, Shown, Tables
from curvescope.studies import gap
from curvescope.studies.common.statistics import above, geometric_interval
from curvescope.studies.gap.analysis import ALL, Pair, ProbeEffort, measure_pair
from curvescope.studies.gap.view import row
from curvescope.train import TrainConfig, train
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SEEDS = {"quick": 4, "full": 10}
TOKENS = {"quick": 128, "full": 512}
STEPS = (0, 30, 100, 300)
FAMILIES = ("transformer", "mlp")
TASKS = ("mse", "cross_entropy")
WIDTH, OUT, LENGTH, SEQUENCES = 5, 3, 4, 5
HIDDEN = 13  # of the MLP, which then has nearly as many parameters as the Transformer
WRITTEN = ProbeEffort(2, 1, 2, 3, 10_000, 0)
THEOREM: Origin = ("Hoffman and Wielandt", "ours")
LOSS = {"mse": "squared error", "cross_entropy": "cross-entropy"}
SMALL = 0.1  # relative to ‖H‖: a share that has nearly vanished
ROUNDING = 1e-9
CAPTION = (
    "A Transformer and an MLP with {sizes} parameters on the same inputs and targets, trained for up to "
    "{steps} steps ({seeds}). Hessian and GGN are dense matrices, so all numbers are exact. Left: "
    "relative error of the GGN's λ_max. Middle: functional share ‖H_f‖/‖H‖ against the loss. Right: "
    "Wasserstein distance of the spectra in units of ‖H‖/√n; the functional share is an upper bound."
)
NAMES = {"transformer": "Transformer", "mlp": "MLP"}


@dataclass(frozen=True)
class Config(FigureConfig):
    """quick: 4 seeds, about four minutes; full: 10 seeds, and more text for the bundled model."""

    seeds: int = setting(0, "models of each kind; 0: the default of the profile, 4 or 10", least=0)
    steps: tuple[int, ...] = setting(
        STEPS, "numbers of training steps after which a model is measured; the first is 0"
    )
    tokens: int = setting(
        0, "tokens of text for the bundled model; 0: the default of the profile, 128 or 512", least=0
    )

    @property
    def count(self) -> int:
        """Number of seeds of each kind."""
        return self.seeds or SEEDS[self.profile]

    def of_study(self) -> gap.Config:
        """Return the settings for the bundled model."""
        return gap.Config(tokens=self.tokens or TOKENS[self.profile], device=self.device)


@dataclass(frozen=True)
class FamilyGaps(Shown):
    """Small models of two families over training, and the bundled model."""

    seeds: int
    steps: list[int]
    courses: dict[str, TrainedModel]
    bundled: gap.Gap

    def pair(self, place: ModelCase, step: int) -> Pair:
        """Dense measurements of a model after `step` training steps."""
        return self.courses[place.name].pair(step)

    def places(self, family: str, task: str) -> list[ModelCase]:
        """All seeds of a family on a task."""
        return [ModelCase(family, task, seed) for seed in range(self.seeds)]

    def summary(self) -> list[Line]:
        """Error of the GGN's λ_max by family and task, and the summary of the study for the bundled model."""
        lines: list[Line] = []
        for task in TASKS:
            for family in FAMILIES:
                first, last = (100 * np.median(gaps(self, family, task, self.steps[i])) for i in (0, -1))
                words = f"% error of the GGN's λ_max at the start, {last:.3g} % after {self.steps[-1]} steps"
                lines.append((f"{family}, {LOSS[task]}", f"{first:.3g}", f"{words} (medians of seeds)"))
        return [*lines, *self.bundled.summary()]

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        sizes = sorted({course.num_parameters for course in self.courses.values()})
        families = CAPTION.format(
            sizes=" and ".join(map(str, sizes)), steps=self.steps[-1], seeds=plural(self.seeds, "seed")
        )
        return {"families": families, **prefixed("bundled", self.bundled.captions())}

    def tables(self) -> Tables:
        """One row per small model and step, and the tables of the bundled model."""
        rows = [
            {"family": family, "task": task, "seed": place.seed, "step": step, **row(self.pair(place, step))}
            for family in FAMILIES
            for task in TASKS
            for place in self.places(family, task)
            for step in self.steps
        ]
        return {"families": rows, **prefixed("bundled", self.bundled.tables())}

    def figures(self) -> dict[str, Figure]:
        """Figure of the families with three panels per loss, then the figures of the bundled model."""
        return {"families": _families(self), **prefixed("bundled", self.bundled.figures())}

    def claims(self) -> list[Claim]:
        """Return the statements of the slides and our own, with measured values."""
        worse = [
            Claim(
                f"{WORSE}, {LOSS[task]}, {'after training' if step else 'at first'}", "worse",
                *_worse(self, task, step), *SLIDES,
            )
            for task in TASKS
            for step in (self.steps[0], self.steps[-1])
        ]  # fmt: skip
        vanishes = [
            Claim(f"{VANISHES}, {LOSS[task]}", "share → 0", *_vanishes(self, task), *OURS) for task in TASKS
        ]
        others = [Claim(said, expected, *judge(self), *origin) for said, expected, judge, origin in SAID]
        return [*worse, *vanishes, *others]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> FamilyGaps:
    """Measure all models."""
    places = [ModelCase(f, t, seed) for f in FAMILIES for t in TASKS for seed in range(cfg.count)]
    pieces = [Piece(place.name, partial(measure_course, place, cfg.steps)) for place in places]
    pieces.append(Piece("bundled", partial(gap.run, cfg.of_study()), "the bundled model"))
    results = work_through(pieces, progress=progress, state=state)
    return FamilyGaps(
        seeds=cfg.count,
        steps=list(cfg.steps),
        courses={place.name: results.take(TrainedModel, place.name) for place in places},
        bundled=results.take(gap.Gap, "bundled"),
    )


class ModelCase(NamedTuple):
    """Model family, task and seed."""

    family: str
    task: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the model's piece of work."""
        return f"{self.family}.{self.task}.{self.seed}"


@dataclass(frozen=True)
class TrainedModel(Result):
    """One model at several steps of its training."""

    num_parameters: int
    pairs: dict[str, Pair]  # by step; of the full model, exact

    def pair(self, step: int) -> Pair:
        """Dense measurements after `step` training steps."""
        return self.pairs[str(step)]


def module_of(place: ModelCase) -> nn.Module:
    """Return the model in float64."""
    if place.family == "mlp":
        cfg = MLPConfig(
            d_in=WIDTH, d_hidden=HIDDEN, d_out=OUT, depth=3, activation="gelu", bias=True, seed=place.seed
        )
        return MLP(cfg).double()
    cfg = TransformerConfig(
        n_layers=1, d_model=WIDTH, n_heads=1, d_ff=2 * WIDTH, n_ctx=LENGTH, inputs="continuous",
        outputs="regression", n_out=OUT, positions="learned", causal=False, init="scaled", seed=place.seed,
    )  # fmt: skip
    return Transformer(cfg).double()


def data_of(place: ModelCase) -> Batches:
    """Return inputs of the seed, the same for both families, and targets of the task."""
    source = generator(place.seed, 7)
    shape = (SEQUENCES, LENGTH)
    x = torch.randn(*shape, WIDTH, generator=source, dtype=torch.float64)
    real = torch.randn(*shape, OUT, generator=source, dtype=torch.float64)
    classes = torch.randint(0, OUT, shape, generator=source)
    return Batches.from_tensors(x, real if place.task == "mse" else classes, name=place.task)


def measure_course(place: ModelCase, steps: tuple[int, ...]) -> TrainedModel:
    """Train the model, and compute its dense Hessian and GGN after each of these steps."""
    model, data = load(module_of(place)), data_of(place)
    loss = "mse_mean" if place.task == "mse" else "cross_entropy"
    cfg = TrainConfig(
        steps=max(*steps, 1), lr=1e-2, warmup=10, weight_decay=0.0, clip=10.0, snapshots=tuple(steps)
    )
    with torch.random.fork_rng(devices=[]):
        _, _, kept = train(model, data, cfg, loss=loss)
    problem = Problem(model, data, loss=loss)
    pairs = {str(step): measure_pair(problem.at(kept[step]), ALL, WRITTEN) for step in steps}
    return TrainedModel(model.num_parameters, pairs)


def gaps(result: FamilyGaps, family: str, task: str, step: int) -> np.ndarray:
    """|1 − λ_max(H_o)/λ_max(H)| of all seeds."""
    return np.array([abs(result.pair(place, step).gap().value) for place in result.places(family, task)])


def _worse(result: FamilyGaps, task: str, step: int) -> Judged:
    """Compare the errors of the two families by their ratio, seed by seed, in logarithms."""
    transformer, mlp = (gaps(result, family, task, step) for family in FAMILIES)
    ratio = geometric_interval(transformer / mlp)
    measured = (
        f"error: {100 * np.median(transformer):.3g} % and {100 * np.median(mlp):.3g} % (medians); ratio "
        f"{ratio.value:.3g} ({ratio.low:.2g} to {ratio.high:.2g})"
    )
    return measured, above(ratio, 1)


def _vanishes(result: FamilyGaps, task: str) -> Judged:
    """Functional share at the smallest loss, over all models of a task."""
    places = [place for family in FAMILIES for place in result.places(family, task)]
    first, last = (
        [result.pair(place, step) for place in places] for step in (result.steps[0], result.steps[-1])
    )
    share = np.array([pair.share().value for pair in last])
    norms = np.array([b.functional.norm / a.functional.norm for a, b in zip(first, last, strict=True)])
    losses = np.array([b.loss / a.loss for a, b in zip(first, last, strict=True)])
    measured = (
        f"loss × {np.median(losses):.1e}, ‖H_f‖ × {np.median(norms):.1e} (medians); remaining share of "
        f"‖H‖ {share.min():.2g} to {share.max():.2g}"
    )
    return measured, decided(right=share.max() < SMALL, wrong=share.min() > SMALL)


def _bound(result: FamilyGaps) -> Judged:
    """Check the bound over all small models and steps, whose spectra are exact."""
    pairs = [pair for course in result.courses.values() for pair in course.pairs.values()]
    ratios = np.array([pair.wasserstein().value / pair.share().value for pair in pairs])
    measured = f"{ratios.min():.2g} to {ratios.max():.2g} times the share, {len(ratios)} models"
    return measured, HOLDS if ratios.max() <= 1 + ROUNDING else FAILS


def _drawn(result: FamilyGaps) -> Judged:
    draws = result.bundled.draws
    if draws is None:
        return "no draws", OPEN
    value, error = draws.expectation()
    half = student(draws.gram.shape[1] - 1) * error
    measured = f"‖E H_f‖²/E‖H_f‖² = {value:.3f} ({value - half:.3f} to {value + half:.3f}), bundled model"
    return measured, HOLDS if abs(value) <= half else FAILS


def _large_loss(result: FamilyGaps) -> Judged:
    if not result.bundled.targets:
        return "no other targets", OPEN
    low, high = (result.bundled.targets[kind] for kind in ("predicted", "random"))
    measured = (
        f"‖H_f‖ = {low.functional.norm:.3g} at loss {low.loss:.2f} (predicted targets), "
        f"{high.functional.norm:.3g} at loss {high.loss:.2f} (random), bundled model"
    )
    apart = high.functional.norm_low > low.functional.norm_high
    other = high.functional.norm_high < low.functional.norm_low
    return measured, decided(right=apart, wrong=other)


def _late(result: FamilyGaps) -> Judged:
    """Compare the functional share at the first and the last checkpoint of the bundled model."""
    shares = {name: result.bundled.pair(name).share() for name in result.bundled.checkpoints}
    first, last = (list(shares.values())[i] for i in (0, -1))
    measured = ", ".join(f"{name} {share.value:.2f} ± {share.error:.2f}" for name, share in shares.items())
    away = 2 * math.hypot(first.error, last.error)
    right = last.value < first.value - away and last.value < 0.5
    return measured, decided(right=right, wrong=last.value > 0.5)


def _too_little(result: FamilyGaps) -> Judged:
    """Sign of the gap over checkpoints of the bundled model."""
    pairs = {name: result.bundled.pair(name) for name in result.bundled.checkpoints}
    measured = ", ".join(f"{name} {100 * pair.gap().value:+.3g} %" for name, pair in pairs.items())
    ends = [pair.gap_interval() for pair in pairs.values()]
    return measured, decided(right=all(low > 0 for low, _ in ends), wrong=any(high < 0 for _, high in ends))


def _queries_and_keys(result: FamilyGaps) -> Judged:
    """Compare functional shares of blocks at the last checkpoint."""
    last = result.bundled.checkpoints[-1]
    shares = {block: result.bundled.pair(last, block).share() for block in result.bundled.blocks[1:]}
    own = [number for block, number in shares.items() if block.endswith(("W_Q", "W_K"))]
    rest = [number for block, number in shares.items() if not block.endswith(("W_Q", "W_K"))]
    measured = ", ".join(f"{block} {n.value:.2f} ± {n.error:.2f}" for block, n in shares.items())
    if not own or not rest:
        return measured, OPEN
    least = min(n.value - 2 * n.error for n in own) > max(n.value + 2 * n.error for n in rest)
    below = max(n.value for n in own) < max(n.value for n in rest)
    return measured, decided(right=least, wrong=below)


WORSE = "the GGN's λ_max is a worse approximation for Transformers than for MLPs"
VANISHES = "the functional Hessian vanishes relative to the GGN as the loss vanishes"
SAID = (
    ("W₁ between the spectra of H and GGN is at most the functional share, in units of ‖H‖/√n",
     "at most 1 times", _bound, THEOREM),
    ("with targets drawn from the model, the functional Hessian vanishes on average", "0", _drawn, OURS),
    ("at fixed parameters, the functional Hessian is larger if the loss is larger",
     "larger", _large_loss, OURS),
    ("the functional Hessian matters early in training, but not late, bundled model",
     "share falls below one half", _late, OURS),
    ("the λ_max of the GGN is too small, bundled model", "1 − λ_max(H_o)/λ_max(H) > 0", _too_little, OURS),
    ("the functional Hessian has a larger share in query and key blocks than in others, bundled model",
     "larger", _queries_and_keys, OURS),
)  # fmt: skip
"""Claim, expected value, function that returns measured value and verdict, and origin."""


def _families(result: FamilyGaps) -> Figure:
    figure, axes = style.subplots(2, 3, figsize=(12, 6.6))
    for (left, middle, right), task in zip(axes, TASKS, strict=True):
        for i, family in enumerate(FAMILIES):
            color = PALETTE[1 - i]
            _missed(left, result, family, task, color)
            _against_loss(middle, result, family, task, color)
            _distances(right, result, family, task, color)
        left.set(
            title=f"{LOSS[task]}: error of the GGN's λ_max", yscale="log", ylabel="|1 − λ_max(H_o)/λ_max(H)|"
        )
        left.set_xticks(range(len(result.steps)), [str(step) for step in result.steps])
        left.set_xlabel("steps")
        middle.set(
            xscale="log",
            yscale="log",
            xlabel="loss",
            ylabel="‖H_f‖/‖H‖",
            title="functional share against the loss",
        )
        right.set(
            xscale="log",
            yscale="log",
            xlabel="functional share",
            ylabel="W₁ / (‖H‖/√n)",
            title="distance of the spectra, and its bound",
        )
        ends = np.array(right.get_xlim())
        right.plot(ends, ends, lw=0.8, color="0.5", label="bound")
        for ax in (left, middle, right):
            ax.legend()
            ax.grid(visible=True)
    return figure


def _missed(ax: Axes, result: FamilyGaps, family: str, task: str, color: str) -> None:
    values = np.array([gaps(result, family, task, step) for step in result.steps])  # (steps, seeds)
    x = np.arange(len(result.steps))
    ax.plot(x, values, "o", ms=3, color=color, alpha=0.5)
    ax.plot(x, np.median(values, axis=1), "-", lw=1.5, color=color, label=NAMES[family])


def _against_loss(ax: Axes, result: FamilyGaps, family: str, task: str, color: str) -> None:
    for place in result.places(family, task):
        pairs = [result.pair(place, step) for step in result.steps]
        label = NAMES[family] if not place.seed else None
        shares = [pair.share().value for pair in pairs]
        ax.plot([pair.loss for pair in pairs], shares, "-o", ms=3, lw=0.8, color=color, label=label)


def _distances(ax: Axes, result: FamilyGaps, family: str, task: str, color: str) -> None:
    pairs = [result.pair(place, step) for place in result.places(family, task) for step in result.steps]
    x, y = [pair.share().value for pair in pairs], [pair.wasserstein().value for pair in pairs]
    ax.plot(x, y, "o", ms=3, color=color, label=NAMES[family])


STUDY = Study(Config, run)
