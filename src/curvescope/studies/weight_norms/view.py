"""Claims, figures and captions of the study `weight_norms`, made from the arrays of its result."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.core.number_format import plural
from curvescope.runs.study_result import Claim, Line, Origin, Tables
from curvescope.studies.common.statistics import OURS, above, all_above, interval_columns
from curvescope.studies.weight_norms.study import ROLES
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE
from curvescope.viz.style import MANY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.weight_norms.study import WeightNorms

SLIDES: Origin = ("slides, 'Cracking the Hessian'", "paper")
FAMILY = {"pre": "with norms", "none": "without norms"}


def claims(result: WeightNorms) -> list[Claim]:
    """Claims over random models, then over training."""
    found = [claim for norm in result.random for claim in _claim_random(result, norm)]
    within = result.correlation("within", "all", "spectral")
    found.append(
        _claim("over training, λ_max of a block follows the spectral norm of its weights", [within], OURS)
    )
    pooled = result.correlation("blocks", "all", "spectral")
    words = "over blocks and checkpoints, larger spectral norms of weights come with larger λ_max"
    return [*found, _claim(words, [pooled], OURS)]


def _claim_random(result: WeightNorms, norm: str) -> list[Claim]:
    family = f"random Transformers {FAMILY[norm]}"

    def of(*roles: str) -> list[Correlation]:
        return [result.correlation(norm, role, "spectral") for role in roles]

    return [
        _claim(
            f"λ_max follows the spectral norms of query and key weights, {family}", of("W_Q", "W_K"), SLIDES
        ),
        _claim(
            f"λ_max follows the spectral norms of value and output weights, {family}", of("W_V", "W_O"), OURS
        ),
        _claim(f"λ_max follows the spectral norms of feed-forward weights, {family}", of("W_1", "W_2"), OURS),
        _spectral_tells_more(result, norm, family),
    ]


def _claim(words: str, correlations: list[Correlation], origin: Origin) -> Claim:
    """Claim that holds if all intervals are above zero, and fails if one is below; nan decides nothing."""
    measured = "ρ = " + ", ".join(correlation.words for correlation in correlations)
    return Claim(words, "ρ > 0", measured, all_above(correlations), *origin)


def _spectral_tells_more(result: WeightNorms, norm: str, family: str) -> Claim:
    """Compare both norms for the role whose Frobenius norm has the largest rank correlation with λ_max."""
    best = max(ROLES, key=lambda role: abs(result.correlation(norm, role, "frobenius").value))
    gain = result.correlation(norm, best, "difference")
    words = f"λ_max correlates more with the spectral norm of weights than with the Frobenius norm, {family}"
    measured = f"{best}: ρ larger by {gain.words}"
    verdict = above(gain)
    return Claim(words, "larger ρ", measured, verdict, *OURS)


LABELS = {"pre": "with norms", "none": "without norms"}
MARKS = "osD^v<>P*X"
TICKS = (0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def figures(result: WeightNorms) -> dict[str, Figure]:
    """Draw blocks over training, and random models if there are any."""
    panels = {"over_training": _training(result)}
    return panels | ({"random_models": _figure_random(result)} if result.random else {})


def _training(result: WeightNorms) -> Figure:
    figure, (left, right) = style.subplots(1, 2, figsize=(11, 4.2), width_ratios=[3, 2])
    roles = list(dict.fromkeys(name.rpartition(".")[2] for name in result.blocks))
    sizes, tops = (
        np.array([getattr(t, name) for t in result.trained.values()]) for name in ("spectral", "lambda_max")
    )
    for i, block in enumerate(result.blocks):
        role = roles.index(block.rpartition(".")[2])
        left.plot(sizes[:, i], tops[:, i], "-", lw=0.6, color=MANY[role % len(MANY)], alpha=0.6)
    for j, name in enumerate(result.trained):
        for k, role in enumerate(roles):
            of = [i for i, block in enumerate(result.blocks) if block.rpartition(".")[2] == role]
            mark = MARKS[j % len(MARKS)]
            left.plot(sizes[j, of], tops[j, of], mark, ms=4.5, color=MANY[k % len(MANY)])
        left.plot([], [], MARKS[j % len(MARKS)], color="0.4", label=name)
    for k, role in enumerate(roles):
        left.plot([], [], "-", color=MANY[k % len(MANY)], label=role)
    left.set(xlabel="spectral norm ‖W‖₂ of the block's weights", ylabel="λ_max of the block")
    _log_norms(left)
    left.set_yscale("log" if (tops > 0).all() else "symlog")
    left.legend(ncols=2)
    names = {"within, all": "within.all", "pooled, all": "blocks.all"} | {r: f"blocks.{r}" for r in roles}
    _forest(right, result, names)
    right.set_title("rank correlation of λ_max with ‖W‖")
    left.grid(visible=True)
    return figure


def _forest(ax: Axes, result: WeightNorms, rows: dict[str, str]) -> None:
    y = np.arange(len(rows))[::-1]
    for i, (kind, label) in enumerate((("spectral", "spectral"), ("frobenius", "Frobenius"))):
        found = [result.correlations[f"{key}.{kind}"] for key in rows.values()]
        values, low, high = np.array([(one.value, one.low, one.high) for one in found]).T
        look = {"fmt": "o", "ms": 4, "lw": 1, "color": PALETTE[i], "label": label}
        ax.errorbar(values, y + 0.13 - 0.26 * i, xerr=style.error_bars(values, low, high), **look)
    ax.axvline(0, color="0.5", lw=0.8)
    ax.set_yticks(y, list(rows))
    ax.set_xlim(-1.05, 1.05)
    ax.set_xticks([-1, -0.5, 0, 0.5, 1])
    ax.set_xlabel("Spearman's ρ")
    ax.legend(loc="lower left")
    ax.grid(visible=True)


def _figure_random(result: WeightNorms) -> Figure:
    figure, axes = style.subplots(2, 3, figsize=(11, 6), sharey=True)
    for j, (ax, role) in enumerate(zip(axes.flat, ROLES, strict=True)):
        for i, (norm, models) in enumerate(result.random.items()):
            one = result.correlation(norm, role, "spectral")
            label = f"{LABELS[norm]}: ρ = {one.words}"
            ax.plot(models.spectral[:, j], models.lambda_max, "o", ms=3.5, color=PALETTE[i], label=label)
        _log_norms(ax)
        ax.set(yscale="log", title=role)
        ax.legend(loc="upper left")
        ax.grid(visible=True)
    low, high = axes[0][0].get_ylim()
    axes[0][0].set_ylim(low, high * (high / low) ** 0.25)  # space for the legends
    figure.supxlabel("spectral norm ‖W‖₂")
    figure.supylabel("λ_max of the Hessian")
    return figure


def _log_norms(ax: Axes) -> None:
    """Set a logarithmic axis of norms with a few plain tick labels."""
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ticks = [tick for tick in TICKS if low <= tick <= high]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    ax.minorticks_off()


WHERE = {
    "blocks": "blocks at checkpoints, pooled",
    "within": "each block over its checkpoints, mean over blocks",
    "pre": "random models with norms",
    "none": "random models without norms",
}


def summary(result: WeightNorms) -> list[Line]:
    """Rank correlations over training, and the roles that λ_max follows over random models."""
    lines: list[Line] = []
    for where in ("within", "blocks"):
        correlation = result.correlation(where, "all", "spectral")
        words = f"Spearman's ρ of λ_max with ‖W‖₂, {WHERE[where]}; 95 % interval"
        known = "unknown" if math.isnan(correlation.value) else correlation.words
        words += "" if not math.isnan(correlation.value) else "; no block has enough checkpoints"
        lines.append((f"over training, {where}", known, words))
    for norm, models in result.random.items():
        each = {role: result.correlation(norm, role, "spectral") for role in ROLES}
        order = sorted(each, key=lambda role: -each[role].value)
        words = f"of {plural(len(models.lambda_max), 'model')}: " + ", ".join(
            f"{role} {each[role].words}" for role in order
        )
        lines.append((f"{WHERE[norm]}", f"largest ρ: {order[0]}", words))
    lines += [(claim.verdict, "", f"{claim.claim}: {claim.measured}") for claim in result.claims()]
    return [*lines, *(("note", "", note) for note in result.notes)]


def tables(result: WeightNorms) -> Tables:
    """One row per correlation, one per block and checkpoint, and one per random model."""
    norms = [_row(key, result) for key in result.correlations]
    training = [
        {
            "checkpoint": name, "loss": t.loss, "block": block, "lambda_max": t.lambda_max[i],
            "lambda_max_error": t.error[i], "spectral_norm": t.spectral[i], "frobenius_norm": t.frobenius[i],
        }
        for name, t in result.trained.items()
        for i, block in enumerate(result.blocks)
    ]  # fmt: skip
    found = {"norms": norms, "training": training}
    random = [
        {"norms": norm, "loss": m.loss[i], "lambda_max": m.lambda_max[i], "lambda_max_error": m.error[i]}
        | {f"spectral_{role}": m.spectral[i, j] for j, role in enumerate(ROLES)}
        | {f"frobenius_{role}": m.frobenius[i, j] for j, role in enumerate(ROLES)}
        for norm, m in result.random.items()
        for i in range(len(m.lambda_max))
    ]
    return found | ({"random": random} if random else {})


def _row(key: str, result: WeightNorms) -> dict[str, Any]:
    where, role, kind = key.split(".")
    one = result.correlations[key]
    return {
        "over": WHERE[where], "role": role, "norm": kind, **interval_columns("spearman", one),
        "rows": one.count, "drawn": one.groups,
    }  # fmt: skip


def captions(result: WeightNorms) -> dict[str, str]:
    """Return the caption of each figure and table."""
    captions = {
        "norms": "Spearman's ρ of λ_max with norms of weight matrices, with a 95 % bootstrap interval over "
        "the independent units (drawn): blocks with all their checkpoints, or models. difference: ρ "
        "with the spectral norm minus ρ with the Frobenius norm. Over training, λ_max is that of the "
        "block's part of the Hessian; over random models, that of the full Hessian.",
        "training": "λ_max of each weight matrix's block of the Hessian (an eigenvalue lies within the "
        "error), with the spectral and the Frobenius norm of the matrix.",
        "over_training": f"λ_max of blocks against ‖W‖₂ at {plural(len(result.trained), 'checkpoint')}, one "
        "line per block. Left: all blocks. Right: rank correlations by role.",
    }
    if result.random:
        captions["random"] = (
            "Random one-layer Transformers. Each weight matrix has random singular vectors, a Frobenius "
            "norm that is log-uniform over a factor of 16, and singular values that fall as i^(−a) with "
            "a uniform up to 2, all drawn independently."
        )
        captions["random_models"] = captions["random"] + (
            "\x20λ_max of the full Hessian against ‖W‖₂, role by role."
        )
    return captions
