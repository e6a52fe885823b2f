"""Products with our linear maps in the module, as they run on a GPU: the numbers are those of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import curvescope as cs
from curvescope.engines import batch_products
from curvescope.kernels import function_mode
from curvescope.studies.hvp.analysis import GPT2


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(function_mode, "LINEAR_ON", ("cpu", "cuda"))
    monkeypatch.setattr(batch_products, "TWINS_ON", ("cpu", "cuda"))


class Normed(nn.Module):
    """Weights that are no leaves, one that multiplies an activation, and a bias that is computed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second, self.scale = nn.Linear(8, 4), nn.Parameter(torch.ones(4) / 3)

    def forward(self, x):
        W = self.first.weight / self.first.weight.norm(dim=1, keepdim=True)
        y = torch.tanh(torch.nn.functional.linear(x, W, self.first.bias))
        mixed = y @ (y.flatten(0, -2).t() @ y.flatten(0, -2))  # a product of two activations
        return torch.nn.functional.linear(mixed, self.second.weight, self.second.bias * self.scale)


def tokens(vocabulary: int, shape: tuple[int, int]):
    source = torch.Generator().manual_seed(0)
    return tuple(torch.randint(vocabulary, shape, generator=source) for _ in range(2))


def problems():
    torch.manual_seed(0)
    yield "gpt2", cs.Problem(GPT2(3, 16, 2, 11, 8).double(), tokens(11, (2, 8)))
    x = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.randint(4, (3, 5), generator=torch.Generator().manual_seed(2))
    yield "normed", cs.Problem(Normed().double(), (x, y))


@pytest.mark.parametrize("operator", [cs.Hessian, cs.GGN, cs.FunctionalHessian])
@pytest.mark.parametrize(("name", "problem"), list(problems()), ids=lambda x: x if isinstance(x, str) else "")
def test_products_are_those_of_autograd(name, problem, operator):
    ours, theirs = operator(problem, engine="fast"), operator(problem, engine="autograd")
    V = torch.randn(ours.shape[1], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(ours @ V, theirs @ V, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours @ V[:, 0], theirs @ V[:, 0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("operator", [cs.Hessian, cs.GGN])
def test_layers_that_are_computed_again(operator):
    _, problem = next(problems())
    ours, theirs = operator(problem, checkpoint=True, engine="fast"), operator(problem, engine="autograd")
    v = torch.randn(ours.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        torch.testing.assert_close(ours @ v, theirs @ v, rtol=1e-9, atol=1e-12)


class Waves(nn.Module):
    """A complex linear map, of which a little is added."""

    def __init__(self):
        super().__init__()
        self.re, self.im = (nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2))
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = torch.fft.fft(x) @ torch.complex(self.re, self.im)
        return self.b(torch.tanh(self.a(x + 0.01 * torch.fft.ifft(y).real)))


def test_complex_maps_are_left_to_torch():
    torch.manual_seed(0)
    problem = cs.Problem(Waves().double(), (torch.randn(5, 6).double(), torch.randint(4, (5,))))
    v = torch.ones(problem.space().size, dtype=torch.float64)
    ours, theirs = cs.Hessian(problem, engine="fast") @ v, cs.Hessian(problem, engine="autograd") @ v
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_layer_that_computes_what_the_head_takes():
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Linear(6, 6)) for _ in range(2))).double()
    problem = cs.Problem(module, (torch.randn(5, 6).double(), torch.randint(6, (5,))))
    v = torch.ones(problem.space().size, dtype=torch.float64)
    ours, theirs = cs.Hessian(problem, checkpoint=True) @ v, cs.Hessian(problem, engine="autograd") @ v
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
