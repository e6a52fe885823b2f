"""The spectrum at one strength of one way, on every text, and the blocks of it."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

import numpy as np

from curvescope.core.result import Result
from curvescope.data.batches import Batches
from curvescope.models.running.attention.attending import attending
from curvescope.operators import GGN, Hessian
from curvescope.problem import Problem
from curvescope.studies.sinks.lines import Lines, measure_lines, stacked
from curvescope.studies.sinks.ways import Way, sink_mass

GROUPS = {
    "embeddings": ("E", "P", "W_in"),
    "queries, keys": ("L*.W_[QK]", "L*.W_QK"),
    "values, outputs": ("L*.W_[VO]",),
    "feed-forward": ("L*.W_[12gu]", "L*.W_gu"),
    "norms, biases": ("L*.b_*", "*.g", "*.b"),
    "unembedding": ("U",),
}
"""Blocks that are looked at together, by globs."""


@dataclass(frozen=True)
class Effort(Result):
    """How hard to look."""

    num_probes: int
    num_steps: int
    ggn_steps: int
    block_steps: int
    seed: int
    engine: str
    checkpoint: bool


@dataclass(frozen=True)
class Moved(Result):
    """One way at one strength, on X texts."""

    mass: np.ndarray  # (X,) weight that the sink takes; nan where attention is not reached
    loss: np.ndarray  # (X,)
    hessian: Lines
    ggn: Lines  # from one probe


@dataclass(frozen=True)
class Blocks(Result):
    """λ_max of groups of diagonal blocks of the Hessian on one text; an eigenvalue lies within an error."""

    names: list[str]
    values: np.ndarray  # (G,)
    errors: np.ndarray  # (G,)


def measure_moved(texts: list[Problem], way: Way, token: int, effort: Effort, *, reached: bool) -> Moved:
    """Sink mass, loss and both spectra on every text."""
    model, options = texts[0].model, {"engine": effort.engine, "checkpoint": effort.checkpoint}
    found = [_problem(text, way, token) for text in texts]
    masses = [sink_mass(model, text.batches, way) if reached else np.nan for text in found]
    how = {"num_probes": effort.num_probes, "num_steps": effort.num_steps, "seed": effort.seed}
    one = {"num_probes": 1, "num_steps": effort.ggn_steps, "seed": effort.seed}
    with attending(model, way.attending):
        losses = [text.loss_value() for text in found]
        own = [(x * effort.num_probes, text) for x, text in enumerate(found)]  # probes of each text
        hessians = [measure_lines(Hessian(text, **options), **how, first=first) for first, text in own]
        ggns = [measure_lines(GGN(text, **options), **one, first=first) for first, text in own]
    return Moved(np.array(masses), np.array(losses), stacked(hessians), stacked(ggns))


def measure_blocks(text: Problem, way: Way, token: int, effort: Effort) -> Blocks:
    """λ_max of every group on one text."""
    H = Hessian(_problem(text, way, token), engine=effort.engine, checkpoint=effort.checkpoint)  # pyright: ignore[reportArgumentType]
    names, values, errors = [], [], []
    how = {"num_probes": 1, "num_steps": effort.block_steps, "seed": effort.seed}
    with attending(text.model, way.attending):
        for name, globs in groups(text).items():
            ends = measure_lines(H.block(globs), **how).ends()
            names.append(name)
            values.append(ends.top[0])
            errors.append(ends.top_error[0])
    return Blocks(names, np.array(values), np.array(errors))


def groups(problem: Problem) -> dict[str, tuple[str, ...]]:
    """The groups that a model has, with the globs that match something."""
    blocks = [block.name for block in problem.space()]
    found = {
        name: tuple(glob for glob in globs if fnmatch.filter(blocks, glob)) for name, globs in GROUPS.items()
    }
    return {name: globs for name, globs in found.items() if globs}


def _problem(text: Problem, way: Way, token: int) -> Problem:
    batches = text.batches
    assert isinstance(batches, Batches)
    if not way.num_inserted:
        return text
    return Problem(text.model, way.batches(batches, token), text.loss, params=text.choice.params)
