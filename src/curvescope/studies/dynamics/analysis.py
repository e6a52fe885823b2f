"""Deterministic full-batch training runs measured by a monitor.

The loss of a step is that of all data before the update, in eval mode, so training and measurement use the
same loss. Steps are θ ← θ − η ∇L (`gd`), or those of torch's Adam and AdamW.

Stability threshold: if and when a run reaches it, and if it stays there.

Let r = η λ_max / 2 for gradient descent; for Adam, r is η times the preconditioned sharpness divided by its
threshold. A run rises if r grows from its lowest value to 1, and stays if r remains near 1.

Sequence of checkpoints of any run, each measured like in the monitor, without a training loop.

The setting names a folder of checkpoints (checkpoint-500, checkpoint-1000, … as Hugging Face's Trainer
writes them), single folders, or revisions of the model (initial, early, … of a bundled one; step1000, … of
a hub id). They are sorted by the last number in their names; names without a number keep their order.

Spikes of the loss, and the signals that warned of them.

A spike is a step whose loss is at least `SPIKE` times the lowest before it. A signal warns if it is beyond
its threshold at every measurement up to the last one before the spike; the lead is the number of steps
between the first of these measurements and the spike. A signal beyond its threshold in a run without a
spike is a false alarm.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from curvescope.algorithms.spectra.lanczos import eigsh
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.number_format import plural
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.data.batches import Batch, Batches
from curvescope.data.tasks import task_data, task_options
from curvescope.models.model import Model
from curvescope.models.zoo import BUNDLED, REVISIONS
from curvescope.models.zoo.folder import zoo_model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.monitor import CurvatureMonitor
from curvescope.monitor.result import Monitored
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.studies.problem_config import TASK, check_alike, load_model, make_batches, make_problem

if TYPE_CHECKING:
    from curvescope.studies.dynamics.study import Config

Optimizer = Literal["gd", "adam", "adamw"]
NOTHING = np.zeros(0)


class Recipe(NamedTuple):
    """Optimizer and learning rate of a run: η rises linearly over `warmup` steps, then is constant."""

    optimizer: Optimizer
    lr: float
    steps: int
    warmup: int = 0
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def rate(self, step: int) -> float:
        """Learning rate η of a step; steps count from 0."""
        return self.lr * min(1.0, (step + 1) / max(self.warmup, 1))


@dataclass(frozen=True)
class Course(Result):
    """Training run: the loss at every step, and measurements of the monitor at some steps."""

    name: str
    seed: int
    optimizer: str
    lr: np.ndarray  # (S,) learning rate of each step
    # (S + 1,) before each step and after the last; shorter if the loss became infinite or nan.
    loss: np.ndarray
    seen: Monitored
    evaluated: np.ndarray = field(default_factory=lambda: NOTHING)  # (E,) steps
    accuracy: np.ndarray = field(default_factory=lambda: NOTHING)  # (E,) on the data
    held_out_loss: np.ndarray = field(default_factory=lambda: NOTHING)  # (E,)
    held_out_accuracy: np.ndarray = field(default_factory=lambda: NOTHING)  # (E,)

    def column(self, name: str) -> np.ndarray:
        """Return a quantity at every measurement, see `monitor.columns`."""
        return self.seen.history[name]

    @property
    def measured(self) -> np.ndarray:
        """Steps at which the monitor measured."""
        return self.seen.history["step"].astype(int)


def follow(
    problem: Problem,
    recipe: Recipe,
    *,
    every: int,
    name: str = "run",
    seed: int = 0,
    num_probes: int = 4,
    evaluate: Callable[[Model], tuple[float, float, float]] | None = None,
) -> Course:
    """Train a copy of the problem's model; measure before every `every`-th step and after the last.

    Args:
        evaluate: Function that returns (accuracy, held-out loss, held-out accuracy) of the model; called at
            every measurement.
    """
    model = _copy(problem.model)
    own = Problem(model, problem.batches, problem.loss)
    optimizer = make_optimizer(model, recipe)
    monitor = CurvatureMonitor(
        model, problem.batches, problem.loss, every=every, budget=1.0, seed=seed, blocks=False,
        num_probes=num_probes, raise_errors=True,
    )  # fmt: skip
    losses, rates, evaluated = [], [], []
    for step in track(range(recipe.steps + 1), name):
        rate = recipe.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        value = accumulate(own, optimizer)
        losses.append(value)
        if not math.isfinite(value):
            break
        if step % every == 0 or step == recipe.steps:
            monitor.measure(step, optimizer=optimizer)
            if evaluate is not None:
                evaluated.append((step, *evaluate(model)))
        if step < recipe.steps:
            rates.append(rate)
            optimizer.step()
    columns = np.array(evaluated, float).T if evaluated else np.zeros((4, 0))
    return Course(name, seed, recipe.optimizer, np.array(rates), np.array(losses), monitor.result(), *columns)


def accumulate(problem: Problem, optimizer: torch.optim.Optimizer) -> float:
    """Return L(θ) and add ∇L(θ) to the parameters' `.grad`: the sum over all batches, divided once."""
    optimizer.zero_grad(set_to_none=True)
    model, total, N = problem.model, 0.0, problem.num_terms
    for batch in problem.batches:
        batch = batch.map(lambda t: t.to(model.device, model.dtype if t.is_floating_point() else None))
        value = problem.loss.sum(model.forward({}, batch.inputs), batch.targets, batch.weights) / N
        value.backward()
        total += float(value.detach())
    return total


def make_optimizer(model: Model, recipe: Recipe) -> torch.optim.Optimizer:
    """Build the optimizer from torch; `gd` is SGD on all the data."""
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    if not parameters:
        raise UsageError(f"expected trainable parameters, but all parameters of {model.name!r} are frozen")
    if recipe.optimizer == "gd":
        return torch.optim.SGD(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay)
    kind = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
    betas = (recipe.beta1, recipe.beta2)
    return kind(parameters, lr=recipe.lr, betas=betas, weight_decay=recipe.weight_decay)


def _copy(model: Model) -> Model:
    """Copy the model in eval mode, so dropout does not change the loss."""
    return replace(model, module=copy.deepcopy(model.module).eval())


# --------------------------------------------------------------------------------------------------- networks

SMALL, AUTO = "small", "auto"
DIGITS, SAMPLE = "task:digits", "sample"
Norm = Literal["none", "pre", "post"]
# Sizes of the small model, and the standard deviation STD of its weights.
WIDTH, HEADS, HIDDEN, STD = (
    24,
    2,
    48,
    0.12,
)
GROK_WIDTH, GROK_HEADS, GROK_HIDDEN = 32, 4, 64
ANSWER = 2  # position of "=" in a b =


def problem_of(
    cfg: Config, *, seed: int = 0, norm: Norm = "pre", layers: int = 1, loss: str = AUTO
) -> Problem:
    """Return the small model of a seed on its task, or the model of the settings, which is the same for all
    seeds.

    For image classes the default loss is the squared error, as in Cohen et al. (2021).
    """
    if cfg.model != SMALL:
        return make_problem(replace(cfg, data=SAMPLE if cfg.data == AUTO else cfg.data))
    batches = read_task(cfg)
    model = small_model(batches, cfg, seed=seed, norm=norm, layers=layers)
    wanted = loss if cfg.loss == AUTO else cfg.loss
    classes = not batches[0].targets.is_floating_point()
    if wanted == AUTO and classes and batches[0].targets.dim() == 1:
        return Problem(model, with_one_hot(batches, model), loss="mse")
    return Problem(
        model, batches, loss=wanted if wanted != AUTO else "cross_entropy" if classes else "mse_mean"
    )


def read_task(cfg: Config) -> Batches:
    """Read the task of the small model, with at most `num_sequences` sequences."""
    data = DIGITS if cfg.data == AUTO else cfg.data
    if not data.startswith(TASK):
        raise UsageError(
            f"expected a task for the small model, got {data!r}", hint="curvescope run dynamics tiny-gpt"
        )
    name = data.removeprefix(TASK)
    own = {"num_sequences": cfg.num_sequences, "dtype": cfg.dtype}
    return task_data(name, **{key: value for key, value in own.items() if key in task_options(name)})


def small_model(batches: Batches, cfg: Config, *, seed: int, norm: Norm, layers: int) -> Model:
    """Build a Transformer of width 24 for the inputs and targets of these batches."""
    inputs, targets = batches[0].inputs, batches[0].targets
    assert isinstance(inputs, Tensor)
    most = max(int(torch.as_tensor(b.targets).max()) for b in batches) + 1
    if inputs.dim() == 4:
        size = inputs.shape[-1]
        shape: dict[str, Any] = {
            "inputs": "patches", "outputs": "class", "n_out": most, "image_size": size, "patch_size": 2,
            "n_ctx": (size // 2) ** 2, "causal": False,
        }  # fmt: skip
    elif inputs.is_floating_point():
        shape = {"inputs": "continuous", "outputs": "regression", "d_in": inputs.shape[-1]}
        shape |= {"n_out": targets.shape[-1], "n_ctx": inputs.shape[1], "causal": False}
    else:
        tokens = max(most, *(int(b.inputs.max()) + 1 for b in batches))  # pyright: ignore
        shape = {"vocab_size": tokens, "n_ctx": inputs.shape[1]}
    zoo = TransformerConfig(
        n_layers=layers, d_model=WIDTH, n_heads=HEADS, d_ff=HIDDEN, init="scaled", init_std=STD, norm=norm,
        seed=seed, **shape,
    )  # fmt: skip
    name = f"{norm}-norm Transformer of {layers} layer{'s' if layers > 1 else ''}"
    return zoo_model(Transformer(zoo).to(cfg.device, getattr(torch, cfg.dtype)), name=name)


def with_one_hot(batches: Batches, model: Model) -> Batches:
    """Replace classes (B,) by one-hot rows (B, classes)."""
    count = int(model.facts["n_out"])
    found = [Batch(b.inputs, one_hot(b.targets, count).to(model.dtype), b.weights) for b in batches]
    return Batches(found, name=batches.name)


Evaluate = Callable[[Model], tuple[float, float, float]]


def modular_addition(cfg: Config, seed: int) -> tuple[Problem, Evaluate]:
    """Return addition modulo p on the training pairs, and a function for accuracy and held-out metrics."""
    options: dict[str, Any] = {"p": cfg.modulus, "fraction": cfg.fraction, "seed": seed}
    kept, rest = (
        task_data("modular_addition", **options),
        task_data("modular_addition", **options, held_out=True),
    )
    zoo = TransformerConfig(
        n_layers=1, d_model=GROK_WIDTH, n_heads=GROK_HEADS, d_ff=GROK_HIDDEN, n_ctx=3,
        vocab_size=cfg.modulus + 1, norm="none", activation="relu", init="scaled", bias_qkv=False,
        bias_o=False, bias_ff=False, seed=seed,
    )  # fmt: skip
    module = Transformer(zoo).to(cfg.device, getattr(torch, cfg.dtype))
    problem = Problem(zoo_model(module, name=f"Transformer without norms, p = {cfg.modulus}"), kept)

    def evaluate(model: Model) -> tuple[float, float, float]:
        return _answers(model, kept)[1], *_answers(model, rest)

    return problem, evaluate


def _answers(model: Model, batches: Batches) -> tuple[float, float]:
    """Mean loss and accuracy."""
    batch = batches[0].map(lambda t: t.to(model.device))
    with torch.no_grad():
        logits, y = model.forward({}, batch.inputs)[:, ANSWER], batch.targets[:, ANSWER]
    return float(cross_entropy(logits, y)), float((logits.argmax(-1) == y).double().mean())


# ------------------------------------------------------------------------------------------------------- edge

NEAR = 0.25  # relative distance from the threshold
RISING = 1.05  # minimum ratio to the lowest value


@dataclass(frozen=True)
class Approach:
    """Approach of a run to its threshold; `ratio` (S,) has the measurements with a ratio."""

    steps: np.ndarray
    ratio: np.ndarray
    error: np.ndarray  # (S,) error of the ratio, from the error of the eigenvalue
    lowest: int  # index of the lowest ratio before it reaches 1
    reached: int | None  # index of the first later ratio that exceeds 1 by more than its error

    @property
    def rises(self) -> bool:
        """Return True if the ratio grew from its lowest value."""
        end = self.reached if self.reached is not None else len(self.ratio) - 1
        return bool(self.ratio[end] > RISING * self.ratio[self.lowest])

    @property
    def after(self) -> np.ndarray:
        """Ratios from the measurement that reaches 1 on."""
        return self.ratio[self.reached :] if self.reached is not None else self.ratio[:0]

    @property
    def near(self) -> float:
        """Share of later ratios within NEAR of 1."""
        return float((np.abs(self.after - 1) <= NEAR).mean()) if len(self.after) else float("nan")


def approach(course: Course) -> Approach:
    """Compare η λ with its threshold at every measurement."""
    h = course.seen.history
    ratio = h["lr_sharpness"] / h["sharpness_threshold"]
    error = h["lr"] * h["sharpness_error"] / h["sharpness_threshold"]
    known = np.isfinite(ratio)
    steps, ratio, error = h["step"][known].astype(int), ratio[known], error[known]
    begun = next((i for i in range(1, len(ratio)) if ratio[i] >= ratio[i - 1]), len(ratio)) - 1
    above = np.flatnonzero(ratio[begun:] - error[begun:] >= 1) + begun
    reached = int(above[0]) if len(above) else None
    before = ratio[begun : reached if reached else None]
    lowest = begun + int(np.argmin(before)) if len(before) else begun
    return Approach(steps, ratio, error, lowest, reached)


def later_loss(course: Course, step: int) -> tuple[float, float]:
    """Final loss over that at a step (medians of ten steps), and the share of steps on which it rose."""
    loss = course.loss[step:]
    few = max(1, min(10, len(loss) // 2))
    return float(np.median(loss[-few:]) / np.median(loss[:few])), float((np.diff(loss) > 0).mean())


# --------------------------------------------------------------------------------------------------- grokking

MEMORIZED, GENERALIZED = 0.99, 0.95  # accuracy on the training data, and on held-out data


@dataclass(frozen=True)
class Phases:
    """Measurements at which the model memorized and generalized; None if it did not."""

    memorized: int | None
    generalized: int | None

    @property
    def delayed(self) -> bool:
        """Return True if the model generalized after it memorized."""
        return (
            self.generalized is not None and self.memorized is not None and self.generalized > self.memorized
        )


def phases(course: Course) -> Phases:
    """Return the first measurements with enough accuracy."""
    first = [
        np.flatnonzero(course.accuracy >= MEMORIZED),
        np.flatnonzero(course.held_out_accuracy >= GENERALIZED),
    ]
    memorized, generalized = (int(found[0]) if len(found) else None for found in first)
    return Phases(memorized, generalized)


@dataclass(frozen=True)
class QuantityChange:
    """Ratio of a quantity after generalization to before: geometric means, and range of ratios."""

    value: float
    low: float
    high: float

    @property
    def direction(self) -> int:
        """Return 1 or −1 if the interquartile ranges do not overlap, else 0."""
        return 1 if self.low > 1 else -1 if self.high < 1 else 0


def change(course: Course, name: str, *, per_loss: bool = False) -> QuantityChange | None:
    """Change of a positive quantity from memorized to generalized; None if the model did not grok.

    low and high are the ratios of opposite quartiles of the measurements before and after.
    """
    found = phases(course)
    if not found.delayed:
        return None
    values = course.column(name) / (course.column("loss") if per_loss else 1.0)
    before, behind = values[found.memorized : found.generalized], values[found.generalized :]
    if not (before > 0).all() or not (behind > 0).all():
        return None
    quartile = lambda part, q: float(np.quantile(np.log(part), q))  # noqa: E731
    middle = np.log(behind).mean() - np.log(before).mean()
    low, high = (
        quartile(behind, 0.25) - quartile(before, 0.75),
        quartile(behind, 0.75) - quartile(before, 0.25),
    )
    return QuantityChange(float(np.exp(middle)), float(np.exp(low)), float(np.exp(high)))


# --------------------------------------------------------------------------------------------------- sequence

CONFIGURATIONS = ("config.json", "config.toml", "adapter_config.json", "ckpt.pt")
NUMBER = re.compile(r"\d+")


class CheckpointSource(NamedTuple):
    """Checkpoint: its source, and the step in its name."""

    name: str
    model: str
    revision: str | None
    step: int | None


@dataclass(frozen=True)
class Sequence(Result):
    """Measurements at every checkpoint."""

    names: list[str]
    steps: np.ndarray  # (C,) numbers in the names, or positions in the order
    numbered: bool
    seen: list[Monitored]  # one measurement per checkpoint

    def column(self, name: str) -> np.ndarray:
        """Return a quantity (C,) at every checkpoint, see `monitor.columns`."""
        return np.array([float(one.history[name][0]) for one in self.seen])

    def block_map(self, name: str = "lambda_max") -> tuple[list[str], np.ndarray]:
        """Return the blocks with this quantity at some checkpoint, and its values (blocks, C)."""
        blocks = list(dict.fromkeys(str(b) for one in self.seen for b in one.blocks["block"]))
        found = np.full((len(blocks), len(self.seen)), np.nan)
        for j, one in enumerate(self.seen):
            for block, value in zip(one.blocks["block"], one.blocks[name], strict=True):
                found[blocks.index(str(block)), j] = value
        known = [i for i, row in enumerate(found) if np.isfinite(row).any()]
        return [blocks[i] for i in known], found[known]

    def followed(self) -> str:
        """Text such as `the 12 measured blocks (of 69)`: the blocks with their own λ_max."""
        known = {str(b) for one in self.seen for b in one.blocks["block"]}
        count = len(self.block_map()[0])
        told = f"the {plural(count, 'block')} that {'was' if count == 1 else 'were'} followed"
        return "every block" if count == len(known) > 1 else f"{told} (of {len(known)})"


def find_points(cfg: Config) -> list[CheckpointSource]:
    """Return the checkpoints of the settings, sorted."""
    points = [point for name in cfg.checkpoints for point in _points(cfg, name)]
    if all(point.step is not None for point in points):
        points.sort(key=lambda point: point.step or 0)
    doubled = {p.name for p in points if sum(q.name == p.name for q in points) > 1}
    return [p._replace(name=str(Path(p.model))) if p.name in doubled else p for p in points]


def _points(cfg: Config, name: str) -> list[CheckpointSource]:
    folder = Path(name)
    if not _is_folder(folder):
        return [_revision(cfg, name)]
    if _is_model(folder):
        return [CheckpointSource(folder.name, str(folder), None, _number(folder.name))]
    inside = sorted(child for child in folder.iterdir() if child.is_dir() and _is_model(child))
    if not inside:
        raise UsageError(
            f"checkpoints: expected a model, or folders with models, in {folder}; found none",
            hint=f"a checkpoint contains one of {', '.join(CONFIGURATIONS)}",
        )
    return [CheckpointSource(child.name, str(child), None, _number(child.name)) for child in inside]


def _revision(cfg: Config, name: str) -> CheckpointSource:
    """Return a revision of the model; the step is known for bundled models."""
    if cfg.model == SMALL:
        if name not in REVISIONS:
            raise UsageError(
                f"checkpoints: expected a folder, or a revision of the model given by name, got {name!r}",
                hint="curvescope run dynamics HUB/ID --checkpoints step1000",
            )
        return _revision(replace(cfg, model="tiny-gpt"), name)
    if cfg.model not in BUNDLED:
        return CheckpointSource(name, cfg.model, name, _number(name))
    about = files("curvescope") / "assets" / cfg.model / "training.json"
    steps = json.loads(about.read_text(encoding="utf-8"))["steps"]
    return CheckpointSource(name, cfg.model, name, steps.get(name))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _is_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in CONFIGURATIONS)


def _number(name: str) -> int | None:
    found = NUMBER.findall(name)
    return int(found[-1]) if found else None


def load_point(cfg: Config, point: CheckpointSource) -> Model:
    """Load the model of a checkpoint."""
    return load_model(replace(cfg, model=point.model, revision=point.revision))


def batches_of(cfg: Config, model: Model) -> Batches:
    """Read the data for all checkpoints with the tokenizer of the first."""
    return make_batches(replace(cfg, data=SAMPLE if cfg.data == AUTO else cfg.data), model)


def contents_of(cfg: Config, points: list[CheckpointSource], batches: Batches) -> str:
    """Digest of all checkpoints and the data; one model is in memory at a time."""
    first = load_point(cfg, points[0])
    digests = [fingerprint(first)]
    for point in points[1:]:
        model = load_point(cfg, point)
        check_alike(point.name, model, first)
        digests.append(fingerprint(model))
    return fingerprint(batches, *digests)


def measure_point(cfg: Config, point: CheckpointSource, number: int, batches: Batches) -> Monitored:
    """Measure one checkpoint with a new monitor, so the numbers do not depend on earlier checkpoints."""
    model = load_point(cfg, point)
    loss = "mse_mean" if batches[0].targets.is_floating_point() else "cross_entropy"
    problem = Problem(model, batches, loss if cfg.loss == AUTO else cfg.loss)
    monitor = CurvatureMonitor(
        model, problem.batches, problem.loss, budget=1.0, seed=cfg.seed, blocks=cfg.blocks,
        num_probes=cfg.num_probes, raise_errors=True,
    )  # fmt: skip
    monitor.measure(number if point.step is None else point.step)
    return monitor.result()


# ----------------------------------------------------------------------------------------------------- spikes

SPIKE = 3.0
SIGNALS = {
    "sharpness": "η times the (preconditioned) sharpness is above its threshold",
    "along_gradient": "η gᵀHg/‖g‖² is above the threshold",
    "grad_share": "more than half of ‖g‖² is in the top eigenspace",
    "grad_norm": "‖g‖ is more than twice the median of the measurements before",
    "loss": "the loss is more than 1.2 times the lowest before",
}
"""Signals that can warn, with their conditions."""
SHARE, SPIKE_TWICE, RISEN, FEWEST = 0.5, 2.0, 1.2, 3


class Warned(NamedTuple):
    """Warning of a signal before the spike of a run."""

    signal: str
    lead: int  # steps; 0 if it did not warn


def rises(course: Course) -> np.ndarray:
    """Loss after every step divided by the lowest before, (S,); infinite if the loss is not finite."""
    loss = np.where(np.isfinite(course.loss), course.loss, np.inf)
    return loss[1:] / np.minimum.accumulate(loss)[:-1]


def rise(course: Course) -> float:
    """Largest rise of the loss."""
    return float(rises(course).max(initial=0.0))


def onset(course: Course) -> int | None:
    """First step of the first spike, or None."""
    found = np.flatnonzero(rises(course) >= SPIKE) + 1
    return int(found[0]) if len(found) else None


def alarms(course: Course) -> dict[str, np.ndarray]:
    """Return, for every signal, an array (S,) that is True at measurements beyond the threshold."""
    h = course.seen.history
    norm, loss = h["grad_norm"], h["loss"]
    medians = np.array([np.median(norm[:i]) if i >= FEWEST else np.inf for i in range(len(norm))])
    lowest = np.concatenate([[np.inf], np.minimum.accumulate(loss)[:-1]])
    with np.errstate(invalid="ignore"):
        return {
            "sharpness": h["lr_sharpness"] > h["sharpness_threshold"],
            "along_gradient": h["lr"] * h["curvature_along_gradient"] > h["threshold"],
            "grad_share": h["grad_share"] > SHARE,
            "grad_norm": norm > SPIKE_TWICE * medians,
            "loss": loss > RISEN * lowest,
        }


def warned(course: Course) -> list[Warned]:
    """Return the lead of every signal, in a run with a spike."""
    step = onset(course)
    assert step is not None
    before = course.measured < step
    found = []
    for signal, on in alarms(course).items():
        steps, on = course.measured[before], on[before]
        quiet = np.flatnonzero(~on)
        first = quiet[-1] + 1 if len(quiet) else 0
        found.append(Warned(signal, int(step - steps[first]) if first < len(steps) else 0))
    return found


def false_alarms(courses: list[Course]) -> dict[str, tuple[int, int]]:
    """Count alarms and measurements for every signal, over runs without a spike."""
    found: dict[str, tuple[int, int]] = dict.fromkeys(SIGNALS, (0, 0))
    for course in courses:
        for signal, on in alarms(course).items():
            count, total = found[signal]
            found[signal] = count + int(on.sum()), total + len(on)
    return found


# ------------------------------------------------------------------------------------------------ experiments

SHORT, FEW = 20, 10  # number of measurements: spikes and grokking, warmup
GROKKED = 2  # number of networks of grokking
# Factor for the number of networks of warmup; the first ones are measured during training.
EXPERIMENT_TWICE = 2
ACCURACY = 1e-3  # relative accuracy of λ_max at the start


class Planned(NamedTuple):
    """Planned run of an experiment."""

    experiment: str
    name: str  # name of the run and of its piece
    work: Callable[[], Course]


def planned(cfg: Config) -> list[Planned]:
    """Return all runs of the experiments, in order."""
    makers = {"edge": _edge, "adam": _adam, "warmup": _warmup, "spikes": _spikes, "grokking": _grokking}
    return [run for experiment in dict.fromkeys(cfg.experiments) for run in makers[experiment](cfg)]


def start_sharpness(problem: Problem, seed: int) -> float:
    """λ_max of the Hessian before training, which sets the learning rates."""
    found = eigsh(Hessian(problem), 1, which="LA", tol=ACCURACY, vectors=False, seed=seed)
    if not found.values[0] > 0:
        raise CurvescopeError(
            f"expected positive curvature, which sets the learning rate; {problem.model.name!r} has "
            f"λ_max = {found.values[0]:.3g}"
        )
    return float(found.values[0])


def seeds_of(cfg: Config, times: int = 1) -> range:
    """Seeds of the small model; a model given by name has one."""
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
        for seed in seeds_of(cfg, EXPERIMENT_TWICE)
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
