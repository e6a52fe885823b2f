"""Extended sweeps: every block and pair of blocks of a zoo Transformer against the scale σ of the embeddings.

The embeddings E and P of the model are multiplied by each scale. Those of a new model have standard deviation
1, so that the scale equals the paper's σ; a trained model has scale 1. If the chosen blocks are small enough
together, the matrices H_o and H_f are formed and all numbers are exact: Frobenius norms of all pairs,
spectral norms and traces of the diagonal blocks. Otherwise norms and traces of the diagonal blocks are
estimated with probes. All computations use float64.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from curvescope.algorithms.blocks.probes import own_probes
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.operators import GGN, FunctionalHessian
from curvescope.papers.common import FigureConfig
from curvescope.papers.ormaniec2025.growth import TITLES
from curvescope.papers.ormaniec2025.growth_exponents import fit
from curvescope.papers.ormaniec2025.growth_sweeps import PARTS
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study import Study
from curvescope.runs.study_result import Claim, Line, Shown, Tables
from curvescope.studies.problem_config import ModelOnData, make_batches
from curvescope.train import TrainConfig, train
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DENSE = 2500  # most rows of a matrix that is formed
SMALL = 0.05  # largest scale in the fit of exponents
MANY = 16  # most blocks for which numbers are written


@dataclass(frozen=True)
class Config(FigureConfig):
    """Model, data, blocks and scales. The defaults take about a minute on a CPU.

    Without `model`, the fields below it define a zoo Transformer on the addition task.
    """

    blocks: tuple[str, ...] = setting(
        ("*",), "glob patterns of blocks, including single heads such as L0.h*.W_Q"
    )
    model: str | None = setting(
        None, "a bundled name, a folder or a TOML file of a zoo Transformer; by default a new one"
    )
    n_layers: int = setting(1, "layers of the new model")
    d_model: int = setting(8, "width of the new model")
    n_heads: int = setting(2, "heads of each layer of the new model")
    norm: Literal["none", "pre", "post"] = setting(
        "none", "position of the normalization layers in the new model"
    )
    attention: Literal["softmax", "linear"] = setting(
        "softmax", "attention weights of the new model: softmax or linear"
    )
    activation: Literal["relu", "gelu", "silu", "identity"] = setting(
        "gelu", "activation of the feed-forward layers"
    )
    steps: int = setting(0, "training steps before the measurement", least=0)
    data: str = setting("task:addition", "a task or, for a model with a tokenizer, a corpus such as sample")
    tokens: int = setting(256, "tokens of a corpus", least=1)
    seq_len: int = setting(32, "tokens per sequence of a corpus", least=1)
    scales: int | None = setting(
        None, "number of scales from 0.01 to 10; by default 7 (quick) or 19 (full)", least=2
    )
    probes: int = setting(8, "random vectors if the blocks are too large for exact matrices", least=1)
    seed: int = setting(0, "seed of weights, data and probes")

    @property
    def sigma(self) -> np.ndarray:
        """The scales."""
        return np.logspace(-2, 1, self.scales or (7 if self.profile == "quick" else 19))


@dataclass(frozen=True)
class ScaleNorms(Result):
    """Norms and traces of the blocks at one scale, with parts in the order of PARTS; NaN if not computed."""

    frobenius: np.ndarray  # (3, b, b)
    stderr: np.ndarray  # (3, b) standard error of the diagonal norms over probes
    spectral: np.ndarray  # (3, b)
    trace: np.ndarray  # (3, b)


@dataclass(frozen=True)
class Beyond(Shown):
    """All scales."""

    settings: dict[str, Any]
    model: str
    names: list[str]
    sizes: list[int]
    sigma: np.ndarray  # (S,)
    frobenius: np.ndarray  # (S, 3, b, b)
    stderr: np.ndarray  # (S, 3, b)
    spectral: np.ndarray  # (S, 3, b)
    trace: np.ndarray  # (S, 3, b)
    exponents: np.ndarray  # (3, b, b) for σ ≤ SMALL; NaN if a norm is zero or unknown

    @property
    def exact(self) -> bool:
        """Return True if the matrices were formed."""
        return bool((self.stderr == 0).all())

    def claims(self) -> list[Claim]:
        """Return the paper's exponents that apply to this model; none with normalization layers."""
        expected = {("W_Q", "H_o"): 6, ("W_Q", "H_f"): 5, ("W_V", "H_o"): 2}
        if self.settings.get("norm") != "none" or self.settings.get("attention") != "softmax":
            return []
        claims = []
        for i, name in enumerate(self.names):
            for part in ("H_o", "H_f"):
                power, slope = expected.get((name[-3:], part)), self.exponents[PARTS.index(part), i, i]
                if power is not None and not math.isnan(slope):
                    verdict = "holds" if abs(slope - power) < 0.1 else "fails"
                    claims.append(Claim(f"{name}, {part} ~ σ^{power}", str(power), f"{slope:.2f}", verdict))
        return claims

    def summary(self) -> list[Line]:
        """Return the main numbers, each with a label and an explanation."""
        how = "exact" if self.exact else f"from {self.settings['probes']} probes"
        return [
            ("blocks", str(len(self.names)), f"{sum(self.sizes):,} parameters of {self.model}, {how}"),
            *((c.claim, c.measured, f"expected {c.published}: {c.verdict}") for c in self.claims()),
        ]

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        return {
            "beyond_exponents": f"Exponent of σ in the Frobenius norm of every block of {self.model} for σ ≤ "
            f"{SMALL:g}, from a linear fit of the logarithms. Blank: exactly zero, or not computed.",
            "beyond_curves": f"Frobenius norm of the diagonal blocks of {self.model} against the scale σ of "
            f"the embeddings, on {self.settings['data']}.",
            "beyond": "Every norm; also spectral norm and trace of diagonal blocks. stderr is 0 if exact.",
        }

    def tables(self) -> Tables:
        """One row per pair of blocks, part and scale; upper triangle with the diagonal."""
        rows = []
        for s, sigma in enumerate(self.sigma):
            for p, part in enumerate(PARTS):
                for i, one in enumerate(self.names):
                    for j, two in enumerate(self.names[i:], start=i):
                        if math.isnan(self.frobenius[s, p, i, j]):
                            continue
                        row = {"row": one, "col": two, "part": part, "sigma": sigma}
                        row["frobenius"] = self.frobenius[s, p, i, j]
                        for what in ("stderr", "spectral", "trace"):
                            row[what] = getattr(self, what)[s, p, i] if i == j else math.nan
                        rows.append(row)
        return {"beyond": rows}

    def figures(self) -> dict[str, Figure]:
        """Both figures."""
        return {"beyond_exponents": _exponents(self), "beyond_curves": _curves(self)}


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Beyond:
    """Measure the blocks at every scale; `state` has a piece for each."""
    problem = _problem(cfg)
    space, sigma = problem.space(*cfg.blocks), cfg.sigma
    names = [f"scale{index:02d}" for index in range(len(sigma))]
    pieces = [
        Piece(name, lambda scale=scale: _measure(_scaled(problem, float(scale)), cfg), f"σ = {scale:.3g}")
        for name, scale in zip(names, sigma, strict=True)
    ]
    contents = fingerprint(problem.model, problem.batches)
    done = work_through(pieces, contents=contents, progress=progress, state=state)
    found = [done.take(ScaleNorms, name) for name in names]
    arrays = {
        what: np.stack([getattr(piece, what) for piece in found])
        for what in ("frobenius", "stderr", "spectral", "trace")
    }
    small, names = sigma <= SMALL * 1.001, [block.name for block in space]
    exponents = np.array(
        [
            [[fit(sigma[small], arrays["frobenius"][small, p, i, j]).slope for j in range(len(names))]
             for i in range(len(names))]
            for p in range(len(PARTS))
        ]
    )  # fmt: skip
    sizes = [block.size for block in space]
    return Beyond(
        cfg.to_dict(),
        problem.model.name,
        names,
        sizes,
        sigma,
        arrays["frobenius"],
        arrays["stderr"],
        arrays["spectral"],
        arrays["trace"],
        exponents,
    )


def _problem(cfg: Config) -> Problem:
    """Return the model on its data, trained if the settings say so."""
    if cfg.model is None:
        config = TransformerConfig(
            n_layers=cfg.n_layers, d_model=cfg.d_model, n_heads=cfg.n_heads, n_ctx=18, vocab_size=12,
            norm=cfg.norm, attention=cfg.attention, activation=cfg.activation, init="scaled", embed_std=1.0,
            seed=cfg.seed,
        )  # fmt: skip
        model = replace(load(Transformer(config).double().to(cfg.device)), name="a zoo Transformer")
    else:
        model = load(cfg.model, dtype="float64", device=cfg.device)
    if not isinstance(model.module, Transformer) or model.module.E is None:
        raise UsageError(f"expected a zoo Transformer with an embedding, got {model.name!r}")
    on = ModelOnData(
        model=model.name, data=cfg.data, tokens=cfg.tokens, seq_len=cfg.seq_len, batch_size=64, seed=cfg.seed
    )
    batches = make_batches(on, model)
    if cfg.steps:
        model = train(model, batches, TrainConfig(steps=cfg.steps, warmup=min(50, cfg.steps)))[0]
    return Problem(model, batches)


def _scaled(problem: Problem, scale: float) -> Problem:
    """Return the problem with E and P scaled; a tied unembedding is scaled with them."""
    module = copy.deepcopy(problem.model.module)
    with torch.no_grad():
        for name in ("E", "P"):
            if getattr(module, name) is not None:
                getattr(module, name).mul_(scale)
    model: Model = replace(problem.model, module=module)
    return Problem(model, problem.batches, problem.loss)


def _measure(problem: Problem, cfg: Config) -> ScaleNorms:
    space = problem.space(*cfg.blocks).in_blocks()
    operators = GGN(problem, *cfg.blocks).in_blocks(), FunctionalHessian(problem, *cfg.blocks).in_blocks()
    names, b = [block.name for block in space], len(space)
    frobenius = np.full((3, b, b), math.nan)
    stderr, spectral, trace = np.zeros((3, b)), np.full((3, b), math.nan), np.full((3, b), math.nan)
    if space.size <= DENSE:
        outer, functional = (op.to_dense() for op in operators)
        cuts = [space.slices[name] for name in names]
        for p, H in enumerate((outer, functional, outer + functional)):
            frobenius[p] = [[float(H[rows, columns].norm()) for columns in cuts] for rows in cuts]
            spectral[p] = [float(torch.linalg.eigvalsh(H[cut, cut]).abs().max()) for cut in cuts]
            trace[p] = [float(H[cut, cut].trace()) for cut in cuts]
        return ScaleNorms(frobenius, stderr, spectral, trace)
    for i, name in enumerate(names):
        outer, functional = (op.block(name) for op in operators)
        for p, block in enumerate((outer, functional, outer + functional)):
            found = own_probes(block, num_probes=cfg.probes, seed=cfg.seed)
            frobenius[p, i, i], stderr[p, i], trace[p, i] = found.norm, found.norm_stderr, found.trace
    return ScaleNorms(frobenius, stderr, spectral, trace)


def _exponents(result: Beyond) -> Figure:
    names = result.names
    side = 2.2 + 0.36 * len(names)
    figure, axes = style.subplots(1, 3, figsize=(3 * side, side + 0.6), sharey=True)
    known = result.exponents[np.isfinite(result.exponents)]
    top = float(np.abs(known).max(initial=1.0))
    for ax, part, values in zip(axes, PARTS, result.exponents, strict=True):
        ax.imshow(values, cmap="RdBu_r", vmin=-top, vmax=top)
        ax.set_xticks(range(len(names)), names, rotation=90)
        ax.set_yticks(range(len(names)), names)
        ax.set_title(TITLES[part])
        if len(names) <= MANY:
            style.write_cells(ax, "{:.1f}".format, size=7)
    figure.colorbar(axes[0].images[0], ax=list(axes), label="exponent of σ", shrink=0.8)
    return figure


def _curves(result: Beyond) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = style.subplots(1, 3, figsize=(13, 4.6), sharey=True)
    colors = plt.get_cmap("turbo")(np.linspace(0.05, 0.95, len(result.names)))
    for p, (ax, part) in enumerate(zip(axes, PARTS, strict=True)):
        for i, name in enumerate(result.names):
            values = result.frobenius[:, p, i, i]
            good = values > 0
            if good.any():
                ax.plot(result.sigma[good], values[good], color=colors[i], lw=1.4, marker=".", label=name)
        ax.set(xscale="log", yscale="log")
        ax.axvline(1, color="0.4", lw=0.8, ls=":")
        ax.set(title=TITLES[part], xlabel="scale σ of the embeddings")
    axes[0].set_ylabel("‖block‖ F")
    style.shared_legend(figure, axes[2], loc="outside right center")
    return figure


STUDY = Study(Config, run)
