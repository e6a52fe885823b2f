"""What an attention layer of a zoo Transformer sees of the loss: G = ∂L/∂F and B = ∂²L/∂F² in its output F.

The one place in this room where derivatives are taken by machine: they are those of everything behind F.
Norms and later layers couple all tokens of a sequence, so B is an (L d) × (L d) matrix for each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.parts import MatrixName
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch, Batches
from curvescope.losses import Loss
from curvescope.models.model import Model
from curvescope.models.running.exchange import evaluating
from curvescope.models.zoo.transformer import Transformer
from curvescope.problem import Problem

LIMIT = 2048  # entries L d of one sequence's attention output; B holds their square
GROUP = 64  # directions that go through the rest of the network at once


class Rest(NamedTuple):
    """Inputs of a layer's attention, and derivatives of the summed loss in its output."""

    X: Tensor  # (n, L, d)
    G: Tensor  # (n, L, d)
    B: Tensor  # (n, L, d, L, d)


def make_problem(model: Any, batch: Any, loss: str | Loss) -> Problem:
    """The problem of a `Batch`, of `Batches`, or of a pair (inputs, targets)."""
    return Problem(model, Batches([batch]) if isinstance(batch, Batch) else batch, loss)


def check_lengths(parts: Sequence[Tensor]) -> None:
    """Raise unless all batches have one shape behind their first axis."""
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise ShapeError(
            f"expected batches of sequences of one length, got {' and '.join(map(str, sorted(shapes)))}",
            hint="give one batch at a time",
        )


def rest_of_model(
    problem: Problem, batch: Batch, layer: int, *, curvature: MatrixName = "hessian", limit: int = LIMIT
) -> Rest:
    """X, G and B of one placed batch, not divided by the number of terms.

    B is the Hessian of the rest, its GGN Jᵀ (∂²ℓ/∂z²) J with J = ∂z/∂F, or their difference
    (`functional`). It takes L·d passes through the rest of the network, for all sequences at once.
    """
    if curvature not in get_args(MatrixName):
        raise UsageError(f"expected curvature of {', '.join(get_args(MatrixName))}, got {curvature!r}")
    module = as_transformer(problem.model)
    X, F = capture(module, batch.inputs, f"L{layer}.attn.in", f"L{layer}.attn.out")
    _check_size(F, limit)
    with torch.inference_mode(False), torch.enable_grad():
        F = F.clone().requires_grad_()
        with evaluating(module):
            z = _with_output(module, layer, F)(batch.inputs)
        s = problem.loss.sum(z, batch.targets, batch.weights)
        (G,) = torch.autograd.grad(s, F, create_graph=True)
        _refuse_coupled(lambda V: _pull(G, F, V), F)
        B = torch.zeros((), dtype=F.dtype, device=F.device)
        if curvature != "ggn":
            B = _dense(lambda V: _pull(G, F, V), F)
        if curvature != "hessian":
            part = _dense(_gauss_newton(problem, batch, z, F), F)
            B = part if curvature == "ggn" else B - part
    return Rest(X, G.detach(), B)


def as_transformer(model: Model) -> Transformer:
    """The zoo Transformer in a model, or one sentence."""
    if not isinstance(model.module, Transformer):
        raise UsageError(
            f"expected a zoo Transformer, got a {type(model.module).__name__}",
            hint="cs.Hessian(problem).block(…) takes any module",
        )
    return model.module


def capture(module: Transformer, inputs: Any, *places: str) -> list[Tensor]:
    """What the model records at the given places, such as 'L0.attn.pattern'."""
    seen: dict[str, Tensor] = {}

    def record(place: str, tensor: Tensor) -> None:
        if place in places:
            seen[place] = tensor

    with evaluating(module), torch.no_grad():
        module(inputs, record)
    return [seen[place] for place in places]


def _with_output(module: Transformer, layer: int, F: Tensor) -> Transformer:
    """The model with F in place of the layer's attention; it shares everything else with `module`."""
    name = f"L{layer}"
    changed, block = copy.copy(module), copy.copy(module.get_submodule(name))
    object.__setattr__(block, "attend", lambda x, record: F)
    object.__setattr__(changed, "_modules", {**module._modules, name: block})
    return changed


def _gauss_newton(problem: Problem, batch: Batch, z: Tensor, F: Tensor) -> Callable[[Tensor], Tensor]:
    """V ↦ Jᵀ (∂²ℓ/∂z²) J V for directions V (k, n, L, d)."""
    u = torch.zeros_like(z, requires_grad=True)
    (pulled,) = torch.autograd.grad(z, F, u, create_graph=True)  # Jᵀu, whose derivative in u is J

    def product(V: Tensor) -> Tensor:
        moved = _pull(pulled, u, V)
        return _pull(z, F, problem.loss.hessian_product(z.detach(), batch.targets, batch.weights, moved))

    return product


def _dense(product: Callable[[Tensor], Tensor], F: Tensor) -> Tensor:
    """The matrix of each sequence, (n, L, d, L, d): sequences do not meet, so one direction serves all."""
    n, L, d = F.shape
    eye = torch.eye(L * d, dtype=F.dtype, device=F.device).reshape(L * d, 1, L, d)
    rows = [product(part.expand(-1, n, -1, -1)) for part in eye.split(GROUP)]
    return torch.cat(rows).unflatten(0, (L, d)).permute(2, 0, 1, 3, 4)


def _pull(source: Tensor, leaf: Tensor, cotangents: Tensor) -> Tensor:
    """Gradients of ⟨cotangent, source⟩ in a leaf, for k cotangents: (k, *leaf.shape)."""
    nothing = torch.zeros(len(cotangents), *leaf.shape, dtype=leaf.dtype, device=leaf.device)
    if not source.requires_grad:
        return nothing
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    try:
        (found,) = torch.autograd.grad(source, leaf, cotangents, is_grads_batched=True, **options)
    except RuntimeError:  # an operation of a custom loss without a rule for batches
        parts = [torch.autograd.grad(source, leaf, c, **options)[0] for c in cotangents]
        found = None if parts[0] is None else torch.stack(parts)
    return nothing if found is None else found


def _check_size(F: Tensor, limit: int) -> None:
    L, d = F.shape[1:]
    if L * d > limit:
        raise UsageError(
            f"expected at most {limit} entries of attention output per sequence, got {L} · {d} = {L * d}",
            hint="use shorter sequences, a larger limit=, or cs.Hessian(problem).block(…), which forms none",
        )


def _refuse_coupled(product: Callable[[Tensor], Tensor], F: Tensor) -> None:
    """Raise when moving the first sequence changes the gradient of another."""
    if F.shape[0] < 2:
        return
    V = torch.zeros(1, *F.shape, dtype=F.dtype, device=F.device)
    V[0, 0] = torch.randn(F.shape[1:], generator=generator(0), dtype=torch.float64).to(F)
    moved = product(V)[0].flatten(1).abs().amax(1)
    if bool((moved[1:] > 1e-6 * moved[0]).any()):
        raise UsageError(
            "expected a loss that is a sum over sequences, but it couples those of a batch",
            hint="give batches of one sequence each",
        )
