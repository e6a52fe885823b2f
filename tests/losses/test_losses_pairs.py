"""A loss over pairs of sequences: targets are a tree, and every operator meets a dense truth."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev

import curvescope as cs
from oracles import relative_error, transformer
from selection import some

PAIRS, T, V = 4, 3, 5
SOURCE = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, V, (PAIRS, 2, T), generator=SOURCE)
TARGETS = {
    "tokens": torch.randint(0, V, (PAIRS, 2, T), generator=SOURCE),
    "reference": torch.randn(PAIRS, generator=SOURCE, dtype=torch.float64),
}
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=torch.float64)


class PairNet(nn.Module):
    """A language model on both sequences of a pair: (B, 2, T) to (B, 2, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = transformer(d_model=3, n_heads=1, d_ff=3, n_ctx=T, vocab_size=V)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])


def preferences(z: Tensor, y: dict[str, Tensor]) -> Tensor:
    """−log σ(log p(chosen) − log p(rejected) − reference), one number per pair: (B,)."""
    log_p = z.log_softmax(-1).gather(-1, y["tokens"][..., None])[..., 0].sum(-1)
    return -F.logsigmoid(log_p[:, 0] - log_p[:, 1] - y["reference"])


def count(y: dict[str, Tensor], w: Tensor | None) -> float:
    return len(y["reference"]) if w is None else float(w.sum())


def weighted(z: Tensor, y: dict[str, Tensor], w: Tensor | None) -> Tensor:
    terms = preferences(z, y)
    return terms.sum() if w is None else (w * terms).sum()


LOSS = cs.CustomLoss(weighted, count, terms=preferences, name="preference")
MODULE = PairNet()


def value_at(theta: Tensor) -> Tensor:
    return weighted(outputs_at(theta).view(PAIRS, 2, T, V), TARGETS, WEIGHTS) / WEIGHTS.sum()


def outputs_at(theta: Tensor) -> Tensor:
    shapes = {name: p.shape for name, p in MODULE.named_parameters()}
    pieces = theta.split([shape.numel() for shape in shapes.values()])
    values = {name: t.view(shapes[name]) for name, t in zip(shapes, pieces, strict=True)}
    return functional_call(MODULE, values, (TOKENS,)).flatten()


def problem(batch_size: int | None) -> cs.Problem:
    return cs.Problem(MODULE, cs.Batches.from_tensors(TOKENS, TARGETS, WEIGHTS, batch_size=batch_size), LOSS)


def in_order(model: cs.Model, truth: Tensor) -> Tensor:
    """A dense matrix over raw parameters in the order of the model's blocks."""
    starts, start = {}, 0
    for name, p in model.named_parameters():
        starts[name], start = start, start + p.numel()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    order = [starts[b.parameter] + b.positions(shapes[b.parameter]).flatten() for b in model.blocks.values()]
    order = torch.cat(order)
    return truth[order][:, order]


@pytest.mark.parametrize("batch_size", some([3, None, 1], 1))
def test_operators_of_a_loss_over_pairs(batch_size: int | None):
    given = problem(batch_size)
    theta = torch.cat([p.detach().flatten() for p in MODULE.parameters()])
    assert given.num_terms == 5
    assert given.loss_value() == pytest.approx(float(value_at(theta)), rel=1e-13)
    H = in_order(given.model, jacfwd(grad(value_at))(theta))
    J = jacrev(outputs_at)(theta)
    at = outputs_at(theta)
    middle = jacfwd(grad(lambda z: weighted(z.view(PAIRS, 2, T, V), TARGETS, WEIGHTS) / WEIGHTS.sum()))(at)
    G = in_order(given.model, J.T @ middle @ J)
    assert relative_error(cs.Hessian(given, engine="autograd").to_dense(), H) < 1e-10
    assert relative_error(cs.GGN(given, engine="autograd").to_dense(), G) < 1e-10
    assert relative_error(cs.FunctionalHessian(given, engine="autograd").to_dense(), H - G) < 1e-10
    rows = jacrev(lambda t: preferences(outputs_at(t).view(PAIRS, 2, T, V), TARGETS))(theta)
    E = in_order(given.model, rows.T @ (WEIGHTS[:, None] * rows) / WEIGHTS.sum())
    assert relative_error(cs.EmpiricalFisher(given, engine="autograd").to_dense(), E) < 1e-10
