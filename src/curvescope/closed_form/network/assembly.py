"""Exact Hessians of a tape as dense matrices, in two independent ways.

Sources (any tape): H = (Dv_n)ᵀ B (Dv_n) + Σ_p (D in_p)ᵀ K_p(g_p) (D in_p), where D is the total derivative by
the tape's input and parameters, in_p = (x_p, θ_p), and g_p the cotangent of the output of p. The first
term is the GGN, the others name who contributes which curvature.

Assembly (backwards, block by block): over stages x_{l+1} = f_l(x_l; θ_l), with C = ∂²ℓ/∂x_{l+1}² and
X_m = ∂²ℓ/∂x_{l+1}∂θ_m carried along. All of this is for small models.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import INPUT, BlockMatrix, slices, symmetric
from curvescope.closed_form.network.primitives import Primitive, Step, Tape
from curvescope.closed_form.objectives import Objective


def total_derivatives(tape: Tape) -> list[Tensor]:
    """Dv_0, …, Dv_n: each variable by (input, parameters), (entries of v_t, n)."""
    place, n = slices(tape.sizes), sum(tape.sizes.values())
    first = torch.eye(n).to(tape.output)[place[INPUT]]
    found = [first]
    for step in tape.steps:
        jacobian = step.primitive.jacobian()
        D = jacobian[INPUT] @ found[-1]
        for name in step.primitive.parameters:
            D[:, place[name]] += jacobian[name]
        found.append(D if step.skip is None else D + step.scale * found[step.skip])
    return found


def gauss_newton(tape: Tape, objective: Objective) -> BlockMatrix:
    """(Dv_n)ᵀ B (Dv_n) over the input and the parameters."""
    D = total_derivatives(tape)[-1]
    return BlockMatrix(D.mT @ objective.to_dense() @ D, tape.sizes)


def curvature_sources(tape: Tape, g: Tensor) -> dict[str, BlockMatrix]:
    """Σ_p (D in_p)ᵀ K_p (D in_p), summand by summand; g is the cotangent of the output."""
    return _sources(tape, g, total_derivatives(tape))


def _sources(tape: Tape, g: Tensor, derivatives: list[Tensor]) -> dict[str, BlockMatrix]:
    """The same from the total derivatives Dv_0, …, Dv_n; a step's own depend on earlier parameters only."""
    cotangents, _ = tape.cotangents(g)
    place, n = slices(tape.sizes), sum(tape.sizes.values())
    found: dict[str, BlockMatrix] = {}
    before = place[INPUT].stop
    for t, step in enumerate(tape.steps):
        D, own = derivatives[t][:, :before], [place[name] for name in step.primitive.parameters]
        for source, K in _dense_curvature(step.primitive, cotangents[t + 1]).items():
            if source not in found:
                found[source] = BlockMatrix(g.new_zeros(n, n), tape.sizes)
            _add_source(found[source].matrix, D, K, own)
        before = max([before, *(where.stop for where in own)])
    return found


def _add_source(H: Tensor, D: Tensor, K: Tensor, own: list[slice]) -> None:
    """Add (D in)ᵀ K (D in) to H for in = (x, θ): D is that of x by the first entries, θ is at `own`.

    θ's rows of D in are rows of the identity, so DᵀK_xx D is a product of matrices, DᵀK_xθ goes to the
    columns of θ, its transpose to the rows, and K_θθ to where they meet.
    """
    (n_x, n), sizes = D.shape, [where.stop - where.start for where in own]
    H[:n, :n] += D.mT @ (K[:n_x, :n_x] @ D)
    crosses = (D.mT @ K[:n_x, n_x:]).split(sizes, dim=1)
    for rows, cross, part in zip(own, crosses, K[n_x:, n_x:].split(sizes), strict=True):
        H[:n, rows] += cross
        H[rows, :n] += cross.mT
        for columns, block in zip(own, part.split(sizes, dim=1), strict=True):
            H[rows, columns] += block


def stages(tape: Tape) -> list[Tape]:
    """The tape cut wherever no skip connection passes: a chain of smaller tapes."""
    n = len(tape.steps)
    crossed = {
        t for s, step in enumerate(tape.steps) if step.skip is not None for t in range(step.skip + 1, s + 1)
    }
    cuts = [t for t in range(n) if t not in crossed] + [n]
    found = []
    for a, b in pairwise(cuts):
        steps = tuple(
            Step(step.primitive, None if step.skip is None else step.skip - a, step.scale)
            for step in tape.steps[a:b]
        )
        found.append(Tape(steps, tape.output if b == n else tape.steps[b].primitive.x))
    return found


def assemble(tape: Tape, objective: Objective, *, functional: bool = True) -> BlockMatrix:
    """Every block over the input and the parameters, backwards over the stages.

    With J, K of stage l at its input and the current g, in this order: H_ll = J_θᵀ C J_θ + K_θθ;
    H_lm = J_θᵀ X_m (m > l); X_m ← J_xᵀ X_m; X_l = J_xᵀ C J_θ + K_xθ; C ← J_xᵀ C J_x + K_xx; g ← J_xᵀ g. A
    parameter of several stages (a tied embedding) adds its blocks up. `functional=False` drops K: the GGN.
    """
    sizes, place = tape.sizes, slices(tape.sizes)
    everywhere = torch.arange(sum(sizes.values()))
    H = tape.output.new_zeros(len(everywhere), len(everywhere))
    C, g = objective.to_dense(), objective.gradient
    later: list[tuple[Tensor, Tensor]] = []  # positions of θ_m, and X_m
    for stage in reversed(stages(tape)):
        n_x = stage.input.numel()
        derivatives = total_derivatives(stage)
        J = derivatives[-1]
        J_x, J_theta = J[:, :n_x], J[:, n_x:]
        K = J.new_zeros(J.shape[1], J.shape[1])
        if functional:
            K = sum((term.matrix for term in _sources(stage, g, derivatives).values()), K)
        rows = torch.cat(
            [everywhere[place[name]] for name in stage.sizes if name != INPUT] or [everywhere[:0]]
        )
        _accumulate(H, rows, rows, J_theta.mT @ C @ J_theta + K[n_x:, n_x:])
        for columns, X in later:
            cross = J_theta.mT @ X
            _accumulate(H, rows, columns, cross)
            _accumulate(H, columns, rows, cross.mT)
        later = [(columns, J_x.mT @ X) for columns, X in later]
        later.append((rows, J_x.mT @ C @ J_theta + K[:n_x, n_x:]))
        C = J_x.mT @ C @ J_x + K[:n_x, :n_x]
        g = stage.cotangents(g)[0][0]
    first = everywhere[place[INPUT]]
    _accumulate(H, first, first, C)
    for columns, X in later:
        _accumulate(H, first, columns, X)
        _accumulate(H, columns, first, X.mT)
    return BlockMatrix(H, sizes)


def _accumulate(H: Tensor, rows: Tensor, columns: Tensor, block: Tensor) -> None:
    """Add a block at positions of which each list has no repetition."""
    H[rows[:, None], columns] += block


def _dense_curvature(primitive: Primitive, g: Tensor) -> dict[str, Tensor]:
    """K(g) by source over (x, θ) of one primitive."""
    sizes = {INPUT: primitive.x.numel()} | {name: p.numel() for name, p in primitive.parameters.items()}
    return {source: symmetric(blocks, sizes, g).matrix for source, blocks in primitive.curvature(g).items()}
