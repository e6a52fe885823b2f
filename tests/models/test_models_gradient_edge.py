"""A gradient edge stands for its node after the tensor is gone, in every version of PyTorch."""

from __future__ import annotations

import gc

import pytest
import torch

from curvescope.models.running.eager import gradient_edge


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return 2 * x * g


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_the_node_of_a_custom_function_outlives_its_output(shape):
    x = torch.full(shape, 3.0, requires_grad=True)
    edge = gradient_edge(Square.apply(x))
    gc.collect()
    (found,) = torch.autograd.grad([edge], [x], [torch.ones(shape)])
    torch.testing.assert_close(found, torch.full(shape, 6.0))
