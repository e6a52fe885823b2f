"""'Closing the Curvature Gap' (arXiv 2510.16927) and the article around it: measured versions of their
figures.

Each figure is imported on demand, from the module of its name or from `figures`. Only numbers computed from
second derivatives are called curvature.
"""

from __future__ import annotations

FIGURES = {
    "full_hessian": "every entry of a one-block ViT's Hessian, initial and trained, and block norms in "
    "between (E1–E3)",
    "landscape": "change of the mean loss as the sample grows, with a control (E5, and E4 on any model)",
    "convergence": "the published curves with their networks: ViT, low rank, fully connected (E4, E7, E8)",
    "propagation": "sources of curvature across depth, norms, width and training, and with components "
    "switched off",
    "scaling": "curvature and loss against model size and data size: the power laws that a trained grid "
    "supports",
    "bounds": "Theorems 1 and 6, the estimates of their proofs, and the precursor's bound, next to exact "
    "values",
}
UNCLEAR = {
    "data": "use pictures=NAME for the training images of networks, or text=NAME for the text of landscape"
}
"""Settings that are refused, with a hint for each."""
MORE: dict[str, str] = {}
"""Figures that the paper does not have; made only on request."""
