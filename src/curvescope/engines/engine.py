"""The engine: how products of a problem are executed.

An operator asks once, `engine.sum_over_batches(form, V, …)`, and gets the sum back. In between:

    detect    has the problem changed since something was cached? (change_detection)
    validate  of a model that is new or changed: which kernels fit, on a few positions (kernel_validation)
    run       the module, as it is or with our kernels; layers kept or recomputed (run, checkpoint)
    cache     graphs that do not depend on the directions; recordings of products (cache_policy)
    apply     the cached product of every batch to the directions (product_forms, batch_products, vjp)
    confirm   nothing has changed meanwhile, or the product is taken again (change_detection)

The sum is not divided by the number of terms: an engine knows nothing of normalization.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar, final, get_args

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import CurvescopeError, UsageError, near_misses
from curvescope.core.parts import MatrixName
from curvescope.data.batches import Batch
from curvescope.engines import batch_products
from curvescope.engines.batch_products import Names, Work, required
from curvescope.engines.cache_policy import CachePolicy
from curvescope.engines.change_detection import ChangeDetector, moved
from curvescope.engines.kernel_validation import near, refuse_other
from curvescope.engines.memory import columns_at_once, ran_out
from curvescope.engines.product_forms import ProductForm, Receive, Tree
from curvescope.engines.recompute_check import other_outputs
from curvescope.engines.reference_forward import reference, refuse_random
from curvescope.engines.run import PlainRunner, Runner
from curvescope.engines.sources import SourceWork, functional_sources, refuse_unless_whole
from curvescope.engines.vjp import pull
from curvescope.kernels.substitute import PlainAttention
from curvescope.models.running.exchange import locked
from curvescope.models.sources import find_sources, repeated_layers
from curvescope.problem import Problem, differentiating

EngineName = Literal["auto", "autograd", "fast"]
LOG = logging.getLogger("curvescope")
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
        checkpoint: Recompute layers instead of keeping them. They are recomputed without it too if a GPU has
            no room for what a batch keeps, and if they gather their parameters from several ranks or widen
            them.
    """

    def __init__(self, problem: Problem, name: EngineName = "auto", *, checkpoint: bool = False):
        if name not in get_args(EngineName):
            hint = near_misses(name, list(get_args(EngineName)))
            raise UsageError(f"expected an engine, got {name!r}", hint=hint)
        checkpoint = checkpoint or problem.model.releases
        self.problem, self.checkpoint = problem, checkpoint
        self.wanted: EngineName = name
        self.detector = ChangeDetector(problem, engine=name, checkpoint=checkpoint)
        self.caching = CachePolicy(problem, recomputes=checkpoint)
        self.runner: Runner = PlainRunner(problem, checkpoint=checkpoint)
        self._frozen = 0  # `frozen` blocks that are open

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Engine, checkpoint=self.checkpoint), (self.problem, self.wanted)  # begins empty

    def of(self, problem: Problem) -> Engine:
        """An engine of the same kind for another problem; it begins empty."""
        return Engine(problem, self.wanted, checkpoint=self.checkpoint)

    @property
    def name(self) -> str:
        """How the module was run last."""
        return self.runner.name

    @property
    def why(self) -> str:
        """Why our kernels were not taken at the last product; empty if they were."""
        return "" if self.detector.known is None else self.detector.known.why

    @property
    def attends(self) -> bool:
        """Our attention stands in the place of the module's own."""
        fused = None if self.detector.known is None else self.detector.known.fused
        return fused is not None and (fused.attention or any(r.method == ATTEND for r in fused.replacements))

    # ------------------------------------------------------------------------------- products

    def sum_over_batches(
        self,
        form: ProductForm,
        V: Tensor,
        rows: ParamSpace,
        columns: ParamSpace,
        *,
        label: str,
        chunk: int | None = None,
        check: Callable[[], object] | None = None,
    ) -> tuple[Tensor, float]:
        """Apply Σ_batches of a form to the columns V; fewer columns at a time if memory runs out.

        Args:
            form: What is computed of every batch.
            V: Columns over the space `columns`, (n, k).
            rows: Space of the result.
            columns: Space of V.
            label: Name of the operator, for the progress.
            chunk: Columns at a time, instead of what memory suggests.
            check: Called once for a state of the problem, before its first product; it may raise.

        Returns:
            The sum, not divided, and the total weight N of its terms.
        """

        def work() -> tuple[Tensor, float]:
            N = self.problem.num_terms  # read before a GPU has much to do: it would be waited for
            if check is not None:
                self.keep("check", check, 0)
            return self._sum(form, V, rows, columns, label, chunk), N

        found = None
        while (
            found is None
        ):  # the error is left before the next try: it holds on to what the product had made
            found = self._within_memory(work, V.shape[1])
        return found

    def _within_memory(self, work: Callable[[], T], columns: int) -> T | None:
        """What `work` gives; None if memory ran out and another try with less is worth it."""
        try:
            return self.consistent(work)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            if not (self.caching.halve(columns) or self._recompute_layers()):
                raise self.caching.too_large() from error
        return None

    def _sum(
        self,
        form: ProductForm,
        V: Tensor,
        rows: ParamSpace,
        columns: ParamSpace,
        label: str,
        chunk: int | None,
    ) -> Tensor:
        problem, k = self.problem, V.shape[1]
        step = self.caching.limited(1 if k == 1 else chunk or columns_at_once(problem))
        spread = problem.model.spread
        step = step if spread is None or step == 1 else int(spread.least(step, problem.device))
        parts = [torch.zeros(rows.size, 0, dtype=problem.dtype, device=problem.device)]
        for start in range(0, k, step):
            part = V[:, start : start + step]
            tangents, total = columns.scatter_columns(part), rows.total(part.shape[1])
            for index, batch in enumerate(problem.local_batches(label)):
                form.apply(self, index, batch, rows.parameter_names, tangents, total.add)
            parts.append(total.whole())
        return parts[-1] if len(parts) == 2 else torch.cat(parts, dim=1)

    # ------------------------------------------------------------------------------- one state of the problem

    def consistent(self, work: Callable[[], T], *, gradients: bool = False) -> T:
        """Return what `work` computes at one state of the problem; nothing that is cached is stale.

        Threads take turns with a module. `work` is called a second time if a change is only seen behind it.

        Args:
            work: Computes something by the methods of this engine.
            gradients: Confirm the values of gradients too.
        """
        with locked(self.problem.model.module), differentiating():
            found, sure = self._tried(work, gradients=gradients)
            if sure:
                return found
            self._forget()
            found, sure = self._tried(work, again=True)
            if not (sure and self.detector.confirm()):  # the first one noted the state
                refuse_random(self.problem, self.detector.few.batch)
                raise CurvescopeError(
                    f"{self.problem.model.name} gave other outputs each time it was called during a product",
                    hint="let nothing write to the model or the data meanwhile",
                )
            return found

    def _tried(
        self, work: Callable[[], T], *, again: bool = False, gradients: bool = False
    ) -> tuple[Any, bool]:
        """What `work` gives, and if it is of one state of the problem, as far as is seen at once."""
        self._bind()
        self.refuse_wrong(second=False)
        try:
            found = work()
        except RuntimeError as error:  # autograd refuses graphs whose numbers were written to
            unseen = not again and WRITTEN in str(error)  # also those of others, such as a loss_fn's
            if not (unseen or self.detector.written()):
                raise
            if self._frozen:
                self._forget()
                raise moved(self.problem) from error
            return None, False
        repeated = not self.caching.recomputes or self.detector.agreed(self.runner.repeats.hold())
        if not repeated and (again or self._frozen):
            self._forget()
            refuse_random(self.problem, self.detector.few.batch)
            raise other_outputs(self.problem.model)
        return found, repeated and (bool(self._frozen) or self.detector.confirm(gradients=gradients))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Declare the model and the data constant inside; both ends are checked, single products less.

        Raises:
            CurvescopeError: The model or the data have changed before the end.
        """
        self.consistent(lambda: None, gradients=True)
        self._frozen += 1
        try:
            yield
        finally:
            self._frozen -= 1
        with locked(self.problem.model.module), differentiating():
            if self.detector.look() is not None or not self.detector.confirm(gradients=True):
                self._forget()
                raise moved(self.problem)

    def _bind(self) -> None:
        """Look for changes, and forget what is cached of another state."""
        known = self.detector.look()
        if known is None:
            if self.caching.overflowed:
                self._recompute_layers()
            return
        if self._frozen:
            self._forget()
            raise moved(self.problem)
        self.runner = known.runner(self.problem, checkpoint=self.caching.recomputes)
        if not self.detector.compared and not self._gives_reference():  # other kernels may fit it now
            known = self.detector.validated_anew()
            self.runner = known.runner(self.problem, checkpoint=self.caching.recomputes)
            self._refuse_other_outputs()
        self.caching.bind(known, self.runner)

    def _gives_reference(self) -> bool:
        """Return True if the module, run as it is here, gives what it gives when its user calls it."""
        few = self.detector.few
        return few.reference is None or near(self.runner, few.batch, few.reference.outputs)

    def _refuse_other_outputs(self) -> None:
        if self.detector.compared or self._gives_reference():
            return
        few = self.detector.few.batch
        refuse_random(self.problem, few)
        refuse_other(self.problem, few)
        with PlainAttention():  # PyTorch's ways to compute attention differ where a query sees no key
            if near(self.runner, few, reference(self.problem, few).outputs):
                return
        if self.caching.recomputes:
            raise other_outputs(self.problem.model)
        raise CurvescopeError(
            f"the fast engine does not give the outputs of {self.problem.model.name} itself",
            hint="use engine='autograd'",
        )

    def refuse_wrong(self, *, second: bool) -> None:
        """Raise if a custom autograd function makes the derivatives that a product needs wrong."""
        if self.detector.known is not None:
            self.detector.known.derivatives.refuse(second=second)

    def _forget(self) -> None:
        self.detector.forget()
        self.caching.forget()

    def _recompute_layers(self) -> bool:
        """From here on recompute layers, because memory ran out; False if they are already, or cannot be."""
        with locked(self.problem.model.module), differentiating():
            caching, model = self.caching, self.problem.model
            caching.overflowed = False
            if caching.recomputes or not caching.whole or not repeated_layers(model.module):
                return False
            caching.forget()
            try:
                known = self.detector.recomputing()
            except UsageError as error:
                LOG.info("layers cannot be computed again: %s", error)
                return False
            LOG.warning(
                "%s: what a batch keeps does not fit into memory, so layers are computed again, as with "
                "checkpoint=True; smaller batches would be faster",
                model.name,
            )
            caching.recomputes = True
            self.runner = known.runner(self.problem, checkpoint=True)
            caching.bind(known, self.runner)
            return True

    # ------------------------------------------------------------------------------- for forms and operators

    def cached_product(
        self,
        key: Any,
        build: Callable[[], Work],
        batch: Batch,
        tangents: Mapping[str, Tensor],
        receive: Receive,
    ) -> None:
        """Apply the product that `build` makes of a batch, cached and replayed if possible, to tangents."""
        group, (*_, rows, columns) = self.caching.directions(batch, tangents), key
        make = partial(self.caching.replayed, build, batch, rows, columns)
        work: Work = self.caching.graph(key, make, batch)
        work(list(tangents.values()), group, lambda number, x: receive(rows[number], x))

    def keep(self, key: Any, build: Callable[[], T], size: int) -> T:
        """Return what `build` makes at the problem as it is, kept inside `consistent` until that changes.

        Args:
            key: Of this engine's own.
            build: A function of the problem alone.
            size: Bytes that it takes.
        """
        return self.caching.get(key, build, size)

    def in_activations(self, index: int, batch: Batch, part: MatrixName, at: str, tangents: Tensor) -> Tensor:
        """∂²s/∂x² at a point with activations x, or Jᵀ (∂²loss/∂z²) J, applied to tangents (k, *x.shape)."""
        self.refuse_wrong(second=part != "ggn")
        build = partial(batch_products.in_activations, self.problem, self.runner, batch, part, at)
        total = torch.zeros_like(tangents)
        key, receive = (index, part, (at,), (at,)), lambda _, x: total.copy_(x)
        self.cached_product(key, build, batch, {at: tangents}, receive)
        return total

    def activation_gradient(self, batch: Batch, at: str) -> Tensor:
        """∂s/∂x for the activations x at a point."""
        return batch_products.activation_gradient(self.problem, self.runner, batch, at)

    def sources(
        self, index: int, batch: Batch, rows: Names, tangents: Mapping[str, Tensor], wanted: Sequence[str]
    ) -> dict[str, Tree]:
        """The functional Hessian applied to the tangents: each source that is wanted, and the rest."""
        self.refuse_wrong(second=True)
        columns = tuple(tangents)
        parts = find_sources(self.problem.model)
        few = self.detector.few.batch
        self.keep("sources add up", partial(refuse_unless_whole, self.problem, parts, few), 0)
        build = partial(functional_sources, self.problem, parts, batch, rows, columns)
        work: SourceWork = self.caching.graph((index, "sources", rows, columns), build, batch)
        group = self.caching.directions(batch, tangents, plain=True)
        found = work(list(tangents.values()), wanted, group)
        return {name: _tree(rows, some) for name, some in found.items()}

    def jacobian(self, batch: Batch, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs z, and J applied to the tangents: (k, *z.shape)."""
        how = self.problem, self.runner, batch, (), tuple(tangents)
        graph = batch_products.linearized(*how, lazy=False)
        (z,), (Jv,) = (
            graph.outputs,
            graph.push(list(tangents.values()), self.caching.directions(batch, tangents)),
        )
        return required(z).detach(), Jv

    def jacobian_transpose(self, batch: Batch, rows: Names, cotangents: Tensor) -> Tree:
        """Jᵀ applied to cotangents (k, *z.shape)."""
        graph = batch_products.linearized(self.problem, self.runner, batch, rows, (), lazy=False)
        group = self.caching.directions(batch, {"": cotangents})
        return _tree(rows, pull(graph.outputs, [cotangents], [graph.leaves[name] for name in rows], group))


def _tree(names: Names, found: Any) -> Tree:
    return {name: x for name, x in zip(names, found, strict=True) if x is not None}
