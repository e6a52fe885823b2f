"""Recurrent layers, which write a list of their parameters at every call: that is no change of the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import curvescope as cs


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]):
        super().__init__()
        self.cell = kind(2, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0][:, -1]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_their_lists_of_parameters_are_put_back(kind: type[nn.RNNBase]):
    module = Recurrent(kind).double()
    x, y = torch.ones(3, 4, 2).double(), torch.ones(3, 3).double()
    problem = cs.Problem(module, (x, y), nn.MSELoss())
    H, own = cs.Hessian(problem), list(module.cell.parameters())
    for work in (lambda: H @ torch.ones(H.shape[0]).double(), problem.gradient, problem.loss_value):
        work()
        assert all(mine is his for mine, his in zip(module.cell._flat_weights, own, strict=True))
    moved = problem.at(torch.zeros(H.shape[0]).double())
    assert moved.loss_value() == 1
    assert all(mine is his for mine, his in zip(module.cell._flat_weights, own, strict=True))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_samples_and_diagonals_of_recurrent_layers(kind: type[nn.RNNBase]):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Recurrent(kind).double()
        x, y = torch.randn(3, 4, 2).double(), torch.randn(3, 3).double()
    problem = cs.Problem(module, (x, y), nn.MSELoss())
    torch.testing.assert_close(cs.per_sample(problem).gradients().mean(0), problem.gradient())
    G = cs.GGN(problem)
    found = torch.as_tensor(cs.exact_diagonal(G, method="outputs").values)
    torch.testing.assert_close(found, G.to_dense().diagonal())
