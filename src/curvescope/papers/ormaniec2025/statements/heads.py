"""Growth of the blocks of one head with its tokens and weights, and the attention moments in each block.

A statement is a row; its verdict is computed from the numbers by the rules in this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form import attention
from curvescope.closed_form.attention.hessian import AttentionCurvature
from curvescope.closed_form.block_matrix import Pair
from curvescope.closed_form.bounds import growth
from curvescope.closed_form.bounds.operator_norms import attention_norm_bounds
from curvescope.closed_form.printed.kronecker import Theorem
from curvescope.core.hessian_terms import HALVES, SYMBOLS, Half
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.runs.study_result import FAILS, HOLDS

SLOPE = "holds as a slope for small scores, as a bound beyond"
CORRECTED = "holds with a correction"
VERDICTS = (HOLDS, SLOPE, CORRECTED, FAILS)
OURS = "ours"  # source of a statement that is not from the paper

STEP = 1.001  # ratio of arguments in the difference quotient of a local slope
Slopes = dict[tuple[Pair, Half], float]
SMALL, TOLERANCE = 1e-3, 0.02
BEYOND = (1.0, 3.0)
GRID = np.logspace(-2, 1, 37)
SPREAD, FARTHER = 12.0, 40.0  # σ²Δ at which saturation is measured, and a second, larger value
NEAR = 0.5  # tolerance of a slope there
B = 0.1  # ∂²ℓ/∂F² of a squared error
CLAIMS = {"outer": "slides; Theorem 3.1", "functional": "slides; Theorem 3.2"}
SMALL_WEIGHT, LARGE_WEIGHTS, EXACT = 1e-4, (1.0, 20.0), 1e-6
TABLES = {1: growth.WEIGHTS_Q, 2: growth.WEIGHTS_K, 3: growth.WEIGHTS_V}
FACTOR = 3.0
MOMENTS = ("M1", "M2", "M3")


@dataclass(frozen=True)
class Statement(Result):
    """One row: the claimed value and the measured one, over several random instances."""

    statement: str
    where: str
    claimed: float
    measured: float  # mean over instances
    low: float  # smallest value
    high: float  # largest value
    verdict: str
    note: str


@dataclass(frozen=True)
class StatementGroup(Result):
    """Statements on one subject, and the arrays of its figure."""

    title: str
    rows: list[Statement]
    curves: dict[str, np.ndarray]


def state(
    statement: str,
    where: str,
    claimed: float,
    values: Sequence[float] | np.ndarray | float,
    *,
    tolerance: float,
    note: str = "",
    verdict: str | None = None,
) -> Statement:
    """Make a row; without a given verdict it holds if every value is within `tolerance` of the claim."""
    found = np.atleast_1d(np.asarray(values, dtype=float))
    near = bool((np.abs(found - claimed) <= tolerance).all())
    return Statement(
        statement,
        where,
        float(claimed),
        float(found.mean()),
        float(found.min()),
        float(found.max()),
        (HOLDS if near else FAILS) if verdict is None else verdict,
        note,
    )


def slope_verdict(
    claimed: float, near: np.ndarray, far: np.ndarray, *, bound_ratio: float, tolerance: float
) -> str:
    """Verdict on a growth law: a slope everywhere, a slope for small scores and a bound beyond, or neither.

    Args:
        near: slopes for small scores.
        far: slopes at larger scales.
        bound_ratio: largest ratio of ‖block‖ and a bound that grows with exactly the claimed exponent.
    """
    if np.abs(near - claimed).max() > tolerance:
        return FAILS
    if np.abs(far - claimed).max() <= tolerance:
        return HOLDS
    return SLOPE if bound_ratio <= 1 + 1e-9 else FAILS


class AttentionHead(NamedTuple):
    """One attention head on one sequence, and the loss's gradient at its output."""

    X: Tensor  # (L, d)
    W_Q: Tensor  # (d, d_K)
    W_K: Tensor
    W_V: Tensor  # (d, d_V)
    G: Tensor  # (L, d_V)


def make_head(seed: int, L: int = 6, d: int = 4, d_K: int = 3, d_V: int = 3) -> AttentionHead:
    """Draw a head with standard normal entries."""
    source = generator(seed)
    shapes = (L, d), (d, d_K), (d, d_K), (d, d_V), (L, d_V)
    return AttentionHead(*(torch.randn(*shape, generator=source, dtype=torch.float64) for shape in shapes))


def local_slopes(at: Callable[[float], AttentionCurvature], scale: float) -> Slopes:
    """d log ‖block‖_F / d log scale of a curvature `at(scale)`, by pair and part; NaN if it is zero."""
    low, high = at(scale / STEP), at(scale * STEP)
    return {
        (pair, part): log_slope(float(low.frobenius(pair, part)), float(high.frobenius(pair, part)))
        for pair in growth.PAIRS
        for part in HALVES
    }


def log_slope(low: float, high: float, step: float = STEP) -> float:
    """Slope between two values whose arguments differ by the factor `step`²; NaN if one is not positive."""
    return math.log(high / low) / (2 * math.log(step)) if low > 0 and high > 0 else math.nan


def exponent(before: float, after: float, factor: float) -> float:
    """Power p in after = factor^p · before."""
    return math.log(after / before) / math.log(factor)


def name(pair: Pair, part: Half) -> str:
    """H_o(Q, K)."""
    return f"{SYMBOLS[part]}({pair[0]}, {pair[1]})"


def _slopes(heads: Sequence[AttentionHead], sigma: float) -> list[dict]:
    return [local_slopes(lambda s, h=h: attention.curvature(s * h.X, *h[1:], B), sigma) for h in heads]


def growth_in_data(num_heads: int) -> StatementGroup:
    """Exponents of σ for tokens σX, at a fixed ∂ℓ/∂F."""
    heads = [make_head(seed) for seed in range(num_heads)]
    near, far = _slopes(heads, SMALL), [_slopes(heads, sigma) for sigma in BEYOND]
    ratios = _bound_ratios(heads)
    rows = []
    for part in HALVES:
        for pair in growth.PAIRS:
            values = np.array([found[pair, part] for found in near])
            beyond = np.array([[found[pair, part] for found in at] for at in far])
            exponents = growth.DATA.exponents(pair, part)
            if not exponents:
                rows.append(_zero(heads, pair, part))
                continue
            said = " and ".join(f"σ^{e}" for e in exponents)
            words = ", ".join(f"{m:.2f} at σ = {s:g}" for s, m in zip(BEYOND, beyond.mean(1), strict=True))
            note = f"mean slope {words}; at most {ratios[pair, part]:.2f} of a bound that grows so"
            verdict = slope_verdict(
                min(exponents), values, beyond, bound_ratio=ratios[pair, part], tolerance=TOLERANCE
            )
            if len(exponents) > 1 and verdict != FAILS:
                verdict, note = CORRECTED, f"the slope is the smaller exponent, the larger a bound; {note}"
            rows.append(
                state(f"‖{name(pair, part)}‖ grows as {said}", CLAIMS[part], max(exponents), values,
                      tolerance=TOLERANCE, note=note, verdict=verdict)
            )  # fmt: skip
    rows += _terms_of_query_key(heads)
    return StatementGroup("growth in the data", rows, _curves(heads))


def _zero(heads: Sequence[AttentionHead], pair: tuple[str, str], part: Half) -> Statement:
    norms = [float(attention.curvature(*h, B).frobenius(pair, part)) for h in heads]
    verdict = HOLDS if not any(norms) else FAILS
    note = "not only bounded: exactly zero, at every σ" if verdict == HOLDS else "is not zero"
    return state(
        f"{name(pair, part)} is O(1)", CLAIMS[part], 0.0, norms, tolerance=0.0, note=note, verdict=verdict
    )


def _terms_of_query_key(heads: Sequence[AttentionHead]) -> list[Statement]:
    """The third-moment term and the mixed term of H_f(Q, K), each on its own."""

    def norms(head: AttentionHead, sigma: float) -> list[float]:
        terms = attention.curvature(sigma * head.X, *head[1:], B).terms(("Q", "K"), "functional")
        return [float(term.inner(term).sqrt()) for term in terms]

    step, found = 1.001, []
    for head in heads:
        low, high = norms(head, SMALL / step), norms(head, SMALL * step)
        found.append([log_slope(a, b, step) for a, b in zip(low, high, strict=True)])
    said = (
        ("the third-moment term of H_f(Q, K) alone grows as σ^5", 5),
        (
            "the mixed term Γ ⊗ I of H_f(Q, K) alone grows as σ^3",
            3,
        ),
    )
    return [
        state(words, CLAIMS["functional"], claimed, values, tolerance=TOLERANCE)
        for (words, claimed), values in zip(said, np.array(found).T, strict=True)
    ]


def _bound_ratios(heads: Sequence[AttentionHead]) -> dict:
    """Largest ratio of ‖block‖₂ and its bound C σ^exponent from norms, over σ and heads."""
    place = {"Q": 0, "K": 1, "V": 2}
    worst: dict = {}
    for part in HALVES:
        for head in heads:
            G, curve = (0 * head.G, B) if part == "outer" else (head.G, 0.0)
            for sigma in GRID[::6]:
                tokens = float(sigma) * head.X
                truth = attention.curvature(tokens, *head[1:4], G, curve)
                bound = attention_norm_bounds(tokens, *head[1:4], G, curve).upper
                for one, two in growth.PAIRS:
                    block = truth.to_dense((one, two), part).flatten(0, 1).flatten(1)
                    limit = float(bound[place[one], place[two]])
                    ratio = float(torch.linalg.matrix_norm(block, ord=2)) / limit if limit else 0.0
                    worst[(one, two), part] = max(worst.get(((one, two), part), 0.0), ratio)
    return worst


def _curves(heads: Sequence[AttentionHead]) -> dict[str, np.ndarray]:
    """Norms of one head, and mean slopes over heads, for the figure."""
    curves: dict[str, np.ndarray] = {"sigma": GRID}
    slopes = [_slopes(heads, float(sigma)) for sigma in GRID]
    centered = [h._replace(X=h.X - h.X.mean(0)) for h in heads]
    flat = [_slopes(centered, float(sigma)) for sigma in GRID]
    for part in HALVES:
        for pair in growth.PAIRS:
            key = f"{part} {''.join(pair)}"
            norms = [
                float(attention.curvature(float(s) * heads[0].X, *heads[0][1:], B).frobenius(pair, part))
                for s in GRID
            ]
            curves[f"norm {key}"] = np.array(norms)
            curves[f"slope {key}"] = np.array([np.mean([f[pair, part] for f in at]) for at in slopes])
            curves[f"centered {key}"] = np.array([np.mean([f[pair, part] for f in at]) for at in flat])
    return curves


def saturation(num_heads: int) -> StatementGroup:
    """Saturation for large tokens: every M₂ and M₃ decreases like exp(−σ²Δ) if no other gap is close to Δ."""
    heads = _lone_gaps(num_heads)
    found = {spread: [_saturated(head, gap, spread) for head, gap in heads] for spread in (SPREAD, FARTHER)}
    rows = []
    for part in HALVES:
        for pair in growth.PAIRS:
            law, farther = (growth.saturation_slope(pair, part, spread) for spread in found)
            if law is None or farther is None:
                continue
            values = np.array([slopes[pair, part] for slopes in found[SPREAD]])
            beyond = np.array([slopes[pair, part] for slopes in found[FARTHER]])
            verdict, note = _asymptotic(np.abs(values - law), np.abs(beyond - farther))
            if law == growth.DATA.bound(pair, part):
                note = f"no saturation: M₁ stays; {note}"
            words = f"slope of ‖{name(pair, part)}‖ at σ²Δ = {SPREAD:g} is {law:g}"
            rows.append(state(words, "ours (saturation law)", law, values, tolerance=NEAR, verdict=verdict,
                              note=note))  # fmt: skip
    return StatementGroup("saturation", rows, {})


def _saturated(head: AttentionHead, gap: float, spread: float) -> Slopes:
    return local_slopes(lambda s: attention.curvature(s * head.X, *head[1:], B), (spread / gap) ** 0.5)


def _asymptotic(here: np.ndarray, farther: np.ndarray) -> tuple[str, str]:
    """Verdict and note on a law for σ → ∞, from its errors at two scales.

    A head follows the law only at larger σ if a query has a third score close to the two largest.
    """
    near, all_farther = here <= NEAR, bool((farther <= NEAR).all())
    if near.all():
        return HOLDS, f"within {here.max():.2g} for all heads"
    words = f"within {NEAR:g} for {near.sum()} of {len(near)} heads, off by up to {here.max():.2g}"
    if all_farther:
        return CORRECTED, f"{words}; for all of them at σ²Δ = {FARTHER:g}"
    return FAILS, words


def _lone_gaps(num: int) -> list[tuple[AttentionHead, float]]:
    """Draw heads with one smallest gap Δ between a query's two largest scores, and no other gap near it."""
    found: list[tuple[AttentionHead, float]] = []
    seed = 0
    while len(found) < num:
        head = make_head(seed)
        top = (head.X @ head.W_Q @ head.W_K.T @ head.X.T / 3**0.5).topk(2).values
        gaps = (top[:, 0] - top[:, 1]).sort().values
        if 0.1 < 1.7 * float(gaps[0]) < float(gaps[1]):
            found.append((head, float(gaps[0])))
        seed += 1
    return found


def scaled_targets(num_heads: int) -> StatementGroup:
    """∂ℓ/∂F of a squared error for small σ: constant with fixed targets, ∝ σ if targets scale with σ."""
    rows = []
    for shift, words in ((0, "fixed targets"), (1, "targets that scale with σ")):
        found = [_with_targets(make_head(seed), shift) for seed in range(num_heads)]
        for pair in growth.PAIRS[:-1]:
            claimed = growth.DATA.slope(pair, "functional")
            assert claimed is not None
            values = [slopes[pair, "functional"] for slopes in found]
            note = "" if shift == 0 else "one more than with fixed targets"
            rows.append(
                state(f"‖{name(pair, 'functional')}‖ with {words} grows as σ^{claimed + shift}", "ours",
                      claimed + shift, values, tolerance=TOLERANCE, note=note)
            )  # fmt: skip
    return StatementGroup("targets", rows, {})


def _with_targets(head: AttentionHead, power: int) -> dict:
    def at(sigma: float) -> attention.AttentionCurvature:
        tokens, scale = sigma * head.X, 3**-0.5
        F = torch.softmax(scale * tokens @ head.W_Q @ head.W_K.T @ tokens.T, -1) @ tokens @ head.W_V
        return attention.curvature(tokens, *head[1:4], B * (F - sigma**power * head.G), B)

    return local_slopes(at, SMALL)


def centering(num_heads: int) -> StatementGroup:
    """Tokens of mean zero: uniform attention averages to zero, so M₁ is of third order."""
    heads = [make_head(seed) for seed in range(num_heads)]
    centered = [h._replace(X=h.X - h.X.mean(0)) for h in heads]
    slopes = _slopes(centered, SMALL)
    rows = []
    for pair in growth.PAIRS:
        before = growth.DATA.slope(pair, "outer")
        note = (
            "as without centering"
            if before == 6
            else f"σ^{before} without centering; centering removes the difference"
        )
        values = [found[pair, "outer"] for found in slopes]
        words = f"‖{name(pair, 'outer')}‖ of centered tokens grows as σ^6"
        rows.append(state(words, "ours", 6, values, tolerance=TOLERANCE, note=note))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    masked = [
        local_slopes(lambda s, h=h: attention.curvature(s * h.X, *h[1:], B, mask=mask), SMALL)
        for h in centered
    ]
    for pair in (("Q", "V"), ("V", "V")):
        claimed = growth.DATA.slope(pair, "outer")
        assert claimed is not None
        words = (
            f"under a causal mask, centering changes nothing: ‖{name(pair, 'outer')}‖ grows as σ^{claimed}"
        )
        values = [found[pair, "outer"] for found in masked]
        note = "a centered sequence does not have centered prefixes"
        rows.append(state(words, "ours", claimed, values, tolerance=TOLERANCE, note=note))
    return StatementGroup("centering", rows, {})


def growth_in_weights(num_heads: int) -> StatementGroup:
    """Exponents of t if one weight is replaced by tW, at a fixed ∂ℓ/∂F."""
    heads = [make_head(seed) for seed in range(num_heads)]
    rows, curves = [], {}
    for place, table in TABLES.items():
        scales = (SMALL_WEIGHT, *LARGE_WEIGHTS)
        found = {
            t: [local_slopes(lambda s, h=h, place=place: _scaled(h, place, s), t) for h in heads]
            for t in scales
        }
        for part in HALVES:
            measured = []
            for pair in growth.PAIRS:
                exponents = table.exponents(pair, part)
                near = np.array([slopes[pair, part] for slopes in found[SMALL_WEIGHT]])
                measured.append(near.mean() if exponents else np.nan)
                if exponents:
                    far = np.array([[slopes[pair, part] for slopes in found[t]] for t in LARGE_WEIGHTS])
                    rows.append(_weight_row(table, pair, part, near, far))
            curves[f"{table.variable} {part}"] = np.array(measured)
    return StatementGroup("growth in the weights", rows, curves)


def _scaled(head: AttentionHead, place: int, t: float) -> attention.AttentionCurvature:
    return attention.curvature(
        *AttentionHead(*(t * value if i == place else value for i, value in enumerate(head))), B
    )


def _weight_row(
    table: growth.GrowthTable, pair: Pair, part: Half, near: np.ndarray, far: np.ndarray
) -> Statement:
    exponents = table.exponents(pair, part)
    claimed, slope = max(exponents), min(exponents)
    said = " and ".join(f"t^{e}" for e in dict.fromkeys(exponents))
    exact = np.abs(far - slope).max() <= EXACT
    fits = np.abs(near - slope).max() <= (EXACT if table.exact else TOLERANCE)
    note = (
        "at every t" if exact else f"for t → 0; {far[0].mean():.2f} at t = 1, {far[1].mean():.2f} at t = 20"
    )
    verdict = FAILS if not fits or (table.exact and not exact) else HOLDS
    if verdict == HOLDS and claimed != slope:
        verdict, note = CORRECTED, f"the slope is the smaller exponent; {note}"
    words = f"‖{name(pair, part)}‖ grows as {said} with t {table.variable}"
    return state(words, "slides", claimed, near, tolerance=TOLERANCE, note=note, verdict=verdict)


def attention_moments(num_heads: int) -> StatementGroup:
    """Powers of M₁, M₂, M₃ in every block: one moment of the Kronecker form is scaled by three."""
    heads = [make_head(seed, L=4, d=3, d_K=2, d_V=2) for seed in range(num_heads)]
    theorems = [Theorem(*head) for head in heads]
    rows, others, curves = [], [], {}
    for part in HALVES:
        table = growth.MOMENTS_OUTER if part == "outer" else growth.MOMENTS_FUNCTIONAL
        for moment in MOMENTS:
            powers = [_powers(theorem, part, moment) for theorem in theorems]
            for pair, terms in table.items():
                for number, term in enumerate(terms):
                    claimed = getattr(term, moment)
                    values = [found[pair][number] for found in powers]
                    curves[f"{part} {''.join(pair)}{number} {moment}"] = np.array([claimed, np.mean(values)])
                    if claimed == 0:
                        others += values
                        continue
                    which = "" if len(terms) == 1 else (" (third-moment term)", " (mixed term)")[number]
                    power = f"{moment[0]}_{moment[1]}" + ("" if claimed == 1 else f"^{claimed}")
                    words = f"{name(pair, part)}{which} is of order {power}"
                    rows.append(state(words, "slides; section 3", claimed, values, tolerance=EXACT))
    words = "no other moment enters any block: largest power found"
    rows.append(state(words, "slides; section 3", 0, np.abs(others).max(), tolerance=EXACT))
    return StatementGroup("attention moments", rows, curves)


def _powers(theorem: Theorem, part: Half, moment: str) -> dict[tuple[str, str], list[float]]:
    """Power of a moment in the terms of every block, at a fixed residual F − Y."""
    moments = replace(theorem.moments, **{moment: FACTOR * getattr(theorem.moments, moment)})
    scaled = replace(theorem, Y=theorem.Y + (moments.M1 - theorem.moments.M1) @ theorem.W_V)
    scaled.__dict__["moments"] = moments  # overrides the cached property with scaled moments
    before, after = getattr(theorem, part)(), getattr(scaled, part)()
    found: dict[tuple[str, str], list[float]] = {}
    for pair in growth.PAIRS:
        key = pair if pair in before else pair[::-1]
        pieces = [(before[key], after[key])]
        if part == "functional" and pair == ("Q", "K"):
            pieces = [
                (before[key] - theorem.mixed, after[key] - scaled.mixed),
                (theorem.mixed, scaled.mixed),
            ]
        found[pair] = [_power(one, two) for one, two in pieces]
    return found


def _power(before: torch.Tensor, after: torch.Tensor) -> float:
    one, two = float(before.norm()), float(after.norm())
    return exponent(one, two, FACTOR) if one and two else 0.0
