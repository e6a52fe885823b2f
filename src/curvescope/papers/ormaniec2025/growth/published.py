"""The published curves of the sweeps: mean and standard error over 20 repeats, from 20 probes in float32."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np


@dataclass(frozen=True)
class PublishedCurve:
    """A norm against the scales of the experiment's grid; 0 and inf are where float32 ended."""

    mean: np.ndarray  # (20,)
    stderr: np.ndarray  # (20,) over repeats, probe noise included


Curve = tuple[str, str, int]
"""Block, part and layer, counted from 0."""


def published_curves(experiment: str) -> dict[Curve, PublishedCurve]:
    """The curves of a sweep; those that are exactly zero are left out, of MLPs there is H alone."""
    return _all()[experiment]


@cache
def _all() -> dict[str, dict[Curve, PublishedCurve]]:
    text = (files("curvescope.papers.ormaniec2025") / "published" / "growth.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found: dict[str, dict[Curve, PublishedCurve]] = {}
    for row in csv.DictReader(lines):
        mean, stderr = (np.array([float(row[f"{name}{i}"]) for i in range(20)]) for name in ("mean", "sem"))
        curve = row["block"], row["part"], int(row["layer"])
        found.setdefault(row["experiment"], {})[curve] = PublishedCurve(mean, stderr)
    return found
