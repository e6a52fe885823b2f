"""Statements of the paper and its precursor about bounds, each with a verdict from the study `bounds`.

The paper measures none of its bounds, so the inequalities themselves are compared. A claim holds if no
instance violates it, which is evidence but no proof. It fails as printed and holds corrected if some instance
violates it, and none violates a corrected form. Otherwise it fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from curvescope.core.progress import Progress
from curvescope.papers.common import Claimed, FigureConfig
from curvescope.runs.resumable_loop import State
from curvescope.runs.study import Study
from curvescope.runs.study_result import FAILS, HOLDS, Claim
from curvescope.studies import bounds
from curvescope.studies.bounds import Bounds, Comparisons, analysis
from curvescope.studies.bounds.analysis import REPAIRED

PROFILES = {
    "quick": bounds.Config(num_seeds=4),
    "full": bounds.Config(
        num_seeds=20,
        weight_scales=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        data_scales=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        depths=(1, 2, 4, 8),
        num_layers=(1, 2, 3, 4, 6),
    ),
}
EVIDENCE = "a claim holds if no tested instance violates it, which is evidence but no proof"
CORRECTED = "fails as printed, holds corrected"
LITERAL, PROOF = "lemma, literal σ", "lemma, σ of its proof"
HEADS = (analysis.HEAD, analysis.KEYLESS, analysis.CLUSTERS)
BLOCKS = (analysis.BLOCK, analysis.CLOSING)
WHOLE = (analysis.WHOLE, analysis.OUTER)


@dataclass(frozen=True)
class Config(FigureConfig):
    """The profile sets the number of instances and scales."""


@dataclass(frozen=True)
class ClaimedBounds(Claimed):
    """Comparisons of the study as a figure of the paper."""

    NAME = "bounds"

    measured: Bounds

    def claims(self) -> list[Claim]:
        """Return every claim with its verdict."""
        return [_verdict(inequality, self.measured) for inequality in STATED]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> ClaimedBounds:
    """Measure everything that is not stored in `state`."""
    comparisons = bounds.run(PROFILES[cfg.profile], progress=progress, state=state)
    return ClaimedBounds(comparisons, notes=[*comparisons.notes, EVIDENCE])


class Fix(NamedTuple):
    """A corrected form of a claim: the name of its bound, and the change in words."""

    bound: str
    words: str


class Stated(NamedTuple):
    """An inequality of the paper, and the comparisons that test it."""

    claim: str
    published: str
    quantities: str  # separated by spaces
    fix: Fix | None = None
    bound: str = analysis.THEOREM_6
    source: str = "Theorem 6 and its proof"
    instances: tuple[str, ...] = ()  # names of the instances; empty: all


_head = partial(Stated, bound=analysis.THEOREM_1, source="Theorem 1 and its proof")
_norm = partial(Stated, bound=LITERAL, source="lemma on LayerNorm")
_size = partial(Stated, source="proposition before Theorem 6")
_network = partial(Stated, bound=analysis.PRECURSOR, source="precursor, arXiv 2409.11995")

SIX_BLOCKS = Fix(analysis.PRIORI, "with all six blocks, and ½ for 1/L")
WITH_ITS_OWN = Fix(analysis.PRIORI, "with a separate estimate")
WITHOUT_FACTOR = Fix(REPAIRED, "without the factor of the loss, and ½ for 1/L")
DEVIATION = Fix(PROOF, "σ the smallest standard deviation of a row, as in the proof")
STATED = (
    _head("Theorem 1", "‖H‖ ≤ M, constants of the main text", "‖H‖", SIX_BLOCKS, instances=HEADS),
    _head(
        "Theorem 1, other constants",
        "‖H‖ ≤ M, constants of the appendix",
        "‖H‖",
        SIX_BLOCKS,
        bound=analysis.APPENDIX,
        instances=HEADS,
    ),
    _head("Theorem 1 with random weights and data", "‖H‖ ≤ M", "‖H‖", instances=(analysis.HEAD,)),
    _head("M covers KK", "KK is not in the maximum", "‖H_KK‖", WITH_ITS_OWN),
    _head(
        "M of the appendix covers VK",
        "VK is not in the maximum",
        "‖H_KV‖",
        WITH_ITS_OWN,
        bound=analysis.APPENDIX,
    ),
    _head("estimate of QQ", "as in the maximum", "‖H_QQ‖"),
    _head("estimate of QK", "as in the maximum", "‖H_QK‖"),
    _head("estimate of VQ", "as in the maximum", "‖H_QV‖"),
    _head("estimate of VV", "(2L/d)‖X‖²", "‖H_VV‖"),
    _head("slope of the softmax", "‖∂A/∂T‖ ≤ 1/L", "‖∂A/∂T‖", Fix(REPAIRED, "½ for 1/L")),
    _head("moment matrix Z_1", "‖Z_1‖ ≤ ‖X‖³/L", "‖Z_1‖", Fix(REPAIRED, "½‖X‖³ for ‖X‖³/L")),
    _head("curvature of the softmax", "‖∂²A/∂T²‖ ≤ 6", "‖∂²A/∂T²‖"),
    _head("moment matrix Z_2", "‖Z_2‖ ≤ 6‖X‖⁵", "‖Z_2‖"),
    _head("attention matrix", "‖A‖ ≤ L", "‖A‖"),
    _norm("slope of LayerNorm", "‖J‖ ≤ 1/σ + ‖X‖²/(√n σ³)", "‖∂LN/∂X‖", DEVIATION),
    _norm("curvature of LayerNorm", "‖H‖ ≤ (‖X‖/σ³)(1 + √(m/n)) + …", "‖∂²LN/∂X²‖", DEVIATION),
    _size("size of Y", "‖Y‖_F = √(Ld)", "‖Y‖_F"),
    _size("size of S", "‖S‖ ≤ √(Ld)(1 + √min(L, d_ff) ‖W_1‖‖W_2‖)", "‖S‖"),
    Stated("Theorem 6", "‖H‖ ≤ M_tr", "‖H‖", instances=BLOCKS),
    Stated("Theorem 6, σ of the lemma", "‖H‖ ≤ M_tr", "‖H‖", bound=analysis.LITERAL, instances=BLOCKS),
    Stated("slopes of S", "five estimates of ‖B_i‖", "‖B_1‖ ‖B_2‖ ‖B_Q‖ ‖B_K‖ ‖B_V‖"),
    Stated("ξ_12", "‖ξ_12‖ ≤ √d ‖Y‖", "‖ξ_12‖"),
    Stated("ξ_21", "‖ξ_21‖ ≤ √d_ff ‖W_2‖", "‖ξ_21‖", Fix(REPAIRED, "‖Y‖_F for √d_ff ‖W_2‖")),
    Stated("ξ of W_1, W_2 with attention", "six estimates", "‖ξ_1Q‖ ‖ξ_1K‖ ‖ξ_1V‖ ‖ξ_2Q‖ ‖ξ_2K‖ ‖ξ_2V‖"),
    Stated("ξ inside attention", "nine estimates", " ".join(f"‖ξ_{a}{b}‖" for a in "QKV" for b in "QKV")),
    Stated("Φ_QQ and Φ_KK", "12‖W_V‖‖W_K‖²‖X‖⁵/(L d d_K)", "‖Φ_QQ‖ ‖Φ_KK‖"),
    Stated(
        "Φ_QK and Φ_KQ",
        "12…/(L d d_K) + 2‖W_V‖‖X‖³/(L²√(d d_K))",
        "‖Φ_QK‖ ‖Φ_KQ‖",
        WITHOUT_FACTOR,
    ),
    Stated(
        "Φ of W_V with W_Q or W_K",
        "2‖W_K‖‖X‖³/(L²√(d d_K))",
        "‖Φ_VQ‖ ‖Φ_VK‖ ‖Φ_QV‖ ‖Φ_KV‖",
        WITHOUT_FACTOR,
    ),
    _network(
        "precursor, GGN",
        "n√2 M_x² M_W^{2n} + √2 M_W² (M_W^{2n} − 1)/(M_W² − 1)",
        analysis.OUTER,
        Fix(analysis.PRIORI, "½|x|² Σ_p Π_{s≠p}‖W_s‖²"),
    ),
    _network(
        "precursor, Hessian",
        "the same, without the functional Hessian",
        analysis.WHOLE,
        Fix(analysis.PRIORI, "½ for √2, products over s ≠ p, and the functional Hessian"),
    ),
)


def _verdict(inequality: Stated, result: Bounds) -> Claim:
    tried = _tried(inequality, result, inequality.bound)
    violated, count = int(tried.violated.sum()), len(tried.true)
    if not violated:
        ratio = tried.ratio[tried.true > 0]
        measured = (
            f"violated 0 of {count}; bound / exact value: median {np.median(ratio):.3g}, minimum "
            f"{ratio.min():.3g}"
        )
        return Claim(inequality.claim, inequality.published, measured, HOLDS, inequality.source)
    with np.errstate(divide="ignore"):
        worst = float((tried.true / tried.value)[tried.violated].max())
    up_to = f"{worst:.3g}" if np.isfinite(worst) else "∞"
    measured, verdict = f"violated {violated} of {count}, exact value / bound up to {up_to}", FAILS
    if inequality.fix is not None:
        corrected = _tried(inequality, result, inequality.fix.bound)
        still = int(corrected.violated.sum())
        measured += f"; {inequality.fix.words}: {still} of {len(corrected.true)}"
        verdict = FAILS if still else CORRECTED
    return Claim(inequality.claim, inequality.published, measured, verdict, inequality.source)


def _tried(inequality: Stated, result: Bounds, bound: str) -> Comparisons:
    """Return the comparisons of a claim with one bound; those of the precursor use networks."""
    quantities = inequality.quantities.split()
    table = result.bounds if quantities[0] in WHOLE else result.estimates
    names = inequality.instances or tuple(
        name
        for name in dict.fromkeys(table.instance)
        if name.startswith(analysis.NETWORK) == (inequality.bound == analysis.PRECURSOR)
    )
    return table.chosen(quantity=quantities, bound=bound, instance=names)


STUDY = Study(Config, run)
