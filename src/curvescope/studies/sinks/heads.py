"""Where sinks are: weight on the first token, massive activations, and the values that are read there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.data.batches import Batches
from curvescope.geometry.roles import weight
from curvescope.geometry.stream import stream
from curvescope.models.capture import capture
from curvescope.models.model import Model
from curvescope.models.running.attending import patterns

Inputs = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Heads(Result):
    """Sinks of L layers with h heads; what a model does not show is nan, and `notes` say why."""

    mass: np.ndarray  # (L, h) mean weight on the first token over queries behind it
    mass_spread: np.ndarray  # (L, h) standard deviation over sequences
    values: np.ndarray  # (L, h) norm of the first token's value over the mean norm of the others'
    points: list[str]  # of the stream: in, L0, L1, …
    massive: np.ndarray  # (N,) largest |x| over the median |x| at the first token, mean over sequences
    massive_others: np.ndarray  # (N,) the same, mean over the other tokens
    notes: list[str]


def find_sinks(model: Model, batches: Batches) -> Heads:
    """On all sequences; nothing is changed."""
    placed = [batch.map(lambda t: t.to(model.device)).inputs for batch in batches]
    notes: list[str] = []
    mass = _tried(lambda: torch.cat([_masses(model, x) for x in placed]), notes)
    values = _tried(lambda: torch.cat([_value_ratios(model, x) for x in placed]), notes)
    points = _tried(lambda: torch.cat([_massive(model, x) for x in placed]), notes)
    names = [] if points is None else ["in", *(f"L{i}" for i in range(points.shape[-1] - 1))]
    both = np.full((2, 0), np.nan) if points is None else points.mean(0).numpy()
    nothing = np.full((0, 0), np.nan) if mass is None else np.full(mass.shape[1:], np.nan)
    return Heads(
        mass=nothing if mass is None else mass.mean(0).numpy(),
        mass_spread=nothing if mass is None else mass.std(0, correction=0).numpy(),
        values=nothing if values is None else values.mean(0).numpy(),
        points=names,
        massive=both[0],
        massive_others=both[1],
        notes=notes,
    )


def _tried(measure: Callable[[], Tensor], notes: list[str]) -> Tensor | None:
    """What is measured, or None with a note where the model does not show it."""
    try:
        return measure().double().cpu()
    except UsageError as error:
        if str(error) not in notes:
            notes.append(str(error))
        return None


def _masses(model: Model, inputs: Inputs) -> Tensor:
    """(B, L, h)."""
    found = patterns(model, inputs)
    if found[0].shape[-2] < 2:
        raise UsageError("expected sequences of at least two tokens, to see what later ones look at")
    return torch.stack([P[:, :, 1:, 0].mean(-1) for P in found], dim=1)


def _value_ratios(model: Model, inputs: Inputs) -> Tensor:
    """‖v_0‖ over the mean of ‖v_j‖, j ≥ 1, for every sequence: (B, L, h); heads of a group share theirs."""
    reads = capture(model, inputs, "L*.attn.in")
    h, kv = int(model.facts["n_heads"]), int(model.facts.get("n_kv_heads", model.facts["n_heads"]))
    layers = []
    for i in range(int(model.facts["n_layers"])):
        x, ratios = reads[f"L{i}.attn.in"].cpu(), []
        for j in range(kv):
            W, b = weight(model, f"L{i}.h{j}.W_V"), weight(model, f"L{i}.h{j}.b_V")
            if W is None:
                raise UsageError(f"the values of single heads of {model.name} are not known")
            norms = (x @ W if b is None else x @ W + b).norm(dim=-1)
            ratios.append(norms[:, 0] / norms[:, 1:].mean(-1))
        layers.append(torch.stack(ratios, dim=-1).repeat_interleave(h // kv, dim=-1))
    return torch.stack(layers, dim=1)


def _massive(model: Model, inputs: Inputs) -> Tensor:
    """Largest over median |x| at the first token, and the mean over the others: (B, 2, L + 1)."""
    sizes = stream(model, inputs).blocks.abs()  # (B, T, N, d)
    ratios = sizes.amax(-1) / sizes.median(-1).values.clamp_min(torch.finfo(sizes.dtype).tiny)
    return torch.stack([ratios[:, 0], ratios[:, 1:].mean(1)], dim=1)
