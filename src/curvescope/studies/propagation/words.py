"""What is said about the sources of curvature: the numbers to look at first, rows of the table, captions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms.estimates.intervals import may_be_largest
from curvescope.core.numbers import LIES_BETWEEN, between, one_of, plural, rounded, with_error
from curvescope.models.sources import REST
from curvescope.runs.shown import Line
from curvescope.studies.propagation.shares import HESSIAN, OUTER

if TYPE_CHECKING:
    from curvescope.studies.propagation.study import Propagation

NAMED = 3  # sources that a line names
LIES = "what the steps found, and a bound beyond it that holds with 95 % certainty"
REST_WORDS = (
    "Rest: what is left of the Hessian, the second derivatives of all that is called outside of these parts"
    "{}, such as the head, whose logits are bilinear in the last state and U."
)


def summary(result: Propagation) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    shares = result.shares
    found = [
        ("loss", f"{result.loss:.4f}", f"{result.loss_name} over {result.num_terms:g} terms of {result.data}")
    ]
    found += _ends(result)
    norm = shares.norm(HESSIAN)
    outer = shares.share(OUTER)
    found += [
        ("‖H‖", with_error(norm.value, norm.stderr), "Frobenius norm; ± is a standard error"),
        (
            "share of the GGN",
            with_error(outer.value, outer.stderr),
            "of ‖H‖²: ⟨GGN, H⟩ / ‖H‖²; the sources have the rest, and a negative share takes away",
        ),
        _strongest(result),
        (
            "adds up to",
            f"{shares.residual:.1e}",
            f"‖H v − GGN v − Σ sources‖ / ‖H v‖ over {plural(len(shares.forms), 'vector')}",
        ),
    ]
    return [*found, *(("note", "", note) for note in result.notes)]


def _ends(result: Propagation) -> list[Line]:
    """Where both ends of the spectrum of H lie."""
    top, _, low, _ = result.ends_of(HESSIAN)
    if math.isnan(top):
        return []
    least, most = result.bounds_of(HESSIAN)
    value, words = between(top, most), f"λ_min {between(least, low)}"
    words += f"; {LIES_BETWEEN}" if " to " in value + words else ""
    return [("λ_max, H", value, words)]


def opening(result: Propagation) -> str:
    """How much of the Hessian is the GGN, and which source is the strongest of the rest."""
    shares = result.shares
    outer = shares.share(OUTER)
    said = f"The GGN makes up {with_error(100 * outer.value, 100 * outer.stderr)} % of ‖H‖²"
    if all(shares.is_zero(name) for name in result.sources):
        return f"{said}; no source brings anything."
    first, whole = strongest(result), shares.norm(HESSIAN)
    count = plural(len(result.sources), "source")
    if len(first) > 1:
        names = one_of([f"{name} ({_norm(result, name)})" for name in first], NAMED)
        return f"{said}. The strongest of {count} of the rest is {names}, which are not told apart."
    of = f", {rounded(shares.norm(first[0]).value / whole.value, 2)} of ‖H‖" if whole.value else ""
    return (
        f"{said}. The strongest of {count} of the rest is {first[0]}, whose norm is "
        f"{_norm(result, first[0])}{of}."
    )


def strongest(result: Propagation) -> list[str]:
    """The sources that may have the largest norm, by their estimates: one where intervals tell."""
    norms = [result.shares.norm(name) for name in result.sources]
    values, low, high = (np.array([getattr(n, what) for n in norms]) for what in ("value", "low", "high"))
    return [result.sources[i] for i in may_be_largest(values, low, high)]


def _norm(result: Propagation, name: str) -> str:
    norm = result.shares.norm(name)
    return with_error(norm.value, norm.stderr)


def _strongest(result: Propagation) -> Line:
    """The sources with the largest norms."""
    order = sorted(result.sources, key=lambda name: -result.shares.norm(name).value)[: NAMED + 1]
    words = f"‖{order[0]}‖ = {_norm(result, order[0])}"
    then = ", ".join(f"{name} {_norm(result, name)}" for name in order[1:])
    words += f", then {then}" if then else ""
    first = strongest(result)
    words += f"; {len(first)} are not told apart" if len(first) > 1 else ""
    value = one_of(first) if len(first) <= NAMED else "not decided"
    return ("strongest source", value, f"{words}; norms of sources that cancel do not add up")


def row(result: Propagation, name: str) -> dict[str, Any]:
    """Everything that is known about H, the GGN or one source."""
    trace, norm, share = (f(name) for f in (result.shares.trace, result.shares.norm, result.shares.share))
    top, _, low, _ = result.ends_of(name)
    least, most = result.bounds_of(name)
    layer, dot, kind = name.partition(".")
    return {
        "layer": layer if dot else "–",
        "source": name if name in (HESSIAN, OUTER) else kind or name,
        "trace": trace.value,
        "trace_stderr": trace.stderr,
        "trace_low": trace.low,
        "trace_high": trace.high,
        "frobenius": norm.value,
        "frobenius_stderr": norm.stderr,
        "frobenius_low": norm.low,
        "frobenius_high": norm.high,
        "lambda_max": top,
        "lambda_max_low": top,
        "lambda_max_high": most,
        "lambda_min": low,
        "lambda_min_low": least,
        "lambda_min_high": low,
        "share": share.value,
        "share_stderr": share.stderr,
        "share_low": share.low,
        "share_high": share.high,
        "method": "zero" if result.shares.is_zero(name) else "exact" if result.shares.exact else "probes",
        "what": meaning(result, name),
    }


def meaning(result: Propagation, name: str) -> str:
    """What H, the GGN or a source is, in words."""
    if name == REST:
        held = f"; blocks outside of them: {', '.join(result.outside)}" if result.outside else ""
        return f"what is left: all that no source above holds, such as the head{held}"
    own = {HESSIAN: "the Hessian", OUTER: "the generalized Gauss–Newton matrix, no source"}
    return own.get(name, "the second derivative of this part alone")


def _outside(result: Propagation) -> str:
    return f" ({', '.join(result.outside)})" if result.outside else ""


def captions(result: Propagation) -> dict[str, str]:
    """What each figure and table shows."""
    probes = plural(len(result.shares.forms), "probe")
    exact = result.shares.exact
    how = "from all unit vectors, exactly" if exact else f"from {probes} that all of them see"
    bars = "" if exact else "; bars are 95 % intervals"
    what = (
        "H = H_o + Σ over sources: the second derivative of each norm, attention and feed-forward network "
        "alone, seen through the first derivatives of all others. " + REST_WORDS.format(_outside(result))
    )
    return {
        "sources": f"{what} Trace, Frobenius norm and share of ‖H‖² (⟨A, H⟩/‖H‖²; they add up to one) {how}. "
        f"λ_max and λ_min from Lanczos steps: {LIES}. Zero: a matrix that is "
        "nothing but rounding (it is not symmetric); its errors are its size.",
        "by_layer": "Every source at its layer with the 95 % interval of its norm or share, or where its "
        "eigenvalue lies, with 95 % certainty; behind the layers H, the GGN and sources of no layer.",
        "flow": f"{what} Top: Frobenius norm of each source, layer by layer, and its share of ‖H‖². Bottom: "
        f"largest and least eigenvalue of each source ({LIES}), and how strongly "
        f"layers are coupled, ‖H_lm‖ / √(‖H_ll‖ ‖H_mm‖). Norms and shares {how}{bars}.",
        "norms": f"Frobenius norm of each source, {how}.",
        "coupling": "Frobenius norm of every block of the Hessian between two layers, from probes on one "
        "layer each, with standard error and 95 % interval.",
    }
