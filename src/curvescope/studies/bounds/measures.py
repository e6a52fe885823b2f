"""The norm of the Hessian of an instance, exactly, next to every bound there is.

Hessians are written out in closed form and their norms are those of all eigenvalues.
"""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from curvescope.closed_form.attention import curvature as head_curvature
from curvescope.closed_form.block_matrix import INPUT, BlockMatrix
from curvescope.closed_form.bounds import attention_bounds
from curvescope.closed_form.bounds.block import block_forward, theorem6_corrected
from curvescope.closed_form.bounds.operator_norms import theorem1_corrected
from curvescope.closed_form.bounds.relu_network import (
    a_priori_network_bounds,
    measured_network_bounds,
    relu_network_point,
)
from curvescope.closed_form.loss_curvature import squared_error
from curvescope.closed_form.network.block import Architecture
from curvescope.closed_form.network.stack import StackCurvature, stack_tape
from curvescope.closed_form.objectives import Objective, squared_error_objective
from curvescope.closed_form.printed.bounds import theorem1_as_printed, theorem6_as_printed
from curvescope.closed_form.printed.precursor import precursor_as_printed
from curvescope.studies.bounds.comparisons import Row
from curvescope.studies.bounds.instances import Block, Head, Network

WHOLE, OUTER = "‖H‖", "‖GGN‖"
THEOREM_1, APPENDIX = "Theorem 1", "Theorem 1, appendix"
THEOREM_6, LITERAL = "Theorem 6", "Theorem 6, literal σ"
PRECURSOR, NONE = "precursor", "none"
PRIORI, NORMS = "corrected, a priori", "corrected, operator norms"
MEASURED, CERTIFIED = "corrected, measured", "certified"
PRINTED = (THEOREM_1, APPENDIX, THEOREM_6, LITERAL, PRECURSOR)
CORRECTED = (PRIORI, NORMS, MEASURED, CERTIFIED)
POST_NORM = Architecture(num_heads=1, norm="post", norm_eps=0.0, activation="relu", causal=False)


def norm_of(A: Tensor) -> float:
    """Spectral norm."""
    return float(torch.linalg.matrix_norm(A, ord=2))


def symmetric_norm(H: Tensor) -> float:
    """Largest |eigenvalue|."""
    return float(torch.linalg.eigvalsh((H + H.mT) / 2).abs().max())


def head_hessian(head: Head) -> BlockMatrix:
    """Of ‖F − target‖²/(Ld) in Q, K, V."""
    return head_curvature(*head[:4], *squared_error(head.output, head.target)).hessian()


def compare_head(head: Head) -> list[Row]:
    """‖H‖ of a head: Theorem 1 with both of its constants, corrected, and the certified bound."""
    true = symmetric_norm(head_hessian(head).matrix)
    values = {
        THEOREM_1: theorem1_as_printed(*head).value,
        APPENDIX: theorem1_as_printed(*head, constants="appendix").value,
        PRIORI: theorem1_corrected(*head).whole,
        MEASURED: theorem1_corrected(*head, measured=True).whole,
        CERTIFIED: attention_bounds(*head[:4], *squared_error(head.output, head.target), lower=False).whole,
    }
    return [Row(WHOLE, bound, true, value) for bound, value in values.items()]


def block_hessian(blocks: list[Block]) -> StackCurvature:
    """Of blocks one after the other, from the first one's tokens to its target."""
    names = ("W_Q", "W_K", "W_V", "W_1", "W_2")
    params = {f"L{i}.{n}": getattr(block, n) for i, block in enumerate(blocks) for n in names}
    return StackCurvature(stack_tape(params, blocks[0].X[None], POST_NORM), _loss_to(blocks[0].target))


def compare_block(block: Block) -> list[Row]:
    """‖H‖ of a block: Theorem 6 with σ as its lemma defines it and as its proof uses it, and corrected."""
    curvature = block_hessian([block])
    true = symmetric_norm(curvature.hessian().to_dense(curvature.names))
    values = {
        THEOREM_6: theorem6_as_printed(*block).value,
        LITERAL: theorem6_as_printed(*block, sigma="row_norm").value,
        NORMS: theorem6_corrected(*block[:6], target=block.target, measured=False).whole,
        MEASURED: theorem6_corrected(*block[:6], target=block.target).whole,
    }
    return [Row(WHOLE, bound, true, value) for bound, value in values.items()]


def compare_stack(blocks: list[Block]) -> list[Row]:
    """‖H‖ of a stack, for which there is no bound, and of its part in each block alone, for which there is.

    What lies behind block l is a loss of its output: the gradient and the norm of the Hessian of that are
    measured, and enter the bound of the block.
    """
    curvature = block_hessian(blocks)
    H = curvature.hessian()
    rows = [Row(WHOLE, NONE, symmetric_norm(H.to_dense(curvature.names)), nan)]
    X = blocks[0].X
    for layer, block in enumerate(blocks):
        names = [name for name in curvature.names if name.startswith(f"L{layer}.")]
        Z = block_forward(X, *block[1:6]).Z
        G, bend = _loss_behind(Z, blocks[layer + 1 :], blocks[0].target)
        found = theorem6_corrected(X, *block[1:6], G=G, curvature=bend)
        rows.append(Row(f"‖H_{layer}{layer}‖", MEASURED, symmetric_norm(H.to_dense(names)), found.whole))
        X = Z
    return rows


def _loss_to(target: Tensor):
    def loss(z: Tensor) -> Objective:
        return squared_error_objective(z, target[None])

    return loss


def _loss_behind(Z: Tensor, blocks: list[Block], target: Tensor) -> tuple[Tensor, float]:
    """Gradient, and norm of the Hessian, of the loss as a function of Z."""
    if not blocks:
        G, c = squared_error(Z, target)
        return G, float(c)
    rest = block_hessian([blocks[0]._replace(X=Z, target=target), *blocks[1:]])
    G = rest.tape.cotangents(rest.objective.gradient)[0][0][0]
    return G, symmetric_norm(rest.hessian()[INPUT, INPUT])


def compare_network(network: Network) -> list[Row]:
    """‖GGN‖ and ‖H‖ of a ReLU network at one sample: the precursor's bound, and the corrected ones."""
    x, weights, label = network
    at, printed = relu_network_point(x, weights, label), precursor_as_printed(x, weights)
    rows = []
    for quantity, functional in ((OUTER, False), (WHOLE, True)):
        true = symmetric_norm(at.hessian(functional=functional).matrix)
        rows += [
            Row(quantity, PRECURSOR, true, printed),
            Row(quantity, PRIORI, true, a_priori_network_bounds(x, weights, functional=functional).whole),
            Row(quantity, MEASURED, true, measured_network_bounds(at, functional=functional).whole),
        ]
    return rows
