"""Our products against those of hessian-eigenthings and curvlinops, and where theirs are wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
import oracles
from oracles import Bench, cut, make_data, relative_error

pytestmark = pytest.mark.cross_library

AGREE = 1e-8
DENSE = ["pre-layernorm-gelu-2layers", "no-norm-linear-gelu_tanh-tied", "plain-normed-mlp", "wide-heads"]


class Flat(nn.Module):
    """A module whose outputs are (terms, classes), as torch's own losses want them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).flatten(0, -2)


def criterion(bench: Bench) -> nn.Module:
    return nn.CrossEntropyLoss() if bench.case.kind == "cross_entropy" else nn.MSELoss()


def flat_targets(bench: Bench, y: Tensor) -> Tensor:
    return y.flatten() if bench.case.kind == "cross_entropy" else y.flatten(0, -2)


def theirs(bench: Bench, multiply, v: Tensor) -> Tensor:
    """A product, whose vectors are in the order of ours: torch's."""
    return multiply(v).detach()


def eigenthings_hessian(bench: Bench, data: oracles.Data):
    peer = pytest.importorskip("hessian_eigenthings")
    pairs = [(x, flat_targets(bench, y)) for x, y, _ in data]
    return peer.HessianOperator(Flat(bench.module), pairs, peer.supervised_loss(criterion(bench))).matvec


def curvlinops_operator(bench: Bench, data: oracles.Data, name: str):
    peer = pytest.importorskip("curvlinops")
    pairs = [(x, flat_targets(bench, y)) for x, y, _ in data]
    module = Flat(bench.module)
    operator = getattr(peer, name)(module, criterion(bench), list(module.parameters()), pairs)
    return lambda v: operator @ v


def curvlinops_hessian(bench: Bench, data: oracles.Data):
    return curvlinops_operator(bench, data, "HessianLinearOperator")


def curvlinops_ggn(bench: Bench, data: oracles.Data):
    return curvlinops_operator(bench, data, "GGNLinearOperator")


def eigenthings_ggn(bench: Bench, data: oracles.Data):
    peer = pytest.importorskip("hessian_eigenthings")
    pairs = [(x, flat_targets(bench, y)) for x, y, _ in data]
    loss = criterion(bench)
    return peer.GGNOperator(
        Flat(bench.module), pairs, lambda model, batch: model(batch[0]), lambda z, batch: loss(z, batch[1])
    ).matvec


PEERS = {
    "eigenthings-hessian": (eigenthings_hessian, cs.Hessian),
    "curvlinops-hessian": (curvlinops_hessian, cs.Hessian),
    "eigenthings-ggn": (eigenthings_ggn, cs.GGN),
    "curvlinops-ggn": (curvlinops_ggn, cs.GGN),
}


def ours(bench: Bench, operator: type, data: oracles.Data, v: Tensor) -> Tensor:
    batches = cs.Batches([cs.Batch(x, y) for x, y, _ in data])
    return operator(cs.Problem(bench.model, batches, bench.case.kind)) @ v


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("peer", PEERS)
def test_products_agree_where_every_batch_is_dense(peer: str, name: str):
    if (peer, name) == ("curvlinops-hessian", "plain-normed-mlp"):
        pytest.skip("has its own test: the peer is wrong through F.layer_norm")
    bench = oracles.bench(name)
    make, operator = PEERS[peer]
    x, y, _ = make_data(bench.case)
    data, v = cut((x[:4], y[:4], None), [2, 2]), bench.probe()
    assert relative_error(theirs(bench, make(bench, data), v), ours(bench, operator, data, v)) < AGREE


def ragged() -> tuple[Bench, oracles.Data, oracles.Data]:
    """One batch, and the same sequences in two, of which most targets of the first are ignored."""
    bench = oracles.bench("pre-layernorm-gelu-2layers")
    x, y, _ = make_data(bench.case)
    y = y.clone()
    y[:2, 1:] = -100
    return bench, cut((x, y, None), [5]), cut((x, y, None), [2, 3])


@pytest.mark.parametrize("peer", PEERS)
def test_the_same_ragged_data_in_two_batches_is_another_matrix_for_the_peers(peer: str):
    bench, whole, parts = ragged()
    make, operator = PEERS[peer]
    v = bench.probe()
    one, two = (ours(bench, operator, data, v) for data in (whole, parts))
    assert relative_error(two, one) < 1e-12
    assert relative_error(theirs(bench, make(bench, whole), v), one) < AGREE
    assert relative_error(theirs(bench, make(bench, parts), v), one) > 0.05


def test_curvlinops_hessian_is_wrong_through_layer_norm():
    """It differentiates forward over a vmapped reverse pass, as torch.func.hessian does."""
    bench = oracles.bench("plain-normed-mlp")
    truth = oracles.double_backward_hessian(bench.dense.value, bench.dense.theta)
    data, v = cut(make_data(bench.case), [5]), bench.probe()
    expected = truth[bench.order][:, bench.order] @ v
    assert relative_error(ours(bench, cs.Hessian, data, v), expected) < 1e-11
    assert relative_error(theirs(bench, eigenthings_hessian(bench, data), v), expected) < 1e-11
    error = relative_error(theirs(bench, curvlinops_hessian(bench, data), v), expected)
    if error < AGREE:
        pytest.skip("this torch or this curvlinops is right through F.layer_norm")
    assert error > 0.02


@pytest.mark.parametrize("make", [eigenthings_hessian, eigenthings_ggn])
def test_batches_of_uneven_length_are_weighed_alike_by_eigenthings(make):
    bench = oracles.bench("pre-layernorm-gelu-2layers")
    operator = cs.Hessian if make is eigenthings_hessian else cs.GGN
    data, v = cut(make_data(bench.case), [4, 1]), bench.probe()
    truth = ours(bench, operator, cut(make_data(bench.case), [5]), v)
    assert relative_error(ours(bench, operator, data, v), truth) < 1e-12
    assert relative_error(theirs(bench, make(bench, data), v), truth) > 0.05


def test_dropout_makes_another_product_each_time_for_eigenthings():
    peer = pytest.importorskip("hessian_eigenthings")
    layers = [nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)]
    module = oracles.shaken(nn.Sequential(*layers)).train()
    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0, 1, 1, 0])
    v = torch.ones(50, dtype=torch.float64)
    theirs_twice = peer.HessianOperator(module, [(x, y)], peer.supervised_loss(nn.CrossEntropyLoss()))
    assert relative_error(theirs_twice.matvec(v), theirs_twice.matvec(v)) > 1e-3
    with pytest.warns(UserWarning, match="dropout"):
        H = cs.Hessian(cs.Problem(module, (x, y)))
    assert torch.equal(H @ v, H @ v)
