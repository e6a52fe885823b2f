"""Pictures of points: PCA against the covariance, the sphere's own PCA on circles, UMAP repeats itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from curvescope.core.errors import MissingExtra, ShapeError, UsageError
from curvescope.geometry.projection import project, project_apart, tangent

POINTS = np.random.default_rng(0).normal(size=(40, 6)) * np.array([5.0, 3.0, 2.0, 1.0, 0.5, 0.1])


def distances(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x[:, None] - x[None], axis=-1)


def test_pca_is_that_of_the_covariance():
    found = project(POINTS, dim=3)
    centered = POINTS - POINTS.mean(0)
    values, vectors = np.linalg.eigh(centered.T @ centered)
    values, vectors = values[::-1], vectors[:, ::-1]
    np.testing.assert_allclose(found.explained, values[:3] / values.sum())
    truth = centered @ vectors[:, :3]
    for j in range(3):
        sign = np.sign(vectors[np.abs(vectors[:, j]).argmax(), j])  # the largest loading is positive
        np.testing.assert_allclose(found.coordinates[:, j], sign * truth[:, j], atol=1e-10)


def test_all_axes_keep_all_distances():
    found = project(POINTS, dim=6)
    np.testing.assert_allclose(distances(found.coordinates), distances(POINTS), atol=1e-10)
    assert found.explained.sum() == pytest.approx(1)


def test_pca_does_not_depend_on_the_order_of_points():
    order = np.random.default_rng(1).permutation(len(POINTS))
    np.testing.assert_allclose(
        project(POINTS[order]).coordinates, project(POINTS).coordinates[order], atol=1e-10
    )


def test_few_points_leave_axes_empty():
    found = project(POINTS[:2], dim=3)
    assert found.coordinates.shape == (2, 3)
    np.testing.assert_allclose(found.explained, [1, 0, 0], atol=1e-12)


def test_a_great_circle_becomes_a_line_with_its_own_lengths():
    angle = np.linspace(-1.2, 1.2, 13)
    x = 4.0 * np.stack([np.cos(angle), np.sin(angle), np.zeros(13)], 1)  # of any length
    found = project(x, method="sphere", dim=2)
    assert found.explained[0] == pytest.approx(1)
    np.testing.assert_allclose(np.abs(np.diff(found.coordinates[:, 0])), 0.2, atol=1e-9)


def test_the_logarithmic_map_keeps_angles_to_the_mean_direction():
    p = POINTS / np.linalg.norm(POINTS, axis=1, keepdims=True) + 0.5
    p /= np.linalg.norm(p, axis=1, keepdims=True)
    m = p.mean(0) / np.linalg.norm(p.mean(0))
    v = tangent(p)
    np.testing.assert_allclose(v @ m, 0, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(v, axis=1), np.arccos(np.clip(p @ m, -1, 1)), atol=1e-9)


def test_the_words_say_how_much_is_shown():
    assert "100 %" in project(POINTS, dim=6).words
    assert "tangent plane" in project(POINTS, method="sphere").words


def test_a_saved_projection_comes_back(tmp_path):
    found = project(POINTS)
    again = type(found).load(found.save(tmp_path))
    np.testing.assert_array_equal(again.coordinates, found.coordinates)


def test_umap_that_is_missing_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(MissingExtra, match=r"umap-learn, which is not installed .*pip install .umap-learn"):
        project(POINTS, method="umap")


def test_wrong_points_are_refused():
    with pytest.raises(ShapeError, match=r"got \(6,\)"):
        project(POINTS[0])
    with pytest.raises(UsageError, match="finite"):
        project(np.full((3, 3), np.nan))
    with pytest.raises(UsageError, match="got 'tsne'"):
        project(POINTS, method="tsne")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="mean direction"):
        project(np.array([[1.0, 0.0], [-1.0, 0.0]]), method="sphere")


class Drops:
    """In place of UMAP: keeps the first coordinates, and notes how it was called."""

    calls: ClassVar[list] = []

    def __init__(self, **options):
        self.calls.append(options)
        self.dim = options["n_components"]

    def fit(self, X):
        self.calls.append(X.shape)

    def transform(self, X):
        return X[:, : self.dim]


def test_groups_are_put_apart_into_a_picture_of_others(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Drops))
    Drops.calls.clear()
    found = project_apart(POINTS, [POINTS[:3], POINTS[10:14]], seed=5)
    np.testing.assert_allclose(
        found.coordinates, np.concatenate([POINTS[:3], POINTS[10:14]])[:, :3], rtol=1e-6
    )
    options, fitted = Drops.calls
    assert (options["metric"], options["random_state"], fitted) == ("euclidean", 5, POINTS.shape)
    assert "Euclidean" in found.words
    assert "cosine" not in found.words


@pytest.mark.slow
def test_umap_repeats_itself_with_its_seed():
    pytest.importorskip("umap")
    one, two = (project(POINTS, method="umap", seed=3, neighbors=8) for _ in range(2))
    np.testing.assert_array_equal(one.coordinates, two.coordinates)
    assert one.coordinates.shape == (40, 3)
    assert one.explained is None
    other = project(POINTS, method="umap", seed=4, neighbors=8)
    assert not np.allclose(one.coordinates, other.coordinates)
    assert "seed 3" in one.words
