"""`params`: what a person may say, which parameters are meant, and what is frozen."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
import oracles
from curvescope.models.parameter_selection import as_params


def drawn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


X, Y = drawn((6, 3)), torch.arange(6) % 4


class Net(nn.Module):
    """A row of layers, one of them shared."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5))
        self.out = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)))


def net() -> Any:
    return oracles.drawn(Net).double()


def names(problem: cs.Problem, *patterns: Any) -> list[str]:
    return [block.name for block in problem.space(*patterns)]


W, B = ["inner.0.weight", "inner.2.weight", "out.weight"], ["inner.0.bias", "inner.2.bias", "out.bias"]
SAID = {
    "glob": (lambda m: "*.weight", W),
    "name": (lambda m: "out.bias", ["out.bias"]),
    "expression": (lambda m: re.compile(r"inner\.\d\.bias"), B[:2]),
    "expression as a string": (lambda m: r"re:inner\.\d\.bias", B[:2]),
    "module": (lambda m: m.inner[0], ["inner.0.weight", "inner.0.bias"]),
    "row of modules": (lambda m: m.inner, [W[0], B[0], W[1], B[1]]),
    "parameter": (lambda m: m.out.weight, ["out.weight"]),
    "mixture": (lambda m: [m.out, "inner.0.*", [m.inner[0].bias, re.compile("out.bias")]],
                ["inner.0.weight", "inner.0.bias", "out.weight", "out.bias"]),
    "generator": (lambda m: m.out.parameters(), ["out.weight", "out.bias"]),
    "named parameters": (lambda m: list(m.out.named_parameters("out")), ["out.weight", "out.bias"]),
}  # fmt: skip


@pytest.mark.parametrize("said", SAID)
def test_what_is_meant(said: str):
    m = net()
    make, want = SAID[said]
    problem = cs.Problem(m, (X, Y), params=make(m))
    assert names(problem) == want
    everything = cs.Hessian(cs.Problem(m, (X, Y)))
    dense = everything.to_dense()
    places = [list(range(*everything.space.slices[n].indices(len(dense)))) for n in want]
    at = [i for place in places for i in place]
    torch.testing.assert_close(cs.Hessian(problem).to_dense(), dense[at][:, at])
    torch.testing.assert_close(cs.Hessian(cs.Problem(m, (X, Y)), make(m)).to_dense(), dense[at][:, at])
    torch.testing.assert_close(problem.gradient(), cs.Problem(m, (X, Y)).gradient(make(m)))
    assert cs.Jacobian(problem).shape[1] == cs.per_sample(problem).space.size == len(at)


REFUSED = {
    "nothing": (lambda m: [], "expected at least one block or glob, got none"),
    "no such name": (lambda m: "out.wieght", r"no block matches 'out.wieght' \(did you mean 'out.weight'"),
    "no such expression": (lambda m: re.compile("inner"), "match full names, such as inner.0.weight"),
    "no expression": (lambda m: "re:(", r"expected a regular expression, got 're:\('"),
    "another module": (lambda m: nn.Linear(5, 4), "got a Linear that is not in it"),
    "another tensor": (lambda m: m.out.weight.detach(), r"got a tensor of \(4, 5\) that is not in it"),
    "no parameters": (lambda m: m.inner[1], "the Tanh has none"),
    "number": (lambda m: 3, "expected the name of a block or a glob, got 3"),
    "dictionary in a list": (lambda m: [dict(m.named_parameters())], "got a dictionary"),
    "dictionary": (
        lambda m: dict(m.named_parameters()),
        r"expected a function f\(params, x\) together with params",
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_means_nothing_is_one_sentence(said: str):
    m = net()
    make, words = REFUSED[said]
    with pytest.raises(cs.UsageError, match=words):
        cs.Problem(m, (X, Y), params=make(m))


def test_names_of_blocks_come_before_names_of_parameters():
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
    model = cs.load(nn.Sequential(layer, nn.Linear(4, 2)).double())
    assert [b.name for b in model.space("0.linear?.weight")] == ["L0.W_1", "L0.W_2"]
    assert {b.name for b in model.space("0.self_attn.in_proj_weight")} == {"L0.W_Q", "L0.W_K", "L0.W_V"}
    assert [b.name for b in model.space(re.compile(r"L0\.h\d\.W_K"))] == ["L0.h0.W_K", "L0.h1.W_K"]
    assert [b.name for b in model.space(layer.norm1)] == ["L0.ln1.g", "L0.ln1.b"]
    weights = {n for n, _ in model.module.named_parameters() if n.endswith(".weight")}
    assert {b.parameter for b in model.space("*.weight")} == weights


def test_one_head_may_be_all_that_varies():
    tiny = oracles.bench("wide-heads")
    problem = cs.Problem(tiny.problem.model, tiny.problem.batches, tiny.problem.loss, params="L0.h1.W_Q")
    assert names(problem) == names(problem, "*") == ["L0.h1.W_Q"]
    assert names(problem, "L0.W_K") == ["L0.W_K"]
    truth = cs.Hessian(tiny.problem, "L0.h1.W_Q").to_dense()
    torch.testing.assert_close(cs.Hessian(problem).to_dense(), truth)


# ---------------------------------------------------------------------------------------------- frozen


def test_what_is_frozen_is_left_out_and_a_note_says_so_once():
    m = net()
    whole = cs.Hessian(cs.Problem(m, (X, Y))).to_dense()
    m.inner.requires_grad_(False)
    problem = cs.Problem(m, (X, Y))
    assert names(problem) == names(problem, "*") == ["out.weight", "out.bias"]
    n = problem.space().size
    torch.testing.assert_close(cs.Hessian(problem).to_dense(), whole[-n:, -n:])
    (note,) = [note for note in problem.notes if "frozen" in note]
    assert note.startswith(
        "50 of 74 parameters are frozen (requires_grad=False) and left out: inner.0.weight"
    )
    assert "params='*'" in note
    assert len(cs.Problem(m, (X, Y), params="*").space()) == 6
    assert not cs.Problem(m, (X, Y), params="*").notes
    assert names(problem, "inner.2.bias") == ["inner.2.bias"]  # asked for by name
    assert names(problem, "*.bias") == ["out.bias"]
    torch.testing.assert_close(
        problem.at(torch.zeros(n).double()).get_parameter("out.bias"), torch.zeros(4).double()
    )
    sources = cs.FunctionalSources(problem)
    assert all(source.shape == (n, n) for source in sources.values())


def test_a_model_that_is_frozen_as_a_whole_needs_a_word():
    m = net().requires_grad_(False)
    with pytest.raises(cs.UsageError, match=r"every parameter of Net is frozen .*params='\*' takes all"):
        cs.Problem(m, (X, Y))
    assert cs.Hessian(cs.Problem(m, (X, Y), params=m.out)).shape == (24, 24)


@pytest.mark.parametrize("first", [False, True])
def test_freezing_and_thawing_behind_a_problem_is_refused(first: bool):
    m = net()
    m.inner[0].requires_grad_(not first)
    problem = cs.Problem(m, (X, Y))
    operators = [cs.Hessian(problem), cs.GGN(problem), cs.Jacobian(problem)]
    v = torch.ones(problem.space().size, dtype=torch.float64)
    before = [op @ v for op in operators]
    m.inner[0].requires_grad_(first)
    uses = [*(lambda op=op: op @ v for op in operators), problem.gradient, cs.per_sample(problem).gradients]
    for use in uses:
        with pytest.raises(cs.CurvescopeError, match="since the problem was made, 2 parameters of Net"):
            use()
    m.inner[0].requires_grad_(not first)
    for op, want in zip(operators, before, strict=True):
        assert torch.equal(op @ v, want)


def test_named_parameters_may_be_frozen_and_thawed():
    m = net()
    H = cs.Hessian(cs.Problem(m, (X, Y), params=["*"]))
    v = drawn((74,))
    want = H @ v
    m.requires_grad_(False)
    assert torch.equal(H @ v, want)
    assert not any(p.requires_grad for p in m.parameters())


def test_parameters_of_a_function_are_chosen_by_name_too():
    w = {"a": drawn((3, 4)), "b": drawn((4,))}
    model = cs.load(lambda p, x: torch.tanh(x @ p["a"]) + p["b"], params=w)
    assert names(cs.Problem(model, (X, Y))) == ["a", "b"]
    assert names(cs.Problem(model, (X, Y), params="b")) == ["b"]


def test_lists_are_flattened():
    a, b = nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)])
    assert as_params(["x", [a, (b, re.compile("y"))]]) == ("x", a, b, re.compile("y"))


def test_a_tied_parameter_has_both_of_its_names():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.embed(ids))

    problem = cs.Problem(Tied().double(), (torch.arange(4)[None], torch.ones(1, 4).long()))
    assert names(problem, "out.weight") == names(problem, "embed.weight") == ["embed.weight"]
