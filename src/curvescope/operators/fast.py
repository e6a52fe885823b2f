"""The fast engine: double backward through our kernels, with the loss's head never formed whole.

What a product needs of the module is computed once per batch and kept (`kept`); norms, activations and
attention have fused second derivatives; a linear head with cross-entropy is worked off in slices. The
numbers are those of the autograd engine, which is asked once per model, on a few tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch, Batches
from curvescope.kernels.head import LinearHead
from curvescope.kernels.substitute import FindHead, Substitute
from curvescope.models.fused import fused
from curvescope.operators import replay_cpu, replay_cuda
from curvescope.operators.autograd import AutogradEngine, Linearised
from curvescope.operators.engine import Tree
from curvescope.problem import Problem, differentiating

LOG = logging.getLogger("curvescope")
FEW = 16  # positions of the sequence on which engines are compared
TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-3}  # far below a mistake, above rounding


class FastEngine(AutogradEngine):
    """Double backward of the module with our kernels in it.

    Args:
        forced: whether a module that our kernels cannot run is an error; if not, it is run as it is.
    """

    name = "fast"

    def __init__(self, *, forced: bool = True, checked: bool = True, checkpoint: bool = False) -> None:
        super().__init__(checkpoint=checkpoint)
        self._forced, self._checked = forced, checked
        self._fits = True
        self._place: dict[int, int | None] = {}
        self._recorder: replay_cpu.Recorder | replay_cuda.Recorder | None = None

    def begin(self, problem: Problem) -> None:
        if self._checked:
            self._fits = check(problem, forced=self._forced, checkpoint=self._checkpoint)
        super().begin(problem)

    def outputs(
        self, problem: Problem, batch: Batch, leaves: Mapping[str, Tensor], *, second_order: bool, lazy: bool
    ) -> Tensor | LinearHead:
        if not self._fits:
            return super().outputs(problem, batch, leaves, second_order=second_order, lazy=lazy)
        place = self._head_place(problem) if lazy and problem.loss.takes_head else None

        @contextmanager
        def kernels(head: int | None) -> Iterator[Substitute]:
            with (
                fused(problem.model, second_order=second_order),
                sdpa_kernel(SDPBackend.MATH),  # what is not substituted: PyTorch's other ways are no better
                Substitute(second_order=second_order, head=head) as mode,
            ):
                yield mode

        with kernels(place) as mode, self._layers(problem, partial(kernels, None)):
            z = problem.outputs(batch, leaves)
        if mode.placeholder is None:
            return z
        if z is mode.placeholder and mode.head is not None:
            return mode.head
        return self.outputs(problem, batch, leaves, second_order=second_order, lazy=False)

    def _keep(self, key: Any, build: Callable[[], Any], problem: Problem, batch: Batch) -> Any:
        """A product is recorded when it is asked for again."""
        if problem.device.type not in ("cpu", "cuda") or not self._fits or self._checkpoint:
            return super()._keep(key, build, problem, batch)
        if self._recorder is None:
            if problem.device.type == "cuda":
                self._recorder = replay_cuda.Recorder(problem.device)
            else:
                self._recorder = replay_cpu.Recorder(batched=self._directions(problem, batch) > 1)
        recorder = self._recorder

        def recorded() -> Any:
            with recorder.building():
                found = build()
            return found if isinstance(found, Linearised) else recorder.replayed(found)

        return super()._keep(key, recorded, problem, batch)

    def _head_place(self, problem: Problem) -> int | None:
        """Which linear map makes the outputs; the same for all batches of a problem."""
        key = id(problem.model.module)
        if key not in self._place:
            batch = _few_terms(problem).map(problem.placed)
            with torch.no_grad(), fused(problem.model, second_order=False), FindHead() as mode:
                self._place[key] = mode.place(problem.outputs(batch))
        return self._place[key]


# --------------------------------------------------------------------------------------- checked at first use

_fits: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()


def check(problem: Problem, *, forced: bool, checkpoint: bool = False) -> bool:
    """Whether our kernels can run the module; raise where their Hessian product is not autograd's.

    Asked once per model, on a few tokens. With `forced`, a module that they cannot run is an error.
    """
    known = _fits.setdefault(problem.model.module, {})
    kind = (problem.dtype, problem.device, type(problem.loss), checkpoint)
    if kind in known and (known[kind] or not forced):
        return known[kind]
    few = Problem(problem.model, Batches([_few_terms(problem)]), problem.loss)
    source = generator(0)
    v = {
        name: torch.randn(1, *p.shape, generator=source, dtype=torch.float32).to(p)
        for name, p in few.model.parameters.items()
    }
    try:
        theirs = _product(few, AutogradEngine(), v)
    except (CurvescopeError, RuntimeError):
        return True  # nothing to compare with; whoever takes the product will say why, of the whole batch
    try:
        ours = _product(few, FastEngine(checked=False, checkpoint=checkpoint), v)
    except Exception as error:  # whatever a module does that our kernels do not expect
        if forced:
            raise
        LOG.info("%s is differentiated as it is, without our kernels: %s", problem.model.name, error)
        known[kind] = False
        return False
    if not all(bool(torch.isfinite(t).all()) for t in theirs.values()):
        return True  # whoever takes the product will say so
    _compare(few, v, ours, theirs)
    known[kind] = True
    return True


def _compare(few: Problem, v: Mapping[str, Tensor], ours: Tree, theirs: Tree) -> None:
    """Raise unless both products are the same up to rounding."""
    error, tolerance = _distance(ours, theirs), TOLERANCE.get(few.dtype, 0.1)
    if few.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        tolerance = max(tolerance, 0.05)
    if not error <= tolerance and not error <= 10 * _rounding(few, v, theirs):
        raise CurvescopeError(
            f"the fast engine and autograd disagree on {few.model.name} by {error:.1e} of the product",
            hint="use engine='autograd'",
        )


def _few_terms(problem: Problem) -> Batch:
    """The first sequence with a counted term, cut to a few positions where that leaves one."""
    for batch in problem.batches:
        for i in range(batch.num_sequences):
            one = batch[i : i + 1]
            short = _cut(one)
            if problem.loss.total_weight(short.targets, short.weights) > 0 and _runs(problem, short):
                return short
            if problem.loss.total_weight(one.targets, one.weights) > 0:
                return one
    raise UsageError("expected at least one term that counts")


def _runs(problem: Problem, batch: Batch) -> bool:
    """Whether the module takes so few positions; some are made for one length."""
    try:
        with torch.no_grad():
            problem.outputs(batch.map(problem.placed))
    except Exception:  # whatever a module raises at a length that it does not know
        return False
    return True


def _cut(batch: Batch) -> Batch:
    """Tokens and their targets up to a few positions; anything else as it is."""
    T = batch.targets.shape[1] if batch.targets.dim() == 2 else 0
    if any(t.dim() != 2 or t.shape[1] != T for t in batch.tensors()) or batch.targets.is_floating_point():
        return batch
    return batch.map(lambda t: t[:, :FEW])


def _product(problem: Problem, engine: AutogradEngine, v: Mapping[str, Tensor]) -> Tree:
    (batch,) = problem.placed_batches("check of the engine")
    with differentiating():
        return engine.second_derivative(problem, 0, batch, "hessian", tuple(v), v)


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all parameters; a missing one is zero."""
    names = set(a) | set(b)
    zero = torch.zeros(())
    gaps = [(a.get(n, zero).double().cpu() - b.get(n, zero).double().cpu()).norm() for n in names]
    sizes = [x.double().norm().cpu() for x in b.values()]
    gap, size = (float(torch.stack(x).norm()) if x else 0.0 for x in (gaps, sizes))
    return gap / size if size else gap


def _rounding(problem: Problem, v: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """How far autograd itself is from its product in float64."""
    import copy
    from dataclasses import replace

    model = replace(problem.model, module=copy.deepcopy(problem.model.module).double())
    exact = _product(
        Problem(model, problem.batches, problem.loss),
        AutogradEngine(),
        {name: t.double() for name, t in v.items()},
    )
    return _distance(theirs, exact)
