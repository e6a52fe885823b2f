"""Wrong calls raise one sentence that names what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import curvescope as cs
from wrong_calls import REAL, Make, X, Y, assert_one_sentence, config, hessian, model, problem, regression


class NoRow:
    """A DataLoader whose items are no pairs."""

    def __iter__(self):
        yield {"x": X}


VECTORS: dict[str, tuple[Make, str]] = {
    "short vector": (
        lambda _: hessian() @ torch.zeros(3).double(),
        r"expected a vector of \d+ entries .* got \(3,\)",
    ),
    "row vector": (
        lambda _: hessian() @ torch.zeros(1, 3).double(),
        r"expected a vector of \d+ entries .* got \(1, 3\)",
    ),
    "numpy vector of another size": (lambda _: hessian() @ np.zeros(3), r"expected a vector of \d+ entries"),
    "list vector": (lambda _: hessian() @ [0.0], r"expected a tensor or a NumPy array .* got list"),
    "complex vector": (
        lambda _: (h := hessian()) @ torch.zeros(h.shape[1]).cfloat(),
        r"expected torch\.float64 on cpu, got torch\.complex64 on cpu",
    ),
    "vector of truth values": (
        lambda _: (h := hessian()) @ torch.zeros(h.shape[1]).bool(),
        r"expected torch\.float64 .* got torch\.bool",
    ),
    "transposed rectangle": (
        lambda _: hessian().block("E", "U").T @ torch.zeros(3).double(),
        r"expected a vector of 20 entries .* got \(3,\)",
    ),
}

OPERATORS: dict[str, tuple[Make, str]] = {
    "unknown block": (
        lambda _: hessian().block("L0.W_X"),
        r"no block matches 'L0\.W_X' \(did you mean 'L0\.W_",
    ),
    "unknown head": (
        lambda _: hessian().block("L0.h5.W_Q"),
        r"no block matches 'L0\.h5\.W_Q' \(did you mean 'L0\.h",
    ),
    "overlap": (lambda _: hessian().block(["L0.W_Q", "L0.h1.W_Q"]), r"L0\.W_Q and L0\.h1\.W_Q overlap"),
    "block of other columns": (lambda _: hessian().block("E", "zzz"), r"no block matches 'zzz' \(known: "),
    "unknown engine": (
        lambda _: cs.Hessian(problem(), engine="magic"),
        r"expected an engine, got 'magic' .*autograd",
    ),  # pyright: ignore
    "no columns at once": (
        lambda _: cs.GGN(problem(), chunk=0),
        r"expected a chunk of at least 1 column, got 0",
    ),
    "no problem": (lambda _: cs.Hessian(model()), r"expected a cs\.Problem, got Model"),  # pyright: ignore
    "no samples": (
        lambda _: cs.MonteCarloFisher(problem(), num_samples=0),
        r"expected num_samples of at least 1, got 0",
    ),
    "smoothed Fisher": (
        lambda _: cs.MonteCarloFisher(problem(loss=cs.CrossEntropy(0.1))),
        r"with label_smoothing is not",
    ),
    "infinite weights": (lambda _: _infinite(), r"expected finite weights, .* ones in U \(1 entry\)"),
    "weights that became infinite": (
        lambda _: _infinite(later=True),
        r"not finite; the loss at these parameters is (nan|inf), and .* weights in U \(1 entry\)",
    ),
}

DATA: dict[str, tuple[Make, str]] = {
    "unknown loss": (
        lambda _: problem(loss="crossentropy"),
        r"expected a loss, got 'crossentropy' \(did you mean 'cross_entropy'",
    ),
    "loss class": (lambda _: problem(loss=cs.CrossEntropy), r"expected a loss, got the class CrossEntropy"),
    "smoothing of one": (lambda _: cs.CrossEntropy(1.0), r"expected a label_smoothing in \[0, 1\), got 1\.0"),
    "generator": (
        lambda _: cs.Problem(model(), ((x, x) for x in [X])),
        r"expected a DataLoader .* one-pass generator",
    ),
    "iterator": (
        lambda _: cs.Problem(model(), iter([(X, Y)])),
        r"expected a DataLoader .* one-pass list_iterator",
    ),
    "no sequences": (lambda _: problem(X[:0], Y[:0]), r"expected at least one sequence, got none"),
    "empty list": (lambda _: cs.Problem(model(), []), r"expected at least one sequence, got none"),
    "number as data": (lambda _: cs.Problem(model(), 3), r"expected Batches.* got int"),
    "odd items": (lambda _: cs.Problem(model(), NoRow()), r"expected items \(inputs, targets\).* got a dict"),
    "numpy pair": (
        lambda _: problem(X.numpy(), Y.numpy()),
        r"expected items \(inputs, targets\).* got a ndarray",
    ),
    "lengths": (lambda _: problem(X, Y[:1]), r"same number of sequences, got shapes \(2, 3\), \(1, 3\)"),
    "negative weights": (
        lambda _: problem(X, Y, -torch.ones(2)),
        r"expected weights that are.* not negative",
    ),
    "weights of others": (
        lambda _: problem(X, Y, torch.ones(3)),
        r"expected one weight per term, got shape \(3,\)",
    ),
    "weights of nothing": (
        lambda _: problem(X, Y, torch.zeros(2)),
        r"expected at least one term that counts",
    ),
    "all ignored": (
        lambda _: problem(X, torch.full_like(Y, -100)),
        r"expected at least one term that counts",
    ),
    "target too big": (
        lambda _: problem(X, Y + 1).loss_value(),
        r"expected targets below 5 .* got values from 1 to 5",
    ),
    "target negative": (
        lambda _: problem(X, Y - 1).gradient(),
        r"expected targets below 5 .* got values from -1 to 3",
    ),
    "real targets": (
        lambda _: hessian_of(problem(X, Y.double())),
        r"expected integer targets \(2, 3\) .* got float64",
    ),
    "targets per sequence": (
        lambda _: problem(X, Y[:, 0]).loss_value(),
        r"expected integer targets \(2, 3\) .* got int64 \(2,\)",
    ),
    "integer targets": (
        lambda _: regression(REAL, REAL.long()).loss_value(),
        r"expected real targets .* \(2, 3, 4\), got int64",
    ),
    "targets of other shape": (
        lambda _: regression(REAL, REAL[..., :1]).loss_value(),
        r"expected real targets .* got float64 \(2, 3, 1\)",
    ),
    "weights per entry": (
        lambda _: problem(
            REAL, REAL, REAL + 1, loss="mse", inputs="continuous", outputs="regression"
        ).loss_value(),
        r"expected one weight per sequence, \(2,\), got \(2, 3, 4\).*mse_mean",
    ),
    "batch size": (
        lambda _: cs.Batches.from_tensors(X, Y, batch_size=0),
        r"expected a batch_size of at least 1, got 0",
    ),
    "too long": (
        lambda _: problem(X.repeat(1, 2), Y.repeat(1, 2)).loss_value(),
        r"expected at most n_ctx=3 positions, got 6",
    ),
    "real tokens": (
        lambda _: problem(X.double(), Y).loss_value(),
        r"expected integer tokens \(B, T\), got torch\.float64",
    ),
    "tokens as inputs": (
        lambda _: regression(X, REAL).loss_value(),
        r"expected real inputs \(B, T, 4\), got torch\.int64",
    ),
    "ids of another vocabulary": (
        lambda _: problem(X + 3, Y),
        r"expected tokens from 0 to 4, the vocabulary of 'Transformer', got 3 to 7 \(are they from another",
    ),
    "a task with more tokens": (
        lambda _: cs.Problem(model(n_ctx=16), cs.task_data("addition", num_sequences=4)),
        r"got 0 to 1\d, which is what the task 'addition' has",
    ),
    "ids that no embedding has": (
        lambda _: cs.Problem(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 5)), (X, Y)).loss_value(),
        r"no row for some of the inputs, which range from 0 to 4",
    ),
    "real numbers for an embedding": (
        lambda _: cs.Problem(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5)), (X.float(), Y)).loss_value(),
        r"integer inputs for an embedding, got torch\.float32",
    ),
    "a dictionary without labels": (
        lambda _: cs.Problem(model(), {"input_ids": X}),
        r"expected items \(inputs, targets\) or a dictionary with labels, got a dict of input_ids",
    ),
    "a mask that hides tokens": (
        lambda _: cs.Problem(model(causal=False), {"input_ids": X, "attention_mask": X > 0, "labels": Y}),
        r"takes no attention_mask, and the one given hides tokens",
    ),
    "one sequence alone": (
        lambda _: problem(X[0], Y[0]).loss_value(),
        r"expected integer tokens \(B, T\), got torch\.int64 \(3,\)",
    ),
}


def _infinite(later: bool = False) -> Any:
    found = model()
    before = cs.Hessian(cs.Problem(found, (X, Y)))
    with torch.no_grad():
        found.get_parameter("U")[0, 0] = torch.inf
    H = before if later else cs.Hessian(cs.Problem(found, (X, Y)))
    return H @ torch.ones(H.shape[1]).double()


def hessian_of(p: cs.Problem) -> Any:
    H = cs.Hessian(p)
    return H @ torch.ones(H.shape[1]).double()


CASES = {**VECTORS, **OPERATORS, **DATA}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence(name: str, tmp_path: Path):
    call, message = CASES[name]
    with pytest.raises(cs.CurvescopeError, match=message) as caught:
        call(tmp_path)
    assert_one_sentence(caught.value)


def test_there_are_enough_cases():
    assert len(CASES) >= 20


# Less likely ones.
RAW: dict[str, Make] = {
    "token out of vocabulary": lambda _: problem(X + 3, Y).loss_value(),
    "inputs of another width": lambda _: regression(REAL[..., :3], REAL).loss_value(),
    "images of another size": lambda _: cs.Transformer(
        config(inputs="patches", outputs="class", n_out=2, image_size=2, patch_size=2)
    )(torch.zeros(1, 2, 2, 2)),
    "Jacobian of no problem": lambda _: cs.Jacobian(model()),  # pyright: ignore
    "patches of nothing": lambda _: config(inputs="patches", outputs="class", n_out=2, patch_size=0),
    "heads of nothing": lambda _: config(d_head=0),
    "heads of less": lambda _: config(d_head=-2),
    "outputs of nothing": lambda _: config(outputs="regression", n_out=0),
    "negative deviation": lambda _: model(init_std=-1.0),
    "negative vocabulary": lambda _: cs.load(cs.MLPConfig(vocab_size=-1)),
    "saving a bare module of another kind": lambda tmp: cs.save(nn.Linear(1, 1), tmp),  # pyright: ignore
    "name too long": lambda _: cs.load("x" * 300),
    "device of another type": lambda _: cs.load(config(), device=[]),  # pyright: ignore
    "block of another type": lambda _: hessian().block([3]),  # pyright: ignore
    "chunk of another type": lambda _: cs.Hessian(problem(), chunk="all"),  # pyright: ignore
    "number added to an operator": lambda _: hessian() + 1,  # pyright: ignore
}


@pytest.mark.parametrize("name", RAW)
def test_more_bad_input_is_one_sentence(name: str, tmp_path: Path):
    with pytest.raises(cs.CurvescopeError) as caught:
        RAW[name](tmp_path)
    assert_one_sentence(caught.value)


class Narrow(nn.Module):
    """A module that fails, on some inputs, at a place of its own."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.w, self.error = nn.Linear(4, 5, dtype=torch.float64), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self.w(x)


FAILING: dict[str, Callable[[cs.Problem], Any]] = {
    "value": lambda p: p.loss_value(),
    "gradient": lambda p: p.gradient(),
    "product": lambda p: cs.Hessian(p) @ torch.ones(25, dtype=torch.float64),
    "plain product": lambda p: cs.Hessian(p, engine="autograd") @ torch.ones(25, dtype=torch.float64),
}


@pytest.mark.parametrize("name", FAILING)
def test_an_error_of_the_module_itself_is_said_to_be_its_own(name: str):
    p = cs.Problem(Narrow(), (REAL[..., :3], Y))
    with pytest.raises(RuntimeError, match=r"the forward of Narrow itself .* \(\d, 3, 3\): mat1") as caught:
        FAILING[name](p)
    assert isinstance(caught.value, cs.CurvescopeError)
    assert_one_sentence(caught.value)
    assert type(caught.value.__cause__) is RuntimeError


@pytest.mark.parametrize("error", [ValueError("mine"), NotImplementedError("mine")])
def test_other_errors_of_a_module_stay_as_they_are(error: Exception):
    p = cs.Problem(Narrow(error), (REAL, Y))
    with pytest.raises(type(error), match=r"^mine$"):
        p.loss_value()


def test_an_error_that_the_module_does_not_raise_by_itself_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, as_it_is: bool = False, **__: Any) -> torch.Tensor:
        if not as_it_is:
            raise RuntimeError("ours")
        return torch.zeros(2, 3, 5, dtype=torch.float64)

    p = cs.Problem(Narrow(), (REAL, Y))
    monkeypatch.setattr(cs.Model, "forward", fail)
    with pytest.raises(RuntimeError, match=r"^ours$") as caught:
        p.loss_value()
    assert not isinstance(caught.value, cs.CurvescopeError)
