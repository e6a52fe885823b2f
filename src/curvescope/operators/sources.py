"""Sources of curvature: the functional Hessian as a sum over the parts of a network.

With parts y = f(x, θ) (norms, attentions, feed-forward networks), λ = ∂ℓ/∂y and D = d(x, θ)/dθ_all,

    H = H_o + Σ_f Dᵀ (λ · f'') D

exactly: each source is the second derivative of one part, mapped by the first derivatives of all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from curvescope.core.errors import UsageError, near_misses
from curvescope.engines import SourceTerm
from curvescope.engines.memory import columns_at_once
from curvescope.models.curvature_sources import REST, find_sources
from curvescope.models.parameter_selection import Params
from curvescope.operators.base import CurvatureOperator
from curvescope.problem import Problem


class FunctionalSource(CurvatureOperator):
    """Dᵀ (λ · f'') D of one source: the contribution of that part's second derivative to the Hessian.

    Args:
        source: `L0.attention`, `L0.ffn`, `L0.ln1`, `ln_f`, …, or `rest` for everything else, such as the
            head, and norms without a role. `FunctionalSources(problem)` lists them. If the sources do not add
            up to the functional Hessian on a few positions, the operator raises.
    """

    def __init__(self, problem: Problem, source: str, *blocks: Params, chunk: int | None = None):
        super().__init__(problem, *blocks, chunk=chunk)
        names = [*find_sources(problem.model), REST]
        if source not in names:
            raise UsageError(
                f"{problem.model.name} has no source {source!r}", hint=near_misses(source, names)
            )
        self.source = source

    @property
    def form(self) -> SourceTerm:
        """Term of this source."""
        return SourceTerm(self.source)


class FunctionalSources(Mapping[str, FunctionalSource]):
    """All sources of a problem by name, in the order of the network; they share one engine and its cache."""

    def __init__(self, problem: Problem, *blocks: Params):
        if not isinstance(problem, Problem):
            raise UsageError(f"expected a cs.Problem, got {type(problem).__name__}")
        self.problem, self._blocks = problem, blocks
        self._names = (*find_sources(problem.model), REST)
        self._example = FunctionalSource(problem, REST, *blocks)

    def __getitem__(self, name: str) -> FunctionalSource:
        if name not in self._names:
            raise KeyError(name)
        source = self._example.block(self._blocks or "*")
        source.source = name
        return source

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def products(self, V: Tensor) -> dict[str, Tensor]:
        """Apply every source to the columns V (n, k) at once: (n, k) each; their sum is H_f V.

        Together they cost one reverse pass and one more for each source, less than separate products.
        """
        op = self._example
        return op.engine.consistent(lambda: self._sum(V))

    def _sum(self, V: Tensor) -> dict[str, Tensor]:
        op, n = self._example, self.problem.num_terms
        total = {name: torch.zeros_like(V) for name in self._names}
        step = max(1, columns_at_once(self.problem) // len(self))
        for columns in (slice(start, start + step) for start in range(0, V.shape[1], step)):
            tangents = op.columns.scatter_columns(V[:, columns])
            for index, batch in enumerate(self.problem.placed_batches("sources")):
                results = op.engine.sources(index, batch, op.space.parameter_names, tangents, self._names)
                for name, tree in results.items():
                    part = total[name][:, columns]
                    part += op.space.gather_columns(tree, part.shape[1]) / n
        return total
