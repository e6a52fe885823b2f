"""The vector algebra of the algorithms: everything that adds up over the entries of a vector.

An algorithm keeps its vectors as rows (m, n), or columns (n, k) where a product takes them, and touches
their entries through these functions alone: random vectors, inner products, norms, projections, rotations.
Sums over entries end in `add_up` and norms in `join_norms`: vectors that are spread over several machines
would need these two, and `random_vector`, to be told so, and no algorithm.

Long vectors are worked through some entries at a time: a part that was read serves several steps while it
is in the cache, and sums of float32 entries are carried in float64 without a second copy of the vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.operator import LinearOperator
from curvescope.core.ranks import together
from curvescope.core.seeds import Probe, probes

PART = 2**16  # entries at a time on a CPU: a dozen rows of them fit in its cache
WIDE_PART = 2**22  # entries at a time on other devices
PASSES = 5  # of Gram–Schmidt; what still shrinks after them lies in the span of the basis
OVERLAP = 4.0  # roundings that a long vector may keep of the basis
COMFORT = {torch.float64: 100, torch.float32: 12}  # decades around one where squares and products are safe


def add_up(partial: Tensor) -> Tensor:
    """Sums over all entries, from the sums over the entries that are here: all of them."""
    return partial


def join_norms(pieces: list[Tensor]) -> Tensor:
    """Norms of whole vectors from the norms of their parts."""
    return pieces[0] if len(pieces) == 1 else torch.linalg.vector_norm(torch.stack(pieces), dim=0)


def summing_dtype(device: torch.device) -> torch.dtype:
    """float64, except on devices that do not have it."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A float64 array on the CPU."""
    return tensor.detach().cpu().double().numpy()


def parts(length: int, device: torch.device) -> Iterator[slice]:
    """The entries 0, …, length − 1 in order, some at a time."""
    step = PART if device.type == "cpu" else WIDE_PART
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def random_vector(op: LinearOperator, *, seed: int, index: int, kind: Probe = "gaussian") -> Tensor:
    """Vector (n,) number `index` of an endless random matrix, see `seeds.probes`."""
    return probes(op.shape[1], 1, seed=seed, first=index, kind=kind, dtype=op.dtype, device=op.device)[:, 0]


def norms(x: Tensor, *, dim: int | None = None) -> Tensor:
    """Euclidean norms along `dim`, or of all of x, summed in float64; in x's dtype.

    A float32 sum of squares on a CPU is wrong by 2e-4 for vectors of half a million entries that differ in
    size, and a Lanczos basis normalised with it is not orthonormal.
    """
    if dim is None:
        x, dim = x.reshape(-1), 0
    wide = summing_dtype(x.device)
    pieces = [
        torch.linalg.vector_norm(x.narrow(dim, p.start, p.stop - p.start), dim=dim, dtype=wide)
        for p in parts(x.shape[dim], x.device)
    ]
    return join_norms(pieces).to(x.dtype)


def column_dots(V: Tensor, W: Tensor) -> Tensor:
    """vⱼ · wⱼ for each column, summed in float64, (k,) on the columns' device."""
    wide = summing_dtype(V.device)
    total = torch.zeros(V.shape[1], dtype=wide, device=V.device)
    for p in parts(V.shape[0], V.device):
        total += (V[p] * W[p]).sum(dim=0, dtype=wide)
    return add_up(total)


def dots(rows: Tensor, w: Tensor) -> Tensor:
    """Inner products of the rows (m, n) with w (n,), added up in float64: (m,)."""
    total = torch.zeros(rows.shape[0], dtype=summing_dtype(w.device), device=w.device)
    for p in parts(len(w), w.device):
        total += rows[:, p] @ w[p]
    return add_up(total)


def orthogonalize(basis: Tensor, w: Tensor) -> tuple[np.ndarray, float]:
    """Take the span of the orthonormal rows of a basis (m, n) out of w (n,), in place.

    Classical Gram–Schmidt, repeated: twice is enough unless w lies in the span up to rounding, and once is
    enough for a long vector whose measured overlap is a rounding. Each pass reads the basis once.

    Returns:
        The coefficients (m,) that were taken out and the norm of what is left; zero if nothing is.
    """
    overlap = dots(basis, w)
    taken, before = torch.zeros_like(overlap), math.inf
    allowed = OVERLAP * torch.finfo(w.dtype).eps if len(w) > PART else 0.0
    for turn in range(PASSES):
        taken += overlap
        rest, overlap = _take_out(basis, overlap, w)
        settled = float(overlap.norm()) <= allowed * rest if turn == 0 else rest >= 0.5 * before
        if settled or math.isnan(rest):
            return to_numpy(taken), rest
        before = rest
    return to_numpy(taken), 0.0


def _take_out(basis: Tensor, coefficients: Tensor, w: Tensor) -> tuple[float, Tensor]:
    """w − basisᵀ coefficients, in place: its norm, and its inner products with the basis."""
    c, wide, pieces = coefficients.to(w.dtype), summing_dtype(w.device), []
    total = torch.zeros_like(coefficients)
    for p in parts(len(w), w.device):
        x, rows = w[p], basis[:, p]
        x.addmv_(rows.T, c, alpha=-1)
        pieces.append(torch.linalg.vector_norm(x, dtype=wide))
        total += rows @ x
    return float(join_norms(pieces)), add_up(total)


def rotate(rows: Tensor, S: np.ndarray) -> None:
    """Overwrite the first p rows of a basis (m, n) by Sᵀ rows for S (m, p), without a second copy of it."""
    R = torch.as_tensor(np.ascontiguousarray(S.T)).to(rows.dtype).to(rows.device)
    for p in parts(rows.shape[1], rows.device):
        rows[: R.shape[0], p] = R @ rows[:, p]


def gram(rows: Tensor, others: Tensor) -> np.ndarray:
    """rows @ othersᵀ for (k, n) and (k, n) in float64, some entries at a time.

    A float32 product of long rows is wrong by 2e-4 when their entries differ much in size.
    """
    wide = summing_dtype(rows.device)
    total = torch.zeros(rows.shape[0], others.shape[0], dtype=wide, device=rows.device)
    for p in parts(rows.shape[1], rows.device):
        total += rows[:, p].to(wide) @ others[:, p].to(wide).T
    return to_numpy(add_up(total))


def comfortable(product: Tensor) -> float:
    """A power of two that brings the entries of a product (n,) near one, where squares are safe.

    It is 1 unless the largest entry is many decades away from one. To multiply by it changes no digit.
    """
    largest = float(torch.stack([product[p].abs().max() for p in parts(len(product), product.device)]).max())
    if largest == 0 or not math.isfinite(largest) or abs(math.log10(largest)) <= COMFORT[product.dtype]:
        return 1.0
    most = 1000 if product.dtype == torch.float64 else 120
    return 2.0 ** max(-most, min(most, -math.frexp(largest)[1]))


def check_finite(*values: float | np.ndarray) -> None:
    """Raise, on every rank in step, if a number that came out of a product is nan or infinite."""
    with together():
        if not all(np.isfinite(value).all() for value in values):
            raise CurvescopeError(
                "a product of the operator is not finite", hint="look for nan or inf in op @ v"
            )
