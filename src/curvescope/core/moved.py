"""Result classes that live elsewhere than their saved name says: moving one is one line here.

A saved result names its classes, so a name that was written once is kept for good: `HOMES` says where the
class of that name is now. A class that is not listed is saved under its full name.
"""

from __future__ import annotations

_STUDIES = {
    "spectrum": ("Part", "Spectrum"),
    "blocks": ("Part", "Blocks"),
    "hvp": ("Measured", "Cost"),
    "embeddings": ("Counts", "Embeddings"),
    "probes": ("Probes",),
    "heads": ("Heads",),
    "trajectory": ("Trajectory",),
    "layernorm": ("NormShape", "LayerNorms"),
}
HOMES = {
    "curvescope.studies.blocks_heterogeneity.Heterogeneity": "curvescope.algorithms.heterogeneity",
    "curvescope.studies.blocks_probes.OwnProbes": "curvescope.algorithms.block_probes",
    **{
        f"curvescope.studies.{study}.{name}": f"curvescope.studies.{study}.study"
        for study, names in _STUDIES.items()
        for name in names
    },
}
"""Saved name of a class: the module that has it now."""

SAVED_NAMES = {f"{module}.{name.rpartition('.')[2]}": name for name, module in HOMES.items()}
"""Full name of a class that has moved: the name it is saved under."""
