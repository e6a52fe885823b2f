"""Losses that the theory leaves open: smoothed labels, distillation, contrastive and preference pairs.

Each is a `CustomLoss`, or built in; H, GGN and functional Hessian meet dense truths, and H = H_o + Σ sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev

import curvescope as cs
from oracles import relative_error, transformer

PAIRS, T, V = 2, 3, 4
SOURCE = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, V, (2 * PAIRS, T), generator=SOURCE)  # rows 2i and 2i + 1 are a pair
NEXT = torch.randint(0, V, (2 * PAIRS, T), generator=SOURCE)
TEACHER = torch.randn(2 * PAIRS, T, V, generator=SOURCE, dtype=torch.float64)
REFERENCE = torch.randn(2 * PAIRS, generator=SOURCE, dtype=torch.float64)  # log p of another model
MODULE = transformer(d_model=3, n_heads=1, d_ff=2, n_ctx=T, vocab_size=V)

Value = Callable[[Tensor], Tensor]


def smoothed(z: Tensor) -> Tensor:
    """(1 − ε) · cross-entropy + ε · its mean over all classes, ε = 0.2."""
    log_p = z.log_softmax(-1)
    return -(0.8 * log_p.gather(-1, NEXT[..., None]).sum() + 0.2 * log_p.mean(-1).sum())


def distilled(z: Tensor) -> Tensor:
    """Σ KL(teacher ‖ student), both at temperature 2."""
    p = (TEACHER / 2).softmax(-1)
    return (p * (p.log() - (z / 2).log_softmax(-1))).sum()


def contrastive(z: Tensor) -> Tensor:
    """Each first sequence of a pair finds its second among those of the whole batch (in-batch negatives)."""
    pooled = z.mean(dim=1)
    a, b = pooled[0::2], pooled[1::2]
    scores = a @ b.T / 0.5
    return F.cross_entropy(scores, torch.arange(len(a)), reduction="sum")


def preferred(z: Tensor) -> Tensor:
    """−log σ(β (log-ratio of the chosen − log-ratio of the rejected)), each against a reference, β = 0.5."""
    log_p = z.log_softmax(-1).gather(-1, NEXT[..., None])[..., 0].sum(-1) - REFERENCE
    return -F.logsigmoid(0.5 * (log_p[0::2] - log_p[1::2])).sum()


def own(value: Value, count: int, *, convex: bool) -> cs.CustomLoss:
    return cs.CustomLoss(lambda z, y, w: value(z), lambda y, w: count, name=value.__name__, convex=convex)


LOSSES: dict[str, tuple[Value, int, Any]] = {
    "label smoothing": (smoothed, NEXT.numel(), cs.CrossEntropy(label_smoothing=0.2)),
    "distillation": (distilled, NEXT.numel(), own(distilled, NEXT.numel(), convex=True)),
    "contrastive": (contrastive, PAIRS, own(contrastive, PAIRS, convex=False)),
    "preference pairs": (preferred, PAIRS, own(preferred, PAIRS, convex=False)),
}


def outputs_at(theta: Tensor) -> Tensor:
    shapes = {name: p.shape for name, p in MODULE.named_parameters()}
    pieces = theta.split([shape.numel() for shape in shapes.values()])
    values = {name: t.view(shapes[name]) for name, t in zip(shapes, pieces, strict=True)}
    return functional_call(MODULE, values, (TOKENS,))


@pytest.fixture(scope="module")
def point() -> tuple[Tensor, Tensor]:
    """The parameters in a vector, and the Jacobian of all outputs in them."""
    theta = torch.cat([p.detach().flatten() for p in MODULE.parameters()])
    return theta, jacrev(lambda t: outputs_at(t).flatten())(theta)


@pytest.mark.parametrize("name", LOSSES)
def test_operators_and_sources_of_a_loss(name: str, point: tuple[Tensor, Tensor]):
    value, count, loss = LOSSES[name]
    theta, J = point
    problem = cs.Problem(MODULE, (TOKENS, NEXT), loss)
    assert problem.num_terms == count
    H = jacfwd(grad(lambda t: value(outputs_at(t)) / count))(theta)
    shape = outputs_at(theta).shape
    middle = jacfwd(grad(lambda z: value(z.view(shape)) / count))(outputs_at(theta).flatten())
    G = J.T @ middle @ J
    U = torch.randn(len(theta), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outer, parts = cs.GGN(problem) @ U, cs.FunctionalSources(problem).products(U)
    assert "L0.attention" in parts
    assert relative_error(cs.Hessian(problem) @ U, H @ U) < 1e-10
    assert relative_error(outer, G @ U) < 1e-10
    assert relative_error(cs.FunctionalHessian(problem) @ U, (H - G) @ U) < 1e-10
    assert relative_error(outer + torch.stack(list(parts.values())).sum(0), H @ U) < 1e-10


def test_in_batch_negatives_couple_samples():
    """The Hessian in the outputs is dense over the batch, so such a loss belongs to its batch."""
    z = outputs_at(torch.cat([p.detach().flatten() for p in MODULE.parameters()])).detach()
    coupled = jacfwd(grad(contrastive))(z)[0, :, :, 3]  # first sequence of one pair, second of the other
    assert float(coupled.abs().max()) > 1e-3
    separate = jacfwd(grad(preferred))(z)[0, :, :, 3]
    assert float(separate.abs().max()) == 0
