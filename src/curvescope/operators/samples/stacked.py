"""Several samples at once, each with parameters of its own: derivatives of every single one of them.

The parameters θ are repeated, (B, *shape), and sample b is run at copy b by `torch.func.vmap`. What the
batched operations record is plain autograd's graph, outside vmap, and it is differentiated in reverse twice:
that is right through `F.layer_norm`, where nested `torch.func` transforms are not. The sum of the samples'
losses depends on copy b through sample b alone, so

    ∂s/∂θ_b = ∇s_b,        ∂²s/∂θ_b ∂θ_b' = δ_bb' ∇²s_b.

A module that vmap cannot run, or that holds a parameter in a second way, gets its samples one at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.progress import track
from curvescope.core.tensors.trees import tree_map
from curvescope.data.batches import Batch
from curvescope.engines.passes import gradient, linearise, pull
from curvescope.engines.run import PlainRunner
from curvescope.operators.roots import Columns
from curvescope.problem import Leaves, Problem

Part = Literal["hessian", "ggn"]
NEAR = {torch.float32: 1e-3, torch.float64: 1e-8}  # relative: two orders of the same operations
SLOW = "There is a performance drop"  # an operation that vmap takes sample by sample; the numbers are right


@dataclass(frozen=True)
class Graph:
    """Outputs of B samples as a function of `points`: of copies (B, *shape), or of parameters for B = 1."""

    problem: Problem
    space: ParamSpace
    batch: Batch
    points: Mapping[str, Tensor]
    outputs: Tensor
    stacked: bool

    def gradients(self) -> Tensor:
        """∇s_b of every sample's sum: (B, n)."""
        s, points = self._sum(), list(self.points.values())
        found = torch.autograd.grad(s, points, allow_unused=True) if s.requires_grad else [None] * len(points)
        return self._gathered([None if g is None else g[None] for g in found], 1)[..., 0]

    def products(self, V: Tensor, part: Part, group: int) -> Tensor:
        """∇²s_b V, or its Gauss-Newton part: (B, n, k), from V of shape (n, k) or (B, n, k)."""
        tangents = self._tangents(V)
        into = list(self.points.values())
        if part == "hessian":
            found = pull(gradient(self._sum(), into), tangents, into, group)
        else:
            z, batch = self.outputs, self.batch
            (Jv,) = linearise(self.points, (z,), tuple(self.points)).push(tangents, group)
            middle = self.problem.loss.hessian_product(z.detach(), batch.targets, batch.weights, Jv)
            found = pull([z], [middle], into, group)
        return self._gathered(found, V.shape[-1])

    def pulled(self, cotangents: Tensor, group: int) -> Tensor:
        """Jᵀ u of every sample for cotangents (k, B, …) of the outputs: (B, n, k)."""
        found = pull([self.outputs], [cotangents], list(self.points.values()), group)
        return self._gathered(found, len(cotangents))

    def squares(self, columns: Columns, group: int) -> Tensor:
        """Σ_k (Jᵀ r_k) ∘ (Jᵀ M r_k) of every sample, or Σ_k (Jᵀ r_k)² for roots r_k: (B, n)."""
        into = list(self.points.values())
        total = [torch.zeros_like(x)[None] for x in into]
        for start in track(range(0, columns.number, group), "exact diagonal"):
            R = columns.make(slice(start, min(start + group, columns.number)))
            pulled = others = pull([self.outputs], [R], into, group)
            if columns.times is not None:
                others = pull([self.outputs], [columns.times(R)], into, group)
            for add, one, other in zip(total, pulled, others, strict=True):
                if one is not None and other is not None:
                    add += (one * other).sum(dim=0)
        return self._gathered([x.detach() for x in total], 1)[..., 0]

    def _sum(self) -> Tensor:
        return self.problem.loss.sum(self.outputs, self.batch.targets, self.batch.weights)

    def _tangents(self, V: Tensor) -> list[Tensor]:
        """Directions of the points, k in front."""
        if V.dim() == 3:
            trees = [self.space.scatter_columns(own) for own in V]
            tree = {name: torch.stack([t[name] for t in trees], dim=1) for name in self.space.parameters}
            return [tree[name] if self.stacked else tree[name][:, 0] for name in self.points]
        B = self.batch.num_sequences
        tree = self.space.scatter_columns(V)
        if not self.stacked:
            return [tree[name] for name in self.points]
        return [tree[name][:, None].expand(-1, B, *tree[name].shape[1:]) for name in self.points]

    def _gathered(self, found: Any, k: int) -> Tensor:
        """Results (k, B, *shape) of the points as vectors: (B, n, k)."""
        B = self.batch.num_sequences
        pairs = zip(self.points, found, strict=True)
        tree = {name: (x if self.stacked else x[:, None]).contiguous() for name, x in pairs if x is not None}
        if not tree:
            return torch.zeros(B, self.space.size, k, dtype=self.space.dtype, device=self.space.device)
        one = torch.func.vmap(self.space.gather, out_dims=-1)  # over k: (n, k)
        return torch.func.vmap(one, in_dims=1)(tree).detach()


def together(problem: Problem, space: ParamSpace, batch: Batch) -> Graph | None:
    """The graph of all samples of a placed batch, or None where the module cannot be run so."""
    runner, B = PlainRunner(problem), batch.num_sequences
    rows = tree_map(lambda x: x[:, None], batch.inputs)  # a sample is a batch of one sequence

    def one(own: Leaves, inputs: Any) -> Tensor:
        z = runner.outputs(Batch(inputs, inputs), own, second_order=True, lazy=False)
        assert isinstance(z, Tensor)
        return z[0]

    def run(leaves: Leaves) -> tuple[Leaves, Tensor]:
        copies = {name: leaf.expand(B, *leaf.shape) for name, leaf in leaves.items()}
        return copies, torch.func.vmap(one)(copies, rows)

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=SLOW)
            leaves, (copies, z) = problem.differentiable(space.parameters, run, lambda found: [found[1]])
    except Exception:  # whatever a module raises that looks at its numbers
        return None
    own = problem.model.parameters
    if any(leaf is own[name] for name, leaf in leaves.items()):  # copies do not reach the second way
        return None
    return Graph(problem, space, batch, copies, z, stacked=True)


def alone(problem: Problem, space: ParamSpace, batch: Batch) -> Graph:
    """The graph of a placed batch of one sample."""
    runner = PlainRunner(problem)

    def run(leaves: Leaves) -> Tensor:
        z = runner.outputs(batch, leaves, second_order=True, lazy=False)
        assert isinstance(z, Tensor)
        return z

    leaves, z = problem.differentiable(space.parameters, run, lambda z: [z])
    return Graph(problem, space, batch, leaves, z, stacked=False)


def fits_together(problem: Problem, space: ParamSpace, batch: Batch, v: Tensor) -> bool:
    """Whether samples of a placed batch, taken at once, are what they are alone: outputs and a product."""
    two = batch[:2]
    graph = together(problem, space, two)
    if graph is None:
        return False
    for b in range(two.num_sequences):
        single = alone(problem, space, two[b : b + 1])
        ask: list[Callable[[Graph], Tensor]] = [lambda g: g.outputs, lambda g: g.products(v, "hessian", 1)]
        try:
            pairs = [(f(graph)[b], f(single)[0]) for f in ask]
        except RuntimeError:  # a derivative that batched operations do not have
            return False
        if not all(_near(ours, theirs) for ours, theirs in pairs):
            return False
    return True


def _near(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    scale = float(b.detach().abs().max()) if b.numel() else 0.0
    return not b.numel() or float((a - b).detach().abs().max()) <= NEAR.get(a.dtype, 1e-2) * scale
