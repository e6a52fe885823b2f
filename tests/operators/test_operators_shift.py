"""Weight decay and damping against the Hessian of the loss with its penalty."""

from __future__ import annotations

import pytest
import torch
from packed_net import hessian

import curvescope as cs
from curvescope.operators.base import WeightDecay


def truth(weights: torch.Tensor) -> torch.Tensor:
    return hessian().to_dense() + torch.diag(weights)


def weights(damping: float, by_block: dict[str, float]) -> torch.Tensor:
    space = hessian().space
    return torch.cat(
        [torch.full((b.size,), damping + by_block.get(b.name, 0.0), dtype=torch.float64) for b in space]
    )


MATRICES = ["L0.W_Q", "L0.W_K", "L0.W_V", "L0.W_O", "L0.W_1", "L0.W_2", "head.weight"]
BIASES = [f"L0.b_{x}" for x in "QKVO12"]
ALL = [*MATRICES, *BIASES, "head.bias", *(f"L0.ln{i}.{x}" for i in (1, 2) for x in "gb")]
CASES: dict[str, tuple[float, WeightDecay, dict[str, float]]] = {
    "damping": (0.5, 0.0, {}),
    "decay of all": (0.0, 0.25, dict.fromkeys(ALL, 0.25)),
    "both": (0.5, 0.25, dict.fromkeys(ALL, 0.25)),
    "matrices": (0.0, {"matrices": 0.1}, dict.fromkeys(MATRICES, 0.1)),
    "part of a parameter": (
        0.1,
        {"L0.W_Q": 2.0, "L0.b_?": 1.0},
        {"L0.W_Q": 2.0, **dict.fromkeys(BIASES, 1.0)},
    ),
    "the last counts": (
        0.0,
        {"*": 1.0, "L0.W_[QK]": 0.0},
        {**dict.fromkeys(ALL, 1.0), "L0.W_Q": 0, "L0.W_K": 0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_diagonal_is_added(name: str):
    damping, decay, by_block = CASES[name]
    H = cs.Hessian(hessian().problem, damping=damping, weight_decay=decay)
    assert {block.name for block in H.space} == set(ALL)
    full = truth(weights(damping, by_block))
    torch.testing.assert_close(H.to_dense(), full, rtol=1e-10, atol=1e-10)
    where = {block.name: H.space.positions(block) for block in H.space}
    for rows, columns in [("L0.W_Q", "L0.W_Q"), ("L0.W_Q", "L0.W_K"), ("L0.b_1", "L0.b_1")]:
        part = full[where[rows]][:, where[columns]]
        torch.testing.assert_close(H.block(rows, columns).to_dense(), part, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(H.block(rows, columns).T.to_dense(), part.T, rtol=1e-10, atol=1e-10)


def test_a_head_and_the_whole_share_the_diagonal():
    H = cs.Hessian(hessian().problem, damping=1.0)
    plain = hessian()
    found = H.block("L0.W_Q", "L0.h1.W_Q").to_dense() - plain.block("L0.W_Q", "L0.h1.W_Q").to_dense()
    columns = torch.eye(16).double().reshape(16, 4, 4)[:, :, 2:].reshape(16, 8)
    torch.testing.assert_close(found, columns, rtol=0, atol=1e-12)


def test_it_is_the_hessian_of_the_penalized_loss():
    problem, w = hessian().problem, 0.3
    H = cs.Hessian(problem, "head.weight", weight_decay={"matrices": w})
    theta = dict(problem.model.module.named_parameters())
    x, y = problem.batches[0].inputs, problem.batches[0].targets

    def penalized(U: torch.Tensor) -> torch.Tensor:
        z = torch.func.functional_call(problem.model.module, {**theta, "head.weight": U}, x)
        return ((z - y) ** 2).mean() + w / 2 * (U**2).sum()

    U = theta["head.weight"].detach()
    found = torch.autograd.functional.hessian(penalized, U)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(H.to_dense(), found.reshape(8, 8), rtol=1e-9, atol=1e-9)


def test_all_operators_take_them():
    problem = hessian().problem
    for make in (cs.GGN, cs.FunctionalHessian, cs.EmpiricalFisher, cs.MonteCarloFisher):
        plain, damped = (
            make(problem, "head.weight"),
            make(problem, "head.weight", damping=0.5, weight_decay=0.25),
        )
        assert damped.psd == plain.psd
        found = damped.to_dense() - plain.to_dense()
        torch.testing.assert_close(found, 0.75 * torch.eye(8).double(), rtol=0, atol=1e-12)
    v = torch.ones(8).double()
    torch.testing.assert_close(damped @ v - plain @ v, 0.75 * v)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"damping": -1}, "expected a finite damping of at least 0, got -1"),
        ({"damping": float("nan")}, "expected a finite damping"),
        ({"damping": "a lot"}, "expected a finite damping of at least 0, got 'a lot'"),
        ({"weight_decay": -0.1}, "expected a finite weight_decay of at least 0"),
        ({"weight_decay": {"L9.*": 0.1}}, r"no block matches 'L9.\*' of weight_decay"),
        (
            {"weight_decay": {"head.weight": -1}},
            "expected a finite weight_decay of 'head.weight' of at least 0, got -1",
        ),
    ],
)
def test_wrong_numbers_are_refused(settings, message):
    with pytest.raises(cs.UsageError, match=message):
        cs.Hessian(hessian().problem, **settings)
