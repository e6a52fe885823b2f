"""The softmax and its Jacobian: against autograd, with hidden entries, and with their digits."""

import pytest
import torch

from curvescope.closed_form.attention.core import core_point, core_push, core_vjp
from curvescope.closed_form.objectives import class_targets, cross_entropy_objective
from curvescope.closed_form.softmax import (
    centered,
    masked_softmax,
    softmax_along,
    softmax_covariance,
)
from curvescope.core.errors import ShapeError
from curvescope.core.seeds import generator
from oracles import normal


def test_jacobian_along_directions_and_as_a_matrix():
    source = generator(81)
    z, u, U = normal(source, 2, 3, 5), normal(source, 2, 3, 5), normal(source, 4, 5)
    p, moved = torch.func.jvp(lambda z: torch.softmax(z, -1), (z,), (u,))
    torch.testing.assert_close(softmax_along(p, u), moved)
    J = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    torch.testing.assert_close(softmax_covariance(p, U), U @ J @ U.T)
    torch.testing.assert_close(centered(p[:, :, None], U), U - (p @ U.T)[..., None])
    with pytest.raises(ShapeError, match="over 5 entries"):
        centered(p, U.T)


def test_hidden_entries_have_probability_zero():
    scores = normal(generator(82), 3, 4)
    mask = torch.tensor([[True, True, False, True], [False] * 4, [True] * 4])
    p = masked_softmax(scores, mask)
    torch.testing.assert_close(p[0, mask[0]], torch.softmax(scores[0, mask[0]], -1))
    assert not p[~mask].any()
    assert torch.equal(masked_softmax(torch.where(mask, scores, -torch.inf)), p)
    torch.testing.assert_close(p[2], torch.softmax(scores[2], -1))
    assert masked_softmax(torch.full((2,), torch.nan)).isnan().all()  # a bug upstream stays visible


@pytest.mark.parametrize("shift", [1.0, 1e6])
def test_nearly_one_hot_probabilities_keep_their_digits(shift):
    """Two entries with weights 1 − w and w: u − Σ p u is −w Δ and (1 − w) Δ, Δ the difference of u."""
    w, step = 1e-13, 0.75
    p = torch.tensor([1 - w, w], dtype=torch.float64)
    u = torch.tensor([shift, shift + step], dtype=torch.float64)
    want = torch.tensor([-w * step, (1 - w) * step], dtype=torch.float64)
    torch.testing.assert_close(centered(p, u), want, rtol=1e-14, atol=0)
    plain = u - (p * u).sum()
    assert abs(float(plain[0] / want[0]) - 1) > 1e-4


def test_the_core_of_attention_keeps_its_digits_too():
    """One query, keys 0 and −30: the derivative in the score is e^{−30} (1 − e^{−30}) up to rounding."""
    q, k = torch.ones(2, 1).double(), torch.tensor([[0.0], [-30.0]]).double()
    v = torch.tensor([[1000.0], [1001.0]]).double()
    at = core_point(q, k, v, scale=1.0)
    small = torch.exp(torch.tensor(-30.0).double())
    slope = small / (1 + small) ** 2
    tau = at.score_cotangent(torch.ones(2, 1).double())
    want = slope * torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]).double()
    torch.testing.assert_close(tau, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(core_vjp(at, torch.ones(2, 1).double())[0], -30 * want[:, 1:])
    moved = core_push(at, (torch.zeros_like(q), torch.tensor([[0.0], [1.0]]).double(), torch.zeros_like(v)))
    torch.testing.assert_close(moved.dA, want, rtol=1e-12, atol=0)


def test_targets_are_classes_or_probabilities():
    source = generator(83)
    z, labels = normal(source, 4, 3), torch.tensor([0, 2, -100, 1])
    y, weight = class_targets(labels, z)
    assert torch.equal(y[[0, 1, 3]], torch.eye(3).double()[[0, 2, 1]])
    torch.testing.assert_close(weight[:, 0], torch.tensor([1.0, 1.0, 0.0, 1.0]).double() / 3)
    ignored = torch.full((4,), -100)
    assert float(cross_entropy_objective(z, ignored, num_terms=5).value) == 0  # one of several batches
    smooth = torch.softmax(normal(source, 4, 3), -1)
    torch.testing.assert_close(
        cross_entropy_objective(z, smooth).value, torch.nn.functional.cross_entropy(z, smooth)
    )
    for wrong in (2 * smooth, smooth - 1, labels[:3]):
        with pytest.raises(ShapeError, match=r"integer targets .* or probabilities"):
            class_targets(wrong, z)
    with pytest.raises(ShapeError, match="at least one token"):
        class_targets(ignored, z)
