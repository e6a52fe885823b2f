"""Readout of a model applied to any state: the logit lens, and the direction of a token.

With a norm before the unembedding, logit_t = n(x) · P(γ_f ∘ u_t) + β_f · u_t + b_t: on the sphere of
normalized states a token is the direction P(γ_f ∘ u_t), where P centers for LayerNorm and is 1 for RMSNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvescope.geometry.roles import has_lens, norm_of, weight
from curvescope.geometry.sphere import StreamNorm, project
from curvescope.geometry.stream import Stream
from curvescope.models.capture.activation_points import block_paths
from curvescope.models.forward_errors import check_vocabulary
from curvescope.models.model import Model
from curvescope.models.running.patching import evaluating

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}  # of the largest logit, see `readout`


@dataclass(frozen=True, eq=False)
class Readout:
    """Readout of a model: final norm (kind `none` without one), unembedding U (d, V) and its bias.

    If logits are not norm(x) U + b (a head with a hidden layer, a cap on the logits), `own_end` runs the
    model's own last modules on the states. `notes` explain such details.
    """

    norm: StreamNorm
    U: Tensor
    bias: Tensor | None = None
    own_end: Callable[[Tensor], Tensor] | None = None
    has_logits: bool = True
    notes: tuple[str, ...] = ()

    @property
    def vocabulary(self) -> int:
        """Columns of the unembedding."""
        return self.U.shape[1]

    @property
    def center(self) -> bool:
        """Return True if the norm subtracts the mean."""
        return self.norm.kind == "layernorm"

    def unit(self, x: Tensor) -> Tensor:
        """Project a state to the unit sphere: Px / |Px|, without ε."""
        x = project(x, kind=self.norm.kind)
        return x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)

    def token(self, ids: Tensor) -> Tensor:
        """Return the unit directions P(γ_f ∘ u_t) of tokens, in the shape (*ids.shape, d)."""
        return self.unit(self.norm.direction(self.U.T[ids]))

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (…, V) that the model computes from states (…, d) after its last block."""
        if self.own_end is not None:
            return self.own_end(x)
        z = self.norm(x) @ self.U
        return z if self.bias is None else z + self.bias


def readout(model: Model, residual_stream: Stream) -> Readout:
    """Return the readout of a model, after checking that it maps the last states to the model's own logits.

    Args:
        residual_stream: a stream of this model; its last points and outputs serve as the check.
    """
    check_vocabulary(model)
    linear = _linear_end(model)
    last, outputs = residual_stream.points[:, :, -1], residual_stream.outputs
    fits = outputs.shape[:2] == last.shape[:2] and outputs.shape[-1] >= model.facts["vocab_size"]
    if not fits or not _is_lm(model):
        note = "no head over the vocabulary: there is no lens, and tokens are represented by their embeddings"
        return replace(linear, has_logits=False, notes=(*linear.notes, note))
    if linear.U.shape == (last.shape[-1], outputs.shape[-1]):
        error = float((linear.logits(last) - outputs).abs().max())
        if error <= TOLERANCE[model.dtype] * max(float(outputs.abs().max()), 1.0):
            return linear
    note = "the head is more than a norm and a matrix: the lens runs the model's own head on every state"
    return replace(linear, own_end=lambda x: run_end(model, x), notes=(*linear.notes, note))


def run_end(model: Model, x: Tensor) -> Tensor:
    """Return the outputs (…, V) of the model after replacing the output of its last block by states x (…, d).

    Each state forms a sequence of length one, because tokens do not interact after the last block.
    """
    block = model.module.get_submodule(block_paths(model)[-1])
    single = x.reshape(-1, 1, x.shape[-1])
    ids = torch.zeros(single.shape[:2], dtype=torch.int64, device=x.device)

    def replace_output(_module: object, _arguments: object, output: object) -> object:
        return (single, *output[1:]) if isinstance(output, tuple) else single

    handle = block.register_forward_hook(replace_output)
    try:
        with evaluating(model.module), torch.no_grad():
            return model.forward({}, ids).reshape(*x.shape[:-1], -1)
    finally:
        handle.remove()


def _linear_end(model: Model) -> Readout:
    """Return norm and unembedding from the model's blocks, in its dtype and on its device."""
    E, U, bias = (weight(model, name) for name in ("E", "U", "b_U"))
    assert E is not None

    def placed(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(dtype=model.dtype, device=model.device)

    U = placed(E.T if U is None else U)
    assert U is not None
    if has_lens(model):
        norm = norm_of(model, "ln_f")
        return Readout(replace(norm, gamma=placed(norm.gamma), beta=placed(norm.beta)), U, placed(bias))
    kind = "post-norm" if model.facts.get("norm") == "post" else "no norm before the unembedding"
    return Readout(StreamNorm("none"), U, placed(bias), notes=(f"{kind}: tokens are u_t, not P(γ ∘ u_t)",))


def _is_lm(model: Model) -> bool:
    if model.facts.get("kind") == "transformer":
        return model.facts.get("outputs") == "tokens"
    return model.facts.get("task", "causal-lm") in ("causal-lm", "masked-lm")
