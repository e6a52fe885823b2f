"""Composition and copying scores against dense matrices, and their chance level."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvescope as cs
from cases import transformer
from curvescope.core.errors import CurvescopeError
from curvescope.geometry import (
    Factored,
    circuits,
    composition,
    composition_score,
    copying_score,
    heads,
    through_vocabulary,
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_scores_are_dense_norms(kind):
    model = cs.load(transformer(n_layers=2, d_model=8, n_heads=2))
    first, second = heads(model, 0), heads(model, 1)
    found = composition(first, second, kind, num_samples=5)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            M = a.vo.to_dense()
            N = {"Q": b.qk.to_dense(), "K": b.qk.to_dense().T, "V": b.vo.to_dense()}[kind]
            want = (M @ N).norm() / M.norm() / N.norm()
            assert found.scores[i, j] == pytest.approx(float(want), abs=1e-12)
    assert found.layers == [0, 1]
    assert found.chance == pytest.approx(7**-0.5)
    assert len(found.to_frame()) == 4


def random_head(d: int, h: int, seed: int, norm: str):
    source = [draw(d, h, seed=seed + i) for i in range(3)]
    return circuits(*source, draw(h, d, seed=seed + 3), norm=norm)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_random_heads_are_at_chance(norm):
    """Over independent heads the mean square of the score is 1/d′, and z has mean 0 and deviation 1."""
    d, h = 24, 3
    first = [random_head(d, h, 100 * i, norm) for i in range(20)]
    second = [random_head(d, h, 7 + 100 * i, norm) for i in range(20)]
    found = composition(first, second, "V", num_samples=400, seed=1)
    free = d - 1 if norm == "layernorm" else d
    assert found.chance == pytest.approx(free**-0.5)
    square = (found.scores**2).mean()
    assert square == pytest.approx(1 / free, rel=0.1)
    assert (found.chance_mean**2 + found.chance_std**2).mean() == pytest.approx(1 / free, rel=0.03)
    assert abs(found.z.mean()) < 0.3
    assert found.z.std() == pytest.approx(1, abs=0.25)


def test_a_planted_composition_stands_out():
    d, h = 24, 3
    first = random_head(d, h, 0, "rmsnorm")
    W_Q = first.W_O.T  # the later head's queries read what the earlier one writes
    later = circuits(W_Q, draw(d, h, seed=20), draw(d, h, seed=21), draw(h, d, seed=22), norm="rmsnorm")
    scores = {kind: composition([first], [later], kind, num_samples=200) for kind in ("Q", "K", "V")}
    assert scores["Q"].scores[0, 0] > 0.5
    assert scores["Q"].z[0, 0] > 5
    assert abs(scores["K"].z[0, 0]) < 4
    same = composition([first], [later], "Q", num_samples=200)
    np.testing.assert_array_equal(same.z, scores["Q"].z)


def test_copying_scores():
    A = torch.linalg.qr(draw(12, 4))[0]
    assert copying_score(Factored(A, A)) == pytest.approx(1)
    assert copying_score(Factored(-A, A)) == pytest.approx(-1)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert copying_score(Factored(A[:, :2] @ turn, A[:, :2])) == pytest.approx(0, abs=1e-12)
    assert copying_score(Factored(0 * A, A)) == 0
    M = Factored(draw(12, 4, seed=2), draw(12, 4, seed=3))
    values = torch.linalg.eigvals(M.to_dense())
    assert copying_score(M) == pytest.approx(float(values.real.sum() / values.abs().sum()))


def test_eigenvalues_through_the_vocabulary():
    M, E, U = Factored(draw(6, 2), draw(6, 2, seed=1)), draw(15, 6, seed=2), draw(15, 6, seed=3)
    dense = torch.linalg.eigvals(E @ M.to_dense() @ U.T)
    dense = dense[dense.abs().argsort(descending=True)][:2]
    found = through_vocabulary(M, E, U).eigenvalues
    torch.testing.assert_close(found.abs().sort().values, dense.abs().sort().values)
    torch.testing.assert_close(found.real.sum(), dense.real.sum())


def test_scores_of_zero_and_wrong_arguments():
    zero = Factored(torch.zeros(5, 2).double(), draw(5, 2))
    assert composition_score(zero, zero) == 0
    one = [random_head(6, 2, 0, "rmsnorm")]
    with pytest.raises(CurvescopeError, match="Q, K or V"):
        composition(one, one, "O")
    with pytest.raises(CurvescopeError, match="one width"):
        composition(one, [random_head(7, 2, 0, "rmsnorm")], "V")
