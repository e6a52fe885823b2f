"""Propagation of curvature across depth, norm placement, width and training, and with components switched
off.

Every number comes from second derivatives: the exact split of `operators.sources`, Lanczos for eigenvalues,
and all eigenvalues of a dense Hessian if a component is switched off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from curvescope.core.config import setting
from curvescope.core.number_format import plural
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.data.tasks.random_sequences import markov
from curvescope.models.load import load
from curvescope.models.zoo import REVISIONS
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.operators import Hessian
from curvescope.papers.common import FigureConfig, Judged, decided
from curvescope.problem import Problem
from curvescope.runs.resumable_loop import FinishedPieces, Piece, State, work_through
from curvescope.runs.study import Study
from curvescope.runs.study_result import FAILS, HOLDS, OPEN, Claim, Line, Origin, Shown, Tables
from curvescope.studies import propagation
from curvescope.studies.common.statistics import Interval, above, exponent_interval, mean_interval
from curvescope.studies.problem_config import make_problem
from curvescope.studies.propagation import Propagation
from curvescope.studies.propagation.study import HESSIAN, OUTER, SourceEstimate
from curvescope.train import TrainConfig, train
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


VOCAB, LENGTH, SEQUENCES = 8, 16, 8
BASE = {
    "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "n_ctx": LENGTH, "vocab_size": VOCAB,
    "init": "scaled",
}  # fmt: skip
SMALL = BASE | {"n_layers": 1, "d_model": 8, "d_ff": 16}
NORMS = ("pre", "post", "none")
WIDTHS = (8, 16, 32)
SIGMAS = (1.0, 0.3, 0.1, 0.03, 0.01)
COMPONENTS: dict[str, dict[str, Any]] = {
    "everything": {},
    "no residual": {"residual": False},
    "no norm": {"norm": "none"},
    "no feed-forward": {"d_ff": 0},
    "one head": {"n_heads": 1},
}
ZERO = 1e-12  # relative to the largest: smaller eigenvalues and blocks are rounding errors
ARTICLE: Origin = ("article", "article")
OURS: Origin = ("ours, on a part that the article's table names", "ours")
ROUNDING = 1e-12
SWITCHED = {
    "no residual": "residual connections lower the largest eigenvalue",
    "no norm": "normalization lowers the largest eigenvalue",
    "no feed-forward": "the feed-forward network raises the largest eigenvalue",
    "one head": "several heads lower the largest eigenvalue",
}
"""Claimed effect of each component, by the name of the variant without it. The article's table names
components; the sentences are ours.
"""
CAPTIONS = {
    "depth": "‖H‖ and λ_max at initialization against the number of layers, by norm placement ({seeds}; "
    "bars are 95 % intervals over probes), and the shares of ‖H‖² by kind of source, means over seeds.",
    "sigma": "Frobenius norm of the first norm's own source against the scale of its input: the second "
    "derivative of a norm grows as 1/σ².",
    "components": "Largest eigenvalue, condition and trace of the full Hessian with components switched "
    "off, at initialization and after {steps} steps ({seeds}, all eigenvalues exact). Condition: λ_max "
    "over the smallest eigenvalue that is positive beyond rounding. negative: share of negative "
    "eigenvalues.",
    "training": "The bundled model at its checkpoints {checkpoints}: Frobenius norms of its sources, added "
    "up by kind, and extreme eigenvalues.",
    "models": "One row per model: norm, trace and extreme eigenvalues of the Hessian, share of the GGN, and "
    "the strongest source.",
}
KINDS = ("ln1", "attention", "ln2", "ffn", "ln_f", "rest")


class Variant(NamedTuple):
    """A model to measure: its settings, its seed, and its number of training steps."""

    settings: dict[str, Any]
    seed: int
    steps: int = 0

    def problem(self) -> Problem:
        """Return the model in float64 on Markov chains of its own seed."""
        module = Transformer(TransformerConfig(**{**BASE, **self.settings, "seed": self.seed}))
        model = load(module.double())
        data = markov(num_sequences=SEQUENCES, length=LENGTH, vocab=VOCAB, seed=self.seed)
        if self.steps:
            cfg = TrainConfig(steps=self.steps, lr=3e-3, warmup=10)
            with torch.random.fork_rng(devices=[]):
                model, _, _ = train(model, data, cfg)
        return Problem(model, data)


def by_depth(depths: tuple[int, ...], seeds: int) -> dict[str, Variant]:
    """Depth × norm placement × seeds."""
    return {
        f"depth.{norm}.{layers}.{seed}": Variant({"norm": norm, "n_layers": layers}, seed)
        for norm in NORMS
        for layers in depths
        for seed in range(seeds)
    }


def by_width(seeds: int) -> dict[str, Variant]:
    """Width × seeds, pre-norm."""
    return {
        f"width.{width}.{seed}": Variant({"d_model": width, "d_ff": 2 * width}, seed)
        for width in WIDTHS
        for seed in range(seeds)
    }


def by_sigma(seeds: int) -> dict[str, Variant]:
    """Scale of the first norm's input: embeddings only, with ε = 0."""
    return {
        f"sigma.{sigma:g}.{seed}": Variant(
            {"n_layers": 1, "embed_std": sigma, "positions": "none", "norm_eps": 1e-20}, seed
        )
        for sigma in SIGMAS
        for seed in range(seeds)
    }


def by_component(steps: int, seeds: int) -> dict[str, Variant]:
    """Variants with and without each component, initial and trained; small enough for a dense Hessian."""
    return {
        f"component.{name}.{trained}.{seed}": Variant({**SMALL, **settings}, seed, trained)
        for name, settings in COMPONENTS.items()
        for trained in (0, steps)
        for seed in range(seeds)
    }


@dataclass(frozen=True)
class Config(FigureConfig):
    """Number of models. Quick: depths up to 8 and 2 seeds, about two minutes; full: up to 24 and 5 seeds."""

    seeds: int | None = setting(None, "models of each kind; 2 in the profile quick, 5 in full")
    steps: int = setting(200, "training steps of the models with components switched off")
    tokens: int = setting(128, "tokens of text for the bundled model's checkpoints")

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of layers."""
        return (1, 2, 4, 8) if self.profile == "quick" else (1, 2, 4, 8, 16, 24)

    @property
    def count(self) -> int:
        """Number of seeds of each kind."""
        return self.seeds or (2 if self.profile == "quick" else 5)


@dataclass(frozen=True)
class DenseSpectrum(Result):
    """Eigenvalues of a dense Hessian, and the norms of its blocks."""

    values: np.ndarray  # (n,) ascending
    names: list[str]  # of B blocks
    norms: np.ndarray  # (B, B)
    loss: float

    @property
    def condition(self) -> float:
        """λ_max over the smallest eigenvalue that is positive beyond rounding."""
        top = float(self.values[-1])
        return top / float(self.values[self.values > ZERO * top].min())


@dataclass(frozen=True)
class PropagationSweeps(Shown):
    """All models, by the quantity that was varied."""

    seeds: int
    depths: list[int]
    steps: int
    measured: dict[str, Propagation]  # by depth, width and σ, and for the bundled checkpoints
    spectra: dict[str, DenseSpectrum]  # with and without components

    def summary(self) -> list[Line]:
        """Growth of ‖H‖ with depth, and the effect of the strongest component."""
        lines = []
        for norm in ("pre", "post", "none"):
            value, low, high = exponent(self, norm)
            words = f"‖H‖ ∝ depth^p at initialization, norms {norm}; 95 % interval {low:.2f} to {high:.2f}"
            lines.append((f"growth with depth, {norm}", f"{value:.2f}", words))
        for name in list(COMPONENTS)[1:]:
            ratio, low, high = with_and_without(self, name, self.steps)
            words = f"times: λ_max with {name} relative to the full model, trained"
            words += f"; seeds {low:.2g} to {high:.2g}"
            lines.append((f"λ_max, {name}", f"{ratio:.3g}", words))
        return lines

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        own = {
            "seeds": plural(self.seeds, "seed"), "steps": self.steps, "checkpoints": ", ".join(REVISIONS),
        }  # fmt: skip
        return {name: text.format(**own) for name, text in CAPTIONS.items()}

    def tables(self) -> Tables:
        """One row per model, and one per component with geometric means over seeds."""
        models = [{"model": name, **_numbers(one)} for name, one in self.measured.items()]
        components = [
            _component_row(name, steps, spectra(self, name, steps))
            for name in COMPONENTS
            for steps in (0, self.steps)
        ]
        return {"models": models, "components": components}

    def figures(self) -> dict[str, Figure]:
        """Figures of depth, the scale of a norm, components and training."""
        return {
            "depth": _depth(self),
            "sigma": _sigma(self),
            "components": _components(self),
            "training": _training(self),
        }

    def claims(self) -> list[Claim]:
        """Statements of the paper and the article around it, with measured values."""
        whole = [s for name, s in self.spectra.items() if name.startswith("component.everything.")]
        grows = "the norm of the Hessian grows with depth, norms"
        return [
            Claim("the Hessian of a block has many zero blocks", "many", *_zero_blocks(whole), *ARTICLE),
            Claim("diagonal blocks dominate", "dominance", *_dominance(whole), *ARTICLE),
            Claim("LayerNorm keeps curvature bounded", "bounded", *_bounded(self), *ARTICLE),
            *(Claim(f"{grows} {norm}", "grows", *_grows(self, norm), *ARTICLE) for norm in NORMS),
            Claim("pre-norm has less curvature than post-norm", "use pre-norm", *_pre_norm(self), *ARTICLE),
            *(Claim(claim, "named in a table", *_component(self, name, lowers="lower" in claim), *OURS)
              for name, claim in SWITCHED.items()),
            Claim("the Hessian is the GGN and a sum over sources", "exact", *_adds_up(self), "Theorems 3–5"),
        ]  # fmt: skip


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> PropagationSweeps:
    """Measure all models."""
    models = by_depth(cfg.depths, cfg.count) | by_width(cfg.count) | by_sigma(cfg.count)
    written = by_component(cfg.steps, cfg.count)
    pieces = [
        Piece(name, partial(_measure, variant, ends=not name.startswith("sigma.")))
        for name, variant in models.items()
    ]
    pieces += [Piece(name, partial(_write_out, variant)) for name, variant in written.items()]
    pieces += [Piece(f"training.{name}", partial(_checkpoint, name, cfg)) for name in REVISIONS]
    found = work_through(pieces, progress=progress, state=state)
    return _result(cfg, found, [*models, *(f"training.{name}" for name in REVISIONS)], list(written))


def _measure(variant: Variant, *, ends: bool = True) -> Propagation:
    """Measure the shares of all sources and, if requested, the extreme eigenvalues of H and the GGN."""
    cfg = propagation.Config(
        num_probes=6, num_steps=12, eigenvalues=("H", "GGN") if ends else (), num_map_probes=0, max_exact=0,
        seed=variant.seed,
    )  # fmt: skip
    return propagation.measure(variant.problem(), cfg, [])


def _checkpoint(revision: str, cfg: Config) -> Propagation:
    settings = propagation.Config(
        model="tiny-gpt", revision=revision, tokens=cfg.tokens, num_probes=4, num_steps=10,
        eigenvalues=("H", "GGN"), num_map_probes=0, device=cfg.device,
    )  # fmt: skip
    return propagation.measure(make_problem(settings), settings, [])


def _write_out(variant: Variant) -> DenseSpectrum:
    problem = variant.problem()
    H = Hessian(problem).in_blocks().to_dense().double().cpu().numpy()
    where = problem.space().in_blocks().slices
    norms = np.array([[np.linalg.norm(H[r, c]) for c in where.values()] for r in where.values()])
    return DenseSpectrum(np.linalg.eigvalsh((H + H.T) / 2), list(where), norms, problem.loss_value())


def _result(cfg: Config, found: FinishedPieces, measured: list[str], written: list[str]) -> PropagationSweeps:
    return PropagationSweeps(
        seeds=cfg.count,
        depths=list(cfg.depths),
        steps=cfg.steps,
        measured={name: found.take(Propagation, name) for name in measured},
        spectra={name: found.take(DenseSpectrum, name) for name in written},
    )


def exponent(result: PropagationSweeps, norm: str) -> Interval:
    """Exponent p of ‖H‖ ∝ depth^p: mean and 95 % interval over seeds."""
    return _exponent(result, {d: f"depth.{norm}.{d}" for d in result.depths}, HESSIAN)


def sigma_slope(result: PropagationSweeps) -> Interval:
    """Exponent p of ‖source of the first norm‖ ∝ σ^p."""
    return _exponent(result, {s: f"sigma.{s:g}" for s in SIGMAS}, "L0.ln1")


def _exponent(result: PropagationSweeps, models: Mapping[float, str], source: str) -> Interval:
    """Exponent p of ‖source‖ ∝ x^p over models that are named by x, with an interval over seeds."""
    curves = [
        [result.measured[f"{name}.{seed}"].shares.norm(source).value for name in models.values()]
        for seed in range(result.seeds)
    ]
    return exponent_interval(np.array(list(models)), np.array(curves))


def with_and_without(result: PropagationSweeps, name: str, steps: int) -> tuple[float, float, float]:
    """λ_max with a component switched off over that of the full model: geometric mean, smallest, largest."""
    pairs = zip(spectra(result, name, steps), spectra(result, "everything", steps), strict=True)
    ratios = np.array([float(off.values[-1] / on.values[-1]) for off, on in pairs])
    return float(np.exp(np.log(ratios).mean())), float(ratios.min()), float(ratios.max())


def spectra(result: PropagationSweeps, name: str, steps: int) -> list[DenseSpectrum]:
    """Spectra of the variant `name` after a number of steps, one per seed."""
    return [result.spectra[f"component.{name}.{steps}.{seed}"] for seed in range(result.seeds)]


def _numbers(one: Propagation) -> dict[str, Any]:
    norm, trace, share = one.shares.norm(HESSIAN), one.shares.trace(HESSIAN), one.shares.share(OUTER)
    top, error, low, low_error = one.ends_of(HESSIAN)
    strongest = max(one.sources, key=lambda name: one.shares.norm(name).value)
    return {
        "parameters": one.num_parameters, "loss": one.loss, "frobenius": norm.value,
        "frobenius_stderr": norm.stderr, "trace": trace.value, "trace_stderr": trace.stderr,
        "lambda_max": top, "lambda_max_error": error, "lambda_min": low, "lambda_min_error": low_error,
        "share_ggn": share.value, "share_ggn_stderr": share.stderr, "strongest_source": strongest,
        "strongest_norm": one.shares.norm(strongest).value, "adds_up_to": one.shares.residual,
    }  # fmt: skip


def _component_row(name: str, steps: int, spectra: list[DenseSpectrum]) -> dict[str, Any]:
    tops = np.array([s.values[-1] for s in spectra])
    return {
        "component": name,
        "trained_steps": steps,
        "lambda_max": math.exp(np.log(tops).mean()),
        "lambda_max_least": tops.min(),
        "lambda_max_largest": tops.max(),
        "lambda_min": float(np.mean([s.values[0] for s in spectra])),
        "trace": float(np.mean([s.values.sum() for s in spectra])),
        "condition": math.exp(np.mean([math.log(s.condition) for s in spectra])),
        "negative": float(np.mean([(s.values < -1e-12 * s.values[-1]).mean() for s in spectra])),
        "loss": float(np.mean([s.loss for s in spectra])),
    }


def _zero_blocks(spectra: list[DenseSpectrum]) -> Judged:
    """Count pairs of blocks without a second derivative; the loss does not depend on key biases at all."""
    zero, keys, pairs = 0, 0, 0
    for s in spectra:
        empty = s.norms <= ROUNDING * s.norms.max()
        key = np.array([name.endswith(".b_K") for name in s.names])
        with_key = key[:, None] | key[None, :]
        zero, keys, pairs = zero + int(empty.sum()), keys + int((empty & with_key).sum()), pairs + empty.size
    measured = (
        f"{zero} of {pairs} pairs of blocks are zero, {keys} of them with a key bias, which does not "
        "affect any output"
    )
    return measured, HOLDS if zero - keys > 0.1 * pairs else FAILS


def _dominance(spectra: list[DenseSpectrum]) -> Judged:
    share = mean_interval(np.array([(np.diag(s.norms) ** 2).sum() / (s.norms**2).sum() for s in spectra]))
    mean, low, high = (100 * end for end in share)
    return f"diagonal blocks hold {mean:.0f} % of ‖H‖² ({low:.0f} to {high:.0f})", above(share, 0.5)


def _bounded(result: PropagationSweeps) -> Judged:
    mean, low, high = sigma_slope(result)
    measured = f"the norm's own source grows as σ^{mean:.2f} ({low:.2f} to {high:.2f}); theory: −2"
    return measured, FAILS if high < -0.5 else HOLDS if low > -0.1 else OPEN


def _grows(result: PropagationSweeps, norm: str) -> Judged:
    mean, low, high = found = exponent(result, norm)
    return f"‖H‖ ∝ depth^{mean:.2f} ({low:.2f} to {high:.2f}) at initialization", above(found)


def _pre_norm(result: PropagationSweeps) -> Judged:
    pre, post = (
        np.array([
            result.measured[f"depth.{norm}.{d}.{seed}"].ends_of(HESSIAN)[0]
            for d in result.depths
            for seed in range(result.seeds)
        ])
        for norm in ("pre", "post")
    )  # fmt: skip
    least, most = (pre / post).min(), (pre / post).max()
    measured = f"λ_max of pre-norm relative to post-norm: {least:.2g} to {most:.2g} at depths {result.depths}"
    return measured, decided(right=most < 1, wrong=least > 1)


def _component(result: PropagationSweeps, name: str, *, lowers: bool) -> Judged:
    """Check that switching a component off changes λ_max in the claimed direction, for every seed."""
    found = {steps: with_and_without(result, name, steps) for steps in (0, result.steps)}
    measured = "; ".join(
        f"λ_max × {mean:.2g} ({low:.2g} to {high:.2g}) with {name}, "
        f"{'trained' if steps else 'at initialization'}"
        for steps, (mean, low, high) in found.items()
    )
    grown, shrunk = (
        all(low > 1 for _, low, _ in found.values()),
        all(high < 1 for *_, high in found.values()),
    )
    return measured, decided(right=grown if lowers else shrunk, wrong=shrunk if lowers else grown)


def _adds_up(result: PropagationSweeps) -> Judged:
    of_bundled = {name: name.startswith("training.") for name in result.measured}
    zoo, trained = (
        max(one.shares.residual for name, one in result.measured.items() if of_bundled[name] == bundled)
        for bundled in (False, True)
    )
    measured = f"relative error {zoo:.0e} in float64, {trained:.0e} for the bundled model in float32"
    return measured, HOLDS if zoo < 1e-10 and trained < 1e-5 else FAILS


def _depth(result: PropagationSweeps) -> Figure:
    figure, axes = style.subplots(1, 3, figsize=(13, 3.9))
    for i, norm in enumerate(NORMS):
        for seed in range(result.seeds):
            models = [result.measured[f"depth.{norm}.{d}.{seed}"] for d in result.depths]
            sizes = [m.shares.norm(HESSIAN) for m in models]
            look = {"fmt": "-o", "ms": 3.5, "lw": 1, "color": PALETTE[i]}
            label = f"norms {norm}" if norm != "none" else "no norms"
            values = np.array([s.value for s in sizes])
            errors = style.error_bars(values, [s.low for s in sizes], [s.high for s in sizes])
            axes[0].errorbar(result.depths, values, yerr=errors, label=label if not seed else None, **look)
            ends = np.array([m.ends_of(HESSIAN) for m in models])
            axes[1].errorbar(result.depths, ends[:, 0], yerr=ends[:, 1], **look)
    for ax, title in zip(axes, ("‖H‖", "λ_max", ""), strict=True):
        ax.set(xscale="log", yscale="log")
        ax.grid(visible=True)
        ax.set_xscale("log", base=2)
        ax.set_xticks(result.depths, [str(d) for d in result.depths])
        ax.set(xlabel="layers", title=title)
    axes[0].legend()
    _kinds_over_depth(axes[2], result)
    return figure


def _kinds_over_depth(ax: Axes, result: PropagationSweeps) -> None:
    """Shares of ‖H‖² by kind of source, pre-norm, mean over seeds."""
    ax.set_yscale("linear")
    for i, kind in enumerate((OUTER, *KINDS)):
        found = [
            [_share(result.measured[f"depth.pre.{d}.{seed}"], kind) for seed in range(result.seeds)]
            for d in result.depths
        ]
        shares = [np.mean([n.value for n in some]) for some in found]
        halves = [np.sqrt(np.mean([((n.high - n.low) / 2) ** 2 for n in some]) / len(some)) for some in found]
        color = "0.3" if kind == OUTER else PALETTE[(i - 1) % len(PALETTE)]
        look = {"ms": 3.5, "lw": 1, "color": color, "label": kind}
        ax.errorbar(result.depths, shares, yerr=np.nan_to_num(halves), fmt="--o" if i > 5 else "-o", **look)
    ax.axhline(0, color="0.6", lw=0.6)
    ax.set_title("shares of ‖H‖², pre-norm (sum 1)")
    ax.legend(ncols=2)


def _share(one: Propagation, kind: str) -> SourceEstimate:
    """Share of all sources of a kind."""
    names = [name for name in one.shares.names if name == kind or name.rpartition(".")[2] == kind]
    return one.shares.share(*names)


def _sigma(result: PropagationSweeps) -> Figure:
    figure, ax = style.subplots(figsize=(5, 3.6))
    for seed in range(result.seeds):
        sizes = [result.measured[f"sigma.{s:g}.{seed}"].shares.norm("L0.ln1").value for s in SIGMAS]
        ax.plot(SIGMAS, sizes, "o", ms=4, color=PALETTE[0], label="source L0.ln1" if not seed else None)
    first = result.measured[f"sigma.{SIGMAS[0]:g}.0"].shares.norm("L0.ln1").value
    ax.plot(SIGMAS, [first / s**2 for s in SIGMAS], lw=1, color="0.5", label="1/σ²")
    ax.set(xscale="log", yscale="log")
    ax.grid(visible=True)
    ax.set(xlabel="standard deviation σ of the embeddings", ylabel="Frobenius norm")
    ax.legend()
    return figure


def _components(result: PropagationSweeps) -> Figure:
    table = result.tables()["components"]
    figure, axes = style.subplots(1, 3, figsize=(12, 3.4), sharey=True)
    y = np.arange(len(COMPONENTS))[::-1]
    for ax, (column, title) in zip(
        axes, {"lambda_max": "λ_max", "condition": "condition", "trace": "trace"}.items(), strict=True
    ):
        for i, steps in enumerate((0, result.steps)):
            rows = table[table["trained_steps"] == steps]
            label = f"after {steps} steps" if steps else "at initialization"
            ax.plot(rows[column], y + 0.12 - 0.24 * i, "o", ms=5, color=PALETTE[i], label=label)
        ax.set(xscale="log" if min(table[column]) > 0 else "symlog", title=title)
        ax.grid(visible=True)
    axes[0].set_yticks(y, list(COMPONENTS))
    axes[0].legend()
    return figure


def _training(result: PropagationSweeps) -> Figure:
    figure, axes = style.subplots(1, 2, figsize=(10, 3.6))
    models = [result.measured[f"training.{name}"] for name in REVISIONS]
    x = np.arange(len(REVISIONS))
    for i, kind in enumerate(KINDS):
        sizes = [
            math.sqrt(sum(m.shares.norm(n).value ** 2 for n in m.sources if n.rpartition(".")[2] == kind))
            for m in models
        ]
        look = {"ms": 3.5, "lw": 1, "color": PALETTE[i % len(PALETTE)], "label": kind}
        axes[0].plot(x, sizes, "--o" if i > 4 else "-o", **look)
    for name, dash in ((HESSIAN, "-"), (OUTER, "--")):
        axes[0].plot(x, [m.shares.norm(name).value for m in models], dash, lw=1.2, color="0.4", label=name)
    axes[0].set(yscale="log", title="Frobenius norm, sources of a kind in quadrature")
    axes[0].legend(ncols=2)
    ends = np.array([m.ends_of(HESSIAN) for m in models])
    axes[1].errorbar(x, ends[:, 0], yerr=ends[:, 1], fmt="-o", ms=4, lw=1, color=PALETTE[1], label="λ_max")
    axes[1].errorbar(x, -ends[:, 2], yerr=ends[:, 3], fmt="-o", ms=4, lw=1, color=PALETTE[0], label="−λ_min")
    axes[1].set(yscale="log", title="extreme eigenvalues of H")
    axes[1].legend()
    for ax in axes:
        ax.set_xticks(x, REVISIONS)
        ax.grid(visible=True)
    return figure


STUDY = Study(Config, run)
