"""Beyond which a number is unusual: above what healthy models have, see docs/diagnose.md.

Each limit lies above the largest value (below the smallest, for `EMBEDDED_LOW` and `LIVE`) over the healthy
models of `benchmarks/diagnosis.py`, calibrating seeds, and the bundled model at its four checkpoints.
"""

from __future__ import annotations

RATE = 1.0  # learning rate over the ceiling: a theorem for the quadratic, nothing is calibrated
NEGATIVE = 1.0  # −λ_min / λ_max of a model that has learned something
NEGATIVE_FRESH = 3.0  # of one that has not: random weights lie near a saddle
LEARNED = 0.95  # loss over log V, below which a model has learned something
CONDITION = 3.0  # λ_max over the Frobenius norm of the bulk
CONFIDENT = 1.6  # loss over log V
UNEVEN = 1.2  # decades between a layer's curvature and the median layer's
FLAT = 1e-4  # curvature of an entry of a block over that of the median block
GROWTH = 1.0  # of gradients from the first layer to the last, in a post-norm model that is not trained
EMBEDDED_HIGH = 12.0  # stream where the layers begin over what they add to it
EMBEDDED_LOW = 0.01
SHARP = 5.0  # trace of a sequence's GGN over the median sequence's
STEEP = 6.0  # norm of a sequence's gradient over the median sequence's
COPIES = 0.0  # share of sequences that are copies: none of a text is
BATCH = 0.8  # spread of λ_max over parts of the data
LIVE = 0.05  # liveness of a head, below which it is saturated
SATURATED = 0.0  # share of heads
MASS = 0.5  # weight of a head on the first token
WRITTEN = 1e-3  # of what the median head writes
DEAD = 0.0  # share of heads
