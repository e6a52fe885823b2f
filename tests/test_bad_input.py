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
from curvescope.studies.setting import TokenModel, load_token_model

SMALL: dict[str, Any] = {"n_layers": 1, "d_model": 4, "n_heads": 2, "d_ff": 3, "n_ctx": 3, "vocab_size": 5}
X, Y = torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[1, 2, 3], [4, 0, 1]])
REAL = torch.zeros(2, 3, 4, dtype=torch.float64)


def model(**settings: Any) -> cs.Model:
    return cs.load(cs.TransformerConfig(**{**SMALL, **settings}), dtype="float64")


def problem(x: Any = X, y: Any = Y, *rest: Any, loss: Any = "cross_entropy", **settings: Any) -> cs.Problem:
    return cs.Problem(model(**settings), (x, y, *rest), loss)


def hessian(**settings: Any) -> cs.Hessian:
    return cs.Hessian(problem(**settings))


def regression(x: torch.Tensor = REAL, y: torch.Tensor = REAL) -> cs.Problem:
    return problem(x, y, loss="mse", inputs="continuous", outputs="regression")


def config(**settings: Any) -> cs.TransformerConfig:
    return cs.TransformerConfig(**{**SMALL, **settings})


def written(folder: Path, name: str, content: str | bytes) -> Path:
    """A file, in a folder that has all a model needs otherwise."""
    cs.save(cs.load(config()), folder)
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


class Empty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Whole(nn.Module):
    """A module with an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)


class NoRow:
    """A DataLoader whose items are no pairs."""

    def __iter__(self):
        yield {"x": X}


Make = Callable[[Path], Any]

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
        r"needs label_smoothing=0",
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
    "loss class": (lambda _: problem(loss=cs.CrossEntropy), r"expected a loss, got <class"),
    "torch loss": (lambda _: problem(loss=nn.CrossEntropyLoss()), r"expected a loss, got CrossEntropyLoss"),
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
        lambda _: problem(X, Y + 1).value(),
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
        lambda _: problem(X, Y[:, 0]).value(),
        r"expected integer targets \(2, 3\) .* got int64 \(2,\)",
    ),
    "integer targets": (
        lambda _: regression(REAL, REAL.long()).value(),
        r"expected real targets .* \(2, 3, 4\), got int64",
    ),
    "targets of other shape": (
        lambda _: regression(REAL, REAL[..., :1]).value(),
        r"expected real targets .* got float64 \(2, 3, 1\)",
    ),
    "weights per entry": (
        lambda _: problem(
            REAL, REAL, REAL + 1, loss="mse", inputs="continuous", outputs="regression"
        ).value(),
        r"expected one weight per sequence, \(2,\), got \(2, 3, 4\).*mse_mean",
    ),
    "batch size": (
        lambda _: cs.Batches.from_tensors(X, Y, batch_size=0),
        r"expected a batch_size of at least 1, got 0",
    ),
    "too long": (
        lambda _: problem(X.repeat(1, 2), Y.repeat(1, 2)).value(),
        r"expected at most n_ctx=3 positions, got 6",
    ),
    "real tokens": (
        lambda _: problem(X.double(), Y).value(),
        r"expected integer tokens \(B, T\), got torch\.float64",
    ),
    "tokens as inputs": (
        lambda _: regression(X, REAL).value(),
        r"expected real inputs \(B, T, 4\), got torch\.int64",
    ),
    "ids of another vocabulary": (
        lambda _: problem(X + 3, Y),
        r"expected tokens from 0 to 4, the vocabulary of 'Transformer', got 3 to 7 \(are they from another",
    ),
    "a task with more tokens": (
        lambda _: cs.Problem(model(n_ctx=16), cs.task("addition", num_sequences=4)),
        r"got 0 to 1\d, which is what the task 'addition' has",
    ),
    "ids that no embedding has": (
        lambda _: cs.Problem(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 5)), (X, Y)).value(),
        r"no entry for some of its inputs, which go from 0 to 4",
    ),
    "real numbers for an embedding": (
        lambda _: cs.Problem(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5)), (X.float(), Y)).value(),
        r"needs integer inputs, and got torch\.float32",
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
        lambda _: problem(X[0], Y[0]).value(),
        r"expected integer tokens \(B, T\), got torch\.int64 \(3,\)",
    ),
}

MODELS: dict[str, tuple[Make, str]] = {
    "weights that are no numbers": (
        lambda tmp: load_token_model(TokenModel(model=str(cs.save(_broken(), tmp)))),
        r"expected finite weights, .* in E \(20 entries\), L0\.W_Q \(1 entry\)",
    ),
    "unknown name": (
        lambda _: cs.load("tiny-gbt"),
        r"expected a bundled model.* got 'tiny-gbt'.*did you mean 'tiny-gpt'",
    ),
    "number": (lambda _: cs.load(3), r"expected a name, a path, a configuration or an nn\.Module, got a int"),
    "empty folder": (
        lambda tmp: cs.load(tmp),
        r"expected config\.toml and model\.safetensors in the folder .* missing",
    ),
    "other file": (
        lambda tmp: cs.load(written(tmp, "x.txt", "")),
        r"expected a folder or a \.toml file, got the file",
    ),
    "corrupt weights": (
        lambda tmp: cs.load(written(tmp, "model.safetensors", b"\x00" * 40).parent),
        r"expected weights in safetensors, could not read",
    ),
    "no toml": (
        lambda tmp: cs.load(written(tmp, "config.toml", "= 3")),
        r"expected a model configuration in TOML, could not read",
    ),
    "bytes as toml": (
        lambda tmp: cs.load(written(tmp, "a.toml", b"\xff\xfe")),
        r"expected a model configuration in TOML, could not read",
    ),
    "unknown key": (
        lambda tmp: cs.load(written(tmp, "a.toml", "n_layer = 3")),
        r"unknown setting 'n_layer' \(did you mean 'n_layers'",
    ),
    "wrong type": (
        lambda tmp: cs.load(written(tmp, "a.toml", 'n_layers = "3"')),
        r"n_layers: expected int, got '3'",
    ),
    "unknown kind": (
        lambda tmp: cs.load(written(tmp, "a.toml", 'kind = "cnn"')),
        r"kind: expected 'transformer' or 'mlp', got 'cnn'",
    ),
    "norm": (lambda _: config(norm="middle"), r"norm: expected one of none, pre, post, got 'middle'"),
    "activation": (lambda _: config(activation="tanh"), r"activation: expected one of relu, .*, got 'tanh'"),
    "width": (lambda _: config(n_heads=3), r"d_model=4 is no multiple of n_heads"),
    "groups": (lambda _: config(n_kv_heads=3), r"n_heads=2 is no multiple of n_kv_heads"),
    "odd rope": (lambda _: config(positions="rope", d_head=3), r"rope needs an even head size, got 3"),
    "merged rope": (
        lambda _: config(positions="rope", merged_qk=True),
        r"rope rotates queries and keys; merged_qk has neither",
    ),
    "tied images": (lambda _: config(tied=True, outputs="class", n_out=2), r"tied needs tokens in and out"),
    "no classes": (lambda _: config(outputs="class"), r"outputs='class' needs n_out"),
    "too many patches": (
        lambda _: config(inputs="patches", outputs="class", n_out=2),
        r"an image has 16 patches, n_ctx is 3",
    ),
    "no width": (lambda _: config(d_model=0), r"d_model: expected a positive number, got 0"),
    "negative depth": (lambda _: config(n_layers=-1), r"expected n_layers and d_ff of at least 0, got -1"),
    "flag as number": (lambda _: config(causal=1), r"causal: expected bool, got 1"),
    "mlp depth": (
        lambda _: cs.MLPConfig(depth=0),
        r"depth.* expected a? ?positive|expected positive sizes and depth, got",
    ),
    "unknown dtype": (
        lambda _: cs.load(config(), dtype="float16"),
        r"expected float32 or float64, got 'float16'",
    ),
    "half": (
        lambda _: cs.load(config(), dtype=torch.bfloat16),
        r"expected float32 or float64, got torch\.bfloat16",
    ),
    "unknown device": (
        lambda _: cs.load(config(), device="gpu"),
        r"expected a device such as cpu or cuda, got 'gpu'",
    ),
    "revision of a module": (
        lambda _: cs.load(nn.Linear(2, 2), revision="final"),
        r"expected a bundled model with revision='final', got a Linear",
    ),
    "revision of a folder": (
        lambda tmp: cs.load(tmp, revision="final"),
        r"expected a bundled model with revision='final', got \w*Path",
    ),
    "revision of a list": (
        lambda _: cs.load([1], revision="final"),
        r"expected a bundled model with revision='final', got a list",
    ),
    "unknown revision": (
        lambda _: cs.load("tiny-gpt", revision="best"),
        r"expected a revision of tiny-gpt, got 'best' .*initial",
    ),
    "no parameters": (lambda _: cs.load(Empty()), r"expected a module with parameters, Empty has none"),
    "integer parameters": (lambda _: cs.load(Whole()), r"expected real parameters, 'w' is torch\.int64"),
    "two dtypes": (
        lambda _: cs.load(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())),
        r"expected parameters of one dtype, got several",
    ),
    "saved module": (
        lambda tmp: cs.save(cs.load(nn.Linear(1, 1)), tmp),
        r"expected a zoo model, got a Linear",
    ),
    "tuple of outputs": (
        lambda _: cs.Problem(nn.LSTM(4, 4), (REAL, REAL), "mse").value(),
        r"expected outputs as a tensor or an object with \.logits, got tuple",
    ),
}


def _broken() -> cs.Model:
    found = cs.load(config())
    with torch.no_grad():
        found.parameters["E"].fill_(torch.nan)
        found.parameters["L0.W_Q"][0, 0] = -torch.inf
    return found


def _infinite(later: bool = False) -> Any:
    found = model()
    before = cs.Hessian(cs.Problem(found, (X, Y)))
    with torch.no_grad():
        found.parameters["U"][0, 0] = torch.inf
    H = before if later else cs.Hessian(cs.Problem(found, (X, Y)))
    return H @ torch.ones(H.shape[1]).double()


def hessian_of(p: cs.Problem) -> Any:
    H = cs.Hessian(p)
    return H @ torch.ones(H.shape[1]).double()


def assert_one_sentence(error: cs.CurvescopeError) -> None:
    """One line, no full stop inside, no trace of Python's own errors, and the hint apart."""
    text = str(error)
    assert "\n" not in text
    assert not error.message.endswith(".")
    assert len(error.message) < 400
    assert text.startswith(error.message)


CASES = {**VECTORS, **OPERATORS, **DATA, **MODELS}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence(name: str, tmp_path: Path):
    call, message = CASES[name]
    with pytest.raises(cs.CurvescopeError, match=message) as caught:
        call(tmp_path)
    assert_one_sentence(caught.value)


def test_there_are_enough_cases():
    assert len(CASES) >= 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there():
    with pytest.raises(
        cs.UsageError, match=r"expected a CUDA device, but torch sees none \(use device='cpu'\)"
    ):
        cs.load(config(), device="cuda")


# Less likely ones.
RAW: dict[str, Make] = {
    "token out of vocabulary": lambda _: problem(X + 3, Y).value(),
    "inputs of another width": lambda _: regression(REAL[..., :3], REAL).value(),
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
    "value": lambda p: p.value(),
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
        p.value()


def test_an_error_that_the_module_does_not_raise_by_itself_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, as_it_is: bool = False, **__: Any) -> torch.Tensor:
        if not as_it_is:
            raise RuntimeError("ours")
        return torch.zeros(2, 3, 5, dtype=torch.float64)

    p = cs.Problem(Narrow(), (REAL, Y))
    monkeypatch.setattr(cs.Model, "forward", fail)
    with pytest.raises(RuntimeError, match=r"^ours$") as caught:
        p.value()
    assert not isinstance(caught.value, cs.CurvescopeError)
