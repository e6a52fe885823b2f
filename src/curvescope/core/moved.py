"""Result classes that live elsewhere than their saved name says: moving one is one line here.

A saved result names its classes, so a name that was written once is kept for good: `HOMES` says where the
class of that name is now. A class that is not listed is saved under its full name.
"""

from __future__ import annotations

_MOVED = {  # saved in this module: now in that one, these classes
    "studies.spectrum": {"studies.spectrum.study": "Part Spectrum"},
    "studies.blocks": {"studies.blocks.part": "Part", "studies.blocks.study": "Blocks"},
    "studies.blocks_heterogeneity": {"algorithms.blocks.heterogeneity": "Heterogeneity"},
    "studies.blocks_probes": {"algorithms.blocks.probes": "OwnProbes"},
    "studies.hvp": {"studies.hvp.costs": "Measured Cost"},
    "studies.weight_norms.ranks": {"algorithms.estimates.ranks": "Correlation"},
    "studies.embeddings": {"studies.embeddings.study": "Counts Embeddings"},
    "studies.probes": {"studies.probes.study": "Probes"},
    "studies.heads": {"studies.heads.study": "Heads"},
    "studies.trajectory": {"studies.trajectory.study": "Trajectory"},
    "studies.layernorm": {"studies.layernorm.study": "NormShape LayerNorms"},
    "algorithms.density": {"algorithms.spectra.density": "SpectralDensity"},
    "algorithms.krylov": {"algorithms.spectra.krylov": "Tridiagonals"},
    "algorithms.lanczos": {"algorithms.spectra.lanczos": "Eigenpairs"},
    "algorithms.diagonal": {"algorithms.estimates.diagonal": "DiagonalEstimate"},
    "algorithms.norms": {"algorithms.estimates.norms": "FrobeniusNorm SpectralNorm"},
    "algorithms.trace": {"algorithms.estimates.trace": "TraceEstimate BlockTraces"},
    "algorithms.solve": {"algorithms.systems.solve": "Solution"},
    "geometry.words": {"geometry.vocabulary.words": "Words"},
    "geometry.decode": {"geometry.vocabulary.decode": "TopTokens"},
    "geometry.check": {"geometry.attention.check": "HeadCheck"},
    "geometry.composition": {"geometry.attention.composition": "Composition"},
    "geometry.energy": {"geometry.attention.energy": "Energy"},
    "geometry.directions": {"geometry.attention.directions": "Spectra Directions HeadDirections"},
    "geometry.selectable": {"geometry.attention.selectable": "Hull Selectable"},
    "geometry.probes": {"geometry.probes.keys": "KeyProbe", "geometry.probes.values": "ValueProbe"},
    "geometry.trajectory": {"geometry.trajectory.paths": "Trajectories Path"},
    "geometry.trajectory_average": {"geometry.trajectory.average": "Curve"},
    "closed_form.attention_split": {"closed_form.attention.split": "BlockSplit"},
    "closed_form.reduction": {"closed_form.spectra.reduction": "ExactSpectrum ProductBulk"},
    "closed_form.bounds": {"closed_form.bounds.head": "BlockBounds"},
    "closed_form.bounds_as_printed": {"closed_form.printed.bounds": "PrintedBound"},
    "operators.third_derivative": {"operators.taylor.third_derivative": "ThirdDerivative"},
    "papers.ormaniec2025.heatmap": {"papers.ormaniec2025.heatmap.study": "Columns HeatMap"},
    "papers.ormaniec2025.histograms": {"papers.ormaniec2025.histograms.study": "Bars Histograms"},
    "papers.ormaniec2025.growth": {"papers.ormaniec2025.growth.study": "Points Sweep Growth"},
    "papers.ormaniec2025.beyond": {"papers.ormaniec2025.beyond.study": "Scale Beyond"},
    "papers.ormaniec2025.statements": {"papers.ormaniec2025.statements.study": "Statements"},
    "papers.ormaniec2025.statement_rows": {"papers.ormaniec2025.statements.rows": "Statement Group"},
}
_RENAMED = {  # class in results saved before version 0.3: the same class now
    "algorithms.block_map.BlockMap": "algorithms.blocks.block_norms.BlockNorms",
    "operators.taylor.line.Line": "operators.taylor.line.LossLine",
    "operators.taylor.plane.Plane": "operators.taylor.plane.LossPlane",
    "studies.optimisers.course.Course": "studies.optimizers.course.Course",
    "studies.optimisers.study.Compared": "studies.optimizers.study.Compared",
    "studies.optimisers.tuning.Search": "studies.optimizers.tuning.Search",
    "studies.quantise.rounding.Roundings": "studies.quantize.rounding.Roundings",
    "studies.quantise.study.Quantised": "studies.quantize.study.Quantized",
}
RENAMED = {f"curvescope.{before}": f"curvescope.{now}" for before, now in _RENAMED.items()}
"""Full name of a class in older results: the name that it has now, and is saved under."""

RENAMED_FIELDS = {"centre": "center", "centred": "centered", "normalise": "normalize"}
"""Name of a field in older results: its name now."""

HOMES = {
    f"curvescope.{before}.{name}": f"curvescope.{now}"
    for before, places in _MOVED.items()
    for now, names in places.items()
    for name in names.split()
}
"""Saved name of a class: the module that has it now."""

SAVED_NAMES = {f"{module}.{name.rpartition('.')[2]}": name for name, module in HOMES.items()}
"""Full name of a class that has moved: the name it is saved under."""
