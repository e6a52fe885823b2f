"""Reference run of the user's module on a few positions: its outputs, loss and gradients.

The engine compares them with earlier ones (`change_detection`) and with the results of our kernels
(`kernel_validation`). This file also raises errors for modules that draw random numbers or write to
parameters.
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
from curvescope.core.tensors import LOOKUP, custom_functions, lookup_settings, receive_gradients
from curvescope.data.batches import Batch
from curvescope.data.dict_batches import MASK, hides_start
from curvescope.engines.tensor_digest import digest, same, same_sums, sums
from curvescope.models.running.eager import IgnoreTensorHooks, without_tensor_hooks
from curvescope.models.running.patching import Change, patched, thawed
from curvescope.problem import Problem

NUM_POSITIONS = 16  # positions of the sequence that the module is called on
NUM_TRIES = 8  # calls to detect random outputs
ROUNDING = 64  # in units of the last place of the largest output
GRADIENT_ROUNDING = {
    torch.float64: 1e-9
}  # of the sum of |g|; 1e-3 in float32, where parts may be in half precision
Graph = tuple[Any, ...]


class Reference(NamedTuple):
    """Results of the user's unmodified module.

    Attributes:
        outputs: Its outputs.
        loss: Their loss, (1,).
        graph: The autograd graph of the loss: names of its operations and their connections. None if the
            module cannot be differentiated as it is, or if its weights are spread over ranks or widened.
        gradients: Two sums over the gradient in each parameter, (parameters, 2); None if not requested.
    """

    outputs: Tensor
    loss: Tensor
    graph: Graph | None = None
    gradients: Tensor | None = None


@dataclass(frozen=True)
class ReferenceSample:
    """A small part of the data on the model's device, and the results of module and loss on it.

    Attributes:
        batch: The data.
        reference: The module's results; None if it cannot be called on any candidate.
        custom: True if its graph has custom autograd functions, whose backward may be arbitrary.
    """

    batch: Batch
    reference: Reference | None
    custom: bool = False

    def rerun(self, problem: Problem, *, gradients: bool) -> Reference | None:
        """Return the module's current results; with gradients if its graph has custom functions."""
        if self.reference is None:
            return None
        if self.reference.graph is None:
            return reference(problem, self.batch)
        return differentiated_reference(problem, self.batch, gradients=gradients or self.custom)[0]


def reference_sample(problem: Problem) -> ReferenceSample:
    """Return a small part of the data that the module accepts: a sequence with a counted term, truncated if
    possible.

    Modules made for one length, or for one number of sequences, get a full sequence or batch.
    """
    candidates = [batch.map(problem.placed) for batch in _candidates(problem)]
    for batch in candidates:
        before, numbers = _random_states(problem), _numbers(problem)
        try:
            sample = _first_reference(problem, batch)
        except Exception:  # a module may raise anything for an unexpected shape
            continue
        _refuse_writing(problem, numbers)
        if _random_states(problem) != before:
            refuse_random(problem, batch)
        return sample
    return ReferenceSample(candidates[0], None)


def _first_reference(problem: Problem, batch: Batch) -> ReferenceSample:
    model = problem.model
    if model.spread is None and model.widening is None:
        try:
            first, names = differentiated_reference(problem, batch, gradients=True)
            return ReferenceSample(batch, first, custom=bool(names))
        except Exception:  # a module without a derivative may raise anything
            pass
    return ReferenceSample(batch, reference(problem, batch))


def _random_states(problem: Problem) -> tuple[Any, ...]:
    """Return the states of all global random generators that a module may use."""
    states = [torch.get_rng_state()]
    if problem.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(problem.device))
    numpys = dict(np.random.get_state(legacy=False))
    parts = *numpys.pop("state").values(), *numpys.values(), *(t.numpy() for t in states)
    return random.getstate(), *(x.tobytes() if isinstance(x, np.ndarray) else x for x in parts)


def _numbers(problem: Problem) -> dict[str, tuple[Tensor, ...]]:
    return {name: digest([p]) for name, p in problem.named_parameters()}


def _refuse_writing(problem: Problem, before: Mapping[str, tuple[Tensor, ...]]) -> None:
    """Raise if a forward pass wrote to parameters, because outputs are then not a function of them."""
    for name, current in _numbers(problem).items():
        if not same(current, before[name]):
            raise CurvescopeError(
                f"the parameter {name!r} of {problem.model.name} was written to during a forward pass, so "
                f"the loss is not a function of it",
                hint="make sure that neither the module nor other threads write to its parameters",
            )


def _candidates(problem: Problem) -> Iterator[Batch]:
    counted = (
        (single, batch)
        for batch in problem.batches
        for single in (batch[i : i + 1] for i in range(batch.num_sequences))
        if problem.loss.total_weight(single.targets, single.weights) > 0
    )
    first = next(counted, None)
    if first is None:
        return
    masked = isinstance(first[0].inputs, Mapping) and MASK in first[0].inputs
    single, batch = _hidden_start(first, counted) if masked else first
    short = _cut(single)
    if problem.loss.total_weight(short.targets, short.weights) > 0:
        yield short
    yield from (single, batch)


def _hidden_start(first: tuple[Batch, Batch], others: Iterator[tuple[Batch, Batch]]) -> tuple[Batch, Batch]:
    """Return a left-padded sequence, on which implementations of attention may differ."""
    return next((pair for pair in (first, *others) if hides_start(pair[0].inputs)), first)


def _cut(batch: Batch) -> Batch:
    """Truncate tokens and targets to a few positions; leave other data unchanged."""
    targets = batch.targets
    T = targets.shape[1] if isinstance(targets, Tensor) and targets.dim() == 2 else 0
    if any(t.dim() != 2 or t.shape[1] != T for t in batch.tensors()) or targets.is_floating_point():
        return batch
    return batch.map(lambda t: t[:, :NUM_POSITIONS])


@torch.no_grad()
def reference(problem: Problem, batch: Batch) -> Reference:
    """Compute the outputs of the unmodified module, and their loss, on a batch on the model's device."""
    z = problem.module_outputs(batch).to(problem.dtype)
    return Reference(z.clone(), problem.loss.sum(z, batch.targets, batch.weights).reshape(1))


def differentiated_reference(
    problem: Problem, batch: Batch, *, gradients: bool
) -> tuple[Reference, list[str]]:
    """Compute outputs, loss and autograd graph of the unmodified module.

    Args:
        problem: The problem with the module.
        batch: A batch on the model's device.
        gradients: If True, also compute gradients and find custom functions, at two to three times the cost.

    Returns:
        The module's results, and the names of custom autograd functions in its graph.
    """
    point = {name: p.detach().requires_grad_() for name, p in problem.point.items()}
    parameters = [p for name, p in problem.model.named_parameters() if name not in point]
    frozen = [p for p in parameters if not p.requires_grad]
    with torch.enable_grad(), thawed(frozen) if frozen else nullcontext():
        with IgnoreTensorHooks() if gradients else nullcontext():
            z = problem.module_outputs(batch, point).to(problem.dtype)
            loss = problem.loss.sum(z, batch.targets, batch.weights)
        graph, names = _graph_of(loss), custom_functions(loss) if gradients else []
        gradient_sums = _gradient_sums(loss, [*parameters, *point.values()]) if gradients else None
    return Reference(z.detach().clone(), loss.detach().reshape(1), graph, gradient_sums), names


def _graph_of(loss: Tensor) -> Graph:
    """Names and settings of the nodes in the graph of a loss, each with the numbers of its next nodes."""
    if loss.grad_fn is None:
        return ()
    numbers, waiting, graph = {loss.grad_fn: 0}, [loss.grad_fn], []
    while waiting:
        node = waiting.pop()
        name = node.name()
        graph.append(name)
        if name.startswith(LOOKUP):
            graph += lookup_settings(node)
        for next_node, _ in node.next_functions:
            if next_node is None:
                graph.append(-1)
                continue
            number = numbers.get(next_node)
            if number is None:
                numbers[next_node] = number = len(numbers)
                waiting.append(next_node)
            graph.append(number)
    return tuple(graph)


def _gradient_sums(loss: Tensor, parameters: list[Tensor]) -> Tensor:
    """Σ w g and Σ |g| for the gradient g in each parameter, with different weights w for all entries."""
    rows = [loss.new_zeros(2)] * len(parameters)

    def receive(number: int, g: Tensor) -> None:
        rows[number] = sums(g).to(loss)

    if loss.requires_grad:
        with without_tensor_hooks(parameters):
            receive_gradients([loss], parameters, receive)
    return torch.stack(rows) if rows else loss.new_zeros(0, 2)


def agree(now: Reference, before: Reference) -> bool:
    """Return True if both are the same up to the order in which sums were taken."""
    return (
        now.graph == before.graph
        and _agree(now.outputs, before.outputs)
        and _agree(now.loss, before.loss)
        and (
            now.gradients is None or before.gradients is None or _sums_agree(now.gradients, before.gradients)
        )
    )


def _sums_agree(now: Tensor, before: Tensor) -> bool:
    """Return True if sums over gradients are the same up to rounding."""
    tolerance = GRADIENT_ROUNDING.get(before.dtype, 1e-3)
    return now.shape == before.shape and bool(same_sums(now, before, tolerance).all())


def _agree(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    scale = float(torch.nan_to_num(b, posinf=0.0, neginf=0.0).abs().max()) if b.numel() else 0.0
    gap = torch.nan_to_num(a - b).abs().max()
    undefined = torch.equal(torch.isfinite(a), torch.isfinite(b))
    return undefined and float(gap) <= ROUNDING * torch.finfo(a.dtype).eps * scale


def refuse_random(problem: Problem, batch: Batch) -> None:
    """Raise if the module gives different outputs at every call; the message names the layer.

    It does not raise if other code writes to the parameters meanwhile.
    """
    numbers, first, different = _numbers(problem), _layer_outputs(problem, batch), []
    for _ in range(NUM_TRIES):  # a few draws may be agree
        repeated = _layer_outputs(problem, batch)
        different = [name for name in first if name in repeated and not _agree(first[name], repeated[name])]
        if different:
            break
    else:
        return
    if not all(same(current, numbers[name]) for name, current in _numbers(problem).items()):
        return
    name = different[0] or type(problem.model.module).__name__
    raise CurvescopeError(
        f"{name} gives different outputs in repeated calls, so its curvature is not a fixed matrix",
        hint="switch its randomness off, for instance with F.dropout(x, p, self.training)",
    )


def _layer_outputs(problem: Problem, batch: Batch) -> dict[str, Tensor]:
    """Return the output of the first call of every submodule, innermost first."""
    outputs: dict[str, Tensor] = {}

    def recording(name: str, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            y = forward(*args, **kwargs)
            first_output = y[0] if isinstance(y, tuple) and y else y
            if isinstance(first_output, Tensor) and first_output.is_floating_point():
                outputs.setdefault(name, first_output.detach().clone())
            return y

        return call

    parts: dict[str, nn.Module] = dict(problem.model.module.named_modules())
    with patched([Change(vars(m), "forward", recording(name, m.forward)) for name, m in parts.items()]):
        whole = reference(problem, batch).outputs
    outputs.setdefault("", whole)
    outputs[f"what is computed with {problem.model.name}"] = whole  # e.g. by a function of model and batch
    return outputs
