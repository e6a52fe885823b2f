"""Direct logit attribution: the contribution of every head, feed-forward network and bias to a logit.

In a pre-norm model the last state is a sum x = Σ_c x_c over the embedding, the outputs of heads and
feed-forward networks, and biases. With the scale of the last norm held fixed at s(x) = 1/√(|Px|²/d + ε), the
logit of token t is exactly the sum

    logit_t = Σ_c s(x) x_c · P(γ ∘ u_t) + β · u_t + b_t.

The terms describe the direct path only. Without part c the logit would change by another amount, because
later layers also read x_c and the scale changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.result import Result
from curvescope.geometry.roles import embedding, has_lens, norm_kind, norm_of, weight
from curvescope.geometry.sphere import StreamNorm, project
from curvescope.models.capture.activation_points import block_paths, find_point, point_names, skip_scale
from curvescope.models.capture.hook_sites import ActivationReader
from curvescope.models.forward_errors import check_vocabulary
from curvescope.models.model import Model
from curvescope.models.running.patching import evaluating

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative; far smaller than any missing part


@dataclass(frozen=True)
class Attribution(Result):
    """Contributions to the logits of M tokens; they add up to `logits`."""

    model: str
    parts: list[str]  # embed, L0.h0, …, L0.b_O, L0.ff, …, ln_f.b, b_U
    values: np.ndarray  # (C, M)
    logits: np.ndarray  # (M,) minus the mean over the vocabulary, if `centered`
    sequence: np.ndarray  # (M,)
    position: np.ndarray  # (M,)
    ids: np.ndarray  # (M,) ids of the tokens
    centered: bool
    error: float  # largest difference between the sum of the parts and the model's own logit


def logit_attribution(
    model: Model, inputs: Tensor, tokens: Tensor | None = None, *, centered: bool = True
) -> Attribution:
    """Attribute the logits of given tokens to the parts of the model.

    Args:
        model: A pre-norm language model whose heads are known, or one without norms.
        inputs: Ids (B, T).
        tokens: Ids (B, T) whose logits are attributed, −100 for none; by default the next input tokens.
        centered: Subtract the mean over the vocabulary from the logits, which does not change the softmax.
    """
    _check(model)
    target_ids = torch.nn.functional.pad(inputs[:, 1:], (0, 1), value=-100) if tokens is None else tokens
    sequence, position = (target_ids.cpu() >= 0).nonzero(as_tuple=True)
    ids = target_ids.cpu()[sequence, position]
    outputs, activations = _run(model, inputs)
    names, contributions = _contributions(model, activations, (sequence, position), ids, centered)
    logits_at = outputs.double().cpu()[sequence, position]
    model_logits = logits_at.gather(-1, ids[:, None])[:, 0] - (logits_at.mean(-1) if centered else 0.0)
    _check_sum(
        contributions.sum(0),
        model_logits,
        model,
        "its logits are not a norm and a matrix after the last layer",
    )
    return Attribution(
        model=model.name,
        parts=names,
        values=contributions.numpy(),
        logits=model_logits.numpy(),
        sequence=sequence.numpy(),
        position=position.numpy(),
        ids=ids.numpy(),
        centered=centered,
        error=float((contributions.sum(0) - model_logits).abs().max()),
    )


def _contributions(
    model: Model,
    activations: dict[str, Tensor],
    positions: tuple[Tensor, Tensor],
    ids: Tensor,
    centered: bool,
) -> tuple[list[str], Tensor]:
    """Return the names of the parts and their contributions to the logits of `ids` at `positions`: (C, M)."""
    rows = embedding(model, "output").double()
    u = rows[ids] - rows.mean(0) if centered else rows[ids]
    norm = norm_of(model, "ln_f") if has_lens(model) else StreamNorm("none")
    last_state = activations[f"L{len(block_paths(model)) - 1}.out"][positions]
    r, total = norm.direction(u) * _scale(norm, last_state), torch.zeros_like(last_state)
    contributions = {}
    for name, part in _parts(model, activations, positions):
        total += part
        contributions[name] = (part * r).sum(-1)
    _check_sum(total, last_state, model, "the stream is not the sum of the outputs of its layers")
    for name, shift in (("ln_f.b", norm.shift(u)), ("b_U", _bias(model, ids, centered))):
        if shift is not None and bool(shift.any()):
            contributions[name] = shift
    return list(contributions), torch.stack(list(contributions.values()))


def _check(model: Model) -> None:
    check_vocabulary(model)
    linear = model.facts.get("norm") == "pre" or norm_kind(model) == "none"
    if not (skip_scale(model) and linear and "L0.attn.heads" in point_names(model)):
        raise UsageError(
            f"expected a model whose last state is the sum of the outputs of its layers, got {model.name!r}",
            hint="pre-norm language models of the zoo, Hugging Face and TransformerLens are such models",
        )


def _run(model: Model, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs, and the activations from which the parts are computed, in float64 on the CPU."""
    point_set, layers = set(point_names(model)), range(len(block_paths(model)))
    names = ["L0.in", *(f"L{i}.{part}" for i in layers for part in ("attn.heads", "ff.out"))]
    names = [name for name in (*names, f"L{layers[-1]}.out") if name in point_set]
    reader = ActivationReader([find_point(model, name) for name in names], len(inputs))
    with evaluating(model.module), torch.no_grad():
        outputs = model.forward({}, inputs.to(model.device), changes=reader.changes())
    return outputs, {name: x.double().cpu() for name, x in reader.values.items()}


def _parts(
    model: Model, activations: dict[str, Tensor], positions: tuple[Tensor, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Return all parts of the last state at some positions, (M, d) each."""
    num_layers, skip = len(block_paths(model)), skip_scale(model)
    yield "embed", activations["L0.in"][positions] * skip**num_layers
    for i in range(num_layers):
        skip_factor = skip ** (num_layers - 1 - i)  # factor of the skip connections after the layer
        head_outputs = list(_heads(model, i, activations[f"L{i}.attn.heads"][positions]))
        gain = _post_gain(model, f"L{i}.ln1_post", sum(part for _, part in head_outputs)) * skip_factor
        yield from ((name, part * gain) for name, part in head_outputs)
        if f"L{i}.ff.out" in activations:
            ff = activations[f"L{i}.ff.out"][positions]
            includes_norm = model.facts.get("kind") == "hooked_transformer"  # its ff.out includes that norm
            yield (
                f"L{i}.ff",
                ff * (1.0 if includes_norm else _post_gain(model, f"L{i}.ln2_post", ff)) * skip_factor,
            )


def _heads(model: Model, i: int, F: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Return the output of every head, from the input F (M, h k) of W_O, and the bias."""
    k = model.facts["d_head"]
    for j, F_head in enumerate(F.split(k, dim=-1)):
        W_O = weight(model, f"L{i}.h{j}.W_O")
        assert W_O is not None
        yield f"L{i}.h{j}", F_head @ W_O.double()
    b_O = weight(model, f"L{i}.b_O")
    if b_O is not None:
        yield f"L{i}.b_O", b_O.double().expand(len(F), -1)


def _post_gain(model: Model, role: str, total: Tensor | int) -> Tensor | float:
    """Return the factor of a norm after a sublayer, with its scale held fixed; 1 without such a norm."""
    if f"{role}.g" not in model.blocks:
        return 1.0
    norm = norm_of(model, role)
    assert isinstance(total, Tensor)
    gain = _scale(norm, total)
    return gain if norm.gamma is None else gain * norm.gamma


def _scale(norm: StreamNorm, x: Tensor) -> Tensor:
    """Return 1/√(|Px|²/d + ε): (M, 1)."""
    if norm.kind == "none":
        return torch.ones_like(x[:, :1])
    return torch.rsqrt(project(x, kind=norm.kind).square().mean(-1, keepdim=True) + norm.eps)


def _bias(model: Model, ids: Tensor, centered: bool) -> Tensor | None:
    b = weight(model, "b_U")
    if b is None:
        return None
    return b.double()[ids] - (b.double().mean() if centered else 0.0)


def _check_sum(computed: Tensor, expected: Tensor, model: Model, reason: str) -> None:
    error, size = float((computed - expected).abs().max()), float(expected.abs().max())
    if not error <= TOLERANCE.get(model.dtype, 0.05) * max(size, 1.0):
        raise CurvescopeError(f"cannot attribute logits of {model.name}: {reason} (difference {error:.1e})")
