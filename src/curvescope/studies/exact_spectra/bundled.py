"""The last rungs: parts of the bundled model, whose Hessians are too large to be written out.

λ are the three largest of each sign, by Lanczos; the whole spectrum, and with it exact pairs, is not known.
"""

from __future__ import annotations

import numpy as np

from curvescope.algorithms import eigsh
from curvescope.core.operator import LinearOperator
from curvescope.data.batches import Batches
from curvescope.data.text import text_data
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.operators import FunctionalHessian, Hessian
from curvescope.problem import Problem
from curvescope.studies.exact_spectra.ladder import OUTLIERS, QUERY_KEY, Pairings, tagged
from curvescope.studies.exact_spectra.pairing import ENDS, pairing

NAME, SEQUENCE = "tiny-gpt", 32
PARTS = {"one head's W_Q, W_K": "L1.h0.W_[QK]", "one layer": "L1.*"}
REVISIONS = ("initial", "final")
TOLERANCE = 1e-2  # of the largest eigenvalue, residuals: values are good to its square


def rung_name(revision: str, part: str) -> str:
    """As tables have it."""
    return f"{NAME} ({revision}), {part}"


def bundled(revision: str, num_tokens: int) -> tuple[Model, Batches]:
    """The bundled model at a revision, and some of the sample text."""
    model = load(NAME, revision=revision)
    return model, text_data("sample", model, tokens=num_tokens, seq_len=SEQUENCE)


def climb_bundled(revision: str, part: str, *, num_tokens: int, seed: int) -> Pairings:
    """Pairing of the outliers of the Hessian, and of the functional Hessian, of one part of the model."""
    problem = Problem(*bundled(revision, num_tokens))
    values = {OUTLIERS: [_ends(Hessian(problem, PARTS[part]), seed)]}
    if part.endswith("W_K"):
        values[QUERY_KEY] = [_ends(FunctionalHessian(problem, PARTS[part]), seed)]
    return tagged(rung_name(revision, part), values)


def _ends(op: LinearOperator, seed: int) -> float:
    found = eigsh(op, 2 * ENDS, which="BE", vectors=False, seed=seed, tol=TOLERANCE)
    return pairing(found.values, ends=ENDS) if found.converged else np.nan
