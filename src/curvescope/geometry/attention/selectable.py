"""Keys that no query can prefer: those inside the convex hull of the others (Brody, Alon & Yahav 2023).

A query q attends most to key i if q · k_i is larger than every other q · k_j. Such a q exists exactly if k_i
is a vertex of the convex hull of the keys. The points n(x) lie on a sphere, where each is a vertex. A head
projects them to h < d dimensions, where they may not be vertices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.result import Result, Tabular
from curvescope.core.seeds import generator
from curvescope.geometry.attention.heads import without_svd
from curvescope.geometry.roles import embedding, read_norm
from curvescope.geometry.sphere import StreamNorm, fold
from curvescope.geometry.vocabulary.names import names_of
from curvescope.geometry.vocabulary.representations import How, represent
from curvescope.models.model import Model

EQUAL_KEYS = 1e-6  # distance, relative to the longest key, that float32 states cannot resolve
NEAR_KEYS = 0.1  # distance, relative to the median distance, of keys that nearly coincide


@dataclass(frozen=True)
class Hull(Result):
    """Vertices of the convex hull of some points, with a proof for each.

    The points are centered, whitened and scaled to a largest length of 1, which does not change the vertices.
    For a vertex, `margin` is the least q · (p_i − p_j) over j for a unit direction q that selects it. For
    another point, `distance` is the distance to the best convex combination of the other points found.
    """

    vertex: np.ndarray  # (n,) bool
    margin: np.ndarray  # (n,) nan for other points
    distance: np.ndarray  # (n,) nan for vertices
    decided_by: list[str]  # direction or nearest
    tolerance: float


@dataclass(frozen=True)
class Selectable(Tabular):
    """Keys of a sample of tokens that no query of a head can prefer.

    Keys that coincide are tested as one key, and share its result: a query can prefer them to all others, but
    not one of them alone. `nearest` is 0 for them, and small for keys that nearly coincide, such as those of
    tokens that training never saw, which often cannot be selected together.
    """

    layer: int
    num_tokens: int  # in the sample
    vocabulary: int  # tokens it was drawn from
    ids: np.ndarray  # (n,)
    with_gain: np.ndarray  # (H, n) bool: can be selected, keys n(x) P Γ W_K
    without_gain: np.ndarray  # (H, n) the same with γ = 1
    without_norm: np.ndarray  # (H, n) keys x W_K of the stream itself
    nearest: np.ndarray  # (H, n) distance to the nearest other key, in median distances; 0 if they coincide
    text: list[str]
    bytes: list[str]
    seed: int
    notes: list[str]

    def table(self) -> Any:
        """Return one row per head: the number of keys that cannot be selected.

        `of_them_crowded` counts those (with γ) that have another key within a tenth of the median distance,
        `only_together` counts keys that can be selected, but not alone, because another one coincides.
        """
        names = ("with_gain", "without_gain", "without_norm")
        columns = {f"unselectable_{name}": (~getattr(self, name)).sum(1) for name in names}
        columns["of_them_crowded"] = self.crowded.sum(1)
        columns["only_together"] = (self.with_gain & (self.nearest == 0)).sum(1)
        return {"head": np.arange(len(self.with_gain)), "num_tokens": self.num_tokens, **columns}

    @property
    def crowded(self) -> np.ndarray:
        """(H, n) keys with γ that cannot be selected and nearly coincide with another."""
        return ~self.with_gain & (self.nearest < NEAR_KEYS)


def selectable_keys(
    model: Model,
    layer: int,
    *,
    num_tokens: int = 200,
    how: How = "auto",
    seed: int = 0,
    tolerance: float = 1e-9,
    tokenizer: Any = None,
) -> Selectable:
    """Find the keys of a sample of tokens that each head could attend to most, with and without γ and norm.

    A key competes only with the others in the random sample. A key that cannot be selected in the sample
    cannot be selected among the full vocabulary either; the converse does not hold.

    Args:
        num_tokens: size of the sample; the time grows at least with its square.
        how: representation of a token, see `represent`.
    """
    if num_tokens < 2:
        raise UsageError(f"num_tokens: expected at least 2, got {num_tokens}")
    names = names_of(model.tokenizer if tokenizer is None else tokenizer)
    known = names.known(len(embedding(model)))
    ids = known[torch.randperm(len(known), generator=generator(seed))[:num_tokens].sort().values]
    tokens = represent(model, layer, how=how, ids=ids, tokenizer=names)
    x = tokens.table[tokens.at].double()
    norm, reason = read_norm(model, layer)
    norm = norm if tokens.normed else StreamNorm("none", name=norm.name)
    unfolded = without_svd(model, layer, folded=False)
    forms = {
        "with_gain": norm,
        "without_gain": StreamNorm(norm.kind, eps=norm.eps),
        "without_norm": StreamNorm("none"),
    }
    keys = {name: [_keys(x, c.W_K, form) for c in unfolded] for name, form in forms.items()}
    selectable = {
        name: np.stack([_selectable(k, tolerance) for k in head_keys]) for name, head_keys in keys.items()
    }
    notes = [tokens.note, f"{len(ids)} of {len(known)} tokens, drawn with seed {seed}"]
    notes += [reason] if reason else []
    return Selectable(
        layer=layer,
        num_tokens=len(ids),
        vocabulary=len(known),
        ids=ids.numpy(),
        **selectable,
        nearest=np.stack([_nearest_other(k) for k in keys["with_gain"]]),
        text=names.texts(ids.tolist()),
        bytes=names.hexes(ids.tolist()),
        seed=seed,
        notes=notes,
    )


def _keys(x: Tensor, W_K: Tensor, norm: StreamNorm) -> Tensor:
    """Return the keys (n, h) of the stream x (n, d), without the constant that all share."""
    folded, _ = fold(W_K, gamma=norm.gamma, kind=norm.kind)
    return norm.sphere(x) @ folded


def _selectable(keys: Tensor, tolerance: float) -> np.ndarray:
    """Return which keys can be selected, where coinciding keys count as one: (n,) bool."""
    first = _first_equal(keys)
    distinct, index = first.unique(return_inverse=True)
    if len(distinct) < 2:
        return np.ones(len(keys), bool)  # there is no other key
    return hull_vertices(keys[distinct], tolerance=tolerance).vertex[index.numpy()]


def _nearest_other(keys: Tensor) -> np.ndarray:
    """Return the distance of each key to the nearest other one, in median distances; 0 if they coincide."""
    distances = _distances(keys)
    median = float(distances[~torch.eye(len(keys), dtype=torch.bool)].median())
    first = _first_equal(keys)
    is_distinct = torch.bincount(first, minlength=len(keys))[first] == 1
    nearest = distances.fill_diagonal_(torch.inf).min(1).values / (median if median > 0 else 1.0)
    return torch.where(is_distinct, nearest, torch.zeros_like(nearest)).numpy()


def _first_equal(keys: Tensor) -> Tensor:
    """Return for each key the first key that it coincides with, up to rounding: (n,)."""
    close = _distances(keys) <= EQUAL_KEYS * keys.norm(dim=1).max()
    return close.int().argmax(1)


def _distances(keys: Tensor) -> Tensor:
    return torch.cdist(keys, keys, compute_mode="donot_use_mm_for_euclid_dist")


def hull_vertices(points: Tensor, *, tolerance: float = 1e-9) -> Hull:
    """Find the points (n, h) that are vertices of their convex hull; points that coincide are not vertices.

    Most vertices are certified by a direction: the whitened point itself, improved by a few steps of a
    perceptron. For each remaining point, nonnegative least squares finds the nearest convex combination of
    the others, which either reaches the point or gives a separating direction.

    Args:
        tolerance: a margin below this counts as zero.
    """
    p = torch.as_tensor(points).detach().double().cpu()
    if p.dim() != 2 or len(p) < 2:
        raise ShapeError(f"expected at least two points (n, h), got {tuple(p.shape)}")
    p, n = _whitened(p), len(p)
    if not p.shape[1]:
        return Hull(np.zeros(n, bool), np.full(n, np.nan), np.zeros(n), ["nearest"] * n, tolerance)
    margin = _margins_by_direction(p).numpy().copy()
    vertex, distance = margin > tolerance, np.full(n, np.nan)
    decided_by = np.where(vertex, "direction", "nearest").tolist()
    for i in np.flatnonzero(~vertex):
        margin[i], distance[i] = _nearest(p, int(i))
        vertex[i] = margin[i] > tolerance
    margin[~vertex], distance[vertex] = np.nan, np.nan
    return Hull(vertex, margin, distance, decided_by, tolerance)


def _whitened(p: Tensor) -> Tensor:
    """Center and whiten the points, and scale them to a largest length of 1."""
    p = p - p.mean(0)
    U, s, _ = torch.linalg.svd(p, full_matrices=False)
    U = U[:, s > 1e-12 * s.max()] if float(s.max()) > 0 else U[:, :0]
    return U / U.norm(dim=1).max() if U.shape[1] else U


def _margins_by_direction(p: Tensor, steps: int = 30) -> Tensor:
    """Return the best margin (n,) that a perceptron finds for each point, starting at direction p_i."""
    n = len(p)
    q = p / p.norm(dim=1, keepdim=True).clamp_min(1e-300)
    best = torch.full((n,), -torch.inf, dtype=p.dtype)
    for _ in range(steps):
        scores = q @ p.T
        own_scores = scores.diagonal().clone()
        rival = scores.fill_diagonal_(-torch.inf).max(1)
        best = torch.maximum(best, own_scores - rival.values)
        if bool((best > 0).all()):
            break
        q = q + (p - p[rival.indices])
        q = q / q.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return best


def _nearest(p: Tensor, i: int) -> tuple[float, float]:
    """Return the margin of point i for |q| = 1, and its distance to the nearest combination of the others.

    Solve least squares with weights λ ≥ 0 for (p_j, 1) against (p_i, 1). The remainder (r, ρ) has
    r · p_j + ρ ≤ 0 for all others and |r|² + ρ² for point i, so r separates point i unless it is 0.
    """
    from scipy.optimize import nnls

    lifted = torch.cat([p, torch.ones(len(p), 1, dtype=p.dtype)], dim=1).numpy()
    others = np.delete(lifted, i, axis=0)
    weights, _ = nnls(others.T, lifted[i], maxiter=50 * len(p))
    remainder = lifted[i] - weights @ others
    r, length = remainder[:-1], float(np.linalg.norm(remainder[:-1]))
    margin = float((lifted[i, :-1] @ r - (others[:, :-1] @ r).max()) / length) if length > 0 else 0.0
    total = weights.sum()
    combined = weights @ others[:, :-1] / total if total > 0 else others[:, :-1].mean(0)
    return margin, float(np.linalg.norm(combined - lifted[i, :-1]))
