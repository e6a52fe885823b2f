"""A product depends on the terms, not on how they are cut, ordered or padded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import curvescope as cs
import oracles
from oracles import Bench, as_batches, as_package_loss, cut, make_data, relative_error
from selection import one_in, pairs

EXACT = 1e-12
OPERATORS = [cs.Hessian, cs.GGN, cs.FunctionalHessian, cs.EmpiricalFisher]
ARGUMENTS = ("bench", "operator")
WEIGHTED = ["pre-layernorm-gelu-2layers", "tokens-to-class-rope", "stream-linear-no-residual"]
CAUSAL = ["pre-layernorm-gelu-2layers", "pre-rmsnorm-swiglu-rope-grouped", "no-norm-linear-gelu_tanh-tied"]


def product(bench: Bench, operator: type, data: oracles.Data) -> Tensor:
    problem = cs.Problem(bench.model, as_batches(data), as_package_loss(bench.case.kind))
    return operator(problem) @ bench.probe(2)


@pytest.mark.parametrize(ARGUMENTS, pairs(oracles.NAMES, OPERATORS, shift=2, every=5), indirect=["bench"])
def test_cuts_do_not_matter(bench: Bench, operator: type):
    data = make_data(bench.case)
    whole = product(bench, operator, cut(data, [5]))
    for sizes in ([4, 1], [1, 1, 1, 1, 1], [2, 3]):
        assert relative_error(product(bench, operator, cut(data, sizes)), whole) < EXACT


@pytest.mark.parametrize(ARGUMENTS, pairs(oracles.NAMES, OPERATORS, shift=3, every=5), indirect=["bench"])
def test_order_does_not_matter(bench: Bench, operator: type):
    x, y, w = make_data(bench.case)
    order = torch.tensor([3, 0, 4, 2, 1])
    mixed = (x[order], y[order], None if w is None else w[order])
    found = product(bench, operator, cut(mixed, [3, 2]))
    assert relative_error(found, product(bench, operator, cut((x, y, w), [5]))) < EXACT


def test_monte_carlo_draws_do_not_depend_on_the_cut():
    bench = oracles.bench("post-layernorm-relu-ignored")
    found = []
    for sizes in ([5], [4, 1], [1, 2, 2]):
        F = cs.MonteCarloFisher(
            cs.Problem(bench.model, as_batches(cut(make_data(bench.case), sizes))), num_samples=2, seed=9
        )
        found.append((torch.cat(F.drawn, dim=1), F @ bench.probe()))
    for drawn, vector in found[1:]:
        assert torch.equal(drawn, found[0][0])
        assert relative_error(vector, found[0][1]) < EXACT


@pytest.mark.parametrize(("operator", "name"), pairs(OPERATORS, CAUSAL, shift=1, every=2))
def test_padded_positions_do_not_matter(name: str, operator: type):
    bench = oracles.bench(name)
    x, y, w = make_data(bench.case)
    padded_y = torch.nn.functional.pad(y, (0, 1), value=-100)
    padded_w = None if w is None else torch.nn.functional.pad(w, (0, 1), value=3.0)
    truth = product(bench, operator, [(x, y, w)])
    for filler in (0, 4):
        padded_x = torch.nn.functional.pad(x, (0, 1), value=filler)
        assert relative_error(product(bench, operator, [(padded_x, padded_y, padded_w)]), truth) < EXACT
    ragged = [(x[:2], y[:2], w if w is None else w[:2])]
    ragged.append((padded_x[2:], padded_y[2:], None if padded_w is None else padded_w[2:]))
    assert relative_error(product(bench, operator, ragged), truth) < EXACT


@pytest.mark.parametrize("operator", one_in(OPERATORS, 4, shift=0))
def test_ignored_sequences_do_not_matter(operator: type):
    bench = oracles.bench("pre-layernorm-gelu-2layers")
    x, y, _ = make_data(bench.case)
    empty = (torch.zeros(3, 4, dtype=torch.long), torch.full((3, 4), -100), None)
    truth = product(bench, operator, [(x, y, None)])
    assert relative_error(product(bench, operator, [empty, (x, y, None), empty]), truth) < EXACT
    together = (torch.cat([empty[0], x]), torch.cat([empty[1], y]), None)
    assert relative_error(product(bench, operator, [together]), truth) < EXACT


@pytest.mark.parametrize(("operator", "name"), pairs(OPERATORS, WEIGHTED, every=2))
def test_weights_count_sequences(name: str, operator: type):
    """Weight 0 removes a sequence, weight 2 counts it twice."""
    bench = oracles.bench(name)
    x, y, _ = make_data(bench.case)
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    rows = [0, 2, 2, 3]
    truth = product(bench, operator, [(x[rows], y[rows], None)])
    assert relative_error(product(bench, operator, [(x, y, weights)]), truth) < EXACT
    assert relative_error(product(bench, operator, [(x, y, weights.long())]), truth) < EXACT
    assert relative_error(product(bench, operator, [(x, y, 7.5 * weights)]), truth) < EXACT


@pytest.mark.parametrize("operator", one_in(OPERATORS, 4, shift=1))
def test_a_weight_of_zero_is_an_ignored_target(operator: type):
    bench = oracles.bench("pre-layernorm-gelu-2layers")
    x, y, _ = make_data(bench.case)
    weights = torch.ones(5, 4, dtype=torch.float64)
    weights[1, 2] = weights[4, 0] = 0
    holes = torch.where(weights == 0, -100, y)
    truth = product(bench, operator, [(x, holes, None)])
    assert relative_error(product(bench, operator, [(x, y, weights)]), truth) < EXACT


@pytest.mark.parametrize("bench", one_in(oracles.NAMES, 4, shift=1), indirect=True)
def test_value_and_gradient_do_not_depend_on_the_cut(bench: Bench):
    data = make_data(bench.case)
    values, gradients = [], []
    for sizes in ([5], [1, 4], [2, 2, 1]):
        problem = cs.Problem(bench.model, as_batches(cut(data, sizes)), as_package_loss(bench.case.kind))
        values.append(problem.loss_value())
        gradients.append(problem.gradient())
    assert values == pytest.approx([values[0]] * 3, rel=1e-13)
    assert max(relative_error(g, gradients[0]) for g in gradients) < EXACT


def test_cuts_do_not_matter_with_weights_in_single_precision(tiny: Bench):
    x, y, _ = make_data(tiny.case)
    weights = torch.rand(5, 4, generator=torch.Generator().manual_seed(2))
    assert weights.dtype == torch.float32
    found = [product(tiny, cs.Hessian, cut((x, y, weights), sizes)) for sizes in ([5], [2, 3], [1] * 5)]
    assert max(relative_error(vector, found[0]) for vector in found) < EXACT
    truth = product(tiny, cs.Hessian, [(x, y, weights.double())])
    assert relative_error(found[0], truth) < EXACT


def test_a_loader_is_read_once_and_kept(tiny: Bench):
    x, y, _ = make_data(tiny.case)
    dataset = torch.utils.data.TensorDataset(x, y)
    shuffled = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True)
    H = cs.Hessian(cs.Problem(tiny.model, shuffled))
    v = tiny.probe()
    assert torch.equal(H @ v, H @ v)
    assert (
        relative_error(H @ v, product(tiny, cs.Hessian, [(x, y, None)])[:, 0] * 0 + tiny.found("hessian") @ v)
        < EXACT
    )


@pytest.mark.filterwarnings("ignore:targets equal the inputs")  # of one sequence one target counts
def test_the_mean_over_ragged_batches_is_not_the_mean_of_means():
    """What peers compute: with uneven batches it is another matrix, so the tests above can fail."""
    bench = oracles.bench("pre-layernorm-gelu-2layers")
    x, y, _ = make_data(bench.case)
    y = y.clone()
    y[0, 1:] = -100
    parts = [
        product(bench, cs.Hessian, [(x[:1], y[:1], None)]),
        product(bench, cs.Hessian, [(x[1:], y[1:], None)]),
    ]
    truth = product(bench, cs.Hessian, [(x, y, None)])
    assert relative_error((parts[0] + parts[1]) / 2, truth) > 0.05
    assert relative_error((parts[0] * 1 + parts[1] * 16) / 17, truth) < EXACT
