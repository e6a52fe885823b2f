"""Embeddings that do more than look up: rows without a gradient, and weights that a forward pass changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
from oracles import drawn, relative_error

IDS = torch.tensor([[0, 1, 2, 3], [0, 0, 4, 6]])
TARGETS = torch.tensor([[1, 2, 3, 0], [5, 4, 6, 2]])
ENGINES = ("autograd", "fast")


class Padded(nn.Module):
    """A table with a padding row, and a head of its own or tied to it."""

    def __init__(self, *, tied: bool, padding: int | None = 0) -> None:
        super().__init__()
        self.e, self.l = nn.Embedding(7, 4, padding_idx=padding), nn.Linear(4, 4)
        self.o = nn.Linear(4, 7, bias=False)
        self.e.weight = nn.Parameter(torch.randn(7, 4))  # no zeros at the padding
        if tied:
            self.o.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.tanh(self.l(self.e(x).cumsum(1))))


def fixed_row_hessian(m: nn.Module, space: cs.ParamSpace) -> Tensor:
    """Second derivatives of the loss as a function whose looked-up padding row is a constant."""

    def loss(theta: Tensor) -> Tensor:
        p = space.scatter(theta)
        table = p["e.weight"]
        table = torch.cat([m.e.weight[:1].detach(), table[1:]])
        h = torch.tanh(F.linear(table[IDS].cumsum(1), p["l.weight"], p["l.bias"]))
        z = h @ p.get("o.weight", p["e.weight"]).T
        return F.cross_entropy(z.reshape(-1, 7), TARGETS.reshape(-1))

    own = space.gather({k: v.detach() for k, v in m.named_parameters()})
    return torch.autograd.functional.hessian(loss, own)


@pytest.mark.parametrize("tied", [False, True])
def test_a_padding_row_is_a_constant_where_it_is_looked_up(tied):
    m = drawn(lambda: Padded(tied=tied).double())
    problem = cs.Problem(m, (IDS, TARGETS))
    want = fixed_row_hessian(m, problem.space())
    assert want[:4].any() == tied  # its use as an output is a variable
    for engine in ENGINES:
        found = cs.Hessian(problem, engine=engine).to_dense()
        assert relative_error(found, want) < 1e-12
        parts = (
            cs.GGN(problem, engine=engine).to_dense()
            + cs.FunctionalHessian(problem, engine=engine).to_dense()
        )
        assert relative_error(parts, want) < 1e-12
    assert any("row 0 of e is" in note for note in problem.notes)


def test_a_padding_row_that_does_not_occur_needs_no_word():
    assert not cs.Problem(Padded(tied=False, padding=5), (IDS, TARGETS)).notes


class Writes(nn.Module):
    """A layer that brings its weight to a norm whenever it is called, in one of the usual ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.e, self.o = way, nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "functional":
            return self.o(F.embedding(x, self.e.weight, max_norm=0.5))
        if self.way == "data":
            self.e.weight.data = torch.renorm(self.e.weight.data, 2, 0, 0.5)
        elif self.way == "in place":
            with torch.no_grad():
                self.e.weight.renorm_(2, 0, 0.5)
        return self.o(self.e(x))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", ["functional", "data", "in place", "set later"])
def test_weights_that_a_forward_pass_changes_are_refused(way, engine):
    m = drawn(lambda: Writes(way).double())
    H = cs.Hessian(cs.Problem(m, (IDS, TARGETS)), engine=engine)
    if way == "set later":
        m.e.max_norm = 0.5
    with pytest.raises(cs.CurvescopeError, match=r"'e\.weight' of Writes was written to during a forward"):
        H @ torch.ones(H.shape[1], dtype=torch.float64)


def test_weights_that_change_outside_the_few_positions_are_refused_too():
    m = drawn(lambda: Writes("functional").double())
    with torch.no_grad():
        m.e.weight.mul_(0.1)[6] = 9.0  # the last id of the second sequence
    H = cs.Hessian(cs.Problem(m, (IDS, TARGETS)))
    with pytest.raises(cs.CurvescopeError, match="during a product"):
        H @ torch.ones(H.shape[1], dtype=torch.float64)


class Scaled(nn.Module):
    """A table that is looked up with an option of its own."""

    def __init__(self, option: str, *, bag: bool = False) -> None:
        super().__init__()
        self.option, self.bag = option, bag
        self.e, self.o = nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        if self.bag:
            h = F.embedding_bag(x.reshape(-1, 1), self.e, mode="sum", **{self.option: True})
            return self.o(torch.tanh(h).reshape(*x.shape, 4))
        return self.o(torch.tanh(F.embedding(x, self.e, **{self.option: True})))


ASKED = {
    "gradient": lambda problem: problem.gradient(),
    "Hessian": lambda problem: cs.Hessian(problem).to_dense(),
    "GGN": lambda problem: cs.GGN(problem).to_dense(),
    "Fisher": lambda problem: cs.EmpiricalFisher(problem).to_dense(),
    "diagonal": lambda problem: cs.exact_diagonal(cs.GGN(problem)),
    "samples": lambda problem: cs.per_sample(problem).gradients(),
    "KFAC": cs.KFAC,
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_gradients_that_a_function_scales_or_makes_sparse_are_refused(option, bag, asked):
    problem = cs.Problem(drawn(lambda: Scaled(option, bag=bag).double()), (IDS, TARGETS))
    with pytest.raises(cs.UsageError, match=f"{option}=True"):
        ASKED[asked](problem)


class Rewrites(nn.Module):
    """Writes to a tensor in its forward pass, and uses it: a constant, or keys as in the first Llama."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.e, self.l, self.o = way, nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.register_buffer("scale", torch.zeros(4))
        self.keys = torch.zeros(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(self.e(x))
        if self.way == "constant":
            return self.o(torch.tanh(h * self.get_buffer("scale").fill_(1.3)))
        self.keys = self.keys.to(h)
        self.keys[: len(x), : x.shape[1]] = h
        return self.o(torch.tanh(self.keys[: len(x), : x.shape[1]]))

    def by_hand(self, x: Tensor) -> Tensor:
        h = self.l(self.e(x))
        return self.o(torch.tanh(1.3 * h if self.way == "constant" else h))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", ["constant", "keys"])
def test_tensors_that_a_forward_pass_rewrites(way, engine):
    m = drawn(lambda: Rewrites(way).double())
    problem = cs.Problem(m, [(IDS[:1], TARGETS[:1]), (IDS[1:], TARGETS[1:])])
    H, into = cs.Hessian(problem, engine=engine), list(m.parameters())
    loss = F.cross_entropy(m.by_hand(IDS).reshape(-1, 7), TARGETS.reshape(-1))
    g = torch.cat([part.flatten() for part in torch.autograd.grad(loss, into, create_graph=True)])
    rows = [torch.autograd.grad(each, into, retain_graph=True, materialize_grads=True) for each in g]
    truth = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    assert relative_error(problem.gradient(), g.detach()) < 1e-12
    assert relative_error(H.to_dense(), truth) < 1e-12
    values = cs.eigsh(H, k=2, tol=1e-8).values
    assert values[0] == pytest.approx(torch.linalg.eigvalsh(truth)[-1].item(), rel=1e-6)
    G = cs.GGN(problem, engine=engine)
    diagonal = cs.exact_diagonal(G, method="outputs").values
    assert relative_error(diagonal, G.to_dense().diagonal()) < 1e-12
