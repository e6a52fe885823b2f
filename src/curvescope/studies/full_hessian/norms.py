"""Norms of groups of blocks and of their diagonal Hessian blocks, step by step through the training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from curvescope.algorithms.blocks.probes import own_probes
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.studies.full_hessian.settings import Config
from curvescope.studies.full_hessian.training import Trained, at

GROUPS = {
    "Q": ("L0.W_Q",),
    "K": ("L0.W_K",),
    "V": ("L0.W_V",),
    "O": ("L0.W_O",),
    "norms": ("L0.ln*",),
    "feed-forward": ("L0.W_[12]", "L0.b_[12]"),
    "embedding": ("E", "P"),
    "head": ("U", "b_U"),
}
"""Blocks by the name of their group; the paper draws all but the output matrix O, embedding and head."""
MAX_EXACT = 64  # rows of a group that is written out


@dataclass(frozen=True)
class Norms(Result):
    """Of S steps and G groups."""

    groups: list[str]
    sizes: np.ndarray  # (G,) parameters
    steps: np.ndarray  # (S,)
    weights: np.ndarray  # (S, G) ‖w‖
    hessian: np.ndarray  # (S, G) ‖H_gg‖_F
    low: np.ndarray  # (S, G) ends of its 95 % interval
    high: np.ndarray
    exact: np.ndarray  # (G,) written out, no probes

    def of(self, values: np.ndarray, group: str) -> np.ndarray:
        """(S,) the values of a group."""
        return values[:, self.groups.index(group)]


def measure(problem: Problem, cfg: Config, found: Trained) -> Norms:
    """Of the network of one seed, on the batch that its Hessian is of."""
    names = list(GROUPS)
    shape = (len(found.steps), len(names))
    weights, hessian, low, high = (np.empty(shape) for _ in range(4))
    exact = np.zeros(len(names), dtype=bool)
    for s, point in track(list(enumerate(found.weights)), "norms of blocks"):
        here = at(problem, point)
        H = Hessian(here)
        for g, globs in enumerate(GROUPS.values()):
            A = H.block(list(globs))
            own = own_probes(
                A, num_probes=cfg.num_probes, num_steps=cfg.num_steps, max_exact=MAX_EXACT, seed=found.seed
            )
            weights[s, g] = float(
                torch.linalg.vector_norm(A.space.gather(dict(here.named_parameters())).double())
            )
            hessian[s, g], low[s, g], high[s, g] = own.norm, own.norm_low, own.norm_high
            exact[g] = own.exact
    sizes = np.array([problem.space(*globs).size for globs in GROUPS.values()])
    return Norms(names, sizes, found.steps, weights, hessian, low, high, exact)
