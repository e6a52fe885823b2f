"""What torch gets wrong about second derivatives, and that it does not reach a product."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvescope as cs
import oracles
from oracles import relative_error


@pytest.mark.parametrize("name", ["plain-normed-mlp", "plain-attention-tied"])
def test_torch_func_hessian_is_wrong_through_layer_norm_and_ours_is_not(name: str):
    bench = oracles.bench(name)
    f, theta = bench.dense.value, bench.dense.theta
    truth = oracles.double_backward_hessian(f, theta)
    assert relative_error(bench.dense.hessian, truth) < 1e-11  # forward over reverse
    assert relative_error(bench.found("hessian"), truth[bench.order][:, bench.order]) < 1e-11
    suspect = torch.func.hessian(f)(theta)
    if relative_error(suspect, truth) < 1e-8:
        pytest.skip(f"torch {torch.__version__} computes torch.func.hessian through F.layer_norm correctly")
    assert relative_error(suspect, truth) > 0.02
    assert relative_error(suspect, suspect.T) > 0.02  # a Hessian that is not symmetric


@pytest.mark.parametrize(
    "name", ["pre-layernorm-gelu-2layers", "post-layernorm-relu-ignored", "pre-rmsnorm-swiglu-rope-grouped"]
)
def test_the_norm_that_the_zoo_writes_out_is_right_even_under_torch_func_hessian(name: str):
    bench = oracles.bench(name)
    found = torch.func.hessian(bench.dense.value)(bench.dense.theta)
    assert relative_error(found, bench.dense.hessian) < 1e-11
    assert relative_error(found[bench.order][:, bench.order], bench.found("hessian")) < 1e-11


def test_batched_directions_are_right_through_layer_norm():
    """Several columns go through one batched backward pass; each must be what it is alone."""
    bench = oracles.bench("plain-attention-tied")
    for operator in (cs.Hessian, cs.FunctionalHessian, cs.GGN):
        A, V = operator(bench.problem), bench.probe(6)
        alone = torch.stack([A @ v for v in V.unbind(1)], dim=1)
        assert relative_error(A @ V, alone) < 1e-13


@pytest.mark.parametrize("engine", ["autograd", "fast"])
def test_fused_attention_is_replaced_by_one_that_has_second_derivatives(engine):
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    module = oracles.drawn(oracles.FusedAttention).double()
    dense = oracles.Dense(module, [(x, x, None)], "mse")
    with sdpa_kernel(SDPBackend.MATH):
        truth = oracles.double_backward_hessian(dense.value, dense.theta)
    H = cs.Hessian(cs.Problem(module, (x, x), "mse"), engine=engine)
    order = torch.arange(len(dense.theta))
    assert relative_error(H.to_dense(), truth[order][:, order]) < 1e-11


@pytest.mark.parametrize(
    "operator", [cs.Hessian, cs.FunctionalHessian, cs.GGN, cs.EmpiricalFisher, cs.Jacobian]
)
def test_an_operation_that_is_differentiable_once_is_refused(operator: type):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    problem = cs.Problem(oracles.shaken(oracles.drawn(oracles.SquaredOnce)), (x, x[:, :2]), "mse")
    with pytest.raises(cs.CurvescopeError, match="second derivative"):
        operator(problem) @ torch.ones(8, dtype=torch.float64)
