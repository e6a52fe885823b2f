"""Geometry of embeddings, heads and trajectories.

heads(model, 0)[3].qk.singular_values     # what head 3 of block 0 looks for, folded through its norm
decode_heads(model, 0).qk.to_frame()      # the same as tokens, for all heads, both signs
probe_keys(model, 0, ["king", "queen"])   # which keys the query of a word looks for
extremes(token_scores(model))             # tokens with the largest and the smallest norms and logits
composition(heads(model, 0), heads(model, 1), "K")
steer(problem, "L3.mid", direction)       # what the loss and the logits do along a direction
logit_attribution(model, ids)             # what every head and layer adds to a logit
"""

from curvescope.geometry.attention.circuits import Circuit, Rotary, circuits, rotary_of
from curvescope.geometry.attention.composition import (
    Composition,
    composition,
    composition_score,
    copying_score,
    through_vocabulary,
)
from curvescope.geometry.attention.directions import (
    Directions,
    HeadDirections,
    Spectra,
    decode_heads,
    spectra,
)
from curvescope.geometry.attention.energy import Energy, HeadCheck, activation_energy, check_heads
from curvescope.geometry.attention.heads import heads
from curvescope.geometry.attention.selectable import Hull, Selectable, hull_vertices, selectable_keys
from curvescope.geometry.causal.attribution import Attribution, logit_attribution
from curvescope.geometry.causal.decoded import SingularDirection, decode_at, layer_directions
from curvescope.geometry.causal.steering import Effect, ablate, intervene, steer
from curvescope.geometry.embeddings import (
    Distances,
    Extremes,
    TokenScores,
    distances,
    extremes,
    token_scores,
)
from curvescope.geometry.low_rank import Factored
from curvescope.geometry.probes import KeyProbe, LogitLens, ValueProbe, logit_lens, probe_keys, probe_values
from curvescope.geometry.roles import norm_of
from curvescope.geometry.sphere import (
    Ellipsoid,
    StreamNorm,
    attainable,
    ellipsoid,
    fold,
    normalize,
    project,
    radius,
    support,
    unscale,
)
from curvescope.geometry.vocabulary.decode import TopTokens, top_tokens
from curvescope.geometry.vocabulary.names import TokenNames
from curvescope.geometry.vocabulary.references import TokenReference, reference, rows_reference
from curvescope.geometry.vocabulary.representations import Representation, represent
from curvescope.geometry.vocabulary.words import Words, common_nouns, select_words, vocabulary_words

__all__ = [
    "Attribution",
    "Circuit",
    "Composition",
    "Directions",
    "Distances",
    "Effect",
    "Ellipsoid",
    "Energy",
    "Extremes",
    "Factored",
    "HeadCheck",
    "HeadDirections",
    "Hull",
    "KeyProbe",
    "LogitLens",
    "Representation",
    "Rotary",
    "Selectable",
    "SingularDirection",
    "Spectra",
    "StreamNorm",
    "TokenNames",
    "TokenReference",
    "TokenScores",
    "TopTokens",
    "ValueProbe",
    "Words",
    "ablate",
    "activation_energy",
    "attainable",
    "check_heads",
    "circuits",
    "common_nouns",
    "composition",
    "composition_score",
    "copying_score",
    "decode_at",
    "decode_heads",
    "distances",
    "ellipsoid",
    "extremes",
    "fold",
    "heads",
    "hull_vertices",
    "intervene",
    "layer_directions",
    "logit_attribution",
    "logit_lens",
    "norm_of",
    "normalize",
    "probe_keys",
    "probe_values",
    "project",
    "radius",
    "reference",
    "represent",
    "rotary_of",
    "rows_reference",
    "select_words",
    "selectable_keys",
    "spectra",
    "steer",
    "support",
    "through_vocabulary",
    "token_scores",
    "top_tokens",
    "unscale",
    "vocabulary_words",
]
