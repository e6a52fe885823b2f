"""The engine: how products of a problem are executed, batch by batch.

    bind    what the product depends on is looked at; what is kept of another state is forgotten (change_detection)
    check   a model that is new, or does something else than before, is tried on a few positions (kernel_validation)
    run     the module is run: as it is, or with our kernels; its layers kept, or computed again (run)
    keep    the graph that does not depend on the directions is kept while memory allows (batch_products, graph_cache)
    replay  a product that is asked for again is recorded and replayed (replay)

Methods take trees: tangents are {parameter: (k, *shape)}, k directions at once. Results are the same for the
parameters in `rows`, handed over one by one: `receive(parameter, result)` is done with the result's memory
when it returns. A parameter that a result does not depend on may be missing. `index` counts the batches, so
that the engine can keep what does not depend on the directions. An engine knows nothing of spaces or
normalisation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar, final, get_args

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, UsageError, near_misses
from curvescope.core.numbers import plural
from curvescope.core.parts import MatrixName
from curvescope.data.batches import Batch
from curvescope.engines import batch_products
from curvescope.engines.batch_products import Names, Work, required
from curvescope.engines.change_detection import ChangeDetector, moved
from curvescope.engines.graph_cache import Kept, KeptByAll, forget_everything
from curvescope.engines.kernel_validation import near, num_entries, refuse_other
from curvescope.engines.memory import directions_per_pass, too_large
from curvescope.engines.recompute_check import other_outputs
from curvescope.engines.reference_forward import reference, refuse_random
from curvescope.engines.replay import cpu, cuda
from curvescope.engines.run import PlainRunner, Runner
from curvescope.engines.sources import SourceWork, functional_sources, refuse_unless_whole
from curvescope.engines.vjp import Linearised, pull, pull_each
from curvescope.kernels.substitute import PlainAttention
from curvescope.losses.base import Part
from curvescope.models.running.exchange import locked
from curvescope.models.sources import find_sources, repeated_layers
from curvescope.problem import Problem, differentiating

Tree = dict[str, Tensor]
Receive = Callable[[str, Tensor], object]
"""Takes a parameter's name and its result (k, *shape)."""
Middle = Callable[[Tensor, Tensor], Tensor]
"""M u for the outputs z and u of shape (k, *z.shape)."""
EngineName = Literal["auto", "autograd", "fast"]
LOG = logging.getLogger("curvescope")
GRAPH_SIZE = 4  # of the gradient's graph, in units of the forward pass's results
T = TypeVar("T")
ATTEND = "attend"  # the method of the zoo's layers that attends
WRITTEN = "modified by an inplace operation"  # in the words of autograd


@final
class Engine:
    """Products of one problem.

    Args:
        problem: What it is bound to.
        name: `fast` runs the module with our kernels, and it is an error if they cannot; `autograd` as it is;
            `auto` is `fast`, or `autograd` for modules that our kernels cannot run.
        checkpoint: Whether layers are computed again instead of being kept. Without it they are too where a
            GPU has no room for what a batch keeps, and where they gather their parameters from several ranks
            or widen them.
    """

    def __init__(self, problem: Problem, name: EngineName = "auto", *, checkpoint: bool = False):
        if name not in get_args(EngineName):
            hint = near_misses(name, list(get_args(EngineName)))
            raise UsageError(f"expected an engine, got {name!r}", hint=hint)
        sharding = problem.model.sharding
        checkpoint = checkpoint or problem.model.releases
        self._alone = sharding is None or not sharding.gathers
        self.problem, self.checkpoint = problem, checkpoint
        self._again = checkpoint  # whether layers are computed again, from here on
        self._unkept = False  # whether a batch's graph was larger than what may be kept
        self.wanted: EngineName = name
        self._detector = ChangeDetector(problem, engine=name, checkpoint=checkpoint)
        self._runner: Runner = PlainRunner(problem, checkpoint=checkpoint)
        self._kept = Kept() if self._alone or sharding is None else KeptByAll(sharding.spread)
        self._recorder: cpu.Recorder | cuda.Recorder | None = None
        self._groups: dict[str, int] = {}  # directions at once, by how the module is run
        self.most: int | None = None  # columns at once, where memory ran out with more
        self._frozen = 0
        self._adds_up = False  # whether the sources were seen to

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Engine, checkpoint=self.checkpoint), (self.problem, self.wanted)  # begins empty

    def of(self, problem: Problem) -> Engine:
        """An engine of the same kind for another problem; it begins empty."""
        return Engine(problem, self.wanted, checkpoint=self.checkpoint)

    @property
    def name(self) -> str:
        """How the module was run last."""
        return self._runner.name

    @property
    def why(self) -> str:
        """Why our kernels were not taken at the last product; empty where they were."""
        return "" if self._detector.known is None else self._detector.known.why

    @property
    def attends(self) -> bool:
        """Whether our attention stands in the place of the module's own."""
        fused = None if self._detector.known is None else self._detector.known.fused
        return fused is not None and (fused.attention or any(r.method == ATTEND for r in fused.replacements))

    # ------------------------------------------------------------------------------- bind and check

    def product(self, work: Callable[[], T]) -> T:
        """What `work` makes of the methods below, at the problem as it is; nothing that is kept is stale.

        Threads take turns with a module. `work` is called a second time where numbers had been written in a
        way that is only seen afterwards.
        """
        with locked(self.problem.model.module), differentiating():
            found, sure = self._tried(work)
            if sure:
                return found
            self._forget()
            found, sure = self._tried(work, again=True)
            if not (sure and self._detector.confirm()):  # noted, then asked once more
                refuse_random(self.problem, self._detector.few.batch)
                raise CurvescopeError(
                    f"{self.problem.model.name} gave other outputs each time it was asked during a product",
                    hint="let nothing write to the model or the data meanwhile",
                )
            return found

    def _tried(self, work: Callable[[], T], *, again: bool = False) -> tuple[Any, bool]:
        """What `work` makes, and whether it is of one state of the problem, as far as is seen at once."""
        self._bind()
        self._refuse_wrong(second=False)
        try:
            found = work()
        except RuntimeError as error:  # autograd refuses graphs whose numbers were written to
            unseen = not again and WRITTEN in str(error)  # also those of others, such as a loss_fn's
            if not (unseen or self._detector.written()):
                raise
            if self._frozen:
                self._forget()
                raise moved(self.problem) from error
            return None, False
        repeated = not self._again or self._detector.agreed(self._runner.repeats.hold())
        if not repeated and (again or self._frozen):
            self._forget()
            refuse_random(self.problem, self._detector.few.batch)
            raise other_outputs(self.problem.model)
        return found, repeated and (bool(self._frozen) or self._detector.confirm())

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Products inside belong together: the whole guarantee is given once for all of them.

        Raises:
            CurvescopeError: The model or the data have changed before the end.
        """
        self.product(lambda: None)
        self._frozen += 1
        try:
            yield
        finally:
            self._frozen -= 1
        with locked(self.problem.model.module), differentiating():
            if self._detector.look() is not None or not self._detector.confirm(gradients=True):
                self._forget()
                raise moved(self.problem)

    def _bind(self) -> None:
        known = self._detector.look()
        if known is None:
            if self._unkept:
                self._compute_again()
            return
        if self._frozen:
            self._forget()
            raise moved(self.problem)
        self._kept.forget()
        self._recorder, self._adds_up = None, False
        self._groups.clear()
        self._runner = known.runner(self.problem, checkpoint=self._again)
        self._reused = True
        self._verify()

    def _verify(self) -> None:
        """Raise unless the module, run as it is here, gives what it gives when its user calls it."""
        few, theirs = self._detector.few.batch, self._detector.few.reference
        if theirs is None or self._detector.compared or near(self._runner, few, theirs.outputs):
            return
        if self._reused:  # other kernels may fit the module as it is now
            self._reused = False
            self._runner = self._detector.validated_anew().runner(self.problem, checkpoint=self._again)
            self._verify()
            return
        refuse_random(self.problem, few)
        refuse_other(self.problem, few)
        with PlainAttention():  # PyTorch's ways to compute attention differ where a query sees no key
            if near(self._runner, few, reference(self.problem, few).outputs):
                return
        if self._again:
            raise other_outputs(self.problem.model)
        raise CurvescopeError(
            f"the fast engine does not give the outputs of {self.problem.model.name} itself",
            hint="use engine='autograd'",
        )

    def _refuse_wrong(self, *, second: bool) -> None:
        """Raise if a custom autograd function makes the derivatives that a product needs wrong."""
        if self._detector.known is not None:
            self._detector.known.derivatives.refuse(second=second)

    def _forget(self) -> None:
        self._detector.forget()
        self._kept.forget()

    # ------------------------------------------------------------------------------- products of a batch

    def second_derivative(
        self,
        index: int,
        batch: Batch,
        part: Part,
        rows: Names,
        tangents: Mapping[str, Tensor],
        receive: Receive,
    ) -> None:
        """∂²s/∂θ_rows ∂θ_cols applied to the tangents (of the parameters cols), s the scalar of `part`."""
        self._refuse_wrong(second=True)
        columns = tuple(tangents)
        build = partial(
            batch_products.second_derivative, self.problem, self._runner, batch, part, rows, columns
        )
        self._done((index, part, rows, columns), build, batch, tangents, receive)

    def ggn(
        self, index: int, batch: Batch, rows: Names, tangents: Mapping[str, Tensor], receive: Receive
    ) -> None:
        """Jᵀ (∂²loss/∂z²) J applied to the tangents."""
        columns = tuple(tangents)
        build = partial(batch_products.ggn, self.problem, self._runner, batch, rows, columns)
        self._done((index, "ggn", rows, columns), build, batch, tangents, receive)

    def in_activations(self, index: int, batch: Batch, part: MatrixName, at: str, tangents: Tensor) -> Tensor:
        """∂²s/∂x² at a point with activations x, or Jᵀ (∂²loss/∂z²) J, applied to tangents (k, *x.shape)."""
        self._refuse_wrong(second=part != "ggn")
        build = partial(batch_products.in_activations, self.problem, self._runner, batch, part, at)
        total = torch.zeros_like(tangents)
        self._done((index, part, (at,), (at,)), build, batch, {at: tangents}, lambda _, x: total.copy_(x))
        return total

    def activation_gradient(self, batch: Batch, at: str) -> Tensor:
        """∂s/∂x for the activations x at a point."""
        return batch_products.activation_gradient(self.problem, self._runner, batch, at)

    def sources(
        self, index: int, batch: Batch, rows: Names, tangents: Mapping[str, Tensor], wanted: Sequence[str]
    ) -> dict[str, Tree]:
        """The functional part applied to the tangents: each source that is wanted, and the rest."""
        self._refuse_wrong(second=True)
        columns = tuple(tangents)
        parts = find_sources(self.problem.model)
        if not self._adds_up:
            refuse_unless_whole(self.problem, parts, self._detector.few.batch)
            self._adds_up = True
        build = partial(functional_sources, self.problem, parts, batch, rows, columns)
        work: SourceWork = self._keep((index, "sources", rows, columns), build, batch)
        found = work(list(tangents.values()), wanted, self._directions(batch, tangents, plain=True))
        return {name: _tree(rows, some) for name, some in found.items()}

    def sandwich(
        self,
        index: int,
        batch: Batch,
        middle: Middle,
        rows: Names,
        tangents: Mapping[str, Tensor],
        receive: Receive,
    ) -> None:
        """Jᵀ M J applied to the tangents."""
        columns, group = tuple(tangents), self._directions(batch, tangents)
        build = partial(
            batch_products.linearised, self.problem, self._runner, batch, rows, columns, lazy=False
        )
        graph: Linearised = self._keep((index, "sandwich", rows, columns), build, batch)
        (z,), (Jv,) = graph.outputs, graph.push(list(tangents.values()), group)
        into = [graph.leaves[name] for name in rows]
        pulled = middle(required(z).detach(), Jv)
        pull_each([z], [pulled], into, group, lambda number, x: receive(rows[number], x))

    def jacobian(self, batch: Batch, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs z, and J applied to the tangents: (k, *z.shape)."""
        graph = batch_products.linearised(self.problem, self._runner, batch, (), tuple(tangents), lazy=False)
        group = self._directions(batch, tangents)
        (z,), (Jv,) = graph.outputs, graph.push(list(tangents.values()), group)
        return required(z).detach(), Jv

    def jacobian_transpose(self, batch: Batch, rows: Names, cotangents: Tensor) -> Tree:
        """Jᵀ applied to cotangents (k, *z.shape)."""
        graph = batch_products.linearised(self.problem, self._runner, batch, rows, (), lazy=False)
        group = self._directions(batch, {"": cotangents})
        return _tree(rows, pull(graph.outputs, [cotangents], [graph.leaves[name] for name in rows], group))

    # ------------------------------------------------------------------------------- keep and replay

    def _done(
        self,
        key: Any,
        build: Callable[[], Work],
        batch: Batch,
        tangents: Mapping[str, Tensor],
        receive: Receive,
    ) -> None:
        """A work, kept and replayed where it can be, applied to the tangents."""
        group, (*_, rows, columns) = self._directions(batch, tangents), key
        work: Work = self._keep(key, partial(self._replayed, build, batch, rows, columns), batch)
        work(list(tangents.values()), group, lambda number, x: receive(rows[number], x))

    def _replayed(self, build: Callable[[], Work], batch: Batch, rows: Names, columns: Names) -> Work:
        device = self.problem.device
        on = ("cuda",) if self._again else ("cpu", "cuda")  # a CPU would keep what layers do not
        if device.type not in on or self._runner.name != "fast" or not self._alone:
            return build()
        if self._recorder is None:
            self._recorder = cuda.Recorder(device) if device.type == "cuda" else cpu.Recorder()
        with self._recorder.building():
            work = build()
        made = self._graph_bytes(batch)
        if self.problem.model.widening is not None:  # a pass makes the wide weights, too
            made += GRAPH_SIZE * self.problem.model.num_parameters * self.problem.dtype.itemsize
        return self._recorder.replayed(work, rows, columns, batch_bytes=made)

    def keep(self, key: Any, build: Callable[[], T], size: int) -> T:
        """What `build` makes at the problem as it is, kept inside `product` until that changes.

        Args:
            key: Of this engine's own.
            build: A function of the problem alone.
            size: Bytes that it takes.
        """
        return self._kept.get(key, build, device=self.problem.device, size=size)

    def _keep(self, key: Any, build: Callable[[], T], batch: Batch) -> T:
        found = self.keep(key, build, self._graph_bytes(batch))
        self._unkept |= self.problem.device.type == "cuda" and self._kept.refused
        return found

    def _graph_bytes(self, batch: Batch) -> int:
        """What a graph of the batch is expected to take."""
        known = self._detector.known
        return 0 if known is None else int(GRAPH_SIZE * known.entry_bytes * num_entries(batch))

    def _directions(self, batch: Batch, tangents: Mapping[str, Tensor], *, plain: bool = False) -> int:
        """Directions at once; found with the first batch that is given several, then kept."""
        if next(iter(tangents.values())).shape[0] == 1 or self._again or not self._alone:
            return 1
        runner = PlainRunner(self.problem) if plain else self._runner
        if runner.name not in self._groups:
            assert self._detector.known is not None, "found out before any product"
            size = self._detector.known.pass_bytes(runner, batch)
            self._groups[runner.name] = directions_per_pass(self.problem, size)
        found = self._groups[runner.name]
        return found if self.most is None else min(found, self.most)

    def fewer(self, columns: int) -> bool:
        """Halve the directions that go at once, because memory ran out with so many columns.

        False where it is one already, and nothing was kept that could be forgotten; and where parameters come
        from several ranks, of which the others go on with this product.
        """
        if not self._alone:
            return False
        now = min(columns, *self._groups.values(), columns if self.most is None else self.most)
        held = forget_everything()
        if self.problem.device.type == "cuda":
            torch.cuda.empty_cache()
        if now > 1:
            self.most = now // 2
            LOG.warning("memory ran out: from here on %s at a time", plural(self.most, "column"))
        return now > 1 or held

    def computes_again(self) -> bool:
        """From here on layers are computed again, because memory ran out; False where they are, or cannot."""
        with locked(self.problem.model.module), differentiating():
            return self._compute_again()

    def _compute_again(self) -> bool:
        self._unkept = False
        if self._again or not self._alone or not repeated_layers(self.problem.model.module):
            return False
        self._kept.forget()
        self._recorder = None
        self._groups.clear()
        try:
            known = self._detector.recomputing()
        except UsageError as error:
            LOG.info("layers cannot be computed again: %s", error)
            return False
        LOG.warning(
            "%s: what a batch keeps does not fit into memory, so layers are computed again, as with "
            "checkpoint=True; smaller batches would be faster",
            self.problem.model.name,
        )
        self._again = True
        self._runner = known.runner(self.problem, checkpoint=True)
        return True

    def too_large(self) -> CurvescopeError:
        """What to do where one direction through one batch takes more memory than there is."""
        batch = max(self.problem.batches, key=num_entries)
        return too_large(self.problem, batch, self._graph_bytes(batch), again=self._again)


def _tree(names: Names, found: Any) -> Tree:
    return {name: x for name, x in zip(names, found, strict=True) if x is not None}
