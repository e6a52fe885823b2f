"""Adapters: which parameters of a family of models play which role."""

from curvescope.models.adapters.families import FAMILIES, family_of

__all__ = ["FAMILIES", "family_of"]
