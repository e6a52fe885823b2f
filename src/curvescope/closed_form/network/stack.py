"""Complete networks: exact gradient, Hessian, GGN, sources of curvature and their products.

    tape = stack_tape(params, tokens, Architecture(num_heads=2))
    curvature = StackCurvature(tape, lambda z: cross_entropy_objective(z, targets))
    curvature.hessian()["L0.W_Q", "L1.W_K"]; curvature.sources(); curvature.hvp(direction)

Parameters are one dictionary in the names of the project (`E, P, L0.W_Q, …, L1.ln2.b, ln_f.g, U`), every
weight inputs × outputs. The code uses no automatic differentiation.

Dense Hessians of a tape are computed in two independent ways.

Sources (any tape): H = (Dv_n)ᵀ B (Dv_n) + Σ_p (D in_p)ᵀ K_p(g_p) (D in_p), where D is the total derivative by
the tape's input and parameters, in_p = (x_p, θ_p), and g_p the cotangent of the output of p. The first
term is the GGN, the other terms are the curvatures of the sources p.

Assembly (backwards, block by block): over stages x_{l+1} = f_l(x_l; θ_l), with C = ∂²ℓ/∂x_{l+1}² and
X_m = ∂²ℓ/∂x_{l+1}∂θ_m. Both ways are for small models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import INPUT, BlockMatrix, slices, symmetric
from curvescope.closed_form.network.block import Architecture, record_block, record_norm
from curvescope.closed_form.network.input_output_layers import Embedding, Linear, MeanOverTokens, Positions
from curvescope.closed_form.network.primitives import Primitive, Tape, TapeRecorder, TapeStep, Tree
from curvescope.closed_form.objectives import OutputObjective
from curvescope.core.errors import ShapeError, UsageError, near_misses
from curvescope.core.hessian_terms import Part, check_part
from curvescope.core.operator import FunctionOperator


def stack_tape(params: Tree, inputs: Tensor, arch: Architecture) -> Tape:
    """Return the tape of a network at tokens (B, T), or at real inputs (B, T, d) with or without a matrix E.

    Blocks are `L0.…, L1.…`. With pre-norm, `ln_f` follows the last block. The unembedding is `U` (with
    `b_U`), or Eᵀ if `arch.tied`; without either the output is the last stream. Parameters are detached.
    """
    params, real = {name: p.detach() for name, p in params.items()}, inputs.is_floating_point()
    recorder = TapeRecorder(inputs if real else torch.zeros(0).to(next(iter(params.values()))))
    if not real:
        if "E" not in params:
            raise UsageError("tokens need an embedding 'E'", hint="give real inputs (B, T, d) instead")
        recorder.apply(lambda x: Embedding(x, params, tokens=inputs))
    elif "E" in params:
        recorder.apply(lambda x: Linear(x, params, weight="E", bias="", label="embedding"))
    if "P" in params:
        recorder.apply(lambda x: Positions(x, params))
    for i in range(_num_blocks(params)):
        record_block(recorder, params, arch, prefix=f"L{i}.")
    if arch.norm == "pre":
        record_norm(recorder, params, arch, prefix="ln_f.")
    if arch.pooled:
        recorder.apply(MeanOverTokens)
    if arch.tied or "U" in params:
        weight = "E" if arch.tied else "U"
        recorder.apply(lambda x: Linear(x, params, weight=weight, transposed=arch.tied))
    tape = recorder.tape()
    _refuse_unused(params, tape)
    return tape


@final
class StackCurvature:
    """First and second derivatives of a loss of a network, in closed form.

    Args:
        tape: the network at its inputs.
        loss: outputs to `OutputObjective`, for instance `lambda z: cross_entropy_objective(z, targets)`.
    """

    def __init__(self, tape: Tape, loss: Callable[[Tensor], OutputObjective]):
        self.tape, self.objective = tape, loss(tape.output)
        if self.objective.gradient.shape != tape.output.shape:
            raise ShapeError(
                f"expected a loss gradient of shape {tuple(tape.output.shape)}, "
                f"got {tuple(self.objective.gradient.shape)}"
            )

    @property
    def value(self) -> Tensor:
        """The loss."""
        return self.objective.value

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters, in the order of their first use."""
        return tuple(self.tape.parameters)

    @cached_property
    def _swept(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        return self.tape.cotangents(self.objective.gradient)

    def gradient(self) -> dict[str, Tensor]:
        """Return ∂ℓ/∂θ, by name."""
        return {name: self._swept[1][name] for name in self.names}

    def hessian(self) -> BlockMatrix:
        """Return all blocks of the Hessian, by backward assembly. Small models only.

        Rows are the parameters, and the input `x` if it is real: `.to_dense(names)` chooses.
        """
        return self._ordered(assemble(self.tape, self.objective))

    def ggn(self) -> BlockMatrix:
        """Return all blocks of the GGN Jᵀ B J, by backward assembly without curvatures."""
        return self._ordered(assemble(self.tape, self.objective, functional=False))

    def sources(self) -> dict[str, BlockMatrix]:
        """Return the functional Hessian H − H_o as a sum over its sources.

        Keys: `L0.ln1`, `L0.attention.core`, `L0.attention.bilinear`, `L0.ffn.activation`,
        `L0.ffn.bilinear`, …, `ln_f`, `unembedding`.
        """
        terms = curvature_sources(self.tape, self.objective.gradient)
        return {source: self._ordered(term) for source, term in terms.items()}

    def product(self, direction: Tree, *, part: Part = "total") -> dict[str, Tensor]:
        """Return H v (`total`), GGN v (`outer`) or (H − H_o) v (`functional`), without forming a matrix.

        One forward sweep of tangents and one backward sweep. `direction` is a tree of parameters; a
        missing name is zero.
        """
        check_part(part)
        self._check(direction)
        tangents = self.tape.tangents(torch.zeros_like(self.tape.input), direction)
        dg = self.objective.product(tangents[-1])
        if part == "functional":
            dg = torch.zeros_like(dg)
        curved = part != "outer"
        _, result = self.tape.second_order(self._swept[0], tangents, direction, dg, curved=curved)
        return {name: result.get(name, torch.zeros_like(p)) for name, p in self.tape.parameters.items()}

    def hvp(self, direction: Tree) -> dict[str, Tensor]:
        """Return the exact Hessian-vector product."""
        return self.product(direction)

    def ggn_vp(self, direction: Tree) -> dict[str, Tensor]:
        """Return the exact Gauss-Newton-vector product."""
        return self.product(direction, part="outer")

    def operator(self, names: Sequence[str] | None = None, *, part: Part = "total") -> FunctionOperator:
        """Return the matrix over `names` (default all parameters) as an operator on flat columns."""
        check_part(part)
        names = self.names if names is None else tuple(names)
        self._check(dict.fromkeys(names))
        shapes = {name: self.tape.parameters[name].shape for name in names}
        sizes = [shapes[name].numel() for name in names]

        def apply(column: Tensor) -> Tensor:
            parts = column.split(sizes)
            tree = {name: v.reshape(shapes[name]) for name, v in zip(names, parts, strict=True)}
            result = self.product(tree, part=part)
            return torch.cat([result[name].reshape(-1) for name in names])

        n, like = sum(sizes), self.tape.output
        return FunctionOperator(
            lambda V: torch.stack([apply(v) for v in V.unbind(1)], dim=1) if V.shape[1] else V.clone(),
            (n, n),
            dtype=like.dtype,
            device=like.device,
            symmetric=True,
            psd=part == "outer",
        )

    def _ordered(self, matrix: BlockMatrix) -> BlockMatrix:
        """Return the matrix with parameters first, then a real input."""
        last = [INPUT] if self.tape.input.numel() else []
        return matrix.select([*self.names, *last])

    def _check(self, tree: Mapping[str, Tensor | None]) -> None:
        known = self.tape.parameters
        for name, value in tree.items():
            if name not in known:
                raise UsageError(f"no parameter is called {name!r}", hint=near_misses(name, list(self.names)))
            if value is not None and value.shape != known[name].shape:
                raise ShapeError(
                    f"expected {name} of shape {tuple(known[name].shape)}, got {tuple(value.shape)}"
                )


def _num_blocks(params: Tree) -> int:
    numbers = {int(match[1]) for name in params if (match := re.match(r"L(\d+)\.", name))}
    if numbers != set(range(len(numbers))):
        raise UsageError(f"expected blocks L0, L1, … without a gap, got {sorted(numbers)}")
    return len(numbers)


def _refuse_unused(params: Tree, tape: Tape) -> None:
    unused = [name for name in params if name not in tape.parameters]
    if unused:
        raise UsageError(
            f"parameters that the network does not use: {', '.join(unused)}",
            hint="names are E, P, L0.W_Q, L0.ln1.g, ln_f.g, U; gated layers have W_g, W_u",
        )


def total_derivatives(tape: Tape) -> list[Tensor]:
    """Return Dv_0, …, Dv_n, each variable's derivative by (input, parameters): (entries of v_t, n)."""
    positions, n = slices(tape.sizes), sum(tape.sizes.values())
    first = torch.eye(n).to(tape.output)[positions[INPUT]]
    derivatives = [first]
    for step in tape.steps:
        jacobian = step.primitive.jacobian()
        D = jacobian[INPUT] @ derivatives[-1]
        for name in step.primitive.parameters:
            D[:, positions[name]] += jacobian[name]
        derivatives.append(D if step.skip is None else D + step.scale * derivatives[step.skip])
    return derivatives


def gauss_newton(tape: Tape, objective: OutputObjective) -> BlockMatrix:
    """Return (Dv_n)ᵀ B (Dv_n) over the input and the parameters."""
    D = total_derivatives(tape)[-1]
    return BlockMatrix(D.mT @ objective.to_dense() @ D, tape.sizes)


def curvature_sources(tape: Tape, g: Tensor) -> dict[str, BlockMatrix]:
    """Return the summands of Σ_p (D in_p)ᵀ K_p (D in_p); g is the cotangent of the output."""
    return _sources(tape, g, total_derivatives(tape))


def _sources(tape: Tape, g: Tensor, derivatives: list[Tensor]) -> dict[str, BlockMatrix]:
    """Return the sources from the total derivatives Dv_0, …, Dv_n, which have earlier parameters only."""
    cotangents, _ = tape.cotangents(g)
    positions, n = slices(tape.sizes), sum(tape.sizes.values())
    terms: dict[str, BlockMatrix] = {}
    before = positions[INPUT].stop
    for t, step in enumerate(tape.steps):
        D, own = derivatives[t][:, :before], [positions[name] for name in step.primitive.parameters]
        for source, K in _dense_curvature(step.primitive, cotangents[t + 1]).items():
            if source not in terms:
                terms[source] = BlockMatrix(g.new_zeros(n, n), tape.sizes)
            _add_source(terms[source].matrix, D, K, own)
        before = max([before, *(where.stop for where in own)])
    return terms


def _add_source(H: Tensor, D: Tensor, K: Tensor, own: list[slice]) -> None:
    """Add (D in)ᵀ K (D in) to H for in = (x, θ): D = ∂x by the first entries, θ has the slices `own`.

    θ's rows of D in are rows of the identity, so DᵀK_xx D is a product of matrices, DᵀK_xθ goes to the
    columns of θ, its transpose to the rows, and K_θθ to their intersection.
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
    """Split the tape at every variable that no skip connection crosses, into a chain of smaller tapes."""
    n = len(tape.steps)
    crossed = {
        t for s, step in enumerate(tape.steps) if step.skip is not None for t in range(step.skip + 1, s + 1)
    }
    cuts = [t for t in range(n) if t not in crossed] + [n]
    tapes = []
    for a, b in pairwise(cuts):
        steps = tuple(
            TapeStep(step.primitive, None if step.skip is None else step.skip - a, step.scale)
            for step in tape.steps[a:b]
        )
        tapes.append(Tape(steps, tape.output if b == n else tape.steps[b].primitive.x))
    return tapes


def assemble(tape: Tape, objective: OutputObjective, *, functional: bool = True) -> BlockMatrix:
    """Assemble all blocks over the input and the parameters, backwards over the stages.

    With J, K of stage l at its input and the current g, in this order: H_ll = J_θᵀ C J_θ + K_θθ;
    H_lm = J_θᵀ X_m (m > l); X_m ← J_xᵀ X_m; X_l = J_xᵀ C J_θ + K_xθ; C ← J_xᵀ C J_x + K_xx; g ← J_xᵀ g. A
    parameter of several stages (a tied embedding) sums its blocks. `functional=False` drops K: the GGN.
    """
    sizes, positions = tape.sizes, slices(tape.sizes)
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
            [everywhere[positions[name]] for name in stage.sizes if name != INPUT] or [everywhere[:0]]
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
    first = everywhere[positions[INPUT]]
    _accumulate(H, first, first, C)
    for columns, X in later:
        _accumulate(H, first, columns, X)
        _accumulate(H, columns, first, X.mT)
    return BlockMatrix(H, sizes)


def _accumulate(H: Tensor, rows: Tensor, columns: Tensor, block: Tensor) -> None:
    """Add a block at positions; neither list may repeat a position."""
    H[rows[:, None], columns] += block


def _dense_curvature(primitive: Primitive, g: Tensor) -> dict[str, Tensor]:
    """Return K(g) by source over (x, θ) of one primitive."""
    sizes = {INPUT: primitive.x.numel()} | {name: p.numel() for name, p in primitive.parameters.items()}
    return {source: symmetric(blocks, sizes, g).matrix for source, blocks in primitive.curvature(g).items()}
