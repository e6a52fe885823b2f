"""'What Does It Mean to Be a Transformer?' (Ormaniec, Dangel and Singh, ICLR 2025), figure by figure.

Every figure is a folder of this package, imported when it is asked for: `study` computes it, `figures` draws.
"""

from __future__ import annotations

FIGURES = {
    "heatmap": "the entries of the Hessian of a small Transformer, and of its attention (figure 1, left)",
    "histograms": "sizes of the entries of the W_Q and W_V blocks, with softmax and without (figures 1, 4)",
    "growth": "norms of blocks against the scale of the embeddings, in every setting (figures 3, 5 to 8)",
    "statements": "what the paper and its slides state in words and exponents, each checked in closed form",
}
MORE = {
    "beyond": "all blocks and pairs of blocks of a small Transformer against that scale, norms and traces",
    "reviewers": "what the reviewers asked: depth, F − Y, other networks, ranges of σ, W_QK, softmax",
}
"""Figures that the paper does not have: made only when they are asked for."""
