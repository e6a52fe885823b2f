"""Cotangents u of the outputs whose outer products sum to the middle of a curvature, Σ u uᵀ.

With terms t of weight w_t, at outputs z of sequences n, and Σ over all u that are made here,

    ggn        Σ u uᵀ = Σ_t w_t ∂²ℓ_t/∂z²                     columns of a root, all of them
    mc         its expectation is that                        r_t √w_t at targets drawn from the model
    empirical  Σ u uᵀ = Σ_t w_t r_t r_tᵀ, r_t = ∂ℓ_t/∂z       at the data's own targets

if every term has vectors of its own ("separate"). Terms of a sequence that go back together, one vector for
all, cost a pass instead of T passes and add the products of different terms; of drawn targets these have
expectation zero. A vector holds those of all sequences of a batch, whose graphs do not meet.
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
from curvescope.operators.roots import Columns, ggn_columns
from curvescope.problem import Problem

Kind = Literal["ggn", "mc", "empirical", "forward-only"]
Terms = Literal["auto", "separate", "together"]


@dataclass(frozen=True)
class Curvature:
    """Matrix that is approximated, and how its terms are sent back."""

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
        """Return True if every term has vectors of its own."""
        return self.terms == "separate" or (self.terms == "auto" and self.kind != "mc")

    def chunks(self, problem: Problem, z: Tensor, batch: Batch, first: int, size: int) -> Iterator[Tensor]:
        """Vectors of a batch, at most `size` at a time: (k, *z.shape).

        Args:
            problem: Whose loss it is.
            z: Outputs on the batch.
            batch: A placed one.
            first: The number of its first sequence among all data.
            size: Vectors at once.
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
            yield from _apart(u, _layout(problem, z)) if self.separate else [u]


def _layout(problem: Problem, z: Tensor) -> TermLayout:
    """Return the positions of the loss's terms in the outputs."""
    layout = problem.loss.layout(z)
    if layout is not None:
        return layout
    raise UsageError(
        f"the loss {problem.loss.name!r} does not define its terms within a sequence",
        hint="terms='together' sends those of a sequence back at once",
    )


def _apart(u: Tensor, layout: TermLayout) -> Iterator[Tensor]:
    """The parts of u in one term of every sequence, those that are not zero."""
    cut = layout.split(u)
    for term in range(layout.number):
        if bool(cut[:, term].any()):
            vector = torch.zeros_like(cut)
            vector[:, term] = cut[:, term]
            yield layout.join(vector, u.shape)


def _root(problem: Problem, z: Tensor, batch: Batch, *, separate: bool) -> Columns:
    """Columns of S with S Sᵀ = Σ_t w_t ∂²ℓ_t/∂z², position by position or of all positions at once."""
    loss = problem.loss
    if not loss.rooted:
        return _dense_root(problem, z, batch)
    if separate or not loss.together:
        return ggn_columns(loss, z, batch)
    axis = -1 if (layout := loss.layout(z)) is None else layout.axis
    C = z.shape[axis] if z.dim() > 1 else 1

    def make(chosen: slice) -> Tensor:
        noise = torch.eye(C, dtype=z.dtype, device=z.device)[chosen]
        if z.dim() > 1:
            noise = noise.reshape(-1, *[1] * (z.dim() - 1), C).movedim(-1, axis).expand(-1, *z.shape)
        return loss.root(z, batch.targets, batch.weights, noise)

    return Columns(C, make)


def _dense_root(problem: Problem, z: Tensor, batch: Batch) -> Columns:
    """Columns of a root for any convex loss: √λ v for the eigenpairs of every sequence's Hessian in its
    outputs.
    """
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
    return Columns(D, lambda some: root[some].reshape(-1, *z.shape))
