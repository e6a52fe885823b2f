"""The engine: how products of a problem are executed.

An operator calls `engine.sum_over_batches(form, V, …)` and gets the sum. The steps:

    detect    compare the problem with the state that the cache belongs to (change_detection)
    validate  choose the kernels that fit a new or changed model, on a few positions (kernel_validation)
    run       run the module, with or without our kernels, with layers stored or recomputed (module_runner,
              checkpoint)
    cache     store graphs that do not depend on the directions, and recordings of products (graph_cache)
    apply     apply the cached product of every batch to the directions (product_forms, batch_products, vjp)
    confirm   check that nothing has changed meanwhile, or repeat the product (change_detection)

The engine does not divide the sum by the number of terms.
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
from curvescope.core.hessian_terms import MatrixName
from curvescope.data.batches import Batch
from curvescope.engines import batch_products
from curvescope.engines.batch_products import BatchProduct, Names, required
from curvescope.engines.change_detection import ChangeDetector, changed_error
from curvescope.engines.checkpoint import recompute_error
from curvescope.engines.functional_sources import SourceWork, check_sources_add_up, functional_sources
from curvescope.engines.graph_cache import CachePolicy
from curvescope.engines.memory import columns_at_once, ran_out
from curvescope.engines.module_runner import Runner
from curvescope.engines.product_forms import ProductForm, Tree
from curvescope.engines.reference_forward import refuse_random
from curvescope.engines.vjp import Receive, pull
from curvescope.models.curvature_sources import find_sources, repeated_layers
from curvescope.models.running.patching import locked
from curvescope.problem import Problem, differentiating

EngineName = Literal["auto", "autograd", "fast"]
LOG = logging.getLogger("curvescope")
T = TypeVar("T")
ATTEND = "attend"  # attention method of the zoo's layers
WRITTEN = "modified by an inplace operation"  # autograd's message


@final
class Engine:
    """Products of one problem.

    Args:
        problem: The problem whose products are computed.
        name: `fast` runs the module with our kernels and raises if they do not fit; `autograd` runs it
            unchanged; `auto` is `fast` if the kernels fit, else `autograd`.
        checkpoint: Recompute layers instead of storing them. They are recomputed anyway if the graph of a
            batch does not fit into a GPU's memory, or if layers gather or convert their parameters.
    """

    def __init__(self, problem: Problem, name: EngineName = "auto", *, checkpoint: bool = False):
        if name not in get_args(EngineName):
            hint = near_misses(name, list(get_args(EngineName)))
            raise UsageError(f"expected an engine, got {name!r}", hint=hint)
        checkpoint = checkpoint or problem.model.releases
        self.problem, self.checkpoint = problem, checkpoint
        self.requested: EngineName = name
        self.detector = ChangeDetector(problem, engine=name, checkpoint=checkpoint)
        self.caching = CachePolicy(problem, recomputes=checkpoint)
        self.runner = Runner(problem, checkpoint=checkpoint)
        self._frozen = 0  # number of open `frozen` blocks

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Engine, checkpoint=self.checkpoint), (
            self.problem,
            self.requested,
        )  # starts without cached entries

    def of(self, problem: Problem) -> Engine:
        """Return an engine of the same kind for another problem, without cached entries."""
        return Engine(problem, self.requested, checkpoint=self.checkpoint)

    @property
    def name(self) -> str:
        """Name of the engine that ran the module last."""
        return self.runner.name

    @property
    def fallback_reason(self) -> str:
        """Reason why the last product did not use our kernels; empty if it did."""
        return "" if self.detector.known is None else self.detector.known.fallback_reason

    @property
    def attends(self) -> bool:
        """Return True if our attention replaces the module's own."""
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
            form: Computation for every batch.
            V: Columns over the space `columns`, (n, k).
            rows: Space of the result.
            columns: Space of V.
            label: Name of the operator, for the progress.
            chunk: Number of columns at a time; by default chosen from the free memory.
            check: Called once per state of the problem, before its first product; it may raise.

        Returns:
            The sum, not divided, and the total weight N of its terms.
        """

        def work() -> tuple[Tensor, float]:
            N = self.problem.num_terms  # read first, because reading it later would wait for the GPU
            if check is not None:
                self.keep("check", check, 0)
            return self._sum(form, V, rows, columns, label, chunk), N

        while True:
            try:
                return self.consistent(work)
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
                if not (self.caching.halve(V.shape[1]) or self._recompute_layers()):
                    raise self.caching.too_large() from error

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
        step = step if spread is None or step == 1 else int(spread.min(step, problem.device))
        parts = [torch.zeros(rows.size, 0, dtype=problem.dtype, device=problem.device)]
        for start in range(0, k, step):
            part = V[:, start : start + step]
            tangents, total = columns.scatter_columns(part), rows.total(part.shape[1])
            for index, batch in enumerate(problem.local_batches(label)):
                form.apply(self, index, batch, rows.parameter_names, tangents, total.add)
            parts.append(total.result())
        return parts[-1] if len(parts) == 2 else torch.cat(parts, dim=1)

    # ------------------------------------------------------------------------------- one state of the problem

    def consistent(self, work: Callable[[], T], *, gradients: bool = False) -> T:
        """Return the result of `work` at one state of the problem, without stale cached entries.

        Threads take turns with a module. `work` is called a second time if a change is only detected
        afterwards.

        Args:
            work: Function that uses the methods of this engine.
            gradients: If True, confirm the values of gradients, too.
        """
        with locked(self.problem.model.module), differentiating():
            result, unchanged = self._attempt(work, gradients=gradients)
            if unchanged:
                return result
            self._forget()
            result, unchanged = self._attempt(work, again=True)
            if not (unchanged and self.detector.confirm()):  # the first call recorded the state
                refuse_random(self.problem, self.detector.sample.batch)
                raise CurvescopeError(
                    f"{self.problem.model.name} gave different outputs in repeated calls during a product",
                    hint="do not write to the model or the data during a product",
                )
            return result

    def _attempt(
        self, work: Callable[[], T], *, again: bool = False, gradients: bool = False
    ) -> tuple[Any, bool]:
        """Run `work` once; return its result, and True if no change of the problem was detected."""
        self._bind()
        self.refuse_wrong(second=False)
        try:
            result = work()
        except RuntimeError as error:  # autograd raises if tensors saved in a graph were overwritten
            retry = not again and WRITTEN in str(error)  # also for other graphs, such as a loss_fn's
            if not (retry or self.detector.written()):
                raise
            if self._frozen:
                self._forget()
                raise changed_error(self.problem) from error
            return None, False
        repeated = not self.caching.recomputes or self.detector.holds_on_all_ranks(
            self.runner.recompute_check.all_equal()
        )
        if not repeated and (again or self._frozen):
            self._forget()
            refuse_random(self.problem, self.detector.sample.batch)
            raise recompute_error(self.problem.model)
        return result, repeated and (bool(self._frozen) or self.detector.confirm(gradients=gradients))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Declare the model and the data constant inside; start and end are checked instead of every product.

        A block inside another one checks nothing: the outer one does, at its own end.

        Raises:
            CurvescopeError: The model or the data have changed before the end.
        """
        if self._frozen:
            yield
            return
        self.consistent(lambda: None, gradients=True)
        self._frozen += 1
        try:
            yield
        finally:
            self._frozen -= 1
        with locked(self.problem.model.module), differentiating():
            if self.detector.detect() is not None or not self.detector.confirm(gradients=True):
                self._forget()
                raise changed_error(self.problem)

    def _bind(self) -> None:
        """Detect changes, and clear the cache if the state has changed."""
        known = self.detector.detect()
        if known is None:
            if self.caching.overflowed:
                self._recompute_layers()
            return
        if self._frozen:
            self._forget()
            raise changed_error(self.problem)
        self.runner = known.runner(self.problem, checkpoint=self.caching.recomputes)
        self.caching.bind(known, self.runner)

    def refuse_wrong(self, *, second: bool) -> None:
        """Raise if a custom autograd function makes the derivatives that a product needs wrong."""
        if self.detector.known is not None:
            self.detector.known.derivatives.refuse(second=second)

    def _forget(self) -> None:
        self.detector.forget()
        self.caching.forget()

    def _recompute_layers(self) -> bool:
        """Recompute layers from now on, because memory ran out. Return False if that is impossible or already
        done.
        """
        with locked(self.problem.model.module), differentiating():
            caching, model = self.caching, self.problem.model
            caching.overflowed = False
            if caching.recomputes or not caching.is_local or not repeated_layers(model.module):
                return False
            caching.forget()
            try:
                known = self.detector.recomputing()
            except UsageError as error:
                LOG.info("layers cannot be recomputed: %s", error)
                return False
            LOG.warning(
                "%s: the graph of a batch does not fit into memory, so layers are recomputed, as with "
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
        build: Callable[[], BatchProduct],
        batch: Batch,
        tangents: Mapping[str, Tensor],
        receive: Receive,
    ) -> None:
        """Apply the batch product made by `build` to tangents, cached and replayed if possible."""
        group, (*_, rows, columns) = self.caching.directions(batch, tangents), key
        make = partial(self.caching.replayed, build, batch, rows, columns)
        work: BatchProduct = self.caching.graph(key, make, batch)
        work(list(tangents.values()), group, receive)

    def keep(self, key: Any, build: Callable[[], T], size: int) -> T:
        """Return the result of `build`, cached until the problem changes; call this inside `consistent`.

        Args:
            key: Key of the cache entry in this engine.
            build: A function of the problem alone.
            size: Size of the result in bytes.
        """
        return self.caching.get(key, build, size)

    def in_activations(self, index: int, batch: Batch, part: MatrixName, at: str, tangents: Tensor) -> Tensor:
        """Apply ∂²s/∂x² in the activations x at a point, or Jᵀ (∂²loss/∂z²) J, to tangents (k, *x.shape)."""
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
        """Apply the functional Hessian to tangents: one result for each source in `wanted`, and the rest."""
        self.refuse_wrong(second=True)
        columns = tuple(tangents)
        parts = find_sources(self.problem.model)
        sample = self.detector.sample.batch
        self.keep("sources add up", partial(check_sources_add_up, self.problem, parts, sample), 0)
        build = partial(functional_sources, self.problem, parts, batch, rows, columns)
        work: SourceWork = self.caching.graph((index, "sources", rows, columns), build, batch)
        group = self.caching.directions(batch, tangents, plain=True)
        results = work(list(tangents.values()), wanted, group)
        return {name: _tree(rows, values) for name, values in results.items()}

    def jacobian(self, batch: Batch, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the outputs z, and J applied to the tangents: (k, *z.shape)."""
        arguments = self.problem, self.runner, batch, (), tuple(tangents)
        graph = batch_products.linearized(*arguments, lazy=False)
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


def _tree(names: Names, results: Any) -> Tree:
    return {name: x for name, x in zip(names, results, strict=True) if x is not None}
