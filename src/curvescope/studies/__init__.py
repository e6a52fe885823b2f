"""Studies: one module per question, `Config` in, `run(cfg) -> Result` out. This list imports none of them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from curvescope.core.errors import UsageError, near_misses

STUDIES = {
    "spectrum": "spectral densities, extreme eigenvalues and block maps of the Hessian and its two parts",
    "blocks": "every layer × role block: trace, norms, extreme eigenvalues, densities, how they differ",
}


def find(name: str) -> ModuleType:
    """The module of a study."""
    if name not in STUDIES:
        raise UsageError(f"expected a study, got {name!r}", hint=near_misses(name, list(STUDIES)))
    return import_module(f"curvescope.studies.{name}")
