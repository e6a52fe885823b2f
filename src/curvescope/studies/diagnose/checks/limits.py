"""Beyond which a number is unusual: above what healthy models have, see docs/diagnose.md.

Each limit lies above the largest value (below the smallest, for `EMBEDDED_LOW` and `LIVE`) over the healthy
models of `benchmarks/diagnosis.py`, calibrating seeds, and the bundled model at its four checkpoints.
"""

from __future__ import annotations

RATE = 1.0  # learning rate over the ceiling: a theorem for the quadratic, nothing is calibrated
NEGATIVE = 1.5  # −λ_min / λ_max
CONDITION = 2.0  # λ_max over the Frobenius norm of the bulk
CONFIDENT = 1.25  # loss over log V
UNEVEN = 1.2  # decades between a layer's curvature and the median layer's
FLAT = 1e-4  # curvature of an entry of a block over that of the median block
GROWTH = 1.15  # of gradients from the first layer to the last, in a post-norm model
EMBEDDED_HIGH = 10.0  # stream where the layers begin over what they add to it
EMBEDDED_LOW = 0.01
SHARP = 5.0  # trace of a sequence's GGN over the median sequence's
COPIES = 0.0  # share of sequences that are copies: none of a text is
BATCH = 0.6  # spread of λ_max over parts of the data
LIVE = 0.05  # liveness of a head, below which it is saturated
SATURATED = 0.0  # share of heads
MASS = 0.5  # weight on the first token, excess over equal weights
WRITTEN = 1e-3  # of what the median head writes
DEAD = 0.0  # share of heads
