"""A small model and data for calls that are wrong, and what an error has to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import curvescope as cs

Make = Callable[[Path], Any]
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


def assert_one_sentence(error: cs.CurvescopeError) -> None:
    """One line, no full stop inside, no trace of Python's own errors, and the hint apart."""
    text = str(error)
    assert "\n" not in text
    assert not error.message.endswith(".")
    assert len(error.message) < 400
    assert text.startswith(error.message)
