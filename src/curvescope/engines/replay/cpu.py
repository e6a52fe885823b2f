"""Record repeated products on a CPU, and replay them.

A product runs some hundreds of operations whose shapes never change, and autograd takes fresh memory for each
result: on a CPU much of the time goes into pages that the system must clear first. A recording lists the
operations as they are dispatched; every result gets a place that others have left; and a replay calls them
one after the other, each writing where it wrote. Values that an operation reads from a tensor, and random
numbers, would not be repeated, so such products are not recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from curvescope.core.seeds import generator
from curvescope.core.tensors import leaves, tree_map
from curvescope.engines.batch_products import BatchProduct, Names, results
from curvescope.engines.vjp import Receive
from curvescope.models.running.aliased_parameters import DispatchMode

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
    """Raised if a replay would not repeat an operation."""


@dataclass(frozen=True)
class StorageView:
    """Position of a tensor: one of the storages made during the recording, and the layout in it."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Step:
    """One operation. Tensors made during the recording are places, all others are themselves."""

    op: Any
    args: Any
    kwargs: Any
    made: tuple[StorageView | None, ...]  # its results in new storages, in the order of all its results

    def storages(self) -> set[int]:
        """All that it reads or writes."""
        return storages((self.args, self.kwargs, self.made))


def storages(tree: Any) -> set[int]:
    """Those of all places in a tree."""
    return {x.storage for x in leaves(tree) if isinstance(x, StorageView)}


class Pool:
    """Memory for recordings that never run at the same time: each may use all of it."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def plan(self, sizes: Sequence[int], used: Sequence[set[int]]) -> dict[int, Tensor]:
        """A block for each storage, from the first step that uses it to the last.

        The smallest free block that is large enough is reused; among equal sizes the one freed last, which
        may still be in the CPU's cache.
        """
        last = {s: i for i, storages_used in enumerate(used) for s in storages_used}
        free, blocks = list(self._blocks), {}
        for i, storages_used in enumerate(used):
            for s in sorted(storages_used - blocks.keys()):
                fitting = [b for b in reversed(free) if sizes[s] <= b.numel() <= 2 * sizes[s]]
                block = min(fitting, key=Tensor.numel, default=None)
                if block is None:
                    block = torch.empty(sizes[s], dtype=torch.uint8, device="cpu")
                    self._blocks.append(block)
                blocks[s], free = block, [b for b in free if b is not block]
            free += [blocks[s] for s in sorted(storages_used) if last[s] == i]
        return blocks


class Recording:
    """The steps of a work, bound to their memory.

    Raises:
        NotRecordable: the work draws random numbers, reads a number, or changes the shape of a tensor.
    """

    def __init__(self, writer: Writer, work_results: Sequence[Tensor | None], pool: Pool):
        results = [writer.described(t) for t in work_results]
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
        places = tree_map(self.described, args), tree_map(self.described, kwargs)
        result = func(*args, **kwargs)
        given, results = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)], leaves(result)
        strange = [t for t in (*given, *results) if isinstance(t, Tensor) and not _plain(t)]
        if strange:
            self.refused = f"{func} has a tensor of {strange[0].layout}, {strange[0].dtype}"
        if self.refused:
            return result
        addresses = {_address(t) for t in given}
        made = tuple(self._made(t, addresses) for t in results)
        if func._schema.is_mutable or any(place is not None for place in made):  # otherwise it is a view
            self.steps.append(Step(func, places[0], places[1], made))
        return result

    def described(self, x: Any) -> Any:
        """The place of a tensor made here; anything else as it is."""
        number = self._numbers.get(_address(x)) if isinstance(x, Tensor) and _plain(x) else None
        return (
            x
            if number is None
            else StorageView(number, x.shape, x.stride(), int(x.storage_offset()), x.dtype)
        )

    def _made(self, x: Any, addresses: set[int]) -> StorageView | None:
        """The place of a result, unless it is none or a view of an argument."""
        if not isinstance(x, Tensor) or _address(x) in addresses:
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
        self._bound: dict[StorageView, Tensor] = {}

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, StorageView):
            return x
        if x not in self._bound:
            storage = self._blocks[x.storage].untyped_storage()
            empty = torch.empty(0, dtype=x.dtype, device="cpu")
            self._bound[x] = empty.set_(storage, x.offset, x.shape, x.stride)  # pyright: ignore
        return self._bound[x]


def _calls(step: Step, bind: _Binder) -> Iterator[Callable[[], Any]]:
    """Return the calls that replay one step: the operation in place, into its results, or copied into
    them.
    """
    args, kwargs = tree_map(bind, step.args), tree_map(bind, step.kwargs)
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
    """Return True if a tensor is memory with strides, and nothing else."""
    return t.layout == torch.strided and t.device.type == "cpu" and not t.is_complex() and not t.is_quantized


def _address(t: Tensor) -> int:
    """Identity of the storage, which tensors that share memory have in common."""
    return t.untyped_storage()._cdata


@cache
def _out_variant(op: Any) -> tuple[Any, list[str]] | None:
    """The same operation writing into given tensors, and their names, where it does so without a copy."""
    signature = [(a.name, str(a.type)) for a in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        variant = getattr(op.overloadpacket, name)
        arguments = variant._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        same = [(a.name, str(a.type)) for a in arguments if not a.is_out] == signature
        if outs and same and (op in _WRITING or _for_cpu(variant)):
            return variant, outs
    return None


LOG = logging.getLogger("curvescope")
# Directions before a recording, one at a time and several at once: it costs as much as a replay saves in 10
# to 50. A run with that many products is likely to need more. Short runs, such as eight products per block or
# the two searches of a monitor's row, pay nothing.
WARM, MANY = 24, 28


@final
class Replay:
    """`work(tensors, group, receive)` for tensors (k, …), k directions, of always the same shapes.

    The first calls run the work directly. Then a call is recorded, and a replay with other inputs is compared
    with the work. If they are not equal bit for bit, the work continues to run directly. Results are valid
    until the next call of any work that shares the pool.
    """

    def __init__(self, work: BatchProduct, rows: Names, pool: Pool):
        self._work, self._rows, self._pool = work, rows, pool
        self._done = 0  # directions, without a recording
        self._recording: Recording | None = None
        self._refused = False

    def __call__(self, tensors: Sequence[Tensor], group: int, receive: Receive) -> None:
        k = tensors[0].shape[0]
        if self._refused or (k != 1 and (group > 1 or not self._records_soon(k))):
            self._done += k
            self._work(tensors, group, receive)
        elif k == 1:
            self._single(tensors, receive)
        else:
            columns = [self._column([t[j : j + 1] for t in tensors]) for j in range(k)]
            for name in columns[0]:
                receive(name, torch.cat([column[name] for column in columns]))

    def _records_soon(self, k: int) -> bool:
        return self._recording is not None or self._done + k > MANY

    def _column(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Copies of the results of one direction."""
        results_: dict[str, Tensor] = {}
        self._single(tensors, lambda name, x: results_.__setitem__(name, x.clone()))
        return results_

    def _single(self, tensors: Sequence[Tensor], receive: Receive) -> None:
        if self._recording is None:
            self._done += 1
            if self._done > WARM and not self._refused:
                self._record(tensors)
        if self._recording is None:
            self._work(tensors, 1, receive)
            return
        for name, x in zip(self._rows, self._recording.replay(tensors), strict=True):
            if x is not None:
                receive(name, x)

    def _record(self, tensors: Sequence[Tensor]) -> None:
        """The recording and its comparison, in as little memory as they take."""
        try:
            self._recording = self._compared([t.clone() for t in tensors])
        except (NotRecordable, RuntimeError) as error:  # for instance if memory ran out
            LOG.info("a product was not recorded: %s", str(error).splitlines()[0])
            self._refused = True

    def _compared(self, inputs: list[Tensor]) -> Recording:
        writer = Writer(inputs)
        with writer:
            results_ = results(self._work, inputs, self._rows)
        recording, source = Recording(writer, results_, self._pool), generator(0)
        del results_, writer
        other_inputs = [t.normal_(generator=source) for t in inputs]
        if not _same(recording.replay(other_inputs), results(self._work, other_inputs, self._rows)):
            raise NotRecordable("a replay gives different values")
        return recording


def _same(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Return True if all are the same, bit for bit."""
    pairs = zip(actual, expected, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
