"""Training sequences and queries, and how they read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.data.batches import IGNORED, Batch, Batches
from curvescope.models.model import Model
from curvescope.problem import Problem
from curvescope.studies.landscape.points import subset
from curvescope.studies.setting import kind_of
from curvescope.tokenizers import as_tokenizer

ARROW = "=>"
SUMS = "0123456789+="  # what the ids of the task addition stand for


def held_out(problem: Problem, count: int) -> tuple[Problem, list[Problem]]:
    """The problem without its last sequences, and each of these as a query."""
    total = problem.batches.num_sequences
    if total <= count:
        raise UsageError(
            f"expected more sequences than the {count} that are held out as queries, got {total}",
            hint="tokens=512, or fewer num_queries",
        )
    queries = [subset(problem, np.array([i])) for i in range(total - count, total)]
    return subset(problem, np.arange(total - count)), queries


def asked(problem: Problem, texts: tuple[str, ...]) -> list[Problem]:
    """A query for each text: the mean loss of its tokens, or of those behind an arrow alone."""
    model = problem.model
    if model.tokenizer is None or kind_of(model) != "causal-lm":
        raise UsageError(
            f"expected a model of the next token that reads text for a query, {model.name!r} is none",
            hint="without a query, sequences of the data are held out",
        )
    return [Problem(model, _batch(model, text), problem.loss) for text in texts]


def _batch(model: Model, text: str) -> Batches:
    if text.count(ARROW) > 1:
        raise UsageError(f"expected a query of at most one {ARROW}, got {text!r}")
    tokenizer = as_tokenizer(model.tokenizer)
    before, arrow, behind = text.partition(ARROW)
    first = tokenizer.encode(before)
    ids = first + tokenizer.encode(behind)
    counted = len(first) if arrow else 1
    if len(ids) < 2 or not 1 <= counted < len(ids):
        raise UsageError(
            f"expected a query of at least two tokens, or words before and behind {ARROW}, got {text!r}"
        )
    if model.n_ctx is not None and len(ids) - 1 > model.n_ctx:
        raise UsageError(f"expected a query of at most {model.n_ctx + 1} tokens, got {len(ids)}")
    targets = torch.tensor([ids[1:]])
    targets[:, : counted - 1] = IGNORED
    return Batches.from_tensors(torch.tensor([ids[:-1]]), targets, name="query")


def read(problem: Problem, name: str) -> list[str]:
    """Every sequence as a person reads it: its text, its ids, or its class."""
    return [
        _read(batch[i : i + 1], problem, name)
        for batch in problem.batches
        for i in range(batch.num_sequences)
    ]


def _read(one: Batch, problem: Problem, name: str) -> str:
    inputs, targets = one.inputs, one.targets
    if isinstance(inputs, Mapping):
        inputs = inputs.get("input_ids")
    if not isinstance(targets, Tensor):
        return "a sequence"
    if not isinstance(inputs, Tensor) or inputs.is_floating_point() or targets.shape != inputs.shape:
        return (
            f"class {int(targets)}"
            if targets.numel() == 1 and not targets.is_floating_point()
            else "a sequence"
        )
    counted = torch.nonzero(targets[0] != IGNORED)[:, 0].tolist()
    last = counted[-1] if counted else len(inputs[0]) - 1
    ids = inputs[0, : last + 1].tolist() + ([int(targets[0, last])] if counted else [])
    if problem.model.tokenizer is not None:
        return as_tokenizer(problem.model.tokenizer).decode(ids)
    return "".join(SUMS[i] for i in ids) if name == "addition" else " ".join(map(str, ids))
