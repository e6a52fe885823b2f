"""Operators to other libraries and back: the same matrix, and their algorithms run on ours."""

from __future__ import annotations

import pytest
import torch

import curvescope as cs
from oracles import Bench, bench, relative_error

pytestmark = pytest.mark.cross_library
PEERS = {
    "scipy": "scipy",
    "curvlinops": "curvlinops",
    "linear_operator": "linear_operator",
    "eigenthings": "hessian_eigenthings",
}


@pytest.fixture(scope="module")
def case() -> Bench:
    return bench("pre-layernorm-gelu-2layers")


def exported(peer: str, A: cs.LinearOperator):
    pytest.importorskip(PEERS[peer])
    return getattr(A, f"to_{peer}")()


def product(A, V):
    """A V by the other library's own product."""
    if hasattr(A, "matvec") and not hasattr(A, "matmat"):
        return torch.stack([A.matvec(v) for v in V.T], dim=1)
    return torch.as_tensor(A @ (V.numpy() if hasattr(A, "matmat") else V))


@pytest.mark.parametrize("peer", PEERS)
def test_an_operator_goes_out_and_comes_back(peer: str, case: Bench):
    H = cs.Hessian(case.problem)
    V = torch.randn(H.shape[1], 3, dtype=H.dtype, generator=torch.Generator().manual_seed(0))
    theirs = exported(peer, H)
    assert relative_error(product(theirs, V), H @ V) < 1e-12
    back = cs.as_operator(theirs, symmetric=True)
    assert back.symmetric
    assert relative_error(back @ V, H @ V) < 1e-12


@pytest.mark.parametrize("peer", ["scipy", "curvlinops", "linear_operator"])
def test_a_rectangular_operator_keeps_its_transpose(peer: str):
    A = cs.Matrix(torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    back = cs.as_operator(exported(peer, A))
    assert not back.symmetric
    torch.testing.assert_close(back.to_dense(), A.A)
    torch.testing.assert_close(back.T.to_dense(), A.A.T)


def test_hessian_eigenthings_takes_no_rectangular_operator():
    pytest.importorskip("hessian_eigenthings")
    with pytest.raises(cs.UsageError):
        cs.Matrix(torch.ones(5, 3)).to_eigenthings()


def test_curvlinops_estimates_the_trace_of_ours(case: Bench):
    curvlinops = pytest.importorskip("curvlinops")
    G = cs.GGN(case.problem)
    torch.manual_seed(0)
    estimate = float(curvlinops.hutchinson_trace(G.to_curvlinops(), 300))
    assert estimate == pytest.approx(float(torch.trace(G.to_dense())), rel=0.2)


def test_gpytorch_solves_with_ours(case: Bench):
    pytest.importorskip("linear_operator")
    G = cs.GGN(case.problem)
    n = G.shape[0]
    b = torch.randn(n, dtype=G.dtype, generator=torch.Generator().manual_seed(1))
    damped = (G + cs.Identity(n, dtype=G.dtype)).to_linear_operator()
    x = damped.solve(b)
    truth = torch.linalg.solve(G.to_dense() + torch.eye(n, dtype=G.dtype), b)
    assert relative_error(x, truth) < 1e-2  # its conjugate gradients stop at a tolerance of their own


def test_eigenthings_finds_the_largest_eigenvalue_of_ours(case: Bench):
    pytest.importorskip("hessian_eigenthings")
    from hessian_eigenthings.algorithms.lanczos import lanczos

    H = cs.Hessian(case.problem)
    found = float(max(lanczos(H.to_eigenthings(), k=1, max_iter=60, seed=0).eigenvalues, key=abs))
    values = torch.linalg.eigvalsh(H.to_dense())
    assert found == pytest.approx(float(values[values.abs().argmax()]), rel=1e-3)


def test_our_algorithms_run_on_operators_of_curvlinops(case: Bench):
    pytest.importorskip("curvlinops")
    A = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    theirs = cs.Matrix(A).to_curvlinops()
    assert cs.eigsh(cs.as_operator(2.0 * theirs, symmetric=True), k=1).values[0] == pytest.approx(16.0)


@pytest.fixture
def own_problem() -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A small network, a loss of torch's, inputs and targets."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    return net, torch.nn.MSELoss(), x, y


def curvlinops_hessian(net, loss, x, y):
    curvlinops = pytest.importorskip("curvlinops")
    return curvlinops.HessianLinearOperator(net, loss, list(net.parameters()), [(x, y)])


def eigenthings_hessian(net, loss, x, y):
    peer = pytest.importorskip("hessian_eigenthings")
    return peer.HessianOperator(net, [(x, y)], peer.supervised_loss(loss))


@pytest.mark.parametrize("make", [curvlinops_hessian, eigenthings_hessian])
def test_a_hessian_of_another_library_is_the_same_matrix_as_ours(make, own_problem):
    net, loss, x, y = own_problem
    H = cs.Hessian(cs.Problem(net, cs.Batches.from_tensors(x, y), loss=loss))
    theirs = cs.as_operator(make(net, loss, x, y))
    assert theirs.symmetric
    assert relative_error(theirs.to_dense(), H.to_dense()) < 1e-12


def test_an_operator_of_gpytorch_keeps_its_entries():
    operators = pytest.importorskip("linear_operator.operators")
    theirs = operators.ToeplitzLinearOperator(torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(cs.as_operator(theirs).to_dense(), theirs.to_dense())


def test_a_table_of_results_becomes_a_dataset_of_xarray():
    pytest.importorskip("xarray")
    A = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    frame = cs.eigsh(cs.Matrix(A), k=2).to_frame()
    dataset = frame.to_xarray()
    assert set(dataset.data_vars) == set(frame.columns)
    for name in frame.columns:
        assert list(dataset[name].values) == list(frame[name])
