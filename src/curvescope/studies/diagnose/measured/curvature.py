"""The Hessian as a whole, block by block, and on disjoint parts of the data.

whole   P Lanczos runs: both ends of the spectrum, and the width of its bulk
rows    E‖(H v)_b‖² = ‖H_b:‖², the rows of a block b, for all blocks from the same few probes v
blocks  both ends of H_bb for every matrix
parts   λ_max, and the gradient by layers, on K disjoint parts of the data
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import torch

from curvescope.algorithms.blocks.ends import extreme_ends
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.core.seeds import probes
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.studies.sinks.lines import Lines, measure_lines
from curvescope.studies.sinks.study import cut_texts

FIRST = 100  # number of the first shared probe: not one of the Lanczos runs'
LAYER = re.compile(r"L(\d+)\.")
INSIDE = ("W_Q", "W_K", "W_QK")  # what only the softmax sees


@dataclass(frozen=True)
class Effort:
    """How hard to look, and how products are executed."""

    num_probes: int
    num_steps: int
    num_shared: int
    block_steps: int
    part_steps: int
    num_parts: int
    seed: int
    engine: str = "auto"
    checkpoint: bool = False


@dataclass(frozen=True)
class Whole(Result):
    """The loss, and the spectrum of the Hessian."""

    loss: float
    uniform: float  # loss of equal probabilities, log V; nan where outputs are no classes
    size: int  # n
    lines: Lines  # of one operator


@dataclass(frozen=True)
class Rows(Result):
    """Squared norms ‖(H v)_b‖² of B blocks for P probes v."""

    names: list[str]
    sizes: np.ndarray  # (B,)
    squares: np.ndarray  # (P, B)


@dataclass(frozen=True)
class BlockEnds(Result):
    """λ_max of every matrix H_bb, with its residual and the bound that it exceeds 5 times in 100."""

    names: list[str]
    top: np.ndarray  # (B,)
    error: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Parts(Result):
    """λ_max on K disjoint parts of the data, and squared gradient norms of L layers."""

    top: np.ndarray  # (K,)
    error: np.ndarray  # (K,) residuals
    gradient: np.ndarray  # (L,) of all data
    without: np.ndarray  # (K, L) of all data but one part


def measure_whole(problem: Problem, effort: Effort) -> Whole:
    """The ends and the bulk."""
    H = Hessian(problem, engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
    lines = measure_lines(H, num_probes=effort.num_probes, num_steps=effort.num_steps, seed=effort.seed)
    return Whole(problem.loss_value(), uniform_loss(problem), H.shape[0], lines)


def uniform_loss(problem: Problem) -> float:
    """log V, the cross-entropy of outputs that prefer nothing; nan for another loss, and for a sum."""
    batch = problem.batches[0].map(problem.placed)
    with torch.no_grad():
        z = problem.outputs(batch[:1])
    axis = problem.loss.class_axis(z)
    return math.nan if axis is None or not problem.loss.divided else math.log(z.shape[axis])


def measure_rows(problem: Problem, effort: Effort) -> Rows:
    """All blocks from shared probes."""
    H = Hessian(problem, engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
    found = []
    with H.frozen():
        for i in track(range(effort.num_shared), "probes"):
            v = probes(H.shape[0], 1, seed=effort.seed, first=FIRST + i, dtype=H.dtype, device=H.device)
            parts = H.space.to_dict((H @ v)[:, 0])
            found.append([float(part.double().square().sum()) for part in parts.values()])
    sizes = [block.size for block in H.space]
    return Rows([block.name for block in H.space], np.array(sizes), np.array(found))


def matrices(problem: Problem) -> list[str]:
    """Blocks with two axes or more among what varies."""
    return [block.name for block in problem.space() if len(block.shape) > 1]


def measure_blocks(problem: Problem, effort: Effort) -> BlockEnds:
    """Matrix by matrix, a few Lanczos steps each."""
    names, found = matrices(problem), []
    for name in track(names, "blocks"):
        H = Hessian(problem, name, engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
        found.append(extreme_ends(H, num_steps=effort.block_steps, seed=effort.seed))
    return BlockEnds(
        names,
        np.array([ends.values[1] for ends in found]),
        np.array([ends.residuals[1] for ends in found]),
        np.array([ends.high for ends in found]),
    )


def measure_parts(problem: Problem, effort: Effort) -> Parts:
    """Disjoint parts, one after the other."""
    parts = cut_texts(problem, effort.num_parts)
    tops, errors, gradients, shares = [], [], [], []
    for part in track(parts, "parts of the data"):
        H = Hessian(part, engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
        ends = extreme_ends(H, num_steps=effort.part_steps, seed=effort.seed)
        tops.append(ends.values[1])
        errors.append(ends.residuals[1])
        gradients.append(part.gradient())
        shares.append(part.num_terms / problem.num_terms)
    whole = sum((w * g for w, g in zip(shares, gradients, strict=True)), torch.zeros_like(gradients[0]))
    without = [by_layer(problem, whole - w * g) for w, g in zip(shares, gradients, strict=True)]
    return Parts(np.array(tops), np.array(errors), by_layer(problem, whole), np.array(without))


def by_layer(problem: Problem, vector: torch.Tensor) -> np.ndarray:
    """Squared norms of a vector over the matrices of each layer but W_Q and W_K: (L,), empty without layers.

    Queries and keys get hardly any gradient where all weights are equal, which says nothing of depth.
    """
    found: dict[int, float] = {}
    for name, part in problem.space().to_dict(vector).items():
        layer = LAYER.match(name)
        if layer is not None and part.dim() > 1 and not name.endswith(INSIDE):
            found[int(layer[1])] = found.get(int(layer[1]), 0.0) + float(part.double().square().sum())
    return np.array([found[i] for i in sorted(found)])
