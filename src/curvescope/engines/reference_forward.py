"""The user's own module on a few positions: its outputs, its loss and its gradients, as a reference.

The engine compares them with what they were before (`change_detection`) and with what our kernels give
(`kernel_validation`). A module that draws random numbers, or writes to its parameters, is refused here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from curvescope.core.errors import CurvescopeError
from curvescope.core.tensors import custom_functions, take_each
from curvescope.data.batches import Batch
from curvescope.data.dicts import MASK, hides_start
from curvescope.engines.tensor_digest import digest, same, weighted_sum
from curvescope.models.running.eager import IgnoreTensorHooks, without_tensor_hooks
from curvescope.models.running.exchange import Change, exchanged, thawed
from curvescope.problem import Problem

FEW = 16  # positions of the sequence that the module is called on
TRIES = 8  # of a module that draws random numbers, to see that its outputs differ
ROUNDING = 64  # in units of the last place of the largest output
GRADIENT_ROUNDING = {
    torch.float64: 1e-9
}  # of the sum of |g|; 1e-3 in float32, where parts may be in half precision
Graph = tuple[Any, ...]


class Reference(NamedTuple):
    """What the user's module gives, called as it is.

    Attributes:
        outputs: Its outputs.
        loss: Their loss, (1,).
        graph: The autograd graph of the loss: names of its operations and their connections. None if the
            module cannot be differentiated as it is, or if its weights are spread over ranks or widened.
        gradients: Two sums over the gradient in each parameter, (parameters, 2); None if not asked for.
    """

    outputs: Tensor
    loss: Tensor
    graph: Graph | None = None
    gradients: Tensor | None = None


@dataclass(frozen=True)
class Few:
    """A small part of the data, placed, and what module and loss give on it.

    Attributes:
        batch: The data.
        reference: What the module gives; None if it can be called on none of the candidates.
        custom: Whether custom autograd functions are in its graph, whose backward may do anything.
    """

    batch: Batch
    reference: Reference | None
    custom: bool = False

    def again(self, problem: Problem, *, gradients: bool) -> Reference | None:
        """Return what the module gives now; gradients always if custom functions are in its graph."""
        if self.reference is None:
            return None
        if self.reference.graph is None:
            return reference(problem, self.batch)
        return differentiated_reference(problem, self.batch, gradients=gradients or self.custom)[0]


def few_positions(problem: Problem) -> Few:
    """A small part of the data that the module takes: a sequence with a counted term, cut where that works.

    Some modules are made for one length, or one number of sequences: they get a whole sequence, or a batch.
    """
    candidates = [batch.map(problem.placed) for batch in _candidates(problem)]
    for batch in candidates:
        before, numbers = _random_states(problem), _numbers(problem)
        try:
            found = _first_reference(problem, batch)
        except Exception:  # whatever a module raises at a shape that it does not know
            continue
        _refuse_writing(problem, numbers)
        if _random_states(problem) != before:
            refuse_random(problem, batch)
        return found
    return Few(candidates[0], None)


def _first_reference(problem: Problem, batch: Batch) -> Few:
    model = problem.model
    if model.spread is None and model.widening is None:
        try:
            found, names = differentiated_reference(problem, batch, gradients=True)
            return Few(batch, found, custom=bool(names))
        except Exception:  # whatever is raised by a module that has no derivative as it is
            pass
    return Few(batch, reference(problem, batch))


def _random_states(problem: Problem) -> tuple[Any, ...]:
    """Of all generators that a module may draw from without having one of its own."""
    states = [torch.get_rng_state()]
    if problem.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(problem.device))
    numpys = dict(np.random.get_state(legacy=False))
    parts = *numpys.pop("state").values(), *numpys.values(), *(t.numpy() for t in states)
    return random.getstate(), *(x.tobytes() if isinstance(x, np.ndarray) else x for x in parts)


def _numbers(problem: Problem) -> dict[str, tuple[Tensor, ...]]:
    return {name: digest([p]) for name, p in problem.named_parameters()}


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
def reference(problem: Problem, batch: Batch) -> Reference:
    """Outputs of the module as it is, and their loss, on a placed batch."""
    z = problem.module_outputs(batch).to(problem.dtype)
    return Reference(z.clone(), problem.loss.sum(z, batch.targets, batch.weights).reshape(1))


def differentiated_reference(
    problem: Problem, batch: Batch, *, gradients: bool
) -> tuple[Reference, list[str]]:
    """Outputs, loss and autograd graph of the module as it is.

    Args:
        problem: Whose module is called.
        batch: A placed one.
        gradients: Take gradients too, and look for custom functions; that costs two to three times as much.

    Returns:
        What the module gives, and the names of custom autograd functions in its graph.
    """
    point = {name: p.detach().requires_grad_() for name, p in problem.point.items()}
    own = [p for name, p in problem.model.named_parameters() if name not in point]
    frozen = [p for p in own if not p.requires_grad]
    with torch.enable_grad(), thawed(frozen) if frozen else nullcontext():
        with IgnoreTensorHooks() if gradients else nullcontext():
            z = problem.module_outputs(batch, point).to(problem.dtype)
            loss = problem.loss.sum(z, batch.targets, batch.weights)
        graph, names = _graph_of(loss), custom_functions(loss) if gradients else []
        sums = _gradient_sums(loss, [*own, *point.values()]) if gradients else None
    return Reference(z.detach().clone(), loss.detach().reshape(1), graph, sums), names


def _graph_of(loss: Tensor) -> Graph:
    """Names of the nodes behind a loss, each followed by the numbers of those that it leads to."""
    if loss.grad_fn is None:
        return ()
    numbers, waiting, found = {loss.grad_fn: 0}, [loss.grad_fn], []
    while waiting:
        node = waiting.pop()
        found.append(node.name())
        for other, _ in node.next_functions:
            if other is None:
                found.append(-1)
                continue
            number = numbers.get(other)
            if number is None:
                numbers[other] = number = len(numbers)
                waiting.append(other)
            found.append(number)
    return tuple(found)


def _gradient_sums(loss: Tensor, parameters: list[Tensor]) -> Tensor:
    """Σ w g and Σ |g| for the gradient g in each parameter, w weights that differ from entry to entry."""
    sums = [loss.new_zeros(2)] * len(parameters)

    def take(number: int, g: Tensor) -> None:
        with torch.no_grad():
            sums[number] = torch.stack([weighted_sum(g), g.abs().sum()]).to(loss)

    if loss.requires_grad:
        with without_tensor_hooks(parameters):
            take_each([loss], parameters, take)
    return torch.stack(sums) if sums else loss.new_zeros(0, 2)


def alike(now: Reference, before: Reference) -> bool:
    """Return True if both are the same up to the order in which sums were taken."""
    return (
        now.graph == before.graph
        and _alike(now.outputs, before.outputs)
        and _alike(now.loss, before.loss)
        and (now.gradients is None or before.gradients is None or _near(now.gradients, before.gradients))
    )


def _near(now: Tensor, before: Tensor) -> bool:
    """Return True if sums over gradients are the same up to rounding."""
    if now.shape != before.shape:
        return False
    limit = GRADIENT_ROUNDING.get(before.dtype, 1e-3) * before[:, 1:]
    return bool((((now - before).abs() <= limit) | (now == before) | (now.isnan() & before.isnan())).all())


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
        whole = reference(problem, batch).outputs
    found.setdefault("", whole)
    found[f"what is computed with {problem.model.name}"] = whole  # e.g. by a function of model and batch
    return found
