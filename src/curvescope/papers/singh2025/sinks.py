"""Statements of the slides about attention sinks, checked by the study `sinks` on several kinds of models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from curvescope.core.config import setting
from curvescope.core.number_format import plural
from curvescope.core.progress import Progress
from curvescope.data.tasks.random_sequences import markov
from curvescope.models.load import load
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.papers.common import OURS, FigureConfig, Judged, decided
from curvescope.papers.singh2025 import SLIDES
from curvescope.problem import Problem
from curvescope.runs.resumable_loop import State, work_through
from curvescope.runs.study import Study
from curvescope.runs.study_result import FAILS, HOLDS, OPEN, Claim, Line, Shown, Tables
from curvescope.studies import sinks
from curvescope.studies.problem_config import make_problem
from curvescope.studies.sinks import Sinks
from curvescope.studies.sinks.analysis import HOWS, UNCHANGED, Intervention, Quantity, effect
from curvescope.studies.sinks.view import all_ways, draw_text, few_ticks
from curvescope.train import TrainConfig, train
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.sinks import Sinks


COUNTS = ("texts", "tokens", "num_probes", "num_steps")
TRAINED, INITIAL = "bundled, trained", "bundled, initial"
ZOO: dict[str, Any] = {
    "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "n_ctx": 24, "vocab_size": 8, "init": "scaled",
}  # fmt: skip
LENGTH, SEQUENCES, STEPS = 16, 12, 200
FEW = ("bias", "inserted", "activation")
STILL = 0.02  # a factor closer to one than this on every text counts as no change
GROWN = 0.05  # increase of the sink's share of the attention weights that counts as a larger sink
PANELS: dict[Quantity, str] = {"lambda_max": "λ_max", "bulk_width": "bulk width", "stretch": "stretch"}
CAPTION = (
    "λ_max, bulk width and stretch (λ_max over bulk width) against a bias at the first key, as factors, "
    "one color per model ({texts} each; dots are texts with their errors). The bundled model reads its "
    "sample text in float32, small models a Markov chain in float64. Parameters: {sizes}."
)
BESIDE = 1.06  # horizontal shift between models at the same strength


@dataclass(frozen=True)
class Config(FigureConfig):
    """Quick: three texts, five probes, two minutes; full: five, eight, every intervention and model."""

    texts: int = setting(0, "disjoint parts of each model's data; 0: the default of the profile, 3 or 5")
    tokens: int = setting(
        0, "tokens of all texts of the bundled model; 0: the default of the profile, 144 or 960"
    )
    num_probes: int = setting(0, "random vectors on each text; 0: the default of the profile, 5 or 8")
    num_steps: int = setting(0, "Lanczos steps on each text; 0: the default of the profile, 10 or 24")
    threshold: float = setting(
        0.2, "threshold τ of outliers, relative to the largest |λ| of the unchanged model on a text"
    )
    seed: int = setting(0, "seed of the texts and of all probes")

    def of_study(self, case: SinkCase) -> sinks.Config:
        """Return the settings for a model: the given ones, else those of the profile."""
        own = case.config(full=self.profile == "full", device=self.device)
        given = {name: getattr(self, name) for name in COUNTS if getattr(self, name)}
        return replace(own, **given, threshold=self.threshold, seed=self.seed)

    def __post_init__(self) -> None:
        super().__post_init__()
        for case in CASES.values():
            self.of_study(case)  # raises the errors of the study


@dataclass(frozen=True)
class SinkCases(Shown):
    """Results of the study for every kind of model."""

    cases: dict[str, Sinks]

    def summary(self) -> list[Line]:
        """Effect of the largest bias on every model."""
        lines = []
        for name, one in self.cases.items():
            way = last(one, "bias")
            top, bulk = (effect(one, way.name, quantity) for quantity in ("lambda_max", "bulk_width"))
            words = f"λ_max at bias {way.strength:g}, bulk width × {bulk.mean:.2f}; attention on the sink "
            words += f"{one.moved[UNCHANGED].mass.mean():.2f} → {one.moved[way.name].mass.mean():.2f}"
            lines.append((name, f"× {top.mean:.2f}", words))
        return lines

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        first = next(iter(self.cases.values()))
        own = first.captions()
        sizes = ", ".join(f"{name}: {one.num_parameters:,}" for name, one in self.cases.items())
        texts = plural(len(first.moved[UNCHANGED].loss), "text")
        return {name: own[name] for name in self.tables()} | {
            "bias": CAPTION.format(texts=texts, sizes=sizes),
            "spectra": f"{own['spectra']} Bundled model, trained.",
        }

    def tables(self) -> Tables:
        """The study's tables, with the rows of all models."""

        tables: dict[str, list[pd.DataFrame]] = {}
        for name, one in self.cases.items():
            for table, frame in one.tables().items():
                frame.insert(0, "case", name)
                tables.setdefault(table, []).append(frame)
        return tables

    def figures(self) -> dict[str, Figure]:
        """Effect of the bias on every model, and of all interventions on the trained model."""
        return {"bias": _bias(self), "spectra": self.cases[TRAINED].figures()["spectra"]}

    def claims(self) -> list[Claim]:
        """Statements of the slides for every model, and our own for the trained model."""
        by_case = [
            Claim(f"{said} ({name})", expected, *measure(one), *SLIDES)
            for name, one in self.cases.items()
            for said, expected, measure in OF_EVERY_MODEL
        ]
        makes = Claim("training makes the bundled model's sink", "makes", *_trained_sink(self), *OURS)
        trained = self.cases[TRAINED]
        ours = [Claim(said, expected, *measure(trained), *OURS) for said, expected, measure in OF_THE_TRAINED]
        return [*by_case, makes, *ours]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> SinkCases:
    """Measure all models."""
    settings = {name: cfg.of_study(case) for name, case in CASES.items()}
    sweeps = {
        name: sinks.prepare(case.problem(settings[name]), settings[name], []) for name, case in CASES.items()
    }
    pieces = [piece for name, sweep in sweeps.items() for piece in sweep.pieces(f"{name}.")]
    found = work_through(pieces, progress=progress, state=state)
    return SinkCases(cases={name: sweep.result(found, f"{name}.") for name, sweep in sweeps.items()})


class SinkCase(NamedTuple):
    """A model: a checkpoint of the bundled model, or a small Transformer on a Markov chain."""

    revision: str | None = None
    zoo: dict[str, Any] | None = None
    steps: int = 0
    everything: bool = False  # all interventions at all strengths, and blocks

    def config(self, *, full: bool, device: str) -> sinks.Config:
        """Return the settings of the study `sinks`."""
        hows = tuple(HOWS) if full or self.everything else FEW
        biases = (1.0, 2.0, 4.0, 8.0) if full or self.everything else (2.0, 8.0)
        settings: dict[str, Any] = {"hows": hows, "biases": biases, "strengths": (4.0,), "gates": (0.9,)}
        settings |= {"block_steps": 8 if full or self.everything else 0}
        if full:
            settings |= {"strengths": (1.0, 2.0, 4.0), "gates": (0.5, 0.9), "num_probes": 8, "num_steps": 24}
            settings |= {"ggn_steps": 16, "tokens": 960 if self.zoo is None else 192, "texts": 5}
        return sinks.Config(revision=self.revision, device=device, **settings)

    def problem(self, cfg: sinks.Config) -> Problem:
        """Return the model on its data; a small model in float64."""
        if self.zoo is None:
            return make_problem(cfg)
        model = load(Transformer(TransformerConfig(**{**ZOO, **self.zoo})).double(), device=cfg.device)
        data = markov(num_sequences=SEQUENCES, length=LENGTH, vocab=ZOO["vocab_size"], seed=0)
        if self.steps:
            with torch.random.fork_rng(devices=[]):
                model, _, _ = train(model, data, TrainConfig(steps=self.steps, lr=3e-3, warmup=10))
        return Problem(model, data)


CASES = {
    TRAINED: SinkCase(everything=True),
    INITIAL: SinkCase(revision="initial"),
    "small, norms, trained": SinkCase(zoo={"norm": "pre"}, steps=STEPS),
    "small, no norms, trained": SinkCase(zoo={"norm": "none"}, steps=STEPS),
    "small, no norms, initial": SinkCase(zoo={"norm": "none"}),
}
"""By condition."""


def last(result: Sinks, how: str) -> Intervention:
    """Return an intervention at its largest strength."""
    return next(way for way in reversed(result.ways) if way.how == how)


def times(result: Sinks, way: Intervention, *quantities: Quantity) -> str:
    """Format factors at a strength, such as `λ_max × 1.25 (1.10 to 1.42)`."""
    labels = {"lambda_max": "λ_max", "bulk_width": "bulk width", "ggn_lambda_max": "λ_max of the GGN"}
    found = [(labels.get(q, q), effect(result, way.name, q)) for q in quantities]
    factors = [f"{label} × {e.mean:.3g} ({e.texts.min():.3g} to {e.texts.max():.3g})" for label, e in found]
    return f"{way.how} {way.strength:g}: {', '.join(factors)}"


def by_direction(direction: int, wanted: int) -> str:
    """The claim holds if the change has the wanted sign, and fails if it has the opposite sign."""
    return decided(right=direction == wanted, wrong=direction == -wanted)


def _activations(one: Sinks) -> Judged:
    way = last(one, "activation")
    quantities: tuple[Quantity, ...] = ("lambda_max", "bulk_width", "outliers")
    effects = [effect(one, way.name, quantity) for quantity in quantities]
    still = all(np.abs(np.log(e.texts)).max() < STILL for e in effects)
    moved = any(e.direction and np.abs(np.log(e.texts)).min() >= STILL for e in effects)
    return times(one, way, *quantities), decided(right=moved, wrong=still)


def _shrinks(one: Sinks) -> Judged:
    way = last(one, "bias")
    return times(one, way, "bulk_width"), by_direction(effect(one, way.name, "bulk_width").direction, -1)


def _grows(one: Sinks) -> Judged:
    """Check the largest bias; the measured text also lists smaller ones."""
    way = last(one, "bias")
    others = [w for w in one.ways if w.how == "bias" and w != way]
    path = ", ".join(f"{effect(one, w.name, 'lambda_max').mean:.3g} at {w.strength:g}" for w in others)
    measured = times(one, way, "lambda_max", "outliers") + (f"; λ_max × {path}" if path else "")
    return measured, by_direction(effect(one, way.name, "lambda_max").direction, 1)


def _stretches(one: Sinks) -> Judged:
    """Check λ_max over the bulk width for every intervention that makes the sink larger."""
    larger = [last(one, how) for how in dict.fromkeys(one.hows) if _rise(one, last(one, how)) > GROWN]
    if not larger:
        return "no intervention made the sink larger", OPEN
    directions = {effect(one, way.name, "stretch").direction for way in larger}
    measured = "; ".join(times(one, way, "stretch") for way in larger)
    return measured, decided(right=directions == {1}, wrong=directions == {-1})


def _rise(one: Sinks, way: Intervention) -> float:
    """Increase of the sink's share of the attention weights, mean over texts."""
    return float((one.moved[way.name].mass - one.moved[UNCHANGED].mass).mean())


def _trained_sink(result: SinkCases) -> Judged:
    before, after = (result.cases[name].heads.mass for name in (INITIAL, TRAINED))
    measured = (
        f"mean weight on the first token {before.mean():.3f} at initialization, {after.mean():.3f} trained; "
    )
    measured += f"in its largest head {before.max():.3f} and {after.max():.3f}"
    grown = after.mean() > before.mean() and after.max() > 2 * before.max()
    return measured, HOLDS if grown else FAILS


def _all_alike(one: Sinks) -> Judged:
    found = {how: effect(one, last(one, how).name, "lambda_max") for how in dict.fromkeys(one.hows)}
    signs = {e.direction for e in found.values()}
    measured = ", ".join(f"{how} × {e.mean:.3g}" for how, e in found.items())
    return measured, decided(right=signs in ({1}, {-1}), wrong={1, -1} <= signs)


def _ggn_follows(one: Sinks) -> Judged:
    hows = list(dict.fromkeys(one.hows))
    pairs = [
        [effect(one, last(one, how).name, q).direction for q in ("lambda_max", "ggn_lambda_max")]
        for how in hows
    ]
    each = "; ".join(times(one, last(one, how), "lambda_max", "ggn_lambda_max") for how in hows)
    sure = [(a, b) for a, b in pairs if a or b]
    wrong = any(a * b == -1 for a, b in sure)
    measured = (
        f"same direction in {sum(a == b for a, b in sure)} of {len(sure)} interventions that change one "
    )
    measured += f"surely; {each}"
    right = bool(sure) and not wrong and all(a == b for a, b in sure)
    return measured, decided(right=right, wrong=wrong)


def _queries_and_keys(one: Sinks) -> Judged:
    """Compare λ_max of these blocks; an eigenvalue lies within its error."""
    group, way = "queries, keys", last(one, "bias")
    before, after = one.blocks[UNCHANGED], one.blocks[way.name]
    i = before.names.index(group)
    low, high = (side * b.errors[i] for side, b in ((-1, before), (1, after)))
    measured = f"λ_max of these blocks {before.values[i]:.3g} → {after.values[i]:.3g}"
    measured += f" at bias {way.strength:g}"
    less = after.values[i] + high < before.values[i] + low
    more = after.values[i] - high > before.values[i] - low
    return measured, decided(right=less, wrong=more)


def _beyond_noise(one: Sinks) -> Judged:
    """Compare the change of the bulk on each text with its error, which includes the noise of the probes."""
    found = effect(one, last(one, "bias").name, "bulk_width")
    ratios = np.abs(np.log(found.texts)) / np.maximum(found.errors, np.finfo(float).tiny)
    measured = (
        f"change of the bulk relative to its error, for each text: {', '.join(f'{r:.2g}' for r in ratios)}"
    )
    return measured, HOLDS if ratios.min() > 1 else FAILS


def _no_sink_needed(one: Sinks) -> Judged:
    """Check interventions without a sink token: softmax one and gates remove attention weight."""
    hows = [how for how in ("softmax_one", "gated") if how in one.hows]
    directions = [effect(one, last(one, how).name, "bulk_width").direction for how in hows]
    measured = "; ".join(times(one, last(one, how), "bulk_width") for how in hows)
    right, wrong = (all(direction == side for direction in directions) for side in (-1, 1))
    return measured, decided(right=right, wrong=wrong)


OF_EVERY_MODEL = (
    ("outlier activations change the spectrum", "changes", _activations),
    ("a larger bias at the first token shrinks the bulk", "shrinks", _shrinks),
    ("a larger bias at the first token grows the outliers", "grows", _grows),
    ("larger sinks stretch the spectrum", "stretch", _stretches),
)
"""Claim, expected value, and function that returns measured value and verdict."""
OF_THE_TRAINED = (
    ("all interventions change λ_max in the same direction", "same direction", _all_alike),
    ("the GGN's λ_max changes in the same direction as the Hessian's", "same direction", _ggn_follows),
    ("a saturated sink reduces the curvature of queries and keys", "less", _queries_and_keys),
    ("paired probes distinguish the bulk's change under a bias from noise", "above 1", _beyond_noise),
    (
        "attention weight without a target token also shrinks the bulk (softmax one, gates)",
        "shrinks",
        _no_sink_needed,
    ),
)


def _bias(result: SinkCases) -> Figure:
    figure, axes = style.subplots(1, len(PANELS), figsize=(12, 3.7))
    for ax, (quantity, title) in zip(axes, PANELS.items(), strict=True):
        for i in range(len(result.cases)):
            _follow(ax, result, i, quantity)
        ax.axhline(1, color="0.5", lw=0.6)
        ax.set_xscale("symlog", linthresh=1)
        ax.set_yscale("log")
        ax.set_xticks([0, 1, 2, 4, 8], ["0", "1", "2", "4", "8"])
        ax.set(xlim=(-0.2, 11), xlabel="bias at the first key", title=f"{title}, times")
        few_ticks(ax)
    axes[0].legend()
    return figure


def _follow(ax: Axes, result: SinkCases, i: int, quantity: Quantity) -> None:
    name, one = list(result.cases.items())[i]
    ways = [way for way in all_ways(one) if way.how == "bias"]
    x = np.array([way.strength for way in ways])
    beside = x * BESIDE ** (i - (len(result.cases) - 1) / 2)
    found = [effect(one, way.name, quantity) for way in ways]
    color = PALETTE[i % len(PALETTE)]
    ax.plot(x, [e.mean for e in found], "-", lw=1.3, color=color, label=name)
    for t in range(len(found[0].texts)):
        draw_text(ax, beside, found, t, color=color, alpha=0.5)


STUDY = Study(Config, run)
