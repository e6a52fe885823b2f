"""Our K-FAC and EK-FAC against those of curvlinops: kinds, sharing, biases, on an MLP and on attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
from curvescope.core.blocks import ParamSpace
from oracles import drawn, relative_error

pytestmark = pytest.mark.cross_library

AGREE = 1e-12
NUM_SEQUENCES = 12  # factors of full rank, so that their eigenvectors are theirs alone
KINDS = {"ggn": "type-2", "mc": "mc", "empirical": "empirical", "forward-only": "forward-only"}


class Attention(nn.Module):
    """One layer of causal attention and a feed-forward layer; outputs for every token, or for the mean."""

    def __init__(self, *, pooled: bool):
        super().__init__()
        self.pooled = pooled
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=i > 0) for i in range(3))
        self.o, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (self.q(x) @ self.k(x).mT).masked_fill(~mask, -torch.inf)
        x = x + self.o(scores.softmax(-1) @ self.v(x))
        z = self.down(torch.tanh(self.up(x)))
        return z.mean(1) if self.pooled else z


class ClassesFirst(nn.Module):
    """Outputs (B, C, T), as torch's cross-entropy takes them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).mT


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


MODULES = {"mlp": mlp, "pooled": lambda: Attention(pooled=True), "tokens": lambda: Attention(pooled=False)}


def make_problem(name: str, loss: str) -> tuple[nn.Module, cs.Problem, list[tuple[Tensor, Tensor]]]:
    """A module, its problem in two batches, and the same data for the peer."""
    module = drawn(MODULES[name]).double()
    source = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SEQUENCES, *(() if name == "mlp" else (3,)), 4, generator=source, dtype=torch.float64)
    lead = x.shape[:2] if name == "tokens" else x.shape[:1]
    if loss == "cross_entropy":
        y = torch.randint(0, 3, lead, generator=source)
    else:
        y = torch.randn(*lead, 3, generator=source, dtype=torch.float64)
    problem = cs.Problem(module, cs.Batches.from_tensors(x, y, batch_size=7), loss)
    return module, problem, list(zip(x.split(7), y.split(7), strict=True))


def curvlinops_dense(
    operator: str,
    module: nn.Module,
    problem: cs.Problem,
    data: Any,
    space: ParamSpace,
    kind: str,
    **settings: Any,
) -> Tensor:
    """The peer's matrix in the order of vectors over `space`; its labels are our draws."""
    peer = pytest.importorskip("curvlinops")
    loss = nn.CrossEntropyLoss() if problem.loss.name == "cross_entropy" else nn.MSELoss()
    tokens = isinstance(module, Attention) and not module.pooled
    network = ClassesFirst(module) if tokens and problem.loss.name == "cross_entropy" else module
    parameters = dict(module.named_parameters())
    K = getattr(peer, operator)(
        network,
        loss,
        [parameters[name] for name in space.parameter_names],
        data,
        fisher_type=KINDS[kind],
        check_deterministic=False,
        **settings,
    )
    if kind == "mc":
        fisher = cs.MonteCarloFisher(problem, num_samples=settings["mc_samples"])
        flat = [s.flatten(0, -1 if s.dtype == torch.long else -2) for batch in fisher.drawn for s in batch]
        labels = iter(flat * 2)  # of factors, then of eigenvalues
        K.draw_label = lambda output: next(labels)
    sizes = [parameters[name].numel() for name in space.parameter_names]
    order, start = {}, 0
    for name, size in zip(space.parameter_names, sizes, strict=True):
        order[name], start = start + torch.arange(size).view(parameters[name].shape), start + size
    at = torch.cat([part.take(order[part.parameter]).flatten() for part in space.segments])
    dense = K @ torch.eye(start, dtype=torch.float64)
    return dense.detach()[at][:, at]


SETTINGS = [
    (name, loss, kind, sharing, bias)
    for name in MODULES
    for loss in ("cross_entropy", "mse_mean")
    for kind in KINDS
    for sharing in ("expand", "reduce")
    for bias in ("joint", "separate")
]


@pytest.mark.parametrize(("name", "loss", "kind", "sharing", "bias"), SETTINGS)
def test_kfac_is_that_of_curvlinops(name: str, loss: str, kind: str, sharing: str, bias: str):
    module, problem, data = make_problem(name, loss)
    samples = 2 if kind == "mc" else 1
    ours = cs.KFAC(problem, kind=kind, sharing=sharing, bias=bias, terms="together", num_samples=samples)
    theirs = curvlinops_dense(
        "KFACLinearOperator",
        module,
        problem,
        data,
        ours.space,
        kind,
        mc_samples=samples,
        kfac_approx=sharing,
        separate_weight_and_bias=bias == "separate",
    )
    assert not ours.left_out
    assert relative_error(ours.to_dense(), theirs) < AGREE


@pytest.mark.parametrize(
    ("name", "loss", "kind", "sharing", "bias"),
    [case for case in SETTINGS if case[0] != "tokens" and case[2] != "forward-only"],
)
def test_ekfac_is_that_of_curvlinops(name: str, loss: str, kind: str, sharing: str, bias: str):
    module, problem, data = make_problem(name, loss)
    samples = 2 if kind == "mc" else 1
    # Gradients of keys add up to zero over a sequence, so that a factor is zero, and every basis its own.
    left_out = "k." if sharing == "reduce" else "no module"
    blocks = [block.name for block in problem.space() if not block.parameter.startswith(left_out)]
    ours = cs.EKFAC(
        problem, *blocks, kind=kind, sharing=sharing, bias=bias, terms="together", num_samples=samples
    )
    theirs = curvlinops_dense(
        "EKFACLinearOperator",
        module,
        problem,
        data,
        ours.space,
        kind,
        mc_samples=samples,
        kfac_approx=sharing,
        separate_weight_and_bias=bias == "separate",
    )
    assert relative_error(ours.to_dense(), theirs) < AGREE
