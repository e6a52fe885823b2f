"""Fully connected ReLU networks: the Hessian against autodiff, the precursor's bound and corrected ones."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian as autodiff_hessian

from curvescope.closed_form.bounds.relu_network import (
    a_priori_network_bounds,
    measured_network_bounds,
    relu_network_point,
)
from curvescope.closed_form.printed.bounds import precursor_as_printed
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.seeds import generator
from oracles import normal


def network(number, depth, size=1.0, width=4, classes=3):
    source = generator(81, number, depth)
    widths = [5, *[width] * (depth - 1), classes]
    weights = [size * normal(source, a, b) / a**0.5 for a, b in pairwise(widths)]
    return normal(source, 5), weights, torch.randint(0, classes, (), generator=source)


def outputs(x, *weights):
    for W in weights[:-1]:
        x = torch.relu(x @ W)
    return x @ weights[-1]


def norm(M):
    return float(torch.linalg.matrix_norm(M, ord=2))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_hessian_is_that_of_automatic_differentiation(depth):
    x, weights, label = network(0, depth)

    def loss(*W):
        return torch.nn.functional.cross_entropy(outputs(x, *W)[None], label[None])

    H, sizes = autodiff_hessian(loss, tuple(weights)), [W.numel() for W in weights]
    rows = [[H[i][j].reshape(sizes[i], sizes[j]) for j in range(depth)] for i in range(depth)]
    dense = torch.cat([torch.cat(row, 1) for row in rows])
    at = relu_network_point(x, weights, label)
    torch.testing.assert_close(at.hessian().matrix, dense, rtol=1e-10, atol=1e-12)
    J = torch.autograd.functional.jacobian(lambda *W: outputs(x, *W), tuple(weights))
    J = torch.cat([slope.flatten(1) for slope in J], 1)
    torch.testing.assert_close(at.hessian(functional=False).matrix, J.mT @ at.B @ J, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
def test_corrected_bounds_of_a_relu_network_hold(size):
    for number in range(12):
        depth = 1 + number % 4
        x, weights, label = network(number, depth, size)
        at = relu_network_point(x, weights, label)
        for functional in (True, False):
            truth = at.hessian(functional=functional)
            for found in (
                a_priori_network_bounds(x, weights, functional=functional),
                measured_network_bounds(at, functional=functional),
            ):
                assert norm(truth.matrix) <= found.whole
                for i, one in enumerate(found.names):
                    for j, two in enumerate(found.names):
                        assert norm(truth[one, two]) <= found.upper[i, j] * (1 + 1e-9) + 1e-15


def test_without_the_functional_part_the_bound_is_the_sum_over_layers():
    x, weights, _ = network(3, 3)
    a, b, c = (norm(W) ** 2 for W in weights)
    expected = float(x @ x) / 2 * (b * c + a * c + a * b)
    assert a_priori_network_bounds(x, weights, functional=False).whole == pytest.approx(expected, rel=1e-10)


def test_the_precursor_fails_where_weights_are_small():
    """One layer has the GGN B ⊗ x xᵀ whatever W is; the printed bound falls as ‖W‖². Two: H_f is left out."""
    violated, dead = {1: 0, 2: 0}, 0
    for number in range(40):
        x, weights, label = network(number, 1, 0.1)
        truth = norm(relu_network_point(x, weights, label).hessian(functional=False).matrix)
        violated[1] += truth > precursor_as_printed(x, weights)
        x, weights, label = network(number, 2, 0.1)
        truth = norm(relu_network_point(x, weights, label).hessian().matrix)
        violated[2] += truth > precursor_as_printed(x, weights)
        dead += truth == 0  # no hidden unit is active
    assert violated[1] >= 39
    assert violated[2] == 40 - dead >= 35
    x, weights, label = network(0, 3, 2.0)
    truth = norm(relu_network_point(x, weights, label).hessian(functional=False).matrix)
    assert truth < precursor_as_printed(x, weights) < precursor_as_printed(x, weights, norm="entries")


def test_the_printed_sum_at_norm_one():
    x, one = torch.tensor([2.0, 0.0]), torch.eye(2)
    np.testing.assert_allclose(precursor_as_printed(x, [one, one, one]), 2**0.5 * (3 * 4 + 3))


def test_wrong_calls_say_what_was_expected():
    x, weights, label = network(0, 2)
    with pytest.raises(ShapeError, match=r"expected x \(n_1,\)"):
        relu_network_point(x[1:], weights, label)
    with pytest.raises(ShapeError, match="weights"):
        a_priori_network_bounds(x, [])
    with pytest.raises(UsageError, match="'entries'"):
        precursor_as_printed(x, weights, norm="frobenius")
