"""Directions at a named point as tokens: whose logits they raise on the direct path to the unembedding."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.geometry.roles import check_vocabulary, has_lens, norm_of, weight
from curvescope.geometry.sphere import project
from curvescope.geometry.vocabulary.decode import TopTokens, top_tokens
from curvescope.geometry.vocabulary.references import Reference, reference
from curvescope.models.capture.points import block_paths
from curvescope.models.model import Model
from curvescope.problem import Problem

HEAD = re.compile(r"L(\d+)\.h(\d+)\.out")
HEADS = re.compile(r"L(\d+)\.attn\.heads")


def decode_at(model: Model, at: str, directions: Tensor, *, k: int = 5) -> TopTokens:
    """The tokens whose logits a step along each direction (m, w) raises most, and lowers most (axis 1).

    A step u of the stream moves the logit of t by P(γ ∘ u_t) · u, up to the scale of the last norm, if
    nothing in between responds; at `final` by u_t · u; what a head gives goes through its W_O first. Logits
    are taken less their mean over the vocabulary, which the softmax does not see.

    Args:
        model: One with a vocabulary.
        at: The point that the directions are of.
        directions: One in each row.
        k: Tokens on each side.
    """
    return top_tokens(in_stream(model, at, directions), written(model, at), k=k, tokenizer=model.tokenizer)


def in_stream(model: Model, at: str, directions: Tensor) -> Tensor:
    """Directions (m, w) of a point as what they add to the stream: (m, d), in float64 on the CPU."""
    v = torch.as_tensor(directions).detach().double().cpu()
    head, heads = HEAD.fullmatch(at), HEADS.fullmatch(at)
    if head or heads:
        name = f"L{head[1]}.h{head[2]}.W_O" if head else f"L{heads[1]}.W_O" if heads else ""
        W_O = weight(model, name)
        if W_O is None:
            raise UsageError(f"expected a model whose W_O is known, {model.name!r} has no {name}")
        return v @ W_O.double()
    d = model.facts.get("d_model")
    if v.dim() != 2 or v.shape[1] != d:
        raise ShapeError(f"expected directions (m, {d}) of the stream at {at!r}, got {tuple(v.shape)}")
    return v


def written(model: Model, at: str) -> Reference:
    """What directions at a point are compared with: rows of tokens, less their mean."""
    check_vocabulary(model)
    if at == "final":
        return reference(model, "raw", which="output", centered=True)
    return reference(model, "logit", centered=True)


def direct_change(problem: Problem, at: str, directions: Tensor, ids: Tensor) -> Tensor:
    """How far a step along each direction (m, w) moves the logits of tokens ids (m, k) on the direct path.

    The products that `decode_at` ranks tokens by, times the scale 1/√(|Px|²/d + ε) of the last norm, held
    fixed, in the mean over the tokens of the data; logits are taken less their mean over the vocabulary. What
    other layers make of the step is left out.
    """
    model = problem.model
    rows = written(model, at)
    places = torch.searchsorted(rows.ids, ids.contiguous())
    own = rows.rows(places.flatten()).view(*ids.shape, -1)
    found = (own * in_stream(model, at, directions)[:, None]).sum(-1)
    return found if at == "final" or not has_lens(model) else found * _mean_scale(problem)


def _mean_scale(problem: Problem) -> float:
    """The mean over tokens of 1/√(|Px|²/d + ε) at the last norm."""
    norm, last = norm_of(problem.model, "ln_f"), f"L{len(block_paths(problem.model)) - 1}.out"
    found = []
    for batch in problem.placed_batches("scale of the last norm"):
        x = project(problem.activations(batch, last)[last].double(), kind=norm.kind)
        found.append(torch.rsqrt(x.square().mean(-1) + norm.eps).flatten().cpu())
    return float(torch.cat(found).mean())
