"""Work on a CPU that is the same every time, done again without autograd and in memory planned once.

A product runs some hundreds of operations whose shapes never change, and autograd takes fresh memory for each
result: on a CPU much of the time goes into pages that the system must clear first. Here the operations are
written down as they are dispatched; every result gets a place that others have left; and a replay calls them
one after the other, each writing where it wrote. Numbers that an operation reads from a tensor, and random
ones, would not be repeated: such work is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from curvescope.engines.replay.plan import Place, Pool, Step, leaves, mapped, storages
from curvescope.models.running.held import DispatchMode

_torch: Any = torch  # for names that torch does not declare
_aten: Any = torch.ops.aten
_COPIES = (_aten.clone.default, _aten._to_copy.default)
_NOTHING = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_ZEROS = {_aten.zeros, _aten.zeros_like, _aten.new_zeros}
_WRITING = {_aten.stack.default, _aten.mv.default}  # write into given tensors, for all devices in one kernel
_REFUSED_TAGS = {  # what an operation gives depends on more than the places of its arguments
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
_REFUSED = {_aten.resize_, _aten.set_, _aten.resize_as_}


class NotRecordable(Exception):
    """Work that does something which a replay would not repeat."""


class Recording:
    """The steps of a work, bound to their memory.

    Raises:
        NotRecordable: the work draws random numbers, reads a number, or changes the shape of a tensor.
    """

    def __init__(self, writer: Writer, found: Sequence[Tensor | None], pool: Pool):
        results = [writer.described(t) for t in found]
        if writer.refused:
            raise NotRecordable(writer.refused)
        used = [storages(writer.inputs), *(step.storages() for step in writer.steps), storages(results)]
        bind = _Binder(pool.plan(writer.sizes, used))
        self._inputs = [bind(place) for place in writer.inputs]
        self._calls = [call for step in writer.steps for call in _calls(step, bind)]
        self._results = [bind(place) for place in results]

    @torch.no_grad()
    def replay(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The work for other tensors."""
        with _torch._C._AutoDispatchBelowAutograd():
            for place, t in zip(self._inputs, tensors, strict=True):
                place.copy_(t)
            for call in self._calls:
                call()
        return self._results


class Writer(DispatchMode):
    """Writes down what is dispatched inside. Storages are numbered, those of the inputs first."""

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.steps: list[Step] = []
        self.sizes: list[int] = []
        self.refused = ""
        self._numbers: dict[int, int] = {}
        self._held: list[StorageWeakRef] = []  # so that no other storage gets an address that was numbered
        self.inputs = [self._numbered(t) for t in inputs]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _REFUSED or not _REFUSED_TAGS.isdisjoint(func.tags):
            self.refused = str(func)
        places = mapped(self.described, args), mapped(self.described, kwargs)
        found = func(*args, **kwargs)
        given, results = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)], leaves(found)
        strange = [t for t in (*given, *results) if isinstance(t, Tensor) and not _plain(t)]
        if strange:
            self.refused = f"{func} has a tensor of {strange[0].layout}, {strange[0].dtype}"
        if self.refused:
            return found
        seen = {_address(t) for t in given}
        made = tuple(self._made(t, seen) for t in results)
        if func._schema.is_mutable or any(place is not None for place in made):  # otherwise it is a view
            self.steps.append(Step(func, places[0], places[1], made))
        return found

    def described(self, x: Any) -> Any:
        """The place of a tensor made here; anything else as it is."""
        number = self._numbers.get(_address(x)) if isinstance(x, Tensor) and _plain(x) else None
        return x if number is None else Place(number, x.shape, x.stride(), int(x.storage_offset()), x.dtype)

    def _made(self, x: Any, seen: set[int]) -> Place | None:
        """The place of a result, unless it is none or a view of an argument."""
        if not isinstance(x, Tensor) or _address(x) in seen:
            return None
        return self._numbered(x)

    def _numbered(self, t: Tensor) -> Any:
        """The place of a tensor in a new storage."""
        self._numbers[_address(t)] = len(self.sizes)
        self._held.append(StorageWeakRef(t.untyped_storage()))
        self.sizes.append(t.untyped_storage().nbytes())
        return self.described(t)


class _Binder:
    """Tensors at their places."""

    def __init__(self, blocks: dict[int, Tensor]):
        self._blocks = blocks
        self._bound: dict[Place, Tensor] = {}

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, Place):
            return x
        if x not in self._bound:
            storage = self._blocks[x.storage].untyped_storage()
            empty = torch.empty(0, dtype=x.dtype, device="cpu")
            self._bound[x] = empty.set_(storage, x.offset, x.shape, x.stride)  # pyright: ignore
        return self._bound[x]


def _calls(step: Step, bind: _Binder) -> Iterator[Callable[[], Any]]:
    """What a replay calls for one step: the operation in place, into its results, or copied into them."""
    args, kwargs = mapped(bind, step.args), mapped(bind, step.kwargs)
    made = [bind(place) for place in step.made]
    packet, variant = step.op.overloadpacket, _out_variant(step.op)
    if packet in _NOTHING:
        return
    if packet in _ZEROS:
        yield made[0].zero_
    elif step.op in _COPIES:
        yield partial(_aten.copy_.default, made[0], args[0])
    elif not any(t is not None for t in made):
        yield partial(step.op, *args, **kwargs)
    elif variant is not None and all(t is not None for t in made):
        op, names = variant
        yield partial(op, *args, **kwargs, **dict(zip(names, made, strict=True)))
    else:
        yield partial(_copied, step.op, args, kwargs, made)


def _copied(op: Any, args: Any, kwargs: Any, made: Sequence[Tensor | None]) -> None:
    for place, t in zip(made, leaves(op(*args, **kwargs)), strict=True):
        if place is not None:
            place.copy_(t)


def _for_cpu(op: Any) -> bool:
    return _torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU")


def _plain(t: Tensor) -> bool:
    """Whether a tensor is memory with strides, and nothing else."""
    return t.layout == torch.strided and t.device.type == "cpu" and not t.is_complex() and not t.is_quantized


def _address(t: Tensor) -> int:
    """What tensors have in common that share memory."""
    return t.untyped_storage()._cdata


@cache
def _out_variant(op: Any) -> tuple[Any, list[str]] | None:
    """The same operation writing into given tensors, and their names, where it does so without a copy."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        arguments = other._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        same = [(a.name, str(a.type)) for a in arguments if not a.is_out] == wanted
        if outs and same and (op in _WRITING or _for_cpu(other)):
            return other, outs
    return None
