"""Keys that no query can prefer: those inside the convex hull of the others (Brody, Alon & Yahav 2023).

A query q attends most to key i when q · k_i is larger than every other q · k_j. Such a q exists exactly if
k_i is a vertex of the convex hull of the keys. The points n(x) themselves lie on a sphere, where each is a
vertex, but a head sees their image in h < d dimensions, where it may not be.
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
from curvescope.geometry.sphere import Norm, fold
from curvescope.geometry.vocabulary.names import names_of
from curvescope.geometry.vocabulary.representations import How, represent
from curvescope.models.model import Model

SAME = 1e-6  # of the longest key: what float32 states cannot tell apart
NEAR = 0.1  # of the median distance between keys: all but the same


@dataclass(frozen=True)
class Hull(Result):
    """Vertices of the convex hull of some points, with a proof for each.

    Numbers are of the points less their mean and scaled so that every direction has the same variance, which
    changes no hull, and the largest length is 1. For a vertex, `margin` is the least q · (p_i − p_j) over j
    for the unit direction q that was found: it can be selected, by this much at least. For another point,
    `distance` is how far the convex combination of the others that was found is from it.
    """

    vertex: np.ndarray  # (n,) bool
    margin: np.ndarray  # (n,) nan where it is no vertex
    distance: np.ndarray  # (n,) nan where it is one
    decided_by: list[str]  # direction or nearest
    tolerance: float


@dataclass(frozen=True)
class Selectable(Tabular):
    """Keys of a sample of tokens that no query of a head can prefer.

    Keys that coincide are tested as one, and each counts as selectable if that one is: a query can prefer
    them to the rest, though none of them alone. `nearest` shows them (0), and those that all but coincide,
    such as tokens that training never saw: these are often out of reach together, in one place.
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
        """One row per head: how many keys cannot be selected.

        `of_them_crowded` counts those (with γ) that have another key within a tenth of the median distance,
        `only_together` keys that can be selected, but not alone, because another one is the same.
        """
        names = ("with_gain", "without_gain", "without_norm")
        columns = {f"unselectable_{name}": (~getattr(self, name)).sum(1) for name in names}
        columns["of_them_crowded"] = self.crowded.sum(1)
        columns["only_together"] = (self.with_gain & (self.nearest == 0)).sum(1)
        return {"head": np.arange(len(self.with_gain)), "num_tokens": self.num_tokens, **columns}

    @property
    def crowded(self) -> np.ndarray:
        """(H, n) keys with γ that cannot be selected and all but coincide with another."""
        return ~self.with_gain & (self.nearest < NEAR)


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
    """Find the keys, in a random sample of tokens, that each head could attend to most, with and without γ
    and norm.

    A key counts against the others of the sample only: one that cannot be selected here cannot be selected
    among the whole vocabulary either, one that can be selected here may not be.

    Args:
        num_tokens: size of the sample; the work grows with its square at least.
        how: what stands for a token, see `represent`.
    """
    if num_tokens < 2:
        raise UsageError(f"num_tokens: expected at least 2, got {num_tokens}")
    names = names_of(model.tokenizer if tokenizer is None else tokenizer)
    known = names.known(len(embedding(model)))
    ids = known[torch.randperm(len(known), generator=generator(seed))[:num_tokens].sort().values]
    tokens = represent(model, layer, how=how, ids=ids, tokenizer=names)
    x = tokens.table[tokens.at].double()
    norm, why = read_norm(model, layer)
    norm = norm if tokens.normed else Norm("none", name=norm.name)
    plain = without_svd(model, layer, folded=False)
    forms = {"with_gain": norm, "without_gain": Norm(norm.kind, eps=norm.eps), "without_norm": Norm("none")}
    keys = {name: [_keys(x, c.W_K, form) for c in plain] for name, form in forms.items()}
    found = {name: np.stack([_selectable(k, tolerance) for k in own]) for name, own in keys.items()}
    notes = [tokens.note, f"{len(ids)} of {len(known)} tokens, drawn with seed {seed}"]
    notes += [why] if why else []
    return Selectable(
        layer=layer,
        num_tokens=len(ids),
        vocabulary=len(known),
        ids=ids.numpy(),
        **found,
        nearest=np.stack([_nearest_other(k) for k in keys["with_gain"]]),
        text=names.texts(ids.tolist()),
        bytes=names.hexes(ids.tolist()),
        seed=seed,
        notes=notes,
    )


def _keys(x: Tensor, W_K: Tensor, norm: Norm) -> Tensor:
    """Keys (n, h) of the stream x (n, d), less what is the same for all."""
    folded, _ = fold(W_K, gamma=norm.gamma, kind=norm.kind)
    return norm.sphere(x) @ folded


def _selectable(keys: Tensor, tolerance: float) -> np.ndarray:
    """Return True if each key can be selected, those that coincide as one: (n,) bool."""
    first = _same(keys)
    own, at = first.unique(return_inverse=True)
    if len(own) < 2:
        return np.ones(len(keys), bool)  # there is nothing else to prefer
    return hull_vertices(keys[own], tolerance=tolerance).vertex[at.numpy()]


def _nearest_other(keys: Tensor) -> np.ndarray:
    """Distance of each key to the nearest other one over the median distance; 0 where they coincide."""
    distances = _distances(keys)
    middle = float(distances[~torch.eye(len(keys), dtype=torch.bool)].median())
    first = _same(keys)
    alone = torch.bincount(first, minlength=len(keys))[first] == 1
    nearest = distances.fill_diagonal_(torch.inf).min(1).values / (middle if middle > 0 else 1.0)
    return torch.where(alone, nearest, torch.zeros_like(nearest)).numpy()


def _same(keys: Tensor) -> Tensor:
    """Return for each key the first key that it coincides with, up to rounding: (n,)."""
    close = _distances(keys) <= SAME * keys.norm(dim=1).max()
    return close.int().argmax(1)


def _distances(keys: Tensor) -> Tensor:
    return torch.cdist(keys, keys, compute_mode="donot_use_mm_for_euclid_dist")


def hull_vertices(points: Tensor, *, tolerance: float = 1e-9) -> Hull:
    """Find the points (n, h) that are vertices of their convex hull; points that coincide are not vertices.

    Most are found at once by a direction: the point itself, seen from the mean and with equal variance in all
    directions, or what a few steps of a perceptron make of that. For each of the rest, the nearest convex
    combination of the others is found, which is the point itself or shows a direction.

    Args:
        tolerance: a margin below this counts as none.
    """
    p = torch.as_tensor(points).detach().double().cpu()
    if p.dim() != 2 or len(p) < 2:
        raise ShapeError(f"expected at least two points (n, h), got {tuple(p.shape)}")
    p, n = _whitened(p), len(p)
    if not p.shape[1]:
        return Hull(np.zeros(n, bool), np.full(n, np.nan), np.zeros(n), ["nearest"] * n, tolerance)
    margin = _margins_by_direction(p).numpy().copy()
    vertex, distance = margin > tolerance, np.full(n, np.nan)
    by = np.where(vertex, "direction", "nearest").tolist()
    for i in np.flatnonzero(~vertex):
        margin[i], distance[i] = _nearest(p, int(i))
        vertex[i] = margin[i] > tolerance
    margin[~vertex], distance[vertex] = np.nan, np.nan
    return Hull(vertex, margin, distance, by, tolerance)


def _whitened(p: Tensor) -> Tensor:
    """The points less their mean, with the same variance in all directions they span, of length 1 at most."""
    p = p - p.mean(0)
    U, s, _ = torch.linalg.svd(p, full_matrices=False)
    U = U[:, s > 1e-12 * s.max()] if float(s.max()) > 0 else U[:, :0]
    return U / U.norm(dim=1).max() if U.shape[1] else U


def _margins_by_direction(p: Tensor, steps: int = 30) -> Tensor:
    """The best margin (n,) that a perceptron finds for each point, from the direction p_i."""
    n = len(p)
    q = p / p.norm(dim=1, keepdim=True).clamp_min(1e-300)
    best = torch.full((n,), -torch.inf, dtype=p.dtype)
    for _ in range(steps):
        scores = q @ p.T
        own = scores.diagonal().clone()
        rival = scores.fill_diagonal_(-torch.inf).max(1)
        best = torch.maximum(best, own - rival.values)
        if bool((best > 0).all()):
            break
        q = q + (p - p[rival.indices])
        q = q / q.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return best


def _nearest(p: Tensor, i: int) -> tuple[float, float]:
    """The margin of point i, for |q| = 1, and its distance to the combination of the others nearest to it.

    Least squares with weights λ ≥ 0 for (p_j, 1) against (p_i, 1). The remainder (r, ρ) has r · p_j + ρ ≤ 0
    for all others and |r|² + ρ² for point i, so that r separates it unless it is 0.
    """
    from scipy.optimize import nnls

    lifted = torch.cat([p, torch.ones(len(p), 1, dtype=p.dtype)], dim=1).numpy()
    others = np.delete(lifted, i, axis=0)
    weights, _ = nnls(others.T, lifted[i], maxiter=50 * len(p))
    left = lifted[i] - weights @ others
    r, length = left[:-1], float(np.linalg.norm(left[:-1]))
    margin = float((lifted[i, :-1] @ r - (others[:, :-1] @ r).max()) / length) if length > 0 else 0.0
    total = weights.sum()
    combined = weights @ others[:, :-1] / total if total > 0 else others[:, :-1].mean(0)
    return margin, float(np.linalg.norm(combined - lifted[i, :-1]))
