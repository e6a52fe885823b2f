"""How the blocks of a head grow with its weights, and which attention moments they are made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from curvescope.closed_form import attention
from curvescope.closed_form.block_matrix import Pair
from curvescope.closed_form.bounds import growth
from curvescope.closed_form.printed.kronecker import Theorem
from curvescope.core.parts import HALVES, Half
from curvescope.papers.ormaniec2025.statements.rows import (
    CORRECTED,
    FAILS,
    HOLDS,
    Group,
    Head,
    Statement,
    exponent,
    local_slopes,
    make_head,
    name,
    state,
)

SMALL, LARGE, TOLERANCE, EXACT = 1e-4, (1.0, 20.0), 0.02, 1e-6
B = 0.1
TABLES = {1: growth.WEIGHTS_Q, 2: growth.WEIGHTS_K, 3: growth.WEIGHTS_V}
FACTOR = 3.0
MOMENTS = ("M1", "M2", "M3")


def growth_in_weights(num_heads: int) -> Group:
    """Exponents of t for tW in place of one weight, at a fixed ∂ℓ/∂F."""
    heads = [make_head(seed) for seed in range(num_heads)]
    rows, curves = [], {}
    for place, table in TABLES.items():
        scales = (SMALL, *LARGE)
        found = {
            t: [local_slopes(lambda s, h=h, place=place: _scaled(h, place, s), t) for h in heads]
            for t in scales
        }
        for part in HALVES:
            measured = []
            for pair in growth.PAIRS:
                exponents = table.exponents(pair, part)
                near = np.array([slopes[pair, part] for slopes in found[SMALL]])
                measured.append(near.mean() if exponents else np.nan)
                if exponents:
                    far = np.array([[slopes[pair, part] for slopes in found[t]] for t in LARGE])
                    rows.append(_weight_row(table, pair, part, near, far))
            curves[f"{table.variable} {part}"] = np.array(measured)
    return Group("growth in the weights", rows, curves)


def _scaled(head: Head, place: int, t: float) -> attention.AttentionCurvature:
    return attention.curvature(
        *Head(*(t * value if i == place else value for i, value in enumerate(head))), B
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


def attention_moments(num_heads: int) -> Group:
    """Powers of M₁, M₂, M₃ in every block: one moment of the Kronecker form times three, the rest kept."""
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
    return Group("attention moments", rows, curves)


def _powers(theorem: Theorem, part: Half, moment: str) -> dict[tuple[str, str], list[float]]:
    """Power of a moment in the terms of every block; the residual F − Y is kept."""
    moments = replace(theorem.moments, **{moment: FACTOR * getattr(theorem.moments, moment)})
    scaled = replace(theorem, Y=theorem.Y + (moments.M1 - theorem.moments.M1) @ theorem.W_V)
    scaled.__dict__["moments"] = moments  # the cached property, as if attention had had these
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
