"""Kernels are called without torch's detours, and other kinds of tensors keep theirs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvescope.kernels import activations, norms
from curvescope.kernels.attention import attention
from curvescope.kernels.autograd import Function

KERNELS = {
    "norm": lambda x: norms.layer_norm(x, None, None, 1e-5),
    "activation": activations.gelu,
    "gate": lambda x: activations.gated(x, x, "silu"),
    "attention": lambda x: attention(x, x, x),
}


class Count(TorchFunctionMode):
    """How many operations it was shown."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    """A tensor whose class is that of everything made from it."""


@pytest.mark.parametrize("kernel", KERNELS)
def test_modes_do_not_see_the_operations_of_a_kernel(kernel: str):
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    with Count() as mode:
        KERNELS[kernel](x)
        assert mode.seen == 0
        x.exp()
    assert mode.seen > 0  # behind a kernel they see again


@pytest.mark.parametrize("kernel", ["norm", "gate"])
def test_other_classes_of_tensors_are_left_to_themselves(kernel: str):
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    found = KERNELS[kernel](x.as_subclass(Own))
    assert type(found) is Own
    assert torch.equal(found.as_subclass(Tensor), KERNELS[kernel](x))


def test_a_function_takes_its_defaults():
    class Scaled(Function):
        @staticmethod
        def forward(x: Tensor, by: float = 3.0) -> Tensor:
            return x * by

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.by = inputs[1]

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            return dy * ctx.by, None

    x = torch.ones(2, requires_grad=True)
    (dx,) = torch.autograd.grad(Scaled.apply(x).sum(), x)
    assert dx.tolist() == [3.0, 3.0]
    assert inspect.signature(Scaled.forward) is inspect.signature(Scaled.forward)
