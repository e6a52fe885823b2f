"""How the blocks of a head grow with its tokens: slopes, bounds, saturation, targets, centering."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from curvescope.closed_form import attention
from curvescope.closed_form.bounds import growth
from curvescope.closed_form.bounds.operator_norms import attention_norm_bounds
from curvescope.core.parts import HALVES, Half
from curvescope.papers.ormaniec2025.statements.rows import (
    CORRECTED,
    FAILS,
    HOLDS,
    Group,
    Head,
    Slopes,
    Statement,
    local_slopes,
    log_slope,
    make_head,
    name,
    slope_verdict,
    state,
)

SMALL, TOLERANCE = 1e-3, 0.02
BEYOND = (1.0, 3.0)
GRID = np.logspace(-2, 1, 37)
SPREAD, FARTHER = 12.0, 40.0  # σ²Δ at which saturation is measured, and measured again
NEAR = 0.5  # of a slope there
B = 0.1  # ∂²ℓ/∂F² of a squared error
CLAIMS = {"outer": "slides; Theorem 3.1", "functional": "slides; Theorem 3.2"}


def _slopes(heads: Sequence[Head], sigma: float) -> list[dict]:
    return [local_slopes(lambda s, h=h: attention.curvature(s * h.X, *h[1:], B), sigma) for h in heads]


def growth_in_data(num_heads: int) -> Group:
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
    return Group("growth in the data", rows, _curves(heads))


def _zero(heads: Sequence[Head], pair: tuple[str, str], part: Half) -> Statement:
    norms = [float(attention.curvature(*h, B).frobenius(pair, part)) for h in heads]
    verdict = HOLDS if not any(norms) else FAILS
    note = "not only bounded: exactly zero, at every σ" if verdict == HOLDS else "is not zero"
    return state(
        f"{name(pair, part)} is O(1)", CLAIMS[part], 0.0, norms, tolerance=0.0, note=note, verdict=verdict
    )


def _terms_of_query_key(heads: Sequence[Head]) -> list[Statement]:
    """The third-moment term and the mixed term of H_f(Q, K), each alone."""

    def norms(head: Head, sigma: float) -> list[float]:
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


def _bound_ratios(heads: Sequence[Head]) -> dict:
    """The largest ‖block‖₂ over its bound from norms alone, which is C σ^exponent, over σ and heads."""
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


def _curves(heads: Sequence[Head]) -> dict[str, np.ndarray]:
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


def saturation(num_heads: int) -> Group:
    """What large tokens do: every M₂ and M₃ falls like exp(−σ²Δ), once nothing else comes near the gap Δ."""
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
    return Group("saturation", rows, {})


def _saturated(head: Head, gap: float, spread: float) -> Slopes:
    return local_slopes(lambda s: attention.curvature(s * head.X, *head[1:], B), (spread / gap) ** 0.5)


def _asymptotic(here: np.ndarray, farther: np.ndarray) -> tuple[str, str]:
    """Verdict and note on a law for σ → ∞, from its errors at two places.

    A head whose query has a third score near the two largest follows only where σ is larger.
    """
    near, all_farther = here <= NEAR, bool((farther <= NEAR).all())
    if near.all():
        return HOLDS, f"within {here.max():.2g} for all heads"
    words = f"within {NEAR:g} for {near.sum()} of {len(near)} heads, off by up to {here.max():.2g}"
    if all_farther:
        return CORRECTED, f"{words}; for all of them at σ²Δ = {FARTHER:g}"
    return FAILS, words


def _lone_gaps(num: int) -> list[tuple[Head, float]]:
    """Heads with one smallest gap Δ between a query's two largest scores, and no second near it."""
    found: list[tuple[Head, float]] = []
    seed = 0
    while len(found) < num:
        head = make_head(seed)
        top = (head.X @ head.W_Q @ head.W_K.T @ head.X.T / 3**0.5).topk(2).values
        gaps = (top[:, 0] - top[:, 1]).sort().values
        if 0.1 < 1.7 * float(gaps[0]) < float(gaps[1]):
            found.append((head, float(gaps[0])))
        seed += 1
    return found


def scaled_targets(num_heads: int) -> Group:
    """∂ℓ/∂F of a squared error is constant for small σ if targets are fixed, ∝ σ if they scale along."""
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
    return Group("targets", rows, {})


def _with_targets(head: Head, power: int) -> dict:
    def at(sigma: float) -> attention.AttentionCurvature:
        tokens, scale = sigma * head.X, 3**-0.5
        F = torch.softmax(scale * tokens @ head.W_Q @ head.W_K.T @ tokens.T, -1) @ tokens @ head.W_V
        return attention.curvature(tokens, *head[1:4], B * (F - sigma**power * head.G), B)

    return local_slopes(at, SMALL)


def centering(num_heads: int) -> Group:
    """Tokens of mean zero: uniform attention averages to nothing, M₁ is of third order."""
    heads = [make_head(seed) for seed in range(num_heads)]
    centered = [h._replace(X=h.X - h.X.mean(0)) for h in heads]
    slopes = _slopes(centered, SMALL)
    rows = []
    for pair in growth.PAIRS:
        before = growth.DATA.slope(pair, "outer")
        note = (
            "as without centering" if before == 6 else f"σ^{before} without centering: the difference is gone"
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
        words = f"under a causal mask centering changes nothing: ‖{name(pair, 'outer')}‖ grows as σ^{claimed}"
        values = [found[pair, "outer"] for found in masked]
        note = "what a query sees is not centered if the sequence is"
        rows.append(state(words, "ours", claimed, values, tolerance=TOLERANCE, note=note))
    return Group("centering", rows, {})
