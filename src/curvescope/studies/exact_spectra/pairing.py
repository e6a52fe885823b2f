"""How far a spectrum is paired: whether its eigenvalues come as ±λ.

P = 1 − Σ_i |p_i − n_i| / Σ_i (p_i + n_i)

with the positive eigenvalues p_1 ≥ p_2 ≥ … and the negative ones' sizes n_1 ≥ n_2 ≥ …, zeros where one side
has fewer. P is 1 if and only if the spectrum is symmetric, and 0 if and only if all signs agree, as for a
GGN. A random symmetric matrix comes near 1 too, so a P near 1 is no evidence of structure:
that is the share of eigenvalues whose partner is there to rounding.
"""

from __future__ import annotations

import numpy as np

ENDS = 3  # eigenvalues of each sign that count as outliers
EXACT = 1e-9  # of the largest |λ|: nearer than this are equal


def pairing(values: np.ndarray, *, ends: int | None = None) -> float:
    """P of a spectrum, or of its `ends` largest eigenvalues of each sign; nan for zeros alone."""
    positive, negative = _sides(values)
    if ends is not None:
        positive, negative = positive[:ends], negative[:ends]
    total = positive.sum() + negative.sum()
    return float(1 - np.abs(positive - negative).sum() / total) if total > 0 else np.nan


def outliers(values: np.ndarray) -> np.ndarray:
    """Eigenvalues that are not repeated: where a bulk is ±b many times, what lies outside it."""
    values = np.sort(np.asarray(values, dtype=float))
    same = np.diff(values) <= EXACT * np.abs(values).max(initial=0.0)
    return values[~(np.append(same, False) | np.append(False, same))] if len(values) else values


def exactly_paired(values: np.ndarray) -> float:
    """Share of the eigenvalues that are not zero whose negative is an eigenvalue too; nan for zeros alone."""
    size = np.abs(values).max(initial=0.0)
    if size == 0:
        return np.nan
    positive, negative = (side[side > EXACT * size] for side in _sides(values))
    paired = i = j = 0
    while i < len(positive) and j < len(negative):
        if abs(positive[i] - negative[j]) <= EXACT * size:
            paired, i, j = paired + 2, i + 1, j + 1
        elif positive[i] > negative[j]:
            i += 1
        else:
            j += 1
    return paired / (len(positive) + len(negative))


def condition_number(values: np.ndarray) -> float:
    """max |λ| / min |λ| over the eigenvalues that are not zero, to 1e-12 of the largest; nan if all are."""
    sizes = np.abs(values)
    there = sizes[sizes > 1e-12 * sizes.max()]
    return float(there.max() / there.min()) if len(there) else np.nan


def _sides(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positive parts and negative parts, largest first, as many as there are eigenvalues."""
    values = np.asarray(values, dtype=float)
    return np.sort(np.maximum(values, 0))[::-1], np.sort(np.maximum(-values, 0))[::-1]
