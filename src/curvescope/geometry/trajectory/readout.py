"""Readout of a model applied to any state: the logit lens, and the direction of a token.

With a norm before the unembedding, logit_t = n(x) · P(γ_f ∘ u_t) + β_f · u_t + b_t: on the sphere of
normalized states a token is the direction P(γ_f ∘ u_t) (P centers for LayerNorm, is 1 for RMSNorm).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvescope.geometry.roles import has_lens, norm_of, weight
from curvescope.geometry.sphere import Norm, project
from curvescope.geometry.stream import Stream
from curvescope.models.capture.activation_points import block_paths
from curvescope.models.forward_errors import check_vocabulary
from curvescope.models.model import Model
from curvescope.models.running.patching import evaluating

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}  # of the largest logit, see `readout`


@dataclass(frozen=True, eq=False)
class Readout:
    """Readout of a model: final norm (kind `none` without one), unembedding U (d, V), its bias.

    `own_end` is set where logits are not norm(x) U + b (a head with a hidden layer, a cap on the logits): the
    model's own end is then run on the states. `notes` say what a reader should know.
    """

    norm: Norm
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
        """Return True if the norm takes the mean away."""
        return self.norm.kind == "layernorm"

    def unit(self, x: Tensor) -> Tensor:
        """Project a state to the unit sphere: Px / |Px|, without ε."""
        x = project(x, kind=self.norm.kind)
        return x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)

    def token(self, ids: Tensor) -> Tensor:
        """Unit directions P(γ_f ∘ u_t) of tokens, in the shape of `ids` with d behind."""
        return self.unit(self.norm.direction(self.U.T[ids]))

    def logits(self, x: Tensor) -> Tensor:
        """Logits (…, V) of states (…, d), as the model would read them after its last block."""
        if self.own_end is not None:
            return self.own_end(x)
        z = self.norm(x) @ self.U
        return z if self.bias is None else z + self.bias


def readout(model: Model, seen: Stream) -> Readout:
    """The model's end, checked on a stream: the lens at the last point must be the model's own logits.

    Args:
        seen: a stream of this model; its last points and outputs are the check.
    """
    check_vocabulary(model)
    found = _linear_end(model)
    last, outputs = seen.points[:, :, -1], seen.outputs
    fits = outputs.shape[:2] == last.shape[:2] and outputs.shape[-1] >= model.facts["vocab_size"]
    if not fits or not _is_lm(model):
        note = "no head over the vocabulary: the lens is left out, tokens are their embeddings"
        return replace(found, has_logits=False, notes=(*found.notes, note))
    if found.U.shape == (last.shape[-1], outputs.shape[-1]):
        error = float((found.logits(last) - outputs).abs().max())
        if error <= TOLERANCE[model.dtype] * max(float(outputs.abs().max()), 1.0):
            return found
    note = "the head is more than a norm and a matrix: every state is read by the model's own end"
    return replace(found, own_end=lambda x: run_end(model, x), notes=(*found.notes, note))


def run_end(model: Model, x: Tensor) -> Tensor:
    """Outputs (…, V) of the model with the states x (…, d) put in place of what its last block returns.

    Each state is a sequence of its own: behind the last block tokens do not meet.
    """
    block = model.module.get_submodule(block_paths(model)[-1])
    alone = x.reshape(-1, 1, x.shape[-1])
    ids = torch.zeros(alone.shape[:2], dtype=torch.int64, device=x.device)

    def put(_module: object, _arguments: object, output: object) -> object:
        return (alone, *output[1:]) if isinstance(output, tuple) else alone

    handle = block.register_forward_hook(put)
    try:
        with evaluating(model.module), torch.no_grad():
            return model.forward({}, ids).reshape(*x.shape[:-1], -1)
    finally:
        handle.remove()


def _linear_end(model: Model) -> Readout:
    """Norm and unembedding from the model's blocks, in its own type and place."""
    E, U, bias = (weight(model, name) for name in ("E", "U", "b_U"))
    assert E is not None

    def here(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(dtype=model.dtype, device=model.device)

    U = here(E.T if U is None else U)
    assert U is not None
    if has_lens(model):
        norm = norm_of(model, "ln_f")
        return Readout(replace(norm, gamma=here(norm.gamma), beta=here(norm.beta)), U, here(bias))
    where = "post-norm" if model.facts.get("norm") == "post" else "no norm before the unembedding"
    return Readout(Norm("none"), U, here(bias), notes=(f"{where}: tokens are u_t, not P(γ ∘ u_t)",))


def _is_lm(model: Model) -> bool:
    if model.facts.get("kind") == "transformer":
        return model.facts.get("outputs") == "tokens"
    return model.facts.get("task", "causal-lm") in ("causal-lm", "masked-lm")
