"""The stripe of the query–key block: how much of it is a matrix ⊗ the identity over d_K.

With entries (r, t) of W_Q and (r', t') of W_K, t the coordinate of a key, the functional Hessian of the block
has the term s (Σ_i x_i (Σ_i u_i)ᵀ) ⊗ I: it lies at t = t' alone (Ormaniec et al., Theorem 3.2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Stripe(NamedTuple):
    """Two measures; both are independent of the block's scale."""

    ratio: float  # root mean square entry at t = t', over that at t ≠ t'
    share: float  # of ‖H_QK‖², what lies in the span of all A ⊗ I; 1/d_K² for independent entries


def stripe(block: np.ndarray, d_model: int) -> Stripe:
    """Of the block (d k, d k) between W_Q and W_K, both d × k and row-major; not a number without entries."""
    k = block.shape[0] // d_model
    entries = block.reshape(d_model, k, d_model, k).astype(np.float64)
    on = np.einsum("ptqt->tpq", entries)  # (k, d, d)
    total, diagonal = float((entries**2).sum()), float((on**2).sum())
    count = on.size
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.float64(max(total - diagonal, 0.0)) / np.float64(entries.size - count)
        ratio = float(np.sqrt(np.float64(diagonal / count) / off))
        share = float(k * (on.mean(0) ** 2).sum() / np.float64(total))
    return Stripe(ratio, share)
