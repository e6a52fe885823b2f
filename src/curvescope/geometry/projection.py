"""Project points to 2 or 3 dimensions for pictures: PCA, PCA on the sphere, UMAP.

One fit uses all points of a picture, so that distances in it are comparable. Only `project_apart` fits one
set of points and transforms others with that map.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from curvescope.core.errors import MissingExtra, ShapeError, UsageError
from curvescope.core.requirements import how_to_install
from curvescope.core.result import Result

Method = Literal["pca", "sphere", "umap"]
APART = "umap apart"


@dataclass(frozen=True)
class Projection(Result):
    """Coordinates of points, and the share of their variance.

    `explained` is the share of the variance along each axis (of the tangent vectors for `sphere`); UMAP keeps
    neighbors, not variance, so it has none.
    """

    coordinates: np.ndarray  # (n, dim)
    method: str
    explained: np.ndarray | None  # (dim,)
    seed: int

    @property
    def words(self) -> str:
        """Describe the projection for a caption."""
        if self.method == APART:
            return (
                "UMAP (Euclidean, fitted to raw embeddings, every group of points transformed separately, "
                f"seed {self.seed}): differences between groups may come from the map"
            )
        if self.explained is None:
            return (
                f"UMAP (cosine, seed {self.seed}): neighbors stay close, lengths and angles have no meaning"
            )
        name = "PCA" if self.method == "pca" else "PCA in the tangent plane of the sphere"
        return f"{name}: {len(self.explained)} axes with {100 * self.explained.sum():.0f} % of the variance"


def project(
    points: np.ndarray,
    *,
    method: Method = "pca",
    dim: int = 3,
    seed: int = 0,
    neighbors: int = 15,
    min_dist: float = 0.1,
) -> Projection:
    """Project points (n, d) to `dim` axes.

    Args:
        method: `pca` of the points minus their mean; `sphere`, PCA of the logarithmic map at the mean
            direction, v = θ (p − m cos θ) / sin θ with cos θ = p · m for unit p and m; `umap` with the cosine
            distance.
        seed: seed of UMAP; the other methods are deterministic.
        neighbors: number of neighbors in UMAP.
        min_dist: smallest distance in UMAP.
    """
    X = np.asarray(points, dtype=np.float64)
    if X.ndim != 2 or len(X) < 2:
        raise ShapeError(f"expected points (n, d) with n of at least 2, got {X.shape}")
    if method not in get_args(Method):
        raise UsageError(f"expected a projection of {', '.join(get_args(Method))}, got {method!r}")
    if not np.isfinite(X).all():
        raise UsageError("expected finite points, got infinite or NaN entries")
    if method == "umap":
        coordinates_ = _umap(X, dim=dim, seed=seed, neighbors=neighbors, min_dist=min_dist)
        return Projection(coordinates_, method, None, seed)
    if method == "sphere":
        X = tangent(X)
    coordinates, explained = _pca(X, dim)
    return Projection(coordinates, method, explained, seed)


def tangent(points: np.ndarray) -> np.ndarray:
    """Map points (n, d), as unit vectors, to the tangent plane at their mean direction (logarithmic map)."""
    p = points / np.linalg.norm(points, axis=1, keepdims=True)
    m = p.mean(0)
    size = np.linalg.norm(m)
    if size < 1e-9:
        raise UsageError("expected points with a mean direction, got a mean of zero", hint="projection='pca'")
    m = m / size
    cosine = np.clip(p @ m, -1.0, 1.0)
    tangential = p - cosine[:, None] * m
    length = np.linalg.norm(tangential, axis=1)
    angle = np.arctan2(length, cosine)
    return tangential * (angle / np.where(length > 0, length, 1.0))[:, None]


def _pca(X: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return coordinates and shares of variance; the largest loading of every axis is positive."""
    X = X - X.mean(0)
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    largest = np.abs(Vt).argmax(1)
    sign = np.sign(Vt[np.arange(len(Vt)), largest])
    coordinates, total = U * s * np.where(sign == 0, 1.0, sign), float((s**2).sum()) or 1.0
    missing = max(dim - len(s), 0)
    coordinates = np.pad(coordinates[:, :dim], ((0, 0), (0, missing)))
    return coordinates, np.pad(s[:dim] ** 2, (0, missing)) / total


def project_apart(
    fitted: np.ndarray,
    groups: Sequence[np.ndarray],
    *,
    dim: int = 3,
    seed: int = 0,
    neighbors: int = 15,
    min_dist: float = 0.1,
) -> Projection:
    """Fit UMAP with the Euclidean distance to `fitted` (n, d), then transform each group (m, d) with it.

    The result has the coordinates of the groups, one after the other.
    """
    X = np.asarray(fitted, dtype=np.float32)
    model = _umap_model(len(X), "euclidean", dim=dim, seed=seed, neighbors=neighbors, min_dist=min_dist)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X)
        coordinates = [model.transform(np.asarray(group, dtype=np.float32)) for group in groups]
    return Projection(np.concatenate(coordinates).astype(np.float64), APART, None, seed)


def _umap(X: np.ndarray, *, dim: int, seed: int, neighbors: int, min_dist: float) -> np.ndarray:
    model = _umap_model(len(X), "cosine", dim=dim, seed=seed, neighbors=neighbors, min_dist=min_dist)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # UMAP warns that a seed allows only one thread
        return np.asarray(model.fit_transform(X.astype(np.float32)), dtype=np.float64)


def _umap_model(num_points: int, metric: str, *, dim: int, seed: int, neighbors: int, min_dist: float) -> Any:
    umap = need_umap()
    if num_points <= dim + 1:
        raise UsageError(
            f"expected more than {dim + 1} points for UMAP in {dim} dimensions, got {num_points}"
        )
    return umap.UMAP(
        n_components=dim,
        n_neighbors=max(min(neighbors, num_points - 1), 2),
        min_dist=min_dist,
        metric=metric,
        init="spectral" if num_points > 4 * dim else "random",
        random_state=seed,
        n_jobs=1,
    )


def need_umap() -> Any:
    """Import the package umap-learn, or raise MissingExtra."""
    try:
        import umap
    except ImportError:
        raise MissingExtra(
            "UMAP needs the package umap-learn, which is not installed",
            hint=how_to_install("umap-learn") + ", or projection='pca'",
        ) from None
    return umap
