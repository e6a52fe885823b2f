"""What somebody found who only wanted a wrong number: each is right now, or refused in one sentence."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
from curvescope.core.operator import FunctionOperator, Matrix

settings = types.ModuleType("settings")
settings.gain = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def drawn(make, seed: int = 0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def replayed(operator: cs.LinearOperator) -> Tensor:
    v = torch.randn(operator.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        operator @ v
    return v


def test_a_loss_that_reads_another_module():
    loss = cs.CustomLoss(
        lambda z, t, w: F.cross_entropy(z * settings.gain, t, reduction="sum"), lambda t, w: float(t.numel())
    )
    net, x, y = drawn(
        lambda: (nn.Linear(8, 5).double(), torch.randn(6, 8).double(), torch.randint(0, 5, (6,)))
    )
    P = cs.Problem(net, (x, y), loss)
    H = cs.Hessian(P)
    v = replayed(H)
    settings.gain = 4.0
    try:
        assert relative(H @ v, cs.Hessian(cs.Problem(net, (x, y), loss), engine="autograd") @ v) < 1e-12
    finally:
        settings.gain = 1.0


class Slotted:
    __slots__ = ("gain",)


class Rare(nn.Module):
    """Something that only shows at a token which the few positions do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.o, self.slotted = nn.Embedding(50, 6), nn.Linear(6, 50), Slotted()
        self.slotted.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.e(x))
        return self.o(torch.where((x == 49)[..., None], h * self.slotted.gain * settings.gain, h))


@pytest.mark.parametrize("where", ["slots", "a Python module"])
def test_what_shows_only_at_rare_tokens_is_seen_by_a_new_operator(where):
    """It shows neither in tensors nor on the few positions: an operator goes on with what it has cached."""
    m, x = drawn(lambda: (Rare().double(), torch.randint(0, 49, (4, 32))))
    x[3, 29:] = 49
    P = cs.Problem(m, (x, x.roll(1, 1)))
    v = replayed(cs.Hessian(P))
    if where == "slots":
        m.slotted.gain = 5.0
    else:
        settings.gain = 5.0
    try:
        right = cs.Hessian(cs.Problem(m, (x, x.roll(1, 1))), engine="autograd") @ v
        assert relative(cs.Hessian(P) @ v, right) < 1e-12
    finally:
        settings.gain = 1.0


class Scaled(nn.Module):
    """The gradient of a part is scaled, or cut off; outputs are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.o, self.share, self.cut = nn.Embedding(9, 6), nn.Linear(6, 9), 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.e(x))
        h = h * self.share + h.detach() * (1 - self.share)
        return self.o(h.detach() if self.cut else h)


@pytest.mark.parametrize(("name", "value"), [("cut", True), ("share", 0.5)])
def test_a_change_that_shows_only_in_gradients_is_followed_or_refused(name, value):
    m, x = drawn(lambda: (Scaled().double(), torch.randint(0, 9, (4, 8))))
    P = cs.Problem(m, (x, x.roll(1, 1)))
    H = cs.Hessian(P)
    v = replayed(H)
    with pytest.raises(cs.CurvescopeError, match="changed"), H.frozen():
        setattr(m, name, value)
    right = cs.Hessian(cs.Problem(m, (x, x.roll(1, 1))), engine="autograd") @ v
    assert relative(H @ v, right) < 1e-12
    with H.frozen():
        assert relative(H @ v, right) < 1e-12


def test_a_graph_that_is_cut_is_followed_by_single_products():
    m, x = drawn(lambda: (Scaled().double(), torch.randint(0, 9, (4, 8))))
    H = cs.Hessian(cs.Problem(m, (x, x.roll(1, 1))))
    v = replayed(H)
    m.cut = True
    right = cs.Hessian(cs.Problem(m, (x, x.roll(1, 1))), engine="autograd") @ v
    assert relative(H @ v, right) < 1e-12


class Named(nn.Module):
    """An attribute with the name of a global that holds an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.H = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.H(x).tanh()


def test_an_attribute_with_the_name_of_an_operator():
    m, x, y = drawn(lambda: (Named().double(), torch.randn(6, 8).double(), torch.randint(0, 5, (6,))))
    globals()["H"] = cs.Hessian(cs.Problem(m, (x, y)))
    try:
        replayed(globals()["H"])
    finally:
        del globals()["H"]


class Held(nn.Module):
    def __init__(self, *, also: bool) -> None:
        super().__init__()
        self.l, self.o, self.also = nn.Linear(8, 6), nn.Linear(6, 5), also
        self.weights = [self.l.weight]

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.weights[0].T
        return self.o(torch.tanh(h + self.l(x) if self.also else h))


@pytest.mark.parametrize("also", [True, False])
def test_frozen_parameters_held_by_reference_are_refused(also):
    m, x, y = drawn(lambda: (Held(also=also).double(), torch.randn(6, 8).double(), torch.randint(0, 5, (6,))))
    P = cs.Problem(m.requires_grad_(False), (x, y), params="*")
    v = torch.ones(P.space().size, dtype=torch.float64)
    for use in (lambda: cs.Hessian(P) @ v, lambda: cs.GGN(P, engine="autograd") @ v, P.gradient):
        with pytest.raises(cs.UsageError, match="it is frozen"):
            use()
    assert not any(p.requires_grad for p in m.parameters())
    m.requires_grad_(True)
    H = cs.Hessian(P)
    replayed(H)
    m.requires_grad_(False)
    with pytest.raises(cs.UsageError, match="it is frozen"):
        H @ v


class ClampedRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(6)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x = x.clamp(-10, 10)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def test_a_norm_that_differs_for_large_inputs_is_no_rms_norm():
    m = drawn(lambda: nn.Sequential(nn.Embedding(50, 6), ClampedRMSNorm(), nn.Linear(6, 50)).double())
    with torch.no_grad():
        m[0].weight[49, :3] = torch.tensor([60.0, -40.0, 25.0])
    x = drawn(lambda: torch.randint(0, 49, (4, 32)))
    x[2, 29] = 49
    P = cs.Problem(m, (x, x.roll(1, 1)))
    H = cs.Hessian(P)
    v = replayed(H)
    assert relative(H @ v, cs.Hessian(P, engine="autograd") @ v) < 1e-12


def test_a_sparse_buffer():
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(6, 5)
            self.register_buffer("adjacency", torch.eye(6, dtype=torch.float64).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return self.l((self.adjacency @ x.T).T)

    m, x, y = drawn(lambda: (Graph().double(), torch.randn(4, 6).double(), torch.randint(0, 5, (4,))))
    P = cs.Problem(m, (x, y))
    v = replayed(cs.Hessian(P))
    assert relative(cs.Hessian(P) @ v, cs.Hessian(P, engine="autograd") @ v) < 1e-12


def llama():
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=2, intermediate_size=12)
    return drawn(lambda: transformers.LlamaForCausalLM(config).double().eval())


def test_attention_that_eager_does_not_know_is_refused():
    m, x = llama(), drawn(lambda: torch.randint(0, 17, (3, 12)))
    for p in m.parameters():
        p.data.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    H = cs.Hessian(cs.Problem(m, (x, x.roll(1, 1))))
    v = replayed(H)
    m.model.layers[0].self_attn.is_causal = False
    with pytest.raises(cs.CurvescopeError, match="other outputs with attention and options"):
        H @ v


@pytest.mark.parametrize("engine", ["auto", "autograd"])
def test_inputs_that_mean_something_else_to_eager_attention_are_refused(engine):
    m, x = llama(), drawn(lambda: torch.randint(0, 17, (3, 12)))
    for p in m.parameters():
        p.data.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    mask = torch.ones(12, 12).tril().bool()[None, None].expand(3, 1, 12, 12).contiguous()
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]).expand(3, 12).contiguous()
    for name, tensor in (("attention_mask", mask), ("position_ids", positions)):
        H = cs.Hessian(cs.Problem(m, [cs.Batch({"input_ids": x, name: tensor}, x)]), engine=engine)
        v = torch.ones(H.shape[0], dtype=torch.float64)
        with pytest.raises(cs.CurvescopeError, match="other outputs with attention and options"):
            H @ v


@pytest.mark.parametrize("scale", [2.0**-660, 2.0**-300, 2.0**260, 2.0**660])
def test_xtrace_at_any_scale(scale):
    d = torch.from_numpy(np.random.default_rng(0).random(300) ** 6)

    def found(factor: float):
        operator = FunctionOperator(lambda V: factor * d[:, None] * V, (300, 300), symmetric=True)
        return cs.trace(operator, num_probes=12, method="xtrace")

    ours, plain = found(scale), found(1.0)
    for name in ("value", "stderr", "low", "high"):
        assert getattr(ours, name) / scale == pytest.approx(getattr(plain, name), rel=1e-9)
    assert plain.stderr > 0


def test_two_probes_that_agree_by_chance_say_nothing():
    e = torch.zeros(300, dtype=torch.float64)
    e[:2] = 0.5**0.5
    matrix = Matrix(1e3 * torch.outer(e, e) + torch.eye(300, dtype=torch.float64), symmetric=True, psd=True)
    found = [cs.trace(matrix, num_probes=2, seed=seed) for seed in range(40)]
    equal = [one for one in found if one.stderr <= 1e-12 * abs(one.value)]
    assert equal
    assert all(np.isnan(one.low) and np.isnan(one.high) for one in equal)
