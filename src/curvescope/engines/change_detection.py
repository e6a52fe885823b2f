"""Detection of changes: has a problem changed since something of it was cached?

Two checks. Versions and content digests of all tensors: the parameters, the module's other tensors, those of
the loss, and the data. And the user's own module on a few positions (`reference_forward`): outputs, loss and
gradients are compared with what they were. The first looks at versions before a product; everything else is
compared behind it, so that a GPU need not wait.
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
from curvescope.engines.kernel_validation import Known, forget_known, known, modes
from curvescope.engines.reference_forward import Few, alike, few_positions
from curvescope.engines.tensor_digest import digest, same
from curvescope.models.running.exchange import note_rewritten
from curvescope.problem import Problem

MOST = 20_000  # objects that are searched for tensors of a loss
DEPTH = 6  # of containers, closures and objects in which tensors of a loss are looked for
Slot = tuple[int, str, Any]
"""A place for a tensor: the id of a submodule, an attribute, and a key or number inside of it."""
Digest = tuple[Tensor, ...]


@final
class ChangeDetector:
    """The state of a problem as an engine saw it last.

    Attributes:
        known: What is known of its model.
        compared: Our outputs were compared with the module's own at the last look.
    """

    def __init__(self, problem: Problem, *, engine: str, checkpoint: bool):
        self._problem, self._engine, self._checkpoint = problem, engine, checkpoint
        self._few: Few | None = None
        self.known: Known | None = None
        self.compared = False
        self._versions: tuple[Any, ...] = ()
        self._slots: tuple[Slot, ...] = ()  # of tensors that are not parameters
        self._outside: list[Tensor] = []  # that the loss holds, and the function that calls the module
        self._written: set[Slot] = set()  # those that the module itself writes to when it is called
        self._digests: tuple[Digest, Digest, Digest] | None = None
        self._fresh = False
        self._looked: Any = None  # an event of the stream
        self._side: torch.cuda.Stream | None = None

    @property
    def few(self) -> Few:
        """A small part of the data, and what the user's module gives on it."""
        if self._few is None:
            before = _versions(self._tensors_by_slot())
            self._few = few_positions(self._problem)
            after = _versions(self._tensors_by_slot())
            self._written |= {slot for slot, version in before.items() if after.get(slot) != version}
            self._note_written()
        return self._few

    def _note_written(self) -> None:
        """Tell whoever runs the module which tensors it writes to."""
        parts = {id(part): part for part in self._problem.model.module.modules()}
        for number, attribute, key in self._written:
            name = key if attribute == "_buffers" else attribute
            if number in parts and (attribute == "_buffers" or key is None):
                note_rewritten(parts[number], name)

    def look(self) -> Known | None:
        """Return what is known of the model, or None if all tensors have the versions of the last look."""
        problem = self._problem
        if problem.device.type == "cuda":
            self._looked = torch.cuda.current_stream(problem.device).record_event()
        if self.agreed(self.known is not None and self._all_versions() == self._versions):
            return None
        problem.check_structure()
        self._few, self._fresh, self._digests = None, True, None
        few, held = self.few, self._tensors_by_slot()
        self._slots = tuple(slot for slot in held if slot not in self._written)
        model, own = problem.model, {id(p) for p in problem.model.parameters()}
        others = tensors_in(problem.loss, model.call, model.output, model.options)
        self._outside = [t for t in others if id(t) not in own]
        self._recognize(few)
        self._versions = self._all_versions()
        return self.known

    def validated_anew(self) -> Known:
        """What is known of the model, found out again because kernels that fitted it do not any more."""
        forget_known(self._problem.model)
        return self._recognize(self.few)

    def recomputing(self) -> Known:
        """What is known of the model with layers that are computed again, from here on."""
        self._checkpoint = True
        return self._recognize(self.few)

    def _recognize(self, few: Few) -> Known:
        numbers = digest(self._other_tensors())
        self.known, self.compared = known(
            self._problem, few, numbers, engine=self._engine, checkpoint=self._checkpoint
        )
        return self.known

    def written(self) -> bool:
        """Return True if a tensor has another version than at the last look."""
        return self._all_versions() != self._versions

    def confirm(self, *, gradients: bool = False) -> bool:
        """Return True if the problem is what it was when it was looked at after a change.

        The first call after a change only records digests, and sees what a pass through all data wrote.

        Args:
            gradients: Compare gradients by their values, not only by the graph that makes them.
        """
        with self._aside():
            before, now = self._digests, self._all_digests()
            if self._fresh or before is None:
                self._digests, self._fresh = now, False
                return self.agreed(not self.written())
            numbers, others = same(now[0], before[0]), all(map(same, now[1:], before[1:]))
            reference = self.few.again(self._problem, gradients=gradients)
            first = self.few.reference
            answers = reference is None or first is None or alike(reference, first)
            if numbers and not (
                others and answers
            ):  # the module does something else with the same parameters
                forget_known(self._problem.model)
            return self.agreed(numbers and others and answers)

    def agreed(self, holds: bool) -> bool:
        """Return True if something holds on every rank that the model is spread over."""
        spread = self._problem.model.spread
        return holds if spread is None else spread.all(holds, self._problem.device)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a GPU beside the product, which is still under way: on a stream that waits for `look` alone."""
        if self._looked is None:
            yield
            return
        self._side = self._side or torch.cuda.Stream(self._problem.device)
        self._side.wait_event(self._looked)
        with torch.cuda.stream(self._side):
            yield
        torch.cuda.current_stream(self._problem.device).wait_stream(self._side)

    def forget(self) -> None:
        """Look at everything anew."""
        self._versions = ()

    # ------------------------------------------------------------------------------------ tensors

    def _tensors_by_slot(self) -> dict[Slot, Tensor]:
        """Tensors of all submodules that are not parameters: buffers, attributes, and those in containers."""
        found: dict[Slot, Tensor] = {}
        for part in self._problem.model.module.modules():
            for name, value in vars(part).items():
                if name in _NO_STATE or value is None:
                    continue
                if isinstance(value, Tensor):
                    found[id(part), name, None] = value
                elif isinstance(value, dict | list | tuple) and value:
                    items = value.items() if isinstance(value, dict) else enumerate(value)
                    found |= {(id(part), name, key): t for key, t in items if _is_state(t)}
        return found

    def _other_tensors(self) -> list[Tensor]:
        """The module's tensors at the slots that were found at the last look, and those of the loss."""
        held = self._tensors_by_slot()
        return [*(held[slot] for slot in self._slots if slot in held), *self._outside]

    def _data(self) -> list[Tensor]:
        return [t for batch in self._problem.batches for t in batch.tensors()]

    def _parameters(self) -> list[Tensor]:
        return [*self._problem.model.parameters(), *self._problem.point.values()]

    def _all_digests(self) -> tuple[Digest, Digest, Digest]:
        return tuple(map(digest, (self._parameters(), self._other_tensors(), self._data())))  # pyright: ignore[reportReturnType]

    def _all_versions(self) -> tuple[Any, ...]:
        """Global settings, which data, and where parameters, buffers and data lie in which version."""
        buffers = [
            b
            for part in self._problem.model.module.modules()
            for name, b in part._buffers.items()
            if b is not None and (id(part), "_buffers", name) not in self._written
        ]
        tensors = [*self._parameters(), *buffers, *self._data()]
        return modes(), self._problem.batches, *map(_version, tensors)


_NO_STATE = {name for name in vars(nn.Module()) if name != "_buffers"} | {"_flat_weights"}
"""Attributes of a module without tensors of its own (hooks, submodules), and parameters, which are apart."""


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def tensors_in(*roots: Any) -> Iterator[Tensor]:
    """The tensors in objects, containers, modules, and what functions hold in closures and defaults."""
    seen: dict[int, Any] = {}
    waiting = [(root, DEPTH) for root in roots]
    while waiting and len(seen) < MOST:
        value, depth = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif depth and id(value) not in seen:
            seen[id(value)] = value  # held, so that no other object gets its place in memory
            waiting += [(inner, depth - 1) for inner in _inside(value)]


def _inside(value: Any) -> Iterator[Any]:
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
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
    elif not isinstance(value, type | types.ModuleType) and _is_of_user(type(value)):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_of_user(kind: type) -> bool:
    """Return True unless a class is torch's, NumPy's or Python's own."""
    return kind.__module__.split(".")[0] not in {"torch", "numpy", "builtins", "logging", "threading"}


def moved(problem: Problem) -> CurvescopeError:
    """What to say where a problem has changed between products that belong together."""
    return CurvescopeError(
        f"{problem.model.name} or its data changed while something was computed from many products",
        hint="begin again, and let nothing write to them meanwhile",
    )


def _versions(tensors: Mapping[Slot, Tensor]) -> dict[Slot, tuple[int, int, bool]]:
    return {slot: _version(t) for slot, t in tensors.items()}


def _version(t: Tensor) -> tuple[int, int, bool]:
    """Where a tensor lies, how often autograd saw it being written, and if derivatives are taken in it."""
    at = t.data_ptr() if t.layout == torch.strided else id(t)
    return at, 0 if t.is_inference() else t._version, t.requires_grad
