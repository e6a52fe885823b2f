"""Detection of changes of a problem since something was cached.

There are two checks. One compares versions and content digests of all tensors: the parameters, the module's
other tensors, those of the loss, and the data. The other runs the user's module on a few positions
(`reference_forward`) and compares outputs, loss and gradients with earlier ones. Versions are compared before
a product, everything else after it, so that a GPU need not wait.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from curvescope.core.errors import CurvescopeError
from curvescope.engines.kernel_validation import ValidatedModel, forget_validation, modes, validated_model
from curvescope.engines.reference_forward import ReferenceSample, agree, reference_sample
from curvescope.engines.tensor_digest import digest, same
from curvescope.models.running.patching import note_rewritten
from curvescope.problem import Problem

MAX_OBJECTS = 20_000  # largest number of objects that are searched for tensors of a loss
DEPTH = 6  # levels of containers, closures and objects that are searched for tensors of a loss
Slot = tuple[int, str, Any]
"""Location of a tensor: the id of a submodule, an attribute, and a key or index inside it."""
Digest = tuple[Tensor, ...]


@final
class ChangeDetector:
    """The last known state of a problem, with checks for changes.

    Attributes:
        known: Validation of its model.
    """

    def __init__(self, problem: Problem, *, engine: str, checkpoint: bool):
        self._problem, self._engine, self._checkpoint = problem, engine, checkpoint
        self._sample: ReferenceSample | None = None
        self.known: ValidatedModel | None = None
        self._versions: tuple[Any, ...] = ()
        self._slots: tuple[Slot, ...] = ()  # of tensors that are not parameters
        self._external: list[Tensor] = []  # held by the loss, or by the function that calls the module
        self._written: set[Slot] = set()  # slots that the module writes to when it is called
        self._digests: tuple[Digest, Digest, Digest] | None = None
        self._fresh = False
        self._detected: Any = None  # an event of the stream
        self._side: torch.cuda.Stream | None = None

    @property
    def sample(self) -> ReferenceSample:
        """Small part of the data, and the outputs of the user's module on it."""
        if self._sample is None:
            before = _versions(self._tensors_by_slot())
            self._sample = reference_sample(self._problem)
            after = _versions(self._tensors_by_slot())
            self._written |= {slot for slot, version in before.items() if after.get(slot) != version}
            self._note_written()
        return self._sample

    def _note_written(self) -> None:
        """Record the tensors that the module writes to, for later passes."""
        submodules = {id(part): part for part in self._problem.model.module.modules()}
        for number, attribute, key in self._written:
            name = key if attribute == "_buffers" else attribute
            if number in submodules and (attribute == "_buffers" or key is None):
                note_rewritten(submodules[number], name)

    def detect(self) -> ValidatedModel | None:
        """Return the validation of the model, or None if all tensors have the versions of the last call."""
        problem = self._problem
        if problem.device.type == "cuda":
            self._detected = torch.cuda.current_stream(problem.device).record_event()
        if self.holds_on_all_ranks(self.known is not None and self._all_versions() == self._versions):
            return None
        problem.check_structure()
        self._sample, self._fresh, self._digests = None, True, None
        sample, tensors = self.sample, self._tensors_by_slot()
        self._slots = tuple(slot for slot in tensors if slot not in self._written)
        model, parameter_ids = problem.model, {id(p) for p in problem.model.parameters()}
        outside = tensors_in(problem.loss, model.call, model.output, model.options)
        self._external = [t for t in outside if id(t) not in parameter_ids]
        self._recognize(sample)
        self._versions = self._all_versions()
        return self.known

    def recomputing(self) -> ValidatedModel:
        """Recompute layers from now on, and return the validation of the model with recomputed layers."""
        self._checkpoint = True
        return self._recognize(self.sample)

    def _recognize(self, sample: ReferenceSample) -> ValidatedModel:
        numbers, options = digest(self._other_tensors()), {"checkpoint": self._checkpoint}
        self.known = validated_model(self._problem, sample, numbers, engine=self._engine, **options)
        return self.known

    def written(self) -> bool:
        """Return True if a tensor has another version than at the last `detect`."""
        return self._all_versions() != self._versions

    def confirm(self, *, gradients: bool = False) -> bool:
        """Return True if the problem is unchanged since its last change was detected.

        The first call after a change only records digests, including what a pass through all data wrote.

        Args:
            gradients: Compare gradients by their values, not only by the graph that makes them.
        """
        with self._on_side_stream():
            before, digests = self._digests, self._all_digests()
            if self._fresh or before is None:
                self._digests, self._fresh = digests, False
                return self.holds_on_all_ranks(not self.written())
            numbers, others_equal = same(digests[0], before[0]), all(map(same, digests[1:], before[1:]))
            reference = self.sample.rerun(self._problem, gradients=gradients)
            first = self.sample.reference
            answers = reference is None or first is None or agree(reference, first)
            if numbers and not (
                others_equal and answers
            ):  # the module computes something different with the same parameters
                forget_validation(self._problem.model)
            return self.holds_on_all_ranks(numbers and others_equal and answers)

    def holds_on_all_ranks(self, holds: bool) -> bool:
        """Return True if a condition holds on every rank that the model is sharded over."""
        spread = self._problem.model.spread
        return holds if spread is None else spread.all(holds, self._problem.device)

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Run the body on a CUDA stream that waits only for `look`, while the product is still running."""
        if self._detected is None:
            yield
            return
        self._side = self._side or torch.cuda.Stream(self._problem.device)
        self._side.wait_event(self._detected)
        with torch.cuda.stream(self._side):
            yield
        torch.cuda.current_stream(self._problem.device).wait_stream(self._side)

    def forget(self) -> None:
        """Forget the recorded state, so that everything is checked again."""
        self._versions = ()

    # ------------------------------------------------------------------------------------ tensors

    def _tensors_by_slot(self) -> dict[Slot, Tensor]:
        """Return the tensors of all submodules except parameters: buffers, attributes, and those in
        containers.
        """
        tensors: dict[Slot, Tensor] = {}
        for part in self._problem.model.module.modules():
            for name, value in vars(part).items():
                if name in _NO_STATE or value is None:
                    continue
                if isinstance(value, Tensor):
                    tensors[id(part), name, None] = value
                elif isinstance(value, dict | list | tuple) and value:
                    items = value.items() if isinstance(value, dict) else enumerate(value)
                    tensors |= {(id(part), name, key): t for key, t in items if _is_state(t)}
        return tensors

    def _other_tensors(self) -> list[Tensor]:
        """Return the module's tensors at the slots of the last `detect`, and the tensors of the loss."""
        tensors = self._tensors_by_slot()
        return [*(tensors[slot] for slot in self._slots if slot in tensors), *self._external]

    def _data(self) -> list[Tensor]:
        return [t for batch in self._problem.batches for t in batch.tensors()]

    def _parameters(self) -> list[Tensor]:
        return [*self._problem.model.parameters(), *self._problem.point.values()]

    def _all_digests(self) -> tuple[Digest, Digest, Digest]:
        return tuple(map(digest, (self._parameters(), self._other_tensors(), self._data())))  # pyright: ignore[reportReturnType]

    def _all_versions(self) -> tuple[Any, ...]:
        """Return global settings, and addresses and versions of parameters, buffers and data."""
        buffers = [
            b
            for part in self._problem.model.module.modules()
            for name, b in part._buffers.items()
            if b is not None and (id(part), "_buffers", name) not in self._written
        ]
        tensors = [*self._parameters(), *buffers, *self._data()]
        return modes(), self._problem.batches, *map(_version, tensors)


_NO_STATE = {name for name in vars(nn.Module()) if name != "_buffers"} | {"_flat_weights"}
"""Attributes of a module that are skipped: hooks and submodules, and parameters, which are compared
separately.
"""


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def tensors_in(*roots: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in objects, containers, modules, and closures and defaults of functions."""
    seen: dict[int, Any] = {}
    waiting = [(root, DEPTH) for root in roots]
    while waiting and len(seen) < MAX_OBJECTS:
        value, depth = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif depth and id(value) not in seen:
            seen[id(value)] = value  # a reference, so that its id is not reused
            waiting += [(inner, depth - 1) for inner in _children(value)]


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from (value.__defaults__ or (), value.__kwdefaults__ or {})
        yield from (cell.cell_contents for cell in value.__closure__ or () if _has_contents(cell))
    elif not isinstance(value, type | types.ModuleType) and _is_of_user(type(value)):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()


def _has_contents(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_of_user(kind: type) -> bool:
    """Return True unless a class is torch's, NumPy's or Python's own."""
    return kind.__module__.split(".")[0] not in {"torch", "numpy", "builtins", "logging", "threading"}


def changed_error(problem: Problem) -> CurvescopeError:
    """Return the error for a problem that changed during a computation of several products."""
    return CurvescopeError(
        f"{problem.model.name} or its data changed during a computation from several products",
        hint="start again, and do not write to the model or the data during the computation",
    )


def _versions(tensors: Mapping[Slot, Tensor]) -> dict[Slot, tuple[int, int, bool]]:
    return {slot: _version(t) for slot, t in tensors.items()}


def _version(t: Tensor) -> tuple[int, int, bool]:
    """Memory address of a tensor, its version counter, and if it requires a gradient."""
    at = t.data_ptr() if t.layout == torch.strided else id(t)
    return at, 0 if t.is_inference() else t._version, t.requires_grad
