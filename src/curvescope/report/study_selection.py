"""Select the studies of a model's page, by section, with smaller settings for a quick page.

The names are the anchors of the page; names of studies are taken too. Seconds are processor time of one core
for the bundled model with the quick settings, figures included: what a plan takes, and how far it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from curvescope.core.errors import UsageError, near_misses
from curvescope.models.zoo import REVISIONS
from curvescope.studies.batch_run import Wanted

SAMPLE = {"tokens": 256, "seq_len": 32}
"""Sample of all quick sections with curvature, so that a page has one λ_max of a model. Its eight sequences
give useful intervals over other data; those of two sequences would reach over several powers of ten.
"""
SECTIONS: dict[str, tuple[Wanted, ...]] = {
    "findings": (Wanted("diagnose", "what is wrong with it, if anything", 20, SAMPLE),),
    "spectra": (
        Wanted(
            "spectrum", "how its eigenvalues lie", 29,
            {**SAMPLE, "num_probes": 2, "num_steps": 30, "num_eigenvalues": 2, "num_trace_probes": 16,
             "num_map_probes": 1, "max_products": 100},
        ),
    ),
    "block-map": (
        Wanted(
            "blocks", "which block is sharpest", 24,
            {**SAMPLE, "norms": ("E", "P", "L*.W_*", "U"), "num_trace_probes": 8, "num_norm_probes": 4,
             "num_sharp_steps": 12},
        ),
    ),
    "blocks": (
        Wanted(
            "blocks", "how different blocks are", 50,
            {**SAMPLE, "num_density_probes": 2, "num_steps": 20},
            {"density": ("L0.W_[QV1]", "L3.W_[QV1]")},
        ),
    ),
    "propagation": (
        Wanted(
            "propagation", "where curvature comes from", 19,
            {**SAMPLE, "num_probes": 4, "num_map_probes": 1, "num_steps": 6},
        ),
    ),
    "dynamics": (
        Wanted(
            "dynamics", "how curvature changed in training", 28,
            {**SAMPLE, "blocks": ("L*.W_[QO2]",)}, {"checkpoints": REVISIONS},
        ),
    ),
    "landscape": (Wanted("taylor", "how far a quadratic predicts the loss", 39, {"tokens": 64}),),
    "geometry": (
        Wanted("heads", "what heads look for and write", 8),
        Wanted("trajectory", "the paths of tokens through the layers", 6, {"tokens": 256}),
    ),
}  # fmt: skip
MORE: tuple[Wanted, ...] = (
    Wanted("gap", "how well the GGN stands for the Hessian", 75),
    Wanted("embeddings", "how near the embedding is to its normalized form", 4),
    Wanted("layernorm", "the ellipsoids of its norms", 5),
    Wanted("activations", "how sharply the loss bends in states of tokens", 15),
)
"""Studies of the full profile, and on request."""
AROUND = 10.0
"""Seconds of loading Python and of writing the page."""
FULL = 660.0
"""Seconds of the whole full profile."""
QUICK = ("findings", "spectra", "block-map", "propagation", "dynamics", "geometry")
"""Sections of the quick profile."""


def names() -> list[str]:
    """Names that `report` accepts: sections, then studies."""
    return list(dict.fromkeys([*SECTIONS, *(one.study for one in _all())]))


def choose(asked: Sequence[str], profile: str) -> list[Wanted]:
    """The studies of these sections, of all of the profile by default, each once."""
    if not asked:
        asked = QUICK if profile == "quick" else [*SECTIONS, *(one.study for one in MORE)]
    found: dict[str, Wanted] = {}
    for one in chain.from_iterable(map(_of, asked)):
        found[one.study] = found[one.study].joined(one) if one.study in found else one
    return list(found.values())


def _of(name: str) -> Iterable[Wanted]:
    if name in SECTIONS:
        return SECTIONS[name]
    of_study = [one for one in _all() if one.study == name]
    if not of_study:
        raise UsageError(
            f"expected a section of the page or a study, got {name!r}", hint=near_misses(name, names())
        )
    return of_study[:1]


def _all() -> Iterable[Wanted]:
    return chain(*SECTIONS.values(), MORE)
