"""The noun probes: 'at the last layer the heads together preserve the meaning of the input key'."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.papers.molina2023.setting import AUTO, MODEL, Reproduced, with_model
from curvescope.runs.study import Study
from curvescope.runs.work import State
from curvescope.studies import probes
from curvescope.studies.probes.study import share_kept


@dataclass(frozen=True)
class Config(probes.Config):
    """As the study; `auto` is the best model at hand."""

    model: str = setting(AUTO, MODEL)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Reproduced:
    """The study, and what can be counted of the findings."""
    own, why = with_model(cfg)
    found = probes.run(own, progress=progress, state=state)
    strength = [float(np.median(np.nanmax(p.z[:, :, 0], axis=1))) for p in found.keys]
    kept = [share_kept(p) for p in found.values]
    layers = [f"L{p.layer}" for p in found.keys]
    claims = [
        [
            "query-key patterns are clear in early layers, less so later",
            "stated (abstract, reviews)",
            "best head's key, σ above random: " + _each(layers, [f"{v:.1f}" for v in strength]),
            "a reader decides",
        ],
        [
            "the last layer's heads together keep the input key",
            "stated (reviews)",
            "words among the first tokens read: " + _each(layers, [f"{v:.0%}" for v in kept]),
            "a reader decides",
        ],
    ]
    return Reproduced("probes", found.model, why, found, claims)


def _each(names: list[str], values: list[str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))


STUDY = Study(Config, run)
