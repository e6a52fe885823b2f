"""Words of verdicts, whose words a claim is in, and the two numbers that rules are made of."""

from __future__ import annotations

import numpy as np

from curvescope.runs.shown import Origin

CONDITIONS = "holds under conditions"
SLIDES: Origin = ("slides, 'Cracking the Hessian'", "paper")
OURS: Origin = ("ours", "ours")


def factor(values: np.ndarray) -> float:
    """Largest over least."""
    return float(values.max() / values.min()) if len(values) else np.nan


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Exponent of y ∝ xᵃ by least squares over logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0]) if len(x) > 1 else np.nan
