"""Tables, claims, figures and captions of the study `factors`, made from the arrays of its result."""

from __future__ import annotations

import math
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.intervals import mean_interval
from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.core.numbers import plural
from curvescope.runs.shown import FAILS, HOLDS, Claim, Line, Origin
from curvescope.studies.common.statistics import above
from curvescope.studies.factors.analysis import (
    BLOCKS,
    DIAGONAL,
    EKFAC_NAME,
    GGN,
    IDENTITY,
    KFAC_NAME,
    MEASURES,
    gain,
    over_methods,
)
from curvescope.viz import style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.factors.study import Factors

OURS: Origin = ("ours", "ours")
ROUNDING = 1e-9
QUERIES_KEYS, OTHERS = ("*.W_[QK]",), ("*.W_V", "*.W_1", "*.W_2")
WORDS = {
    "frobenius": "the relative error from the GGN",
    "angle": "the angle from the GGN",
    "divergence": "the divergence from the GGN",
    "lost": "the lost decrease",
    "frobenius_hessian": "the relative error from the Hessian",
    "angle_hessian": "the angle from the Hessian",
}
FINAL, STEP = "the optimizer's loss", "the best single step"


class Mean(NamedTuple):
    """A mean over seeds with Student's 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """`+0.31 [+0.05, +0.52]`."""
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def mean_of(values: np.ndarray) -> Mean:
    """Of one number for each seed: (S,)."""
    n = len(values)
    if not np.isfinite(values).all():
        return Mean(float(values.mean()), math.nan, math.nan)
    stderr = values.std(ddof=1) / math.sqrt(n)
    low, high = mean_interval(np.array(values.mean()), np.array(stderr), n - 1)
    return Mean(float(values.mean()), float(low), float(high))


def claims(result: Factors) -> list[Claim]:
    """All claims: about distances, then about what they predict."""
    found = [*_nearer(result), _between(result), *_grow(result), *_queries_keys(result)]
    for measure in MEASURES:
        for outcome in outcomes(result):
            words = f"{WORDS[measure]} predicts {outcome}"
            found.append(_above(words, "ρ > 0", "ρ = ", correlation(result, measure, outcome)))
    for outcome in outcomes(result):
        for measure in ("lost", "frobenius_hessian"):
            words = f"{WORDS[measure]} predicts {outcome} better than the relative error from the GGN"
            one = better(result, measure, "frobenius", outcome)
            found.append(_above(words, "better", "ρ larger by ", one))
    return found


def outcomes(result: Factors) -> list[str]:
    """What is predicted: single steps, and runs where there are any."""
    return [STEP, FINAL] if result.tuned else [STEP]


def correlation(result: Factors, measure: str, outcome: str) -> Correlation:
    """ρ over approximations of a distance with an outcome, which is worse where it is larger."""
    x, y = pair(result, measure, outcome)
    return over_methods(x, y, draws=result.draws, seed=result.seed)


def better(result: Factors, measure: str, other: str, outcome: str) -> Correlation:
    """How much larger ρ is for one distance than for another."""
    x, y = pair(result, measure, outcome)
    return gain(x, pair(result, other, outcome)[0], y, draws=result.draws, seed=result.seed)


def pair(result: Factors, measure: str, outcome: str) -> tuple[np.ndarray, np.ndarray]:
    """Distances and outcomes, (S, C, M) each: minus the decrease; the last loss, with the mean distance."""
    x = result.distance(measure)
    if outcome == STEP:
        return x, -result.decrease
    return x.mean(axis=1, keepdims=True), result.final[:, None]


def _above(words: str, said: str, label: str, one: Correlation | Mean) -> Claim:
    """It holds where the interval is above zero, and fails where it is below."""
    verdict = above(one)
    return Claim(words, said, f"{label}{one.words}", verdict, *OURS)


def _nearer(result: Factors) -> list[Claim]:
    """EK-FAC against K-FAC: from the GGN in every block, where it is a theorem, and from the Hessian."""
    names = result.approximations
    if not {KFAC_NAME, EKFAC_NAME} <= set(names):
        return []
    E, K = names.index(EKFAC_NAME), names.index(KFAC_NAME)
    found = []
    for measure, matrix in (("frobenius", "GGN"), ("frobenius_hessian", "Hessian")):
        d = result.parts[:, :, MEASURES.index(measure)]
        nearer = d[:, :, E] <= d[:, :, K] + ROUNDING
        words = f"EK-FAC is nearer to the {matrix} than K-FAC in every block at every checkpoint"
        measured = f"in {int(nearer.sum())} of {nearer.size}"
        found.append(Claim(words, "all", measured, HOLDS if nearer.all() else FAILS, *OURS))
    return found


def _between(result: Factors) -> Claim:
    """Whether the blocks of the GGN hold less than half of its squared norm."""
    share = mean_of(result.between[:, :, 0].mean(axis=1))
    verdict = above(share, 0.5)
    measured = f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}] of ‖H_o‖²"
    return Claim("most of the GGN lies between blocks", "more than a half", measured, verdict, *OURS)


def _grow(result: Factors) -> list[Claim]:
    """Whether angles at the end of training are larger than at its beginning."""
    found = []
    for name in result.approximations:
        measure, matrix = ("angle_hessian", "Hessian") if name == GGN else ("angle", "GGN")
        if name == IDENTITY:
            continue
        own = result.of(measure, name)
        words = f"{name} moves away from the {matrix} in training"
        found.append(_above(words, "further", "degrees more: ", mean_of(own[:, -1] - own[:, 0])))
    return found


def _queries_keys(result: Factors) -> list[Claim]:
    """Whether blocks of queries and keys are further from theirs than those of values and feed-forward."""

    def mean(m: int, globs: tuple[str, ...]) -> np.ndarray:
        some = [i for i, name in enumerate(result.blocks) if any(fnmatch(name, glob) for glob in globs)]
        return result.parts[:, :, MEASURES.index("angle"), m][..., some].mean(axis=(1, 2))

    found = []
    for m, name in enumerate(result.approximations):
        if name in (IDENTITY, DIAGONAL, BLOCKS, GGN):
            continue
        words = f"{name} is further from the GGN in queries and keys than in values and feed-forward"
        gap = mean_of(mean(m, QUERIES_KEYS) - mean(m, OTHERS))
        found.append(_above(words, "further", "degrees more: ", gap))
    return found


def table(result: Factors) -> list[dict[str, Any]]:
    """Every correlation of a distance with an outcome."""
    found = []
    for measure in MEASURES:
        for outcome in outcomes(result):
            one = correlation(result, measure, outcome)
            row = {"distance": measure, "outcome": outcome, "rho": one.value}
            found.append(row | {"low": one.low, "high": one.high})
    return found


# ----------------------------------------------------------------------------------------------------- tables


def tables(result: Factors) -> dict[str, pd.DataFrame]:
    """By name."""
    import pandas as pd

    found = {
        "whole": _whole(result),
        "parts": _parts(result),
        "correlations": table(result),
        "claims": [c._asdict() for c in result.claims()],
    }
    if result.tuned:
        found |= {"optimizers": optimizers(result), "trials": _trials(result)}
    return {name: pd.DataFrame(rows) for name, rows in found.items()}


def _whole(result: Factors) -> list[dict[str, Any]]:
    """One row for every seed, checkpoint and approximation."""
    return [
        {"seed": s, "step": step, "loss": float(result.loss[s, k]), "approximation": name}
        | {measure: float(result.whole[s, k, q, m]) for q, measure in enumerate(MEASURES)}
        | {"decrease": float(result.decrease[s, k, m])}
        for s in range(len(result.loss))
        for k, step in enumerate(result.checkpoints)
        for m, name in enumerate(result.approximations)
    ]


def _parts(result: Factors) -> list[dict[str, Any]]:
    """Means over seeds, one row for every checkpoint, block and approximation."""
    mean = result.parts.mean(axis=0)
    return [
        {"step": step, "block": block, "size": size, "approximation": name}
        | {measure: float(mean[k, q, m, b]) for q, measure in enumerate(MEASURES)}
        for k, step in enumerate(result.checkpoints)
        for b, (block, size) in enumerate(zip(result.blocks, result.sizes, strict=True))
        for m, name in enumerate(result.approximations)
    ]


def optimizers(result: Factors) -> list[dict[str, Any]]:
    """One row for every approximation: its settings, its loss at the end, its mean distances."""
    found = []
    for m, tuned in enumerate(result.tuned):
        ends = result.final[:, m]
        row: dict[str, Any] = {"approximation": tuned.method, "lr": tuned.rate, "damping": tuned.damping}
        row |= {"settled": tuned.settled, "diverged": int((~np.isfinite(ends)).sum())}
        row |= dict(zip(("loss", "low", "high"), geometric(ends), strict=True))
        mean = result.whole.mean(axis=(0, 1))
        found.append(row | {measure: float(mean[q, m]) for q, measure in enumerate(MEASURES)})
    return found


def geometric(values: np.ndarray) -> tuple[float, float, float]:
    """Geometric mean over seeds, with Student's interval of the logarithm."""
    one = mean_of(np.log(values))
    mean, low, high = (float(np.exp(value)) for value in one)
    return mean, low, high


def _trials(result: Factors) -> list[dict[str, Any]]:
    """Every trial of the tuning."""
    return [
        {"approximation": one.method, "lr": float(rate), "damping": float(damping), "loss": float(loss)}
        | {"chosen": rate == one.rate and damping == one.damping}
        for one in result.tuned
        for rate, damping, loss in zip(one.rates, one.dampings, one.loss, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------- figures

LOOKS = {
    "identity": (style.GRAY, "o"), "diagonal": (style.GOLD, "s"), "kfac": (style.SKY, "^"),
    "ekfac": (style.BLUE, "v"), "shampoo": (style.PINK, "D"), "shampoo-squared": (style.ORANGE, "P"),
    "block-diagonal": (style.TEAL, "X"), "ggn": ("black", "*"),
}  # fmt: skip
LABELS = {
    "frobenius": "relative error from the GGN",
    "angle": "angle from the GGN, degrees",
    "divergence": "divergence from the GGN",
    "lost": "lost decrease of the GGN's model",
    "frobenius_hessian": "relative error from the Hessian",
    "angle_hessian": "angle from the Hessian, degrees",
}
TOPS = {"angle": 95, "angle_hessian": 100, "lost": 1.03}  # where an interval may end beyond what can be


def figures(result: Factors) -> dict[str, Figure]:
    """By name."""
    return {"distances": _distances(result), "blocks": _blocks(result), "outcomes": _outcomes(result)}


def _panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, np.ndarray]:
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **shared)


def _distances(result: Factors) -> Figure:
    figure, axes = _panels(2, 3, (11, 6.2), sharex=True)
    x = np.arange(len(result.checkpoints))
    for ax, measure in zip(axes.T.flat, _columns(), strict=True):
        for m, name in enumerate(result.approximations):
            own = result.distance(measure)[..., m]  # (S, C)
            mean, low, high = np.array([mean_of(column) for column in own.T]).T
            color, mark = LOOKS[name]
            ax.plot(x, mean, marker=mark, ms=4.5, lw=1.2, color=color, label=name)
            ax.fill_between(x, low, high, color=color, alpha=0.1, lw=0)
        ax.set_title(LABELS[measure], fontsize=9)
        top = TOPS.get(measure, 1.15 * float(result.distance(measure).max()))
        ax.set_ylim(-0.03 * top, top)
        ax.set_xticks(x, [str(step) for step in result.checkpoints])
    for ax in axes[-1]:
        ax.set_xlabel("steps of training")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8)
    return figure


def _columns() -> tuple[str, ...]:
    """Measures column by column: errors, angles, preconditioners."""
    return "frobenius", "frobenius_hessian", "angle", "angle_hessian", "divergence", "lost"


def _blocks(result: Factors) -> Figure:
    height = 0.34 * len(result.blocks) + 1.7
    figure, axes = _panels(1, 2, (11, height), sharey=True)
    image = None
    for ax, measure in zip(axes[0], ("angle", "angle_hessian"), strict=True):
        values = result.parts[:, -1, MEASURES.index(measure)].mean(axis=0).T  # (B, M)
        image = ax.imshow(values, vmin=0, vmax=90, cmap=style.MAP, aspect="auto")
        for (b, m), value in np.ndenumerate(values):
            ax.text(m, b, f"{value:.0f}", ha="center", va="center", fontsize=8,
                    color=style.ink_at(image, value))  # fmt: skip
        ax.set_title(f"{LABELS[measure]}, block by block", fontsize=9)
        ax.set_xticks(range(len(result.approximations)), result.approximations, rotation=30, ha="right")
        ax.set_yticks(range(len(result.blocks)), result.blocks)
        ax.tick_params(labelsize=8, length=0)
    assert image is not None
    figure.colorbar(image, ax=axes, shrink=0.9, pad=0.01).ax.tick_params(labelsize=8)
    return figure


def _outcomes(result: Factors) -> Figure:
    rows, shown = outcomes(result)[::-1], ("frobenius", "angle", "divergence", "lost", "angle_hessian")
    size = 13, 2.7 * len(rows) + 0.5
    figure, axes = _panels(len(rows), len(shown), size, sharey="row", sharex="col")
    for row, outcome in zip(axes, rows, strict=True):
        for ax, measure in zip(row, shown, strict=True):
            _against(ax, result, measure, outcome)
            rho = correlation(result, measure, outcome)
            ax.set_title(f"ρ = {rho.words}", fontsize=8.5)
        final = outcome == FINAL
        row[0].set_ylabel("loss at the end" if final else "share of the best decrease")
    for ax, measure in zip(axes[-1], shown, strict=True):
        ax.set_xlabel(LABELS[measure], fontsize=8.5)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8)
    return figure


def _against(ax: Axes, result: Factors, measure: str, outcome: str) -> None:
    """A point for each approximation, with intervals over seeds in both directions."""
    for m, name in enumerate(result.approximations):
        x = np.array(mean_of(result.distance(measure)[..., m].mean(axis=1)))
        if outcome == FINAL:
            y = np.array(geometric(result.final[:, m]))
        else:
            share = result.decrease[..., m] / result.decrease.max(axis=-1)
            y = np.array(mean_of(share.mean(axis=1)))
        color, mark = LOOKS[name]
        bars = [np.abs(v[1:] - v[0])[:, None] for v in (x, y)]
        if np.isfinite(y[0]):
            ax.errorbar(
                x[:1], y[:1], np.nan_to_num(bars[1]), np.nan_to_num(bars[0]), fmt=mark, ms=6, color=color,
                lw=0.9, label=name,
            )  # fmt: skip
    if outcome == FINAL:
        ax.set_yscale("log")
        for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis("{x:g}")


# --------------------------------------------------------------------------------------------------- captions


def opening(result: Factors) -> str:
    """Whether the angle from the GGN ranks what approximations do."""
    found = []
    for outcome in outcomes(result):
        one = correlation(result, "angle", outcome)
        said = "follows" if one.low > 0 else "goes against" if one.high < 0 else "is not shown to follow"
        found.append(f"{outcome} {said} the angle from the GGN (ρ = {one.words})")
    sentence = "; ".join(found)
    return f"Over {plural(len(result.approximations), 'approximation')}, {sentence}."


def summary(result: Factors) -> list[Line]:
    """Distances at the beginning and the end, losses of the optimizers, then the claims."""
    count = f"{plural(sum(result.sizes), 'parameter')} in {plural(len(result.blocks), 'block')}"
    first, last = result.loss.mean(axis=0)[[0, -1]]
    ends = f"loss {first:.3f} → {last:.3f} in {result.checkpoints[-1]} steps of Adam"
    found: list[Line] = [("network", "", f"{count}, {plural(len(result.loss), 'seed')}, {ends}")]
    for name in result.approximations:
        G, H = (result.of(measure, name).mean(axis=0) for measure in ("angle", "angle_hessian"))
        words = f"angle from the GGN, first to last checkpoint; from the Hessian {H[0]:.0f}° → {H[-1]:.0f}°"
        found.append((name, f"{G[0]:.0f}° → {G[-1]:.0f}°", words))
    for row in sorted(optimizers(result), key=lambda row: row["loss"]) if result.tuned else []:
        steps = result.courses.shape[-1] - 1
        words = f"[{row['low']:.2g}, {row['high']:.2g}] after {steps} steps, lr {row['lr']:.2g}"
        found.append((f"step by {row['approximation']}", f"loss {row['loss']:.2g}", words))
    found += [("note", "", note) for note in result.notes]
    return [*found, *((c.verdict, "", f"{c.claim}: {c.measured}") for c in result.claims())]


def captions(result: Factors) -> dict[str, str]:
    """What each figure and table shows."""
    measures = (
        "frobenius: ‖A − B‖/‖B‖; angle: between them, in degrees; divergence: logarithm of the "
        "arithmetic over the geometric mean of the eigenvalues of (A + α)⁻¹(B + β); lost: the part of the "
        f"quadratic model's decrease that no step along (A + α)⁻¹g reaches; α and β are {result.damping:g} "
        "times the mean diagonals. B is the GGN, or where it is said the Hessian"
    )
    found = {
        "distances": "Distances of whole matrices over training: means over seeds, bands are 95 % intervals. "
        f"{measures}.",
        "blocks": "Angles from the GGN's own blocks and from the Hessian's, at the last checkpoint: means "
        "over seeds. An approximation that is block-diagonal has no part between blocks.",
        "whole": f"Every seed, checkpoint and approximation. {measures}. decrease: of the loss, by the best "
        "of all tried lengths and dampings of one step.",
        "parts": f"Single blocks: means over seeds. {measures}.",
        "correlations": "Spearman's ρ over approximations of distance with outcome, a mean over seeds and "
        "checkpoints; 95 % intervals by the bootstrap over seeds and approximations. For runs the distance "
        "is a mean over checkpoints.",
        "claims": "What is said about approximations, with verdicts from the intervals.",
        "outcomes": "Outcome against distance: the loss of each optimizer at the end, where they are run, "
        "against its mean distance, and the share of the largest single step's decrease, a mean over "
        "checkpoints; 95 % intervals over seeds. ρ as in the table of correlations.",
    }
    if result.tuned:
        found |= {
            "optimizers": f"Optimizers θ ← θ − lr (A + δ)⁻¹ g, A made anew every {result.every} steps, δ a "
            "multiple of its mean diagonal; tuned alike on a seed of their own. loss: geometric mean over "
            "seeds at the end, with its 95 % interval; settled: no neighbor of rate and damping is better; "
            "distances are means over seeds and checkpoints.",
            "trials": "Loss at the end for every rate and damping that was tried.",
        }
    return found
