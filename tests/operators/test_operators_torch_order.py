"""Vectors over a whole problem are `torch.nn.utils.parameters_to_vector` of all that varies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import curvescope as cs
from curvescope.core.errors import ShapeError

V, T = 11, 5
CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}
"""A module, and what is passed as `params=`."""


def named(make: Callable[[], tuple[nn.Module, Any]]) -> Callable[[], tuple[nn.Module, Any]]:
    CASES[make.__name__.replace("_", " ")] = make
    return make


class Tied(nn.Module):
    """Linear layers that are not square, a norm, a parameter of its own; the output may be the embedding."""

    def __init__(self, *, tied: bool):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 2))
        self.emb = nn.Embedding(V, 4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, V, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        h = h + self.down(torch.tanh(self.up(h)) * self.scale.flatten())
        return self.head(self.norm(h))


def shaken(module: nn.Module) -> nn.Module:
    """In float64, with weights that matter everywhere."""
    module, source = module.double().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=source, dtype=torch.float64))
    return module


def family(name: str) -> nn.Module:
    pytest.importorskip("transformers")
    import adapters_cases

    return adapters_cases.original(name, attention="eager")


@named
def plain() -> tuple[nn.Module, Any]:
    return shaken(Tied(tied=False)), None


@named
def tied() -> tuple[nn.Module, Any]:
    return shaken(Tied(tied=True)), None


@named
def frozen() -> tuple[nn.Module, Any]:
    module = shaken(Tied(tied=False))
    for p in (module.up.weight, module.norm.bias):
        p.requires_grad_(False)
    return module, None


@named
def some_params() -> tuple[nn.Module, Any]:
    return shaken(Tied(tied=False)), ["down.*", "scale", "emb.weight"]


@named
def zoo_transformer() -> tuple[nn.Module, Any]:
    cfg = cs.TransformerConfig(n_layers=1, d_model=4, n_heads=2, d_ff=6, vocab_size=V, n_ctx=T)
    return shaken(cs.Transformer(cfg)), None


@named
def encoder_of_torch() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    return shaken(nn.Sequential(nn.Embedding(V, 4), layer, nn.Linear(4, V))), None


@named
def gpt2() -> tuple[nn.Module, Any]:
    return family("gpt2"), None


@named
def gpt2_some_params() -> tuple[nn.Module, Any]:
    return family("gpt2"), ["L1.W_O", "L0.W_[QKV]", "L0.b_[QKV]", "E"]


@named
def llama() -> tuple[nn.Module, Any]:
    return family("llama"), None


@named
def lora() -> tuple[nn.Module, Any]:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return shaken(peft.get_peft_model(family("gpt2"), config)), None


def outputs_of(module: nn.Module, x: Tensor) -> Tensor:
    z = module(x)
    return z if isinstance(z, Tensor) else z.logits


class Bench:
    """A problem, and what double backward says of the same parameters."""

    def __init__(self, name: str):
        self.module, params = CASES[name]()
        source = torch.Generator().manual_seed(1)
        self.x, self.y = (torch.randint(0, V, (3, T), generator=source) for _ in range(2))
        self.problem = cs.Problem(self.module, (self.x, self.y), params=params)
        meant = set(self.problem.space().parameter_names)
        self.parameters = [p for key, p in self.module.named_parameters() if key in meant]
        every = [p for p in self.module.parameters() if p.requires_grad]
        assert params is not None or [id(p) for p in self.parameters] == [id(p) for p in every]
        self.rounding = 1e-5 if self.problem.model.casts else 1e-10
        self.v = torch.randn(self.problem.space().size, generator=source, dtype=torch.float64)

    def loss(self) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # which has second derivatives
            z = outputs_of(self.module, self.x).double()
        return nn.functional.cross_entropy(z.flatten(0, 1), self.y.flatten())

    def gradient(self, *, graph: bool = False) -> Tensor:
        return self.flat(
            torch.autograd.grad(self.loss(), self.parameters, create_graph=graph, allow_unused=True)
        )

    def hessian(self, v: Tensor) -> Tensor:
        form = self.gradient(graph=True) @ v
        return self.flat(torch.autograd.grad(form, self.parameters, allow_unused=True))

    def flat(self, found: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(found, self.parameters, strict=True)
        return parameters_to_vector([torch.zeros_like(p) if g is None else g for g, p in pairs])

    def close(self, found: Any, truth: Tensor) -> None:
        found = torch.as_tensor(found)
        assert found.shape == truth.shape
        assert float((found - truth).abs().max()) <= self.rounding * float(truth.abs().max())


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


def test_products_gradients_and_points_are_in_torchs_order(case: Bench):
    problem, v = case.problem, case.v
    theta = parameters_to_vector(case.parameters).detach()
    space = problem.space()
    case.close(space.gather(dict(problem.named_parameters())).detach(), theta)
    case.close(problem.gradient(), case.gradient())
    H, truth = cs.Hessian(problem), case.hessian(v)
    case.close(H @ v, truth)
    case.close(H @ torch.stack([v, 2 * v], dim=1), torch.stack([truth, 2 * truth], dim=1))
    moved = copy.deepcopy(case)
    vector_to_parameters(theta + 0.01 * v, moved.parameters)
    assert problem.at(theta + 0.01 * v).loss_value() == pytest.approx(moved.loss().item(), rel=1e-6)


def test_parts_fishers_and_what_is_added_are_in_torchs_order(case: Bench):
    problem, v = case.problem, case.v
    whole = cs.Hessian(problem) @ v
    case.close(cs.GGN(problem) @ v + cs.FunctionalHessian(problem) @ v, whole)
    case.close(cs.Hessian(problem, weight_decay=0.3, damping=0.1) @ v, whole + 0.4 * v)
    one = cs.Problem(problem.model, (case.x[:1, :1], case.y[:1, :1]), params=problem.choice.params)
    g = one.gradient()
    case.close(cs.EmpiricalFisher(one) @ v, g * (g @ v))
    J = cs.Jacobian(problem)
    u = torch.randn(J.shape[0], generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    z = outputs_of(case.module, case.x).double().flatten()
    case.close(J.T @ u, case.flat(torch.autograd.grad(z @ u, case.parameters, allow_unused=True)))


def test_blocks_of_a_vector_are_those_of_the_operator(case: Bench):
    problem, v = case.problem, case.v
    space, H = problem.space(), cs.Hessian(problem)
    parts = space.to_dict(v)
    assert list(parts) == [block.name for block in space]
    case.close(space.from_dict(parts), v)
    blocks = space.in_blocks()
    case.close(space.convert(v, blocks), torch.cat([part.flatten() for part in parts.values()]))
    case.close(blocks.convert(space.convert(v, blocks), space), v)
    name = next(block.name for block in space if len(block.shape) == 2)
    only = space.from_dict({key: part if key == name else 0 * part for key, part in parts.items()})
    case.close(H.block(name) @ parts[name].flatten(), space.to_dict(H @ only)[name].flatten())
    case.close(H[name, name].to_dense(), H.block(name).to_dense())
    case.close(H.in_blocks() @ space.convert(v, blocks), space.convert(H @ v, blocks))
    case.close((0.5 * H + H).in_blocks() @ space.convert(v, blocks), 1.5 * space.convert(H @ v, blocks))


@pytest.mark.parametrize("name", ["plain", "some params", "gpt2"])
def test_algorithms_give_vectors_in_torchs_order(name: str):
    case = Bench(name)
    problem, b = case.problem, case.v
    H, G = cs.Hessian(problem), cs.GGN(problem, damping=1.0)
    found = cs.eigsh(H, 2, tol=1e-9, max_products=2000)
    q = found.vectors[:, 0]
    case.rounding = 1e-6
    case.close(case.hessian(q), float(found.values[0]) * q)
    x = cs.solve(G, b, tol=1e-12, max_products=2000).x
    case.close(G @ x, b)
    diagonal = H.to_dense().diagonal()
    e = torch.zeros_like(b)
    e[7] = 1
    case.close(diagonal[7:8], case.hessian(e)[7:8])
    exact = cs.exact_diagonal(H)
    case.close(exact.values, diagonal)
    for block in problem.space():
        case.close(exact.block(block.name), problem.space().to_dict(diagonal)[block.name].flatten())
    K = cs.KFAC(problem, kind="ggn")
    assert K.space.whole
    u = torch.randn(K.shape[0], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    case.close(K.inverse(0.1) @ (K @ u + 0.1 * u), u)
    traces = cs.block_traces(H, num_probes=4, seed=0)
    assert list(traces.names) == [block.name for block in problem.space()]


def test_a_vector_of_the_wrong_size_is_told_what_is_expected():
    H = cs.Hessian(Bench("plain").problem)
    with pytest.raises(ShapeError, match="parameters_to_vector"):
        H @ torch.ones(3, dtype=torch.float64)
    with pytest.raises(ShapeError, match="got \\(3,\\)") as error:
        H.block("up.weight") @ torch.ones(3, dtype=torch.float64)
    assert "parameters_to_vector" not in str(error.value)


def test_a_block_with_the_name_of_a_parameter_has_its_layout():
    case = Bench("plain")
    H, weight = cs.Hessian(case.problem, "up.weight"), case.module.up.weight
    v = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (g,) = torch.autograd.grad(case.loss(), [weight], create_graph=True)
    (truth,) = torch.autograd.grad((g * v).sum(), [weight])
    case.close(H @ v.flatten(), truth.flatten())
    assert np.array_equal(case.problem.space("up.weight").blocks[0].shape, weight.shape)
