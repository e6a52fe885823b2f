"""How far the GGN is from the Hessian: two families of models of one size, and the bundled model.

The small models are exact in every number (`Course`). The bundled model is measured by the study `gap`, over
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
from curvescope.core.config import at_least, setting
from curvescope.core.numbers import plural
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
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Line, Origin, Shown
from curvescope.runs.study import Study
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies import gap
from curvescope.studies.common.statistics import above, geometric_interval
from curvescope.studies.gap.analysis import ALL, Effort, Pair, measure_pair
from curvescope.studies.gap.view import row
from curvescope.train import TrainConfig, train
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SEEDS = {"quick": 4, "full": 10}
TOKENS = {"quick": 128, "full": 512}
STEPS = (0, 30, 100, 300)
FAMILIES = ("transformer", "mlp")
TASKS = ("mse", "cross_entropy")
WIDTH, OUT, LENGTH, SEQUENCES = 5, 3, 4, 5
HIDDEN = 13  # of the MLP: as many parameters as the Transformer, up to a few
WRITTEN = Effort(2, 1, 2, 3, 10_000, 0)
THEOREM: Origin = ("Hoffman and Wielandt", "ours")
LOSS = {"mse": "squared error", "cross_entropy": "cross-entropy"}
SMALL = 0.1  # of ‖H‖: a share that is nearly gone
ROUNDING = 1e-9
CAPTION = (
    "A Transformer and an MLP of {sizes} parameters on the same inputs and targets, trained for up to "
    "{steps} steps ({seeds}); Hessian and GGN are written out, so that all numbers are exact. Left: how much "
    "of λ_max the GGN misses. Middle: functional share ‖H_f‖/‖H‖ against the loss. Right: Wasserstein "
    "distance of the spectra in units of ‖H‖/√n, which the share bounds."
)
NAMES = {"transformer": "Transformer", "mlp": "MLP"}


@dataclass(frozen=True)
class Config(FigureConfig):
    """quick: 4 seeds, about four minutes; full: 10 seeds, and more text for the bundled model."""

    seeds: int = setting(0, "models of each kind; 0: those of the profile, 4 and 10")
    steps: tuple[int, ...] = setting(STEPS, "of training, after which a model is measured; the first is 0")
    tokens: int = setting(0, "of the text for the bundled model; 0: those of the profile, 128 and 512")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "seeds", "tokens")

    @property
    def count(self) -> int:
        """Seeds of each kind."""
        return self.seeds or SEEDS[self.profile]

    def of_study(self) -> gap.Config:
        """The settings for the bundled model."""
        return gap.Config(tokens=self.tokens or TOKENS[self.profile], device=self.device)


@dataclass(frozen=True)
class Gaps(Shown):
    """Small models of two families over training, and the bundled model."""

    seeds: int
    steps: list[int]
    courses: dict[str, Course]
    bundled: gap.Gap

    def pair(self, place: Place, step: int) -> Pair:
        """What was written out of a model after so many steps."""
        return self.courses[place.name].pair(step)

    def places(self, family: str, task: str) -> list[Place]:
        """All seeds of a family on a task."""
        return [Place(family, task, seed) for seed in range(self.seeds)]

    def summary(self) -> list[Line]:
        """How much of λ_max the GGN misses, by family and task, and what the study says of tiny-gpt."""
        found: list[Line] = []
        for task in TASKS:
            for family in FAMILIES:
                first, last = (100 * np.median(gaps(self, family, task, self.steps[i])) for i in (0, -1))
                words = f"% of λ_max that the GGN misses at first, {last:.3g} % after {self.steps[-1]} steps"
                found.append((f"{family}, {LOSS[task]}", f"{first:.3g}", f"{words} (medians of seeds)"))
        return [*found, *self.bundled.summary()]

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        sizes = sorted({course.num_parameters for course in self.courses.values()})
        families = CAPTION.format(
            sizes=" and ".join(map(str, sizes)), steps=self.steps[-1], seeds=plural(self.seeds, "seed")
        )
        return {"families": families, **prefixed("bundled", self.bundled.captions())}

    def tables(self) -> dict[str, pd.DataFrame]:
        """One row per small model and step; those of the bundled model."""
        import pandas as pd

        rows = [
            {"family": family, "task": task, "seed": place.seed, "step": step, **row(self.pair(place, step))}
            for family in FAMILIES
            for task in TASKS
            for place in self.places(family, task)
            for step in self.steps
        ]
        return {"families": pd.DataFrame(rows), **prefixed("bundled", self.bundled.tables())}

    def figures(self) -> dict[str, Figure]:
        """The families in three panels for each loss; then the bundled model's own figures."""
        return {"families": _families(self), **prefixed("bundled", self.bundled.figures())}

    def claims(self) -> list[Claim]:
        """What the slides say, and sentences of ours, next to what was measured."""
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


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Gaps:
    """Measure all models."""
    places = [Place(f, t, seed) for f in FAMILIES for t in TASKS for seed in range(cfg.count)]
    pieces = [Piece(place.name, partial(measure_course, place, cfg.steps)) for place in places]
    pieces.append(Piece("bundled", partial(gap.run, cfg.of_study()), "the bundled model"))
    found = work_through(pieces, progress=progress, state=state)
    return Gaps(
        seeds=cfg.count,
        steps=list(cfg.steps),
        courses={place.name: found.take(Course, place.name) for place in places},
        bundled=found.take(gap.Gap, "bundled"),
    )


class Place(NamedTuple):
    """Which model, on which task, with which seed."""

    family: str
    task: str
    seed: int

    @property
    def name(self) -> str:
        """Of its piece of work."""
        return f"{self.family}.{self.task}.{self.seed}"


@dataclass(frozen=True)
class Course(Result):
    """One model at several steps of its training."""

    num_parameters: int
    pairs: dict[str, Pair]  # by step; of the whole model, exact

    def pair(self, step: int) -> Pair:
        """After so many steps."""
        return self.pairs[str(step)]


def module_of(place: Place) -> nn.Module:
    """The model, in float64."""
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


def data_of(place: Place) -> Batches:
    """Inputs of the seed, the same for both families, and targets of the task."""
    source = generator(place.seed, 7)
    shape = (SEQUENCES, LENGTH)
    x = torch.randn(*shape, WIDTH, generator=source, dtype=torch.float64)
    real = torch.randn(*shape, OUT, generator=source, dtype=torch.float64)
    classes = torch.randint(0, OUT, shape, generator=source)
    return Batches.from_tensors(x, real if place.task == "mse" else classes, name=place.task)


def measure_course(place: Place, steps: tuple[int, ...]) -> Course:
    """Train the model, and write its Hessian and GGN out after each of these steps."""
    model, data = load(module_of(place)), data_of(place)
    loss = "mse_mean" if place.task == "mse" else "cross_entropy"
    cfg = TrainConfig(
        steps=max(*steps, 1), lr=1e-2, warmup=10, weight_decay=0.0, clip=10.0, snapshots=tuple(steps)
    )
    with torch.random.fork_rng(devices=[]):
        _, _, kept = train(model, data, cfg, loss=loss)
    problem = Problem(model, data, loss=loss)
    pairs = {str(step): measure_pair(problem.at(kept[step]), ALL, WRITTEN) for step in steps}
    return Course(model.num_parameters, pairs)


def gaps(result: Gaps, family: str, task: str, step: int) -> np.ndarray:
    """|1 − λ_max(H_o)/λ_max(H)| of all seeds."""
    return np.array([abs(result.pair(place, step).gap().value) for place in result.places(family, task)])


def _worse(result: Gaps, task: str, step: int) -> Judged:
    """By the ratio of the two families' errors, seed by seed, in logarithms."""
    transformer, mlp = (gaps(result, family, task, step) for family in FAMILIES)
    ratio = geometric_interval(transformer / mlp)
    measured = (
        f"missed: {100 * np.median(transformer):.3g} % and {100 * np.median(mlp):.3g} % (medians); ratio "
        f"{ratio.value:.3g} ({ratio.low:.2g} to {ratio.high:.2g})"
    )
    return measured, above(ratio, 1)


def _vanishes(result: Gaps, task: str) -> Judged:
    """The functional share where the loss is least, of all models on a task."""
    places = [place for family in FAMILIES for place in result.places(family, task)]
    first, last = (
        [result.pair(place, step) for place in places] for step in (result.steps[0], result.steps[-1])
    )
    share = np.array([pair.share().value for pair in last])
    norms = np.array([b.functional.norm / a.functional.norm for a, b in zip(first, last, strict=True)])
    losses = np.array([b.loss / a.loss for a, b in zip(first, last, strict=True)])
    measured = (
        f"loss × {np.median(losses):.1e}, ‖H_f‖ × {np.median(norms):.1e} (medians); share of ‖H‖ left "
        f"{share.min():.2g} to {share.max():.2g}"
    )
    return measured, decided(right=share.max() < SMALL, wrong=share.min() > SMALL)


def _bound(result: Gaps) -> Judged:
    """Over all small models and steps, whose spectra are exact."""
    pairs = [pair for course in result.courses.values() for pair in course.pairs.values()]
    ratios = np.array([pair.wasserstein().value / pair.share().value for pair in pairs])
    measured = f"{ratios.min():.2g} to {ratios.max():.2g} times the share, {len(ratios)} models"
    return measured, HOLDS if ratios.max() <= 1 + ROUNDING else FAILS


def _drawn(result: Gaps) -> Judged:
    draws = result.bundled.draws
    if draws is None:
        return "no draws", OPEN
    value, error = draws.expectation()
    half = student(draws.gram.shape[1] - 1) * error
    measured = f"‖E H_f‖²/E‖H_f‖² = {value:.3f} ({value - half:.3f} to {value + half:.3f}), bundled model"
    return measured, HOLDS if abs(value) <= half else FAILS


def _large_loss(result: Gaps) -> Judged:
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


def _late(result: Gaps) -> Judged:
    """Share at the first and at the last checkpoint of the bundled model."""
    shares = {name: result.bundled.pair(name).share() for name in result.bundled.checkpoints}
    first, last = (list(shares.values())[i] for i in (0, -1))
    measured = ", ".join(f"{name} {share.value:.2f} ± {share.error:.2f}" for name, share in shares.items())
    away = 2 * math.hypot(first.error, last.error)
    right = last.value < first.value - away and last.value < 0.5
    return measured, decided(right=right, wrong=last.value > 0.5)


def _too_little(result: Gaps) -> Judged:
    """The sign of the gap, over checkpoints of the bundled model."""
    pairs = {name: result.bundled.pair(name) for name in result.bundled.checkpoints}
    measured = ", ".join(f"{name} {100 * pair.gap().value:+.3g} %" for name, pair in pairs.items())
    ends = [pair.gap_interval() for pair in pairs.values()]
    return measured, decided(right=all(low > 0 for low, _ in ends), wrong=any(high < 0 for _, high in ends))


def _queries_and_keys(result: Gaps) -> Judged:
    """Functional shares of blocks at the last checkpoint."""
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
VANISHES = "the functional Hessian vanishes beside the GGN as the loss does"
SAID = (
    ("W₁ between the spectra of H and GGN is at most the functional share, in units of ‖H‖/√n",
     "at most 1 times", _bound, THEOREM),
    ("with targets drawn from the model the functional Hessian vanishes on the average", "0", _drawn, OURS),
    ("at fixed parameters the functional Hessian is larger where the loss is", "larger", _large_loss, OURS),
    ("the functional Hessian matters early in training and not late, bundled model",
     "share falls below one half", _late, OURS),
    ("the GGN has too small a λ_max, bundled model", "1 − λ_max(H_o)/λ_max(H) > 0", _too_little, OURS),
    ("the functional Hessian has a larger share in query and key blocks than in others, bundled model",
     "larger", _queries_and_keys, OURS),
)  # fmt: skip
"""What is said, what is expected, what was measured with a verdict, and where it stands."""


def _families(result: Gaps) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6.6), layout="constrained")
    for (left, middle, right), task in zip(axes, TASKS, strict=True):
        for i, family in enumerate(FAMILIES):
            color = PALETTE[1 - i]
            _missed(left, result, family, task, color)
            _against_loss(middle, result, family, task, color)
            _distances(right, result, family, task, color)
        left.set_title(f"{LOSS[task]}: λ_max that the GGN misses")
        left.set(yscale="log", ylabel="|1 − λ_max(H_o)/λ_max(H)|")
        left.set_xticks(range(len(result.steps)), [str(step) for step in result.steps])
        left.set_xlabel("steps")
        middle.set(xscale="log", yscale="log", xlabel="loss", ylabel="‖H_f‖/‖H‖")
        middle.set_title("functional share against the loss")
        right.set(xscale="log", yscale="log", xlabel="functional share", ylabel="W₁ / (‖H‖/√n)")
        right.set_title("distance of the spectra, and its bound")
        ends = np.array(right.get_xlim())
        right.plot(ends, ends, lw=0.8, color="0.5", label="bound")
        for ax in (left, middle, right):
            ax.legend()
            ax.grid(visible=True)
    return figure


def _missed(ax: Axes, result: Gaps, family: str, task: str, color: str) -> None:
    values = np.array([gaps(result, family, task, step) for step in result.steps])  # (steps, seeds)
    x = np.arange(len(result.steps))
    ax.plot(x, values, "o", ms=3, color=color, alpha=0.5)
    ax.plot(x, np.median(values, axis=1), "-", lw=1.5, color=color, label=NAMES[family])


def _against_loss(ax: Axes, result: Gaps, family: str, task: str, color: str) -> None:
    for place in result.places(family, task):
        pairs = [result.pair(place, step) for step in result.steps]
        label = NAMES[family] if not place.seed else None
        shares = [pair.share().value for pair in pairs]
        ax.plot([pair.loss for pair in pairs], shares, "-o", ms=3, lw=0.8, color=color, label=label)


def _distances(ax: Axes, result: Gaps, family: str, task: str, color: str) -> None:
    pairs = [result.pair(place, step) for place in result.places(family, task) for step in result.steps]
    x, y = [pair.share().value for pair in pairs], [pair.wasserstein().value for pair in pairs]
    ax.plot(x, y, "o", ms=3, color=color, label=NAMES[family])


STUDY = Study(Config, run)
