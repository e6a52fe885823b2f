"""Words of verdicts, and the two numbers that rules are made of."""

from __future__ import annotations

import numpy as np

CONDITIONS = "holds under conditions"
SLIDES, OURS = "slides, 'Cracking the Hessian'", "ours"


def factor(values: np.ndarray) -> float:
    """Largest over least."""
    return float(values.max() / values.min()) if len(values) else np.nan


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Exponent of y ∝ xᵃ by least squares over logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0]) if len(x) > 1 else np.nan
