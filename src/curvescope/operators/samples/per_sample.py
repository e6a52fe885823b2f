"""Losses, gradients, products and traces of single samples: every sequence, or every term.

With L = (1/N) Σ_t w_t ℓ_t over terms t and N_x = Σ_{t ∈ x} w_t, a sample x has the loss of a problem that
contains only x, and the problem is the weighted mean of the samples:

    ℓ_x = (1/N_x) Σ_{t ∈ x} w_t ℓ_t,    L = Σ_x (N_x/N) ℓ_x,    H = Σ_x (N_x/N) H_x,    H_x = ∇²ℓ_x.

Several samples go through the model at a time (`stacked`), as many as fit into memory. Every group is
compared with an ordinary pass over it; if derivatives differ, its samples are computed one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import ShapeError, UsageError, warn
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.core.seeds import Probe, probes
from curvescope.data.batches import Batch
from curvescope.engines import Engine
from curvescope.engines.memory import SHARE_OF_FREE_MEMORY, free_bytes, result_bytes
from curvescope.models.parameter_selection import Params
from curvescope.models.running.aliased_parameters import RefuseAliased
from curvescope.operators.samples.batch_coupling import refuse_coupled
from curvescope.operators.samples.stacked import Graph, Part, agrees, plain_graph, stacked_graph
from curvescope.problem import Problem, check_finite, differentiating

GRAPH = 4  # memory of a gradient's graph, in units of the forward pass's results
COPIES = 4  # copies of a sample's parameters: the parameters, a gradient, a direction, a product
DIRECTION = 3  # memory of one more direction, in units of a sample's parameters and of its results
CPU_BYTES = 256 * 2**20  # more memory does not save time


@dataclass(frozen=True)
class SampleTraces(Result):
    """Traces of the samples' matrices: means over shared probes, with standard errors."""

    values: np.ndarray  # (S,)
    stderr: np.ndarray  # (S,) zero if `exact`
    exact: bool  # True if computed from all basis vectors
    num_probes: int
    seed: int
    probe: str = "rademacher"


@final
class PerSample:
    """Losses, gradients and curvature of every sample of a problem, at its current parameters.

    Nothing is cached between calls. If the model or the data change while a method runs, or inside
    `frozen()`, it raises.
    """

    def __init__(
        self,
        problem: Problem,
        space: ParamSpace,
        each: Each,
        chunk: int | None,
        *,
        cpu_bytes: int = CPU_BYTES,
    ):
        self.problem, self.space, self._cpu_bytes = problem, space, cpu_bytes
        self.each: Each = each
        self._engine, self._chunk = Engine(problem, "autograd"), chunk
        self._sizes: dict[Any, tuple[int, int]] | None = (
            None  # group sizes that fit into memory, inside `frozen()`
        )
        self._checked: set[tuple[int, int, bool]] = set()  # stacked samples that agreed, inside `frozen()`
        self._one_at_a_time = False  # stacked samples disagreed, or vmap failed, inside `frozen()`
        self._warned = False
        self._reached: set[frozenset[str]] = set()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Declare model and data constant inside; calls share sizes and checks of stacked samples."""
        if self._sizes is not None:
            yield
            return
        with self._engine.frozen():
            self._sizes, self._reached = {}, set()
            self._checked, self._one_at_a_time = set(), False
            try:
                refuse_coupled(self.problem)
                yield
            finally:
                self._sizes = None

    @property
    def shares(self) -> np.ndarray:
        """N_x / N, (S,); they sum to 1."""
        return np.concatenate([rows.weights for rows in self._rows()]) / self.problem.num_terms

    @property
    def sequences(self) -> np.ndarray:
        """Number of each sample's sequence in the data: (S,)."""
        counts = [batch.num_sequences for batch in self.problem.batches]
        firsts = np.cumsum([0, *counts[:-1]])
        return np.concatenate(
            [r.sequences.numpy() + first for r, first in zip(self._rows(), firsts, strict=True)]
        )

    @property
    def num_samples(self) -> int:
        """Number S of samples."""
        return len(self.shares)

    def losses(self, parameters: Mapping[str, Tensor] | None = None) -> np.ndarray:
        """ℓ_x, (S,), at the problem's parameters, or at others given by name."""
        values, loss = [], self.problem.loss
        parameters_ = {**self.problem.point, **(parameters or {})}
        with self.frozen(), differentiating(), torch.no_grad(), self._reaching(parameters_):
            for rows, batch in zip(self._rows(), self.problem.placed_batches("losses"), strict=True):
                z = self.problem.outputs(batch, parameters_)
                samples = rows.batch(batch)
                for i, s in enumerate(rows.sequences.tolist()):
                    single = samples[i : i + 1]
                    values.append(float(loss.sum(z[s : s + 1], single.targets, single.weights)))
        return np.array(values) / self._divisors()

    def gradient_parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield ∇ℓ_x of groups of samples: their slice, and gradients (b, n)."""
        yield from self.stream("gradients", lambda graph, rows, group: graph.gradients())

    def gradients(self) -> Tensor:
        """∇ℓ_x of all samples, (S, n). `gradient_parts` needs less memory."""
        return torch.cat([gradients for _, gradients in self.gradient_parts()])

    def gradient_norms(self) -> np.ndarray:
        """‖∇ℓ_x‖: (S,)."""
        return _concatenated(gradients.double().norm(dim=1) for _, gradients in self.gradient_parts())

    def gradient_products(self, V: Tensor) -> np.ndarray:
        """⟨∇ℓ_x, v⟩ for the columns v of V (n, k): (S, k)."""
        self._check(V, per_sample=False)
        return _concatenated(gradients @ V for _, gradients in self.gradient_parts())

    def product_parts(self, V: Tensor, part: Part = "hessian") -> Iterator[tuple[slice, Tensor]]:
        """Yield H_x V, or G_x V, of groups of samples: their slice, and products (b, n, k).

        Args:
            V: Columns (n, k) for all samples, or (S, n, k) with separate columns for each sample.
            part: `hessian`, or `ggn` for the GGN G_x.
        """
        if part not in get_args(Part):
            raise UsageError(f"expected 'hessian' or 'ggn', got {part!r}")
        self._check(V)

        def work(graph: Graph, rows: slice, group: int) -> Tensor:
            self._engine.refuse_wrong(second=part == "hessian")
            return graph.products(V[rows] if V.dim() == 3 else V, part, group)

        yield from self.stream(f"{part} products", work, second_order=True)

    def products(self, V: Tensor, part: Part = "hessian") -> Tensor:
        """H_x V, or G_x V, of all samples, (S, n, k). `product_parts` needs less memory."""
        return torch.cat([product for _, product in self.product_parts(V, part)])

    def forms(self, V: Tensor, part: Part = "hessian") -> np.ndarray:
        """vᵀ H_x v, or vᵀ G_x v, for the columns v: (S, k)."""
        return _concatenated(
            (product * (V[rows] if V.dim() == 3 else V)).double().sum(1)
            for rows, product in self.product_parts(V, part)
        )

    def traces(
        self, part: Part = "hessian", *, num_probes: int = 16, probe: Probe = "rademacher", seed: int = 0
    ) -> SampleTraces:
        """Return tr H_x, or tr G_x: exact with at most as many parameters as probes, else Hutchinson's
        estimate.
        """
        if num_probes < 2:
            raise UsageError(f"expected num_probes of at least 2, got {num_probes}")
        if probe not in get_args(Probe):
            raise UsageError(f"expected 'rademacher' or 'gaussian', got {probe!r}")
        V, exact = probe_columns(self.space, num_probes, probe=probe, seed=seed)
        forms = self.forms(V, part)
        if exact:
            return SampleTraces(forms.sum(1), np.zeros(len(forms)), True, V.shape[1], seed, probe)
        stderr = forms.std(axis=1, ddof=1) / math.sqrt(num_probes)
        return SampleTraces(forms.mean(1), stderr, False, num_probes, seed, probe)

    def __repr__(self) -> str:
        return f"PerSample({self.num_samples} {self.each}s, {self.space.size} parameters)"

    # ------------------------------------------------------------------------------- the stream of samples

    @contextmanager
    def _reaching(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Raise in the first pass inside if the module holds a changed parameter in a second way."""
        assert self._sizes is not None, "inside frozen"
        if not values or frozenset(values) in self._reached:
            yield
            return
        with RefuseAliased(dict(self.problem.model.named_parameters()), values):
            yield
        self._reached.add(frozenset(values))

    def stream(
        self, what: str, work: Callable[[Graph, slice, int], Tensor], *, second_order: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of samples with the results (b, …) of `work` on them, divided by their N_x.

        Args:
            what: The name of the work, for the progress bar.
            work: A function of the graph of b samples, their slice, and the number of directions at once.
            second_order: True if `work` differentiates the outputs twice.
        """
        divisors, first_sample = torch.as_tensor(self._divisors()), 0
        with self.frozen():
            for rows, full_batch in zip(self._rows(), self.problem.placed_batches(what), strict=True):
                if not len(rows.sequences):
                    continue
                step, group = self._group_sizes(rows.batch(full_batch))
                for start in track(range(0, len(rows.sequences), step), what):
                    batch = rows.batch(full_batch, slice(start, start + step))
                    numbers = slice(first_sample, first_sample + batch.num_sequences)
                    with differentiating():
                        graphs = self._graphs(batch, numbers, second_order)
                        results = torch.cat([work(graph, graph_rows, group) for graph, graph_rows in graphs])
                        check_finite(results, self.problem)
                    scale = divisors[numbers].to(results).reshape(-1, *[1] * (results.dim() - 1))
                    yield numbers, results / scale
                    first_sample = numbers.stop

    def _graphs(self, batch: Batch, numbers: slice, second_order: bool) -> Iterator[tuple[Graph, slice]]:
        """Yield one graph for all samples if it agrees with an ordinary pass, else one for each sample."""
        problem, space = self.problem, self.space
        if batch.num_sequences > 1 and not self._one_at_a_time:
            graph, key = stacked_graph(problem, space, batch), (numbers.start, numbers.stop, second_order)
            if graph is not None and (key in self._checked or agrees(graph, second_order=second_order)):
                self._checked.add(key)
                yield graph, numbers
                return
            self._one_at_a_time = True
            if graph is not None and not self._warned:
                self._warned = True
                warn(
                    f"torch.func.vmap computes different derivatives of {problem.model.name} than an "
                    f"ordinary pass, so samples are computed one at a time, which is slower"
                )
        for i in range(batch.num_sequences):
            yield (
                plain_graph(problem, space, batch[i : i + 1]),
                slice(numbers.start + i, numbers.start + i + 1),
            )

    def _group_sizes(self, batch: Batch) -> tuple[int, int]:
        """Number of samples of a batch, and of directions for each, that fit into memory."""
        problem, B, single = self.problem, batch.num_sequences, batch[:1]
        key = (B, *(tuple(t.shape) for t in single.tensors()))
        if self._sizes is not None and key in self._sizes:
            return self._sizes[key]
        _, results = result_bytes(lambda: problem.outputs(single))
        size = sum(map(math.prod, self.space.shapes.values())) * torch.finfo(problem.dtype).bits // 8
        limit = int(SHARE_OF_FREE_MEMORY * free_bytes(problem.device))
        limit = min(limit, self._cpu_bytes) if problem.device.type == "cpu" else limit
        limit_samples = self._chunk or max(1, limit // max(GRAPH * results + COPIES * size, 1))
        step = max(1, min(limit_samples, B))
        sizes = step, max(1, limit // max(DIRECTION * (results + size) * step, 1))
        if self._sizes is not None:
            self._sizes[key] = sizes
        return sizes

    def _rows(self) -> list[SampleRows]:
        return [rows_of(self.problem, batch, self.each) for batch in self.problem.batches]

    def _divisors(self) -> np.ndarray:
        """Divisor of each sample's sum."""
        return np.concatenate([rows.divisors for rows in self._rows()])

    def _check(self, V: Tensor, *, per_sample: bool = True) -> None:
        """Raise unless V has columns for all samples or, if `per_sample`, columns for each sample."""
        n, S = self.space.size, self.num_samples
        shapes = [(n,), (S, n)] if per_sample else [(n,)]
        if V.shape[:-1] not in shapes or V.dtype != self.problem.dtype:
            expected = " or ".join(f"({', '.join(map(str, shape))}, k)" for shape in shapes)
            raise ShapeError(
                f"expected columns {expected} in {self.problem.dtype}, got {V.dtype} {tuple(V.shape)}"
            )


def per_sample(
    problem: Problem, *blocks: Params, each: Each = "sequence", chunk: int | None = None
) -> PerSample:
    """Return every sequence, or every single term, of a problem's data with its own loss and curvature.

    Args:
        problem: A `cs.Problem`.
        blocks: Globs of blocks for gradients and products; by default all parameters.
        each: `sequence`, or `term` for a counted target or an entry of `mse_mean`.
        chunk: Number of samples at a time; by default chosen from the free memory.
    """
    if not isinstance(problem, Problem):
        raise UsageError(f"expected a cs.Problem, got {type(problem).__name__}")
    if each not in get_args(Each):
        raise UsageError(f"expected each='sequence' or 'term', got {each!r}")
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise UsageError(f"expected a chunk of at least 1 sample, got {chunk!r}")
    if each == "term" and not has_terms(problem):
        raise UsageError(
            f"the loss {problem.loss.name!r} does not define its terms within a sequence",
            hint="each='sequence', or a loss whose terms are targets or entries: cross_entropy, mse_mean",
        )
    return PerSample(problem, problem.space(*blocks), each, chunk)


def probe_columns(
    space: ParamSpace, num_probes: int, *, probe: Probe = "rademacher", seed: int
) -> tuple[Tensor, bool]:
    """Probes (n, num_probes) and False, or all basis vectors and True if they are no more."""
    options = {"dtype": space.dtype, "device": space.device}
    if space.size <= num_probes:
        return torch.eye(space.size, **options), True
    return probes(space.size, num_probes, seed=seed, kind=probe, **options), False


def _concatenated(parts: Iterable[Tensor]) -> np.ndarray:
    return torch.cat([part.double().cpu() for part in parts]).numpy()


Each = Literal["sequence", "term"]


class SampleRows(NamedTuple):
    """Samples of one batch: their sequences, and for terms their positions in the sequence."""

    sequences: Tensor  # (R,)
    terms: Tensor | None  # (R,)
    weights: np.ndarray  # (R,) N_x
    divisors: np.ndarray  # (R,) total weight of the batch that `batch` makes for the sample
    shape: tuple[int, ...]  # shape of the terms of one sequence

    def batch(self, batch: Batch, rows: slice = slice(None)) -> Batch:
        """Make a batch with one sequence per sample; other terms of a term's sequence have weight 0."""
        chosen = self.sequences[rows]
        samples = batch.map(lambda t: t[chosen.to(t.device)])
        if self.terms is None:
            return samples
        hot = torch.nn.functional.one_hot(self.terms[rows], math.prod(self.shape))
        return Batch(samples.inputs, samples.targets, hot.reshape(-1, *self.shape).to(samples.targets.device))


def has_terms(problem: Problem) -> bool:
    """Return True if the loss is a sum over targets or entries that weights can exclude."""
    return all(problem.loss.term_weights(b.targets, b.weights) is not None for b in problem.batches)


def rows_of(problem: Problem, batch: Batch, each: Each) -> SampleRows:
    """Samples of a batch with nonzero weight."""
    if each == "sequence":
        singles = (batch[i : i + 1] for i in range(batch.num_sequences))
        weights = np.array([problem.loss.total_weight(single.targets, single.weights) for single in singles])
        counted = np.flatnonzero(weights > 0)
        return SampleRows(torch.as_tensor(counted), None, weights[counted], weights[counted], ())
    w, unweighted = (
        problem.loss.term_weights(batch.targets, given_weights) for given_weights in (batch.weights, None)
    )
    assert w is not None, "checked by has_terms"
    assert unweighted is not None, "checked by has_terms"
    w, unweighted = w.double().cpu(), unweighted.double().cpu()
    flat = w.reshape(len(w), -1)
    at = sequences, terms = (flat > 0).nonzero(as_tuple=True)
    return SampleRows(
        sequences, terms, flat[at].numpy(), unweighted.reshape(len(w), -1)[at].numpy(), tuple(w.shape[1:])
    )
