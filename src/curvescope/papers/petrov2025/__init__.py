"""'Closing the Curvature Gap' (arXiv 2510.16927), and the article around it, in honest versions.

Each figure is imported when it is asked for, from the module of its name or from `figures`. What is called
curvature here is made
of second derivatives.
"""

from __future__ import annotations

FIGURES = {
    "full_hessian": "every entry of a one-block ViT's Hessian, initial and trained, norms between (E1–E3)",
    "landscape": "how the mean loss settles as the sample grows, beside a control (E5, and E4 on any model)",
    "convergence": "the published curves with their networks: ViT, low rank, fully connected (E4, E7, E8)",
    "propagation": "curvature by source across depth, norms, width and training, and with parts switched off",
    "scaling": "curvature and loss over model size and data size: which power laws a trained grid supports",
    "bounds": "Theorems 1 and 6, the estimates of their proofs, and the precursor's bound, next to the truth",
}
UNCLEAR = {"data": "pictures=NAME: what networks for images are trained on; text=NAME: what landscape reads"}
"""Settings that are refused, with what to say instead."""
MORE: dict[str, str] = {}
"""Figures that the paper does not have: made only when they are asked for."""
