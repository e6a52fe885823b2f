"""How large the stream is where the layers begin, and how much they add to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from curvescope.core.errors import CurvescopeError
from curvescope.core.result import Result
from curvescope.geometry.stream import stream
from curvescope.problem import Problem


@dataclass(frozen=True)
class Depth(Result):
    """Root mean squares over the tokens of S sequences; `why` says why they are not known."""

    embedded: np.ndarray  # (S,) of the stream where the layers begin
    added: np.ndarray  # (S,) of what all layers have added at the end
    norm: str  # where norms stand: pre, post, none; "" where that is not known
    num_layers: int
    why: str = ""


def measure_depth(problem: Problem) -> Depth:
    """On all sequences."""
    model = problem.model
    norm, layers = str(model.facts.get("norm", "")), int(model.facts.get("n_layers", 0))
    embedded, added = [], []
    try:
        for batch in problem.batches:
            points = stream(model, batch.map(problem.placed).inputs).blocks.double()
            first, last = points[:, :, 0], points[:, :, -1]
            embedded.append(_rms(first))
            added.append(_rms(last - first))
    except (CurvescopeError, KeyError) as error:
        words = error.message if isinstance(error, CurvescopeError) else f"no {error} is known"
        return Depth(np.zeros(0), np.zeros(0), norm, layers, words)
    return Depth(np.concatenate(embedded), np.concatenate(added), norm, layers)


def _rms(x: torch.Tensor) -> np.ndarray:
    """Of each sequence of (B, T, d)."""
    return x.square().mean((1, 2)).sqrt().cpu().numpy()
