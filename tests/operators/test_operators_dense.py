"""Every operator of every case against a dense matrix found another way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvescope as cs
import oracles
from oracles import Bench, relative_error
from selection import a_half, a_third, one_in, pairs, some

TIGHT = 1e-10
CURVATURES = ["hessian", "ggn", "functional", "fisher"]


def each_with_one(shift: int) -> pytest.MarkDecorator:
    """One in six of the cases, each with one of the curvatures."""
    return pytest.mark.parametrize(
        ("bench", "name"), pairs(oracles.NAMES, CURVATURES, shift=shift, every=6), indirect=["bench"]
    )


def test_the_cases_vary_what_matters():
    configs = [b.cfg for b in (case.make() for case in oracles.CASES) if isinstance(b, cs.Transformer)]
    seen = {
        key: {getattr(cfg, key) for cfg in configs}
        for key in ("norm", "norm_kind", "norm_affine", "attention")
    }
    assert len(oracles.CASES) >= 12
    assert [len(values) for values in seen.values()] == [3, 2, 2, 2]
    for key, count in {"activation": 6, "positions": 3, "score_bias": 3, "inputs": 3, "outputs": 3}.items():
        assert len({getattr(cfg, key) for cfg in configs}) == count, key
    for key in ("merged_qk", "tied", "causal", "residual"):
        assert {getattr(cfg, key) for cfg in configs} == {True, False}, key
    assert {case.kind for case in oracles.CASES} == set(oracles.TERMS)


@pytest.mark.parametrize("bench", a_half(oracles.NAMES, shift=0), indirect=True)
def test_value_and_gradient(bench: Bench):
    value = bench.dense.value(bench.dense.theta)
    assert bench.problem.loss_value() == pytest.approx(float(value), rel=1e-12)
    assert bench.problem.num_terms == pytest.approx(bench.dense.total, rel=1e-12)
    assert relative_error(bench.problem.gradient(), bench.dense.gradient()[bench.order]) < 1e-11


@pytest.mark.parametrize(("bench", "name"), pairs(oracles.NAMES, ["hessian", "ggn"]), indirect=["bench"])
def test_operator_equals_its_dense_matrix(bench: Bench, name: str):
    assert len(bench.order) < 500
    assert relative_error(bench.found(name), bench.truth(name)) < TIGHT


@pytest.mark.parametrize("bench", one_in(oracles.NAMES, 6, shift=1), indirect=True)
def test_the_functional_part_equals_its_dense_matrix(bench: Bench):
    assert relative_error(bench.found("functional"), bench.truth("functional")) < TIGHT


@pytest.mark.parametrize("bench", a_third(oracles.NAMES, shift=2), indirect=True)
def test_the_fisher_equals_its_dense_matrix(bench: Bench):
    assert relative_error(bench.found("fisher"), bench.truth("fisher")) < TIGHT


@pytest.mark.parametrize(
    "bench", some(sorted(oracles.NAMES, key="plain-normed-mlp".__ne__), 1), indirect=True
)
def test_the_functional_oracle_is_the_sum_over_single_outputs(bench: Bench):
    slopes = bench.dense.slopes
    summed = sum(slope * bench.dense.output_hessian(i) for i, slope in enumerate(slopes))
    assert relative_error(summed, bench.dense.functional) < 1e-12


@pytest.mark.parametrize("bench", one_in(oracles.NAMES, 6, shift=1), indirect=True)
def test_hessian_is_ggn_plus_functional(bench: Bench):
    parts = bench.found("ggn") + bench.found("functional")
    assert relative_error(parts, bench.found("hessian")) < 1e-12


@pytest.mark.parametrize("bench", one_in(oracles.NAMES, 6, shift=3), indirect=True)
def test_jacobian_equals_its_dense_matrix(bench: Bench):
    J = cs.Jacobian(bench.problem)
    truth = bench.dense.jacobian[:, bench.order]
    assert relative_error(J.to_dense(), truth) < TIGHT
    assert relative_error(J.T.to_dense(), truth.T) < TIGHT
    assert relative_error(J.T.T @ bench.probe(), truth @ bench.probe()) < TIGHT


@pytest.mark.parametrize("bench", one_in(oracles.NAMES, 6, shift=1), indirect=True)
def test_monte_carlo_fisher_equals_the_fisher_of_its_drawn_targets(bench: Bench):
    if bench.case.kind in ("smoothed", "custom"):
        with pytest.raises(cs.UsageError, match="log-likelihood"):
            cs.MonteCarloFisher(bench.problem)
        return
    F = cs.MonteCarloFisher(bench.problem, num_samples=2, seed=3)
    for (_, y, _), drawn in zip(bench.data, F.drawn, strict=True):
        assert drawn.shape == (2, *y.shape)
        if not y.is_floating_point():
            assert torch.equal(drawn == -100, (y == -100).expand(2, *y.shape))
    truth = bench.dense.fisher([list(drawn) for drawn in F.drawn])[bench.order][:, bench.order]
    assert relative_error(F.to_dense(), truth) < TIGHT


@pytest.mark.parametrize("bench", one_in(oracles.NAMES, 6, shift=2), indirect=True)
def test_symmetric_and_in_agreement_with_a_finite_difference(bench: Bench):
    H, u, v = bench.operator("hessian"), bench.probe(seed=7), bench.probe(seed=8)
    assert float(u @ (H @ v)) == pytest.approx(float(v @ (H @ u)), rel=1e-11, abs=1e-12)
    raw, step = torch.zeros_like(v), 1e-5 / float(v.norm())
    raw[bench.order] = v
    ahead, behind = (bench.dense.gradient(bench.dense.theta + s * step * raw) for s in (1, -1))
    difference = ((ahead - behind) / (2 * step))[bench.order]
    assert relative_error(H @ v, difference) < 1e-6


@pytest.mark.parametrize("bench", one_in(oracles.NAMES, 6, shift=5), indirect=True)
def test_differences_of_the_value_alone_agree_with_gradient_and_hessian(bench: Bench):
    """No derivative of torch's on this side, so that a graph cut by mistake is seen."""
    v = bench.probe(seed=9)
    v, raw = v / v.norm(), torch.zeros_like(v)
    raw[bench.order] = v
    before, here, after = (float(bench.dense.value(bench.dense.theta + t * raw)) for t in (-1e-4, 0.0, 1e-4))
    slope, bend = float(bench.problem.gradient() @ v), float(v @ (bench.operator("hessian") @ v))
    assert (after - before) / 2e-4 == pytest.approx(slope, rel=1e-5, abs=1e-6)
    assert (after - 2 * here + before) / 1e-8 == pytest.approx(bend, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("bench", "name"),
    [
        *a_third([(case, "fisher") for case in oracles.NAMES], shift=2),
        *a_half([(case, "ggn") for case in oracles.NAMES], shift=1),
    ],
    indirect=["bench"],
)
def test_positive_semi_definite(bench: Bench, name: str):
    A = bench.found(name)
    eigenvalues = torch.linalg.eigvalsh((A + A.T) / 2)
    assert eigenvalues[0] > -1e-12 * eigenvalues[-1]
    if bench.case.kind != "custom":  # nothing is known about a user's loss
        assert bench.operator(name).psd
    assert not bench.operator("functional").psd


@each_with_one(3)
def test_vectors_columns_chunks_and_scipy_agree(bench: Bench, name: str):
    A, V = bench.operator(name), bench.probe(2)
    columns = A @ V
    one_by_one = bench.OPERATORS[name](bench.problem, chunk=1)
    assert relative_error(one_by_one @ V, columns) < 1e-13
    assert relative_error(A @ V[:, 1], columns[:, 1]) < 1e-13
    assert A.T is A
    S = A.to_scipy()
    assert S.shape == A.shape
    assert S.dtype == np.float64
    np.testing.assert_allclose(
        S @ V.numpy(), columns.numpy(), rtol=0, atol=1e-12 * float(columns.abs().max())
    )
    found = torch.as_tensor(S.rmatvec(V[:, 0].numpy()))
    assert relative_error(found, columns[:, 0]) < 1e-12


@each_with_one(1)
def test_float32_is_close_to_float64(bench: Bench, name: str):
    model = cs.load(bench.module, dtype="float32")
    problem = cs.Problem(model, bench.problem.batches, bench.problem.loss)
    single, v = bench.OPERATORS[name](problem), bench.probe()
    found = single @ v.float()
    assert found.dtype == torch.float32
    assert relative_error(found.double(), bench.operator(name) @ v) < 2e-4
    assert bench.model.dtype == torch.float64


def test_double_backward_agrees_with_the_forward_over_reverse_oracle():
    case = oracles.bench("score-bias-no-ff-tied")
    truth = oracles.double_backward_hessian(case.dense.value, case.dense.theta)
    assert relative_error(truth, case.dense.hessian) < 1e-12


@pytest.mark.parametrize("name", some(["mlp-relu-mse", "mlp-tokens-gelu"], 1))
def test_monte_carlo_fisher_tends_to_the_ggn(name: str):
    case = oracles.bench(name)
    ggn = case.found("ggn")
    errors = [
        float((cs.MonteCarloFisher(case.problem, num_samples=s, seed=1).to_dense() - ggn).norm() / ggn.norm())
        for s in (20, 500)
    ]
    assert errors[1] < 0.12
    assert errors[1] < 0.4 * errors[0]


def test_monte_carlo_fisher_is_one_matrix_and_depends_on_its_seed(tiny: Bench):
    v = tiny.probe()
    first, again, other = (cs.MonteCarloFisher(tiny.problem, seed=s) @ v for s in (0, 0, 1))
    F = cs.MonteCarloFisher(tiny.problem, seed=0)
    assert torch.equal(first, again)
    assert torch.equal(F @ v, F @ v)
    assert relative_error(first, other) > 1e-3


def test_many_columns_go_in_groups(tiny: Bench):
    H = cs.Hessian(tiny.problem)
    H.engine.caching._directions["fast"] = 7
    assert relative_error(H @ tiny.probe(17), tiny.found("hessian") @ tiny.probe(17)) < 1e-12


def test_dictionary_inputs_and_objects_with_logits(tiny: Bench):
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny.module

        def forward(self, input_ids: torch.Tensor, offset: torch.Tensor) -> object:
            return type("Output", (), {"logits": self.net(input_ids + offset * 0)})()

    batches = cs.Batches([cs.Batch({"input_ids": x, "offset": x}, y) for x, y, _ in tiny.data])
    H = cs.Hessian(cs.Problem(Named(), batches))
    names = [f"net.{name}" for name in tiny.model.blocks]
    assert sorted(names) == sorted(H.space.slices)
    parts = tiny.model.space().to_dict(tiny.probe())
    v = H.space.from_dict({f"net.{name}": part for name, part in parts.items()})
    found = H.space.to_dict(H @ v)
    truth = tiny.model.space().to_dict(tiny.found("hessian") @ tiny.probe())
    for name, part in truth.items():
        torch.testing.assert_close(found[f"net.{name}"], part, rtol=0, atol=1e-12)
