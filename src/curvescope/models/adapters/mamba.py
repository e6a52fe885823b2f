"""Mamba: a state-space model; its blocks are its parameters."""

from curvescope.models.adapters.table import Family

FAMILY = Family(
    norm_kind="rmsnorm",
    positions="none",
    float32=("the norms", "the scan"),
    notes=("a state-space model has no heads, no attention pattern and no Q, K, V",),
)
