"""Validation of kernels on a model: which of them fit, and that they give the numbers of plain autograd.

The first use checks this on a few positions, and it is checked again if the module has changed. It takes
three passes through these positions: for autograd's product, for the outputs with kernels and their linear
head, and for the product with kernels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.ranks.shard_layout import ShardGroup
from curvescope.core.seeds import drawn_on, generator
from curvescope.core.tensors import custom_functions
from curvescope.data.batches import Batch
from curvescope.engines import batch_products
from curvescope.engines.checkpoint import recompute_error
from curvescope.engines.derivatives import Derivatives, compare_derivatives
from curvescope.engines.memory import result_bytes
from curvescope.engines.module_runner import Runner, find_head, refuse_lost
from curvescope.engines.reference_forward import Graph, ReferenceSample, reference, refuse_random
from curvescope.engines.tensor_digest import same
from curvescope.engines.vjp import ReversePass
from curvescope.kernels.backends import casting
from curvescope.kernels.function_mode import HeadLocation, PlainAttention
from curvescope.models.hf.module import rounding
from curvescope.models.model import Model
from curvescope.models.running.fused import Fused, fuse
from curvescope.problem import Problem, differentiating, double_copy

LOG = logging.getLogger("curvescope")
TOLERANCE = {
    torch.float64: 1e-5,
    torch.float32: 1e-3,
}  # above rounding, and far below the error of a wrong kernel
TOLERANCE_WITHOUT_ROUNDING = 5e-3  # in float32, if autograd's own rounding is not measured
COMPARED_CHUNK, DEVICE_CHUNK = 2**18, 2**26  # entries that are compared at a time on a CPU, and on a GPU
LARGE_VECTOR = 2**30  # vectors with more bytes are compared in parts
Tree = Mapping[str, Tensor]


@dataclass(frozen=True)
class ValidatedModel:
    """Result of validating a model: `fused` is None without our kernels; `head` makes its outputs."""

    fused: Fused | None
    head: HeadLocation | None
    entry_bytes: float  # size of all results of a pass except views, per entry of the data
    graph: Graph | None = None  # graph of the user's module on the few positions
    numbers: tuple[Tensor, ...] = ()  # digest of its tensors that are not parameters
    sizes: dict[Any, int] = field(default_factory=dict)  # sizes of passes, by runner and shapes
    fallback_reason: str = ""  # reason for running without our kernels
    derivatives: Derivatives = field(default_factory=Derivatives)

    def runner(self, problem: Problem, *, checkpoint: bool) -> Runner:
        """Return the runner of the module of the problem."""
        return Runner(problem, self.fused, self.head, checkpoint=checkpoint)

    def pass_bytes(self, runner: Runner, batch: Batch) -> int:
        """Return the size of all results of a pass, measured once for batches of the same shapes."""
        key = (runner.name, *(t.shape for t in batch.tensors()))
        if key not in self.sizes:
            run = partial(runner.outputs, batch, {}, second_order=False, lazy=True)
            self.sizes[key] = result_bytes(run)[1]
        return self.sizes[key]


_known: WeakKeyDictionary[Model, dict[Any, ValidatedModel]] = WeakKeyDictionary()


def validated_model(
    problem: Problem, sample: ReferenceSample, numbers: tuple[Tensor, ...], *, engine: str, checkpoint: bool
) -> ValidatedModel:
    """Validate the model of the problem, and check that its outputs with kernels are those of the module
    itself.

    A stored validation is used if the module's graph, other tensors and outputs are unchanged.

    Args:
        problem: The problem with the model.
        sample: Its module's results on a few positions.
        numbers: A digest of the model's tensors that are not parameters.
        engine: The engine's name.
        checkpoint: True if layers are recomputed.
    """
    kind, model = _kind(problem, engine, checkpoint), problem.model
    entries, graph = (
        _known.setdefault(model, {}),
        None if sample.reference is None else sample.reference.graph,
    )
    before = entries.get(kind)
    holds = before is not None and before.graph == graph and same(before.numbers, numbers)
    if before is not None and (holds if model.spread is None else model.spread.all(holds, problem.device)):
        if _gives_reference(model, before.runner(problem, checkpoint=checkpoint), sample):
            return before
        forget_validation(model)
    validated, outputs = _validate(problem, sample.batch, engine, checkpoint)
    validated = replace(validated, graph=graph, numbers=numbers)
    runner = validated.runner(problem, checkpoint=checkpoint)
    if not _gives_reference(model, runner, sample, outputs):
        _refuse_outputs(problem, sample.batch, runner)
    _known.setdefault(model, {})[kind] = validated
    return validated


def _gives_reference(
    model: Model, runner: Runner, sample: ReferenceSample, outputs: Tensor | None = None
) -> bool:
    """Return True if a runner's outputs are those of the module when its user calls it, on all ranks."""
    holds = sample.reference is None or outputs_agree(runner, sample.batch, sample.reference.outputs, outputs)
    return holds if model.spread is None else model.spread.all(holds, model.device)


def _refuse_outputs(problem: Problem, sample: Batch, runner: Runner) -> None:
    """Raise an error with the reason why a runner's outputs differ from those of the unmodified module."""
    refuse_random(problem, sample)
    check_plain_form(problem, sample)
    with PlainAttention():  # implementations of attention differ if a query has no key
        if outputs_agree(runner, sample, reference(problem, sample).outputs):
            return
    if runner.checkpoint:
        raise recompute_error(problem.model)
    raise CurvescopeError(
        f"the outputs of the fast engine differ from those of {problem.model.name}",
        hint="use engine='autograd'",
    )


def forget_validation(model: Model) -> None:
    """Forget the validation of a model, so that it is validated again."""
    _known.pop(model, None)


def _kind(problem: Problem, engine: str, checkpoint: bool) -> tuple[Any, ...]:
    return engine, checkpoint, problem.dtype, problem.device, type(problem.loss), modes()


def modes() -> tuple[Any, ...]:
    """Global settings that affect numbers."""
    return (
        casting(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )


def _validate(
    problem: Problem, sample: Batch, engine: str, checkpoint: bool
) -> tuple[ValidatedModel, Tensor | None]:
    """Validate the kernels for a model and its head; return the outputs, too, if they were computed."""
    model = problem.model
    if checkpoint:
        with differentiating():
            refuse_lost(problem, sample)
    if engine == "autograd":
        return _without_kernels(problem, sample, fallback_reason="engine=autograd was requested"), None
    fused, groups = fuse(model), _groups(problem)
    try:
        v = _direction(problem)
        expected = _Products(problem, sample, Runner(problem, checkpoint=model.releases), v)
        part = expected.of(groups[0])
    except (CurvescopeError, RuntimeError):  # no reference; the product itself raises the reason
        return replace(_without_kernels(problem, sample), fused=fused), None
    try:
        (head, outputs), size = result_bytes(partial(find_head, problem, fused, sample), views=False)
        runner, gap = Runner(problem, fused, head, checkpoint=checkpoint), _RelativeError()
        actual = _Products(problem, sample, runner, v)
        for i, names in enumerate(groups):
            part = part if i == 0 else expected.of(names)
            gap.add(actual, names, part)
    except Exception as error:  # a module may raise anything with our kernels
        if engine == "fast":
            raise
        LOG.info("%s runs without our kernels: %s", model.name, error)
        fallback_reason = f"our kernels do not fit this module: {str(error).partition(chr(10))[0]}"
        return _without_kernels(problem, sample, expected.functions, fallback_reason=fallback_reason), None
    repeated = runner.recompute_check.all_equal()
    if not (repeated if model.spread is None else model.spread.all(repeated, problem.device)):
        refuse_random(problem, sample)
        raise recompute_error(model)
    error, length = gap.measured(model.spread, problem.device)
    if math.isfinite(length):  # else the product itself raises
        _compare(problem, sample, v, error, part if len(groups) == 1 else None, checkpoint=checkpoint)
    derivatives = compare_derivatives(problem, sample, expected.functions)
    validated = ValidatedModel(fused, head, _entry_bytes(problem, sample, size), derivatives=derivatives)
    return validated, None if checkpoint else outputs


def _without_kernels(
    problem: Problem, sample: Batch, functions: list[str] | None = None, *, fallback_reason: str = ""
) -> ValidatedModel:
    """Validate a model that runs without our kernels.

    Args:
        problem: The problem with the model.
        sample: A few positions.
        functions: Custom functions in its graph; None if no graph was made.
        why: Reason for running without kernels.
    """
    derivatives = compare_derivatives(problem, sample, functions)
    return ValidatedModel(
        None,
        None,
        _entry_bytes(problem, sample, _size(problem, sample)),
        fallback_reason=fallback_reason,
        derivatives=derivatives,
    )


def _size(problem: Problem, sample: Batch) -> int:
    """Return the size of all results of a reference pass; 0 if it fails (the product raises the reason)."""
    try:
        return result_bytes(partial(reference, problem, sample), views=False)[1]
    except Exception:  # a module may raise anything
        return 0


def _entry_bytes(problem: Problem, sample: Batch, size: int) -> float:
    """Size of all results of a pass per entry of the data, from the `size` on a few positions.

    Weights that a pass converts from half precision are excluded, because they do not grow with the data.
    """
    model, wide = problem.model, 0
    if model.widening is not None:
        wide = sum(p.numel() * model.dtype.itemsize for p in model.parameters() if p.dtype != model.dtype)
    return max(size - wide, 0) / num_entries(sample)


def num_entries(batch: Batch) -> int:
    """Number of entries of the largest tensor of a batch."""
    return max(t.numel() for t in batch.tensors())


def _direction(problem: Problem) -> dict[str, Tensor]:
    parameters = dict(problem.model.named_parameters())
    drawing_device = drawn_on(sum(p.numel() for p in parameters.values()), problem.device)
    source = generator(0, device=drawing_device)
    options = {"generator": source, "device": drawing_device, "dtype": torch.float32}
    return {
        name: torch.randn(1, *p.shape, **options).to(problem.device, problem.dtype)
        for name, p in parameters.items()
    }


def _groups(problem: Problem) -> list[tuple[str, ...]]:
    """Return groups of parameter names: one group, or several for a large model, to limit memory."""
    sizes = {n: p.numel() * torch.finfo(problem.dtype).bits // 8 for n, p in problem.model.named_parameters()}
    limit = max(LARGE_VECTOR, sum(sizes.values()) // 4)
    groups, group_size = [[]], 0
    for name, size in sizes.items():
        if groups[-1] and group_size + size > limit:
            groups.append([])
            group_size = 0
        groups[-1].append(name)
        group_size += size
    return [tuple(names) for names in groups]


class _Products:
    """H v on a few positions, some rows at a time, from one graph."""

    def __init__(self, problem: Problem, sample: Batch, runner: Runner, v: Tree):
        self._v, names = list(v.values()), tuple(v)
        self.functions: list[str] = []
        with differentiating():
            arguments = (problem, runner, sample, "hessian")
            self._graph = batch_products.gradient_graph(
                *arguments, names, names, twins=False, observe=self._note
            )

    def _note(self, s: Tensor) -> None:
        self.functions = custom_functions(s)

    def hand_over(self, names: Sequence[str], receive: Callable[[str, Tensor], object]) -> None:
        """Pass the named rows to `receive`, one after the other; rows that are zero may be missing."""
        into = [self._graph.leaves[name] for name in names]
        with differentiating():
            ReversePass(self._graph.first, names, into)(self._v, 1, receive)

    def of(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the named rows, (1, *shape) each."""
        rows: dict[str, Tensor] = {}
        self.hand_over(names, rows.__setitem__)
        return rows


class _RelativeError:
    """‖actual − expected‖ / ‖expected‖, accumulated over parameters; a missing parameter counts as zero."""

    def __init__(self) -> None:
        self._squared_error, self._size = 0.0, 0.0  # squares

    def add(self, actual: _Products, names: Sequence[str], expected: Tree) -> None:
        """Add the named rows of both products."""
        names_seen: set[str] = set()

        def compare(name: str, x: Tensor) -> None:
            names_seen.add(name)
            gaps = (_square(a if b is None else a.to(b) - b) for a, b in _parts(x, expected.get(name)))
            self._squared_error += float(sum(gaps))

        actual.hand_over(names, compare)
        lengths = {name: float(_square(y)) for name, y in expected.items()}
        self._squared_error += sum(length for name, length in lengths.items() if name not in names_seen)
        self._size += sum(lengths.values())

    def measured(
        self, spread: ShardGroup | None = None, device: torch.device | None = None
    ) -> tuple[float, float]:
        """Return the relative error, and ‖expected‖, over all ranks."""
        squares = torch.tensor([self._squared_error, self._size], dtype=torch.float64)
        if spread is not None:
            squares = spread.sum(squares.to(device))
        gap, size = squares.sqrt().tolist()
        return gap / size if size else gap, size


def _parts(x: Tensor, y: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Split both tensors into parts, to limit the memory of their difference."""
    step = DEVICE_CHUNK if x.is_cuda else COMPARED_CHUNK
    other_parts = (None,) * -(-x.numel() // step) if y is None else y.flatten().split(step)
    return zip(x.flatten().split(step), other_parts, strict=True)


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _compare(
    problem: Problem, sample: Batch, v: Tree, error: float, expected: Tree | None, *, checkpoint: bool
) -> None:
    """Raise unless both products agree up to rounding."""
    tolerance = TOLERANCE.get(problem.dtype, 0.1)
    if problem.dtype == torch.float32 and (expected is None or not _can_be_copied(problem.model)):
        tolerance = TOLERANCE_WITHOUT_ROUNDING
    if problem.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        tolerance = max(tolerance, 0.05)
    if not error <= tolerance and not error <= 10 * _rounding(problem, sample, v, expected):
        refuse_random(problem, sample)
        check_plain_form(problem, sample)
        raise CurvescopeError(
            f"for {problem.model.name}, products of the fast engine and of autograd differ by {error:.1e} "
            f"(relative)",
            hint="use engine='autograd'" + (" and checkpoint=False" if checkpoint else ""),
        )


def _can_be_copied(model: Model) -> bool:
    return model.spread is None and model.widening is None


def _rounding(problem: Problem, sample: Batch, v: Tree, expected: Tree | None) -> float:
    """Rounding error of autograd itself against its product in float64; 0 if that would need a large copy."""
    if expected is None or not _can_be_copied(problem.model):
        return 0.0
    double, batch = double_copy(problem, sample)
    exact, gap = (
        _Products(double, batch, Runner(double), {n: t.double() for n, t in v.items()}),
        _RelativeError(),
    )
    gap.add(exact, tuple(v), expected)
    return gap.measured()[0]


def check_plain_form(problem: Problem, sample: Batch) -> None:
    """Raise if the module with eager attention has other outputs than when its user calls it."""
    with PlainAttention():
        expected = reference(problem, sample).outputs
    if outputs_agree(Runner(problem), sample, expected):
        return
    raise CurvescopeError(
        f"{problem.model.name} has other outputs with attention and options that can be differentiated "
        f"twice than with its own",
        hint="call it with eager attention and use_cache=False, and compare the outputs",
    )


@torch.no_grad()
def outputs_agree(runner: Runner, sample: Batch, expected: Tensor, actual: Tensor | None = None) -> bool:
    """Return True if outputs agree up to rounding."""
    if actual is None:
        actual = batch_products.required(runner.outputs(sample, {}, second_order=False, lazy=False))
    finite = expected.isfinite()
    if not bool(finite.any()):
        return True  # the product itself raises
    scale = max(float(expected[finite].abs().max()), 1e-30)
    return float((actual - expected)[finite].abs().max()) <= rounding(expected) * scale
