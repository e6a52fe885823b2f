"""Numbers of the sweeps that sentences and claims are made of: exponents and ratios, over seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.algorithms.estimates.intervals import student
from curvescope.papers.petrov2025.propagation.variants import SIGMAS
from curvescope.studies.propagation.analysis import HESSIAN

if TYPE_CHECKING:
    from curvescope.papers.petrov2025.propagation.study import Spectrum, Sweeps


def exponent(result: Sweeps, norm: str) -> tuple[float, float, float]:
    """p of ‖H‖ ∝ depth^p: least squares over depths, mean over seeds, 95 % interval over seeds."""
    slopes = []
    for seed in range(result.seeds):
        sizes = [
            result.measured[f"depth.{norm}.{d}.{seed}"].shares.norm(HESSIAN).value for d in result.depths
        ]
        slopes.append(np.polyfit(np.log(result.depths), np.log(sizes), 1)[0])
    return interval(np.array(slopes))


def sigma_slope(result: Sweeps) -> tuple[float, float, float]:
    """p of ‖source of the first norm‖ ∝ σ^p."""
    slopes = []
    for seed in range(result.seeds):
        sizes = [result.measured[f"sigma.{s:g}.{seed}"].shares.norm("L0.ln1").value for s in SIGMAS]
        slopes.append(np.polyfit(np.log(SIGMAS), np.log(sizes), 1)[0])
    return interval(np.array(slopes))


def with_and_without(result: Sweeps, name: str, steps: int) -> tuple[float, float, float]:
    """λ_max with a component switched off over that of the whole model: geometric mean, least, largest."""
    pairs = zip(spectra(result, name, steps), spectra(result, "everything", steps), strict=True)
    ratios = np.array([float(off.values[-1] / on.values[-1]) for off, on in pairs])
    return float(np.exp(np.log(ratios).mean())), float(ratios.min()), float(ratios.max())


def spectra(result: Sweeps, name: str, steps: int) -> list[Spectrum]:
    """With one component as named, after so many steps, seed by seed."""
    return [result.spectra[f"component.{name}.{steps}.{seed}"] for seed in range(result.seeds)]


def interval(samples: np.ndarray) -> tuple[float, float, float]:
    """Mean and 95 % interval by Student's t; not known from one sample."""
    mean = float(samples.mean())
    if len(samples) < 2:
        return mean, float("nan"), float("nan")
    half = student(len(samples) - 1) * float(samples.std(ddof=1)) / np.sqrt(len(samples))
    return mean, mean - half, mean + half
