"""Changes that no fingerprint of the module holds: of classes, of torch itself, of one number among many."""

from __future__ import annotations

import pytest
import torch
from changing_net import Net, module_and_data, truth
from torch import Tensor, nn

import curvescope as cs


def test_attribute_of_a_class():
    class Scaled(Net):
        gain = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain

    m, x, y = module_and_data(Scaled)
    H = cs.Hessian(cs.Problem(m, (x, y)))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    for _ in range(4):
        H @ v
    Scaled.gain = 0.5
    want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
    assert (H @ v - want).norm() < 1e-10 * want.norm()
    Scaled.forward = lambda self, x: Net.forward(self, x) * 3
    want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
    assert (H @ v - want).norm() < 1e-10 * want.norm()


def test_global_hooks():
    m, x, y = module_and_data(Net)
    H = cs.Hessian(cs.Problem(m, (x, y)))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    for _ in range(4):
        H @ v
    handle = nn.modules.module.register_module_forward_hook(
        lambda mod, i, o: o * 2 if isinstance(mod, nn.Linear) else None
    )
    try:
        want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
        assert (H @ v - want).norm() < 1e-10 * want.norm()
    finally:
        handle.remove()
    want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
    assert (H @ v - want).norm() < 1e-10 * want.norm()


def test_settings_of_an_embedding_that_only_its_gradient_depends_on():
    m, x, y = module_and_data(Net)
    H = cs.Hessian(cs.Problem(m, (x, y)))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    for _ in range(4):
        H @ v
    for row in (int(x[0, 0]), None):
        m.e.padding_idx = row
        want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
        assert (H @ v - want).norm() < 1e-10 * want.norm()
    m.e.scale_grad_by_freq = True
    with pytest.raises(cs.CurvescopeError, match="scale_grad_by_freq"):
        H @ v


def test_what_nobody_can_see_is_asked(monkeypatch):
    """A function of another library, exchanged there: only the module's own answer shows it."""
    m, x, y = module_and_data(Net)
    m.steps = [lambda h: torch.nn.functional.softsign(h)]
    H = cs.Hessian(cs.Problem(m, (x, y)))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    for _ in range(4):
        H @ v
    monkeypatch.setattr(torch.nn.functional, "softsign", torch.tanh)
    want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
    assert (H @ v - want).norm() < 1e-10 * want.norm()


def test_a_column_that_a_sine_would_hide():
    """sin(355) is nearly 0: weights of a checksum must not have such holes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(768, 4), nn.Tanh(), nn.Linear(4, 3))
        x, y = torch.randn(5, 768), torch.randint(0, 3, (5,))
    x[:, 354] *= 100
    P = cs.Problem(net, (x, y))
    H = cs.Hessian(P)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(0))
    H @ v
    for column in (354, 709, 0):
        net[0].weight.data[0, column] += 5e-4
        fresh = cs.Hessian(P) @ v
        assert torch.equal(H @ v, fresh)


def test_a_module_that_counts_its_calls_is_replayed_all_the_same():
    class Counting(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    m, x, y = module_and_data(Counting)
    H = cs.Hessian(cs.Problem(m, (x, y)))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    for _ in range(5):
        H @ v
    before = m.calls
    H @ v
    assert m.calls == before + 1  # asked once, nothing built
    m.power = 0.5
    want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
    assert (H @ v - want).norm() < 1e-10 * want.norm()


def test_how_often_a_first_product_calls_the_module():
    m, x, y = module_and_data(Net)
    calls = []
    m.e.register_forward_hook(lambda *_: calls.append(1))
    H = cs.Hessian(cs.Problem(m, (x, y)))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    H @ v
    assert len(calls) == 5  # asked, autograd's product, our outputs and product; then the data
    calls.clear()
    H @ v
    assert len(calls) == 1  # asked
