"""The fast engine gives autograd's numbers on every kind of model, and says so when it does not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
from curvescope.engines import kernel_validation
from curvescope.kernels import norms
from curvescope.kernels.function_mode import FindHead, Substitute
from dense import relative_error
from selection import pairs, some

OPERATORS = {
    "hessian": cs.Hessian,
    "ggn": cs.GGN,
    "functional": cs.FunctionalHessian,
    "fisher": cs.EmpiricalFisher,
}
ZOO = {
    "gpt2": {"n_layers": 2},
    "rms, swiglu, rope, grouped": {
        "norm_kind": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "n_heads": 4,
        "n_kv_heads": 2,
    },
    "post-norm, not causal": {"norm": "post", "causal": False, "activation": "gelu_tanh"},
    "tied, with a bias": {"tied": True, "bias_u": True, "activation": "silu"},
    "alibi": {"score_bias": "alibi", "activation": "relu"},
    "merged": {"merged_qk": True},
    "linear attention": {"attention": "linear"},
}


class GPT(nn.Module):
    """As people write it: PyTorch's fused attention, modules of nn, a tied head."""

    def __init__(self, vocabulary: int = 11, d: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.wte = nn.Embedding(vocabulary, d)
        self.ln, self.ln_f = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        q, k, v = self.qkv(self.ln(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.head(self.ln_f(x))


def tokens(vocabulary: int, shape: tuple[int, int] = (4, 7)) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    x, y = (torch.randint(vocabulary, shape, generator=source) for _ in range(2))
    y[0, 3:] = -100
    return x, y


def problem(name: str) -> cs.Problem:
    if name == "nn modules":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return cs.Problem(GPT().double(), cs.Batches.from_tensors(*tokens(11), batch_size=3))
    shape = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 8, "vocab_size": 11, "init": "xavier"}
    cfg = cs.TransformerConfig(**{**shape, **ZOO[name]})
    return cs.Problem(cs.load(cfg, dtype="float64"), cs.Batches.from_tensors(*tokens(11), batch_size=3))


@pytest.mark.parametrize(("name", "operator"), pairs(["nn modules", *ZOO], [*OPERATORS]))
def test_products_are_those_of_autograd(name, operator):
    p = problem(name)
    ours, theirs = (OPERATORS[operator](p, engine=engine) for engine in ("fast", "autograd"))
    V = torch.randn(ours.shape[1], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert relative_error(ours @ V, theirs @ V) < 1e-11
    assert relative_error(ours @ V[:, 0], theirs @ V[:, 0]) < 1e-11


@pytest.mark.parametrize("name", some(["nn modules", "gpt2"], 1))
def test_blocks_and_rectangles(name):
    p = problem(name)
    rows, columns = list(p.model.blocks)[1], list(p.model.blocks)[-1]
    for operator in (cs.Hessian, cs.GGN, cs.FunctionalHessian):
        ours, theirs = (operator(p, engine=e).block(rows, columns) for e in ("fast", "autograd"))
        assert relative_error(ours.to_dense(), theirs.to_dense()) < 1e-11


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_losses_without_a_head(loss):
    """Real outputs, and class logits of a small network, whose last map the loss may or may not take."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 4)).double()
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6) % 4 if loss == "cross_entropy" else torch.sin(x @ torch.ones(3, 4).double())
    p = cs.Problem(module, (x, y), loss)
    for operator in (cs.Hessian, cs.GGN, cs.FunctionalHessian):
        assert (
            relative_error(operator(p, engine="fast").to_dense(), operator(p, engine="autograd").to_dense())
            < 1e-12
        )


def test_smoothed_and_weighted_terms():
    model, (x, y) = problem("gpt2").model, tokens(11)
    w = torch.rand(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    p = cs.Problem(model, cs.Batches([cs.Batch(x, y, w)]), cs.CrossEntropy(label_smoothing=0.1))
    for operator in (cs.Hessian, cs.GGN, cs.FunctionalHessian):
        ours, theirs = (operator(p, engine=engine) for engine in ("fast", "autograd"))
        v = torch.randn(ours.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert relative_error(ours @ v, theirs @ v) < 1e-12


def test_logits_are_never_formed_whole():
    """Of a wide head no tensor of the size of all logits is made, in building the graph and in products."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = GPT(vocabulary=300_000, d=2, heads=1)
    x, y = tokens(300_000, (2, 10))
    p = cs.Problem(module, (x, y))
    cs.Hessian(p) @ torch.ones(p.space().size)  # the check at first use is on so few tokens that it may
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            made = found if isinstance(found, tuple) else (found,)
            sizes.extend(t.untyped_storage().nbytes() for t in made if isinstance(t, Tensor))
            return found

    for operator in (cs.Hessian, cs.GGN, cs.FunctionalHessian):
        with Watch():
            operator(p) @ torch.ones(p.space().size)
    assert max(sizes) < 20 * 300_000 * 4


def test_a_wrong_kernel_is_caught_at_first_use(monkeypatch):
    right = norms.layer_norm

    def wrong(x, *args, **options):
        y = right(x, *args, **options)
        return y + 0.3 * (y - y.detach())  # the right value with a wrong derivative

    monkeypatch.setattr(norms, "layer_norm", wrong)
    H = cs.Hessian(problem("gpt2"), engine="fast")
    with pytest.raises(cs.CurvescopeError, match=r"autograd differ.*engine='autograd'"):
        H @ torch.ones(H.shape[1], dtype=torch.float64)


def test_rounding_is_no_disagreement():
    """A saturated model in float32 has a Hessian of rounding errors only; that is not the engine's fault."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = GPT()
    with torch.no_grad():
        module.wte.weight.mul_(200)
    x, _ = tokens(11)
    H = cs.Hessian(cs.Problem(module, (x, x.roll(1, 1))), engine="fast")
    assert torch.isfinite(H @ torch.ones(H.shape[1])).all()


def test_the_module_is_left_as_it_was():
    p = problem("gpt2")
    before = {name: dict(vars(part)) for name, part in p.model.module.named_modules()}
    cs.Hessian(p, engine="fast") @ torch.ones(p.space().size, dtype=torch.float64)
    for name, part in p.model.module.named_modules():
        assert vars(part).keys() == before[name].keys()


def test_checked_once_per_model(monkeypatch):
    calls = []
    inner = kernel_validation._Products
    monkeypatch.setattr(kernel_validation, "_Products", lambda *a: calls.append(1) or inner(*a))
    p = problem("gpt2")
    for _ in range(2):
        cs.Hessian(p, engine="fast") @ torch.ones(p.space().size, dtype=torch.float64)
    assert len(calls) == 2  # one product of each engine


class Doubled(nn.Module):
    """A head that is worked on after: it cannot be left undone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lm_head = nn.Embedding(5, 3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.lm_head(self.inner(x))


def test_a_head_that_is_worked_on_is_formed():
    module = Doubled().double()
    x = torch.arange(5)[None]
    with torch.no_grad(), FindHead() as mode:
        assert mode.place(module(x)) is None
    p = cs.Problem(module, (x, x.roll(1, 1)))
    ours, theirs = (cs.Hessian(p, engine=e).to_dense() for e in ("fast", "autograd"))
    assert relative_error(ours, theirs) < 1e-12


def test_a_head_in_the_middle_of_the_mode_is_a_placeholder():
    linear = nn.Linear(3, 5)
    x = torch.randn(2, 3)
    with Substitute(head=0) as mode:
        z = linear(x)
    assert z is mode.placeholder
    assert mode.head is not None
    torch.testing.assert_close(mode.head.h @ mode.head.W.T + mode.head.b, linear(x))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("operator", ["hessian", "ggn", "functional"])
def test_a_recorded_product_is_the_same(operator):
    """The second call records, later ones replay; new parameters are noticed after a recording too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        p = cs.Problem(GPT().cuda(), cs.Batches.from_tensors(*tokens(11), batch_size=3))
    ours, theirs = (OPERATORS[operator](p, engine=engine) for engine in ("fast", "autograd"))
    V = torch.randn(ours.shape[1], 4, device="cuda")
    for _ in range(2):
        for v in V.unbind(1):
            assert relative_error(ours @ v, theirs @ v) < 1e-3
        with torch.no_grad():
            p.model.get_parameter("up.weight").mul_(1.5)
