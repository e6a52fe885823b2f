"""A model that has been looked at is exactly the model it was."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
import oracles
from oracles import relative_error
from selection import pairs

OPERATORS = [cs.Hessian, cs.GGN, cs.FunctionalHessian, cs.EmpiricalFisher, cs.MonteCarloFisher, cs.Jacobian]


class Noisy(nn.Module):
    """Dropout, batch norm and layer norm, in whatever mode."""

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 4)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.tanh(self.norm(self.up(x)))))


def make_noisy(p: float = 0.5) -> Noisy:
    return oracles.drawn(lambda: Noisy(p).double())


def make_data() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, generator=source).double(), torch.randint(0, 4, (6,), generator=source)


def snapshot(module: nn.Module) -> dict[str, object]:
    """All that could change, as values that can be compared."""
    named = list(module.named_parameters()) + list(module.named_buffers())
    return {
        "values": {name: t.detach().clone() for name, t in named},
        "identity": {name: (id(t), t.data_ptr(), t._version, t.requires_grad) for name, t in named},
        "grads": {name: None if t.grad is None else t.grad.clone() for name, t in named},
        "modes": {name: m.training for name, m in module.named_modules()},
        "hooks": {
            name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in module.named_modules()
        },
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),
        "random": random.getstate(),
        "grad_enabled": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }


def assert_same(before: dict[str, object], after: dict[str, object]) -> None:
    for key in ("identity", "modes", "hooks", "random", "grad_enabled", "dtype"):
        assert before[key] == after[key], key
    for key in ("torch", "numpy"):
        assert np.array_equal(np.asarray(before[key]), np.asarray(after[key])), key
    for key in ("values", "grads"):
        for name, old in before[key].items():
            new = after[key][name]
            assert (old is None) == (new is None), (key, name)
            assert old is None or torch.equal(old, new), (key, name)


@pytest.mark.filterwarnings("ignore:dropout")
@pytest.mark.parametrize(("operator", "mode"), pairs(OPERATORS, ["train", "eval", "mixed"]))
def test_products_leave_the_module_alone(operator: type, mode: str):
    module = make_noisy()
    module.train(mode != "eval")
    if mode == "mixed":
        module.norm.eval()
        module.up.weight.requires_grad_(False)
    module.down.weight.grad = torch.ones_like(module.down.weight)
    before = snapshot(module)
    problem = cs.Problem(module, make_data())
    A = operator(problem)
    A @ torch.ones(A.shape[1], 2, dtype=torch.float64)
    A.T @ torch.ones(A.shape[0], dtype=torch.float64)
    problem.gradient()
    problem.loss_value()
    assert_same(before, snapshot(module))


@pytest.mark.parametrize("name", ["wide-heads", "mlp-relu-mse"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_products_leave_a_zoo_model_alone(operator: type, name: str):
    bench = oracles.bench(name)
    before = snapshot(bench.module)
    A = operator(bench.problem)
    A @ torch.ones(A.shape[1], dtype=torch.float64)
    assert_same(before, snapshot(bench.module))


def test_an_error_inside_leaves_the_module_alone():
    module = make_noisy(p=0.0).train()
    H = cs.Hessian(cs.Problem(module, make_data()))
    with torch.no_grad():
        module.down.weight[0, 0] = torch.inf
    before = snapshot(module)
    with pytest.raises(cs.CurvescopeError, match=r"not finite; the loss at these parameters is (inf|nan)"):
        H @ torch.ones(64, dtype=torch.float64)
    assert_same(before, snapshot(module))


def test_loading_and_building_leave_the_random_numbers_alone():
    before = snapshot(nn.Identity())
    cs.load(cs.TransformerConfig(n_layers=1, d_model=4, n_heads=1, n_ctx=3, vocab_size=3), dtype="float64")
    cs.load(cs.MLPConfig())
    assert_same(before, snapshot(nn.Identity()))


def test_dropout_in_train_mode_warns_and_gives_the_operator_of_eval_mode():
    module = make_noisy().train()
    with pytest.warns(UserWarning, match="dropout is switched off.*eval mode") as told:
        problem = cs.Problem(module, make_data())
    assert told[0].filename == __file__
    H, v = cs.Hessian(problem), torch.ones(64, dtype=torch.float64)
    found = H @ v
    assert torch.equal(found, H @ v)
    assert any("dropout" in note for note in problem.model.notes)
    module.eval()
    assert relative_error(found, cs.Hessian(cs.Problem(module, make_data())) @ v) == 0.0
    value = nn.functional.cross_entropy(module(make_data()[0]), make_data()[1]).detach()
    assert problem.loss_value() == pytest.approx(float(value), rel=1e-14)


@pytest.mark.parametrize("module", [make_noisy(0.0).train(), make_noisy().eval(), oracles.PlainNet().train()])
def test_no_warning_without_active_dropout(module: nn.Module):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = cs.load(module)
    assert model.notes == ()


def test_batch_norm_in_train_mode_warns_and_its_statistics_stay():
    module = oracles.drawn(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))).double().train()
    before = snapshot(module)
    with pytest.warns(UserWarning, match="batch norm uses its running statistics"):
        problem = cs.Problem(module, make_data())
    cs.Hessian(problem) @ torch.ones(24, dtype=torch.float64)
    assert_same(before, snapshot(module))


@pytest.mark.parametrize(
    "noisy",
    [
        nn.MultiheadAttention(4, 2, dropout=0.5),
        nn.LSTM(4, 4, num_layers=2, dropout=0.5),
        nn.Sequential(nn.Linear(4, 4), nn.FeatureAlphaDropout(0.5)),
    ],
)
def test_other_kinds_of_dropout_warn_too(noisy: nn.Module):
    with pytest.warns(UserWarning, match="dropout"):
        cs.load(noisy.train())


@pytest.mark.parametrize(("operator", "context"), pairs(OPERATORS, [torch.no_grad, torch.inference_mode]))
def test_products_do_not_notice_a_surrounding_no_grad(operator: type, context):
    tiny = oracles.bench("wide-heads")
    A = operator(tiny.problem)
    v = tiny.probe()
    truth = A @ v
    with context():
        found = A @ v
    assert relative_error(found, truth) == 0.0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradient_does_not_notice_a_surrounding_no_grad(context):
    tiny = oracles.bench("wide-heads")
    truth = tiny.problem.gradient()
    with context():
        found = tiny.problem.gradient()
    assert torch.equal(found, truth)


def test_frozen_parameters_that_are_asked_for_have_curvature_too():
    module, v = make_noisy(p=0.0), torch.ones(64, dtype=torch.float64)
    truth = cs.Hessian(cs.Problem(module, make_data())) @ v
    module.requires_grad_(False)
    problem = cs.Problem(module, make_data(), params="*")
    assert torch.equal(cs.Hessian(problem) @ v, truth)
    assert float(problem.gradient("down.weight").norm()) > 0
    assert not any(p.requires_grad for p in module.parameters())


class Idle(nn.Module):
    """One parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_unused_parameters_have_zero_gradient_and_curvature(frozen: bool):
    module = oracles.drawn(Idle).double()
    module.used.requires_grad_(not frozen)
    problem = cs.Problem(module, make_data())
    assert not (cs.Hessian(problem, "idle.*") @ torch.ones(6, dtype=torch.float64)).any()
    assert not (cs.GGN(problem, "idle.*") @ torch.ones(6, dtype=torch.float64)).any()
    assert not cs.Jacobian(problem, "idle.*").to_dense().any()
    assert not problem.gradient("idle.*").any()


def test_a_vector_that_asks_for_gradients_is_only_read():
    tiny = oracles.bench("wide-heads")
    v = tiny.probe().requires_grad_()
    found = cs.Hessian(tiny.problem) @ v
    assert not found.requires_grad
    assert v.grad is None
