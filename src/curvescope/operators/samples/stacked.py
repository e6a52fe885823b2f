"""Derivatives of several samples in one pass, each with its own copy of the parameters.

The parameters θ are repeated, (B, *shape), and `torch.func.vmap` runs sample b at copy b. The batched
operations record an ordinary autograd graph, which is differentiated twice in reverse mode, outside vmap.
This is right through `F.layer_norm`, unlike nested `torch.func` transforms. The sum of the samples' losses
depends on copy b only through sample b, so

    ∂s/∂θ_b = ∇s_b,        ∂²s/∂θ_b ∂θ_b' = δ_bb' ∇²s_b.

vmap drops the `padding_idx` of an embedding; `ConstantPadding` restores it. `agrees` compares every stacked
graph with an ordinary pass over the same samples. The caller computes samples one at a time if the two
differ, if vmap cannot run the module, or if the module holds a parameter in a second way.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvescope.core.blocks import ParamSpace
from curvescope.core.progress import track
from curvescope.core.seeds import generator
from curvescope.core.tensors import tree_map
from curvescope.data.batches import Batch
from curvescope.engines.module_runner import Runner
from curvescope.engines.vjp import gradient, linearize, pull
from curvescope.operators.roots import RootColumns
from curvescope.problem import Leaves, Problem

Part = Literal["hessian", "ggn"]
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}  # relative, for two orders of the same operations
ROUNDING = 0.01  # share of TOLERANCE of the largest derivative of all: smaller derivatives may be rounding
SLOW = "There is a performance drop"  # vmap's warning for an operation without a batching rule


class ConstantPadding(TorchFunctionMode):
    """Make embeddings give no derivative to the row of `padding_idx`, also under vmap."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in LOOKUPS:
            return result
        ids, weight, padding = LOOKUPS[func](*args, **(kwargs or {}))
        if padding is None:
            return result
        row = padding + weight.shape[0] if padding < 0 else padding
        return torch.where((ids == row)[..., None], result.detach(), result)


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> tuple:
    return input, weight, padding_idx


def _torch_embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, *_: Any, **__: Any) -> tuple:
    return indices, weight, None if padding_idx < 0 else padding_idx  # here −1 means no padding


LOOKUPS = {F.embedding: _embedding, torch.embedding: _torch_embedding}


@dataclass(frozen=True)
class Graph:
    """Outputs of B samples as a function of `points`: copies (B, *shape), or the parameters if B = 1."""

    problem: Problem
    space: ParamSpace
    batch: Batch
    points: Mapping[str, Tensor]
    outputs: Tensor
    stacked: bool

    def gradients(self) -> Tensor:
        """∇s_b of every sample's sum: (B, n)."""
        s, points = self._sum(), list(self.points.values())
        results = (
            torch.autograd.grad(s, points, allow_unused=True) if s.requires_grad else [None] * len(points)
        )
        return self._gathered([None if g is None else g[None] for g in results], 1)[..., 0]

    def products(self, V: Tensor, part: Part, group: int) -> Tensor:
        """∇²s_b V, or its GGN: (B, n, k), from V of shape (n, k) or (B, n, k)."""
        tangents = self._tangents(V)
        into = list(self.points.values())
        if part == "hessian":
            results = pull(gradient(self._sum(), into), tangents, into, group)
        else:
            z, batch = self.outputs, self.batch
            (Jv,) = linearize(self.points, (z,), tuple(self.points)).push(tangents, group)
            middle = self.problem.loss.hessian_product(z.detach(), batch.targets, batch.weights, Jv)
            results = pull([z], [middle], into, group)
        return self._gathered(results, V.shape[-1])

    def pulled(self, cotangents: Tensor, group: int) -> Tensor:
        """Jᵀ u of every sample for cotangents (k, B, …) of the outputs: (B, n, k)."""
        results = pull([self.outputs], [cotangents], list(self.points.values()), group)
        return self._gathered(results, len(cotangents))

    def squares(self, columns: RootColumns, group: int) -> Tensor:
        """Σ_k (Jᵀ r_k) ∘ (Jᵀ M r_k) of every sample, or Σ_k (Jᵀ r_k)² for roots r_k: (B, n)."""
        into = list(self.points.values())
        total = [torch.zeros_like(x)[None] for x in into]
        for start in track(range(0, columns.number, group), "exact diagonal"):
            R = columns.make(slice(start, min(start + group, columns.number)))
            pulled = second = pull([self.outputs], [R], into, group)
            if columns.times is not None:
                second = pull([self.outputs], [columns.times(R)], into, group)
            for add, pulled_root, pulled_product in zip(total, pulled, second, strict=True):
                if pulled_root is not None and pulled_product is not None:
                    add += (pulled_root * pulled_product).sum(dim=0)
        return self._gathered([x.detach() for x in total], 1)[..., 0]

    def _sum(self) -> Tensor:
        return self.problem.loss.sum(self.outputs, self.batch.targets, self.batch.weights)

    def _tangents(self, V: Tensor) -> list[Tensor]:
        """Directions of the points, with axis k first."""
        if V.dim() == 3:
            trees = [self.space.scatter_columns(columns) for columns in V]
            tree = {name: torch.stack([t[name] for t in trees], dim=1) for name in self.space.parameter_names}
            return [tree[name] if self.stacked else tree[name][:, 0] for name in self.points]
        B = self.batch.num_sequences
        tree = self.space.scatter_columns(V)
        if not self.stacked:
            return [tree[name] for name in self.points]
        return [tree[name][:, None].expand(-1, B, *tree[name].shape[1:]) for name in self.points]

    def _gathered(self, results: Any, k: int) -> Tensor:
        """Gather results (k, B, *shape) of the points into vectors (B, n, k)."""
        B = self.batch.num_sequences
        pairs = zip(self.points, results, strict=True)
        tree = {name: (x if self.stacked else x[:, None]).contiguous() for name, x in pairs if x is not None}
        if not tree:
            return torch.zeros(B, self.space.size, k, dtype=self.space.dtype, device=self.space.device)
        gather = torch.func.vmap(self.space.gather, out_dims=-1)  # over k: (n, k)
        return torch.func.vmap(gather, in_dims=1)(tree).detach()


def stacked_graph(problem: Problem, space: ParamSpace, batch: Batch) -> Graph | None:
    """Build the graph of all samples of a batch on the device; None if vmap cannot run the module."""
    runner, B = Runner(problem), batch.num_sequences
    rows = tree_map(lambda x: x[:, None], batch.inputs)  # a sample is a batch of one sequence

    def sample(leaves_of_sample: Leaves, inputs: Any) -> Tensor:
        z = runner.outputs(Batch(inputs, inputs), leaves_of_sample, second_order=True, lazy=False)
        assert isinstance(z, Tensor)
        return z[0]

    def run(leaves: Leaves) -> tuple[Leaves, Tensor]:
        copies = {name: leaf.expand(B, *leaf.shape) for name, leaf in leaves.items()}
        return copies, torch.func.vmap(sample)(copies, rows)

    try:
        with warnings.catch_warnings(), ConstantPadding():
            warnings.filterwarnings("ignore", message=SLOW)
            leaves, (copies, z) = problem.differentiable(
                space.parameter_names, run, lambda run_result: [run_result[1]]
            )
    except Exception:  # a module that reads its values may raise anything
        return None
    leaves_of_sample = dict(problem.model.named_parameters())
    if any(
        leaf is leaves_of_sample[name] for name, leaf in leaves.items()
    ):  # copies do not reach the second way
        return None
    return Graph(problem, space, batch, copies, z, stacked=True)


def plain_graph(problem: Problem, space: ParamSpace, batch: Batch) -> Graph:
    """Build the graph of a batch on the device in an ordinary pass: one sample, or all as one function."""
    runner = Runner(problem)

    def run(leaves: Leaves) -> Tensor:
        z = runner.outputs(batch, leaves, second_order=True, lazy=False)
        assert isinstance(z, Tensor)
        return z

    leaves, z = problem.differentiable(space.parameter_names, run, lambda z: [z])
    return Graph(problem, space, batch, leaves, z, stacked=False)


def agrees(graph: Graph, *, second_order: bool) -> bool:
    """Return True if stacked samples have the outputs and the derivatives of an ordinary pass over them.

    With random cotangents u, different in every entry of every sample's outputs z, and a random direction v,
    the check compares z, Jᵀu and, for `second_order`, ∂(Jᵀu)/∂θ v. A wrong derivative of any sample changes
    these sums, except for a set of u and v of measure zero.
    """
    plain = plain_graph(graph.problem, graph.space, graph.batch)
    z = plain.outputs
    if graph.outputs.shape != z.shape or not _near([graph.outputs], [z]):
        return False
    if not z.requires_grad or not graph.outputs.requires_grad:
        return z.requires_grad == graph.outputs.requires_grad
    u = _random(z, 0)
    v = [_random(x, 1 + i) for i, x in enumerate(plain.points.values())]
    try:
        actual = _derivatives(graph, u, v, second_order)
    except RuntimeError:  # a batched operation has no derivative
        return False
    expected = _derivatives(plain, u, v, second_order)
    return all(_near(*pair) for pair in zip(actual, expected, strict=True))


def _derivatives(graph: Graph, u: Tensor, v: list[Tensor], second_order: bool) -> list[list[Tensor]]:
    """Jᵀu and ∂(Jᵀu)/∂θ v, summed over samples, for every parameter."""
    into, z = list(graph.points.values()), graph.outputs

    def summed(gradients: Sequence[Tensor | None]) -> list[Tensor]:
        sums = [
            torch.zeros_like(x) if g is None else g.detach() for g, x in zip(gradients, into, strict=True)
        ]
        return [g.to_dense().sum(0) if graph.stacked else g.to_dense() for g in sums]

    pulled = torch.autograd.grad(z, into, u, retain_graph=True, create_graph=second_order, allow_unused=True)
    if not second_order:
        return [summed(pulled)]
    directions = [x.expand(like.shape)[None] for x, like in zip(v, into, strict=True)]
    second = [None if g is None else g[0] for g in pull(pulled, directions, into, 1)]
    return [summed(pulled), summed(second)]


def _random(like: Tensor, index: int) -> Tensor:
    return torch.randn(like.shape, generator=generator(0, index), dtype=torch.float64).to(like.detach())


def _near(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Return True if tensors agree up to rounding, each relative to its own largest entry.

    The largest entry of all tensors sets a floor, because a derivative that is exactly zero is computed as a
    rounding error.
    """
    if not expected:
        return True
    tolerance = TOLERANCE.get(expected[0].dtype, 1e-2)
    sizes = [_largest(x) for x in expected]
    floor = ROUNDING * max(sizes)
    for a, b, size in zip(actual, expected, sizes, strict=True):
        a, b = a.detach(), b.detach()
        if not ((a == b) | ((a - b).abs() <= tolerance * max(size, floor))).all():
            return False
    return True


def _largest(x: Tensor) -> float:
    """Largest finite entry in absolute value; a module may hide classes by −∞."""
    finite = x.detach()[x.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
