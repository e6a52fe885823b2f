"""Extreme eigenvalues and traces of the many small blocks of a block-diagonal operator, all at once.

A = diag(A_1, …, A_M) with w × w blocks. One product with a vector is a product with every block, so Lanczos
runs in all of them together, each with a Krylov space of its own: A_i Q_i = Q_i T_i + β q eᵀ. With P = I − Q
Qᵀ, tr A_i = tr T_i + tr(P A_i P), and only the last term is estimated from probes (Chen and Hallman 2023). If
the blocks have no more rows than this would take products, they are computed exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import check_count, check_symmetric, fixed_operator
from curvescope.core.errors import ShapeError
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.core.seeds import probes

BREAKDOWN = 10.0  # roundings: a β below this many, relative to the product, is zero


@dataclass(frozen=True)
class EqualBlocks(Result):
    """Extreme eigenvalues and trace of every block; an eigenvalue lies within `residuals` of each of
    `values`.

    λ_max is at least values[:, 1], and λ_min at most values[:, 0]. Where `exact`, nothing is estimated.
    """

    values: np.ndarray  # (M, 2) λ_min, λ_max
    residuals: np.ndarray  # (M, 2)
    vectors: Tensor  # (M, w) of λ_max
    trace: np.ndarray  # (M,)
    trace_stderr: np.ndarray  # (M,) over probes; zero where exact
    exact: bool
    num_products: int
    seed: int


@fixed_operator
def equal_blocks(
    op: LinearOperator, size: int, *, num_steps: int = 24, num_probes: int = 8, seed: int = 0
) -> EqualBlocks:
    """Compute extreme eigenvalues, top eigenvectors and traces of the size × size diagonal blocks of an
    operator.

    Memory: num_steps + 1 vectors of the operator's size; where exact, `size` of them.

    Args:
        op: A symmetric, block-diagonal operator; entries outside the blocks are not detected.
        size: Size w of every block.
        num_steps: Lanczos steps.
        num_probes: Probes for tr(P A_i P).
    """
    check_symmetric(op, "equal_blocks")
    size = check_count("size", size, at_least=1)
    check_count("num_steps", num_steps, at_least=1)
    check_count("num_probes", num_probes, at_least=2)
    if op.shape[0] % size:
        raise ShapeError(f"expected blocks of a size that divides {op.shape[0]}, got {size}")
    if size <= num_steps + num_probes:
        return _exact_blocks(op, size, seed)
    Q, alpha, beta, lengths = _lanczos(op, size, num_steps, seed)
    values, residuals, vectors = _ritz(Q, alpha, beta, lengths)
    samples = _outside(op, Q, num_probes, seed) + alpha.sum(1)  # (P, M)
    return EqualBlocks(
        values,
        residuals,
        vectors,
        samples.mean(0),
        samples.std(0, ddof=1) / math.sqrt(num_probes),
        False,
        num_steps + num_probes,
        seed,
    )


def _exact_blocks(op: LinearOperator, size: int, seed: int) -> EqualBlocks:
    """Compute the blocks from all basis vectors, with one product each for all blocks."""
    num = op.shape[0] // size
    A = torch.empty(num, size, size, dtype=op.dtype, device=op.device)
    for i in track(range(size), "entries of a block"):
        basis = torch.zeros(num, size, dtype=op.dtype, device=op.device)
        basis[:, i] = 1
        A[:, :, i] = (op @ basis.flatten()).view(num, size)
    eigenvalues, U = torch.linalg.eigh((A + A.mT).double().cpu() / 2)
    values = eigenvalues[:, [0, -1]].numpy()
    trace, zero = eigenvalues.sum(1).numpy(), np.zeros(num)
    vectors = U[:, :, -1].to(op.device, op.dtype)
    return EqualBlocks(values, np.zeros_like(values), vectors, trace, zero, True, size, seed)


def _lanczos(
    op: LinearOperator, size: int, num_steps: int, seed: int
) -> tuple[Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """Return bases Q (M, m, w), diagonals α and subdiagonals β of T, (M, m) each, and valid steps (M,)."""
    num, eps = op.shape[0] // size, torch.finfo(op.dtype).eps
    Q = torch.zeros(num, num_steps + 1, size, dtype=op.dtype, device=op.device)
    start = probes(op.shape[0], 1, seed=seed, kind="gaussian", dtype=op.dtype, device=op.device)
    Q[:, 0] = torch.nn.functional.normalize(start.view(num, size), dim=1)
    alpha, beta = (torch.zeros(num, num_steps, dtype=torch.float64) for _ in range(2))
    lengths = torch.full((num,), num_steps)
    for j in track(range(num_steps), "Lanczos in all blocks"):
        product = (op @ Q[:, j].flatten()).view(num, size)
        alpha[:, j] = (Q[:, j] * product).sum(1).double().cpu()
        remainder = product
        for _ in range(2):  # orthogonalize twice against all earlier vectors
            remainder = remainder - torch.bmm((Q[:, : j + 1] @ remainder[:, :, None]).mT, Q[:, : j + 1])[:, 0]
        length = remainder.norm(dim=1)
        exhausted = length <= BREAKDOWN * eps * product.norm(dim=1)
        Q[:, j + 1] = torch.where(
            exhausted[:, None], 0.0, remainder / torch.where(exhausted, 1.0, length)[:, None]
        )
        beta[:, j] = torch.where(exhausted, 0.0, length).double().cpu()
        lengths[exhausted.cpu() & (lengths == num_steps)] = j + 1
    return Q[:, :num_steps], alpha.numpy(), beta.numpy(), lengths.numpy()


def _ritz(
    Q: Tensor, alpha: np.ndarray, beta: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Return extreme Ritz values (M, 2), their residuals, and the vectors of the largest (M, w)."""
    num = len(alpha)
    values, residuals = np.zeros((num, 2)), np.zeros((num, 2))
    vectors = torch.zeros(num, Q.shape[2], dtype=Q.dtype, device=Q.device)
    for m in np.unique(lengths):
        members = np.flatnonzero(lengths == m)
        T = np.zeros((len(members), m, m))
        T[:, range(m), range(m)] = alpha[members, :m]
        T[:, range(1, m), range(m - 1)] = beta[members, : m - 1]  # eigh reads the lower triangle
        theta, S = np.linalg.eigh(T)
        values[members] = theta[:, [0, -1]]
        residuals[members] = beta[members, m - 1 : m] * np.abs(S[:, -1][:, [0, -1]])
        top = torch.from_numpy(S[:, :, -1]).to(Q)
        vectors[members] = torch.bmm(top[:, None], Q[members, :m])[:, 0]
    return values, residuals, vectors


def _outside(op: LinearOperator, Q: Tensor, num_probes: int, seed: int) -> np.ndarray:
    """vᵀ P A P v of every block for each probe: (P, M)."""
    num, _, size = Q.shape
    samples = []
    for p in track(range(num_probes), "traces of all blocks"):
        v = probes(op.shape[0], 1, seed=seed, first=p + 1, dtype=op.dtype, device=op.device).view(num, size)
        v = v - torch.bmm((Q @ v[:, :, None]).mT, Q)[:, 0]
        product = (op @ v.flatten()).view(num, size)
        samples.append((v * product).double().sum(1).cpu().numpy())
    return np.stack(samples)
