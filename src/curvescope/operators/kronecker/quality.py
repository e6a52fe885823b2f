"""Distance of Kronecker-factored approximations from the exact GGN and Hessian of a layer.

For a layer with GGN H_o, Hessian H, approximation K and gradient g, with damping δ = d · λ_max(H_o):

    error          ‖K − H_o‖_F / ‖H_o‖_F, and the same of H
    λ_max ratio    λ_max(K) / λ_max(H_o)
    cosine         of (K + δ I)⁻¹ g and (H_o + δ I)⁻¹ g; of g itself for comparison
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError, near_misses
from curvescope.core.progress import track
from curvescope.core.result import Tabular
from curvescope.operators.curvature import GGN, Hessian
from curvescope.operators.kronecker.approximations import EKFAC, KFAC, Shampoo
from curvescope.operators.kronecker.base import KroneckerOperator
from curvescope.operators.kronecker.cotangents import Kind
from curvescope.operators.kronecker.layers import KroneckerLayer
from curvescope.operators.kronecker.spectral import LayerSpectrum, with_values
from curvescope.problem import Problem
from curvescope.viz import estimates as viz

if TYPE_CHECKING:
    from matplotlib.figure import Figure

APPROXIMATIONS: MappingProxyType[str, Callable[..., KroneckerOperator]] = MappingProxyType(
    {
        "kfac-expand": lambda *a, **k: KFAC(*a, sharing="expand", **k),
        "kfac-reduce": lambda *a, **k: KFAC(*a, sharing="reduce", **k),
        "ekfac": EKFAC,
        "shampoo": lambda *a, **k: Shampoo(*a, exponent=0.5, **k),
        "shampoo-squared": lambda *a, **k: Shampoo(*a, exponent=1.0, **k),
    }
)
"""Approximations by name: functions of a problem, blocks, `kind`, `num_samples` and `seed`."""
QUANTITIES = ("error_ggn", "error_hessian", "lambda_max", "cosine")


@dataclass(frozen=True)
class KFACQuality(Tabular):
    """Distances of approximations (M of them) from the exact matrices of layers (S of them)."""

    layers: list[str]
    sizes: np.ndarray  # (S,) parameters of a layer
    methods: list[str]
    error_ggn: np.ndarray  # (M, S) ‖K − H_o‖ / ‖H_o‖
    error_hessian: np.ndarray  # (M, S) ‖K − H‖ / ‖H‖
    lambda_max: np.ndarray  # (M, S) λ_max(K) / λ_max(H_o)
    cosine: np.ndarray  # (M, S) of the damped preconditioned gradients
    cosine_gradient: np.ndarray  # (S,) of the plain gradient with the exact one
    ggn_error_hessian: np.ndarray  # (S,) ‖H_o − H‖ / ‖H‖, the error of the exact GGN
    left_out: dict[str, str]
    damping: float  # d: δ is d times λ_max(H_o) of the layer
    kind: str
    seed: int

    def table(self) -> Any:
        """One row per layer and approximation."""
        return [
            {"layer": layer, "size": int(self.sizes[s]), "method": method}
            | {name: float(getattr(self, name)[m, s]) for name in QUANTITIES}
            for s, layer in enumerate(self.layers)
            for m, method in enumerate(self.methods)
        ]

    def plot(self) -> Figure:
        """Three panels over the layers: error against the GGN, λ_max ratio, cosine."""
        return viz.quality(
            self.layers, self.methods, self.error_ggn, self.lambda_max, self.cosine, self.cosine_gradient
        )


def kfac_quality(
    problem: Problem,
    *blocks: str,
    methods: Sequence[str] = tuple(APPROXIMATIONS),
    kind: Kind = "ggn",
    num_samples: int = 1,
    seed: int = 0,
    damping: float = 1e-2,
    max_size: int = 4200,
) -> KFACQuality:
    """Measure approximations on every layer of a selection against its dense GGN and Hessian.

    Args:
        problem: A `cs.Problem`.
        blocks: Names and globs; all blocks without one.
        methods: Names of `APPROXIMATIONS`.
        kind: Gradients of the approximations; with `ggn`, only the Kronecker product has an error.
        num_samples: Number of draws for kind="mc".
        seed: Seed of the draws.
        damping: d, in units of λ_max(H_o) of each layer.
        max_size: Largest number of parameters of a layer; larger layers are left out and reported.
    """
    _check(methods, damping)
    settings = {"kind": kind, "seed": seed, "num_samples": num_samples}
    operator = APPROXIMATIONS[methods[0]](problem, *blocks, **settings)
    small = [layer for layer in operator.layers if _size(layer) <= max_size]
    large = {layer.name: _size(layer) for layer in operator.layers if layer not in small}
    if not small:
        name, size = min(large.items(), key=lambda item: item[1])
        raise UsageError(f"expected a layer of at most max_size={max_size} parameters, got {name} of {size}")
    names = [block.name for layer in small for block in layer.blocks]
    with operator.frozen():  # all matrices at the same parameters
        spectra = [
            APPROXIMATIONS[name](problem, *names, **settings).spectra()
            for name in track(methods, "approximations")
        ]
        columns = [
            _measured(problem, layer, [s[i] for s in spectra], damping)
            for i, layer in enumerate(track(small, "dense layers"))
        ]
    quantities: dict[str, Any] = {name: np.array([c[name] for c in columns]) for name in columns[0]}
    too_large = {name: f"{size} parameters are more than max_size={max_size}" for name, size in large.items()}
    return KFACQuality(
        layers=[layer.name for layer in small],
        sizes=np.array([_size(layer) for layer in small]),
        methods=list(methods),
        **{name: quantities[name].T for name in QUANTITIES},
        cosine_gradient=quantities["cosine_gradient"],
        ggn_error_hessian=quantities["ggn_error_hessian"],
        left_out=operator.left_out | too_large,
        damping=float(damping),
        kind=kind,
        seed=seed,
    )


def _check(methods: Sequence[str], damping: float) -> None:
    """Raise unless these are names of approximations and a number above 0."""
    for name in methods:
        if name not in APPROXIMATIONS:
            hint = near_misses(name, list(APPROXIMATIONS))
            raise UsageError(f"expected an approximation, got {name!r}", hint=hint)
    if not methods:
        raise UsageError("expected at least one approximation, got none")
    if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0 < damping < float("inf"):
        raise UsageError(f"expected a damping above 0, got {damping!r}")


def _measured(
    problem: Problem, layer: KroneckerLayer, spectra: list[LayerSpectrum], damping: float
) -> dict[str, Any]:
    """Measure all quantities of one layer, for every approximation."""
    names = [block.name for block in layer.blocks]
    space = problem.space(*names)  # blocks in the model's order
    order = torch.cat([space.positions(block) for block in layer.blocks]).to(problem.device)
    G = GGN(problem, *names).to_dense().double()[order][:, order]
    H = Hessian(problem, *names).to_dense().double()[order][:, order]
    g = problem.gradient(*names).double()[order]
    values, vectors = torch.linalg.eigh(G)
    top = float(values[-1])
    exact = vectors @ ((vectors.T @ g) / (values.clamp(min=0) + damping * top))
    quantities: dict[str, Any] = {name: [] for name in QUANTITIES}
    for spectrum in spectra:
        K = _dense(spectrum)
        quantities["error_ggn"].append(_relative(K, G))
        quantities["error_hessian"].append(_relative(K, H))
        quantities["lambda_max"].append(float(spectrum.values.max()) / top if top > 0 else float("nan"))
        damped = 1 / (spectrum.values + damping * top)
        step = with_values(spectrum, damped).times(g.to(damped).reshape(*damped.shape, 1))
        quantities["cosine"].append(_cosine(step.flatten().double(), exact))
    quantities["cosine_gradient"] = _cosine(g, exact)
    quantities["ggn_error_hessian"] = _relative(G, H)
    return quantities


def _dense(spectrum: LayerSpectrum) -> Tensor:
    m, n = spectrum.values.shape
    eye = torch.eye(m * n, dtype=spectrum.values.dtype, device=spectrum.values.device)
    return spectrum.times(eye.reshape(m, n, m * n)).reshape(m * n, m * n).double()


def _relative(K: Tensor, exact: Tensor) -> float:
    norm = float(exact.norm())
    return float((K - exact).norm()) / norm if norm > 0 else float("nan")


def _cosine(x: Tensor, y: Tensor) -> float:
    norms = float(x.norm() * y.norm())
    return float(x @ y) / norms if norms > 0 else float("nan")


def _size(layer: KroneckerLayer) -> int:
    return layer.shape[0] * layer.shape[1]
