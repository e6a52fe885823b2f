"""Norms of the blocks of a network's derivatives against the scale σ of its inputs, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from curvescope.core.result import Result
from curvescope.core.tensors.targets import IGNORED
from curvescope.operators import GGN, FunctionalHessian
from curvescope.papers.ormaniec2025.reviewers.setting import addition_batch, embedded, problem
from curvescope.problem import Problem

PARTS = ("gradient", "H_o", "H_f", "H")
Make = Callable[[int], nn.Module]
MakeProblem = Callable[[int, float], Problem]


@dataclass(frozen=True)
class Sweep(Result):
    """Frobenius norms of diagonal blocks, and what the loss hands to the network's outputs F."""

    blocks: list[str]  # b of them
    sizes: list[int]  # parameters of each
    sigma: np.ndarray  # (S,)
    norms: np.ndarray  # (seeds, S, 4, b) in the order of PARTS
    slope: np.ndarray  # (seeds, S) ‖∂ℓ/∂F‖ of a term, root mean square over those that count

    def curve(self, part: str, block: str) -> np.ndarray:
        """Norms of a block, (seeds, S)."""
        return self.norms[:, :, PARTS.index(part), self.blocks.index(block)]


def sweep(make: Make, sigma: Sequence[float] | np.ndarray, *blocks: str, seeds: int, sequences: int) -> Sweep:
    """A network on the addition task under cross-entropy; `blocks` are globs."""
    batch = addition_batch(sequences)

    def at(seed: int, scale: float) -> Problem:
        return problem(make(seed), scale * embedded(batch, seed), batch.targets)

    return sweep_of(at, sigma, *blocks, seeds=seeds)


def sweep_of(at: MakeProblem, sigma: Sequence[float] | np.ndarray, *blocks: str, seeds: int) -> Sweep:
    """The problems at(seed, σ)."""
    norms, slope, first = [], [], at(0, float(sigma[0]))
    for seed in range(seeds):
        found = [at(seed, float(scale)) for scale in sigma]
        norms.append([block_norms(one, *blocks) for one in found])
        slope.append([loss_slope(one) for one in found])
    space = first.space(*blocks)
    return Sweep(
        [block.name for block in space], [block.size for block in space], np.asarray(sigma, dtype=float),
        np.array(norms), np.array(slope),
    )  # fmt: skip


def block_norms(one: Problem, *blocks: str) -> np.ndarray:
    """Of gradient, H_o, H_f and H = H_o + H_f, exactly, from matrices that are written out: (4, b)."""
    space = one.space(*blocks).in_blocks()
    operators = [kind(one, *blocks, engine="autograd").in_blocks() for kind in (GGN, FunctionalHessian)]
    outer, functional = (op.to_dense() for op in operators)
    gradient = one.space(*blocks).convert(one.gradient(*blocks), space)
    whole = outer + functional
    cuts = [space.slices[block.name] for block in space]
    rows = [[float(gradient[cut].norm()) for cut in cuts]]
    rows += [[float(H[cut, cut].norm()) for cut in cuts] for H in (outer, functional, whole)]
    return np.array(rows)


def loss_slope(one: Problem) -> float:
    """‖∂ℓ/∂F‖ of a term, root mean square over the positions that count.

    It is 2(F − Y) for the loss "mse_mean", and p − y for cross-entropy.
    """
    batch = next(iter(one.placed_batches("outputs")))
    targets = batch.targets
    assert isinstance(targets, Tensor)
    with torch.no_grad():
        G = one.loss.gradient(one.outputs(batch), targets, batch.weights)
    counted = targets != IGNORED if batch.weights is None else batch.weights.bool()
    return float(G[counted].square().sum(-1).mean().sqrt())
