"""Vertices of convex hulls against Qhull, and keys that no query can prefer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvescope as cs
from cases import transformer
from curvescope.core.errors import CurvescopeError
from curvescope.geometry import hull_vertices, normalize, selectable_keys


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("n", "h"), [(60, 2), (80, 3), (60, 5)])
def test_vertices_are_those_of_qhull(n, h):
    from scipy.spatial import ConvexHull

    points = draw(n, h) * torch.logspace(0, 3, h, dtype=torch.float64)  # badly scaled
    found = hull_vertices(points)
    assert set(np.flatnonzero(found.vertex)) == set(ConvexHull(points.numpy()).vertices.tolist())
    assert (found.margin[found.vertex] > 0).all()
    assert (found.distance[~found.vertex] < 1e-9).all()
    assert np.isnan(found.margin[~found.vertex]).all()
    assert set(found.decided_by) == {"direction", "nearest"}


def test_known_hulls():
    square = torch.tensor([[0.0, 0], [1, 0], [1, 1], [0, 1], [0.5, 0.5], [0.5, 0.0]], dtype=torch.float64)
    assert hull_vertices(square).vertex.tolist() == [True] * 4 + [False] * 2  # the last lies on an edge
    twice = torch.cat([square[:4], square[:1]])
    assert hull_vertices(twice).vertex.tolist() == [False, True, True, True, False]
    assert not hull_vertices(torch.zeros(3, 2)).vertex.any()
    line = torch.tensor([[0.0, 0], [1, 1], [2, 2]], dtype=torch.float64)
    assert hull_vertices(line).vertex.tolist() == [True, False, True]
    assert hull_vertices(normalize(draw(50, 4))).vertex.all()  # points of a sphere
    with pytest.raises(CurvescopeError, match="two points"):
        hull_vertices(draw(1, 3))


def test_keys_of_a_model():
    """One coordinate per head: exactly the largest and the smallest key can be selected."""
    model = cs.load(transformer(vocab_size=30, d_model=6, n_heads=3, d_head=1, positions="none"))
    found = selectable_keys(model, 0, num_tokens=20, seed=1)
    p = {name: tensor.detach() for name, tensor in model.module.named_parameters()}
    E, g = p["E"][torch.from_numpy(found.ids)], p["L0.ln1.g"]
    n = torch.nn.functional.layer_norm(E, (6,), eps=1e-5)
    for head in range(3):
        W = p["L0.W_K"][:, head]
        for name, keys in (("with_gain", (n * g) @ W), ("without_gain", n @ W), ("without_norm", E @ W)):
            want = {int(keys.argmax()), int(keys.argmin())}
            assert set(np.flatnonzero(getattr(found, name)[head])) == want
    assert (found.num_tokens, found.vocabulary) == (20, 30)
    assert any("20 of 30 tokens" in note for note in found.notes)
    assert found.to_frame()["unselectable_with_gain"].tolist() == [18] * 3


def test_keys_that_coincide_are_counted_apart():
    """A line of keys, its ends twice: both can be selected, but only together; those between cannot."""
    model = cs.load(transformer(vocab_size=30, d_model=6, n_heads=1, d_head=1, positions="none"))
    E = dict(model.module.named_parameters())["E"]
    keys = selectable_keys(model, 0, num_tokens=30)
    low, high = np.flatnonzero(keys.with_gain[0])
    others = [i for i in range(30) if i not in (low, high)]
    with torch.no_grad():
        E[others[0]], E[others[1]] = E[low], E[high]
        E[others[2]] = E[others[3]]
    found = selectable_keys(model, 0, num_tokens=30)
    ends = {int(low), int(high), others[0], others[1]}
    assert set(np.flatnonzero(found.with_gain[0])) == ends
    assert set(np.flatnonzero(found.nearest[0] == 0)) == ends | {others[2], others[3]}
    row = found.to_frame().iloc[0]
    assert (row["unselectable_with_gain"], row["only_together"]) == (26, 4)
    assert row["of_them_crowded"] == (found.nearest[0] < 0.1)[[i for i in range(30) if i not in ends]].sum()


def test_distances_to_the_nearest_key():
    model = cs.load(transformer(vocab_size=12, d_model=6, n_heads=1, d_head=2, positions="none"))
    found = selectable_keys(model, 0)
    p = {name: tensor.detach() for name, tensor in model.module.named_parameters()}
    n = torch.nn.functional.layer_norm(p["E"], (6,), eps=1e-5)
    keys = ((n * p["L0.ln1.g"]) @ p["L0.W_K"]).numpy()
    apart = np.linalg.norm(keys[:, None] - keys[None], axis=-1)
    pairs = np.sort(apart[np.triu_indices(12, 1)])
    want = np.where(np.eye(12) > 0, np.inf, apart).min(1) / pairs[(len(pairs) - 1) // 2]
    np.testing.assert_allclose(found.nearest[0], want, rtol=1e-9)


def test_the_same_token_everywhere_can_be_selected():
    model = cs.load(transformer(vocab_size=9, positions="none"))
    with torch.no_grad():
        dict(model.module.named_parameters())["E"][:] = draw(1, model.facts["d_model"])
    found = selectable_keys(model, 0)
    assert found.with_gain.all()
    assert (found.to_frame()["only_together"] == 9).all()


def test_wide_heads_select_everything():
    """With n ≤ h + 1 points in general position each is a vertex."""
    model = cs.load(transformer(vocab_size=9, d_model=12, n_heads=1, d_head=12, n_layers=2))
    for layer in (0, 1):
        found = selectable_keys(model, layer)
        assert found.with_gain.all()
        assert found.num_tokens == 9
    with pytest.raises(CurvescopeError, match="at least 2"):
        selectable_keys(model, 0, num_tokens=1)


def test_post_norm_models_say_what_they_read():
    model = cs.load(transformer(vocab_size=9, norm="post", n_layers=2))
    assert any("not foldable" in note for note in selectable_keys(model, 1).notes)
