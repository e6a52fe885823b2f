"""The fast engine on modules as people write them: calls, masks and lengths that it has no kernel for."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
from curvescope.models.plain import plain_model
from curvescope.models.running.fused import fuse
from dense import relative_error
from selection import pairs

V, D, T = 11, 8, 7
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
BLIND = CAUSAL.clone().index_fill_(0, torch.tensor([2]), False)  # a query that sees no key
BLIND_ADDED = torch.zeros(T, T, dtype=torch.float64).masked_fill(~BLIND, -torch.inf)


class Small(nn.Module):
    """An embedding, a function of it and of the layers, nothing else."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.e, self.u = nn.Embedding(V, D), nn.Linear(D, V)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.e(x))

    def attend(self, h: Tensor, *, keys: Tensor | None = None, shared: bool = False, **options) -> Tensor:
        keys = h if keys is None else keys
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2)
                   for f, x in ((self.q, h), (self.k, keys), (self.v, keys)))  # fmt: skip
        if shared:
            k, v = k[:, :1], v[:, :1]
        y = F.scaled_dot_product_attention(query=q, key=k, value=v, **options)
        return self.u(h + y.transpose(1, 2).flatten(2))


def written_into(m: Small, h: Tensor) -> Tensor:
    z = m.u(F.gelu(m.q(h)))
    z *= 2
    return z


def by_name(m: Small, h: Tensor) -> Tensor:
    x = F.silu(input=F.gelu(input=F.layer_norm(input=m.q(h), normalized_shape=(D,))))
    x = torch.addmm(input=m.k.bias, mat1=x.flatten(0, 1), mat2=m.k.weight.T).view_as(x)
    x = torch.matmul(input=F.rms_norm(input=x, normalized_shape=(D,)), other=m.v.weight)
    return F.linear(input=x, weight=m.u.weight, bias=m.u.bias)


def looked_at(m: Small, h: Tensor) -> Tensor:
    z = m.u(F.gelu(m.q(h)))
    if not torch.isfinite(z).all():
        raise FloatingPointError
    return z


def encoder(padded: bool) -> nn.Module:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True, activation="gelu")
            self.e, self.body, self.u = nn.Embedding(V, D), nn.TransformerEncoder(layer, 1), nn.Linear(D, V)

        def forward(self, x: Tensor) -> Tensor:
            mask = x == 3 if padded else None
            return self.u(self.body(self.e(x), src_key_padding_mask=mask))

    return Encoder()


class OneLength(nn.Module):
    """A module that takes sequences of one length only, longer than the engines are compared on."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.p, self.u = nn.Embedding(V, 4), nn.Parameter(torch.randn(20, 4)), nn.Linear(4, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.u(F.gelu(self.e(x) + self.p))


class OddRMSNorm(nn.Module):
    """A familiar name, a gain of another shape, and inputs of three axes only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(1, 1, D)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 3:
            raise ValueError
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


MODULES = {
    "attention by name": lambda: Small(lambda m, h: m.attend(h, is_causal=True)),
    "a mask": lambda: Small(lambda m, h: m.attend(h, attn_mask=CAUSAL)),
    "a query that sees no key": lambda: Small(lambda m, h: m.attend(h, attn_mask=BLIND)),
    "no key, added": lambda: Small(lambda m, h: m.attend(h, attn_mask=BLIND_ADDED)),
    "fewer keys": lambda: Small(lambda m, h: m.attend(h, keys=h[:, :5], is_causal=True)),
    "keys of the first sequence": lambda: Small(lambda m, h: m.attend(h, keys=h[:1])),
    "one key head": lambda: Small(lambda m, h: m.attend(h, shared=True, is_causal=True)),
    "grouped": lambda: Small(lambda m, h: m.attend(h, shared=True, is_causal=True, enable_gqa=True)),
    "arguments by name": lambda: Small(by_name),
    "outputs written into": lambda: Small(written_into),
    "outputs looked at": lambda: Small(looked_at),
    "nn.TransformerEncoder": lambda: encoder(padded=False),
    "nn.TransformerEncoder, padded": lambda: encoder(padded=True),
    "one length": OneLength,
    "an odd norm": lambda: nn.Sequential(nn.Embedding(V, D), OddRMSNorm(), nn.Linear(D, V)),
}


def problem(make, dtype: torch.dtype = torch.float64) -> cs.Problem:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make().to(dtype)
    length = 20 if isinstance(module, OneLength) else T
    x = torch.randint(V, (3, length), generator=torch.Generator().manual_seed(0))
    x[:, 0], x[1, 5:] = 1, 3
    return cs.Problem(module, (x, x.roll(-1, 1)))


def direction(operator: cs.LinearOperator) -> Tensor:
    source = torch.Generator().manual_seed(1)
    return torch.randn(operator.shape[1], 2, dtype=torch.float64, generator=source).to(operator.dtype)


@pytest.mark.parametrize(("name", "operator"), pairs([*MODULES], [cs.Hessian, cs.GGN]))
def test_products_are_those_of_autograd(name, operator):
    p = problem(MODULES[name])
    ours, theirs = (operator(p, engine=engine) for engine in ("fast", "autograd"))
    v = direction(ours)
    assert relative_error(ours @ v, theirs @ v) < 1e-11


class Cast(Small):
    """Half precision inside, by autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def test_autocast_is_left_alone():
    p = problem(lambda: Cast(lambda m, h: m.attend(F.layer_norm(h, (D,)), is_causal=True)), torch.float32)
    ours, theirs = (cs.Hessian(p, engine=engine) for engine in ("fast", "autograd"))
    v = direction(ours)
    assert relative_error(ours @ v, theirs @ v) < 1e-6


class Sloped(nn.Module):
    """Outputs that are a gradient: a product takes a third derivative, which our kernels do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.n, self.u = nn.Embedding(V, D), nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = self.e(x)
            h = h if h.requires_grad else h.requires_grad_()
            (slope,) = torch.autograd.grad(F.gelu(self.n.weight * h).sum(), h, create_graph=True)
        return self.u(slope)


def test_auto_is_autograd_where_the_kernels_cannot_run():
    p = problem(Sloped)
    theirs = cs.Hessian(p, engine="autograd")
    v = direction(theirs)
    for _ in range(2):
        assert relative_error(cs.Hessian(p) @ v, theirs @ v) < 1e-12
    with pytest.raises(cs.CurvescopeError, match="in order to differentiate it again"):
        cs.Hessian(p, engine="fast") @ v


def test_a_method_of_the_module_itself_is_put_back():
    model = cs.load(
        cs.TransformerConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=T, vocab_size=V), dtype="float64"
    )
    norm, calls = model.module.get_submodule("L0.ln1"), []
    theirs = norm.forward
    own = norm.forward = lambda x: calls.append(1) or theirs(x)
    x = torch.arange(T)[None]
    H = cs.Hessian(cs.Problem(model, (x, x.roll(1, 1))), engine="fast")
    H @ direction(H)
    assert norm.forward is own


class Gated(nn.Module):
    """A gated layer under the usual names, with small gates."""

    def __init__(self, activation) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(D, 12), nn.Linear(D, 12), nn.Linear(12, D)
        self.act_fn = activation
        for p in self.parameters():
            nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_are_told_apart(dtype):
    kinds = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh")}
    for kind, activation in kinds.items():
        (found,) = fuse(plain_model(Gated(activation).to(dtype))).replacements
        assert found.replacement.keywords["activation"] == kind  # pyright: ignore[reportFunctionMemberAccess]
    assert fuse(plain_model(Gated(nn.ReLU()).to(dtype))).replacements == ()


def test_another_activation_is_noticed():
    p = problem(lambda: nn.Sequential(nn.Embedding(V, D), Gated(nn.SiLU()), nn.Linear(D, V)))
    H = cs.Hessian(p, engine="fast")
    v = direction(H)
    before = H @ v
    p.model.module.get_submodule("1").act_fn = nn.Tanh()
    assert relative_error(H @ v, cs.Hessian(p, engine="autograd") @ v) < 1e-11
    assert relative_error(H @ v, before) > 1e-6


def test_a_jacobian_is_checked_too(monkeypatch):
    from curvescope.kernels import norms

    right = norms.layer_norm
    monkeypatch.setattr(norms, "layer_norm", lambda *a, **k: (y := right(*a, **k)) + 0.3 * (y - y.detach()))
    p = problem(lambda: nn.Sequential(nn.Embedding(V, D), nn.LayerNorm(D), nn.GELU(), nn.Linear(D, V)))
    J = cs.Jacobian(p)
    for product in (lambda: J @ direction(J), lambda: J.T @ torch.ones(J.shape[0], dtype=torch.float64)):
        with pytest.raises(cs.CurvescopeError, match="differ by"):
            product()
