"""Tables, claims, figures and captions of the study `influence`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation, spearman
from curvescope.core.number_format import plural
from curvescope.runs.study_result import FAILS, HOLDS, OPEN, Claim, Line, Tables
from curvescope.studies.common.columns import pick
from curvescope.studies.common.statistics import OURS, above, below, interval_columns
from curvescope.studies.influence.analysis import (
    GGN_NAME,
    GRADIENTS,
    HESSIAN,
    KFAC_NAME,
    gain,
    over_queries,
    slope,
)
from curvescope.viz import style
from curvescope.viz.style import MANY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.influence.analysis import Scores
    from curvescope.studies.influence.study import Comparison, Influence

WIDTH = 60  # maximum characters of a text in a table


def tables(result: Influence) -> Tables:
    """Return every table by name."""
    found = {"sequences": sequences(result), "dampings": dampings(result)}
    if result.comparisons:
        found["ranks"] = ranks(result)
        found["removed"] = removed(result)
        found["claims"] = [pick(c, "claim", "measured", "verdict") for c in result.claims()]
    return found


def short(text: str, width: int = WIDTH) -> str:
    """Return a text on one line, without its middle if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width // 2 - 1]}…{line[-width // 2 :]}"


def sequences(result: Influence) -> list[dict[str, Any]]:
    """Return one row per query and training sequence: the most helpful first, the most harmful last."""
    rows = []
    for number, scores in enumerate(result.scores):
        order = np.argsort(-scores.values[0], kind="stable")
        for place, i in enumerate(order, start=1):
            rows.append(
                {
                    "query": number + 1,
                    "rank": place,
                    "score": scores.values[0, i],
                    "±": scores.error[0, i],
                    "says": says(scores.values[0, i], scores.error[0, i]),
                    "sequence": int(scores.sequences[i]),
                    "text": short(result.texts[scores.sequences[i]]),
                }
            )
    return rows


def says(score: float, error: float) -> str:
    """Describe if a sequence helped or harmed, given the error bound."""
    return "not decided" if abs(score) <= error else "helped" if score > 0 else "harmed"


def dampings(result: Influence) -> list[dict[str, Any]]:
    """Return one row per query and damping: its linear system and its rank correlation."""
    return [
        {
            "query": number + 1,
            "mean diagonals": unit,
            "δ": scores.damping[d],
            "rho_with_first": float(spearman(scores.values[0], scores.values[d])),
            "largest |score|": float(np.abs(scores.values[d]).max()),
            "largest ±": float(scores.error[d].max()),
            "residual": scores.residual[d],
            "converged": bool(scores.converged[d]),
            "products": int(scores.num_products[d]),
        }
        for number, scores in enumerate(result.scores)
        for d, unit in enumerate(result.units)
    ]


def ranks(result: Influence) -> list[dict[str, Any]]:
    """Return one row per small model, method and kind of retraining."""
    how: dict[str, Any] = {"draws": result.draws, "seed": result.seed}
    rows = []
    for name, one in result.comparisons.items():
        for method, predicted in one.predicted.items():
            for trained in ("near", "again"):
                measured = getattr(one, trained)
                found, size = over_queries(predicted, measured, **how), slope(predicted, measured, **how)
                row: dict[str, Any] = {"model": name, "method": method, "trained": trained}
                row |= interval_columns("ρ", found)
                row |= {"measured/predicted": size.value, **pick(size, "low", "high")}
                rows.append(row | {"residual": one.residual.get(method, np.nan)})
    return rows


def removed(result: Influence) -> list[dict[str, Any]]:
    """Return one row per small model, query and left-out sequence."""
    rows = []
    for name, one in result.comparisons.items():
        for q in range(one.near.shape[0]):
            for r, sequence in enumerate(one.removed.tolist()):
                predicted = {method: values[q, r] for method, values in one.predicted.items()}
                rows.append(
                    {
                        "model": name,
                        "query": q + 1,
                        "sequence": sequence,
                        "text": one.texts[r],
                        "near": one.near[q, r],
                        "again": one.again[q, r],
                        **predicted,
                        "moved, near": one.moved[r, 0],
                        "moved, again": one.moved[r, 1],
                        "elsewhere": bool(one.elsewhere[r]),
                    }
                )
    return rows


NEAR, AGAIN = "training continued from the minimum", "retrained from the same start"
MARGIN = 0.05  # margin of ρ within which two methods rank equally
WITHIN = 1.25  # factor within which a size counts as right


def claims(result: Influence) -> list[Claim]:
    """Return all claims, one small model after the other."""
    how: dict[str, Any] = {"draws": result.draws, "seed": result.seed}
    return [claim for name, one in result.comparisons.items() for claim in _claim_case(name, one, how)]


def _claim_case(name: str, one: Comparison, how: dict[str, Any]) -> list[Claim]:
    exact = one.predicted[GGN_NAME]
    found = [
        _ranks(f"influence ranks leave-one-out, {words}: {name}", over_queries(exact, measured, **how))
        for words, measured in ((NEAR, one.near), (AGAIN, one.again))
    ]
    for other, words in (
        (GRADIENTS, "the inverse of the GGN ranks leave-one-out better than gradients alone"),
        (None, "the Hessian's inverse ranks leave-one-out better than the GGN's"),
    ):
        pair = (exact, one.predicted[other]) if other else (one.predicted[HESSIAN], exact)
        more = gain(*pair, one.near, **how)
        found.append(Claim(f"{words}: {name}", "better", f"ρ larger by {more.words}", above(more), *OURS))
    lost = gain(exact, one.predicted[KFAC_NAME], one.near, **how)
    words, margin = "K-FAC's inverse ranks leave-one-out like the exact inverse", f"less than {MARGIN:g}"
    measured = f"ρ smaller by {lost.words}"
    found.append(Claim(f"{words}: {name}", f"ρ smaller by {margin}", measured, below(lost, MARGIN), *OURS))
    for method in (GGN_NAME, HESSIAN):
        words = f"the size of the change is right with the {method}: {name}"
        found.append(_size(words, slope(one.predicted[method], one.near, **how), one.near.size))
    return found


def _ranks(words: str, one: Correlation) -> Claim:
    return Claim(words, "ρ > 0", f"ρ = {one.words}", above(one), *OURS)


def _size(words: str, ratio: Correlation, cells: int) -> Claim:
    """Claim on the size of the change; cells without any change are left out."""
    inside = ratio.low > 1 / WITHIN and ratio.high < WITHIN
    outside = ratio.high < 1 / WITHIN or ratio.low > WITHIN
    verdict = HOLDS if inside else FAILS if outside else OPEN
    measured = f"median of measured / predicted = {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    measured += f", {cells - ratio.count} of {cells} without any change" if ratio.count < cells else ""
    known = bool(np.isfinite([ratio.value, ratio.low, ratio.high]).all())
    return Claim(words, f"within a factor of {WITHIN:g}", measured, verdict if known else OPEN, *OURS)


PANELS = ((GGN_NAME, "near"), (HESSIAN, "near"), (GGN_NAME, "again"))
TITLES = {"near": "continued from the minimum", "again": "retrained from the start"}


def figures(result: Influence) -> dict[str, Figure]:
    """Draw scores by query, and predictions against retraining if there is any."""
    found = {"scores": _scores(result)}
    return found | ({"retraining": _retraining(result)} if result.comparisons else {})


def _scores(result: Influence) -> Figure:
    count = len(result.scores)
    figure, axes = style.subplots(1, count, figsize=(5.2 * count, 4), squeeze=False)
    for ax, scores, query in zip(axes[0], result.scores, result.queries, strict=True):
        order = np.argsort(-scores.values[0], kind="stable")
        x = np.arange(1, len(order) + 1)
        for d, unit in enumerate(result.units):
            values, error = scores.values[d, order], scores.error[d, order]
            label = f"δ = {unit:g} × mean diagonal"
            ax.errorbar(x, values, error, fmt="o-" if d == 0 else ".", ms=4, lw=0.8, label=label, capsize=2)
        ax.axhline(0, color="0.6", lw=0.8)
        ax.set(xlabel="training sequence, by score at the first δ", title=short(query, 52))
        ax.set_ylabel("predicted change of the query's loss")
    axes[0, 0].legend()
    return figure


def _retraining(result: Influence) -> Figure:
    rows = len(result.comparisons)
    figure, axes = style.subplots(rows, len(PANELS), figsize=(11.5, 3.9 * rows), squeeze=False)
    for row, (name, one) in zip(axes, result.comparisons.items(), strict=True):
        for ax, (method, trained) in zip(row, PANELS, strict=True):
            predicted, measured = one.predicted[method], getattr(one, trained)
            _against(ax, predicted, measured, one.elsewhere & (trained == "again"))
            rho = over_queries(predicted, measured, draws=result.draws, seed=result.seed)
            ax.set_title(f"{name}, {method}, {TITLES[trained]}\nρ = {rho.words}")
    axes[0, 0].legend(ncols=2)
    return figure


def _against(ax: Axes, predicted: np.ndarray, measured: np.ndarray, elsewhere: np.ndarray) -> None:
    """Draw measured against predicted changes, a color for each query, on axes that are linear near zero."""
    size = np.abs(np.concatenate([predicted.ravel(), measured.ravel()]))
    linear = 10.0 ** np.round(np.log10(np.median(size) or 1e-6))
    end = 1.5 * float(size.max())
    for q, (x, y) in enumerate(zip(predicted, measured, strict=True)):
        for mark, some in (("o", ~elsewhere), ("x", elsewhere)):
            ax.plot(x[some], y[some], mark, ms=4, alpha=0.8, color=MANY[q % len(MANY)])
        ax.plot([], [], "o", ms=4, color=MANY[q % len(MANY)], label=f"query {q + 1}")
    ax.plot([-end, end], [-end, end], "-", color="0.3", lw=0.8, label="equal")
    for axis, scale, limit in (
        (ax.xaxis, ax.set_xscale, ax.set_xlim),
        (ax.yaxis, ax.set_yscale, ax.set_ylim),
    ):
        scale("symlog", linthresh=linear)
        axis.set_ticks([t * linear for t in (-10, -1, 0, 1, 10) if abs(t) * linear <= end])
        limit(-end, end)
    ax.set(xlabel="predicted change", ylabel="measured change")


SHOWN = 3  # sequences shown at either end


def summary(result: Influence) -> list[Line]:
    """Return the key numbers: label, value, explanation."""
    where = f"{', '.join(result.blocks)}, {plural(result.num_parameters, 'parameter')}"
    data = f"of {plural(len(result.texts), 'training sequence')} of {result.data}"
    low, high = result.mean_diagonal_interval
    diagonal = f"{result.mean_diagonal:.3g}" + (f" [{low:.3g}, {high:.3g}]" if high > low else "")
    rule = f"{result.units[0]:g} × the GGN's mean diagonal, {diagonal}, over {where}"
    found = [("loss", f"{result.loss:.4f}", data), ("δ", f"{result.scores[0].damping[0]:.3g}", rule)]
    for i, (query, scores) in enumerate(zip(result.queries, result.scores, strict=True), start=1):
        found += _query(f"query {i}", query, scores, result.texts)
    found += [line for name, one in result.comparisons.items() for line in _caption_case(name, one)]
    return [*found, *((c.verdict, "", f"{c.claim}: {c.measured}") for c in result.claims())]


def _query(label: str, query: str, scores: Scores, texts: list[str]) -> list[Line]:
    state = "" if scores.converged[0] else ", not converged"
    words = f"residual {scores.residual[0]:.1e}{state}: {short(query)!r}"
    order = np.argsort(-scores.values[0], kind="stable")
    ends = dict.fromkeys([*order[:SHOWN].tolist(), *order[-SHOWN:].tolist()])
    found = [(label, f"loss {scores.query_loss:.4f}", words)]
    for i in ends:
        value, error = float(scores.values[0, i]), float(scores.error[0, i])
        text = repr(short(texts[scores.sequences[i]]))
        found.append((says(value, error), f"{value:+.2e} ± {error:.0e}", text))
    return found


def _caption_case(name: str, one: Comparison) -> list[Line]:
    far = int(one.elsewhere.sum())
    words = (
        f"{one.case}, {plural(one.num_parameters, 'parameter')}, {plural(one.num_sequences, 'sequence')}, "
        f"‖∇F‖ at most {max(one.minimum.gradient_norm, float(one.gradient_norm.max())):.0e}; "
        f"{far} of {plural(len(one.removed), 'training run')} from the start ended at another minimum"
    )
    return [(name, "", words)]


def captions(result: Influence) -> dict[str, str]:
    """Return a caption for each figure and table."""
    meaning = (
        "Score: (N_i/N) ∇ℓ_qᵀ (H_o + δ I)⁻¹ ∇ℓ_i, the predicted change of the query's loss if sequence "
        "i is left out and the weights of the others are unchanged; positive: the sequence helped. ± "
        "bounds the error from the residual of the linear system"
    )
    found = {
        "sequences": f"Every training sequence, the most helpful first. {meaning}.",
        "dampings": "The linear systems at all dampings, and Spearman's ρ of their scores with those at "
        "the first damping. δ is a multiple of the mean diagonal of the GGN: directions with less "
        "curvature change little.",
        "scores": f"Scores of all training sequences at every damping, sorted by the first. {meaning}.",
    }
    if not result.comparisons:
        return found
    near = "near: training continued from the minimum; again: retrained from the same start"
    found["retraining"] = (
        "Change of a query's loss without a sequence: predicted with the ridge as damping, and measured "
        f"by training without it; {near}. On the line both are equal. Crosses: retraining ended at "
        "another minimum than continued training. Axes are linear near zero."
    )
    found["ranks"] = (
        "Spearman's ρ over sequences, mean over queries, of predicted with measured changes; 95 % intervals "
        f"by the bootstrap over queries and sequences. {near}. λ: the ridge of the objective, which is "
        "the default damping. measured/predicted: the median. Blocks without factors are left out of "
        "K-FAC."
    )
    found["removed"] = f"Every query and sequence left out; {near}. moved: distance ‖Δθ‖."
    found["claims"] = "Claims about influence, with verdicts from the intervals."
    return found
