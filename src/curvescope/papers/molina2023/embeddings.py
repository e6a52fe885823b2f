"""The embedding: 'the effect of layer normalization on word embeddings', and its extreme tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.papers.molina2023.setting import AUTO, MODEL, Reproduced, with_model
from curvescope.runs.study import Study
from curvescope.runs.work import State
from curvescope.studies import embeddings


@dataclass(frozen=True)
class Config(embeddings.Config):
    """As the study; `auto` is the best model at hand."""

    model: str = setting(AUTO, MODEL)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Reproduced:
    """The study, and what its tables say in a line each."""
    own, why = with_model(cfg)
    found = embeddings.run(own, progress=progress, state=state)
    d = found.distances
    claims = [
        [
            "distance of the embedding to its normalized form",
            "a table (numbers not at hand)",
            f"{d.l2_mean[0]:.3f}; scaled {d.l2_mean[2]:.3f}",
            "–",
        ],
        [
            "cosine distance of the two",
            "a table (numbers not at hand)",
            f"{d.cosine_mean[0]:.4f}; centered {d.cosine_mean[1]:.4f}",
            "–",
        ],
    ]
    if found.counts is not None and np.isfinite(found.counts.spearman.get("shift", np.nan)):
        value = found.counts.spearman["shift"]
        claims.append(
            ["β·u and how often a token occurs", "not at hand", f"rank correlation {value:+.2f}", "–"]
        )
    return Reproduced("embeddings", found.model, why, found, claims)


STUDY = Study(Config, run)
