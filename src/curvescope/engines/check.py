"""What is known of a model: which kernels fit it, and that they give the numbers of plain autograd.

Found at first use, on a few positions, and anew whenever the module does something else than before. Three
passes through those positions: one for autograd's product, one for our outputs and the linear map that makes
them, one for our product.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.ranks.spread import Spread
from curvescope.core.seeds import drawn_on, generator
from curvescope.data.batches import Batch
from curvescope.engines import ask, works
from curvescope.engines.memory import result_bytes
from curvescope.engines.run import FusedRunner, PlainRunner, Runner, find_head
from curvescope.engines.state.digest import digest, same
from curvescope.engines.state.snapshot import Snapshot, modes
from curvescope.kernels.substitute import PlainAttention
from curvescope.models.hf.module import rounding
from curvescope.models.model import Model
from curvescope.models.running.fused import Fused, fuse
from curvescope.problem import Problem, differentiating

LOG = logging.getLogger("curvescope")
TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-3}  # far below a mistake, above rounding
PIECE, WIDE_PIECE = 2**18, 2**26  # entries that are compared at once, on a GPU
ASIDE = 2**30  # bytes of a vector that is no large part of a GPU's memory
Tree = Mapping[str, Tensor]


@dataclass(frozen=True)
class Known:
    """A model as it was checked: `fused` is None where it is run as it is; `head` makes its outputs."""

    snapshot: Snapshot
    fused: Fused | None
    head: int | None
    numbers: tuple[Tensor, ...]  # in tensors that are no parameters, summed up
    entry_bytes: float  # of all results of a pass that are no views, for each entry of the data
    sizes: dict[Any, int] = field(default_factory=dict)  # of passes, by runner and shapes
    why: str = ""  # it is run as it is

    def holds(self) -> bool:
        """Whether the module does what it did, with the same numbers apart from its parameters."""
        return self.snapshot.same() and same(digest(self.snapshot.tensors), self.numbers)

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


def known(problem: Problem, few: ask.Few, *, engine: str, checkpoint: bool) -> tuple[Known, bool]:
    """What is known of the problem's model, found out where nothing is or where the model has changed.

    With it comes whether outputs with our kernels were seen to be the module's answer just now.
    """
    kind = (engine, checkpoint, problem.dtype, problem.device, type(problem.loss), modes())
    model = problem.model
    entries = _known.setdefault(model, {})
    holds = kind in entries and entries[kind].holds()
    if holds if model.spread is None else model.spread.all(holds, problem.device):
        return entries[kind], False
    problem.check_structure()
    snapshot = Snapshot(model.module, model.options, model.call, model.output, problem.loss)
    found = _find_out(problem, few.batch, engine, checkpoint)
    snapshot.settle()
    entry_bytes = found.size / num_entries(few.batch)
    entries[kind] = Known(
        snapshot, found.fused, found.head, digest(snapshot.tensors), entry_bytes, why=found.why
    )
    ours, theirs = found.outputs, few.answer
    return entries[kind], ours is not None and theirs is not None and _near(ours, theirs.outputs)


class _Found(NamedTuple):
    """What fits a model (None: it is run as it is), and of one pass all results' size and our outputs."""

    fused: Fused | None
    head: int | None
    size: int
    outputs: Tensor | None = None
    why: str = ""


def _find_out(problem: Problem, few: Batch, engine: str, checkpoint: bool) -> _Found:
    """Kernels for the problem's model, and its head."""
    model = problem.model
    if engine == "autograd":
        return _Found(None, None, _size(problem, few), why="engine=autograd was asked for")
    fused = fuse(model)
    try:
        v = _direction(problem)
        plain = PlainRunner(problem, checkpoint=model.releases)
        theirs: dict[str, Tensor] = {}
        _product(problem, few, plain, v, _put_aside(problem, theirs))
    except (CurvescopeError, RuntimeError):
        return _Found(fused, None, _size(problem, few))  # nothing to compare with; the product will say why
    try:
        (head, outputs), size = result_bytes(partial(find_head, problem, fused, few), views=False)
        gap = _Gap(theirs, model.spread)
        _product(problem, few, FusedRunner(problem, fused, head, checkpoint=checkpoint), v, gap.receive)
    except Exception as error:  # whatever a module does that our kernels do not expect
        if engine == "fast":
            raise
        LOG.info("%s is differentiated as it is, without our kernels: %s", model.name, error)
        why = f"our kernels do not fit this module: {str(error).partition(chr(10))[0]}"
        return _Found(None, None, _size(problem, few), why=why)
    error, length = gap.measured()
    if math.isfinite(length):  # else the product says
        _compare(problem, few, v, error, theirs)
    return _Found(fused, head, size, None if checkpoint else outputs)


def _size(problem: Problem, few: Batch) -> int:
    """Of all results where the module is asked; 0 where it cannot be, and the product will say why."""
    try:
        return result_bytes(partial(ask.answer, problem, few), views=False)[1]
    except Exception:  # whatever a module raises
        return 0


def num_entries(batch: Batch) -> int:
    """Of the largest tensor of a batch."""
    return max(t.numel() for t in batch.tensors())


def _direction(problem: Problem) -> dict[str, Tensor]:
    parameters = problem.model.parameters
    place = drawn_on(sum(p.numel() for p in parameters.values()), problem.device)
    source = generator(0, device=place)
    options = {"generator": source, "device": place, "dtype": torch.float32}
    return {
        name: torch.randn(1, *p.shape, **options).to(problem.device, problem.dtype)
        for name, p in parameters.items()
    }


def _product(
    problem: Problem, few: Batch, runner: Runner, v: Tree, receive: Callable[[str, Tensor], object]
) -> None:
    """H v on a few positions, handed over parameter by parameter."""
    names = tuple(v)
    with differentiating():
        work = works.second_derivative(problem, runner, few, "hessian", names, names)
        work(list(v.values()), 1, lambda number, x: receive(names[number], x))


def _put_aside(problem: Problem, found: dict[str, Tensor]) -> Callable[[str, Tensor], None]:
    """Keeps results: of a large model on a GPU in the memory of the machine, so that a check needs no more
    vectors there than a product."""
    size = problem.model.num_parameters * torch.finfo(problem.dtype).bits // 8
    away = problem.device.type == "cuda" and size > ASIDE

    def keep(name: str, x: Tensor) -> None:
        found[name] = x.cpu() if away else x

    return keep


class _Gap:
    """‖ours − theirs‖ / ‖theirs‖ over all parameters, as ours come; a missing one is zero."""

    def __init__(self, theirs: Tree, spread: Spread | None = None):
        self._theirs, self._spread, self._seen = theirs, spread, set[str]()
        self._squares = torch.zeros(2, dtype=torch.float64)

    def receive(self, name: str, x: Tensor) -> None:
        """One of ours, (1, *shape)."""
        self._seen.add(name)
        if name not in self._theirs:
            self._add(x, torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape))
            return
        self._add(x, self._theirs[name])

    def _add(self, ours: Tensor, theirs: Tensor) -> None:
        piece = WIDE_PIECE if ours.is_cuda else PIECE
        total = torch.zeros(2, dtype=torch.float64, device=ours.device)
        for x, y in zip(ours.flatten().split(piece), theirs.flatten().split(piece), strict=True):
            y = y.to(x.device)
            total += torch.stack([_square(x.to(y) - y), _square(y)])
        self._squares += total.cpu()

    def measured(self) -> tuple[float, float]:
        """It, and ‖theirs‖, once all of ours are there; on all ranks that have pieces."""
        for name, y in self._theirs.items():
            if name not in self._seen:
                self._add(torch.zeros((), dtype=y.dtype, device=y.device).expand(y.shape), y)
        squares = self._squares
        if self._spread is not None:
            device = next((y.device for y in self._theirs.values()), squares.device)
            squares = self._spread.added(squares.to(device))
        gap, size = squares.sqrt().tolist()
        return gap / size if size else gap, size


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _compare(problem: Problem, few: Batch, v: Tree, error: float, theirs: Tree) -> None:
    """Raise unless both products are the same up to rounding."""
    tolerance = TOLERANCE.get(problem.dtype, 0.1)
    if problem.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        tolerance = max(tolerance, 0.05)
    if not error <= tolerance and not error <= 10 * _rounding(problem, few, v, theirs):
        ask.refuse_random(problem, few)
        refuse_other(problem, few)
        raise CurvescopeError(
            f"the fast engine and autograd disagree on {problem.model.name} by {error:.1e} of the product",
            hint="use engine='autograd'",
        )


def _rounding(problem: Problem, few: Batch, v: Tree, theirs: Tree) -> float:
    """How far autograd itself is from its product in float64; of a model in pieces or halves, not at all."""
    if problem.model.spread is not None or problem.model.widening is not None:
        return 0.0
    model = replace(problem.model, module=copy.deepcopy(problem.model.module).double())
    point = {name: p.double() for name, p in problem.point.items()}
    double = Problem(model, [few], problem.loss, params="*").at(point)
    (batch,) = double.placed_batches("check of the engine")
    exact = _Gap(theirs)
    _product(double, batch, PlainRunner(double), {n: t.double() for n, t in v.items()}, exact.receive)
    return exact.measured()[0]


def refuse_other(problem: Problem, few: Batch) -> None:
    """Raise where the module gives something else in its plain form than when its user calls it."""
    with PlainAttention():
        theirs = ask.answer(problem, few).outputs
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
