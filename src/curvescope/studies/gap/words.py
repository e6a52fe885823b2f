"""What is said about the gap: the numbers to look at first, and captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import LIES_BETWEEN, between, plural, rounded, with_error
from curvescope.runs.shown import Line
from curvescope.studies.gap.pair import Pair

if TYPE_CHECKING:
    from curvescope.studies.gap.study import Gap


def summary(result: Gap) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    last = result.checkpoints[-1]
    pair = result.pair(last)
    words = f"{result.loss_name} over {result.num_terms:g} terms of {result.data}, at {last}"
    found: list[Line] = [("loss", f"{pair.loss:.4f}", words), *whole(pair)]
    if len(result.checkpoints) > 1:
        found.append(_over_training(result))
    found += _blocks(result, last)
    if result.targets:
        found.append(_targets(result))
    if result.draws is not None:
        value, error = result.draws.expectation()
        words = (
            f"‖E H_f‖² / E‖H_f‖² over {plural(result.draws.gram.shape[1], 'draw')} of targets from the "
            "model: zero in theory; ± is a standard error"
        )
        found.append(("functional Hessian of drawn targets", with_error(value, error), words))
    return [*found, *(("note", "", note) for note in result.notes)]


def opening(result: Gap) -> str:
    """How much of the Hessian the GGN leaves out, at the last checkpoint and since the first."""
    last = result.checkpoints[-1]
    pair = result.pair(last)
    said = (
        f"The functional Hessian, which the GGN leaves out, is {with_error(*pair.share())} of ‖H‖ at {last}"
    )
    if np.isfinite(pair.gap().value):
        said += f"; the GGN's λ_max is {off(*pair.gap_interval())} the Hessian's"
    if len(result.checkpoints) == 1:
        return f"{said}."
    first = result.checkpoints[0]
    return f"{said}. At {first} the share was {with_error(*result.pair(first).share())}."


def off(low: float, high: float) -> str:
    """`25.1 to 27.6 % below`, from both ends of 1 − λ_max(H_o)/λ_max(H)."""
    if low < 0 < high:
        return f"between {rounded(-100 * low, 3)} % above and {rounded(100 * high, 3)} % below"
    near, far = sorted((abs(100 * low), abs(100 * high)))
    return f"{between(near, far, 3)} % {'below' if high > 0 else 'above'}"


def _percent(pair: Pair) -> str:
    """`25.1 to 27.6 %`, where 1 − λ_max(H_o)/λ_max(H) lies."""
    low, high = pair.gap_interval()
    return f"{between(100 * low, 100 * high, 3)} %"


def whole(pair: Pair) -> list[Line]:
    """The whole model: both λ_max, norms, traces, spectra."""
    h, g = pair.hessian.ends, pair.ggn.ends
    assert h is not None
    assert g is not None
    found = [
        (
            "λ_max, H against H_o",
            _percent(pair),
            f"1 − λ_max(H_o)/λ_max(H); λ_max {between(float(h.values[1]), h.high)} and "
            f"{between(float(g.values[1]), g.high)}; {LIES_BETWEEN}",
        ),
        (
            "functional share",
            with_error(*pair.share()),
            f"‖H_f‖/‖H‖; norms {with_error(pair.functional.norm, pair.functional.norm_stderr)} and "
            f"{with_error(pair.hessian.norm, pair.hessian.norm_stderr)}",
        ),
        (
            "trace, H_f of H",
            with_error(*pair.trace_gap()),
            f"tr H_f / tr H; traces {with_error(pair.functional.trace, pair.functional.trace_stderr)} and "
            f"{with_error(pair.hessian.trace, pair.hessian.trace_stderr)}",
        ),
    ]
    if pair.distance is not None:
        words = (
            f"W₁ of the spectra of H and H_o in units of ‖H‖/√n = {pair.scale:.3g}, without its bias; "
            "at most the functional share"
        )
        found.append(("Wasserstein distance", with_error(*pair.wasserstein()), words))
    return found


def _over_training(result: Gap) -> Line:
    each = [
        f"{name} {with_error(*pair.share())} (loss {pair.loss:.2f}, λ_max gap {100 * pair.gap().value:.2g} %)"
        for name, pair in ((name, result.pair(name)) for name in result.checkpoints)
    ]
    first, last = (result.pair(result.checkpoints[i]).share().value for i in (0, -1))
    return ("share over training", f"× {last / first:.2g}", ", ".join(each))


def _blocks(result: Gap, checkpoint: str) -> list[Line]:
    """Blocks whose λ_max the GGN misses most and least."""
    gaps = {b: result.pair(checkpoint, b).gap() for b in result.blocks[1:]}
    known = {b: gap for b, gap in gaps.items() if np.isfinite(gap.value)}
    if not known:
        return []
    order = sorted(known, key=lambda b: -abs(known[b].value))
    each = [f"{b} {_percent(result.pair(checkpoint, b))}" for b in order]
    words = f"λ_max that the GGN misses at {checkpoint}: {', '.join(each[:6])}"
    return [("worst block", order[0], words)]


def _targets(result: Gap) -> Line:
    own = result.pair(result.checkpoints[-1])
    each = {"own": own, **result.targets}
    said = [f"{name} {with_error(*p.share())} (loss {p.loss:.2f})" for name, p in each.items()]
    least = result.targets["predicted"].share().value
    ratio = result.targets["random"].share().value / least if least > 0 else np.inf
    words = f"times the share with random targets, of that with predicted ones: {', '.join(said)}"
    return ("share by targets", f"{ratio:.2g}", words)


WHAT = (
    "H = H_o + H_f, H_o the GGN and H_f the functional Hessian. λ_max from Lanczos steps: an eigenvalue "
    "lies within the error, and the largest is below high 95 times in 100; λ_max gap is 1 − "
    "λ_max(H_o)/λ_max(H). Traces and Frobenius norms with standard errors and 95 % intervals over probes; "
    "trace gap is tr H_f/tr H; functional share is ‖H_f‖/‖H‖. Wasserstein: W₁ between the spectra of H and "
    "H_o, in units of the root mean square eigenvalue ‖H‖/√n, at most the functional share; its error is "
    "that over probes (stderr, and a 95 % interval) and how far the last half of the Lanczos steps has "
    "moved it (from least to most); unresolved bounds what they may leave open."
)


def captions(result: Gap) -> dict[str, str]:
    """What each figure and table shows."""
    where = "every checkpoint" if len(result.checkpoints) > 1 else "the model as it is"
    found = {
        "gap": f"One row per checkpoint and block; 'all' is the whole model. {WHAT}",
        "training": f"The whole model at {where}. {WHAT}",
        "over_training": f"Functional share, λ_max of H and H_o, and Wasserstein distance at {where}; bars "
        "are errors over probes, of λ_max residuals, within which an eigenvalue lies.",
        "blocks": f"By block, at {where}: how much of λ_max the GGN misses, in percent (below zero: it has "
        "too much), and the functional share ‖H_f‖/‖H‖.",
    }
    if result.pair(result.checkpoints[-1]).densities:
        found["densities"] = (
            "Share of eigenvalues above |λ|, on either side of zero, of the Hessian and of the GGN, at "
            f"{where}: the quadratures of all probes, not broadened. W₁ is the area between the two curves, "
            "seen on linear axes."
        )
    if result.targets:
        text = (
            "The whole model at the last checkpoint, parameters fixed, targets exchanged: predicted are the "
            "likeliest classes or the outputs themselves, drawn are from the model's own distribution, "
            "random have nothing to do with the input."
        )
        found["targets"] = f"{text} {WHAT}"
        found["other_targets"] = (
            f"{text} Left: functional share against the loss. Right: the norm of the mean of H_f over draws "
            "of targets from the model, of that of a single one; 1/√draws where its expectation is zero."
        )
    return found
