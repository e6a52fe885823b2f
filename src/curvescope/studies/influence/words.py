"""What is said about influence: the numbers to look at first, captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.influence.tables import says, short

if TYPE_CHECKING:
    from curvescope.studies.influence.scores import Scores
    from curvescope.studies.influence.study import Comparison, Influence

SHOWN = 3  # sequences at either end


def summary(result: Influence) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    where = f"{', '.join(result.blocks)}, {plural(result.num_parameters, 'parameter')}"
    data = f"of {plural(len(result.texts), 'training sequence')} of {result.data}"
    low, high = result.mean_diagonal_interval
    diagonal = f"{result.mean_diagonal:.3g}" + (f" [{low:.3g}, {high:.3g}]" if high > low else "")
    rule = f"{result.units[0]:g} × the GGN's mean diagonal, {diagonal}, over {where}"
    found = [("loss", f"{result.loss:.4f}", data), ("δ", f"{result.scores[0].damping[0]:.3g}", rule)]
    for i, (query, scores) in enumerate(zip(result.queries, result.scores, strict=True), start=1):
        found += _query(f"query {i}", query, scores, result.texts)
    found += [line for name, one in result.comparisons.items() for line in _case(name, one)]
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


def _case(name: str, one: Comparison) -> list[Line]:
    far = int(one.elsewhere.sum())
    words = (
        f"{one.case}, {plural(one.num_parameters, 'parameter')}, {plural(one.num_sequences, 'sequence')}, "
        f"‖∇F‖ at most {max(one.minimum.gradient_norm, float(one.gradient_norm.max())):.0e}; "
        f"{far} of {plural(len(one.removed), 'training')} from the start ended at another minimum"
    )
    return [(name, "", words)]


def notes(scores: list[Scores]) -> list[str]:
    """What a reader should know of the scores at the chosen damping."""
    found = []
    for i, one in enumerate(scores, start=1):
        if not one.converged[0]:
            found.append(f"query {i}: the linear system has not converged; ± says what that leaves open")
        if float(np.abs(one.values[0]).max()) > one.query_loss:
            found.append(
                f"query {i}: the largest score is more than the query's loss, where no linear prediction "
                "holds; its order may be read, its size not"
            )
    return found


def captions(result: Influence) -> dict[str, str]:
    """What each figure and table shows."""
    meaning = (
        "Score: (N_i/N) ∇ℓ_qᵀ (H_o + δ I)⁻¹ ∇ℓ_i, by which the query's loss is predicted to "
        "change if sequence i is left out and the others weigh what they did; positive: it has helped. "
        "± bounds what the residual of the linear system may change"
    )
    found = {
        "sequences": f"Every training sequence, the most helpful first. {meaning}.",
        "dampings": "The linear systems at all dampings, and Spearman's ρ of their scores with the first's. "
        "δ is a multiple of the mean diagonal of the GGN: directions of less curvature move little.",
        "scores": f"Scores of all training sequences at every damping, sorted by the first. {meaning}.",
    }
    if not result.comparisons:
        return found
    near = "near: trained on from the minimum; again: trained from the same start"
    found["retraining"] = (
        "Change of a query's loss without a sequence, as predicted, with the ridge as damping, "
        f"and as found by training without it; {near}. On the line both are equal. Crosses: training again "
        "has ended at another minimum than training on. Axes are linear near zero."
    )
    found["ranks"] = (
        "Spearman's ρ over sequences, mean over queries, of predicted with measured changes; 95 % intervals "
        f"by the bootstrap over queries and sequences. {near}. λ: the ridge of the objective, which is the "
        "damping where none is given. measured/predicted: the median. Blocks without factors are left out of "
        "K-FAC."
    )
    found["removed"] = f"Every query and sequence left out; {near}. moved: how far θ went."
    found["claims"] = "What is said about influence, with verdicts from the intervals."
    return found
