"""Sources add up to the functional Hessian, each is its closed form, and the module is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
import oracles
from curvescope.closed_form.network.from_model import stack_curvature
from curvescope.models.curvature_sources import REST, find_sources
from oracles import relative_error
from selection import one_in, some

EXACT = 1e-12


def columns(op: cs.LinearOperator, count: int = 2) -> Tensor:
    source = torch.Generator().manual_seed(3)
    return torch.randn(op.shape[1], count, generator=source, dtype=torch.float64).to(op.dtype)


def problem(**settings: object) -> cs.Problem:
    module = oracles.transformer(**settings)
    tokens = torch.randint(0, 5, (3, 6), generator=torch.Generator().manual_seed(0))
    return cs.Problem(module, (tokens[:, :-1], tokens[:, 1:]))


@pytest.mark.parametrize("bench", one_in(oracles.NAMES, 6, shift=2), indirect=True)
def test_sources_add_up_to_the_functional_part(bench: oracles.Bench):
    case = bench.problem
    V = columns(cs.Hessian(case))
    truth = (cs.Hessian(case) @ V) - (cs.GGN(case) @ V)
    found = torch.stack(list(cs.FunctionalSources(case).products(V).values())).sum(0)
    assert float((found - truth).norm()) < EXACT * float((cs.Hessian(case) @ V).norm())


@pytest.mark.parametrize(
    "settings",
    [
        {"n_layers": 2},
        {"norm": "post", "norm_kind": "rmsnorm", "activation": "swiglu", "bias_o": False},
        {"norm_affine": False, "tied": True, "activation": "silu"},
        {"norm": "none", "d_ff": 0},
    ],
    ids=["pre", "post", "no gain", "attention alone"],
)
def test_each_source_is_its_closed_form(settings: dict[str, object]):
    case = problem(**settings)
    truth: dict[str, Tensor] = {}
    for name, term in stack_curvature(case.model, case.batches).sources().items():
        front = name.removesuffix(".core").removesuffix(".bilinear").removesuffix(".activation")
        front = REST if front == "unembedding" else front
        dense = term.to_dense([block.name for block in case.space()])
        truth[front] = truth.get(front, torch.zeros_like(dense)) + dense
    V, space = columns(cs.Hessian(case), 3), case.space()
    found, own = cs.FunctionalSources(case).products(V), space.convert(V, space.in_blocks())
    assert found.keys() == truth.keys()
    for name, product in found.items():
        assert relative_error(space.convert(product, space.in_blocks()), truth[name] @ own) < 1e-10, name


def test_one_source_alone_and_rectangular_blocks_are_those_of_all():
    case = problem(n_layers=2)
    S, V = cs.FunctionalSources(case), columns(cs.Hessian(case))
    for name, product in list(S.products(V).items())[::2]:  # every kind, in one of the two layers
        assert relative_error(cs.FunctionalSource(case, name) @ V, product) < EXACT
    blocks = case.model.blocks
    rows, cols = (case.space().positions(blocks[name]) for name in ("L1.W_Q", "L0.W_Q"))
    only = torch.zeros_like(V)
    only[cols] = V[cols]
    block = S["L1.attention"].block("L1.W_Q", "L0.W_Q")
    assert relative_error(block @ V[cols], (S["L1.attention"] @ only)[rows]) < EXACT
    below = S["L0.attention"].block("L1.W_2", "L0.W_Q")  # attention does not see W_2 of the layer above
    assert float((below @ V[cols]).abs().max()) == 0


@pytest.mark.parametrize("group", some([2, 5], 1))
def test_columns_together_are_those_alone(group: int, monkeypatch: pytest.MonkeyPatch):
    case = problem(n_layers=2)
    S, V = cs.FunctionalSources(case), columns(cs.Hessian(case), 5)
    alone = [S.products(V[:, j : j + 1]) for j in range(5)]
    reverse, passes = torch.autograd.grad, []
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: passes.append(1) or reverse(*a, **k))
    S.products(V[:, :1])
    once = len(passes)
    S._example.engine.caching._directions["autograd"] = group
    for name, product in S.products(V).items():
        assert relative_error(product, torch.cat([one[name] for one in alone], dim=1)) < EXACT, name
    assert len(passes) == once * (1 + -(-5 // group))


class _Cube(torch.autograd.Function):
    """x³, whose derivative has no rule for several directions at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy * 3 * x**2 if float(dy.detach().sum()) != 0.5 else dy


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(_Cube.apply(self.norm(self.inner(x))))


def test_columns_that_cannot_go_together_go_one_by_one():
    module = oracles.shaken(oracles.drawn(Cubed))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    case = cs.Problem(module, (x, torch.tensor([0, 1, 2, 1])))
    V = columns(cs.Hessian(case), 3)
    whole = (cs.Hessian(case) @ V) - (cs.GGN(case) @ V)
    assert relative_error(sum(cs.FunctionalSources(case).products(V).values()), whole) < EXACT


def test_a_source_of_later_layers_does_not_depend_on_batching():
    case = problem(n_layers=2)
    (batch,) = case.batches
    pairs = [(batch.inputs[:1], batch.targets[:1]), (batch.inputs[1:], batch.targets[1:])]
    cut = cs.Problem(case.model, pairs)
    V = columns(cs.Hessian(case))
    found = cs.FunctionalSources(cut).products(V)
    for name, product in cs.FunctionalSources(case).products(V).items():
        assert relative_error(found[name], product) < EXACT


def test_sources_follow_a_model_that_moves():
    case = problem()
    S, V = cs.FunctionalSources(case), columns(cs.Hessian(case))
    S.products(V)
    with torch.no_grad():
        for p in case.model.module.parameters():
            p.mul_(1.3)
    F = cs.FunctionalHessian(case) @ V
    assert relative_error(sum(S.products(V).values()), F) < EXACT


def test_the_module_is_left_as_it_was():
    case = problem(n_layers=2)
    before = {name: dict(vars(part)) for name, part in case.model.module.named_modules()}
    cs.FunctionalSources(case).products(columns(cs.Hessian(case)))
    for name, part in case.model.module.named_modules():
        assert vars(part).keys() == before[name].keys()
        assert all(vars(part)[key] is value for key, value in before[name].items())


class Post(nn.Module):
    """PyTorch's own layers, which compute their feed-forward network in a method."""

    def __init__(self, *, norm_first: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 5, 0.0, "gelu", batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@pytest.mark.parametrize("norm_first", some([True, False], 1))
def test_layers_of_torch(norm_first: bool):
    module = oracles.shaken(oracles.drawn(lambda: Post(norm_first=norm_first)))
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    case = cs.Problem(module, (x, torch.tensor([[0, 1, 2], [2, 1, 0]])))
    S, V = cs.FunctionalSources(case), columns(cs.Hessian(case))
    assert set(S) == {f"L{i}.{s}" for i in range(2) for s in ("attention", "ffn", "ln1", "ln2")} | {REST}
    found = S.products(V)
    assert relative_error(sum(found.values()), cs.FunctionalHessian(case) @ V) < EXACT
    head = torch.cat([torch.full((b.size,), b.parameter.startswith("head")) for b in case.space()])
    below = V.masked_fill(head[:, None], 0)  # the head has no second derivative but with what lies below it
    assert float((cs.FunctionalSource(case, REST) @ below)[~head].abs().max()) < EXACT * float(
        found[REST].norm()
    )


def test_a_block_without_curvature_is_only_rounding():
    case = problem(n_layers=2)
    found = cs.FunctionalSource(case, "L0.attention", "L0.b_K") @ columns(cs.Hessian(case, "L0.b_K"))
    assert float(found.abs().max()) < 1e-12


def test_a_source_that_is_not_there_is_named():
    with pytest.raises(cs.UsageError, match=r"no source 'L0.attn'"):
        cs.FunctionalSource(problem(), "L0.attn")


def test_names_of_sources():
    assert list(find_sources(problem().model)) == ["L0.attention", "L0.ffn", "L0.ln1", "L0.ln2", "ln_f"]


class Part(nn.Module):
    """tanh(W x), and something besides that does not go through its arguments or results."""

    def __init__(self, how: str):
        super().__init__()
        self.linear, self.how = nn.Linear(3, 3), how
        self.held: list[Tensor] = []
        self.side: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.how == "closure":
            return y * self.held[0]
        if self.how == "given":
            return y * self.side
        if self.how == "left":
            self.side = y * y
        return y


class Sideways(nn.Module):
    """A layer around such a part."""

    def __init__(self, how: str):
        super().__init__()
        self.norm, self.mix, self.how = nn.LayerNorm(3), Part(how), how

    def forward(self, x: Tensor) -> Tensor:
        self.mix.side = x * x
        y = self.mix(self.norm(x))
        y = y + self.mix.side if self.how == "left" else y
        self.mix.side = None
        return x + y


@pytest.mark.parametrize("how", ["plain", "closure", "given", "left"])
def test_parts_with_other_inputs_or_outputs_are_refused(how: str):
    def make() -> nn.Module:
        layers = nn.Sequential(Sideways(how), Sideways(how))
        return nn.Sequential(nn.Linear(3, 3), layers, nn.Linear(3, 3))

    module = oracles.shaken(oracles.drawn(make))
    for layer in module[1]:  # pyright: ignore[reportIndexIssue]
        layer.mix.held.append(module[0].bias)  # pyright: ignore[reportIndexIssue]
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    case = cs.Problem(module, (x, torch.tensor([0, 1, 2, 0])))
    S, V = cs.FunctionalSources(case), columns(cs.Hessian(case))
    if how == "plain":
        assert relative_error(sum(S.products(V).values()), cs.FunctionalHessian(case) @ V) < EXACT
        return
    with pytest.raises(cs.CurvescopeError, match="do not add up"):
        S.products(V)
