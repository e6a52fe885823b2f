"""Models, batches and losses as people have them: what plain autograd makes of the user's own code."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import curvescope as cs
from front_door import assert_meets_autograd, leaves_of
from oracles import drawn, relative_error, shaken
from wrong_calls import assert_one_sentence


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = normal(5, 3, seed=0), torch.tensor([0, 2, 1, 1, 0])


class Net(nn.Module):
    """Two layers; returns its outputs in some way."""

    def __init__(self, way: str = "tensor"):
        super().__init__()
        self.first, self.norm, self.last, self.way = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3), way

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        h = self.norm(self.first(x).tanh())
        z = self.last(h)
        loss = None if labels is None else F.cross_entropy(z, labels)
        ways: dict[str, Any] = {
            "tensor": z,
            "tuple": (z, h),
            "logits": {"h": h, "logits": z},
            "one entry": {"scores": z},
            "object": Result(z, h),
            "named": {"hidden": h, "scores": z},
            "second": (h, z),
            "loss": loss,
            "loss and logits": (loss, z),
            "loss entry": {"loss": loss, "logits": z},
        }
        return ways[self.way]


class Result(NamedTuple):
    """With a name for each entry."""

    scores: Tensor
    hidden: Tensor


def net(way: str = "tensor") -> Net:
    return shaken(drawn(lambda: Net(way)))  # pyright: ignore


def loss_of(module: nn.Module) -> Tensor:
    return F.cross_entropy(module(X), Y)


def cut(*parts: Tensor, at: int = 2) -> list[tuple[Tensor, ...]]:
    return [tuple(t[:at] for t in parts), tuple(t[at:] for t in parts)]


# ------------------------------------------------------------------------------------------ what is returned

CHOICES: dict[str, tuple[str, Any]] = {
    "first of a tuple": ("tuple", None),
    "logits of a dictionary": ("logits", None),
    "the only entry": ("one entry", None),
    "first of a named tuple": ("object", None),
    "by name": ("named", "scores"),
    "by attribute": ("object", "scores"),
    "by position": ("second", 1),
    "by a function": ("named", lambda found: found["scores"]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_outputs_are_found_in_what_a_module_returns(name: str):
    way, output = CHOICES[name]
    module = net(way)
    plain = net()
    p = cs.Problem(module, (X, Y), output=output)
    assert p.value() == pytest.approx(float(loss_of(plain).detach()), rel=1e-12)
    v = torch.ones(p.space().size, dtype=torch.float64)
    for operator in (cs.Hessian, cs.GGN, cs.Functional):
        assert relative_error(operator(p) @ v, operator(cs.Problem(plain, (X, Y))) @ v) < 1e-12
    assert cs.load(module, output=output).evaluate(X).shape == (5, 3)


# ------------------------------------------------------------------------------------------ functions as loss


def penalised(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y) + 0.1 * (model(2 * x) ** 2).mean()


TERMS: dict[str, Any] = {
    "function": lambda batch: len(batch[0]),
    "one for each batch": [2, 3],
    "tensors": lambda batch: torch.tensor(len(batch[1])),
}


@pytest.mark.parametrize("name", TERMS)
def test_a_function_of_model_and_batch_meets_autograd(name: str):
    module = net()
    problems = [
        cs.Problem(module, (X, Y), loss_fn=penalised),
        cs.Problem(module, cut(X, Y), loss_fn=penalised, terms=TERMS[name]),
    ]
    assert_meets_autograd(problems, leaves_of(module), lambda: penalised(module, (X, Y)))


def test_a_function_may_be_a_sum():
    module = net()

    def squares(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"]) ** 2).sum()

    data = [{"x": X[:2]}, {"x": X[2:]}]
    problems = [
        cs.Problem(module, {"x": X, "name": "all"}, loss_fn=squares),
        cs.Problem(module, data, loss_fn=squares, terms="sum"),
    ]
    assert_meets_autograd(problems, leaves_of(module), lambda: squares(module, {"x": X}))


def test_one_number_of_terms_weighs_all_batches_alike():
    module, data = net(), cut(X, Y)
    p = cs.Problem(module, data, loss_fn=penalised, terms=7)
    values = [float(penalised(module, batch).detach()) for batch in data]
    assert p.value() == pytest.approx(sum(values) / 2, rel=1e-12)
    assert p.num_terms == 14


def test_algorithms_run_on_a_function():
    p = cs.Problem(net(), (X, Y), loss_fn=penalised)
    H = cs.Hessian(p)
    assert H.symmetric
    top = float(torch.linalg.eigvalsh(H.dense())[-1])
    assert float(cs.eigsh(H, k=1).values[0]) == pytest.approx(top, rel=1e-6)
    assert float(H.block("last.*").dense().norm()) > 0


def test_a_change_of_what_a_function_reads_is_seen():
    settings, x, module = {"weight": 1.0}, X.clone(), net()

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return settings["weight"] * F.cross_entropy(model(batch[0]), batch[1])

    H = cs.Hessian(cs.Problem(module, (x, Y), loss_fn=scaled))
    v = torch.ones(H.shape[0], dtype=torch.float64)
    before = H @ v
    settings["weight"] = 3.0
    assert relative_error(H @ v, 3 * before) < 1e-12
    x.mul_(0.5)
    fresh = cs.Hessian(cs.Problem(module, (x, Y), loss_fn=scaled)) @ v
    assert relative_error(H @ v, fresh) < 1e-12


def test_batches_reach_a_function_as_they_are():
    seen: list[Any] = []

    def look(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch)
        return model(batch[0]["x"]).square().mean() * batch[2]

    data = ({"x": X, "words": ["a", "b"]}, None, 2)
    cs.Problem(net(), data, loss_fn=look).value()
    batch = seen[-1]
    assert batch[0]["words"] == ["a", "b"]
    assert batch[1] is None
    assert type(batch[0]) is dict
    assert torch.equal(batch[0]["x"], X)


@pytest.mark.parametrize("way", ["loss", "loss and logits", "loss entry"])
def test_a_model_that_returns_its_own_loss(way: str):
    module, plain = net(way), net()
    data: Any = {"x": X, "labels": Y} if way == "loss entry" else (X, Y)
    p = cs.Problem(module, data, loss="own")
    assert p.value() == pytest.approx(float(loss_of(plain).detach()), rel=1e-12)
    v = torch.ones(p.space().size, dtype=torch.float64)
    assert relative_error(cs.Hessian(p) @ v, cs.Hessian(cs.Problem(plain, (X, Y))) @ v) < 1e-11


# ------------------------------------------------------------------------------------ functions of parameters


def two_layers(params: dict[str, Any], x: Tensor) -> Tensor:
    return (x @ params["first"]["w"] + params["first"]["b"]).tanh() @ params["out"]


def parameters() -> dict[str, Any]:
    first = {"w": normal(3, 4, seed=1), "b": normal(4, seed=2)}
    return {"first": first, "out": normal(4, 3, seed=3)}


def test_a_function_with_a_dictionary_of_parameters_meets_autograd():
    params = parameters()
    named = {"first.w": params["first"]["w"], "first.b": params["first"]["b"], "out": params["out"]}
    for p in named.values():
        p.requires_grad_()
    problems = [cs.Problem(two_layers, data, params=params) for data in ((X, Y), cut(X, Y))]
    assert list(problems[0].model.blocks) == list(named)
    assert_meets_autograd(
        problems,
        named,
        lambda: F.cross_entropy(two_layers(params, X), Y),
        outputs=lambda: two_layers(params, X),
        of_outputs=lambda z: F.cross_entropy(z, Y),
    )


def test_functional_call_is_such_a_function():
    module = net()
    params = {name: p.detach().clone() for name, p in module.named_parameters()}

    def f(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, params, (x,))

    ours, theirs = cs.Problem(f, (X, Y), params=params), cs.Problem(module, (X, Y))
    v = normal(ours.space().size, seed=4)
    tree = ours.space().scatter(v)
    found = ours.space().scatter(cs.Hessian(ours) @ v)
    expected = theirs.space().scatter(cs.Hessian(theirs) @ theirs.space().gather(tree))
    assert all(relative_error(found[name], expected[name]) < 1e-10 for name in found)


def test_a_function_takes_a_loss_function_too():
    params = parameters()
    p = cs.Problem(
        two_layers, (X, Y), params=params, loss_fn=lambda f, batch: F.cross_entropy(f(batch[0]), batch[1])
    )
    assert p.value() == pytest.approx(cs.Problem(two_layers, (X, Y), params=params).value(), rel=1e-12)


# ------------------------------------------------------------------------------------------------- batches


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Other noise every time."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + 0.1 * torch.randn(3).double(), Y[i]


def test_a_loader_is_read_once_and_says_what_it_draws():
    rows = TensorDataset(X, Y)
    notes = {
        "in order": DataLoader(rows, batch_size=2),
        "shuffles": DataLoader(rows, batch_size=2, shuffle=True),
        "anew": DataLoader(Augmented(), batch_size=2),
    }
    with torch.random.fork_rng(devices=[]):
        for word, loader in notes.items():
            for options in ({}, {"loss_fn": penalised, "terms": lambda batch: len(batch[0])}):
                p = cs.Problem(net(), loader, **options)
                assert p.value() == p.value()
                assert [word in note for note in p.notes] == ([] if word == "in order" else [True])


def test_an_item_of_a_loader_is_a_batch():
    item = next(iter(DataLoader(TensorDataset(X, Y), batch_size=5)))
    assert isinstance(item, list)
    assert cs.Problem(net(), item).value() == pytest.approx(cs.Problem(net(), (X, Y)).value(), rel=1e-14)


def test_real_labels_are_not_shifted():
    """As many answers of yes and no as tokens."""
    ids, y = torch.tensor([[0, 1, 2], [2, 1, 1]]), torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]).double()
    module = shaken(drawn(lambda: nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(6, 3))))
    loss = nn.BCEWithLogitsLoss()
    p = cs.Problem(module, {"input_ids": ids, "labels": y}, loss)
    assert p.value() == pytest.approx(float(loss(module(ids), y).detach()), rel=1e-12)
    assert p.notes == ()


class Buffer:
    """Every batch in the same memory."""

    def __iter__(self):
        x, y = torch.empty(1, 3).double(), torch.empty(1, dtype=torch.long)
        for i in range(5):
            yield x.copy_(X[i : i + 1]), y.copy_(Y[i : i + 1])


def test_a_loader_that_reuses_a_buffer_is_copied():
    whole = cs.Problem(net(), (X, Y), loss_fn=penalised).value()
    terms = lambda batch: len(batch[1])  # noqa: E731
    assert cs.Problem(net(), Buffer(), loss_fn=penalised, terms=terms).value() == pytest.approx(whole)
    assert cs.Problem(net(), Buffer()).value() == pytest.approx(cs.Problem(net(), (X, Y)).value())


# ------------------------------------------------------------------------------------------------ bad input


class Needy(Net):
    """Returns its own loss, and nothing without labels."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return F.cross_entropy(self.last(self.first(x)), labels)  # pyright: ignore


def apart(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).detach(), batch[1])


OTHER = net()
REFUSED: dict[str, tuple[Any, str]] = {
    "no terms": (lambda: cs.Problem(net(), cut(X, Y), loss_fn=penalised), "terms beside loss_fn where there"),
    "terms alone": (lambda: cs.Problem(net(), (X, Y), terms=3), "got them alone"),
    "terms of others": (
        lambda: cs.Problem(net(), cut(X, Y), loss_fn=penalised, terms=[1, 2, 3]),
        r"one for each of 2 batches, a function of a batch, or 'sum', got \[1, 2, 3\]",
    ),
    "odd terms": (
        lambda: cs.Problem(net(), cut(X, Y), loss_fn=penalised, terms=lambda batch: "five"),
        "expected a number of terms for each batch",
    ),
    "both": (lambda: cs.Problem(net(), (X, Y), nn.MSELoss(), loss_fn=penalised), "either loss or loss_fn"),
    "no function": (lambda: cs.Problem(net(), (X, Y), loss_fn=3), "expected a function loss_fn"),
    "list of tensors": (
        lambda: cs.Problem(net(), [X, Y], loss_fn=penalised),
        "a list of tensors, which may be either",
    ),
    "generator": (
        lambda: cs.Problem(net(), (b for b in cut(X, Y)), loss_fn=penalised, terms=1),
        "one-pass generator",
    ),
    "no batch": (lambda: cs.Problem(net(), [], loss_fn=penalised), "at least one batch, got none"),
    "a float": (
        lambda: cs.Problem(net(), (X, Y), loss_fn=lambda m, b: penalised(m, b).item()).value(),
        r"one real number .* got a float \(return it without",
    ),
    "many numbers": (
        lambda: cs.Problem(net(), (X, Y), loss_fn=lambda m, b: m(b[0])).value(),
        r"got a tensor \(5, 3\)",
    ),
    "detached": (
        lambda: cs.Problem(net(), (X, Y), loss_fn=apart).gradient(),
        "no parameter of which it depends on",
    ),
    "another model": (
        lambda: cs.Problem(net(), (X, Y), loss_fn=lambda m, b: penalised(OTHER, b)).gradient(),
        "no parameter of which it depends on",
    ),
    "GGN": (lambda: cs.GGN(cs.Problem(net(), (X, Y), loss_fn=penalised)), "GGN needs the model's outputs"),
    "functional": (
        lambda: cs.Functional(cs.Problem(net(), (X, Y), loss_fn=penalised)),
        "Functional needs the model's outputs",
    ),
    "Fisher": (
        lambda: cs.EmpiricalFisher(cs.Problem(net(), (X, Y), loss_fn=penalised)),
        "EmpiricalFisher needs the model's outputs .* cs.CustomLoss",
    ),
    "K-FAC": (
        lambda: cs.KFAC(cs.Problem(net(), (X, Y), loss_fn=penalised)),
        "KFAC needs the model's outputs",
    ),
    "no own loss": (
        lambda: cs.Problem(net("tuple"), (X, Y), loss="own").value(),
        r"returns its own loss, got a tuple of a tensor \(5, 3\), a tensor \(5, 4\)",
    ),
    "labels needed": (
        lambda: cs.Problem(Needy(), {"x": X, "labels": Y}).value(),
        r"Needy raised an error without its argument 'labels': .* \(loss='own' calls it",
    ),
    "two entries": (
        lambda: cs.Problem(net("named"), (X, Y)).value(),
        r"with logits, got a dict of hidden, scores \(output=",
    ),
    "loss first": (
        lambda: cs.Problem(net("loss and logits"), {"x": X, "labels": Y}).value(),
        "expected outputs as a tensor",
    ),
    "no such entry": (
        lambda: cs.Problem(net("named"), (X, Y), output="logits").value(),
        "outputs at 'logits' of what the module returns, got a dict of hidden, scores",
    ),
    "no such position": (lambda: cs.Problem(net("tuple"), (X, Y), output=4).value(), "outputs at 4"),
    "function alone": (lambda: cs.Problem(two_layers, (X, Y)), "parameters of the function two_layers as"),
    "no tensor": (
        lambda: cs.Problem(two_layers, (X, Y), params={"w": 1.0}),
        "real tensors as parameters of two_layers, 'w' is float",
    ),
    "two of a name": (
        lambda: cs.Problem(two_layers, (X, Y), params={"a.b": X, "a": {"b": X}}),
        "'a.b' are two",
    ),
    "params of a module": (
        lambda: cs.Problem(net(), (X, Y), params={"w": X}),
        "expected a function f",
    ),
    "flat targets": (
        lambda: cs.Problem(net(), (X, Y.repeat(2))),
        r"got shapes \(5, 3\), \(10,\) \(a batch has sequences on axis 0",
    ),
    "dataset": (lambda: cs.Problem(net(), 3.0), r"got float .*DataLoader\(dataset"),
}


def test_an_error_of_the_function_itself_is_said_to_be_its_own():
    p = cs.Problem(net(), (X[:, :2], Y), loss_fn=penalised)
    with pytest.raises(
        cs.CurvescopeError, match=r"the loss of Net itself .* \(5, 2\), \(5,\): mat1"
    ) as caught:
        p.value()
    assert_one_sentence(caught.value)


def test_a_function_that_draws_is_refused_as_such():
    def drops(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(F.dropout(model(batch[0])), batch[1])

    H = cs.Hessian(cs.Problem(net(), (X, Y), loss_fn=drops))
    with (
        torch.random.fork_rng(devices=[]),
        pytest.raises(
            cs.CurvescopeError, match="what is computed with Net gives other outputs every time"
        ) as caught,
    ):
        H @ torch.ones(H.shape[0], dtype=torch.float64)
    assert_one_sentence(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_odd_ways_in_are_refused_in_one_sentence(name: str):
    make, message = REFUSED[name]
    with pytest.raises(cs.UsageError, match=message) as caught:
        make()
    assert_one_sentence(caught.value)
