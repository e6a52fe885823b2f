"""The user's own module, asked on a few positions: is it what it was, and is it the same every time?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from curvescope.core.errors import CurvescopeError
from curvescope.data.batches import Batch
from curvescope.data.dicts import MASK, hides_start
from curvescope.engines.tensor_digest import digest, same
from curvescope.models.running.exchange import Change, exchanged
from curvescope.problem import Problem

FEW = 16  # positions of the sequence that is asked
TRIES = 8  # of a module that draws random numbers, to see that its outputs differ
ROUNDING = 64  # in units of the last place of the largest output


class Answer(NamedTuple):
    """Outputs of the user's module, called as it is, and their loss."""

    outputs: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Few:
    """A small part of the data, placed, and what module and loss answer."""

    batch: Batch
    answer: Answer | None


def few_positions(problem: Problem) -> Few:
    """A small part of the data that the module takes: a sequence with a counted term, cut where that works.

    Some modules are made for one length, or one number of sequences: they get a whole sequence, or a batch.
    """
    candidates = [batch.map(problem.placed) for batch in _candidates(problem)]
    for batch in candidates:
        before, numbers = _random_states(problem), _numbers(problem)
        try:
            found = answer(problem, batch)
        except Exception:  # whatever a module raises at a shape that it does not know
            continue
        _refuse_writing(problem, numbers)
        if _random_states(problem) != before:
            refuse_random(problem, batch)
        return Few(batch, found)
    return Few(candidates[0], None)


def _random_states(problem: Problem) -> tuple[Any, ...]:
    """Of all generators that a module may draw from without having one of its own."""
    states = [torch.get_rng_state()]
    if problem.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(problem.device))
    numpys = dict(np.random.get_state(legacy=False))
    parts = *numpys.pop("state").values(), *numpys.values(), *(t.numpy() for t in states)
    return random.getstate(), *(x.tobytes() if isinstance(x, np.ndarray) else x for x in parts)


def _numbers(problem: Problem) -> dict[str, tuple[Tensor, ...]]:
    return {name: digest([p]) for name, p in problem.parameters.items()}


def _refuse_writing(problem: Problem, before: Mapping[str, tuple[Tensor, ...]]) -> None:
    """Raise when parameters were written to in a forward pass: outputs are no function of them then."""
    for name, now in _numbers(problem).items():
        if not same(now, before[name]):
            raise CurvescopeError(
                f"the parameter {name!r} of {problem.model.name} was written to during a forward pass, so "
                "that the loss is no function of it",
                hint="let the module, and other threads meanwhile, leave its parameters as they are",
            )


def _candidates(problem: Problem) -> Iterator[Batch]:
    counted = (
        (one, batch)
        for batch in problem.batches
        for one in (batch[i : i + 1] for i in range(batch.num_sequences))
        if problem.loss.total_weight(one.targets, one.weights) > 0
    )
    first = next(counted, None)
    if first is None:
        return
    masked = isinstance(first[0].inputs, Mapping) and MASK in first[0].inputs
    one, batch = _hidden_start(first, counted) if masked else first
    short = _cut(one)
    if problem.loss.total_weight(short.targets, short.weights) > 0:
        yield short
    yield from (one, batch)


def _hidden_start(first: tuple[Batch, Batch], others: Iterator[tuple[Batch, Batch]]) -> tuple[Batch, Batch]:
    """A sequence whose first token is hidden, padded on the left: attention of other kinds differs there."""
    return next((pair for pair in (first, *others) if hides_start(pair[0].inputs)), first)


def _cut(batch: Batch) -> Batch:
    """Tokens and their targets up to a few positions; anything else as it is."""
    targets = batch.targets
    T = targets.shape[1] if isinstance(targets, Tensor) and targets.dim() == 2 else 0
    if any(t.dim() != 2 or t.shape[1] != T for t in batch.tensors()) or targets.is_floating_point():
        return batch
    return batch.map(lambda t: t[:, :FEW])


@torch.no_grad()
def answer(problem: Problem, batch: Batch) -> Answer:
    """What the module as it is and the loss give on a placed batch."""
    z = problem.answer(batch).to(problem.dtype)
    return Answer(z.clone(), problem.loss.sum(z, batch.targets, batch.weights).reshape(1))


def alike(a: Answer, b: Answer) -> bool:
    """Whether two answers are the same up to the order in which sums were taken."""
    return all(map(_alike, a, b))


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    scale = float(torch.nan_to_num(b, posinf=0.0, neginf=0.0).abs().max()) if b.numel() else 0.0
    gap = torch.nan_to_num(a - b).abs().max()
    undefined = torch.equal(torch.isfinite(a), torch.isfinite(b))
    return undefined and float(gap) <= ROUNDING * torch.finfo(a.dtype).eps * scale


def refuse_random(problem: Problem, batch: Batch) -> None:
    """Raise when the module gives other outputs every time it is asked; the sentence names the layer.

    Not where somebody writes to its parameters meanwhile.
    """
    numbers, first, other = _numbers(problem), _layer_outputs(problem, batch), []
    for _ in range(TRIES):  # a few draws may be alike
        again = _layer_outputs(problem, batch)
        other = [name for name in first if name in again and not _alike(first[name], again[name])]
        if other:
            break
    else:
        return
    if not all(same(now, numbers[name]) for name, now in _numbers(problem).items()):
        return
    name = other[0] or type(problem.model.module).__name__
    raise CurvescopeError(
        f"{name} gives other outputs every time it is called, so its curvature is no fixed matrix",
        hint="switch its randomness off: F.dropout(x, p, self.training) does so in eval mode",
    )


def _layer_outputs(problem: Problem, batch: Batch) -> dict[str, Tensor]:
    """What every submodule gave at its first call, the innermost first."""
    found: dict[str, Tensor] = {}

    def noting(name: str, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            y = forward(*args, **kwargs)
            seen = y[0] if isinstance(y, tuple) and y else y
            if isinstance(seen, Tensor) and seen.is_floating_point():
                found.setdefault(name, seen.detach().clone())
            return y

        return call

    parts: dict[str, nn.Module] = dict(problem.model.module.named_modules())
    with exchanged([Change(vars(m), "forward", noting(name, m.forward)) for name, m in parts.items()]):
        whole = answer(problem, batch).outputs
    found.setdefault("", whole)
    found[f"what is computed with {problem.model.name}"] = whole  # e.g. by a function of model and batch
    return found
