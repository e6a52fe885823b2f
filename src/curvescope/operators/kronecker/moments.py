"""Second moments over the data: K-FAC's factors, EK-FAC's eigenvalues, Shampoo's factors.

Let a be the inputs and g the output gradients of the rows of a layer, with one g for every row and every
cotangent u of the curvature (`cotangents`), and N the total weight of the terms:

    expand   A = mean over rows of a aᵀ                       B = (1/N) Σ_rows,u g gᵀ
    reduce   A = mean over sequences of ā āᵀ, ā the mean      B = (1/N) Σ_n,u (Σ_rows g)(Σ_rows g)ᵀ
             over the sequence's rows

(Eschenhagen et al., 2023). All uses of a block are rows of one layer. The full gradient of sequence n and
cotangent u is G = Σ_rows a gᵀ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from curvescope.operators.kronecker.cotangents import Curvature
from curvescope.operators.kronecker.layers import KroneckerLayer
from curvescope.operators.kronecker.stream import Sides, sequence_groups
from curvescope.problem import Problem

Sharing = Literal["expand", "reduce"]
GRADIENT_BYTES = 2**26  # memory for full gradients


class FactorPair(NamedTuple):
    """K ≈ rows ⊗ columns for an m × n layer, row-major: (m, m) and (n, n)."""

    rows: Tensor
    columns: Tensor


def kfac_factors(
    problem: Problem,
    layers: tuple[KroneckerLayer, ...],
    curvature: Curvature,
    sharing: Sharing,
    *,
    joint: bool,
) -> list[FactorPair]:
    """A and B of every layer, as factors of the rows and columns of its matrix."""
    sums = [_Sums(layer) for layer in layers]
    for piece in sequence_groups(problem, layers, "factors", joint=joint):
        for layer, total in zip(layers, sums, strict=True):
            total.add_inputs(piece.inputs(layer), piece.counts(layer), sharing)
        if curvature.kind == "forward-only":
            continue
        for gradients in piece.gradients(curvature):
            for total, g in zip(sums, gradients, strict=True):
                total.add_outputs(g, sharing)
    forward_only = curvature.kind == "forward-only"
    return [total.pair(problem.num_terms, forward_only=forward_only) for total in sums]


class _Sums:
    """Running sums of one layer, for each orientation in which its block is used."""

    def __init__(self, layer: KroneckerLayer):
        self._shape = layer.shape
        self._inputs: dict[bool, Tensor] = {}
        self._outputs: dict[bool, Tensor] = {}
        self._count: dict[bool, float] = {}

    def add_inputs(self, inputs: Sides, counts: dict[bool, Tensor], sharing: Sharing) -> None:
        for key, a in inputs.items():
            rows = counts[key]
            if sharing == "reduce":
                a = a.sum(1) / rows.clamp(min=1)[:, None]
                self._count[key] = self._count.get(key, 0.0) + float((rows > 0).sum())
            else:
                self._count[key] = self._count.get(key, 0.0) + float(rows.sum())
            flat = a.reshape(-1, a.shape[-1])
            self._inputs[key] = self._inputs.get(key, 0) + flat.T @ flat

    def add_outputs(self, outputs: Sides, sharing: Sharing) -> None:
        for key, g in outputs.items():
            flat = (g.sum(2) if sharing == "reduce" else g).reshape(-1, g.shape[-1])
            self._outputs[key] = self._outputs.get(key, 0) + flat.T @ flat

    def pair(self, num_terms: float, *, forward_only: bool) -> FactorPair:
        """Return the factors; `pooled` combines those of two orientations."""
        pairs = []
        for key, A in self._inputs.items():
            A = A / max(self._count[key], 1.0)
            side = self._shape[0 if key else 1]
            B = self._outputs.get(key, A.new_zeros(side, side)) / num_terms
            B = torch.eye(side, dtype=A.dtype, device=A.device) if forward_only else B
            pairs.append(FactorPair(B, A) if key else FactorPair(A, B))
        return pooled(pairs)


def pooled(pairs: list[FactorPair]) -> FactorPair:
    """Approximate a sum of Kronecker products by one pair: means of each factor, weighted by traces.

    R = Σ_u t_u R_u / tr R_u and C likewise, with t_u = tr R_u tr C_u, divided by Σ_u t_u: this keeps the
    trace of the sum, and a single pair unchanged. It is needed for a tied embedding, which lookup and
    unembedding use in different orientations.
    """
    if len(pairs) == 1:
        return pairs[0]
    traces = [(float(p.rows.trace()), float(p.columns.trace())) for p in pairs]
    live = [(p, r, c) for p, (r, c) in zip(pairs, traces, strict=True) if r * c > 0]
    if not live:
        return FactorPair(torch.zeros_like(pairs[0].rows), torch.zeros_like(pairs[0].columns))
    rows = torch.stack([p.rows * c for p, _, c in live]).sum(0)
    columns = torch.stack([p.columns * r for p, r, _ in live]).sum(0)
    return FactorPair(rows, columns / sum(r * c for _, r, c in live))


def eigenvalues_in(
    problem: Problem,
    layers: tuple[KroneckerLayer, ...],
    curvature: Curvature,
    bases: Sequence[FactorPair | None],
    *,
    joint: bool,
) -> list[Tensor]:
    """Λ = (1/N) Σ_n,u (Qᵣᵀ G Q_c)², the diagonal of the curvature in Kronecker bases: (m, n) each.

    A basis of None means the parameters' basis: Λ is the diagonal of the curvature itself.
    """
    diagonals = [torch.zeros(layer.shape, dtype=problem.dtype, device=problem.device) for layer in layers]
    for piece in sequence_groups(problem, layers, "eigenvalues", joint=joint):
        turned = [_in_basis(piece.inputs(x), q, inputs=True) for x, q in zip(layers, bases, strict=True)]
        for gradients in piece.gradients(curvature):
            for total, a, g, q in zip(diagonals, turned, gradients, bases, strict=True):
                _add_squares(total, a, _in_basis(g, q, inputs=False))
    return [total / problem.num_terms for total in diagonals]


def _add_squares(total: Tensor, inputs: Sides, outputs: Sides) -> None:
    """Add Σ_n,u G² to `total`; with one row per sequence it is a² (Σ_u g²)ᵀ, without computing G."""
    if len(inputs) == 1 and next(iter(inputs.values())).shape[1] == 1:
        ((key, a),) = inputs.items()
        sums = a[:, 0].square().T @ outputs[key][:, :, 0].square().sum(0)
        total += sums.T if key else sums
        return
    for G in sequence_gradients(inputs, outputs):
        total += G.square().sum((0, 1))


def _in_basis(sides: Sides, q: FactorPair | None, *, inputs: bool) -> Sides:
    """Express inputs or outputs in the basis of their side."""
    if q is None:
        return sides
    return {key: x @ (q.rows if inputs != key else q.columns) for key, x in sides.items()}


def sequence_gradients(inputs: Sides, outputs: Sides) -> Iterator[Tensor]:
    """Yield G of every sequence for groups of cotangents: (k, B, m, n)."""
    if not inputs:  # no sequence here uses the layer
        return
    key = next(iter(inputs))
    k, B, _, n = outputs[key].shape
    size = B * inputs[key].shape[-1] * n * inputs[key].element_size()
    step = max(1, GRADIENT_BYTES // max(size, 1))
    for start in range(0, k, step):
        total: Tensor | None = None
        for key in inputs:
            g = outputs[key][start : start + step]
            G = torch.einsum("brm,kbrn->kbmn", inputs[key], g)
            G = G.mT if key else G
            total = G if total is None else total + G
        assert total is not None, "a layer is used"
        yield total


def shampoo_factors(
    problem: Problem, layers: tuple[KroneckerLayer, ...], curvature: Curvature, *, joint: bool
) -> list[FactorPair]:
    """L = (1/N) Σ_n,u G Gᵀ and R = (1/N) Σ_n,u Gᵀ G of every layer."""
    options = {"dtype": problem.dtype, "device": problem.device}
    pairs = [FactorPair(*(torch.zeros(side, side, **options) for side in layer.shape)) for layer in layers]
    for piece in sequence_groups(problem, layers, "factors", joint=joint):
        inputs = [piece.inputs(layer) for layer in layers]
        for gradients in piece.gradients(curvature):
            for pair, a, g in zip(pairs, inputs, gradients, strict=True):
                for G in sequence_gradients(a, g):
                    pair.rows.add_(torch.einsum("kbmn,kbpn->mp", G, G))
                    pair.columns.add_(torch.einsum("kbmn,kbmp->np", G, G))
    N = problem.num_terms
    return [FactorPair(pair.rows / N, pair.columns / N) for pair in pairs]
