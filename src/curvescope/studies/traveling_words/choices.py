"""What `legacy=true` means in the studies of geometry: the choices of the Traveling Words code.

That is santiag0m/traveling-words, the code of Molina (2023). Its choices are options of `curvescope.geometry`
like any others; they are put together here and nowhere else. The setting stands below `papers` because the
studies have the option too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from curvescope.geometry.embeddings import LENGTHS
from curvescope.geometry.probes import ValueProbe
from curvescope.geometry.sphere import Norm
from curvescope.geometry.vocabulary.representations import How

DISTANCES: dict[str, Any] = {"norm": Norm("layernorm", eps=1e-5), "all_rows": True}
SCORES: dict[str, Any] = {"which": "input", "scores": LENGTHS, "all_rows": True}
DIRECTIONS: dict[str, Any] = {
    "folded": False,
    "sides": 1,
    "written": "embedding",
    "query_bias": True,
    "energy": False,
}
NUM_PAIRS = 20  # singular pairs of each head
REPRESENTATION: How = "raw"  # of a token, in every block
KEYS: dict[str, Any] = {"folded": False, "bias": False, "form": "bare"}
VALUES: dict[str, Any] = {"folded": False, "output_bias": "every", "form": "bare"}
FITTED_ROWS = 10_000  # of the embedding, to which its UMAP is fitted


def whole_lengths(probe: ValueProbe) -> ValueProbe:
    """The probe with the lengths of its updates cut to whole numbers, as they were printed."""
    return replace(probe, norms=np.trunc(probe.norms))
