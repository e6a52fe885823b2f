"""Models, batches and losses as people have them: what plain autograd makes of the user's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import curvescope as cs
from curvescope.kernels.norms.plain_norms import plain_norms
from front_door import assert_meets_autograd, leaves_of
from front_door_cases import X, Y, cut, net, normal, penalized, two_layers
from oracles import drawn, relative_error, shaken


def loss_of(module: nn.Module) -> Tensor:
    return F.cross_entropy(module(X), Y)


# ------------------------------------------------------------------------------------------ what is returned

CHOICES: dict[str, tuple[str, Any]] = {
    "first of a tuple": ("tuple", 0),
    "logits of a dictionary": ("logits", None),
    "the only entry": ("one entry", None),
    "first of a named tuple": ("object", 0),
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
    assert p.loss_value() == pytest.approx(float(loss_of(plain).detach()), rel=1e-12)
    v = torch.ones(p.space().size, dtype=torch.float64)
    for operator in (cs.Hessian, cs.GGN, cs.FunctionalHessian):
        assert relative_error(operator(p) @ v, operator(cs.Problem(plain, (X, Y))) @ v) < 1e-12
    assert cs.load(module, output=output).evaluate(X).shape == (5, 3)


# ------------------------------------------------------------------------------------------ functions as loss


TERMS: dict[str, Any] = {
    "function": lambda batch: len(batch[0]),
    "one for each batch": [2, 3],
    "tensors": lambda batch: torch.tensor(len(batch[1])),
}


@pytest.mark.parametrize("name", TERMS)
def test_a_function_of_model_and_batch_meets_autograd(name: str):
    module = net()
    problems = [
        cs.Problem(module, (X, Y), loss_fn=penalized),
        cs.Problem(module, cut(X, Y), loss_fn=penalized, terms=TERMS[name]),
    ]
    assert_meets_autograd(problems, leaves_of(module), lambda: penalized(module, (X, Y)))


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


def test_a_function_may_take_gradients_itself():
    """A gradient penalty; also where the parameters themselves are what it differentiates in.

    The third derivative of torch's layer_norm is wrong; finite differences of the gradient tell.
    """
    module = net()

    def written_out(loss: Any) -> Tensor:
        with plain_norms():
            return loss(module, (X, Y))

    def smooth(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        z = model(x)
        (slope,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        return F.cross_entropy(z, batch[1]) + slope.square().mean()

    problems = [
        cs.Problem(module, (X, Y), loss_fn=smooth),
        cs.Problem(module, cut(X, Y), loss_fn=smooth, terms=lambda batch: len(batch[0])),
    ]
    assert_meets_autograd(problems, leaves_of(module), lambda: written_out(smooth))

    def flat(model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum((slope.square().sum() for slope in slopes), torch.zeros(()))

    own = cs.Problem(module, (X, Y), loss_fn=flat)
    assert_meets_autograd([own], leaves_of(module), lambda: written_out(flat))


def test_one_number_of_terms_weighs_all_batches_alike():
    module, data = net(), cut(X, Y)
    p = cs.Problem(module, data, loss_fn=penalized, terms=7)
    values = [float(penalized(module, batch).detach()) for batch in data]
    assert p.loss_value() == pytest.approx(sum(values) / 2, rel=1e-12)
    assert p.num_terms == 14


def test_algorithms_run_on_a_function():
    p = cs.Problem(net(), (X, Y), loss_fn=penalized)
    H = cs.Hessian(p)
    assert H.symmetric
    top = float(torch.linalg.eigvalsh(H.to_dense())[-1])
    assert float(cs.eigsh(H, k=1).values[0]) == pytest.approx(top, rel=1e-6)
    assert float(H.block("last.*").to_dense().norm()) > 0


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
    cs.Problem(net(), data, loss_fn=look).loss_value()
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
    assert p.loss_value() == pytest.approx(float(loss_of(plain).detach()), rel=1e-12)
    v = torch.ones(p.space().size, dtype=torch.float64)
    assert relative_error(cs.Hessian(p) @ v, cs.Hessian(cs.Problem(plain, (X, Y))) @ v) < 1e-11


# ------------------------------------------------------------------------------------ functions of parameters


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
    assert p.loss_value() == pytest.approx(
        cs.Problem(two_layers, (X, Y), params=params).loss_value(), rel=1e-12
    )


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
        "augmentation": DataLoader(Augmented(), batch_size=2),
    }
    with torch.random.fork_rng(devices=[]):
        for word, loader in notes.items():
            for options in ({}, {"loss_fn": penalized, "terms": lambda batch: len(batch[0])}):
                p = cs.Problem(net(), loader, **options)
                assert p.loss_value() == p.loss_value()
                assert [word in note for note in p.notes] == ([] if word == "in order" else [True])


def test_an_item_of_a_loader_is_a_batch():
    item = next(iter(DataLoader(TensorDataset(X, Y), batch_size=5)))
    assert isinstance(item, list)
    assert cs.Problem(net(), item).loss_value() == pytest.approx(
        cs.Problem(net(), (X, Y)).loss_value(), rel=1e-14
    )


def test_real_labels_are_not_shifted():
    """As many answers of yes and no as tokens."""
    ids, y = torch.tensor([[0, 1, 2], [2, 1, 1]]), torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]).double()
    module = shaken(drawn(lambda: nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(6, 3))))
    loss = nn.BCEWithLogitsLoss()
    p = cs.Problem(module, {"input_ids": ids, "labels": y}, loss)
    assert p.loss_value() == pytest.approx(float(loss(module(ids), y).detach()), rel=1e-12)
    assert p.notes == ()


class Buffer:
    """Every batch in the same memory."""

    def __iter__(self):
        x, y = torch.empty(1, 3).double(), torch.empty(1, dtype=torch.long)
        for i in range(5):
            yield x.copy_(X[i : i + 1]), y.copy_(Y[i : i + 1])


def test_a_loader_that_reuses_a_buffer_is_copied():
    whole = cs.Problem(net(), (X, Y), loss_fn=penalized).loss_value()
    terms = lambda batch: len(batch[1])  # noqa: E731
    assert cs.Problem(net(), Buffer(), loss_fn=penalized, terms=terms).loss_value() == pytest.approx(whole)
    assert cs.Problem(net(), Buffer()).loss_value() == pytest.approx(cs.Problem(net(), (X, Y)).loss_value())


def test_activations_need_the_outputs_of_a_loss_fn():
    m, x, y = nn.Linear(3, 2), torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
    p = cs.Problem(m, (x, y), loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    with pytest.raises(cs.UsageError, match="outputs separate from the loss"):
        cs.ActivationHessian(p, "")
