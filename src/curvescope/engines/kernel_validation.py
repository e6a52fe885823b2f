"""What is known of a model: which kernels fit it, and that they give the numbers of plain autograd.

Found at first use, on a few positions, and anew whenever the module does something else than before. Three
passes through those positions: one for autograd's product, one for our outputs and the linear map that makes
them, one for our product.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.ranks.spread import Spread
from curvescope.core.seeds import drawn_on, generator
from curvescope.core.tensors import custom_functions
from curvescope.data.batches import Batch
from curvescope.engines import batch_products
from curvescope.engines.derivatives import Derivatives, compare_derivatives
from curvescope.engines.memory import result_bytes
from curvescope.engines.recompute_check import other_outputs
from curvescope.engines.reference_forward import Few, Graph, reference, refuse_random
from curvescope.engines.run import FusedRunner, PlainRunner, Runner, find_head, refuse_lost
from curvescope.engines.tensor_digest import same
from curvescope.engines.vjp import pull_each
from curvescope.kernels.backends import casting
from curvescope.kernels.substitute import Head, PlainAttention
from curvescope.models.hf.module import rounding
from curvescope.models.model import Model
from curvescope.models.running.fused import Fused, fuse
from curvescope.problem import Problem, differentiating

LOG = logging.getLogger("curvescope")
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}  # far below a mistake, above rounding
UNKNOWN = 5e-3  # in float32, where autograd's own rounding is not measured
PART, WIDE_PART = 2**18, 2**26  # entries that are compared at once; on a GPU
LARGE = 2**30  # bytes of a vector that is compared in parts
Tree = Mapping[str, Tensor]


@dataclass(frozen=True)
class Known:
    """A model as it was checked: `fused` is None where it is run as it is; `head` makes its outputs."""

    graph: Graph | None  # of the user's module on the few positions
    fused: Fused | None
    head: Head | None
    numbers: tuple[Tensor, ...]  # digest of its tensors that are not parameters
    entry_bytes: float  # of all results of a pass that are no views, for each entry of the data
    sizes: dict[Any, int] = field(default_factory=dict)  # of passes, by runner and shapes
    why: str = ""  # it is run as it is
    derivatives: Derivatives = field(default_factory=Derivatives)

    def runner(self, problem: Problem, *, checkpoint: bool) -> Runner:
        """How the module of the problem is run."""
        if self.fused is None:
            return PlainRunner(problem, checkpoint=checkpoint)
        return FusedRunner(problem, self.fused, self.head, checkpoint=checkpoint)

    def pass_bytes(self, runner: Runner, batch: Batch) -> int:
        """The size of all results of a pass; one through a batch of the same shapes is not made again."""
        key = (runner.name, *(t.shape for t in batch.tensors()))
        if key not in self.sizes:
            run = partial(runner.outputs, batch, {}, second_order=False, lazy=True)
            self.sizes[key] = result_bytes(run)[1]
        return self.sizes[key]


_known: WeakKeyDictionary[Model, dict[Any, Known]] = WeakKeyDictionary()


def known(
    problem: Problem, few: Few, numbers: tuple[Tensor, ...], *, engine: str, checkpoint: bool
) -> tuple[Known, bool]:
    """What is known of the problem's model, found out unless its graph and its other tensors are as before.

    Args:
        problem: Whose model is meant.
        few: Its module on a few positions.
        numbers: A digest of the model's tensors that are not parameters.
        engine: The engine's name.
        checkpoint: Layers are computed again.

    Returns:
        It, and whether our outputs were compared with the module's own just now.
    """
    kind, model = _kind(problem, engine, checkpoint), problem.model
    entries, graph = _known.setdefault(model, {}), None if few.reference is None else few.reference.graph
    before = entries.get(kind)
    holds = before is not None and before.graph == graph and same(before.numbers, numbers)
    if holds if model.spread is None else model.spread.all(holds, problem.device):
        return entries[kind], False
    found = _find_out(problem, few.batch, engine, checkpoint)
    entry_bytes = max(found.size - _widened_bytes(model), 0) / num_entries(few.batch)
    derivatives = compare_derivatives(problem, few.batch, found.functions)
    entries[kind] = Known(
        graph, found.fused, found.head, numbers, entry_bytes, why=found.why, derivatives=derivatives
    )
    ours, theirs = found.outputs, few.reference
    return entries[kind], ours is not None and theirs is not None and _near(ours, theirs.outputs)


def forget_known(model: Model) -> None:
    """Find out again at the next look which kernels fit a model."""
    _known.pop(model, None)


def _kind(problem: Problem, engine: str, checkpoint: bool) -> tuple[Any, ...]:
    return engine, checkpoint, problem.dtype, problem.device, type(problem.loss), modes()


def modes() -> tuple[Any, ...]:
    """Global settings that numbers depend on."""
    return (
        casting(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )


class _Found(NamedTuple):
    """What fits a model (None: it is run as it is), and of one pass all results' size and our outputs."""

    fused: Fused | None
    head: Head | None
    size: int
    outputs: Tensor | None = None
    why: str = ""
    functions: list[str] | None = None  # custom ones in the graph; None if no graph was made


def _find_out(problem: Problem, few: Batch, engine: str, checkpoint: bool) -> _Found:
    """Kernels for the problem's model, and its head."""
    model = problem.model
    if checkpoint:
        with differentiating():
            refuse_lost(problem, few)
    if engine == "autograd":
        return _Found(None, None, _size(problem, few), why="engine=autograd was asked for")
    fused, groups = fuse(model), _groups(problem)
    try:
        v = _direction(problem)
        theirs = _Products(problem, few, PlainRunner(problem, checkpoint=model.releases), v)
        part = theirs.of(groups[0])
    except (CurvescopeError, RuntimeError):
        return _Found(fused, None, _size(problem, few))  # nothing to compare with; the product will say why
    try:
        (head, outputs), size = result_bytes(partial(find_head, problem, fused, few), views=False)
        runner, gap = FusedRunner(problem, fused, head, checkpoint=checkpoint), _Gap()
        ours = _Products(problem, few, runner, v)
        for i, names in enumerate(groups):
            part = part if i == 0 else theirs.of(names)
            gap.add(ours, names, part)
    except Exception as error:  # whatever a module does that our kernels do not expect
        if engine == "fast":
            raise
        LOG.info("%s is differentiated as it is, without our kernels: %s", model.name, error)
        why = f"our kernels do not fit this module: {str(error).partition(chr(10))[0]}"
        return _Found(None, None, _size(problem, few), why=why, functions=theirs.functions)
    repeated = runner.repeats.hold()
    if not (repeated if model.spread is None else model.spread.all(repeated, problem.device)):
        refuse_random(problem, few)
        raise other_outputs(model)
    error, length = gap.measured(model.spread, problem.device)
    if math.isfinite(length):  # else the product says
        _compare(problem, few, v, error, part if len(groups) == 1 else None, checkpoint=checkpoint)
    return _Found(fused, head, size, None if checkpoint else outputs, functions=theirs.functions)


def _size(problem: Problem, few: Batch) -> int:
    """Of all results where the module is asked; 0 where it cannot be, and the product will say why."""
    try:
        return result_bytes(partial(reference, problem, few), views=False)[1]
    except Exception:  # whatever a module raises
        return 0


def _widened_bytes(model: Model) -> int:
    """Of the wide weights that a pass makes where they are kept in half precision, whatever the data."""
    if model.widening is None:
        return 0
    return sum(p.numel() * model.dtype.itemsize for p in model.parameters() if p.dtype != model.dtype)


def num_entries(batch: Batch) -> int:
    """Of the largest tensor of a batch."""
    return max(t.numel() for t in batch.tensors())


def _direction(problem: Problem) -> dict[str, Tensor]:
    parameters = dict(problem.model.named_parameters())
    place = drawn_on(sum(p.numel() for p in parameters.values()), problem.device)
    source = generator(0, device=place)
    options = {"generator": source, "device": place, "dtype": torch.float32}
    return {
        name: torch.randn(1, *p.shape, **options).to(problem.device, problem.dtype)
        for name, p in parameters.items()
    }


def _groups(problem: Problem) -> list[tuple[str, ...]]:
    """Names of parameters: all, or of a large model some at a time, of which products take little memory."""
    sizes = {n: p.numel() * torch.finfo(problem.dtype).bits // 8 for n, p in problem.model.named_parameters()}
    most = max(LARGE, sum(sizes.values()) // 4)
    found, held = [[]], 0
    for name, size in sizes.items():
        if found[-1] and held + size > most:
            found.append([])
            held = 0
        found[-1].append(name)
        held += size
    return [tuple(names) for names in found]


class _Products:
    """H v on a few positions: some parameters' rows at a time, of one graph."""

    def __init__(self, problem: Problem, few: Batch, runner: Runner, v: Tree):
        self._v, names = list(v.values()), tuple(v)
        self.functions: list[str] = []
        with differentiating():
            how = (problem, runner, few, "hessian")
            self._graph = batch_products.gradient_graph(*how, names, names, twins=False, look=self._note)

    def _note(self, s: Tensor) -> None:
        self.functions = custom_functions(s)

    def hand_over(self, names: Sequence[str], receive: Callable[[str, Tensor], object]) -> None:
        """The named rows, one after the other; those that are zero may be missing."""
        into = [self._graph.leaves[name] for name in names]
        with differentiating():
            pull_each(self._graph.first, self._v, into, 1, lambda number, x: receive(names[number], x))

    def of(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The named rows, (1, *shape) each."""
        found: dict[str, Tensor] = {}
        self.hand_over(names, found.__setitem__)
        return found


class _Gap:
    """‖ours − theirs‖ / ‖theirs‖ over parameters, as they come; a missing one is zero."""

    def __init__(self) -> None:
        self._gap, self._size = 0.0, 0.0  # squares

    def add(self, ours: _Products, names: Sequence[str], theirs: Tree) -> None:
        """The named rows of ours, against theirs."""
        seen: set[str] = set()

        def compare(name: str, x: Tensor) -> None:
            seen.add(name)
            gaps = (_square(a if b is None else a.to(b) - b) for a, b in _parts(x, theirs.get(name)))
            self._gap += float(sum(gaps))

        ours.hand_over(names, compare)
        lengths = {name: float(_square(y)) for name, y in theirs.items()}
        self._gap += sum(length for name, length in lengths.items() if name not in seen)
        self._size += sum(lengths.values())

    def measured(
        self, spread: Spread | None = None, device: torch.device | None = None
    ) -> tuple[float, float]:
        """It, and ‖theirs‖; on all ranks that have pieces."""
        squares = torch.tensor([self._gap, self._size], dtype=torch.float64)
        if spread is not None:
            squares = spread.added(squares.to(device))
        gap, size = squares.sqrt().tolist()
        return gap / size if size else gap, size


def _parts(x: Tensor, y: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Parts of both, so that no difference is as large as they are."""
    step = WIDE_PART if x.is_cuda else PART
    others = (None,) * -(-x.numel() // step) if y is None else y.flatten().split(step)
    return zip(x.flatten().split(step), others, strict=True)


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _compare(
    problem: Problem, few: Batch, v: Tree, error: float, theirs: Tree | None, *, checkpoint: bool
) -> None:
    """Raise unless both products are the same up to rounding."""
    tolerance = TOLERANCE.get(problem.dtype, 0.1)
    if problem.dtype == torch.float32 and (theirs is None or not _can_be_copied(problem.model)):
        tolerance = UNKNOWN
    if problem.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        tolerance = max(tolerance, 0.05)
    if not error <= tolerance and not error <= 10 * _rounding(problem, few, v, theirs):
        refuse_random(problem, few)
        refuse_other(problem, few)
        raise CurvescopeError(
            f"the fast engine and autograd disagree on {problem.model.name} by {error:.1e} of the product",
            hint="use engine='autograd'" + (" and checkpoint=False" if checkpoint else ""),
        )


def _can_be_copied(model: Model) -> bool:
    return model.spread is None and model.widening is None


def _rounding(problem: Problem, few: Batch, v: Tree, theirs: Tree | None) -> float:
    """How far autograd itself is from its product in float64; 0 where that would take a large copy."""
    model = problem.model
    if theirs is None or not _can_be_copied(model):
        return 0.0
    wide = replace(model, module=copy.deepcopy(model.module).double())
    point = {name: p.double() for name, p in problem.point.items()}
    double = Problem(wide, [few], problem.loss, params="*").at(point)
    (batch,) = double.placed_batches("check of the engine")
    exact, gap = _Products(double, batch, PlainRunner(double), {n: t.double() for n, t in v.items()}), _Gap()
    gap.add(exact, tuple(v), theirs)
    return gap.measured()[0]


def refuse_other(problem: Problem, few: Batch) -> None:
    """Raise where the module gives something else in its plain form than when its user calls it."""
    with PlainAttention():
        theirs = reference(problem, few).outputs
    if near(PlainRunner(problem), few, theirs):
        return
    raise CurvescopeError(
        f"{problem.model.name} gives other outputs when it is called as it is than with attention and "
        "options that can be differentiated twice",
        hint="call it so that eager attention and use_cache=False change nothing, and compare",
    )


@torch.no_grad()
def near(runner: Runner, few: Batch, theirs: Tensor) -> bool:
    """Whether outputs are the same up to what another order of operations may change; in any precision."""
    ours = runner.outputs(few, {}, second_order=False, lazy=False)
    assert isinstance(ours, Tensor)
    return _near(ours, theirs)


def _near(ours: Tensor, theirs: Tensor) -> bool:
    finite = theirs.isfinite()
    if not bool(finite.any()):
        return True  # the product will say so
    scale = max(float(theirs[finite].abs().max()), 1e-30)
    return float((ours - theirs)[finite].abs().max()) <= rounding(theirs) * scale
