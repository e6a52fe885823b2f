"""Ways in that are refused, each in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
from front_door_cases import Net, X, Y, cut, net, penalized, two_layers
from wrong_calls import assert_one_sentence


class Needy(Net):
    """Returns its own loss, and nothing without labels."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return F.cross_entropy(self.last(self.first(x)), labels)  # pyright: ignore


def apart(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).detach(), batch[1])


OTHER = net()
REFUSED: dict[str, tuple[Any, str]] = {
    "no terms": (lambda: cs.Problem(net(), cut(X, Y), loss_fn=penalized), "terms for loss_fn with"),
    "terms alone": (lambda: cs.Problem(net(), (X, Y), terms=3), "got terms only"),
    "terms of others": (
        lambda: cs.Problem(net(), cut(X, Y), loss_fn=penalized, terms=[1, 2, 3]),
        r"one for each of 2 batches, a function of a batch, or 'sum', got \[1, 2, 3\]",
    ),
    "odd terms": (
        lambda: cs.Problem(net(), cut(X, Y), loss_fn=penalized, terms=lambda batch: "five"),
        "expected a number of terms for each batch",
    ),
    "both": (lambda: cs.Problem(net(), (X, Y), nn.MSELoss(), loss_fn=penalized), "either loss or loss_fn"),
    "no function": (lambda: cs.Problem(net(), (X, Y), loss_fn=3), "expected a function loss_fn"),
    "list of tensors": (
        lambda: cs.Problem(net(), [X, Y], loss_fn=penalized),
        "a list of tensors, which may be either",
    ),
    "generator": (
        lambda: cs.Problem(net(), (b for b in cut(X, Y)), loss_fn=penalized, terms=1),
        "one-pass generator",
    ),
    "no batch": (lambda: cs.Problem(net(), [], loss_fn=penalized), "at least one batch, got none"),
    "a float": (
        lambda: cs.Problem(net(), (X, Y), loss_fn=lambda m, b: penalized(m, b).item()).loss_value(),
        r"one real number .* got a float \(return it without",
    ),
    "many numbers": (
        lambda: cs.Problem(net(), (X, Y), loss_fn=lambda m, b: m(b[0])).loss_value(),
        r"got a tensor \(5, 3\)",
    ),
    "detached": (
        lambda: cs.Problem(net(), (X, Y), loss_fn=apart).gradient(),
        "the loss depends on no parameter",
    ),
    "another model": (
        lambda: cs.Problem(net(), (X, Y), loss_fn=lambda m, b: penalized(OTHER, b)).gradient(),
        "the loss depends on no parameter",
    ),
    "GGN": (lambda: cs.GGN(cs.Problem(net(), (X, Y), loss_fn=penalized)), "GGN needs the model's outputs"),
    "functional": (
        lambda: cs.FunctionalHessian(cs.Problem(net(), (X, Y), loss_fn=penalized)),
        "FunctionalHessian needs the model's outputs",
    ),
    "Fisher": (
        lambda: cs.EmpiricalFisher(cs.Problem(net(), (X, Y), loss_fn=penalized)),
        "EmpiricalFisher needs the model's outputs .* cs.CustomLoss",
    ),
    "K-FAC": (
        lambda: cs.KFAC(cs.Problem(net(), (X, Y), loss_fn=penalized)),
        "KFAC needs the model's outputs",
    ),
    "no own loss": (
        lambda: cs.Problem(net("tuple"), (X, Y), loss="own").loss_value(),
        r"returns its own loss, got a tuple of a tensor \(5, 3\), a tensor \(5, 4\)",
    ),
    "labels needed": (
        lambda: cs.Problem(Needy(), {"x": X, "labels": Y}).loss_value(),
        r"Needy raised an error without its argument 'labels': .* \(loss='own' calls it",
    ),
    "two entries": (
        lambda: cs.Problem(net("named"), (X, Y)).loss_value(),
        r"with logits, got a dict of hidden, scores \(output=",
    ),
    "two tensors": (
        lambda: cs.Problem(net("tuple"), (X, Y)).loss_value(),
        r"expected one tensor of outputs, .* got a tuple of a tensor \(5, 3\), a tensor \(5, 4\)",
    ),
    "no such entry": (
        lambda: cs.Problem(net("named"), (X, Y), output="logits").loss_value(),
        "outputs at 'logits' of what the module returns, got a dict of hidden, scores",
    ),
    "no such position": (lambda: cs.Problem(net("tuple"), (X, Y), output=4).loss_value(), "outputs at 4"),
    "function alone": (lambda: cs.Problem(two_layers, (X, Y)), "parameters of the function two_layers as"),
    "no tensor": (
        lambda: cs.Problem(two_layers, (X, Y), params={"w": 1.0}),
        "real tensors as parameters of two_layers, .*'w' is float",
    ),
    "two of a name": (
        lambda: cs.Problem(two_layers, (X, Y), params={"a.b": X, "a": {"b": X}}),
        r"two .*'a\.b'",
    ),
    "params of a module": (
        lambda: cs.Problem(net(), (X, Y), params={"w": X}),
        "expected a function f",
    ),
    "flat targets": (
        lambda: cs.Problem(net(), (X, Y.repeat(2))),
        r"got shapes \(5, 3\), \(10,\)",
    ),
    "dataset": (lambda: cs.Problem(net(), 3.0), r"got float .*DataLoader\(dataset"),
}


def test_an_error_of_the_function_itself_is_said_to_be_its_own():
    p = cs.Problem(net(), (X[:, :2], Y), loss_fn=penalized)
    with pytest.raises(
        cs.CurvescopeError, match=r"the loss of Net itself .* \(5, 2\), \(5,\): mat1"
    ) as caught:
        p.loss_value()
    assert_one_sentence(caught.value)


def test_a_function_that_draws_is_refused_as_such():
    def drops(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(F.dropout(model(batch[0])), batch[1])

    H = cs.Hessian(cs.Problem(net(), (X, Y), loss_fn=drops))
    with (
        torch.random.fork_rng(devices=[]),
        pytest.raises(cs.CurvescopeError, match="Net gives different outputs") as caught,
    ):
        H @ torch.ones(H.shape[0], dtype=torch.float64)
    assert_one_sentence(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_odd_ways_in_are_refused_in_one_sentence(name: str):
    make, message = REFUSED[name]
    with pytest.raises(cs.UsageError, match=message) as caught:
        make()
    assert_one_sentence(caught.value)
