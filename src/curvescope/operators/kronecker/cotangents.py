"""Cotangents u of the outputs whose outer products sum to the middle of a curvature, Σ u uᵀ.

With terms t of weight w_t, outputs z of sequences n, and Σ over all u,

    ggn        Σ u uᵀ = Σ_t w_t ∂²ℓ_t/∂z²                     all columns of a root
    mc         the same in expectation                        r_t √w_t at targets drawn from the model
    empirical  Σ u uᵀ = Σ_t w_t r_t r_tᵀ, r_t = ∂ℓ_t/∂z       at the data's own targets

if every term has its own vectors ("separate"). With one vector for all terms of a sequence ("together"), one
pass replaces T passes, and products of different terms are added; for drawn targets their expectation is
zero. A vector contains cotangents of all sequences of a batch, because their graphs are independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.data.batches import Batch
from curvescope.losses.base import TermLayout
from curvescope.operators.curvature import sampled_targets
from curvescope.operators.roots import RootColumns, ggn_columns
from curvescope.problem import Problem

Kind = Literal["ggn", "mc", "empirical", "forward-only"]
Terms = Literal["auto", "separate", "together"]


@dataclass(frozen=True)
class Curvature:
    """Matrix to approximate, and the grouping of its terms in reverse passes."""

    kind: Kind = "mc"
    terms: Terms = "auto"
    num_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (("kind", self.kind, Kind), ("terms", self.terms, Terms)):
            if value not in get_args(known):
                raise UsageError(f"expected {name} as one of {', '.join(get_args(known))}, got {value!r}")
        if not isinstance(self.num_samples, int) or self.num_samples < 1:
            raise UsageError(f"expected num_samples of at least 1, got {self.num_samples!r}")
        if self.num_samples != 1 and self.kind != "mc":
            raise UsageError(f"num_samples belongs to kind='mc', got kind={self.kind!r}")

    @property
    def separate(self) -> bool:
        """Return True if every term has its own vectors."""
        return self.terms == "separate" or (self.terms == "auto" and self.kind != "mc")

    def chunks(self, problem: Problem, z: Tensor, batch: Batch, first: int, size: int) -> Iterator[Tensor]:
        """Yield the vectors of a batch, at most `size` at a time: (k, *z.shape).

        Args:
            problem: Problem with the loss.
            z: Outputs on the batch.
            batch: A batch on the model's device.
            first: Number of its first sequence in the data.
            size: Largest number of vectors at a time.
        """
        z = z.detach()
        if self.kind == "ggn":
            columns = _root(problem, z, batch, separate=self.separate)
            for start in range(0, columns.number, size):
                yield columns.make(slice(start, min(start + size, columns.number)))
            return
        several: list[Tensor] = []
        for u in self._gradients(problem, z, batch, first):
            several.append(u)
            if len(several) == size:
                yield torch.stack(several)
                several = []
        if several:
            yield torch.stack(several)

    def _gradients(self, problem: Problem, z: Tensor, batch: Batch, first: int) -> Iterator[Tensor]:
        for sample in range(self.num_samples):
            targets = batch.targets
            if self.kind == "mc":
                targets = sampled_targets(problem.loss, z, batch, first, sample, self.seed)
            u = problem.loss.root_gradient(z, targets, batch.weights) * self.num_samples**-0.5
            yield from _split_terms(u, _layout(problem, z)) if self.separate else [u]


def _layout(problem: Problem, z: Tensor) -> TermLayout:
    """Return the positions of the loss's terms in the outputs."""
    layout = problem.loss.layout(z)
    if layout is not None:
        return layout
    raise UsageError(
        f"the loss {problem.loss.name!r} does not define its terms within a sequence",
        hint="terms='together' uses one reverse pass for all terms of a sequence",
    )


def _split_terms(u: Tensor, layout: TermLayout) -> Iterator[Tensor]:
    """Split u into its nonzero parts with one term of every sequence each."""
    cut = layout.split(u)
    for term in range(layout.number):
        if bool(cut[:, term].any()):
            vector = torch.zeros_like(cut)
            vector[:, term] = cut[:, term]
            yield layout.join(vector, u.shape)


def _root(problem: Problem, z: Tensor, batch: Batch, *, separate: bool) -> RootColumns:
    """Columns of S with S Sᵀ = Σ_t w_t ∂²ℓ_t/∂z², position by position or of all positions at once."""
    loss = problem.loss
    if not loss.has_root:
        return _dense_root(problem, z, batch)
    if separate or not loss.joint_root:
        return ggn_columns(loss, z, batch)
    axis = -1 if (layout := loss.layout(z)) is None else layout.axis
    C = z.shape[axis] if z.dim() > 1 else 1

    def make(chosen: slice) -> Tensor:
        noise = torch.eye(C, dtype=z.dtype, device=z.device)[chosen]
        if z.dim() > 1:
            noise = noise.reshape(-1, *[1] * (z.dim() - 1), C).movedim(-1, axis).expand(-1, *z.shape)
        return loss.root(z, batch.targets, batch.weights, noise)

    return RootColumns(C, make)


def _dense_root(problem: Problem, z: Tensor, batch: Batch) -> RootColumns:
    """Columns √λ v of a root for any convex loss, for eigenpairs of each sequence's output Hessian."""
    if not problem.loss.convex:
        raise UsageError(
            f"kind='ggn' needs a loss that is convex in the outputs, got {problem.loss.name!r}",
            hint="kind='empirical' takes any loss",
        )
    B, D = len(z), z[0].numel()
    basis = torch.eye(D, dtype=z.dtype, device=z.device)[:, None].expand(D, B, D).reshape(D, *z.shape)
    H = problem.loss.hessian_product(z, batch.targets, batch.weights, basis).reshape(D, B, D)
    values, vectors = torch.linalg.eigh(H.permute(1, 0, 2))
    root = (vectors * values.clamp(min=0).sqrt()[:, None]).permute(2, 0, 1)  # (D, B, D)
    return RootColumns(D, lambda some: root[some].reshape(-1, *z.shape))
