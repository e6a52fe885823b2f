"""Loss derivatives against automatic differentiation of PyTorch's losses."""

import pytest
import torch
from torch.func import grad, jacfwd

from curvescope.closed_form.objectives import cross_entropy, squared_error
from curvescope.core.errors import ShapeError
from curvescope.core.seeds import generator


def draw(*shape):
    return torch.randn(*shape, generator=generator(3, *shape), dtype=torch.float64)


def per_token(H, F):
    """The blocks of ∂²ℓ/∂F² that belong to one token; the others must be zero."""
    tokens, o = F.numel() // F.shape[-1], F.shape[-1]
    H = H.reshape(tokens, o, tokens, o)
    diagonal = torch.stack([H[i, :, i] for i in range(tokens)])
    rest = H.clone()
    for i in range(tokens):
        rest[i, :, i] = 0
    assert not rest.any()
    return diagonal.reshape(*F.shape, o)


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)])
def test_squared_error(shape):
    F, Y = draw(*shape), draw(*shape) * 2 + 1
    G, B = squared_error(F, Y)
    loss = torch.nn.functional.mse_loss
    torch.testing.assert_close(G, grad(lambda f: loss(f, Y))(F))
    H = torch.autograd.functional.hessian(lambda f: loss(f, Y), F).reshape(F.numel(), -1)
    torch.testing.assert_close(H, B * torch.eye(F.numel(), dtype=torch.float64))
    assert squared_error(F, Y, factor=1.0).B == 1.0


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)])
@pytest.mark.parametrize("case", ["plain", "bias", "ignored", "smoothed"])
def test_cross_entropy(shape, case):
    F, U = draw(*shape), draw(3, 5)
    bias = draw(5) if case == "bias" else None
    targets = torch.randint(5, shape[:-1], generator=generator(8))
    if case == "ignored":
        targets[..., 1] = -100
    if case == "smoothed":
        targets = torch.softmax(draw(*shape[:-1], 5), -1)

    def loss(f):
        logits = f @ U if bias is None else f @ U + bias
        y = targets.flatten(0, -2) if case == "smoothed" else targets.flatten()
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), y)

    G, B = cross_entropy(F, targets, U, b_U=bias)
    torch.testing.assert_close(G, grad(loss)(F))
    torch.testing.assert_close(B, per_token(jacfwd(grad(loss))(F), F))


def test_confident_predictions_keep_their_digits():
    F, U = torch.tensor([[40.0, 0.0]]).double(), torch.eye(2).double()
    B = cross_entropy(F, torch.tensor([0]), U).B
    p = torch.exp(torch.tensor(-40.0).double())
    torch.testing.assert_close(
        B[0], p * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double(), rtol=1e-12, atol=0
    )


def test_shapes_are_checked():
    F, U = draw(4, 3), draw(3, 5)
    with pytest.raises(ShapeError, match="expected targets"):
        squared_error(F, F.T)
    with pytest.raises(ShapeError, match="expected classes"):
        cross_entropy(F, torch.zeros(3, dtype=torch.long), U)
    with pytest.raises(ShapeError, match="at least one"):
        cross_entropy(F, torch.full((4,), -100), U)
