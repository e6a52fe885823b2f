"""Beyond the published sweeps: every block, every pair of blocks, of any zoo Transformer, against σ.

The embeddings E and P of the model are multiplied by each scale in turn. Those of a new model are drawn with
standard deviation 1, so that the scale is the paper's σ; a trained model is itself at scale 1. Where the
chosen blocks are small enough together the matrices H_o and H_f are formed and everything is exact: Frobenius
norms of all pairs, spectral norms and traces of the diagonal blocks. Otherwise norms and traces of the
diagonal blocks come from probes. Float64 throughout.
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
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Claim, Line, Shown
from curvescope.runs.study import Study
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.setting import ModelOnData, make_batches
from curvescope.train import TrainConfig, train

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


DENSE = 2500  # rows of a matrix that is formed
SMALL = 0.05  # scales up to which exponents are fitted
MANY = 16  # blocks beyond which no numbers are written


@dataclass(frozen=True)
class Config(FigureConfig):
    """A model, data, blocks and scales. The defaults take about a minute on a CPU.

    Without `model` a zoo Transformer on the addition task is made from the fields below it.
    """

    blocks: tuple[str, ...] = setting(("*",), "globs; single heads too, e.g. L0.h*.W_Q")
    model: str | None = setting(
        None, "a bundled name, a folder or a TOML file of a zoo Transformer; by default one is made"
    )
    n_layers: int = setting(1, "of the model that is made, as the next five")
    d_model: int = setting(8, "its width")
    n_heads: int = setting(2, "heads of each layer")
    norm: Literal["none", "pre", "post"] = setting("none", "where its norms stand")
    attention: Literal["softmax", "linear"] = setting("softmax", "of its scores")
    activation: Literal["relu", "gelu", "silu", "identity"] = setting("gelu", "of its feed-forward layers")
    steps: int = setting(0, "of training before anything is measured")
    data: str = setting("task:addition", "a task, or, for a model with a tokenizer, a corpus such as sample")
    tokens: int = setting(256, "of a corpus")
    seq_len: int = setting(32, "tokens of one sequence of a corpus")
    scales: int | None = setting(None, "how many, from 0.01 to 10; by default 7 (quick) or 19 (full)")
    probes: int = setting(8, "where blocks are too large for their matrix")
    seed: int = setting(0, "of weights, data and probes")

    def __post_init__(self) -> None:
        if isinstance(self.blocks, str):
            object.__setattr__(self, "blocks", (self.blocks,))
        super().__post_init__()
        for name, least in {"steps": 0, "probes": 1, "tokens": 1, "seq_len": 1}.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.scales is not None and self.scales < 2:
            raise UsageError(f"scales: expected at least 2, got {self.scales}")

    @property
    def sigma(self) -> np.ndarray:
        """The scales."""
        return np.logspace(-2, 1, self.scales or (7 if self.profile == "quick" else 19))


@dataclass(frozen=True)
class Scale(Result):
    """The blocks at one scale, by part in the order of PARTS; NaN is what was not computed."""

    frobenius: np.ndarray  # (3, b, b)
    stderr: np.ndarray  # (3, b) of the diagonal, over probes
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
    exponents: np.ndarray  # (3, b, b) of σ ≤ SMALL; NaN where a norm is zero or unknown

    @property
    def exact(self) -> bool:
        """Whether the matrices were formed."""
        return bool((self.stderr == 0).all())

    def claims(self) -> list[Claim]:
        """The paper's exponents where this model has such blocks and no norm."""
        expected = {("W_Q", "H_o"): 6, ("W_Q", "H_f"): 5, ("W_V", "H_o"): 2}
        if self.settings.get("norm") != "none" or self.settings.get("attention") != "softmax":
            return []
        found = []
        for i, name in enumerate(self.names):
            for part in ("H_o", "H_f"):
                power, slope = expected.get((name[-3:], part)), self.exponents[PARTS.index(part), i, i]
                if power is not None and not math.isnan(slope):
                    verdict = "holds" if abs(slope - power) < 0.1 else "fails"
                    found.append(Claim(f"{name}, {part} ~ σ^{power}", str(power), f"{slope:.2f}", verdict))
        return found

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        how = "exact" if self.exact else f"from {self.settings['probes']} probes"
        return [
            ("blocks", str(len(self.names)), f"{sum(self.sizes):,} parameters of {self.model}, {how}"),
            *((c.claim, c.measured, f"expected {c.published}: {c.verdict}") for c in self.claims()),
        ]

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return {
            "beyond_exponents": f"Exponent of σ in the Frobenius norm of every block of {self.model} for "
            f"σ ≤ {SMALL:g}, from a line through the logarithms. Blank: exactly zero, or not computed.",
            "beyond_curves": f"Frobenius norm of the diagonal blocks of {self.model} against the scale σ of "
            f"the embeddings, on {self.settings['data']}.",
            "beyond": "Every norm; spectral norm and trace of diagonal blocks. stderr is 0 where exact.",
        }

    def tables(self) -> dict[str, pd.DataFrame]:
        """One row per pair of blocks, part and scale; upper triangle with the diagonal."""
        import pandas as pd

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
        return {"beyond": pd.DataFrame(rows)}

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
    found = [done.take(Scale, name) for name in names]
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
    """The model, trained if that was asked for, on its data."""
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
    """The problem with E and P multiplied; a tied unembedding is scaled along."""
    module = copy.deepcopy(problem.model.module)
    with torch.no_grad():
        for name in ("E", "P"):
            if getattr(module, name) is not None:
                getattr(module, name).mul_(scale)
    model: Model = replace(problem.model, module=module)
    return Problem(model, problem.batches, problem.loss)


def _measure(problem: Problem, cfg: Config) -> Scale:
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
        return Scale(frobenius, stderr, spectral, trace)
    for i, name in enumerate(names):
        outer, functional = (op.block(name) for op in operators)
        for p, block in enumerate((outer, functional, outer + functional)):
            found = own_probes(block, num_probes=cfg.probes, seed=cfg.seed)
            frobenius[p, i, i], stderr[p, i], trace[p, i] = found.norm, found.norm_stderr, found.trace
    return Scale(frobenius, stderr, spectral, trace)


def _exponents(result: Beyond) -> Figure:
    import matplotlib.pyplot as plt

    names = result.names
    side = 2.2 + 0.36 * len(names)
    figure, axes = plt.subplots(1, 3, figsize=(3 * side, side + 0.6), layout="constrained", sharey=True)
    known = result.exponents[np.isfinite(result.exponents)]
    top = float(np.abs(known).max(initial=1.0))
    for ax, part, values in zip(axes, PARTS, result.exponents, strict=True):
        ax.imshow(values, cmap="RdBu_r", vmin=-top, vmax=top)
        ax.set_xticks(range(len(names)), names, rotation=90)
        ax.set_yticks(range(len(names)), names)
        ax.set_title(TITLES[part], fontsize=11)
        if len(names) <= MANY:
            for i, j in np.argwhere(np.isfinite(values)):
                color = "white" if abs(values[i, j]) > 0.7 * top else "black"
                ax.text(j, i, f"{values[i, j]:.1f}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(axes[0].images[0], ax=list(axes), label="exponent of σ", shrink=0.8)
    return figure


def _curves(result: Beyond) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), layout="constrained", sharey=True)
    colors = plt.get_cmap("turbo")(np.linspace(0.05, 0.95, len(result.names)))
    for p, (ax, part) in enumerate(zip(axes, PARTS, strict=True)):
        for i, name in enumerate(result.names):
            values = result.frobenius[:, p, i, i]
            good = values > 0
            if good.any():
                ax.plot(result.sigma[good], values[good], color=colors[i], lw=1.4, marker=".", label=name)
        ax.set(xscale="log", yscale="log")
        ax.axvline(1, color="0.4", lw=0.8, ls=":")
        ax.set_title(TITLES[part], fontsize=11)
        ax.set_xlabel("scale σ of the embeddings")
    axes[0].set_ylabel("‖block‖ F")
    handles, labels = axes[2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    return figure


STUDY = Study(Config, run)
