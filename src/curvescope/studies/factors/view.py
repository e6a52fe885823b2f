"""Tables, claims, figures and captions of the study `factors`."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.core.number_format import plural
from curvescope.runs.study_result import FAILS, HOLDS, Claim, Line, Tables
from curvescope.studies.common.statistics import OURS, Interval, above, geometric_interval, mean_interval
from curvescope.studies.factors import analysis
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.factors.study import Factors

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


def claims(result: Factors) -> list[Claim]:
    """Return all claims: about distances, then about their predictions."""
    found = [*_nearer(result), _between(result), *_grow(result), *_queries_keys(result)]
    for measure in analysis.MEASURES:
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
    """Return the predicted outcomes: single steps, and runs if there are any."""
    return [STEP, FINAL] if result.tuned else [STEP]


def correlation(result: Factors, measure: str, outcome: str) -> Correlation:
    """Rank correlation over approximations between a distance and an outcome; larger outcomes are worse."""
    x, y = pair(result, measure, outcome)
    return analysis.over_methods(x, y, draws=result.draws, seed=result.seed)


def better(result: Factors, measure: str, other: str, outcome: str) -> Correlation:
    """Difference of ρ between two distances."""
    x, y = pair(result, measure, outcome)
    return analysis.gain(x, pair(result, other, outcome)[0], y, draws=result.draws, seed=result.seed)


def pair(result: Factors, measure: str, outcome: str) -> tuple[np.ndarray, np.ndarray]:
    """Return distances and outcomes, (S, C, M): minus the decrease, or the final and mean distance."""
    x = result.distance(measure)
    if outcome == STEP:
        return x, -result.decrease
    return x.mean(axis=1, keepdims=True), result.final[:, None]


def _above(words: str, said: str, label: str, one: Correlation | Interval) -> Claim:
    """Claim that holds if the interval is above zero, and fails if it is below."""
    verdict = above(one)
    measured = one.words if isinstance(one, Correlation) else f"{one:+.2f}"
    return Claim(words, said, f"{label}{measured}", verdict, *OURS)


def _nearer(result: Factors) -> list[Claim]:
    """Compare distances of EK-FAC and K-FAC in every block, from the GGN (a theorem) and from the Hessian."""
    names = result.approximations
    if not {analysis.KFAC_NAME, analysis.EKFAC_NAME} <= set(names):
        return []
    E, K = names.index(analysis.EKFAC_NAME), names.index(analysis.KFAC_NAME)
    found = []
    for measure, matrix in (("frobenius", "GGN"), ("frobenius_hessian", "Hessian")):
        d = result.parts[:, :, analysis.MEASURES.index(measure)]
        nearer = d[:, :, E] <= d[:, :, K] + ROUNDING
        words = f"EK-FAC is nearer to the {matrix} than K-FAC in every block at every checkpoint"
        measured = f"in {int(nearer.sum())} of {nearer.size}"
        found.append(Claim(words, "all", measured, HOLDS if nearer.all() else FAILS, *OURS))
    return found


def _between(result: Factors) -> Claim:
    """Claim that the blocks of the GGN hold less than half of its squared norm."""
    share = mean_interval(result.between[:, :, 0].mean(axis=1))
    verdict = above(share, 0.5)
    measured = f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}] of ‖H_o‖²"
    return Claim("most of the GGN lies between blocks", "more than a half", measured, verdict, *OURS)


def _grow(result: Factors) -> list[Claim]:
    """Claims that angles at the end of training are larger than at its beginning."""
    found = []
    for name in result.approximations:
        measure, matrix = ("angle_hessian", "Hessian") if name == analysis.GGN else ("angle", "GGN")
        if name == analysis.IDENTITY:
            continue
        own = result.of(measure, name)
        words = f"the distance of {name} from the {matrix} grows in training"
        found.append(_above(words, "further", "degrees more: ", mean_interval(own[:, -1] - own[:, 0])))
    return found


def _queries_keys(result: Factors) -> list[Claim]:
    """Claims that approximations of query and key blocks are worse than those of values and feed-forward."""

    def mean(m: int, globs: tuple[str, ...]) -> np.ndarray:
        some = [i for i, name in enumerate(result.blocks) if any(fnmatch(name, glob) for glob in globs)]
        return result.parts[:, :, analysis.MEASURES.index("angle"), m][..., some].mean(axis=(1, 2))

    found = []
    for m, name in enumerate(result.approximations):
        if name in (analysis.IDENTITY, analysis.DIAGONAL, analysis.BLOCKS, analysis.GGN):
            continue
        words = f"{name} is further from the GGN in queries and keys than in values and feed-forward"
        gap = mean_interval(mean(m, QUERIES_KEYS) - mean(m, OTHERS))
        found.append(_above(words, "further", "degrees more: ", gap))
    return found


def table(result: Factors) -> list[dict[str, Any]]:
    """Return the correlation of every distance with every outcome."""
    found = []
    for measure in analysis.MEASURES:
        for outcome in outcomes(result):
            one = correlation(result, measure, outcome)
            row = {"distance": measure, "outcome": outcome, "rho": one.value}
            found.append(row | {"low": one.low, "high": one.high})
    return found


def tables(result: Factors) -> Tables:
    """Return all tables by name."""
    found = {
        "whole": _whole(result),
        "parts": _parts(result),
        "correlations": table(result),
        "claims": [c._asdict() for c in result.claims()],
    }
    if result.tuned:
        found |= {"optimizers": optimizers(result), "trials": _trials(result)}
    return found


def _whole(result: Factors) -> list[dict[str, Any]]:
    """Return one row for every seed, checkpoint and approximation."""
    return [
        {"seed": s, "step": step, "loss": float(result.loss[s, k]), "approximation": name}
        | {measure: float(result.whole[s, k, q, m]) for q, measure in enumerate(analysis.MEASURES)}
        | {"decrease": float(result.decrease[s, k, m])}
        for s in range(len(result.loss))
        for k, step in enumerate(result.checkpoints)
        for m, name in enumerate(result.approximations)
    ]


def _parts(result: Factors) -> list[dict[str, Any]]:
    """Return means over seeds, one row for every checkpoint, block and approximation."""
    mean = result.parts.mean(axis=0)
    return [
        {"step": step, "block": block, "size": size, "approximation": name}
        | {measure: float(mean[k, q, m, b]) for q, measure in enumerate(analysis.MEASURES)}
        for k, step in enumerate(result.checkpoints)
        for b, (block, size) in enumerate(zip(result.blocks, result.sizes, strict=True))
        for m, name in enumerate(result.approximations)
    ]


def optimizers(result: Factors) -> list[dict[str, Any]]:
    """Return one row for every approximation: its settings, final loss and mean distances."""
    found = []
    for m, tuned in enumerate(result.tuned):
        ends = result.final[:, m]
        row: dict[str, Any] = {"approximation": tuned.method, "lr": tuned.rate, "damping": tuned.damping}
        row |= {"settled": tuned.settled, "diverged": int((~np.isfinite(ends)).sum())}
        row |= dict(zip(("loss", "low", "high"), geometric_interval(ends), strict=True))
        mean = result.whole.mean(axis=(0, 1))
        found.append(row | {measure: float(mean[q, m]) for q, measure in enumerate(analysis.MEASURES)})
    return found


def _trials(result: Factors) -> list[dict[str, Any]]:
    """Return every trial of the tuning."""
    return [
        {"approximation": one.method, "lr": float(rate), "damping": float(damping), "loss": float(loss)}
        | {"chosen": rate == one.rate and damping == one.damping}
        for one in result.tuned
        for rate, damping, loss in zip(one.rates, one.dampings, one.loss, strict=True)
    ]


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
# Upper limits of axes, because intervals can exceed the possible range.
TOPS = {"angle": 95, "angle_hessian": 100, "lost": 1.03}


def figures(result: Factors) -> dict[str, Figure]:
    """Return all figures by name."""
    return {"distances": _distances(result), "blocks": _blocks(result), "outcomes": _outcomes(result)}


def _distances(result: Factors) -> Figure:
    figure, axes = style.subplots(2, 3, figsize=(11, 6.2), sharex=True, squeeze=False)
    x = np.arange(len(result.checkpoints))
    for ax, measure in zip(axes.T.flat, _columns(), strict=True):
        for m, name in enumerate(result.approximations):
            own = result.distance(measure)[..., m]  # (S, C)
            mean, low, high = np.array([mean_interval(column) for column in own.T]).T
            color, mark = LOOKS[name]
            ax.plot(x, mean, marker=mark, ms=4.5, lw=1.2, color=color, label=name)
            ax.fill_between(x, low, high, color=color, alpha=0.1, lw=0)
        ax.set_title(LABELS[measure])
        top = TOPS.get(measure, 1.15 * float(result.distance(measure).max()))
        ax.set_ylim(-0.03 * top, top)
        ax.set_xticks(x, [str(step) for step in result.checkpoints])
    for ax in axes[-1]:
        ax.set_xlabel("steps of training")
    style.shared_legend(figure, axes[0, 0], loc="outside lower center", ncols=8)
    return figure


def _columns() -> tuple[str, ...]:
    """Order of the measures by column: errors, angles, preconditioners."""
    return "frobenius", "frobenius_hessian", "angle", "angle_hessian", "divergence", "lost"


def _blocks(result: Factors) -> Figure:
    height = 0.34 * len(result.blocks) + 1.7
    figure, axes = style.subplots(1, 2, figsize=(11, height), sharey=True, squeeze=False)
    image = None
    for ax, measure in zip(axes[0], ("angle", "angle_hessian"), strict=True):
        values = result.parts[:, -1, analysis.MEASURES.index(measure)].mean(axis=0).T  # (B, M)
        image = ax.imshow(values, vmin=0, vmax=90, cmap=style.MAP, aspect="auto")
        style.write_cells(ax, "{:.0f}".format)
        ax.set_title(f"{LABELS[measure]}, block by block")
        ax.set_xticks(range(len(result.approximations)), result.approximations, rotation=30, ha="right")
        ax.set_yticks(range(len(result.blocks)), result.blocks)
        ax.tick_params(length=0)
    assert image is not None
    figure.colorbar(image, ax=axes, shrink=0.9, pad=0.01)
    return figure


def _outcomes(result: Factors) -> Figure:
    rows, shown = outcomes(result)[::-1], ("frobenius", "angle", "divergence", "lost", "angle_hessian")
    size = 13, 2.7 * len(rows) + 0.5
    figure, axes = style.subplots(
        len(rows), len(shown), figsize=size, sharey="row", sharex="col", squeeze=False
    )
    for row, outcome in zip(axes, rows, strict=True):
        for ax, measure in zip(row, shown, strict=True):
            _against(ax, result, measure, outcome)
            rho = correlation(result, measure, outcome)
            ax.set_title(f"ρ = {rho.words}")
        final = outcome == FINAL
        row[0].set_ylabel("final loss" if final else "share of the best decrease")
    for ax, measure in zip(axes[-1], shown, strict=True):
        ax.set_xlabel(LABELS[measure])
    style.shared_legend(figure, axes[0, 0], loc="outside lower center", ncols=8)
    return figure


def _against(ax: Axes, result: Factors, measure: str, outcome: str) -> None:
    """Draw a point for each approximation, with intervals over seeds in both directions."""
    for m, name in enumerate(result.approximations):
        x = np.array(mean_interval(result.distance(measure)[..., m].mean(axis=1)))
        if outcome == FINAL:
            y = np.array(geometric_interval(result.final[:, m]))
        else:
            share = result.decrease[..., m] / result.decrease.max(axis=-1)
            y = np.array(mean_interval(share.mean(axis=1)))
        color, mark = LOOKS[name]
        across, along = (style.error_bars(*v)[:, None] for v in (x, y))
        if np.isfinite(y[0]):
            ax.errorbar(x[:1], y[:1], along, across, fmt=mark, ms=6, color=color, lw=0.9, label=name)
    if outcome == FINAL:
        ax.set_yscale("log")
        for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis("{x:g}")


def opening(result: Factors) -> str:
    """Summarize how the angle from the GGN ranks the outcomes."""
    found = []
    for outcome in outcomes(result):
        one = correlation(result, "angle", outcome)
        unclear = "does not clearly depend on"
        said = "increases with" if one.low > 0 else "decreases with" if one.high < 0 else unclear
        found.append(f"{outcome} {said} the angle from the GGN (ρ = {one.words})")
    sentence = "; ".join(found)
    return f"Over {plural(len(result.approximations), 'approximation')}, {sentence}."


def summary(result: Factors) -> list[Line]:
    """Return the distances at the beginning and the end, losses of the optimizers, then the claims."""
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
    """Return a caption for each figure and table."""
    measures = (
        "frobenius: ‖A − B‖/‖B‖; angle: between them, in degrees; divergence: logarithm of the arithmetic "
        "over the geometric mean of the eigenvalues of (A + α)⁻¹(B + β); lost: the share of the quadratic "
        f"model's decrease that no step along (A + α)⁻¹g reaches; α and β are {result.damping:g} times the "
        "mean diagonals. B is the GGN, unless the name says Hessian"
    )
    found = {
        "distances": "Distances of whole matrices over training: means over seeds, bands are 95 % intervals. "
        f"{measures}.",
        "blocks": "Angles from the GGN's own blocks and from the Hessian's, at the last checkpoint: means "
        "over seeds. A block-diagonal approximation has no entries between blocks.",
        "whole": f"Every seed, checkpoint and approximation. {measures}. decrease: decrease of the loss "
        "by one step, the best of all tried lengths and dampings.",
        "parts": f"Single blocks: means over seeds. {measures}.",
        "correlations": "Spearman's ρ between distance and outcome over approximations, a mean over "
        "seeds and checkpoints; 95 % intervals by the bootstrap over seeds and approximations. For "
        "runs, the distance is the mean over checkpoints.",
        "claims": "Claims about approximations, with verdicts from the intervals.",
        "outcomes": "Outcome against distance: the final loss of each optimizer, if they run, against "
        "its mean distance, and the decrease by a single step relative to the best approximation, a "
        "mean over checkpoints; 95 % intervals over seeds. ρ as in the table of correlations.",
    }
    if result.tuned:
        found |= {
            "optimizers": f"Optimizers θ ← θ − lr (A + δ)⁻¹ g, with A recomputed every {result.every} steps "
            "and δ a multiple of its mean diagonal; all are tuned in the same way on a separate seed. "
            "loss: geometric mean of the final loss over seeds, with its 95 % interval; settled: no "
            "neighboring rate or damping is better; distances are means over seeds and checkpoints.",
            "trials": "Final loss for every rate and damping tried.",
        }
    return found
