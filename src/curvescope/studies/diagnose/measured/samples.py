"""Single sequences: their losses, gradients and curvature, and which are there more than once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.operators import per_sample
from curvescope.problem import Problem


@dataclass(frozen=True)
class Samples(Result):
    """S sequences; `why` says why their gradients are not known, and is empty where they are."""

    num_sequences: int
    copies: np.ndarray  # of every sequence of the data, the number of the first that equals it: itself
    numbers: np.ndarray  # (S,) which sequence of the data each is; those without a counted target are none
    losses: np.ndarray  # (S,)
    gradient_norms: np.ndarray  # (S,)
    traces: np.ndarray  # (S,) of the GGN of each
    traces_stderr: np.ndarray  # (S,)
    why: str = ""


def measure_samples(problem: Problem, *, num_probes: int, seed: int) -> Samples:
    """Every sequence by itself; traces from probes that all share."""
    copies = first_equal(problem)
    try:
        samples = per_sample(problem)
        with samples.frozen():
            traces = samples.traces("ggn", num_probes=num_probes, seed=seed)
            losses, norms, numbers = samples.losses(), samples.gradient_norms(), samples.sequences
    except UsageError as error:
        none = np.zeros(0)
        return Samples(len(copies), copies, none, none, none, none, none, error.message)
    return Samples(len(copies), copies, numbers, losses, norms, traces.values, traces.stderr)


def first_equal(problem: Problem) -> np.ndarray:
    """For every sequence the number of the first one with the same inputs and targets."""
    seen: dict[tuple[bytes, ...], int] = {}
    found = []
    for batch in problem.batches:
        tensors = [tensor.detach().cpu().contiguous() for tensor in batch.tensors()]
        for i in range(batch.num_sequences):
            key = tuple(tensor[i].numpy().tobytes() for tensor in tensors)
            found.append(seen.setdefault(key, len(found)))
    return np.array(found)
