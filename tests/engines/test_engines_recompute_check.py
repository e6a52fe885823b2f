"""Layers that are computed again are what they were when they were called, or that is said."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
from curvescope.core.errors import CurvescopeError
from curvescope.engines import batch_products
from dense import relative_error

D, V = 8, 11


class Layer(nn.Module):
    """x + B tanh(A (norm(x) ∘ c)), where c comes in one of many ways."""

    def __init__(self, way: str, root: nn.Module):
        super().__init__()
        self.a, self.b, self.norm, self.way = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D), way
        self.held = [root]
        self.keep: Tensor | float = 1.0

    def body(self, x: Tensor, c: Tensor | float) -> Tensor:
        return x + self.b(torch.tanh(self.a(self.norm(x) * c)))

    def forward(self, x, more=None):
        if self.way == "argument":
            return self.body(x, more)
        if self.way == "attribute" or self.way == "mask":
            return self.body(x, self.keep)
        if self.way == "object":
            return self.body(x, more.c)
        if self.way == "holder":
            return self.body(x, self.held[0].scale)
        if self.way == "returned":
            more.x = self.body(more.x, 1.0)
            return more
        if self.way in ("counted", "listed"):  # grows with every call, as a cache does
            seen = more if self.way == "listed" else more.seen
            seen.append(1)
            return self.body(x, float(len(seen)))
        return self.body(x, 1.0)


class Net(nn.Module):
    """Three such layers between an embedding and a head; c is σ(C mean x), or a mask of the tokens."""

    def __init__(self, way: str):
        super().__init__()
        self.e, self.c, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.layers = nn.ModuleList(Layer(way, self) for _ in range(3))
        self.way = way

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.e(tokens)
        c = torch.sigmoid(self.c(x.mean(1, keepdim=True)))
        mask = (tokens % 2 == 0).unsqueeze(-1).to(x.dtype)
        more = {"argument": c, "object": SimpleNamespace(c=c), "returned": SimpleNamespace(x=x)}
        more |= {"counted": SimpleNamespace(seen=[]), "listed": []}
        for layer in self.layers:
            if self.way in ("attribute", "mask"):
                layer.keep = c if self.way == "attribute" else mask
            found = layer(x, more[self.way]) if self.way in more else layer(x)
            x = found.x if self.way == "returned" else found
        return self.head(x)


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(V, (3, 6), generator=source), torch.randint(V, (3, 6), generator=source)


def nets(way: str, kind: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A module in a precision, and the same weights in float64."""
    torch.manual_seed(0)
    low, wide = Net(way).to(kind).eval(), Net(way).eval()
    wide.load_state_dict(low.state_dict())
    return low, wide.double()


KINDS = [torch.float32, torch.bfloat16]
LOST = ["attribute", "object", "holder", "returned"]


@pytest.mark.parametrize("engine", ["auto", "autograd"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("way", ["argument", *LOST])
def test_derivatives_that_would_get_lost_are_refused(way, kind, engine):
    low, wide = nets(way, kind)
    H = cs.Hessian(cs.Problem(low, [tokens()]), engine=engine, checkpoint=True)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1))
    if way in LOST:
        with pytest.raises(CurvescopeError, match="recomputing layers"):
            H @ v
        return
    want = cs.Hessian(cs.Problem(wide, [tokens()]), engine="autograd") @ v.double()
    for _ in range(3):
        assert relative_error((H @ v).double(), want) < 1e-5


def test_memory_that_runs_out_is_said_where_layers_cannot_be_computed_again(monkeypatch):
    """Nobody asked for checkpoint=True: its refusal is not what there is to say."""
    low, _ = nets("attribute", torch.float32)
    plain = batch_products.second_derivative

    def short_of_memory(problem, runner, *rest):
        raise torch.OutOfMemoryError("CUDA out of memory")

    H = cs.Hessian(cs.Problem(low, [tokens()]))
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1))
    with monkeypatch.context() as patch:
        patch.setattr(batch_products, "second_derivative", short_of_memory)
        with pytest.raises(CurvescopeError, match="memory"):
            H @ v
    assert batch_products.second_derivative is plain
    want = cs.Hessian(cs.Problem(low, [tokens()]), engine="autograd") @ v
    assert relative_error(H @ v, want) < 1e-5


def in_a_row(A: cs.LinearOperator, v: Tensor) -> list[Tensor]:
    """Products that belong together."""
    with A.frozen():
        return [A @ v for _ in range(3)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", ["Hessian", "GGN", "FunctionalHessian"])
def test_a_mask_that_the_model_puts_on_its_layers(name, kind):
    """Another pass puts another one there; layers that are computed again would see that."""
    low, wide = nets("mask", kind)
    data = [tokens(0), tokens(7)]
    A = getattr(cs, name)(cs.Problem(low, data), checkpoint=True)
    v = torch.randn(A.shape[0], generator=torch.Generator().manual_seed(1))
    want = getattr(cs, name)(cs.Problem(wide, data), engine="autograd") @ v.double()
    for _ in range(3):
        assert relative_error((A @ v).double(), want) < 1e-5
    for found in in_a_row(A, v):
        assert relative_error(found.double(), want) < 1e-5


@pytest.mark.parametrize("engine", ["auto", "autograd"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("way", ["counted", "listed"])
def test_what_grows_with_every_call_is_refused(way, kind, engine):
    low, _ = nets(way, kind)
    H = cs.Hessian(cs.Problem(low, [tokens()]), engine=engine, checkpoint=True)
    with pytest.raises(CurvescopeError, match=r"stores something between calls|writes into a list"):
        H @ torch.ones(H.shape[0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_loss_that_hooks_inside_of_layers_add_to(kind):
    low, wide = nets("plain", kind)

    def loss(module, batch):
        seen = []
        hooks = [
            layer.a.register_forward_hook(lambda *given: seen.append(given[2])) for layer in module.layers
        ]
        z = module(batch[0])
        for hook in hooks:
            hook.remove()
        return nn.functional.cross_entropy(z.flatten(0, 1), batch[1].flatten()) + sum(
            x.square().mean() for x in seen
        )

    H = cs.Hessian(cs.Problem(low, [tokens()], loss_fn=loss), checkpoint=True)
    with pytest.raises(CurvescopeError, match="intermediate results"):
        H @ torch.ones(H.shape[0])
    if kind == torch.float32:
        kept = cs.Hessian(cs.Problem(low, [tokens()], loss_fn=loss))
        v = torch.ones(kept.shape[0])
        want = cs.Hessian(cs.Problem(wide, [tokens()], loss_fn=loss), engine="autograd") @ v.double()
        assert relative_error((kept @ v).double(), want) < 1e-5


class Gated(nn.Module):
    """x + tanh(A x) + λ s, with s of the layer before, from one of many places; λ is zero at first."""

    def __init__(self, way: str):
        super().__init__()
        self.a, self.lam, self.way = nn.Linear(D, D), nn.Parameter(torch.zeros(1)), way
        self.far: Tensor | None = None
        self.ctx: dict[str, Tensor] = {}

    def forward(self, x, shared):
        y = torch.tanh(self.a(x))
        if self.way == "written":  # into a dictionary that it is called with
            before = shared.get("y")
            shared["y"] = y
            return x + y if before is None else x + y + self.lam * before
        if self.way == "ordered":  # by numbers that the model writes into a dictionary of the layer
            return (x + y)[..., self.ctx["order"]]
        return x + y if self.far is None else x + y + self.lam * self.far


class GatedNet(nn.Module):
    """Three such layers; with the way `far` they get the first embedding, in long sequences alone."""

    def __init__(self, way: str):
        super().__init__()
        self.e, self.head, self.way = nn.Embedding(V, D), nn.Linear(D, V), way
        self.layers = nn.ModuleList(Gated(way) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.e(tokens)
        shared: dict[str, Tensor] = {}
        for layer in self.layers:
            layer.far = first if self.way == "far" and tokens.shape[1] > 20 else None
            layer.ctx["order"] = torch.arange(D).roll(int(tokens[0, 0]))
            x = layer(x, shared)
        return self.head(x)


def gated(way: str, kind: torch.dtype) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    low, wide = GatedNet(way).to(kind), GatedNet(way)
    wide.load_state_dict(low.state_dict())
    return low, wide.double()


@pytest.mark.parametrize("engine", ["auto", "autograd"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("way", "words"), [("written", "writes into a list"), ("far", "holds a tensor")])
def test_derivatives_that_no_number_shows(way, words, kind, engine):
    """λ is zero: outputs are the same without them. The long way is not on the few positions of a check."""
    low, _ = gated(way, kind)
    x = torch.arange(60).reshape(2, 30) % V
    H = cs.Hessian(cs.Problem(low, [(x, x.roll(1, 1))]), engine=engine, checkpoint=True)
    with pytest.raises(CurvescopeError, match=words):
        H @ torch.ones(H.shape[0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_entries_that_change_places(kind):
    """What the model writes into a dictionary of its layers is another batch's later; plain sums are not."""
    low, wide = gated("ordered", kind)
    data = [tokens(0), tokens(7)]
    assert data[0][0][0, 0] != data[1][0][0, 0]
    H = cs.Hessian(cs.Problem(low, data), checkpoint=True)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1))
    want = cs.Hessian(cs.Problem(wide, data), engine="autograd") @ v.double()
    for _ in range(3):
        assert relative_error((H @ v).double(), want) < 1e-5
    with pytest.raises(CurvescopeError, match="stores something between calls"):
        in_a_row(H, v)


class Handing(nn.Module):
    """Hands an additive mask on, which is infinite in places."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, given):
        x, mask = given
        return x + (self.a(x) + mask).softmax(-1), mask


class HandingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.layers = nn.ModuleList(Handing() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.e(ids)
        mask = torch.zeros_like(x).masked_fill(torch.arange(D) > 4, -torch.inf)
        for layer in self.layers:
            x, mask = layer((x, mask))
        return self.head(x)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_infinite_outputs_are_the_same_outputs(kind):
    torch.manual_seed(0)
    low, wide = HandingNet().to(kind), HandingNet()
    wide.load_state_dict(low.state_dict())
    H = cs.Hessian(cs.Problem(low, [tokens()]), checkpoint=True)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1))
    want = cs.Hessian(cs.Problem(wide.double(), [tokens()]), engine="autograd") @ v.double()
    for _ in range(2):
        assert relative_error((H @ v).double(), want) < 1e-5


class Unused(nn.Module):
    """A layer with a weight that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.left = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_weight_that_a_layer_does_not_use(kind):
    torch.manual_seed(0)
    low = nn.Sequential(nn.Embedding(V, D), *(Unused() for _ in range(3)), nn.Linear(D, V)).to(kind)
    wide = nn.Sequential(nn.Embedding(V, D), *(Unused() for _ in range(3)), nn.Linear(D, V)).double()
    wide.load_state_dict(low.state_dict())
    H = cs.Hessian(cs.Problem(low, [tokens()]), checkpoint=True)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1))
    want = cs.Hessian(cs.Problem(wide, [tokens()]), engine="autograd") @ v.double()
    assert relative_error((H @ v).double(), want) < 1e-5


class Turned(nn.Module):
    """A layer with a table in a buffer, by which positions are turned."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.register_buffer("rate", torch.linspace(0.1, 1.3, D))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=self.rate.dtype)[:, None] * self.rate
        return x + torch.tanh(self.a(x) * at.cos())


def test_buffers_in_half_precision_are_wide_in_layers_that_are_computed_again():
    torch.manual_seed(0)
    low = nn.Sequential(nn.Embedding(V, D), *(Turned() for _ in range(3)), nn.Linear(D, V)).bfloat16()
    wide = nn.Sequential(nn.Embedding(V, D), *(Turned() for _ in range(3)), nn.Linear(D, V))
    wide.load_state_dict(low.state_dict())
    x = torch.arange(2 * 64).reshape(2, 64) % V
    H, want = (cs.Hessian(cs.Problem(m, [(x, x.roll(1, 1))])) for m in (low, wide.double()))
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1))
    assert relative_error((H @ v).double(), want @ v.double()) < 1e-5


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("at", ["L1.mid", "L1.attn.out", "L1.ff.out", "L1.out", "L2.in"])
@pytest.mark.parametrize("maker", [cs.ActivationHessian, cs.ActivationGGN])
def test_activations_inside_of_layers_that_are_computed_again(maker, at, kind):
    config = cs.TransformerConfig(n_layers=3, d_model=8, n_heads=2, n_ctx=6, vocab_size=V)
    torch.manual_seed(0)
    low, wide = cs.Transformer(config).to(kind), cs.Transformer(config)
    wide.load_state_dict(low.state_dict())
    A = maker(cs.Problem(low, [tokens()]), at)
    B = maker(cs.Problem(wide.double(), [tokens()]), at)
    v = torch.randn(A.shape[0], generator=torch.Generator().manual_seed(1))
    want = B @ v.double()
    assert float(want.norm()) > 1e-6
    assert relative_error((A @ v).double(), want) < 1e-4


def test_a_loss_of_the_model_itself_has_no_cache():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**shape, intermediate_size=16, max_position_embeddings=16)
    low, wide = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    low = low.bfloat16()
    wide.load_state_dict(low.state_dict())
    x = tokens()[0]
    H, want = (
        cs.Hessian(cs.Problem(m, [{"input_ids": x, "labels": x}], loss="own")) for m in (low, wide.double())
    )
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1))
    assert relative_error((H @ v).double(), want @ v.double()) < 1e-5
    assert low.config.use_cache
