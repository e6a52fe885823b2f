"""Memory that a measurement takes in addition to training, and a plan that keeps it to a limit.

A measurement keeps vectors as long as the parameters (a basis with its products, probes with theirs) and the
graph of one batch. The graph grows with the sequences in it, so a limit cuts the probe batches: a loss is a
sum over terms that is divided once, and products do not depend on how its data are cut.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from curvescope.core.errors import UsageError
from curvescope.core.number_format import data_size, plural
from curvescope.data.batches import Batch, Batches
from curvescope.engines.graph_cache import GRAPH_SIZE
from curvescope.engines.memory import result_bytes
from curvescope.monitor.measurement import Effort
from curvescope.problem import Problem

UNITS = {"": 0, "B": 0, "KIB": 10, "MIB": 20, "GIB": 30, "TIB": 40, "K": 10, "M": 20, "G": 30, "T": 40}
OTHER_VECTORS = 14  # gradient, last step, weights before it, preconditioner, vectors of the last time
LEAST_BASIS, LEAST_PROBES = 8, 2
PASS_SIZE = 2 * GRAPH_SIZE  # of a graph and of one product through it, in units of the forward pass's results
RECOMPUTED = 0.3  # of it that is left where layers are recomputed


class MemoryPlan(NamedTuple):
    """Vectors, batches and layers that a measurement keeps in memory."""

    effort: Effort
    batches: Batches | None  # smaller ones; None for those of the problem
    checkpoint: bool  # whether layers are recomputed
    sentence: str  # how much memory that takes


def plan_memory(problem: Problem, effort: Effort, limit: str | int | None) -> MemoryPlan:
    """The largest effort whose memory is within a limit, and a sentence that states it.

    Raises:
        UsageError: The limit is too small for one sequence and the shortest basis.
    """
    vector = problem.space().size * torch.finfo(problem.dtype).bits // 8
    batches = problem.batches
    largest = max(batches, key=lambda batch: batch.num_sequences)
    one = _bytes_of_a_sequence(problem)
    graph = one * largest.num_sequences
    vectors = _vectors(effort)
    if limit is None:
        return MemoryPlan(effort, None, False, _sentence(vectors, vector, largest.num_sequences, graph))
    most, checkpoint = parse_size(limit), False
    room = most - (OTHER_VECTORS + 2 * LEAST_BASIS + 3 * LEAST_PROBES) * vector
    if one > room:
        checkpoint, one = True, int(RECOMPUTED * one)
    if one > room or room < 0:
        least = most - room + one
        raise UsageError(
            f"expected memory of at least {data_size(least)} for one sequence of this model, got {limit!r}",
            hint="take shorter probe sequences, or a larger memory",
        )
    count = max(1, min(largest.num_sequences, int(max(room / 2, one) // max(one, 1))))
    if not problem.loss.has_outputs or problem.model.spread is not None:  # batches stay as they are
        count = largest.num_sequences
    left = most - count * one - OTHER_VECTORS * vector
    basis, probes = effort.max_basis, effort.num_probes
    while 2 * basis + 3 * probes > left // max(vector, 1) and (basis > LEAST_BASIS or probes > LEAST_PROBES):
        if basis > LEAST_BASIS and (basis > 2 * probes or probes == LEAST_PROBES):
            basis -= 1
        else:
            probes -= 1
    effort = effort._replace(max_basis=basis, num_probes=probes)
    cut = Batches(list(_cut(batches, count)), name=batches.name) if count < largest.num_sequences else None
    return MemoryPlan(effort, cut, checkpoint, _sentence(_vectors(effort), vector, count, count * one))


def parse_size(size: str | int) -> int:
    """Bytes of a number, or of a text such as "1 GiB" or "500 MiB"."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if match is None or match[2].upper() not in UNITS or not float(match[1]) > 0:
        raise UsageError(f"expected a memory such as '1 GiB' or a number of bytes, got {size!r}")
    return int(float(match[1]) * 2 ** UNITS[match[2].upper()])


def peak_bytes(device: torch.device) -> int:
    """Most memory that the process had so far on the device of the model."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _vectors(effort: Effort) -> int:
    return 2 * effort.max_basis + 3 * effort.num_probes + OTHER_VECTORS


def _sentence(vectors: int, vector: int, sequences: int, graph: int) -> str:
    return (
        f"a measurement takes at most about {data_size(vectors * vector + graph)} beside the training: "
        f"{vectors} vectors as long as the parameters, {data_size(vectors * vector)}, and the graph of "
        f"{plural(sequences, 'probe sequence')}, {data_size(graph)}"
    )


def _bytes_of_a_sequence(problem: Problem) -> int:
    """Memory of a product through one sequence, from the results of a forward pass."""
    if not problem.loss.has_outputs:  # a function of whole batches
        sequences = sum(each.num_sequences for each in problem.batches)
        _, size = result_bytes(problem.loss_value, views=False)
        return int(PASS_SIZE * size / sequences)
    few = next(iter(problem.local_batches("memory")))[:1]
    _, size = result_bytes(lambda: problem.outputs(few), views=False)
    return int(PASS_SIZE * size)


def _cut(batches: Any, count: int) -> Iterator[Batch]:
    """The same data in batches of at most so many sequences."""
    for batch in batches:
        for start in range(0, batch.num_sequences, count):
            yield batch[start : start + count]
