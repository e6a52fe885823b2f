"""The norms: 'layer normalization confines the features to a hyper-sphere'."""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.papers.claims import AGREES, DIFFERS
from curvescope.papers.molina2023.setting import AUTO, MODEL, Reproduced, measured_on, with_model
from curvescope.runs.study import Study
from curvescope.runs.work import State
from curvescope.studies import layernorm

EXACT = 1e-9


@dataclass(frozen=True)
class Config(layernorm.Config):
    """As the study; `auto` is the best model at hand."""

    model: str = setting(AUTO, MODEL)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Reproduced:
    """The study, and the claim."""
    own, why = with_model(cfg)
    found = layernorm.run(own, progress=progress, state=state)
    off = max(n.identity_error for n in found.norms)
    hidden = max(1 - float(s.with_gain.mean()) for s in found.selectable)
    claims = [
        [
            "a norm's outputs lie on an ellipsoid, the image of a sphere",
            "stated (abstract)",
            f"largest relative distance {off:.1e} over {len(found.norms)} norms",
            measured_on(own.model, AGREES if off < EXACT else DIFFERS),
        ],
        [
            "keys that no query can prefer",
            "not in the paper",
            f"{hidden:.1%} of the sample in the layer with most",
            "–",
        ],
    ]
    return Reproduced("layernorm", found.model, why, found, claims)


STUDY = Study(Config, run)
