"""The walk over an autograd graph and what it finds."""

from __future__ import annotations

from functools import wraps

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from curvescope.core.tensors import graph_nodes, once_differentiable_node


def decorated(function):
    @wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def cube(*marks):
    """x³ as a function whose backward has the given decorators."""

    def backward(ctx, g: Tensor) -> Tensor:
        return 3 * g * ctx.saved_tensors[0] ** 2

    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    for mark in marks:
        backward = mark(backward)
    return type(
        "Cube",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    ).apply


def test_every_node_comes_once():
    x = torch.ones(3, requires_grad=True)
    y = x * x
    z = (y + y.exp()).sum()
    names = [type(node).__name__ for node in graph_nodes(z)]
    assert len(names) == len(set(graph_nodes(z))) == 5
    assert sorted(names) == sorted(
        ["SumBackward0", "AddBackward0", "MulBackward0", "ExpBackward0", "AccumulateGrad"]
    )
    assert list(graph_nodes(torch.ones(2))) == list(graph_nodes(x)) == []


@pytest.mark.parametrize(
    ("marks", "found"),
    [
        ((), False),
        ((decorated,), False),
        ((once_differentiable,), True),
        ((once_differentiable, decorated), True),
        ((decorated, once_differentiable), True),
    ],
)
def test_functions_that_are_differentiable_once_are_found(marks, found):
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    node = once_differentiable_node(torch.sin(cube(*marks)(torch.exp(x))).sum())
    assert (node is not None and type(node).__name__ == "CubeBackward") if found else node is None
