"""What heads look at, and what they write.

liveness   (1 − Σ_j p_ij²) / (1 − 1/n_i), mean over queries i that see n_i > 1 keys: the trace of the
           softmax's Jacobian over that of equal weights, 1 for equal weights, 0 where all are on one key
mass       weight on the first key, mean over queries behind it
written    root mean square over tokens of what a head adds to the stream, P V W_O
change     of the loss without the head, for those that write less than a share of the usual
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.geometry.causal.steering import intervene
from curvescope.geometry.roles import weight
from curvescope.models.capture import capture
from curvescope.models.model import Model
from curvescope.models.running.attending import patterns
from curvescope.problem import Problem

SILENT = 0.01  # of the usual: heads that are ablated to see what they are for
Inputs = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Heads(Result):
    """L layers with h heads over S sequences; what is not known is empty, and `why…` says why."""

    liveness: np.ndarray  # (S, L, h)
    mass: np.ndarray  # (S, L, h)
    written: np.ndarray  # (L, h)
    change: np.ndarray  # (L, h) nan where the head was not ablated
    why_patterns: str = ""
    why_written: str = ""


def measure_heads(problem: Problem) -> Heads:
    """On all sequences; nothing is changed."""
    model, nothing = problem.model, np.zeros((0, 0))
    placed = [batch.map(problem.placed).inputs for batch in problem.batches]
    live = mass = np.zeros((0, 0, 0))
    written = change = nothing
    why_patterns = why_written = ""
    try:
        seen = [_attention(model, inputs) for inputs in placed]
        live, mass = (torch.cat([both[k] for both in seen]).cpu().numpy() for k in (0, 1))
    except UsageError as error:
        why_patterns = error.message
    try:
        written = _written(model, placed)
        change = _changes(problem, written)
    except (UsageError, KeyError) as error:
        why_written = error.message if isinstance(error, UsageError) else f"no {error} is known"
    return Heads(live, mass, written, change, why_patterns, why_written)


def _attention(model: Model, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Liveness and mass: (B, L, h) each."""
    live, mass = [], []
    for P in patterns(model, inputs):
        P = P.double()
        T = P.shape[-1]
        if T < 2 or P.shape[-2] != T:
            raise UsageError("expected sequences of at least two tokens that look at themselves")
        causal = bool((P.triu(1) == 0).all())
        seen = torch.arange(1, T + 1, device=P.device) if causal else torch.full((T,), T, device=P.device)
        spread = (1 - P.square().sum(-1))[..., 1:] / (1 - 1 / seen[1:])
        live.append(spread.mean(-1))
        mass.append(P[..., 1:, 0].mean(-1))
    return torch.stack(live, dim=1), torch.stack(mass, dim=1)


def _written(model: Model, placed: list[Inputs]) -> np.ndarray:
    """(L, h)."""
    h, k = int(model.facts["n_heads"]), int(model.facts["d_head"])
    num_layers = int(model.facts["n_layers"])
    squares, count = torch.zeros(num_layers, h, dtype=torch.float64), 0
    for inputs in placed:
        F = capture(model, inputs, "L*.attn.heads")
        for i in range(num_layers):
            own = F[f"L{i}.attn.heads"].reshape(-1, h * k).cpu().double()
            count += len(own) if i == 0 else 0
            for j in range(h):
                W_O = weight(model, f"L{i}.h{j}.W_O")
                if W_O is None:
                    raise UsageError(f"what single heads of {model.name} write is not known")
                squares[i, j] += (own[:, k * j : k * j + k] @ W_O.double()).square().sum()
    return (squares / count).sqrt().numpy()


def _changes(problem: Problem, written: np.ndarray) -> np.ndarray:
    """Of the loss, without each of the heads that write hardly anything."""
    found, usual = np.full(written.shape, np.nan), float(np.median(written))
    for i, j in zip(*np.nonzero(written < SILENT * usual), strict=True):
        found[i, j] = intervene(problem, f"L{i}.h{j}.out", torch.neg).loss_change[0]
    return found
