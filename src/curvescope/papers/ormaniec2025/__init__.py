"""'What Does It Mean to Be a Transformer?' (Ormaniec, Dangel and Singh, ICLR 2025), figure by figure.

Every figure is a module or a package here, imported on demand.
"""

from __future__ import annotations

FIGURES = {
    "heatmap": "entries of the Hessian of a small Transformer, and of its attention (figure 1, left)",
    "histograms": "sizes of the entries of the W_Q and W_V blocks, with softmax and without (figures 1, 4)",
    "growth": "norms of blocks against the scale of the embeddings, for all models (figures 3, 5 to 8)",
    "statements": "statements and exponents of the paper and its slides, each checked in closed form",
}
MORE = {
    "beyond": "norms and traces of all blocks of a small Transformer against the scale of the embeddings",
    "reviewers": "questions of the reviewers: depth, F − Y, other networks, ranges of σ, W_QK, softmax",
}
"""Figures that the paper does not have; made only on request."""
